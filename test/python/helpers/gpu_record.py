"""The record of the last GPU runs of the whole suite, and whether the sources it vouches for have changed since.

``python -m pytest test/python --gpu-record=test/gpu_record.json`` adds a run to it (`recorder.py`), and
``python test/python/helpers/gpu_record.py --check`` reads it, so that a machine without a GPU can say what has been
tested on one. Checking needs neither torch nor pytest nor a GPU.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parents[1]
SOURCES = ROOT / "python" / "cuteforge"
RECORD = ROOT / "test" / "gpu_record.json"
COMMANDS = "cli/"  # what only calls the library: changed, it leaves what was seen of kernels and run time true


def contents(folder: Path = SOURCES) -> dict[str, bytes]:
    """The bytes of every Python file of a folder, by relative path."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    return {name: paths[name].read_bytes() for name in sorted(paths)}


def digest(folder: Path = SOURCES) -> str:
    """sha256 over the relative path and bytes of every Python file of a folder."""
    sha = hashlib.sha256()
    for name, text in contents(folder).items():
        sha.update(name.encode() + b"\0" + text + b"\0")
    return sha.hexdigest()


def digests(folder: Path = SOURCES) -> dict[str, str]:
    """sha256 of the code of each file, shortened: enough to say which have changed. Comments, docstrings and line
    breaks do not count."""
    return {name: _digest_of_code(text) for name, text in contents(folder).items()}


@functools.cache
def _digest_of_code(text: bytes) -> str:
    """Remembered: the tests of records take those of all sources 20 times, and once costs three seconds."""
    return hashlib.sha256(repr(_code(ast.parse(text))).encode()).hexdigest()[:16]


def _code(node: Any) -> Any:
    """A syntax tree as tuples and lists, the same in every Python: what is empty is left out, since newer ones have
    more of it. 3.12 has an empty text after ``{n}`` in ``f"{x:<{n}}"``."""
    if isinstance(node, ast.JoinedStr):
        texts = [value for value in node.values if not (isinstance(value, ast.Constant) and value.value == "")]
        node = ast.JoinedStr(texts)
    if isinstance(node, list):
        return [_code(item) for item in node if not _is_bare_text(item)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _code(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return type(node).__name__, fields


def _is_bare_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def files_of_tests(tests: Path = TESTS) -> list[str]:
    """Every file of tests, as pytest names it."""
    return sorted(path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py"))


def changed_since(before: dict[str, str], folder: Path) -> list[str]:
    """The files that are not those of the digests `before`."""
    now = digests(folder)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def check(record_path: Path = RECORD, sources: Path = SOURCES, tests: Path = TESTS) -> tuple[bool, str]:
    """Whether the record vouches for the present sources, and one line that says so."""
    if not record_path.is_file():
        return False, f"GPU record: none ({record_path.name} is missing); nothing here was tested on a GPU"
    try:
        record = json.loads(record_path.read_text())
        what = _summary(record["runs"])
        refusal = next(filter(None, (_why_not(run, tests) for run in record["runs"])), None)
        changed = changed_since(record["digests"], sources)
        tests_changed = changed_since(record["tests_digests"], tests)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return False, f"GPU record: unreadable ({error!r})"
    if refusal:
        return False, f"GPU record: {refusal} ({what})"
    if not all(name.startswith(COMMANDS) for name in changed):
        return False, f"GPU record: STALE, {', '.join(changed)} changed since that run ({what})"
    since = [*changed, *(f"test/python/{name}" for name in tests_changed)]
    return True, f"GPU record: current{f' but for {_few(since)}, changed since' if since else ''} ({what})"


def _why_not(run: dict, tests: Path) -> str | None:
    """Why a run does not show that the whole suite passes on a GPU, None if it does."""
    if run["gpu"] is None:
        return "the recorded run saw no GPU"
    if run["selection"] or run["deselected"] or run["not_run"]:
        left_out = [*run["selection"], *(f"{name} was deselected from" for name in run["deselected"]), *run["not_run"]]
        return f"the recorded run is a selection, not of the whole suite: {_few(left_out)}"
    recorded, present = set(run["files"]), set(files_of_tests(tests))
    if recorded != present:
        differences = [f"{name} was added since" for name in sorted(present - recorded)]
        differences += [f"{name} is gone" for name in sorted(recorded - present)]
        return f"not of the whole suite: {_few(differences)}"
    return None if run["passed"] else "the recorded run is not a pass"


def _summary(runs: list[dict]) -> str:
    """The machine of the last run, and the counts of each."""
    last = runs[-1]
    counts = "; ".join(counts_of(run) for run in runs)
    in_a_row = f", {len(runs)} runs in a row" if len(runs) > 1 else ""
    return f"{last['gpu']}, driver {last['driver']}, {last['date']}{in_a_row}: {counts}"


def totals(run: dict) -> Counter[str]:
    return sum(map(Counter, run["files"].values()), Counter())


def counts_of(run: dict) -> str:
    counts = totals(run)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in sorted(counts)) or "no tests"


def _few(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="say whether the record vouches for the present sources")
    parser.add_argument("--strict", action="store_true", help="with --check: exit with status 1 when it does not")
    parser.add_argument("--record", type=Path, default=RECORD)
    args = parser.parse_args(argv)
    if not args.check:
        print(digest())
        return 0
    current, line = check(args.record)
    print(line)
    return int(args.strict and not current)


if __name__ == "__main__":
    sys.exit(main())

"""The record of the last GPU run, and whether the sources it vouches for have changed since.

``pytest --gpu-record test/gpu_record.json`` writes it, ``python test/python/helpers/gpu_record.py --check`` reads it, so
that a machine without a GPU can say what has been tested on one. Checking needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "python" / "cuteforge"
RECORD = ROOT / "test" / "gpu_record.json"
COMMANDS = "cli/"  # what only calls the library: changed, it leaves what was seen of kernels and run time true
_PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "pytest")


def contents(sources: Path = SOURCES) -> dict[str, bytes]:
    """The bytes of every Python file of the package, by relative path."""
    paths = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*.py")}
    return {name: paths[name].read_bytes() for name in sorted(paths)}


def digest(sources: Path = SOURCES) -> str:
    """sha256 over the relative path and bytes of every Python file of the package."""
    sha = hashlib.sha256()
    for name, text in contents(sources).items():
        sha.update(name.encode() + b"\0" + text + b"\0")
    return sha.hexdigest()


def digests(sources: Path = SOURCES) -> dict[str, str]:
    """sha256 of each file, shortened: enough to say which have changed."""
    return {name: hashlib.sha256(text).hexdigest()[:16] for name, text in contents(sources).items()}


def environment() -> dict:
    """GPU, driver and versions of this machine."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Recorder:
    """Pytest plugin: counts outcomes per test file and writes the record at the end, failures included."""

    def __init__(self, path: Path):
        self._path = path
        self._digest, self._digests = digest(), digests()
        self._outcomes: dict[str, Counter] = defaultdict(Counter)
        self._failures: list[str] = []
        self._skips: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome = "error" if report.when != "call" and report.failed else report.outcome
            self._outcomes[report.nodeid.split("::")[0]][outcome] += 1
        if report.failed:
            self._failures.append(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skips[report.nodeid] = report.longrepr[2]

    def pytest_sessionfinish(self, session, exitstatus) -> None:
        machine = environment()
        ran = sum(self._outcomes.values(), Counter())
        record = {
            **machine,
            "digest": self._digest,
            "digests": self._digests,
            "sources_changed_while_running": digest() != self._digest,
            "exit_status": int(exitstatus),
            "passed": int(exitstatus) == 0 and not self._failures and ran["passed"] > 0 and machine["gpu"] is not None,
            "files": {name: dict(sorted(count.items())) for name, count in sorted(self._outcomes.items())},
            "failures": sorted(set(self._failures)),
            "skipped": dict(sorted(self._skips.items())),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(record, indent=1) + "\n")


def check(record_path: Path = RECORD, sources: Path = SOURCES) -> tuple[bool, str]:
    """Whether the record vouches for the present sources, and one line that says so."""
    if not record_path.is_file():
        return False, f"GPU record: none ({record_path.name} is missing); nothing here was tested on a GPU"
    try:
        record = json.loads(record_path.read_text())
        what = f"{record['gpu']}, driver {record['driver']}, {record['date']}"
        counts = sum((Counter(c) for c in record["files"].values()), Counter())
        passed, recorded = record["passed"] and not record["sources_changed_while_running"], record["digest"]
    except (ValueError, KeyError, TypeError) as error:
        return False, f"GPU record: unreadable ({error!r})"
    summary = ", ".join(f"{counts[k]} {k}" for k in sorted(counts)) or "no tests"
    if not passed:
        return False, f"GPU record: the recorded run is not a pass ({what}): {summary}"
    if recorded == digest(sources):
        return True, f"GPU record: current ({what}): {summary}"
    changed = _changed(record, sources)
    if changed and all(name.startswith(COMMANDS) for name in changed):
        return True, f"GPU record: current but for {', '.join(changed)}, changed since ({what}): {summary}"
    return False, f"GPU record: STALE, {', '.join(changed) or 'the sources'} changed since that run ({what}): {summary}"


def _changed(record: dict, sources: Path) -> list[str]:
    """The files that are not those of the record, as far as it names them."""
    before, now = record.get("digests", {}), digests(sources)
    return sorted(name for name in before.keys() | now.keys() if before and before.get(name) != now.get(name))


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

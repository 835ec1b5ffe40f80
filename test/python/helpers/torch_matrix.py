"""Which versions of torch the suite was run with: makes those runs, and writes the table of them in docs/support.md.

``python test/python/helpers/torch_matrix.py run 2.11.0`` makes an environment with that torch, runs the whole suite in
it without a GPU, and puts what came out in `test/torch_record.json` and the table. With ``--python PATH`` it uses an
environment that is there. ``render`` writes the table from the records alone, the GPU record too: the page says what
ran, and nothing else. Rendering needs neither torch nor pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.gpu_record import RECORD as GPU_RECORD
from helpers.gpu_record import ROOT, totals

RECORD = ROOT / "test" / "torch_record.json"
PAGE = ROOT / "docs" / "support.md"
EXTRAS = ".[test,bench,docs,transformers]"  # what they add is not skipped then
_TABLE = re.compile(r"(?<=<!-- torch: begin -->\n).*?(?=<!-- torch: end -->)", re.DOTALL)
_HEAD = ("torch", "transformers", "Python", "where", "passed", "failed", "skipped", "when")


def rows_of(torch_record: dict, gpu_record: dict) -> list[tuple[str, ...]]:
    """A row for each version without a GPU, and one for the last run on a GPU. Selections of the suite are left out."""
    runs = [*torch_record.values(), *gpu_record.get("runs", [])[-1:]]
    return [_row(run) for run in runs if not (run["selection"] or run["deselected"] or run["not_run"])]


def _row(run: dict) -> tuple[str, ...]:
    counts, versions = totals(run), run["versions"]
    failed = counts["failed"] + counts["error"]
    where = run["gpu"] or "CPU"
    seen = (counts["passed"], failed, counts["skipped"])
    return (
        versions["torch"],
        versions["transformers"] or "none",
        versions["python"],
        where,
        *map(str, seen),
        run["date"][:10],
    )


def table(rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return "\nNothing is recorded.\n\n"
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in (_HEAD, ("---",) * len(_HEAD), *rows)) + "\n"


def rendered(page: str, torch_record: dict, gpu_record: dict) -> str:
    """The page with the table of these records between its markers."""
    if len(_TABLE.findall(page)) != 1:
        raise ValueError("page: wanted the markers '<!-- torch: begin -->' and '<!-- torch: end -->' once")
    return _TABLE.sub(lambda _: table(rows_of(torch_record, gpu_record)), page)


def read(record: Path) -> dict:
    return json.loads(record.read_text()) if record.is_file() else {}


def render() -> None:
    PAGE.write_text(rendered(PAGE.read_text(), read(RECORD), read(GPU_RECORD)))


def make_environment(version: str, folder: Path) -> Path:
    """The Python of a new environment with this torch. Which build of torch it gets, the installer's own settings
    say."""
    python = folder / "bin" / "python"
    if uv := shutil.which("uv"):
        make, install = [uv, "venv", str(folder)], [uv, "pip", "install", "--python", str(python)]
    else:
        make, install = [sys.executable, "-m", "venv", str(folder)], [str(python), "-m", "pip", "install"]
    subprocess.run(make, check=True)
    subprocess.run([*install, f"torch=={version}", "-e", EXTRAS], cwd=ROOT, check=True)
    return python


def torch_of(python: Path) -> str:
    code = "import torch; print(torch.__version__)"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run(version: str, python: Path, record: Path, arguments: list[str]) -> int:
    """The suite without a GPU, its outcome in the record. Returns pytest's status."""
    found = torch_of(python)
    if found.split("+")[0] != version:
        raise SystemExit(f"--python: wanted an environment with torch {version}, got {found} in {python}")
    command = [str(python), "-m", "pytest", "test/python", f"--torch-record={record.resolve()}", *arguments]
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("render", help="write the table of docs/support.md from the records")
    running = commands.add_parser("run", help="run the suite with a version of torch and record it")
    running.add_argument("version", help="the torch to test with, as 2.11.0; what follows goes to pytest")
    running.add_argument("--python", type=Path, help="the Python of an environment that has it (default: make one)")
    running.add_argument("--record", type=Path, default=RECORD)
    args, rest = parser.parse_known_args(argv)
    if args.command == "render":
        if rest:
            parser.error(f"render takes nothing more, got {' '.join(rest)}")
        render()
        return 0
    with tempfile.TemporaryDirectory(prefix="cuteforge-torch-") as folder:
        return run(args.version, args.python or make_environment(args.version, Path(folder)), args.record, rest)


if __name__ == "__main__":
    sys.exit(main())

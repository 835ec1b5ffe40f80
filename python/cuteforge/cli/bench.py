"""`bench`: runs the benchmarks of a source checkout, each in a process of its own, and draws their records."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import cuteforge
from cuteforge.errors import ContractError

_PACKAGE_ROOT = Path(cuteforge.__file__).resolve().parents[1]
BENCHMARKS_DIR = _PACKAGE_ROOT.parent / "benchmarks"
NOT_HERE = 2


def run(families: Sequence[str] = (), quick: bool = False, json: Path | None = None, plots: Path | None = None) -> int:
    """Run the benchmarks, which need a GPU, then draw all records, which does not.

    Args:
        families: the benchmarks to run; when empty all, but none if `plots` is all that is given.
        quick: few cases; they leave a record only where `json` says.
        json: folder of the records; None for that of the checkout.
        plots: folder for the drawings; None draws nothing.

    Returns:
        0; 1 when a benchmark or the drawing failed; 2 when the benchmarks are not here, or matplotlib is not.

    Raises:
        ContractError: `families` names a benchmark that does not exist.
    """
    if not (BENCHMARKS_DIR / "harness.py").is_file():
        return _refuse(f"no benchmarks in {BENCHMARKS_DIR}: they are part of a source checkout, not of the package")
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        return _refuse("plots need matplotlib: pip install 'cuteforge[bench]'")
    available = sorted(path.stem.removeprefix("bench_") for path in BENCHMARKS_DIR.glob("bench_*.py"))
    if unknown := [family for family in families if family not in available]:
        raise ContractError(f"families: wanted some of {', '.join(available)}, got {unknown[0]!r}")
    only_plots = plots is not None and not (families or quick or json)
    options = [*(["--quick"] if quick else []), *(["--out", str(json)] if json else [])]
    scripts = [(f"bench_{family}.py", options) for family in (() if only_plots else families or available)]
    if plots is not None:
        records = ["--results", str(json)] if json else []
        scripts.append(("plots.py", [str(plots), *records]))
    failed = [name for name, arguments in scripts if _run_script(name, arguments)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run_script(name: str, arguments: Sequence[str]) -> int:
    """Exit status of a script of the checkout. Nothing else runs beside it: it times host work and start-up."""
    paths = [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(BENCHMARKS_DIR / name), *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def _refuse(sentence: str) -> int:
    print(f"cuteforge: {sentence}", file=sys.stderr)
    return NOT_HERE

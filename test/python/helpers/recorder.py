"""Pytest plugins that write what a run was, and how it went, to a record; failures and what was left out included."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import torch_matrix
from helpers.gpu_record import SOURCES, TESTS, digest, digests, files_of_tests

RUNS_KEPT = 2  # a test that fails now and then shows itself in the second run in a row
_PACKAGES = (
    "torch",
    "transformers",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "numpy",
    "pytest",
    "pytest-xdist",
    "hypothesis",
)
_SELECTING = {
    "keyword": "-k",
    "markexpr": "-m",
    "deselect": "--deselect",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
    "lf": "--last-failed",
    "stepwise": "--stepwise",
    "stepwise_skip": "--stepwise-skip",
    "collectonly": "--collect-only",
}


def selecting_options(config: pytest.Config) -> list[str]:
    """The options of a run that leave tests out, as they were given."""
    given = {option: config.getoption(name, None) for name, option in _SELECTING.items()}
    return [option if value is True else f"{option} {value}" for option, value in given.items() if value]


def selection_of(config: pytest.Config, tests: Path = TESTS) -> list[str]:
    """What makes a run something else than one of the whole suite; empty if nothing does."""
    parts = [arg for arg in config.args if (config.invocation_params.dir / arg).resolve() != tests]
    return parts + selecting_options(config)


def environment() -> dict:
    """GPU, driver and versions of this machine."""
    import torch

    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "gpus": torch.cuda.device_count() if has_gpu else 0,
        "driver": _driver() if has_gpu else None,
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


def add_gpu_run(record: dict, run: dict) -> dict:
    """The record with one more run. Runs of other sources or tests are dropped from it, and all but the last two of the
    same."""
    state = {"digests": digests(SOURCES), "tests_digests": digests(TESTS)}
    earlier = record.get("runs", []) if all(record.get(name) == value for name, value in state.items()) else []
    return {**state, "runs": [*earlier, run][-RUNS_KEPT:]}


def add_torch_run(record: dict, run: dict) -> dict:
    """The record with the run of another version of torch in the place of the last one of that version."""
    version = run["versions"]["torch"].split("+")[0]
    return dict(sorted({**record, version: run}.items(), key=lambda item: list(map(_number, item[0].split(".")))))


def _number(part: str) -> int:
    return int("".join(filter(str.isdigit, part)) or 0)


class Deselected:
    """In a worker of pytest-xdist: tells the controller, which collects nothing, what was deselected."""

    def __init__(self, config: pytest.Config):
        self._counts = config.workeroutput["deselected"] = {}

    def pytest_deselected(self, items) -> None:
        _count_by_file(self._counts, items)


def _count_by_file(counts: dict[str, int], items) -> None:
    for item in items:
        name = item.nodeid.split("::")[0]
        counts[name] = counts.get(name, 0) + 1


class Recorder:
    """Counts outcomes per test file, and adds the run to the record at the end."""

    def __init__(self, path: Path, add: Callable[[dict, dict], dict] = add_gpu_run, tests: Path = TESTS):
        self._path, self._add, self._tests = path, add, tests
        self._digest, self._tests_digest = digest(), digest(tests)
        self._started = time.monotonic()
        self._outcomes: dict[str, Counter] = defaultdict(Counter)
        self._failures: set[str] = set()
        self._skips: dict[str, Counter] = defaultdict(Counter)
        self._deselected: dict[str, int] = {}
        self._workers: set[str] = set()

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._note(report, "error" if report.when != "call" and report.failed else report.outcome)

    def pytest_collectreport(self, report) -> None:
        """A file that skips itself or does not import has no tests to report."""
        if report.outcome != "passed":
            self._note(report, "error" if report.failed else report.outcome)

    def _note(self, report, outcome: str) -> None:
        name = report.nodeid.split("::")[0]
        self._outcomes[name][outcome] += 1
        if report.failed:
            self._failures.add(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skips[report.longrepr[2].removeprefix("Skipped: ")][name] += 1

    def pytest_deselected(self, items) -> None:
        _count_by_file(self._deselected, items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node) -> None:
        self._workers.add(node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        """Every worker deselects the same tests."""
        self._deselected.update(getattr(node, "workeroutput", {}).get("deselected", {}))

    def pytest_sessionfinish(self, session, exitstatus) -> None:
        run = self._run(session.config, int(exitstatus))
        record = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._add(record, run), indent=1) + "\n")
        if self._path in (torch_matrix.RECORD, torch_matrix.GPU_RECORD):
            torch_matrix.render()  # or the next run in a row fails: a test compares the page with the records

    def _run(self, config: pytest.Config, exit_status: int) -> dict:
        run = {
            **environment(),
            "processes": len(self._workers) or 1,
            "seconds": round(time.monotonic() - self._started),
            "digest": self._digest,
            "tests_digest": self._tests_digest,
            "changed_while_running": (digest(), digest(self._tests)) != (self._digest, self._tests_digest),
            "exit_status": exit_status,
            "selection": self._selection(config),
            "deselected": dict(sorted(self._deselected.items())),
            "not_run": sorted(set(files_of_tests(self._tests)) - set(self._outcomes)),
            "files": {name: dict(sorted(counts.items())) for name, counts in sorted(self._outcomes.items())},
            "failures": sorted(self._failures),
            "skipped": {why: dict(sorted(counts.items())) for why, counts in sorted(self._skips.items())},
        }
        return {"passed": self._passed(run), **run}

    def _selection(self, config: pytest.Config) -> list[str]:
        """`--maxfail` leaves out what would have come later, if it ever stops a run."""
        most = config.getoption("maxfail", 0)
        stopped = [f"--maxfail {most}"] if most and len(self._failures) >= most else []
        return selection_of(config, self._tests) + stopped

    def _passed(self, run: dict) -> bool:
        """A pass is of the whole suite, from which nothing was left out."""
        if run["exit_status"] or run["failures"] or run["changed_while_running"]:
            return False
        is_whole = not (run["selection"] or run["deselected"] or run["not_run"])
        return is_whole and any("passed" in counts for counts in run["files"].values())

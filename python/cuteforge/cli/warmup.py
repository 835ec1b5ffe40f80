"""`warmup`: compiles configurations ahead into the disk cache, in parallel processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cuteforge.cli.cache import open_cache
from cuteforge.cli.console import open_console, track
from cuteforge.cli.families import FAMILIES, Configuration, preset_configurations
from cuteforge.cli.processes import default_count, in_processes
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.runtime import compile_cache, env
from cuteforge.runtime.arch import resolve_arch

STATUSES = ("compiled", "already there", "failed", "not stored")
BAD_STATUSES = ("failed", "not stored")


@dataclass(frozen=True)
class Job:
    """One configuration for one architecture.

    Tile selection reads the facts of `device` if that is a GPU of this architecture.
    """

    configuration: Configuration
    arch: str
    device: str


@dataclass(frozen=True)
class Outcome:
    """What became of a job, and after how long."""

    job: Job
    status: Literal["compiled", "already there", "failed", "not stored"]
    seconds: float = 0.0
    reason: str = ""


def run(
    family: Sequence[str] = (),
    arch: Sequence[str] = (),
    config: Path | None = None,
    head_dim: Sequence[int] = (),
    dtype: Sequence[str] = (),
    jobs: int | None = None,
) -> int:
    """Compile what the disk cache does not hold yet, print a table. Needs no GPU.

    The processes are spawned: a script that calls this needs the usual ``if __name__ == "__main__":``.

    Args:
        family: names of `FAMILIES`; all when empty.
        arch: architecture names; when empty those of the GPUs here, else CUTEFORGE_ARCH.
        config: a JSON list of objects ``{"family": ..., "op": ..., <options of the op>}`` in place of the presets.
        head_dim, dtype: in place of those of the presets.
        jobs: number of processes; None for one a core, at most `MAX_DEFAULT_JOBS`.

    Returns:
        0, or 1 when a configuration was refused, did not compile or could not be stored; the table says why.

    Raises:
        ContractError: an architecture, the file, or a configuration in it is malformed; nothing was compiled.
        UnsupportedError: the disk cache cannot be used, or there is neither an architecture nor a GPU.
    """
    if not env.disk_cache():
        raise ContractError("CUTEFORGE_DISK_CACHE: wanted 1, as warmup leaves nothing but files, got 0")
    cache, targets = open_cache(), find_targets(arch)
    configurations = choose_configurations(family, config, head_dim, dtype)
    work = [Job(c, name, f"cuda:{index}") for name, index in targets.items() for c in configurations]
    started, console = time.perf_counter(), open_console()
    outcomes = list(track(console, "compiling", compile_all(work, jobs or default_count()), len(work)))
    print_outcomes(console, sorted(outcomes, key=lambda outcome: work.index(outcome.job)))
    counts = ", ".join(f"{_count(outcomes, status)} {status}" for status in STATUSES)
    console.print(f"{counts}; {time.perf_counter() - started:.1f} s; {cache.root}", markup=False, soft_wrap=True)
    return 1 if any(_count(outcomes, status) for status in BAD_STATUSES) else 0


def find_targets(archs: Sequence[str]) -> dict[str, int]:
    """Architecture name -> the GPU here whose facts count if it is one of this architecture."""
    if not archs and env.arch() is None and torch.cuda.device_count() == 0:
        raise UnsupportedError("--arch: no GPU here to take it from; give --arch sm_90a or set CUTEFORGE_ARCH=sm_90a")
    here = {resolve_arch(None, index).name: index for index in reversed(range(torch.cuda.device_count()))}
    named = [resolve_arch(name, None).name for name in archs]
    return {name: here.get(name, 0) for name in named or here or [resolve_arch(None, None).name]}


def choose_configurations(
    families: Sequence[str], config: Path | None, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Configuration]:
    """Those of the file, else the presets; each is well-formed, if not served."""
    if config is None:
        chosen = [c for family in families or FAMILIES for c in preset_configurations(family, head_dims, dtypes)]
        where = [f"{c.family} {c.label}" for c in chosen]
    else:
        if families or head_dims or dtypes:
            raise ContractError(
                f"--config: wanted no --family, --head-dim or --dtype beside it, got {config} and one of them"
            )
        chosen = read_configurations(config)
        where = [f"config[{index}]" for index in range(len(chosen))]
    for name, configuration in zip(where, chosen):
        _check(name, configuration)
    return chosen


def read_configurations(path: Path) -> list[Configuration]:
    """The configurations in a JSON file; their ops and options are not looked at."""
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(f"--config: wanted a readable JSON file, got {error}") from error
    if not isinstance(items, list):
        raise ContractError(f"--config: wanted a list of objects, got {type(items).__name__}")
    for index, item in enumerate(items):
        if not (isinstance(item, dict) and isinstance(item.get("family"), str) and isinstance(item.get("op"), str)):
            raise ContractError(f"config[{index}]: wanted an object with a family and an op, got {item!r}")
    return [
        Configuration(item["family"], item["op"], {k: v for k, v in item.items() if k not in ("family", "op")})
        for item in items
    ]


def compile_all(jobs: Sequence[Job], num_processes: int) -> Iterator[Outcome]:
    """Outcomes as they come."""
    for job, outcome in in_processes(compile_job, jobs, num_processes):
        is_lost = isinstance(outcome, BrokenProcessPool)
        yield Outcome(job, "failed", reason=str(outcome)) if is_lost else outcome


def compile_job(job: Job) -> Outcome:
    """Compile or load in this process; the errors of a job become its outcome."""
    before, started = compile_cache.stats(), time.perf_counter()
    try:
        job.configuration.build_op(job.device).compile(job.arch)
    except Exception as error:  # one configuration that fails must not hide the others
        return Outcome(job, "failed", time.perf_counter() - started, _reason(error))
    after, seconds = compile_cache.stats(), time.perf_counter() - started
    reasons = after.not_stored[len(before.not_stored) :]
    if reasons:
        return Outcome(job, "not stored", seconds, "; ".join(dict.fromkeys(reasons)))
    return Outcome(job, "compiled" if after.compiles > before.compiles else "already there", seconds)


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """A row each, with the reason of one that failed."""
    table = Table("family", "configuration", "for", "", "seconds")
    for outcome in outcomes:
        configuration = outcome.job.configuration
        is_bad = outcome.status in BAD_STATUSES
        status = Text(f"{outcome.status.upper()}: {outcome.reason}" if is_bad else outcome.status, overflow="fold")
        seconds = f"{outcome.seconds:.1f}"
        table.add_row(configuration.family, Text(configuration.label), outcome.job.arch, status, seconds)
    console.print(table)


def _check(name: str, configuration: Configuration) -> None:
    """Refuse what is malformed before anything is compiled. What no kernel serves becomes a row of the table."""
    try:
        configuration.build_op().check_support()
    except UnsupportedError:
        pass
    except ContractError as error:
        raise ContractError(f"{name}: {error}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, (ContractError, UnsupportedError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _count(outcomes: Sequence[Outcome], status: str) -> int:
    return sum(outcome.status == status for outcome in outcomes)

"""`demo`: real input through every kernel family, each result checked against an fp64 oracle."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from cuteforge.cli import processes, timing
from cuteforge.cli.console import open_console, track
from cuteforge.cli.families import FAMILIES, Case, load
from cuteforge.runtime import compile_cache

# A100, L20, H200, B200.
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a")


@dataclass(frozen=True)
class Check:
    """One result of one case: its largest error against fp64, and how large that may be."""

    case: str
    result: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        """False for NaN as well."""
        return self.error <= self.budget

    def cells(self) -> tuple[str, ...]:
        return self.case, self.result, f"{self.error:.3e}", f"{self.budget:.3e}", "ok" if self.ok else "FAILED"


def run() -> int:
    """Run every family on the GPU, or without one the eager code and the compiler.

    Returns:
        0, or 1 when a check or a compile failed.

    Raises:
        ContractError, UnsupportedError: the GPU, or CUTEFORGE_ARCH, is refused.
    """
    started = time.perf_counter()
    console = open_console()
    on_gpu = torch.cuda.is_available()
    _describe(console, on_gpu)
    ok = _run_on_gpu(console) if on_gpu else _run_without_gpu(console)
    console.print(f"{'all ok' if ok else 'FAILED'}, {time.perf_counter() - started:.1f} s")
    return 0 if ok else 1


def max_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest distance from the fp64 `exact`; NaN if `got` holds one. 0 when empty."""
    return (got.double() - exact).abs().max().item() if exact.numel() else 0.0


def budget(eager: torch.Tensor, exact: torch.Tensor) -> float:
    """Twice (the error of `eager`, which is rounded to the dtype of the result, plus one ulp of the largest value)."""
    largest = exact.abs().max().item() if exact.numel() else 0.0
    ulp = torch.finfo(eager.dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0
    return 2 * (max_error(eager, exact) + ulp)


def check_results(case: Case, results) -> list[Check]:
    """A `Check` for each of `results` (name -> tensor)."""
    exact, eager = case.exact(), case.eager()
    return [
        Check(case.name, name, max_error(results[name], exact[name]), budget(eager[name], exact[name]))
        for name in exact
    ]


def _describe(console: Console, on_gpu: bool) -> None:
    if on_gpu:
        console.print(f"{torch.cuda.get_device_name()}: kernels against an fp64 oracle")
    else:
        console.print(
            "No CUDA GPU here: the eager CPU code runs on the input, and the kernels are compiled but not run."
        )


@functools.cache
def _cases(device: str) -> list[Case]:
    return [case for family in FAMILIES for case in load(family).demo_cases(device)]


def _run_on_gpu(console: Console) -> bool:
    table = Table("case", "result", "max error", "budget", "", "time", "of copy ceiling")
    copy_tbps = timing.copy_tbps()
    all_ok = True
    cases = _cases("cuda")
    for case in track(console, "checking", cases, len(cases)):
        launch, results = case.bind()
        launch()
        checks = check_results(case, results)
        ok = all(check.ok for check in checks)
        speed = _speed_cells(case, launch, copy_tbps) if ok else ("", "")
        for i, check in enumerate(checks):
            table.add_row(*check.cells(), *(speed if i == 0 else ("", "")))
        all_ok = all_ok and ok
    console.print(table)
    console.print(
        f"copy ceiling {copy_tbps:.2f} TB/s; times are medians of {timing.REPEATS} launches, L2 overwritten before each"
    )
    return all_ok


def _speed_cells(case: Case, launch, copy_tbps: float) -> tuple[str, str]:
    us = timing.median_us(launch)
    return f"{us:.1f} us", f"{case.size_bytes / us * 1e-6 / copy_tbps:.0%}"


def _run_without_gpu(console: Console) -> bool:
    cases = _cases("cpu")
    table = Table("case", "result", "max error", "budget", "")
    tracked = track(console, "checking", cases, len(cases))
    checks = [check for case in tracked for check in check_results(case, case.fallback())]
    for check in checks:
        table.add_row(*check.cells())
    console.print(table)
    compiled_ok = _compile_all(console, cases)
    return all(check.ok for check in checks) and compiled_ok


def _compile_all(console: Console, cases: Sequence[Case]) -> bool:
    """Compile every case for every architecture, print a row each; False if one did not compile."""
    jobs = [(index, arch) for index in range(len(cases)) for arch in ARCHITECTURES]
    count = processes.default_count()
    if count > 1:
        done = processes.in_processes(compile_case, jobs, count)
    else:  # there is nothing to gain, and a process takes seconds to start
        done = ((job, compile_case(job)) for job in jobs)
    cells, problems = {}, {}
    for (index, arch), outcome in track(console, "compiling", done, len(jobs)):
        cells[index, arch], problem = outcome if isinstance(outcome, Compiled) else _failed(outcome)
        if problem:
            problems[index, arch] = problem
    table = Table("compiled", *ARCHITECTURES)
    for index, case in enumerate(cases):
        table.add_row(case.name, *(cells[index, arch] for arch in ARCHITECTURES))
    for index, arch in sorted(problems):
        console.print(f"{cases[index].name} for {arch}: {problems[index, arch]}", markup=False)
    console.print(table)
    return not problems


class Compiled(NamedTuple):
    """What became of a compile: seconds and where the code came from, or that it failed and why."""

    cell: str
    problem: str = ""


def compile_case(job: tuple[int, str]) -> Compiled:
    """Compile a case, by its index, for an architecture."""
    index, arch = job
    case = _cases("cpu")[index]
    compiles, started = compile_cache.stats().compiles, time.perf_counter()
    try:
        case.compile_for(arch)
    except Exception as error:  # one architecture that fails must not hide the others
        return _failed(error)
    seconds = time.perf_counter() - started
    return Compiled(f"{seconds:.2f} s" + ("" if compile_cache.stats().compiles > compiles else " (cached)"))


def _failed(error: Exception) -> Compiled:
    return Compiled("FAILED", f"{type(error).__name__}: {error}")

"""What a call would run on a GPU, as data: kernel, architecture, tile, plan, and the reasons."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuteforge.errors import UnsupportedError
from cuteforge.runtime.compile_cache import KernelKey, load_kernel

_FAMILIES = "cuteforge.families."


@dataclass(frozen=True)
class LaunchPlan:
    """How a launch is cut.

    Attributes:
        ctas: of the grid.
        threads: of a CTA.
        cluster: CTAs of a cluster; 1 without clusters.
        splits: of a decode, the pieces that the keys of a KV head are cut into, over all requests: each has a CTA for
            each KV head. None where nothing is cut.
        kernels: launched one after another; 2 where a second one joins parts.
    """

    ctas: int
    threads: int
    cluster: int = 1
    splits: int | None = None
    kernels: int = 1

    def __str__(self) -> str:
        parts = [f"{counted(self.ctas, 'CTA')} of {self.threads} threads"]
        if self.cluster > 1:
            parts.append(f"clusters of {self.cluster}")
        if self.splits is not None:
            parts.append(counted(self.splits, "split"))
        if self.kernels > 1:
            parts.append(f"{self.kernels} kernels")
        return ", ".join(parts)


@dataclass(frozen=True)
class KernelFacts:
    """The kernel that serves a call, and how it is launched. Prints as lines.

    Attributes:
        kernel: its name: the module it is compiled from, without the package's own.
        arch: what it is compiled for.
        num_sms: of the GPU that the plan is for.
        tile: how a CTA works; a frozen dataclass of the family.
        smem_bytes: shared memory of a CTA.
        plan: None where it is not known; the last of the reasons then says why.
        reasons: sentences: why this kernel, this tile and this plan.
    """

    kernel: str
    arch: str
    num_sms: int
    tile: Any
    smem_bytes: int
    plan: LaunchPlan | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        tile = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(self.tile).items())
        lines = [
            f"kernel  {self.kernel}, {self.arch} with {self.num_sms} SMs",
            f"tile    {tile}; {self.smem_bytes} bytes of shared memory",
            f"plan    {self.plan or 'not known'}",
        ]
        return "\n".join(lines + [f"{'why' if i == 0 else '':<8}{reason}" for i, reason in enumerate(self.reasons)])


def counted(count: int, noun: str) -> str:
    """ "1 CTA", "2 CTAs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def kernel_name(key: KernelKey) -> str:
    """The name of a kernel: "cuteforge.families.rotary.kernel:build" is rotary.kernel."""
    return key.builder.partition(":")[0].removeprefix(_FAMILIES)


def host_numbers(key: KernelKey, numbers: Sequence[int], count: int) -> list[int] | str:
    """What a compiled function of the host makes of whole numbers, by `host_results.store_results`.

    It is kept as kernels are. Compiling it takes less than a second, and the import of the compiler two.

    Returns:
        `count` numbers; or, where there is no compiler or it may not run now, the sentence that says so.
    """
    results = (ctypes.c_int64 * count)()
    try:
        load_kernel(key).entry(*numbers, ctypes.addressof(results))
    except (UnsupportedError, RuntimeError) as error:
        return str(error)
    return list(results)

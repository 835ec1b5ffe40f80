"""How a launch is cut, for `explain`: the host's own functions on the extents of operands that are not there.

A function of the host, compiled and kept as those of kernels are. It launches nothing and needs no GPU.
"""

from types import SimpleNamespace
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.families.attention.operands import DEVICE_NAMES, row_of
from cuteforge.families.attention.work.counts import Counts, Operands
from cuteforge.families.attention.work.host_call import EXTENTS, SCALARS, HostPlan
from cuteforge.families.attention.work.limits import Limits
from cuteforge.families.attention.work.plan import make_plan, may_cut_row_tiles
from cuteforge.families.attention.work.traits import WorkTraits
from cuteforge.runtime.build import Build
from cuteforge.runtime.host_results import store_results


class Planner:
    """The function for one compile key."""

    def __init__(self, traits: WorkTraits):
        self.traits = traits

    @cute.jit
    def __call__(self, *arguments):
        """Args: arguments: the extents of `EXTENTS` and `SCALARS`, in their orders, and an address for the
        `HostPlan`.
        """
        *numbers, address = arguments
        left, right, *limits = numbers[-len(SCALARS) :]
        counts = Counts(self.traits, self._operands(numbers, left, right))
        found = HostPlan(counts.work_tiles, counts.row_tiles)
        if cutlass.const_expr(self.traits.splits):
            plan = make_plan(counts, Limits(*limits))
            second = Int32(may_cut_row_tiles(counts, plan))
            found = HostPlan(*found[:2], plan.splits, plan.pieces, plan.log_cluster, second)
        store_results(found, address)

    def _operands(self, numbers: list, left: Any, right: Any) -> Operands:
        """Operands that have shapes only."""
        given, first = dict.fromkeys((*DEVICE_NAMES, *Operands.SCALARS)), 0
        for name, count in EXTENTS.items():
            shape = self._shape(name, numbers[first : first + count])
            given[row_of(name).device_name] = SimpleNamespace(shape=shape)
            first += count
        return Operands(*(given | {"left": left, "right": right}).values())

    def _shape(self, name: str, extents: list) -> tuple:
        """The shape that kernels see: the dims that the operand has, and the head dim."""
        problem = self.traits.problem
        if name not in ("q", "k"):
            return tuple(extents)
        has_three = problem.queries == "batch" if name == "q" else problem.keys in ("batch", "pages")
        return (*extents[0 if has_three else 1 :], problem.head_dim)


def build(traits: WorkTraits) -> Build:
    """The function for `traits`, for `runtime.compile_cache`."""
    count = sum(EXTENTS.values()) + len(SCALARS)
    return Build(Planner(traits).__call__, (*(Int32(0),) * count, Int64(0)), "host_plan")

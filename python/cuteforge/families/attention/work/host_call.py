"""What the host's plan is asked by and what it answers (`host_plan.py`). Pure Python: no torch, no cutlass."""

from __future__ import annotations

from typing import NamedTuple

from cuteforge.families.attention.work.limits import Limits

# Operands whose extents the plan reads, and how many of them, without the head dim. Where an operand has fewer dims, or
# is not given, zeros come first.
EXTENTS = {"q": 3, "k": 3, "page_table": 2, "cu_seqlens_q": 1, "workspace": 1}
# They follow the extents.
SCALARS = ("left", "right", *Limits._fields)


class HostPlan(NamedTuple):
    """What the host finds out for a launch.

    Attributes:
        work_tiles, row_tiles: as of `Counts`.
        splits, pieces, log_cluster: as of `SplitPlan`; 0 for a kernel that does not split keys, and so is
        has_second_kernel: whether another kernel joins parts.
    """

    work_tiles: int
    row_tiles: int
    splits: int = 0
    pieces: int = 0
    log_cluster: int = 0
    has_second_kernel: int = 0

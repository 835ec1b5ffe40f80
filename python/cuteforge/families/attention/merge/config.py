"""What the kernel that joins partial results is compiled for. Pure Python: no torch, no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

from cuteforge.op.tensor_spec import ITEMSIZE
from cuteforge.runtime.arch import WARP

ACCESS_BYTES = 16


@dataclass(frozen=True)
class MergeTraits:
    """The compile key: everything that the trace reads.

    Attributes:
        queries: ``"batch"`` (B, L, H, D), ``"packed"`` (T, H, D).
        num_warps: of a CTA. Nothing is shared between them.
    """

    dtype: str
    head_dim: int
    queries: str
    num_warps: int = 4

    @property
    def access_elems(self) -> int:
        """Adjacent columns that a lane loads at once."""
        return ACCESS_BYTES // ITEMSIZE[self.dtype]

    @property
    def runs(self) -> int:
        """Accesses of a row."""
        return self.head_dim // self.access_elems

    @property
    def lanes_per_row(self) -> int:
        """Adjacent lanes that share a row: a power of two, so that rows do not straddle warps; narrow rows share a
        warp."""
        return min(1 << (self.runs - 1).bit_length(), WARP)

    @property
    def rows_per_cta(self) -> int:
        return self.num_warps * WARP // self.lanes_per_row

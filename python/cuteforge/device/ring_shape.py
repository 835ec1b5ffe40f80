"""Sizes of a ring of key and value tiles in shared memory. Pure Python: no cutlass."""

import math
from dataclasses import dataclass

from cuteforge.device.swizzled_rows import CHUNK_ELEMS, SwizzledRows

WARP = 32
LINE_CHUNKS = 8  # of 128 bytes


def lanes_of_row(*dims: int) -> int:
    """Lanes that copy one row of each width together: a line at a time, so that an address is found once for all lines of a row; half a line where
    that leaves none of them idle."""
    return 4 if math.gcd(*(dim // CHUNK_ELEMS for dim in dims), LINE_CHUNKS) == 4 else LINE_CHUNKS


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring. All dims are multiples of 8 elements of 2 bytes."""

    head_dim: int
    v_dim: int
    tile_n: int
    num_stages: int
    num_warps: int

    @property
    def k_rows(self) -> SwizzledRows:
        return SwizzledRows(self.head_dim)

    @property
    def v_rows(self) -> SwizzledRows:
        return SwizzledRows(self.v_dim)

    @property
    def v_offset_bytes(self) -> int:
        """Where the values of a stage start."""
        return self.tile_n * self.k_rows.pitch_bytes

    @property
    def stage_bytes(self) -> int:
        return self.tile_n * (self.k_rows.pitch_bytes + self.v_rows.pitch_bytes)

    @property
    def bytes(self) -> int:
        return self.num_stages * self.stage_bytes

    @property
    def lanes_per_row(self) -> int:
        return lanes_of_row(self.head_dim, self.v_dim)

    @property
    def rounds(self) -> int:
        """In how many a group's warps copy a tile."""
        return -(-self.tile_n // (WARP // self.lanes_per_row * self.num_warps))

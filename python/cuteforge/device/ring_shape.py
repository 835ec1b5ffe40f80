"""Sizes of a ring of key and value tiles in shared memory. Pure Python: no cutlass."""

import math
from dataclasses import dataclass

WARP = 32
CHUNK_BYTES = 16
CHUNK_ELEMS = 8


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring. All dims are multiples of 8 elements of 2 bytes."""

    head_dim: int
    v_dim: int
    tile_n: int
    num_stages: int
    num_warps: int

    @property
    def k_pitch_bytes(self) -> int:
        return (2 * -(-self.head_dim // 16) + 1) * CHUNK_BYTES

    @property
    def v_pitch_bytes(self) -> int:
        return (2 * -(-self.v_dim // 16) + 1) * CHUNK_BYTES

    @property
    def v_offset_bytes(self) -> int:
        """Where the values of a stage start."""
        return self.tile_n * self.k_pitch_bytes

    @property
    def stage_bytes(self) -> int:
        return self.tile_n * (self.k_pitch_bytes + self.v_pitch_bytes)

    @property
    def bytes(self) -> int:
        return self.num_stages * self.stage_bytes

    @property
    def lanes_per_row(self) -> int:
        """Lanes that copy one row together: all busy where the number of chunks allows."""
        common = math.gcd(self.head_dim // CHUNK_ELEMS, self.v_dim // CHUNK_ELEMS, WARP)
        return common if common >= 4 else 8

    @property
    def rows_per_warp(self) -> int:
        """Rows that a warp copies in a round."""
        return WARP // self.lanes_per_row

    @property
    def rows_per_round(self) -> int:
        return self.rows_per_warp * self.num_warps

    @property
    def rounds(self) -> int:
        return -(-self.tile_n // self.rows_per_round)

"""Sizes of a ring of tiles in shared memory, each of rows of two matrices. Pure Python: no cutlass."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cuteforge.device.swizzled_rows import SwizzledRows, lanes_of_row
from cuteforge.runtime.arch import WARP


class Matrices(NamedTuple):
    """Something of each of the two matrices of a ring: of the keys, and of the values."""

    first: Any
    second: Any


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring: of keys and values, or of any two matrices with a row for each token.

    Attributes:
        row_bytes: of a row of each matrix, multiples of 16.
        tile_rows: tokens of a tile.
        num_warps: warps that fill the ring and read it.
    """

    row_bytes: tuple[int, int]
    tile_rows: int
    num_stages: int
    num_warps: int

    @property
    def rows(self) -> Matrices:
        """How the rows of the first and of the second matrix lie."""
        return Matrices(*map(SwizzledRows, self.row_bytes))

    @property
    def offsets(self) -> Matrices:
        """Where the matrices of a stage start."""
        return Matrices(0, self.tile_rows * self.rows.first.pitch_bytes)

    @property
    def stage_bytes(self) -> int:
        return self.tile_rows * sum(rows.pitch_bytes for rows in self.rows)

    @property
    def bytes(self) -> int:
        return self.num_stages * self.stage_bytes

    @property
    def lanes_per_row(self) -> int:
        return lanes_of_row(*self.row_bytes)

    @property
    def rounds(self) -> int:
        """In how many the warps copy a tile."""
        return -(-self.tile_rows // (WARP // self.lanes_per_row * self.num_warps))

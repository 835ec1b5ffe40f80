"""Rows from anywhere to panels in shared memory, by warps: `cp.async` of 16 bytes a lane (sm_90 for the layout of the panels)."""

import math

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.copy import cp_async
from cuteforge.device.kv_source import NOWHERE, shuffle_address
from cuteforge.device.math import select
from cuteforge.device.mma_sm90 import swizzled_offset
from cuteforge.device.ring_shape import WARP
from cuteforge.device.swizzled_rows import CHUNK_BYTES, CHUNK_ELEMS
from cuteforge.device.traced import TraceConstant


class RowCopier(TraceConstant):
    """One of `num_warps` warps that share out the rows of a tile; `lanes` adjacent lanes copy one row.

    Args:
        dims: columns of the matrices that are copied.
    """

    def __init__(self, dims: tuple, num_warps: int, warp, lane):
        common = math.gcd(*(dim // CHUNK_ELEMS for dim in dims), WARP)
        self.lanes = common if common >= 4 else 8
        self.rows_per_warp = WARP // self.lanes
        self.rows_per_round = self.rows_per_warp * num_warps
        self.num_warps, self.warp, self.lane = num_warps, warp, lane

    @property
    def rows_at_once(self) -> int:
        """Rows whose addresses the lanes hold, one each."""
        return self.num_warps * WARP

    def look_up(self, source, first, num_rows: int, end):
        """What `source.lookup` says of one of the warp's rows, a row for each lane; of those past `num_rows` that they are not there."""
        turn, place = self.lane // self.rows_per_warp, self.lane % self.rows_per_warp
        row = turn * self.rows_per_round + self.warp * self.rows_per_warp + place
        return source.lookup(first + row, select(row < num_rows, end, Int32(0)))

    @cute.jit
    def copy(self, target: Int32, pitch_rows: int, first: int, num_rows: int, dim: int, found):
        """Start copying `num_rows` rows, of which the lanes have looked up the addresses; rows that are NOWHERE, and columns up to a multiple of 16,
        become zeros.

        Args:
            target: a matrix of `pitch_rows` rows, of which `first` is the first one that is copied.
        """
        chunks, padded = dim // CHUNK_ELEMS, -(-dim // 16) * 2
        first_row, chunk = self.warp * self.rows_per_warp + self.lane // self.lanes, self.lane % self.lanes
        # the copying warps have few registers
        for turn in cutlass.range(-(-num_rows // self.rows_per_round), unroll=2 if padded <= self.lanes else 1):
            row = first_row + turn * self.rows_per_round
            address = shuffle_address(found, turn * self.rows_per_warp + self.lane // self.lanes)
            exists = address != Int64(NOWHERE)
            if row < num_rows:
                for start in cutlass.range_constexpr(0, padded, self.lanes):
                    column = chunk + start
                    place = target + swizzled_offset(first + row, column, pitch_rows)
                    source = address + Int64(column * CHUNK_BYTES)
                    if cutlass.const_expr(start + self.lanes <= chunks):
                        cp_async(place, source, CHUNK_BYTES, exists)
                    elif column < padded:
                        cp_async(place, source, CHUNK_BYTES, exists & (column < chunks))

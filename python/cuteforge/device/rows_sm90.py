"""Rows from anywhere to panels in shared memory, by warps: `cp.async` of 16 bytes a lane (sm_90 for the layout of the panels)."""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.copy import cp_async
from cuteforge.device.kv_source import NOWHERE
from cuteforge.device.math import select
from cuteforge.device.mma_sm90 import swizzled_offset
from cuteforge.device.panels import PANEL_COLS, ROW_BYTES
from cuteforge.device.ring_shape import LINE_CHUNKS, WARP, lanes_of_row
from cuteforge.device.shared_rows import SharedRows
from cuteforge.device.swizzled_rows import CHUNK_BYTES, CHUNK_ELEMS
from cuteforge.device.traced import TraceConstant


class RowCopier(TraceConstant):
    """One of `num_warps` warps that share out the rows of a tile.

    Args:
        dims: columns of the matrices that are copied.
    """

    def __init__(self, dims: tuple, num_warps: int, warp, lane):
        self.num_warps, self.warp, self.lane = num_warps, warp, lane
        self.rows = SharedRows(lanes_of_row(*dims), num_warps, warp, lane)

    @property
    def rows_at_once(self) -> int:
        """Rows whose addresses the lanes hold, one each."""
        return self.num_warps * WARP

    def look_up(self, source, first, num_rows: int, end):
        """What `source.look_up` says of one of the warp's rows, a row for each lane; of those past `num_rows` that they are not there."""
        row = self.rows.looked_up()
        return source.look_up(first + row, select(row < num_rows, end, Int32(0)))

    @cute.jit
    def copy(self, target: Int32, pitch_rows: int, first: int, num_rows: int, dim: int, found):
        """Start copying `num_rows` rows, of which the lanes have looked up the addresses; rows that are NOWHERE, and columns up to a multiple of 16,
        become zeros.

        Args:
            target: a matrix of `pitch_rows` rows, of which `first` is the first one that is copied.
        """
        per_round = self.rows.per_round
        turns = -(-num_rows // per_round)
        is_even = num_rows % per_round == per_round % 8 == first % 8 == dim % PANEL_COLS == 0
        if cutlass.const_expr(is_even and self.rows.lanes == LINE_CHUNKS):
            is_there = (found != Int64(NOWHERE)) | (self.lane >= turns * self.rows.per_warp)
            if cute.arch.vote_all_sync(is_there):
                self._copy_whole(target, pitch_rows, first, turns, dim, found)
            else:
                self._copy_any(target, pitch_rows, first, num_rows, turns, dim, found)
        else:
            self._copy_any(target, pitch_rows, first, num_rows, turns, dim, found)

    def _copy_whole(self, target, pitch_rows: int, first: int, turns: int, dim: int, found) -> None:
        """All rows are there, their lines whole, and a lane's chunks all exchanged alike: a few instructions a line, for four warps have to keep a
        whole SM in keys and values (H200, pages: 362 TFLOP/s without this)."""
        place = target + swizzled_offset(first + self.rows.row, self.rows.chunk, pitch_rows)
        for turn in range(turns):
            source = self.rows.address(found, turn) + Int64(self.rows.chunk * CHUNK_BYTES)
            for panel in range(dim // PANEL_COLS):
                row_bytes = (turn * self.rows.per_round + panel * pitch_rows) * ROW_BYTES
                cp_async(place + row_bytes, source + panel * ROW_BYTES, CHUNK_BYTES)

    @cute.jit
    def _copy_any(self, target: Int32, pitch_rows: int, first: int, num_rows: int, turns: int, dim: int, found):
        chunks, padded = dim // CHUNK_ELEMS, -(-dim // 16) * 2
        # the copying warps have few registers
        for turn in cutlass.range(turns, unroll=1):
            row = self.rows.row + turn * self.rows.per_round
            address = self.rows.address(found, turn)
            exists = address != Int64(NOWHERE)
            if row < num_rows:
                for start in cutlass.range_constexpr(0, padded, self.rows.lanes):
                    column = self.rows.chunk + start
                    place = target + swizzled_offset(first + row, column, pitch_rows)
                    source = address + Int64(column * CHUNK_BYTES)
                    if cutlass.const_expr(start + self.rows.lanes <= chunks):
                        cp_async(place, source, CHUNK_BYTES, exists)
                    elif column < padded:
                        cp_async(place, source, CHUNK_BYTES, exists & (column < chunks))

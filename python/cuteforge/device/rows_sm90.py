"""Rows from anywhere to panels in shared memory, by warps: `cp.async` of 16 bytes a lane (sm_90 for the layout of the
panels)."""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.copy import cp_async
from cuteforge.device.math import select
from cuteforge.device.mma_sm90 import swizzled_offset
from cuteforge.device.panels import PANEL_ROW_BYTES
from cuteforge.device.row_lanes import NOWHERE, RowLanes
from cuteforge.device.swizzled_rows import CHUNK_BYTES, LINE_CHUNKS, SwizzledRows, lanes_of_row
from cuteforge.device.traced import TraceConstant
from cuteforge.runtime.arch import WARP


class RowCopier(TraceConstant):
    """One of `num_warps` warps that share out the rows of a tile.

    Args:
        row_bytes: of the matrices that are copied.
    """

    def __init__(self, row_bytes: tuple, num_warps: int, warp, lane):
        self.num_warps, self.warp, self.lane = num_warps, warp, lane
        self.lanes = RowLanes(lanes_of_row(*row_bytes), num_warps, warp, lane)

    @property
    def rows_at_once(self) -> int:
        """Rows whose addresses the lanes hold, one each."""
        return self.num_warps * WARP

    def look_up(self, source, first, num_rows: int, end):
        """What `source.look_up` says of one of the warp's rows, a row for each lane; of those past `num_rows` that they
        are not there."""
        row = self.lanes.looked_up()
        return source.look_up(first + row, select(row < num_rows, end, Int32(0)))

    @cute.jit
    def copy(self, target: Int32, pitch_rows: int, first: int, num_rows: int, row_bytes: int, found):
        """Start copying `num_rows` rows, of which the lanes have looked up the addresses; rows that are NOWHERE, and
        what fills a last operand, become zeros.

        Args:
            target: a matrix of `pitch_rows` rows, of which `first` is the first one that is copied.
        """
        per_round = self.lanes.per_round
        rounds = -(-num_rows // per_round)
        is_even = num_rows % per_round == per_round % 8 == first % 8 == row_bytes % PANEL_ROW_BYTES == 0
        if cutlass.const_expr(is_even and self.lanes.lanes == LINE_CHUNKS):
            is_there = (found != Int64(NOWHERE)) | (self.lane >= rounds * self.lanes.per_warp)
            if cute.arch.vote_all_sync(is_there):
                self._copy_whole(target, pitch_rows, first, rounds, row_bytes, found)
            else:
                self._copy_any(target, pitch_rows, first, num_rows, row_bytes, found)
        else:
            self._copy_any(target, pitch_rows, first, num_rows, row_bytes, found)

    def _copy_whole(self, target, pitch_rows: int, first: int, rounds: int, row_bytes: int, found) -> None:
        """All rows are there, their lines whole, and a lane's chunks all exchanged alike: a few instructions a line,
        for four warps have to keep a whole SM in keys and values (H200, pages: 362 TFLOP/s without this)."""
        first_address = target + swizzled_offset(first + self.lanes.row, self.lanes.chunk, pitch_rows)
        for number in range(rounds):
            source = self.lanes.address(found, number) + Int64(self.lanes.chunk * CHUNK_BYTES)
            for panel in range(row_bytes // PANEL_ROW_BYTES):
                offset = (number * self.lanes.per_round + panel * pitch_rows) * PANEL_ROW_BYTES
                cp_async(first_address + offset, source + panel * PANEL_ROW_BYTES, CHUNK_BYTES)

    @cute.jit
    def _copy_any(self, target: Int32, pitch_rows: int, first: int, num_rows: int, row_bytes: int, found):
        rows, rounds = SwizzledRows(row_bytes), -(-num_rows // self.lanes.per_round)
        # the producer warps have few registers
        for number in cutlass.range(rounds, unroll=1):
            row = self.lanes.row + number * self.lanes.per_round
            address = self.lanes.address(found, number)
            exists = address != Int64(NOWHERE)
            if row < num_rows:
                for start in cutlass.range_constexpr(0, rows.chunks, self.lanes.lanes):
                    chunk = self.lanes.chunk + start
                    smem_address = target + swizzled_offset(first + row, chunk, pitch_rows)
                    source = address + Int64(chunk * CHUNK_BYTES)
                    if cutlass.const_expr(start + self.lanes.lanes <= rows.filled_chunks):
                        cp_async(smem_address, source, CHUNK_BYTES, exists)
                    elif chunk < rows.chunks:
                        cp_async(smem_address, source, CHUNK_BYTES, exists & (chunk < rows.filled_chunks))

"""Tiles of the keys, or of the values, of a unit on their way to shared memory: by TMA in boxes of adjacent rows, or row by row."""

import cutlass
from cutlass import Int32, cute

from cuteforge.device.copy import smem_words
from cuteforge.device.math import select
from cuteforge.device.mma_sm90 import see_copies
from cuteforge.device.panels import PANEL_COLS, ROW_BYTES, panel_bytes
from cuteforge.device.ring_shape import LINE_CHUNKS, WARP
from cuteforge.device.rows_sm90 import RowCopier
from cuteforge.device.stages_sm90 import Stages
from cuteforge.device.swizzled_rows import CHUNK_BYTES
from cuteforge.device.tma_sm90 import TmaRows
from cuteforge.device.traced import TraceConstant
from cuteforge.gqa.work import Unit

ALL = (1 << WARP) - 1  # lanes


class TileBoxes(TraceConstant):
    """By all lanes of one warp.

    Args:
        copies: of keys or of values.
        clears: whether rows that do not exist become zeros. Values have to: what lies after the last one may be a NaN, and 0 times a NaN is one.
            Scores with such keys are masked.
        loaded: barrier that counts what is loaded before the rest becomes zeros.
    """

    def __init__(self, unit: Unit, copies: TmaRows, clears: bool, loaded: cute.Pointer, lane):
        self.unit, self.copies, self.clears, self.loaded, self.lane = unit, copies, clears, loaded, lane
        self.tile_n, self.boxes = unit.traits.tile.tile_n, unit.traits.tile.tile_n // copies.rows
        self.source = unit.source() if unit.traits.problem.is_paged else None

    def look_up(self, tile):
        """Where the boxes of a tile of pages start, one for each lane, for `copy`."""
        if self.source is None:
            return Int32(0), Int32(0)
        end = select(self.lane < self.boxes, self.unit.k_len, Int32(0))
        return self.source.look_up(tile * self.tile_n + self.lane * self.copies.rows, end)

    @cute.jit
    def copy(self, stages: Stages, stage: Int32, tile: Int32, found: tuple, loaded_parity: Int32):
        """Start filling a stage. Returns the parity of `loaded` after it."""
        target, full, token = stages.address(stage), stages.full(stage), tile * self.tile_n
        left = self.unit.k_len - token
        there = cute.arch.vote_ballot_sync(self._is_there(found))
        is_whole = there == Int32(ALL >> (WARP - self.boxes))
        if cutlass.const_expr(self.clears):
            is_whole = is_whole & (left >= self.tile_n)
        if cutlass.const_expr(self.source is None and not self.clears):
            self._load(target, full, token, found)
        elif is_whole:
            self._load(target, full, token, found)
        elif cutlass.const_expr(self.clears):
            self._load(target, self.loaded, token, found, there)
            cute.arch.mbarrier_wait(self.loaded, loaded_parity)
            loaded_parity = loaded_parity ^ 1
            self._clear(target, left, there)
            see_copies()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)
        else:
            self._load(target, full, token, found, there)
        return loaded_parity

    def _is_there(self, found: tuple):
        """Whether the box that this lane has looked up is in memory."""
        return self.lane == 0 if self.source is None else self.source.has_page(found[0])

    @cute.jit
    def _load(self, target: Int32, barrier: cute.Pointer, token: Int32, found: tuple, there: Int32 | None = None):
        """Start copying the boxes of a tile, all of them if it is not said which are `there`."""
        unit, copies, is_whole = self.unit, self.copies, there is None
        copies.expect(barrier, self.boxes if is_whole else cute.arch.popc(there))
        if cutlass.const_expr(self.source is None):
            place = (unit.head, unit.batch) if cutlass.const_expr(len(unit.ops.mK.shape) == 4) else (unit.head,)
            copies.copy(target, barrier, unit.first_key + token, place)
        else:
            # four at a time where registers allow: with a window, a cap and sinks the copying warps spill 8 bytes then (ptxas of CUDA 12)
            at_once = 2 if unit.traits.problem.has_options else 4
            for box in cutlass.range(self.boxes, unroll=at_once if is_whole else 1):
                page, slot = (cute.arch.shuffle_sync(x, box) for x in found)
                if cutlass.const_expr(is_whole):
                    copies.copy(target + box * (copies.rows * ROW_BYTES), barrier, slot, (unit.head, page))
                elif (there >> box) & 1 != 0:
                    copies.copy(target + box * (copies.rows * ROW_BYTES), barrier, slot, (unit.head, page))

    @cute.jit
    def _clear(self, target: Int32, left: Int32, there: Int32):
        """Zero the rows from the `left`-th on, and those of boxes that are not there."""
        copies, at_once = self.copies, WARP // LINE_CHUNKS
        begin = left // at_once * at_once if self.source is None else 0
        for row in cutlass.range(begin + self.lane // LINE_CHUNKS, self.tile_n, at_once, unroll=1):
            if row >= left or (there >> (row // copies.rows)) & 1 == 0:
                for panel in cutlass.range_constexpr(-(-copies.cols // PANEL_COLS)):
                    line = target + (panel * panel_bytes(PANEL_COLS, self.tile_n) + row * ROW_BYTES)
                    smem_words(line + self.lane % LINE_CHUNKS * CHUNK_BYTES, CHUNK_BYTES // 4).fill(0)


class TileRows(TraceConstant):
    """By the warps of a copier.

    Args:
        which: keys or values, as in `Buffers.tokens`.
        dim: their columns.
    """

    def __init__(self, unit: Unit, copier: RowCopier, which: int, dim: int):
        self.unit, self.copier, self.which, self.dim = unit, copier, which, dim
        self.tile_n, self.source = unit.traits.tile.tile_n, unit.source()

    def _parts(self) -> list[tuple[int, int]]:
        """(first row, rows) of what the lanes look up at once."""
        step = self.copier.rows_at_once
        return [(first, min(step, self.tile_n - first)) for first in range(0, self.tile_n, step)]

    def look_up(self, tile):
        """Where the rows of a tile are, for `copy`."""
        found = [
            self.copier.look_up(self.source, tile * self.tile_n + first, rows, self.unit.k_len)
            for first, rows in self._parts()
        ]
        return tuple(number for pair in found for number in pair)

    def copy(self, stages: Stages, stage, tile, found: tuple, loaded_parity):
        """Start filling a stage; rows that do not exist become zeros. Returns `loaded_parity`."""
        for i, (first, rows) in enumerate(self._parts()):
            address = self.source.addresses(found[2 * i : 2 * i + 2])[self.which]
            self.copier.copy(stages.address(stage), self.tile_n, first, rows, self.dim, address)
        # waited for here, so that the fence is none of the warps that multiply
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        see_copies()
        cute.arch.mbarrier_arrive(stages.full(stage))
        return loaded_parity

"""Tiles of the keys, or of the values, on their way to shared memory: by TMA in boxes of adjacent rows, or row by
row."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from cuteforge.device.copy import smem_words
from cuteforge.device.math import select
from cuteforge.device.mma_sm90 import see_copies
from cuteforge.device.panels import PANEL_ROW_BYTES, num_panels, panels_bytes
from cuteforge.device.rows_sm90 import RowCopier
from cuteforge.device.stages_sm90 import Stages
from cuteforge.device.swizzled_rows import CHUNK_BYTES, LINE_CHUNKS
from cuteforge.device.tma_sm90 import TmaRows
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.buffers import VALUES
from cuteforge.families.attention.keys.source import PageToken
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.runtime.arch import WARP

ALL = (1 << WARP) - 1  # lanes
NONE = -1


class Tail(NamedTuple):
    """A tile on its way of which not all exists: the rest becomes zeros once it is there.

    Attributes:
        stage: where it is, `NONE` if there is no such tile.
        num_rows: from its first one on that exist.
        boxes: bits of those that are in memory.
    """

    stage: Int32
    num_rows: Int32
    boxes: Int32


class TileBoxes(TraceConstant):
    """Tiles of one matrix, keys or values, by all lanes of one warp.

    Args:
        copies: of the matrix.
        which: keys or values, as in `Buffers.tokens`.
        loaded: barrier that counts what is loaded of a tile of values before the rest of it becomes zeros: what lies
            after the last one may be a NaN, and 0 times a NaN is one. Keys need no zeros: scores with what lies after
            them are masked.
    """

    def __init__(self, traits, copies: TmaRows, which: int, loaded: cute.Pointer, lane):
        self.copies, self.which, self.lane = copies, which, lane
        self.loaded = loaded if which == VALUES else None
        self.is_paged, self.tile_n = traits.problem.is_paged, traits.tile.tile_n
        self.boxes = self.tile_n // copies.rows

    def look_up(self, work: WorkTile, tile):
        """Where the boxes of a tile of pages start, one for each lane, for `copy`."""
        if not self.is_paged:
            return PageToken(Int32(0), Int32(0))
        end = select(self.lane < self.boxes, work.k_len, Int32(0))
        return work.source().look_up(tile * self.tile_n + self.lane * self.copies.rows, end)

    @cute.jit
    def copy(self, work: WorkTile, stages: Stages, stage: Int32, tile: Int32, found: PageToken, before: Tail):
        """Start filling a stage. Returns its tail, which `finish` takes before the next call: `before` is done with."""
        target, full, token = stages.address(stage), stages.full_barrier(stage), tile * self.tile_n
        tail_stage, num_rows, boxes = Int32(NONE), work.k_len - token, Int32(1)
        if cutlass.const_expr(self.is_paged):
            boxes = cute.arch.vote_ballot_sync(work.source().has_page(found.page))
        is_whole = boxes == Int32(ALL >> (WARP - self.boxes))
        if cutlass.const_expr(self.loaded is not None):
            is_whole = is_whole & (num_rows >= self.tile_n)
        if cutlass.const_expr(self.loaded is None and not self.is_paged):
            self._load(work, target, full, token, found)
        elif is_whole:
            self._load(work, target, full, token, found)
        elif cutlass.const_expr(self.loaded is not None):
            self._load(work, target, self.loaded, token, found, boxes)
            tail_stage = stage
        else:
            self._load(work, target, full, token, found, boxes)
        return Tail(tail_stage, num_rows, boxes)

    def end_work(self, stages: Stages, tail: Tail) -> Tail:
        return tail

    @cute.jit
    def finish(self, stages: Stages, tail: Tail, loaded_phase: Int32):
        """Wait for a tile that has a tail, and zero it. Returns the phase of `loaded` after it.

        Later than the copy, so that what comes next is looked for while it is on its way: of 1024 requests of 32 keys
        each one has a tail.
        """
        if tail.stage != NONE:
            cute.arch.mbarrier_wait(self.loaded, loaded_phase)
            loaded_phase = loaded_phase ^ 1
            self._clear(stages.address(tail.stage), tail.num_rows, tail.boxes)
            see_copies()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(stages.full_barrier(tail.stage))
        return loaded_phase

    @cute.jit
    def _load(
        self,
        work: WorkTile,
        target: Int32,
        barrier: cute.Pointer,
        token: Int32,
        found: PageToken,
        boxes: Int32 | None = None,
    ):
        """Start copying the boxes of a tile, all of them if it is not said which of them are in memory."""
        copies, is_whole = self.copies, boxes is None
        copies.expect(barrier, self.boxes if is_whole else cute.arch.popc(boxes))
        if cutlass.const_expr(not self.is_paged):
            outer = (work.head, work.batch) if cutlass.const_expr(len(work.ops.mK.shape) == 4) else (work.head,)
            copies.copy(target, barrier, work.first_key + token, outer)
        else:
            # four at a time where registers allow: with a window, a cap and sinks the producer warps spill 8 bytes then
            # (ptxas of CUDA 12)
            at_once = 2 if work.traits.problem.has_options else 4
            for box in cutlass.range(self.boxes, unroll=at_once if is_whole else 1):
                page, page_token = (cute.arch.shuffle_sync(x, box) for x in found)
                if cutlass.const_expr(is_whole):
                    copies.copy(target + box * (copies.rows * PANEL_ROW_BYTES), barrier, page_token, (work.head, page))
                elif (boxes >> box) & 1 != 0:
                    copies.copy(target + box * (copies.rows * PANEL_ROW_BYTES), barrier, page_token, (work.head, page))

    @cute.jit
    def _clear(self, target: Int32, num_rows: Int32, boxes: Int32):
        """Zero the rows past `num_rows`, and those of boxes that are not in memory."""
        copies, at_once = self.copies, WARP // LINE_CHUNKS
        begin = 0 if self.is_paged else num_rows // at_once * at_once
        for row in cutlass.range(begin + self.lane // LINE_CHUNKS, self.tile_n, at_once, unroll=1):
            if row >= num_rows or (boxes >> (row // copies.rows)) & 1 == 0:
                for panel in cutlass.range_constexpr(num_panels(copies.row_bytes)):
                    line = target + (panel * panels_bytes(PANEL_ROW_BYTES, self.tile_n) + row * PANEL_ROW_BYTES)
                    smem_words(line + self.lane % LINE_CHUNKS * CHUNK_BYTES, CHUNK_BYTES // 4).fill(0)


class TileRows(TraceConstant):
    """Tiles of one matrix by the warps of a copier.

    Args:
        which: keys or values, as in `Buffers.tokens`.
        row_bytes: of the matrix.
    """

    def __init__(self, traits, copier: RowCopier, which: int, row_bytes: int):
        self.copier, self.which, self.row_bytes, self.tile_n = copier, which, row_bytes, traits.tile.tile_n

    def _parts(self) -> list[tuple[int, int]]:
        """(first row, rows) of what the lanes look up at once."""
        step = self.copier.rows_at_once
        return [(first, min(step, self.tile_n - first)) for first in range(0, self.tile_n, step)]

    def look_up(self, work: WorkTile, tile):
        """Do nothing yet: the copy looks the rows up, while the tile before is still on its way."""
        return PageToken(Int32(0), Int32(0))

    @cute.jit
    def copy(self, work: WorkTile, stages: Stages, stage: Int32, tile: Int32, found: PageToken, before: Tail):
        """Start filling a stage; rows that do not exist become zeros. Returns what is on its way, which counts as there
        when the next tile is."""
        source = work.source()
        for first, rows in self._parts():
            looked_up = self.copier.look_up(source, tile * self.tile_n + first, rows, work.k_len)
            self.copier.copy(
                stages.address(stage), self.tile_n, first, rows, self.row_bytes, source.addresses(looked_up)[self.which]
            )
        cute.arch.cp_async_commit_group()
        self._arrive(stages, before, 1)
        return Tail(stage, Int32(0), Int32(0))

    @cute.jit
    def end_work(self, stages: Stages, tail: Tail):
        """Wait for the last tile: the next work tile may be long in coming."""
        self._arrive(stages, tail, 0)
        return no_tail()

    def finish(self, stages: Stages, tail: Tail, loaded_phase):
        return loaded_phase

    @cute.jit
    def _arrive(self, stages: Stages, tail: Tail, after: cutlass.Constexpr):
        """Say that a tile is there, once it is; `after` it have been started since. Here is the fence, so that the
        consumer warps have none."""
        if tail.stage != NONE:
            cute.arch.cp_async_wait_group(after)
            see_copies()
            cute.arch.mbarrier_arrive(stages.full_barrier(tail.stage))


def no_tail() -> Tail:
    return Tail(Int32(NONE), Int32(0), Int32(0))

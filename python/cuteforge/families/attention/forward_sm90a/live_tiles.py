"""Which tiles of keys a boolean mask leaves anything of, for the rows of a work tile: from the first such tile to the
last. Padding, causal masks, windows and documents side by side have nothing outside of these."""

import cutlass
from cutlass import Boolean, Int32, Uint32, cute

from cuteforge.device.copy import smem_words
from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.config import Barrier
from cuteforge.families.attention.parts.mask import CHUNK, WORDS, MaskRow
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.runtime.arch import WARP

UNROLL = 2  # loads on their way at once


class LiveTiles(TraceConstant):
    """Found by the warps that copy the queries, while others work on the work tiles before: each reads some of the
    rows.

    Args:
        warps: how many there are, and `warp` which one this is.
        slots: byte address in shared memory of two words for each warp, twice.
    """

    def __init__(self, warps: int, warp, lane, slots):
        self.warps, self.warp, self.lane, self.slots = warps, warp, lane, slots

    @cute.jit
    def bounds(self, work: WorkTile, number: Int32):
        """(first, end) of the tiles of keys; `number` counts the work tiles of the CTA."""
        first, end = work.key_tiles()
        if end > first:
            first, end = self._own_bounds(work, first, end)
        own = smem_words(self._slot(number, self.warp), 2)
        if self.lane == 0:
            own[0], own[1] = Uint32(first), Uint32(end)
        cute.arch.barrier(barrier_id=Barrier.QUERY_WARPS, number_of_threads=self.warps * WARP)
        for other in cutlass.range_constexpr(self.warps):
            words = smem_words(self._slot(number, other), 2)
            # a warp whose rows see nothing has an end at its first
            other_first, other_end = Int32(words[0]), Int32(words[1])
            is_empty = end <= first
            first, end = (
                select(is_empty, other_first, select(other_end > other_first, cutlass.min(first, other_first), first)),
                select(is_empty, other_end, select(other_end > other_first, cutlass.max(end, other_end), end)),
            )
        return cute.arch.make_warp_uniform(first), cute.arch.make_warp_uniform(end)

    def _slot(self, number, warp):
        return self.slots + (number % 2 * self.warps + warp) * 8

    @cute.jit
    def _own_bounds(self, work: WorkTile, first: Int32, end: Int32):
        rows = OwnRows(work, self.warps, self.warp, self.lane)
        found = Boolean(False)
        while (end > first) & ~found:
            dead = rows.dead_tiles(first, end, from_last=True)
            found = dead < rows.at_once
            end = cutlass.max(end - dead, first)
        found = Boolean(False)
        while (end > first) & ~found:
            dead = rows.dead_tiles(first, end, from_last=False)
            found = dead < rows.at_once
            first = cutlass.min(first + dead, end)
        return first, end


class OwnRows(TraceConstant):
    """The rows of the mask that one warp reads for a work tile; those that several heads share once.

    Attributes:
        at_once: tiles that the warp looks at together: a lane each where there is one row, else all lanes one.
    """

    def __init__(self, work: WorkTile, warps: int, warp, lane):
        self.work, self.lane, self.traits = work, lane, work.traits
        rank = self.traits.problem.mask_rank
        self.at_once = WARP if rank == 2 else 1
        self.step = work.counts.divisors.group_size.divisor
        if rank == 4:
            self.step = Int32(select(work.ops.mMask.shape[1] == 1, self.step, Int32(1)))
        # from the first row of a token on, where rows of a token are alike
        self.first_row = work.first_row // self.step * self.step
        count = (work.last_row() - self.first_row) // self.step + 1
        share = (count + warps - 1) // warps
        self.begin, self.count = warp * share, cutlass.max(cutlass.min(share, count - warp * share), 0)

    def dead_tiles(self, first, end, from_last: bool) -> Int32:
        """How many tiles at one end of ``first .. end``, up to `at_once`, the mask leaves nothing of."""
        offset = self.lane if self.at_once > 1 else Int32(0)
        tile = end - 1 - offset if from_last else first + offset
        if self.at_once > 1:
            is_live = (tile >= first) & (tile < end) & self._any_of_row(tile)
            live = cute.arch.vote_ballot_sync(is_live)
            return Int32(select(live == 0, Int32(WARP), cute.arch.popc((live & -live) - 1)))
        return Int32(select(cute.arch.vote_any_sync(self._any_of_rows(tile)), Int32(0), Int32(1)))

    @cute.jit
    def _any_of_row(self, tile: Int32):
        """Of the one row, by one lane."""
        found, row = Uint32(0), MaskRow(self.work, self.work.first_row)
        col, chunks = tile * self.traits.tile.tile_n, self.traits.tile.tile_n // CHUNK
        for chunk in cutlass.range(chunks, unroll=UNROLL):
            found = found | any_of_chunk(row, col + chunk * CHUNK)
        return found != 0

    @cute.jit
    def _any_of_rows(self, tile: Int32):
        """Of the warp's rows, by all lanes."""
        found, chunks = Uint32(0), self.traits.tile.tile_n // CHUNK
        col = tile * self.traits.tile.tile_n
        for i in cutlass.range(self.lane, self.count * chunks, WARP, unroll=UNROLL):
            row = MaskRow(self.work, self.first_row + (self.begin + i // chunks) * self.step)
            found = found | any_of_chunk(row, col + i % chunks * CHUNK)
        return found != 0


@cute.jit
def any_of_chunk(row: MaskRow, col: Int32):
    """Not 0 if a chunk of a row keeps anything; it may be so if only what is after the last column would."""
    words, found = row.load(col, row.num_cols)
    for i in cutlass.range_constexpr(WORDS):
        found = found | words[i]
    return found

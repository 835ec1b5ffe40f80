"""Which tiles of keys a boolean mask leaves anything of, for the rows of a work tile: from the first such tile to the
last. Padding, causal masks, windows and documents side by side have nothing outside of these.

There is no search where it would take longer than the products that it saves: for a mask with rows of its own for each
query head, and where query heads do not share KV heads (`OwnRows.are_few`).
"""

import cutlass
from cutlass import Boolean, Int32, Uint32, cute

from cuteforge.device.copy import smem_words
from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.config import LIVE_TILES_BYTES, Barrier
from cuteforge.families.attention.parts.mask import CHUNK, HIGH_BITS, WORDS, MaskRow, nonzero_bytes
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.runtime.arch import WARP

# Of a warp. It reads two in the time of a product of 128 rows and 80 keys, and looks at 512 columns.
FEW_ROWS = 16
COLS = WARP * CHUNK  # that a warp looks at together, a chunk each lane
NO_COLS = -(1 << 31)  # so many columns, where a chunk may begin before the first one
ALL_BYTES = HIGH_BITS


class LiveTiles(TraceConstant):
    """Found by the producer warps of the queries, while others work on the work tiles before: each reads some of the
    rows.

    Args:
        warps: how many there are, and `warp` which one this is.
        slots: byte address in shared memory of `LIVE_TILES_BYTES` for each warp, twice.
    """

    def __init__(self, warps: int, warp, lane, slots):
        self.warps, self.warp, self.lane, self.slots = warps, warp, lane, slots

    @cute.jit
    def find(self, work: WorkTile, number: Int32):
        """(first, end) of the live tiles, and of the full ones; `number` counts the work tiles of the CTA."""
        first, end = work.key_tiles()
        first_full, end_full = Int32(0), Int32(0)
        rows = OwnRows(work, self.warps, self.warp, self.lane)
        if (end > first) & rows.are_few:
            first, end = rows.live_tiles(first, end)
            if cutlass.const_expr(rows.is_one):
                first_full, end_full = rows.full_tiles(first, end)
        if cutlass.const_expr(work.traits.problem.mask_rank > 2):
            first, end = self._join(first, end, number)
        return first, end, first_full, end_full

    @cute.jit
    def _join(self, first: Int32, end: Int32, number: Int32):
        """The live tiles of the rows of all warps. A warp whose rows see nothing reports an empty range."""
        own = self._words(number, self.warp)
        if self.lane == 0:
            own[0], own[1] = Uint32(first), Uint32(end)
        cute.arch.barrier(barrier_id=Barrier.QUERY_WARPS, number_of_threads=self.warps * WARP)
        first, end = Int32(0), Int32(0)
        for warp in cutlass.range_constexpr(self.warps):
            words = self._words(number, warp)
            its_first, its_end = Int32(words[0]), Int32(words[1])
            if its_end > its_first:
                first = select(end > first, cutlass.min(first, its_first), its_first)
                end = cutlass.max(end, its_end)
        return cute.arch.make_warp_uniform(first), cute.arch.make_warp_uniform(end)

    def _words(self, number, warp) -> cute.Tensor:
        return smem_words(self.slots + (number % 2 * self.warps + warp) * LIVE_TILES_BYTES, 2)


class OwnRows(TraceConstant):
    """The rows of the mask that one warp reads for a work tile. A row that several heads or tokens share is read once.

    Attributes:
        is_one: whether the mask has one row for all.
        are_few: whether they are read sooner than the tiles of keys would be multiplied.
    """

    def __init__(self, work: WorkTile, warps: int, warp, lane):
        self.work, self.lane, self.tile_n = work, lane, work.traits.tile.tile_n
        self.chunks = self.tile_n // CHUNK  # of a tile
        rank = work.traits.problem.mask_rank
        self.is_one = rank == 2
        # rows on their way; more take more registers than these warps have
        self.at_once = 1 if self.is_one or work.traits.problem.is_paged else 2
        group_size, shape = work.counts.divisors.group_size.divisor, work.ops.mMask.shape
        self.step = Int32(select(shape[1] == 1, group_size, Int32(1))) if rank == 4 else group_size
        # from the first row of a token on, where rows of a token are alike
        first_row = work.first_row // self.step * self.step
        count = (work.last_row() - first_row) // self.step + 1
        if rank > 2:
            # one token has the rows of all
            of_token = (group_size + self.step - 1) // self.step
            count = Int32(select(shape[rank - 2] == 1, cutlass.min(count, of_token), count))
        share = (count + warps - 1) // warps
        self.first_row = first_row + warp * share * self.step
        self.count = cutlass.max(cutlass.min(share, count - warp * share), 0)
        self.are_few = share <= FEW_ROWS
        if self.is_one:
            self.first_row, self.count, self.are_few = work.first_row, Int32(1), Boolean(True)

    @cute.jit
    def live_tiles(self, first: Int32, end: Int32):
        """(first, end) of the tiles between `first` and `end` that the mask leaves anything of."""
        begin, stop = first * self.tile_n, end * self.tile_n
        col, live = stop, Uint32(0)
        while (col > begin) & (live == 0):
            col = col - COLS
            # of the tile of the last column nothing further can be found
            last = (col + (COLS - 1)) % self.tile_n // CHUNK
            live = self._live(col, begin, ~((Uint32(1) << Uint32(WARP - 1 - last)) - 1))
        live_begin, live_stop = stop, stop
        if live != 0:
            live_stop = col + highest(live) * CHUNK + CHUNK
            col, live = begin - COLS, Uint32(0)
            while (live == 0) & (col < live_stop):
                col = col + COLS
                rest = self.chunks - col % self.tile_n // CHUNK
                live = self._live(col, begin, (Uint32(1) << Uint32(rest)) - 1)
            live_begin = col + lowest(live) * CHUNK
        return live_begin // self.tile_n, (live_stop + (self.tile_n - 1)) // self.tile_n

    @cute.jit
    def _live(self, col: Int32, begin: Int32, enough: Uint32):
        """A bit for each of the chunks from `col` on: whether the mask keeps anything of it.

        Chunks before `begin` have 0. A chunk that crosses the last column may have 1 for bytes after it. Once a bit of
        `enough` is found, no more rows are read.
        """
        own, number, live = col + self.lane * CHUNK, self.count, Uint32(0)
        while (number > 0) & ((live & enough) == 0):
            # the last rows of a causal mask see most
            found = Uint32(0)
            for i in cutlass.range_constexpr(self.at_once):
                row = MaskRow(self.work, self.first_row + cutlass.max(number - 1 - i, 0) * self.step)
                words, bits = row.load(own, select(own >= begin, row.num_cols, Int32(NO_COLS)))
                found = found | bits | words[0] | words[1] | words[2] | words[3]
            live = live | Uint32(cute.arch.vote_ballot_sync(found != 0))
            number = number - self.at_once
        return live

    @cute.jit
    def full_tiles(self, first: Int32, end: Int32):
        """(first, end) of the first run of tiles between `first` and `end` of which the one row keeps all."""
        row, stop = MaskRow(self.work, self.first_row), end * self.tile_n
        col, full_begin, full_stop = first * self.tile_n, stop, stop
        is_done = Boolean(False)
        while (col < stop) & ~is_done:
            full = self._full(row, col)
            if (full_begin == stop) & (full != 0):
                full_begin = col + lowest(full) * CHUNK
            # the lanes from the beginning of the run on
            after = ~full & ~((Uint32(1) << Uint32(cutlass.min(cutlass.max(full_begin - col, 0) // CHUNK, 31))) - 1)
            if (full_begin < col + COLS) & (after != 0):
                full_stop = col + lowest(after) * CHUNK
                is_done = Boolean(True)
            col = col + COLS
        return (full_begin + (self.tile_n - 1)) // self.tile_n, full_stop // self.tile_n

    @cute.jit
    def _full(self, row: MaskRow, col: Int32):
        """Which of the chunks from `col` on the row keeps all of: a bit each."""
        own, all_bytes = col + self.lane * CHUNK, Uint32(ALL_BYTES)
        words, _ = row.load(own, row.num_cols)
        for w in cutlass.range_constexpr(WORDS):
            all_bytes = all_bytes & nonzero_bytes(words[w])
        is_full = (all_bytes == Uint32(ALL_BYTES)) & (own + CHUNK <= row.num_cols)
        return Uint32(cute.arch.vote_ballot_sync(is_full))


def lowest(bits) -> Int32:
    """The number of the lowest bit that is set."""
    return Int32(cute.arch.popc((bits & (~bits + 1)) - 1))


def highest(bits) -> Int32:
    """The number of the highest bit that is set."""
    return Int32(31) - Int32(cute.arch.clz(bits))

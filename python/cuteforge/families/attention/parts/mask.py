"""Which scores count: limits by length, causality and windows, and boolean masks.

A lane needs bytes all over a row of a mask: two of every eight columns. So the four lanes of a row load 16 bytes
each, as wide as loads get, turn bytes into bits, and hand the bits to each other (H200, 4x2048 d128, a mask for each
request: loads of the two bytes that a lane needs took more of L1's time than the products took).
"""

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from cuteforge.device.copy import broadcast_offset, gmem_run, prefetch
from cuteforge.device.math import NEG_INF, select, where
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.parts.softmax import HALVES
from cuteforge.families.attention.work.tile import WorkTile

CHUNK = 16  # columns that a lane loads at once
LANES = 4  # that share a row
WORDS = CHUNK // 4  # of a chunk
QUAD_LANES = 0x1C03  # of a shuffle: within groups of four
HIGH_BITS, LOW_BITS = 0x80808080, 0x7F7F7F7F  # of the bytes of a word
EVERY_OTHER = 0x5555  # bits of a half word


class ScoreMask(TraceConstant):
    """Sets the scores that do not count, to -inf if nothing else is said.

    Args:
        rows: a lane's packed rows, by block and half.
    """

    def __init__(self, work: WorkTile, rows: list, lane):
        self.traits, self.work, self.lane = work.traits, work, lane
        self.first_col = lane % 4 * 2
        self.rows = rows
        # a mask of rank 2 has one row for all
        self.has_one_row = self.traits.problem.mask_rank == 2
        num_cols = None if self.traits.problem.mask_rank == 0 else work.ops.mMask.shape[-1]
        self.num_cols = num_cols
        # Tiles that end at or before this key, and those that start at or after the other, need no limit.
        self.full_below = self._end(work.first_row)
        self.full_from = work.keys_begin(work.last_row())

    def _end(self, row):
        """The end of the keys that a row sees: columns that a mask lacks count as masked."""
        end = self.work.keys_end(row)
        return end if self.num_cols is None else cutlass.min(end, self.num_cols)

    def look_up(self, tile):
        """Load what a boolean mask says of the lane's scores of a tile of keys, by block and half; None without a mask.
        The loads start here, before the scores are computed, and so run beside that."""
        if self.traits.problem.mask_rank == 0:
            return None
        if self.has_one_row and self.traits.finds_live_tiles:
            return [[RowBits(self._bits_of_the_row(tile))]]
        keeps_bytes = self.traits.keeps_mask_bytes
        rows = [[self.rows[0][0]]] if self.has_one_row else self.rows
        if not (keeps_bytes and self.traits.mask_is_ahead):
            rows = [[found_anew(row) for row in halves] for halves in rows]
        found = [[self._row_chunks(row, tile, keeps_bytes) for row in halves] for halves in rows]
        if keeps_bytes:
            return found
        return [[RowChunks([], row.packed(), row.sources, self.lane) for row in halves] for halves in found]

    def _row_chunks(self, row, tile, prefetches: bool) -> "RowChunks":
        first, chunks = tile * self.traits.tile.tile_n, self.traits.tile.tile_n // CHUNK
        return MaskRow(self.work, row).look_up(first, chunks, self.lane, prefetches)

    @cute.jit
    def _bits_of_the_row(self, tile: Int32):
        """The lane's bits of a mask of rank 2. Tiles that are known to be kept as a whole are not loaded."""
        bits = Uint32(self._all_bits())
        first, end = self.work.full_tiles
        if tile < first or tile >= end:
            bits = self._row_chunks(self.rows[0][0], tile, False).bits()
        return bits

    @cute.jit
    def apply(self, rS: cute.Tensor, tile: Int32, found: list | None, value: cutlass.Constexpr = NEG_INF):
        """Set the scores of a tile of keys, `rS` (m_blocks, n_tiles, 4), that do not count to a value; `found` is what
        was looked up for it."""
        if cutlass.const_expr(found is not None):
            kept = self._kept(found)
            if self._keeps_less(kept):
                self._set_unkept(rS, kept, value)
        first = tile * self.traits.tile.tile_n
        if self._crosses_limit(first):
            self._set_outside(rS, first, value)

    def _kept(self, found: list) -> list:
        """A bit for each of the lane's scores, by block and half; see `kept_bit`."""
        kept = [[row.bits() for row in halves] for halves in found]
        return [halves * HALVES for halves in kept * len(self.rows)] if self.has_one_row else kept

    def _crosses_limit(self, first):
        crosses = first + self.traits.tile.tile_n > self.full_below
        return crosses | (first < self.full_from) if self.traits.problem.has_left else crosses

    def _keeps_less(self, kept: list):
        """Whether the mask leaves out any score of the warp's tile."""
        less = Boolean(False)
        for bits in (bits for halves in kept for bits in halves):
            less = less | (bits != Uint32(self._all_bits()))
        return cute.arch.vote_any_sync(less)

    def _all_bits(self) -> int:
        """What `kept_bit` numbers, of a tile that is kept as a whole."""
        return sum(1 << kept_bit(n, e) for n in range(self.traits.tile.tile_n // 8) for e in range(2))

    @cute.jit
    def _set_unkept(self, rS: cute.Tensor, kept: list, value: cutlass.Constexpr):
        for block in cutlass.range_constexpr(rS.shape[0]):
            for half in cutlass.range_constexpr(HALVES):
                bits = kept[block][half]
                for n in cutlass.range_constexpr(rS.shape[1]):
                    for e in cutlass.range_constexpr(2):
                        is_kept = (bits & Uint32(1 << kept_bit(n, e))) != 0
                        rS[block, n, 2 * half + e] = where(is_kept, rS[block, n, 2 * half + e], value)

    @cute.jit
    def _set_outside(self, rS: cute.Tensor, first: Int32, value: cutlass.Constexpr):
        for block in cutlass.range_constexpr(rS.shape[0]):
            for half in cutlass.range_constexpr(HALVES):
                # Formed here, in the few tiles that need it: kept, they would be registers that the others have no room
                # for.
                row = self.rows[block][half]
                limit = self._end(row) - (first + self.first_col)
                begin = self.work.keys_begin(row) - (first + self.first_col)
                for n in cutlass.range_constexpr(rS.shape[1]):
                    for e in cutlass.range_constexpr(2):
                        counts = n * 8 + e < limit
                        if cutlass.const_expr(self.traits.problem.has_left):
                            counts = counts & (n * 8 + e >= begin)
                        rS[block, n, 2 * half + e] = where(counts, rS[block, n, 2 * half + e], value)


def found_anew(row) -> Int32:
    """`row`, hidden from the compiler, so that it computes what depends on the row for each tile again. Values that are
    kept from tile to tile would take registers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[row])


def kept_bit(n: int, e: int) -> int:
    """Which bit tells of a lane's score `e` of the `n`-th eight columns of a tile; see `RowChunks.bits`."""
    chunk, half = divmod(n, 2)
    number, source = divmod(chunk, LANES)
    return source // 2 * 16 + source % 2 + 8 * e + 4 * number + 2 * half


class MaskRow(TraceConstant):
    """One row of a boolean mask of rank 2 (B, S), 3 (B, L, S) or 4 (B, H, L, S); outer dims of extent 1 are broadcast.

    A row that the mask lacks is masked.

    Attributes:
        address: of its first byte.
        num_cols: its columns, 0 if the mask lacks it.
        end: of the memory of the whole mask.
    """

    def __init__(self, work: WorkTile, row):
        mMask = work.ops.mMask
        token, head = work.token_and_head(row)
        index = {2: (work.batch,), 3: (work.batch, token), 4: (work.batch, head, token)}[len(mMask.shape)]
        offset, exists = broadcast_offset(mMask, index)
        start = mMask.iterator.toint()
        self.address, self.end = start + offset, start + work.counts.divisors.mask_bytes
        self.num_cols = select(exists & (row < work.num_rows), mMask.shape[-1], Int32(0))

    def look_up(self, first, chunks: int, lane, prefetches: bool) -> "RowChunks":
        """Start to read `chunks` chunks of columns from `first` on, by the four lanes one after another."""
        rounds = -(-chunks // LANES)
        words, slow_bits = [], Uint32(0)
        for number in range(rounds):
            chunk = number * LANES + lane % LANES
            # in the last round some lanes have none
            num_cols = self.num_cols if chunks % LANES == 0 else select(chunk < chunks, self.num_cols, Int32(0))
            found, bits = self.load(first + chunk * CHUNK, num_cols)
            words.append([found[i] for i in range(WORDS)])
            slow_bits = slow_bits | (bits << (WORDS * number))
        if prefetches:
            self._prefetch(first + chunks * CHUNK + lane % LANES * CHUNK)
        return RowChunks(words, slow_bits, min(chunks, LANES), lane)

    @cute.jit
    def _prefetch(self, col: Int32):
        """Bring what the next tile needs to L1."""
        if col < self.num_cols:
            prefetch(self.address + Int64(col))

    @cute.jit
    def load(self, col: Int32, num_cols: Int32):
        """The four words of a chunk of columns; what there is past the last column is not defined.

        Of the last bytes of the mask, after which its memory may end, the bits come instead, as those of round 0 in
        `RowChunks.packed`, and words of zeros.
        """
        words, bits = cute.make_rmem_tensor(WORDS, Uint32), Uint32(0)
        words.fill(0)
        if col < num_cols:
            address = self.address + Int64(col)
            start = address & Int64(-CHUNK)
            if (start == address) & (address + CHUNK <= self.end):
                found = gmem_run(Uint32, address, WORDS).load()
                for i in cutlass.range_constexpr(WORDS):
                    words[i] = found[i]
            elif start + 2 * CHUNK <= self.end:
                shifted = shifted_words(start, Int32(address - start))
                for i in cutlass.range_constexpr(WORDS):
                    words[i] = shifted[i]
            else:
                for i in cutlass.range(cutlass.min(num_cols - col, CHUNK), unroll=1):
                    if gmem_run(cutlass.Uint8, address + Int64(i), 1)[0] != 0:
                        bits = bits | (Uint32(1) << Uint32(i % 4 * 8 + i // 4))
        return words, bits


def shifted_words(start, distance) -> list:
    """The words of a chunk that begins `distance` bytes, less than a chunk, after an aligned address."""
    both = [gmem_run(Uint32, start + Int64(i * CHUNK), WORDS).load() for i in range(2)]
    words = [half[i] for half in both for i in range(WORDS)]
    for step in (2, 1):
        is_further = (distance & (4 * step)) != 0
        words = [select(is_further, words[i + step], words[i]) for i in range(len(words) - step)]
    shift = Uint32(distance % 4 * 8)
    return [funnel_right(words[i], words[i + 1], shift) for i in range(WORDS)]


def nonzero_bytes(word) -> Uint32:
    """The highest bit of each byte that is not 0."""
    return (((word & Uint32(LOW_BITS)) + Uint32(LOW_BITS)) | word) & Uint32(HIGH_BITS)


def funnel_right(low, high, shift) -> Uint32:
    """The lower word of 64 bits shifted right by up to 31."""
    instruction = "shf.r.clamp.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return cute.arch.inline_ptx(instruction, write_only_types=[Uint32], read_only_args=[low, high, shift])


class RowBits(TraceConstant):
    """The bits of a row, where they are known already; as `RowChunks.bits`."""

    def __init__(self, bits):
        self._bits = bits

    def bits(self) -> Uint32:
        return self._bits


class RowChunks(TraceConstant):
    """Bytes of a row of a mask that the four lanes of a row have loaded.

    Args:
        words: by round, what a lane has loaded.
        bits: what is known as bits already, as `packed`.
        sources: lanes that have loaded anything.
    """

    def __init__(self, words: list, bits, sources: int, lane):
        self.words, self.known_bits, self.sources, self.lane = words, bits, sources, lane

    def packed(self) -> Uint32:
        """A bit for each byte that the lane has loaded: byte j of word w of round t becomes bit ``8 j + 4 t + w``."""
        packed = self.known_bits
        for number, words in enumerate(self.words):
            for i, word in enumerate(words):
                packed = packed | (nonzero_bytes(word) >> (7 - (WORDS * number + i)))
        return packed

    def bits(self) -> Uint32:
        """Bit `kept_bit(n, e)` is 1 if the lane's score `e` of the `n`-th eight columns is kept.

        Lane q needs, of each source lane, bytes ``2 (q % 2)`` and the next of words ``q // 2`` and ``2 + q // 2``.
        """
        packed, kept = self.packed(), Uint32(0)
        shift = Uint32(self.lane % 2 * 16 + self.lane % LANES // 2)
        for source in range(self.sources):
            bits = cute.arch.shuffle_sync(packed, Int32(source), mask_and_clamp=QUAD_LANES) >> shift
            kept = kept | ((bits & Uint32(EVERY_OTHER)) << (source // 2 * 16 + source % 2))
        return kept

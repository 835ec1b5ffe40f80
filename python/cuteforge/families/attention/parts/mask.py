"""Which scores count: limits by length, causality and windows, and boolean masks."""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from cuteforge.device.copy import gmem_run
from cuteforge.device.math import NEG_INF, select, where
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.parts.softmax import HALVES
from cuteforge.families.attention.work.tile import WorkTile


class ScoreMask(TraceConstant):
    """Sets the scores that do not count to -inf.

    Args:
        rows: a lane's packed rows, by block and half.
    """

    def __init__(self, work: WorkTile, rows: list, lane):
        self.traits, self.work = work.traits, work
        self.first_col = lane % 4 * 2
        self.rows = rows
        # Tiles that end at or before this key, and those that start at or after the other, need no limit.
        self.full_below = work.keys_end(work.first_row)
        self.full_from = work.keys_begin(work.last_row())

    def look_up(self, tile):
        """Which of a lane's scores of a tile of keys a boolean mask keeps: by block and half a bit for each column;
        None without a mask. All of it is read here, so that it is on its way while scores are computed."""
        if self.traits.problem.mask_rank == 0:
            return None
        first, count = tile * self.traits.tile.tile_n + self.first_col, self.traits.tile.tile_n // 4
        kept = [[MaskRow(self.work, row).bits(first, count) for row in rows] for rows in self._mask_rows()]
        # a mask of rank 2 has one row for all
        return [halves * HALVES for halves in kept * len(self.rows)] if self.traits.problem.mask_rank == 2 else kept

    def _mask_rows(self) -> list:
        return [[self.rows[0][0]]] if self.traits.problem.mask_rank == 2 else self.rows

    @cute.jit
    def apply(self, rS: cute.Tensor, tile: Int32, kept: list | None):
        """Mask the scores of a tile of keys, `rS` (m_blocks, n_tiles, 4); `kept` is what was looked up for it."""
        first = tile * self.traits.tile.tile_n
        if self._crosses_limit(first) | self._keeps_less(kept):
            self._set(rS, first, kept)

    def _crosses_limit(self, first):
        crosses = first + self.traits.tile.tile_n > self.full_below
        return crosses | (first < self.full_from) if self.traits.problem.has_left else crosses

    def _keeps_less(self, kept: list | None):
        """Whether the mask leaves out any score of the warp's tile."""
        if kept is None:
            return Boolean(False)
        all_bits = Int32((1 << self.traits.tile.tile_n // 4) - 1) if self.traits.tile.tile_n < 128 else Int32(-1)
        less = Boolean(False)
        for bits in (bits for halves in kept for bits in halves):
            less = less | (bits != all_bits)
        return cute.arch.vote_any_sync(less)

    @cute.jit
    def _set(self, rS: cute.Tensor, first: Int32, kept: list | None):
        for block in cutlass.range_constexpr(rS.shape[0]):
            for half in cutlass.range_constexpr(HALVES):
                # Formed here, in the few tiles that need it: kept, they would be registers that the others have no room
                # for.
                row = self.rows[block][half]
                limit = self.work.keys_end(row) - (first + self.first_col)
                begin = self.work.keys_begin(row) - (first + self.first_col)
                for n in cutlass.range_constexpr(rS.shape[1]):
                    for e in cutlass.range_constexpr(2):
                        counts = n * 8 + e < limit
                        if cutlass.const_expr(self.traits.problem.has_left):
                            counts = counts & (n * 8 + e >= begin)
                        if cutlass.const_expr(kept is not None):
                            counts = counts & ((kept[block][half] & (1 << (2 * n + e))) != 0)
                        rS[block, n, 2 * half + e] = where(counts, rS[block, n, 2 * half + e], NEG_INF)


class MaskRow(TraceConstant):
    """One row of a boolean mask of rank 2 (B, S), 3 (B, L, S) or 4 (B, H, L, S); outer dims of extent 1 are broadcast.

    A row that the mask lacks is masked.
    """

    def __init__(self, work: WorkTile, row):
        mMask = work.ops.mMask
        token, head = work.token_and_head(row)
        index = {2: (work.batch,), 3: (work.batch, token), 4: (work.batch, head, token)}[len(mMask.shape)]
        address, exists = mMask.iterator.toint(), Boolean(row < work.num_rows)
        for i, extent, stride in zip(index, mMask.shape, mMask.stride):
            address = address + Int64(select(extent == 1, Int32(0), i)) * Int64(stride)
            exists = exists & ((extent == 1) | (i < extent))
        self.address, self.is_wide = address, work.traits.v_tiles > 24
        self.num_cols = select(exists, mMask.shape[len(mMask.shape) - 1], Int32(0))

    @cute.jit
    def bits(self, first: Int32, count: int):
        """Which of a lane's `count` columns, pairs 8 apart from `first` on, are kept: one bit each, column by
        column."""
        bits = Int32(0)
        # All loads at once take more registers than results of a wide head leave.
        unroll = 2 if self.is_wide else count // 2
        if ((self.address & 1) == 0) & (self.num_cols % 2 == 0):
            for n in cutlass.range(count // 2, unroll=unroll):
                if first + n * 8 < self.num_cols:
                    pair = Int32(gmem_run(cutlass.Uint16, self.address + Int64(first + n * 8), 1)[0])
                    bits = bits | (self._pair_bits(pair) << (2 * n))
        else:
            for i in cutlass.range(count, unroll=2 if self.is_wide else count):
                col = first + i // 2 * 8 + i % 2
                if col < self.num_cols:
                    if gmem_run(cutlass.Uint8, self.address + Int64(col), 1)[0] != 0:
                        bits = bits | (Int32(1) << i)
        return bits

    def _pair_bits(self, pair):
        """Two bits for two bytes."""
        return Int32(select((pair & 255) != 0, Int32(1), Int32(0))) | Int32(select(pair > 255, Int32(2), Int32(0)))

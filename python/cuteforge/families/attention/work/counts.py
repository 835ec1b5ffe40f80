"""Sizes of a launch that shapes and lengths give: requests, heads, rows, keys, and the work tiles they make."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.math import fast_divisor, select
from cuteforge.device.traced import Operands as NamedOperands
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.operands import DEVICE_NAMES
from cuteforge.families.attention.work.band import Band
from cuteforge.families.attention.work.offsets import PackedTiles, span
from cuteforge.families.attention.work.traits import WorkTraits

MAX_SEARCH = 64  # steps of the host
# Up to so many bytes of keys and values are read with a hint that they are read once: 34 MB took 18.4 us with it and
# 19.6 without, 270 MB as long with it as without, 1 GB 264 us with it and 255 without (H200).
LITTLE_BYTES = 192 * 2**20
L2_BYTES = 24 * 2**20  # for keys and values that are read again and again: half of the L2 of most GPUs


class Operands(NamedOperands):
    """The operands of a kernel: its tensors by their names in `operands.ROWS`, mQ and so on, and `left`, `right` and
    `softcap`. None for those that the op does not have."""

    SCALARS = ("left", "right", "softcap")

    def __init__(self, *given):
        super().__init__((*DEVICE_NAMES, *self.SCALARS), given)


class Divisors(NamedTuple):
    """Sizes that kernels divide by, prepared by the host.

    Attributes:
        group_size: query heads of a KV head.
        heads: KV heads.
        row_tiles: of a request; of packed queries in all.
        together: pairs of a request and a KV head in a set; see `Counts`.
        set: work tiles of a set.
        page: tokens of a page; None where they are not a number of the launch.
        mask_bytes: from the first byte of a mask to the end of its last; no divisor. None without a mask.
    """

    group_size: Any
    heads: Any
    row_tiles: Any
    together: Any
    set: Any
    page: Any
    mask_bytes: Any


class Counts(TraceConstant):
    """Sizes that shapes give: requests, heads, and the work tiles of a grid.

    Args:
        divisors: in a kernel, what the host has prepared.

    Attributes:
        requests, kv_heads, group_size, tokens: of requests, KV heads, query heads of one, query tokens.
        row_tiles: of a request; of packed queries in all.
        together: pairs of a request and a KV head that are worked on at one time, a set, so that their keys and values
            stay in L2.
        sets: of batched queries, in a kernel.
        work_tiles: their number; of packed queries some are empty.
    """

    def __init__(self, traits: WorkTraits, ops: Operands, divisors: Divisors | None = None):
        self.traits, self.ops, self.divisors = traits, ops, divisors
        q_shape, k_shape = ops.mQ.shape, ops.mK.shape
        self.kv_heads = k_shape[len(k_shape) - 2]
        self.group_size = (
            q_shape[len(q_shape) - 2] // self.kv_heads if divisors is None else divisors.group_size.divisor
        )
        tile_m = traits.tile.tile_m
        if traits.problem.packs_queries:
            self.requests, self.tokens = ops.mCuSeqlensQ.shape[0] - 1, q_shape[0]
            self.row_tiles = self.packed_rows().most_tiles()
            self.together, self.work_tiles = Int32(1), self.row_tiles * self.kv_heads
        else:
            self.requests = q_shape[0]
            self.tokens = q_shape[1] if traits.problem.queries == "batch" else Int32(1)
            self.row_tiles = (self.tokens * self.group_size + tile_m - 1) // tile_m
            pairs = self.requests * self.kv_heads
            self.together = self._pairs_together(pairs) if divisors is None else divisors.together.divisor
            self.sets = None if divisors is None else divmod(pairs, divisors.together)[0]
            self.work_tiles = pairs * self.row_tiles

    def packed_rows(self) -> PackedTiles:
        """Where the row tiles of packed queries are."""
        return PackedTiles(self.ops.mCuSeqlensQ, self.tokens, self.group_size, self.traits.tile.tile_m)

    @cute.jit
    def _pairs_together(self, pairs: Int32):
        """The largest part of all pairs that L2 holds, all where nothing is read twice. One that leaves a rest would
        leave CTAs without work."""
        together = cutlass.max(pairs, 1)
        if cutlass.const_expr(not self.traits.reads_keys_once):
            keys_in_l2 = L2_BYTES // sum(self.traits.row_bytes)
            most = cutlass.max(keys_in_l2 // cutlass.max(self.most_keys(), 1), 1)
            together = cutlass.min(together, most)
            least = cutlass.max(together - MAX_SEARCH, 1)
            while pairs % together != 0 and together > least:
                together = together - 1
            if pairs % together != 0:
                together = Int32(1)
        return together

    def make_divisors(self) -> Divisors:
        """What kernels divide by, prepared by the host."""
        page = fast_divisor(self.ops.mK.shape[1]) if self.traits.problem.has_page_size else None
        sizes = self.group_size, self.kv_heads, self.row_tiles, self.together, self.together * self.row_tiles
        return Divisors(*map(fast_divisor, sizes), page, self._mask_bytes())

    def _mask_bytes(self):
        if self.traits.problem.mask_rank == 0:
            return None
        size = Int64(1)
        for extent, stride in zip(self.ops.mMask.shape, self.ops.mMask.stride):
            size = size + Int64(cutlass.max(extent - 1, 0)) * Int64(stride)
        return size

    def most_keys(self):
        """Keys that a request can have, by shape."""
        problem, ops = self.traits.problem, self.ops
        if problem.packs_keys:
            return ops.mK.shape[0]
        if not problem.is_paged:
            return ops.mK.shape[1]
        page_size = ops.mK.shape[1] if problem.has_page_size else Int32(1)
        most = Int64(ops.mPageTable.shape[1]) * Int64(page_size)
        return Int32(select(most > Int64(2**31 - 1), Int64(2**31 - 1), most))

    def reads_little(self):
        """Whether the keys and values of all requests are at most `LITTLE_BYTES`, as far as shapes tell."""
        keys = Int64(self.requests) * Int64(self.kv_heads) * Int64(self.most_keys())
        return keys <= LITTLE_BYTES // sum(self.traits.row_bytes)

    def band(self, tokens, keys) -> Band:
        """The band of scores of a request of so many query tokens and keys."""
        return Band(self.traits.problem, self.ops.left, self.ops.right, tokens, keys)

    @cute.jit
    def keys_of(self, batch: Int32):
        """(first key in packed keys, number of keys) of a request: never more than the operands hold, none past the
        last request."""
        first, length = Int32(0), Int32(0)
        if batch < self.requests:
            first, length = self._keys_of(batch)
        return first, length

    @cute.jit
    def _keys_of(self, batch: Int32):
        problem, ops = self.traits.problem, self.ops
        first = Int32(0)
        length = self.most_keys()
        if cutlass.const_expr(problem.packs_keys):
            first, length = span(ops.mCuSeqlensK, batch, length)
        if cutlass.const_expr(problem.takes("seqlens_k")):
            length = cutlass.min(ops.mSeqlensK[batch], length)
        elif cutlass.const_expr(problem.takes("kv_indptr")):
            begin, end = ops.mKvIndptr[batch], ops.mKvIndptr[batch + 1]
            length = select((begin >= 0) & (end >= begin), cutlass.min(end - begin, length), Int32(0))
        if cutlass.const_expr(problem.takes("page_table_rows")):
            row = ops.mPageTableRows[batch]
            length = select((row >= 0) & (row < ops.mPageTable.shape[0]), length, Int32(0))
        return first, cutlass.max(length, 0)

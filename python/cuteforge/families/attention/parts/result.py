"""Where results go: the output, or a part in the workspace or a cluster; and how the key warps of a CTA join theirs."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cuteforge.device.copy import gmem_run, smem_floats
from cuteforge.device.math import LOG2_E, NEG_INF, exp2_fast, fma_rn, rcp_rn, select
from cuteforge.device.mma_sm80 import pack_pair
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward.config import PARTS, Traits
from cuteforge.families.attention.parts.softmax import HALVES, finite_or_zero, log_sum_exp
from cuteforge.families.attention.work.counts import Counts
from cuteforge.families.attention.work.shares import WHOLE
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.families.attention.work.traits import ROW_BLOCK
from cuteforge.runtime.arch import WARP

# What a key warp leaves of a row beside its sums: its largest score, and the sums of its weights as rounded and before.
MAX, WEIGHT, TOTAL = range(3)
STATS = 3


class Results(TraceConstant):
    """The rows of one work tile as a CTA leaves them: final, or a part of its own.

    Args:
        split: the split that the CTA works on, a `Split`, where row tiles are shared, else None.
        part: which of the CTA's parts, WHOLE for final rows.
        cluster: an `InCluster`; None where kernels have no clusters.
    """

    def __init__(self, work: WorkTile, split=None, part=None, cluster=None):
        self.traits, self.work, self.part, self.cluster = work.traits, work, part, cluster
        if split is not None:
            self.split, self.partials = split.index, Partials(work.counts, split.count)

    @cute.jit
    def store_fragments(self, rows: list, softmax, rO: cute.Tensor, rWeight: cute.Tensor, lane: Int32):
        """Divide the sums by the weights and store them: of final rows, of which a warp has all keys."""
        mOut = self.work.ops.mOut
        for block in cutlass.range_constexpr(self.traits.tile.m_blocks):
            for half in cutlass.range_constexpr(HALVES):
                row = rows[block][half]
                total = softmax.row_sum(block, half) if cutlass.const_expr(self.traits.keeps_sums) else Float32(0.0)
                largest, weight = softmax.rMax[block, half], rWeight[block, 0, 2 * half]
                factor, shift, total = finish_row(self.sink(row), largest, softmax.factor, weight, total)
                lse = log_sum_exp(shift, total)
                words = [
                    pack_pair(mOut.element_type, *(rO[block, n, 2 * half + e] * factor for e in range(2)))
                    for n in range(self.traits.v_tiles)
                ]
                chunks = [exchange_in_quad(words[n : n + 4], lane) for n in range(0, len(words) - 3, 4)]
                if row < self.work.num_rows:
                    address = self.work.query_address(mOut, row)
                    for i in cutlass.range_constexpr(len(chunks)):
                        store_words(address + Int64((4 * i + lane % 4) * 16), chunks[i])
                    for n in cutlass.range_constexpr(4 * len(chunks), len(words)):
                        store_words(address + Int64(n * 16 + lane % 4 * 4), [words[n]])
                    if lane % 4 == 0:
                        store_lse(self.work, row, lse)

    @cute.jit
    def wait_for_peers(self):
        """Before anything is stored, by all threads."""
        if cutlass.const_expr(self.cluster is not None):
            if self.cluster.joins:
                self.cluster.part.wait_for_peers()

    @cute.jit
    def store(self, row: Int32, col: Int32, values: list):
        """Store adjacent columns of a row: as they are in a part, else rounded."""
        if cutlass.const_expr(self.traits.splits):
            if self.part != WHOLE:
                self._store_part(row, col, values)
            else:
                self._store_rounded(row, col, values)
        else:
            self._store_rounded(row, col, values)

    def sink(self, row):
        """What joins the sums of a row besides its keys, if anything: nothing joins those of a part."""
        sink = self.work.sink(row)
        if sink is None or not self.traits.splits:
            return sink
        return Float32(select(self.part == WHOLE, sink, Float32(NEG_INF)))

    @cute.jit
    def _store_part(self, row: Int32, col: Int32, values: list):
        if cutlass.const_expr(self.cluster is not None):
            if self.cluster.joins:
                self.cluster.part.store(row, col, values)
            else:
                self._store_floats(row, col, values)
        else:
            self._store_floats(row, col, values)

    def _store_floats(self, row, col, values: list) -> None:
        store_floats(self.partials.row_address(self._index(row)) + Int64(col * 4), values)

    def _index(self, row):
        return self.partials.index(self.split, self.work.head, self.part, row - self.work.first_row)

    def _store_rounded(self, row, col, values: list) -> None:
        mOut = self.work.ops.mOut
        store_rounded(mOut.element_type, self.work.query_address(mOut, row) + Int64(col * 2), values)

    @cute.jit
    def store_lse(self, row: Int32, lse: Float32):
        if cutlass.const_expr(self.traits.splits):
            if self.part != WHOLE:
                self._store_part_lse(row, lse)
            else:
                store_lse(self.work, row, lse)
        else:
            store_lse(self.work, row, lse)

    @cute.jit
    def _store_part_lse(self, row: Int32, lse: Float32):
        gLse = gmem_run(Float32, self.partials.lse_address(self._index(row)), 1)
        if cutlass.const_expr(self.cluster is not None):
            if self.cluster.joins:
                self.cluster.part.store_lse(row, lse)
            else:
                gLse[0] = lse
        else:
            gLse[0] = lse


@cute.jit
def store_nothing(work: WorkTile, row: Int32):
    """What a packed row gets that sees no key."""
    if row < work.num_rows:
        address = work.query_address(work.ops.mOut, row)
        for chunk in cutlass.range(work.traits.v_tiles, unroll=1):
            store_words(address + Int64(chunk * 16), [cutlass.Uint32(0)] * 4)
        store_lse(work, row, _blind_lse(work, row))


def _blind_lse(work: WorkTile, row):
    sink = work.sink(row)
    return Float32(NEG_INF) if sink is None else sink


def store_lse(work: WorkTile, row, lse) -> None:
    """Store the log-sum-exp of a packed row, where it is wanted."""
    if work.traits.problem.has_lse:
        work.ops.mLse[work.lse_index(row)] = lse


class Partials(TraceConstant):
    """The workspace: two parts for each CTA, fp32 rows of results, after them their log-sum-exps."""

    def __init__(self, counts: Counts, splits):
        tile_m, self.v_dim = counts.traits.tile.tile_m, counts.traits.problem.v_dim
        self.tile_m, self.kv_heads = tile_m, counts.kv_heads
        self.base = counts.ops.mWorkspace.iterator.toint()
        self.lse_base = self.base + Int64(splits * counts.kv_heads) * (PARTS * tile_m * self.v_dim * 4)

    def index(self, split, head, part, row):
        """Of a row of a tile in one part of a CTA."""
        return Int64((split * self.kv_heads + head) * PARTS + part) * self.tile_m + Int64(row)

    def row_address(self, index):
        return self.base + index * (self.v_dim * 4)

    def lse_address(self, index):
        return self.lse_base + index * 4


class KeyWarpJoin(TraceConstant):
    """Results of the key warps in shared memory: for each of them and each row the sums, the maximum, and the two sums
    of weights."""

    def __init__(self, traits: Traits, address):
        self.traits, self.address = traits, address
        tile = traits.tile
        self.stats = address + tile.key_warps * tile.tile_m * traits.join_pitch * 4

    def _row(self, key_warp, row):
        return self.address + (key_warp * self.traits.tile.tile_m + row) * (self.traits.join_pitch * 4)

    def _stats(self, key_warp, row):
        return self.stats + (key_warp * self.traits.tile.tile_m + row) * (STATS * 4)

    @cute.jit
    def put(self, key_warp: Int32, row_warp: Int32, softmax, rO: cute.Tensor, rWeight: cute.Tensor, lane: Int32):
        """Leave a warp's rows."""
        tile = self.traits.tile
        for block in cutlass.range_constexpr(tile.m_blocks):
            for half in cutlass.range_constexpr(HALVES):
                row = (row_warp * tile.m_blocks + block) * ROW_BLOCK + half * 8 + lane // 4
                total = softmax.row_sum(block, half) if cutlass.const_expr(self.traits.keeps_sums) else Float32(0.0)
                for n in cutlass.range_constexpr(self.traits.v_tiles):
                    run = smem_floats(self._row(key_warp, row) + (n * 8 + lane % 4 * 2) * 4, 2)
                    run[0], run[1] = rO[block, n, 2 * half], rO[block, n, 2 * half + 1]
                if lane % 4 == 0:
                    stats = smem_floats(self._stats(key_warp, row), 1, STATS)
                    stats[MAX], stats[WEIGHT] = softmax.rMax[block, half], rWeight[block, 0, 2 * half]
                    stats[TOTAL] = total

    @cute.jit
    def store(self, results: Results, work: WorkTile, factor: Float32, thread: Int32):
        """Join the key warps row by row, four columns a thread, and store."""
        tile, runs = self.traits.tile, self.traits.problem.v_dim // 4
        rows = cutlass.min(work.num_rows - work.first_row, tile.tile_m)
        for i in cutlass.range(thread, rows * runs, WARP * tile.num_warps, unroll=1):
            row, col = i // runs, i % runs * 4
            weights, largest = self._weights(row, factor)
            rSum = cute.make_rmem_tensor(4, Float32)
            rSum.fill(0.0)
            total, exact = Float32(0.0), Float32(0.0)
            for key_warp in cutlass.range_constexpr(tile.key_warps):
                part = smem_floats(self._row(key_warp, row) + col * 4, 4)
                stats = smem_floats(self._stats(key_warp, row), 1, STATS)
                total = fma_rn(weights[key_warp], stats[WEIGHT], total)
                exact = fma_rn(weights[key_warp], stats[TOTAL], exact)
                for c in cutlass.range_constexpr(4):
                    rSum[c] = fma_rn(weights[key_warp], part[c], rSum[c])
            scale, shift, exact = finish_row(results.sink(work.first_row + row), largest, factor, total, exact)
            results.store(work.first_row + row, col, [rSum[c] * scale for c in range(4)])
            if cutlass.const_expr(self.traits.keeps_sums):
                if col == 0:
                    results.store_lse(work.first_row + row, log_sum_exp(shift, exact))

    def _weights(self, row, factor):
        """What the sums of each key warp are scaled by, and the largest score of all of them."""
        maxima = [
            smem_floats(self._stats(key_warp, row), 1, STATS)[MAX] for key_warp in range(self.traits.tile.key_warps)
        ]
        largest = maxima[0]
        for other in maxima[1:]:
            largest = cute.arch.fmax(largest, other)
        shift = finite_or_zero(largest) * factor
        return [exp2_fast(fma_rn(m, factor, -shift)) for m in maxima], largest


def finish_row(sink, largest, factor, weight, total) -> tuple:
    """(what the sums of a row are multiplied by, and its log-sum-exp as `log_sum_exp` takes it).

    Args:
        sink: one more logit, or None.
        largest: score; times `factor` a power of two.
        weight, total: sums of the weights relative to that, as rounded and before.
    """
    if sink is None:
        return reciprocal_or_zero(weight), finite_or_zero(largest) * factor, total
    # a factor may be so small that it times -inf is NaN
    of_keys = Float32(select(largest == NEG_INF, Float32(NEG_INF), largest * factor))
    of_sink = sink * LOG2_E
    shift = finite_or_zero(cute.arch.fmax(of_keys, of_sink))
    of_keys, of_sink = exp2_fast(of_keys - shift), exp2_fast(of_sink - shift)
    weight, total = (fma_rn(x, of_keys, of_sink) for x in (weight, total))
    return reciprocal_or_zero(weight) * of_keys, shift, total


def reciprocal_or_zero(total):
    """1 / total; 0 for a row that has seen no key."""
    return Float32(select(total == 0.0, Float32(0.0), rcp_rn(total)))


def exchange_in_quad(words: list, lane) -> list:
    """Four words of each of four adjacent lanes, transposed: lane i gets the i-th word of all. Where a lane has two
    columns of each block of eight, it then has all of one block: 16 bytes to store at a time."""
    words = list(words)
    for distance, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        upper = (lane & distance) != 0
        for a, b in pairs:
            other = cute.arch.shuffle_sync_bfly(select(upper, words[a], words[b]), distance)
            words[a], words[b] = select(upper, other, words[a]), select(upper, words[b], other)
    return words


def store_rounded(dtype, address, values: list) -> None:
    """Store an even number of adjacent values, each rounded once, at an address aligned to their size."""
    store_words(address, [pack_pair(dtype, low, high) for low, high in zip(values[::2], values[1::2])])


def store_words(address, words: list) -> None:
    run = gmem_run(cutlass.Uint32, address, len(words))
    rX = cute.make_rmem_tensor(len(words), cutlass.Uint32)
    for i, word in enumerate(words):
        rX[i] = word
    run.store(rX.load())


def store_floats(address, values: list) -> None:
    rX = cute.make_rmem_tensor(len(values), Float32)
    for i, value in enumerate(values):
        rX[i] = value
    gmem_run(Float32, address, len(values)).store(rX.load())

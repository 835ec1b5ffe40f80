"""The portable forward kernel: decode and prefill, dense, ragged and paged, from one source.

The warps that read the same keys stream their share of the keys and values through a ring of their own
(keys/ring.py). A warp multiplies its query rows, held in registers, with a tile of keys, turns the scores into weights
(parts/softmax.py), and adds up the weighted values. The weights of a row are summed by the same matrix instructions
that multiply them with the values, as rounded, so that equal values come out exact. The key warps of a CTA meet in
shared memory, CTAs that share the keys of a work tile in a workspace (parts/combine.py), or in the shared memory of a
cluster (parts/cluster.py).
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.device.copy import ReadOnce, prefetch, row_address
from cuteforge.device.math import select
from cuteforge.device.mma_sm80 import OperandLanes, ldmatrix_x4, left_operand, mma_16x8x16, ones_operand
from cuteforge.device.traced import TraceConstant, named_kernel
from cuteforge.families.attention.forward.config import SMEM_ALIGNMENT, Barrier, Traits
from cuteforge.families.attention.forward.entry import Entry, build_entry
from cuteforge.families.attention.keys.ring import TokenRing
from cuteforge.families.attention.parts.cluster import ClusterPart, InCluster
from cuteforge.families.attention.parts.combine import Combine
from cuteforge.families.attention.parts.queries import load_queries
from cuteforge.families.attention.parts.result import KeyWarpJoin, Results
from cuteforge.families.attention.parts.scores import weighing_factor
from cuteforge.families.attention.parts.scoring import LookedUp, Scoring
from cuteforge.families.attention.parts.softmax import HALVES, OnlineSoftmax
from cuteforge.families.attention.work.counts import Counts, Divisors, Operands
from cuteforge.families.attention.work.limits import Limits
from cuteforge.families.attention.work.plan import make_plan, may_cut_row_tiles
from cuteforge.families.attention.work.shares import BEGUN, CONTINUED, WHOLE, Shares, Split, SplitPlan, first_granule
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.families.attention.work.traits import ROW_BLOCK
from cuteforge.runtime.arch import WARP
from cuteforge.runtime.build import Build

PAGES_OF_SECTOR = 8  # page numbers in 32 bytes, what L1 fetches
ALL_GRANULES = 1 << 24


class Thread(NamedTuple):
    """A thread of the CTA."""

    lane: Any
    warp: Any


class KeyTiles(NamedTuple):
    """The tiles of keys of one warp: `count` of them from `first` on, `key_warps` apart."""

    first: Any
    count: Any
    key_warp: Any


class WarpRows(TraceConstant):
    """The rows of a warp, and what it sums up for them.

    Attributes:
        first: the warp's first packed row.
        of_lane: the lane's packed rows, by block and half.
        rO: (m_blocks, v_tiles, 4) sums of weighted values.
        rWeight: (m_blocks, 1, 4) sums of the weights as rounded.
        query_address: of the warp's part of shared memory, if it has one.
    """

    def __init__(self, traits: Traits, first, query_address, lane):
        self.first, self.query_address = first, query_address
        blocks = range(traits.tile.m_blocks)
        self.of_lane = [[first + (i * ROW_BLOCK + half * 8) + lane // 4 for half in range(HALVES)] for i in blocks]
        self.rO = cute.make_rmem_tensor((traits.tile.m_blocks, traits.v_tiles, 4), Float32)
        self.rWeight = cute.make_rmem_tensor((traits.tile.m_blocks, 1, 4), Float32)
        self.rO.fill(0.0)
        self.rWeight.fill(0.0)


class Weighing(TraceConstant):
    """From the scores of a tile of keys to weights."""

    def __init__(self, work: WorkTile, rows: WarpRows, softmax: OnlineSoftmax, scale, lane):
        self.scoring, self.softmax, self.rows = Scoring(work, rows.of_lane, scale, lane), softmax, rows

    def apply(self, rS, tile, found: LookedUp) -> None:
        self.scoring.apply(rS, tile, found)
        self.softmax.update(rS, self.rows.rO, self.rows.rWeight)


@named_kernel("attention")
class Attention(Entry):
    """The kernel for one `Traits`."""

    @cute.jit
    def launch(self, given: tuple, counts: Counts, limits: Limits, scale: Float32, stream: cuda.CUstream):
        divisors = counts.make_divisors()
        if cutlass.const_expr(self.traits.splits):
            plan = make_plan(counts, limits)
            self._launch(given, divisors, plan, scale, plan.splits * counts.kv_heads, stream)
            if may_cut_row_tiles(counts, plan):
                Combine(self.traits).launch(given, divisors, plan, counts, stream)
        else:
            self._launch(given, divisors, None, scale, counts.work_tiles, stream)

    def _launch(self, given: tuple, divisors: Divisors, plan: SplitPlan | None, scale, num_ctas, stream) -> None:
        clusters = {"cluster": (Int32(1) << plan.log_cluster, 1, 1)} if self.traits.cluster else {}
        self.kernel(given, divisors, plan, scale).launch(
            grid=(num_ctas, 1, 1),
            block=(WARP * self.traits.tile.num_warps, 1, 1),
            **clusters,
            min_blocks_per_mp=self.traits.tile.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, given: tuple, divisors: Divisors, plan: SplitPlan | None, scale: Float32):
        if cutlass.const_expr(self.traits.dependent_launch):
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        thread = Thread(tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP))
        counts = Counts(self.traits, Operands(*given), divisors)
        smem = cutlass.memory.SmemAllocator()
        sAddress = smem.allocate(self.traits.smem_bytes - SMEM_ALIGNMENT, byte_alignment=SMEM_ALIGNMENT).toint()
        if cutlass.const_expr(self.traits.splits):
            self._attend_share(counts, plan, bidx, sAddress, scale, tidx)
        else:
            work = WorkTile.at(counts, bidx, thread.lane)
            self._attend(work, Results(work), Int32(0), Int32(ALL_GRANULES), sAddress, scale, thread)

    @cute.jit
    def _attend_share(self, counts: Counts, plan: SplitPlan, bidx: Int32, sAddress: Int32, scale: Float32, tidx: Int32):
        """Go through the row tiles that the share of a CTA touches, or, in a cluster, do its piece of a row tile and
        join the pieces."""
        traits, log_cluster = self.traits, plan.log_cluster
        thread = Thread(tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP))
        shares = Shares(counts, plan, thread.lane)
        rank = bidx & ((Int32(1) << log_cluster) - 1)
        number, head = divmod(bidx >> log_cluster, counts.divisors.heads)
        split = (number << log_cluster) + rank
        if cutlass.const_expr(traits.problem.is_paged and not traits.problem.takes("page_table_rows")):
            self._fetch_pages(counts, shares, split, tidx)
        batch, row_tile, granule, remaining, part = shares.start_of_share(split)
        if cutlass.const_expr(traits.cluster > 0):
            if log_cluster > 0:
                work = WorkTile(counts, batch, head, row_tile)
                self._in_cluster(log_cluster, work, sAddress, rank).part.begin(tidx)
        going = remaining > 0 or shares.pieces > 0
        while going:
            granules = shares.granules_of(batch)
            end = cutlass.min(granules, granule + remaining)
            if shares.pieces <= 1:
                part = select(granule > 0, Int32(CONTINUED), select(end < granules, Int32(BEGUN), Int32(WHOLE)))
            work = WorkTile(counts, batch, head, row_tile)
            cluster = self._in_cluster(log_cluster, work, sAddress, rank)
            results = Results(work, Split(plan.splits, split), part, cluster)
            self._attend(work, results, granule, end, sAddress, scale, thread)
            remaining = remaining - (end - granule)
            going = remaining > 0
            granule = Int32(0)
            row_tile = row_tile + 1
            if row_tile == counts.row_tiles:
                row_tile = Int32(0)
                batch = batch + 1
            if going:
                # the rings are filled again only when all have read what lies there
                cute.arch.sync_threads()
        if cutlass.const_expr(traits.cluster > 0):
            if log_cluster > 0:
                # looked for again: kept, it would be registers that the loop has no room for
                batch, row_tile = divmod(number, counts.divisors.row_tiles)
                work = WorkTile(counts, batch, head, row_tile)
                self._in_cluster(log_cluster, work, sAddress, rank).part.join(tidx)

    @cute.jit
    def _fetch_pages(self, counts: Counts, shares: Shares, split: Int32, tidx: Int32):
        """Page numbers of a piece of a row tile come to L1 while the length of the request is looked up. If it has all
        keys that its row has room for, they are the piece's first; else what is read may be of no use."""
        if shares.pieces > 0 and tidx < WARP:
            mTable = counts.ops.mPageTable
            num_pages, row = mTable.shape[1], shares.request_of(split)
            piece = split - split // shares.plan.pieces_divisor * shares.pieces
            page = piece * (num_pages // shares.pieces) + tidx * PAGES_OF_SECTOR
            if row < mTable.shape[0] and page < num_pages:
                prefetch(row_address(mTable, (row, page)))

    def _in_cluster(self, log_cluster, work: WorkTile, sAddress, rank) -> InCluster | None:
        """As `Results` takes it."""
        traits = self.traits
        if not traits.cluster:
            return None
        address = sAddress + (traits.streams_bytes + traits.query_bytes)
        return InCluster(log_cluster > 0, ClusterPart(work, address, rank, log_cluster))

    @cute.jit
    def _attend(
        self,
        work: WorkTile,
        results,
        granule: Int32,
        end_granule: Int32,
        sAddress: Int32,
        scale: Float32,
        thread: Thread,
    ):
        """One warp's part of a work tile: its rows, and of the keys of some granules its share. They are counted from
        the first one that is seen."""
        tile = self.traits.tile
        lane, warp = thread
        key_warp, row_warp = warp // tile.row_warps, warp % tile.row_warps
        shape = self.traits.ring
        source = work.source()
        hint = ReadOnce(work.counts.reads_little()) if self.traits.reads_keys_once else None
        ring = TokenRing(shape, sAddress + key_warp * shape.bytes, row_warp, lane, source, work.k_len, hint)
        ring.clear_pads()
        if cutlass.const_expr(self.traits.problem.appends):
            if warp == 0 and granule == 0 and work.first_row == 0:
                source.append(lane)
        softmax = OnlineSoftmax(tile.m_blocks, weighing_factor(work.ops, scale), self.traits.keeps_sums)
        warp_rows = ROW_BLOCK * tile.m_blocks
        # all key warps leave the same rows at the same address
        query_address = sAddress + self.traits.streams_bytes + row_warp * (warp_rows * shape.rows.first.pitch_bytes)
        rows = WarpRows(self.traits, work.first_row + row_warp * warp_rows, query_address, lane)
        tiles = self._tiles(work, granule, end_granule, key_warp)
        self._stream(work, ring, rows, softmax, tiles, scale, lane)
        if cutlass.const_expr(tile.key_warps == 1):
            results.store_fragments(rows.of_lane, softmax, rows.rO, rows.rWeight, lane)
        else:
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            join = KeyWarpJoin(self.traits, sAddress)
            join.put(key_warp, row_warp, softmax, rows.rO, rows.rWeight, lane)
            cute.arch.sync_threads()
            results.wait_for_peers()
            join.store(results, work, softmax.factor, warp * WARP + lane)

    @cute.jit
    def _tiles(self, work: WorkTile, granule: Int32, end_granule: Int32, key_warp: Int32):
        """The tiles of a key warp in some granules."""
        tile = self.traits.tile
        first_seen, end_seen = work.key_tiles()
        skipped = first_granule(work.counts, work.q_len, work.k_len)
        end = cutlass.min(end_seen, (end_granule + skipped) * tile.key_warps)
        first = (granule + skipped) * tile.key_warps + key_warp
        if cutlass.const_expr(self.traits.problem.has_left):
            # the row tiles of a request start one after the other
            passed = cutlass.max(first_seen - first + (tile.key_warps - 1), 0) // tile.key_warps
            first = first + passed * tile.key_warps
        return KeyTiles(first, cutlass.max(end - first + (tile.key_warps - 1), 0) // tile.key_warps, key_warp)

    @cute.jit
    def _stream(
        self, work: WorkTile, ring: TokenRing, rows: WarpRows, softmax, tiles: KeyTiles, scale: Float32, lane: Int32
    ):
        """Go through the tiles, the copies `num_stages - 1` tiles ahead and the look-ups some further."""
        num_stages, step = self.traits.tile.num_stages, self.traits.tile.key_warps
        begin, count, key_warp = tiles
        found = [ring.look_up(begin + ahead * step) for ahead in range(num_stages - 1 + self.traits.lookups_ahead)]
        for ahead in cutlass.range_constexpr(num_stages - 1):
            if ahead < count:
                ring.issue(begin + ahead * step, Int32(ahead), found[ahead])
            cute.arch.cp_async_commit_group()
        found = found[num_stages - 1 :]
        # after the copies: their wait is not behind that of the queries
        queries = load_queries(work, rows.of_lane, rows.first, scale, rows.query_address, lane)
        weighing = Weighing(work, rows, softmax, scale, lane)
        for number in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(num_stages - 2)
            self._sync_ring(key_warp)
            ahead = number + (num_stages - 1)
            if ahead < count:
                ring.issue(begin + ahead * step, ring.stage_of(ahead), found[0])
            cute.arch.cp_async_commit_group()
            found = [*found[1:], ring.look_up(begin + (ahead + len(found)) * step)]
            self._attend_tile(ring, queries, weighing, rows, begin + number * step, ring.stage_of(number), lane)

    @cute.jit
    def _sync_ring(self, key_warp: Int32):
        """Wait for the warps that share a ring."""
        tile = self.traits.tile
        if cutlass.const_expr(tile.row_warps == 1):
            cute.arch.sync_warp()
        elif cutlass.const_expr(tile.key_warps == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=Barrier.KEY_WARP + key_warp, number_of_threads=WARP * tile.row_warps)

    @cute.jit
    def _attend_tile(self, ring, queries, weighing, rows, tile: Int32, stage: Int32, lane: Int32):
        """One tile of keys and values, which is in a stage of the ring."""
        shape = ring.shape
        (k_rows, v_rows), (k_offset, v_offset) = shape.rows, shape.offsets
        address = ring.base + stage * shape.stage_bytes
        rS = cute.make_rmem_tensor((self.traits.tile.m_blocks, shape.tile_rows // 8, 4), Float32)
        found = weighing.scoring.look_up(tile)
        self._multiply_keys(address + k_offset + OperandLanes(lane, k_rows).rows_as_columns, queries, rS)
        weighing.apply(rS, tile, found)
        self._multiply_values(address + v_offset + OperandLanes(lane, v_rows).rows_summed, rS, rows.rO, rows.rWeight)

    def _multiply_keys(self, address, queries, rS) -> None:
        """rS = queries @ keys^T."""
        rows, zero = self.traits.ring.rows.first, (Float32(0.0),) * 4
        sums = {(block, n): zero for block in range(rS.shape[0]) for n in range(rS.shape[1])}
        for step in range(self.traits.k_steps):
            operands = queries.operands(step)
            for pair in range(rS.shape[1] // 2):
                b = ldmatrix_x4(rows.along(address, 2 * step) + pair * 16 * rows.pitch_bytes)
                for block, a in enumerate(operands):
                    for i, n in enumerate((2 * pair, 2 * pair + 1)):
                        sums[block, n] = mma_16x8x16(self.dtype, a, b[2 * i : 2 * i + 2], sums[block, n])
        for (block, n), values in sums.items():
            _put(rS, block, n, values)

    def _multiply_values(self, address, rS, rO, rWeight) -> None:
        """rO += weights @ values, rWeight += the rows' sums of the weights as rounded."""
        rows, ones = self.traits.ring.rows.second, ones_operand(self.dtype)
        for step in range(rS.shape[1] // 2):
            weights = [
                left_operand(self.dtype, _get(rS, block, 2 * step), _get(rS, block, 2 * step + 1))
                for block in range(rS.shape[0])
            ]
            for block, a in enumerate(weights):
                _put(rWeight, block, 0, mma_16x8x16(self.dtype, a, ones, _get(rWeight, block, 0)))
            for n in range(0, self.traits.v_tiles, 2):
                b = ldmatrix_x4(rows.along(address, n) + step * 16 * rows.pitch_bytes, transposed=True)
                for i in range(min(2, self.traits.v_tiles - n)):
                    for block, a in enumerate(weights):
                        values = mma_16x8x16(self.dtype, a, b[2 * i : 2 * i + 2], _get(rO, block, n + i))
                        _put(rO, block, n + i, values)


def _get(rX: cute.Tensor, block: int, n: int) -> tuple:
    return tuple(rX[block, n, e] for e in range(4))


def _put(rX: cute.Tensor, block: int, n: int, values) -> None:
    for e, value in enumerate(values):
        rX[block, n, e] = value


def build(traits: Traits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    return build_entry(Attention(traits), "attention")

"""The attention kernel: decode and prefill, dense, ragged and paged, from one source.

Each group of warps streams its share of the keys and values through a ring of its own (device/kv_ring.py). A warp multiplies its query rows, held in
registers, with a tile of keys, turns the scores into weights (device/softmax.py), and adds up the weighted values. The weights of a row are summed by
the same matrix instructions that multiply them with the values, as rounded, so that equal values come out exact. Groups of a CTA meet in shared
memory, CTAs that share the keys of a unit in a workspace (combine.py), or in the shared memory of a cluster (cluster.py).
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.device.copy import ReadOnce
from cuteforge.device.kv_ring import KVRing
from cuteforge.device.math import select
from cuteforge.device.mma_sm80 import OperandLanes, ldmatrix_x4, left_operand, mma_16x8x16, ones_operand
from cuteforge.device.softmax import HALVES, OnlineSoftmax
from cuteforge.device.traced import named_kernel
from cuteforge.gqa.cluster import ClusterPart
from cuteforge.gqa.combine import Combine
from cuteforge.gqa.config import ROW_BLOCK, SMEM_ALIGNMENT, WARP, Traits
from cuteforge.gqa.entry import Entry, build_entry
from cuteforge.gqa.mask import ScoreMask
from cuteforge.gqa.plan import make_plan, may_cut_units
from cuteforge.gqa.queries import load_queries
from cuteforge.gqa.result import GroupJoin, Results
from cuteforge.gqa.scores import ScoreCap, score_factor
from cuteforge.gqa.shares import BEGUN, CONTINUED, WHOLE, Shares
from cuteforge.gqa.work import Counts, Operands, Unit
from cuteforge.runtime.compile_cache import Build


@named_kernel("attention")
class Attention(Entry):
    """The portable kernel."""

    @cute.jit
    def launch(
        self, given: tuple, counts: Counts, max_ctas: Int32, most_splits: Int32, scale: Float32, stream: cuda.CUstream
    ):
        by = counts.divisors()
        if cutlass.const_expr(self.traits.splits):
            self._launch_shares(given, by, scale, counts, most_splits, max_ctas, stream)
        else:
            self._launch(given, by, None, scale, counts.units, stream)

    @cute.jit
    def _launch_shares(
        self,
        given: tuple,
        by: tuple,
        scale: Float32,
        counts: Counts,
        most_splits: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        plan = make_plan(counts, most_splits, max_ctas)
        self._launch(given, by, plan, scale, plan[0] * counts.kv_heads, stream)
        if may_cut_units(counts, plan):
            Combine(self.traits).launch(given, by, plan, counts, stream)

    def _launch(self, given: tuple, by: tuple, plan: tuple | None, scale, num_ctas, stream) -> None:
        clusters = {"cluster": (Int32(1) << plan[-1], 1, 1)} if self.traits.cluster else {}
        self.kernel(given, by, plan, scale).launch(
            grid=(num_ctas, 1, 1),
            block=(WARP * self.traits.tile.num_warps, 1, 1),
            **clusters,
            min_blocks_per_mp=self.traits.tile.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, given: tuple, by: tuple, plan: tuple | None, scale: Float32):
        if cutlass.const_expr(self.traits.dependent_launch):
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        lane, warp = tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP)
        counts = Counts(self.traits, Operands(*given), by)
        smem = cutlass.memory.SmemAllocator()
        sAddress = smem.allocate(self.traits.smem_bytes - SMEM_ALIGNMENT, byte_alignment=SMEM_ALIGNMENT).toint()
        if cutlass.const_expr(self.traits.splits):
            self._attend_share(counts, plan, bidx, sAddress, scale, tidx)
        else:
            unit = Unit.of_block(counts, bidx, lane)
            self._attend(unit, Results(unit), Int32(0), Int32(1 << 24), sAddress, scale, lane, warp)

    @cute.jit
    def _attend_share(self, counts: Counts, plan: tuple, bidx: Int32, sAddress: Int32, scale: Float32, tidx: Int32):
        """Go through the units that the share of a CTA touches, or, in a cluster, do its piece of a unit and join the pieces."""
        traits, (teams, *_, log_cluster) = self.traits, plan
        lane, warp = tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP)
        shares = Shares(counts, plan, lane)
        rank = bidx & ((Int32(1) << log_cluster) - 1)
        place, head = divmod(bidx >> log_cluster, counts.by_heads)
        team = (place << log_cluster) + rank
        batch, row_tile, turn, left, part = shares.first_segment(team)
        if cutlass.const_expr(traits.cluster > 0):
            if log_cluster > 0:
                self._cluster_part(log_cluster, Unit(counts, batch, head, row_tile), sAddress, rank)[1].begin(tidx)
        going = left > 0 or shares.pieces > 0
        while going:
            turns = shares.turns_of(batch)
            end = cutlass.min(turns, turn + left)
            if shares.pieces <= 1:
                part = select(turn > 0, Int32(CONTINUED), select(end < turns, Int32(BEGUN), Int32(WHOLE)))
            unit = Unit(counts, batch, head, row_tile)
            results = Results(unit, (teams, team), part, self._cluster_part(log_cluster, unit, sAddress, rank))
            self._attend(unit, results, turn, end, sAddress, scale, lane, warp)
            left = left - (end - turn)
            going = left > 0
            turn = Int32(0)
            row_tile = row_tile + 1
            if row_tile == counts.row_tiles:
                row_tile = Int32(0)
                batch = batch + 1
            if going:
                # the rings are filled again only when all have read what is in their place
                cute.arch.sync_threads()
        if cutlass.const_expr(traits.cluster > 0):
            if log_cluster > 0:
                # looked for again: kept, it would be registers that the loop has no room for
                batch, row_tile = divmod(place, counts.by_row_tiles)
                unit = Unit(counts, batch, head, row_tile)
                self._cluster_part(log_cluster, unit, sAddress, rank)[1].join(tidx)

    def _cluster_part(self, log_cluster, unit: Unit, sAddress, rank) -> tuple | None:
        """As `Results` takes it."""
        traits = self.traits
        if not traits.cluster:
            return None
        address = sAddress + (traits.streams_bytes + traits.query_bytes)
        return log_cluster > 0, ClusterPart(unit, address, rank, log_cluster)

    @cute.jit
    def _attend(
        self,
        unit: Unit,
        results,
        turn: Int32,
        end_turn: Int32,
        sAddress: Int32,
        scale: Float32,
        lane: Int32,
        warp: Int32,
    ):
        """One warp's part of a unit: its rows, and of the keys of some turns its group's. Turns are counted from the first one that is seen."""
        tile = self.traits.tile
        group, row_warp = warp // tile.row_warps, warp % tile.row_warps
        first_row = unit.first_row + row_warp * (ROW_BLOCK * tile.m_blocks)
        rows = [
            [first_row + (block * ROW_BLOCK + half * 8) + lane // 4 for half in range(HALVES)]
            for block in range(tile.m_blocks)
        ]
        shape = self.traits.ring
        source = unit.source()
        hint = ReadOnce(unit.counts.reads_little()) if self.traits.reads_keys_once else None
        ring = KVRing(shape, sAddress + group * shape.bytes, row_warp, lane, source, unit.k_len, hint)
        ring.clear_pads()
        if cutlass.const_expr(self.traits.problem.appends):
            if warp == 0 and turn == 0 and unit.first_row == 0:
                source.append(lane)
        softmax = OnlineSoftmax(tile.m_blocks, score_factor(scale, unit.ops.softcap), self.traits.keeps_sums)
        rO = cute.make_rmem_tensor((tile.m_blocks, self.traits.v_tiles, 4), Float32)
        rWeight = cute.make_rmem_tensor((tile.m_blocks, 1, 4), Float32)
        rO.fill(0.0)
        rWeight.fill(0.0)
        first, count = self._tiles(unit, turn, end_turn, group)
        # every group leaves the same rows in the same place
        query_address = (
            sAddress + self.traits.streams_bytes + row_warp * (ROW_BLOCK * tile.m_blocks * shape.k_rows.pitch_bytes)
        )
        self._stream(
            unit, ring, rows, first_row, query_address, softmax, rO, rWeight, first, count, group, scale, lane
        )  # fmt: skip
        if cutlass.const_expr(tile.key_warps == 1):
            results.store_fragments(rows, softmax, rO, rWeight, lane)
        else:
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            join = GroupJoin(self.traits, sAddress)
            join.put(group, row_warp, softmax, rO, rWeight, lane)
            cute.arch.sync_threads()
            results.wait_for_peers()
            join.store(results, unit, softmax.factor, warp * WARP + lane)

    @cute.jit
    def _tiles(self, unit: Unit, turn: Int32, end_turn: Int32, group: Int32):
        """(first tile, number of tiles) of a group of warps in some turns; its tiles are `key_warps` apart."""
        tile = self.traits.tile
        first_seen, end_seen = unit.tiles()
        skipped = unit.first_turn()
        end = cutlass.min(end_seen, (end_turn + skipped) * tile.key_warps)
        first = (turn + skipped) * tile.key_warps + group
        if cutlass.const_expr(self.traits.problem.has_left):
            # the row tiles of a request start one after the other
            rounds = cutlass.max(first_seen - first + (tile.key_warps - 1), 0) // tile.key_warps
            first = first + rounds * tile.key_warps
        return first, cutlass.max(end - first + (tile.key_warps - 1), 0) // tile.key_warps

    @cute.jit
    def _stream(
        self, unit, ring, rows: list, first_row: Int32, query_address: Int32, softmax, rO, rWeight, begin: Int32, count: Int32,
        group: Int32, scale: Float32, lane: Int32,
    ):  # fmt: skip
        """Go through the group's tiles, the copies `num_stages - 1` tiles ahead and the look-ups some further."""
        tile, num_stages = self.traits.tile, self.traits.tile.num_stages
        step = tile.key_warps
        found = [ring.look_up(begin + ahead * step) for ahead in range(num_stages - 1 + self.traits.lookups_ahead)]
        for ahead in cutlass.range_constexpr(num_stages - 1):
            if ahead < count:
                ring.issue(begin + ahead * step, Int32(ahead), found[ahead])
            cute.arch.cp_async_commit_group()
        found = found[num_stages - 1 :]
        # after the copies: their wait is not behind that of the queries
        queries = load_queries(unit, rows, first_row, scale, query_address, lane)
        mask, cap = ScoreMask(unit, rows, lane), ScoreCap(scale, unit.ops.softcap)
        for turn in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(num_stages - 2)
            self._sync_group(group)
            ahead = turn + (num_stages - 1)
            if ahead < count:
                ring.issue(begin + ahead * step, ring.stage_of(ahead), found[0])
            cute.arch.cp_async_commit_group()
            found = [*found[1:], ring.look_up(begin + (ahead + len(found)) * step)]
            self._attend_tile(
                ring, mask, cap, queries, softmax, rO, rWeight, begin + turn * step, ring.stage_of(turn), lane
            )

    @cute.jit
    def _sync_group(self, group: Int32):
        """Wait for the warps that share a ring."""
        tile = self.traits.tile
        if cutlass.const_expr(tile.row_warps == 1):
            cute.arch.sync_warp()
        elif cutlass.const_expr(tile.key_warps == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=group + 1, number_of_threads=WARP * tile.row_warps)

    @cute.jit
    def _attend_tile(self, ring, mask, cap, queries, softmax, rO, rWeight, tile: Int32, stage: Int32, lane: Int32):
        shape = ring.shape
        keys = ring.base + stage * shape.stage_bytes
        rS = cute.make_rmem_tensor((self.traits.tile.m_blocks, shape.tile_n // 8, 4), Float32)
        self._multiply_keys(keys + OperandLanes(lane, shape.k_rows).rows_as_columns, queries, rS)
        cap.apply(rS)
        mask.apply(rS, tile)
        softmax.update(rS, rO, rWeight)
        values = keys + shape.v_offset_bytes + OperandLanes(lane, shape.v_rows).rows_summed
        self._multiply_values(values, rS, rO, rWeight)

    def _multiply_keys(self, address, queries, rS) -> None:
        """rS = queries @ keys^T."""
        rows, zero = self.traits.ring.k_rows, (Float32(0.0),) * 4
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
        rows, ones = self.traits.ring.v_rows, ones_operand(self.dtype)
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

"""Prefill for sm_90a: products by warpgroups, copies by warps of their own.

A CTA for each SM goes through row tiles. Four of its warps only copy (loads.py), so queries, keys and values of a tile come under the products of
the one before. The other warps, in warpgroups of 64 rows, multiply (products.py): the scores of a tile of keys are computed while the values of the
tile before are added up, and the softmax of one warpgroup runs while the products of another do. What a lane holds is laid out as in `gqa/kernel.py`,
so that softmax, masks and results are the same code.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.device.mma_sm90 import see_copies, wait_groups
from cuteforge.device.panels import PANEL_ROW_BYTES
from cuteforge.device.tma_sm90 import describe_rows
from cuteforge.device.traced import named_kernel
from cuteforge.families.attention.forward.entry import Entry, build_entry
from cuteforge.families.attention.forward_sm90a.buffers import KEYS, NO_UNIT, Buffers
from cuteforge.families.attention.forward_sm90a.config import COPY_WARPS, ROWS, WARPGROUP, WarpgroupTraits
from cuteforge.families.attention.forward_sm90a.loads import Loads
from cuteforge.families.attention.forward_sm90a.products import Products, Turns, flat, fragments, keep, take_sign
from cuteforge.families.attention.parts.mask import ScoreMask
from cuteforge.families.attention.parts.result import Results
from cuteforge.families.attention.parts.scores import ScoreCap, score_factor
from cuteforge.families.attention.parts.softmax import HALVES, OnlineSoftmax
from cuteforge.families.attention.work.counts import Counts, Operands
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.families.attention.work.traits import ROW_BLOCK
from cuteforge.runtime.arch import WARP
from cuteforge.runtime.compile_cache import Build


@named_kernel("prefill_sm90a")
class PrefillSm90a(Entry):
    """The kernel for one `WarpgroupTraits`."""

    @cute.jit
    def launch(
        self, given: tuple, counts: Counts, max_ctas: Int32, most_splits: Int32, scale: Float32, stream: cuda.CUstream
    ):
        tma = None
        if cutlass.const_expr(self.traits.box_rows > 0):
            infos = [describe_rows(m, self.traits.box_rows) for m in (counts.ops.mK, counts.ops.mV)]
            tma = tuple((info.atom, info.tma_tensor) for info in infos)
        self.kernel(given, tma, counts.divisors(), scale).launch(
            grid=(cutlass.min(counts.work_tiles, max_ctas), 1, 1),
            block=(WARP * (COPY_WARPS + self.traits.tile.multiplying_warps), 1, 1),
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, given: tuple, tma: tuple | None, by: tuple, scale: Float32):
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP)
        counts, buffers = Counts(self.traits, Operands(*given), by), Buffers(self.traits)
        loads = Loads(counts, buffers, self.dtype, tma, warp, lane)
        if tidx == 0:
            buffers.init(loads.by_tma)
        cute.arch.sync_threads()
        multiplying, copying = self.traits.registers
        if warp < COPY_WARPS:
            cute.arch.setmaxregister_decrease(copying)
            loads.run(warp)
        else:
            cute.arch.setmaxregister_increase(multiplying)
            self._multiply(counts, buffers, scale, warp - COPY_WARPS, lane)

    @cute.jit
    def _multiply(self, counts: Counts, buffers: Buffers, scale: Float32, warp: Int32, lane: Int32):
        """One warp's rows of all units: 16 of the 64 of its warpgroup."""
        turns = Turns(self.traits.tile.warpgroups, warp // WARPGROUP)
        products = Products(self.traits, self.dtype, turns)
        turns.begin()
        rS, rP, rO = fragments(self.traits)
        place = (Int32(0),) * 4  # stages and parities: of the queries, and of keys and values
        fields = self._next_unit(buffers, *place)
        products.scores(self._queries(buffers, place[0], warp), buffers.tokens[KEYS].address(place[2]), rS)
        while fields[0] != NO_UNIT:
            work = WorkTile.of_fields(counts, fields)
            place, fields = self._attend(work, buffers, products, rS, rP, rO, place, scale, warp, lane)
        wait_groups(0, flat(rS))

    @cute.jit
    def _next_unit(self, buffers: Buffers, query_stage: Int32, query_parity: Int32, stage: Int32, parity: Int32):
        """Wait for the fields and queries of a work, and for its first tile of keys."""
        buffers.queries.wait_full(query_stage, query_parity)
        fields = buffers.told(query_stage)
        if fields[0] != NO_UNIT:
            buffers.tokens[KEYS].wait_full(stage, parity)
        see_copies()
        return fields

    def _queries(self, buffers: Buffers, stage, warp):
        """Address of the rows of the warpgroup."""
        return buffers.queries.address(stage) + warp // WARPGROUP * (ROWS * PANEL_ROW_BYTES)

    @cute.jit
    def _attend(
        self, work: WorkTile, buffers: Buffers, products: Products, rS: cute.Tensor, rP: cute.Tensor, rO: cute.Tensor,
        place: tuple, scale: Float32, warp: Int32, lane: Int32,
    ):  # fmt: skip
        """One work, whose first scores are on their way. Starts those of the next one, or of anything if there is none.

        Returns:
            The place of the next one, as `place`, and its fields.
        """
        query_stage, query_parity, stage, parity = place
        first_row = work.first_row + warp * ROW_BLOCK
        rows = [[first_row + half * 8 + lane // 4 for half in range(HALVES)]]
        queries = self._queries(buffers, query_stage, warp)
        softmax = OnlineSoftmax(1, score_factor(scale, work.ops.softcap), True)
        mask, cap = ScoreMask(work, rows, lane), ScoreCap(scale, work.ops.softcap)
        first, end = work.key_tiles()
        rO.fill(0.0)
        keep(rS, wait_groups(0, flat(rS))[0])
        self._weigh(first, buffers, softmax, mask, cap, rS, stage, scale, lane)
        products.round_weights(rS, rP)
        self._wait_for_keys(buffers, stage, parity, end - first > 1)
        for i in cutlass.range(first + 1, end, unroll=1):
            stage, parity = self._attend_tile(
                i, end, queries, buffers, products, softmax, mask, cap, rS, rP, rO, stage, parity, scale, lane
            )
        buffers.queries.release(query_stage, lane)
        after = (*buffers.queries.next(query_stage, query_parity), *buffers.tokens[KEYS].next(stage, parity))
        fields = self._finish(work, rows, buffers, products, softmax, rS, rP, rO, stage, parity, after, warp, lane)
        return after, fields

    @cute.jit
    def _attend_tile(
        self, i: Int32, end: Int32, queries: Int32, buffers: Buffers, products: Products, softmax: OnlineSoftmax, mask: ScoreMask,
        cap: ScoreCap, rS: cute.Tensor, rP: cute.Tensor, rO: cute.Tensor, stage: Int32, parity: Int32, scale: Float32, lane: Int32,
    ):  # fmt: skip
        """The scores and weights of tile `i`, beside the values of the tile before. Returns the stage and parity of tile `i`.

        Tiles go up to `end`.
        """
        keys, values = buffers.tokens
        ahead, ahead_parity = keys.next(stage, parity)
        products.turns.wait()
        products.scores(queries, keys.address(ahead), rS)
        values.wait_full(stage, parity)
        products.values(rP, values.address(stage), rO, ends_turn=True)
        keep(rS, wait_groups(1, flat(rS))[0])
        rScale, grew = self._weigh(i, buffers, softmax, mask, cap, rS, ahead, scale, lane)
        self._wait_for_keys(buffers, ahead, ahead_parity, (i + 1 < end) & softmax.is_added_up())
        # The weights are found while the values of the tile before are added up; until then that reads the old ones, so the new ones are
        # rounded afterwards.
        sums, weights = wait_groups(0, flat(rO), flat(rS))
        keep(rO, sums)
        keep(rS, weights)
        products.round_weights(rS, rP)
        values.release(stage, lane)
        softmax.rescale(rScale, grew, rO)
        return ahead, ahead_parity

    @cute.jit
    def _weigh(
        self, tile: Int32, buffers: Buffers, softmax: OnlineSoftmax, mask: ScoreMask, cap: ScoreCap, rS: cute.Tensor, stage: Int32,
        scale: Float32, lane: Int32,
    ):  # fmt: skip
        """Turn the scores of a tile, whose keys were in a stage, into weights; as `OnlineSoftmax.weigh`."""
        buffers.tokens[KEYS].release(stage, lane)
        take_sign(rS, scale)
        cap.apply(rS)
        mask.apply(rS, tile)
        return softmax.weigh(rS)

    @cute.jit
    def _finish(
        self, work: WorkTile, rows: list, buffers: Buffers, products: Products, softmax: OnlineSoftmax, rS: cute.Tensor, rP: cute.Tensor,
        rO: cute.Tensor, stage: Int32, parity: Int32, after: tuple, warp: Int32, lane: Int32,
    ):  # fmt: skip
        """Add up the values of the last tile and store the rows; start the first scores of the next work, beside them where its queries have a
        buffer of their own. Returns the fields of that work."""
        keys, values = buffers.tokens
        values.wait_full(stage, parity)
        if cutlass.const_expr(self.traits.query_stages > 1):
            fields = self._next_unit(buffers, *after)
            products.turns.wait()
            products.values(rP, values.address(stage), rO)
            products.scores(self._queries(buffers, after[0], warp), keys.address(after[2]), rS, ends_turn=True)
            keep(rO, wait_groups(1, flat(rO))[0])
            values.release(stage, lane)
            self._store(work, rows, softmax, rO, lane)
        else:
            products.turns.wait()
            products.values(rP, values.address(stage), rO, ends_turn=True)
            keep(rO, wait_groups(0, flat(rO))[0])
            values.release(stage, lane)
            self._store(work, rows, softmax, rO, lane)
            fields = self._next_unit(buffers, *after)
            products.scores(self._queries(buffers, after[0], warp), keys.address(after[2]), rS)
        return fields

    @cute.jit
    def _wait_for_keys(self, buffers: Buffers, stage: Int32, parity: Int32, wanted):
        """Wait for the tile of keys after the one in a stage. This is a branch, so what it depends on is not moved behind the wait for products that
        follows it: the softmax would then no longer run beside them."""
        if wanted:
            keys = buffers.tokens[KEYS]
            keys.wait_full(*keys.next(stage, parity))

    def _store(self, work: WorkTile, rows: list, softmax: OnlineSoftmax, rO: cute.Tensor, lane) -> None:
        rWeight = cute.make_rmem_tensor((1, 1, 4), Float32)
        for half in range(HALVES):
            rWeight[0, 0, 2 * half] = softmax.row_sum(0, half)
        Results(work).store_fragments(rows, softmax, rO, rWeight, lane)


def build(traits: WarpgroupTraits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    return build_entry(PrefillSm90a(traits), "prefill_sm90a")

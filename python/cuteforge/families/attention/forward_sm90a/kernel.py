"""The forward kernel of sm_90a: products by warpgroups, copies by warps of their own.

A CTA for each SM goes through work tiles. Four of its warps only copy (loads.py), so queries, keys and values of a tile
come under the products of the one before. The other warps, in warpgroups of 64 rows, multiply (products.py): the scores
of a tile of keys are computed while the values of the tile before are added up, and the softmax of one warpgroup runs
while the products of another do. What a lane holds is laid out as in `forward/kernel.py`, so that softmax, masks and
results are the same code.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.device.mma_sm90 import see_copies, wait_groups
from cuteforge.device.panels import PANEL_ROW_BYTES
from cuteforge.device.tma_sm90 import describe_rows
from cuteforge.device.traced import TraceConstant, named_kernel
from cuteforge.families.attention.forward.entry import Entry, build_entry
from cuteforge.families.attention.forward_sm90a.buffers import KEYS, NO_WORK, Buffers
from cuteforge.families.attention.forward_sm90a.config import COPY_WARPS, ROWS, WARPGROUP, WarpgroupTraits
from cuteforge.families.attention.forward_sm90a.loads import Loads
from cuteforge.families.attention.forward_sm90a.products import (
    Fragments,
    Products,
    Turns,
    set_registers,
    take_sign,
    values_of,
)
from cuteforge.families.attention.parts.mask import ScoreMask
from cuteforge.families.attention.parts.result import Results
from cuteforge.families.attention.parts.scores import ScoreCap, score_factor
from cuteforge.families.attention.parts.softmax import HALVES, OnlineSoftmax
from cuteforge.families.attention.work.counts import Counts, Divisors, Operands
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.families.attention.work.traits import ROW_BLOCK
from cuteforge.runtime.arch import WARP
from cuteforge.runtime.build import Build


@named_kernel("prefill_sm90a")
class ForwardSm90a(Entry):
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
    def kernel(self, given: tuple, tma: tuple | None, by: Divisors, scale: Float32):
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
            MultiplyingWarp(counts, buffers, self.dtype, scale, warp - COPY_WARPS, lane).run()


class Cursor(NamedTuple):
    """Where a multiplying warp is in the buffers: stages and parities, of the queries, and of keys and values."""

    query_stage: Any
    query_parity: Any
    stage: Any
    parity: Any


class MultiplyingWarp(TraceConstant):
    """One warp's rows of all work tiles of a CTA: 16 of the 64 of its warpgroup."""

    def __init__(self, counts: Counts, buffers: Buffers, dtype, scale, warp, lane):
        self.counts, self.buffers, self.scale, self.warp, self.lane = counts, buffers, scale, warp, lane
        self.traits = counts.traits
        self.turns = Turns(self.traits.tile.warpgroups, warp // WARPGROUP)
        self.products = Products(self.traits, dtype, self.turns)

    @cute.jit
    def run(self):
        self.turns.begin()
        fragments = Fragments(self.traits)
        cursor = Cursor(*(Int32(0),) * 4)
        fields = self._next_work(*cursor)
        keys = self.buffers.tokens[KEYS]
        self.products.scores(self._queries(cursor.query_stage), keys.address(cursor.stage), fragments.rS)
        while fields[0] != NO_WORK:
            work = WorkTile.of_fields(self.counts, fields)
            cursor, fields = self._attend(work, fragments, cursor)
        wait_groups(0, values_of(fragments.rS))

    @cute.jit
    def _next_work(self, query_stage: Int32, query_parity: Int32, stage: Int32, parity: Int32):
        """Wait for the fields and queries of a work tile, and for its first tile of keys."""
        self.buffers.queries.wait_full(query_stage, query_parity)
        fields = self.buffers.told(query_stage)
        if fields[0] != NO_WORK:
            self.buffers.tokens[KEYS].wait_full(stage, parity)
        see_copies()
        return fields

    def _queries(self, stage):
        """Address of the rows of the warpgroup."""
        return self.buffers.queries.address(stage) + self.warp // WARPGROUP * (ROWS * PANEL_ROW_BYTES)

    @cute.jit
    def _attend(self, work: WorkTile, fragments: Fragments, cursor: Cursor):
        """One work tile, whose first scores are on their way. Starts those of the next one, or of anything if there is
        none.

        Returns:
            The cursor at the next one, and its fields.
        """
        query_stage, query_parity, stage, parity = cursor
        first_row = work.first_row + self.warp * ROW_BLOCK
        rows = [[first_row + half * 8 + self.lane // 4 for half in range(HALVES)]]
        queries = self._queries(query_stage)
        weighing = Weighing(self, work, rows)
        first, end = work.key_tiles()
        rS, rP = fragments.rS, fragments.rP
        fragments.rO.fill(0.0)
        set_registers(rS, wait_groups(0, values_of(rS))[0])
        weighing.weigh(rS, first, stage)
        self.products.round_weights(rS, rP)
        self._wait_for_keys(stage, parity, end - first > 1)
        for i in cutlass.range(first + 1, end, unroll=1):
            stage, parity = self._attend_tile(i, end, queries, weighing, fragments, stage, parity)
        self.buffers.queries.release(query_stage, self.lane)
        queries_after = self.buffers.queries.next(query_stage, query_parity)
        after = Cursor(*queries_after, *self.buffers.tokens[KEYS].next(stage, parity))
        fields = self._finish(weighing, fragments, stage, parity, after)
        return after, fields

    @cute.jit
    def _attend_tile(
        self, i: Int32, end: Int32, queries: Int32, weighing, fragments: Fragments, stage: Int32, parity: Int32
    ):
        """The scores and weights of tile `i` of keys, beside the values of the tile before. Returns the stage and
        parity of tile `i`.

        Tiles go up to `end`.
        """
        keys, values = self.buffers.tokens
        rS, rP, rO = fragments.rS, fragments.rP, fragments.rO
        ahead, ahead_parity = keys.next(stage, parity)
        self.turns.wait()
        self.products.scores(queries, keys.address(ahead), rS)
        values.wait_full(stage, parity)
        self.products.values(rP, values.address(stage), rO, ends_turn=True)
        set_registers(rS, wait_groups(1, values_of(rS))[0])
        rScale, grew = weighing.weigh(rS, i, ahead)
        self._wait_for_keys(ahead, ahead_parity, (i + 1 < end) & weighing.softmax.is_added_up())
        # The weights are found while the values of the tile before are added up; until then that reads the old ones, so
        # the new ones are rounded afterwards.
        sums, weights = wait_groups(0, values_of(rO), values_of(rS))
        set_registers(rO, sums)
        set_registers(rS, weights)
        self.products.round_weights(rS, rP)
        values.release(stage, self.lane)
        weighing.softmax.rescale(rScale, grew, rO)
        return ahead, ahead_parity

    @cute.jit
    def _finish(self, weighing, fragments: Fragments, stage: Int32, parity: Int32, after: Cursor):
        """Add up the values of the last tile and store the rows; start the first scores of the next work tile, beside
        them where its queries have a buffer of their own. Returns the fields of that work tile."""
        keys, values = self.buffers.tokens
        rS, rP, rO = fragments.rS, fragments.rP, fragments.rO
        values.wait_full(stage, parity)
        if cutlass.const_expr(self.traits.query_stages > 1):
            fields = self._next_work(*after)
            self.turns.wait()
            self.products.values(rP, values.address(stage), rO)
            self.products.scores(self._queries(after.query_stage), keys.address(after.stage), rS, ends_turn=True)
            set_registers(rO, wait_groups(1, values_of(rO))[0])
            values.release(stage, self.lane)
            weighing.store(rO)
        else:
            self.turns.wait()
            self.products.values(rP, values.address(stage), rO, ends_turn=True)
            set_registers(rO, wait_groups(0, values_of(rO))[0])
            values.release(stage, self.lane)
            weighing.store(rO)
            fields = self._next_work(*after)
            self.products.scores(self._queries(after.query_stage), keys.address(after.stage), rS)
        return fields

    @cute.jit
    def _wait_for_keys(self, stage: Int32, parity: Int32, wanted):
        """Wait for the tile of keys after the one in a stage. This is a branch, so what it depends on is not moved
        behind the wait for products that follows it: the softmax would then no longer run beside them."""
        if wanted:
            keys = self.buffers.tokens[KEYS]
            keys.wait_full(*keys.next(stage, parity))


class Weighing(TraceConstant):
    """From the scores of a work tile to weights, and from sums to results."""

    def __init__(self, warp: MultiplyingWarp, work: WorkTile, rows: list):
        self.warp, self.work, self.rows = warp, work, rows
        self.softmax = OnlineSoftmax(1, score_factor(warp.scale, work.ops.softcap), True)
        self.mask, self.cap = ScoreMask(work, rows, warp.lane), ScoreCap(warp.scale, work.ops.softcap)

    @cute.jit
    def weigh(self, rS: cute.Tensor, tile: Int32, stage: Int32):
        """Turn the scores of a tile of keys, which were in a stage, into weights; as `OnlineSoftmax.weigh`."""
        self.warp.buffers.tokens[KEYS].release(stage, self.warp.lane)
        take_sign(rS, self.warp.scale)
        self.cap.apply(rS)
        self.mask.apply(rS, tile)
        return self.softmax.weigh(rS)

    def store(self, rO: cute.Tensor) -> None:
        rWeight = cute.make_rmem_tensor((1, 1, 4), Float32)
        for half in range(HALVES):
            rWeight[0, 0, 2 * half] = self.softmax.row_sum(0, half)
        Results(self.work).store_fragments(self.rows, self.softmax, rO, rWeight, self.warp.lane)


def build(traits: WarpgroupTraits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    return build_entry(ForwardSm90a(traits), "prefill_sm90a")

"""The forward kernel of sm_90a: products by warpgroups, copies by warps of their own.

A CTA for each SM goes through work tiles. Four of its warps only copy (producer.py), so queries, keys and values of a
tile come under the products of the one before. The other warps, in warpgroups of 64 rows, multiply (products.py): the
scores of a tile of keys are computed while the values of the tile before are added up, and the softmax of one warpgroup
runs while the products of another do. What a lane holds is laid out as in `forward/kernel.py`, so that softmax, masks
and results are the same code.
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
from cuteforge.families.attention.forward_sm90a.config import PRODUCER_WARPS, ROWS, WARPGROUP, WarpgroupTraits
from cuteforge.families.attention.forward_sm90a.producer import ProducerWarp
from cuteforge.families.attention.forward_sm90a.products import (
    Fragments,
    PingPong,
    Products,
    set_registers,
    take_sign,
    values_of,
)
from cuteforge.families.attention.parts.result import Results
from cuteforge.families.attention.parts.scores import weighing_factor
from cuteforge.families.attention.parts.scoring import LookedUp, Scoring
from cuteforge.families.attention.parts.softmax import HALVES, OnlineSoftmax
from cuteforge.families.attention.work.counts import Counts, Divisors, Operands
from cuteforge.families.attention.work.limits import Limits
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.families.attention.work.traits import ROW_BLOCK
from cuteforge.runtime.arch import WARP
from cuteforge.runtime.build import Build


@named_kernel("prefill_sm90a")
class ForwardSm90a(Entry):
    """The kernel for one `WarpgroupTraits`."""

    @cute.jit
    def launch(self, given: tuple, counts: Counts, limits: Limits, scale: Float32, stream: cuda.CUstream):
        tma = None
        if cutlass.const_expr(self.traits.box_rows > 0):
            infos = [describe_rows(m, self.traits.box_rows) for m in (counts.ops.mK, counts.ops.mV)]
            tma = tuple((info.atom, info.tma_tensor) for info in infos)
        self.kernel(given, tma, counts.make_divisors(), scale).launch(
            grid=(cutlass.min(counts.work_tiles, limits.max_ctas), 1, 1),
            block=(WARP * (PRODUCER_WARPS + self.traits.tile.consumer_warps), 1, 1),
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, given: tuple, tma: tuple | None, divisors: Divisors, scale: Float32):
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP)
        counts, buffers = Counts(self.traits, Operands(*given), divisors), Buffers(self.traits)
        producer = ProducerWarp(counts, buffers, self.dtype, tma, warp, lane)
        if tidx == 0:
            buffers.init(producer.by_tma)
        cute.arch.sync_threads()
        if warp < PRODUCER_WARPS:
            cute.arch.setmaxregister_decrease(self.traits.registers.producer)
            producer.run(warp)
        else:
            cute.arch.setmaxregister_increase(self.traits.registers.consumer)
            ConsumerWarp(counts, buffers, self.dtype, scale, warp - PRODUCER_WARPS, lane).run()


class Cursor(NamedTuple):
    """Where a consumer warp is in the buffers: stages and phases, of the queries, and of keys and values."""

    query_stage: Any
    query_phase: Any
    stage: Any
    phase: Any


class ConsumerWarp(TraceConstant):
    """One warp's rows of all work tiles of a CTA: 16 of the 64 of its warpgroup."""

    def __init__(self, counts: Counts, buffers: Buffers, dtype, scale, warp, lane):
        self.counts, self.buffers, self.scale, self.warp, self.lane = counts, buffers, scale, warp, lane
        self.traits = counts.traits
        self.ping_pong = PingPong(self.traits.tile.warpgroups, warp // WARPGROUP)
        self.products = Products(self.traits, dtype, self.ping_pong)

    @cute.jit
    def run(self):
        self.ping_pong.begin()
        fragments = Fragments(self.traits)
        cursor = Cursor(*(Int32(0),) * 4)
        fields = self._next_work(*cursor)
        keys = self.buffers.tokens[KEYS]
        self.products.scores(self._queries(cursor.query_stage), keys.address(cursor.stage), fragments.rS)
        while fields.batch != NO_WORK:
            work = WorkTile.of_fields(self.counts, fields)
            cursor, fields = self._attend(work, fragments, cursor)
        wait_groups(0, values_of(fragments.rS))

    @cute.jit
    def _next_work(self, query_stage: Int32, query_phase: Int32, stage: Int32, phase: Int32):
        """Wait for the fields and queries of a work tile, and for its first tile of keys."""
        self.buffers.queries.consumer_wait(query_stage, query_phase)
        fields = self.buffers.read_work(query_stage)
        if fields.batch != NO_WORK:
            self.buffers.tokens[KEYS].consumer_wait(stage, phase)
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
        query_stage, query_phase, stage, phase = cursor
        first_row = work.first_row + self.warp * ROW_BLOCK
        rows = [[first_row + half * 8 + self.lane // 4 for half in range(HALVES)]]
        queries = self._queries(query_stage)
        weighing = Weighing(self, work, rows)
        first, end = work.key_tiles()
        rS, rP = fragments.rS, fragments.rP
        fragments.rO.fill(0.0)
        found = weighing.scoring.look_up(first)
        set_registers(rS, wait_groups(0, values_of(rS))[0])
        weighing.weigh(rS, first, found, stage)
        self.products.round_weights(rS, rP)
        self._wait_for_keys(stage, phase, end - first > 1)
        for i in cutlass.range(first + 1, end, unroll=1):
            stage, phase = self._attend_tile(i, end, queries, weighing, fragments, stage, phase)
        self.buffers.queries.consumer_release(query_stage, self.lane)
        queries_after = self.buffers.queries.next(query_stage, query_phase)
        after = Cursor(*queries_after, *self.buffers.tokens[KEYS].next(stage, phase))
        fields = self._finish(weighing, fragments, stage, phase, after)
        return after, fields

    @cute.jit
    def _attend_tile(
        self, i: Int32, end: Int32, queries: Int32, weighing, fragments: Fragments, stage: Int32, phase: Int32
    ):
        """The scores and weights of tile `i` of keys, beside the values of the tile before. Returns the stage and
        phase of tile `i`.

        Tiles go up to `end`.
        """
        keys, values = self.buffers.tokens
        rS, rP, rO = fragments.rS, fragments.rP, fragments.rO
        ahead, ahead_phase = keys.next(stage, phase)
        self.ping_pong.wait()
        self.products.scores(queries, keys.address(ahead), rS)
        values.consumer_wait(stage, phase)
        self.products.values(rP, values.address(stage), rO, hands_over=True)
        found = weighing.scoring.look_up(i)
        set_registers(rS, wait_groups(1, values_of(rS))[0])
        rScale, grew = weighing.weigh(rS, i, found, ahead)
        self._wait_for_keys(ahead, ahead_phase, (i + 1 < end) & weighing.softmax.is_added_up())
        # The weights are found while the values of the tile before are added up; until then that reads the old ones, so
        # the new ones are rounded afterwards.
        sums, weights = wait_groups(0, values_of(rO), values_of(rS))
        set_registers(rO, sums)
        set_registers(rS, weights)
        self.products.round_weights(rS, rP)
        values.consumer_release(stage, self.lane)
        weighing.softmax.rescale(rScale, grew, rO)
        return ahead, ahead_phase

    @cute.jit
    def _finish(self, weighing, fragments: Fragments, stage: Int32, phase: Int32, after: Cursor):
        """Add up the values of the last tile and store the rows; start the first scores of the next work tile, beside
        them where its queries have a buffer of their own. Returns the fields of that work tile."""
        keys, values = self.buffers.tokens
        rS, rP, rO = fragments.rS, fragments.rP, fragments.rO
        values.consumer_wait(stage, phase)
        if cutlass.const_expr(self.traits.query_stages > 1):
            fields = self._next_work(*after)
            self.ping_pong.wait()
            self.products.values(rP, values.address(stage), rO)
            self.products.scores(self._queries(after.query_stage), keys.address(after.stage), rS, hands_over=True)
            set_registers(rO, wait_groups(1, values_of(rO))[0])
            values.consumer_release(stage, self.lane)
            weighing.store(rO)
        else:
            self.ping_pong.wait()
            self.products.values(rP, values.address(stage), rO, hands_over=True)
            set_registers(rO, wait_groups(0, values_of(rO))[0])
            values.consumer_release(stage, self.lane)
            weighing.store(rO)
            fields = self._next_work(*after)
            self.products.scores(self._queries(after.query_stage), keys.address(after.stage), rS)
        return fields

    @cute.jit
    def _wait_for_keys(self, stage: Int32, phase: Int32, wanted):
        """Wait for the tile of keys after the one in a stage. This is a branch, so what it depends on is not moved
        behind the wait for products that follows it: the softmax would then no longer run beside them."""
        if wanted:
            keys = self.buffers.tokens[KEYS]
            keys.consumer_wait(*keys.next(stage, phase))


class Weighing(TraceConstant):
    """From the scores of a work tile to weights, and from sums to results."""

    def __init__(self, warp: ConsumerWarp, work: WorkTile, rows: list):
        self.warp, self.work, self.rows = warp, work, rows
        self.softmax = OnlineSoftmax(1, weighing_factor(work.ops, warp.scale), True)
        self.scoring = Scoring(work, rows, warp.scale, warp.lane)

    @cute.jit
    def weigh(self, rS: cute.Tensor, tile: Int32, found: LookedUp, stage: Int32):
        """Turn the scores of a tile of keys, which were in a stage, into weights; as `OnlineSoftmax.weigh`.

        `found` is what was looked up for the tile."""
        self.warp.buffers.tokens[KEYS].consumer_release(stage, self.warp.lane)
        take_sign(rS, self.warp.scale)
        self.scoring.apply(rS, tile, found)
        return self.softmax.weigh(rS)

    def store(self, rO: cute.Tensor) -> None:
        rWeight = cute.make_rmem_tensor((1, 1, 4), Float32)
        for half in range(HALVES):
            rWeight[0, 0, 2 * half] = self.softmax.row_sum(0, half)
        Results(self.work).store_fragments(self.rows, self.softmax, rO, rWeight, self.warp.lane)


def build(traits: WarpgroupTraits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    return build_entry(ForwardSm90a(traits), "prefill_sm90a")

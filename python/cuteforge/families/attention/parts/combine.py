"""Joins the parts of the row tiles that several CTAs shared: a weighted mean by their log-sum-exps, in a fixed order.

A sink is one more part, of zeros.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute

from cuteforge.device.copy import gmem_run
from cuteforge.device.math import LOG2_E, NEG_INF, exp2_fast, fast_divisor, select
from cuteforge.device.traced import TraceConstant, named_kernel
from cuteforge.families.attention.forward.config import Traits
from cuteforge.families.attention.parts.result import Partials, reciprocal_or_zero, store_lse, store_rounded
from cuteforge.families.attention.parts.softmax import joined_lse
from cuteforge.families.attention.work.counts import Counts, Divisors, Operands
from cuteforge.families.attention.work.shares import BEGUN, CONTINUED, Shares, SplitPlan
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.runtime.arch import WARP

# Warps that share the parts of one row: with up to four parts each, all are on their way at once.
NUM_WARPS = 8
COLS = 4  # columns a lane and round


@named_kernel("attention_combine")
class Combine:
    """A CTA for each row of the row tiles that splits may share; see `Shares.crossing`."""

    def __init__(self, traits: Traits):
        self.traits = traits

    @cute.jit
    def launch(self, given: tuple, divisors: Divisors, plan: SplitPlan, counts: Counts, stream: cuda.CUstream):
        rows = cutlass.min(counts.tokens * counts.group_size, self.traits.tile.tile_m)
        crossings = counts.requests * counts.row_tiles
        if plan.pieces == 0:
            crossings = cutlass.min(crossings, plan.splits)
        self.kernel(given, divisors, fast_divisor(rows), plan).launch(
            grid=(crossings * counts.kv_heads * rows, 1, 1),
            block=(WARP * NUM_WARPS, 1, 1),
            stream=stream,
            use_pdl=self.traits.dependent_launch,
        )

    @cute.kernel
    def kernel(self, given: tuple, divisors: Divisors, rows_divisor, plan: SplitPlan):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        lane, warp = tidx % WARP, tidx // WARP
        counts = Counts(self.traits, Operands(*given), divisors)
        index, row = divmod(bidx, rows_divisor)
        number, head = divmod(index, counts.divisors.heads)
        batch, row_tile, first, last = Shares(counts, plan, lane).crossing(number)
        smem = cutlass.memory.SmemAllocator()
        sParts = smem.allocate_tensor(Float32, cute.make_layout((COLS + 2, WARP, NUM_WARPS)))
        work = WorkTile(counts, batch, head, row_tile)
        if cutlass.const_expr(self.traits.dependent_launch):
            cute.arch.griddepcontrol_wait()
        if last > first and work.first_row + row < work.num_rows:
            parts = Parts(counts, plan.splits, work, first, last)
            for start in cutlass.range_constexpr(0, self.traits.problem.v_dim, WARP * COLS):
                self._join(parts, sParts, row, start + lane * COLS, lane, warp)

    @cute.jit
    def _join(self, parts, sParts: cute.Tensor, row: Int32, col: Int32, lane: Int32, warp: Int32):
        """Four columns of a row a lane: each warp its share of the parts, then the first warp all of it."""
        rSum = cute.make_rmem_tensor(COLS, Float32)
        rSum.fill(0.0)
        largest, total = Float32(NEG_INF), Float32(0.0)
        if col < self.traits.problem.v_dim:
            for i in cutlass.range(warp, parts.count, NUM_WARPS, unroll=4):
                lse, values = parts.load(i, row, col)
                largest, total = _add(rSum, largest, total, lse, Float32(1.0), values)
        for c in cutlass.range_constexpr(COLS):
            sParts[c, lane, warp] = rSum[c]
        sParts[COLS, lane, warp], sParts[COLS + 1, lane, warp] = largest, total
        cute.arch.sync_threads()
        if warp == 0 and col < self.traits.problem.v_dim:
            for other in cutlass.range_constexpr(1, NUM_WARPS):
                values = [sParts[c, lane, other] for c in range(COLS)]
                weight = sParts[COLS + 1, lane, other]
                largest, total = _add(rSum, largest, total, sParts[COLS, lane, other], weight, values)
            if cutlass.const_expr(self.traits.problem.has_sinks):
                largest, total = _add(rSum, largest, total, parts.sink(row), Float32(1.0), [Float32(0.0)] * COLS)
            scale = reciprocal_or_zero(total)
            parts.store(row, col, [rSum[c] * scale for c in range(COLS)])
            if cutlass.const_expr(self.traits.problem.has_lse):
                if col == 0:
                    parts.store_lse(row, joined_lse(largest, total))
        cute.arch.sync_threads()


class Parts(TraceConstant):
    """The parts of one work tile: what the split `first` began and those up to `last` went on with."""

    def __init__(self, counts: Counts, splits, work: WorkTile, first, last):
        self.work, self.first, self.count = work, first, last - first + 1
        self.partials = Partials(counts, splits)

    def load(self, i, row, col):
        """(log-sum-exp, four columns) of a row of part `i`."""
        part = select(i == 0, Int32(BEGUN), Int32(CONTINUED))
        index = self.partials.index(self.first + i, self.work.head, part, row)
        lse = gmem_run(Float32, self.partials.lse_address(index), 1)[0]
        return lse, gmem_run(Float32, self.partials.row_address(index) + Int64(col * 4), COLS).load()

    def sink(self, row):
        return self.work.sink(self.work.first_row + row)

    def store(self, row, col, values) -> None:
        mOut = self.work.ops.mOut
        address = self.work.query_address(mOut, self.work.first_row + row) + Int64(col * 2)
        store_rounded(mOut.element_type, address, values)

    def store_lse(self, row, lse) -> None:
        store_lse(self.work, self.work.first_row + row, lse)


def _add(rSum: cute.Tensor, largest, total, lse, weight, values):
    """Add `values`, a sum of weights `weight` with the largest log-sum-exp `lse`; (largest, total) after it. A part
    without keys adds nothing."""
    after = cute.arch.fmax(largest, lse)
    shift = Float32(select(after == NEG_INF, Float32(0.0), after))
    before, here = (exp2_fast((x - shift) * LOG2_E) for x in (largest, lse))
    for c in range(COLS):
        rSum[c] = rSum[c] * before + values[c] * here
    return after, total * before + weight * here

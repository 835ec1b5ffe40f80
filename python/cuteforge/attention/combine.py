"""Joins the partial results of the CTAs that shared the keys of a unit: a weighted mean by their log-sum-exps, in a fixed order."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute

from cuteforge.attention.config import WARP, Traits
from cuteforge.attention.result import reciprocal_or_zero, store_rounded
from cuteforge.attention.work import Counts, Operands, row_address
from cuteforge.device.copy import gmem_run
from cuteforge.device.math import LN_2, LOG2_E, NEG_INF, exp2_fast, select
from cuteforge.device.traced import named_kernel

NUM_WARPS = 4
COLS = 4  # columns a lane and round


@named_kernel("attention_combine")
class Combine:
    """A warp for each row of the output."""

    def __init__(self, traits: Traits):
        self.traits = traits

    @cute.jit
    def launch(self, ops: Operands, counts: Counts, splits: Int32, stream: cuda.CUstream):
        rows = counts.requests * counts.kv_heads * counts.group * counts.tokens
        self.kernel(ops.mOut, ops.mLse, ops.mWorkspace, counts.kv_heads, splits, rows).launch(
            grid=((rows + NUM_WARPS - 1) // NUM_WARPS, 1, 1),
            block=(WARP * NUM_WARPS, 1, 1),
            stream=stream,
            use_pdl=self.traits.dependent_launch,
        )

    @cute.kernel
    def kernel(
        self,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        mWorkspace: cute.Tensor,
        kv_heads: Int32,
        splits: Int32,
        num_rows: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        row, lane = bidx * NUM_WARPS + tidx // WARP, tidx % WARP
        if cutlass.const_expr(self.traits.dependent_launch):
            cute.arch.griddepcontrol_wait()
        if row < num_rows:
            self._combine_row(mOut, mLse, mWorkspace, kv_heads, splits, num_rows, row, lane)

    @cute.jit
    def _combine_row(
        self, mOut, mLse, mWorkspace, kv_heads: Int32, splits: Int32, num_rows: Int32, row: Int32, lane: Int32
    ):
        """`row` counts the rows of all units: request, KV head, token, head of the group."""
        v_dim, base = self.traits.problem.v_dim, mWorkspace.iterator.toint()
        rows_of_unit = num_rows // (mOut.shape[0] * kv_heads)
        unit, row_of_unit = row // rows_of_unit, row % rows_of_unit
        first = Int64(unit) * Int64(splits * rows_of_unit) + Int64(row_of_unit)
        lse_base = base + Int64(num_rows) * Int64(splits) * (v_dim * 4)
        lse = self._joined_lse(lse_base, first, splits, rows_of_unit, lane)
        rSum = cute.make_rmem_tensor((-(-v_dim // (WARP * COLS)), COLS), Float32)
        rSum.fill(0.0)
        total = Float32(0.0)
        for split in cutlass.range(splits, unroll=4):
            index = first + Int64(split) * Int64(rows_of_unit)
            weight = exp2_fast((gmem_run(Float32, lse_base + index * 4, 1)[0] - lse) * LOG2_E)
            total = total + weight
            for part in cutlass.range_constexpr(rSum.shape[0]):
                col = (part * WARP + lane) * COLS
                if col < v_dim:
                    values = gmem_run(Float32, base + (index * v_dim + Int64(col)) * 4, COLS).load()
                    for c in cutlass.range_constexpr(COLS):
                        rSum[part, c] = rSum[part, c] + weight * values[c]
        scale = reciprocal_or_zero(total)
        out_index = self._out_index(mOut, kv_heads, unit, row_of_unit, rows_of_unit)
        for part in cutlass.range_constexpr(rSum.shape[0]):
            col = (part * WARP + lane) * COLS
            if col < v_dim:
                address = row_address(mOut, out_index) + Int64(col * 2)
                store_rounded(mOut.element_type, address, [rSum[part, c] * scale for c in range(COLS)])
        if cutlass.const_expr(mLse is not None):
            joined = lse + cute.math.log2(total, fastmath=True) * LN_2
            if lane == 0:
                mLse[_lse_index(out_index)] = Float32(select(total == 0.0, Float32(NEG_INF), joined))

    def _out_index(self, mOut, kv_heads, unit, row, rows_of_unit):
        """(request, token, query head), or (request, query head) where there is one token."""
        batch, kv_head = unit // kv_heads, unit % kv_heads
        group = mOut.shape[len(mOut.shape) - 2] // kv_heads
        head = kv_head * group + row % group
        return (batch, row // group, head) if len(mOut.shape) == 4 else (batch, head)

    @cute.jit
    def _joined_lse(self, lse_base, first, splits: Int32, stride: Int32, lane: Int32):
        """The largest log-sum-exp of the splits, 0 if none has seen a key."""
        largest = Float32(NEG_INF)
        for split in cutlass.range(lane, splits, WARP, unroll=1):
            address = lse_base + (first + Int64(split) * Int64(stride)) * 4
            largest = cute.arch.fmax(largest, gmem_run(Float32, address, 1)[0])
        for distance in cutlass.range_constexpr(5):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << distance))
        return Float32(select(largest == NEG_INF, Float32(0.0), largest))


def _lse_index(out_index: tuple) -> tuple:
    """(request, query head, token) of a row of the output."""
    batch, *token, head = out_index
    return (batch, head, *(token or [0]))

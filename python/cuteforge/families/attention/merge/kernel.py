"""Joins two partial results of attention: a mean of the rows weighted by the exponentials of their log-sum-exps.

Memory-bound: every element is read or written once, 16 bytes a lane.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.device.copy import gmem_run, load_fp32, row_address
from cuteforge.device.dtypes import DTYPES
from cuteforge.device.fake_operands import FakeOperands
from cuteforge.device.math import NEG_INF, div_rn, exp_accurate, fma_rn, mul_rn, rcp_rn, select
from cuteforge.device.traced import named_kernel
from cuteforge.families.attention.merge.config import ACCESS_BYTES, MergeTraits
from cuteforge.runtime.arch import WARP
from cuteforge.runtime.build import Build


@named_kernel("merge_state")
class Merge:
    """The kernel for one `MergeTraits`; calling it launches."""

    def __init__(self, traits: MergeTraits):
        self.traits = traits

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (B, L, H, D) or (T, H, D)
        mLseA: cute.Tensor,  # (B, H, L) or (H, T)
        mB: cute.Tensor,  # as mA
        mLseB: cute.Tensor,  # as mLseA
        mOut: cute.Tensor,  # as mA
        mLse: cute.Tensor,  # as mLseA
        stream: cuda.CUstream,
    ):
        """As many CTAs as a token has heads share `rows_per_cta` tokens: no number of rows is formed, which could pass
        2**31."""
        rows, heads = self.traits.rows_per_cta, mA.shape[len(mA.shape) - 2]
        tokens = mA.shape[0]
        if cutlass.const_expr(self.traits.queries == "batch"):
            tokens = mA.shape[0] * mA.shape[1]
        num_ctas = tokens // rows * heads + (tokens % rows * heads + (rows - 1)) // rows
        if num_ctas > 0:
            self.kernel(mA, mLseA, mB, mLseB, mOut, mLse, tokens).launch(
                grid=(num_ctas, 1, 1), block=(WARP * self.traits.num_warps, 1, 1), stream=stream
            )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,  # (B, L, H, D) or (T, H, D)
        mLseA: cute.Tensor,  # (B, H, L) or (H, T)
        mB: cute.Tensor,  # as mA
        mLseB: cute.Tensor,  # as mLseA
        mOut: cute.Tensor,  # as mA
        mLse: cute.Tensor,  # as mLseA
        tokens: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        traits, heads = self.traits, mA.shape[len(mA.shape) - 2]
        block, part = bidx // heads, bidx % heads
        rest = part * traits.rows_per_cta + tidx // traits.lanes_per_row
        token, head = block * traits.rows_per_cta + rest // heads, rest % heads
        lane = tidx % traits.lanes_per_row
        # The last CTA may have more rows than are left: those look at token 0 and write nothing, as the barrier is for
        # whole warps.
        wanted = token < tokens
        index, lse_index = self._indices(mA, select(wanted, token, Int32(0)), head)
        weight_a, weight_b, lse = weights(mLseA[lse_index], mLseB[lse_index])
        if wanted:
            for first in cutlass.range_constexpr(0, traits.runs, traits.lanes_per_row):
                if first + lane < traits.runs:
                    offset = Int64((first + lane) * ACCESS_BYTES)
                    a, b, out = (row_address(m, index) + offset for m in (mA, mB, mOut))
                    self._join(a, weight_a, b, weight_b, out)
        # In place, the lse of a row is written where all its lanes have read.
        cute.arch.sync_warp()
        if wanted and lane == 0:
            mLse[lse_index] = lse

    def _indices(self, mA: cute.Tensor, token, head):
        """Of a row in the results, and in the log-sum-exps."""
        if self.traits.queries == "packed":
            return (token, head), (head, token)
        batch, token = token // mA.shape[1], token % mA.shape[1]
        return (batch, token, head), (batch, head, token)

    def _join(self, a, weight_a, b, weight_b, out) -> None:
        """One access of a row: addresses and weights of the parts, address of the result."""
        dtype, elems = DTYPES[self.traits.dtype], self.traits.access_elems
        # both loads before any use, not only where a weight needs them: one latency
        rA, rB = gmem_run(dtype, a, elems), gmem_run(dtype, b, elems)
        parts = zip(load_fp32(rA), load_fp32(rB))
        rOut = cute.make_rmem_tensor(elems, dtype)
        for i, (value_a, value_b) in enumerate(parts):
            # what an empty part holds may be NaN
            value_a, value_b = _unless_empty(value_a, weight_a), _unless_empty(value_b, weight_b)
            rOut[i] = fma_rn(value_b, weight_b, mul_rn(value_a, weight_a)).to(dtype)
        gmem_run(dtype, out, elems).store(rOut.load())


def _unless_empty(value, weight):
    return Float32(select(weight == 0.0, Float32(0.0), value))


def weights(lse_a, lse_b):
    """What the rows of the parts are multiplied by, and the log-sum-exp of both; 0, 0 and -inf where neither has a
    key."""
    largest = cute.arch.fmax(lse_a, lse_b)
    shift = Float32(select(largest == NEG_INF, Float32(0.0), largest))
    weight_a, weight_b = exp_accurate(lse_a - shift), exp_accurate(lse_b - shift)
    total = weight_a + weight_b
    inverse = Float32(select(total == 0.0, Float32(0.0), rcp_rn(total)))
    smaller = Float32(select(weight_a < weight_b, weight_a, weight_b))
    # The logarithm of 0 is -inf.
    lse = shift + Float32(select(total < 1.0, cute.math.log(total), _log1p(smaller, total)))
    return weight_a * inverse, weight_b * inverse, lse


def _log1p(x, one_plus_x):
    """ln(1 + x) for 0 <= x <= 1, of which `one_plus_x` has lost digits: they are made up for by what is left of x in it
    (Kahan)."""
    rounded = one_plus_x - 1.0
    return select(rounded == 0.0, x, cute.math.log(one_plus_x) * div_rn(x, rounded))


def build(traits: MergeTraits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    rows, lses = {"packed": ("T H D", "H T"), "batch": ("B L H D", "B H L")}[traits.queries]
    fake = FakeOperands({"D": traits.head_dim})
    pairs = [(fake.tensor(rows, traits.dtype, ACCESS_BYTES), fake.tensor(lses, "float32", 4)) for _ in range(3)]
    args = (*(operand for pair in pairs for operand in pair), make_fake_stream())
    return Build(Merge(traits).__call__, args, "merge_state")

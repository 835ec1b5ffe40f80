"""Backward kernels: gradients of kv and score in one pass over the windows, and of ape by a fixed-order sum.

Every consumed (token, column) belongs to one window, so grad_kv and grad_score are stored without atomics; what no window consumes is stored
as 0 by `ZeroFill`. The gradient of ape adds up over all rows: each warp sums its rows in registers, the warps of a CTA are joined in
shared memory, and the CTAs either leave partial sums for a second kernel that adds them in a fixed order, or use atomics.

For ratio <= 16 the arithmetic repeats the eager fp32 softmax backward bit for bit: serial sums, p = e / total, t = round(dp * p),
dz = fma(p, -sum t, t).
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.csa.compressor.config import Traits
from cuteforge.csa.compressor.fake_operands import backward_operands
from cuteforge.csa.compressor.pooling import Accurate, Fast, PartExchange, pool_part
from cuteforge.csa.compressor.window import NO_ROW, WindowStream, launch_shape, row_plan
from cuteforge.csa.compressor.zero_fill import ZeroFill
from cuteforge.device.copy import Rows
from cuteforge.device.math import MIN_EXACT_NUMERATOR, div_by, div_rn, fma_rn, mul_rn, rcp_rn, sum_rn
from cuteforge.device.segments import WARP
from cuteforge.runtime.compile_cache import Build


class Backward:
    """The kernels for one `Traits`. `with_workspace` and `with_atomics` are the two host entries."""

    def __init__(self, traits: Traits):
        self.traits = traits
        # only the unsplit windows (ratio <= 16) promise the bits of the eager computation
        self.arithmetic = Fast if traits.tile.split_window and traits.problem.dtype != "float32" else Accurate

    @cute.jit
    def with_workspace(
        self,
        mKV: cute.Tensor,
        mScore: cute.Tensor,
        mApe: cute.Tensor,
        mCu: cute.Tensor,
        mCuComp: cute.Tensor,
        mGradOut: cute.Tensor,
        mGradKV: cute.Tensor,
        mGradScore: cute.Tensor,
        mGradApe: cute.Tensor,
        mWorkspace: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Partial sums of the gradient of ape in the workspace, then their sum in a fixed order."""
        num_groups, run_log2 = self._plan(mKV, mGradOut, max_ctas)
        shape = (self.traits.problem.head_dim, self.traits.problem.window, num_groups)
        mSums = cute.make_tensor(cute.recast_ptr(mWorkspace.iterator, dtype=Float32), cute.make_layout(shape))
        operands = (mKV, mScore, mApe, mCu, mCuComp, mGradOut, mGradKV, mGradScore)
        self._launch(operands, mSums, num_groups, run_log2, stream)
        ApeReduction(self.traits).launch(mSums, self._by_window_entry(mGradApe, 1), num_groups, stream)

    @cute.jit
    def with_atomics(
        self,
        mKV: cute.Tensor,
        mScore: cute.Tensor,
        mApe: cute.Tensor,
        mCu: cute.Tensor,
        mCuComp: cute.Tensor,
        mGradOut: cute.Tensor,
        mGradKV: cute.Tensor,
        mGradScore: cute.Tensor,
        mGradApe: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """All CTAs add to the gradient of ape, which is zeroed first."""
        num_groups, run_log2 = self._plan(mKV, mGradOut, max_ctas)
        mSums = self._by_window_entry(mGradApe, num_groups)
        ApeReduction(self.traits).launch(mSums, mSums, Int32(0), stream)
        operands = (mKV, mScore, mApe, mCu, mCuComp, mGradOut, mGradKV, mGradScore)
        self._launch(operands, mSums, num_groups, run_log2, stream)

    def _plan(self, mKV, mGradOut, max_ctas):
        """As `row_plan`. Zero filling is shared out with the rows, so tokens without rows count as rows as well."""
        ratio = self.traits.problem.ratio
        rows = cutlass.max(mGradOut.shape[0], (mKV.shape[0] + ratio - 1) // ratio)
        return row_plan(self.traits, rows, max_ctas)

    def _by_window_entry(self, mGradApe, num_groups):
        """The gradient of ape as (column, window entry, window.group): the layout of the partial sums, the groups on top of each other."""
        problem = self.traits.problem
        shape = (problem.head_dim, (problem.ratio, problem.coff), num_groups)
        return cute.make_tensor(
            mGradApe.iterator, cute.make_layout(shape, stride=(1, (mGradApe.stride[0], problem.head_dim), 0))
        )

    @cute.jit
    def _launch(self, operands, mSums, num_groups: Int32, run_log2: Int32, stream: cuda.CUstream):
        if num_groups > 0:
            self.kernel(*operands, mSums, run_log2).launch(
                **launch_shape(self.traits, num_groups),
                stream=stream,
                use_pdl=self.traits.dependent_launch and not self.traits.deterministic,
            )

    @cute.kernel
    def kernel(
        self,
        mKV: cute.Tensor,
        mScore: cute.Tensor,
        mApe: cute.Tensor,
        mCu: cute.Tensor,
        mCuComp: cute.Tensor,
        mGradOut: cute.Tensor,
        mGradKV: cute.Tensor,
        mGradScore: cute.Tensor,
        mSums: cute.Tensor,
        run_log2: Int32,
    ):
        if cutlass.const_expr(self.traits.dependent_launch):
            cute.arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()
        tile = self.traits.tile
        window = WindowStream(self.traits, smem, mKV, mScore, mCu, mCuComp, mGradOut, mGradOut.shape[0], run_log2)
        exchange = PartExchange(self.traits, smem) if cutlass.const_expr(tile.split_window) else None
        outputs = (Rows(mGradKV), Rows(mGradScore))
        rApe = window.load_ape(mApe)
        state = window.start()
        ZeroFill(self.traits.problem, mCu, mCuComp, mKV.shape[0], mGradOut.shape[0], outputs).run(*window.grid_warp())
        rSum = cute.make_rmem_tensor((tile.cols_per_lane, self.traits.slots), Float32)
        rSum.fill(0.0)
        stage = Int32(0)
        for step in cutlass.range(window.count, unroll=1):
            state = window.advance(step, stage, state)
            gradients = self._gradients(window, exchange, rApe, stage, step)
            self._store(window, outputs, rSum, window.sCode[stage], gradients)
            stage = window.next_stage(stage)
        if cutlass.const_expr(self.traits.warps_along_rows > 1):
            self._join_warps(window, rSum)
        if cutlass.const_expr(self.traits.dependent_launch and not self.traits.deterministic):
            cute.arch.griddepcontrol_wait()
        self._add_up(window, mSums, rSum)

    def _gradients(self, window, exchange, rApe, stage, step):
        """(gradients of the values, gradients of the scores) by window entry, for each of the lane's columns."""
        split_window = self.traits.tile.split_window
        grad_out = window.read_grad_out(stage)
        parts = pool_part(window, rApe, stage, self.arithmetic, empty_is_nan=not split_window)
        if not split_window:
            return [self._eager_gradients(g, part) for g, part in zip(grad_out, parts)]
        exchange.publish(window, parts, step, self.arithmetic)
        # read again: kept over the barrier, the values would cost a register for each window entry
        values = [window.read_values(stage, k) for k in range(self.traits.slots)]
        return [
            self._split_gradients(
                g, part, [value[c] for value in values], *exchange.join(window, c, step, self.arithmetic)
            )
            for c, (g, part) in enumerate(zip(grad_out, parts))
        ]

    def _eager_gradients(self, g, part):
        """In the order and rounding of the eager softmax backward."""
        weights = self._divide(part)
        terms = [mul_rn(mul_rn(g, value), weight) for value, weight in zip(part.values, weights)]
        total = sum_rn(terms)
        return [mul_rn(g, weight) for weight in weights], [
            fma_rn(weight, -total, term) for weight, term in zip(weights, terms)
        ]

    def _split_gradients(self, g, part, values, largest, inverse, mean):
        """From the joined window: sum of dp * p is g * mean."""
        factor = self.arithmetic.exp(part.max - largest) * inverse
        weights = [weight * factor for weight in part.weights]
        total = g * mean
        return [g * weight for weight in weights], [
            weight * (g * value - total) for weight, value in zip(weights, values)
        ]

    @cute.jit
    def _divide(self, part):
        """Correctly rounded weight / total of every entry. Weights too small for the short division are rare."""
        count = len(part.weights)
        rWeight = cute.make_rmem_tensor(count, Float32)
        smallest = part.weights[0]
        for k in cutlass.range_constexpr(1, count):
            smallest = cute.arch.fmin(smallest, part.weights[k])
        if smallest >= MIN_EXACT_NUMERATOR:
            inverse = rcp_rn(part.total)
            for k in cutlass.range_constexpr(count):
                rWeight[k] = div_by(part.weights[k], -part.total, inverse)
        else:
            for k in cutlass.range_constexpr(count):
                rWeight[k] = div_rn(part.weights[k], part.total)
        return [rWeight[k] for k in range(count)]

    @cute.jit
    def _store(self, window, outputs, rSum, code: Int32, gradients):
        """Store the gradients of one row's window, and add those of the scores up for ape."""
        if code != NO_ROW:
            token = window.first_token(code)
            for slot in cutlass.range_constexpr(self.traits.slots):
                valid = window.is_valid(slot, code < 0)
                if cutlass.const_expr(valid is None):
                    self._store_entry(window, outputs, rSum, token, slot, gradients)
                else:
                    self._store_entry_if(valid, window, outputs, rSum, token, slot, gradients)

    @cute.jit
    def _store_entry_if(self, valid, window, outputs, rSum, token, slot, gradients):
        if valid:
            self._store_entry(window, outputs, rSum, token, slot, gradients)

    def _store_entry(self, window, outputs, rSum, token, slot, gradients):
        row = token + window.entry(slot)
        _, half_col = window.ape_position(slot)
        window.store(outputs[0], row, half_col, [values[slot] for values, _ in gradients])
        window.store(outputs[1], row, half_col, [scores[slot] for _, scores in gradients])
        for c, (_, scores) in enumerate(gradients):
            rSum[c, slot] = rSum[c, slot] + scores[slot]

    @cute.jit
    def _join_warps(self, window, rSum):
        """Add the sums of the warps that share columns into the first of them, in warp order, through the rings (no copy is in flight)."""
        traits = self.traits
        cols = traits.tile.cols_per_lane
        shape = (cols, traits.slots, WARP, traits.warps_along_cols, traits.warps_along_rows)
        sSum = cute.make_tensor(
            cute.recast_ptr(window.sRings, dtype=Float32), cute.make_layout(shape, stride=self._sum_strides(shape))
        )
        along_cols, along_rows = window.warp % traits.warps_along_cols, window.warp // traits.warps_along_cols
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for slot in cutlass.range_constexpr(traits.slots):
            for c in cutlass.range_constexpr(cols):
                sSum[c, slot, window.lane, along_cols, along_rows] = rSum[c, slot]
        cute.arch.sync_threads()
        for slot in cutlass.range_constexpr(traits.slots):
            for c in cutlass.range_constexpr(cols):
                total = sSum[c, slot, window.lane, along_cols, 0]
                for other in cutlass.range_constexpr(1, traits.warps_along_rows):
                    total = total + sSum[c, slot, window.lane, along_cols, other]
                rSum[c, slot] = total

    def _sum_strides(self, shape):
        cols, slots, lanes, along_cols, _ = shape
        return (1, cols * lanes, cols, cols * lanes * slots, cols * lanes * slots * along_cols)

    @cute.jit
    def _add_up(self, window, mSums, rSum):
        """Hand this CTA's sums on: one writer for each (column, window entry)."""
        problem = self.traits.problem
        writer = Int32(0)
        if cutlass.const_expr(not self.traits.tile.split_window):
            writer = window.warp // self.traits.warps_along_cols
        for slot in cutlass.range_constexpr(self.traits.slots):
            entry = window.entry(slot)
            for c in cutlass.range_constexpr(self.traits.tile.cols_per_lane):
                wanted = window.col + c < problem.head_dim and writer == slot % self.traits.warps_along_rows
                if cutlass.const_expr(self.traits.has_spare_slots):
                    wanted = wanted and entry < problem.window
                if wanted:
                    if cutlass.const_expr(self.traits.deterministic):
                        mSums[window.col + c, entry, window.group] = rSum[c, slot]
                    else:
                        target = mSums.iterator + cute.crd2idx((window.col + c, entry, window.group), mSums.layout)
                        cute.arch.atomic_add(target.llvm_ptr, rSum[c, slot], sem="relaxed", scope="gpu")


class ApeReduction:
    """Sum over the first groups of a (column, window entry, window.group) tensor in a fixed order; no groups gives 0."""

    LANES = 16  # threads that share the groups of one column

    def __init__(self, traits: Traits):
        self.traits = traits

    @cute.jit
    def launch(self, mSums: cute.Tensor, mGradApe: cute.Tensor, num_groups: Int32, stream: cuda.CUstream):
        problem = self.traits.problem
        self.kernel(mSums, mGradApe, num_groups).launch(
            grid=(-(-problem.head_dim // WARP), problem.window, 1), block=(WARP, self.LANES, 1),
            stream=stream,
            use_pdl=self.traits.dependent_launch and self.traits.deterministic,
        )

    @cute.kernel
    def kernel(self, mSums: cute.Tensor, mGradApe: cute.Tensor, num_groups: Int32):
        if cutlass.const_expr(self.traits.dependent_launch):
            # whichever of the two kernels comes second is the one that waits
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        x, y, _ = cute.arch.thread_idx()
        chunk, entry, _ = cute.arch.block_idx()
        col = chunk * WARP + x
        sSum = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((WARP, self.LANES)))
        total = Float32(0.0)
        if col < self.traits.problem.head_dim:
            for group in cutlass.range(y, num_groups, self.LANES, unroll=8):
                total = total + mSums[col, entry, group]
        sSum[x, y] = total
        cute.arch.sync_threads()
        if y == 0 and col < self.traits.problem.head_dim:
            for other in cutlass.range_constexpr(1, self.LANES):
                total = total + sSum[x, other]
            mGradApe[col, entry, 0] = total


def build(traits: Traits) -> Build:
    """The kernels for `traits`, for `runtime.compile_cache`."""
    backward = Backward(traits)
    host = backward.with_workspace if traits.deterministic else backward.with_atomics
    operands = backward_operands(traits.problem, traits.deterministic)
    return Build(host, (*operands, Int32(1), make_fake_stream()), "csa_compressor_backward")

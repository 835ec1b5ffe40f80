"""Backward kernels: gradients of kv and score in one pass over the windows, and of ape by a fixed-order sum.

Every consumed (token, column) belongs to one window, so grad_kv and grad_score are stored without atomics; what no
window consumes is stored as 0 by `ZeroFill`. The gradient of ape adds up over all rows: each warp sums its rows in
registers, the warps of a CTA are joined in shared memory, and the CTAs either leave partial sums for a second kernel
that adds them in a fixed order, or use atomics.

For ratio <= 16 the arithmetic repeats the eager fp32 softmax backward bit for bit: serial sums, p = e / total, t =
round(dp * p), dz = fma(p, -sum t, t).
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.device.math import MIN_EXACT_NUMERATOR, div_by, div_rn, fma_rn, mul_rn, rcp_rn, sum_rn
from cuteforge.device.traced import Operands, named_kernel
from cuteforge.families.csa.compressor.ape_gradient import ApeReduction, ApeSums
from cuteforge.families.csa.compressor.config import Traits
from cuteforge.families.csa.compressor.entry import build_entry
from cuteforge.families.csa.compressor.matrix_rows import Rows
from cuteforge.families.csa.compressor.operands import BACKWARD, device_names
from cuteforge.families.csa.compressor.pooling import Accurate, Fast, PartExchange, logits, pool_part
from cuteforge.families.csa.compressor.row_workers import NO_ROW, RowWorker, launch_shape, row_plan
from cuteforge.families.csa.compressor.window import WindowStream
from cuteforge.families.csa.compressor.zero_fill import Outputs, ZeroFill
from cuteforge.runtime.build import Build


@named_kernel("csa_compressor_backward")
class Backward:
    """The kernels for one `Traits`; calling it launches."""

    def __init__(self, traits: Traits):
        self.traits = traits
        # only the unsplit windows (ratio <= 16) promise the bits of the eager computation
        self.arithmetic = Fast if traits.tile.split_window and traits.problem.dtype != "float32" else Accurate

    @cute.jit
    def __call__(self, *arguments):
        """Args: arguments: the tensors of `entry_names(BACKWARD)`, None for those that the op does not have; the CTAs
        that fill the GPU once; the stream.
        """
        *given, max_ctas, stream = arguments
        ops = Operands(device_names(BACKWARD), given)
        num_teams, log_rows = self._plan(ops, max_ctas)
        if cutlass.const_expr(self.traits.deterministic):
            # partial sums of the gradient of ape in the workspace, then their sum in a fixed order
            shape = (self.traits.problem.head_dim, self.traits.problem.window, num_teams)
            sums = cute.recast_ptr(ops.mWorkspace.iterator, dtype=Float32)
            mSums = cute.make_tensor(sums, cute.make_layout(shape))
            self._launch(tuple(given), mSums, num_teams, log_rows, stream)
            ApeReduction(self.traits).launch(mSums, self._by_window_entry(ops.mGradApe, 1), num_teams, stream)
        else:
            # all CTAs add to the gradient of ape, which is zeroed first
            mSums = self._by_window_entry(ops.mGradApe, num_teams)
            ApeReduction(self.traits).launch(mSums, mSums, Int32(0), stream)
            self._launch(tuple(given), mSums, num_teams, log_rows, stream)

    def _plan(self, ops: Operands, max_ctas):
        """As `row_plan`. Zero filling is shared out with the rows, so tokens without rows count as rows as well."""
        ratio = self.traits.problem.ratio
        rows = cutlass.max(ops.mGradOut.shape[0], (ops.mKv.shape[0] + ratio - 1) // ratio)
        return row_plan(self.traits, rows, max_ctas)

    def _by_window_entry(self, mGradApe, num_teams):
        """The gradient of ape as (column, window entry, team): the layout of the partial sums, the teams on top of each
        other."""
        problem = self.traits.problem
        shape = (problem.head_dim, (problem.ratio, problem.coff), num_teams)
        return cute.make_tensor(
            mGradApe.iterator, cute.make_layout(shape, stride=(1, (mGradApe.stride[0], problem.head_dim), 0))
        )

    @cute.jit
    def _launch(self, given: tuple, mSums: cute.Tensor, num_teams: Int32, log_rows: Int32, stream: cuda.CUstream):
        if num_teams > 0:
            self.kernel(given, mSums, log_rows).launch(
                **launch_shape(self.traits, num_teams),
                stream=stream,
                use_pdl=self.traits.dependent_launch and not self.traits.deterministic,
            )

    @cute.kernel
    def kernel(
        self,
        given: tuple,  # the tensors of `entry_names(BACKWARD)`
        mSums: cute.Tensor,  # (column, window entry, team)
        log_rows: Int32,
    ):
        if cutlass.const_expr(self.traits.dependent_launch):
            cute.arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()
        tile = self.traits.tile
        ops = Operands(device_names(BACKWARD), given)
        num_rows = ops.mGradOut.shape[0]
        rows = RowWorker(self.traits, ops, num_rows, log_rows)
        window = WindowStream(rows, smem, ops)
        exchange = PartExchange(self.traits, smem) if cutlass.const_expr(tile.split_window) else None
        outputs = Outputs(Rows(ops.mGradKv), Rows(ops.mGradScore))
        ape = window.load_ape(ops.mApe)
        state = window.start()
        ZeroFill(rows, num_rows, outputs).run()
        sums = ApeSums(window, mSums)
        stage = Int32(0)
        for step in cutlass.range(rows.count, unroll=1):
            state = window.advance(step, stage, state)
            gradients = self._gradients(window, exchange, ape, stage, step)
            self._store(window, outputs, sums, window.sCode[stage], gradients)
            stage = window.next_stage(stage)
        sums.store()

    def _gradients(self, window, exchange, ape, stage, step):
        """A function from window entry to (gradients of the values, gradients of the scores), one of each for each of
        the lane's columns."""
        grad_out = window.read_grad_out(stage)
        split_window = self.traits.tile.split_window
        parts = pool_part(window, ape, stage, self.arithmetic, empty_is_nan=not split_window)
        if not split_window:
            columns = [self._eager_gradients(g, part) for g, part in zip(grad_out, parts)]
            return lambda slot: ([values[slot] for values, _ in columns], [scores[slot] for _, scores in columns])
        exchange.publish(window, parts, step, self.arithmetic)
        wholes = [exchange.join(window, c, step, self.arithmetic) for c in range(self.traits.tile.cols_per_lane)]
        weigh = (
            self._kept_weights(parts, wholes)
            if self.traits.tile.resident
            else self._new_weights(window, ape, stage, wholes)
        )
        return lambda slot: self._split_gradients(grad_out, window.read_values(stage, slot), weigh(slot), wholes)

    def _eager_gradients(self, g, part):
        """One column, in the order and rounding of the eager softmax backward."""
        weights = self._divide(part)
        terms = [mul_rn(mul_rn(g, value), weight) for value, weight in zip(part.values, weights)]
        negated = -sum_rn(terms)
        return [mul_rn(g, weight) for weight in weights], [
            fma_rn(weight, negated, term) for weight, term in zip(weights, terms)
        ]

    def _split_gradients(self, grad_out, values, weights, wholes):
        """One window entry, given its share of the joined window: the sum of dp * p is g * mean.

        The values were read again: kept over the barrier of the exchange, they would cost a register for each entry.
        """
        value_gradients = [g * weight for g, weight in zip(grad_out, weights)]
        score_gradients = []
        for g, weight, value, whole in zip(grad_out, weights, values, wholes):
            # g - g is 0, or NaN for a gradient that is not finite: the eager sum of dp * p is NaN then
            total = fma_rn(g, whole.mean, g - g)
            score_gradients.append(weight * fma_rn(g, value, -total))
        return value_gradients, score_gradients

    def _kept_weights(self, parts, wholes):
        """A function from window entry to its shares of the joined window, from the weights within the part."""
        factors = [self.arithmetic.exp(part.max - whole.max) * whole.inverse for part, whole in zip(parts, wholes)]
        return lambda slot: [part.weights[slot] * factor for part, factor in zip(parts, factors)]

    def _new_weights(self, window, ape, stage, wholes):
        """The same from the scores, for windows whose weights are too many to keep."""
        return lambda slot: [
            self.arithmetic.weight(z - whole.max) * whole.inverse
            for z, whole in zip(logits(window, ape, stage, slot), wholes)
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
    def _store(self, window, outputs, sums, code: Int32, gradients):
        """Store the gradients of one row's window, and add those of the scores up for ape."""
        if code != NO_ROW:
            token = window.first_token(code)
            if cutlass.const_expr(self.traits.tile.resident):
                for slot in cutlass.range_constexpr(self.traits.slots):
                    self._store_if_valid(window, outputs, sums, token, code, slot, gradients)
            else:
                # nothing is kept for an entry, so the loop need not be unrolled: hundreds of addresses would not fit
                # the registers
                for slot in cutlass.range(self.traits.slots, unroll=1):
                    self._store_if_valid(window, outputs, sums, token, code, slot, gradients)

    @cute.jit
    def _store_if_valid(self, window, outputs, sums, token, code: Int32, slot, gradients):
        valid = window.is_valid(slot, code < 0)
        if cutlass.const_expr(valid is None):
            self._store_entry(window, outputs, sums, token, slot, gradients)
        elif valid:
            self._store_entry(window, outputs, sums, token, slot, gradients)

    def _store_entry(self, window, outputs, sums, token, slot, gradients):
        block, ape_row = window.position(slot)
        row, half_col = token + block * self.traits.problem.ratio + ape_row, block * self.traits.problem.head_dim
        values, scores = gradients(slot)
        window.store(outputs.kv, row, half_col, values)
        window.store(outputs.score, row, half_col, scores)
        sums.add(slot, scores)


def build(traits: Traits) -> Build:
    """The kernels for `traits`, for `runtime.compile_cache`."""
    return build_entry(Backward(traits), BACKWARD)

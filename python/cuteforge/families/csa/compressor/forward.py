"""Forward kernel: out[row, col] = sum_k v_k * softmax_k(score_k + ape_k) over the window of the row.

One source for sm_80 and up, every ratio, coff, head dim and dtype. Memory-bound: window.py says how the bytes are kept in flight.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.device.copy import Rows
from cuteforge.device.traced import named_kernel
from cuteforge.families.csa.compressor.config import Traits
from cuteforge.families.csa.compressor.fake_operands import forward_operands
from cuteforge.families.csa.compressor.pooling import Accurate, Fast, PartExchange, pool_part
from cuteforge.families.csa.compressor.row_lanes import RowLane, launch_shape, row_plan
from cuteforge.families.csa.compressor.window import WindowStream
from cuteforge.runtime.build import Build


@named_kernel("csa_compressor_forward")
class Forward:
    """The kernel for one `Traits`; calling it launches."""

    def __init__(self, traits: Traits):
        self.traits = traits
        self.arithmetic = Accurate if traits.problem.dtype == "float32" else Fast

    @cute.jit
    def __call__(
        self,
        mKV: cute.Tensor,
        mScore: cute.Tensor,
        mApe: cute.Tensor,
        mCu: cute.Tensor,
        mCuComp: cute.Tensor,
        mOut: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        if mOut.shape[0] > 0:
            groups, run_log2 = row_plan(self.traits, mOut.shape[0], max_ctas)
            self.kernel(mKV, mScore, mApe, mCu, mCuComp, mOut, run_log2).launch(
                **launch_shape(self.traits, groups), stream=stream
            )

    @cute.kernel
    def kernel(
        self,
        mKV: cute.Tensor,
        mScore: cute.Tensor,
        mApe: cute.Tensor,
        mCu: cute.Tensor,
        mCuComp: cute.Tensor,
        mOut: cute.Tensor,
        run_log2: Int32,
    ):
        smem = cutlass.memory.SmemAllocator()
        split_window = self.traits.tile.split_window
        rows = RowLane(self.traits, mCu, mCuComp, mKV.shape[0], mOut.shape[0], run_log2)
        window = WindowStream(rows, smem, mKV, mScore)
        exchange = PartExchange(self.traits, smem) if cutlass.const_expr(split_window) else None
        out = Rows(mOut)
        ape = window.load_ape(mApe)
        state = window.start()
        stage = Int32(0)
        for step in cutlass.range(rows.count, unroll=1):
            state = window.advance(step, stage, state)
            parts = pool_part(window, ape, stage, self.arithmetic, empty_is_nan=not split_window)
            if cutlass.const_expr(split_window):
                self._join_and_store(window, exchange, parts, out, step)
            else:
                window.store(
                    out, window.rows.row(step), 0, [part.mean(self.arithmetic, empty_is_nan=True) for part in parts]
                )
            stage = window.next_stage(stage)

    def _join_and_store(self, window, exchange, parts, out, step):
        exchange.publish(window, parts, step, self.arithmetic)
        self._store_in_turn(window, exchange, out, step)

    @cute.jit
    def _store_in_turn(self, window, exchange, out, step: Int32):
        """The warps take turns at joining the parts of a row."""
        if window.warp == step % self.traits.tile.num_warps:
            cols = range(self.traits.tile.cols_per_lane)
            window.store(
                out, window.rows.row(step), 0, [exchange.join(window, c, step, self.arithmetic)[2] for c in cols]
            )


def build(traits: Traits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    return Build(
        Forward(traits), (*forward_operands(traits.problem), Int32(1), make_fake_stream()), "csa_compressor_forward"
    )

"""Forward kernel: out[row, col] = sum_k v_k * softmax_k(score_k + ape_k) over the window of the row.

One source for sm_80 and up, every ratio, coff, head dim and dtype. Memory-bound: window.py says how the bytes are kept
in flight.
"""

import cutlass
from cutlass import Int32, cute

from cuteforge.device.traced import Operands, named_kernel
from cuteforge.families.csa.compressor.config import Traits
from cuteforge.families.csa.compressor.entry import build_entry
from cuteforge.families.csa.compressor.matrix_rows import Rows
from cuteforge.families.csa.compressor.operands import FORWARD, device_names
from cuteforge.families.csa.compressor.pooling import Accurate, Fast, PartExchange, pool_part
from cuteforge.families.csa.compressor.row_workers import RowWorker, launch_shape, row_plan
from cuteforge.families.csa.compressor.window import WindowStream
from cuteforge.runtime.build import Build


@named_kernel("csa_compressor_forward")
class Forward:
    """The kernel for one `Traits`; calling it launches."""

    def __init__(self, traits: Traits):
        self.traits = traits
        self.arithmetic = Accurate if traits.problem.dtype == "float32" else Fast

    @cute.jit
    def __call__(self, *arguments):
        """Args: arguments: the tensors of `entry_names(FORWARD)`, None for those that the op does not have; the CTAs
        that fill the GPU once; the stream.
        """
        *given, max_ctas, stream = arguments
        num_rows = Operands(device_names(FORWARD), given).mOut.shape[0]
        if num_rows > 0:
            teams, log_rows = row_plan(self.traits, num_rows, max_ctas)
            self.kernel(tuple(given), log_rows).launch(**launch_shape(self.traits, teams), stream=stream)

    @cute.kernel
    def kernel(self, given: tuple, log_rows: Int32):
        ops = Operands(device_names(FORWARD), given)
        smem = cutlass.memory.SmemAllocator()
        split_window = self.traits.tile.split_window
        rows = RowWorker(self.traits, ops, ops.mOut.shape[0], log_rows)
        window = WindowStream(rows, smem, ops)
        exchange = PartExchange(self.traits, smem) if cutlass.const_expr(split_window) else None
        out = Rows(ops.mOut)
        ape = window.load_ape(ops.mApe)
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
        self._store_by_one_warp(window, exchange, out, step)

    @cute.jit
    def _store_by_one_warp(self, window, exchange, out, step: Int32):
        """Row by row another warp joins the parts."""
        if window.warp == step % self.traits.tile.num_warps:
            cols = range(self.traits.tile.cols_per_lane)
            window.store(
                out, window.rows.row(step), 0, [exchange.join(window, c, step, self.arithmetic).mean for c in cols]
            )


def build(traits: Traits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    return build_entry(Forward(traits), FORWARD)

"""The gradient of ape: a sum over all rows of what the windows contribute.

Each CTA adds up its own rows. Then it either leaves its sums in a workspace, which a second kernel adds up in a fixed
order, or adds them to the result with atomics.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.device.traced import TraceConstant, named_kernel
from cuteforge.families.csa.compressor.config import Traits
from cuteforge.families.csa.compressor.window import WindowStream
from cuteforge.runtime.arch import WARP


class ApeSums(TraceConstant):
    """Running sums of this lane's columns and window entries.

    In registers, or for windows with too many entries in `mSums` itself, a (column, window entry, team of CTAs) tensor:
    each element of it belongs to one lane then.
    """

    def __init__(self, window: WindowStream, mSums):
        self.traits, self.window, self.mSums = window.traits, window, mSums
        cols, slots = self.traits.tile.cols_per_lane, self.traits.slots
        if self.traits.tile.resident:
            self.rSum = cute.make_rmem_tensor((cols, slots), Float32)
            self.rSum.fill(0.0)
        elif self.traits.deterministic:
            self._start_from_zero()
        else:
            self._wait_for_zeros()

    @cute.jit
    def _start_from_zero(self):
        for slot in cutlass.range(self.traits.slots, unroll=1):
            for c in cutlass.range_constexpr(self.traits.tile.cols_per_lane):
                self._put(slot, c, Float32(0.0), True)

    def add(self, slot, scores: list) -> None:
        """Add the score gradients of window entry `slot` of one row, one for each of the lane's columns."""
        for c, score in enumerate(scores):
            if self.traits.tile.resident:
                self.rSum[c, slot] = self.rSum[c, slot] + score
            else:
                self._accumulate(slot, c, score)

    def store(self) -> None:
        """Join the warps' sums and put them where the other CTAs' are."""
        if not self.traits.tile.resident:
            return
        if self.traits.rows_per_cta > 1:
            self._join_warps()
        if not self.traits.deterministic:
            self._wait_for_zeros()
        for slot in range(self.traits.slots):
            # with a split window every warp has entries of its own, otherwise `_join_warps` left each sum with one warp
            is_writer = self.traits.tile.split_window or self.window.warp == slot % self.traits.rows_per_cta
            for c in range(self.traits.tile.cols_per_lane):
                self._put(slot, c, self.rSum[c, slot], is_writer)

    def _wait_for_zeros(self) -> None:
        if self.traits.dependent_launch:
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def _join_warps(self):
        """Add up the sums of the CTA's warps, in warp order, through the rings (no copy is in flight). Warp
        ``slot % warps`` gets the sum."""
        traits, window, rSum = self.traits, self.window, self.rSum
        cols = traits.tile.cols_per_lane
        strides = (1, cols * WARP, cols, cols * WARP * traits.slots)
        layout = cute.make_layout((cols, traits.slots, WARP, traits.rows_per_cta), stride=strides)
        sSum = cute.make_tensor(cute.recast_ptr(window.sRings, dtype=Float32), layout)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for slot in cutlass.range_constexpr(traits.slots):
            for c in cutlass.range_constexpr(cols):
                sSum[c, slot, window.lane, window.warp] = rSum[c, slot]
        cute.arch.sync_threads()
        for slot in cutlass.range_constexpr(traits.slots):
            if window.warp == slot % traits.rows_per_cta:
                for c in cutlass.range_constexpr(cols):
                    total = sSum[c, slot, window.lane, 0]
                    for other in cutlass.range_constexpr(1, traits.rows_per_cta):
                        total = total + sSum[c, slot, window.lane, other]
                    rSum[c, slot] = total

    @cute.jit
    def _put(self, slot, c: int, value, is_writer):
        """Store, or with atomics add, one sum."""
        if self._exists(slot, c) and is_writer:
            if cutlass.const_expr(self.traits.deterministic):
                self.mSums[self._index(slot, c)] = value
            else:
                self._add_atomically(slot, c, value)

    @cute.jit
    def _accumulate(self, slot, c: int, value):
        if self._exists(slot, c):
            if cutlass.const_expr(self.traits.deterministic):
                self.mSums[self._index(slot, c)] = self.mSums[self._index(slot, c)] + value
            else:
                self._add_atomically(slot, c, value)

    def _add_atomically(self, slot, c: int, value) -> None:
        target = self.mSums.iterator + cute.crd2idx(self._index(slot, c), self.mSums.layout)
        cute.arch.atomic_add(target.llvm_ptr, value, sem="relaxed", scope="gpu")

    def _index(self, slot, c: int):
        block, ape_row = self.window.position(slot)
        return self.window.col + c, block * self.traits.problem.ratio + ape_row, self.window.rows.team

    def _exists(self, slot, c: int):
        problem = self.traits.problem
        in_columns = self.window.col + c < problem.head_dim
        _, ape_row = self.window.position(slot)
        return in_columns & (ape_row < problem.ratio) if self.traits.has_spare_slots else in_columns


@named_kernel("csa_compressor_ape_reduction")
class ApeReduction:
    """Sum over the first teams of a (column, window entry, team) tensor in a fixed order; no teams gives 0."""

    LANES = 16  # threads that share the teams of one column

    def __init__(self, traits: Traits):
        self.traits = traits

    @cute.jit
    def launch(
        self,
        mSums: cute.Tensor,  # (column, window entry, team)
        mGradApe: cute.Tensor,  # (column, window entry, 1)
        num_teams: Int32,
        stream: cuda.CUstream,
    ):
        problem = self.traits.problem
        self.kernel(mSums, mGradApe, num_teams).launch(
            grid=(-(-problem.head_dim // WARP), problem.window, 1),
            block=(WARP, self.LANES, 1),
            stream=stream,
            use_pdl=self.traits.dependent_launch and self.traits.deterministic,
        )

    @cute.kernel
    def kernel(
        self,
        mSums: cute.Tensor,  # (column, window entry, team)
        mGradApe: cute.Tensor,  # (column, window entry, 1)
        num_teams: Int32,
    ):
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
            for team in cutlass.range(y, num_teams, self.LANES, unroll=8):
                total = total + mSums[col, entry, team]
        sSum[x, y] = total
        cute.arch.sync_threads()
        if y == 0 and col < self.traits.problem.head_dim:
            for other in cutlass.range_constexpr(1, self.LANES):
                total = total + sSum[x, other]
            mGradApe[col, entry, 0] = total

"""Online softmax over score fragments of 16-row blocks: running maxima, sums, and weights as left operands of the next
product.

Scores are taken times a positive factor that turns exp into exp2. A row that has seen no key has the maximum -inf; it
is replaced by 0 where it is subtracted, so that its weights are 0 and not NaN.
"""

import cutlass
from cutlass import Boolean, Float32, cute

from cuteforge.device.math import LN_2, NEG_INF, add_rn, exp2_fast, fma_rn, mul_rn, select
from cuteforge.device.traced import TraceConstant

HALVES = 2  # a lane holds rows g and g + 8 of a block


class OnlineSoftmax(TraceConstant):
    """State of a lane's rows; `factor` is positive: ``|scale| * log2(e)``, or what scores are capped at times log2(e).
    Where a bias has been added it is 1.

    `rMax[block, half]` is the largest score so far, in every lane of the row's four. `rSum` is the lane's own part of
    the row's sum of weights before they are rounded, kept where `with_sums`: what a log-sum-exp is made of.
    """

    def __init__(self, m_blocks: int, factor, with_sums: bool):
        self.m_blocks, self.factor, self.with_sums = m_blocks, factor, with_sums
        self.rMax = cute.make_rmem_tensor((m_blocks, HALVES), Float32)
        self.rSum = cute.make_rmem_tensor((m_blocks, HALVES), Float32)
        self.rMax.fill(NEG_INF)
        self.rSum.fill(0.0)

    @cute.jit
    def update(self, rS: cute.Tensor, *sums: cute.Tensor):
        """Take the scores of a tile in: turn `rS` (m_blocks, n_tiles, 4) into weights, and scale `sums`, of the same
        shape but for n_tiles."""
        rScale, grew = self.weigh(rS)
        self.rescale(rScale, grew, *sums)

    @cute.jit
    def weigh(self, rS: cute.Tensor):
        """Turn the scores of a tile into weights. Returns what sums so far have to be scaled by, and whether any row
        needs it."""
        rScale = cute.make_rmem_tensor((self.m_blocks, HALVES), Float32)
        grew = False
        for block in cutlass.range_constexpr(self.m_blocks):
            for half in cutlass.range_constexpr(HALVES):
                before = self.rMax[block, half]
                largest = self._row_max(rS, block, half, before)
                shift = finite_or_zero(largest) * self.factor
                # exactly 1 where nothing grew, the product being rounded as it is in `shift`: tiles that a row does not
                # see leave its bits alone
                rScale[block, half] = exp2_fast(add_rn(mul_rn(before, self.factor), -shift))
                self._weigh(rS, block, half, shift)
                self.rMax[block, half] = largest
                grew = (largest > before) | grew
        if cutlass.const_expr(self.with_sums):
            self._add_up(rS, rScale)
        return rScale, grew

    @cute.jit
    def rescale(self, rScale: cute.Tensor, grew, *sums: cute.Tensor):
        """Scale sums. Once a row has met its largest score nothing needs it: most tiles of a long row."""
        if cute.arch.vote_any_sync(grew):
            for rX in sums:
                _scale_rows(rX, rScale)

    def _row_max(self, rS, block: int, half: int, start):
        largest = start
        for n in range(rS.shape[1]):
            for e in range(HALVES):
                largest = cute.arch.fmax(largest, rS[block, n, 2 * half + e])
        for distance in (1, 2):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, distance))
        return largest

    def _weigh(self, rS, block: int, half: int, shift) -> None:
        for n in range(rS.shape[1]):
            for e in range(2 * half, 2 * half + 2):
                rS[block, n, e] = exp2_fast(fma_rn(rS[block, n, e], self.factor, -shift))

    def _add_up(self, rS, rScale) -> None:
        for block in range(self.m_blocks):
            for half in range(HALVES):
                total = self.rSum[block, half] * rScale[block, half]
                for n in range(rS.shape[1]):
                    total = total + (rS[block, n, 2 * half] + rS[block, n, 2 * half + 1])
                self.rSum[block, half] = total

    def is_added_up(self):
        """True, which the compiler cannot know: what depends on it runs after the weights so far were found and added
        up."""
        added_up = Boolean(True)
        for block in range(self.m_blocks):
            for half in range(HALVES):
                added_up = added_up & ~(self.rSum[block, half] < 0.0)
        return added_up

    def row_sum(self, block: int, half: int):
        """The whole row's sum, in each of its four lanes."""
        total = self.rSum[block, half]
        for distance in (1, 2):
            total = total + cute.arch.shuffle_sync_bfly(total, distance)
        return total


def log_sum_exp(shift, total):
    """ln of ``total * 2**shift``, -inf where the total is 0."""
    return (shift + cute.math.log2(total, fastmath=True)) * LN_2


def joined_lse(largest, total):
    """ln of ``total * exp(largest)``, -inf where the total is 0: the log-sum-exp of parts, from the largest of
    theirs."""
    lse = largest + cute.math.log2(total, fastmath=True) * LN_2
    return Float32(select(total == 0.0, Float32(NEG_INF), lse))


def finite_or_zero(largest):
    return Float32(select(largest == NEG_INF, Float32(0.0), largest))


def _scale_rows(rX: cute.Tensor, rScale: cute.Tensor) -> None:
    for block in range(rX.shape[0]):
        for n in range(rX.shape[1]):
            for e in range(4):
                rX[block, n, e] = rX[block, n, e] * rScale[block, e // 2]

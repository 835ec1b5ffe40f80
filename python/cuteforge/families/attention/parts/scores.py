"""How scores, the products of queries and keys, become what the softmax takes: times a positive factor, and capped
where the op has a cap."""

import cutlass
from cutlass import Float32, cute

from cuteforge.device.math import LOG2_E, select, tanh_scaled
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.parts.softmax import HALVES


def score_factor(scale, softcap) -> Float32:
    """What scores are taken times, so that exp becomes exp2; of capped ones, which are between -1 and 1."""
    if softcap is not None:
        return softcap * LOG2_E
    return Float32(select(scale == 0.0, Float32(1.0), cutlass.max(scale, -scale) * LOG2_E))


def weighing_factor(ops, scale) -> Float32:
    """What the softmax takes scores times: after a bias they are what exp2 takes."""
    return score_factor(scale, ops.softcap) if ops.mBias is None else Float32(1.0)


class ScoreCap(TraceConstant):
    """Turns scores, which have the sign of the scale already, into ``tanh(|scale| * score / softcap)``; without a
    softcap it leaves them alone."""

    def __init__(self, scale, softcap):
        self.scale = None if softcap is None else cutlass.max(scale, -scale) * (2 * LOG2_E) / softcap

    @cute.jit
    def apply(self, rS: cute.Tensor):
        """Four of a row at a time; a NaN among them makes NaN of all."""
        if cutlass.const_expr(self.scale is not None):
            for block in cutlass.range_constexpr(rS.shape[0]):
                for n in cutlass.range_constexpr(0, rS.shape[1], 2):
                    for half in cutlass.range_constexpr(HALVES):
                        indices = [(n + i, 2 * half + e) for i in range(2) for e in range(2)]
                        capped = tanh_scaled([rS[block, m, e] for m, e in indices], self.scale)
                        for (m, e), value in zip(indices, capped):
                            rS[block, m, e] = value

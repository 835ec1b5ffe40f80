"""From the products of queries and keys to what the softmax takes: the cap, then the bias, then the mask."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.parts.bias import ScoreBias
from cuteforge.families.attention.parts.mask import ScoreMask
from cuteforge.families.attention.parts.scores import ScoreCap
from cuteforge.families.attention.work.tile import WorkTile


class LookedUp(NamedTuple):
    """What was looked up for a tile of keys; None where there is nothing, or not yet.

    Attributes:
        mask: as `ScoreMask.look_up` gives it.
        bias: as `ScoreBias.look_up` does.
    """

    mask: Any
    bias: Any


class Scoring(TraceConstant):
    """What becomes of a lane's scores.

    Args:
        rows: a lane's packed rows, by block and half.
        scale: of the scores, which have its sign already.
    """

    def __init__(self, work: WorkTile, rows: list, scale, lane):
        self.traits = work.traits
        self.mask, self.cap = ScoreMask(work, rows, lane), ScoreCap(scale, work.ops.softcap)
        self.bias = ScoreBias(work, rows, scale, lane)

    def look_up(self, tile) -> LookedUp:
        """What the mask and the bias have for a tile of keys, on its way while scores are computed."""
        return LookedUp(self.mask.look_up(tile) if self.traits.mask_is_ahead else None, self.bias.look_up(tile))

    @cute.jit
    def apply(self, rS: cute.Tensor, tile: Int32, found: LookedUp):
        """To the scores of a tile of keys, `rS` (m_blocks, n_tiles, 4); `found` is what was looked up for it."""
        masked = self.mask.look_up(tile) if found.mask is None else found.mask
        if cutlass.const_expr(self.cap.scale is not None):
            # Four of a row are capped together. What does not count may be NaN and must not reach what does; -inf would
            # become NaN where the scale is 0.
            self.mask.apply(rS, tile, masked, 0.0)
            self.cap.apply(rS)
        self.bias.add(rS, tile, found.bias)
        self.mask.apply(rS, tile, masked)

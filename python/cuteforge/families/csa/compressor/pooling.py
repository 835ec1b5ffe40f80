"""Softmax pooling of a window that the warps of a CTA share: each pools its part, then the parts are joined through
shared memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Float32, cute

from cuteforge.device.math import (
    NEG_INF,
    dot,
    exp_accurate,
    exp_fast,
    max_of,
    rcp_approx,
    rcp_rn,
    select,
    sum_rn,
    where,
)
from cuteforge.device.traced import TraceConstant
from cuteforge.families.csa.compressor.config import Traits
from cuteforge.families.csa.compressor.window import WindowStream
from cuteforge.runtime.arch import WARP


class Accurate:
    """Weights with the bits of the eager computation."""

    exp = staticmethod(exp_accurate)
    weight = staticmethod(exp_accurate)
    rcp = staticmethod(rcp_rn)

    @staticmethod
    def mean(values, weights, inverse):
        """The weights are divided before they meet the values, so that large finite values do not overflow."""
        return dot(values, [weight * inverse for weight in weights])


class Fast:
    """For results of 16 bits: half the instructions, an error of about |z - max| * 2**-24."""

    # A window has at most 512 entries: weights of at most 2**-9 keep a sum of large finite values from overflowing.
    LOG2_SCALE = -9

    exp = staticmethod(exp_fast)
    rcp = staticmethod(rcp_approx)

    @staticmethod
    def weight(x):
        return exp_fast(x, Fast.LOG2_SCALE)

    @staticmethod
    def mean(values, weights, inverse):
        return dot(values, weights) * inverse


@dataclass
class Part:
    """One column of a part of a window: its largest z, the weights exp(z - max) up to a common factor, their sum, and
    the values."""

    max: Float32
    weights: list
    total: Float32
    values: list

    def mean(self, arithmetic, empty_is_nan: bool):
        """Weighted mean of the values."""
        inverse = arithmetic.rcp(self.total)
        if not empty_is_nan:
            inverse = select(self.max == NEG_INF, Float32(0.0), inverse)
        return arithmetic.mean(self.values, self.weights, inverse)


def logits(window: WindowStream, ape, stage, slot: int) -> list:
    """score + ape of window entry `slot` for each of the lane's columns, -inf where the entry takes no part in the
    row."""
    valid = window.is_valid(slot, window.sCode[stage] < 0)
    return [where(valid, s + a, NEG_INF) for s, a in zip(window.read_scores(stage, slot), ape(slot))]


def pool_part(window: WindowStream, ape, stage, arithmetic, empty_is_nan: bool) -> list:
    """The `Part` of this warp for each of the lane's columns. A part of nothing but -inf weighs 0, or NaN with
    `empty_is_nan`."""
    slots = range(window.traits.slots)
    z = [logits(window, ape, stage, slot) for slot in slots]
    values = [window.read_values(stage, slot) for slot in slots]
    parts = []
    for c in range(window.traits.tile.cols_per_lane):
        largest = max_of([z[k][c] for k in slots])
        shift = largest if empty_is_nan else select(largest == NEG_INF, Float32(0.0), largest)
        weights = [arithmetic.weight(z[k][c] - shift) for k in slots]
        parts.append(Part(largest, weights, sum_rn(weights), [values[k][c] for k in slots]))
    return parts


class Joined(NamedTuple):
    """One column of a whole window: its largest z, 1 / the sum of the weights exp(z - max), and the weighted mean of
    the values."""

    max: Any
    inverse: Any
    mean: Any


class PartExchange(TraceConstant):
    """(max, sum of weights, mean) of every warp's part. Two buffers, so that one barrier a row is enough."""

    FIELDS = 3

    def __init__(self, traits: Traits, smem):
        self.num_warps = traits.tile.num_warps
        shape = (traits.tile.cols_per_lane, WARP, self.FIELDS, self.num_warps, 2)
        self.sPart = smem.allocate_tensor(Float32, cute.make_layout(shape))

    def publish(self, window: WindowStream, parts, step, arithmetic) -> None:
        """Write this warp's parts and wait for those of the others. All warps of the CTA call it for every row."""
        for c, part in enumerate(parts):
            for field, value in enumerate((part.max, part.total, part.mean(arithmetic, empty_is_nan=False))):
                self.sPart[c, window.lane, field, window.warp, step % 2] = value
        cute.arch.sync_threads()

    def join(self, window: WindowStream, c: int, step, arithmetic) -> Joined:
        """Column `c` of the lane, over the whole window."""
        warps = range(self.num_warps)
        fields = ([self.sPart[c, window.lane, f, w, step % 2] for w in warps] for f in range(self.FIELDS))
        maxima, totals, means = fields
        largest = max_of(maxima)
        weights = [totals[w] * arithmetic.exp(maxima[w] - largest) for w in warps]
        inverse = arithmetic.rcp(sum_rn(weights))
        return Joined(largest, inverse, Accurate.mean(means, weights, inverse))

"""A warpgroup's products: scores of its queries with a tile of keys, sums of the values by their weights, and the turns at which they start."""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from cuteforge.device.math import select
from cuteforge.device.mma_sm80 import left_operand
from cuteforge.device.mma_sm90 import ColumnOperand, RowOperand, commit_group, multiply, start_group
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.config import WARPGROUP, WarpgroupTraits
from cuteforge.runtime.arch import WARP

TURN_BARRIER = 1  # the first of the named barriers by which warpgroups take turns
EARLY_COLS = 256
TURN_THREADS = 2 * WARPGROUP * WARP  # of the warpgroup that waits and of the one that passes its turn


class Turns(TraceConstant):
    """Products of one warpgroup at a time, so that the softmax of the others runs beside them."""

    def __init__(self, warpgroups: int, warpgroup):
        self.warpgroups, self.warpgroup = warpgroups, warpgroup

    @cute.jit
    def begin(self):
        """The first warpgroup has the first turn."""
        if self.warpgroup == self.warpgroups - 1:
            self.pass_on()

    def wait(self) -> None:
        cute.arch.barrier(barrier_id=TURN_BARRIER + self.warpgroup, number_of_threads=TURN_THREADS)

    def pass_on(self) -> None:
        after = select(self.warpgroup == self.warpgroups - 1, Int32(0), self.warpgroup + 1)
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=TURN_THREADS)


class Products(TraceConstant):
    """Starts groups of products; who reads the sums waits for their group first."""

    def __init__(self, traits: WarpgroupTraits, dtype, turns: Turns):
        self.traits, self.dtype, self.turns = traits, dtype, turns

    def scores(self, queries, keys, rS, ends_turn: bool = False) -> None:
        """rS = queries @ keys^T, matrices at addresses of shared memory."""
        left, right = RowOperand(queries, self.traits.tile.tile_m), RowOperand(keys, self.traits.tile.tile_n)
        lefts = [(left.descriptor(step),) for step in range(self.traits.k_steps)]
        self._start(rS, [Float32(0.0)] * (rS.shape[1] * 4), lefts, right, False, ends_turn)

    def values(self, rP, values, rO, ends_turn: bool = False) -> None:
        """rO += weights @ values."""
        lefts = [tuple(rP[0, step, i] for i in range(4)) for step in range(rP.shape[1])]
        self._start(rO, values_of(rO), lefts, ColumnOperand(values, self.traits.tile.tile_n), True, ends_turn)

    def _start(self, rX, sums: list, lefts: list, right, transposed: bool, ends_turn: bool) -> None:
        start_group()
        # A turn is passed on when products of EARLY_COLS columns are still to come: 128 cycles, in which the next
        # warpgroup gets ready.
        early = min(-(-EARLY_COLS // (len(sums) * 2)), len(lefts))
        for step, left in enumerate(lefts):
            if ends_turn and step == len(lefts) - early:
                self.turns.pass_on()
            sums = multiply(self.dtype, left, right.descriptor(step), sums, transposed)
        commit_group()
        set_registers(rX, sums)

    def round_weights(self, rS, rP) -> None:
        """rP = the weights as left operands, 16 keys each."""
        tiles = [tuple(rS[0, n, e] for e in range(4)) for n in range(rS.shape[1])]
        for step, pair in enumerate(zip(tiles[::2], tiles[1::2])):
            for i, word in enumerate(left_operand(self.dtype, *pair)):
                rP[0, step, i] = word


@cute.jit
def take_sign(rS: cute.Tensor, scale: Float32):
    """Scores are weighed with a positive factor, so they take the sign of the scale."""
    if scale <= 0.0:
        for n in cutlass.range_constexpr(rS.shape[1]):
            for e in cutlass.range_constexpr(4):
                rS[0, n, e] = Float32(select(scale == 0.0, Float32(0.0), -rS[0, n, e]))


class Fragments(TraceConstant):
    """A lane's registers: rS scores and rO sums of values in fp32, rP weights as left operands; (1, tiles, 4) each."""

    def __init__(self, traits: WarpgroupTraits):
        tile_n = traits.tile.tile_n
        self.rS = cute.make_rmem_tensor((1, tile_n // 8, 4), Float32)
        self.rP = cute.make_rmem_tensor((1, tile_n // 16, 4), Uint32)
        self.rO = cute.make_rmem_tensor((1, traits.v_tiles, 4), Float32)


def values_of(rX: cute.Tensor) -> list:
    """The registers of a fragment in the order of matrix instructions."""
    return [rX[0, n, e] for n in range(rX.shape[1]) for e in range(4)]


def set_registers(rX: cute.Tensor, values: list) -> None:
    """`values_of`, the other way."""
    for i, value in enumerate(values):
        rX[0, i // 4, i % 4] = value

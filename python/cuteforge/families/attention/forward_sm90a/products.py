"""A warpgroup's products: scores of its queries with a tile of keys, sums of the values by their weights, and the order
in which they start."""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from cuteforge.device.math import select
from cuteforge.device.mma_sm80 import left_operand
from cuteforge.device.mma_sm90 import ColumnOperand, RowOperand, commit_group, multiply, start_group
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.config import WARPGROUP, Barrier, WarpgroupTraits
from cuteforge.runtime.arch import WARP

EARLY_COLS = 256
PING_PONG_THREADS = 2 * WARPGROUP * WARP  # of the warpgroup that waits and of the one before it, which arrives


class PingPong(TraceConstant):
    """Ping-pong of the warpgroups: one at a time starts products, so that the softmax of the others runs beside
    them."""

    def __init__(self, warpgroups: int, warpgroup):
        self.warpgroups, self.warpgroup = warpgroups, warpgroup

    @cute.jit
    def begin(self):
        """The first warpgroup starts first."""
        if self.warpgroup == self.warpgroups - 1:
            self.arrive()

    def wait(self) -> None:
        cute.arch.barrier(barrier_id=Barrier.PING_PONG + self.warpgroup, number_of_threads=PING_PONG_THREADS)

    def arrive(self) -> None:
        after = select(self.warpgroup == self.warpgroups - 1, Int32(0), self.warpgroup + 1)
        cute.arch.barrier_arrive(barrier_id=Barrier.PING_PONG + after, number_of_threads=PING_PONG_THREADS)


class Products(TraceConstant):
    """Starts groups of products; who reads the sums waits for their group first."""

    def __init__(self, traits: WarpgroupTraits, dtype, ping_pong: PingPong):
        self.traits, self.dtype, self.ping_pong = traits, dtype, ping_pong

    def scores(self, queries, keys, rS, hands_over: bool = False) -> None:
        """rS = queries @ keys^T, matrices at addresses of shared memory."""
        left, right = RowOperand(queries, self.traits.tile.tile_m), RowOperand(keys, self.traits.tile.tile_n)
        lefts = [(left.descriptor(step),) for step in range(self.traits.k_steps)]
        self._start(rS, [Float32(0.0)] * (rS.shape[1] * 4), lefts, right, False, hands_over)

    def values(self, rP, values, rO, hands_over: bool = False) -> None:
        """rO += weights @ values."""
        lefts = [tuple(rP[0, step, i] for i in range(4)) for step in range(rP.shape[1])]
        self._start(rO, values_of(rO), lefts, ColumnOperand(values, self.traits.tile.tile_n), True, hands_over)

    def _start(self, rX, sums: list, lefts: list, right, transposed: bool, hands_over: bool) -> None:
        start_group()
        # The next warpgroup may start when products of EARLY_COLS columns are still to come: 128 cycles, in which it
        # gets ready.
        early = min(-(-EARLY_COLS // (len(sums) * 2)), len(lefts))
        for step, left in enumerate(lefts):
            if hands_over and step == len(lefts) - early:
                self.ping_pong.arrive()
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

"""Rotary kernel: rotates pairs of columns of all heads of a token by the token's angles, for one tensor or for q and k in one launch.

One source for every pairing, width, dtype and layout. Memory-bound: each element is read and written once, with 16-byte accesses where the
head dim allows; cosines and sines are read once for up to `HEADS_PER_THREAD` heads.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.device.copy import gmem_run, load_fp32
from cuteforge.device.math import fma_rn, mul_rn, select
from cuteforge.device.traced import TraceConstant, named_kernel
from cuteforge.rotary.config import HEADS_IN_FLIGHT, HEADS_PER_THREAD, Traits
from cuteforge.rotary.fake_operands import FakeOperands
from cuteforge.runtime.compile_cache import Build

NAN = float("nan")


class Heads(TraceConstant):
    """A (T, H, D) or (B, L, H, D) tensor, addressed by token and head."""

    def __init__(self, dtype, base, strides, num_heads):
        self.dtype, self.itemsize = dtype, dtype.width // 8
        self.base = base
        self.token_strides, self.head_stride = strides[:-1], strides[-1]
        self.num_heads = num_heads

    @classmethod
    def of(cls, mX: cute.Tensor):
        strides = tuple(Int64(stride) for stride in mX.stride[:-1])
        return cls(mX.element_type, mX.iterator.toint(), strides, mX.shape[len(mX.shape) - 2])

    def unless(self, condition, other: "Heads") -> "Heads":
        """`other` where the condition holds: one piece of code for both."""
        mine = (self.base, *self.token_strides, self.head_stride, self.num_heads)
        theirs = (other.base, *other.token_strides, other.head_stride, other.num_heads)
        base, *strides, num_heads = (select(condition, b, a) for a, b in zip(mine, theirs))
        return Heads(self.dtype, base, tuple(strides), num_heads)

    def token(self, index):
        """Byte address of a token; `index` is (t,) or (b, l)."""
        return self.base + token_offset(index, self.token_strides) * self.itemsize

    def head(self, address, head):
        """Byte address of a head of the token at `address`."""
        return address + Int64(head) * self.head_stride * self.itemsize


def token_offset(index, stride):
    """Element offset of a token, in 64 bits."""
    offset = Int64(index[0]) * Int64(stride[0])
    for i, s in zip(index[1:], stride[1:]):
        offset = offset + Int64(i) * Int64(s)
    return offset


@named_kernel("rotary")
class Rotary:
    """The kernel for one `Traits`; `launch` takes the tensors that it has."""

    def __init__(self, traits: Traits):
        self.traits = traits

    @cute.jit
    def launch(
        self,
        mX: cute.Tensor,
        mOut: cute.Tensor,
        mK: cute.Tensor | None,
        mKOut: cute.Tensor | None,
        mCos: cute.Tensor,
        mSin: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        inverse: Int32,
        stream: cuda.CUstream,
    ):
        """What `traits` has no use for is None: the keys, or the sines and positions where `mCos` is a table of pairs."""
        num_tokens = mX.shape[0]
        if cutlass.const_expr(self.traits.rank == 4):
            num_tokens = mX.shape[0] * mX.shape[1]
        groups = head_groups(mX)
        if cutlass.const_expr(self.traits.has_keys):
            groups += head_groups(mK)
        num_ctas = (num_tokens + self.traits.tokens_per_cta - 1) // self.traits.tokens_per_cta * groups
        if num_ctas > 0:
            self.kernel(mX, mOut, mK, mKOut, mCos, mSin, mPositions, num_tokens, groups, inverse).launch(
                grid=(num_ctas, 1, 1),
                block=(self.traits.num_threads, 1, 1),
                min_blocks_per_mp=self.traits.ctas_per_sm,
                preferred_smem_carveout=0,
                stream=stream,
            )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mOut: cute.Tensor,
        mK: cute.Tensor | None,
        mKOut: cute.Tensor | None,
        mCos: cute.Tensor,
        mSin: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        num_tokens: Int32,
        groups: Int32,
        inverse: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        traits = self.traits
        unit = tidx % traits.units
        place = tidx // traits.units
        # The groups of heads of the same tokens are neighbours, so that a token's angles are still in L2.
        token = bidx // groups * traits.tokens_per_cta + place
        group = bidx % groups
        if token < num_tokens and place < traits.tokens_per_cta:
            index = (token // mX.shape[1], token % mX.shape[1]) if cutlass.const_expr(traits.rank == 4) else (token,)
            angles = self._angles(mCos, mSin, mPositions, index, unit, inverse)
            source, target = Heads.of(mX), Heads.of(mOut)
            if cutlass.const_expr(traits.has_keys):
                is_key = group >= head_groups(mX)
                source, target = source.unless(is_key, Heads.of(mK)), target.unless(is_key, Heads.of(mKOut))
                group -= select(is_key, head_groups(mX), Int32(0))
            self._heads(source, target, index, group, unit, angles)

    def _angles(self, mCos, mSin, mPositions, index, unit, inverse):
        """(cosines, sines, whether the position is in the table) of the thread's pairs; NaN outside the table, which is not read then.

        The last is None for a table of pairs, which has a row for each token.
        """
        pairs = self.traits.problem.pairs_per_unit
        first = select(unit < self.traits.rotary_units, unit * pairs, Int32(0))
        if self.traits.positions is None:
            row = mCos.iterator.toint() + (token_offset(index, mCos.stride) + Int64(2 * first)) * 4
            both = load_floats(row, 2 * pairs)
            cosines, sines, is_known = both[0::2], both[1::2], None
        else:
            position = mPositions[index if len(index) > 1 else index[0]]
            is_known = (position >= 0) & (position < mCos.shape[0])
            cosines = self._table_run(mCos, position, is_known, first)
            sines = self._table_run(mSin, position, is_known, first)
        return cosines, [select(inverse != 0, -sine, sine) for sine in sines], is_known

    @cute.jit
    def _table_run(self, mTable: cute.Tensor, position, is_known, first: Int32):
        pairs = self.traits.problem.pairs_per_unit
        rTable = cute.make_rmem_tensor(pairs, Float32)
        rTable.fill(NAN)
        if is_known:
            row = mTable.iterator.toint() + (Int64(position) * Int64(mTable.stride[0]) + Int64(first)) * 4
            values = load_floats(row, pairs)
            for i in cutlass.range_constexpr(pairs):
                rTable[i] = values[i]
        return [rTable[i] for i in range(pairs)]

    @cute.jit
    def _heads(self, source: Heads, target: Heads, index, group: Int32, unit: Int32, angles):
        """The thread's columns of the heads of one group."""
        problem = self.traits.problem
        source_token, target_token = source.token(index), target.token(index)
        for batch in cutlass.range_constexpr(HEADS_PER_THREAD // HEADS_IN_FLIGHT):
            first_head = group * HEADS_PER_THREAD + batch * HEADS_IN_FLIGHT
            if unit < self.traits.rotary_units:
                self._rotate(source, target, source_token, target_token, first_head, unit, angles)
            elif cutlass.const_expr(self.traits.copy_units > 0):
                wanted = source.base != target.base
                if cutlass.const_expr(angles[2] is not None):
                    wanted = wanted | ~angles[2]
                if wanted:
                    col = problem.rotary_dim + (unit - self.traits.rotary_units) * problem.access_elems
                    self._copy(source, target, source_token, target_token, first_head, col, angles[2])

    @cute.jit
    def _rotate(self, source, target, source_token, target_token, first_head: Int32, unit: Int32, angles):
        """Load the pairs of all heads in flight, then rotate and store them one head after another."""
        heads = [first_head + i for i in range(HEADS_IN_FLIGHT)]
        # heads past the last one load it again and store nothing
        loaded = [
            [
                load_fp32(run)
                for run in self._runs(source, source.head(source_token, cutlass.min(head, source.num_heads - 1)), unit)
            ]
            for head in heads
        ]
        for head, values in zip(heads, loaded):
            if head < source.num_heads:
                runs = self._runs(target, target.head(target_token, head), unit)
                store_fp32(runs, self._rotated(values, *angles[:2]))

    @cute.jit
    def _copy(self, source, target, source_token, target_token, first_head: Int32, col: Int32, is_known):
        """Columns that are not rotated."""
        elems = self.traits.problem.access_elems
        for i in cutlass.range_constexpr(HEADS_IN_FLIGHT):
            head = first_head + i
            if head < source.num_heads:
                offset = Int64(col * source.itemsize)
                kept = gmem_run(source.dtype, source.head(source_token, head) + offset, elems).load()
                run = gmem_run(target.dtype, target.head(target_token, head) + offset, elems)
                if cutlass.const_expr(is_known is None):
                    run.store(kept)
                else:
                    # bits are copied, not numbers: the payload of a NaN stays
                    if is_known:
                        run.store(kept)
                    else:
                        run.fill(NAN)

    def _runs(self, heads: Heads, address, unit):
        """The runs of a head that hold the thread's pairs: (firsts, seconds) of half-split pairs, or one stretch of interleaved ones."""
        problem = self.traits.problem
        if problem.interleaved:
            cols = range(0, 2 * problem.pairs_per_unit, problem.access_elems)
            first = unit * (2 * problem.pairs_per_unit)
        else:
            cols = (0, problem.rotary_dim // 2)
            first = unit * problem.pairs_per_unit
        return [
            gmem_run(heads.dtype, address + Int64((first + col) * heads.itemsize), problem.access_elems) for col in cols
        ]

    def _rotated(self, values, cosines, sines):
        """The rotated runs, as `values` is laid out."""
        flat = [value for run in values for value in run]
        pairs = self.traits.problem.pairs_per_unit
        firsts, seconds = (flat[0::2], flat[1::2]) if self.traits.problem.interleaved else (flat[:pairs], flat[pairs:])
        turned = [rotate(*pair) for pair in zip(firsts, seconds, cosines, sines)]
        if self.traits.problem.interleaved:
            flat = [value for pair in turned for value in pair]
        else:
            flat = [pair[0] for pair in turned] + [pair[1] for pair in turned]
        length = len(values[0])
        return [flat[i : i + length] for i in range(0, len(flat), length)]


def head_groups(mX):
    """Groups of heads that one thread goes through."""
    return (mX.shape[len(mX.shape) - 2] + (HEADS_PER_THREAD - 1)) // HEADS_PER_THREAD


def rotate(first, second, cosine, sine):
    """A pair turned by an angle: one product is rounded, the other and the sum are not."""
    return fma_rn(first, cosine, -mul_rn(second, sine)), fma_rn(first, sine, mul_rn(second, cosine))


def load_floats(address, count: int) -> list:
    """`count` adjacent fp32, in accesses of up to 16 bytes."""
    step = min(count, 4)
    return [value for i in range(0, count, step) for value in load_fp32(gmem_run(Float32, address + 4 * i, step))]


def store_fp32(runs, values) -> None:
    """Store lists of fp32 to runs, each value rounded once."""
    for run, columns in zip(runs, values):
        rX = cute.make_rmem_tensor(len(columns), run.element_type)
        for i, value in enumerate(columns):
            rX[i] = value.to(run.element_type)
        run.store(rX.load())


def build(traits: Traits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    fake = FakeOperands(traits)
    return Build(host_entry(traits), (*fake.all(), Int32(0), make_fake_stream()), "rotary")


def host_entry(traits: Traits):
    """The host function with just the tensors that `traits` has, in the order of the signature."""
    kernel = Rotary(traits)

    @cute.jit
    def table_of_pairs(mX: cute.Tensor, mOut: cute.Tensor, mTable: cute.Tensor, inverse: Int32, stream: cuda.CUstream):
        kernel.launch(mX, mOut, None, None, mTable, None, None, inverse, stream)

    @cute.jit
    def table_of_pairs_with_keys(
        mX: cute.Tensor, mOut: cute.Tensor, mK: cute.Tensor, mKOut: cute.Tensor, mTable: cute.Tensor, inverse: Int32, stream: cuda.CUstream
    ):  # fmt: skip
        kernel.launch(mX, mOut, mK, mKOut, mTable, None, None, inverse, stream)

    @cute.jit
    def positions(
        mX: cute.Tensor, mOut: cute.Tensor, mCos: cute.Tensor, mSin: cute.Tensor, mPositions: cute.Tensor, inverse: Int32, stream: cuda.CUstream
    ):  # fmt: skip
        kernel.launch(mX, mOut, None, None, mCos, mSin, mPositions, inverse, stream)

    @cute.jit
    def positions_with_keys(
        mX: cute.Tensor, mOut: cute.Tensor, mK: cute.Tensor, mKOut: cute.Tensor, mCos: cute.Tensor, mSin: cute.Tensor, mPositions: cute.Tensor,
        inverse: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        kernel.launch(mX, mOut, mK, mKOut, mCos, mSin, mPositions, inverse, stream)

    if traits.positions is None:
        return table_of_pairs_with_keys if traits.has_keys else table_of_pairs
    return positions_with_keys if traits.has_keys else positions

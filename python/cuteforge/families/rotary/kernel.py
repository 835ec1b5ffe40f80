"""Rotary kernel: rotates pairs of columns of all heads of a token by the token's angles, for one tensor or for q and k
in one launch.

One source for every pairing, width, dtype and layout. Memory-bound: each element is read and written once, with 16-byte
accesses where the head dim allows. Nothing that a thread reads of its heads waits for an angle: position, heads and
angles are two memory latencies, not three.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.device.copy import l2_policy, load_fp32
from cuteforge.device.fake_operands import FakeOperands
from cuteforge.device.math import fast_divisor, fma_rn, mul_rn, select
from cuteforge.device.traced import Operands, TraceConstant, named_kernel
from cuteforge.families.rotary.config import MAX_ACCESS_BYTES, Traits
from cuteforge.families.rotary.operands import device_names, entry_names, signature_of
from cuteforge.op.tensor_spec import ITEMSIZE
from cuteforge.runtime.build import Build

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
        return cls(mX.element_type, mX.iterator.toint(), strides, heads_of(mX))

    def unless(self, condition, other: "Heads") -> "Heads":
        """`other` where the condition holds: one piece of code for both."""
        mine = (self.base, *self.token_strides, self.head_stride, self.num_heads)
        theirs = (other.base, *other.token_strides, other.head_stride, other.num_heads)
        base, *strides, num_heads = (select(condition, b, a) for a, b in zip(mine, theirs))
        return Heads(self.dtype, base, tuple(strides), num_heads)

    def address(self, index, head, col):
        """Byte address of a column of a head; the token's `index` is (t,) or (b, l)."""
        offset = token_offset(index, self.token_strides) + Int64(head) * self.head_stride + Int64(col)
        return self.base + offset * self.itemsize

    @property
    def pitch(self):
        """Bytes from one head to the next."""
        return self.head_stride * self.itemsize


def token_offset(index, stride):
    """Element offset of a token, in 64 bits."""
    offset = Int64(index[0]) * Int64(stride[0])
    for i, s in zip(index[1:], stride[1:]):
        offset = offset + Int64(i) * Int64(s)
    return offset


def heads_of(mX: cute.Tensor):
    """Heads of a tensor of tokens."""
    return mX.shape[len(mX.shape) - 2]


@named_kernel("rotary")
class Rotary:
    """The kernel for one `Traits`; calling it launches."""

    def __init__(self, traits: Traits):
        self.traits = traits

    @cute.jit
    def __call__(self, *arguments):
        """Args: arguments: the tensors of `operands.ROWS`, None for those that the op does not have; whether to
        rotate back, 0 or 1; the stream.
        """
        *given, inverse, stream = arguments
        traits, ops = self.traits, Operands(device_names(), given)
        num_tokens, length = ops.mX.shape[0], None
        if cutlass.const_expr(traits.rank == 4):
            num_tokens, length = ops.mX.shape[0] * ops.mX.shape[1], ops.mX.shape[1]
        num_ctas, bundles = self._grid(ops, num_tokens)
        if num_ctas > 0:
            divisors = fast_divisor(bundles), None if length is None else fast_divisor(length)
            self.kernel(tuple(given), num_tokens, *divisors, inverse).launch(
                grid=(num_ctas, 1, 1),
                block=(traits.num_threads, 1, 1),
                min_blocks_per_mp=traits.ctas_per_sm,
                preferred_smem_carveout=0,  # percent; the kernel has no shared memory, its L1 holds angles
                stream=stream,
            )

    def _grid(self, ops: Operands, num_tokens):
        """(CTAs, bundles of a token)."""
        key_heads = heads_of(ops.mK) if self.traits.has_keys else None
        return self.traits.grid(num_tokens, heads_of(ops.mX), key_heads)

    @cute.kernel
    def kernel(
        self,
        given: tuple,
        num_tokens: Int32,
        bundles: cute.FastDivmodDivisorV2,
        length: cute.FastDivmodDivisorV2 | None,
        inverse: Int32,
    ):
        ops = Operands(device_names(), given)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        traits = self.traits
        thread, task = tidx % traits.threads_per_head, tidx // traits.threads_per_head
        # The bundles of a token are neighbours, so that the tasks of a CTA share its angles. As many CTAs as a token
        # has bundles share `tasks_per_cta` tokens: no number of tasks is formed, which could pass 2**31.
        token_set, cta = divmod(bidx, bundles)
        row, bundle = divmod(cta * traits.tasks_per_cta + task, bundles)
        first_token = token_set * traits.tasks_per_cta
        if row < num_tokens - first_token and task < traits.tasks_per_cta:
            token = first_token + row
            index = divmod(token, length) if cutlass.const_expr(traits.rank == 4) else (token,)
            source, target = Heads.of(ops.mX), Heads.of(ops.mOut)
            if cutlass.const_expr(traits.has_keys):
                query_bundles = traits.bundles_of(heads_of(ops.mX))
                is_key = bundle >= query_bundles
                source, target = source.unless(is_key, Heads.of(ops.mK)), target.unless(is_key, Heads.of(ops.mKOut))
                bundle -= select(is_key, query_bundles, Int32(0))
            angles = Angles(traits, ops, index)
            first_head = bundle * traits.heads_per_thread
            if thread < traits.rotary_threads:
                self._rotate(source, target, index, first_head, thread, angles, inverse)
            elif cutlass.const_expr(traits.copy_threads > 0):
                self._copy(source, target, index, first_head, thread - traits.rotary_threads, angles)

    def _rotate(self, source: Heads, target: Heads, index, first_head, thread, angles: "Angles", inverse):
        """Load the thread's pairs of all its heads, then their angles; rotate and store one head after another."""
        problem, heads = self.traits.problem, self.traits.heads_per_thread
        pair = thread * problem.pairs_per_thread
        col = 2 * pair if problem.interleaved else pair
        wanted = [has_head(source, first_head, i) for i in range(heads)]
        loaded = [
            [load_words(run, problem.align_bytes, want) for run in self._runs(head)]
            for head, want in zip(adjacent_heads(source, index, first_head, col, heads), wanted)
        ]
        cosines, sines = angles.load(pair)
        sines = [select(inverse != 0, -sine, sine) for sine in sines]
        for head, words, want in zip(adjacent_heads(target, index, first_head, col, heads), loaded, wanted):
            values = [load_fp32(as_elements(run, source.dtype)) for run in words]
            for run, columns in zip(self._runs(head), self._rotated(values, cosines, sines), strict=True):
                store_words(run, as_words(columns, target.dtype), want)

    @cute.jit
    def _copy(self, source: Heads, target: Heads, index, first_head: Int32, thread: Int32, angles: "Angles"):
        """Columns that are not rotated: bits are copied, not numbers, so that the payload of a NaN stays."""
        problem, heads = self.traits.problem, self.traits.heads_per_thread
        col = problem.rotary_dim + thread * problem.access_elems
        needed = source.base != target.base
        if cutlass.const_expr(angles.is_known is not None):
            needed = needed | ~angles.is_known
        if needed:
            wanted = [has_head(source, first_head, i) for i in range(heads)]
            loaded = [
                load_words(address, problem.align_bytes, want)
                for address, want in zip(adjacent_heads(source, index, first_head, col, heads), wanted)
            ]
            nan = as_words([Float32(NAN)] * problem.access_elems, target.dtype)
            targets = adjacent_heads(target, index, first_head, col, heads)
            for address, words, want in zip(targets, loaded, wanted):
                if cutlass.const_expr(angles.is_known is not None):
                    words = [type(word)(select(angles.is_known, word, other)) for word, other in zip(words, nan)]
                store_words(address, words, want)

    def _runs(self, address):
        """Addresses of the accesses that hold the thread's pairs of a head: of (firsts, seconds) of split pairs, or of
        interleaved ones."""
        problem = self.traits.problem
        cols = range(0, 2 * problem.pairs_per_thread, problem.access_elems)
        if not problem.interleaved:
            cols = (0, problem.rotary_dim // 2)
        return [address + col * ITEMSIZE[problem.dtype] for col in cols]

    def _rotated(self, values, cosines, sines):
        """The rotated runs, as `values` is laid out."""
        flat = [value for run in values for value in run]
        pairs = self.traits.problem.pairs_per_thread
        firsts, seconds = (flat[0::2], flat[1::2]) if self.traits.problem.interleaved else (flat[:pairs], flat[pairs:])
        rotated = [rotate(*pair) for pair in zip(firsts, seconds, cosines, sines, strict=True)]
        if self.traits.problem.interleaved:
            flat = [value for pair in rotated for value in pair]
        else:
            flat = [pair[0] for pair in rotated] + [pair[1] for pair in rotated]
        length = len(values[0])
        return [flat[i : i + length] for i in range(0, len(flat), length)]


class Angles(TraceConstant):
    """The angles of a token: by its position, which is asked for at once, or from its own row of a table of pairs."""

    def __init__(self, traits: Traits, ops: Operands, index):
        self.pairs = traits.problem.pairs_per_thread
        self.ops, self.index = ops, index
        self.is_known = None  # whether the position is in the table; None where there are no positions
        if ops.mPositions is not None:
            self.position = ops.mPositions[index if len(index) > 1 else index[0]]
            self.is_known = (self.position >= 0) & (self.position < ops.mCos.shape[0])

    def load(self, pair):
        """(cosines, sines) of a thread's pairs, of which `pair` is the first; NaN outside the table, which is not read
        then."""
        if self.is_known is not None:
            return self._by_position(pair)
        table = self.ops.mFreqsCis
        both = load_floats(table, token_offset(self.index, table.stride) + Int64(2 * pair), 2 * self.pairs)
        return both[0::2], both[1::2]

    @cute.jit
    def _by_position(self, pair: Int32):
        # A branch, not predicates: the assembler moves no load behind it, so that what was loaded before does not wait
        # for the position.
        tables = (self.ops.mCos, self.ops.mSin)
        rTables = [cute.make_rmem_tensor(self.pairs, Float32) for _ in tables]
        for rTable in rTables:
            rTable.fill(NAN)
        # Tokens that are far apart, of other sequences, meet the same rows: that the heads between them pushed 4 MB of
        # table out of L2 took 2.5 % of the time of 131072 tokens (H200).
        policy = l2_policy("evict_last")
        if self.is_known:
            for mTable, rTable in zip(tables, rTables):
                offset = Int64(self.position) * Int64(mTable.stride[0]) + Int64(pair)
                fill(rTable, load_floats(mTable, offset, self.pairs, policy))
        return [elements(rTable) for rTable in rTables]


def adjacent_heads(heads: Heads, index, first_head, col, count: int) -> list:
    """Byte addresses of a column of adjacent heads."""
    addresses = [heads.address(index, first_head, col)]
    while len(addresses) < count:
        addresses.append(addresses[-1] + heads.pitch)
    return addresses


def has_head(heads: Heads, first_head, i: int):
    """Whether a bundle has a head `i`; None for the first, which it has."""
    return first_head + i < heads.num_heads if i else None


def rotate(first, second, cosine, sine):
    """A pair rotated by an angle: one product is rounded, the other and the sum are not."""
    return fma_rn(first, cosine, -mul_rn(second, sine)), fma_rn(first, sine, mul_rn(second, cosine))


def load_floats(mTable, offset, count: int, policy=None) -> list:
    """`count` adjacent fp32 at an element offset, in accesses of up to 16 bytes, with a policy of L2 or none."""
    address, step = mTable.iterator.toint() + offset * 4, min(4 * count, MAX_ACCESS_BYTES)
    runs = [load_words(address + i, step, None, Float32, policy) for i in range(0, 4 * count, step)]
    return [value for run in runs for value in run]


def load_words(address, size_bytes: int, wanted, word=None, policy=None) -> list:
    """`size_bytes` of global memory in one access, as words of a type; anything where not `wanted`, and nothing is read
    then.

    Spelled as PTX for the predicate and the policy.
    """
    word = word or word_type(size_bytes)
    count = size_bytes * 8 // word.width
    hint, operand = ("", "") if policy is None else (".L2::cache_hint", ", {$r1}")
    words = cute.arch.inline_ptx(
        f"ld.global{hint}{access_suffix(word, count)} {operand_list('w', count)}, [{{$r0}}]{operand};",
        write_only_types=[word] * count,
        read_only_args=[address] if policy is None else [address, policy],
        predicate=wanted,
    )
    return list(words) if count > 1 else [words]


def store_words(address, words: list, wanted) -> None:
    """Write words next to one another in one access; nothing where not `wanted`."""
    count = len(words)
    cute.arch.inline_ptx(
        f"st.global{access_suffix(type(words[0]), count)} [{{$r{count}}}], {operand_list('r', count)};",
        read_only_args=[*words, address],
        predicate=wanted,
    )


def word_type(size_bytes: int):
    """What an access of so many bytes is made of."""
    return Uint16 if size_bytes == 2 else Uint32


def access_suffix(word, count: int) -> str:
    """Vector length and width, as PTX spells them."""
    return (f".v{count}" if count > 1 else "") + f".b{word.width}"


def operand_list(kind: str, count: int) -> str:
    """The first operands of a kind, as PTX spells a vector."""
    operands = ", ".join(f"{{${kind}{i}}}" for i in range(count))
    return f"{{{operands}}}" if count > 1 else operands


def as_elements(words: list, dtype) -> cute.Tensor:
    """Words in registers as elements of a type."""
    word = type(words[0])
    rX = cute.make_rmem_tensor(len(words) * word.width // dtype.width, dtype)
    # recast to the wider type: a tensor of one word, whose stride is 0, would become one of one element
    fill(cute.recast_tensor(rX, word), words)
    return rX


def as_words(values: list, dtype) -> list:
    """fp32 values, each rounded once to `dtype`, as the words of one access."""
    rX = cute.make_rmem_tensor(len(values), dtype)
    fill(rX, [value.to(dtype) for value in values])
    return elements(cute.recast_tensor(rX, word_type(len(values) * dtype.width // 8)))


def fill(rX, values) -> None:
    for i, value in enumerate(values):
        rX[i] = value


def elements(rX) -> list:
    return [rX[i] for i in range(cute.size(rX))]


def build(traits: Traits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    return Build(Rotary(traits), (*fake_operands(traits), Int32(0), make_fake_stream()), "rotary")


def fake_operands(traits: Traits) -> tuple:
    """All tensors of the entry in its order, None for those that the op does not have."""
    problem = traits.problem
    fake = FakeOperands({"D": problem.head_dim, "half": problem.rotary_dim // 2})
    dtypes = {"x": problem.dtype, "positions": traits.positions}
    signature = signature_of(traits.rank, problem.dtype, problem.interleaved, traits.given)
    tensors = {row.name: fake.row(row, dtypes) for row in signature.operands}
    return tuple(map(tensors.get, entry_names()))

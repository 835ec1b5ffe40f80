"""Moving short runs of elements between global memory, shared memory and registers."""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant


def gmem_run(dtype, address, elems: int) -> cute.Tensor:
    """`elems` adjacent elements of global memory at a byte address aligned to their size."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=elems * dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(elems))


def row_address(m: cute.Tensor, index: tuple):
    """Byte address of the first element at the leading `index`: of a row, where that is all modes but the last."""
    offset = Int64(0)
    for i, stride in zip(index, m.stride):
        offset = offset + Int64(i) * Int64(stride)
    return m.iterator.toint() + offset * (m.element_type.width // 8)


def prefetch(address) -> None:
    """Bring what is at a byte address of global memory to L1."""
    cute.arch.inline_ptx("prefetch.global.L1 [{$r0}];", read_only_args=[address])


def broadcast_offset(m: cute.Tensor, index: tuple):
    """(element offset of the leading `index`, whether it is there); modes of extent 1 stand for any index."""
    offset, exists = Int64(0), Boolean(True)
    for i, extent, stride in zip(index, m.shape, m.stride):
        offset = offset + Int64(select(extent == 1, Int32(0), i)) * Int64(stride)
        exists = exists & ((extent == 1) | (i < extent))
    return offset, exists


def smem_floats(address, count: int, size: int | None = None) -> cute.Tensor:
    """fp32 in shared memory at a byte address aligned to `count` of them: `size` of them, or `count`."""
    pointer = cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(size or count))


def smem_words(address, count: int, size: int | None = None) -> cute.Tensor:
    """32-bit words in shared memory at a byte address aligned to `count` of them: `size` of them, or `count`."""
    pointer = cute.make_ptr(cutlass.Uint32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(size or count))


def l2_policy(priority: str):
    """A policy for accesses that name one: what they bring to L2 makes room there before other data, `evict_first`, or
    after it, `evict_last`."""
    instruction = f"createpolicy.fractional.L2::{priority}.b64 {{$w0}}, 1.0;"
    return cute.arch.inline_ptx(instruction, write_only_types=[Int64])


class ReadOnce(TraceConstant):
    """A hint for copies of data that is read once: it makes room in L2 for itself instead of pushing other data out.

    Args:
        applies: whether the hint is given, True where that is known. Otherwise a copy has no policy at all, not the
            usual one by name: that took decode of 1 GB from 264 us to 318 (H200).
    """

    def __init__(self, applies=True):
        self.applies = applies
        self.policy = l2_policy("evict_first")


def cp_async(smem_address, gmem_address, size: int, wanted=True, hint: ReadOnce | None = None) -> None:
    """Start an asynchronous copy of 4, 8 or 16 bytes to shared memory, of zeros where not `wanted`; nothing is read
    then.

    Args:
        smem_address, gmem_address: byte addresses, aligned to `size`.
    """
    args = [smem_address, gmem_address]
    operands = f"[{{$r0}}], [{{$r1}}], {size}"
    if wanted is not True:
        args.append(select(wanted, Int32(size), Int32(0)))
        operands += ", {$r2}"
    # only 16-byte copies can pass L1 by; the assembler adds the fetch of whole lines by itself, but not to a copy with
    # a policy or a predicate
    instruction = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global"
    plain = f"{instruction}.L2::128B {operands};"
    hinted = f"{instruction}.L2::cache_hint.L2::128B {operands}, {{$r{len(args)}}};"
    if hint is None:
        cute.arch.inline_ptx(plain, read_only_args=args)
    elif hint.applies is True:
        cute.arch.inline_ptx(hinted, read_only_args=[*args, hint.policy])
    else:
        cute.arch.inline_ptx(hinted, read_only_args=[*args, hint.policy], predicate=hint.applies)
        cute.arch.inline_ptx(plain, read_only_args=args, predicate=~hint.applies)


def load_fp32(run: cute.Tensor) -> list:
    """The elements of a run in fp32."""
    count = cute.size(run)
    if count % 2 == 0 and run.element_type is cutlass.BFloat16:
        # one instruction an element: a bf16 is the upper half of an fp32, the compiler's own conversion of every second
        # one takes two
        words = cute.recast_tensor(run, cutlass.Uint32).load()
        halves = [(words[i] << cutlass.Uint32(16), words[i] & cutlass.Uint32(0xFFFF0000)) for i in range(count // 2)]
        return [as_fp32(half) for pair in halves for half in pair]
    values = run.load().to(cutlass.Float32)
    return [cutlass.Float32(values[i]) for i in range(count)]


def pair_to_fp32(dtype, word) -> list:
    """The two 16-bit numbers of a word in fp32, the lower half first."""
    if dtype is cutlass.BFloat16:
        return [as_fp32(word << cutlass.Uint32(16)), as_fp32(word & cutlass.Uint32(0xFFFF0000))]
    return [_half_to_fp32(word), _half_to_fp32(word >> cutlass.Uint32(16))]


def _half_to_fp32(word) -> cutlass.Float32:
    """The fp16 in the lower half of a word."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; }",
        write_only_types=[cutlass.Float32],
        read_only_args=[word],
    )


def as_fp32(word) -> cutlass.Float32:
    """The fp32 with the bits of a word."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[cutlass.Float32], read_only_args=[word])

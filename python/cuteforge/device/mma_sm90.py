"""Warpgroup matrix instructions of sm_90a: 64 rows times a matrix in shared memory (device/panels.py), summed in fp32,
and the barriers around them.

Accumulators and left operands in registers lie in a warp as those of `mma_sm80` do: warp w of a warpgroup has rows 16 w
to 16 w + 15, and the accumulator of columns 8 n to 8 n + 7 is four registers. So what works on fragments there works
here.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from cuteforge.device.panels import PANEL_ROW_BYTES

_GROUP_BYTES = 8 * PANEL_ROW_BYTES  # eight rows: the pattern of chunks repeats
_SWIZZLE_128 = 1 << 30  # of the upper word
_PTX_TYPES = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}


def swizzled_offset(row, chunk, rows: int):
    """Byte offset of a 16-byte chunk of a row, in a matrix of `rows` rows."""
    return (chunk // 8) * (rows * PANEL_ROW_BYTES) + row * PANEL_ROW_BYTES + ((chunk % 8) ^ (row % 8)) * 16


class RowOperand:
    """A matrix of `rows` rows of which 16 columns a step are summed over: the left one (queries, 64 rows of them from
    the address on), or one whose rows are columns of the product (keys)."""

    def __init__(self, address, rows: int):
        self.low, self.rows = _low_word(address, 16), rows

    def descriptor(self, step: int):
        """Of the columns from ``16 * step`` on."""
        return _descriptor(self.low, step // 4 * (self.rows * PANEL_ROW_BYTES) + step % 4 * 32)


class ColumnOperand:
    """A matrix of `rows` rows of which 16 a step are summed over (values)."""

    def __init__(self, address, rows: int):
        self.low = _low_word(address, rows * PANEL_ROW_BYTES)

    def descriptor(self, step: int):
        """Of the rows from ``16 * step`` on."""
        return _descriptor(self.low, step * 2 * _GROUP_BYTES)


def _low_word(address, leading_bytes: int):
    """Address and leading offset: found once a matrix, the steps add to it."""
    return ((address & Int32(0x3FFFF)) >> 4) | Int32(leading_bytes >> 4 << 16)


def _descriptor(low, offset: int):
    """The upper word is the same for all: 128-byte swizzling, groups of eight rows apart."""
    return (Int64(_SWIZZLE_128 | _GROUP_BYTES >> 4) << 32) | Int64(cutlass.Uint32(low + (offset >> 4)))


def multiply(dtype, a: tuple, descriptor, sums: list, transposed: bool) -> list:
    """Start ``sums + a @ b``: sums 64xN (N / 2 registers). Complete after its group is waited for.

    Args:
        a: 64x16, 4 registers, or the descriptor of a `RowOperand`.
        transposed: whether the rows of b are summed over, as in a `ColumnOperand`.
    """
    count, name = len(sums), _PTX_TYPES[dtype]
    registers, inputs = ", ".join(f"${i}" for i in range(count)), [f"${2 * count + i}" for i in range(len(a) + 1)]
    in_registers = len(a) > 1
    left = f"{{{', '.join(inputs[:-1])}}}" if in_registers else inputs[0]
    modes = f"1, 1, {int(transposed)}" if in_registers else f"1, 1, 0, {int(transposed)}"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{name}.{name}"
    text = f"{instruction} {{{registers}}}, {left}, {inputs[-1]}, 1, {modes};"
    return _asm(text, sums, [*a, descriptor], ["r" if in_registers else "l"] * len(a) + ["l"])


def start_group() -> None:
    """Before the first product that reads registers written since the last one."""
    cute.arch.inline_ptx("wgmma.fence.sync.aligned;")


def commit_group() -> None:
    cute.arch.inline_ptx("wgmma.commit_group.sync.aligned;")


def wait_groups(pending: int, sums: list, before: list = ()) -> tuple:
    """Wait until at most `pending` groups are on their way; returns `sums` and `before` as they are after it.

    Args:
        sums: accumulators that groups have written: what reads them stays after the wait.
        before: values that are to be computed before the wait: the compiler would do that where they are used.
    """
    # Tied operands are copied ahead of an instruction, and accumulators must not be touched before the wait: hence
    # three.
    before = _asm("// before", before, [], []) if before else []
    cute.arch.inline_ptx(f"wgmma.wait_group.sync.aligned {pending};")
    return _asm("// sums", sums, [], []), before


def _asm(text: str, changed: list, operands: list, operand_kinds: list) -> list:
    """Inline PTX that changes 32-bit registers in place."""
    types = [("f32", "f") if isinstance(x, Float32) else ("i32", "r") for x in changed]
    results = ir.Type.parse(f"!llvm.struct<({', '.join(name for name, _ in types)})>")
    values = [x.ir_value() for x in (*changed, *operands)]
    constraints = ",".join([f"={kind}" for _, kind in types] + [str(i) for i in range(len(changed))] + operand_kinds)
    done = llvm.inline_asm(
        results,
        values,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return [
        type(x)(llvm.extractvalue(ir.Type.parse(name), done, [i]))
        for i, (x, (name, _)) in enumerate(zip(changed, types))
    ]


def see_copies() -> None:
    """Let matrix instructions see what `cp.async` and plain stores have written to shared memory."""
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")

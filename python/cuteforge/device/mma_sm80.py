"""Matrix instructions of sm_80 and up: 16x8 products of 16-bit operands, summed in fp32, and the loads that feed them.

Fragments are tuples of registers. Lane ``4 g + t`` of a warp holds, of the 16x8 accumulator, rows g and g + 8 and
columns 2 t and 2 t + 1, in the order (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1); of a 16x16 left operand the same rows,
two columns a register: (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8) (PTX ISA, mma.m16n8k16).
"""

import cutlass
from cutlass import Float32, Uint32, cute

from cuteforge.device.swizzled_rows import SwizzledRows

_PTX_TYPES = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}
_ONES = {cutlass.BFloat16: 0x3F803F80, cutlass.Float16: 0x3C003C00}


def ldmatrix_x4(address, transposed: bool = False) -> tuple:
    """Four 8x8 matrices of 16-bit elements from shared memory, one register each.

    Lane i gives the byte address of row ``i % 8`` of matrix ``i // 8``, aligned to 16 bytes.
    """
    trans = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def mma_16x8x16(dtype, a, b, c) -> tuple:
    """``a @ b + c``: a 16x16 (4 registers), b 16x8 (2), c 16x8 fp32 (4); returns the 4 of the sum."""
    name = _PTX_TYPES[dtype]
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def pack_pair(dtype, low, high) -> Uint32:
    """Two fp32 rounded to 16 bits each, in one register."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{_PTX_TYPES[dtype]}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[Float32(high), Float32(low)],
    )


def ones_operand(dtype) -> tuple:
    """A 16x8 right operand of ones: the product with it sums the rows of the left one."""
    ones = in_register(_ONES[dtype])
    return ones, ones


def in_register(value: int) -> Uint32:
    """A constant as an operand of a matrix instruction: these take no immediates, which a known value would become."""
    return cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {value:#x};", write_only_types=[Uint32])


def left_operand(dtype, first, second) -> tuple:
    """A 16x16 left operand from two adjacent 16x8 accumulators."""
    return (
        pack_pair(dtype, first[0], first[1]),
        pack_pair(dtype, first[2], first[3]),
        pack_pair(dtype, second[0], second[1]),
        pack_pair(dtype, second[2], second[3]),
    )


class OperandLanes:
    """Where a lane points `ldmatrix_x4` to, for the first 16x16 block of rows in shared memory. Those of further
    columns are `along` it."""

    def __init__(self, lane, rows: SwizzledRows):
        matrix, row = lane // 8, lane % 8
        # the block's rows are columns of the product (keys): matrices (0, k), (0, k+8), (8, k), (8, k+8)
        self.rows_as_columns = rows.offset((matrix // 2) * 8 + row, matrix % 2)
        # the block's rows are summed over (values): matrices (0, n), (8, n), (0, n+8), (8, n+8), each transposed
        self.rows_summed = rows.offset((matrix % 2) * 8 + row, matrix // 2)

"""Runs of the rows of a matrix: from global memory to shared memory, from there to registers, and back."""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.copy import ReadOnce, cp_async, gmem_run
from cuteforge.device.traced import TraceConstant

MIN_ASYNC_BYTES = 4  # cp.async moves 4, 8 or 16 bytes


class Rows(TraceConstant):
    """A matrix in global memory addressed by row, for few instructions a row.

    The byte pitch is a 32-bit number, so that the address of a row is one multiply-add with a 64-bit sum.
    """

    def __init__(self, mX: cute.Tensor):
        self.dtype = mX.element_type
        self.itemsize = mX.element_type.width // 8
        self.base = mX.iterator.toint()
        self.pitch = Int32(mX.stride[0]) * self.itemsize

    def column(self, col):
        """Byte address of (0, col): computed once, then moved by `at`."""
        return self.base + Int64(col * self.itemsize)

    def at(self, column, row):
        """Byte address of a row, given that of its column in row 0."""
        return column + Int64(row) * Int64(self.pitch)

    def run(self, address, elems: int) -> cute.Tensor:
        """`elems` adjacent elements at an address aligned to their size."""
        return gmem_run(self.dtype, address, elems)


def smem_run(base: cute.Pointer, offset, elems: int) -> cute.Tensor:
    """`elems` adjacent elements of shared memory at `base + offset`, aligned to their size."""
    align = elems * base.dtype.width // 8
    pointer = cute.make_ptr(base.dtype, (base + offset).toint(), cute.AddressSpace.smem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(elems))


@cute.jit
def copy_or_zero(rows: Rows, address: Int64, dst: cute.Tensor, wanted, hint: ReadOnce | None = None):
    """Start copying a run from global to shared memory, or zero it where not `wanted`; nothing is read then.

    Asynchronous where the run is at least 4 bytes: complete after the next committed group is waited for.
    """
    size = cute.size(dst) * rows.itemsize
    if cutlass.const_expr(size < MIN_ASYNC_BYTES):
        dst.fill(0.0)
        if wanted:
            dst.store(rows.run(address, cute.size(dst)).load())
    else:
        cp_async(dst.iterator.toint(), address, size, wanted, hint)


@cute.jit
def store_run(rows: Rows, address: Int64, values, col: Int32, limit: int, whole: bool):
    """Store fp32 `values` at an address, each rounded once; those of column `limit` and after are left out, `col` being
    the first.

    `whole` says that runs of this length start at multiples of it and that `limit` is one, so that a run is one access.
    """
    count = len(values)
    if cutlass.const_expr(whole):
        if col < limit:
            rX = cute.make_rmem_tensor(count, rows.dtype)
            for c in cutlass.range_constexpr(count):
                rX[c] = values[c].to(rows.dtype)
            rows.run(address, count).store(rX.load())
    else:
        for c in cutlass.range_constexpr(count):
            if col + c < limit:
                rows.run(address + c * rows.itemsize, 1)[0] = values[c].to(rows.dtype)

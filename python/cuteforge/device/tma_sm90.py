"""Tiles of rows by TMA: one instruction of one thread copies 64 columns of all rows of a tile to shared memory (sm_90 and up).

The rows of a request end where its length says, not where the tensor does: what lies after them may be anything, and 0 times a NaN is a NaN. TMA
fills with zeros what is outside of the tensor, so the tensor is described with two modes of tokens of one stride: token ``i + j - rows``. A tile of
which only n rows are left starts at ``i = rows - n`` with i bounded by `rows`, and the rest is outside. `j` runs from a base `rows` tokens before the
first.
"""

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cuteforge.device.math import select
from cuteforge.device.panels import PANEL_COLS, panel_bytes
from cuteforge.device.traced import TraceConstant


def describe_rows(mX: cute.Tensor, rows: int):
    """On the host: the copy of tiles of `rows` tokens of one head, as (atom, coordinate tensor).

    Args:
        mX: (B, S, H, D) or (T, H, D), 16-byte aligned rows.
    """
    *batch, tokens, heads, cols = range(len(mX.shape))
    stride = mX.stride[tokens]
    shape = [rows, mX.shape[cols], mX.shape[tokens] + rows, mX.shape[heads]]
    strides = [stride, 1, stride, _valid_stride(mX, heads)]
    for mode in batch:
        shape.append(mX.shape[mode])
        strides.append(_valid_stride(mX, mode))
    item_bytes = mX.element_type.width // 8
    base = mX.iterator.toint() - Int64(stride) * (rows * item_bytes)
    pointer = cute.make_ptr(mX.element_type, base, cute.AddressSpace.gmem, assumed_align=16)
    tensor = cute.make_tensor(pointer, cute.make_layout(tuple(shape), stride=tuple(strides)))
    layout = _panel_layout(mX.element_type, rows)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, (rows, PANEL_COLS))


def _valid_stride(mX: cute.Tensor, mode: int):
    """The stride of a mode; of one of extent 1, where a tensor may have any, one that a descriptor takes."""
    return Int64(select(mX.shape[mode] == 1, Int64(mX.shape[len(mX.shape) - 1]), Int64(mX.stride[mode])))


def _panel_layout(dtype, rows: int):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, PANEL_COLS), (0, 1))


class TmaRows(TraceConstant):
    """Copies of one matrix, in the kernel; by all lanes of one warp.

    Args:
        atom, tX: what `describe_rows` gave.
        cols: columns of a row.
    """

    def __init__(self, atom, tX: cute.Tensor, dtype, rows: int, cols: int):
        self.atom, self.tX, self.dtype, self.rows, self.cols = atom, tX, dtype, rows, cols
        self.bytes = panel_bytes(cols, rows)

    @cute.jit
    def copy(self, target: Int32, barrier: cute.Pointer, token: Int32, left: Int32, place: tuple):
        """Start copying the rows from `token` on, of which `left` exist; zeros after them. The barrier counts the bytes.

        Args:
            token: within the mode of tokens.
            place: head, and request in a tensor that has them.
        """
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.bytes)
        outside = cutlass.max(self.rows - left, 0)
        for panel in cutlass.range_constexpr(-(-self.cols // PANEL_COLS)):
            start = (outside, panel * PANEL_COLS, token + (self.rows - outside), *[0] * len(place))
            gX = cute.local_tile(cute.domain_offset(start, self.tX), (self.rows, PANEL_COLS), (0, 0, 0, *place))
            sX = self._panel(target + panel * panel_bytes(PANEL_COLS, self.rows))
            source, destination = cute.group_modes(gX, 0, 2), cute.group_modes(sX, 0, 2)
            destination, source = cpasync.tma_partition(self.atom, 0, cute.make_layout(1), destination, source)
            cute.copy(self.atom, source, destination, tma_bar_ptr=barrier)

    def _panel(self, address) -> cute.Tensor:
        layout = _panel_layout(self.dtype, self.rows)
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)

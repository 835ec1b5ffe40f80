"""Rows by TMA: one instruction of one thread copies 128 bytes of adjacent rows, a box, to a tile in shared memory
(sm_90 and up).

TMA fills with zeros what is outside of a tensor, but the rows of a request end where its length says, not where the
tensor does: what a box holds after them may be anything. A descriptor with a second mode of tokens, based some rows
before the tensor, could let boxes end anywhere; but boxes that ended before they began were illegal accesses where
nothing is mapped there (H200). So descriptors start where tensors do, and boxes in them.
"""

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cuteforge.device.math import select
from cuteforge.device.panels import PANEL_ROW_BYTES, num_panels, panels_bytes
from cuteforge.device.traced import TraceConstant


def describe_rows(mX: cute.Tensor, rows: int):
    """On the host: the copy of boxes of `rows` tokens of one head, as (atom, coordinate tensor).

    Args:
        mX: (B, S, H, D), requests or pages of S tokens, or (T, H, D); 16-byte aligned rows.
    """
    *batch, tokens, heads, cols = range(len(mX.shape))
    modes = [tokens, cols, heads, *batch]
    # a descriptor has no extents of 0, a pool may
    shape = tuple(cutlass.max(mX.shape[mode], 1) if mode != cols else mX.shape[mode] for mode in modes)
    strides = tuple(_valid_stride(mX, mode) if mode != cols else 1 for mode in modes)
    tensor = cute.make_tensor(mX.iterator, cute.make_layout(shape, stride=strides))
    layout = _panel_layout(mX.element_type, rows)
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, (rows, panel_cols(mX.element_type))
    )


def _valid_stride(mX: cute.Tensor, mode: int):
    """The stride of a mode; of one of extent 1, where a tensor may have any, one that a descriptor takes."""
    return Int64(select(mX.shape[mode] == 1, Int64(mX.shape[len(mX.shape) - 1]), Int64(mX.stride[mode])))


def _panel_layout(dtype, rows: int):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, panel_cols(dtype)), (0, 1))


def panel_cols(dtype) -> int:
    """Columns of a panel."""
    return PANEL_ROW_BYTES * 8 // dtype.width


class TmaRows(TraceConstant):
    """Copies of one matrix to tiles, in the kernel; by all lanes of one warp.

    Args:
        atom, tX: what `describe_rows` gave.
        rows: of a box.
        tile_rows: of a tile, a multiple of `rows`.
        row_bytes: of the matrix.
    """

    def __init__(self, atom, tX: cute.Tensor, dtype, rows: int, tile_rows: int, row_bytes: int):
        self.atom, self.tX, self.dtype = atom, tX, dtype
        self.rows, self.tile_rows, self.row_bytes = rows, tile_rows, row_bytes

    def expect(self, barrier: cute.Pointer, boxes) -> None:
        """Let a barrier count the bytes of so many boxes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, boxes * panels_bytes(self.row_bytes, self.rows))

    @cute.jit
    def copy(self, target: Int32, barrier: cute.Pointer, token: Int32, outer: tuple):
        """Start copying the rows from `token` on, which is in the tensor.

        Args:
            target: where the first row lies in the tile.
            token: within the mode of tokens.
            outer: head, and request or page in a tensor that has them.
        """
        cols = panel_cols(self.dtype)
        for panel in cutlass.range_constexpr(num_panels(self.row_bytes)):
            start = (token, panel * cols, *[0] * len(outer))
            gX = cute.local_tile(cute.domain_offset(start, self.tX), (self.rows, cols), (0, 0, *outer))
            sX = self._panel(target + panel * panels_bytes(PANEL_ROW_BYTES, self.tile_rows))
            source, destination = cute.group_modes(gX, 0, 2), cute.group_modes(sX, 0, 2)
            destination, source = cpasync.tma_partition(self.atom, 0, cute.make_layout(1), destination, source)
            cute.copy(self.atom, source, destination, tma_bar_ptr=barrier)

    def _panel(self, address) -> cute.Tensor:
        """One panel of the rows of a box."""
        layout = _panel_layout(self.dtype, self.rows)
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)

"""Tiles of tokens on their way through shared memory: a ring of stages that a few warps fill and read.

A tile has a row of two matrices for each token: its key and its value, or whatever else a source gives the addresses
of. A lane copies the same chunk of rows a constant distance apart: its address in the first one is computed once, and
the others are a few bits away.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from cuteforge.device.copy import cp_async, smem_words
from cuteforge.device.math import select
from cuteforge.device.row_lanes import NOWHERE, RowLanes
from cuteforge.device.swizzled_rows import CHUNK_BYTES
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.keys.ring_shape import RingShape
from cuteforge.families.attention.keys.source import PageToken
from cuteforge.runtime.arch import WARP


class TokenRing(TraceConstant):
    """The ring of the warps that share it.

    Args:
        shape: its sizes.
        base: shared-memory byte address.
        warp, lane: which of those warps, and which lane.
        source: of one head of one request; its tokens before `end` exist. See `keys/source.py`.
        hint: for the copies, or None.
    """

    def __init__(self, shape: RingShape, base, warp, lane, source, end, hint=None):
        self.shape, self.base, self.warp, self.lane = shape, base, warp, lane
        self.source, self.end, self.hint = source, end, hint
        self.lanes = RowLanes(shape.lanes_per_row, shape.num_warps, warp, lane)
        self.first_chunks = [rows.offset(self.lanes.row, self.lanes.chunk) for rows in shape.rows]

    @cute.jit
    def clear_pads(self):
        """Zero the columns of the first matrix that only fill an operand: they meet zeros of the query, and a NaN there
        would count."""
        shape, rows = self.shape, self.shape.rows.first
        if cutlass.const_expr(rows.filled_chunks < rows.chunks):
            for i in cutlass.range(
                self.warp * WARP + self.lane, shape.num_stages * shape.tile_rows, shape.num_warps * WARP
            ):
                stage = self.base + i // shape.tile_rows * shape.stage_bytes
                pad = smem_words(stage + rows.offset(i % shape.tile_rows, rows.filled_chunks), CHUNK_BYTES // 4)
                pad.fill(0)

    def stage_of(self, number: Int32) -> Int32:
        """The stage of the tile that is copied as the `number`-th: worked out, for a counter of its own would be a
        register more."""
        return Int32(Uint32(number) % self.shape.num_stages)

    @cute.jit
    def look_up(self, tile: Int32):
        """What this lane looks up for a tile, to be passed to `issue`: one row."""
        shape = self.shape
        if cutlass.const_expr(self.source.has_lookup):
            assert shape.rounds * self.lanes.per_warp <= WARP, "a lane looks up one row"
            row = self.lanes.looked_up()
            end = select(row < shape.tile_rows, self.end, Int32(0))
            return self.source.look_up(tile * shape.tile_rows + row, end)
        return PageToken(Int32(0), Int32(0))

    @cute.jit
    def issue(self, tile: Int32, stage: Int32, looked_up):
        """Start copying a tile into a stage; rows that do not exist become zeros. The caller commits the copies."""
        shape = self.shape
        stage_address = self.base + stage * shape.stage_bytes
        addresses = (Int64(NOWHERE), Int64(NOWHERE))
        if cutlass.const_expr(self.source.has_lookup):
            addresses = self.source.addresses(looked_up)
        for number in cutlass.range_constexpr(shape.rounds):
            self._issue_round(number, tile, stage_address, addresses)

    @cute.jit
    def _issue_round(self, number, tile: Int32, stage_address: Int32, of_lane):
        """One row for the lanes that copy a row together."""
        shape = self.shape
        further = number * self.lanes.per_round
        row = self.lanes.row + further
        if cutlass.const_expr(self.source.has_lookup):
            addresses = [self.lanes.address(address, number) for address in of_lane]
            wanted = addresses[0] != Int64(NOWHERE)
        else:
            token = tile * shape.tile_rows + row
            addresses = self.source.addresses(token)
            wanted = token < self.end
        if cutlass.const_expr(shape.tile_rows % self.lanes.per_round == 0):
            self._copy_row(stage_address, further, addresses, wanted)
        elif row < shape.tile_rows:
            self._copy_row(stage_address, further, addresses, wanted)

    @cute.jit
    def _copy_row(self, stage_address, further, addresses, wanted):
        """Copy this lane's chunks of the row `further` than its first."""
        shape, chunk = self.shape, self.lanes.chunk
        targets = [
            rows.down(stage_address + offset + first, further)
            for rows, offset, first in zip(shape.rows, shape.offsets, self.first_chunks)
        ]
        for rows, target, address in zip(shape.rows, targets, addresses):
            chunks = rows.filled_chunks
            source = address + Int64(chunk * CHUNK_BYTES)
            for first in cutlass.range_constexpr(0, chunks, shape.lanes_per_row):
                smem_address = rows.along(target, first)
                if cutlass.const_expr(first + shape.lanes_per_row <= chunks):
                    cp_async(smem_address, source + first * CHUNK_BYTES, CHUNK_BYTES, wanted, self.hint)
                elif chunk < chunks - first:
                    cp_async(smem_address, source + first * CHUNK_BYTES, CHUNK_BYTES, wanted, self.hint)

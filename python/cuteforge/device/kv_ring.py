"""Tiles of keys and values on their way through shared memory: a ring of stages that one group of warps fills and reads.

A lane copies the same chunk of rows a constant distance apart: its place in the first one is computed once, and the others are a few bits away.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from cuteforge.device.copy import cp_async, smem_words
from cuteforge.device.kv_source import NOWHERE
from cuteforge.device.math import select
from cuteforge.device.ring_shape import WARP, RingShape
from cuteforge.device.shared_rows import SharedRows
from cuteforge.device.swizzled_rows import CHUNK_BYTES, CHUNK_ELEMS
from cuteforge.device.traced import TraceConstant


class KVRing(TraceConstant):
    """The ring of one group of warps.

    Args:
        shape: RingShape.
        base: shared-memory byte address.
        warp, lane: place within the group.
        source: of one head of one request; its tokens before `end` exist.
        hint: for the copies, or None.
    """

    def __init__(self, shape: RingShape, base, warp, lane, source, end, hint=None):
        self.shape, self.base, self.warp, self.lane = shape, base, warp, lane
        self.source, self.end, self.hint = source, end, hint
        self.rows = SharedRows(shape.lanes_per_row, shape.num_warps, warp, lane)
        places = [rows.offset(self.rows.row, self.rows.chunk) for rows in (shape.k_rows, shape.v_rows)]
        self.k_place, self.v_place = places

    @cute.jit
    def clear_pads(self):
        """Zero the key columns past the head dim: they meet zeros of the query, and a NaN there would count."""
        shape = self.shape
        if cutlass.const_expr(shape.head_dim % 16 != 0):
            for i in cutlass.range(
                self.warp * WARP + self.lane, shape.num_stages * shape.tile_n, shape.num_warps * WARP
            ):
                stage = self.base + i // shape.tile_n * shape.stage_bytes
                pad = smem_words(stage + shape.k_rows.offset(i % shape.tile_n, shape.head_dim // CHUNK_ELEMS), 4)
                pad.fill(0)

    def stage_of(self, turn: Int32) -> Int32:
        """Where the tile of a turn goes: worked out, for a counter of its own would be a register more."""
        return Int32(Uint32(turn) % self.shape.num_stages)

    @cute.jit
    def look_up(self, tile: Int32):
        """What this lane looks up for a tile, to be passed to `issue`: one row."""
        shape = self.shape
        if cutlass.const_expr(self.source.has_lookup):
            assert shape.rounds * self.rows.per_warp <= WARP, "a lane looks up one row"
            row = self.rows.looked_up()
            end = select(row < shape.tile_n, self.end, Int32(0))
            return self.source.look_up(tile * shape.tile_n + row, end)
        return Int32(0), Int32(0)

    @cute.jit
    def issue(self, tile: Int32, stage: Int32, looked_up):
        """Start copying a tile into a stage; rows that do not exist become zeros. The caller commits the group."""
        shape = self.shape
        stage_address = self.base + stage * shape.stage_bytes
        addresses = (Int64(NOWHERE), Int64(NOWHERE))
        if cutlass.const_expr(self.source.has_lookup):
            addresses = self.source.addresses(looked_up)
        for turn in cutlass.range_constexpr(shape.rounds):
            self._issue_round(turn, tile, stage_address, addresses)

    @cute.jit
    def _issue_round(self, turn, tile: Int32, stage_address: Int32, of_lane):
        """One row a lane group."""
        shape = self.shape
        further = turn * self.rows.per_round
        row = self.rows.row + further
        if cutlass.const_expr(self.source.has_lookup):
            addresses = [self.rows.address(address, turn) for address in of_lane]
            wanted = addresses[0] != Int64(NOWHERE)
        else:
            token = tile * shape.tile_n + row
            addresses = self.source.addresses(token)
            wanted = token < self.end
        if cutlass.const_expr(shape.tile_n % self.rows.per_round == 0):
            self._copy_row(stage_address, further, addresses, wanted)
        elif row < shape.tile_n:
            self._copy_row(stage_address, further, addresses, wanted)

    @cute.jit
    def _copy_row(self, stage_address, further, addresses, wanted):
        """Copy this lane's chunks of the row `further` than its first."""
        shape, chunk = self.shape, self.rows.chunk
        k_target = shape.k_rows.down(stage_address + self.k_place, further)
        v_target = shape.v_rows.down(stage_address + shape.v_offset_bytes + self.v_place, further)
        for rows, target, address in ((shape.k_rows, k_target, addresses[0]), (shape.v_rows, v_target, addresses[1])):
            chunks = rows.cols // CHUNK_ELEMS
            source = address + Int64(chunk * CHUNK_BYTES)
            for first in cutlass.range_constexpr(0, chunks, shape.lanes_per_row):
                place = rows.along(target, first)
                if cutlass.const_expr(first + shape.lanes_per_row <= chunks):
                    cp_async(place, source + first * CHUNK_BYTES, CHUNK_BYTES, wanted, self.hint)
                elif chunk < chunks - first:
                    cp_async(place, source + first * CHUNK_BYTES, CHUNK_BYTES, wanted, self.hint)

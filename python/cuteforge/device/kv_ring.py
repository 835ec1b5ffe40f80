"""Tiles of keys and values on their way through shared memory: a ring of stages that one group of warps fills and reads.

Rows are padded to an odd number of 16-byte chunks, so that the eight rows of an 8x8 matrix lie in different banks and every address within a tile is
a lane's own plus a constant.
"""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.copy import cp_async
from cuteforge.device.kv_source import NOWHERE, shuffle_address
from cuteforge.device.math import select
from cuteforge.device.ring_shape import CHUNK_BYTES, CHUNK_ELEMS, WARP, RingShape
from cuteforge.device.traced import TraceConstant


class KVRing(TraceConstant):
    """The ring of one group of warps.

    Args:
        shape: RingShape.
        base: shared-memory byte address.
        warp, lane: place within the group.
        source: of one head of one request; its tokens before `end` exist.
        policy: an L2 policy for the copies, or None.
    """

    def __init__(self, shape: RingShape, base, warp, lane, source, end, policy=None):
        self.shape, self.base, self.warp, self.lane = shape, base, warp, lane
        self.source, self.end, self.policy = source, end, policy
        self.row = warp * shape.rows_per_warp + lane // shape.lanes_per_row
        self.chunk = lane % shape.lanes_per_row

    @cute.jit
    def clear_pads(self):
        """Zero the key columns past the head dim: they meet zeros of the query, and a NaN there would count."""
        shape = self.shape
        if cutlass.const_expr(shape.head_dim % 16 != 0):
            first = self.base + shape.head_dim * 2
            for i in cutlass.range(
                self.warp * WARP + self.lane, shape.num_stages * shape.tile_n, shape.num_warps * WARP
            ):
                offset = i // shape.tile_n * shape.stage_bytes + i % shape.tile_n * shape.k_pitch_bytes
                for word in cutlass.range_constexpr(4):
                    cute.arch.inline_ptx(
                        "st.shared.b32 [{$r0}], {$r1};", read_only_args=[first + offset + 4 * word, Int32(0)]
                    )

    @cute.jit
    def lookup(self, tile: Int32):
        """What this lane looks up for a tile, to be passed to `issue`: the addresses of one row."""
        shape = self.shape
        if cutlass.const_expr(self.source.has_lookup):
            assert shape.rounds * shape.rows_per_warp <= WARP, "a lane looks up one row"
            turn, place = self.lane // shape.rows_per_warp, self.lane % shape.rows_per_warp
            row = turn * shape.rows_per_round + self.warp * shape.rows_per_warp + place
            end = select(row < shape.tile_n, self.end, Int32(0))
            return self.source.lookup(tile * shape.tile_n + row, end)
        return Int64(NOWHERE), Int64(NOWHERE)

    @cute.jit
    def issue(self, tile: Int32, stage: Int32, looked_up):
        """Start copying a tile into a stage; rows that do not exist become zeros. The caller commits the group."""
        shape = self.shape
        stage_address = self.base + stage * shape.stage_bytes
        # Unrolled in full, the shuffles of all rounds come first, and their addresses take the registers of a wide head.
        if cutlass.const_expr(self.source.has_lookup and shape.rounds > 8):
            for turn in cutlass.range(shape.rounds, unroll=4):
                self._issue_round(turn, tile, stage_address, looked_up)
        else:
            for turn in cutlass.range_constexpr(shape.rounds):
                self._issue_round(turn, tile, stage_address, looked_up)

    @cute.jit
    def _issue_round(self, turn, tile: Int32, stage_address: Int32, looked_up):
        """One row a lane group."""
        shape = self.shape
        row = self.row + turn * shape.rows_per_round
        if cutlass.const_expr(self.source.has_lookup):
            owner = turn * shape.rows_per_warp + self.lane // shape.lanes_per_row
            addresses = [shuffle_address(address, owner) for address in looked_up]
            wanted = addresses[0] != Int64(NOWHERE)
        else:
            token = tile * shape.tile_n + row
            addresses = self.source.addresses(token)
            wanted = token < self.end
        target = stage_address + self.chunk * CHUNK_BYTES
        if cutlass.const_expr(shape.tile_n % shape.rows_per_round == 0):
            self._copy_row(target, row, addresses, wanted)
        elif row < shape.tile_n:
            self._copy_row(target, row, addresses, wanted)

    @cute.jit
    def _copy_row(self, target, row, addresses, wanted):
        shape = self.shape
        k_target = target + row * shape.k_pitch_bytes
        v_target = target + row * shape.v_pitch_bytes + shape.v_offset_bytes
        for start, address, dim in ((k_target, addresses[0], shape.head_dim), (v_target, addresses[1], shape.v_dim)):
            chunks = dim // CHUNK_ELEMS
            source = address + Int64(self.chunk * CHUNK_BYTES)
            for first in cutlass.range_constexpr(0, chunks, shape.lanes_per_row):
                offset = first * CHUNK_BYTES
                if cutlass.const_expr(first + shape.lanes_per_row <= chunks):
                    cp_async(start + offset, source + offset, CHUNK_BYTES, wanted, self.policy)
                elif self.chunk < chunks - first:
                    cp_async(start + offset, source + offset, CHUNK_BYTES, wanted, self.policy)

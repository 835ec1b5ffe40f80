"""The producer warps: what each work tile is and its queries, and its keys and values."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.row_lanes import NOWHERE
from cuteforge.device.rows_sm90 import RowCopier
from cuteforge.device.tma_sm90 import TmaRows
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.buffers import KEYS, NO_WORK, VALUES, Buffers
from cuteforge.families.attention.forward_sm90a.config import PRODUCER_WARPS, TOKEN_WARPS
from cuteforge.families.attention.forward_sm90a.live_tiles import LiveTiles
from cuteforge.families.attention.forward_sm90a.schedule import Schedule
from cuteforge.families.attention.forward_sm90a.token_tiles import Tail, TileBoxes, TileRows, no_tail
from cuteforge.families.attention.parts.result import store_nothing
from cuteforge.families.attention.work.counts import Counts
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.runtime.arch import WARP


class TokenCursor(NamedTuple):
    """Where a producer warp is in the buffers of keys, or of values: the stage, its phase, and that of
    `Buffers.loaded`."""

    stage: Any
    phase: Any
    loaded_phase: Any


class ProducerWarp(TraceConstant):
    """Keeps the buffers of a CTA full, work tile after work tile. Each method is what one or more warps do all the
    time.

    Args:
        dtype: of the tensors.
        tma: of keys and of values what `describe_rows` gave; None where no rows are adjacent.

    Attributes:
        by_tma: whether keys and values come by TMA: a constant, but for pages a matter of their size.
    """

    def __init__(self, counts: Counts, buffers: Buffers, dtype, tma: tuple | None, warp, lane):
        self.counts, self.buffers, self.dtype, self.tma, self.lane = counts, buffers, dtype, tma, lane
        self.schedule = Schedule(counts, buffers.ahead(warp), lane)
        self.traits, self.tile = counts.traits, counts.traits.tile
        self.row_bytes = self.traits.row_bytes
        is_cut = self.traits.problem.keys == "pages"
        self.by_tma = counts.ops.mK.shape[1] % self.traits.box_rows == 0 if is_cut else self.traits.box_rows > 0

    @cute.jit
    def run(self, warp: Int32):
        """What one of the producer warps does."""
        if cutlass.const_expr(isinstance(self.by_tma, bool)):
            if cutlass.const_expr(self.by_tma):
                self._copy_boxes(warp)
            else:
                self._copy_rows(warp)
        elif self.by_tma:
            self._copy_boxes(warp)
        else:
            self._copy_rows(warp)

    @cute.jit
    def _copy_boxes(self, warp: Int32):
        """By TMA, which takes one warp for keys and one for values; the others copy the queries, ahead of them."""
        if warp < TOKEN_WARPS:
            tiles = []
            for which, (tma, row_bytes) in enumerate(zip(self.tma, self.row_bytes)):
                copies = TmaRows(*tma, self.dtype, self.traits.box_rows, self.tile.tile_n, row_bytes)
                tiles.append(TileBoxes(self.traits, copies, which, self.buffers.loaded, self.lane))
            if cutlass.const_expr(self.traits.finds_live_tiles):
                self._copy_live_tokens(warp == KEYS, tiles)
            else:
                self._copy_tokens(warp == KEYS, tiles, None)
        else:
            self._copy_queries(
                RowCopier((self.row_bytes.key,), PRODUCER_WARPS - TOKEN_WARPS, warp - TOKEN_WARPS, self.lane)
            )

    @cute.jit
    def _copy_rows(self, warp: Int32):
        """Row by row from wherever they are: keys by one half of the warps, values by the other, queries by all."""
        half = PRODUCER_WARPS // 2
        copier = RowCopier(self.row_bytes, half, warp % half, self.lane)
        tiles = [TileRows(self.traits, copier, which, row_bytes) for which, row_bytes in enumerate(self.row_bytes)]
        self._copy_tokens(warp < half, tiles, RowCopier((self.row_bytes.key,), PRODUCER_WARPS, warp, self.lane))

    @cute.jit
    def _copy_tokens(self, are_keys, tiles: cutlass.Constexpr, query_copier: RowCopier | None):
        """Keys, or values, of all work tiles. Neither waits until there is room for the others: a tile of keys is read
        before the values of the tile before, but would be copied after them (H200, 4 requests of 4096 tokens in pages
        of 16: 1.08 of dense keys, 1.19 with one warp for both).

        Args:
            tiles: of keys, and of values.
            query_copier: copies the queries of each work tile as well, where it is given.
        """
        query_stage, query_phase = Int32(0), Int32(0)
        cursor = TokenCursor(*(Int32(0),) * 3)
        tail = no_tail()
        position = self.schedule.first()
        while self.schedule.has(position):
            work = self.schedule.look_up(position)
            first, end = work.key_tiles()
            if cutlass.const_expr(self.traits.finds_live_tiles):
                work = work.of_tiles((first, end, Int32(0), Int32(0)))
            if cutlass.const_expr(query_copier is not None):
                query_stage, query_phase = self._copy_queries_of(
                    work, end - first, query_copier, query_stage, query_phase
                )
            if are_keys:
                cursor, tail = self._copy_tiles(work, tiles[KEYS], first, end, cursor, tail)
            else:
                cursor, tail = self._copy_tiles(work, tiles[VALUES], first, end, cursor, tail)
            position = self.schedule.after(position)
        if not are_keys:
            tiles[VALUES].finish(self.buffers.tokens[VALUES], tail, cursor.loaded_phase)
        if cutlass.const_expr(query_copier is not None):
            self._publish_end(query_copier, query_stage, query_phase)

    @cute.jit
    def _copy_live_tokens(self, are_keys, tiles: cutlass.Constexpr):
        """`_copy_tokens` by TMA, of the tiles that the producer warps of the queries have found."""
        stage, phase, cursor, tail = Int32(0), Int32(0), TokenCursor(*(Int32(0),) * 3), no_tail()
        fields = self._next_work(stage, phase)
        while fields.batch != NO_WORK:
            work = WorkTile.of_fields(self.counts, fields)
            first, end = work.key_tiles()
            if are_keys:
                cursor, tail = self._copy_tiles(work, tiles[KEYS], first, end, cursor, tail)
            else:
                cursor, tail = self._copy_tiles(work, tiles[VALUES], first, end, cursor, tail)
            stage, phase = self.buffers.queries.next(stage, phase)
            fields = self._next_work(stage, phase)
        if not are_keys:
            tiles[VALUES].finish(self.buffers.tokens[VALUES], tail, cursor.loaded_phase)

    def _next_work(self, stage, phase):
        """The fields of a work tile, once they are there. They stay until its last keys and values have been used."""
        self.buffers.queries.consumer_wait(stage, phase)
        return self.buffers.read_work(stage)

    @cute.jit
    def _copy_tiles(
        self, work: WorkTile, tiles: cutlass.Constexpr, first: Int32, end: Int32, cursor: TokenCursor, tail: Tail
    ):
        """The tiles of a work tile, looked up one ahead. Returns the cursor at the next one, and the tail of the
        last."""
        stages = self.buffers.tokens[tiles.which]
        stage, phase, loaded_phase = cursor
        found = tiles.look_up(work, first)
        for tile in cutlass.range(first, end, unroll=1):
            after = tiles.look_up(work, tile + 1)
            if cutlass.const_expr(tiles.which == VALUES):
                loaded_phase = tiles.finish(stages, tail, loaded_phase)
            stages.producer_acquire(stage, phase)
            tail = tiles.copy(work, stages, stage, tile, found, tail)
            found = after
            stage, phase = stages.next(stage, phase)
        return TokenCursor(stage, phase, loaded_phase), tiles.end_work(stages, tail)

    @cute.jit
    def _copy_queries(self, copier: RowCopier):
        """What the work tiles are, and their queries, beside `_copy_tokens`."""
        stage, phase = Int32(0), Int32(0)
        position = self.schedule.first()
        live_tiles = LiveTiles(copier.num_warps, copier.warp, self.lane, self.buffers.slots)
        while self.schedule.has(position):
            work = self.schedule.look_up(position)
            if cutlass.const_expr(self.traits.finds_live_tiles):
                work = work.of_tiles(live_tiles.find(work, position.number))
            first, end = work.key_tiles()
            stage, phase = self._copy_queries_of(work, end - first, copier, stage, phase)
            position = self.schedule.after(position)
        self._publish_end(copier, stage, phase)

    @cute.jit
    def _copy_queries_of(self, work: WorkTile, num_tiles: Int32, copier: RowCopier, stage: Int32, phase: Int32):
        """The rows of a work tile with keys go to the consumer warps; what those without get is written here."""
        tile_m = self.tile.tile_m
        if num_tiles > 0:
            queries = self.buffers.queries
            queries.producer_acquire(stage, phase)
            if copier.warp == 0 and self.lane == 0:
                self.buffers.publish_work(stage, work)
            for first in cutlass.range_constexpr(0, tile_m, copier.rows_at_once):
                num_rows = min(tile_m - first, copier.rows_at_once)
                found = copier.look_up(QueryRows(work), work.first_row + first, num_rows, work.num_rows)
                copier.copy(queries.address(stage), tile_m, first, num_rows, self.row_bytes.key, found)
            queries.producer_commit(stage)
            stage, phase = queries.next(stage, phase)
        else:
            for i in cutlass.range(copier.warp * WARP + self.lane, tile_m, copier.rows_at_once):
                store_nothing(work, work.first_row + i)
        return stage, phase

    @cute.jit
    def _publish_end(self, copier: RowCopier, stage: Int32, phase: Int32):
        self.buffers.queries.producer_acquire(stage, phase)
        if copier.warp == 0 and self.lane == 0:
            self.buffers.publish_work(stage, None)
        self.buffers.queries.producer_commit(stage)
        # a CTA must not end before what it has asked for is there
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)


class QueryRows(TraceConstant):
    """The query rows of a work tile."""

    def __init__(self, work: WorkTile):
        self.work = work

    @cute.jit
    def look_up(self, row: Int32, end: Int32):
        """Byte address of a row, NOWHERE if it is not before `end`."""
        address = Int64(NOWHERE)
        if row < end:
            address = self.work.query_address(self.work.ops.mQ, row)
        return address

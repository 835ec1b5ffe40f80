"""The warps that copy: what each unit is and its queries, and its keys and values."""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.kv_source import NOWHERE
from cuteforge.device.rows_sm90 import RowCopier
from cuteforge.device.tma_sm90 import TmaRows
from cuteforge.device.traced import TraceConstant
from cuteforge.gqa.config import WARP
from cuteforge.gqa.prefill_sm90a.buffers import KEYS, Buffers
from cuteforge.gqa.prefill_sm90a.config import COPY_WARPS
from cuteforge.gqa.result import store_nothing
from cuteforge.gqa.work import Counts, Unit


class Loads(TraceConstant):
    """Keeps the buffers of a CTA full, unit after unit. Each method is what one or more warps do all the time.

    Args:
        dtype: of the tensors.
        tma: of keys and of values what `describe_rows` gave; None where rows are copied one by one.
    """

    def __init__(self, counts: Counts, buffers: Buffers, dtype, tma: tuple | None, lane):
        self.counts, self.buffers, self.dtype, self.tma, self.lane = counts, buffers, dtype, tma, lane
        self.traits, self.tile = counts.traits, counts.traits.tile
        self.dims = self.traits.problem.head_dim, self.traits.problem.v_dim

    @cute.jit
    def run(self, warp: Int32):
        """What one of the copying warps does."""
        if cutlass.const_expr(self.traits.by_tma):
            if warp == 0:
                self._copy_tokens_by_tma()
            else:
                self._copy_queries(RowCopier(self.dims[:1], COPY_WARPS - 1, warp - 1, self.lane))
        else:
            self._copy_all(warp)

    @cute.jit
    def _copy_tokens_by_tma(self):
        """Keys and values, by one warp."""
        counts, tile_n = self.counts, self.tile.tile_n
        copies = [TmaRows(*tma, self.dtype, tile_n, dim) for tma, dim in zip(self.tma, self.dims)]
        stage, parity = Int32(0), Int32(0)
        index, step, step_after = first_unit()
        while index < counts.units:
            unit = Unit.of_block(counts, index, self.lane)
            place = (unit.head, unit.batch) if cutlass.const_expr(len(counts.ops.mK.shape) == 4) else (unit.head,)
            first, end = unit.tiles()
            for tile in cutlass.range(first, end, unroll=1):
                token = tile * tile_n
                for which in cutlass.range_constexpr(len(copies)):
                    stages = self.buffers.tokens[which]
                    stages.wait_free(stage, parity)
                    copies[which].copy(
                        stages.address(stage), stages.full(stage), unit.first_key + token, unit.k_len - token, place
                    )
                stage, parity = self.buffers.tokens[KEYS].next(stage, parity)
            index, step, step_after = index + step, step_after, step

    @cute.jit
    def _copy_queries(self, copier: RowCopier):
        """What the units are, and their queries, beside `_copy_tokens_by_tma`."""
        stage, parity = Int32(0), Int32(0)
        index, step, step_after = first_unit()
        while index < self.counts.units:
            unit = Unit.of_block(self.counts, index, self.lane)
            first, end = unit.tiles()
            stage, parity = self._copy_queries_of(unit, end - first, copier, stage, parity)
            index, step, step_after = index + step, step_after, step
        self._tell_end(copier, stage, parity)

    @cute.jit
    def _copy_all(self, warp: Int32):
        """Queries, and keys and values row by row, from wherever they are."""
        tile_n, tokens = self.tile.tile_n, self.buffers.tokens
        query_copier, copier = (RowCopier(dims, COPY_WARPS, warp, self.lane) for dims in (self.dims[:1], self.dims))
        query_stage, query_parity, stage, parity = Int32(0), Int32(0), Int32(0), Int32(0)
        index, step, step_after = first_unit()
        while index < self.counts.units:
            unit = Unit.of_block(self.counts, index, self.lane)
            first, end = unit.tiles()
            query_stage, query_parity = self._copy_queries_of(
                unit, end - first, query_copier, query_stage, query_parity
            )
            source = unit.source()
            found = copier.look_up(source, first * tile_n, tile_n, unit.k_len)
            for tile in cutlass.range(first, end, unroll=1):
                after = copier.look_up(source, (tile + 1) * tile_n, tile_n, unit.k_len)
                addresses = source.addresses(found)
                for which in cutlass.range_constexpr(len(tokens)):
                    tokens[which].wait_free(stage, parity)
                    copier.copy(tokens[which].address(stage), tile_n, 0, tile_n, self.dims[which], addresses[which])
                    tokens[which].fill_when_copied(stage)
                found = after
                stage, parity = tokens[KEYS].next(stage, parity)
            index, step, step_after = index + step, step_after, step
        self._tell_end(query_copier, query_stage, query_parity)

    @cute.jit
    def _copy_queries_of(self, unit: Unit, num_tiles: Int32, copier: RowCopier, stage: Int32, parity: Int32):
        """The rows of a unit with keys go to the multiplying warps; what those without get is written here."""
        tile_m = self.tile.tile_m
        if num_tiles > 0:
            queries = self.buffers.queries
            queries.wait_free(stage, parity)
            if copier.warp == 0 and self.lane == 0:
                self.buffers.tell(stage, unit)
            for first in cutlass.range_constexpr(0, tile_m, copier.rows_at_once):
                num_rows = min(tile_m - first, copier.rows_at_once)
                found = copier.look_up(QueryRows(unit), unit.first_row + first, num_rows, unit.num_rows)
                copier.copy(queries.address(stage), tile_m, first, num_rows, self.dims[0], found)
            queries.fill_when_copied(stage)
            stage, parity = queries.next(stage, parity)
        else:
            for i in cutlass.range(copier.warp * WARP + self.lane, tile_m, copier.rows_at_once):
                store_nothing(unit, unit.first_row + i)
        return stage, parity

    @cute.jit
    def _tell_end(self, copier: RowCopier, stage: Int32, parity: Int32):
        self.buffers.queries.wait_free(stage, parity)
        if copier.warp == 0 and self.lane == 0:
            self.buffers.tell(stage, None)
        self.buffers.queries.fill_when_copied(stage)
        # a CTA must not end before what it has asked for is there
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)


def first_unit() -> tuple:
    """(first unit of a CTA, and the steps to its second, to its third and so on, in turn).

    A CTA that is first in one round of units is last in the next: with units in the order of their lengths all have about as much to do.
    """
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return Int32(cta), Int32(2 * (ctas - 1 - cta) + 1), Int32(2 * cta + 1)


class QueryRows(TraceConstant):
    """The query rows of a unit."""

    def __init__(self, unit: Unit):
        self.unit = unit

    @cute.jit
    def look_up(self, row: Int32, end: Int32):
        """Byte address of a row, NOWHERE if it is not before `end`."""
        address = Int64(NOWHERE)
        if row < end:
            address = self.unit.query_address(self.unit.ops.mQ, row)
        return address

"""A work tile: what a CTA works on at a time, some rows of one KV head of one request."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from cuteforge.device.copy import row_address
from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.keys.source import PagedKV, StridedKV
from cuteforge.families.attention.work.counts import Counts
from cuteforge.families.attention.work.traits import WorkTraits


class TileFields(NamedTuple):
    """What a work tile is made of, as numbers that one warp can hand to another.

    Attributes:
        batch, head: request and KV head.
        row_tile: tile of the request's packed rows.
        first_token, q_len: of the request in packed queries.
        first_key, k_len: of the request in packed keys, and its number of keys.
        first_tile, end_tile: of the tiles of keys that a mask leaves anything of; None where nobody looked for them.
    """

    batch: Any
    head: Any
    row_tile: Any
    first_token: Any
    q_len: Any
    first_key: Any
    k_len: Any
    first_tile: Any = None
    end_tile: Any = None

    @classmethod
    def count(cls, traits: WorkTraits) -> int:
        """How many of them are handed over."""
        return len(cls._fields) - (0 if traits.finds_live_tiles else 2)


class WorkTile(TraceConstant):
    """One KV head of one request, and a tile of the query rows that read it: the heads of its group times the query
    tokens, packed token by token.

    Args:
        batch, head, row_tile, first_token, q_len: as in `TileFields`.
        keys: what `Counts.keys_of` gives for the request, where that is known.
        tiles: what `key_tiles` gives, where that is known.

    Attributes:
        first_row, num_rows: where the tile starts among the request's packed rows, and how many rows there are in all.
        k_len: keys of the request.
        band: which of them a token of the request sees.
    """

    def __init__(self, counts: Counts, batch, head, row_tile, first_token=None, q_len=None, keys=None, tiles=None):
        self.traits, self.ops, self.counts = counts.traits, counts.ops, counts
        self.batch, self.head = batch, head
        self.first_token = Int32(0) if first_token is None else first_token
        self.q_len = counts.tokens if q_len is None else q_len
        self.row_tile, self.first_row = row_tile, row_tile * self.traits.tile.tile_m
        self.num_rows = self.q_len * counts.group_size
        # loaded, so the compiler cannot know that all lanes have one value: as such it takes no register of each
        self.first_key, self.k_len = keys or [cute.arch.make_warp_uniform(x) for x in counts.keys_of(batch)]
        self.band = counts.band(self.q_len, self.k_len)
        self.tiles = tiles

    @classmethod
    def at(cls, counts: Counts, index, lane=None):
        """The `index`-th work tile in the order in which they are worked on: the row tiles that see most keys come
        first.

        The lanes of a warp find it together; without `lane` each finds one of its own.

        In rounds (`WorkTraits.in_rounds`) they come first and last in turn, from one request or set to the next, so
        that the lengths of adjacent rounds are alike; see `forward_sm90a/schedule.py`.
        """
        traits, divisors = counts.traits, counts.divisors
        if traits.problem.packs_queries:
            number, head = divmod(index, divisors.heads)
            batch, first_token, q_len, row_tile = counts.packed_rows().find(counts.row_tiles - 1 - number, lane)
            if traits.in_rounds:
                tile_m = traits.tile.tile_m
                last = (q_len * counts.group_size + (tile_m - 1)) // tile_m - 1
                row_tile = Int32(select((batch % 2 != 0) & (row_tile <= last), last - row_tile, row_tile))
            keys = None if lane is not None else counts.keys_of(batch)
            return cls(counts, batch, head, row_tile, first_token, q_len, keys)
        set_index, within = divmod(index, divisors.set)
        from_last, pair = divmod(within, divisors.together)
        batch, head = divmod(set_index * counts.together + pair, divisors.heads)
        row_tile = counts.row_tiles - 1 - from_last
        if traits.in_rounds:
            row_tile = Int32(select((counts.sets - 1 - set_index) % 2 != 0, from_last, row_tile))
        return cls(counts, batch, head, row_tile)

    def fields(self) -> TileFields:
        request = self.batch, self.head, self.row_tile, self.first_token, self.q_len, self.first_key, self.k_len
        return TileFields(*request, *(self.tiles or ()))

    @classmethod
    def of_fields(cls, counts: Counts, fields: TileFields):
        *others, first_key, k_len, first_tile, end_tile = fields
        tiles = None if first_tile is None else (first_tile, end_tile)
        return cls(counts, *others, keys=(first_key, k_len), tiles=tiles)

    def of_tiles(self, first, end):
        """The same work tile, of whose tiles of keys only some count."""
        return self.of_fields(self.counts, self.fields()._replace(first_tile=first, end_tile=end))

    @cute.jit
    def table_row(self):
        """The request's row of the page table."""
        row = self.batch
        if cutlass.const_expr(self.traits.problem.takes("page_table_rows")):
            if self.batch < self.counts.requests:
                row = self.ops.mPageTableRows[self.batch]
        return row

    def token_of(self, row):
        """The query token of a packed row."""
        return row // self.counts.divisors.group_size

    def keys_end(self, row):
        """The end of the keys that a packed row sees."""
        return self.band.keys_end(self.token_of(row))

    def keys_begin(self, row):
        """The first key that a packed row sees."""
        return self.band.keys_begin(self.token_of(row))

    def last_row(self):
        """The last row of the tile."""
        return cutlass.min(self.first_row + self.traits.tile.tile_m, self.num_rows) - 1

    def key_tiles(self):
        """(first, end) of the tiles of keys that the rows of the tile see."""
        return self.tiles or self._tiles_in_band()

    @cute.jit
    def _tiles_in_band(self):
        tile_n = self.traits.tile.tile_n
        keys = cutlass.max(self.keys_end(self.last_row()), 0)
        if self.first_row >= self.num_rows:
            keys = Int32(0)
        end = (keys + (tile_n - 1)) // tile_n
        first = Int32(0)
        if cutlass.const_expr(self.traits.problem.has_left):
            first = cutlass.min(self.keys_begin(self.first_row) // tile_n, end)
        return first, end

    def source(self):
        """Where the keys and values come from."""
        problem, ops = self.traits.problem, self.ops
        if problem.packs_keys:
            return StridedKV.of_packed(ops.mK, ops.mV, self.first_key, self.head)
        if not problem.is_paged:
            return StridedKV.of_batch(ops.mK, ops.mV, self.batch, self.head)
        new, new_token = None, None
        if problem.appends:
            new = tuple(row_address(m, (self.batch, self.head)) for m in (ops.mNewK, ops.mNewV))
            new_token = self.k_len - 1
        return PagedKV(
            ops.mK, ops.mV, ops.mPageTable, self.table_row(), self.head, self.counts.divisors.page, new, new_token
        )

    def token_and_head(self, row):
        """(query token within the request, query head) of a packed row."""
        token, head = divmod(row, self.counts.divisors.group_size)
        return token, self.head * self.counts.group_size + head

    def query_address(self, m: cute.Tensor, row):
        """Byte address of a packed row in q or out."""
        token, head = self.token_and_head(row)
        index = {
            "batch": (self.batch, token, head),
            "single": (self.batch, head),
            "packed": (self.first_token + token, head),
        }[self.traits.problem.queries]
        return row_address(m, index)

    def sink(self, row):
        """The sink of a packed row's head, None in an op without sinks."""
        if not self.traits.problem.has_sinks:
            return None
        _, head = self.token_and_head(row)
        return self.ops.mSinks[head]

    def lse_index(self, row):
        token, head = self.token_and_head(row)
        if self.traits.problem.packs_queries:
            return head, self.first_token + token
        return self.batch, head, token

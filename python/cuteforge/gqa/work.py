"""Which rows and keys a CTA works on: requests, their lengths, and the part that a block index stands for."""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.copy import row_address
from cuteforge.device.kv_source import PagedKV, StridedKV
from cuteforge.device.math import fast_divisor, select
from cuteforge.device.traced import TraceConstant
from cuteforge.gqa.config import WARP, Traits

UNIT_FIELDS = 7
MAX_SEARCH = 64  # steps of the host
# Up to so many bytes of keys and values are read with a hint that they are read once: 34 MB took 18.4 us with it and 19.6 without, 270 MB as long
# with it as without, 1 GB 264 us with it and 255 without (H200).
LITTLE_BYTES = 192 * 2**20
L2_BYTES = 24 * 2**20  # for keys and values that are read again and again: half of the L2 of most GPUs


class Operands(TraceConstant):
    """The operands of a kernel by name; None for those that the op does not have. The last three are numbers."""

    NAMES = (
        "mQ", "mK", "mV", "mOut", "mLse", "mMask", "mLengths", "mCuQ", "mCuK", "mTable", "mRows", "mNewK", "mNewV", "mSinks", "mWorkspace",
        "left", "right", "softcap",
    )  # fmt: skip

    def __init__(self, *tensors):
        for name, tensor in zip(self.NAMES, tensors, strict=True):
            setattr(self, name, tensor)


class Counts(TraceConstant):
    """Sizes that shapes give: requests, heads, and the units of work of a grid.

    Args:
        by: divisors (heads of a group, KV heads, row tiles, pairs of a set, units of a set) in a kernel, where the host has prepared them.

    Attributes:
        requests, kv_heads, group, tokens: of requests, KV heads, query heads of one, query tokens.
        row_tiles: of a request; of packed queries in all.
        together: pairs of a request and a KV head that are worked on at one time, a set, so that their keys and values stay in L2.
        sets: of batched queries, in a kernel.
        units: their places; of packed queries some are empty.
    """

    def __init__(self, traits: Traits, ops: Operands, by: tuple | None = None):
        self.traits, self.ops = traits, ops
        queries, q_shape, k_shape = traits.problem.queries, ops.mQ.shape, ops.mK.shape
        self.kv_heads = k_shape[len(k_shape) - 2]
        self.group = q_shape[len(q_shape) - 2] // self.kv_heads if by is None else by[0].divisor
        tile_m = traits.tile.tile_m
        if queries == "packed":
            self.requests, self.tokens = ops.mCuQ.shape[0] - 1, q_shape[0]
            # Request b has the slots from (cu[b] * G) // tile_m + b on: at least as many as it has tiles of rows. The tokens past the last
            # request are one more, without keys.
            self.row_tiles = self.tokens * self.group // tile_m + self.requests + 1
            self.together, self.units = Int32(1), self.row_tiles * self.kv_heads
        else:
            self.requests = q_shape[0]
            self.tokens = q_shape[1] if queries == "batch" else Int32(1)
            self.row_tiles = (self.tokens * self.group + tile_m - 1) // tile_m
            pairs = self.requests * self.kv_heads
            self.together = self._pairs_together(pairs) if by is None else by[3].divisor
            self.sets = None if by is None else divmod(pairs, by[3])[0]
            self.units = pairs * self.row_tiles
        self.by = by

    @cute.jit
    def _pairs_together(self, pairs: Int32):
        """The largest part of all pairs that L2 holds, all where nothing is read twice. One that leaves a rest would leave CTAs without work."""
        together = cutlass.max(pairs, 1)
        if cutlass.const_expr(not self.traits.reads_keys_once):
            problem = self.traits.problem
            keys_in_l2 = L2_BYTES // (2 * (problem.head_dim + problem.v_dim))
            most = cutlass.max(keys_in_l2 // cutlass.max(self.most_keys(), 1), 1)
            together = cutlass.min(together, most)
            least = cutlass.max(together - MAX_SEARCH, 1)
            while pairs % together != 0 and together > least:
                together = together - 1
            if pairs % together != 0:
                together = Int32(1)
        return together

    @property
    def by_group(self):
        return self.by[0]

    @property
    def by_heads(self):
        return self.by[1]

    @property
    def by_row_tiles(self):
        return self.by[2]

    @property
    def by_together(self):
        return self.by[3]

    @property
    def by_set(self):
        return self.by[4]

    @property
    def by_page(self):
        """By the tokens of a page; None for pages of one."""
        return self.by[5] if self.traits.problem.keys == "pages" else None

    def divisors(self) -> tuple:
        """`by`, prepared by the host."""
        page_sizes = (self.ops.mK.shape[1],) if self.traits.problem.keys == "pages" else ()
        sizes = self.group, self.kv_heads, self.row_tiles, self.together, self.together * self.row_tiles, *page_sizes
        return tuple(map(fast_divisor, sizes))

    def most_keys(self):
        """Keys that a request can have, by shape."""
        problem, ops = self.traits.problem, self.ops
        if problem.keys == "packed":
            return ops.mK.shape[0]
        if not problem.is_paged:
            return ops.mK.shape[1]
        page_size = ops.mK.shape[1] if problem.keys == "pages" else Int32(1)
        most = Int64(ops.mTable.shape[1]) * Int64(page_size)
        return Int32(select(most > Int64(2**31 - 1), Int64(2**31 - 1), most))

    def reads_little(self):
        """Whether the keys and values of all requests are at most `LITTLE_BYTES`, as far as shapes tell."""
        problem = self.traits.problem
        keys = Int64(self.requests) * Int64(self.kv_heads) * Int64(self.most_keys())
        return keys <= LITTLE_BYTES // (2 * (problem.head_dim + problem.v_dim))

    def first_seen(self, position):
        """The first key that a query at a position sees: positions are those of keys, negative ones before the first."""
        left = self.ops.left
        # no difference of two large numbers, which could pass 2**31
        return Int32(0) if left is None else cutlass.max(position, left) - left

    def first_turn(self, keys, tokens):
        """The first turn of keys that any query of a request sees."""
        return self.first_seen(keys - tokens) // self.traits.tile.turn_keys

    @cute.jit
    def keys_of(self, batch: Int32):
        """(first key in packed keys, number of keys) of a request: never more than the operands hold, none past the last request."""
        first, length = Int32(0), Int32(0)
        if batch < self.requests:
            first, length = self._keys_of(batch)
        return first, length

    @cute.jit
    def _keys_of(self, batch: Int32):
        problem, ops = self.traits.problem, self.ops
        first = Int32(0)
        length = self.most_keys()
        if cutlass.const_expr(problem.keys == "packed"):
            first, length = _span(ops.mCuK, batch, length)
        if cutlass.const_expr(problem.lengths == "seqlens"):
            length = cutlass.min(ops.mLengths[batch], length)
        elif cutlass.const_expr(problem.lengths == "indptr"):
            begin, end = ops.mLengths[batch], ops.mLengths[batch + 1]
            length = select((begin >= 0) & (end >= begin), cutlass.min(end - begin, length), Int32(0))
        if cutlass.const_expr(problem.has_rows):
            row = ops.mRows[batch]
            length = select((row >= 0) & (row < ops.mTable.shape[0]), length, Int32(0))
        return first, cutlass.max(length, 0)


class Unit(TraceConstant):
    """One KV head of one request, and the row tile of it that a CTA works on.

    Args:
        batch, head: request and KV head.
        row_tile: tile of the request's packed rows.
        first_token, q_len: of the request in packed queries.
        keys: what `Counts.keys_of` gives for the request, where that is known.

    Attributes:
        first_row, num_rows: where the tile starts among the request's packed rows, and how many rows there are in all.
        k_len: keys of the request.
    """

    def __init__(self, counts: Counts, batch, head, row_tile, first_token=None, q_len=None, keys=None):
        self.traits, self.ops, self.counts = counts.traits, counts.ops, counts
        self.batch, self.head = batch, head
        self.first_token = Int32(0) if first_token is None else first_token
        self.q_len = counts.tokens if q_len is None else q_len
        self.row_tile, self.first_row = row_tile, row_tile * self.traits.tile.tile_m
        self.num_rows = self.q_len * counts.group
        # loaded, so the compiler cannot know that all lanes have one value: as such it takes no register of each
        self.first_key, self.k_len = keys or [cute.arch.make_warp_uniform(x) for x in counts.keys_of(batch)]

    @classmethod
    def of_block(cls, counts: Counts, index, lane=None):
        """The unit of a place in the order of the units: the row tiles that see most keys come first.

        The lanes of a warp find it together; without `lane` each finds one of its own.

        In rounds (`Traits.in_rounds`) they come first and last in turn, from one request or set to the next, so that the lengths of adjacent rounds
        are alike; see `prefill_sm90a.units.UnitsOfCta`.
        """
        if counts.traits.problem.queries == "packed":
            place, head = divmod(index, counts.by_heads)
            batch, first_token, q_len, row_tile = find_request(counts, counts.row_tiles - 1 - place, lane)
            if counts.traits.in_rounds:
                tile_m = counts.traits.tile.tile_m
                last = (q_len * counts.group + (tile_m - 1)) // tile_m - 1
                row_tile = Int32(select((batch % 2 != 0) & (row_tile <= last), last - row_tile, row_tile))
            keys = None if lane is not None else counts.keys_of(batch)
            return cls(counts, batch, head, row_tile, first_token, q_len, keys)
        number, place = divmod(index, counts.by_set)
        row_place, pair = divmod(place, counts.by_together)
        batch, head = divmod(number * counts.together + pair, counts.by_heads)
        row_tile = counts.row_tiles - 1 - row_place
        if counts.traits.in_rounds:
            row_tile = Int32(select((counts.sets - 1 - number) % 2 != 0, row_place, row_tile))
        return cls(counts, batch, head, row_tile)

    def fields(self) -> tuple:
        """What a unit is made of, for warps that are told by others."""
        return self.batch, self.head, self.row_tile, self.first_token, self.q_len, self.first_key, self.k_len

    @classmethod
    def of_fields(cls, counts: Counts, fields):
        *place, first_key, k_len = fields
        return cls(counts, *place, keys=(first_key, k_len))

    @cute.jit
    def table_row(self):
        """The request's row of the page table."""
        row = self.batch
        if cutlass.const_expr(self.traits.problem.has_rows):
            if self.batch < self.counts.requests:
                row = self.ops.mRows[self.batch]
        return row

    def key_limit(self, row):
        """The end of the keys that a packed row sees: of all, of those up to its own token at the lower right corner, or some further."""
        if self.traits.problem.has_right:
            queries_after = self.q_len - 1 - row // self.counts.by_group
            return self.k_len - cutlass.max(queries_after - self.ops.right, 0)
        if not self.traits.problem.causal:
            return self.k_len
        return cutlass.min(row // self.counts.by_group + (self.k_len - self.q_len) + 1, self.k_len)

    def key_begin(self, row):
        """The first key that a packed row sees."""
        return self.counts.first_seen(row // self.counts.by_group + (self.k_len - self.q_len))

    def first_turn(self):
        """As `Counts.first_turn`."""
        return self.counts.first_turn(self.k_len, self.q_len)

    def last_row(self):
        """The last row of the tile."""
        return cutlass.min(self.first_row + self.traits.tile.tile_m, self.num_rows) - 1

    @cute.jit
    def tiles(self):
        """(first, end) of the tiles of keys that the rows of the tile see."""
        tile_n = self.traits.tile.tile_n
        keys = cutlass.max(self.key_limit(self.last_row()), 0)
        if self.first_row >= self.num_rows:
            keys = Int32(0)
        end = (keys + (tile_n - 1)) // tile_n
        first = Int32(0)
        if cutlass.const_expr(self.traits.problem.has_left):
            first = cutlass.min(self.key_begin(self.first_row) // tile_n, end)
        return first, end

    def source(self):
        """Where the unit's keys and values come from."""
        problem, ops = self.traits.problem, self.ops
        if problem.keys == "batch":
            return StridedKV.of_batch(ops.mK, ops.mV, self.batch, self.head)
        if problem.keys == "packed":
            return StridedKV.of_packed(ops.mK, ops.mV, self.first_key, self.head)
        new, new_token = None, None
        if problem.appends:
            new = tuple(row_address(m, (self.batch, self.head)) for m in (ops.mNewK, ops.mNewV))
            new_token = self.k_len - 1
        return PagedKV(ops.mK, ops.mV, ops.mTable, self.table_row(), self.head, self.counts.by_page, new, new_token)

    def token_and_head(self, row):
        """(query token within the request, query head) of a packed row."""
        token, place = divmod(row, self.counts.by_group)
        return token, self.head * self.counts.group + place

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
        if self.traits.problem.queries == "packed":
            return head, self.first_token + token
        return self.batch, head, token


@cute.jit
def find_request(counts: Counts, slot: Int32, lane: Int32 | None):
    """(request, its first token, its tokens, row tile) of a slot of packed queries; no tokens where the table makes no sense.

    All lanes of the warp look for one slot together, or each for a slot of its own, where `lane` is None.
    """
    table = counts.ops.mCuQ
    request = _search_alone(counts, slot) if cutlass.const_expr(lane is None) else _search_together(counts, slot, lane)
    first = table[request]
    after = counts.tokens
    if request < counts.requests:
        after = cutlass.min(table[request + 1], counts.tokens)
    row_tile = slot - _first_slot(counts, first, request)
    q_len = after - first
    if first < 0 or after < first or row_tile < 0:
        q_len = Int32(0)
    # far from a wild offset the first row of a tile would not be a number of 32 bits
    row_tile = cutlass.min(cutlass.max(row_tile, 0), slot)
    found = request, first, q_len, row_tile
    # one value in all lanes, though they looked at different offsets: worth no register of each
    return found if cutlass.const_expr(lane is None) else tuple(cute.arch.make_warp_uniform(x) for x in found)


@cute.jit
def _search_together(counts: Counts, slot: Int32, lane: Int32):
    """The last request whose first slot is at most `slot`: each round looks at 32 offsets."""
    table = counts.ops.mCuQ
    low = Int32(0)
    high = counts.requests + 1  # it is in [low, high)
    while high - low > 1:
        step = (high - low + (WARP - 1)) // WARP
        probe = low + lane * step
        hit = False
        if probe < high:
            hit = _first_slot(counts, table[probe], probe) <= slot
        passed = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(hit)), 1)
        low = low + (passed - 1) * step
        high = cutlass.min(low + step, high)
    return low


@cute.jit
def _search_alone(counts: Counts, slot: Int32):
    """As `_search_together`, one offset at a time."""
    table = counts.ops.mCuQ
    low = Int32(0)
    high = counts.requests + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if _first_slot(counts, table[middle], middle) <= slot:
            low = middle
        else:
            high = middle
    return low


def _first_slot(counts: Counts, first_token, request):
    return Int32(Int64(first_token) * Int64(counts.group) // counts.traits.tile.tile_m) + request


def _span(table, batch, most):
    """(first, length) of a request in a table of offsets, within [0, most)."""
    begin, end = table[batch], cutlass.min(table[batch + 1], most)
    valid = (begin >= 0) & (end >= begin)
    return select(valid, begin, Int32(0)), select(valid, end - begin, Int32(0))

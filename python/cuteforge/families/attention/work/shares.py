"""How CTAs share the keys of all row tiles, so that each has as much to read as any other, whatever the lengths.

The keys of a request that its queries see are counted in granules: the tiles that all key warps of a CTA take at once.
For each KV head the granules of all row tiles form one line, which is cut into equal shares, one a split. A split has a
CTA for each KV head, so that the heads, which lie next to each other in memory, are read together. A CTA goes through
the row tiles that its share touches. A row tile that lies in one share is finished there. Of any other, each CTA leaves
a part in the workspace, at most two a CTA: of the row tile that began before its share, and of the one that goes on
after it.

Where requests are so alike that shares of whole row tiles are about as long, none is cut: a share that begins within a
row tile starts twice, and its parts have to be joined (H200, 63 requests of 989 keys in pages of 16, 64 heads over 4:
59.7 us in equal shares, 42.6 in whole row tiles of dense keys).

Lengths are read on the device, so a captured graph stays right, and balanced, for any.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.work.counts import Counts
from cuteforge.families.attention.work.traits import WorkTraits
from cuteforge.runtime.arch import WARP

# Parts of a CTA: of a row tile that began before, and of one that goes on.
CONTINUED, BEGUN = 0, 1
WHOLE = -1
# How much longer than an equal share the longest of whole row tiles may be, in eighths of it.
UNEVEN = 1


class SplitPlan(NamedTuple):
    """How the line of a KV head is cut; made by the host (plan.py).

    Attributes:
        splits: how many.
        pieces: 0: the whole line is cut into at most `splits` shares of equal length. n: each row tile is cut into n
            pieces, `splits` being n times the row tiles; in clusters of n the n pieces of a row tile are joined.
        pieces_divisor: divisor by them.
        granules_divisor: divisor by the granules of a row tile, where all have as many.
        log_cluster: log2 of the CTAs of a cluster.
    """

    splits: Any
    pieces: Any
    pieces_divisor: Any
    granules_divisor: Any
    log_cluster: Any


class Split(NamedTuple):
    """One split of `count`."""

    count: Any
    index: Any


class ShareStart(NamedTuple):
    """Where the share of a split starts, and how long it is.

    Attributes:
        batch, row_tile, granule: where it starts.
        length: its granules.
        part: where a piece of a row tile belongs; WHOLE, of a share, means that it follows from where a row tile is
            cut.
    """

    batch: Any
    row_tile: Any
    granule: Any
    length: Any
    part: Any


class Crossing(NamedTuple):
    """A row tile that several splits share, the first and the last of them; the last is the first if there is no such
    row tile."""

    batch: Any
    row_tile: Any
    first: Any
    last: Any


def is_uniform(traits: WorkTraits) -> bool:
    """Whether all requests have as many keys as the shapes say."""
    return not traits.problem.has_lengths


def first_granule(counts: Counts, tokens, keys):
    """The first granule of keys that any query of a request sees."""
    return counts.band(tokens, keys).keys_begin(0) // counts.traits.tile.granule_keys


def granules_of_keys(counts: Counts, keys):
    """Granules of one row tile, from the first one on that any query sees; one for a request without keys, whose rows
    are written too."""
    granule_keys = counts.traits.tile.granule_keys
    granules = (keys + (granule_keys - 1)) // granule_keys
    if counts.traits.problem.has_left:
        granules = granules - first_granule(counts, counts.tokens, keys)
    return cutlass.max(granules, 1)


class Shares(TraceConstant):
    """The line of granules of one KV head, and its shares.

    Args:
        lane: all lanes of a warp ask together.

    Attributes:
        total: granules of the line.
        splits: those that have a share.
        are_whole: whether shares are `tiles_of_share` whole row tiles each, instead of equally long.
    """

    def __init__(self, counts: Counts, plan: SplitPlan, lane):
        self.counts, self.lane, self.plan, self.pieces = counts, lane, plan, plan.pieces
        self.is_uniform = is_uniform(counts.traits)
        self.total, longest = self._measure()
        # Every share has a granule, and so leaves the parts that are read; splits beyond that have none.
        self.splits = cutlass.min(plan.splits, self.total)
        self.per_split = self.total // self.splits
        self.longer = self.total - self.per_split * self.splits
        # of a share of whole row tiles
        self.row_tiles = counts.requests * counts.row_tiles
        self.tiles_of_share = (self.row_tiles + plan.splits - 1) // plan.splits
        self.are_whole = Boolean(False)
        if not self.is_uniform:
            fits = self.tiles_of_share * longest * 8 <= self.per_split * (8 + UNEVEN)
            self.are_whole = fits & (self.pieces == 0)

    def granules_of(self, batch):
        """Granules of one row tile of a request."""
        if self.is_uniform:
            return self.plan.granules_divisor.divisor
        return granules_of_keys(self.counts, self.counts.keys_of(batch)[1])

    @cute.jit
    def _measure(self):
        """The granules of the whole line, and those of the longest row tile. Both are 1 where row tiles are cut one by
        one: then nobody needs to read the lengths of all requests."""
        total, longest = Int32(1), Int32(1)
        if self.pieces == 0:
            total, longest = self._measure_line()
        return total, longest

    @cute.jit
    def _measure_line(self):
        requests, row_tiles = self.counts.requests, self.counts.row_tiles
        if cutlass.const_expr(self.is_uniform):
            longest = self.plan.granules_divisor.divisor
            total = requests * row_tiles * longest
        else:
            total, longest = Int32(0), Int32(0)
            for base in cutlass.range(0, requests, WARP, unroll=1):
                granules = self._granules_at(base, requests)
                total = total + cute.arch.warp_redux_sync(granules, kind="add")
                longest = cutlass.max(longest, cute.arch.warp_redux_sync(granules, kind="max"))
            longest = longest // row_tiles
        return total, longest

    @cute.jit
    def begin_of(self, batch: Int32):
        """Where a request begins on the line."""
        begin = Int32(0)
        if cutlass.const_expr(self.is_uniform):
            begin = batch * self.counts.row_tiles * self.plan.granules_divisor.divisor
        else:
            for base in cutlass.range(0, batch, WARP, unroll=1):
                begin = begin + cute.arch.warp_redux_sync(self._granules_at(base, batch), kind="add")
        return begin

    @cute.jit
    def _granules_at(self, base: Int32, end: Int32):
        """Granules of this lane's request of the 32 from `base` on, all its row tiles; 0 from `end` on."""
        granules = Int32(0)
        if base + self.lane < end:
            granules = self.granules_of(base + self.lane) * self.counts.row_tiles
        return granules

    @cute.jit
    def locate(self, position: Int32):
        """(request, row tile, granule of the row tile) at a position of the line before its end."""
        if cutlass.const_expr(self.is_uniform):
            number, granule = divmod(position, self.plan.granules_divisor)
            batch, row_tile = divmod(number, self.counts.divisors.row_tiles)
        else:
            batch, rest = self._locate_request(position)
            granules = self.granules_of(batch)
            row_tile = rest // granules
            granule = rest - row_tile * granules
        return batch, row_tile, granule

    @cute.jit
    def _locate_request(self, position: Int32):
        """(request, position from its begin on)."""
        batch = Int32(0)
        rest = position
        passed = Int32(WARP)
        while passed == WARP and batch < self.counts.requests:
            ends = self._granules_at(batch, self.counts.requests)
            for distance in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(ends, 1 << distance, mask_and_clamp=0)
                if self.lane >= 1 << distance:
                    ends = ends + other
            # requests of this round that end at or before the position
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(ends <= rest))
            if passed > 0:
                rest = rest - cute.arch.shuffle_sync(ends, passed - 1)
            batch = batch + passed
        return cutlass.min(batch, self.counts.requests - 1), rest

    def start(self, split):
        """Where the share of a split starts, the whole line being cut: the first `longer` ones have a granule more."""
        return split * self.per_split + cutlass.min(split, self.longer)

    @cute.jit
    def split_at(self, position: Int32):
        """The split whose share holds a position."""
        split = position // (self.per_split + 1)
        if split >= self.longer:
            split = (position - self.longer) // self.per_split
        return split

    @cute.jit
    def start_of_share(self, split: Int32):
        """Where the share of a split starts, and how long it is."""
        batch, row_tile, granule, length, part = Int32(0), Int32(0), Int32(0), Int32(0), Int32(WHOLE)
        if self.pieces > 0:
            number, piece = divmod(split, self.plan.pieces_divisor)
            batch, row_tile = divmod(number, self.counts.divisors.row_tiles)
            granules = self.granules_of(batch)
            per_piece, _ = divmod(granules + self.pieces - 1, self.plan.pieces_divisor)
            granule = cutlass.min(piece * per_piece, granules)
            length = cutlass.min(granules - granule, per_piece)
            part = Int32(select(piece == 0, Int32(BEGUN), Int32(CONTINUED)))
        elif self.are_whole:
            first = split * self.tiles_of_share
            end = cutlass.min(first + self.tiles_of_share, self.row_tiles)
            if first < end:
                batch, row_tile = divmod(first, self.counts.divisors.row_tiles)
            for number in cutlass.range(first, end, unroll=1):
                length = length + self.granules_of(number // self.counts.divisors.row_tiles)
        elif split < self.splits:
            length = self.per_split + select(split < self.longer, Int32(1), Int32(0))
            batch, row_tile, granule = self.locate(self.start(split))
        return ShareStart(batch, row_tile, granule, length, part)

    @cute.jit
    def crossing(self, index: Int32):
        """The `index`-th row tile that splits may share: where there are no more row tiles than splits the row tile of
        that number, else the one in which the share of split `index` ends."""
        batch, row_tile, first, last = Int32(0), Int32(0), Int32(0), Int32(0)
        if self.pieces > 0:
            batch, row_tile = divmod(index, self.counts.divisors.row_tiles)
            first = index * self.pieces
            last = first + self.pieces - 1
        elif self.are_whole:
            last = first
        elif self.splits < self.row_tiles:
            if index + 1 < self.splits:
                batch, row_tile, granule = self.locate(self.start(index + 1))
                if granule > 0:
                    begin = self.start(index + 1) - granule
                    if begin >= self.start(index):
                        first = index
                        last = self.split_at(begin + self.granules_of(batch) - 1)
        elif index < self.row_tiles:
            batch, row_tile = divmod(index, self.counts.divisors.row_tiles)
            granules = self.granules_of(batch)
            begin = self.begin_of(batch) + row_tile * granules
            first = self.split_at(begin)
            last = self.split_at(begin + granules - 1)
        return Crossing(batch, row_tile, first, last)

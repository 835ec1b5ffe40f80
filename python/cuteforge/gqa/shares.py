"""How CTAs share the keys of all units, so that each has as much to read as any other, whatever the lengths.

The keys of a request that its queries see are counted in turns, the tiles that all groups of a CTA take at once. For each KV head the turns of all
requests form one line, which is cut into equal shares, one for each team; a team has a CTA for each KV head, so that the heads, which lie next to
each other in memory, are read together. A CTA goes through the units that its share touches. A unit that lies in one share is finished there. Of
any other, each CTA leaves a part in the workspace, at most two a CTA: of the unit that began before its share, and of the one that goes on after it.

Lengths are read on the device, so a captured graph stays right, and balanced, for any.
"""

import cutlass
from cutlass import Int32, cute

from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant
from cuteforge.gqa.config import WARP, Traits
from cuteforge.gqa.work import Counts

# Parts of a CTA: of a unit that began before, and of one that goes on.
CONTINUED, BEGUN = 0, 1
WHOLE = -1


def is_uniform(traits: Traits) -> bool:
    """Whether all requests have as many keys as the shapes say."""
    return traits.problem.lengths is None


def turns_of_keys(counts: Counts, keys):
    """Turns of one row tile, from the first one on that any query sees; one for a request without keys, whose rows are written too."""
    turn_keys = counts.traits.tile.turn_keys
    turns = (keys + (turn_keys - 1)) // turn_keys
    if counts.traits.problem.has_left:
        turns = turns - counts.first_turn(keys, counts.tokens)
    return cutlass.max(turns, 1)


class Shares(TraceConstant):
    """The line of turns of one KV head, and its shares.

    Args:
        plan: (teams, pieces, divisor by them, divisor by the turns of a unit, log2 of the CTAs of a cluster), made by the host (plan.py). No pieces:
            the whole line is cut into at most `teams` shares of equal length. n pieces: each unit is cut into n, `teams` being n times the units. In
            clusters of n the n pieces of a unit are joined.
        lane: all lanes of a warp ask together.
    """

    def __init__(self, counts: Counts, plan: tuple, lane):
        self.counts, self.lane = counts, lane
        teams, self.pieces, self.by_pieces, self.by_turns, _ = plan
        self.is_uniform = is_uniform(counts.traits)
        self.total = self._length()
        # Every share has a turn, and so leaves the parts that are read; teams beyond that have none.
        self.teams = cutlass.min(teams, self.total)
        self.per_team = self.total // self.teams
        self.longer = self.total - self.per_team * self.teams

    def turns_of(self, batch):
        """Turns of one row tile of a request."""
        if self.is_uniform:
            return self.by_turns.divisor
        return turns_of_keys(self.counts, self.counts.keys_of(batch)[1])

    @cute.jit
    def _length(self):
        """Turns of the whole line; 1 where units are cut one by one, which takes no look at the lengths of all."""
        length = Int32(1)
        if self.pieces == 0:
            length = self._total()
        return length

    @cute.jit
    def _total(self):
        if cutlass.const_expr(self.is_uniform):
            total = self.counts.requests * self.counts.row_tiles * self.by_turns.divisor
        else:
            total = self.begin_of(self.counts.requests)
        return total

    @cute.jit
    def begin_of(self, batch: Int32):
        """Where a request begins on the line."""
        begin = Int32(0)
        if cutlass.const_expr(self.is_uniform):
            begin = batch * self.counts.row_tiles * self.by_turns.divisor
        else:
            for base in cutlass.range(0, batch, WARP, unroll=1):
                begin = begin + cute.arch.warp_redux_sync(self._turns_at(base, batch), kind="add")
        return begin

    @cute.jit
    def _turns_at(self, base: Int32, end: Int32):
        """Turns of this lane's request of the 32 from `base` on, all its row tiles; 0 from `end` on."""
        turns = Int32(0)
        if base + self.lane < end:
            turns = self.turns_of(base + self.lane) * self.counts.row_tiles
        return turns

    @cute.jit
    def locate(self, position: Int32):
        """(request, row tile, turn of the unit) at a position of the line before its end."""
        if cutlass.const_expr(self.is_uniform):
            unit, turn = divmod(position, self.by_turns)
            batch, row_tile = divmod(unit, self.counts.by_row_tiles)
        else:
            batch, rest = self._locate_request(position)
            turns = self.turns_of(batch)
            row_tile = rest // turns
            turn = rest - row_tile * turns
        return batch, row_tile, turn

    @cute.jit
    def _locate_request(self, position: Int32):
        """(request, position from its begin on)."""
        batch = Int32(0)
        rest = position
        passed = Int32(WARP)
        while passed == WARP and batch < self.counts.requests:
            ends = self._turns_at(batch, self.counts.requests)
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

    def start(self, team):
        """Where the share of a team starts, the whole line being cut: the first `longer` ones have a turn more."""
        return team * self.per_team + cutlass.min(team, self.longer)

    @cute.jit
    def team_at(self, position: Int32):
        """The team whose share holds a position."""
        team = position // (self.per_team + 1)
        if team >= self.longer:
            team = (position - self.longer) // self.per_team
        return team

    @cute.jit
    def first_segment(self, team: Int32):
        """(request, row tile, first turn, turns left, part): where the share of a team starts and how long it is.

        The part is where a piece of a unit belongs; WHOLE, of a share, means that it follows from where a unit is cut.
        """
        batch, row_tile, turn, left, part = Int32(0), Int32(0), Int32(0), Int32(0), Int32(WHOLE)
        if self.pieces > 0:
            unit, piece = divmod(team, self.by_pieces)
            batch, row_tile = divmod(unit, self.counts.by_row_tiles)
            turns = self.turns_of(batch)
            per_piece, _ = divmod(turns + self.pieces - 1, self.by_pieces)
            turn = cutlass.min(piece * per_piece, turns)
            left = cutlass.min(turns - turn, per_piece)
            part = Int32(select(piece == 0, Int32(BEGUN), Int32(CONTINUED)))
        elif team < self.teams:
            left = self.per_team + select(team < self.longer, Int32(1), Int32(0))
            batch, row_tile, turn = self.locate(self.start(team))
        return batch, row_tile, turn, left, part

    @cute.jit
    def crossing(self, place: Int32):
        """(request, row tile, first team, last team) of a unit that teams share; the last is the first if there is none.

        Where there are no more units than teams, `place` is a unit, else the boundary after team `place`, the first within the unit.
        """
        batch, row_tile, first, last = Int32(0), Int32(0), Int32(0), Int32(0)
        units = self.counts.requests * self.counts.row_tiles
        if self.pieces > 0:
            batch, row_tile = divmod(place, self.counts.by_row_tiles)
            first = place * self.pieces
            last = first + self.pieces - 1
        elif self.teams < units:
            if place + 1 < self.teams:
                batch, row_tile, turn = self.locate(self.start(place + 1))
                if turn > 0:
                    begin = self.start(place + 1) - turn
                    if begin >= self.start(place):
                        first = place
                        last = self.team_at(begin + self.turns_of(batch) - 1)
        elif place < units:
            batch, row_tile = divmod(place, self.counts.by_row_tiles)
            turns = self.turns_of(batch)
            begin = self.begin_of(batch) + row_tile * turns
            first = self.team_at(begin)
            last = self.team_at(begin + turns - 1)
        return batch, row_tile, first, last

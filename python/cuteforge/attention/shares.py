"""How CTAs share the keys of all units when there are more CTAs than units, or lengths differ.

The keys of a request are counted in turns, the tiles that all groups of a CTA take at once. For each KV head the turns of all requests form one line,
which is cut into equal shares, one for each team; a team has a CTA for each KV head, so that the heads, which lie next to each other in memory, are
read together. A CTA goes through the units that its share touches. A unit that lies in one share is finished there. Of any other, each CTA leaves
a part in the workspace, at most two a CTA: of the unit that began before its share, and of the one that goes on after it.

Lengths are read on the device, so a captured graph stays right, and balanced, for any.
"""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.attention.config import WARP
from cuteforge.attention.work import Counts
from cuteforge.device.traced import TraceConstant

# Parts of a CTA: of a unit that began before, and of one that goes on.
CONTINUED, BEGUN = 0, 1
WHOLE = -1


class Shares(TraceConstant):
    """The line of turns of one KV head, and its shares.

    Args:
        pieces: 0 cuts the whole line into `teams` equal shares; n > 0 cuts each unit into n, `teams` then being n times the units.
        lane: all lanes of a warp ask together.
    """

    def __init__(self, counts: Counts, teams, pieces, lane):
        self.counts, self.teams, self.pieces, self.lane = counts, teams, pieces, lane
        self.turn = counts.traits.tile.key_warps * counts.traits.tile.tile_n
        self.is_uniform = counts.traits.problem.lengths is None and not counts.traits.problem.has_rows
        self.total = self._total()

    def turns_of(self, batch):
        """Turns of one row tile of a request; one for a request without keys, whose rows are written too."""
        return cutlass.max((self.counts.keys_of(batch)[1] + (self.turn - 1)) // self.turn, 1)

    @cute.jit
    def _total(self):
        total = Int32(0)
        if cutlass.const_expr(self.is_uniform):
            total = self.counts.requests * self.turns_of(Int32(0)) * self.counts.row_tiles
        else:
            for base in cutlass.range(0, self.counts.requests, WARP, unroll=1):
                total = total + cute.arch.warp_redux_sync(self._turns_at(base), kind="add") * self.counts.row_tiles
        return total

    @cute.jit
    def _turns_at(self, base: Int32):
        """This lane's request of 32: its turns, 0 past the last request."""
        turns = Int32(0)
        if base + self.lane < self.counts.requests:
            turns = self.turns_of(base + self.lane)
        return turns

    def start(self, team):
        """Where the share of a team starts, the whole line being cut."""
        return Int32(Int64(team) * Int64(self.total) // Int64(self.teams))

    @cute.jit
    def locate(self, position: Int32):
        """(request, row tile, turn of the unit) at a position of the line before its end."""
        batch = Int32(0)
        rest = position
        if cutlass.const_expr(self.is_uniform):
            batch = position // (self.turns_of(Int32(0)) * self.counts.row_tiles)
            rest = position - batch * (self.turns_of(Int32(0)) * self.counts.row_tiles)
        else:
            passed = Int32(WARP)
            while passed == WARP and batch < self.counts.requests:
                ends = self._turns_at(batch) * self.counts.row_tiles
                for distance in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(ends, 1 << distance, mask_and_clamp=0)
                    if self.lane >= 1 << distance:
                        ends = ends + other
                # requests of this round that end at or before the position
                passed = cute.arch.popc(cute.arch.vote_ballot_sync(ends <= rest))
                if passed > 0:
                    rest = rest - cute.arch.shuffle_sync(ends, passed - 1)
                batch = batch + passed
            batch = cutlass.min(batch, self.counts.requests - 1)
        turns = self.turns_of(batch)
        return batch, rest // turns, rest % turns

    @cute.jit
    def unit_first_crossed(self, team: Int32):
        """(request, row tile, last team) of the unit that the start of a team's share is the first to cross; last is -1 if there is none."""
        batch, row_tile, last = Int32(0), Int32(0), Int32(-1)
        if self.pieces > 0:
            batch, row_tile = self._unit_of_piece(team)
            if team % self.pieces == 1:
                last = team + (self.pieces - 2)
        else:
            position = self.start(team)
            if team > 0 and position < self.total:
                batch, row_tile, turn = self.locate(position)
                begin = position - turn
                # Every share of fewer than one turn that stands at one place begins there too: the first of them counts.
                if turn > 0 and self.start(team - 1) <= begin and self.start(team) > begin:
                    end = begin + self.turns_of(batch)
                    last = Int32((Int64(end) * Int64(self.teams) + Int64(self.total - 1)) // Int64(self.total)) - 1
        return batch, row_tile, last

    def _unit_of_piece(self, team):
        unit = team // cutlass.max(self.pieces, 1)
        return unit // self.counts.row_tiles, unit % self.counts.row_tiles

    @cute.jit
    def first_segment(self, team: Int32):
        """(request, row tile, first turn, turns left, part): where the share of a team starts and how long it is.

        The part is where a piece of a unit belongs; -1 when it follows from the share.
        """
        batch, row_tile, turn, left, part = Int32(0), Int32(0), Int32(0), Int32(0), Int32(WHOLE)
        if self.pieces > 0:
            batch, row_tile = self._unit_of_piece(team)
            piece, turns = team % cutlass.max(self.pieces, 1), self.turns_of(batch)
            turn = Int32(Int64(piece) * Int64(turns) // Int64(self.pieces))
            left = Int32(Int64(piece + 1) * Int64(turns) // Int64(self.pieces)) - turn
            part = cutlass.select_(piece == 0, Int32(BEGUN), Int32(CONTINUED))
        else:
            position = self.start(team)
            left = self.start(team + 1) - position
            if left > 0:
                batch, row_tile, turn = self.locate(position)
        return batch, row_tile, turn, left, part

"""The work tiles that a CTA goes through, and how a producer warp finds out what they are."""

from typing import Any, NamedTuple

from cutlass import Int32, Uint32, cute

from cuteforge.device.copy import smem_words
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.config import FIELDS_AHEAD, FIELDS_BYTES
from cuteforge.families.attention.work.counts import Counts
from cuteforge.families.attention.work.tile import TileFields, WorkTile

FIELDS = 7  # all but the live tiles, which the warps that copy queries find for all others


class Position(NamedTuple):
    """Where a warp is in the schedule of its CTA.

    Attributes:
        index: of the work tile, as `WorkTile.at` takes it.
        step, step_after: how far the next one is, and the one after it from there.
        number: work tiles of the CTA before this one.
    """

    index: Any
    step: Any
    step_after: Any
    number: Any


class Schedule(TraceConstant):
    """The work tiles of a CTA one after another, for one warp. Who goes through them keeps a `Position`: the `first`
    one, then each `after` it.

    Args:
        ahead: byte address in shared memory of the fields of the next work tiles; None where finding them takes no
            search. Of packed queries it does: by one lane for each work tile, `FIELDS_AHEAD` at once (H200, 1024
            requests of 32 tokens: 0.64 us each when a warp looked for one at a time, half of which are empty, where a
            work tile takes 2.4).
    """

    def __init__(self, counts: Counts, ahead, lane):
        self.counts, self.ahead, self.lane = counts, ahead, lane

    def first(self) -> Position:
        """A CTA that is first in one round of work tiles is last in the next: in the order of their lengths all then
        have about as much to do."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return Position(Int32(cta), Int32(2 * (ctas - 1 - cta) + 1), Int32(2 * cta + 1), Int32(0))

    def after(self, position: Position) -> Position:
        return Position(position.index + position.step, position.step_after, position.step, position.number + 1)

    def has(self, position: Position):
        """Whether there is a work tile at a position."""
        return position.index < self.counts.work_tiles

    def look_up(self, position: Position) -> WorkTile:
        """Once for each, in order, by all lanes of the warp."""
        if self.ahead is None:
            return WorkTile.at(self.counts, position.index, self.lane)
        return WorkTile.of_fields(self.counts, self._fields(*position))

    @cute.jit
    def _fields(self, index: Int32, step: Int32, step_after: Int32, number: Int32):
        index_ahead = number % FIELDS_AHEAD
        if index_ahead == 0:
            cute.arch.sync_warp()  # the fields of the work tile before have been read
            mine = index + self.lane // 2 * (step + step_after) + self.lane % 2 * step
            if self.lane < FIELDS_AHEAD and mine < self.counts.work_tiles:
                words = self._words(self.lane)
                for i, value in enumerate(WorkTile.at(self.counts, mine).fields()[:FIELDS]):
                    words[i] = Uint32(value)
            cute.arch.sync_warp()
        words = self._words(index_ahead)
        return TileFields(*(cute.arch.make_warp_uniform(Int32(words[i])) for i in range(FIELDS)))

    def _words(self, index_ahead):
        return smem_words(self.ahead + index_ahead * FIELDS_BYTES, FIELDS_BYTES // 4)

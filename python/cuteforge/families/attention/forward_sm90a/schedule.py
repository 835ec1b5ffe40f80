"""The units that a CTA goes through, and how a copying warp finds out what they are."""

from cutlass import Int32, Uint32, cute

from cuteforge.device.copy import smem_words
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.config import INFO_BYTES, PLACES_AHEAD
from cuteforge.families.attention.work.counts import Counts
from cuteforge.families.attention.work.tile import TileFields, WorkTile


class UnitsOfCta(TraceConstant):
    """The units of a CTA one after another, for one warp.

    Who goes through them keeps (index, the next two steps, number of the unit in the CTA), `first` of it, `after` each.

    Args:
        places: byte address in shared memory of what the next units are; None where that takes no search. Of packed queries it does: by one lane for
            each place, `PLACES_AHEAD` at once (H200, 1024 requests of 32 tokens: 0.64 us a place when a warp did one at a time, half of which are
            empty, where a unit takes 2.4).
    """

    def __init__(self, counts: Counts, places, lane):
        self.counts, self.places, self.lane = counts, places, lane

    def first(self) -> tuple:
        """A CTA that is first in one round of units is last in the next: with units in the order of their lengths all have about as much to do."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return Int32(cta), Int32(2 * (ctas - 1 - cta) + 1), Int32(2 * cta + 1), Int32(0)

    def after(self, at: tuple) -> tuple:
        index, step, step_after, number = at
        return index + step, step_after, step, number + 1

    def is_one(self, at: tuple):
        """Whether there is such a work."""
        return at[0] < self.counts.work_tiles

    def look_up(self, at: tuple) -> WorkTile:
        """Once for each, in order, by all lanes of the warp."""
        if self.places is None:
            return WorkTile.at(self.counts, at[0], self.lane)
        return WorkTile.of_fields(self.counts, self._fields(*at))

    @cute.jit
    def _fields(self, index: Int32, step: Int32, step_after: Int32, number: Int32):
        slot = number % PLACES_AHEAD
        if slot == 0:
            cute.arch.sync_warp()  # the fields of the unit before have been read
            mine = index + self.lane // 2 * (step + step_after) + self.lane % 2 * step
            if self.lane < PLACES_AHEAD and mine < self.counts.work_tiles:
                words = self._words(self.lane)
                for i, value in enumerate(WorkTile.at(self.counts, mine).fields()):
                    words[i] = Uint32(value)
            cute.arch.sync_warp()
        words = self._words(slot)
        return tuple(cute.arch.make_warp_uniform(Int32(words[i])) for i in range(len(TileFields._fields)))

    def _words(self, slot):
        return smem_words(self.places + slot * INFO_BYTES, INFO_BYTES // 4)

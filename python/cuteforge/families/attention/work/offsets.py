"""Finding the request of a tile of packed rows from a table of offsets."""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant
from cuteforge.runtime.arch import WARP


class PackedTiles(TraceConstant):
    """Slots of the tiles of packed rows.

    Request b has the slots from ``offsets[b] * rows_per_token // tile_rows + b`` on: at least as many as it has tiles,
    so some are empty. The tokens past the last request are one more request, without a partner.

    Args:
        mOffsets: (B+1,) int32, ascending; whatever it holds, nothing outside of the tokens is named.
        tokens: in all.
        rows_per_token: the heads of a group, or 1.
    """

    def __init__(self, mOffsets: cute.Tensor, tokens, rows_per_token, tile_rows: int):
        self.mOffsets, self.tokens = mOffsets, tokens
        self.rows_per_token, self.tile_rows = rows_per_token, tile_rows
        self.requests = mOffsets.shape[0] - 1

    def num_slots(self):
        return self.tokens * self.rows_per_token // self.tile_rows + self.requests + 1

    @cute.jit
    def find(self, slot: Int32, lane: Int32 | None):
        """(request, its first token, its tokens, tile) of a slot; no tokens where the table makes no sense.

        All lanes of the warp look for one slot together, or each for a slot of its own, where `lane` is None.
        """
        table = self.mOffsets
        request = self._search_alone(slot) if cutlass.const_expr(lane is None) else self._search_together(slot, lane)
        first = table[request]
        after = self.tokens
        if request < self.requests:
            after = cutlass.min(table[request + 1], self.tokens)
        tile = slot - self._first_slot(first, request)
        length = after - first
        if first < 0 or after < first or tile < 0:
            length = Int32(0)
        # far from a wild offset the first row of a tile would not be a number of 32 bits
        tile = cutlass.min(cutlass.max(tile, 0), slot)
        found = request, first, length, tile
        # one value in all lanes, though they looked at different offsets: worth no register of each
        return found if cutlass.const_expr(lane is None) else tuple(cute.arch.make_warp_uniform(x) for x in found)

    @cute.jit
    def _search_together(self, slot: Int32, lane: Int32):
        """The last request whose first slot is at most `slot`: each round looks at 32 offsets."""
        low = Int32(0)
        high = self.requests + 1  # it is in [low, high)
        while high - low > 1:
            step = (high - low + (WARP - 1)) // WARP
            probe = low + lane * step
            hit = False
            if probe < high:
                hit = self._first_slot(self.mOffsets[probe], probe) <= slot
            passed = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(hit)), 1)
            low = low + (passed - 1) * step
            high = cutlass.min(low + step, high)
        return low

    @cute.jit
    def _search_alone(self, slot: Int32):
        """As `_search_together`, one offset at a time."""
        low = Int32(0)
        high = self.requests + 1
        while high - low > 1:
            middle = low + (high - low) // 2
            if self._first_slot(self.mOffsets[middle], middle) <= slot:
                low = middle
            else:
                high = middle
        return low

    def _first_slot(self, first_token, request):
        return Int32(Int64(first_token) * Int64(self.rows_per_token) // self.tile_rows) + request


def span(mOffsets: cute.Tensor, batch, most):
    """(first, length) of a request in a table of offsets, within [0, most)."""
    begin, end = mOffsets[batch], cutlass.min(mOffsets[batch + 1], most)
    valid = (begin >= 0) & (end >= begin)
    return select(valid, begin, Int32(0)), select(valid, end - begin, Int32(0))

"""Finding the request of a tile of packed rows from a table of offsets."""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant
from cuteforge.runtime.arch import WARP


class PackedTiles(TraceConstant):
    """The tiles of packed rows, in one row of indices.

    Request b has the indices from ``offsets[b] * rows_per_token // tile_rows + b`` on: at least as many as it has
    tiles, so some are empty. The tokens past the last request are one more request, without a partner.

    Args:
        mOffsets: (B+1,) int32, ascending; whatever it holds, nothing outside of the tokens is named.
        tokens: in all.
        rows_per_token: the query heads of a head group, or 1.
    """

    def __init__(self, mOffsets: cute.Tensor, tokens, rows_per_token, tile_rows: int):
        self.mOffsets, self.tokens = mOffsets, tokens
        self.rows_per_token, self.tile_rows = rows_per_token, tile_rows
        self.requests = mOffsets.shape[0] - 1

    def most_tiles(self):
        """How many indices there are, the empty ones included."""
        return self.tokens * self.rows_per_token // self.tile_rows + self.requests + 1

    @cute.jit
    def find(self, index: Int32, lane: Int32 | None):
        """(request, its first token, its tokens, tile) at an index; no tokens where the table makes no sense.

        All lanes of the warp look for one index together, or each for one of its own, where `lane` is None.
        """
        table = self.mOffsets
        request = self._search_alone(index) if cutlass.const_expr(lane is None) else self._search_together(index, lane)
        first = table[request]
        after = self.tokens
        if request < self.requests:
            after = cutlass.min(table[request + 1], self.tokens)
        tile = index - self._first_index(first, request)
        length = after - first
        if first < 0 or after < first or tile < 0:
            length = Int32(0)
        # far from a wild offset the first row of a tile would not be a number of 32 bits
        tile = cutlass.min(cutlass.max(tile, 0), index)
        found = request, first, length, tile
        # one value in all lanes, though they looked at different offsets: worth no register of each
        return found if cutlass.const_expr(lane is None) else tuple(cute.arch.make_warp_uniform(x) for x in found)

    @cute.jit
    def _search_together(self, index: Int32, lane: Int32):
        """The last request whose first index is at most `index`: each round looks at 32 offsets."""
        low = Int32(0)
        high = self.requests + 1  # it is in [low, high)
        while high - low > 1:
            step = (high - low + (WARP - 1)) // WARP
            probe = low + lane * step
            hit = False
            if probe < high:
                hit = self._first_index(self.mOffsets[probe], probe) <= index
            passed = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(hit)), 1)
            low = low + (passed - 1) * step
            high = cutlass.min(low + step, high)
        return low

    @cute.jit
    def _search_alone(self, index: Int32):
        """As `_search_together`, one offset at a time."""
        low = Int32(0)
        high = self.requests + 1
        while high - low > 1:
            middle = low + (high - low) // 2
            if self._first_index(self.mOffsets[middle], middle) <= index:
                low = middle
            else:
                high = middle
        return low

    def _first_index(self, first_token, request):
        return Int32(Int64(first_token) * Int64(self.rows_per_token) // self.tile_rows) + request


def span(mOffsets: cute.Tensor, batch, most):
    """(first, length) of a request in a table of offsets, within [0, most)."""
    begin, end = mOffsets[batch], cutlass.min(mOffsets[batch + 1], most)
    valid = (begin >= 0) & (end >= begin)
    return select(valid, begin, Int32(0)), select(valid, end - begin, Int32(0))

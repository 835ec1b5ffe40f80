"""Finding the segment of a packed row or token from a table of offsets."""

import cutlass
from cutlass import Int32, cute

WARP = 32


@cute.jit
def warp_count_le(table: cute.Tensor, size: Int32, value: Int32, lane: Int32) -> Int32:
    """How many of the first `size` entries of the ascending `table` are <= `value`; the same in all lanes.

    All 32 lanes of the warp call it together with one `value`. Each round looks at 32 entries, so a table of B entries takes
    ceil(log32 B) dependent loads: one up to 32 segments, four for a million. A table that is not ascending gives some number in
    [0, size], never a read outside the table.
    """
    low = Int32(0)
    high = size
    while high - low > WARP:
        step = (high - low + (WARP - 1)) // WARP
        probe = low + lane * step
        hit = False
        if probe < high:
            hit = table[probe] <= value
        count = cute.arch.popc(cute.arch.vote_ballot_sync(hit))
        if count == 0:
            high = low
        else:
            low = low + (count - 1) * step + 1
            high = cutlass.min(low + step - 1, high)
    probe = low + lane
    hit = False
    if probe < high:
        hit = table[probe] <= value
    return low + cute.arch.popc(cute.arch.vote_ballot_sync(hit))


@cute.jit
def lane_count_le(table: cute.Tensor, size: Int32, value: Int32) -> Int32:
    """As `warp_count_le`, for a thread on its own: ceil(log2 size) dependent loads, each lane may ask for another value."""
    low = Int32(0)
    high = size
    while low < high:
        middle = (low + high) // 2
        if table[middle] <= value:
            low = middle + 1
        else:
            high = middle
    return low

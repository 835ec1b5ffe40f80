"""Finding the segment of a packed row or token from a table of offsets."""

import cutlass
from cutlass import Int32, cute

from cuteforge.runtime.arch import WARP


@cute.jit
def warp_bracket(table: cute.Tensor, other: cute.Tensor, size: Int32, value: Int32, lane: Int32):
    """Where `value` falls in the ascending `table` of `size` entries, and what stands there in `table` and `other`.

    Returns ``(index, table[index], table[index + 1], other[index], other[index + 1])`` where ``index`` is that of the
    last entry <= value, -1 if there is none; what lies outside the tables is returned as 0. All 32 lanes of the warp
    call it together with one `value`.

    Each round looks at 32 entries, so B entries take about log32 B dependent loads: one up to 30 segments, four for a
    million. The last round reads both tables at once, which saves a memory latency. A table that is not ascending gives
    some index in range, never a read outside the tables.
    """
    low = Int32(0)
    high = size
    while high - low > WARP - 2:
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
    base = cutlass.max(low - 1, 0)
    probe = base + lane
    key = Int32(0)
    attached = Int32(0)
    if probe < size:
        key = table[probe]
        attached = other[probe]
    index = cute.arch.popc(cute.arch.vote_ballot_sync(probe < high and key <= value)) - 1
    here, after = cutlass.max(index, 0), index + 1
    shuffle = cute.arch.shuffle_sync
    return base + index, shuffle(key, here), shuffle(key, after), shuffle(attached, here), shuffle(attached, after)


@cute.jit
def lane_count_le(table: cute.Tensor, size: Int32, value: Int32) -> Int32:
    """How many of the first `size` entries of the ascending `table` are <= `value`, in ceil(log2 size) dependent loads.

    Each lane may ask for another value. A table that is not ascending gives some number in [0, size], never a read
    outside it.
    """
    low = Int32(0)
    high = size
    while low < high:
        middle = (low + high) // 2
        if table[middle] <= value:
            low = middle + 1
        else:
            high = middle
    return low

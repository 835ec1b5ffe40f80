"""How the host cuts the keys of all row tiles for the CTAs of decode, from shapes alone: what is captured into a graph
stays right for any lengths.

Three ways are weighed by the granules of keys that the last CTA goes through, those that other work costs included:

* a CTA for each row tile and KV head, one after another: nothing to join;
* a cluster of two, four or eight for each, joined through shared memory: only where all of them run at once;
* equal shares of the whole line (shares.py), with a second kernel that joins. Where requests may differ in length only
these are balanced.
"""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.math import fast_divisor
from cuteforge.families.attention.forward.config import MAX_WAVES, MAX_WHOLE_KEYS, cta_workspace_bytes
from cuteforge.families.attention.work.counts import Counts
from cuteforge.families.attention.work.shares import SplitPlan, granules_of_keys, is_uniform

# Costs in 1/16 of the time in which a GPU full of CTAs reads 64 keys for each (H200, D 128: 1 us).
UNIT_KEYS, KEYS = 64, 16
LEAST_KEYS = 9  # of a CTA among few: 64 CTAs on 132 SMs reach 96 % of the memory's rate
SWITCH = 32  # from one row tile to the next: the ring runs empty, the key warps join
JOIN = 16  # in a cluster
COMBINE = 48  # a second kernel


@cute.jit
def make_plan(counts: Counts, most_splits: Int32, max_ctas: Int32) -> SplitPlan:
    """The plan of a launch.

    Args:
        most_splits: pieces of a row tile that the caller wants, 0 for any number.
        max_ctas: that fill the GPU once.
    """
    row_tiles, granules = counts.requests * counts.row_tiles, granules_of_keys(counts, counts.most_keys())
    room = Int32(Int64(counts.ops.mWorkspace.shape[0]) // cta_workspace_bytes(counts.traits)) // counts.kv_heads
    pieces, log_cluster = Int32(0), Int32(0)
    splits = _even_splits(counts, row_tiles, granules, room, max_ctas)
    least = _share_cost(counts, row_tiles, granules, splits, max_ctas)
    if most_splits > 0:
        pieces = cutlass.max(cutlass.min(most_splits, room // row_tiles), 1)
        splits = row_tiles * pieces
    elif is_uniform(counts.traits) or counts.requests == 1:
        for log_size in cutlass.range_constexpr(counts.traits.cluster.bit_length() or 1):
            cost = _piece_cost(counts, granules, 1 << log_size, max_ctas)
            at_once = counts.work_tiles <= max_ctas >> log_size
            if cost <= least and (log_size == 0 or at_once):
                least = cost
                log_cluster = Int32(log_size)
                pieces = Int32(1 << log_size)
                splits = row_tiles * pieces
    elif (
        granules <= MAX_WHOLE_KEYS // counts.traits.tile.granule_keys
        and _piece_cost(counts, granules, 1, max_ctas) <= least
    ):
        pieces = Int32(1)
        splits = row_tiles
    return SplitPlan(splits, pieces, fast_divisor(cutlass.max(pieces, 1)), fast_divisor(granules), log_cluster)


@cute.jit
def _even_splits(counts: Counts, row_tiles: Int32, granules: Int32, room: Int32, max_ctas: Int32):
    """Splits, of a CTA for each KV head, for one wave of CTAs, or for the number of waves that leaves least of the GPU
    idle."""
    splits, least_idle = Int32(1), Int32(1 << 30)
    for waves in cutlass.range_constexpr(1, MAX_WAVES + 1):
        candidate = waves * max_ctas // counts.kv_heads
        # in 1/64 of a wave, and a little for each wave
        idle = (waves * max_ctas - candidate * counts.kv_heads) * 64 // (waves * max_ctas) + 2 * waves
        if candidate > 0 and idle < least_idle:
            splits = candidate
            least_idle = idle
    most_granules = Int64(row_tiles) * Int64(granules)
    # the workspace of many heads may have no room for one: then a split goes through the whole line, and leaves nothing
    # there
    return cutlass.max(cutlass.min(cutlass.min(splits, room), Int32(cutlass.min(most_granules, Int64(1 << 20)))), 1)


def _share_cost(counts: Counts, row_tiles, granules, splits, max_ctas):
    """The whole line in equal shares: each touches a row tile more than it holds."""
    reading = Int64(counts.work_tiles) * Int64(granules) * KEYS // Int64(max_ctas)
    reading = reading * counts.traits.tile.granule_keys // UNIT_KEYS
    return reading + Int64((1 + row_tiles // splits) * SWITCH + COMBINE)


def _piece_cost(counts: Counts, granules, pieces: int, max_ctas):
    """`pieces` CTAs for each work tile, in as many waves as it takes."""
    ctas = Int64(counts.work_tiles) * pieces
    waves, rest = ctas // Int64(max_ctas), Int32(ctas % Int64(max_ctas))
    last = cutlass.max((rest * KEYS + (max_ctas - 1)) // max_ctas, LEAST_KEYS)
    has_last = cutlass.min(rest, 1)
    reading = Int64((granules + (pieces - 1)) // pieces) * (waves * KEYS + Int64(has_last * last))
    reading = reading * counts.traits.tile.granule_keys // UNIT_KEYS
    return reading + (waves + Int64(has_last)) * SWITCH + (JOIN if pieces > 1 else 0)


def may_cut_row_tiles(counts: Counts, plan: SplitPlan):
    """Whether a share may end inside a row tile whose parts no cluster joins, as far as the host can know: not where
    whole ones make equal shares."""
    if not is_uniform(counts.traits):
        return (plan.splits > 1) & (plan.pieces != 1) & (plan.log_cluster == 0)
    row_tiles = counts.requests * counts.row_tiles
    are_cut = (row_tiles % plan.splits != 0) & (plan.splits > 1)
    return (plan.log_cluster == 0) & ((plan.pieces > 1) | ((plan.pieces == 0) & are_cut))

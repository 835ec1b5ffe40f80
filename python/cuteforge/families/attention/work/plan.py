"""How the host cuts the keys of all row tiles for the CTAs of decode, from shapes alone: what is captured into a graph
stays right for any lengths.

Three ways are weighed by the time that they should take:

* a CTA for each row tile and KV head, one after another: nothing to join;
* a cluster of two, four or eight for each, joined through shared memory: only where all of them run at once;
* equal shares of the whole line (shares.py), with a second kernel that joins. Where requests may differ in length only
these are balanced.

The time of CTAs that run at once is that of the slower of two things, and a part of the other: a CTA by itself goes
through its keys at the pace of its warps, and all of them read no faster than the memory. `benchmarks/decode_plan.py`
has the measured times of all ways at 90 sizes, fits the constants to them, and says what the choice loses.
"""

import cutlass
from cutlass import Int32, Int64, cute

from cuteforge.device.math import fast_divisor
from cuteforge.families.attention.forward.config import MAX_WAVES, cta_workspace_bytes
from cuteforge.families.attention.work.counts import Counts
from cuteforge.families.attention.work.limits import Limits
from cuteforge.families.attention.work.shares import SplitPlan, granules_of_keys, is_uniform

# Costs in 1/64 us on an H200.
START = 48  # of CTAs that run at once, until the first keys are there
JOIN = 32  # in a cluster
COMBINE = 240  # a second kernel
SWITCH, RAGGED_SWITCH = 70, 140  # from one row tile to the next; where the device has to look its length up
KEY, KEY_OF_DIM = 256, 7  # in 1/65536 us: a key for a warp by itself, and each of its columns and its value's
BYTES = 70400  # that the memory reads in 1/64 us
# In sixteenths: of the quicker of two things what the slower one does not hide; of the CTAs left for the last wave what
# the wave before does not hide, as it ends CTA by CTA.
OVERLAP, LAST_WAVE = 12, 10
# A piece of a row tile that is read by itself: what is nothing beside a second kernel, and what is little beside all
# other work.
SHORT, RATHER_SHORT = 8 * 64, 30 * 64


@cute.jit
def make_plan(counts: Counts, limits: Limits) -> SplitPlan:
    """The plan of a launch."""
    max_ctas, most_splits = limits.max_ctas, limits.most_splits
    row_tiles, granules = counts.requests * counts.row_tiles, granules_of_keys(counts, counts.most_keys())
    room = Int32(Int64(counts.ops.mWorkspace.shape[0]) // cta_workspace_bytes(counts.traits)) // counts.kv_heads
    pieces, log_cluster = Int32(0), Int32(0)
    splits = _even_splits(counts, row_tiles, granules, room, max_ctas)
    if most_splits > 0:
        pieces = cutlass.max(cutlass.min(most_splits, room // row_tiles), 1)
        splits = row_tiles * pieces
    else:
        least = _share_cost(counts, row_tiles, granules, splits, max_ctas)
        for log_size in cutlass.range_constexpr(counts.traits.cluster.bit_length() or 1):
            cost = _piece_cost(counts, granules, 1 << log_size, limits)
            if cost <= least and _is_allowed(counts, granules, 1 << log_size, limits):
                least = cost
                log_cluster = Int32(log_size)
                pieces = Int32(1 << log_size)
                splits = row_tiles * pieces
    return SplitPlan(splits, pieces, fast_divisor(cutlass.max(pieces, 1)), fast_divisor(granules), log_cluster)


def _at_once(pieces: int, limits: Limits):
    """CTAs that run at once."""
    return limits.max_ctas if pieces <= 2 else limits.max_clustered


def _is_allowed(counts: Counts, granules: Int32, pieces: int, limits: Limits):
    """Whether a cluster for each work tile runs at once, and cutting all row tiles alike costs little even if one
    request is the only long one: its pieces are short, or rather short beside what the others make of it if they are as
    long."""
    ctas = Int64(counts.work_tiles) * pieces
    at_once = (ctas <= Int64(_at_once(pieces, limits))) | (Int32(pieces) == 1)
    if is_uniform(counts.traits):
        return at_once
    by_itself = _by_itself(counts, Int64((granules + (pieces - 1)) // pieces))
    is_short = by_itself <= SHORT
    share = _from_memory(counts, Int64(granules), Int64(counts.work_tiles)) * 3 // 8
    is_rather_short = (Int32(pieces) == 1) & (by_itself <= RATHER_SHORT) & (by_itself <= share)
    return at_once & ((counts.requests == 1) | is_short | is_rather_short)


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
    share = (Int64(row_tiles) * Int64(granules) + Int64(splits - 1)) // Int64(splits)
    switch = SWITCH if is_uniform(counts.traits) else RAGGED_SWITCH
    switches = (1 + share // Int64(granules)) * switch
    return _reading_cost(counts, share, Int64(splits) * Int64(counts.kv_heads), max_ctas) + switches + COMBINE


def _piece_cost(counts: Counts, granules, pieces: int, limits: Limits):
    """`pieces` CTAs for each work tile."""
    piece = Int64((granules + (pieces - 1)) // pieces)
    cost = _reading_cost(counts, piece, Int64(counts.work_tiles) * pieces, _at_once(pieces, limits))
    return cost + (JOIN if pieces > 1 else 0)


def _reading_cost(counts: Counts, granules, ctas, at_once):
    """CTAs of so many granules each, in as many waves as it takes."""
    waves, rest = ctas // Int64(at_once), ctas % Int64(at_once)
    sixteenths = cutlass.min(rest, Int64(1)) * (16 - (16 - LAST_WAVE) * cutlass.min(waves, Int64(1)))
    last = _wave_cost(counts, granules, rest) * sixteenths // 16
    return waves * _wave_cost(counts, granules, Int64(at_once)) + last


def _wave_cost(counts: Counts, granules, ctas):
    """CTAs that run at once."""
    by_itself, from_memory = _by_itself(counts, granules), _from_memory(counts, granules, ctas)
    slower, quicker = cutlass.max(by_itself, from_memory), cutlass.min(by_itself, from_memory)
    return START + slower + quicker * OVERLAP // 16


def _by_itself(counts: Counts, granules):
    """A CTA at the pace of its warps."""
    problem = counts.traits.problem
    of_key = KEY + KEY_OF_DIM * (problem.head_dim + problem.v_dim)
    return granules * (counts.traits.tile.tile_n * of_key) // 1024


def _from_memory(counts: Counts, granules, ctas):
    """What so many CTAs read, as fast as memory is."""
    return granules * counts.traits.granule_bytes * ctas // BYTES


def may_cut_row_tiles(counts: Counts, plan: SplitPlan):
    """Whether a share may end inside a row tile whose parts no cluster joins, as far as the host can know: not where
    whole ones make equal shares."""
    if not is_uniform(counts.traits):
        return (plan.splits > 1) & (plan.pieces != 1) & (plan.log_cluster == 0)
    row_tiles = counts.requests * counts.row_tiles
    are_cut = (row_tiles % plan.splits != 0) & (plan.splits > 1)
    return (plan.log_cluster == 0) & ((plan.pieces > 1) | ((plan.pieces == 0) & are_cut))

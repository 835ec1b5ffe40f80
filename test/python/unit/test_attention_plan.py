"""How the host cuts decode, run on the host: which of the ways it takes for shapes of which the times are known, or
which nothing else can serve."""

import types

import cutlass
import pytest
from cutlass import Int32, cute

from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward.config import Load, select_decode
from cuteforge.families.attention.work import plan
from cuteforge.families.attention.work.limits import Limits
from cuteforge.families.attention.work.traits import limits_of
from cuteforge.runtime.arch import resolve_arch
from helpers.attention_problems import problem_of

H200 = resolve_arch("sm_90a", None)
WHOLE, SHARES = (1, 1), (0, 1)
PAGED = (("keys", "pages"), ("lengths", "seqlens"))


def cluster_of(size):
    return size, size


class Counts(TraceConstant):
    """As families/attention/work/tile.py has them, of `requests` with up to `keys` keys each, a query token each."""

    def __init__(self, traits, requests, kv_heads, keys):
        self.traits, self.requests, self.kv_heads, self.keys = traits, Int32(requests), Int32(kv_heads), Int32(keys)
        self.row_tiles, self.work_tiles = Int32(1), Int32(requests) * Int32(kv_heads)
        self.ops = types.SimpleNamespace(mWorkspace=types.SimpleNamespace(shape=(Int32(64 << 20),)))

    def most_keys(self):
        return self.keys


@cute.jit
def print_plan(traits: cutlass.Constexpr, requests: Int32, kv_heads: Int32, keys: Int32, limits: Limits):
    made = plan.make_plan(Counts(traits, requests, kv_heads, keys), limits)
    cute.printf("plan {} {} {}", made.splits, made.pieces, Int32(1) << made.log_cluster)


def planned(capfd, requests, kv_heads, num_keys, *, d=128, splits=0, arch=H200, facts=(("keys", "batch"),)):
    """(splits, (pieces, CTAs of a cluster))."""
    problem, load = problem_of("bfloat16", d, d, "single", **dict(facts)), Load(requests * kv_heads, num_keys)
    traits = select_decode(problem, 4, arch, True, load)
    limits = limits_of(traits, H200, splits)
    print_plan(traits, requests, kv_heads, num_keys, Limits(*map(Int32, limits)))
    _, splits, pieces, cluster = capfd.readouterr().out.split()
    return int(splits), (int(pieces), int(cluster))


@pytest.mark.parametrize(
    ("requests", "kv_heads", "keys", "d", "way"),
    [
        (1, 8, 512, 128, cluster_of(8)),
        (1, 8, 8192, 128, cluster_of(8)),
        (3, 8, 700, 128, cluster_of(4)),
        (7, 8, 1500, 128, cluster_of(2)),
        (16, 8, 4096, 128, WHOLE),
        (128, 8, 1024, 128, WHOLE),
        (17, 8, 1500, 128, SHARES),
        (8, 8, 32768, 128, cluster_of(2)),
        (1, 8, 131072, 128, SHARES),
        (1, 1, 1, 128, WHOLE),
    ],
)
def test_the_least_turns_of_the_last_cta_decide(capfd, requests, kv_heads, keys, d, way):
    splits, chosen = planned(capfd, requests, kv_heads, keys, d=d)
    assert chosen == way
    assert splits == requests * way[0] if way[0] else 0 < splits <= 132 * plan.MAX_WAVES // kv_heads


@pytest.mark.parametrize(("requests", "size"), [(2, 8), (4, 4)])
def test_no_more_clusters_are_made_than_run_at_once(capfd, requests, size):
    """16 clusters of eight are one more than an H200 runs, which took 31.6 us instead of 26.5; 32 of four are two more,
    54 us instead of 43."""
    assert planned(capfd, requests, 8, 8192)[1] != cluster_of(size)


@pytest.mark.parametrize(("requests", "way"), [(1, SHARES), (3, SHARES), (64, SHARES)])
def test_long_requests_of_unlike_lengths_are_shared(capfd, requests, way):
    """Only the device knows their lengths: row tiles cut alike would leave CTAs idle."""
    assert planned(capfd, requests, 8, 32768, facts=PAGED)[1] == way


@pytest.mark.parametrize(("requests", "keys", "way"), [(3, 256, cluster_of(4)), (128, 256, WHOLE), (128, 1024, WHOLE)])
def test_short_requests_of_unlike_lengths_take_no_second_kernel(capfd, requests, keys, way):
    assert planned(capfd, requests, 8, keys, facts=PAGED)[1] == way


@pytest.mark.parametrize("splits", [1, 7])
def test_splits_asked_for_are_given(capfd, splits):
    assert planned(capfd, 5, 8, 8192, splits=splits) == (5 * splits, (splits, 1))


def test_without_clusters_units_are_shared_or_whole(capfd):
    ampere = resolve_arch("sm_80", None)
    assert planned(capfd, 1, 8, 8192, arch=ampere)[1] == SHARES
    assert planned(capfd, 16, 8, 4096, arch=ampere)[1] == WHOLE


def test_more_units_than_fit_32_bits_times_a_cluster_make_no_clusters(capfd):
    """2**29 units in clusters of 8 would be none, modulo 2**32."""
    assert planned(capfd, 2**26, 8, 64)[1][1] == 1


def test_a_workspace_without_room_for_the_heads_makes_one_team(capfd):
    """No team at all was a division by zero, which ends the process."""
    assert planned(capfd, 1, 70_001, 2, facts=PAGED)[0] == 1
    assert planned(capfd, 1, 70_001, 1 << 20)[0] >= 1

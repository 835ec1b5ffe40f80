"""How attention is cut into tiles, on the facts of five GPUs: what fits, what is refused, what a workspace takes. No
GPU, nothing compiled."""

import itertools
from dataclasses import replace

import pytest

from cuteforge import UnsupportedError
from cuteforge.device.swizzled_rows import ALIGNMENT
from cuteforge.families.attention.forward.config import (
    MAX_WAVES,
    PARTS,
    Load,
    Tile,
    Traits,
    cta_workspace_bytes,
    select_decode,
    select_prefill,
    workspace_bytes,
)
from cuteforge.families.attention.forward_sm90a.config import few_rows, select_warpgroups
from cuteforge.families.attention.merge.config import MergeTraits
from cuteforge.families.attention.options import ScoreOptions, checked_softcap, checked_window
from cuteforge.families.attention.problem import MAX_HEAD_DIM
from cuteforge.families.attention.work.traits import ROW_BLOCK, max_ctas, why_not
from cuteforge.runtime.arch import CTA_RESERVE_BYTES, WARP, resolve_arch
from helpers.attention_problems import problem_of

GPUS = {"A100": "sm_80", "L20": "sm_89", "H200": "sm_90a", "B200": "sm_100a", "RTX 5090": "sm_120a"}
HEADS = [*((d, d) for d in range(8, 257, 8)), (192, 128)]
ROWS = (1, 4, 16, 17, 32, 33, 48, 64, 100, 1024)
MAX_WARPS = 16  # 255 registers a thread leave no room for more
MODEL = problem_of("bfloat16", 128, 128, "batch", "batch")

each_gpu = pytest.mark.parametrize("gpu", GPUS)


def arch_of(gpu):
    return resolve_arch(GPUS[gpu], None)


def problem(d, dv, queries="batch", keys="batch", **facts):
    return problem_of("bfloat16", d, dv, queries, keys, **facts)


def attempt(select, *facts):
    """The traits, or the refusal."""
    try:
        return select(*facts)
    except UnsupportedError as refusal:
        return refusal


def attempts(gpu):
    """(heads, rows or None for prefill, traits or the refusal)."""
    arch = arch_of(gpu)
    for heads, rows, splits in itertools.product(HEADS, ROWS, (True, False)):
        yield heads, rows, attempt(select_decode, problem(*heads), rows, arch, splits)
    for heads in HEADS:
        yield heads, None, attempt(select_prefill, problem(*heads, queries="packed", keys="packed"), arch)


def selected(gpu):
    return [(rows, traits) for _, rows, traits in attempts(gpu) if isinstance(traits, Traits)]


def decode(gpu, splits=True):
    return [(rows, traits) for rows, traits in selected(gpu) if rows is not None and traits.splits == splits]


def prefill(gpu):
    return [traits for rows, traits in selected(gpu) if rows is None]


def all_of(gpu):
    return [traits for _, traits in selected(gpu)]


@each_gpu
def test_every_head_and_group_gets_a_tile(gpu):
    refused = [(heads, rows, str(traits)) for heads, rows, traits in attempts(gpu) if not isinstance(traits, Traits)]
    assert not refused, f"{len(refused)} refused, the first: {refused[0]}"


@each_gpu
def test_tiles_fit(gpu):
    arch = arch_of(gpu)
    for traits in all_of(gpu):
        tile = traits.tile
        assert why_not(traits, arch) is None, traits
        assert traits.smem_bytes <= arch.smem_bytes_per_cta, traits
        assert tile.ctas_per_sm * (traits.smem_bytes + CTA_RESERVE_BYTES) <= arch.smem_bytes_per_sm, traits
        assert 1 <= tile.num_warps * tile.ctas_per_sm <= MAX_WARPS, traits


@each_gpu
def test_tiles_are_what_the_instructions_take(gpu):
    """Whole row blocks, pairs of key blocks of 8, a ring in which a copy is on its way while a tile is read."""
    for traits in all_of(gpu):
        tile = traits.tile
        assert tile.tile_m == ROW_BLOCK * tile.m_blocks * tile.row_warps
        assert tile.tile_n % 16 == 0 and tile.num_stages >= 2, traits
        # a named barrier for each group of warps, and barrier 0
        assert tile.key_warps < 16
        # results of a warp: half of its 255 registers at most
        assert tile.m_blocks * traits.problem.v_dim // 2 <= 128, traits


@each_gpu
def test_decode_reads_the_keys_once_for_up_to_four_row_blocks(gpu):
    """Up to two where 99 KB hold no more of a wide head; and wastes no row block on rows that there are not."""
    for rows, traits in decode(gpu):
        blocks = -(-rows // ROW_BLOCK)
        most = 2 if arch_of(gpu).smem_bytes_per_cta < 128 * 1024 and traits.problem.v_dim > 128 else 4
        assert traits.tile.tile_m >= min(rows, most * ROW_BLOCK), (rows, traits)
        assert traits.tile.tile_m <= ROW_BLOCK * (1 << (min(blocks, 4) - 1).bit_length()), (rows, traits)


@each_gpu
def test_decode_splits_its_keys_inside_a_cta_and_prefill_its_rows(gpu):
    assert all(traits.tile.key_warps > 1 for _, traits in decode(gpu))
    assert all(traits.tile.key_warps == 1 and traits.tile.row_warps >= 4 for traits in prefill(gpu))


@each_gpu
def test_only_decode_with_splits_leaves_parts(gpu):
    arch = arch_of(gpu)
    assert select_decode(MODEL, 4, arch, True).splits and not select_decode(MODEL, 4, arch, False).splits
    assert not any(traits.splits for traits in prefill(gpu))


def cut(traits):
    """The tile, but for where its queries are read from."""
    return replace(traits.tile, queries_in_smem=False)


@each_gpu
def test_tile_does_not_depend_on_what_the_operands_are(gpu):
    """Lengths and the size of pages change what is copied, not how the work is cut: the results agree bit by bit."""
    arch = arch_of(gpu)
    facts = {"lengths": "seqlens", "causal": True, "has_lse": True}
    paged = {"keys": "pages", "lengths": "indptr"}
    kinds = (({}, facts), (paged, {**paged, **facts, "keys": "tokens", "has_rows": True}))
    for d, rows, (first, second) in itertools.product((64, 128, 256), (1, 20), kinds):
        plain, other = problem(d, d, **first), problem(d, d, **second)
        assert cut(select_decode(plain, rows, arch, True)) == cut(select_decode(other, rows, arch, True))
        assert cut(select_prefill(plain, arch)) == cut(select_prefill(other, arch))


def test_decode_of_pages_looks_up_a_row_with_each_lane_where_two_such_tiles_fit():
    for gpu in GPUS:
        arch = arch_of(gpu)
        tile = select_decode(problem(128, 128, keys="tokens", lengths="seqlens"), 4, arch, True).tile
        assert (tile.tile_n == WARP) == (arch.smem_bytes_per_cta >= 160 * 1024), (gpu, tile)
        assert select_decode(MODEL, 4, arch, True).tile.tile_n == WARP // 2


@each_gpu
def test_without_splits_the_tile_is_the_same_in_any_batch(gpu):
    """Else a request would not give the same bits in any batch, which `num_splits=1` promises."""
    arch = arch_of(gpu)
    for keys, d, load in itertools.product(("batch", "pages"), (64, 128), (Load(4096, 512), Load(64, 1 << 20))):
        of = problem(d, d, keys=keys)
        assert select_decode(of, 4, arch, False, load) == select_decode(of, 4, arch, False)


@pytest.mark.parametrize(
    ("keys", "d", "load", "cut"),
    [
        ("batch", 128, Load(132, 512), (4, 16, 1)),
        ("batch", 128, Load(133, 2047), (2, 16, 2)),
        ("batch", 128, Load(133, 2048), (4, 16, 1)),
        ("batch", 64, Load(16, 512), (4, 16, 1)),
        ("batch", 64, Load(17, 1 << 20), (4, 16, 2)),
        ("pages", 128, Load(16, 512), (4, 32, 1)),
        ("pages", 128, Load(17, 1 << 20), (2, 32, 2)),
        ("pages", 64, Load(17, 1 << 20), (4, 32, 2)),
    ],
)
def test_many_work_tiles_are_taken_by_two_ctas_an_sm(keys, d, load, cut):
    """Sizes on both sides of where it pays on an H200 of 132 SMs."""
    tile = select_decode(problem(d, d, keys=keys), 4, arch_of("H200"), True, load).tile
    assert (tile.key_warps, tile.tile_n, tile.ctas_per_sm) == cut


@each_gpu
def test_workspace_is_at_most_64_mib(gpu):
    """For the parts of as many CTAs as are launched to share keys, whatever the sizes of the call."""
    arch = arch_of(gpu)
    for _, traits in decode(gpu):
        ctas = MAX_WAVES * arch.num_sms * traits.tile.ctas_per_sm
        rows = PARTS * traits.tile.tile_m
        assert max_ctas(traits, arch) == arch.num_sms * traits.tile.ctas_per_sm
        assert workspace_bytes(traits, arch) == min(ctas * rows * (traits.problem.v_dim + 1) * 4, 64 * 2**20), traits
        assert cta_workspace_bytes(traits) % 16 == 0, "the next CTA's rows are aligned to the widest store"


def test_dependent_launch_needs_hopper():
    for gpu in GPUS:
        assert select_decode(MODEL, 4, arch_of(gpu), True).dependent_launch == (arch_of(gpu).major >= 9)
        assert not select_decode(MODEL, 4, arch_of(gpu), False).dependent_launch
        assert not select_prefill(MODEL, arch_of(gpu)).dependent_launch


def test_why_not_names_the_limit():
    arch = arch_of("L20")
    large = Traits(MODEL, Tile(1, 4, 1, 256, 3, 1))
    assert "a CTA, there are 101376" in why_not(large, arch)
    crowded = select_decode(MODEL, 4, arch, True)
    crowded = replace(crowded, tile=replace(crowded.tile, ctas_per_sm=16))
    assert "an SM, there are 102400" in why_not(crowded, arch)


def test_a_gpu_with_less_shared_memory_gets_smaller_tiles_until_none_is_left():
    arch = arch_of("H200")
    wide = problem(256, 256)
    smem = [select_decode(wide, 64, _with_smem(arch, kib), True).smem_bytes for kib in (227, 160, 99)]
    assert smem == sorted(smem, reverse=True) and smem[-1] <= 99 * 1024
    with pytest.raises(UnsupportedError, match=r"^q: D = 256 does not fit sm_90a: .* bytes of shared memory"):
        select_decode(wide, 64, _with_smem(arch, 8), True)
    with pytest.raises(UnsupportedError, match=r"^q: D = 256 does not fit"):
        select_prefill(wide, _with_smem(arch, 8))


def _with_smem(arch, kib):
    return replace(arch, smem_bytes_per_cta=kib * 1024, smem_bytes_per_sm=(kib + 1) * 1024)


@each_gpu
def test_shared_memory_holds_rings_queries_and_what_is_joined(gpu):
    """No two of them overlap that are in use together."""
    for traits in all_of(gpu):
        tile, ring = traits.tile, traits.ring
        rows = 2 * traits.problem.head_dim + 2 * traits.problem.v_dim
        assert ring.bytes >= tile.num_stages * tile.tile_n * rows
        assert traits.smem_bytes >= tile.key_warps * ring.bytes + traits.query_bytes
        assert traits.smem_bytes >= traits.join_bytes + traits.query_bytes
        # chunks of a row change places by bits of their addresses
        assert ring.stage_bytes % ALIGNMENT == ring.offsets[1] % ALIGNMENT == traits.streams_bytes % ALIGNMENT == 0
        assert traits.join_bytes == 0 or traits.join_bytes >= tile.key_warps * tile.tile_m * traits.problem.v_dim * 4
        if traits.query_bytes:
            assert traits.query_bytes >= tile.tile_m * traits.problem.head_dim * 2


def test_traits_tell_apart_what_is_compiled():
    """Equal facts are one key; any other fact is another."""
    arch = arch_of("H200")
    base = select_decode(MODEL, 4, arch, True)
    assert base == select_decode(replace(MODEL), 4, arch, True) and hash(base) == hash(
        select_decode(MODEL, 4, arch, True)
    )
    changed = {
        "dtype": "float16", "head_dim": 64, "v_dim": 64, "queries": "single", "keys": "pages", "given": ("lse",),
        "mask_rank": 2, "bias_dtype": "float32",
        "causal": True, "has_left": True, "has_right": True, "has_softcap": True,
    }  # fmt: skip
    assert changed.keys() == vars(MODEL).keys()
    keys = {repr(base)} | {repr(select_decode(replace(MODEL, **{n: v}), 4, arch, True)) for n, v in changed.items()}
    assert len(keys) == 1 + len(changed)


NO_FACTS = {"causal": False, "has_left": False, "has_right": False, "has_softcap": False}


@pytest.mark.parametrize(
    ("causal", "window", "softcap", "facts"),
    [
        (False, None, None, {}),
        (False, (None, None), 0, {}),
        (True, None, None, {"causal": True}),
        (False, (None, 0), None, {"causal": True}),
        (True, (None, 5), None, {"causal": True}),
        (True, [7, 5], 0.0, {"causal": True, "has_left": True}),
        (False, (0, None), None, {"has_left": True}),
        (False, (0, 1), 3, {"has_left": True, "has_right": True, "has_softcap": True}),
    ],
)
def test_numbers_of_options_are_not_compiled_in(causal, window, softcap, facts):
    """Which sides a window has is; no key after one's own is causality, however it is said."""
    options = ScoreOptions(causal, checked_window(window), checked_softcap(softcap))
    assert options.facts == {**NO_FACTS, **facts}


def test_a_window_longer_than_any_request_is_a_32_bit_number():
    assert checked_window((2**40, 2**31)) == (2**31 - 1, 2**31 - 1)


def test_batch_and_rows_of_one_block_share_a_binary():
    arch = arch_of("H200")
    assert len({select_decode(MODEL, rows, arch, True) for rows in range(1, ROW_BLOCK + 1)}) == 1
    assert len({select_decode(MODEL, rows, arch, True) for rows in (49, 64, 4096)}) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_of_a_merge_do_not_straddle_warps(dtype):
    for d in range(8, MAX_HEAD_DIM + 1, 8):
        traits = MergeTraits(dtype, d, "batch")
        lanes, elems = traits.lanes_per_row, traits.access_elems
        assert traits.runs * elems == d
        assert WARP % lanes == 0 and traits.rows_per_cta * lanes == traits.num_warps * WARP
        assert lanes >= traits.runs or lanes == WARP
        assert lanes == 1 or lanes // 2 < traits.runs, "half of the lanes would do"


def test_few_query_rows_take_smaller_row_tiles_with_the_same_keys():
    """The keys of a tile are what the bits of a result depend on."""
    arch = arch_of("H200")
    for (d, dv), keys in itertools.product(HEADS, ("batch", "pages", "tokens")):
        many, few = (select_warpgroups(problem(d, dv, "packed", keys), arch, has_few) for has_few in (False, True))
        assert (many.tile.warpgroups, few.tile.warpgroups) == ((3, 2) if d <= 128 else (2, 2)), (d, dv)
        assert many.tile.tile_n == few.tile.tile_n and many.query_stages >= few.query_stages - 1


@pytest.mark.parametrize(
    ("tokens", "requests", "heads", "kv_heads", "is_few"),
    [
        (2048, 1, 32, 8, True),
        (4096, 1, 32, 8, False),
        (32768, 1024, 32, 8, True),
        (32768, 256, 32, 8, False),
        (16384, 32, 32, 8, False),
    ],
)
def test_what_few_rows_are(tokens, requests, heads, kv_heads, is_few):
    assert (tokens * heads <= few_rows(requests, kv_heads, 132)) == is_few

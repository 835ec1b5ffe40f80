"""How the compressor's work is cut into tiles, on the facts of five GPUs and over every ratio. No GPU, nothing
compiled.

What is whose, and what is copied where, is what the kernel itself says: its `RowWorker` and `WindowStream` run here on
plain integers.
"""

import functools
import itertools
from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from cutlass import cute

from cuteforge import CSACompressorBackward, CSACompressorForward, TensorSpec, UnsupportedError
from cuteforge.families.csa.compressor import config, window
from cuteforge.families.csa.compressor.config import (
    WARP,
    Problem,
    Tile,
    Traits,
    select_traits,
    why_not,
    workspace_bytes,
)
from cuteforge.families.csa.compressor.operands import FLOATS
from cuteforge.families.csa.compressor.pooling import Fast
from cuteforge.families.csa.compressor.row_workers import RowWorker
from cuteforge.op.tensor_spec import ITEMSIZE
from cuteforge.runtime.arch import resolve_arch

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
# Every one up to 49, the ends of each way to share out a window, and steps of 7, which meet every remainder of 16
# warps.
# All 256 take three times as long.
LONGEST = config.MAX_RATIO
RATIOS = sorted({*range(1, 50), *range(50, LONGEST, 7), 63, 64, 65, 127, 128, 129, LONGEST - 2, LONGEST - 1, LONGEST})
HEAD_DIMS = (1, 7, 65, 96, 128, 510, 512, 576, 4096)
MAX_THREADS_PER_SM = 1536  # the least of the five GPUs
PROBLEMS = [Problem(*facts) for facts in itertools.product(FLOATS, HEAD_DIMS, RATIOS, (1, 2))]


@functools.cache
def selection(arch_name):
    """(problem, traits or the refusal) of every problem in both directions."""
    arch = resolve_arch(arch_name, None)
    return [(problem, _select(problem, arch, backward)) for backward in (False, True) for problem in PROBLEMS]


def _select(problem, arch, backward):
    try:
        return select_traits(problem, arch, backward)
    except UnsupportedError as refusal:
        return refusal


def selected(arch_name):
    return [traits for _, traits in selection(arch_name) if isinstance(traits, Traits)]


@functools.cache
def distinct(*facts):
    """One selected `Traits` for each combination of the given facts, over all GPUs."""
    found = {}
    for arch_name in ARCHS:
        for traits in selected(arch_name):
            found.setdefault(tuple(_fact(traits, fact) for fact in facts), traits)
    return list(found.values())


def _fact(traits, name):
    holder = next(part for part in (traits, traits.problem, traits.tile) if hasattr(part, name))
    return getattr(holder, name)


each_arch = pytest.mark.parametrize("arch_name", ARCHS)


def smem_of_kernel(traits):
    """Bytes that the kernel allocates: `WindowStream._allocate` and `PartExchange`."""
    tile, itemsize = traits.tile, ITEMSIZE[traits.problem.dtype]
    lines = 2 * traits.slots + (1 if traits.backward else 0)
    rings = tile.num_warps * tile.num_stages * lines * traits.strip_cols * itemsize
    parts = 2 * tile.num_warps * 3 * WARP * tile.cols_per_lane * 4 if tile.split_window else 0
    return rings + 4 * tile.num_stages * tile.num_warps + parts


@each_arch
def test_selected_tile_fits_a_cta_and_an_sm(arch_name):
    arch = resolve_arch(arch_name, None)
    for traits in selected(arch_name):
        tile = traits.tile
        assert smem_of_kernel(traits) <= traits.smem_bytes <= arch.smem_bytes_per_cta, traits
        assert tile.ctas_per_sm * (smem_of_kernel(traits) + 1024) <= arch.smem_bytes_per_sm, traits
        assert tile.num_warps * WARP <= 1024 and tile.num_warps * WARP * tile.ctas_per_sm <= MAX_THREADS_PER_SM, traits


@each_arch
def test_windows_of_the_bitwise_ratios_and_only_they_stay_in_one_warp(arch_name):
    for traits in selected(arch_name):
        assert traits.tile.split_window == (traits.problem.ratio > 16), traits
        assert not traits.tile.split_window or traits.tile.num_warps % traits.problem.coff == 0, traits


@each_arch
def test_no_problem_is_refused(arch_name):
    assert [problem for problem, traits in selection(arch_name) if not isinstance(traits, Traits)] == []


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_refusal_names_ratio_window_and_gpu(backward):
    """On a GPU with half the shared memory of the smallest."""
    arch = replace(resolve_arch("sm_89", None), smem_bytes_per_cta=48 * 1024)
    with pytest.raises(UnsupportedError, match=r"^ratio: .*512 float32 entries.*sm_89.* there are 49152"):
        select_traits(Problem("float32", 128, 256, 2), arch, backward)


@pytest.fixture
def stream(monkeypatch):
    """Makes the `WindowStream` of one lane on plain integers; the address of a column is its number."""
    here = SimpleNamespace()
    monkeypatch.setattr(cute.arch, "thread_idx", lambda: (here.thread, 0, 0))
    monkeypatch.setattr(cute.arch, "block_idx", lambda: (here.cta, 0, 0))
    monkeypatch.setattr(cute.arch, "grid_dim", lambda: (here.num_ctas, 1, 1))
    monkeypatch.setattr(cute.arch, "make_warp_uniform", lambda warp: warp)
    monkeypatch.setattr(window, "Rows", lambda tensor: SimpleNamespace(column=lambda col: col))
    monkeypatch.setattr(window, "ReadOnce", lambda: None)
    monkeypatch.setattr(window, "select", lambda condition, chosen, otherwise: chosen if condition else otherwise)
    monkeypatch.setattr(window, "Int32", int)
    monkeypatch.setattr(window.WindowStream, "_allocate", lambda self, smem, dtype: None)
    tensor = SimpleNamespace(shape=(1,), element_type=None)
    ops = SimpleNamespace(**dict.fromkeys(("mKv", "mScore", "mCuSeqlens", "mCuSeqlensComp", "mGradOut"), tensor))

    def make(traits, warp=0, lane=0, cta=0, teams=1, num_rows=0, log_rows=0):
        here.thread, here.cta, here.num_ctas = warp * WARP + lane, cta, teams * traits.num_strips
        return window.WindowStream(RowWorker(traits, ops, num_rows, log_rows), None, ops)

    return make


def test_every_window_entry_belongs_to_one_slot_of_one_warp(stream):
    for traits in distinct("tile", "ratio", "coff"):
        problem, split = traits.problem, traits.tile.split_window
        wanted = set(itertools.product(range(problem.coff), range(problem.ratio)))
        warps = [stream(traits, warp) for warp in range(traits.tile.num_warps if split else 1)]
        places = [warp.position(slot) for warp in warps for slot in range(traits.slots)]
        entries = [(block, ape_row) for block, ape_row in places if ape_row < problem.ratio]
        assert len(entries) == len(wanted) and set(entries) == wanted, traits
        assert (len(places) > len(entries)) == traits.has_spare_slots, traits


def test_every_column_belongs_to_one_lane(stream):
    for traits in distinct("strip_cols", "cols_per_lane", "head_dim"):
        cols, d = traits.tile.cols_per_lane, traits.problem.head_dim
        lanes = itertools.product(range(traits.num_strips), range(WARP))
        owned = [stream(traits, lane=lane, cta=chunk).col + c for chunk, lane in lanes for c in range(cols)]
        assert sorted(col for col in owned if col < d) == list(range(d)), traits
        assert (traits.num_strips - 1) * traits.strip_cols < d, traits


@pytest.mark.parametrize("num_rows", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("log_rows", [0, 3])
def test_every_row_belongs_to_one_worker_of_each_strip(stream, num_rows, log_rows):
    teams = 5
    for traits in distinct("num_strips", "rows_per_cta", "strip_cols"):
        if traits.num_strips <= 3:
            taken = Counter()
            for cta, warp in itertools.product(range(teams * traits.num_strips), range(traits.rows_per_cta)):
                lane = stream(traits, warp, 0, cta, teams, num_rows, log_rows)
                taken.update((lane.strip_col, lane.rows.row(step)) for step in range(lane.rows.count))
            columns = range(0, traits.num_strips * traits.strip_cols, traits.strip_cols)
            assert taken == Counter(itertools.product(columns, range(num_rows))), traits


def test_every_element_is_copied_once_to_where_it_is_read(stream):
    """In the last warp and column chunk, which may have entries and columns past the last one."""
    for traits in distinct("tile", "slots", "vector_elems", "coff", "has_spare_slots", "num_strips")[::11]:
        lanes = [stream(traits, traits.tile.num_warps - 1, lane, traits.num_strips - 1) for lane in range(WARP)]
        assert copies_made(traits, lanes) == copies_wanted(traits, lanes[0]), traits


def copies_made(traits, lanes):
    """How often each (token of the window, column, place in the ring) is copied."""
    made = Counter()
    for lane in lanes:
        for part, (entry, offset, exists, columns) in enumerate(lane.copies):
            if exists and lane.lane + part * WARP < traits.runs_per_window:
                made[entry, columns[0], offset] += 1
    return made


def copies_wanted(traits, lane):
    problem, wanted = traits.problem, Counter()
    for slot in range(traits.slots):
        block, ape_row = lane.position(slot)
        if ape_row < problem.ratio:
            for col in range(0, min(traits.strip_cols, problem.head_dim - lane.strip_col), problem.vector_elems):
                column = block * problem.head_dim + lane.strip_col + col
                wanted[block * problem.ratio + ape_row, column, slot * traits.strip_cols + col] += 1
    return wanted


def test_copies_of_the_widest_access_never_cross_a_chunk_or_the_last_column():
    for traits in distinct("tile", "vector_elems", "head_dim", "dtype"):
        problem = traits.problem
        assert traits.strip_cols % problem.vector_elems == 0 and problem.head_dim % problem.vector_elems == 0, traits
        assert problem.vector_elems * ITEMSIZE[problem.dtype] <= 16, traits


def test_rings_hold_the_sums_that_the_warps_join():
    for traits in distinct("tile", "slots", "dtype", "backward"):
        if traits.backward and traits.rows_per_cta > 1:
            sums = traits.rows_per_cta * traits.slots * traits.strip_cols
            assert sums * 4 <= traits.ring_elems * ITEMSIZE[traits.problem.dtype], traits


def test_weights_of_the_longest_window_cannot_overflow_their_sum():
    assert 2 * config.MAX_RATIO * 2.0**Fast.LOG2_SCALE <= 1


@each_arch
def test_relaxed_tiles_end_at_the_smallest_and_never_take_more(arch_name):
    for traits in selected(arch_name)[::97]:
        start = replace(traits.tile, ctas_per_sm=4, num_stages=4, cols_per_lane=4)
        tiles = list(itertools.islice(config._relaxed(start), 100))
        assert tiles[0] == start and tiles[-1] == replace(
            start, ctas_per_sm=1, num_stages=1, cols_per_lane=1, active_lanes=16 if start.split_window else WARP
        )
        taken = [tile.ctas_per_sm * replace(traits, tile=tile).smem_bytes for tile in tiles]
        assert taken == sorted(set(taken), reverse=True), traits


def test_first_tile_that_fits_is_taken():
    problem, roomy = Problem("bfloat16", 512, 4, 2), resolve_arch("sm_90a", None)
    best = select_traits(problem, roomy, False)
    assert best.tile == config._forward_tile(problem)
    one_less = replace(roomy, smem_bytes_per_sm=4 * (best.smem_bytes + 1024) - 1)
    assert select_traits(problem, one_less, False).tile == replace(best.tile, ctas_per_sm=3)
    exact = replace(roomy, smem_bytes_per_sm=4 * (best.smem_bytes + 1024), smem_bytes_per_cta=best.smem_bytes)
    assert select_traits(problem, exact, False) == best


def test_why_not_says_what_a_tile_takes_and_what_there_is():
    arch = resolve_arch("sm_90a", None)
    traits = Traits(Problem("float32", 128, 4, 2), Tile(8, 2, 2, 1))
    taken = traits.smem_bytes
    assert why_not(traits, replace(arch, smem_bytes_per_cta=taken)) is None
    cta = why_not(traits, replace(arch, smem_bytes_per_cta=taken - 1))
    assert "Tile(" in cta and f"{taken} bytes of shared memory a CTA, there are {taken - 1}" in cta
    twice = replace(traits, tile=replace(traits.tile, ctas_per_sm=2))
    sm = why_not(twice, replace(arch, smem_bytes_per_cta=taken, smem_bytes_per_sm=2 * taken))
    assert f"{2 * (taken + 1024)} bytes of shared memory an SM, there are {2 * taken}" in sm


def test_traits_are_equal_exactly_where_their_reprs_are():
    every = [traits for arch_name in ARCHS for traits in selected(arch_name)]
    reprs = {}
    for traits in set(every):
        assert reprs.setdefault(repr(traits), traits) == traits
    assert len(reprs) == len(set(every))
    text = repr(every[0])
    for part in (Traits, Problem, Tile):
        assert all(f"{field.name}=" in text for field in fields(part)), part


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_key_holds_no_sizes_and_no_pitches(backward):
    arch = resolve_arch("sm_90a", None)

    def key(tokens, segments, rows, pitch):
        kv = TensorSpec((tokens, 256), "bfloat16", (pitch, 1))
        ape, offsets = TensorSpec((4, 256), "float32"), TensorSpec((segments + 1,), "int32")
        pooled = TensorSpec((rows, 128), "bfloat16")
        results = (pooled, kv, kv, ape) if backward else (pooled,)
        op = (CSACompressorBackward if backward else CSACompressorForward)(kv, kv, ape, offsets, offsets, *results)
        op.check_support()
        return op._kernel_key(op.dims, arch)

    assert len({key(64, 3, 16, 256), key(10**6, 1, 0, 264), key(4, 10**5, 1, 2**20)}) == 1


@each_arch
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_only_the_backward_of_sm90_and_up_launches_its_kernels_overlapped(arch_name, backward):
    for deterministic in (False, True):
        traits = select_traits(PROBLEMS[0], resolve_arch(arch_name, None), backward, deterministic)
        assert traits.deterministic == deterministic and traits.backward == backward
        assert traits.dependent_launch == (backward and arch_name not in ("sm_80", "sm_89"))


def test_workspace_grows_with_the_ctas_and_holds_at_least_one_group():
    for traits in distinct("tile", "window", "head_dim")[::7]:
        team = 4 * traits.problem.window * traits.problem.head_dim
        sizes = [workspace_bytes(traits, num_ctas) for num_ctas in range(0, 1000, 37)]
        assert sizes == sorted(sizes) and sizes[0] == team, traits
        # `row_plan` launches so many teams at most
        assert workspace_bytes(traits, 999) == max(999 // traits.num_strips, 1) * team, traits


def test_workspace_stays_below_64_mib_at_the_head_dim_of_the_model():
    arch = resolve_arch("sm_90a", None)
    for traits in selected("sm_90a"):
        if traits.backward and traits.problem.head_dim == 512:
            assert workspace_bytes(traits, config.max_ctas(traits, arch)) <= 64 * 2**20, traits

"""What the compiler makes of the attention kernels: no spills, matrix instructions, the widest copies, and shared
memory as reckoned.

By default only the tiles that ask most of the registers are compiled, and each kind of code once (`selected`).
`--full` compiles every tile that is selected for the heads below, with each option. Needs no GPU.
"""

import itertools
import math

import pytest

from cuteforge import UnsupportedError
from cuteforge.families.attention.forward import kernel
from cuteforge.families.attention.forward.config import LIGHT, SMEM_ALIGNMENT, Load, select_decode, select_prefill
from cuteforge.families.attention.merge import kernel as merge
from cuteforge.families.attention.merge.config import MergeTraits
from cuteforge.runtime.arch import WARP, resolve_arch
from helpers import sass
from helpers.attention_problems import problem_of

FULL, REDUCED = "sm_90a", ("sm_80", "sm_89", "sm_100a", "sm_120a")
ARCHS = (FULL, *REDUCED)
WITH_DECODE = ("sm_80", "sm_120a")  # of those the ones with the most and with little shared memory
MODEL_HEAD, PADDED_HEAD, WIDEST_HEAD = 128, 72, 256
OPTION_HEADS = (64, MODEL_HEAD, WIDEST_HEAD)
OPTIONS = {
    "window": {"has_left": True, "has_right": True},
    "softcap": {"causal": True, "has_softcap": True},
    "sinks": {"causal": True, "has_sinks": True},
    "all": {"causal": True, "has_left": True, "has_softcap": True, "has_sinks": True},
}
REGISTERS_PER_SM = 65536
REGISTER_GRANULE = 8  # registers a thread are handed out in eights
HEADS = ((128, 128), (64, 64), (72, 72), (192, 128), (256, 256))
ROWS = (16, 32, 48, 64)
HEAVY = Load(4096, 512)
PAGED = {"keys": "pages", "lengths": "seqlens"}
FEATURES = (
    ("batch", PAGED | {"mask_rank": 3, "has_lse": True, "causal": True}),
    ("single", PAGED | {"appends": True, "has_rows": True}),
    ("single", {"keys": "tokens", "lengths": "indptr"}),
    ("batch", {"keys": "batch", "lengths": "seqlens", "causal": True, "has_lse": True}),
)
PREFILL_FEATURES = (
    ("packed", {"keys": "packed", "causal": True, "has_lse": True}),
    ("packed", PAGED | {"causal": True, "mask_rank": 2}),
    ("batch", {"keys": "batch", "mask_rank": 4, "has_lse": True}),
)


def served(select, *facts):
    """What is selected, if anything: whether every GPU serves every head is asked in unit/test_attention_config.py."""
    try:
        yield select(*facts)
    except UnsupportedError:
        return


def decode_cases(arch, is_full):
    """Each tile once with the features that take most registers, on one architecture also the other features and
    fp16."""
    for heads, rows, load in itertools.product(HEADS, ROWS, (LIGHT, HEAVY)):
        queries, facts = FEATURES[0]
        yield from served(select_decode, problem_of("bfloat16", *heads, queries, **facts), rows, arch, True, load)
    if is_full:
        for facts in ({}, PAGED):
            given = problem_of("bfloat16", *HEADS[0], "single", **facts)
            yield from served(select_decode, given, ROWS[0], arch, True, HEAVY)
        for i, (queries, facts) in enumerate(FEATURES[1:]):
            given = problem_of("float16", *HEADS[0], queries, **facts)
            yield from served(select_decode, given, ROWS[i % 2], arch, i % 2 == 0)


def prefill_cases(arch, is_full):
    queries, facts = PREFILL_FEATURES[0]
    for heads in HEADS:
        yield from served(select_prefill, problem_of("bfloat16", *heads, queries, **facts), arch)
    for heads, (queries, facts) in itertools.product((HEADS[0], HEADS[-1]), PREFILL_FEATURES[1:] if is_full else ()):
        yield from served(select_prefill, problem_of("float16", *heads, queries, **facts), arch)


def cases_of(arch_name):
    """One for each tile and width; on the reduced architectures only what differs from the full one, and the model's
    head."""
    arch, is_full = resolve_arch(arch_name, None), arch_name == FULL
    full = resolve_arch(FULL, None)
    cases = dict.fromkeys((*decode_cases(arch, is_full), *prefill_cases(arch, is_full)))
    if is_full:
        return list(cases)
    known = {_cut(traits) for traits in (*decode_cases(full, True), *prefill_cases(full, True))}
    return [t for t in cases if _cut(t) not in known or t.problem.head_dim == HEADS[0][0] or _is_demanding(t)]


def _cut(traits):
    return traits.problem.head_dim, traits.problem.v_dim, traits.tile


def _is_demanding(traits):
    """The widest head of prefill: most registers."""
    return traits.problem.v_dim == 256 and not traits.splits


def label(arch_name, traits):
    problem, tile = traits.problem, traits.tile
    kind = f"{problem.keys}{'-splits' if traits.splits else ''}{'-mask' if problem.mask_rank else ''}"
    return f"{arch_name}-{problem.dtype}-d{problem.head_dim}-m{tile.tile_m}n{tile.tile_n}-{problem.queries}-{kind}"


def option_cases(arch_name):
    """Prefill with each option, decode with each on one architecture and else with all of them; their registers come on
    top of those of a head."""
    arch = resolve_arch(arch_name, None)
    for option, d in itertools.product(OPTIONS, OPTION_HEADS):
        facts = {"has_lse": True, **OPTIONS[option]}
        prefill = problem_of("bfloat16", d, d, "packed", "packed", **facts)
        yield option, select_prefill(prefill, arch)
        if arch_name == FULL or option == "all":
            decode = problem_of("bfloat16", d, d, "batch", **PAGED, **facts)
            yield option, select_decode(decode, ROWS[0], arch, True)
            yield option, select_decode(decode, ROWS[0], arch, False)
    masked = problem_of(
        "bfloat16", OPTION_HEADS[-1], OPTION_HEADS[-1], "packed", **PAGED, mask_rank=2, **OPTIONS["all"]
    )
    yield "all", select_prefill(masked, arch)


def every_case(arch_name):
    """`(option, traits)` of all there is to compile for an architecture; without an option for a head alone."""
    return [*(("", traits) for traits in cases_of(arch_name)), *option_cases(arch_name)]


def selected(arch_name):
    """Of what every case holds, what asks most of the registers, and each kind of code once.

    On one architecture: the largest decode tile of each head but the one of 64 columns, that of many work tiles, dense
    and paged, and the smallest with all options, once with splits and once without; prefill at the heads that no other
    case has; each kind of keys, of masks and of queries once; a window alone, as only it has a right end, and in
    prefill and decode all options at once: the code of one is a part of that. The splits of decode add a second kernel,
    which is the same for all tiles of a head. On the others prefill at the widest head with all options, and on two the
    largest decode tile.
    """
    every, tiles = every_case(arch_name), {}
    for option, traits in every:
        tiles.setdefault((option, traits.problem, is_decode(traits)), []).append(traits)
    for option, traits in every:
        has_most_or_all = traits == tiles[option, traits.problem, is_decode(traits)][-1] or option == "all"
        is_wanted = _is_wanted if arch_name == FULL else _is_demanding_most
        if (has_most_or_all or not is_decode(traits)) and is_wanted(option, traits):
            if arch_name in (FULL, *WITH_DECODE) or not is_decode(traits):
                yield option, traits


def is_decode(traits):
    return traits.problem.queries != "packed" and traits.problem.mask_rank != 4


def _is_wanted(option, traits):
    problem = traits.problem
    head = problem.head_dim
    if not option:
        if is_decode(traits):
            return head != OPTION_HEADS[0]
        if problem.mask_rank:
            return head == {2: MODEL_HEAD, 4: WIDEST_HEAD}[problem.mask_rank]
        return head not in (MODEL_HEAD, WIDEST_HEAD)  # they come with masks and options
    if option != "all":
        return option == "window" and head == MODEL_HEAD and not is_decode(traits)
    if is_decode(traits):
        return head == (WIDEST_HEAD if traits.splits else MODEL_HEAD)
    return head == MODEL_HEAD or bool(problem.mask_rank)


def _is_demanding_most(option, traits):
    if is_decode(traits):
        return not option and traits.problem.head_dim == WIDEST_HEAD
    return option == "all" and traits.problem.mask_rank


def option_facts(traits):
    problem = traits.problem
    return {name for name in ("has_left", "has_right", "has_softcap", "has_sinks", "causal") if getattr(problem, name)}


def test_selection_has_every_kind_on_one_architecture_and_what_asks_most_on_each():
    """Decode and prefill, the smallest and the largest head dim, a padded one, splits, and every option."""
    every, chosen = every_case(FULL), list(selected(FULL))
    for fact in ("keys", "queries", "dtype", "head_dim", "mask_rank", "appends"):
        assert {getattr(t.problem, fact) for _, t in chosen} == {getattr(t.problem, fact) for _, t in every}, fact
    for decodes in (True, False):
        kind = [(option, traits) for option, traits in chosen if is_decode(traits) == decodes]
        heads = {traits.problem.head_dim for _, traits in kind}
        assert heads >= {MODEL_HEAD, PADDED_HEAD, WIDEST_HEAD}
        assert {traits.problem.head_dim for option, traits in kind if option == "all"} == {MODEL_HEAD, WIDEST_HEAD}
    assert set.union(*(option_facts(t) for _, t in chosen)) == set.union(*(option_facts(t) for _, t in every))
    assert {bool(traits.splits) for _, traits in chosen if is_decode(traits)} == {True, False}
    for arch_name in REDUCED:
        chosen = list(selected(arch_name))
        assert set(chosen) <= set(every_case(arch_name))
        assert {is_decode(traits) for _, traits in chosen} == ({True, False} if arch_name in WITH_DECODE else {False})
        assert {traits.problem.head_dim for _, traits in chosen} == {WIDEST_HEAD}
        assert {len(option_facts(t)) for option, t in chosen if not is_decode(t)} == {len(OPTIONS["all"])}


def pytest_generate_tests(metafunc):
    if "arch_name" in metafunc.fixturenames and metafunc.function is test_machine_code:
        choose = every_case if metafunc.config.getoption("--full") else selected
        cases = [(arch_name, *case) for arch_name in ARCHS for case in choose(arch_name)]
        ids = [label(arch_name, traits) + (f"-{option}" if option else "") for arch_name, option, traits in cases]
        metafunc.parametrize(("arch_name", "traits"), [(arch_name, traits) for arch_name, _, traits in cases], ids=ids)


def test_machine_code(arch_name, traits):
    binary = sass.compile_binary(kernel.build(traits), arch_name)
    assert sum(name.startswith("attention_combine") for name in binary.kernels) == (1 if traits.splits else 0)
    for code in binary.kernels.values():
        assert (code.stack_bytes, code.local_bytes) == (0, 0)
        assert not code.matching(r"STL|LDL|D(ADD|MUL|FMA|SETP|MNMX)\b|.*\.F64|REDG?\b|ATOM")
    attending = [code for name, code in binary.kernels.items() if not name.startswith("attention_combine")]
    assert attending
    for code in attending:
        check_it_fits(traits, code, resolve_arch(arch_name, None), max(binary.launch_smem_bytes))
        check_instructions(traits, code)


def check_it_fits(traits, code, arch, smem_bytes):
    """As many CTAs as the tile says fit an SM, and the shared memory is what `why_not` reckons with."""
    per_thread = -(-code.registers // REGISTER_GRANULE) * REGISTER_GRANULE
    assert code.registers <= 255
    assert per_thread * WARP * traits.tile.num_warps * traits.tile.ctas_per_sm <= REGISTERS_PER_SM, code.registers
    assert traits.smem_bytes - SMEM_ALIGNMENT <= smem_bytes <= traits.smem_bytes <= arch.smem_bytes_per_cta


def check_instructions(traits, code):
    """All products on the tensor cores, of 16-bit operands summed in fp32; keys and values copied past registers and
    L1, 16 bytes a lane."""
    dtype = ".BF16" if traits.problem.dtype == "bfloat16" else ""
    assert code.matching("HMMA").keys() == {f"HMMA.16816.F32{dtype}"}
    assert code.count("HMMA") % products(traits) == 0, code.matching("HMMA")
    assert code.count(r"LDGSTS\.E\.BYPASS.*\.128\b") == code.count("LDGSTS") > 0, code.matching("LDGSTS")
    assert code.count(r"LDSM.*\.4\b") == code.count("LDSM") > 0, code.matching("LDSM")


def products(traits):
    """Matrix instructions of a tile: scores, weighted values, and one for the sum of the weights."""
    tile, steps = traits.tile, traits.tile.tile_n // 16
    return tile.m_blocks * (2 * steps * traits.k_steps + steps * (traits.v_tiles + 1))


MERGES = [
    ("sm_90a", MergeTraits(dtype, d, queries))
    for dtype, d, queries in (("bfloat16", 128, "batch"), ("float16", 80, "packed"), ("float32", 256, "packed"))
] + [(arch, MergeTraits("bfloat16", 128, "batch")) for arch in REDUCED[:1]]


@pytest.mark.parametrize(
    ("arch_name", "traits"), MERGES, ids=[f"{a}-{t.dtype}-d{t.head_dim}-{t.queries}" for a, t in MERGES]
)
def test_machine_code_of_merges(arch_name, traits):
    """Each element is read or written once, 16 bytes a lane."""
    (code,) = sass.compile_binary(merge.build(traits), arch_name).kernels.values()
    assert (code.stack_bytes, code.local_bytes) == (0, 0)
    assert not code.matching(r"STL|LDL|D(ADD|MUL|FMA)\b|.*\.F64|HMMA|REDG?\b|ATOM")
    assert code.registers <= 64
    accesses = math.ceil(traits.runs / traits.lanes_per_row)
    assert code.matching("STG") == {"STG.E": 1, "STG.E.128": accesses}
    assert code.matching(r"LDG\b") == {"LDG.E": 2, "LDG.E.128": 2 * accesses}

"""What the compiler makes of the compressor's kernels, for five GPUs: registers, spills, and the instructions that
decide the speed.

By default only the kernels with the fewest registers to spare are compiled (`selected`). `--full` compiles every tile
that is ever selected, with the longest part of a window that a warp gets in it. Needs no GPU; a missing disassembler is
an error.
"""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import pytest

from cuteforge.families.csa.compressor import backward, forward
from cuteforge.families.csa.compressor.config import SMEM_ALIGNMENT, WARP, Problem, select_traits
from cuteforge.op.tensor_spec import ITEMSIZE
from cuteforge.runtime.arch import resolve_arch
from helpers import sass

FULL, BOTH_WAYS = "sm_90a", "sm_80"
ARCHS = (FULL, "sm_80", "sm_89", "sm_100a", "sm_120a")
REGISTERS_PER_SM = 65536
REGISTER_GRANULE = 8  # registers a thread are handed out in eights
ATOMICS = r"REDG?\b|ATOM"
MODEL = [Problem("bfloat16", 512, 4, 2), Problem("float16", 512, 128, 1)]  # CSA and HCA

# 512, 576 and 544 columns make a lane take at most 4, 2 and 1; 0, 4, 2 or 1 fewer make the widest access 16, 8, 4 or 2
# bytes.
HEAD_DIMS = tuple(most - fewer for most in (512, 576, 544) for fewer in (0, 4, 2, 1))
WIDE_DIMS, NARROW_DIMS, DIMS_BETWEEN = (512, 576, 544), (511,), (508, 510)
# All ratios of unsplit windows. Of the others those that fill the slots of every warp, and those that leave one spare.
RATIOS = [*range(1, 17), *(multiple - spare for multiple in range(20, 257, 4) for spare in (1, 0))]


def access_bytes(traits):
    return traits.problem.vector_elems * ITEMSIZE[traits.problem.dtype]


@functools.cache
def candidates(arch, head_dims=HEAD_DIMS):
    facts = itertools.product(("bfloat16", "float32"), head_dims, RATIOS, (1, 2), (False, True))
    return [select_traits(Problem(*problem), arch, is_backward) for *problem, is_backward in facts]


def most_demanding(every, kind):
    """Of each kind the one with the most window entries a warp; among those, with the most conditions on them. A kind
    of None is left out."""
    return [max(alike, key=_demand) for alike in _by_kind(every, kind)]


def _by_kind(every, kind):
    found = {}
    for traits in every:
        found.setdefault(kind(traits), []).append(traits)
    found.pop(None, None)
    return found.values()


def _demand(traits):
    return traits.slots, traits.problem.coff, traits.has_spare_slots, traits.copy_rounds, traits.problem.ratio


def full_kind(traits):
    """Every tile with accesses of 16 bytes, and of 2 bytes: those need the most addresses. Those between once each."""
    width = access_bytes(traits)
    tile = traits.tile if width in (2, 16) else traits.tile.split_window
    return traits.backward, tile, ITEMSIZE[traits.problem.dtype], width


def atomic_kind(traits):
    """With and without spare entries: where registers are short, either may be the one that spills."""
    return (traits.tile, traits.has_spare_slots) if traits.backward and access_bytes(traits) == 16 else None


def shortest_of_registers(every, kind):
    """Of each kind the tile that asks most of the registers of an SM: entries that a lane holds, times the warps that
    share the registers."""
    return [max(alike, key=lambda t: (_registers_wanted(t), _demand(t))) for alike in _by_kind(every, kind)]


def _registers_wanted(traits):
    return traits.slots * traits.tile.cols_per_lane * traits.tile.num_warps * traits.tile.ctas_per_sm


def every_case(arch):
    """Each tile once, with and without atomics, and the models."""
    every = candidates(arch)
    return [*models(arch), *most_demanding(every, full_kind)], most_demanding(every, atomic_kind)


def models(arch):
    return [select_traits(*facts) for facts in itertools.product(MODEL, (arch,), (False, True))]


def selected(arch):
    """The kernels with the fewest registers to spare: on one architecture for each direction, element size and way to
    share out a window, on the others one backward, and on one of them a forward.

    Where no sums stay in registers few registers are taken, so either element size will do. Accesses of 2, 4 and 8
    bytes are compiled once. Those of 2 bytes need the most addresses and take 13 s instead of 5. The atomic backward
    differs from the other one only in what it does with a sum: its case is the one with the most sums.
    """
    if arch.name != FULL:
        wide = candidates(arch, WIDE_DIMS)
        return shortest_of_registers(wide, either_way if arch.name == BOTH_WAYS else resident_backward), []
    every = candidates(arch, WIDE_DIMS + NARROW_DIMS + DIMS_BETWEEN)
    wide = of_width(every, 16)
    cases = models(arch) + shortest_of_registers(wide, way_and_size)
    cases += most_demanding([t for t in of_width(every, 2) if t.backward and t.tile.resident], access_bytes)
    cases += most_demanding([t for t in of_width(every, 4, 8) if t.backward == (access_bytes(t) == 8)], access_bytes)
    return cases, shortest_of_registers(wide, resident_backward)


def resident_backward(traits):
    return True if traits.backward and traits.tile.resident else None


def either_way(traits):
    """Forward, and the backward with sums in registers."""
    return resident_backward(traits) if traits.backward else False


def way_and_size(traits):
    return (*way(traits), ITEMSIZE[traits.problem.dtype] if traits.tile.resident else None)


def of_width(every, *widths):
    return [traits for traits in every if access_bytes(traits) in widths]


def way(traits):
    return traits.backward, traits.tile.split_window, traits.tile.resident


def cases_of(arch_name, is_full):
    arch = resolve_arch(arch_name, None)
    cases, with_atomics = (every_case if is_full else selected)(arch)
    return list(dict.fromkeys(cases + [replace(traits, deterministic=False) for traits in with_atomics]))


def label(arch_name, traits):
    problem = traits.problem
    direction = "forward" if not traits.backward else "backward" if traits.deterministic else "backward_atomic"
    return f"{arch_name}-{direction}-{problem.dtype}-r{problem.ratio}c{problem.coff}d{problem.head_dim}"


def test_selection_has_every_way_on_one_architecture_and_a_backward_on_each():
    """Forward and backward of either element size, whole and split windows, sums in registers and in memory, with and
    without atomics, each width of an access, and the models."""
    cases, every = cases_of(FULL, is_full=False), candidates(resolve_arch(FULL, None), WIDE_DIMS)
    assert {way_and_size(traits) for traits in of_width(cases, 16)} >= {way_and_size(traits) for traits in every}
    assert {traits.deterministic for traits in cases if traits.backward} == {True, False}
    assert {access_bytes(traits) for traits in cases} == {2, 4, 8, 16}
    assert {traits.problem for traits in cases} >= set(MODEL)
    for arch_name in set(ARCHS) - {FULL}:
        arch, cases = resolve_arch(arch_name, None), cases_of(arch_name, is_full=False)
        most = max(map(_registers_wanted, filter(resident_backward, candidates(arch, WIDE_DIMS))))
        assert most in {_registers_wanted(traits) for traits in cases if resident_backward(traits)}
        assert {traits.backward for traits in cases} == ({True, False} if arch_name == BOTH_WAYS else {True})


def pytest_generate_tests(metafunc):
    if "arch_name" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--full")
        cases = [(arch_name, traits) for arch_name in ARCHS for traits in cases_of(arch_name, is_full)]
        metafunc.parametrize(("arch_name", "traits"), cases, ids=[label(*case) for case in cases])


def test_machine_code(arch_name, traits):
    build = (backward if traits.backward else forward).build(traits)
    binary = sass.compile_binary(build, arch_name)
    assert len(binary.kernels) == (2 if traits.backward else 1)
    for code in binary.kernels.values():
        check_nothing_is_slow(code)
    (code,) = (code for code in binary.kernels.values() if code.count("MUFU.EX2"))
    check_it_fits(traits, code, max(binary.launch_smem_bytes))
    check_copies(traits, code)
    check_stores_and_atomics(traits, code)
    assert code.count("MUFU.EX2") == exponentials(traits)


def test_a_spill_is_an_error():
    """The checks of every case rely on the compiler's refusal: four times 512 threads of an SM get 32 registers
    each."""
    traits = select_traits(MODEL[0], resolve_arch(FULL, None), backward=True)
    crowded = replace(traits, tile=replace(traits.tile, ctas_per_sm=4))
    with pytest.raises(Exception, match="Registers are spilled"):
        sass.compile_binary(backward.build(crowded), FULL)


def check_nothing_is_slow(code):
    """No spills, no local memory, no double precision, and no tensor-core instruction, as nothing here is a matrix
    product."""
    assert (code.stack_bytes, code.local_bytes) == (0, 0)
    for pattern in ("STL|LDL", r"D(ADD|MUL|FMA|SETP|MNMX)\b|.*\.F64", "HMMA|HGMMA|IMMA|DMMA|UTC.*MMA"):
        assert not code.matching(pattern)


def check_it_fits(traits, code, smem_bytes):
    """As many CTAs as the tile says fit an SM, and the shared memory is what `select_traits` reckons with."""
    per_thread = -(-code.registers // REGISTER_GRANULE) * REGISTER_GRANULE
    assert code.registers <= 255
    assert per_thread * WARP * traits.tile.num_warps * traits.tile.ctas_per_sm <= REGISTERS_PER_SM, code.registers
    assert traits.smem_bytes - SMEM_ALIGNMENT <= smem_bytes <= traits.smem_bytes


def check_copies(traits, code):
    """Windows are copied past the registers with the widest access; cp.async has none of 2 bytes."""
    kinds = {16: r"LDGSTS\.E\.BYPASS.*\.128\b", 8: r"LDGSTS\.E.*\.64\b", 4: r"LDGSTS\.E(?!.*\.(64|128)\b)", 2: None}
    kind, copies = kinds[access_bytes(traits)], code.count("LDGSTS")
    assert code.count(kind) == copies > 0 if kind else copies == 0, code.matching("LDGSTS")


def check_stores_and_atomics(traits, code):
    """Each lane stores its columns of a row at once if they are whole runs; only the atomic backward adds to memory."""
    problem, cols = traits.problem, traits.tile.cols_per_lane
    itemsize = ITEMSIZE[problem.dtype]
    run = cols if problem.vector_elems % cols == 0 else 1
    runs = (2 * written_out(traits) if traits.backward else 1) * (cols // run)
    stores = Counter({run * itemsize: runs})
    sums = written_out(traits) * cols if traits.backward else 0
    if traits.backward:
        stores[access_bytes(traits)] += 2 * problem.coff  # zeros for what no window reads
    if traits.backward and traits.deterministic:
        stores[4] += sums if traits.tile.resident else 2 * sums  # sums that do not stay in registers are zeroed first
    opcodes = {2: "STG.E.U16", 4: "STG.E", 8: "STG.E.64", 16: "STG.E.128"}
    assert code.matching("STG") == {opcodes[width]: count for width, count in stores.items()}
    assert code.count(ATOMICS) == (0 if traits.deterministic else sums), code.matching(ATOMICS)


def written_out(traits):
    """Window entries whose gradients have instructions of their own: with nothing kept in registers they share one
    loop."""
    return traits.slots if traits.tile.resident else 1


def exponentials(traits):
    """One for each entry and column; where warps share a window, one more for each of their parts."""
    tile = traits.tile
    count = traits.slots * tile.cols_per_lane
    if not tile.split_window:
        return count
    joined = tile.num_warps * tile.cols_per_lane
    if not traits.backward:
        return count + joined
    return count + joined + tile.cols_per_lane

"""What the compiler makes of the rotary kernel: no spills, the widest accesses, and nothing but fp32 arithmetic.

By default each kind of code is compiled once, and the model for one more architecture; `--full` compiles them all.
"""

from cuteforge.families.rotary import kernel
from cuteforge.families.rotary.config import Problem, Traits
from helpers import sass

ARCHS = ("sm_80", "sm_89", "sm_100a", "sm_120a")
MODEL = Problem("bfloat16", 128, 128, interleaved=False)


def traits_of(problem, rank, has_keys, positions):
    """Of an op that rotates keys too, or does not, by positions of a dtype, or by pairs where that is None."""
    angles = ("freqs_cis",) if positions is None else ("cos", "sin", "positions")
    return Traits(problem, rank, (*(("k", "k_out") if has_keys else ()), *angles), positions)


# (traits, bytes of an access)
MODELS = (
    (traits_of(MODEL, 3, True, "int64"), 16),
    (traits_of(Problem("bfloat16", 128, 128, interleaved=True), 4, False, None), 16),
)
# A case for each element size, each pairing, each kind of angles and each access width.
ONCE = (
    (traits_of(Problem("float16", 192, 64, interleaved=False), 3, True, "int32"), 16),
    (traits_of(Problem("float32", 256, 256, interleaved=False), 4, True, "int64"), 16),
    (traits_of(Problem("bfloat16", 80, 40, interleaved=False), 4, True, None), 8),
    (traits_of(Problem("bfloat16", 66, 66, interleaved=True), 3, False, "int32"), 4),
    (traits_of(Problem("float16", 65, 6, interleaved=True), 3, False, None), 2),
    (traits_of(Problem("bfloat16", 1024, 1022, interleaved=False), 3, False, "int32"), 2),
)
# What differs from these in no way that the checks see: fp32 in interleaved pairs, and accesses of one fp32.
MORE = (
    (traits_of(Problem("float32", 128, 128, interleaved=True), 3, True, "int32"), 16),
    (traits_of(Problem("float32", 2, 2, interleaved=False), 4, True, None), 4),
)


def cases_of(is_full):
    """`cuteforge demo`, which CI runs, compiles the model for the other architectures."""
    cases = [("sm_90a", *case) for case in MODELS + ONCE + (MORE if is_full else ())]
    return cases + [(arch, *case) for arch in (ARCHS if is_full else ARCHS[:1]) for case in MODELS[:1]]


def label(arch, traits, _):
    return f"{arch}-{traits.problem.dtype}-d{traits.problem.head_dim}r{traits.problem.rotary_dim}"


def pytest_generate_tests(metafunc):
    cases = cases_of(metafunc.config.getoption("--full"))
    metafunc.parametrize(("arch", "traits", "width"), cases, ids=[label(*case) for case in cases])


def test_machine_code(arch, traits, width):
    (code,) = sass.compile_binary(kernel.build(traits), arch).kernels.values()
    assert traits.num_threads <= 1024
    assert (code.stack_bytes, code.local_bytes) == (0, 0)
    assert not code.matching(r"D(ADD|MUL|FMA)\b|.*\.F64|HMMA|LDGSTS")
    assert code.registers * traits.num_threads * traits.ctas_per_sm <= 65536
    accesses = traits.problem.accesses_per_head + (traits.copy_threads > 0)
    opcode = {2: "STG.E.U16", 4: "STG.E", 8: "STG.E.64", 16: "STG.E.128"}[width]
    assert code.matching("STG") == {opcode: traits.heads_per_thread * accesses}
    assert code.count("FFMA") == 2 * traits.problem.pairs_per_thread * traits.heads_per_thread

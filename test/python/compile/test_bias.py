"""What the compiler makes of attention with a bias: what is loaded of it takes no register that a tile lacks. Needs no
GPU."""

from cuteforge.families.attention.forward import kernel
from cuteforge.families.attention.forward.config import select_decode, select_prefill
from cuteforge.families.attention.forward_sm90a import kernel as sm90a
from cuteforge.families.attention.forward_sm90a.config import select_warpgroups
from cuteforge.runtime.arch import resolve_arch
from helpers import sass
from helpers.attention_problems import problem_of

DENSE = ("batch", {"keys": "batch", "lengths": "seqlens", "causal": True, "has_lse": True})
PAGES = ("packed", {"keys": "pages", "lengths": "seqlens", "causal": True})
TOKENS = ("batch", {"keys": "tokens", "lengths": "indptr", "causal": True})
DECODE = ("batch", {"keys": "pages", "lengths": "seqlens", "causal": True, "has_lse": True})
ALL = {"has_left": True, "has_softcap": True, "has_sinks": True, "mask_rank": 4}
PORTABLE = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")


def cases(is_full):
    """On sm_90a the largest tile of each dtype and the widest head, with all other options; the portable kernel of the
    widest head on the smallest and the newest GPU. `--full`: every head, kind of keys and architecture."""
    few = [
        ("sm_90a", "warpgroups", 128, 128, *DENSE, "bfloat16", {}),
        ("sm_90a", "warpgroups", 128, 128, *DENSE, "float32", ALL),
        ("sm_90a", "warpgroups", 256, 256, *PAGES, "bfloat16", ALL),
        ("sm_80", "prefill", 256, 256, *DENSE, "float32", ALL),
        ("sm_120a", "prefill", 128, 128, *PAGES, "bfloat16", ALL),
        ("sm_90a", "decode", 128, 128, *DECODE, "float32", ALL),
    ]
    if not is_full:
        return few
    heads = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
    wide = [
        ("sm_90a", "warpgroups", *pair, *keys, dtype, ALL)
        for pair in heads
        for keys, dtype in ((DENSE, "float32"), (PAGES, "float32"), (TOKENS, "float16"))
    ]
    portable = [
        (arch, kind, *pair, *keys, dtype, ALL)
        for arch in PORTABLE
        for pair in heads
        for kind, keys in (("prefill", DENSE), ("decode", DECODE))
        for dtype in ("bfloat16", "float32")
    ]
    return few + wide + portable


def pytest_generate_tests(metafunc):
    found = cases(metafunc.config.getoption("--full"))
    ids = [f"{c[0]}-{c[1]}-d{c[2]}v{c[3]}-{c[5]['keys']}-{c[6]}{'-all' if c[7] else ''}" for c in found]
    metafunc.parametrize("case", found, ids=ids)


def build_of(arch_name, kind, d, dv, queries, facts, bias, options):
    problem, arch = problem_of("bfloat16", d, dv, queries, **facts, **options, bias=bias), resolve_arch(arch_name, None)
    if kind == "warpgroups":
        return sm90a.build(select_warpgroups(problem, arch))
    return kernel.build(select_prefill(problem, arch) if kind == "prefill" else select_decode(problem, 16, arch, True))


def test_machine_code(case):
    """No spills, and the two numbers of a row that lie side by side in a lane are read at once."""
    binary = sass.compile_binary(build_of(*case), case[0])
    for code in binary.kernels.values():
        assert (code.stack_bytes, code.local_bytes) == (0, 0)
        assert not code.matching(r"STL|LDL|D(ADD|MUL|FMA|SETP|MNMX)\b|.*\.F64")
    pairs = r"LDG\.E\.64\b" if case[6] == "float32" else r"LDG\.E(\.CONSTANT)?$"
    assert max(code.count(pairs) for code in binary.kernels.values()) >= 4, [
        code.matching("LDG") for code in binary.kernels.values()
    ]

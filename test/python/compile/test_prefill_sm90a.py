"""What the compiler makes of the prefill kernel of sm_90a: warpgroup products that overlap the softmax, bulk copies, no
spills. Needs no GPU."""

from cuteforge.families.attention.forward_sm90a import kernel
from cuteforge.families.attention.forward_sm90a.config import PRODUCER_WARPS, SMEM_ALIGNMENT, select_warpgroups
from cuteforge.runtime.arch import WARP, resolve_arch
from helpers import sass
from helpers.attention_problems import problem_of

ARCH = resolve_arch("sm_90a", None)
REGISTERS_PER_SM = 65536
DENSE = ("batch", {"keys": "batch", "lengths": "seqlens", "causal": True, "has_lse": True})
RAGGED = ("packed", {"keys": "packed", "causal": True})
PAGES = ("packed", {"keys": "pages", "lengths": "seqlens", "causal": True})
TOKENS = ("batch", {"keys": "tokens", "lengths": "indptr"})
OPTIONS = (
    {"has_left": True, "has_right": True},
    {"causal": True, "has_sinks": True},
    {"causal": True, "has_softcap": True},
    {"has_left": True, "has_softcap": True, "has_sinks": True},
)
MASKED = (DENSE, PAGES)
EVERY_WIDTH = (8, 24, 40, 64, 72, 88, 96, 104, 120, 136, 192, 248, 256)
# The ends of three warpgroups. Two, which are for wider heads, come with packed keys, tokens, and pages; the widest
# with all options, which take more registers than none.
WIDTHS = (8, 120)


def problems(is_full):
    """Each kind of keys once, a window, which alone has a right end, all options, masks of rows and of requests, and
    the ends of the widths; with `--full` each option alone and at more widths."""

    def choose(few, many):
        return many if is_full else few

    return [
        *(problem_of("bfloat16", d, d, DENSE[0], **DENSE[1]) for d in choose(WIDTHS, EVERY_WIDTH)),
        *(
            problem_of("bfloat16", *pair, RAGGED[0], **RAGGED[1])
            for pair in choose(((64, 256),), ((192, 128), (64, 128), (128, 64), (64, 256)))
        ),
        *(problem_of("float16", d, d, PAGES[0], **PAGES[1]) for d in choose((128,), (64, 72, 96, 128, 256))),
        *(
            problem_of("float16", *pair, TOKENS[0], **TOKENS[1])
            for pair in choose(((192, 128),), ((192, 128), (128, 128), (64, 64)))
        ),
        *(
            problem_of("bfloat16", d, d, "packed", keys="packed", has_lse=True, **options)
            for d in choose((128,), (64, 128, 256))
            for options in choose(OPTIONS[:1], OPTIONS)
        ),
        *(
            problem_of("float16", d, d, PAGES[0], **PAGES[1], **OPTIONS[-1])
            for d in choose((72, 256), (64, 72, 128, 256))
        ),
        *(
            problem_of("bfloat16", d, d, queries, **facts, mask_rank=rank)
            for (queries, facts), rank in zip(MASKED, (4, 2))
            for d in choose((128,), EVERY_WIDTH)
        ),
    ]


def few_rows(is_full):
    """Problems of calls with few rows, which get other tiles: dense keys, pages, all options."""
    dense, optioned, paged = ((64, 96, 128), (64, 128), (64, 128)) if is_full else ((128,), (128,), (64,))
    tokens = [problem_of("float16", 128, 128, TOKENS[0], **TOKENS[1])] if is_full else []
    return [
        *(problem_of("bfloat16", d, d, DENSE[0], **DENSE[1]) for d in dense),
        *(problem_of("float16", d, d, "packed", keys="packed", **OPTIONS[-1]) for d in optioned),
        *(problem_of("float16", d, d, PAGES[0], **PAGES[1]) for d in paged),
        *tokens,
    ]


# Waits for products: of the first scores, of scores and of values in the loop, of the last values, and of what is on
# its way at the end.
FIRST, SCORES, VALUES, LAST, END = range(5)


def label(problem):
    options = "".join(f"-{name}" for name in ("left", "right", "softcap", "sinks") if getattr(problem, f"has_{name}"))
    options += f"-mask{problem.mask_rank}" if problem.mask_rank else ""
    return f"{problem.dtype}-d{problem.head_dim}v{problem.v_dim}-{problem.queries}-{problem.keys}{options}"


def pytest_generate_tests(metafunc):
    is_full = metafunc.config.getoption("--full")
    cases = [*((problem, False) for problem in problems(is_full)), *((problem, True) for problem in few_rows(is_full))]
    ids = [f"{label(problem)}-{'few' if has_few_rows else 'many'}" for problem, has_few_rows in cases]
    metafunc.parametrize(("problem", "has_few_rows"), cases, ids=ids)


def test_machine_code(problem, has_few_rows):
    traits = select_warpgroups(problem, ARCH, has_few_rows)
    binary = sass.compile_binary(kernel.build(traits), ARCH.name)
    (code,) = binary.kernels.values()
    assert (code.stack_bytes, code.local_bytes) == (0, 0)
    assert not code.matching(r"STL|LDL|D(ADD|MUL|FMA|SETP|MNMX)\b|.*\.F64|HMMA|REDG?\b|ATOM")
    check_it_fits(traits, code, max(binary.launch_smem_bytes))
    check_copies(traits, code)
    check_products(traits, code)


def check_it_fits(traits, code, smem_bytes):
    """What the warps ask for by and by is there, and shared memory is what `why_not` reckons with."""
    registers = traits.registers
    threads = WARP * (PRODUCER_WARPS + traits.tile.consumer_warps)
    launched = code.registers // 8 * 8 * threads
    assert launched <= REGISTERS_PER_SM
    assert WARP * (traits.tile.consumer_warps * registers.consumer + PRODUCER_WARPS * registers.producer) <= launched
    assert traits.smem_bytes - SMEM_ALIGNMENT <= smem_bytes <= traits.smem_bytes <= ARCH.smem_bytes_per_cta


def check_copies(traits, code):
    """Keys and values by TMA where some lie next to one another, everything else 16 bytes a lane past registers and
    L1."""
    assert (code.count("UTMALDG") > 0) == (traits.problem.keys != "tokens")
    assert code.count(r"LDGSTS\.E\.BYPASS.*\.128\b") == code.count("LDGSTS") > 0, code.matching("LDGSTS")


def check_products(traits, code):
    """One fence and one wait for each group of products, or the assembler has made them wait for one another; and the
    exponentials of a tile come before the wait for the values of the tile before, or they would not run beside those
    products."""
    n = traits.tile.tile_n
    assert code.count("HGMMA") == 3 * traits.k_steps + 2 * (n // 16)
    assert code.count("WARPGROUP.ARRIVE") == 5
    waits = [i for i, opcode in enumerate(code.instructions) if opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == END + 1
    between = code.instructions[waits[SCORES] : waits[VALUES]]
    assert sum(opcode.startswith("MUFU.EX2") for opcode in between) >= n // 2

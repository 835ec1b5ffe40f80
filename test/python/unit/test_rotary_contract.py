"""Every line of the rotary op's check_support, violated once. Metadata only: no GPU, nothing compiled."""

import pytest
import torch

from cuteforge import ContractError, RotaryEmbedding, TensorSpec, UnsupportedError, rotary_qk_wrapper, rotary_wrapper
from cuteforge.families.rotary.config import MAX_HEAD_DIM

T, B, L, H, HK, D, HALF, MAX_POS = 12, 2, 6, 4, 2, 64, 16, 100
RANKS = {3: (T,), 4: (B, L)}


def heads(tokens, num_heads=H, d=D, dtype="bfloat16", stride=None, device="cuda"):
    return TensorSpec((*tokens, num_heads, d), dtype, stride, device)


def samples(rank=3, by_position=True, keys=True, dtype="bfloat16", d=D, half=HALF, index="int64", tokens=None):
    """Consistent samples of every operand that such a call has."""
    tokens = RANKS[rank] if tokens is None else tokens
    given = {"x": heads(tokens, d=d, dtype=dtype), "out": heads(tokens, d=d, dtype=dtype)}
    if keys:
        given |= {name: heads(tokens, HK, d, dtype) for name in ("k", "k_out")}
    if by_position:
        given |= {name: TensorSpec((MAX_POS, half), "float32") for name in ("cos", "sin")}
        return given | {"positions": TensorSpec(tokens, index)}
    return given | {"freqs_cis": TensorSpec((*tokens, half, 2), "float32")}


def make(given, interleaved=True):
    table = (given["cos"], given["sin"]) if "cos" in given else given["freqs_cis"]
    keys = {name: given[name] for name in ("k", "k_out") if name in given}
    return RotaryEmbedding(given["x"], table, given["out"], given.get("positions"), **keys, interleaved=interleaved)


def refuses(name, error=ContractError, base=None, **replaced):
    with pytest.raises(error, match=rf"^{name}\b.*wanted .*, got |^{name}\b.*serves .*, got "):
        make({**(base or samples()), **replaced}).check_support()


tokens_of = pytest.mark.parametrize("rank", RANKS)
way = pytest.mark.parametrize("by_position", [True, False], ids=["positions", "freqs_cis"])

# (case, argument named, its sample); packed, with positions and keys.
BAD_OPERANDS = (
    ("two dims", "x", TensorSpec((T, D), "bfloat16")),
    ("five dims", "x", TensorSpec((1, 1, T, H, D), "bfloat16")),
    ("integers", "x", heads((T,), dtype="int32")),
    ("fp64", "x", heads((T,), dtype="float64")),
    ("fp8", "x", heads((T,), dtype="float8_e4m3fn")),
    ("columns strided", "x", heads((T,), stride=(2 * H * D, 2 * D, 2))),
    ("heads misaligned", "x", heads((T,), stride=(H * (D + 1), D + 1, 1))),
    ("tokens misaligned", "x", heads((T,), stride=(H * D + 4, D, 1))),
    ("negative stride", "x", heads((T,), stride=(-H * D, D, 1))),
    ("on the CPU", "x", heads((T,), device="cpu")),
    ("other dtype", "out", heads((T,), dtype="float16")),
    ("fewer tokens", "out", heads((T - 1,))),
    ("other heads", "out", heads((T,), HK)),
    ("narrower", "out", heads((T,), d=D - 8)),
    ("dense", "out", heads((B, L))),
    ("columns strided", "out", heads((T,), stride=(2 * H * D, 2 * D, 2))),
    ("heads misaligned", "out", heads((T,), stride=(H * (D + 1), D + 1, 1))),
    ("one token repeated", "out", heads((T,), stride=(0, D, 1))),
    ("heads overlap", "out", heads((T,), stride=(H * D, D // 2, 1))),
    ("on the CPU", "out", heads((T,), device="cpu")),
    ("other dtype", "k", heads((T,), HK, dtype="float32")),
    ("fewer tokens", "k", heads((T - 1,), HK)),
    ("other head dim", "k", heads((T,), HK, 2 * D)),
    ("dense", "k", heads((B, L), HK)),
    ("heads misaligned", "k", heads((T,), HK, stride=(HK * (D + 1), D + 1, 1))),
    ("on the CPU", "k", heads((T,), HK, device="cpu")),
    ("heads of x", "k_out", heads((T,), H)),
    ("other dtype", "k_out", heads((T,), HK, dtype="float16")),
    ("one head repeated", "k_out", heads((T,), HK, stride=(D, 0, 1))),
    ("bf16", "cos", TensorSpec((MAX_POS, HALF), "bfloat16")),
    ("fp16", "cos", TensorSpec((MAX_POS, HALF), "float16")),
    ("fp64", "cos", TensorSpec((MAX_POS, HALF), "float64")),
    ("by token", "cos", TensorSpec((T, HALF, 2), "float32")),
    ("columns strided", "cos", TensorSpec((MAX_POS, HALF), "float32", (2 * HALF, 2))),
    ("rows misaligned", "cos", TensorSpec((MAX_POS, HALF), "float32", (HALF + 1, 1))),
    ("on the CPU", "cos", TensorSpec((MAX_POS, HALF), "float32", device="cpu")),
    ("bf16", "sin", TensorSpec((MAX_POS, HALF), "bfloat16")),
    ("fewer positions", "sin", TensorSpec((MAX_POS - 1, HALF), "float32")),
    ("narrower", "sin", TensorSpec((MAX_POS, HALF - 1), "float32")),
    ("rows misaligned", "sin", TensorSpec((MAX_POS, HALF), "float32", (HALF + 1, 1))),
    ("on the CPU", "sin", TensorSpec((MAX_POS, HALF), "float32", device="cpu")),
    ("fp32", "positions", TensorSpec((T,), "float32")),
    ("int16", "positions", TensorSpec((T,), "int16")),
    ("fewer tokens", "positions", TensorSpec((T - 1,), "int64")),
    ("two dims", "positions", TensorSpec((1, T), "int64")),
    ("strided", "positions", TensorSpec((T,), "int64", (2,))),
    ("on the CPU", "positions", TensorSpec((T,), "int64", device="cpu")),
)  # fmt: skip
# The same for a table by token.
BAD_FREQS_CIS = (
    ("bf16", TensorSpec((T, HALF, 2), "bfloat16")),
    ("fp64", TensorSpec((T, HALF, 2), "float64")),
    ("complex", TensorSpec((T, HALF), "complex64")),
    ("two dims", TensorSpec((T, 2 * HALF), "float32")),
    ("no pairs", TensorSpec((T, HALF, 3), "float32")),
    ("fewer tokens", TensorSpec((T - 1, HALF, 2), "float32")),
    ("dense", TensorSpec((B, L, HALF, 2), "float32")),
    ("cos and sin apart", TensorSpec((T, HALF, 2), "float32", (2 * HALF, 1, HALF))),
    ("rows misaligned", TensorSpec((T, HALF, 2), "float32", (2 * HALF + 1, 2, 1))),
    ("on the CPU", TensorSpec((T, HALF, 2), "float32", device="cpu")),
)


@pytest.mark.parametrize(("case", "name", "sample"), BAD_OPERANDS, ids=[f"{n}-{c}" for c, n, _ in BAD_OPERANDS])
def test_bad_operand_is_refused_by_name(case, name, sample):
    refuses(name, **{name: sample})


@pytest.mark.parametrize(("case", "sample"), BAD_FREQS_CIS, ids=[c for c, _ in BAD_FREQS_CIS])
def test_bad_table_by_token_is_refused_by_name(case, sample):
    refuses("freqs_cis", base=samples(by_position=False), freqs_cis=sample)


@pytest.mark.parametrize(
    ("name", "positions"),
    [("fewer tokens", (B, L - 1)), ("other batch", (B + 1, L)), ("packed", (B * L,))],
)
def test_bad_positions_of_dense_tokens_are_refused_by_name(name, positions):
    refuses("positions", base=samples(rank=4), positions=TensorSpec(positions, "int32"))


@pytest.mark.parametrize("half", [0, D // 2 + 1])
@way
def test_rotary_dim_has_to_fit_the_head(half, by_position):
    refuses("cos" if by_position else "freqs_cis", base=samples(by_position=by_position, half=half))


@pytest.mark.parametrize("name", ["x", "out", "cos", "sin", "positions"])
@pytest.mark.parametrize("junk", [None, [1, 2, 3]], ids=["none", "list"])
def test_missing_or_foreign_sample_is_refused_by_name(name, junk):
    refuses(name, **{name: junk})


def test_missing_or_foreign_table_by_token_is_refused_by_name():
    for junk in (None, "table"):
        refuses("freqs_cis", base=samples(by_position=False), freqs_cis=junk)


@pytest.mark.parametrize("name", ["k", "k_out"])
def test_k_and_k_out_come_together(name):
    given = samples()
    del given[name]
    with pytest.raises(ContractError, match=rf"^{name}\b.*got None"):
        make(given)


def test_positions_go_with_cos_and_sin_only():
    given = samples()
    with pytest.raises(ContractError, match=r"^positions\b.*got None"):
        make({**given, "positions": None})
    by_token = samples(by_position=False)
    with pytest.raises(ContractError, match=r"^positions\b.*None"):
        make({**by_token, "positions": given["positions"]})


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_table_is_one_tensor_or_two(length):
    given = samples()
    with pytest.raises(ContractError, match=r"^table\b"):
        RotaryEmbedding(given["x"], (given["cos"],) * length, given["out"], given["positions"])


def test_samples_on_two_gpus_are_refused_by_name():
    refuses("out", x=heads((T,), device="cuda:0"), out=heads((T,), device="cuda:1"))
    refuses("positions", x=heads((T,), device="cuda:0"), positions=TensorSpec((T,), "int64", device="cuda:1"))


def test_a_wider_head_than_the_kernel_serves_is_unsupported():
    refuses("x", UnsupportedError, base=samples(d=MAX_HEAD_DIM + 8))
    assert issubclass(UnsupportedError, RuntimeError), "callers guard kernel calls with `except RuntimeError`"


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("d", "half"),
    [
        (2, 1),
        (3, 1),
        (8, 3),
        (8, 4),
        (64, 32),
        (65, 32),
        (80, 40),
        (96, 16),
        (128, 64),
        (192, 32),
        (256, 128),
        (256, 1),
    ],
)
@way
def test_every_width_pairing_and_dtype_is_supported(d, half, dtype, interleaved, by_position):
    given = samples(d=d, half=half, dtype=dtype, by_position=by_position)
    assert make(given, interleaved).check_support() is True


@tokens_of
@way
@pytest.mark.parametrize("keys", [True, False], ids=["qk", "x"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_every_kind_of_call_is_supported(rank, by_position, keys, index):
    assert make(samples(rank, by_position, keys, index=index)).check_support() is True


@pytest.mark.parametrize("tokens", [(0,), (2**31 + 8,), (0, 5), (5, 0), (1, 1), (70_000, 1), (1, 2**31)])
@way
def test_sizes_are_no_limit(tokens, by_position):
    given = samples(rank=len(tokens) + 2, tokens=tokens, by_position=by_position)
    assert make(given).check_support() is True


def test_an_empty_table_is_supported():
    """Every position is outside then."""
    empty = TensorSpec((0, HALF), "float32")
    assert make({**samples(), "cos": empty, "sin": empty}).check_support() is True


STRIDED = {
    "slices of a fused buffer": (heads((T,), stride=(999 * 8, D, 1)), heads((T,), HK, stride=(999 * 8, D, 1))),
    "wider heads": (heads((T,), stride=(H * 2 * D, 2 * D, 1)), heads((T,), HK, stride=(HK * 72, 72, 1))),
    "head-major": (heads((T,), stride=(D, T * D, 1)), heads((T,), HK, stride=(D, T * D, 1))),
    "a size-1 dim with any stride": (heads((T,), 1, stride=(D, 3, 1)), heads((T,), 1, stride=(D, 0, 1))),
    "tokens far apart": (heads((T,), stride=(2**32, D, 1)), heads((T,), HK, stride=(2**33 + 8, D, 1))),
}  # fmt: skip


@pytest.mark.parametrize("layout", STRIDED)
def test_strides_are_accepted(layout):
    x, k = STRIDED[layout]
    assert make({**samples(), "x": x, "out": x, "k": k, "k_out": k}).check_support() is True


def test_inputs_may_repeat_and_tables_may_be_slices():
    """One token broadcast as input; cos and sin as halves of one cache; one table row for every token and batch."""
    cache = TensorSpec((MAX_POS, HALF), "float32", (2 * HALF, 1))
    repeated = heads((T,), stride=(0, D, 1))
    assert make({**samples(), "x": repeated, "cos": cache, "sin": cache}).check_support() is True
    by_token = samples(rank=4, by_position=False)
    by_token["freqs_cis"] = TensorSpec((B, L, HALF, 2), "float32", (0, 2 * HALF, 2, 1))
    assert make(by_token).check_support() is True


@tokens_of
@way
def test_meta_tensors_are_samples(rank, by_position):
    was_initialized = torch.cuda.is_initialized()  # by a test before, where there is a GPU
    given = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in samples(rank, by_position).items()
    }
    assert make(given).check_support() is True
    assert torch.cuda.is_initialized() == was_initialized


def test_executing_an_op_nobody_compiled_names_compile():
    op = make(samples(keys=False))
    real = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in op.samples.items()}
    with pytest.raises(RuntimeError, match=r"compile\(\)"):
        op.execute(real["x"], (real["cos"], real["sin"]), real["out"], real["positions"])


def cpu(name):
    spec = {**samples(), **samples(by_position=False)}[name]
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))


def test_wrapper_takes_one_kind_of_table():
    x, by_token, cos, sin, positions = map(cpu, ("x", "freqs_cis", "cos", "sin", "positions"))
    for name, arguments in (
        ("freqs_cis", {}),
        ("freqs_cis", {"freqs_cis": by_token, "cos": cos, "sin": sin, "positions": positions}),
        ("sin", {"cos": cos, "positions": positions}),
        ("cos", {"sin": sin, "positions": positions}),
        ("positions", {"cos": cos, "sin": sin}),
        ("positions", {"freqs_cis": by_token, "positions": positions}),
    ):
        with pytest.raises(ContractError, match=rf"^{name}\b.*wanted "):
            rotary_wrapper(x, **arguments)
        with pytest.raises(ContractError, match=rf"^{name}\b.*wanted "):
            rotary_qk_wrapper(x, cpu("k"), **arguments)


@pytest.mark.parametrize(
    "junk", [None, [1.0], torch.zeros(3), torch.zeros(2, 2, 2, 2, 2)], ids=["none", "list", "1d", "5d"]
)
def test_wrappers_refuse_what_is_no_tensor_of_heads_by_name(junk):
    by_token = cpu("freqs_cis")
    with pytest.raises(ContractError, match=r"^x\b"):
        rotary_wrapper(junk, by_token)
    with pytest.raises(ContractError, match=r"^q\b"):
        rotary_qk_wrapper(junk, cpu("k"), by_token)
    with pytest.raises(ContractError, match=r"^k\b"):
        rotary_qk_wrapper(cpu("x"), junk, by_token)


def test_wrappers_refuse_cpu_operands_by_the_name_that_the_caller_gave():
    """In the qk wrapper the first operand is q, not x."""
    with pytest.raises(ContractError, match=r"(?i)^x\b.*cuda.*cpu"):
        rotary_wrapper(cpu("x"), cpu("freqs_cis"))
    with pytest.raises(ContractError, match=r"(?i)^q\b.*cuda.*cpu"):
        rotary_qk_wrapper(cpu("x"), cpu("k"), cpu("freqs_cis"))

"""Every line of the compressor's check_support, violated once. Metadata only: no GPU, nothing compiled."""

import pytest
import torch

from cuteforge import ContractError, CSACompressorBackward, CSACompressorForward, TensorSpec, UnsupportedError

T, D, RATIO, COFF, B, N = 64, 128, 4, 2, 3, 16
INPUTS = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")


def matrix(rows, cols, dtype="bfloat16", pitch=None, device="cuda"):
    return TensorSpec((rows, cols), dtype, None if pitch is None else (pitch, 1), device)


def samples(t=T, d=D, ratio=RATIO, coff=COFF, b=B, n=N, dtype="bfloat16"):
    """Consistent samples of every operand of both directions."""
    tokens, pooled, table = matrix(t, coff * d, dtype), matrix(n, d, dtype), TensorSpec((b + 1,), "int32")
    ape = matrix(ratio, coff * d, "float32")
    return {
        "kv": tokens,
        "score": tokens,
        "ape": ape,
        "cu_seqlens": table,
        "cu_seqlens_comp": table,
        "out": pooled,
        "grad_out": pooled,
        "grad_kv": tokens,
        "grad_score": tokens,
        "grad_ape": ape,
    }


def forward(given, **config):
    return CSACompressorForward(*(given[name] for name in (*INPUTS, "out")), **config)


def backward(given, **config):
    names = (*INPUTS, "grad_out", "grad_kv", "grad_score", "grad_ape")
    return CSACompressorBackward(*(given[name] for name in names), **config)


OPS = pytest.mark.parametrize("make", [forward, backward])

# (case, argument named, its sample). The argument exists in both directions.
BAD_INPUTS = (
    ("width not coff*d of an even split", "kv", matrix(T, COFF * D + 1)),
    ("one dim", "kv", TensorSpec((T,), "bfloat16")),
    ("three dims", "kv", TensorSpec((1, T, COFF * D), "bfloat16")),
    ("dtype no float", "kv", matrix(T, COFF * D, "int32")),
    ("fp64", "kv", matrix(T, COFF * D, "float64")),
    ("fp8", "kv", matrix(T, COFF * D, "float8_e4m3fn")),
    ("columns strided", "kv", TensorSpec((T, COFF * D), "bfloat16", (2 * COFF * D, 2))),
    ("rows misaligned", "kv", matrix(T, COFF * D, pitch=COFF * D + 1)),
    ("negative stride", "kv", TensorSpec((T, COFF * D), "bfloat16", (-COFF * D, 1))),
    ("on the CPU", "kv", matrix(T, COFF * D, device="cpu")),
    ("other dtype", "score", matrix(T, COFF * D, "float16")),
    ("fewer tokens", "score", matrix(T - 1, COFF * D)),
    ("narrower", "score", matrix(T, D)),
    ("rows misaligned", "score", matrix(T, COFF * D, pitch=COFF * D + 4)),
    ("on the CPU", "score", matrix(T, COFF * D, device="cpu")),
    ("rows not ratio", "ape", matrix(RATIO + 1, COFF * D, "float32")),
    ("narrower", "ape", matrix(RATIO, D, "float32")),
    ("bf16", "ape", matrix(RATIO, COFF * D, "bfloat16")),
    ("fp16", "ape", matrix(RATIO, COFF * D, "float16")),
    ("fp64", "ape", matrix(RATIO, COFF * D, "float64")),
    ("columns strided", "ape", TensorSpec((RATIO, COFF * D), "float32", (2 * COFF * D, 2))),
    ("int64", "cu_seqlens", TensorSpec((B + 1,), "int64")),
    ("two dims", "cu_seqlens", TensorSpec((B + 1, 1), "int32")),
    ("empty", "cu_seqlens", TensorSpec((0,), "int32")),
    ("strided", "cu_seqlens", TensorSpec((B + 1,), "int32", (2,))),
    ("int64", "cu_seqlens_comp", TensorSpec((B + 1,), "int64")),
    ("other length", "cu_seqlens_comp", TensorSpec((B,), "int32")),
    ("on the CPU", "cu_seqlens_comp", TensorSpec((B + 1,), "int32", device="cpu")),
)
BAD_RESULTS = (
    (forward, "width", "out", matrix(N, D + 1)),
    (forward, "dtype", "out", matrix(N, D, "float32")),
    (forward, "overlaps itself", "out", matrix(N, D, pitch=D // 2)),
    (forward, "one row repeated", "out", matrix(N, D, pitch=0)),
    (forward, "rows misaligned", "out", matrix(N, D, pitch=D + 1)),
    (forward, "on the CPU", "out", matrix(N, D, device="cpu")),
    (backward, "width", "grad_out", matrix(N, COFF * D)),
    (backward, "dtype", "grad_out", matrix(N, D, "float32")),
    (backward, "fewer tokens", "grad_kv", matrix(T - 1, COFF * D)),
    (backward, "dtype", "grad_kv", matrix(T, COFF * D, "float32")),
    (backward, "overlaps itself", "grad_kv", matrix(T, COFF * D, pitch=0)),
    (backward, "width", "grad_score", matrix(T, D)),
    (backward, "rows misaligned", "grad_score", matrix(T, COFF * D, pitch=COFF * D + 1)),
    (backward, "dtype", "grad_ape", matrix(RATIO, COFF * D)),
    (backward, "rows", "grad_ape", matrix(RATIO - 1, COFF * D, "float32")),
    (backward, "overlaps itself", "grad_ape", matrix(RATIO, COFF * D, "float32", pitch=0)),
)


def refuses(make, name, error=ContractError, config=None, **replaced):
    with pytest.raises(error, match=rf"^{name}\b"):
        make({**samples(), **replaced}, **(config or {})).check_support()


@OPS
@pytest.mark.parametrize(("case", "name", "sample"), BAD_INPUTS, ids=[f"{n}-{c}" for c, n, _ in BAD_INPUTS])
def test_bad_input_is_refused_by_name(make, case, name, sample):
    refuses(make, name, **{name: sample})


@pytest.mark.parametrize(
    ("make", "case", "name", "sample"), BAD_RESULTS, ids=[f"{n}-{c}" for _, c, n, _ in BAD_RESULTS]
)
def test_bad_result_is_refused_by_name(make, case, name, sample):
    refuses(make, name, **{name: sample})


@OPS
@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        ("ratio", ContractError, 0),
        ("ratio", ContractError, -4),
        ("ratio", UnsupportedError, 257),
        ("ratio", ContractError, 4.0),
        ("ratio", ContractError, None),
        ("coff", ContractError, 0),
        ("coff", ContractError, 3),
        ("coff", ContractError, "2"),
    ],
)
def test_bad_configuration_is_refused_by_name(make, name, error, value):
    refuses(make, name, error, {name: value})


@OPS
@pytest.mark.parametrize("name", INPUTS)
def test_missing_or_foreign_sample_is_refused_by_name(make, name):
    refuses(make, name, **{name: None})
    refuses(make, name, **{name: [1, 2, 3]})


@OPS
def test_samples_on_two_gpus_are_refused_by_name(make):
    kv, score = matrix(T, COFF * D, device="cuda:0"), matrix(T, COFF * D, device="cuda:1")
    refuses(make, "score", kv=kv, score=score)


@OPS
def test_rows_need_a_block_of_tokens(make):
    """A padding row pools tokens 0 .. ratio - 1; without rows any number of tokens will do."""
    with pytest.raises(ContractError, match=r"^kv\b.*ratio.*4"):
        make(samples(t=RATIO - 1, n=1)).check_support()
    assert make(samples(t=RATIO - 1, n=0)).check_support() is True


def test_unsupported_is_a_runtime_error():
    """Callers guard kernel calls with `except RuntimeError`."""
    with pytest.raises(RuntimeError, match="257"):
        forward(samples(ratio=257, t=600), ratio=257).check_support()


@OPS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("coff", [1, 2])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8, 16, 17, 64, 100, 128, 255, 256])
def test_every_ratio_coff_and_dtype_is_supported(make, ratio, coff, dtype):
    given = samples(ratio=ratio, coff=coff, dtype=dtype, t=2 * ratio, n=2)
    assert make(given, ratio=ratio, coff=coff).check_support() is True


@OPS
@pytest.mark.parametrize("d", [1, 2, 3, 63, 65, 96, 128, 512, 576, 8192])
def test_every_head_dim_is_supported(make, d):
    assert make(samples(d=d)).check_support() is True


@OPS
@pytest.mark.parametrize(
    "sizes", [{"t": 0, "n": 0, "b": 0}, {"t": 0, "n": 0}, {"b": 100_000}, {"t": 2**33, "n": 2**31}]
)
def test_sizes_are_no_limit(make, sizes):
    assert make(samples(**sizes)).check_support() is True


@OPS
def test_row_pitches_are_accepted(make):
    given = samples()
    for name in ("kv", "score", "grad_kv", "grad_score"):
        given[name] = matrix(T, COFF * D, pitch=COFF * D + 8)
    given["out"] = given["grad_out"] = matrix(N, D, pitch=3 * D)
    given["ape"] = matrix(RATIO, COFF * D, "float32", pitch=COFF * D + 1)
    assert make(given).check_support() is True


@OPS
def test_meta_tensors_are_samples(make):
    was_initialized = torch.cuda.is_initialized()  # by a test before, where there is a GPU
    given = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in samples().items()
    }
    assert make(given).check_support() is True
    assert torch.cuda.is_initialized() == was_initialized


def test_executing_an_op_nobody_compiled_names_compile():
    op = forward(samples())
    operands = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in op.samples.values()]
    with pytest.raises(RuntimeError, match=r"compile\(\)"):
        op.execute(*operands)

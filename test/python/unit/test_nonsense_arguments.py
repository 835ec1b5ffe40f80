"""Nonsense for one argument of a call ends in an error that names the argument, before anything is launched. No GPU:
entries are stubs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cuteforge as cf
from cuteforge.op.tensor_spec import TensorSpec
from helpers.stub_gpu import StubStream, stub_streams, stub_wrappers

BF16, D = torch.bfloat16, 64


@pytest.fixture
def launches(monkeypatch):
    stub_streams(monkeypatch)
    yield from stub_wrappers(monkeypatch)


def floats(*shape):
    return torch.zeros(*shape, dtype=BF16)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


NONSENSE = {
    "None": None,
    "int": 3,
    "0": 0,
    "negative": -1,
    "past 2**31": 2**31,
    "past 2**63": 2**70,
    "past floats": 10**400,
    "float": 1.5,
    "1e39": 1e39,
    "nan": float("nan"),
    "complex": 1j,
    "text": "side",
    "bytes": b"x",
    "list": [1],
    "dict": {},
    "object": object(),
    "class": int,
    "module": torch,
    "ndarray": np.zeros((2, 3), dtype=np.float32),
    "number of numpy": np.int64(3),
    "TensorSpec": TensorSpec((2, 3), "bfloat16"),
    "stream": StubStream(),
    "flag": torch.tensor(True),
    "tensor": torch.zeros(7, 5, 3, 2, 1),
}


def decode():
    return {
        "q": floats(2, 3, 8, D),
        "k": floats(2, 9, 2, D),
        "v": floats(2, 9, 2, D),
        "seqlens_k": ints(2),
        "mask": torch.ones(2, 9, dtype=torch.bool),
        "sinks": torch.zeros(8),
        "causal": False,
        "softmax_scale": 0.5,
        "window": None,
        "softcap": None,
        "num_splits": None,
        "return_lse": True,
        "out": None,
        "stream": None,
    }


def packed():
    return {
        "q": floats(5, 8, D),
        "k": floats(9, 2, D),
        "v": floats(9, 2, D),
        "cu_seqlens_q": ints(3),
        "cu_seqlens_k": ints(3),
        "causal": True,
        "softmax_scale": None,
        "window": (4, None),
        "softcap": 3.0,
        "return_lse": False,
        "out": floats(5, 8, D),
        "stream": None,
    }


def paged(*tokens, **more):
    return {
        "q": floats(*tokens, 8, D),
        "k_cache": floats(9, 16, 2, D),
        "v_cache": floats(9, 16, 2, D),
        "page_table": ints(3, 4),
        "seqlens_k": ints(2),
        "kv_indptr": None,
        "page_table_rows": ints(2),
        "causal": False,
        "window": None,
        "return_lse": False,
        "stream": None,
        **more,
    }


def thin(**tensors):
    return {**tensors, "mask": None, "is_causal": False, "scale": None}


def dense_of_thin():
    return thin(q=floats(2, 3, 8, D), k=floats(2, 9, 2, D), v=floats(2, 9, 2, D))


def pages_of_thin(*tokens, **more):
    pools = {"k_cache": floats(9, 16, 2, D), "v_cache": floats(9, 16, 2, D)}
    return thin(q=floats(*tokens, 8, D), **pools, page_table=ints(2, 4), seqlens_k=ints(2), **more)


def merge():
    return {
        "o_a": floats(5, 4, D),
        "lse_a": torch.zeros(4, 5),
        "o_b": floats(5, 4, D),
        "lse_b": torch.zeros(4, 5),
        "stream": None,
    }


def rotary():
    tables = {"cos": torch.zeros(128, D // 2), "sin": torch.zeros(128, D // 2), "positions": ints(5)}
    return {
        "x": floats(5, 4, D),
        "freqs_cis": None,
        **tables,
        "interleaved": True,
        "inverse": False,
        "out": None,
        "stream": None,
    }


def rotary_qk():
    tables = {"freqs_cis": torch.zeros(5, D // 2, 2), "cos": None, "sin": None, "positions": None}
    heads = {"q": floats(5, 4, D), "k": floats(5, 2, D), "q_out": floats(5, 4, D), "k_out": None}
    return {**heads, **tables, "interleaved": False, "inverse": True, "stream": None}


def pooled(**more):
    return {
        "kv": floats(24, 2 * D),
        "score": floats(24, 2 * D),
        "ape": torch.zeros(4, 2 * D),
        "cu_seqlens": ints(3),
        "cu_seqlens_comp": ints(3),
        "ratio": 4,
        "head_dim": D,
        "coff": 2,
        "stream": None,
        **more,
    }


CALLS = {
    "gqa_decode_wrapper": decode,
    "gqa_prefill_wrapper": packed,
    "paged_gqa_decode_wrapper": lambda: paged(2, new_k=floats(2, 2, D), new_v=floats(2, 2, D)),
    "paged_gqa_prefill_wrapper": lambda: paged(5, cu_seqlens_q=ints(3)),
    "attn_decode": dense_of_thin,
    "attn_prefill": dense_of_thin,
    "attn_paged_decode": lambda: pages_of_thin(2),
    "attn_paged_prefill": lambda: pages_of_thin(5, cu_seqlens_q=ints(3)),
    "merge_state": merge,
    "rotary_wrapper": rotary,
    "rotary_qk_wrapper": rotary_qk,
    "rotary_emb": lambda: {"x": floats(5, 4, D), "freqs_cis": torch.zeros(5, D // 2, 2)},
    "csa_compressor_forward_wrapper": lambda: pooled(total_comp=5),
    "csa_compressor_backward_wrapper": lambda: pooled(grad_out=floats(5, D), deterministic=True),
}
# What arguments are called where they are looked at.
ALIASES = {"is_causal": "causal", "scale": "softmax_scale"}
# What else contradicts nonsense that is a number or a tensor like another.
CONTRADICTED = {
    "ratio": "ape",
    "head_dim": "kv",
    "cos": "freqs_cis",
    "sin": "freqs_cis",
    "page_table_rows": "page_table",
}
ARGUMENTS = [(call, name) for call, draw in CALLS.items() for name in draw()]


def outcome(call, arguments, name, value, launches):
    """What is wrong with the end of a call with nonsense, or None."""
    try:
        call(**{**arguments, name: value})
    except (cf.ContractError, cf.UnsupportedError) as error:
        if launches:
            return "something was launched"
        # another tensor may contradict an argument that comes before it
        if isinstance(value, torch.Tensor) or str(error).split(":")[0] in (
            name,
            ALIASES.get(name),
            CONTRADICTED.get(name),
        ):
            return None
        return f"{error} does not name it"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("served", [False, True], ids=["first call", "another call"])
@pytest.mark.parametrize(("call", "name"), ARGUMENTS)
def test_nonsense_is_refused_by_name(call, name, served, launches):
    """Or served, where it makes sense after all."""
    wrapper, draw = getattr(cf, call), CALLS[call]
    wrong = {}
    for kind, value in NONSENSE.items():
        if served:
            wrapper(**draw())
        launches.clear()
        if problem := outcome(wrapper, draw(), name, value, launches):
            wrong[kind] = problem
    assert not wrong


FLAGS = [
    (call, name)
    for call, name in ARGUMENTS
    if name in ("causal", "is_causal", "return_lse", "interleaved", "inverse", "deterministic")
]


@pytest.mark.parametrize(("call", "name"), FLAGS)
def test_a_flag_is_a_bool(call, name, launches):
    """Also where a call with an equal number would be served from memory: 0 and 1 are raw streams."""
    wrapper, draw = getattr(cf, call), CALLS[call]
    for value in (True, False):
        wrapper(**{**draw(), name: value})
    wrapper(**{**draw(), name: np.True_})
    launches.clear()
    for value in (None, 0, 1, 1.0, "no", [True], StubStream(), torch.tensor(True), torch.ones(2)):
        with pytest.raises(cf.ContractError, match=rf"^{ALIASES.get(name, name)}: wanted True or False, got"):
            wrapper(**{**draw(), name: value})
    assert not launches


def test_a_stream_in_the_place_of_a_flag_is_told_where_it_goes(launches):
    """The tenth argument is a stream in other libraries."""
    *tensors, ratio, head_dim, coff = [
        pooled(grad_out=floats(5, D))[name]
        for name in (
            "kv",
            "score",
            "ape",
            "cu_seqlens",
            "cu_seqlens_comp",
            "grad_out",
            "ratio",
            "head_dim",
            "coff",
        )
    ]
    cf.csa_compressor_backward_wrapper(*tensors, ratio, head_dim, coff)
    launches.clear()
    with pytest.raises(cf.ContractError, match=r"^deterministic: .* StubStream \(a stream goes to stream=\)"):
        cf.csa_compressor_backward_wrapper(*tensors, ratio, head_dim, coff, StubStream())
    for handle in (0, 1, 94_000_000):
        with pytest.raises(cf.ContractError, match=rf"^deterministic: wanted True or False, got {handle}$"):
            cf.csa_compressor_backward_wrapper(*tensors, ratio, head_dim, coff, handle)
    assert not launches


# Classes: samples and options, and operands of execute and bind.

INT32, FP32 = "int32", "float32"


def spec(*shape, dtype="bfloat16"):
    return TensorSpec(shape, dtype)


CLASSES = {
    "GQADecode": lambda: {
        "q": spec(2, 3, 8, D),
        "k": spec(2, 9, 2, D),
        "v": spec(2, 9, 2, D),
        "out": spec(2, 3, 8, D),
        "seqlens_k": spec(2, dtype=INT32),
        "mask": spec(2, 9, dtype="bool"),
        "lse": spec(2, 8, 3, dtype=FP32),
        "sinks": spec(8, dtype=FP32),
        "causal": True,
        "softmax_scale": 1.0,
        "window": (3, 3),
        "softcap": 2.0,
        "num_splits": 2,
    },
    "GQAPrefill": lambda: {
        "q": spec(5, 8, D),
        "k": spec(9, 2, D),
        "v": spec(9, 2, D),
        "out": spec(5, 8, D),
        "cu_seqlens_q": spec(3, dtype=INT32),
        "cu_seqlens_k": spec(3, dtype=INT32),
        "causal": True,
        "softmax_scale": None,
        "window": None,
        "softcap": None,
    },
    "PagedGQADecode": lambda: {
        "q": spec(2, 8, D),
        "k_cache": spec(9, 16, 2, D),
        "v_cache": spec(9, 16, 2, D),
        "page_table": spec(2, 4, dtype=INT32),
        "out": spec(2, 8, D),
        "seqlens_k": spec(2, dtype=INT32),
        "new_k": spec(2, 2, D),
        "new_v": spec(2, 2, D),
    },
    "PagedGQAPrefill": lambda: {
        "q": spec(5, 8, D),
        "k_cache": spec(9, 16, 2, D),
        "v_cache": spec(9, 16, 2, D),
        "page_table": spec(2, 4, dtype=INT32),
        "cu_seqlens_q": spec(3, dtype=INT32),
        "out": spec(5, 8, D),
        "kv_indptr": spec(3, dtype=INT32),
    },
    "MergeState": lambda: {
        "o_a": spec(5, 4, D),
        "lse_a": spec(4, 5, dtype=FP32),
        "o_b": spec(5, 4, D),
        "lse_b": spec(4, 5, dtype=FP32),
        "out": spec(5, 4, D),
        "lse": spec(4, 5, dtype=FP32),
    },
    "RotaryEmbedding": lambda: {
        "x": spec(5, 4, D),
        "table": spec(5, D // 2, 2, dtype=FP32),
        "out": spec(5, 4, D),
        "k": spec(5, 2, D),
        "k_out": spec(5, 2, D),
        "interleaved": True,
    },
    "CSACompressorForward": lambda: {
        "kv": spec(24, 2 * D),
        "score": spec(24, 2 * D),
        "ape": spec(4, 2 * D, dtype=FP32),
        "cu_seqlens": spec(3, dtype=INT32),
        "cu_seqlens_comp": spec(3, dtype=INT32),
        "out": spec(5, D),
        "ratio": 4,
        "coff": 2,
    },
    "CSACompressorBackward": lambda: {
        "kv": spec(24, 2 * D),
        "score": spec(24, 2 * D),
        "ape": spec(4, 2 * D, dtype=FP32),
        "cu_seqlens": spec(3, dtype=INT32),
        "cu_seqlens_comp": spec(3, dtype=INT32),
        "grad_out": spec(5, D),
        "grad_kv": spec(24, 2 * D),
        "grad_score": spec(24, 2 * D),
        "grad_ape": spec(4, 2 * D, dtype=FP32),
        "ratio": 4,
        "coff": 2,
        "deterministic": False,
    },
}
ALIASES |= {"table": "freqs_cis"}
SAMPLES = [(name, argument) for name, draw in CLASSES.items() for argument in draw()]


@pytest.mark.parametrize(("name", "argument"), SAMPLES)
def test_nonsense_for_a_sample_or_an_option_is_refused_by_name(name, argument):
    def make(**arguments):
        getattr(cf, name)(**arguments).check_support()

    wrong = {}
    for kind, value in NONSENSE.items():
        if isinstance(value, TensorSpec):
            continue
        # what is absent may be missed by what it belongs to
        if value is None and argument in (
            "new_k",
            "new_v",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "k",
            "k_out",
            "seqlens_k",
            "kv_indptr",
            "table",
        ):
            continue
        if problem := outcome(make, CLASSES[name](), argument, value, []):
            wrong[kind] = problem
    assert not wrong


def tensor_of(x):
    return torch.zeros(x.shape, dtype=getattr(torch, x.dtype))


@pytest.mark.parametrize("entry", ["execute", "bind"])
@pytest.mark.parametrize("name", CLASSES)
def test_nonsense_for_an_operand_is_refused_by_name(name, entry, launches):
    arguments = CLASSES[name]()
    op = getattr(cf, name)(**arguments).compile()
    operands = {argument: tensor_of(x) for argument, x in arguments.items() if isinstance(x, TensorSpec)}
    if getattr(op, "_splits", False):
        operands["workspace"] = torch.zeros(op.workspace_bytes_on(0), dtype=torch.uint8)
    wrong = {}
    getattr(op, entry)(**operands)
    for argument in operands:
        for kind, value in NONSENSE.items():
            launches.clear()
            if value is None and (argument in ("k", "k_out", "table")):
                continue
            if problem := outcome(getattr(op, entry), operands, argument, value, launches):
                wrong[argument, kind] = problem
    assert not wrong


def test_a_stream_in_the_place_of_a_workspace_is_told_where_it_goes(launches):
    """Whether the op takes a workspace or not."""
    samples = CLASSES["CSACompressorBackward"]()
    operands = [tensor_of(x) for x in samples.values() if isinstance(x, TensorSpec)]
    match = r"^workspace: .* \(a (raw )?stream goes to stream=\)$"
    for deterministic in (True, False):
        op = cf.CSACompressorBackward(**{**samples, "deterministic": deterministic}).compile()
        for stream in (StubStream(), 94_000_000):
            with pytest.raises(cf.ContractError, match=match):
                op.execute(*operands, stream)
            with pytest.raises(cf.ContractError, match=match):
                op.bind(*operands, workspace=stream)
    for splits in (1, 2):
        samples = {**CLASSES["GQADecode"](), "num_splits": splits}
        op = cf.GQADecode(**samples).compile()
        operands = {name: tensor_of(x) for name, x in samples.items() if isinstance(x, TensorSpec)}
        with pytest.raises(cf.ContractError, match=match):
            op.execute(**operands, workspace=StubStream())
    assert not launches


# Numbers of numpy are numbers.


def test_numbers_of_numpy_are_taken(launches):
    cf.gqa_decode_wrapper(
        **{
            **decode(),
            "num_splits": np.int64(2),
            "softmax_scale": np.float32(0.5),
            "softcap": np.float64(2),
            "window": (np.int32(3), None),
        }
    )
    sizes = {"ratio": np.int64(4), "head_dim": np.int32(D), "coff": np.int8(2)}
    cf.csa_compressor_forward_wrapper(**{**pooled(), **sizes}, total_comp=np.int64(5))
    cf.csa_compressor_backward_wrapper(**{**pooled(grad_out=floats(5, D)), **sizes})
    assert len(launches) == 3
    cf.CSACompressorForward(
        **{**CLASSES["CSACompressorForward"](), "ratio": np.int64(4), "coff": np.int64(2)}
    ).check_support()
    assert TensorSpec((np.int64(3), 4), "float32", (np.int32(4), 1)).shape == (3, 4)
    cos, sin = cf.rotary_table(np.int64(5), np.int32(8), base=np.float32(10000))
    assert torch.equal(cos, cf.rotary_table(5, 8)[0]) and torch.equal(sin, cf.rotary_table(5, 8)[1])


# Head dims.


@pytest.mark.parametrize("d", [1, 4, 12, 60, 100, 264, 1024])
def test_a_head_dim_that_is_not_served_is_told_which_are(d, launches):
    """Before a word about how rows lie."""
    wanted = rf"serves D = 8, 16, \.\.\. 256, got D = {d}$"
    for dtype in ("float16", "bfloat16"):
        rows = [TensorSpec((1, n, 2, d), dtype) for n in (1, 9, 9, 1)]
        for op in (cf.GQADecode(*rows), cf.GQAPrefill(*rows)):
            with pytest.raises(cf.UnsupportedError, match=wanted):
                op.check_support()
    pool, table, lengths = TensorSpec((9, 16, 2, d), "float16"), TensorSpec((1, 4), INT32), TensorSpec((1,), INT32)
    q, offsets = TensorSpec((1, 2, d), "float16"), TensorSpec((2,), INT32)
    o, lse = TensorSpec((1, 2, d), "float16"), TensorSpec((2, 1), FP32)
    for op in (
        cf.PagedGQADecode(q, pool, pool, table, q, seqlens_k=lengths),
        cf.PagedGQAPrefill(q, pool, pool, table, offsets, q, seqlens_k=lengths),
        cf.MergeState(o, lse, o, lse, o, lse),
    ):
        with pytest.raises(cf.UnsupportedError, match=wanted):
            op.check_support()
    heads = floats(1, 1, 2, d)
    for wrapper in (cf.gqa_decode_wrapper, cf.gqa_prefill_wrapper, cf.attn_decode):
        with pytest.raises(cf.UnsupportedError, match=wanted):
            wrapper(heads, heads, heads)
    with pytest.raises(cf.UnsupportedError, match=wanted):
        cf.merge_state(heads[0], torch.zeros(2, 1), heads[0], torch.zeros(2, 1))
    assert not launches


def test_a_value_dim_that_is_not_served_is_told_which_are():
    rows = TensorSpec((1, 1, 2, 64), "float16")
    with pytest.raises(cf.UnsupportedError, match=r"^v: the kernel serves Dv = D, and \(192, 128\), got \(64, 60\)"):
        cf.GQADecode(
            rows, rows, TensorSpec((1, 1, 2, 60), "float16"), TensorSpec((1, 1, 2, 60), "float16")
        ).check_support()


# Specs and tables.


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        *(
            ((shape, FP32), "shape")
            for shape in (None, 5, "ab", (1.5,), (None,), ([1],), (True,), (-1,), (2**63,), torch.ones(2))
        ),
        *((((2, 3), FP32, stride), "stride") for stride in (5, "ab", (1.5, 1), (None, 1), (1,), (2**70, 1), (3, 1, 1))),
        *(
            (((2,), FP32, None, device), "device")
            for device in (None, "cuda:x", "cuda:-1", "", "cuda:", "cuda 1", 1.5, object())
        ),
    ],
)
def test_a_spec_that_describes_no_tensor_is_refused_by_name(arguments, name):
    with pytest.raises(cf.ContractError, match=rf"^{name}: wanted"):
        TensorSpec(*arguments)


@pytest.mark.parametrize("name", ["max_pos", "rotary_dim", "base", "device"])
def test_nonsense_for_a_rotary_table_is_refused_by_name(name):
    """A device that torch does not have here is torch's to refuse."""
    arguments = {"max_pos": 5, "rotary_dim": 8, "base": 10000.0, "device": "cpu"}
    kinds = set(NONSENSE) - ({"int", "0", "negative", "past 2**31", "number of numpy"} if name == "device" else set())
    wrong = {
        kind: problem for kind in kinds if (problem := outcome(cf.rotary_table, arguments, name, NONSENSE[kind], []))
    }
    assert not wrong

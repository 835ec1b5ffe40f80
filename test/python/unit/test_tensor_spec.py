"""The validation table: every kind of violation names its operand first, and what is accepted is right."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cuteforge.errors import ContractError
from cuteforge.op.overlap import overlaps_itself
from cuteforge.op.signature import Operand, Signature
from cuteforge.op.tensor_spec import TensorSpec

FLOATS = ("bfloat16", "float16", "float32")
KNOWN = {"ratio": 4, "coff": 2}
POOL = Signature(
    Operand("kv", "T coff*d", FLOATS, align_bytes=16),
    Operand("score", "T coff*d", ("=kv",), align_bytes=16),
    Operand("ape", "ratio coff*d", ("float32",)),
    Operand("cu_seqlens", "B+1", ("int32",)),
    Operand("cu_seqlens_comp", "B+1", ("int32",)),
    Operand("out", "N d", ("=kv",), role="out"),
)


def pool_specs(**changes) -> dict:
    specs = {
        "kv": TensorSpec((512, 1024), "bfloat16"),
        "score": TensorSpec((512, 1024), "bfloat16"),
        "ape": TensorSpec((4, 1024), "float32"),
        "cu_seqlens": TensorSpec((3,), "int32"),
        "cu_seqlens_comp": TensorSpec((3,), "int32"),
        "out": TensorSpec((128, 512), "bfloat16"),
    }
    return {**specs, **changes}


def test_every_symbol_is_solved_and_known_ones_are_kept():
    assert POOL.bind(pool_specs(), KNOWN) == {"ratio": 4, "coff": 2, "T": 512, "d": 512, "B": 2, "N": 128}


def bf16(shape, stride=None, device="cuda") -> TensorSpec:
    return TensorSpec(shape, "bfloat16", stride, device)


VIOLATIONS = [
    ("rank", {"ape": TensorSpec((1024,), "float32")}, "ape: wanted shape (ratio, coff*d) = (4, 1024), got (1024)"),
    ("inexact", {"kv": bf16((512, 1001))}, "kv: wanted shape (T, coff*d) = (T, 2*d), got (512, 1001)"),
    ("tied", {"score": bf16((512, 1000))}, "score: wanted shape (T, coff*d) = (512, 1024), got (512, 1000)"),
    ("sum", {"cu_seqlens_comp": TensorSpec((4,), "int32")}, "cu_seqlens_comp: wanted shape (B+1) = (3), got (4)"),
    ("B=-1", {"cu_seqlens": TensorSpec((0,), "int32")}, "cu_seqlens: wanted shape (B+1), got (0)"),
    (
        "known",
        {"ape": TensorSpec((5, 1024), "float32")},
        "ape: wanted shape (ratio, coff*d) = (4, 1024), got (5, 1024)",
    ),
    ("int64 index", {"cu_seqlens": TensorSpec((3,), "int64")}, "cu_seqlens: wanted dtype int32, got int64"),
    (
        "dtype list",
        {"kv": TensorSpec((512, 1024), "float64")},
        "kv: wanted dtype bfloat16 or float16 or float32, got float64",
    ),
    (
        "dtype of another",
        {"score": TensorSpec((512, 1024), torch.float16)},
        "score: wanted dtype bfloat16 (that of kv), got float16",
    ),
    ("None", {"out": None}, "out: wanted a tensor, got None"),
    ("no tensor", {"kv": [[1.0]]}, "kv: wanted a torch.Tensor or TensorSpec, got list"),
    ("sparse", {"ape": torch.zeros(4, 1024).to_sparse()}, "ape: wanted a strided tensor, got layout torch.sparse_coo"),
    (
        "CPU beside CUDA",
        {"kv": bf16((512, 1024), device="cuda:0"), "ape": torch.empty(4, 1024)},
        "ape: wanted device cuda:0 (that of kv), got cpu",
    ),
    ("CPU first", {"kv": bf16((512, 1024), device="cpu")}, "kv: wanted a CUDA device, got cpu"),
    (
        "two GPUs, the first operand names none",
        {"score": bf16((512, 1024), device="cuda:0"), "out": bf16((128, 512), device="cuda:1")},
        "out: wanted device cuda:0 (that of score), got cuda:1",
    ),
    ("inner stride", {"kv": bf16((512, 1024), (2048, 2))}, "kv: wanted a contiguous last dim (stride 1), got stride 2"),
    (
        "pitch",
        {"score": bf16((512, 1024), (1025, 1))},
        "score: wanted every row aligned to 16 bytes, got stride 1025 (2050 bytes)",
    ),
    ("negative stride", {"kv": bf16((512, 1024), (-1024, 1))}, "kv: wanted strides of 0 or more, got (-1024, 1)"),
    (
        "broadcast output",
        {"out": bf16((128, 512), (0, 1))},
        "out: wanted an output whose elements do not overlap, got shape (128, 512) with strides (0, 1)",
    ),
    (
        "output rows overlap",
        {"out": bf16((128, 512), (511, 1))},
        "out: wanted an output whose elements do not overlap, got shape (128, 512) with strides (511, 1)",
    ),
]


@pytest.mark.parametrize(("changes", "text"), [row[1:] for row in VIOLATIONS], ids=[row[0] for row in VIOLATIONS])
def test_violation_names_the_operand_what_was_wanted_and_what_was_got(changes, text):
    with pytest.raises(ContractError) as refused:
        POOL.bind(pool_specs(**changes), KNOWN)
    assert str(refused.value) == text


ACCEPTED = [
    ("meta beside CUDA", {"kv": torch.empty(512, 1024, dtype=torch.bfloat16, device="meta")}),
    ("one GPU named once", {"ape": TensorSpec((4, 1024), "float32", device="cuda:1")}),
    ("padded pitch", {"kv": bf16((512, 1024), (1032, 1)), "out": bf16((128, 512), (640, 1))}),
    ("broadcast input", {"score": bf16((512, 1024), (0, 1))}),
    ("no tokens", {"kv": bf16((0, 1024)), "score": bf16((0, 1024)), "out": bf16((0, 512))}),
    ("strides of an empty output mean nothing", {"out": bf16((0, 512), (0, 1))}),
    ("pitch of a single row means nothing", {"out": bf16((1, 512), (3, 1))}),
]


@pytest.mark.parametrize("changes", [row[1] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_layouts_and_devices_that_are_right_are_accepted(changes):
    POOL.bind(pool_specs(**changes), KNOWN)


def test_last_dim_of_one_element_may_have_any_stride():
    signature = Signature(Operand("x", "T d", FLOATS))
    assert signature.bind({"x": TensorSpec((5, 1), "float32", (4, 7))}, {}) == {"T": 5, "d": 1}


def test_term_with_two_unknowns_waits_for_a_later_row():
    signature = Signature(Operand("q", "L Hkv*G D", FLOATS), Operand("k", "S Hkv D", FLOATS))
    specs = {"q": TensorSpec((1, 32, 128), "float16"), "k": TensorSpec((9, 8, 128), "float16")}
    assert signature.bind(specs, {})["G"] == 4
    with pytest.raises(
        ContractError, match=r"^q: wanted shape \(L, Hkv\*G, D\) = \(1, 5\*G, 128\), got \(1, 32, 128\)"
    ):
        signature.bind({**specs, "k": TensorSpec((9, 5, 128), "float16")}, {})


def test_symbol_that_no_row_determines_is_a_mistake_of_the_table():
    signature = Signature(Operand("x", "a*b", FLOATS))
    with pytest.raises(ValueError, match="x: the operands do not determine a, b") as raised:
        signature.bind({"x": TensorSpec((6,), "float32")}, {})
    assert not isinstance(raised.value, ContractError)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Operand("x", "T-1", FLOATS), "x: cannot read the dim 'T-1'"),
        (lambda: Operand("x", "T*T", FLOATS), "x: a symbol repeats"),
        (lambda: Operand("x", "T", ("bf16",)), "x: dtypes"),
        (lambda: Operand("x", "T", FLOATS, role="inout"), "x: role"),
        (lambda: Signature(Operand("x", "T", ("=y",)), Operand("y", "T", FLOATS)), "x: no operand 'y' before it"),
        (lambda: Signature(Operand("x", "T", FLOATS), Operand("x", "T", FLOATS)), "operand names repeat"),
    ],
)
def test_mistakes_of_a_table_show_when_it_is_written(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_alignment_may_follow_from_the_solved_dims_and_the_element_size():
    def vector_bytes(dims) -> int:
        return 16 if dims["d"] * dims["itemsize"] % 16 == 0 else dims["itemsize"]

    signature = Signature(Operand("x", "T d", FLOATS, align_bytes=vector_bytes))
    signature.bind({"x": TensorSpec((4, 65), "bfloat16", (67, 1))}, {})
    with pytest.raises(ContractError, match="^x: wanted every row aligned to 16 bytes"):
        signature.bind({"x": TensorSpec((4, 64), "bfloat16", (67, 1))}, {})


def pool_tensors(**changes) -> dict:
    tensors = {
        name: torch.empty_strided(s.shape, s.stride, dtype=getattr(torch, s.dtype)) for name, s in pool_specs().items()
    }
    return {**tensors, **changes}


def test_real_pointers_are_checked():
    POOL.bind_pointers(pool_tensors())
    shifted = torch.empty(512 * 1024 + 1, dtype=torch.bfloat16)[1:].view(512, 1024)
    with pytest.raises(ContractError, match="^score: wanted a base aligned to 16 bytes, got address 0x"):
        POOL.bind_pointers(pool_tensors(score=shifted))


def test_empty_tensors_have_no_address_to_check():
    POOL.bind_pointers(pool_tensors(kv=torch.empty(0, 1024, dtype=torch.bfloat16)))


def test_output_in_the_memory_of_an_input_is_refused():
    tensors = pool_tensors()
    with pytest.raises(ContractError, match="^out: wanted memory of its own for an output, got memory shared with kv"):
        POOL.bind_pointers({**tensors, "out": tensors["kv"][100:228, :512]})


def test_output_in_other_columns_of_an_input_buffer_is_accepted():
    fused = torch.empty(512, 1024 + 512, dtype=torch.bfloat16)
    POOL.bind_pointers(pool_tensors(kv=fused[:, :1024], out=fused[:128, 1024:]))
    with pytest.raises(ContractError, match="^out: wanted memory of its own"):
        POOL.bind_pointers(pool_tensors(kv=fused[:, :1024], out=fused[:128, 1016:1528]))


def addresses(shape, stride) -> list[int]:
    return [sum(i * s for i, s in zip(index, stride)) for index in itertools.product(*map(range, shape))]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=3))
def test_an_output_called_free_of_overlap_has_distinct_addresses(dims):
    shape, stride = zip(*dims)
    if not overlaps_itself(shape, stride):
        assert len(set(addresses(shape, stride))) == len(addresses(shape, stride))


@given(
    rows=st.integers(1, 4), pitch=st.integers(1, 9), first=st.integers(0, 9), second=st.integers(0, 9), data=st.data()
)
def test_slices_called_apart_share_no_byte(rows, pitch, first, second, data):
    widths = [data.draw(st.integers(1, pitch)) for _ in range(2)]
    buffer = torch.empty(64, dtype=torch.uint8)
    a, b = (torch.as_strided(buffer, (rows, w), (pitch, 1), o) for w, o in zip(widths, (first, second)))
    signature = Signature(Operand("a", "R x", ("uint8",), role="out"), Operand("b", "R y", ("uint8",)))
    shared = {first + x for x in addresses(a.shape, a.stride())} & {second + x for x in addresses(b.shape, b.stride())}
    try:
        signature.bind_pointers({"a": a, "b": b})
    except ContractError:
        # With one row there is no pitch to judge by, so all bytes between the ends count.
        assert shared or rows > 1
    else:
        assert not shared


@settings(max_examples=50)
@given(st.integers(0, 99), st.integers(1, 99), st.integers(0, 9), st.sampled_from([1, 2]))
def test_extents_are_solved_back_whatever_they_are(tokens, d, segments, coff):
    index = TensorSpec((segments + 1,), "int32")
    row = TensorSpec((tokens, coff * d), "float32")
    specs = pool_specs(
        kv=row,
        score=row,
        ape=TensorSpec((4, coff * d), "float32"),
        out=TensorSpec((7, d), "float32"),
        cu_seqlens=index,
        cu_seqlens_comp=index,
    )
    signature = Signature(*(Operand(o.name, o.dims, o.dtypes, role=o.role) for o in POOL.operands))
    dims = signature.bind(specs, {"ratio": 4, "coff": coff})
    assert dims == {"T": tokens, "d": d, "B": segments, "N": 7, "ratio": 4, "coff": coff}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_spec_of_a_tensor_is_its_metadata(device):
    x = torch.empty(4, 6, dtype=torch.bfloat16, device=device)[:, :3]
    assert TensorSpec.of(x, "x") == TensorSpec((4, 3), "bfloat16", (6, 1), device)


def test_spec_of_a_fake_cuda_tensor_needs_no_gpu():
    # where there are GPUs, torch makes fake tensors of these alone
    index = max(torch.cuda.device_count() - 1, 0) if torch.cuda.is_available() else 1
    with FakeTensorMode():
        x = torch.empty(4, 6, dtype=torch.float16, device=f"cuda:{index}")
    spec = TensorSpec.of(x, "x")
    assert (spec, spec.device_index) == (TensorSpec((4, 6), "float16", device=f"cuda:{index}"), index)


def test_spec_is_a_plain_value():
    spec = TensorSpec([2, 3], torch.int32)
    assert spec == TensorSpec((2, 3), "int32", (3, 1), "cuda")
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec))) == hash(copy.deepcopy(spec))
    with pytest.raises(ContractError, match=r"^shape: wanted extents of 0 or more, got \(-1\)"):
        TensorSpec((-1,), "int32")
    with pytest.raises(ContractError, match=r"^stride: wanted 2 strides for shape \(2, 3\), got \(1,\)"):
        TensorSpec((2, 3), "int32", (1,))


def test_module_works_without_torch():
    code = "import sys; sys.modules['torch'] = None; import cuteforge; cuteforge.TensorSpec((2, 3), 'int32')"
    subprocess.run([sys.executable, "-c", code], check=True)

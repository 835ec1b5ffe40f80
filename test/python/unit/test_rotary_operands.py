"""The table of rotary's operands: one row gives an operand to validation, torch ops, the compiled entry and the
kernel."""

import pytest

from cuteforge import RotaryEmbedding, TensorSpec
from cuteforge.device.traced import Operands
from cuteforge.families.rotary import kernel, operands
from cuteforge.families.rotary.config import Problem, Traits
from cuteforge.families.rotary.operands import Row

MADE_UP = Row("gains", "{tokens} Hk half", ("float32",), operands._angles)
PAIRS, ANGLES, KEYS = ("freqs_cis",), ("cos", "sin", "positions"), ("k", "k_out")


@pytest.fixture
def made_up(monkeypatch):
    """One more optional operand, added in one place."""
    monkeypatch.setattr(operands, "ROWS", (*operands.ROWS[:-1], MADE_UP, operands.ROWS[-1]))
    operands.signature_of.cache_clear()
    yield
    operands.signature_of.cache_clear()


def traits_of(given, rank=3):
    positions = "int64" if "positions" in given else None
    return Traits(Problem("bfloat16", 128, 64, interleaved=True), rank, given, positions)


def op_of(has_keys, has_positions):
    x, k = TensorSpec((9, 8, 128), "bfloat16"), TensorSpec((9, 2, 128), "bfloat16")
    keys = {"k": k, "k_out": k} if has_keys else {}
    if has_positions:
        table = TensorSpec((100, 32), "float32")
        return RotaryEmbedding(x, (table, table), x, TensorSpec((9,), "int32"), **keys)
    return RotaryEmbedding(x, TensorSpec((9, 32, 2), "float32"), x, **keys)


@pytest.mark.parametrize("has_keys", [False, True], ids=["one", "both"])
@pytest.mark.parametrize("has_positions", [False, True], ids=["pairs", "positions"])
def test_every_operand_reaches_its_place_in_the_entry_and_none_stands_for_the_rest(has_keys, has_positions):
    op = op_of(has_keys, has_positions)
    arranged = op._entry_operands
    assert {x for x in arranged if x} == set(op.signature.names)
    assert all(found in (None, own) for own, found in zip(operands.entry_names(), arranged, strict=True))


@pytest.mark.parametrize("given", [PAIRS, ANGLES, (*KEYS, *PAIRS), (*KEYS, *ANGLES)], ids=" ".join)
@pytest.mark.parametrize("rank", [3, 4])
def test_the_entry_is_compiled_with_a_tensor_for_what_the_op_has_and_none_for_the_rest(given, rank):
    tensors = dict(zip(operands.entry_names(), kernel.fake_operands(traits_of(given, rank)), strict=True))
    assert {name for name, tensor in tensors.items() if tensor is not None} == {"x", "out", *given}
    assert tensors["x"].shape[:-2] == tensors["out"].shape[:-2], "the entry compares the tokens"
    assert tensors["x"].shape[-1] == 128


def test_a_new_optional_operand_costs_one_row(made_up):
    """It arrives in the schema of the torch ops, in the errors, in the entry, and in what the kernel knows."""
    assert "Tensor? gains" in operands.schema_of_angles().split(", ")
    assert operands.given_of({"x", "k", "gains", "out"}) == ("k", "gains")
    assert "gains" in operands.entry_names() and "mGains" in operands.device_names()
    row = operands.signature_of(3, "bfloat16", True, (*KEYS, "gains")).operands[-1]
    assert (row.name, row.dims, row.dtypes, row.role) == ("gains", "T Hk half", ("float32",), "in")
    for given in ((*KEYS, *PAIRS), (*KEYS, *PAIRS, "gains")):
        ops = Operands(operands.device_names(), kernel.fake_operands(traits_of(given)))
        assert (ops.mGains is not None) == ("gains" in given)
    assert ops.mGains.shape[1] is ops.mK.shape[1], "the entry compares equal terms"

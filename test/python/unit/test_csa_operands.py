"""The table of the compressor's operands: one row gives an operand to validation, torch ops, the compiled entries and
the kernels."""

import pytest

from cuteforge import CSACompressorBackward, TensorSpec
from cuteforge.device.traced import Operands
from cuteforge.families.csa.compressor import operands
from cuteforge.families.csa.compressor.config import Problem, select_traits
from cuteforge.families.csa.compressor.entry import fake_operands
from cuteforge.families.csa.compressor.operands import BACKWARD, BOTH, FORWARD, Row
from cuteforge.op.signature import Operand
from cuteforge.runtime.arch import resolve_arch

MADE_UP = Row(Operand("gains", "N d", ("float32",), align_bytes=4), optional=BOTH)
OPS = (FORWARD, BACKWARD)


@pytest.fixture
def made_up(monkeypatch):
    """One more optional operand of both ops, added in one place."""
    monkeypatch.setattr(operands, "ROWS", (*operands.ROWS[:5], MADE_UP, *operands.ROWS[5:]))
    operands.signature_of.cache_clear()
    yield
    operands.signature_of.cache_clear()


def traits_of(op, given=(), deterministic=True):
    problem = Problem("bfloat16", 512, 4, 2, given)
    return select_traits(problem, resolve_arch("sm_90a", None), op == BACKWARD, deterministic)


def backward(deterministic):
    kv, ape = TensorSpec((64, 256), "bfloat16"), TensorSpec((4, 256), "float32")
    offsets, rows = TensorSpec((3,), "int32"), TensorSpec((16, 128), "bfloat16")
    return CSACompressorBackward(kv, kv, ape, offsets, offsets, rows, kv, kv, ape, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [True, False], ids=["workspace", "atomics"])
def test_every_operand_reaches_its_place_in_the_entry_and_none_stands_for_the_rest(deterministic):
    op = backward(deterministic)
    arranged = op._entry_operands or op.signature.names
    assert ("workspace" in op.signature.names) == deterministic
    assert {x for x in arranged if x} == set(op.signature.names)
    assert all(found in (None, own) for own, found in zip(operands.entry_names(BACKWARD), arranged, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_the_entry_is_compiled_with_a_tensor_for_what_the_op_has_and_none_for_the_rest(op):
    for deterministic in (True, False):
        tensors = dict(zip(operands.entry_names(op), fake_operands(op, traits_of(op, (), deterministic)), strict=True))
        absent = {name for name, tensor in tensors.items() if tensor is None}
        assert absent == ({"workspace"} if op == BACKWARD and not deterministic else set())
        assert tensors["kv"].shape[0] is tensors["score"].shape[0], "the entry compares the tokens"
        assert tensors["kv"].shape[1] == 1024


@pytest.mark.parametrize("op", OPS)
def test_a_new_optional_operand_costs_one_row(op, made_up):
    """It arrives in the schema of the torch op, in the wrapper's inputs, in the errors, in the entry, and in what
    kernels know."""
    assert "Tensor? gains" in operands.schema_of(op).split(", ")
    assert "gains" in operands.inputs_of(op)
    assert operands.given_of({"kv", "gains", "workspace"}) == ("gains",)
    assert "gains" in operands.entry_names(op) and "mGains" in operands.device_names(op)
    row = next(row for row in operands.signature_of(op, ("gains",)).operands if row.name == "gains")
    assert (row.dims, row.dtypes, row.role) == ("N d", ("float32",), "in")
    for given in ((), ("gains",)):
        ops = Operands(operands.device_names(op), fake_operands(op, traits_of(op, given)))
        assert (ops.mGains is not None) == ("gains" in given)
    rows = ops.mOut if op == FORWARD else ops.mGradOut
    assert ops.mGains.shape[0] is rows.shape[0], "the entry compares equal terms"

"""The table of attention's operands: one row gives an operand to validation, wrappers, torch ops, compiled entries and
kernels."""

import pytest

from cuteforge.families.attention import operands
from cuteforge.families.attention.operands import (
    ALL,
    DECODE,
    FLOAT32,
    PAGED_DECODE,
    PAGED_PREFILL,
    PREFILL,
    Layout,
    Row,
)
from cuteforge.families.attention.work.counts import Operands

KINDS = (DECODE, PREFILL, PAGED_DECODE, PAGED_PREFILL)
MADE_UP = Row("key_gains", lambda at: "Hkv", FLOAT32, optional=ALL)


@pytest.fixture
def made_up(monkeypatch):
    """One more optional operand of all ops, added in one place."""
    rows = (*operands.ROWS[:-2], MADE_UP, *operands.ROWS[-2:])
    monkeypatch.setattr(operands, "ROWS", rows)
    operands.signature_of.cache_clear()
    yield
    operands.signature_of.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_operands_stand_where_the_entry_expects_them(kind):
    """Every operand of an op reaches the row of the entry that is its own, or that it shares."""
    names = (*operands.names_of(kind, required=True), *operands.names_of(kind, required=False))
    arranged = operands.entry_operands(names)
    for own, found in zip(operands.entry_rows(), arranged, strict=True):
        assert found is None or own.name in (found, operands.row_of(found).shares)
    assert {x for x in arranged if x} == set(names)


def test_kernels_call_the_tensors_of_the_entry_by_their_rows():
    given = Operands(*operands.DEVICE_NAMES, *Operands.SCALARS)
    assert all(getattr(given, name) == name for name in (*operands.DEVICE_NAMES, *Operands.SCALARS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_has_any_strides_and_dtypes_of_its_own(kind):
    (row,) = operands.signature_of(Layout("batch", "batch"), ("bias",)).operands
    assert (row.dtypes, row.dense_dims, row.align_bytes) == (("bfloat16", "float16", "float32"), 0, 1)
    assert "Tensor? bias" in operands.schema_of(kind).split(", ")
    inputs = operands.inputs_of(kind)
    assert inputs[inputs.index("mask") + 1] == "bias"


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_optional_operand_costs_one_row(kind, made_up):
    """It arrives in the entry, in the schema of the torch op, in the wrapper's inputs, in what kernels know, and in the
    errors."""
    assert "Tensor? key_gains" in operands.schema_of(kind).split(", ")
    assert "key_gains" in operands.inputs_of(kind)
    assert operands.given_of(("q", "key_gains", "out")) == ("key_gains",)
    assert operands.entry_operands(("key_gains",)).count("key_gains") == 1
    assert "mKeyGains" in [row.device_name for row in operands.entry_rows()]
    (row,) = operands.signature_of(Layout("batch", "batch"), ("key_gains",)).operands
    assert (row.name, row.dims, row.dtypes, row.role) == ("key_gains", "Hkv", ("float32",), "in")

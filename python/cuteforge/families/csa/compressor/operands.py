"""The operands of the compressor's ops: one table, from which everything that lists them is made. Pure Python: no
torch, no cutlass.

From a row come an operand's line in the validation table, its tensor among those of the compiled entry, its name in the
kernels, the operand without memory that they are compiled with, and its term in the schema of the torch op.

A new optional operand is a new row, and a keyword in the classes and wrappers of its ops.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import NamedTuple

from cuteforge.op.dims import Dims
from cuteforge.op.operand_table import device_name
from cuteforge.op.signature import Operand, Signature

FORWARD, BACKWARD = "csa_compressor_forward", "csa_compressor_backward"
BOTH = frozenset((FORWARD, BACKWARD))
NONE: frozenset[str] = frozenset()
ONLY_FORWARD, ONLY_BACKWARD = frozenset((FORWARD,)), frozenset((BACKWARD,))

FLOATS = ("bfloat16", "float16", "float32")
MOST_PITCH_BYTES = 2**31 - 1  # the kernels step over rows with a 32-bit pitch


def _run_bytes(dims: Dims) -> int:
    """Alignment of base and rows: that of the widest access, up to 16 bytes, which divides half a row."""
    row_bytes = max(dims["d"], 1) * dims["itemsize"]  # no columns are refused later, by name
    return min(16, row_bytes & -row_bytes)


def _matrix(name: str, dims: str, dtypes: tuple[str, ...] = ("=kv",), role: str = "in") -> Operand:
    """What the kernels read or write in runs."""
    return Operand(name, dims, dtypes, align_bytes=_run_bytes, role=role, max_pitch_bytes=MOST_PITCH_BYTES)


def _offsets(name: str) -> Operand:
    return Operand(name, "B+1", ("int32",), align_bytes=4)


class Row(NamedTuple):
    """One operand.

    Attributes:
        operand: its line in the validation tables.
        required, optional: the ops that always have it, and those that may.
    """

    operand: Operand
    required: frozenset[str] = NONE
    optional: frozenset[str] = NONE

    @property
    def name(self) -> str:
        """Of the argument, in errors too."""
        return self.operand.name


ROWS: tuple[Row, ...] = (
    Row(_matrix("kv", "T coff*d", FLOATS), BOTH),
    Row(_matrix("score", "T coff*d"), BOTH),
    Row(Operand("ape", "ratio coff*d", ("float32",), align_bytes=4), BOTH),
    Row(_offsets("cu_seqlens"), BOTH),
    Row(_offsets("cu_seqlens_comp"), BOTH),
    Row(_matrix("out", "N d", role="out"), ONLY_FORWARD),
    Row(_matrix("grad_out", "N d"), ONLY_BACKWARD),
    Row(_matrix("grad_kv", "T coff*d", role="out"), ONLY_BACKWARD),
    Row(_matrix("grad_score", "T coff*d", role="out"), ONLY_BACKWARD),
    Row(Operand("grad_ape", "ratio coff*d", ("float32",), align_bytes=4, role="out"), ONLY_BACKWARD),
    Row(Operand("workspace", "W", ("uint8",), align_bytes=16, role="scratch"), optional=ONLY_BACKWARD),
)


def entry_names(op: str) -> tuple[str, ...]:
    """The tensors of the compiled entry of an op, in its order."""
    return tuple(row.name for row in _rows_of(op))


def device_names(op: str) -> tuple[str, ...]:
    """What its kernels call them."""
    return tuple(map(device_name, entry_names(op)))


def given_of(names: Container[str]) -> tuple[str, ...]:
    """`Problem.given` of an op with the operands `names`; whether there is a workspace, the compile key says."""
    return tuple(row.name for row in ROWS if row.optional and row.name in names and row.operand.role != "scratch")


def inputs_of(op: str) -> tuple[str, ...]:
    """What a caller of an op's wrapper gives, in the order of its torch op."""
    return tuple(row.name for row in _rows_of(op) if row.operand.role == "in")


def schema_of(op: str) -> str:
    """The tensors of the torch op."""
    rows = (row for row in _rows_of(op) if row.operand.role == "in")
    return ", ".join(f"Tensor{'' if op in row.required else '?'} {row.name}" for row in rows)


@functools.cache
def signature_of(op: str, given: tuple[str, ...] = ()) -> Signature:
    """The validation table of an op that has the optional operands `given`."""
    return Signature(*(row.operand for row in ROWS if op in row.required or (op in row.optional and row.name in given)))


def _rows_of(op: str) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if op in row.required | row.optional)

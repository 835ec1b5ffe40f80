"""The operands of the rotary op: one table, from which everything that lists them is made. Pure Python: no torch, no
cutlass.

From a row come an operand's line in the validation table, its tensor among those of the compiled entry, its name in the
kernel, the operand without memory that the kernel is compiled with, and its term in the schema of the torch ops.

A new optional operand is a new row, and a keyword in the class and the wrappers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from cuteforge.families.rotary.config import MAX_ACCESS_BYTES, Problem
from cuteforge.op.operand_table import device_name
from cuteforge.op.signature import Operand, Signature

FLOATS = ("bfloat16", "float16", "float32")
TOKENS = {3: "T", 4: "B L"}  # by the rank of x

# The alignment that a kernel asks of base and rows.
Alignment = Callable[[Problem], int]


def _heads(problem: Problem) -> int:
    return problem.align_bytes


def _angles(problem: Problem) -> int:
    return problem.table_align_bytes


def _pairs(problem: Problem) -> int:
    """Cosine and sine of an angle lie side by side."""
    return min(MAX_ACCESS_BYTES, 2 * problem.table_align_bytes)


def _any(problem: Problem) -> int:
    return 1


@dataclass(frozen=True)
class Row:
    """One operand.

    Attributes:
        name: of the argument, in errors too.
        dims: as in `op.signature.Operand`, with ``{tokens}`` for T or B L.
        dtypes, dense_dims, in_place_of: as in `op.signature.Operand`.
        alignment: that the kernel asks of base and rows.
        is_optional: whether there are ops without it.
    """

    name: str
    dims: str
    dtypes: tuple[str, ...]
    alignment: Alignment
    is_optional: bool = True
    in_place_of: str | None = None
    dense_dims: int = 1

    @property
    def is_output(self) -> bool:
        """Whether a launch writes it."""
        return self.in_place_of is not None


ROWS: tuple[Row, ...] = (
    Row("x", "{tokens} H D", FLOATS, _heads, is_optional=False),
    Row("out", "{tokens} H D", ("=x",), _heads, is_optional=False, in_place_of="x"),
    Row("k", "{tokens} Hk D", ("=x",), _heads),
    Row("k_out", "{tokens} Hk D", ("=x",), _heads, in_place_of="k"),
    Row("freqs_cis", "{tokens} half 2", ("float32",), _pairs, dense_dims=2),
    Row("cos", "max_pos half", ("float32",), _angles),
    Row("sin", "max_pos half", ("float32",), _angles),
    Row("positions", "{tokens}", ("int32", "int64"), _any),
)


def entry_names() -> tuple[str, ...]:
    """The tensors of the compiled entry, in its order."""
    return tuple(row.name for row in ROWS)


def device_names() -> tuple[str, ...]:
    """What the kernel calls them."""
    return tuple(map(device_name, entry_names()))


def given_of(names: Container[str]) -> tuple[str, ...]:
    """Of the operands `names` of an op those that it could do without, in the order of the rows."""
    return tuple(row.name for row in ROWS if row.is_optional and row.name in names)


def schema_of_angles() -> str:
    """The tensors of the torch ops that follow the heads."""
    return ", ".join(f"Tensor? {row.name}" for row in ROWS if row.alignment is not _heads)


@functools.cache
def signature_of(rank: int, dtype: str, interleaved: bool, given: tuple[str, ...]) -> Signature:
    """The validation table of an op.

    Args:
        rank, dtype: of x.
        given: as `given_of` returns it.
    """
    rows = (row for row in ROWS if not row.is_optional or row.name in given)
    return Signature(*(_operand(row, TOKENS[rank], dtype, interleaved) for row in rows))


def _operand(row: Row, tokens: str, dtype: str, interleaved: bool) -> Operand:
    return Operand(
        row.name,
        row.dims.format(tokens=tokens),
        row.dtypes,
        align_bytes=functools.partial(_align_bytes, row.alignment, dtype, interleaved),
        role="out" if row.is_output else "in",
        in_place_of=row.in_place_of,
        dense_dims=row.dense_dims,
    )


def _align_bytes(alignment: Alignment, dtype: str, interleaved: bool, dims: Mapping[str, int]) -> int:
    if not 0 < 2 * dims["half"] <= dims["D"]:
        return 1  # refused by the relations between the dims
    return alignment(Problem(dtype, dims["D"], 2 * dims["half"], interleaved))

"""The operands of attention: one table, from which everything that lists them is made. Pure Python: no torch, no
cutlass.

A row says what an operand is called, its dims, its kind, and which ops take it. From the rows come

* the validation table of an op (`signature_of`),
* the tensors of the compiled entry, their order and their names in a kernel (`ENTRY`, `device_name`), and the operands
without memory that it is
  compiled with (`forward/fake_operands.py`),
* the inputs of a wrapper and the schema of a torch op (`inputs_of`, `schema_of`),
* what a kernel knows of an operand that may be absent (`Problem.given`).

A new optional operand is a new row, and a keyword in the constructors and wrappers of its ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from cuteforge.op.signature import Operand, Signature

DECODE, PREFILL, PAGED_DECODE, PAGED_PREFILL = "gqa_decode", "gqa_prefill", "paged_gqa_decode", "paged_gqa_prefill"
DENSE, PAGED = frozenset((DECODE, PREFILL)), frozenset((PAGED_DECODE, PAGED_PREFILL))
ALL = DENSE | PAGED
NONE: frozenset[str] = frozenset()

FLOATS = ("bfloat16", "float16")
QUERY_DIMS = {"batch": "B L Hq", "single": "B Hq", "packed": "T Hq"}
KEY_DIMS = {"batch": "B S Hkv", "packed": "Tk Hkv", "pages": "P ps Hkv", "tokens": "P Hkv"}
MASK_DIMS = {2: "Bm Sm", 3: "Bm Lm Sm", 4: "Bm Hm Lm Sm"}
BIAS_DIMS = "Bb Hb Lb Sb"


class Layout(NamedTuple):
    """How the tensors of a call are laid out: `queries` and `keys` as in `Problem`, and the dims of the mask, 0 without
    one."""

    queries: str
    keys: str
    mask_rank: int = 0


class Kind(NamedTuple):
    """What an operand is made of.

    Attributes:
        dtypes: as in `op.signature.Operand`.
        align_bytes: of the base and of every row.
        has_rows: whether its rows are read 16 bytes at a time, so that all strides but the last are multiples of that.
        dense_dims: as in `op.signature.Operand`.
    """

    dtypes: tuple[str, ...]
    align_bytes: int
    has_rows: bool = False
    dense_dims: int = 1


QUERIES = Kind(FLOATS, 16, has_rows=True)
HEADS = Kind(("=q",), 16, has_rows=True)
FLOAT32 = Kind(("float32",), 4)
BOOLEAN = Kind(("bool",), 1)
BIAS = Kind((*FLOATS, "float32"), 1, dense_dims=0)
INDEX = Kind(("int32",), 4)
BYTES = Kind(("uint8",), 16)


@dataclass(frozen=True)
class Row:
    """One operand.

    Attributes:
        name: of the argument, in errors too.
        dims: of a layout, as in `op.signature.Operand`.
        kind: what it is made of.
        required, optional: the ops that always take it, and those that may.
        is_output: whether the op makes it; otherwise the caller gives it.
        shares: the operand in whose place it stands in the entry: a pool of pages stands where dense keys do.
    """

    name: str
    dims: Callable[[Layout], str]
    kind: Kind
    required: frozenset[str] = NONE
    optional: frozenset[str] = NONE
    is_output: bool = False
    shares: str | None = None

    @property
    def ops(self) -> frozenset[str]:
        return self.required | self.optional

    @property
    def device_name(self) -> str:
        """What kernels call it: mQ, mPageTable."""
        return "m" + "".join(word.capitalize() for word in (self.shares or self.name).split("_"))


def _fixed(dims: str) -> Callable[[Layout], str]:
    return lambda layout: dims


ROWS: tuple[Row, ...] = (
    Row("q", lambda at: f"{QUERY_DIMS[at.queries]} D", QUERIES, ALL),
    Row("k", lambda at: f"{KEY_DIMS[at.keys]} D", HEADS, DENSE),
    Row("v", lambda at: f"{KEY_DIMS[at.keys]} Dv", HEADS, DENSE),
    Row("k_cache", lambda at: f"{KEY_DIMS[at.keys]} D", HEADS, PAGED, shares="k"),
    Row("v_cache", lambda at: f"{KEY_DIMS[at.keys]} Dv", HEADS, PAGED, shares="v"),
    Row("page_table", _fixed("R C"), INDEX, PAGED),
    Row("cu_seqlens_q", _fixed("B+1"), INDEX, frozenset((PAGED_PREFILL,)), frozenset((PREFILL,))),
    Row("out", lambda at: f"{QUERY_DIMS[at.queries]} Dv", HEADS, ALL, is_output=True),
    Row("cu_seqlens_k", _fixed("B+1"), INDEX, optional=frozenset((PREFILL,))),
    Row("seqlens_k", _fixed("B"), INDEX, optional=ALL),
    Row("kv_indptr", _fixed("B+1"), INDEX, optional=PAGED),
    Row("page_table_rows", _fixed("B"), INDEX, optional=PAGED),
    Row("new_k", _fixed("B Hkv D"), HEADS, optional=frozenset((PAGED_DECODE,))),
    Row("new_v", _fixed("B Hkv Dv"), HEADS, optional=frozenset((PAGED_DECODE,))),
    Row("mask", lambda at: MASK_DIMS[at.mask_rank], BOOLEAN, optional=ALL),
    Row("bias", _fixed(BIAS_DIMS), BIAS, optional=ALL),
    Row("sinks", _fixed("Hq"), FLOAT32, optional=ALL),
    Row("lse", lambda at: "Hq T" if at.queries == "packed" else "B Hq L", FLOAT32, optional=ALL, is_output=True),
    Row("workspace", _fixed("W"), BYTES, optional=frozenset((DECODE, PAGED_DECODE)), is_output=True),
)
# Written where new keys and values are appended to them.
POOLS, APPENDED = ("k_cache", "v_cache"), ("new_k", "new_v")


def row_of(name: str) -> Row:
    """The row of an operand."""
    return next(row for row in ROWS if row.name == name)


def entry_rows() -> tuple[Row, ...]:
    """The rows that have a place of their own among the tensors of the compiled entry, in its order."""
    return tuple(row for row in ROWS if row.shares is None)


def entry_operands(names: Container[str]) -> tuple[str | None, ...]:
    """What the compiled entry takes of an op with the operands `names`, in its order; None for what the op lacks."""
    return tuple(
        next((row.name for row in ROWS if own.name in (row.name, row.shares) and row.name in names), None)
        for own in entry_rows()
    )


DEVICE_NAMES = tuple(row.device_name for row in entry_rows())


def given_of(names: Container[str]) -> tuple[str, ...]:
    """`Problem.given` of an op with the operands `names`."""
    implied = ("workspace", "cu_seqlens_q", "cu_seqlens_k")
    return tuple(row.name for row in ROWS if row.optional and row.name in names and row.name not in implied)


def names_of(op: str, *, required: bool) -> tuple[str, ...]:
    """The operands that an op always takes, or those that it may, but for its workspace."""
    rows = (row for row in ROWS if op in (row.required if required else row.optional))
    return tuple(row.name for row in rows if row.name != "workspace")


def inputs_of(op: str) -> tuple[str, ...]:
    """What a caller of an op's wrapper gives, in the order of its torch op."""
    return tuple(row.name for row in ROWS if op in row.ops and not row.is_output)


def schema_of(op: str, *, appends: bool = False) -> str:
    """The tensors of the torch op. The one that `appends` writes the pools; the other takes nothing to append."""
    terms = []
    for name in inputs_of(op):
        if name in APPENDED and not appends:
            continue
        kind = "Tensor" if op in row_of(name).required else "Tensor?"
        if appends and name in POOLS:
            kind = f"Tensor({'ab'[POOLS.index(name)]}!)"
        terms.append(f"{kind} {name}")
    return ", ".join(terms)


@functools.cache
def signature_of(layout: Layout, names: tuple[str, ...]) -> Signature:
    """The validation table of the operands `names`, in this order."""
    return Signature(*(_operand(row_of(name), layout, names) for name in names))


def _operand(row: Row, layout: Layout, names: tuple[str, ...]) -> Operand:
    role = "scratch" if row.kind is BYTES else "out" if row.is_output else "in"
    if row.name in POOLS and APPENDED[0] in names:
        role = "update"
    kind = row.kind
    return Operand(
        row.name, row.dims(layout), kind.dtypes, align_bytes=kind.align_bytes, role=role, dense_dims=kind.dense_dims
    )

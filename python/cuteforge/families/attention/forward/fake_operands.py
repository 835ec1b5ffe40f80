"""Operands without memory, from which the compiled entries learn what to check: fixed extents, tied extents, alignment."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from cuteforge.device.dtypes import DTYPES
from cuteforge.families.attention.operands import BOOLEAN, INDEX, Layout, Row, entry_rows
from cuteforge.families.attention.problem import Problem


def operands(problem: Problem, has_workspace: bool) -> tuple:
    """All tensors of an entry in its order, None for those that the op does not have."""
    extents = {"D": problem.head_dim, "Dv": problem.v_dim}
    layout = Layout(problem.queries, problem.keys, problem.mask_rank)
    given = (row.name for row in entry_rows() if problem.takes(row.name))
    names = {*given, "workspace"} if has_workspace else {*given}
    return tuple(
        _fake(row, row.dims(layout), problem.dtype, extents) if row.name in names else None for row in entry_rows()
    )


def _fake(row: Row, dims: str, dtype: str, extents: dict) -> cute.Tensor:
    """A tensor of symbolic extents; equal terms are one object, so that the entry compares them."""
    terms = dims.split()
    shape = tuple(_extent(term, row, extents) for term in terms)
    element = _element(row, dtype)
    itemsize = element.width // 8
    divisibility = row.kind.align_bytes // itemsize if row.kind.has_rows else 1
    strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in terms[:-1])
    return make_fake_tensor(element, shape, (*strides, 1), assumed_align=row.kind.align_bytes)


def _extent(term: str, row: Row, extents: dict):
    if term not in extents:
        # the workspace is measured in bytes
        extents[term] = cute.sym_int64() if row.name == "workspace" else cute.sym_int()
    return extents[term]


def _element(row: Row, dtype: str):
    if row.kind.has_rows:
        return DTYPES[dtype]
    return {INDEX: cutlass.Int32, BOOLEAN: cutlass.Uint8}.get(row.kind) or DTYPES[row.kind.dtypes[0]]


def scalars(problem: Problem) -> tuple:
    """The scalars that follow the operands, None for those that the op does not have."""
    limits = [Int32(0) if wanted else None for wanted in (problem.has_left, problem.has_right)]
    return Int32(0), Int32(0), *limits, Float32(0.0) if problem.has_softcap else None, Float32(0.0)

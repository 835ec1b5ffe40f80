"""What a compiled entry of attention is compiled with: operands without memory, and scalars."""

from __future__ import annotations

from cutlass import Float32, Int32

from cuteforge.device.fake_operands import FakeOperands
from cuteforge.families.attention.operands import Layout, entry_rows
from cuteforge.families.attention.problem import Problem
from cuteforge.families.attention.work.limits import Limits


def operands(problem: Problem, has_workspace: bool) -> tuple:
    """All tensors of an entry in its order, None for those that the op does not have."""
    fake = FakeOperands({"D": problem.head_dim, "Dv": problem.v_dim})
    layout = Layout(problem.queries, problem.keys, problem.mask_rank)

    def tensor(row):
        dtype = problem.dtype if row.kind.has_rows else row.kind.dtypes[0]
        dtype = problem.bias_dtype if row.name == "bias" else dtype
        return fake.tensor(row.dims(layout), dtype, row.kind.align_bytes, row.kind.dense_dims)

    names = {row.name for row in entry_rows() if problem.takes(row.name)} | ({"workspace"} if has_workspace else set())
    return tuple(tensor(row) if row.name in names else None for row in entry_rows())


def scalars(problem: Problem) -> tuple:
    """The scalars that follow the operands, None for those that the op does not have."""
    limits = [Int32(0) if wanted else None for wanted in (problem.has_left, problem.has_right)]
    return *(Int32(0) for _ in Limits._fields), *limits, Float32(0.0) if problem.has_softcap else None, Float32(0.0)

"""Operands without memory, from which the compiled entries learn what to check: fixed extents, tied extents, alignment."""

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from cuteforge.device.dtypes import DTYPES
from cuteforge.families.csa.compressor.config import Problem
from cuteforge.op.signature import ITEMSIZE


class FakeOperands:
    """Makes the fake tensors of one op; equal symbols are one object, so that the entry compares them."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.dtype = DTYPES[problem.dtype]
        self.num_tokens, self.num_rows, self.num_offsets = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def rows(self, extent, cols: int):
        """A (extent, cols) matrix of the op's dtype with a row pitch that keeps every run aligned."""
        elems = self.problem.vector_elems
        pitch = cute.sym_int(divisibility=elems)
        align = elems * ITEMSIZE[self.problem.dtype]
        return make_fake_tensor(self.dtype, (extent, cols), (pitch, 1), assumed_align=align)

    def tokens(self):
        return self.rows(self.num_tokens, self.problem.row_elems)

    def pooled(self):
        return self.rows(self.num_rows, self.problem.head_dim)

    def ape(self):
        shape = (self.problem.ratio, self.problem.row_elems)
        return make_fake_tensor(cutlass.Float32, shape, (cute.sym_int64(), 1), assumed_align=4)

    def workspace(self):
        return make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=16)

    def offsets(self):
        return make_fake_tensor(cutlass.Int32, (self.num_offsets,), (1,), assumed_align=4)


def forward_operands(problem: Problem):
    """kv, score, ape, cu_seqlens, cu_seqlens_comp, out."""
    fake = FakeOperands(problem)
    return fake.tokens(), fake.tokens(), fake.ape(), fake.offsets(), fake.offsets(), fake.pooled()


def backward_operands(problem: Problem, with_workspace: bool):
    """kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, grad_kv, grad_score, grad_ape, and the workspace if there is one."""
    fake = FakeOperands(problem)
    operands = (fake.tokens(), fake.tokens(), fake.ape(), fake.offsets(), fake.offsets(), fake.pooled())
    return *operands, fake.tokens(), fake.tokens(), fake.ape(), *([fake.workspace()] if with_workspace else [])

"""Operands without memory, from which the compiled entries learn what to check: fixed extents, tied extents, alignment."""

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from cuteforge.device.dtypes import DTYPES
from cuteforge.families.rotary.config import Traits


class FakeOperands:
    """Makes the fake tensors of one op; the extents of the tokens are one object each, so that the entry compares them."""

    def __init__(self, traits: Traits):
        self.traits = traits
        self.tokens = tuple(cute.sym_int() for _ in range(traits.rank - 2))

    def all(self) -> tuple:
        """In the order of the signature: x, out, k, k_out, then the table."""
        queries, keys = cute.sym_int(), cute.sym_int()
        heads = [self.heads(queries), self.heads(queries)]
        if self.traits.has_keys:
            heads += [self.heads(keys), self.heads(keys)]
        return (*heads, *self.table())

    def heads(self, num_heads):
        problem = self.traits.problem
        strides = tuple(cute.sym_int64(divisibility=problem.access_elems) for _ in range(self.traits.rank - 1))
        shape = (*self.tokens, num_heads, problem.head_dim)
        return make_fake_tensor(DTYPES[problem.dtype], shape, (*strides, 1), assumed_align=problem.align_bytes)

    def table(self) -> tuple:
        problem = self.traits.problem
        half, align = problem.rotary_dim // 2, problem.table_align_bytes
        if self.traits.positions is None:
            align = min(16, 2 * align)
            strides = tuple(cute.sym_int64(divisibility=align // 4) for _ in self.tokens)
            return (make_fake_tensor(cutlass.Float32, (*self.tokens, half, 2), (*strides, 2, 1), assumed_align=align),)
        rows = cute.sym_int()
        cos, sin = (
            make_fake_tensor(
                cutlass.Float32, (rows, half), (cute.sym_int64(divisibility=align // 4), 1), assumed_align=align
            )
            for _ in range(2)
        )
        dtype = DTYPES[self.traits.positions]
        strides = (*(cute.sym_int64() for _ in self.tokens[1:]), 1)
        positions = make_fake_tensor(dtype, self.tokens, strides, assumed_align=dtype.width // 8)
        return cos, sin, positions

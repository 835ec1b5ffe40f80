"""Operands without memory, from which compiled entries learn what to check: fixed extents, tied extents, alignment."""

import math
from collections.abc import Mapping

from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from cuteforge.device.dtypes import DTYPES

WORKSPACE_BYTES = "W"  # the extent that may pass 2**31


class FakeOperands:
    """Makes the fake tensors of one entry. Equal terms are one object, so that the entry compares the extents.

    Args:
        known: the symbols that are compiled in.
    """

    def __init__(self, known: Mapping[str, int]):
        self._known = known
        self._extents: dict = {}

    def tensor(self, dims: str, dtype: str, align_bytes: int, dense_dims: int = 1, has_wide_pitch: bool = True):
        """A tensor whose base and rows are aligned.

        Args:
            dims: one term a dim, as in `op.signature.Operand`.
            dense_dims: innermost dims that are contiguous together; 0 for strides of any kind.
            has_wide_pitch: whether strides may pass 2**31 elements.
        """
        element = DTYPES[dtype]
        shape = tuple(map(self._extent, dims.split()))
        divisibility = max(align_bytes * 8 // element.width, 1)
        symbol = cute.sym_int64 if has_wide_pitch else cute.sym_int
        num_outer = len(shape) - dense_dims
        pitches = tuple(symbol(divisibility=divisibility) for _ in shape[:num_outer])
        dense = tuple(math.prod(shape[i + 1 :]) for i in range(num_outer, len(shape)))
        return make_fake_tensor(element, shape, (*pitches, *dense), assumed_align=max(align_bytes, element.width // 8))

    def row(self, row, dtypes: Mapping[str, str]):
        """The tensor of a row of an `op.signature.Signature`.

        Args:
            dtypes: of the rows that allow several, by their names.
        """
        dtype = dtypes.get(row.dtype_of or row.name, row.dtypes[0])
        align_bytes = row.alignment(self._known, DTYPES[dtype].width // 8)
        return self.tensor(row.dims, dtype, align_bytes, row.dense_dims, row.max_pitch_bytes is None)

    def _extent(self, term: str):
        factors = [int(x) if x.isdecimal() else self._known.get(x) for x in term.split("*")]
        if None not in factors:
            return math.prod(factors)
        if term not in self._extents:
            self._extents[term] = cute.sym_int64() if term == WORKSPACE_BYTES else cute.sym_int()
        return self._extents[term]

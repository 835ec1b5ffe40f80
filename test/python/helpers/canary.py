"""Buffers that betray writes outside them and elements never written inside them.

Every element starts as a NaN of one odd bit pattern (a huge number in an integer table). Arithmetic makes NaNs of other
patterns, so an element that still has this one was not written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cuteforge import TensorSpec

GUARD_BYTES = 4096
# By element size: an integer type, and the pattern. 0x7FE5 is a quiet NaN both as bf16 and as fp16.
_BITS = {
    1: (torch.int8, 0x65),
    2: (torch.int16, 0x7FE5),
    4: (torch.int32, 0x7FE5A5A5),
    8: (torch.int64, 0x7FFCA5A5A5A5A5A5),
}


class Canary:
    """A poisoned ``shape`` tensor (``.tensor``) inside a larger poisoned buffer.

    Args:
        row_pitch: elements from one row of a 2-D ``shape`` to the next; the gap is guarded too.
        offset: elements the base is moved off its 256-byte alignment.
        stride: of a tensor of any rank, in place of ``row_pitch``; contiguous when both are None.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device,
        row_pitch: int | None = None,
        offset: int = 0,
        stride: Sequence[int] | None = None,
    ):
        self.shape, self.dtype, self._offset = tuple(shape), dtype, offset
        if row_pitch is not None:
            stride = (row_pitch, 1)[2 - len(self.shape) :]
        spec = TensorSpec(self.shape, dtype, stride)
        self._guard = GUARD_BYTES // dtype.itemsize
        bits_dtype, self._fill = _BITS[dtype.itemsize]
        self._bits = torch.full((2 * self._guard + offset + spec.span,), self._fill, dtype=bits_dtype, device=device)
        self.tensor = self._bits.view(dtype).as_strided(self.shape, spec.stride, self._guard + offset)

    @classmethod
    def like(cls, tensor: torch.Tensor, row_pitch: int | None = None, offset: int = 0) -> Canary:
        return cls(tensor.shape, tensor.dtype, tensor.device, row_pitch, offset)

    def _inside(self) -> torch.Tensor:
        return self._bits.as_strided(self.shape, self.tensor.stride(), self._guard + self._offset)

    def check_guards(self, name: str = "output") -> None:
        """Nothing outside the tensor was written."""
        outside = self._bits.clone()
        outside.as_strided(self.shape, self.tensor.stride(), self._guard + self._offset).fill_(self._fill)
        written = (outside != self._fill).nonzero().flatten()
        first = int(written[0]) - self._guard - self._offset if written.numel() else 0
        assert not written.numel(), f"{name}: {written.numel()} elements outside were written, first at offset {first}"

    def check_written(self, name: str = "output") -> None:
        """Every element of the tensor was written."""
        missed = (self._inside() == self._fill).nonzero()
        assert not missed.numel(), f"{name}: {len(missed)} elements never written, first at {missed[0].tolist()}"

    def check(self, name: str = "output") -> None:
        self.check_guards(name)
        self.check_written(name)

    def check_untouched(self, name: str = "output") -> None:
        """Nothing was written at all."""
        assert bool((self._bits == self._fill).all()), f"{name}: written although nothing should have been"


def padded_copy(tensor: torch.Tensor, row_pitch: int, offset: int = 0) -> torch.Tensor:
    """``tensor (rows, width)`` again with rows ``row_pitch`` elements apart, NaN-poisoned between and around them."""
    canary = Canary.like(tensor, row_pitch, offset)
    canary.tensor.copy_(tensor)
    return canary.tensor


def strided_copy(tensor: torch.Tensor, stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """``tensor`` of any rank again with these strides, NaN-poisoned between and around its elements."""
    canary = Canary(tensor.shape, tensor.dtype, tensor.device, offset=offset, stride=stride)
    canary.tensor.copy_(tensor)
    return canary.tensor


class Slices:
    """Views of one buffer in use, whose other elements must keep their bits."""

    def __init__(self, buffer: torch.Tensor, *views: torch.Tensor) -> None:
        self._buffer, self._views, self._before = buffer, views, buffer.clone()

    def check_guards(self, name: str = "buffer") -> None:
        """Nothing of the buffer outside the views was written."""
        after, bits = self._buffer.clone(), _BITS[self._buffer.dtype.itemsize][0]
        for view in self._views:
            place = (view.shape, view.stride(), view.storage_offset() - self._buffer.storage_offset())
            after.as_strided(*place).copy_(self._before.as_strided(*place))
        changed = (after.view(bits) != self._before.view(bits)).nonzero()
        assert not len(changed), f"{name}: {len(changed)} elements outside were written, first at {changed[0].tolist()}"

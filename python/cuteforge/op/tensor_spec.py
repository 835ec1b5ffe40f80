"""Shape, dtype, strides and device of a tensor. Pure Python: tensors are read through their attributes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuteforge.arguments import described, integer, kind_of
from cuteforge.errors import ContractError
from cuteforge.op.overlap import outer_dims

if TYPE_CHECKING:
    import torch

ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


_TENSOR_ATTRIBUTES = ("shape", "dtype", "device", "layout", "stride")


_DEVICE = re.compile(r"[a-z_]+[a-z0-9_]*(:[0-9]+)?")


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, stride and device of a tensor that need not exist.

    It stands in for a sample tensor, so that you can ask whether a call is supported, and compile for it, on a machine
    without a GPU.

    Args:
        shape: sizes, outermost first.
        dtype: a name such as ``"bfloat16"``, or the torch dtype; stored as the name.
        stride: in elements, one for each dim; contiguous when None.
        device: ``"cuda"`` (any one GPU), ``"cuda:1"``, or ``"meta"`` (no device implied).

    Raises:
        ContractError: an argument is not of its kind, a size is negative, or there are not as many strides as sizes.

    Examples:
        >>> import torch
        >>> from cuteforge import TensorSpec
        >>> spec = TensorSpec((2, 3), torch.bfloat16, stride=(8, 1))
        >>> spec.itemsize, spec.numel, spec.span
        (2, 6, 11)
        >>> spec.outer_dims(), spec.device, spec.device_index
        ([(1, 3), (8, 2)], 'cuda', None)
        >>> TensorSpec.of(torch.zeros(2, 3), "x").stride
        (3, 1)
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] = None  # type: ignore[assignment]  # contiguous
    device: str = "cuda"

    if TYPE_CHECKING:  # what a caller may give; the fields are what is kept of it

        def __init__(
            self,
            shape: Iterable[int],
            dtype: str | torch.dtype,
            stride: Iterable[int] | None = None,
            device: str | torch.device = "cuda",
        ) -> None: ...

    def __post_init__(self) -> None:
        shape = _integers("shape", self.shape)
        stride = contiguous_stride(shape) if self.stride is None else _integers("stride", self.stride)
        if any(n < 0 for n in shape):
            raise ContractError(f"shape: wanted extents of 0 or more, got {format_shape(shape)}")
        if len(stride) != len(shape):
            raise ContractError(f"stride: wanted {len(shape)} strides for shape {format_shape(shape)}, got {stride}")
        for key, value in (("shape", shape), ("stride", stride)):
            object.__setattr__(self, key, value)
        device = f"cuda:{self.device}" if type(self.device) is int else str(self.device)
        if not (_DEVICE.fullmatch(device) and _is_named(self.device, "device")):
            raise ContractError(
                f"device: wanted a device such as 'cuda', 'cuda:1' or 'meta', got {described(self.device)}"
            )
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        object.__setattr__(self, "device", device)

    @classmethod
    def of(cls, x: Any, name: str) -> TensorSpec:
        """Metadata of a torch tensor (real, meta or fake), or `x` itself when it is a TensorSpec.

        Raises:
            ContractError: `x` is neither, or a tensor without strides (sparse, nested); the text names `name`.
        """
        if isinstance(x, TensorSpec):
            return x
        if getattr(x, "is_nested", False):  # and has no shape
            raise ContractError(f"{name}: wanted a strided tensor, got a nested one")
        if not all(hasattr(x, attribute) for attribute in _TENSOR_ATTRIBUTES):
            raise ContractError(f"{name}: wanted a torch.Tensor or TensorSpec, got {kind_of(x)}")
        if str(x.layout) != "torch.strided":
            raise ContractError(f"{name}: wanted a strided tensor, got layout {x.layout}")
        return cls(tuple(x.shape), x.dtype, tuple(x.stride()), x.device)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def span(self) -> int:
        """Elements from the first to the last one in memory, both included; 0 when empty."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if self.numel else 0

    @property
    def device_index(self) -> int | None:
        """The GPU's number, None where none is named."""
        kind, _, index = self.device.partition(":")
        return int(index) if kind == "cuda" and index else None

    def outer_dims(self) -> list[tuple[int, int]]:
        """``(stride, extent)`` of every dim of more than one element, smallest stride first."""
        return outer_dims(self.shape, self.stride)


def _is_named(value: Any, kind: str) -> bool:
    """Whether it is a text, the number of a device, or torch's own object of a kind."""
    return isinstance(value, str) or type(value).__name__ == kind or (kind == "device" and type(value) is int)


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if not (_is_named(dtype, "dtype") and name.isidentifier()):
        raise ContractError(f"dtype: wanted a dtype of torch or its name, got {described(dtype)}")
    return name


def _integers(name: str, values: Any) -> tuple[int, ...]:
    """Extents or strides as ints."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or hasattr(values, "layout"):
        raise ContractError(f"{name}: wanted a tuple of ints, got {described(values)}")
    return tuple(int(integer(name, value)) for value in values)


def format_shape(values: Iterable[object]) -> str:
    """``(512, 1000)``, ``(4)``, ``()``: as errors print shapes and strides."""
    return f"({', '.join(map(str, values))})"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))

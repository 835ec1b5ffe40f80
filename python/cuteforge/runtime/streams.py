"""Streams as the compiled entries take them: raw handles. Handle 0 is the default stream and nothing else."""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol, SupportsInt

from cuteforge.arguments import described
from cuteforge.errors import ContractError

_MOST_HANDLE = 2**64 - 1  # an address


class _TorchStream(Protocol):
    """An object with torch's name for its raw handle."""

    @property
    def cuda_stream(self) -> int: ...


class _CudaStream(Protocol):
    """An object that speaks the protocol of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


# Type checkers see a raw handle and the streams of cuda.bindings as numbers.
Stream = _TorchStream | _CudaStream | SupportsInt
"""What an argument `stream` takes beside None: a `torch.cuda.Stream`, a CUstream or cudaStream_t of cuda.bindings, an
object with
``__cuda_stream__``, or a raw handle as an int. Handle 0 is the default stream.

Examples:
    >>> import torch
    >>> from cuteforge import rotary_wrapper
    >>> x, freqs_cis = torch.randn(8, 4, 128, device="cuda"), torch.randn(8, 64, 2, device="cuda")
    >>> side = torch.cuda.Stream()
    >>> side.wait_stream(torch.cuda.current_stream())
    >>> out = rotary_wrapper(x, freqs_cis, stream=side)["out"]
    >>> torch.cuda.current_stream().wait_stream(side)
    >>> out.shape
    torch.Size([8, 4, 128])
"""


@functools.cache
def current_stream_query() -> Callable[[int], int]:
    """torch's function `device_index -> raw handle of the current stream`.

    `torch.cuda.current_stream(i).cuda_stream` builds a Stream object, 8 us; the function that torch's own compiler
    emits calls to takes 0.1 us. The public way remains for a torch that drops it.
    """
    import torch

    query = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return query or (lambda device_index: torch.cuda.current_stream(device_index).cuda_stream)


def current_stream_handle(device_index: int) -> int:
    """Raw handle of torch's current stream of GPU `device_index`."""
    return current_stream_query()(device_index)


def stream_handle(stream: Any, device_index: int) -> int:
    """Raw handle of `stream`.

    Args:
        stream: None (torch's current stream of the GPU), a torch.cuda.Stream, a raw handle as an int (0 is the default
            stream), a cuda.bindings CUstream or cudaStream_t, or any object with `__cuda_stream__` or `cuda_stream`.
        device_index: the GPU that the launch is for.

    Raises:
        ContractError: none of these, or a stream of another GPU.
    """
    if stream is None:
        return current_stream_handle(device_index)
    if isinstance(stream, numbers.Integral) and not isinstance(stream, bool):
        handle = int(stream)
    else:
        _check_device(stream, device_index)
        handle = _object_handle(stream)
    if handle is None or not 0 <= handle <= _MOST_HANDLE:
        wanted = "a torch.cuda.Stream, a CUstream, a raw handle >= 0 or an object with __cuda_stream__"
        raise ContractError(f"stream: wanted {wanted}, got {described(stream)}")
    return handle


def _check_device(stream: Any, device_index: int) -> None:
    """Refuse a stream object that says that it belongs to another GPU. Raw CUDA handles do not say."""
    owner = getattr(stream, "device_index", None)
    if isinstance(owner, int) and owner != device_index:
        raise ContractError(f"stream: wanted a stream of cuda:{device_index}, got one of cuda:{owner}")


def _object_handle(stream: Any) -> int | None:
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # (protocol version, handle); the first release of cuda.core had the pair as an attribute.
        return int((protocol() if callable(protocol) else protocol)[1])
    if type(stream).__name__ in ("CUstream", "cudaStream_t"):
        return int(stream)
    return None


def _device_index(device: Any) -> int:
    """GPU number of an index, a torch.device or its text."""
    import torch

    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _torch_stream(stream: Any, device_index: int) -> Any:
    """`stream` as a torch stream; a foreign handle is wrapped, not owned."""
    import torch

    if isinstance(stream, torch.cuda.Stream):
        _check_device(stream, device_index)
        return stream
    handle = stream_handle(stream, device_index)
    if handle == 0:
        return torch.cuda.default_stream(device_index)
    return torch.cuda.ExternalStream(handle, device=device_index)


def record_streams(tensors: Iterable[Any], stream: Any, device: Any) -> None:
    """Tell torch's allocator that `stream` uses `tensors`, so memory freed by the caller is not reused too early.

    Args:
        tensors: CUDA tensors; None entries are skipped.
        stream: as in `stream_handle`.
        device: torch.device or index of the GPU.
    """
    on_stream = _torch_stream(stream, _device_index(device))
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(on_stream)


def stream_context(stream: Any, device: Any) -> contextlib.AbstractContextManager:
    """A context in which torch allocates, copies and launches on `stream` of `device`.

    `stream` is as in `stream_handle`; None keeps the current stream of `device`. Current device and stream are
    restored on exit.
    """
    import torch

    device_index = _device_index(device)
    if stream is None:
        return torch.cuda.device(device_index)
    return torch.cuda.stream(_torch_stream(stream, device_index))


def is_capturing() -> bool:
    """Whether torch's current stream is capturing a CUDA graph. False without CUDA; never initializes it."""
    torch = sys.modules.get("torch")
    # A torch built without CUDA raises from the query; without a context nothing can be capturing.
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

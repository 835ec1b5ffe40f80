"""Launching a loaded kernel. The compiled entry checks its operands, switches to their device and switches back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.runtime import env, streams
from cuteforge.runtime.compile_cache import Kernel

try:
    from torch._C import _increment_version as count_writes
except ImportError:  # the public one calls it, and takes 0.3 us more
    from torch.autograd.graph import increment_version as count_writes

# cudaErrorNoKernelImageForDevice in the texts of the run time and the driver.
_WRONG_ARCH_SIGNS = ("NoKernelImageForDevice", "no kernel image")


def entry_of(kernel: Kernel) -> Callable[..., None]:
    """``entry(*tensors, *scalars, raw_stream)`` of `kernel`, in an NVTX range if CUTEFORGE_NVTX asks for one now.

    Operands that the entry refuses raise before anything is launched (`translate_error` says what). The current device
    may be any: the entry launches on the device of the tensors and restores the current one.
    """
    return functools.partial(_launch_in_range, kernel) if env.nvtx() else kernel.entry


def _launch_in_range(kernel: Kernel, *args: Any) -> None:
    import torch

    with torch.cuda.nvtx.range(f"cuteforge {kernel.key.builder}"):
        kernel.entry(*args)


def bound_launch(
    kernel: Kernel, tensors: Sequence[Any], scalars: Sequence[Any], stream: Any = None, written: tuple = ()
) -> Callable[[], None]:
    """A function that launches `kernel` on the same operands at each call, for the host cost of integer pointers.

    CUTEFORGE_NVTX is read here, once.

    Args:
        kernel: the kernel.
        tensors: CUDA tensors of one device, and None for what the kernel does not have; the first is a tensor. They are
            kept alive. Their storage must not be moved or resized.
        scalars: run-time scalars.
        stream: as in `streams.stream_handle`; None takes torch's current stream of the tensors' device at each call.
        written: tensors that each call counts as a write of.
    """
    import tvm_ffi

    device_index = tensors[0].device.index
    # detach: torch refuses to export a tensor that requires grad. Each view keeps its storage alive.
    given = (None if tensor is None else tvm_ffi.from_dlpack(tensor.detach()) for tensor in tensors)
    args = (*given, *scalars)
    prepared = functools.partial(entry_of(kernel), *args)
    if stream is None:
        current_stream = streams.current_stream_query()

        def launch() -> None:
            prepared(current_stream(device_index))
            count_writes(written)

        return launch

    handle = streams.stream_handle(stream, device_index)

    def launch_on_stream() -> None:
        prepared(handle)
        count_writes(written)

    # The handle is valid as long as the stream object.
    launch_on_stream.stream = stream
    return launch_on_stream


def translate_error(error: Exception) -> Exception:
    """The library's error for one that a compiled entry raised; `error` itself if it is of another kind.

    A refused operand (TypeError, ValueError; nothing was launched) becomes a ContractError with the entry's own text,
    code for another architecture an UnsupportedError. Raise it `from error`.
    """
    text = str(error).strip()
    if isinstance(error, (TypeError, ValueError)):
        return ContractError(text)
    if isinstance(error, RuntimeError) and any(sign in text for sign in _WRONG_ARCH_SIGNS):
        return UnsupportedError(f"the kernel was compiled for another GPU architecture: {text}")
    return error

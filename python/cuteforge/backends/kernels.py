"""The library's kernels by name, and why one does not run somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.attention import GQADecode, GQAPrefill, MergeState, PagedGQADecode, PagedGQAPrefill
from cuteforge.families.csa.compressor import CSACompressorBackward, CSACompressorForward
from cuteforge.families.rotary import RotaryEmbedding
from cuteforge.op.base import APIBase
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.runtime import arch, cutlass_compat, env

Spec = Callable[..., TensorSpec]

# A common call of each kernel: ``sample(spec)``, where ``spec(*shape, dtype=bfloat16)`` is a tensor on the device in
# question.
_SAMPLES: dict[str, Callable[[Spec], APIBase]] = {
    "gqa_decode": lambda spec: GQADecode(*[spec(1, 1, 1, 128)] * 4),
    "gqa_prefill": lambda spec: GQAPrefill(*[spec(1, 1, 1, 128)] * 4),
    "paged_gqa_decode": lambda spec: PagedGQADecode(
        spec(1, 1, 128), *[spec(1, 16, 1, 128)] * 2, spec(1, 1, dtype="int32"), spec(1, 1, 128),
        seqlens_k=spec(1, dtype="int32"),
    ),
    "paged_gqa_prefill": lambda spec: PagedGQAPrefill(
        spec(1, 1, 128), *[spec(1, 16, 1, 128)] * 2, spec(1, 1, dtype="int32"), spec(2, dtype="int32"), spec(1, 1, 128),
        seqlens_k=spec(1, dtype="int32"),
    ),
    "merge_state": lambda spec: MergeState(*[spec(1, 1, 128), spec(1, 1, dtype="float32")] * 3),
    "rotary": lambda spec: RotaryEmbedding(spec(1, 1, 128), spec(1, 64, 2, dtype="float32"), spec(1, 1, 128)),
    "csa_compressor_forward": lambda spec: CSACompressorForward(*_compressor_inputs(spec), spec(1, 128)),
    "csa_compressor_backward": lambda spec: CSACompressorBackward(
        *_compressor_inputs(spec), spec(1, 128), *[spec(4, 256)] * 2, spec(4, 256, dtype="float32")
    ),
}  # fmt: skip

KERNEL_NAMES: tuple[str, ...] = tuple(_SAMPLES)
"""The names of the kernels, as `is_available` takes them.

Examples:
    >>> from cuteforge import KERNEL_NAMES, is_available
    >>> "rotary" in KERNEL_NAMES
    True
    >>> missing = [name for name in KERNEL_NAMES if not is_available(name)]
"""


def is_available(name: str) -> bool:
    """Whether a kernel runs on torch's current GPU: there is one, the kernel serves it, a compiler is installed, and
    CUTEFORGE_KERNELS is not 0.

    Raises:
        ContractError: `name` is not one of KERNEL_NAMES.

    Examples:
        >>> import torch
        >>> from cuteforge import attention, is_available
        >>> device = "cuda" if is_available("gqa_prefill") else "cpu"
        >>> q = k = v = torch.randn(1, 64, 8, 64, device=device, dtype=torch.bfloat16)
        >>> attention(q, k, v).shape
        torch.Size([1, 64, 8, 64])
    """
    if not isinstance(name, str) or name not in _SAMPLES:
        raise ContractError(f"name: wanted one of {', '.join(KERNEL_NAMES)}, got {name!r}")
    if not torch.cuda.is_available():
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    return next(kernel_refusals(device, _SAMPLES[name]), None) is None


def kernel_refusals(
    device: torch.device, sample: Callable[[Spec], APIBase], target: arch.Arch | None = None
) -> Iterator[str]:
    """Why the op ``sample(spec)`` does not run on `device`, in sentences; none where it does.

    Args:
        target: the architecture that counts instead of that of `device`, which need not be here.
    """
    if not env.kernels():
        yield env.KERNELS_OFF
    is_gpu = device.type == "cuda"
    if not is_gpu:
        yield f"the kernels run on CUDA, this call is on {device}"

    def spec(*shape: int, dtype: Any = "bfloat16") -> TensorSpec:
        return TensorSpec(shape, dtype, device=str(device) if is_gpu else "cuda")

    try:
        op = sample(spec)
        op.check_support()
        if target is not None:
            op._check_arch(op.dims, target)
        elif is_gpu:
            _check_toolchain(device)
    except (ContractError, UnsupportedError) as error:
        yield str(error)


def target_of(arch_name: str | None) -> arch.Arch | None:
    """The architecture that `explain` is asked for.

    Raises:
        ContractError: not the name of one.
        UnsupportedError: below compute capability 8.0.
    """
    return None if arch_name is None else arch.resolve_arch(arch_name, None)


def arch_of(device: torch.device, target: arch.Arch | None) -> arch.Arch | None:
    """The architecture that a kernel for tensors on `device` is compiled for; None where there is no GPU."""
    return target or (arch.resolve_arch(None, device.index) if device.type == "cuda" else None)


def spec_like(tensor: torch.Tensor) -> TensorSpec:
    """A tensor of this shape and dtype on any GPU, in rows that kernels read."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _check_toolchain(device: torch.device) -> None:
    """Refuse a GPU that the code compiled here would not run on."""
    target = arch.resolve_arch(None, device.index).name
    major, minor = torch.cuda.get_device_capability(device)
    if not arch.runs_on(target, (major, minor)):
        raise UnsupportedError(f"CUTEFORGE_ARCH={target} is not run by {device} of compute capability {major}.{minor}")
    cutlass_compat.toolchain_fingerprint()


def _compressor_inputs(spec: Spec) -> tuple[TensorSpec, ...]:
    offsets = spec(2, dtype="int32")
    return spec(4, 256), spec(4, 256), spec(4, 256, dtype="float32"), offsets, offsets

"""torch's own attention on our kernels: ``F.scaled_dot_product_attention``, ``varlen_attn``, context parallel.

torch lets a library take the place of its flash attention (`torch.nn.attention.register_flash_attention_impl`). What
calls torch's attention, a model or another library, is served without a change.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.library import Library

from cuteforge.arguments import described, flag
from cuteforge.errors import ContractError
from cuteforge.integrations.aten_attention import CudnnCall, FlashCall, Served, new_generator_state
from cuteforge.integrations.versions import require_torch_operator, require_torch_registry

require_torch_registry()
from torch.nn.attention import (  # noqa: E402
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

FORWARD, FORWARD_INTO = "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace"
CUDNN = "_scaled_dot_product_cudnn_attention"

Kernel = Callable[..., Any]
# The names that `register` has given to torch, and whether each leaves cuDNN's attention on.
_keeps_cudnn: dict[str, bool] = {}


class Handle:
    """What one call of `register` did, and the way back. As a context manager it goes back at the end of the block.

    Examples:
        >>> from cuteforge.integrations.torch_sdpa import register
        >>> with register() as handle:
        ...     print(handle.is_active)
        True
        >>> handle.is_active
        False
    """

    def __init__(self, name: str, before: str | None) -> None:
        self.name = name
        self._before = before

    @property
    def is_active(self) -> bool:
        """Whether torch's attention is served under this name now."""
        return current_flash_attention_impl() == self.name

    def remove(self) -> None:
        """Put back what served torch's flash attention before: torch's own kernels, or another implementation.

        Does nothing if `register` found the name active already, or if something else has taken its place since.
        Doing it twice is harmless. Call it between steps: a forward and its backward should see the same state.
        """
        if not self.is_active or self._before == self.name:
            return
        if self._before is None:
            restore_flash_attention_impl()
        else:
            activate_flash_attention_impl(self._before)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def register(name: str = "cuteforge", *, keep_cudnn: bool = True) -> Handle:
    """Serve torch's own attention by the kernels, in the whole process, until the handle's `remove`.

    Served, on any model and without a change of it: ``F.scaled_dot_product_attention``,
    ``torch.nn.attention.varlen.varlen_attn`` and ``varlen_attn_out`` (packed, and over pages with ``block_table``),
    ``causal_lower_right``, and context parallel, which all call torch's flash attention.

    A call is served if it is in bf16 or fp16 on a GPU of compute capability 8.0 or more, with a head dim of 8, 16, ...
    256, without mask, bias or dropout. Everything else runs as it did before, by the kernel that was there before:
    other dtypes and head dims, dropout, ALiBi, ``return_debug_mask``, ``seqused_k`` without ``block_table``, and
    ``num_splits=1``, which asks for the same bits whatever else is in the batch. So does every call while
    ``CUTEFORGE_KERNELS=0`` is set, where the kernels cannot run, and where `attn_backend` or ``CUTEFORGE_BACKEND``
    asks for another backend. Masks never reach torch's flash attention.

    On sm_90 and sm_100 torch asks cuDNN before flash attention. There the calls that need no gradient are served in
    cuDNN's place. Training, masks and dropout stay with cuDNN, which has a backward kernel of its own; so do, with
    torch 2.14, calls of ``varlen_attn`` with more than 128 query tokens that have neither a window nor head groups.

    Args:
        name: under which torch lists it (`torch.nn.attention.list_flash_attention_impls`). Registering an active name
            again is free.
        keep_cudnn: False turns cuDNN's attention off until `remove` (`torch.backends.cuda.enable_cudnn_sdp`). Then
            training and context parallel are served on sm_90 and sm_100 too; masks and dropout go to other kernels of
            torch.

    Returns:
        The handle that puts back what was there before; also a context manager. `restore_flash_attention_impl` of torch
        goes back to torch's own kernels.

    Gradients: the forward is ours, the backward is torch's flash attention, which needs no more than the log-sum-exps.

    Numerics: as `cuteforge.attention`; log-sum-exps are fp32, natural logarithms. A query that sees no key gives 0 and
    -inf, where torch's kernel says inf.

    Under a second name the second one serves, until its handle gives back to the first; one name is active at a time.
    A `torch.library.Library` of yours that has overridden the same operators gets what is handed on. Keep it alive
    until `remove`: torch raises RuntimeError for a call that is handed on to a library that is gone.

    What torch.compile or a CUDA graph has captured keeps the kernels of that time: register first. Needs torch 2.11 or
    newer, and for pages one whose `varlen_attn` has ``block_table``.

    Raises:
        ContractError: a name that means another implementation to torch, or one that is active with another
            `keep_cudnn`.
        UnsupportedError: this torch has no such registry, or other operators.

    Examples:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from cuteforge.integrations.torch_sdpa import register
        >>> device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        >>> q = torch.randn(1, 8, 64, 64, device=device, dtype=dtype)
        >>> k, v = torch.randn(2, 1, 2, 64, 64, device=device, dtype=dtype)
        >>> handle = register()
        >>> scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).shape
        torch.Size([1, 8, 64, 64])
        >>> handle.remove()
    """
    keep_cudnn = flag("keep_cudnn", keep_cudnn)
    if not isinstance(name, str) or not name:
        raise ContractError(f"name: wanted a string, got {described(name)}")
    if name in list_flash_attention_impls() and name not in _keeps_cudnn:
        raise ContractError(f"name: wanted one that torch gives no meaning of its own, got {name!r}")
    before = current_flash_attention_impl()
    if before == name:
        if _keeps_cudnn[name] is not keep_cudnn:
            raise ContractError(f"keep_cudnn: wanted {not keep_cudnn}, with which {name!r} is active, got {keep_cudnn}")
        return Handle(name, before)
    _check_operators()
    register_flash_attention_impl(name, register_fn=functools.partial(_Activation, keep_cudnn))
    _keeps_cudnn[name] = keep_cudnn
    activate_flash_attention_impl(name)
    return Handle(name, before)


class _Activation:
    """What torch calls to activate, and later removes."""

    def __init__(self, keep_cudnn: bool) -> None:
        self._library: Library | None = override("CUDA", kernels_of(Served()))
        self._cudnn_was_on = not keep_cudnn and torch.backends.cuda.cudnn_sdp_enabled()
        if self._cudnn_was_on:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        self._library = None  # torch takes its kernels along
        if self._cudnn_was_on:
            torch.backends.cuda.enable_cudnn_sdp(True)
            self._cudnn_was_on = False


def override(dispatch_key: str, kernels: Mapping[str, Callable[[Kernel], Kernel]]) -> Library:
    """A library that overrides operators of aten for one dispatch key as long as it lives.

    Another Python library may have overridden them before: it gets what ours hands on, and serves again when ours is
    gone.

    Args:
        kernels: by the name of an operator, what makes its kernel from the one that was there before. The former is
            called with the dispatcher's key set and the arguments, and so is the latter.
    """
    library = Library("aten", "IMPL", dispatch_key)
    for name, make in kernels.items():
        kernel = make(_kernel_before(name, dispatch_key))
        with warnings.catch_warnings():
            # torch says once in a process that a kernel is overridden, which is what we are here for
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            # unless told, torch 2.11 refuses an operator that Python has overridden already
            library.impl(name, kernel, dispatch_key, with_keyset=True, allow_override=True)
    return library


def _kernel_before(name: str, dispatch_key: str) -> Kernel:
    """The kernel of an operator as it is now; it stays callable when another takes its place."""
    try:
        return torch.library.get_kernel(f"aten::{name}", dispatch_key).call_boxed
    except RuntimeError:  # a torch without kernels for this key: nobody gets here with such tensors

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"aten::{name} has no kernel of torch for {dispatch_key}, which the call needs")

        return refuse


def kernels_of(served: Served) -> dict[str, Callable[[Kernel], Kernel]]:
    """Makers of the kernels of the operators that this torch has."""
    makers = {
        FORWARD: functools.partial(_forward, served),
        FORWARD_INTO: functools.partial(_forward_into, served),
        CUDNN: functools.partial(_cudnn, served),
    }
    return {name: make for name, make in makers.items() if hasattr(torch.ops.aten, name)}


def _check_operators() -> None:
    """Refuse a torch whose operators take their arguments in another order."""
    flash = FlashCall._fields[: -len(FlashCall._field_defaults)]
    require_torch_operator(FORWARD, flash)
    for name, names in ((FORWARD_INTO, ("out", *flash)), (CUDNN, CudnnCall._fields[:-1])):
        if hasattr(torch.ops.aten, name):
            require_torch_operator(name, names)


def _forward(served: Served, before: Kernel) -> Kernel:
    """The kernel of ``_flash_attention_forward``."""

    def kernel(keys: Any, *args: Any, **options: Any) -> tuple:
        results = served.flash(FlashCall(*args, **options)) if _FLASH_NAMES.issuperset(options) else None
        if results is None:
            return before(keys, *args, **options)
        return *results, *new_generator_state(results[0])

    return kernel


def _forward_into(served: Served, before: Kernel) -> Kernel:
    """The kernel of ``_flash_attention_forward_no_dropout_inplace``."""

    def kernel(keys: Any, out: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        results = None
        if _FLASH_NAMES.issuperset(options) and out.shape == args[0].shape and out.dtype == args[0].dtype:
            results = served.flash(FlashCall(*args, **options), out)
        return before(keys, out, *args, **options) if results is None else results[1]

    return kernel


def _cudnn(served: Served, before: Kernel) -> Kernel:
    """The kernel of ``_scaled_dot_product_cudnn_attention``."""

    def kernel(keys: Any, *args: Any, **options: Any) -> tuple:
        call = CudnnCall(*args, **options) if _CUDNN_NAMES.issuperset(options) else None
        out = None if call is None else served.cudnn(call)
        if out is None:
            return before(keys, *args, **options)
        seed, offset = (out.new_empty((), dtype=torch.int64) for _ in range(2))
        return out, None, None, None, call.query.shape[2], call.key.shape[2], seed, offset, None

    return kernel


_FLASH_NAMES, _CUDNN_NAMES = frozenset(FlashCall._fields), frozenset(CudnnCall._fields)

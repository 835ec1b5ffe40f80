"""What an attention backend is, and the facts of a call that it may refuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from cuteforge.arguments import described, kind_of
from cuteforge.errors import ContractError
from cuteforge.families.attention.api import MAX_DECODE_TOKENS
from cuteforge.op.checks import check_layout

if TYPE_CHECKING:
    from cuteforge.runtime.arch import Arch
    from cuteforge.runtime.kernel_facts import KernelFacts
    from cuteforge.serving.batch import Batch
    from cuteforge.serving.kv_cache import KVCache

DECODE, PREFILL = "decode", "prefill"
# What a call may ask for beyond plain attention, by the name of the argument; "bias" is an `attn_mask` that is added.
OPTIONS = ("window", "softcap", "sinks", "bias")


class Request(NamedTuple):
    """The facts of a call of `attention` that decide who serves it. Sizes that change from call to call are not among
    them.

    Attributes:
        device, dtype: of q.
        head_dim, v_dim, num_heads, num_kv_heads: D, Dv, Hq and Hkv.
        fwd: ``"decode"`` or ``"prefill"``.
        is_cached: over a KVCache.
        has_mask, is_causal: whether the call has a bool mask, and whether it is causal.
        derivative: ``"graph"``, for a graph of autograd in grad mode; ``"transform"``, for torch.func or forward mode;
            or None.
        options: which of ``"window"``, ``"softcap"``, ``"sinks"`` and ``"bias"`` the call has.
        target: the architecture that `explain` asks for; the GPU of `device` need not be here then.

    Examples:
        >>> import torch
        >>> from cuteforge.backends.interface import Request
        >>> heads = {"head_dim": 128, "v_dim": 128, "num_heads": 32, "num_kv_heads": 8}
        >>> facts = {"fwd": "decode", "is_cached": False, "has_mask": False, "is_causal": True, "derivative": None}
        >>> request = Request(torch.device("cuda:0"), torch.bfloat16, **heads, **facts, options=("window",))
        >>> request._replace(options=()).options
        ()
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_dim: int
    num_heads: int
    num_kv_heads: int
    fwd: str
    is_cached: bool
    has_mask: bool
    is_causal: bool
    derivative: str | None
    options: tuple[str, ...] = ()
    target: Arch | None = None


class AttentionCall(NamedTuple):
    """The arguments of a call of `attention`, checked."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_cache: KVCache | None
    layer_id: int
    attn_mask: torch.Tensor | None
    is_causal: bool
    fwd: str
    options: dict[str, Any]


class AttentionBackend(ABC):
    """An implementation of attention that the policy may choose. Derive from it and call `register_backend`.

    Attributes:
        name: what users ask for it by.
        priority: backends with a larger number are asked first. The library's own have 100 (cuda), 50 (flash) and 0
            (torch_native, which serves everything). One below 0, as by default, serves only where it is asked for.
        options: which of ``"window"``, ``"softcap"``, ``"sinks"`` and ``"bias"`` it takes. They are passed as keyword
            arguments, and only in calls that have them. An `attn_mask` of a floating dtype is passed as `bias`,
            ``(1|B, 1|Hq, 1|L, S)``, and `attn_mask` is None then. A backend is never asked for a call with an option
            that it does not take.

    Examples:
        >>> import torch
        >>> from cuteforge import AttentionBackend, attention
        >>> class Mean(AttentionBackend):
        ...     name = "mean"
        ...     def refuse(self, request):
        ...         return "mean weighs all keys the same and takes no mask" if request.has_mask else None
        ...     def fwd_prefill(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale):
        ...         return v.mean(1, keepdim=True).expand(*q.shape[:3], -1).clone()
        ...     fwd_decode = fwd_prefill
        >>> q = k = v = torch.randn(1, 16, 8, 64)
        >>> torch.testing.assert_close(attention(q, k, v, backend=Mean), attention(q, k, v, scale=0.0))
    """

    name: ClassVar[str]
    priority: ClassVar[int] = -1
    options: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def refuse(self, request: Request) -> str | None:
        """Why calls with these facts are not served, as a sentence that names the limit, or None. Asked once for equal
        facts.

        Examples:
            >>> import torch
            >>> from cuteforge import CudaBackend
            >>> from cuteforge.backends.interface import Request
            >>> heads = {"head_dim": 128, "v_dim": 128, "num_heads": 32, "num_kv_heads": 8}
            >>> facts = {"fwd": "decode", "is_cached": False, "has_mask": False, "is_causal": True, "derivative": None}
            >>> CudaBackend().refuse(Request(torch.device("cpu"), torch.bfloat16, **heads, **facts))
            'the kernels run on CUDA, this call is on cpu'
        """

    @abstractmethod
    def fwd_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache | None, layer_id: int,
        attn_mask: torch.Tensor | None, is_causal: bool, scale: float | None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of a few query tokens; arguments and result as those of `attention`. Stores k and v in the cache,
        if there is one.

        Examples:
            >>> import torch
            >>> from cuteforge import TorchNativeBackend
            >>> q, (k, v) = torch.randn(2, 1, 8, 64), torch.randn(2, 2, 7, 2, 64)
            >>> call = {"kv_cache": None, "layer_id": 0, "attn_mask": None, "is_causal": False, "scale": None}
            >>> TorchNativeBackend().fwd_decode(q, k, v, **call, softcap=30.0).shape
            torch.Size([2, 1, 8, 64])
        """

    @abstractmethod
    def fwd_prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache | None, layer_id: int,
        attn_mask: torch.Tensor | None, is_causal: bool, scale: float | None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of many query tokens; otherwise as `fwd_decode`.

        Examples:
            >>> import torch
            >>> from cuteforge import TorchNativeBackend
            >>> q, (k, v) = torch.randn(2, 7, 8, 64), torch.randn(2, 2, 7, 2, 64)
            >>> call = {"kv_cache": None, "layer_id": 0, "attn_mask": None, "is_causal": True, "scale": None}
            >>> TorchNativeBackend().fwd_prefill(q, k, v, **call).shape
            torch.Size([2, 7, 8, 64])
        """

    def replay(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool, fwd:
        str, scale: float | None
    ) -> Any:  # fmt: skip
        """How later calls like this one, which has just been served, may skip the choice.

        Returns:
            An `op.replay.Replay` of q, k, v and the mask, or None: then each call is chosen for.

        Examples:
            >>> import torch
            >>> from cuteforge import TorchNativeBackend
            >>> q = k = v = torch.randn(1, 16, 8, 64)
            >>> TorchNativeBackend().replay(q, k, v, None, False, "prefill", None) is None
            True
        """
        return None

    def describe(self, call: AttentionCall, arch: Arch) -> KernelFacts | None:
        """What the backend runs for a call that it serves, on a GPU of `arch`; None where it does not say.

        Examples:
            >>> import torch
            >>> from cuteforge import attention, explain
            >>> q = k = v = torch.empty(1, 16, 8, 64, dtype=torch.bfloat16, device="meta")
            >>> explain(attention, q, k, v, arch="sm_90a", backend="torch_native").kernel is None
            True
        """
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache | None = None, layer_id: int = 0,
        attn_mask: torch.Tensor | None = None, is_causal: bool = False, fwd: str | None = None, *, scale: float | None =
        None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Run `fwd_decode` or `fwd_prefill`, as `fwd` says; if it is None, as the cache is bound, or by the number of
        query tokens.

        Examples:
            >>> import torch
            >>> from cuteforge import TorchNativeBackend
            >>> q, (k, v) = torch.randn(2, 1, 8, 64), torch.randn(2, 2, 7, 2, 64)
            >>> TorchNativeBackend().forward(q, k, v).shape  # one query token: fwd_decode
            torch.Size([2, 1, 8, 64])
        """
        run = self.fwd_decode if find_fwd(q, kv_cache, fwd) == DECODE else self.fwd_prefill
        return run(q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale, **options)


def refusal_of(backend: AttentionBackend, request: Request) -> str | None:
    """Why a backend does not serve calls with these facts, or None."""
    return unserved_options(backend, request.options) or backend.refuse(request)


def unserved_options(backend: AttentionBackend, options: Iterable[str]) -> str | None:
    """Which of the options of a call a backend does not take, as a sentence, or None."""
    missing = [option for option in options if option not in backend.options]
    return f"takes no {' and no '.join(missing)}" if missing else None


def find_fwd(q: torch.Tensor, kv_cache: KVCache | None, fwd: str | None) -> str:
    """``"decode"`` or ``"prefill"``: `fwd`, or else with a cache what it is bound to, and without one decode up to 16
    query tokens.

    Raises:
        ContractError: `fwd` is neither, or decode over a cache that is bound to a prefill; or the cache is not bound.
    """
    if fwd is not None and not (isinstance(fwd, str) and fwd in (DECODE, PREFILL)):
        raise ContractError(f"fwd: wanted None, {DECODE!r} or {PREFILL!r}, got {described(fwd)}")
    if kv_cache is None:
        return fwd or (DECODE if q.shape[1] <= MAX_DECODE_TOKENS else PREFILL)
    is_decode = bound_batch(kv_cache).is_decode
    if fwd == DECODE and not is_decode:
        raise ContractError(f"fwd: wanted None or {PREFILL!r} for a cache that bind_prefill bound, got {fwd!r}")
    return fwd or (DECODE if is_decode else PREFILL)


def mark_stored(kv_cache: Any, layer_id: int) -> None:
    """Tell a cache that a kernel has stored the batch's tokens in a layer. Other classes need no `mark_stored`."""
    mark = getattr(kv_cache, "mark_stored", None)
    if mark is not None:
        mark(layer_id)


def bound_batch(kv_cache: Any) -> Batch:
    """The batch that the cache is bound to.

    Raises:
        ContractError: none.
    """
    if isinstance(kv_cache, type) or not hasattr(kv_cache, "batch"):
        hint = "; a mask is the argument attn_mask" if isinstance(kv_cache, torch.Tensor) else ""
        raise ContractError(f"kv_cache: wanted a KVCache or None, got {described(kv_cache)}{hint}")
    if kv_cache.batch is None:
        raise ContractError("kv_cache: wanted one with a batch, by bind_prefill or bind_decode, got none bound")
    return kv_cache.batch


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The new tokens of a bound batch as ``(T, H, D)``: in decode they may come as ``(B, 1, H, D)``."""
    return tuple(x if x.dim() == 3 else _without_length(name, x) for name, x in zip("qkv", (q, k, v)))


def _without_length(name: str, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] != 1:
        raise ContractError(f"{name}: wanted shape (T, H, D), or (B, 1, H, D) in decode, got {tuple(x.shape)}")
    return x.squeeze(1)


def check_operands(q: Any, k: Any, v: Any, kv_cache: Any) -> None:
    """Refuse what is no tensor, and ranks that no call has.

    Raises:
        ContractError: names the argument.
    """
    for name, x in zip("qkv", (q, k, v)):
        require_tensor(name, x)
    ranks = q.dim(), k.dim(), v.dim()
    if ranks == (4, 4, 4) or (kv_cache is not None and ranks == (3, 3, 3)):
        return
    for name, rank, x in zip("qkv", ranks, (q, k, v)):
        tail = f"{'Hq' if name == 'q' else 'Hkv'}, {'Dv' if name == 'v' else 'D'})"
        served, wanted = (4,), f"(B, {'L' if name == 'q' else 'S'}, {tail}"
        if kv_cache is not None:
            served, wanted = (3, 4), f"(T, {tail}, or (B, 1, {tail} in decode"
        if rank not in served:
            raise ContractError(f"{name}: wanted shape {wanted}, got {tuple(x.shape)}")


def require_tensor(name: str, value: Any) -> None:
    """Refuse anything but a tensor, and tensors that are sparse, nested or quantized.

    Raises:
        ContractError: names the argument.
    """
    if not isinstance(value, torch.Tensor):
        raise ContractError(f"{name}: wanted a torch.Tensor, got {kind_of(value)}")
    check_layout(name, value)

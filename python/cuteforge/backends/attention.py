"""`attention`: the front door of all attention backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from cuteforge.arguments import finite, flag, integer
from cuteforge.backends import registry, sdpa
from cuteforge.backends.checks import check_agreement, check_mask_dims
from cuteforge.backends.interface import (
    AttentionBackend,
    AttentionCall,
    Request,
    check_operands,
    find_fwd,
    refusal_of,
    require_tensor,
    unserved_options,
)
from cuteforge.backends.kernels import arch_of, target_of
from cuteforge.backends.selection import Decision, Policy, constant_result, constants, derivative_of, dtype_named
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.attention.options import UNLIMITED, Window, checked_softcap, checked_window
from cuteforge.op import recall
from cuteforge.op.tracing import is_traced
from cuteforge.runtime import env

if TYPE_CHECKING:
    from cuteforge.runtime.kernel_facts import KernelFacts
    from cuteforge.serving.kv_cache import KVCache

_policy = Policy("attention", lambda: registry.backends().values(), registry.wish_for, refusal_of)
registry.on_change(_policy.forget)
registry.on_change(recall.forget)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache | None = None, layer_id: int = 0,
    attn_mask: torch.Tensor | None = None, is_causal: bool = False, fwd: str | None = None,
    backend: registry.Backend | None = None, *,
    scale: float | None = None, window: Window | None = None, softcap: float | None = None, sinks: torch.Tensor | None =
    None,
) -> torch.Tensor:  # fmt: skip
    """``softmax(scale * q k^T) v`` for every head, by the first backend that serves the call.

    Dims: B requests, L query tokens, S keys, T packed tokens; Hq query heads and Hkv KV heads with Hq = G * Hkv, where
    query head h reads KV head ``h // G``; D and Dv head dims.

    Args:
        q, k, v: without a cache ``(B, L, Hq, D)``, ``(B, S, Hkv, D)``, ``(B, S, Hkv, Dv)``, one floating dtype and
            device. With a cache the new tokens of its bound batch, packed: ``(T, Hq, D)``, ``(T, Hkv, D)``,
            ``(T, Hkv, Dv)``, or in decode ``(B, 1, H, D)``. k and v are stored in the cache, and attention runs over
            all tokens of each request. Call it once for each layer and bind.
        kv_cache: a `KVCache` after `bind_prefill` or `bind_decode`.
        layer_id: the layer of the cache.
        attn_mask: bool, True keeps a score; or of a floating dtype, added to the scaled scores after a softcap, where
            -inf masks. ``(B, S)``, ``(B, L, S)`` or ``(B, 1|Hq, 1|L, S)``; B and L of 1 are broadcast. With a cache its
            columns are positions in the request, its rows are the request's new tokens, and what it lacks counts as
            masked.
        is_causal: query i of L sees key j only if ``j <= i + (S - L)``, with L and S of the request. A mask applies on
            top.
        fwd: ``"decode"`` or ``"prefill"``. None: with a cache what was bound; without one decode for up to 16 query
            tokens.
        backend: a member of ATTN_BACKEND, a name, an AttentionBackend or a class of them: use this one or raise. None:
            the one of `attn_backend`, else of CUTEFORGE_BACKEND, else the first by priority that serves the call.
        scale: of the scores, any finite number; None is ``D**-0.5``.
        window: ``(left, right)``: query i stands at position ``p = i + (S - L)`` and sees key j only if
            ``p - left <= j <= p + right``. None on a side is no limit; `is_causal` makes right 0. A mask applies on
            top.
        softcap: a number from 1e-6 to 1e4 turns each score s into ``softcap * tanh(s / softcap)``. None or 0 leaves
            scores as they are.
        sinks: ``(Hq,)`` of a floating dtype, one more logit for each query head. It is not scaled, counts in the
            denominator, and has no value.

    Returns:
        ``(B, L, Hq, Dv)``, or with a cache the shape of q with Dv in place of D; dtype of q, new memory. A query that
        sees no key
        gives 0.

    A call that needs a gradient goes to a backend that has one. Over a cache the gradient reaches q and the new tokens'
    k and v; what earlier calls stored is constant.

    Numerics: those of the backend; sums are at least fp32, and the result is rounded once.

    Raises:
        ContractError: the arguments contradict each other; names the argument.
        UnsupportedError: no backend serves the call, or the one that was asked for does not; lists the refusals.
            Nothing was launched.

    Examples:
        >>> import torch
        >>> from cuteforge import attention
        >>> q = torch.randn(2, 5, 8, 64, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 7, 2, 64)
        >>> out = attention(q, k, v, is_causal=True)
        >>> out.shape
        torch.Size([2, 5, 8, 64])
        >>> out.sum().backward()
    """
    options, known_as = _options(window, softcap, sinks), None
    if kv_cache is None and not options and not is_traced(q):
        asked = is_causal, fwd, scale, backend, registry.context_backend(), env.backend()
        tensors, known_as = (q, k, v, attn_mask), ("attention", asked)
        results = recall.recall(known_as, tensors)
        if results is not None:
            return results[0]
    is_causal, scale, layer_id = _checked(q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale)
    if attn_mask is not None and attn_mask.dtype is not torch.bool:
        attn_mask, options, known_as = None, _with_bias(options, attn_mask), None
    request = _facts(q, k, v, kv_cache, attn_mask, is_causal, fwd, options)
    if is_dynamo_compiling():
        chosen = _choose_traced(request, backend)
    else:
        chosen = _policy.choose(request, backend, registry.context_backend())
    fwd = request.fwd
    result = chosen.forward(q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd, scale=scale, **options)
    if known_as is not None:
        recall.remember(known_as, tensors, chosen.replay, q, k, v, attn_mask, is_causal, fwd, scale)
    return result


def explain_attention(
    q, k, v, kv_cache=None, layer_id=0, attn_mask=None, is_causal=False, fwd=None, backend=None, *, scale=None,
    window=None, softcap=None, sinks=None, arch=None,
) -> Decision:  # fmt: skip
    """What `attention` would do with these arguments; see `explain`."""
    options, target = _options(window, softcap, sinks), target_of(arch)
    is_causal, _, layer_id = _checked(q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale)
    if attn_mask is not None and attn_mask.dtype is not torch.bool:
        attn_mask, options = None, _with_bias(options, attn_mask)
    request = _facts(q, k, v, kv_cache, attn_mask, is_causal, fwd, options)
    check_agreement(q, k, v, kv_cache, layer_id, attn_mask, sinks, options.get("bias"))
    if target is not None:
        request = request._replace(device=torch.device("cuda"), target=target)
    call = AttentionCall(q, k, v, kv_cache, layer_id, attn_mask, is_causal, request.fwd, options)

    def describe(chosen: AttentionBackend) -> KernelFacts | None:
        gpu = arch_of(q.device, target)
        return None if gpu is None else chosen.describe(call, gpu)

    return _policy.decide(request, backend, describe)


def _options(window, softcap, sinks) -> dict[str, Any]:
    """Those of the three that change anything, checked."""
    if window is None and softcap is None and sinks is None:
        return {}
    window, softcap = checked_window(window), checked_softcap(softcap)
    if sinks is not None:
        require_tensor("sinks", sinks)
    given = {"window": None if window == UNLIMITED else window, "softcap": softcap, "sinks": sinks}
    return {name: value for name, value in given.items() if value is not None}


def _with_bias(options: dict[str, Any], attn_mask: torch.Tensor) -> dict[str, Any]:
    """The options with a mask that is added to the scores: to backends it is one of them."""
    check_mask_dims(attn_mask)
    return options | {"bias": sdpa.with_four_dims(attn_mask)}


def _checked(q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale) -> tuple[bool, float | None, int]:
    """Check the arguments that every backend reads; returns flag, scale and layer as plain values. 0.6 us.

    Raises:
        ContractError: names the argument.
    """
    check_operands(q, k, v, kv_cache)
    if attn_mask is not None:
        _check_mask_kind(attn_mask)
    if scale is not None:
        scale = finite("scale", scale)
    if kv_cache is not None:
        layer_id = _checked_layer(kv_cache, layer_id)
    return flag("is_causal", is_causal, or_number=True), scale, layer_id


def _check_mask_kind(attn_mask: Any) -> None:
    dtype = getattr(attn_mask, "dtype", None)
    is_number = isinstance(attn_mask, torch.Tensor) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype is not torch.bool and not is_number:
        got = dtype if isinstance(attn_mask, torch.Tensor) else type(attn_mask).__name__
        wanted = "a bool tensor, True keeps a score, or one of a floating dtype, which is added to the scores"
        raise ContractError(f"attn_mask: wanted {wanted}, got {got}")
    require_tensor("attn_mask", attn_mask)


def _checked_layer(kv_cache: Any, layer_id: Any) -> int:
    layer, count = integer("layer_id", layer_id, 0), getattr(kv_cache, "num_layers", None)
    if isinstance(count, int) and layer >= count:
        raise ContractError(f"layer_id: wanted one in [0, {count}), got {layer}")
    return layer


def _facts(q, k, v, kv_cache, attn_mask, is_causal, fwd, options) -> Request:
    """The facts of a call; its arguments have been checked. 1.5 us."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    followed = (q, k, v, *[options[name] for name in ("sinks", "bias") if name in options])
    return Request(
        q.device, q.dtype, q_shape[-1], v_shape[-1], q_shape[-2], k_shape[-2], find_fwd(q, kv_cache, fwd),
        kv_cache is not None, attn_mask is not None, is_causal, derivative_of(*followed), tuple(options),
    )  # fmt: skip


def _choose_traced(request: Request, backend: Any) -> AttentionBackend:
    """The backend of a call that torch.compile traces: chosen once for a graph."""
    if isinstance(backend, AttentionBackend):
        if missing := unserved_options(backend, request.options):
            raise UnsupportedError(f"attention: {backend.name}: {missing}")
        return backend
    sizes = constants(request.head_dim, request.v_dim, request.num_heads, request.num_kv_heads)
    name = _name_traced(str(request.device), str(request.dtype), sizes, *request[6:], backend)
    return registry.backends()[name]


@constant_result
def _name_traced(device: str, dtype: str, sizes: tuple[int, ...], *rest: Any) -> str:
    """Name of the backend. Runs while torch.compile traces: what it reads, context and environment, is no part of the
    graph's guards."""
    *facts, backend = rest
    request = Request(torch.device(device), dtype_named(dtype), *sizes, *facts)
    return _policy.choose(request, backend, registry.context_backend()).name

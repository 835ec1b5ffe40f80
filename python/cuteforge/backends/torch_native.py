"""torch's own attention as a backend: it serves every call, CPU included."""

from __future__ import annotations

from typing import ClassVar

import torch

from cuteforge.backends import sdpa
from cuteforge.backends.checks import check_agreement
from cuteforge.backends.interface import OPTIONS, AttentionBackend, Request, bound_batch, packed
from cuteforge.backends.selection import derivative_of
from cuteforge.families.attention.options import UNLIMITED, checked_softcap, checked_window
from cuteforge.runtime.streams import is_capturing


class TorchNativeBackend(AttentionBackend):
    """torch's scaled_dot_product_attention: any floating dtype of 16 bits or more and any head dim, differentiable, on
    any device.

    Over a cache it gathers the keys and values of the batch and pads them to the longest request, whose length it reads
    from the device. Under CUDA graph capture it cannot read that, so it pads to the width of the page table. Gradients
    reach q and the new tokens' k and v; what earlier calls stored is constant.

    Examples:
        >>> import torch
        >>> from cuteforge import TorchNativeBackend, attention
        >>> q, k, v = torch.randn(3, 1, 16, 8, 40, dtype=torch.float64)
        >>> attention(q, k, v, window=(4, 0), backend=TorchNativeBackend).dtype
        torch.float64
    """

    name = "torch_native"
    priority = 0
    options: ClassVar[tuple[str, ...]] = OPTIONS

    def refuse(self, request: Request) -> str | None:
        if request.is_cached and request.derivative == "transform":
            return "over a cache it is not served by torch.func and forward-mode differentiation"
        if request.is_cached and request.device.type == "meta":
            return "over a cache the lengths of the requests are read, and the meta device holds no values"
        if request.dtype.is_floating_point and request.dtype.itemsize < 2:
            return f"torch does not multiply {request.dtype}"
        return None

    def fwd_decode(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale, **options):
        return self._attend(q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale, **options)

    def fwd_prefill(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale, **options):
        return self._attend(q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale, **options)

    def _attend(
        self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale, window=None, **options
    ) -> torch.Tensor:  # fmt: skip
        window, bias, sinks = checked_window(window), options.get("bias"), options.get("sinks")
        options["softcap"] = checked_softcap(options.get("softcap"))
        check_agreement(q, k, v, kv_cache, layer_id, attn_mask, sinks, bias)
        if kv_cache is not None:
            window = (window[0], 0) if is_causal else window
            return _attend_cached(q, k, v, kv_cache, layer_id, attn_mask, scale, window, **options)
        visible = None if attn_mask is None else sdpa.with_four_dims(attn_mask)
        if window != UNLIMITED:
            inside = sdpa.window_mask(q.shape[1], k.shape[1], window, q.device)
            visible = inside if visible is None else visible & inside
        followed = (q, k, v) if bias is None else (q, k, v, bias)
        by_scores = derivative_of(*followed) == "transform"
        return sdpa.attend(q, k, v, visible, is_causal, scale, **options, by_scores=by_scores)


def _attend_cached(q, k, v, kv_cache, layer_id, attn_mask, scale, window, bias=None, **options) -> torch.Tensor:
    batch = bound_batch(kv_cache)
    rows, new_k, new_v = packed(q, k, v)
    pools = kv_cache.k_pool(layer_id), kv_cache.v_pool(layer_id)
    kv_cache.append(layer_id, new_k.detach(), new_v.detach())
    lens_k = batch.seqlens_k.clamp(min=0)
    num_keys = _padded_length(lens_k, batch.page_table.shape[1] * pools[0].shape[1])
    keys, values = (sdpa.gather_pages(p, batch.page_table, batch.page_table_rows, lens_k, num_keys) for p in pools)
    lens_q = batch.cu_seqlens_q.diff()
    visible = sdpa.ragged_mask(lens_q, lens_k, batch.max_new, num_keys, attn_mask, window)
    padded, unpadded = sdpa.pad_requests(rows, batch.cu_seqlens_q, batch.max_new)
    request, index = unpadded
    position = index + (lens_k - lens_q)[request]
    keys, values = (_with_graph(x, new, request, position) for x, new in ((keys, new_k), (values, new_v)))
    if bias is not None:
        options["bias"] = sdpa.padded_scores(bias, batch.max_new, num_keys, -torch.inf)
    # The corner is in `visible`.
    out = sdpa.attend(padded, keys, values, visible, False, scale, **options)[unpadded]
    return out if q.dim() == 3 else out.unsqueeze(1)


def _with_graph(stored: torch.Tensor, new: torch.Tensor, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """``stored (B, S, H, D)``, which has the values of ``new (T, H, D)``; autograd follows it back to `new`."""
    if not (torch.is_grad_enabled() and new.requires_grad):
        return stored
    # A padding row has a token, but no key: it writes back what is there.
    is_padding = (position < 0)[:, None, None]
    index = request, position.clamp(min=0)
    return stored.index_put(index, torch.where(is_padding, stored[index], new))


def _padded_length(lens: torch.Tensor, most: int) -> int:
    if not lens.numel() or (lens.is_cuda and is_capturing()):
        return most if lens.numel() else 0
    # At least one key, masked if need be: so the result depends on k and v, and autograd finds them.
    return min(max(int(lens.max()), 1), most)

"""Checks of the operands of `attention` against each other, for backends that do not check them themselves, and for
`explain`."""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.backends import sdpa
from cuteforge.backends.interface import bound_batch, packed
from cuteforge.errors import ContractError

_MASK_SHAPES = "(B, S), (B, L, S) or (B, 1|Hq, 1|L, S)"


def check_agreement(
    q: Any, k: Any, v: Any, kv_cache: Any, layer_id: int, attn_mask: Any, sinks: Any, bias: Any = None
) -> None:  # fmt: skip
    """Refuse tensors that do not belong together. A bias is the `attn_mask` of a call too, one that is added.

    Raises:
        ContractError: names the argument.
    """
    check_sinks(sinks, q)
    if kv_cache is None:
        check_dense(q, k, v)
        sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    else:
        batch, (rows, *_) = bound_batch(kv_cache), packed(q, k, v)
        check_new_queries(rows, kv_cache.k_pool(layer_id), batch)
        sizes = batch.seqlens_k.shape[0], rows.shape[1], 1 if batch.is_decode else None, None
    for mask in (attn_mask, bias):
        if mask is not None:
            check_mask(mask, *sizes, q.device)


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse by name what torch would broadcast, or refuse by no name."""
    batch, _, heads, dim = q.shape
    if not q.is_floating_point():
        raise ContractError(f"q: wanted a floating dtype, got {q.dtype}")
    if k.shape[0] != batch or k.shape[3] != dim:
        raise ContractError(f"k: wanted shape (B, S, Hkv, D) with B = {batch}, D = {dim}, got {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        wanted = f"B, S, Hkv = {tuple(k.shape[:3])}"
        raise ContractError(f"v: wanted shape (B, S, Hkv, Dv) with {wanted}, got {tuple(v.shape)}")
    if k.shape[2] < 1 or heads < 1 or heads % k.shape[2]:
        raise ContractError(f"q: wanted a multiple of Hkv = {k.shape[2]} heads, got Hq = {heads}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ContractError(f"{name}: wanted {q.dtype} on {q.device}, as q, got {x.dtype} on {x.device}")


def check_new_queries(q: torch.Tensor, k_pool: torch.Tensor, batch: Any) -> None:
    """Of new keys and values `append` checks the same."""
    num_tokens, heads, dim = q.shape
    kv_heads = k_pool.shape[2]
    if num_tokens != len(batch.slots) or dim != k_pool.shape[3]:
        wanted = f"T = {len(batch.slots)} new tokens, D = {k_pool.shape[3]}"
        raise ContractError(f"q: wanted shape (T, Hq, D) with {wanted}, got {tuple(q.shape)}")
    if heads < 1 or heads % kv_heads:
        raise ContractError(f"q: wanted a multiple of Hkv = {kv_heads} heads, got Hq = {heads}")
    if q.dtype != k_pool.dtype or q.device != k_pool.device:
        raise ContractError(f"q: wanted {k_pool.dtype} on {k_pool.device}, as the cache, got {q.dtype} on {q.device}")


def check_mask_dims(mask: torch.Tensor) -> None:
    if mask.dim() not in (2, 3, 4):
        raise ContractError(f"attn_mask: wanted shape {_MASK_SHAPES}, got {mask.dim()} dims")


def check_mask(
    mask: torch.Tensor, batch: int, heads: int, length: int | None, num_keys: int | None, device: torch.device
) -> None:
    """Refuse a mask that the call does not have. `length` and `num_keys` of None: rows, columns that it lacks count as
    masked."""
    check_mask_dims(mask)
    if mask.device != device:
        raise ContractError(f"attn_mask: wanted a tensor on {device}, got one on {mask.device}")
    got_batch, got_heads, got_length, got_keys = sdpa.with_four_dims(mask).shape
    wanted = {"B": (batch, got_batch), "Hq": (heads, got_heads), "L": (length, got_length), "S": (num_keys, got_keys)}
    for dim, (want, got) in wanted.items():
        if want is not None and got != want and (got != 1 or dim == "S"):
            raise ContractError(f"attn_mask: wanted {dim} = {want}{'' if dim == 'S' else ' or 1'}, got {got}")


def check_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    heads = q.shape[-2]
    if sinks is None:
        return
    if not sinks.is_floating_point():
        raise ContractError(f"sinks: wanted a floating dtype, got {sinks.dtype}")
    if tuple(sinks.shape) != (heads,):
        raise ContractError(f"sinks: wanted shape (Hq,) = ({heads},), got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ContractError(f"sinks: wanted a tensor on {q.device}, got one on {sinks.device}")

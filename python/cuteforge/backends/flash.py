"""flash-attn as a backend: version 4 where it is installed, else version 2."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cuteforge.backends.interface import AttentionBackend, Request, bound_batch, packed
from cuteforge.backends.sdpa import positive_scale

_MAX_HEAD_DIM = 256
# By preference: the module of each version.
_MODULES = {4: "flash_attn.cute", 2: "flash_attn"}


@dataclass(frozen=True)
class _Library:
    """What is used of an installed flash-attn."""

    version: int
    dense: Callable[..., Any]
    varlen: Callable[..., Any]


class FlashAttnBackend(AttentionBackend):
    """flash-attn, where it is installed: bf16 and fp16 on CUDA, without masks and options. It has gradients without a
    cache. Over a cache only its version 4 is used.

    Examples:
        >>> import torch
        >>> from cuteforge import FlashAttnBackend, explain
        >>> q = k = v = torch.randn(1, 16, 8, 64, dtype=torch.bfloat16)
        >>> decision = explain(q, k, v, backend=FlashAttnBackend)
        >>> decision.verdicts[0].refusal
        'flash-attn runs on CUDA, this call is on cpu'
    """

    name = "flash"
    priority = 50

    def refuse(self, request: Request) -> str | None:
        return "; ".join(_refusals(request)) or None

    def fwd_decode(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale):
        return _attend(q, k, v, kv_cache, layer_id, is_causal, scale)

    def fwd_prefill(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale):
        return _attend(q, k, v, kv_cache, layer_id, is_causal, scale)


def _attend(q, k, v, kv_cache, layer_id, is_causal, scale) -> torch.Tensor:
    library, _ = find_library()
    q, scale = positive_scale(q, scale)
    if kv_cache is None:
        return _first(library.dense(q, k, v, softmax_scale=scale, causal=is_causal))
    batch = bound_batch(kv_cache)
    rows, new_k, new_v = packed(q, k, v)
    kv_cache.append(layer_id, new_k, new_v)
    out = library.varlen(
        rows,
        kv_cache.k_pool(layer_id),
        kv_cache.v_pool(layer_id),
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_new,
        seqused_k=batch.seqlens_k,
        max_seqlen_k=kv_cache.max_seqlen,
        page_table=batch.page_table.index_select(0, batch.page_table_rows),
        softmax_scale=scale,
        causal=is_causal,
    )
    return _first(out) if q.dim() == 3 else _first(out).unsqueeze(1)


def _first(result: Any) -> torch.Tensor:
    """Without the log-sum-exps that version 4 returns beside the result."""
    return result[0] if isinstance(result, tuple) else result


def _refusals(request: Request) -> Iterator[str]:
    if request.device.type != "cuda":
        yield f"flash-attn runs on CUDA, this call is on {request.device}"
        return  # importing it takes seconds
    if request.dtype not in (torch.bfloat16, torch.float16):
        yield f"flash-attn takes bfloat16 and float16, q is {str(request.dtype).removeprefix('torch.')}"
    if request.has_mask:
        yield "flash-attn takes no mask"
    if request.derivative == "transform":
        yield "flash-attn is not served by torch.func and forward-mode differentiation"
    if request.derivative == "graph" and request.is_cached:
        yield "flash-attn has no derivative over a cache, and q, k or v requires grad"
    if request.head_dim % 8 or request.head_dim > _MAX_HEAD_DIM or request.v_dim != request.head_dim:
        yield f"D = Dv = 8, 16, ... {_MAX_HEAD_DIM} are served, got ({request.head_dim}, {request.v_dim})"
    library, why = find_library()
    if library is None:
        yield why
    elif request.is_cached and library.version < 4:
        yield f"flash-attn {library.version} is used without a cache only"


@functools.cache
def find_library() -> tuple[_Library | None, str]:
    """The installed flash-attn, or None and the reason. Never raises, whatever its import does."""
    problems = []
    for version, name in _MODULES.items():
        try:
            module = importlib.import_module(name)
            return _Library(version, module.flash_attn_func, module.flash_attn_varlen_func), ""
        except ModuleNotFoundError as error:
            if error.name == "flash_attn":
                return None, "flash-attn is not installed"
            problems.append(f"{name}: {error}")
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return None, "flash-attn is installed, but not usable: " + "; ".join(problems)

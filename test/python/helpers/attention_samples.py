"""Samples of attention calls, shapes only: for asking what is chosen without drawing operands."""

from __future__ import annotations

from typing import Any

import torch

from cuteforge import TensorSpec
from helpers import attention as attn
from helpers import paged_inputs
from helpers.paged import make_op


def _spec(dtype: torch.dtype, *shape: int) -> TensorSpec:
    return TensorSpec(shape, str(dtype).removeprefix("torch."))


def _int32(*shape: int) -> TensorSpec:
    return _spec(torch.int32, *shape)


def dense(
    config: attn.Config, batch: int, length: int, size: int, kv_heads: int, flags: attn.Flags, **given: Any
) -> attn.Inputs:
    """As `attention.draw`; a mask and sinks in `given` are samples too."""
    q = _spec(config.dtype, batch, length, kv_heads * config.group, config.d)
    k, v = (_spec(config.dtype, batch, size, kv_heads, width) for width in (config.d, config.dv))
    return attn.Inputs(q, k, v, seqlens_k=_int32(batch) if flags.lengths else None, causal=flags.causal, **given)


def packed(
    config: attn.Config, lens_q: list[int], lens_k: list[int], kv_heads: int = 2, causal: bool = True, **given: Any
) -> attn.Inputs:
    """As `attention.draw_ragged`."""
    q = _spec(config.dtype, sum(lens_q), kv_heads * config.group, config.d)
    k, v = (_spec(config.dtype, sum(lens_k) + 3, kv_heads, width) for width in (config.d, config.dv))
    return attn.Inputs(q, k, v, _int32(len(lens_q) + 1), _int32(len(lens_k) + 1), causal=causal, **given)


def sinks(x: attn.Inputs | paged_inputs.Inputs) -> TensorSpec:
    return _spec(torch.float32, x.q.shape[-2])


def mask(*shape: int) -> TensorSpec:
    return _spec(torch.bool, *shape)


def op_of(kind: str, x: attn.Inputs, *, lse: bool = True, num_splits: int | None = None):
    """The op that `attention.prepare` makes of such operands."""
    out = TensorSpec(x.out_shape, x.q.dtype)
    given = x.optional | ({"lse": _spec(torch.float32, *x.lse_shape)} if lse else {})
    splits = {"num_splits": num_splits} if kind == "decode" else {}
    return attn.CLASSES[kind](x.q, x.k, x.v, out, **given, **x.options, **splits)


def paged(config: paged_inputs.Config, batch: paged_inputs.Batch) -> paged_inputs.Inputs:
    """As `paged_inputs.draw`; the number of pages, which nothing depends on, is another."""
    requests, heads = len(batch.lengths), config.group * batch.kv_heads
    is_packed = isinstance(batch.queries, tuple)
    tokens = (sum(batch.queries),) if is_packed else (requests, batch.queries) if batch.queries else (requests,)
    pages = (99 * batch.page_size,) if batch.place == "flat" else (99, batch.page_size)
    caches = [_spec(config.dtype, *pages, batch.kv_heads, width) for width in (config.d, config.dv)]
    lengths = {"kv_indptr": _int32(requests + 1)} if batch.by_indptr else {"seqlens_k": _int32(requests)}
    cuts = _int32(requests + 1) if is_packed else None
    rows = None if batch.rows is None else _int32(requests)
    table = _int32(requests if batch.rows is None else max(batch.rows) + 2, 9)
    q = _spec(config.dtype, *tokens, heads, config.d)
    return paged_inputs.Inputs(q, *caches, table, cuts, page_table_rows=rows, causal=config.causal, **lengths)


def appending(x: paged_inputs.Inputs) -> paged_inputs.Inputs:
    """As `paged_inputs.appending`."""
    new = {
        name: TensorSpec((x.q.shape[0], *cache.shape[-2:]), cache.dtype)
        for name, cache in zip(("new_k", "new_v"), x.pools)
    }
    return x.with_(**new)


def paged_op_of(x: paged_inputs.Inputs, *, num_splits: int | None = None):
    """The op that `paged.run` makes of such operands."""
    *tokens, heads, _ = x.q.shape
    shape = (tokens[0], heads, tokens[1] if len(tokens) == 2 else 1) if x.is_decode else (heads, tokens[0])
    out = TensorSpec((*x.q.shape[:-1], x.v_cache.shape[-1]), x.q.dtype)
    splits = {"num_splits": num_splits} if x.is_decode else {}
    return make_op(x, {"out": out, "lse": _spec(torch.float32, *shape)}, **splits)

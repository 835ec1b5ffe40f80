"""Attention in eager torch: the oracle of tests and benchmarks, and the fallback where no kernel serves.

Runs on CPU and CUDA. Dims: ``B`` batch, ``L`` query tokens, ``S`` KV tokens, ``Hq = G * Hkv`` heads, ``D`` head dim,
``Dv`` that of the
values, ``T`` packed tokens, ``P`` pages of ``ps`` tokens, ``R`` rows and ``C`` columns of a page table. Query head
``h`` reads KV head
``h // G``. A query that sees no key gives out 0 and lse -inf, the neutral element of `merge`; with sinks, lse that of
its head.
"""

from __future__ import annotations

import torch

# Scores held at once: 512 MiB in fp64. Queries are taken in runs short enough for that.
_MAX_SCORES = 2**26


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lens_q: torch.Tensor | None = None,
    lens_k: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    compute_dtype: torch.dtype = torch.float64,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q k^T) v`` of every head, and the logarithm of the softmax's denominator.

    Args:
        q, k, v: ``(B, L, Hq, D)``, ``(B, S, Hkv, D)``, ``(B, S, Hkv, Dv)``.
        lens_q, lens_k: ``(B,)`` valid tokens, all when None; negative counts as 0, more than there are as all. What
            lies past them is not read.
        mask: bool, True = visible: ``(B, S)``, ``(B, L, S)`` or ``(B, 1|Hq, 1|L, S)``, B or L of 1 broadcasts. Rows and
            columns that it lacks count as masked.
        bias: ``(1|B, 1|Hq, 1|L, S)``, added to the scaled scores, after a softcap; -inf masks. What it lacks counts as
            masked.
        sinks: ``(Hq,)``, a logit of each head that joins the denominators, lse included, and has no value.
        causal: query i of request b sees key j only where ``j <= p``, ``p = i + lens_k[b] - lens_q[b]``.
        softmax_scale: None is ``D**-0.5``.
        window: (left, right): only where ``p - left <= j <= p + right``, None on a side is no limit; with causal right
            is 0.
        softcap: scores become ``softcap * tanh(score / softcap)``; None or 0: they do not.
        compute_dtype: arithmetic. The dtype of the inputs gives what eager code of that dtype computes.
        out_dtype: None is the dtype of q.

    Returns:
        ``out (B, L, Hq, Dv)`` and ``lse (B, Hq, L)``, natural log, fp64 with compute_dtype fp64 and else fp32. Queries
        past lens_q see no key.
    """
    batch, length, heads, d = q.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros((batch, length, heads, v.shape[-1]), dtype=out_dtype or q.dtype)
    lse_dtype = torch.promote_types(compute_dtype, torch.float32)
    lse = blind_lse(q.new_empty((batch, heads, length), dtype=lse_dtype), sinks)
    left, right = window or (None, None)
    right = 0 if causal else right
    rows_of, cols_of = _lengths(lens_q, batch, length), _lengths(lens_k, batch, k.shape[1])
    for b, (rows, cols) in enumerate(zip(rows_of, cols_of)):
        if not cols:
            continue
        keys, values = (_by_head(t[b, :cols].to(compute_dtype)) for t in (k, v))
        step = max(1, _MAX_SCORES // (heads * cols))
        for first in range(0, rows, step):
            run = slice(first, min(first + step, rows))
            positions = torch.arange(run.start, run.stop, device=q.device) + (cols - rows)
            visible = _visible(mask, b, run, cols, _window(positions, cols, left, right))
            added = None if bias is None else _rows_of(bias, b, run, cols, -torch.inf).to(compute_dtype)
            scores = _scores(q[b, run].to(compute_dtype), keys, scale, softcap, added, visible)
            part, lse[b, :, run] = _weigh(scores, values, sinks, lse_dtype)
            out[b, run] = part.to(out.dtype)
    return out, lse


def blind_lse(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """What a query that sees no key has in ``lse (..., Hq, L)``, expanded to its shape."""
    blind = lse.new_tensor(-torch.inf) if sinks is None else sinks.to(lse.dtype)[:, None]
    return blind.expand_as(lse).clone()


def _lengths(lens: torch.Tensor | None, batch: int, capacity: int) -> list[int]:
    return [capacity] * batch if lens is None else [min(max(n, 0), capacity) for n in lens.tolist()]


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """``(tokens, heads, width) -> (heads, tokens, width)``."""
    return x.transpose(0, 1)


def _visible(
    mask: torch.Tensor | None, b: int, rows: slice, cols: int, window: torch.Tensor | None
) -> torch.Tensor | None:
    """Which keys the queries `rows` of request `b` see: ``(1|Hq, 1|rows, cols)`` bool, or None for all."""
    if mask is None:
        return None if window is None else window[None]
    if mask.dim() < 4:
        mask = mask.unsqueeze(1).unsqueeze(1) if mask.dim() == 2 else mask.unsqueeze(1)
    visible = _rows_of(mask, b, rows, cols, False)
    return visible if window is None else visible & window


def _window(positions: torch.Tensor, cols: int, left: int | None, right: int | None) -> torch.Tensor | None:
    """Which of `cols` keys queries at `positions` have in their window, ``(rows, cols)``; None without a limit."""
    if left is None and right is None:
        return None
    distance = torch.arange(cols, device=positions.device) - positions[:, None]
    inside = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        inside &= distance >= -left
    if right is not None:
        inside &= distance <= right
    return inside


def _rows_of(by_score: torch.Tensor, b: int, rows: slice, cols: int, missing: float) -> torch.Tensor:
    """``(1|Hq, 1|rows, cols)`` of a mask or bias; `missing` where it has no row or no column."""
    given = by_score[b if by_score.shape[0] > 1 else 0, ..., :cols]
    has_rows = given.shape[1] != 1
    given = given[:, rows] if has_rows else given
    whole = given.new_full((given.shape[0], rows.stop - rows.start if has_rows else 1, cols), missing)
    whole[:, : given.shape[1], : given.shape[2]] = given
    return whole


def _scores(q, keys, scale, softcap, bias, visible) -> torch.Tensor:
    """``(Hq, rows, cols)`` of q ``(rows, Hq, D)`` with keys by head, plus the bias; -inf where they do not count."""
    rows, heads, d = q.shape
    # The queries of a group, one after the other, read one head.
    grouped = _by_head(q).reshape(keys.shape[0], -1, d)
    scores = (grouped @ keys.transpose(1, 2)).view(heads, rows, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def _weigh(scores, values, sinks, lse_dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out ``(rows, Hq, Dv)`` and lse ``(Hq, rows)`` of scores ``(Hq, rows, cols)`` over values by head."""
    heads, rows, cols = scores.shape
    is_blind = scores.isneginf().all(-1)
    if sinks is not None:
        # a key without a value
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(heads, rows, 1)), -1)
    lse = torch.logsumexp(scores.to(lse_dtype), -1)
    weights = torch.softmax(scores, -1).masked_fill(is_blind.unsqueeze(-1), 0)[..., :cols]
    out = (weights.reshape(values.shape[0], -1, cols) @ values).view(heads, rows, -1)
    # a weight of 0 does not hide a NaN among the values
    return _by_head(out.masked_fill(is_blind.unsqueeze(-1), 0)), lse


def unpack(packed: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Requests of ``packed (T, H, D)``, request b at ``cu_seqlens[b] : cu_seqlens[b + 1]``, side by side.

    Returns:
        ``(B, longest, H, D)``, 0 past the lengths, and the lengths ``(B,)`` int32.
    """
    cuts = cu_seqlens.tolist()
    lens = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int32)
    padded = packed.new_zeros(len(cuts) - 1, max(lens.tolist(), default=0), *packed.shape[1:])
    for request, first, end in zip(padded, cuts, cuts[1:]):
        request[: end - first] = packed[first:end]
    return padded, lens


def pack(padded: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack`: ``(cu_seqlens[-1], H, D)``, without what lies past the lengths."""
    cuts = cu_seqlens.tolist()
    packed = padded.new_zeros(cuts[-1], *padded.shape[2:])
    for request, first, end in zip(padded, cuts, cuts[1:]):
        packed[first:end] = request[: end - first]
    return packed


def gather_pages(
    cache: torch.Tensor, page_table: torch.Tensor, lens: torch.Tensor, page_table_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The tokens of every request in order, ``(B, longest, Hkv, D)``, 0 past the lengths.

    Args:
        cache: ``(P, ps, Hkv, D)``, or ``(P, Hkv, D)``, which has pages of one token.
        page_table: ``(R, C)``; entries past the last page of a request are not read, others that are no page are read
            as the nearest.
        lens: ``(B,)`` tokens; negative counts as 0, more than C pages hold as those.
        page_table_rows: ``(B,)`` the table row of each request; None: request b uses row b.
    """
    cache = cache.unsqueeze(1) if cache.dim() == 3 else cache
    page_size = cache.shape[1]
    counts = _lengths(lens, len(lens), page_table.shape[1] * page_size)
    rows = range(len(counts)) if page_table_rows is None else page_table_rows.tolist()
    tokens = cache.new_zeros(len(counts), max(counts, default=0), *cache.shape[2:])
    for request, row, count in zip(tokens, rows, counts):
        pages = page_table[row, : -(-count // page_size)].long().clamp(0, cache.shape[0] - 1)
        request[:count] = cache[pages].flatten(0, 1)[:count]
    return tokens


def merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from that over each.

    Args:
        o_a, o_b: ``(B, L, H, D)`` or ``(T, H, D)``.
        lse_a, lse_b: ``(B, H, L)`` or ``(H, T)``.

    Computed in fp32, or in fp64 where an input is; the results have the dtypes of o_a and lse_a.
    """
    dtype = torch.promote_types(torch.promote_types(o_a.dtype, lse_a.dtype), torch.float32)
    lse_a_wide, lse_b_wide = lse_a.to(dtype), lse_b.to(dtype)
    lse = torch.logaddexp(lse_a_wide, lse_b_wide)
    # Where neither part has a key both weights would be exp(-inf + inf).
    base = lse.masked_fill(lse.isneginf(), 0)
    weights = [(t - base).exp().transpose(-1, -2).unsqueeze(-1) for t in (lse_a_wide, lse_b_wide)]
    # What a part without keys holds does not count, NaN either.
    parts = [(w * o.to(dtype)).masked_fill(w == 0, 0) for w, o in zip(weights, (o_a, o_b))]
    return (parts[0] + parts[1]).to(o_a.dtype), lse.to(lse_a.dtype)

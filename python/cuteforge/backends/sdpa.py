"""Attention by torch's scaled_dot_product_attention, with this library's masks, corner and empty rows.

Dims: ``B`` requests, ``L`` query tokens, ``S`` keys, ``Hq = G * Hkv`` heads, ``D`` and ``Dv`` head dims, ``T`` packed
tokens. A mask that is ready for scores is called `visible`: bool ``(1|B, 1|Hq, 1|L, S)``, True where a query sees a
key.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad, scaled_dot_product_attention

from cuteforge.families.attention.options import UNLIMITED, Window
from cuteforge.op.tracing import autocasts

# A scale closer to 0 than this may be 0 where a kernel rounds it, and a score of -inf times 0 is NaN.
_LEAST_SCALE = 1e-30


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    by_scores: bool = False,
) -> torch.Tensor:
    """``(B, L, Hq, Dv)`` of q ``(B, L, Hq, D)``, k ``(B, S, Hkv, D)``, v ``(B, S, Hkv, Dv)``; a query that sees no key
    gives 0, and no gradient.

    Args:
        is_causal: query i sees key j iff ``j <= i + S - L``.
        scale: None is ``D**-0.5``; any finite number.
        softcap, sinks: as of `attention`; with either all scores are held at once.
        bias: ``(1|B, 1|Hq, 1|L, S)``, added to the scores; -inf masks. If its dtype is not that of q, all scores are
            held at once.
        by_scores: hold all scores at once in any case. torch's fused kernels have no forward-mode derivative and no
            second derivative.
    """
    if autocasts(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return attend(q, k, v, visible, is_causal, scale, softcap, sinks, bias, by_scores=by_scores)
    length, num_keys = q.shape[1], k.shape[1]
    q, scale = positive_scale(q, scale)
    # Of one query token nothing is cut. torch's corner is the upper left: the same one only in a square, where its
    # fused kernels know it.
    is_causal = is_causal and length > 1
    is_rounded = bias is not None and bias.dtype != q.dtype  # as torch's function wants it
    by_scores = by_scores or bool(softcap) or sinks is not None or is_rounded
    is_square = is_causal and not by_scores and visible is None and bias is None and _are_equal(length, num_keys)
    if not is_square:
        visible = _cut(visible, is_causal, length, num_keys, q.device)
    if bias is not None:
        is_added = bias.detach() != -torch.inf
        visible = is_added if visible is None else visible & is_added
    if by_scores:
        return _attend_by_scores(q, k, v, visible, scale, softcap, sinks, bias)
    return _attend_fused(q, k, v, visible, is_square, scale, bias)


def _are_equal(length: int, num_keys: int) -> bool:
    """Whether two sizes are equal. If they vary in a traced graph: whether they are equal at every call of it."""
    if not is_compiling():
        return length == num_keys
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(length == num_keys)


def _attend_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    is_square: bool,
    scale: float | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`attend` by torch's function. `is_square`: causal, with as many queries as keys, and without `visible`. A bias
    comes with `visible`, which knows where it is -inf."""
    # comparisons of sizes, which are no plain bools under torch.compile: a branch makes them so
    is_grouped = True if q.shape[2] > k.shape[2] else False  # noqa: SIM210
    if visible is not None and is_grouped:
        # The fused kernels that take masks know no head groups, and without them all scores are held at once.
        group_size = q.shape[2] // k.shape[2]
        k, v, is_grouped = k.repeat_interleave(group_size, 2), v.repeat_interleave(group_size, 2), False
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    options = {"scale": scale, "enable_gqa": is_grouped}
    if visible is None:
        out = scaled_dot_product_attention(*by_head, is_causal=is_square, **options).transpose(1, 2)
        return _with_nan_rows(out, q, k, is_square) if q.device.type == "cpu" else out
    # A row without a key would be 0/0, and so would its gradient: it sees all keys instead, and what comes of it is
    # dropped.
    is_empty = ~visible.any(-1, keepdim=True)
    # Its query must not count either: a NaN in it would reach the gradients of all keys.
    by_head[0] = by_head[0].masked_fill(is_empty, 0)
    mask = visible | is_empty
    mask = mask if bias is None else torch.where(mask, bias.masked_fill(is_empty, 0), -torch.inf)
    out = scaled_dot_product_attention(*by_head, attn_mask=mask, **options)
    return out.masked_fill(is_empty, 0).transpose(1, 2)


def _with_nan_rows(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, is_square: bool) -> torch.Tensor:
    """`out` with NaN where all scores of a row are NaN: torch's fused kernel of the CPU gives 0 there.

    They are where the query is NaN, or every key that it sees: all of them, or in a square those up to its own.
    """
    if not k.shape[1]:
        return out.masked_fill(out.isnan(), 0)  # without keys some versions hand a NaN query through
    unknown = k.isnan().any(-1)
    unknown = unknown.long().cummin(1).values.bool() if is_square else unknown.all(1, keepdim=True)
    rows = q.isnan().any(-1) | unknown.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return out.masked_fill(rows.unsqueeze(-1), torch.nan)


def _attend_by_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As `attend`, where torch's function has no such thing: all scores are held at once, in fp32 at least.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``(Hq,)`` logits without values.
    """
    dtype, (batch, length, heads, dim) = torch.promote_types(q.dtype, torch.float32), q.shape
    is_empty = None
    if visible is not None:
        is_empty = ~visible.any(-1, keepdim=True)
        q = q.masked_fill(is_empty.transpose(1, 2), 0)
    keys, values = (x.transpose(1, 2).to(dtype) for x in (k, v))
    # The query heads that read a KV head, one after the other.
    rows = heads // k.shape[2] * length
    grouped = q.transpose(1, 2).to(dtype).reshape(batch, k.shape[2], rows, dim)
    scores = (grouped @ keys.transpose(2, 3)).view(batch, heads, length, k.shape[1])
    scores = scores * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.masked_fill(is_empty, 0).to(dtype)
    if visible is not None:
        scores = scores.masked_fill(~(visible | is_empty), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1)
    weights = weights if sinks is None else weights[..., :-1]
    out = weights.reshape(batch, k.shape[2], rows, k.shape[1]) @ values
    out = out.view(batch, heads, length, v.shape[3])
    if is_empty is not None:
        out = out.masked_fill(is_empty, 0)
    return out.transpose(1, 2).to(q.dtype)


def _cut(visible, is_causal: bool, length: int, num_keys: int, device) -> torch.Tensor | None:
    """`visible` with the causal corner."""
    if not is_causal:
        return visible
    corner = corner_mask(length, num_keys, device)
    return corner if visible is None else visible & corner


def positive_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float | None]:
    """`q` and a scale above 0 that give the same scores: some kernels take a row's maximum before they scale."""
    if scale is None or scale >= _LEAST_SCALE:
        return q, scale
    if scale <= -_LEAST_SCALE:
        return -q, -scale
    return q * scale, 1.0


def corner_mask(length: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """`visible` of a causal mask aligned at the last query and the last key, ``(1, 1, L, S)``."""
    return window_mask(length, num_keys, (None, 0), device)


def window_mask(length: int, num_keys: int, window: Window, device: torch.device) -> torch.Tensor:
    """`visible` of a window around the position of each query, ``(1, 1, L, S)``; the last query is at the last key."""
    position = torch.arange(length, device=device) + (num_keys - length)
    return _inside(torch.arange(num_keys, device=device), position.unsqueeze(1), window)[None, None]


def _inside(key: torch.Tensor, position: torch.Tensor, window: Window) -> torch.Tensor:
    """Whether keys are in the window around positions, which has a limit on one side at least."""
    left, right = window
    limits = [] if left is None else [key >= position - left]
    limits += [] if right is None else [key <= position + right]
    return limits[0] if len(limits) == 1 else limits[0].logical_and_(limits[1])


def with_four_dims(mask: torch.Tensor) -> torch.Tensor:
    """A mask ``(B, S)``, ``(B, L, S)`` or ``(B, 1|Hq, 1|L, S)`` as the last of these."""
    return mask if mask.dim() == 4 else mask[:, None] if mask.dim() == 3 else mask[:, None, None]


def ragged_mask(
    lens_q: torch.Tensor, lens_k: torch.Tensor, length: int, num_keys: int, mask: torch.Tensor | None, window: Window
) -> torch.Tensor:
    """`visible` of requests of different lengths, padded to `length` query tokens and `num_keys` keys.

    Args:
        lens_q, lens_k: ``(B,)``; the last query is at the last key.
        window: around the position of each query.
        mask: as of `attention`; rows and columns that it lacks count as masked.
    """
    key = torch.arange(num_keys, device=lens_k.device)
    visible = (key < lens_k[:, None])[:, None, None]
    if window != UNLIMITED:
        position = torch.arange(length, device=lens_k.device) + (lens_k - lens_q)[:, None]
        visible = visible & _inside(key, position[..., None], window)[:, None]
    if mask is None:
        return visible
    return visible & padded_scores(with_four_dims(mask), length, num_keys, False)


def padded_scores(mask: torch.Tensor, length: int, num_keys: int, missing: float) -> torch.Tensor:
    """A mask or bias ``(1|B, 1|Hq, 1|L, S)`` with `num_keys` columns, and with `length` rows or one; `missing` where it
    has none."""
    rows = 0 if mask.shape[2] == 1 else length - mask.shape[2]
    return pad(mask, (0, num_keys - mask.shape[3], 0, rows), value=missing)


def pad_requests(packed: torch.Tensor, cu_seqlens: torch.Tensor, length: int) -> tuple[torch.Tensor, tuple]:
    """``packed (T, H, D)`` as ``(B, length, H, D)``, 0 past the requests' ends, and the index that takes it back."""
    token = torch.arange(packed.shape[0], dtype=cu_seqlens.dtype, device=packed.device)
    request = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    index = (request, (token - cu_seqlens[request]).long())
    padded = packed.new_zeros(len(cu_seqlens) - 1, length, *packed.shape[1:])
    return padded.index_put(index, packed), index


def gather_pages(
    pool: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, num_keys: int
) -> torch.Tensor:
    """The tokens of each request, ``(B, num_keys, H, D)`` of ``pool (P, ps, H, D)``; 0 past its length, whatever the
    pool holds there.
    """
    num_pages, page_size = pool.shape[:2]
    pages = page_table[rows.long(), : -(-num_keys // page_size)].long().clamp(0, num_pages - 1)
    tokens = pool[pages].flatten(1, 2)[:, :num_keys]
    is_past = torch.arange(num_keys, device=lens.device) >= lens[:, None]
    return tokens.masked_fill(is_past[..., None, None], 0)

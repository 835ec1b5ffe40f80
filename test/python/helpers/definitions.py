"""What the policy functions compute, written down once more as their pages define it: slow, by loops, in the dtype of
the inputs, differentiable."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def attention(q, k, v, attn_mask=None, is_causal=False, *, scale=None, window=None, softcap=None, sinks=None) -> Tensor:
    """`cuteforge.attention` without a cache: head by head."""
    batch, length, heads, dim = q.shape
    num_keys, group = k.shape[1], heads // k.shape[2]
    left, right = window or (None, None)
    place = torch.arange(length)[:, None] + num_keys - length
    key = torch.arange(num_keys)
    seen = torch.ones(length, num_keys, dtype=torch.bool)
    if is_causal:
        seen &= key <= place
    if left is not None:
        seen &= key >= place - left
    if right is not None:
        seen &= key <= place + right
    rows = []
    for b in range(batch):
        by_head = [
            _head(
                q[b, :, h],
                k[b, :, h // group],
                v[b, :, h // group],
                *_seen_and_added(seen, _of_head(attn_mask, b, h)),
                scale,
                softcap,
                sinks,
                h,
            )
            for h in range(heads)
        ]
        rows.append(torch.stack(by_head, 1))
    return torch.stack(rows)


def _seen_and_added(seen, mask) -> tuple[Tensor, Tensor]:
    """A bool mask says what is seen, one of numbers what is added, and what is not seen is where that is -inf."""
    if mask.dtype is torch.bool:
        return seen & mask, torch.zeros_like(seen, dtype=torch.float64)
    return seen & (mask != -torch.inf), mask.expand_as(seen)


def _of_head(mask, b: int, h: int) -> Tensor:
    """(1|L, S) of a mask of any rank."""
    if mask is None:
        return torch.tensor(True)
    mask = mask[b if mask.shape[0] > 1 else 0]
    if mask.dim() == 3:
        mask = mask[h if mask.shape[0] > 1 else 0]
    return mask


def _head(q, k, v, seen, added, scale, softcap, sinks, h) -> Tensor:
    out = []
    for i, query in enumerate(q):
        mine = seen[i]
        if not bool(mine.any()):
            out.append(query.new_zeros(v.shape[1]) + 0 * (query.sum() if query.requires_grad else 0))
            continue
        scores = (k[mine] * query).sum(-1) * (q.shape[1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + added[i][mine].to(scores.dtype)
        if sinks is not None:
            scores = torch.cat((scores, sinks[h : h + 1].to(scores.dtype)))
        weights = torch.softmax(scores, 0)[: int(mine.sum())]
        out.append((weights[:, None] * v[mine]).sum(0))
    return torch.stack(out)


def rotary(x, cos, sin, interleaved=True, inverse=False) -> Tensor:
    """Angles ``(…, rotary_dim/2)`` of each token; columns past ``rotary_dim`` pass."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], (-sin if inverse else sin)[..., None, :]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = a * cos - b * sin, b * cos + a * sin
    pair = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((pair, rest), -1)


def compress(kv, score, ape, cu_seqlens: list[int], ratio: int, coff: int) -> Tensor:
    """The rows of all segments, one after the other."""
    d, rows = kv.shape[1] // coff, []
    for start, end in zip(cu_seqlens, cu_seqlens[1:]):
        for block in range((end - start) // ratio):
            first = start + block * ratio
            tokens = range(first, first + ratio)
            values, scores = kv[tokens][:, -d:], (score[tokens] + ape)[:, -d:]
            if coff == 2 and block:
                before = range(first - ratio, first)
                values = torch.cat((kv[before][:, :d], values))
                scores = torch.cat(((score[before] + ape)[:, :d], scores))
            rows.append((torch.softmax(scores, 0) * values).sum(0))
    return torch.stack(rows) if rows else kv.new_zeros(0, d)

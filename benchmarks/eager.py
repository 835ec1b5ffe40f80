"""The baseline in plain PyTorch: attention, rotation and compressor as a model without kernels computes them.

Each function returns a callable that makes new tensors, as eager code does. Rotation and compressor are fp32 arithmetic
on bf16 inputs; attention has bf16 products and a softmax in fp32, as models do. All pass the same check against fp64 as
the kernels. What a model computes once for all layers is left outside of the clock: the angles of the tokens, causal
masks, and the graph of the forward pass that a backward walks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

NAME = "torch eager"
# More than this of intermediate tensors, or for a call, and there is no figure.
MOST_BYTES, MOST_US = 20e9, 200e3
SCORE_BYTES = 4  # of attention: a score and its weight, bf16
# Some 30 launches take the host up to 0.4 ms, one scrub of an H200 takes 50 us: with ten the device never waits for
# Python.
SCRUBS = 10


def rotary(q, k, cos, sin, positions, *, interleaved: bool) -> Callable[[], tuple]:
    """Callable that returns q ``(T, Hq, D)`` and k ``(T, Hk, D)`` turned by the angles at `positions`.

    Interleaved pairs are multiplied as complex numbers; halves take the usual product with cosine and sine.
    """
    import torch

    cos, sin = (table[positions][:, None] for table in (cos, sin))
    if interleaved:
        angles = torch.complex(cos, sin)
        return lambda: tuple(_turn_complex(x, angles) for x in (q, k))
    cos, sin = (torch.cat((table, table), -1) for table in (cos, sin))
    return lambda: tuple(_turn_halves(x, cos, sin) for x in (q, k))


def _turn_complex(x, angles):
    import torch

    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


def _turn_halves(x, cos, sin):
    import torch

    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def compressor_forward(kv, score, ape, *, segments: int, coff: int) -> Callable[[], tuple]:
    """Callable that returns ``(out,)``. `segments` of equal length, whole windows: views, where packed tokens need a
    look-up."""
    return lambda: (_compress(kv, score, ape, segments, coff),)


def compressor_backward(kv, score, ape, grad_out, *, segments: int, coff: int) -> Callable[[], tuple]:
    """Callable that returns ``(grad_kv, grad_score, grad_ape)`` by autograd, over a graph that is made here once."""
    import torch

    leaves = [x.detach().requires_grad_() for x in (kv, score, ape)]
    with torch.enable_grad():
        out = _compress(*leaves, segments, coff)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def _compress(kv, score, ape, segments: int, coff: int):
    import torch

    blocks = (segments, -1, *ape.shape)
    values, logits = kv.float().view(blocks), score.float().view(blocks) + ape
    if coff == 2:
        values, logits = _with_previous(values, 0.0), _with_previous(logits, float("-inf"))
    return (values * torch.softmax(logits, 2)).sum(2).flatten(0, 1).to(kv.dtype)


def _with_previous(blocks, absent: float):
    """The first half of each block's predecessor, then the second half of the block: ``(segments, blocks, 2 * ratio,
    d)``."""
    import torch

    first, second = blocks.chunk(2, -1)
    previous = torch.nn.functional.pad(first[:, :-1], (0, 0, 0, 0, 1, 0), value=absent)
    return torch.cat((previous, second), 2)


def attention(q, k, v, *, causal: bool) -> Callable[[], Any]:
    """Callable that returns ``(B, L, Hq, D)``, of q ``(B, L, Hq, D)`` and k, v ``(B, S, Hkv, D)``; the causal corner is
    at the bottom right.

    Keys and values lie head by head, as in the cache of a model. Bringing them there is not timed.
    """
    keys, values = (x.transpose(1, 2).contiguous() for x in (k, v))
    hidden = _hidden(q, k.shape[1]) if causal else None
    return lambda: _attend(q, keys, values, hidden)


def packed_attention(q, k, v, lengths: Sequence[int], *, causal: bool) -> Callable[[], Any]:
    """Callable that returns ``(T, Hq, D)``: one request after another, whose lengths the host knows."""
    import torch

    requests = zip(*(x[None].split(tuple(lengths), 1) for x in (q, k, v)), strict=True)
    calls = [attention(*request, causal=causal) for request in requests]
    return lambda: torch.cat([call()[0] for call in calls])


def paged_attention(q, caches: Sequence, page_table, kv_len: int, *, causal: bool) -> Callable[[], Any]:
    """As `attention`, over pages ``(P, ps, Hkv, D)`` that hold `kv_len` keys of each request: every call gathers
    them."""
    pages = page_table.long()
    hidden = _hidden(q, kv_len) if causal else None

    def call():
        keys, values = (cache[pages].flatten(1, 2)[:, :kv_len].transpose(1, 2).contiguous() for cache in caches)
        return _attend(q, keys, values, hidden)

    return call


def _hidden(q, kv_len: int):
    """Which keys each query must not see, bool ``(L, S)``."""
    import torch

    length = q.shape[1]
    return torch.ones(length, kv_len, dtype=torch.bool, device=q.device).triu(kv_len - length + 1)


def _attend(q, keys, values, hidden):
    """q ``(B, L, Hq, D)``, keys and values ``(B, Hkv, S, D)``. The heads of a group are rows of one product, so that
    nothing is repeated."""
    import torch

    batch, length, heads, dim = q.shape
    kv_heads = keys.shape[1]
    rows = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, -1, dim)
    scores = torch.baddbmm(q.new_empty(1, 1, 1), rows, keys.flatten(0, 1).mT, beta=0, alpha=dim**-0.5)
    if hidden is not None:
        scores.view(-1, *hidden.shape).masked_fill_(hidden, float("-inf"))
    out = torch.bmm(torch.softmax(scores, -1), values.flatten(0, 1))
    return out.view(batch, kv_heads, -1, length, dim).permute(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def writing(call: Callable[[], tuple], targets: tuple) -> Callable[[], Any]:
    """`call`, with its results copied into `targets`, where the check looks for them."""

    def run():
        for target, result in zip(targets, call(), strict=True):
            target.copy_(result)

    return run

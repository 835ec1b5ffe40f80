"""The baseline in plain PyTorch: the same rotation and the same compressor as a model without kernels computes them.

Each function returns a callable that makes new tensors, as eager code does. Arithmetic is fp32 and inputs are bf16, so
that
the baseline passes the same check against fp64. What a model computes once for all layers is left outside of the clock:
the
angles of the tokens, and the graph of the forward pass that a backward walks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "torch eager"
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


def writing(call: Callable[[], tuple], targets: tuple) -> Callable[[], Any]:
    """`call`, with its results copied into `targets`, where the check looks for them."""

    def run():
        for target, result in zip(targets, call(), strict=True):
            target.copy_(result)

    return run

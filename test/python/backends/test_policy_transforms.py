"""torch.func and forward mode over the policy functions: the derivative, or a refusal that names the function before
anything ran."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from cuteforge import UnsupportedError, apply_rotary_emb, attention, compress, rotary_table
from cuteforge.families.attention import reference
from helpers.policy import draw

COS, SIN = rotary_table(32, 16)
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "mask": {"attn_mask": torch.rand(2, 7, generator=torch.Generator().manual_seed(1)) > 0.4},
    "cap and sinks": {"softcap": 2.0, "sinks": torch.linspace(-1, 1, 4)},
}
func = torch.func


def dual(f, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent


# Each a function of (function of one tensor, tensor, tangent).
TRANSFORMS = {
    "jvp": lambda f, x, t: func.jvp(f, (x,), (t,))[1],
    "dual": dual,
    "vjp": lambda f, x, t: func.vjp(f, x)[1](f(x))[0],
    "grad": lambda f, x, t: func.grad(lambda y: f(y).square().sum())(x),
    "hessian": lambda f, x, t: func.hessian(lambda s: f(x * s).square().sum())(torch.tensor(1.5, dtype=x.dtype)),
    "vmap": lambda f, x, t: func.vmap(f)(torch.stack((x, t))),
    "vmap of grad": lambda f, x, t: func.vmap(func.grad(lambda y: f(y).square().sum()))(torch.stack((x, t))),
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@each_transform
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_is_that_of_the_oracle(transform, options):
    q, k, v = draw(length=4, heads=4, dtype=torch.float64)
    # the oracle writes in place, which vmap does not follow: eager arithmetic instead
    got = transform(lambda x: attention(x, k, v, **options), q, torch.ones_like(q))
    want = transform(lambda x: oracle(x, k, v, **options), q, torch.ones_like(q))
    torch.testing.assert_close(got, want)


def oracle(q, k, v, is_causal=False, window=(None, None), attn_mask=None, softcap=None, sinks=None):
    scores = torch.einsum("blhd,bshd->bhls", q, k.repeat_interleave(2, 2)) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keep = torch.ones(4, 7, dtype=torch.bool)
    distance = torch.arange(7) - torch.arange(4)[:, None] - 3
    if is_causal:
        keep = keep & (distance <= 0)
    if window != (None, None):
        keep = keep & (distance >= -window[0]) & (distance <= window[1])
    if attn_mask is not None:
        keep = keep & attn_mask[:, None, None]
    weights = scores.masked_fill(~keep, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.einsum("bhls,bshd->blhd", weights / total, v.repeat_interleave(2, 2))


def test_the_oracle_of_this_page_is_that_of_the_others():
    q, k, v = draw(length=4, heads=4, dtype=torch.float64)
    for options in OPTIONS.values():
        renamed = {{"is_causal": "causal", "attn_mask": "mask"}.get(name, name): x for name, x in options.items()}
        torch.testing.assert_close(oracle(q, k, v, **options), reference.attend(q, k, v, **renamed)[0])


def test_jvp_for_keys_values_and_sinks():
    operands = (*draw(length=4, heads=4, dtype=torch.float64), torch.linspace(-1, 1, 4).double())
    tangents = tuple(torch.ones_like(x) for x in operands)
    got = func.jvp(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks), operands, tangents)
    want = func.jvp(lambda q, k, v, sinks: oracle(q, k, v, sinks=sinks), operands, tangents)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
def test_attention_under_compile(transform, fresh_compiler):
    q, k, v = draw(length=4, heads=4, dtype=torch.float64)

    def step(x):
        return TRANSFORMS[transform](lambda y: attention(y, k, v, is_causal=True), x, torch.ones_like(x))

    torch.testing.assert_close(torch.compile(step, backend=fresh_compiler, fullgraph=True)(q), step(q))


@each_transform
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_is_linear_in_x(transform, interleaved):
    x = torch.randn(5, 2, 16, dtype=torch.float64)
    table = {"cos": COS, "sin": SIN, "positions": torch.arange(5)}
    cos, sin = (t[:5].double()[:, None] for t in (COS, SIN))

    def turned(x):
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    got = transform(lambda x: apply_rotary_emb(x, **table, interleaved=interleaved), x, torch.ones_like(x))
    torch.testing.assert_close(got, transform(turned, x, torch.ones_like(x)))


@each_transform
def test_compress_refuses_by_name_before_anything_ran(transform, monkeypatch):
    from cuteforge.families.csa.compressor import reference as csa_reference

    monkeypatch.setattr(csa_reference, "compress_forward", lambda *_: pytest.fail("ran"))
    tokens = torch.randn(20, 16)
    with pytest.raises(UnsupportedError, match="^compress: no backend serves this call: .*torch.func and forward-mode"):
        transform(lambda x: compress(x, x, torch.zeros(4, 16), torch.tensor([0, 20])), tokens, torch.ones_like(tokens))


def test_asked_for_kernels_refuse_by_name():
    q, k, v = draw()
    with pytest.raises(
        UnsupportedError, match="^attention: no backend serves this call, asked for by argument: cuda: "
    ):
        func.jvp(lambda x: attention(x, k, v, backend="cuda"), (q,), (q,))

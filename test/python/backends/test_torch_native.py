"""Attention in torch: dense calls and calls over a cache against the eager oracle, and what is refused by name."""

from __future__ import annotations

import pytest
import torch

from cuteforge import ContractError, KVCache, UnsupportedError, attention, explain
from cuteforge.backends import sdpa
from cuteforge.backends.flash import FlashAttnBackend
from cuteforge.backends.interface import Request
from cuteforge.families.attention import reference
from helpers.packs import offsets
from helpers.policy import check, check_packed, draw

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def random_mask(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (5, 1), (3, 3), (14, 2)])
def test_dense(dtype, heads, kv_heads):
    q, k, v = draw(heads=heads, kv_heads=kv_heads, dtype=dtype)
    check(attention(q, k, v), q, k, v)


@pytest.mark.parametrize(("length", "num_keys"), [(1, 7), (3, 7), (7, 7), (9, 4), (5, 1), (4, 0), (0, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_corner_is_at_the_last_query_and_key(length, num_keys, masked):
    """With more queries than keys the first ones see nothing and give 0."""
    q, k, v = draw(length=length, num_keys=num_keys)
    mask = random_mask(2, num_keys) if masked else None
    check(attention(q, k, v, attn_mask=mask, is_causal=True), q, k, v, mask=mask, causal=True)


def test_pf1_numbers():
    q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 5, 1, 8)
    v = torch.arange(5.0).view(1, 5, 1, 1).expand(1, 5, 1, 8)
    assert attention(q, k, v, is_causal=True)[0, :, 0, 0].tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    "shape", [(2, 7), (1, 7), (2, 3, 7), (2, 1, 7), (1, 3, 7), (2, 1, 1, 7), (2, 6, 3, 7), (1, 6, 1, 7), (2, 1, 3, 7)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_every_rank_and_broadcast(shape, causal):
    q, k, v = draw()
    mask = random_mask(*shape)
    check(attention(q, k, v, attn_mask=mask, is_causal=causal), q, k, v, mask=mask, causal=causal)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rows_without_a_key_are_zero_and_so_are_their_gradients(dtype):
    """Softmax over nothing; NaN neither in the result nor in the backward."""
    q, k, v = (x.requires_grad_() for x in draw(dtype=dtype))
    mask = torch.zeros(2, 3, 7, dtype=torch.bool)
    mask[0, 1, 2] = True
    out = attention(q, k, v, attn_mask=mask)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and torch.equal(out[0, 0], torch.zeros_like(out[0, 0]))
    assert torch.equal(out[0, 1, 0], v[0, 2, 0])
    out.sum().backward()
    for x in (q, k, v):
        assert bool(x.grad.isfinite().all())
    assert not bool(q.grad[1].any()) and not bool(v.grad[1].any())


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 7, 0.02])
@pytest.mark.parametrize("masked", [False, True])
def test_any_finite_scale(scale, masked):
    q, k, v = draw()
    mask = random_mask(2, 7) if masked else None
    check(attention(q, k, v, attn_mask=mask, scale=scale), q, k, v, mask=mask, softmax_scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-300, -1e-300, 1e-45, 1e-39, -1e-39, -1.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_any_scale_in_a_causal_square(scale, dtype, length):
    """Without a scale weights are uniform: what is masked is not multiplied by it."""
    q, k, v = draw(length=length, num_keys=length, dtype=dtype)
    check(attention(q, k, v, is_causal=True, scale=scale), q, k, v, causal=True, softmax_scale=scale)


def test_a_scale_of_zero_has_gradients():
    q, k, v = (x.requires_grad_() for x in draw(length=5, num_keys=5, dtype=torch.float64))
    grads = torch.autograd.grad(attention(q, k, v, is_causal=True, scale=0.0).square().sum(), (q, k, v))
    assert not bool(grads[0].any()) and not bool(grads[1].any()) and bool(grads[2].isfinite().all())


SINKS = torch.tensor([-torch.inf, -3.0, 0.0, 0.5, 2.0, 30.0])
OPTIONS = {
    "left": {"window": (2, None)},
    "both sides": {"window": (1, 2)},
    "own key": {"window": (0, 0)},
    "no limit": {"window": (None, None)},
    "cap": {"softcap": 0.7},
    "sinks": {"sinks": SINKS},
    "all": {"window": (3, 1), "softcap": 2.0, "sinks": SINKS},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@each_option
@pytest.mark.parametrize(("length", "num_keys"), [(1, 7), (7, 7), (9, 4), (4, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_options(options, length, num_keys, causal):
    q, k, v = draw(length=length, num_keys=num_keys)
    check(attention(q, k, v, is_causal=causal, **options), q, k, v, causal=causal, **options)


@each_option
def test_options_with_a_mask_a_scale_and_empty_rows(options):
    q, k, v = draw(dtype=BF16)
    mask = random_mask(2, 6, 3, 7)
    mask[0, 1, 2] = False
    check(attention(q, k, v, attn_mask=mask, scale=-0.4, **options), q, k, v, mask=mask, softmax_scale=-0.4, **options)


# (query tokens, keys): torch's fused kernel of the CPU takes keys in vectors of 8 to 32, and in blocks of 512.
NAN_SIZES = [(1, 4), (3, 7), (5, 5), (17, 17), (2, 40), (40, 40), (3, 520)]


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS])
@pytest.mark.parametrize(("length", "num_keys"), NAN_SIZES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("poisoned", ["query", "keys", "first key", "one key", "value"])
def test_a_nan_that_a_row_depends_on_comes_out(options, length, num_keys, causal, poisoned):
    """The rows of the oracle that are NaN are; exact zeros came out where all scores of a row were."""
    for dtype in (FP32, BF16):
        q, k, v = draw(length=length, num_keys=num_keys, dtype=dtype)
        if poisoned == "query":
            q[0, length // 2, 1] = torch.nan
        elif poisoned == "value":
            v[0, num_keys // 2] = torch.nan
        else:
            k[
                0,
                {"keys": slice(None), "first key": slice(1), "one key": slice(num_keys // 2, num_keys // 2 + 1)}[
                    poisoned
                ],
            ] = torch.nan
        want, _ = reference.attend(q, k, v, causal=causal, **options)
        got = attention(q, k, v, is_causal=causal, **options)
        assert not bool((want.isnan() & ~got.isnan()).any())
        assert not bool(got[1].isnan().any()), "another request"


@pytest.mark.parametrize("masked", [False, True])
def test_a_nan_query_that_sees_no_key_gives_zero(masked):
    q, k, v = draw(num_keys=7 if masked else 0)
    mask = torch.zeros(2, 7, dtype=torch.bool) if masked else None
    assert not bool(attention(torch.full_like(q, torch.nan), k, v, attn_mask=mask).any())


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": torch.zeros(6)}])
def test_nan_values_stay_out_of_rows_that_see_no_key(options):
    q, k, v = draw()
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    mask[:, 1] = False
    v.fill_(torch.nan)
    assert not bool(attention(q, k, v, attn_mask=mask, **options)[:, 1].any())
    assert not bool(reference.attend(q, k, v, mask=mask, **options)[0][:, 1].any())


def test_gradients_of_options_are_those_of_the_oracle():
    q, k, v = (x.requires_grad_() for x in draw(dtype=torch.float64))
    sinks = SINKS[1:5].double().requires_grad_()
    q4 = q[:, :, :4]
    options = {"window": (4, None), "softcap": 1.5, "sinks": sinks}
    got = torch.autograd.grad(attention(q4, k, v, **options).square().sum(), (q, k, v, sinks))
    want = torch.autograd.grad(reference.attend(q4, k, v, **options)[0].square().sum(), (q, k, v, sinks))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"window": 3}, "window: wanted None or"),
        ({"window": (-1, 0)}, "window: wanted None or"),
        ({"softcap": -1.0}, "softcap: wanted None, 0 or"),
        ({"softcap": 1e5}, "softcap: wanted None, 0 or"),
        ({"softcap": True}, "softcap: wanted None, 0 or"),
        ({"sinks": [0.0] * 6}, "sinks: wanted a torch.Tensor, got list"),
        ({"sinks": torch.zeros(6, dtype=torch.int32)}, "sinks: wanted a floating dtype, got torch.int32"),
        ({"sinks": torch.zeros(5)}, r"sinks: wanted shape \(Hq,\) = \(6,\), got \(5,\)"),
        ({"sinks": torch.zeros(6, device="meta")}, "sinks: wanted a tensor on cpu"),
    ],
)
def test_options_that_disagree_are_refused_by_name(options, match):
    with pytest.raises(ContractError, match=match):
        attention(*draw(), **options)


def test_narrower_values_strides_and_shared_heads():
    q, k, v = draw(d=24, dv=16)
    check(attention(q, k, v), q, k, v)
    k, v = (x[:, :, :1].expand(-1, -1, 3, -1) for x in (k, v))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    check(attention(q, k, v), q, k, v)


def test_scores_past_half_precision_stay_finite():
    q, k = torch.full((1, 1, 1, 128), 32.0, dtype=FP16), torch.full((1, 16, 1, 128), 32.0, dtype=FP16)
    v = torch.arange(16.0, dtype=FP16).view(1, 16, 1, 1).expand(1, 16, 1, 128)
    assert bool((attention(q, k, v) == 7.5).all())


def test_autocast_changes_nothing():
    q, k, v = draw()
    want = attention(q, k, v)
    with torch.autocast("cpu", BF16):
        got = attention(q, k, v)
    assert got.dtype == FP32 and torch.equal(got, want)


def test_gradients_are_those_of_the_oracle():
    q, k, v = (x.requires_grad_() for x in draw(dtype=torch.float64, length=5, num_keys=5))
    mask = random_mask(2, 5)
    got = torch.autograd.grad(attention(q, k, v, attn_mask=mask, is_causal=True).square().sum(), (q, k, v))
    groups = q.shape[2] // k.shape[2]
    scores = torch.einsum("blhd,bshd->bhls", q, k.repeat_interleave(groups, 2)) * q.shape[-1] ** -0.5
    keep = mask[:, None, None] & torch.ones(5, 5, dtype=torch.bool).tril()
    weights = scores.masked_fill(~keep, -1e300).softmax(-1).masked_fill(~keep, 0)
    out = torch.einsum("bhls,bshd->blhd", weights, v.repeat_interleave(groups, 2))
    for a, b in zip(got, torch.autograd.grad(out.square().sum(), (q, k, v))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q, k, v: (q, k[:1], v), r"k: wanted shape \(B, S, Hkv, D\) with B = 2"),
        (lambda q, k, v: (q, k, v[:, :5]), r"v: wanted shape"),
        (lambda q, k, v: (q[:, :, :5], k, v), "q: wanted a multiple of Hkv = 2 heads, got Hq = 5"),
        (lambda q, k, v: (q, k.double(), v), "k: wanted torch.float32"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "q: wanted a floating dtype"),
    ],
)
def test_operands_that_disagree_are_refused_by_name(change, match):
    with pytest.raises(ContractError, match=match):
        attention(*change(*draw()))


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.zeros(2, 7, dtype=torch.int64), "attn_mask: wanted a bool tensor, .* or one of a floating dtype"),
        (torch.zeros(7), "attn_mask: wanted shape .*got 1 dims"),
        (torch.zeros(2, 2, 3, 7), "attn_mask: wanted Hq = 6 or 1, got 2"),
        (torch.zeros(3, 8), "attn_mask: wanted .*, got"),
        (torch.ones(7, dtype=torch.bool), "attn_mask: wanted shape .*got 1 dims"),
        (torch.ones(2, 1, dtype=torch.bool), "attn_mask: wanted S = 7, got 1"),
        (torch.ones(3, 7, dtype=torch.bool), "attn_mask: wanted B = 2 or 1, got 3"),
        (torch.ones(2, 2, 7, dtype=torch.bool), "attn_mask: wanted L = 3 or 1, got 2"),
        (torch.ones(2, 2, 3, 7, dtype=torch.bool), "attn_mask: wanted Hq = 6 or 1, got 2"),
    ],
)
def test_masks_that_disagree_are_refused_by_name(mask, match):
    with pytest.raises(ContractError, match=match):
        attention(*draw(), attn_mask=mask)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1"])
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    with pytest.raises(ContractError, match="scale: wanted a finite number"):
        attention(*draw(), scale=scale)


# Over a cache.

HEADS, KV_HEADS, D, LAYERS = 6, 2, 16, 2


class Model:
    """Keys and values of requests, layer by layer, and a cache with poisoned pools that is given the same."""

    def __init__(self, num_requests: int, *, page_size: int = 4, dtype=FP32) -> None:
        self.cache = KVCache(
            LAYERS,
            KV_HEADS,
            D,
            num_pages=64,
            page_size=page_size,
            max_requests=8,
            max_seqlen=40,
            dtype=dtype,
            device="cpu",
        )
        for layer in range(LAYERS):
            self.cache.k_pool(layer).fill_(torch.nan)
            self.cache.v_pool(layer).fill_(torch.nan)
        self.requests = [self.cache.add() for _ in range(num_requests)]
        self.keys = [[torch.empty(2, 0, KV_HEADS, D, dtype=dtype) for _ in self.requests] for _ in range(LAYERS)]
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def step(self, lengths: list[int], *, decode: bool = False, as_batch: bool = False, **options) -> None:
        """Bind and attend in every layer, each checked against dense attention."""
        if decode:
            self.cache.bind_decode(self.requests)
        else:
            self.cache.bind_prefill(self.requests, lengths)
        for layer in range(LAYERS):
            total = sum(lengths)
            q, new = self.randn(total, HEADS, D), self.randn(2, total, KV_HEADS, D)
            parts = new.split(lengths, 1)
            self.keys[layer] = [torch.cat(pair, 1) for pair in zip(self.keys[layer], parts)]
            given = [x.unsqueeze(1) if as_batch else x for x in (q, *new)]
            out = attention(*given, self.cache, layer, **options)
            assert out.shape == given[0].shape
            self.check(layer, out.reshape(q.shape), q, lengths, **options)

    def check(self, layer: int, out, q, lengths, attn_mask=None, is_causal=False, fwd=None, **options) -> None:
        lens_k = [x.shape[1] for x in self.keys[layer]]
        padded = torch.zeros(2, len(lens_k), max(lens_k), KV_HEADS, D, dtype=self.dtype)
        for i, x in enumerate(self.keys[layer]):
            padded[:, i, : x.shape[1]] = x
        check_packed(out, q, lengths, *padded, lens_k, mask=attn_mask, causal=is_causal, **options)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_prefill_in_parts_and_decode_over_a_poisoned_cache(dtype, page_size):
    """What no token was stored to is NaN and stays out of every result."""
    model = Model(3, page_size=page_size, dtype=dtype)
    model.step([5, 9, 1], is_causal=True)
    model.step([3, 0, 6], is_causal=True)
    for as_batch in (False, True, True):
        model.step([1, 1, 1], decode=True, as_batch=as_batch, is_causal=True)


@each_option
def test_options_over_a_cache(options):
    model = Model(3)
    model.step([5, 9, 1], is_causal=True, **options)
    model.step([3, 0, 6], attn_mask=random_mask(3, 20), **options)
    model.step([1, 1, 1], decode=True, is_causal=True, **options)


def test_decode_bound_batch_may_run_as_prefill_but_not_the_other_way_round():
    model = Model(2)
    model.step([5, 2], is_causal=True)
    model.step([1, 1], decode=True, fwd="prefill")
    with pytest.raises(ContractError, match="fwd: wanted None or 'prefill'"):
        model.step([2, 3], fwd="decode")


@pytest.mark.parametrize("shape", [(2, 20), (1, 3), (2, 4, 20), (2, 2, 20), (2, 1, 1, 6), (2, HEADS, 9, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_over_a_cache_lack_what_they_lack(shape, causal):
    """Rows are the request's new tokens, columns positions; what there is none of counts as masked."""
    model = Model(2)
    model.step([3, 6], is_causal=True)
    model.step([4, 2], is_causal=causal, attn_mask=random_mask(*shape))


def test_empty_batches_and_requests():
    model = Model(2)
    model.step([0, 0])
    model.step([0, 4], is_causal=True)
    model.cache.bind_prefill([], [])
    q, k = torch.empty(0, HEADS, D), torch.empty(0, KV_HEADS, D)
    assert attention(q, k, k, model.cache).shape == q.shape


def test_a_cache_is_refused_by_name():
    model = Model(2)
    q, k = torch.zeros(2, HEADS, D), torch.zeros(2, KV_HEADS, D)
    with pytest.raises(ContractError, match="kv_cache: wanted one with a batch"):
        attention(q, k, k, model.cache)
    model.cache.bind_decode(model.requests)
    for name, operands in (
        ("q", (q[:1], k, k)),
        ("k", (q, k[:1], k)),
        ("v", (q, k, k[:1])),
        ("q", (q.double(), k, k)),
        ("q", (q[:, :5], k, k)),
        ("q", (q[:, None].expand(2, 2, HEADS, D), k, k)),
        ("k", (q, k[0], k)),
    ):
        with pytest.raises(ContractError, match=rf"^{name}: wanted"):
            attention(*operands, model.cache)
    with pytest.raises(UnsupportedError, match=r"torch_native: over a cache it is not served by torch.func"):
        torch.func.grad(lambda q: attention(q, k, k, model.cache).sum())(q)


# Over a cache, with gradients.


def dense_over_history(q, new, stored, lengths, causal, attn_mask=None, **options):
    """Attention of each request alone over all its keys, of which only those of this call have a graph."""
    outs, start = [], 0
    for i, length in enumerate(lengths):
        mine, (k, v) = (
            slice(start, start + length),
            (torch.cat((old, x[start : start + length])) for old, x in zip(stored[i], new)),
        )
        mask = None
        if attn_mask is not None:
            mask = torch.zeros(1, 1, length, len(k), dtype=torch.bool)
            part = attn_mask[i : i + 1, :length, : len(k)]
            mask[0, :, :, : part.shape[2]] = part
        outs.append(attention(q[None, mine], k[None], v[None], is_causal=causal, attn_mask=mask, **options)[0])
        start += length
    return torch.cat(outs)


GRADIENT_CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": random_mask(3, 4, 9), "is_causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 3.0, "is_causal": True, "scale": 0.7},
    "sinks": {"sinks": torch.randn(2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))},
    "all": {
        "window": (3, 0),
        "softcap": 3.0,
        "sinks": torch.ones(2, dtype=torch.float64),
        "attn_mask": random_mask(3, 4, 20),
    },
}


def with_history(lengths, decode=False):
    """A poisoned fp64 cache whose requests have tokens, bound to more of them; and what they have, which the call below
    does not change."""
    cache = KVCache(
        1,
        1,
        4,
        v_head_dim=3,
        num_pages=32,
        page_size=3,
        max_requests=4,
        max_seqlen=30,
        dtype=torch.float64,
        device="cpu",
    )
    for pool in (cache.k_pool(0), cache.v_pool(0)):
        pool.fill_(torch.nan)
    requests, generator = [cache.add() for _ in lengths], torch.Generator().manual_seed(0)
    history = [5, 0, 3][: len(lengths)]
    cache.bind_prefill(requests, history)
    k, v = (torch.randn(sum(history), 1, dim, generator=generator, dtype=torch.float64) for dim in (4, 3))
    cache.append(0, k, v)
    cache.bind_decode(requests, pad_to=len(lengths) + 1) if decode else cache.bind_prefill(requests, lengths)
    return cache, list(zip(k.split(history), v.split(history))), generator


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("options", GRADIENT_CALLS.values(), ids=GRADIENT_CALLS)
def test_gradients_over_a_cache_are_those_of_dense_attention(options, decode):
    """To q, to the new keys and values, and to sinks; what is in the cache is constant, and the next steps may
    overwrite the batch."""
    lengths = [1, 1, 1] if decode else [2, 4, 0]
    cache, stored, generator = with_history(lengths, decode)
    options, rows = {"is_causal": False, **options}, sum(lengths) + decode
    leaves = [torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in ((2, 4), (1, 4), (1, 3))]
    if decode:  # the padding row
        for x in leaves:
            x[-1] = torch.nan
    leaves += [options.pop("sinks")] if "sinks" in options else []
    leaves = [x.clone().requires_grad_() for x in leaves]
    if "attn_mask" in options and decode:
        options["attn_mask"] = torch.cat((options["attn_mask"], options["attn_mask"][:1]))[:, :1]

    def call(q, k, v, *sinks):
        given = {"sinks": sinks[0]} if sinks else {}
        return attention(q, k, v, cache, 0, **options, **given)[: sum(lengths)]

    weight = torch.randn(sum(lengths), 2, 3, generator=generator, dtype=torch.float64)
    out = call(*leaves)
    got_pool = cache.k_pool(0).clone()
    for _ in range(2):
        cache.bind_prefill([0], [1])
        cache.append(0, *(torch.full((1, 1, dim), 7.0, dtype=torch.float64) for dim in (4, 3)))
    got = torch.autograd.grad((out * weight).sum(), leaves)

    tokens = [x[: sum(lengths)] for x in leaves[:3]]
    given = dict(options)
    causal = given.pop("is_causal")
    given |= {"sinks": leaves[3]} if len(leaves) > 3 else {}
    want_out = dense_over_history(tokens[0], tokens[1:], stored, lengths, causal, **given)
    want = torch.autograd.grad((want_out * weight).sum(), leaves)
    torch.testing.assert_close(out, want_out, atol=1e-12, rtol=0)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    assert not got_pool.requires_grad
    assert not cache.k_pool(0).requires_grad


@pytest.mark.parametrize("options", GRADIENT_CALLS.values(), ids=GRADIENT_CALLS)
def test_gradients_over_a_cache_are_those_of_finite_differences(options):
    cache, _, generator = with_history([2, 4, 0])
    leaves = [
        torch.randn(6, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((2, 4), (1, 4), (1, 3))
    ]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, cache, 0, **options), leaves)


@pytest.mark.parametrize("which", range(3))
def test_any_one_of_the_operands_over_a_cache_may_require_grad(which):
    """Of requests without a key, padding rows alone, too."""
    cache, _, generator = with_history([2, 4, 0])
    for rows in (6, 2):
        if rows == 2:
            cache.bind_decode([], pad_to=2)
        leaves = [
            torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in ((2, 4), (1, 4), (1, 3))
        ]
        leaves[which].requires_grad_()
        attention(*leaves, cache, 0).sum().backward()
        grad = leaves[which].grad
        assert bool(grad.isfinite().all())
        assert bool((grad != 0).any()) == (rows == 6)


def test_a_model_whose_weights_require_grad_decodes_outside_of_no_grad():
    """The results and the bits of the cache are those under no_grad, and a loss over several steps has a gradient."""
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    outs, pools = [], []
    for grad_mode in (True, False):
        cache, _, generator = with_history([2, 4, 0], decode=True)
        total = 0
        with torch.set_grad_enabled(grad_mode):
            for _ in range(3):
                x = torch.randn(4, 1, 4, generator=generator, dtype=torch.float64) @ weight
                total = total + attention(x, x, x[..., :3], cache, 0).sum()
                cache.step()
        outs.append(total)
        pools.append(cache.k_pool(0)[1:].nan_to_num(9.0))
    assert torch.equal(*pools)
    assert torch.equal(outs[0], outs[1])
    outs[0].backward()
    assert bool(weight.grad.isfinite().all())
    assert bool((weight.grad != 0).any())


def test_only_torch_serves_a_gradient_over_a_cache_and_explain_says_why():
    cache, _, _ = with_history([2, 4, 0])
    q, k, v = (torch.ones(6, *shape, dtype=cache.dtype) for shape in ((2, 4), (1, 4), (1, 3)))
    q.requires_grad_()
    refusals = {verdict.name: verdict.refusal for verdict in explain(q, k, v, cache).verdicts}
    assert "the kernels have no derivative" in refusals["cuda"]
    assert refusals["torch_native"] is None
    request = Request(torch.device("cuda"), torch.bfloat16, 64, 64, 2, 1, "prefill", True, False, True, "graph")
    assert "no derivative over a cache" in FlashAttnBackend().refuse(request)


def test_padding_of_requests_is_the_oracles_and_comes_back():
    """Without a loop over requests: empty ones too."""
    lengths = [3, 0, 5, 1]
    x, cuts = torch.randn(9, 2, 4), offsets(lengths)
    padded, place = sdpa.pad_requests(x, cuts, 5)
    assert torch.equal(padded, reference.unpack(x, cuts)[0])
    assert torch.equal(padded[place], x)

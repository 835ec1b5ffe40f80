"""Prefill, dense and ragged, against the reference in fp64; then what must be the same bits."""

import math
from typing import NamedTuple

import pytest
import torch

from cuteforge import attn_prefill, gqa_prefill_wrapper
from cuteforge.families.attention import base as op
from helpers import attention as attn
from helpers import budget
from helpers.canary import Canary
from helpers.packs import offsets

KIND = "prefill"
SCALE_3 = 3 * 128**-0.5


class Case(NamedTuple):
    """One row of the dense table: run-time facts after the configuration."""

    guards: str
    config: attn.Config = attn.MAIN
    batch: int = 2
    length: int = 130
    size: int = 200
    kv_heads: int = 2
    flags: attn.Flags = attn.BASE
    layout: str = "contiguous"
    scale: float | None = None

    @property
    def label(self) -> str:
        shape = f"b{self.batch}-l{self.length}-s{self.size}-h{self.kv_heads}"
        return f"{self.config.label}-{shape}-{self.flags.label}-{self.layout}-x{self.scale}"


SIZES = (
    (1, 1), (1, 4096), (15, 16), (16, 15), (17, 17), (63, 64), (64, 64), (65, 65), (127, 128), (128, 127), (129, 129),
    (128, 1000), (1000, 128), (1000, 1000), (130, 4096),
)  # fmt: skip
CASES = (
    *(Case(c.guards, c) for c in attn.HEAD_DIMS),
    *(Case(c.guards, c, length=65, kv_heads=1 + i % 2) for i, c in enumerate(attn.GROUPS)),
    *(Case("around tiles of queries and keys", length=n, size=size, batch=3) for n, size in SIZES),
    *(Case("around tiles, all keys seen", length=n, size=s, flags=attn.FLAGS[3]) for n, s in SIZES[2:11]),
    Case("long", batch=1, length=8192, size=8192, kv_heads=1, config=attn.GROUPS[0]),
    *(Case("requests", batch=b, length=70, size=70, kv_heads=h) for b, h in ((1, 1), (1, 8), (16, 1), (16, 4))),
    *(Case("scale", scale=scale) for scale in (0.0, -0.3, SCALE_3)),
    *(Case("flags", flags=flags) for flags in attn.FLAGS[1:]),
    *(Case("strided memory", layout=layout) for layout in attn.LAYOUTS if layout != "contiguous"),
    Case("fused, values narrower", attn.LATENT, layout="fused"),
)


def draw(case: Case, device, **given) -> attn.Inputs:
    x = attn.draw(
        case.config,
        case.batch,
        case.length,
        case.size,
        case.kv_heads,
        device=device,
        flags=case.flags,
        softmax_scale=case.scale,
        **given,
    )
    return attn.LAYOUTS[case.layout](x)


@pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])
def test_dense_case(case, device):
    """In guarded memory, unused keys and values NaN; the row says which path it is there for."""
    x = draw(case, device)
    attn.check(attn.run(KIND, x, lse=case.flags.lse), x)


RAGGED_CONFIGS = tuple(attn.HEAD_DIMS[i] for i in (0, 1, 4, 9, 10))
# Name: query and key lengths.
PACKS = {
    "ragged": ([5, 0, 1, 64, 129, 300, 17], [7, 0, 3, 64, 500, 100, 0]),
    "prefix": ([16, 1, 100], [1016, 513, 100]),
    "empties_first_and_last": ([0, 0, 70, 0], [0, 5, 70, 0]),
    "all_empty": ([0, 0, 0], [3, 0, 1]),
    "no_keys": ([4, 9], [0, 0]),
    "one_request": ([257], [257]),
    "one_token": ([1], [1]),
    "one_query_each": ([1] * 40, list(range(40))),
    "many_short": ([1 + b % 3 for b in range(256)], [b % 5 for b in range(256)]),
    "one_long_among_short": ([1, 2, 2000, 1], [3, 2, 2000, 500]),
}
RAGGED = (
    *((config, "ragged", "contiguous") for config in RAGGED_CONFIGS),
    *((attn.MAIN, pack, "contiguous") for pack in PACKS if pack != "ragged"),
    *((attn.MAIN, "ragged", layout) for layout in attn.LAYOUTS if layout != "contiguous"),
    *((config, "ragged", "contiguous") for config in attn.GROUPS[2:9:3]),
)


def draw_pack(config, name, device, **options) -> attn.Inputs:
    return attn.draw_ragged(config, *PACKS[name], device=device, **options)


@pytest.mark.parametrize(("config", "pack", "layout"), RAGGED, ids=[f"{c.label}-{p}-{n}" for c, p, n in RAGGED])
def test_ragged_case(config, pack, layout, device):
    x = attn.LAYOUTS[layout](draw_pack(config, pack, device))
    attn.check(attn.run(KIND, x), x)


@pytest.mark.parametrize("pack", ["ragged", "prefix", "many_short"])
def test_ragged_without_causal(pack, device):
    x = draw_pack(attn.MAIN, pack, device, causal=False)
    attn.check(attn.run(KIND, x), x)


def test_ragged_without_lse(device):
    x = draw_pack(attn.MAIN, "ragged", device)
    got, want = attn.run(KIND, x, lse=False), attn.run(KIND, x)
    assert budget.same_bits(got.out, want.out)


@pytest.mark.parametrize("cuts", [[0, 7, 20], [0, 0, 20], [0]], ids=["two", "empty_first", "no_request"])
def test_tokens_past_the_last_request_see_nothing(cuts, device):
    """Capacity padding of a captured graph: every row of the outputs is written, those of no request with 0 and
    -inf."""
    used, num_tokens = cuts[-1], 300
    q, k, v = (torch.randn(num_tokens, heads, 64, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2))
    q[used:] = k[used:] = v[used:] = math.nan
    cu = torch.tensor(cuts, dtype=torch.int32, device=device)
    out = torch.full_like(q, math.nan)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True, "return_lse": True}
    got = gqa_prefill_wrapper(q, k, v, **options, out=out)
    assert not got["out"][used:].any() and got["lse"][:, used:].isneginf().all()
    if used:
        alone = gqa_prefill_wrapper(q[:used], k[:used], v[:used], **options)
        assert torch.equal(got["out"][:used], alone["out"]) and torch.equal(got["lse"][:, :used], alone["lse"])


def test_ragged_request_equals_its_stand_alone_call(device):
    """The same bits: neighbours, and where a request lies in the pack, do not matter."""
    x = draw_pack(attn.MAIN, "ragged", device)
    cuts_q, cuts_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    for b, want in enumerate(attn.by_request(attn.run(KIND, x), x)):
        q, k, v = (t[c[b] : c[b + 1]].clone() for t, c in ((x.q, cuts_q), (x.k, cuts_k), (x.v, cuts_k)))
        cuts = (offsets([len(t)]).to(device) for t in (q, k))
        assert attn.same(attn.run(KIND, attn.Inputs(q, k, v, *cuts, causal=True)), want), b


def test_more_requests_than_are_looked_up_at_once(device):
    """The warps that copy look the next units up in groups, of which a CTA has several here and one where there are 200
    requests."""
    count, some = 1600, 200
    x = attn.draw_ragged(attn.MAIN, [b % 4 for b in range(count)], [b % 7 for b in range(count)], device=device)
    got = attn.run(KIND, x)
    for first in range(0, count, some):
        cu_q, cu_k = (cu[first : first + some + 1] for cu in (x.cu_seqlens_q, x.cu_seqlens_k))
        queries, keys = (slice(cu[0].item(), cu[-1].item()) for cu in (cu_q, cu_k))
        tensors = {"q": x.q[queries], "k": x.k[keys], "v": x.v[keys]}
        few = x.with_(**tensors, cu_seqlens_q=cu_q - cu_q[0], cu_seqlens_k=cu_k - cu_k[0])
        want = attn.run(KIND, few)
        assert budget.same_bits(got.out[queries], want.out) and budget.same_bits(got.lse[:, queries], want.lse)
    attn.check(want, few)


def test_dense_request_equals_its_stand_alone_call(device):
    x = draw(Case("", batch=5, length=70), device)
    want = attn.run(KIND, x)
    for b in range(5):
        assert attn.same(attn.run(KIND, x.request(b)), attn.Results(want.out[b : b + 1], want.lse[b : b + 1])), b


def test_lengths_equal_cut_memory(device):
    """seqlens_k moves the causal corner to the end of what is valid."""
    x = attn.draw(attn.MAIN, 2, 40, 200, device=device, lengths=[90, 90])
    short = x.with_(k=x.k[:, :90].contiguous(), v=x.v[:, :90].contiguous())
    assert attn.same(attn.run(KIND, x), attn.run(KIND, short))


@pytest.mark.parametrize("layout", attn.LAYOUTS)
@pytest.mark.parametrize("out_gaps", [False, True], ids=["out_contiguous", "out_gaps"])
def test_layout_changes_no_bit(layout, out_gaps, device):
    for x in (draw(Case("", length=70), device), draw_pack(attn.MAIN, "ragged", device)):
        want = attn.run(KIND, x)
        assert attn.same(attn.run(KIND, attn.LAYOUTS[layout](x), out_gaps=out_gaps), want)


def test_q_k_and_v_are_slices_of_one_buffer(device):
    """As a fused projection leaves them, dense and packed."""
    generator = torch.Generator(device=device).manual_seed(0)
    qkv = torch.randn(2, 65, 12, 128, generator=generator, device=device).bfloat16()
    lengths = torch.full((2,), 65, dtype=torch.int32, device=device)
    cuts = torch.tensor([0, 65, 130], dtype=torch.int32, device=device)
    for buffer, given in (
        (qkv, {"seqlens_k": lengths}),
        (qkv.flatten(0, 1), {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts}),
    ):
        x = attn.Inputs(buffer[..., :8, :], buffer[..., 8:10, :], buffer[..., 10:, :], causal=True, **given)
        attn.check(attn.run(KIND, x), x)


def test_same_bits_at_every_run(device):
    for x in (draw(Case("", size=1000), device), draw_pack(attn.MAIN, "ragged", device)):
        want = attn.run(KIND, x)
        assert all(attn.same(attn.run(KIND, x), want) for _ in range(5))


def test_decode_and_prefill_agree(device):
    """One op may stand in for the other: each within the budget of the same oracle."""
    x = attn.draw(attn.MAIN, 3, 5, 300, device=device)
    for kind in attn.CLASSES:
        attn.check(attn.run(kind, x), x)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_wrapper_equals_the_class(packed, device):
    x = draw_pack(attn.MAIN, "ragged", device) if packed else draw(Case(""), device)
    want = attn.run(KIND, x)
    got = attn.wrapped(KIND, x)
    assert list(got.keys()) == ["out", "lse"]
    assert attn.same(attn.Results(*got), want)
    assert list(attn.wrapped(KIND, x, return_lse=False).keys()) == ["out"]
    out = Canary(x.out_shape, x.q.dtype, device, stride=attn.gap_stride(x.out_shape))
    assert attn.wrapped(KIND, x, out=out.tensor)["out"] is out.tensor
    torch.cuda.synchronize()
    out.check("out")
    assert budget.same_bits(out.tensor, want.out)


def test_thin_function(device):
    x = draw(Case("", flags=attn.FLAGS[2], scale=SCALE_3), device)
    got = attn_prefill(x.q, x.k, x.v, None, True, scale=SCALE_3)
    assert isinstance(got, torch.Tensor)
    attn.check(attn.Results(got, None), x)


def test_bound_call_follows_new_offsets(device):
    """Other requests in the same memory: the schedule is found on the device."""
    call = attn.prepare(KIND, draw_pack(attn.MAIN, "ragged", device))
    launch, num_q = call.bind(), call.x.q.shape[0]
    for lens_q in ([0, 0, num_q, 0, 0, 0, 0], [1] * 6 + [num_q - 6], [num_q - 300, 0, 0, 0, 0, 0, 300]):
        fresh = attn.draw_ragged(attn.MAIN, lens_q, PACKS["ragged"][1], device=device, seed=len(lens_q))
        for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
            getattr(call.x, name).copy_(getattr(fresh, name))
        call.poison()
        launch()
        torch.cuda.synchronize()
        call.check_memory()
        attn.check(call.results(), fresh)


@pytest.mark.parametrize("kind", **attn.both_ops)
@pytest.mark.parametrize("sizes", [(70_001, 1), (1, 70_001)], ids=["requests", "kv_heads"])
def test_no_extent_meets_a_grid_limit(sizes, kind, device):
    """65 535 is the limit of two of the three grid dims."""
    batch, kv_heads = sizes
    x = attn.draw(attn.GROUPS[0], batch, 1, 2, kv_heads, device=device, flags=attn.FLAGS[2])
    lengths = torch.arange(batch, device=device, dtype=torch.int32) % 2 + 1
    results = attn.run(kind, x.with_(seqlens_k=lengths))
    visible = torch.arange(2, device=device) < lengths[:, None, None]
    scores = torch.einsum("blhd,bshd->bhs", x.q.float(), x.k.float()) * 128**-0.5
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    want = torch.einsum("bhs,bshd->bhd", weights, x.v.float())
    torch.testing.assert_close(results.out[:, 0].float(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("config", attn.HEAD_DIMS[:8], ids=lambda config: config.label)
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_the_tile_that_few_rows_choose_gives_the_same_bits(config, layout, device, monkeypatch):
    """So what a request gets does not depend on how many others there are."""
    if layout == "dense":
        x = attn.draw(config, 2, 333, 400, device=device, lengths=[400, 77])
    else:
        x = attn.draw_ragged(config, (1, 333, 0, 64), (300, 333, 9, 500), device=device)
    results = []
    for limit in (0, 1 << 30):
        monkeypatch.setattr(op, "few_rows", lambda *_, limit=limit: limit)
        results.append(attn.run(KIND, x))
    assert attn.same(*results)

"""Decode against the reference in fp64: head dims, groups, lengths, splits, layouts, scales; then what must be the same
bits."""

from typing import NamedTuple

import pytest
import torch

from cuteforge import attn_decode
from helpers import attention as attn
from helpers import budget
from helpers.canary import Canary

KIND = "decode"
SCALE_3 = 3 * 128**-0.5


class Case(NamedTuple):
    """One row of the table: run-time facts after the configuration."""

    guards: str
    config: attn.Config = attn.MAIN
    batch: int = 3
    length: int = 1
    size: int = 1000
    kv_heads: int = 2
    flags: attn.Flags = attn.BASE
    num_splits: int | None = None
    layout: str = "contiguous"
    scale: float | None = None

    @property
    def label(self) -> str:
        shape = f"b{self.batch}-l{self.length}-s{self.size}-h{self.kv_heads}"
        return f"{self.config.label}-{shape}-{self.flags.label}-n{self.num_splits}-{self.layout}-x{self.scale}"


SIZES = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4096, 8192)
CASES = (
    *(Case(c.guards, c, length=3) for c in attn.HEAD_DIMS),
    *(Case(c.guards, c, kv_heads=1 + i % 3) for i, c in enumerate(attn.GROUPS)),
    *(Case(f"{g} query heads, 3 tokens", attn.GROUPS[i], length=3, size=129) for i, g in ((4, 6), (7, 11), (9, 33))),
    *(Case("around a tile of keys", size=size, batch=2) for size in SIZES),
    *(Case("around a tile of keys, several tokens", size=size, batch=6, length=4) for size in SIZES[:-2]),
    *(Case("speculative tokens", length=length, size=200) for length in range(1, 17)),
    *(Case("more queries than keys: early ones see nothing", length=n, size=3, batch=6) for n in (4, 7, 16)),
    *(Case("one request", batch=1, size=size) for size in (64, 8192)),
    *(Case("many requests", batch=16, kv_heads=h, size=300) for h in (1, 8)),
    # with 8 KV heads on an H200: a cluster of 8, 4 and 2 for each unit, one CTA each in one wave and in more, equal
    # shares
    *(
        Case("ways to cut", batch=n, kv_heads=8, size=s, flags=attn.FLAGS[3])
        for n in (1, 3, 7, 12, 17, 32)
        for s in (65, 1500)
    ),
    *(Case("splits asked for", num_splits=n, size=s, batch=6) for n in (1, 2, 7) for s in (1, 65, 1000, 4096)),
    *(Case("splits of several tokens", num_splits=n, size=1000, length=16) for n in (1, 7)),
    *(Case("scale", scale=scale, length=2) for scale in (0.0, -0.3, SCALE_3)),
    *(Case("flags", flags=flags, length=2) for flags in attn.FLAGS[1:]),
    *(Case("strided memory", layout=layout, length=4) for layout in attn.LAYOUTS if layout != "contiguous"),
    Case("fused, values narrower", attn.LATENT, layout="fused", length=3),
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
def test_case(case, device):
    """In guarded memory, unused keys and values NaN; the row says which path it is there for."""
    x = draw(case, device)
    attn.check(attn.run(KIND, x, lse=case.flags.lse, num_splits=case.num_splits), x)


@pytest.mark.parametrize("layout", attn.LAYOUTS)
@pytest.mark.parametrize("out_gaps", [False, True], ids=["out_contiguous", "out_gaps"])
def test_layout_changes_no_bit(layout, out_gaps, device):
    x = draw(Case("", length=4), device)
    want = attn.run(KIND, x)
    assert attn.same(attn.run(KIND, attn.LAYOUTS[layout](x), out_gaps=out_gaps), want)


def test_requests_may_share_memory(device):
    """A batch stride of 0: one prompt for several continuations."""
    x = draw(Case("", flags=attn.FLAGS[2]), device)
    shared = x.with_(k=x.k[:1].expand_as(x.k), v=x.v[:1].expand_as(x.v))
    copied = x.with_(k=shared.k.contiguous(), v=shared.v.contiguous())
    assert attn.same(attn.run(KIND, shared), attn.run(KIND, copied))


@pytest.mark.parametrize("length", [1, 16])
@pytest.mark.parametrize("config", [attn.MAIN, attn.MAIN_FP16], ids=lambda c: c.label)
def test_one_split_is_batch_invariant(config, length, device):
    """A request alone has the bits it has beside others, whatever their number, lengths and order."""
    x = draw(Case("", config, batch=5, length=length, size=1000), device)
    want = attn.run(KIND, x, num_splits=1)
    for b in range(5):
        alone = attn.run(KIND, x.request(b), num_splits=1)
        assert attn.same(alone, attn.Results(want.out[b : b + 1], want.lse[b : b + 1])), b
    order = torch.tensor([3, 0, 4, 4, 1, 2, 0], device=device)
    mixed = x.with_(**{name: getattr(x, name)[order] for name in ("q", "k", "v", "seqlens_k")})
    got = attn.run(KIND, mixed, num_splits=1)
    assert attn.same(got, attn.Results(want.out[order], want.lse[order]))


@pytest.mark.parametrize("num_splits", [None, 1, 7])
def test_same_bits_at_every_run(num_splits, device):
    """Each run has fresh poisoned outputs and workspace."""
    x = draw(Case("", size=4096, length=2), device)
    want = attn.run(KIND, x, num_splits=num_splits)
    assert all(attn.same(attn.run(KIND, x, num_splits=num_splits), want) for _ in range(10))


def test_capacity_past_the_lengths_changes_no_value(device):
    """One split, so that the memory's size cannot change how the keys are shared out."""
    x = attn.draw(attn.MAIN, 3, 2, 4096, device=device, lengths=[100, 1, 64])
    short = x.with_(k=x.k[:, :100].contiguous(), v=x.v[:, :100].contiguous())
    assert attn.same(attn.run(KIND, x, num_splits=1), attn.run(KIND, short, num_splits=1))


@pytest.mark.parametrize("lengths", [[-1, 5], [-(2**31), 0], [0, 0]], ids=str)
@pytest.mark.parametrize("num_splits", [None, 1, 7])
def test_lengths_of_0_or_less_are_empty_requests(lengths, num_splits, device):
    x = attn.draw(attn.MAIN, 2, 2, 300, device=device, lengths=lengths)
    results = attn.run(KIND, x, num_splits=num_splits)
    attn.check(results, x)
    assert not results.out[0].any() and results.lse[0].isneginf().all()


def test_workspace_may_hold_anything(device):
    """And is as long as the op says, at the samples' extents."""
    x = draw(Case("", size=4096, batch=1), device)
    call = attn.prepare(KIND, x, num_splits=7)
    want = attn.run(KIND, x, num_splits=7)
    if call.workspace is None:
        return
    for byte in (0, 0x7F, 0xFF):
        call.workspace.tensor.fill_(byte)
        call.execute()
        torch.cuda.synchronize()
        assert attn.same(call.results(), want)
    call.workspace.check_guards("workspace")


@pytest.mark.parametrize("case", [CASES[0], Case("", size=4096), Case("", length=5, size=64)], ids=lambda c: c.label)
def test_wrapper_equals_the_class(case, device):
    x = draw(case, device)
    want = attn.run(KIND, x)
    got = attn.wrapped(KIND, x)
    assert list(got.keys()) == ["out", "lse"]
    assert attn.same(attn.Results(*got), want)
    assert list(attn.wrapped(KIND, x, return_lse=False).keys()) == ["out"]


def test_wrapper_writes_where_asked(device):
    x = draw(CASES[0], device)
    out = Canary(x.out_shape, x.q.dtype, device, stride=attn.gap_stride(x.out_shape))
    assert attn.wrapped(KIND, x, out=out.tensor)["out"] is out.tensor
    torch.cuda.synchronize()
    out.check("out")
    assert budget.same_bits(out.tensor, attn.run(KIND, x).out)


def test_thin_function(device):
    """No lengths; mask, causal and scale by the names of model code."""
    x = draw(Case("", length=3, size=129, flags=attn.FLAGS[3], scale=SCALE_3), device)
    got = attn_decode(x.q, x.k, x.v, scale=SCALE_3)
    assert isinstance(got, torch.Tensor)
    attn.check(attn.Results(got, None), x)
    mask = torch.rand(3, 129, device=device) < 0.5
    got = attn_decode(x.q, x.k, x.v, mask, True)
    attn.check(attn.Results(got, None), x.with_(mask=mask, causal=True, softmax_scale=None))


def test_bound_call_follows_new_contents_and_lengths(device):
    call = attn.prepare(KIND, draw(Case("", length=2), device))
    launch = call.bind()
    for seed, lengths in ((1, [1000, 3, 0]), (2, [0, 999, 64])):
        fresh = attn.draw(attn.MAIN, 3, 2, 1000, device=device, seed=seed, lengths=lengths)
        for name in ("q", "k", "v", "seqlens_k"):
            getattr(call.x, name).copy_(getattr(fresh, name))
        call.poison()
        launch()
        torch.cuda.synchronize()
        call.check_memory()
        attn.check(call.results(), fresh)


def test_scale_of_a_call_replaces_that_of_the_op(device):
    """It is no part of what is compiled."""
    x = draw(Case("", length=2), device)
    call = attn.prepare(KIND, x, softmax_scale=0.01)
    for scale in (SCALE_3, -0.3, 0.0):
        call.execute(softmax_scale=scale)
        torch.cuda.synchronize()
        attn.check(call.results(), x.with_(softmax_scale=scale))
        call.bind(softmax_scale=-scale)()
        torch.cuda.synchronize()
        attn.check(call.results(), x.with_(softmax_scale=-scale))
    call.execute()
    torch.cuda.synchronize()
    attn.check(call.results(), x.with_(softmax_scale=0.01))


@pytest.mark.parametrize("magnitude", [0.0, 1e-3, 30.0])
def test_values_of_any_magnitude(magnitude, device):
    """All keys alike, nearly alike, and one that takes all the weight."""
    x = draw(Case("", attn.MAIN_FP16, size=1000), device)
    x = x.with_(q=x.q * magnitude)
    attn.check(attn.run(KIND, x), x)

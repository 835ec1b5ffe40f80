"""Windows, softcaps and sinks in decode and prefill, dense and packed: each alone, with splits, and together."""

from typing import NamedTuple

import pytest
import torch

from helpers import attention as attn

kinds = pytest.mark.parametrize("kind", **attn.both_ops)
LENGTHS = {"decode": 4, "prefill": 300}
SIZE = 700
D64, D256 = attn.HEAD_DIMS[4], attn.HEAD_DIMS[10]
WIDTHS = (attn.MAIN, attn.MAIN_FP16, D64, attn.LATENT, D256)
# decode: one CTA a request, pieces of each, and what sizes and GPU say; prefill has no such choice
WAYS = [("decode", 1), ("decode", 3), ("decode", 7), ("decode", None), ("prefill", None)]
ways = pytest.mark.parametrize(("kind", "num_splits"), WAYS, ids=[f"{kind}-n{n}" for kind, n in WAYS])
# Keys of the largest tile, which may be read before a window.
SLACK = 128


def draw(kind, device, config=attn.MAIN, causal=True, batch=5, size=SIZE, **given):
    """Ragged lengths, of which some are shorter than there are queries."""
    flags = attn.BASE._replace(causal=causal)
    return attn.draw(config, batch, LENGTHS[kind], size, device=device, flags=flags, **given)


def sinks_of(x, offset=0.0):
    heads = x.q.shape[-2]
    return torch.linspace(-3, 3, heads, device=x.q.device) + offset


class Window(NamedTuple):
    guards: str
    window: tuple
    causal: bool = True


WINDOWS = (
    Window("one's own key", (0, None)),
    Window("shorter than a tile of keys", (5, None)),
    Window("a tile of keys", (15, None)),
    Window("across tiles of keys", (100, None)),
    Window("a turn of tiles and one key", (64, None)),
    Window("longer than some requests", (300, None)),
    Window("longer than all", (5000, None)),
    Window("the longest there is", (2**31 - 1, None)),
    Window("no limit", (None, None)),
    Window("a right side that causality overrules", (40, 9)),
    Window("right only", (None, 3), False),
    Window("right only, none", (None, 0), False),
    Window("right longer than all", (None, 2**31 - 1), False),
    Window("both sides", (33, 20), False),
    Window("one's own key, without causality", (0, 0), False),
    Window("left only", (50, None), False),
)


@ways
@pytest.mark.parametrize("case", WINDOWS, ids=[case.guards.replace(" ", "_") for case in WINDOWS])
def test_window(case, kind, num_splits, device):
    x = draw(kind, device, causal=case.causal, window=case.window)
    attn.check(attn.run(kind, x, num_splits=num_splits), x)


@kinds
@pytest.mark.parametrize("config", WIDTHS, ids=lambda c: c.label)
def test_window_of_each_width(config, kind, device):
    for causal, window in ((True, (100, None)), (False, (70, 30))):
        x = draw(kind, device, config, causal=causal, window=window)
        attn.check(attn.run(kind, x), x)


@pytest.mark.parametrize("size", [16, 64, 65, 513, 4096, 9000])
@pytest.mark.parametrize("batch", [1, 2, 40])
def test_window_of_decodes_that_share_their_keys_otherwise(batch, size, device):
    """By clusters, in equal shares, whole; one token and several."""
    for length, window in ((1, (size // 3, None)), (1, (128, None)), (16, (200, None))):
        for lengths in (True, False):
            flags = attn.BASE._replace(lengths=lengths)
            x = attn.draw(attn.MAIN, batch, length, size, device=device, flags=flags, window=window)
            attn.check(attn.run("decode", x), x)


@ways
def test_keys_far_outside_a_window_are_not_read(kind, num_splits, device):
    """NaN, which would count even with a weight of 0."""
    for left in (0, 40, 200):
        x = draw(kind, device, size=4000, batch=3, lengths=[4000, 3000, 1700], window=(left, None))
        k, v = x.k.clone(), x.v.clone()
        for b, keys in enumerate(x.seqlens_k.tolist()):
            unseen = keys - x.q.shape[1] - left - SLACK
            k[b, :unseen], v[b, :unseen] = torch.nan, torch.nan
        attn.check(attn.run(kind, x.with_(k=k, v=v), num_splits=num_splits), x)


@kinds
def test_window_equals_a_mask(kind, device):
    x = draw(kind, device, causal=False)
    length = x.q.shape[1]
    position = torch.arange(length, device=device)[None, :, None] + (x.seqlens_k[:, None, None] - length)
    distance = torch.arange(SIZE, device=device) - position
    windowed, masked = x.with_(window=(90, 3)), x.with_(mask=(distance >= -90) & (distance <= 3))
    attn.check(attn.run(kind, windowed), masked)
    attn.check(attn.run(kind, masked), windowed)


@pytest.mark.parametrize("config", WIDTHS, ids=lambda c: c.label)
@pytest.mark.parametrize(("causal", "window"), [(True, (60, None)), (False, (10, 70)), (False, (None, 5))])
def test_window_of_packed_requests(causal, window, config, device):
    """Requests with more queries than keys and with fewer, without either."""
    lens_q, lens_k = [5, 0, 170, 1, 300, 20], [7, 3, 130, 900, 300, 0]
    x = attn.draw_ragged(config, lens_q, lens_k, device=device, causal=causal, window=window)
    attn.check(attn.run("prefill", x), x)


@ways
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1000.0])
@pytest.mark.parametrize("scale", [None, 1.0, -0.5, 0.0])
def test_softcap(softcap, scale, kind, num_splits, device):
    """Scores far below the cap, around it and above; of either sign."""
    x = draw(kind, device, softcap=softcap, softmax_scale=scale)
    attn.check(attn.run(kind, x, num_splits=num_splits), x)


@kinds
@pytest.mark.parametrize("config", WIDTHS, ids=lambda c: c.label)
def test_softcap_of_each_width(config, kind, device):
    x = draw(kind, device, config, softcap=20.0, softmax_scale=0.3)
    attn.check(attn.run(kind, x), x)


@kinds
def test_softcap_bounds_scores_that_would_overflow(kind, device):
    """Scores beyond 1e5: all that is left of them is their sign."""
    x = draw(kind, device, softcap=5.0, softmax_scale=1e4)
    out, lse = attn.run(kind, x)
    attn.check(attn.Results(out, None), x)
    assert (lse[lse.isfinite()] <= 5 + torch.tensor(float(SIZE)).log() + 1e-3).all()


@ways
@pytest.mark.parametrize("offset", [0.0, 40.0, -200.0, 300.0])
def test_sinks(offset, kind, num_splits, device):
    """Beside the keys, above all of them, and so far off that either is lost; requests without keys have nothing
    else."""
    x = draw(kind, device)
    x = x.with_(sinks=sinks_of(x, offset))
    attn.check(attn.run(kind, x, num_splits=num_splits), x)


@kinds
@pytest.mark.parametrize("config", [*WIDTHS, *attn.GROUPS], ids=lambda c: c.label)
def test_sinks_of_each_width_and_group(config, kind, device):
    x = draw(kind, device, config)
    x = x.with_(sinks=sinks_of(x))
    attn.check(attn.run(kind, x), x)
    attn.check(attn.run(kind, x, lse=False), x)


@pytest.mark.parametrize("batch", [1, 2, 40])
@pytest.mark.parametrize("size", [1, 65, 1000, 9000])
def test_a_sink_counts_once_however_keys_are_shared(batch, size, device):
    for lengths in (True, False):
        x = attn.draw(attn.MAIN, batch, 2, size, device=device, flags=attn.BASE._replace(lengths=lengths))
        x = x.with_(sinks=sinks_of(x))
        attn.check(attn.run("decode", x), x)


@ways
def test_sinks_of_minus_infinity_are_none(kind, num_splits, device):
    """Some heads may have no sink: rows without keys then have an lse of -inf again."""
    x = draw(kind, device)
    sinks = sinks_of(x)
    sinks[::2] = -torch.inf
    x = x.with_(sinks=sinks)
    attn.check(attn.run(kind, x, num_splits=num_splits), x)


@ways
def test_a_row_without_keys_has_its_sink(kind, num_splits, device):
    x = draw(kind, device, lengths=[0] * 5)
    x = x.with_(sinks=sinks_of(x))
    out, lse = attn.run(kind, x, num_splits=num_splits)
    assert not out.any()
    torch.testing.assert_close(lse, x.sinks[None, :, None].expand_as(lse), rtol=1e-6, atol=1e-6)


def test_tokens_past_the_last_request_have_their_sink(device):
    x = attn.draw_ragged(attn.MAIN, [5, 60], [7, 90], device=device)
    wide = x.with_(q=torch.cat((x.q, x.q[:9])), sinks=sinks_of(x))
    out, lse = attn.run("prefill", wide)
    attn.check(attn.Results(out[:65], lse[:, :65]), x.with_(sinks=wide.sinks))
    assert not out[65:].any()
    torch.testing.assert_close(lse[:, 65:], wide.sinks[:, None].expand(-1, 9), rtol=1e-6, atol=1e-6)


ALL = {"window": (80, None), "softcap": 15.0, "softmax_scale": 0.4}


@ways
@pytest.mark.parametrize("config", WIDTHS, ids=lambda c: c.label)
def test_all_options_together(config, kind, num_splits, device):
    x = draw(kind, device, config, **ALL)
    x = x.with_(sinks=sinks_of(x))
    attn.check(attn.run(kind, x, num_splits=num_splits), x)


@kinds
@pytest.mark.parametrize("shape", [(5, SIZE), (5, 1, 1, SIZE)], ids=str)
def test_all_options_with_a_mask(shape, kind, device):
    """One key in ten is kept: some queries see none within their window."""
    keep = torch.rand(shape, generator=torch.Generator(device=device).manual_seed(3), device=device) < 0.1
    x = draw(kind, device, **ALL, mask=keep)
    x = x.with_(sinks=sinks_of(x), window=(12, None))
    attn.check(attn.run(kind, x), x)


@kinds
def test_wrapper_takes_numbers_that_change(kind, device):
    """Other windows, caps and sinks at every call, one kernel."""
    x = draw(kind, device)
    for left, softcap in ((0, 1.0), (50, 20.0), (300, 7.0)):
        given = x.with_(window=[left, None], softcap=softcap, sinks=sinks_of(x, softcap))
        attn.check(attn.Results(*attn.wrapped(kind, given)), given)


@kinds
def test_sinks_are_read_at_every_launch(kind, device):
    x = draw(kind, device, **ALL)
    x = x.with_(sinks=sinks_of(x))
    call = attn.prepare(kind, x)
    launch = call.bind()
    for offset in (0.0, 3.0):
        x.sinks.copy_(sinks_of(x, offset))
        call.poison()
        launch()
        torch.cuda.synchronize(device)
        attn.check(call.results(), x)


@kinds
def test_a_captured_window_follows_the_lengths(kind, device):
    x = draw(kind, device, lengths=[SIZE] * 5, **ALL)
    x = x.with_(sinks=sinks_of(x))
    call = attn.prepare(kind, x)
    call.execute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.execute()
    for lengths in ([3, 700, 0, 350, 64], [81, 80, 79, 1, 500]):
        x.seqlens_k.copy_(torch.tensor(lengths))
        call.poison()
        graph.replay()
        torch.cuda.synchronize(device)
        attn.check(call.results(), x)

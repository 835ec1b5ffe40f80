"""Random calls against the fp64 oracle, drawn from what the suite compiles anyway."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import attention as attn

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MAIN_FLAGS = st.sampled_from((attn.BASE, *attn.FLAGS))
CONFIGS = st.sampled_from((attn.MAIN, attn.MAIN_FP16, *attn.GROUPS))
# 16 rows a KV head with the group of the main config: how many there are may decide what decode is compiled for.
MAX_DECODE_TOKENS = 4
LAYOUTS = st.sampled_from(sorted(attn.LAYOUTS))
SCALES = st.sampled_from([None, None, 0.0, -0.3, 0.27, 1.5])
MASK_SHAPES = st.sampled_from(["none", "none", "keys", "queries", "by_head", "all_heads_one_query"])
EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
SIZES = st.one_of(st.sampled_from(EDGES), st.integers(0, 700))


def mask_of(shape, batch, heads, length, size, device, seed):
    """A random mask; with base flags and the main config, as in test_masks.py."""
    shapes = {
        "keys": (batch, size),
        "queries": (batch, length, size),
        "by_head": (batch, heads, length, size),
        "all_heads_one_query": (1, 1, 1, size),
    }
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.rand(shapes[shape], generator=generator, device=device) < 0.3


@st.composite
def dense_calls(draw, max_length):
    """A function of the device that gives inputs, and whether the call has lse."""
    shape = draw(MASK_SHAPES)
    config = attn.MAIN if shape != "none" else draw(CONFIGS)
    flags = draw(MAIN_FLAGS) if config is attn.MAIN and shape == "none" else attn.BASE
    is_common = shape == "none" and flags == attn.BASE
    length = draw(st.integers(1, max_length if is_common or max_length > 16 else MAX_DECODE_TOKENS))
    batch, size, kv_heads = draw(st.integers(1, 4)), draw(SIZES), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(-1, size), min_size=batch, max_size=batch))
    layout, scale, seed = draw(LAYOUTS), draw(SCALES), draw(st.integers(0, 999))

    def make(device):
        given = {"lengths": lengths, "softmax_scale": scale, "flags": flags, "seed": seed}
        x = attn.LAYOUTS[layout](attn.draw(config, batch, length, size, kv_heads, device=device, **given))
        if shape == "none":
            return x
        return x.with_(mask=mask_of(shape, batch, x.q.shape[2], length, size, device, seed))

    return make, flags.lse, is_common


@SETTINGS
@given(call=dense_calls(16), num_splits=st.sampled_from([None, None, 1, 2, 3, 7, 40]))
def test_decode(device, call, num_splits):
    make, lse, is_common = call
    x = make(device)
    attn.check(attn.run("decode", x, lse=lse, num_splits=num_splits if is_common else None), x)


@SETTINGS
@given(call=dense_calls(200))
def test_dense_prefill(device, call):
    make, lse, _ = call
    x = make(device)
    attn.check(attn.run("prefill", x, lse=lse), x)


REQUESTS = st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=6)
PACKED_CONFIGS = st.sampled_from((attn.MAIN, attn.MAIN_FP16, *attn.GROUPS[2:9:3], attn.HEAD_DIMS[4], attn.LATENT))


@SETTINGS
@given(
    config=PACKED_CONFIGS,
    requests=REQUESTS,
    kv_heads=st.integers(1, 3),
    layout=LAYOUTS,
    scale=SCALES,
    seed=st.integers(0, 999),
)
def test_ragged_prefill(device, config, requests, kv_heads, layout, scale, seed):
    lens_q, lens_k = zip(*requests)
    x = attn.draw_ragged(config, lens_q, lens_k, kv_heads, device=device, seed=seed, softmax_scale=scale)
    x = attn.LAYOUTS[layout](x)
    attn.check(attn.run("prefill", x), x)


@pytest.mark.parametrize("kind", **attn.both_ops)
@settings(SETTINGS, max_examples=25)
@given(call=dense_calls(MAX_DECODE_TOKENS))
def test_wrapper_equals_the_class(device, kind, call):
    """Whatever the layout, and with index tables of 64 bits."""
    make, _, _ = call
    x = make(device)
    want = attn.run(kind, x)
    given_tables = {} if x.seqlens_k is None else {"seqlens_k": x.seqlens_k.long()}
    assert attn.same(attn.Results(*attn.wrapped(kind, x.with_(**given_tables))), want)

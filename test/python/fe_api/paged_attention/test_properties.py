"""Random calls against fp64: whatever lengths, tables, layouts, masks and splits, on kernels of few configurations."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import paged
from helpers.paged import Batch

# Run-time facts are drawn; what is compiled for stays among those that other tests compile too.
CONFIGS = (paged.MAIN, paged.CAUSAL, paged.CAUSAL_FP16)
limits = settings(
    derandomize=True, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scales = st.sampled_from([None, None, 0.0, -0.2, 0.7])


@st.composite
def batches(draw, is_packed=False):
    """Batches of any lengths; with packed queries each request has tokens of its own, otherwise all have L."""
    lengths = draw(st.lists(st.integers(0, 300) | st.sampled_from((0, 1, 64, 128, 129, 1025)), min_size=1, max_size=5))
    page_size = draw(st.sampled_from(paged.PAGE_SIZES))
    rows = draw(st.none() | st.tuples(*[st.integers(0, 6)] * len(lengths)))
    places = [place for place in paged.PLACES if page_size == 1 or place != "flat"]
    tokens = st.tuples(*[st.integers(0, 150)] * len(lengths)) if is_packed else st.sampled_from((0, 1, 2, 3, 8, 16))
    return Batch(
        tuple(lengths),
        page_size,
        draw(tokens),
        kv_heads=draw(st.integers(1, 4)),
        rows=rows,
        by_indptr=draw(st.booleans()),
        place=draw(st.sampled_from(places)),
        spare_columns=draw(st.integers(0, 3)),
    )


@st.composite
def masks(draw):
    """None, or a kind and how many columns it lacks or has too many."""
    kind = draw(st.none() | st.sampled_from(("columns", "rows")))
    return None if kind is None else (kind, draw(st.integers(-5, 20)))


def build(config, batch, mask, scale, device, seed):
    x = paged.draw(config, batch, device, seed).with_(softmax_scale=scale)
    if mask is None:
        return x
    kind, surplus = mask
    return paged.with_mask(x, kind, cols=max(1, int(x.lens.max()) + surplus), seed=seed)


@limits
@given(data=st.data())
def test_decode(data, device):
    config, batch = data.draw(st.sampled_from(CONFIGS)), data.draw(batches())
    seed = data.draw(st.integers(0, 9))
    x = build(config, batch, data.draw(masks()), data.draw(scales), device, seed)
    paged.check(paged.run(x, num_splits=data.draw(st.sampled_from((None, 1, 2, 7)))), x)


@limits
@given(data=st.data())
def test_append(data, device):
    config, batch = data.draw(st.sampled_from(CONFIGS)), data.draw(batches())
    if batch.rows is not None:  # two requests of one row would store in one slot
        batch = batch._replace(rows=tuple(range(len(batch.rows)))[::-1])
    x = paged.appending(paged.draw(config, batch, device, data.draw(st.integers(0, 9))))
    paged.check(paged.run(x, num_splits=data.draw(st.sampled_from((None, 1, 2, 7)))), x)


@limits
@given(data=st.data())
def test_prefill(data, device):
    config, batch = data.draw(st.sampled_from(CONFIGS)), data.draw(batches(is_packed=True))
    x = build(config, batch, data.draw(masks()), data.draw(scales), device, data.draw(st.integers(0, 9)))
    paged.check(paged.run(x), x)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label)
@limits
@given(data=st.data())
def test_a_request_does_not_depend_on_its_neighbours(config, data, device):
    """Other lengths, pages, queries and NaN elsewhere in the batch change no bit of a request, in one split."""
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=2, max_size=4))
    x = paged.draw(config, Batch(tuple(lengths), 16, 2), device)
    want = paged.run(x, num_splits=1)
    others = [data.draw(st.integers(0, n)) for n in lengths[1:]]
    q = x.q.clone()
    q[1:] = torch.nan
    changed = paged.with_lengths(x.with_(q=q), (lengths[0], *others))
    got = paged.run(changed, num_splits=1)
    assert paged.same(*({name: t[:1] for name, t in results.items()} for results in (got, want)))

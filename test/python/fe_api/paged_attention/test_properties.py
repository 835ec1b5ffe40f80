"""Random calls against fp64: whatever lengths, tables, layouts, masks and splits, on kernels of few configurations."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import paged
from helpers.paged import Batch

# Run-time facts are drawn. What kernels are compiled for is few, as a compile takes seconds: lengths by seqlens_k, rows
# of the table named, lse, and at most 16 query rows for a KV head in decode, where more take another tile.
CONFIGS = (paged.MAIN, paged.CAUSAL)
limits = settings(
    derandomize=True, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scales = st.sampled_from([None, None, 0.0, -0.2, 0.7])


@st.composite
def batches(draw, is_packed=False):
    """Batches of any lengths; with packed queries each request has tokens of its own, otherwise all have L."""
    lengths = draw(st.lists(st.integers(0, 300) | st.sampled_from((0, 1, 64, 128, 129, 1025)), min_size=1, max_size=5))
    tokens = st.tuples(*[st.integers(0, 150)] * len(lengths)) if is_packed else st.integers(1, 4)
    return Batch(
        tuple(lengths),
        draw(st.sampled_from(paged.PAGE_SIZES)),
        draw(tokens),
        kv_heads=draw(st.integers(1, 4)),
        rows=draw(st.tuples(*[st.integers(0, 6)] * len(lengths))),
        place=draw(st.sampled_from([place for place in paged.PLACES if place != "flat"])),
        spare_columns=draw(st.integers(0, 3)),
    )


@st.composite
def inputs(draw, device, is_packed=False):
    """Operands, masked by cache position half of the time; the mask may lack columns or have too many."""
    groups = (1, 2, 3, 4, 5, 7, 8, 16, 33) if is_packed else (1, 2, 3, 4)
    config = draw(st.sampled_from(CONFIGS))._replace(group=draw(st.sampled_from(groups)))
    seed = draw(st.integers(0, 9))
    x = paged.draw(config, draw(batches(is_packed)), device, seed).with_(softmax_scale=draw(scales))
    surplus = draw(st.none() | st.integers(-5, 20))
    if surplus is None:
        return x
    return paged.with_mask(x, "rows", cols=max(1, int(x.lens.max()) + surplus), seed=seed)


@limits
@given(data=st.data())
def test_decode(data, device):
    x = data.draw(inputs(device))
    paged.check(paged.run(x, num_splits=data.draw(st.sampled_from((None, 2, 7)))), x)


@limits
@given(data=st.data())
def test_append(data, device):
    """Each request has a row of its own: two of one row would store in one slot."""
    batch = data.draw(batches())
    batch = batch._replace(rows=tuple(data.draw(st.permutations(range(len(batch.lengths))))))
    config = paged.MAIN._replace(group=data.draw(st.integers(1, 4)))
    x = paged.appending(paged.draw(config, batch, device, data.draw(st.integers(0, 9))))
    paged.check(paged.run(x, num_splits=data.draw(st.sampled_from((None, 2, 7)))), x)


@limits
@given(data=st.data())
def test_prefill(data, device):
    x = data.draw(inputs(device, is_packed=True))
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

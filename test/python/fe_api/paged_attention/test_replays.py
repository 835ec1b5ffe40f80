"""What graphs and streams may do to pages beyond what all families have in common, which fe_api/lifecycle tests."""

import pytest
import torch

from helpers import paged
from helpers.gpu import SLEEP_CYCLES
from helpers.lifecycle import FAMILIES, draw_pages

# Versions of the operands: all of the table, around one page, nothing.
LONG, AROUND_A_PAGE, NOTHING, MIXED = 2, 3, 1, 4


def test_graph_captured_with_long_requests_serves_short_ones(device):
    """And again long ones: no state is left in the scratch memory."""
    call = FAMILIES["paged attention decode"].call(device, LONG)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.execute()
    for version in (AROUND_A_PAGE, LONG, NOTHING, LONG, MIXED, LONG):
        call.refill(version)
        graph.replay()
        torch.cuda.synchronize()
        paged.check(call.results, call.x)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_wrapper_converts_and_copies_on_the_stream_given(kind, device):
    """int64 tables and rows that the kernel cannot read, changed on the side stream just before."""
    x = draw_pages(kind, device, MIXED)
    want = paged.run(x)
    tables = {name: t.long() for name, t in (("page_table", x.page_table), *x.optional.items())}
    q = torch.zeros(*x.q.shape[:-1], 129, dtype=x.q.dtype, device=device)[..., 1:]
    late = {name: torch.zeros_like(t) for name, t in tables.items()}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        q.copy_(x.q)
        for name, tensor in late.items():
            tensor.copy_(tables[name])
    got = paged.call_wrapper(x.with_(q=q, **late), stream=side)
    side.synchronize()
    assert paged.same(got, want)

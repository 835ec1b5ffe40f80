"""Calls of wrappers like an earlier one, of every family: served without validation, and as right as a first call."""

import torch

from helpers import lifecycle
from helpers.calls import check_equal
from helpers.lifecycle import each_family


def first(family, x):
    """The results of a call that knows of none before it."""
    from cuteforge.op import recall

    recall.forget()
    return lifecycle.copied(family.wrapper(x))


@each_family
def test_known_calls_follow_new_data_and_lengths(family, device, served):
    inputs = [family.draw(device, version) for version in range(family.versions)]
    got = [lifecycle.copied(family.wrapper(x)) for x in inputs]
    assert len(served) == family.versions - 1
    for x, results in zip(inputs, got):
        check_equal(results, first(family, x))


@each_family
def test_known_calls_on_another_stream_and_in_a_graph(family, device, served):
    """Both are served as known ones, and the graph replays them."""
    x = family.draw(device, 0)
    want, known = lifecycle.copied(family.wrapper(x)), len(served)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        on_side = family.wrapper(x)
    torch.cuda.current_stream(device).wait_stream(side)
    check_equal(dict(on_side.items()), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = family.wrapper(x)
    for tensor in captured.values():
        tensor.zero_()
    graph.replay()
    check_equal(dict(captured.items()), want)
    assert known == 0 and len(served) == 2

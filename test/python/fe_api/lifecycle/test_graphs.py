"""CUDA graphs of every family: what a replay reads, what keeps the code alive, what a cold call under capture does."""

import gc

import pytest
import torch

from helpers import lifecycle, process
from helpers.gpu import count_launches
from helpers.lifecycle import each_family, each_name

# Of the versions of the operands, the one to go on with after the first.
NEXT = 2


def capture(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay(graph):
    graph.replay()
    torch.cuda.synchronize()


@each_family
@pytest.mark.parametrize("entry", lifecycle.ENTRIES)
def test_replays_follow_new_data_lengths_and_tables(entry, family, device):
    """A capture holds addresses and capacities; numbers, lengths, offsets, tables, rows and positions are read at
    replay."""
    call = family.call(device)
    run, results = call.warm(entry)
    graph = capture(run)
    for version in range(1, family.versions):
        call.refill(version)
        lifecycle.poison(results)
        guard = family.guard(call.x)
        replay(graph)
        guard.check()
        family.judge(results, call.x)
    call.check_guards()


@each_family
def test_compiled_kernel_outlives_its_op_while_a_graph_uses_it(family, device):
    """The op and every reference of ours are gone before the replay; memory is the caller's to keep."""
    from cuteforge.runtime import compile_cache

    call = family.call(device)
    graph = capture(call.execute)
    call.op = None
    compile_cache.clear()
    gc.collect()
    call.refill(NEXT)
    call.poison()
    replay(graph)
    family.judge(call.results, call.x)


@each_family
def test_two_graphs_of_wrapper_calls_do_not_share_scratch(family, device):
    """Each replay's workspace is of its own pool: interleaved replays on two streams stay right."""
    calls = [family.call(device) for _ in range(2)]
    warm = [call.warm("wrapper") for call in calls]
    graphs = [capture(run) for run, _ in warm]
    for version, call in zip(family.long_versions, calls):
        call.refill(version)
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, results), call in zip(warm, calls):
        family.judge(results, call.x)


@pytest.mark.parametrize("name", [name for name, family in lifecycle.FAMILIES.items() if family.most_launches])
def test_attention_launches_its_kernels_and_nothing_else(name, device):
    """No fill, no copy, no plan on the host beside them."""
    family = lifecycle.FAMILIES[name]
    run, _ = family.call(device).warm("bind")
    run()
    torch.cuda.synchronize()
    assert count_launches(run) <= family.most_launches


COLD_CAPTURE = """
import torch
from helpers import lifecycle

family = lifecycle.FAMILIES[{name!r}]
x = family.draw(torch.device("cuda"), 0)
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        family.wrapper(x)
except RuntimeError as error:
    assert "compile" in str(error), error
    print("refused")
family.judge(family.wrapper(x), x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = family.wrapper(x)
graph.replay()
torch.cuda.synchronize()
family.judge(got, x)
print("went on")
"""


@each_name
def test_cold_call_under_capture_is_refused_before_anything_and_the_process_goes_on(name, device, tmp_path):
    out = process.run(COLD_CAPTURE.format(name=name), CUTEFORGE_CACHE_DIR=tmp_path / "cache")
    assert out.splitlines() == ["refused", "went on"]

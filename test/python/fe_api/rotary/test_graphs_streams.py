"""CUDA graphs, explicit streams."""

import gc

import pytest
import torch

from cuteforge import ContractError, rotary_qk_wrapper
from helpers import budget, process, rotary
from helpers.gpu import SLEEP_CYCLES, check_not_behind, check_while_behind

LAYOUT = rotary.TWO_PACKED


def refill(x, seed):
    """Other numbers and positions in the same memory; returns them."""
    fresh = rotary.draw(rotary.HALVES, LAYOUT, x.x.device, seed)
    for name in ("x", "k", "positions"):
        getattr(x, name).copy_(getattr(fresh, name))
    return fresh


def prepared(entry, memory):
    """A warm call, and where its results are afterwards."""
    x, outputs = memory.inputs, memory.outputs
    if entry == "wrapper":
        results = {}

        def run():
            got = rotary_qk_wrapper(x.x, x.k, **x.lookup, interleaved=False)
            results.update(out=got["q"], k_out=got["k"])

        run()
        torch.cuda.synchronize()
        return run, results
    op = rotary.compiled(x, outputs)
    if entry == "bind":
        return op.bind(x.x, x.table, outputs["out"], x.positions, k=x.k, k_out=outputs["k_out"]), outputs
    return lambda: rotary.execute(op, x, outputs), outputs


@pytest.mark.parametrize("entry", ["execute", "bind", "wrapper"])
def test_replays_follow_new_data_and_positions(entry, device):
    """Positions out of the table included: they are read at replay."""
    memory = rotary.arrange(rotary.draw(rotary.HALVES, LAYOUT, device), LAYOUT)
    run, results = prepared(entry, memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (1, 2, 3):
        fresh = refill(memory.inputs, seed)
        if seed == 3:
            fresh.positions[5] = memory.inputs.positions[5] = -1
        for tensor in results.values():
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        rotary.check(results, fresh)
    for name, guard in memory.guards.items():
        guard.check_guards(name)


def test_replays_in_place_keep_turning(device):
    """Each replay turns what the last one left."""
    layout = LAYOUT._replace(in_place=True)
    x = rotary.draw(rotary.HALVES_FP32, layout, device)
    memory = rotary.arrange(x, layout)
    op = rotary.compiled(memory.inputs, memory.outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotary.execute(op, memory.inputs, memory.outputs)
    for _ in range(3):
        before = memory.inputs.with_(x=memory.inputs.x.clone(), k=memory.inputs.k.clone())
        graph.replay()
        torch.cuda.synchronize()
        rotary.check(memory.outputs, before)
    memory.check()


def test_compiled_kernel_outlives_its_op_while_a_graph_uses_it(device):
    """The op and every reference of ours are gone before the replay."""
    from cuteforge.runtime import compile_cache

    memory = rotary.arrange(rotary.draw(rotary.HALVES, LAYOUT, device), LAYOUT)
    op = rotary.compiled(memory.inputs, memory.outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotary.execute(op, memory.inputs, memory.outputs)
    del op
    compile_cache.clear()
    gc.collect()
    fresh = refill(memory.inputs, 7)
    graph.replay()
    torch.cuda.synchronize()
    rotary.check(memory.outputs, fresh)


COLD_CAPTURE = """
import torch
from helpers import rotary
from cuteforge import rotary_qk_wrapper

x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, torch.device("cuda"))
call = lambda: rotary_qk_wrapper(x.x, x.k, **x.lookup, interleaved=False)
check = lambda got: rotary.check({"out": got["q"], "k_out": got["k"]}, x)
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call()
except RuntimeError as error:
    assert "compile" in str(error), error
    print("refused")
check(call())
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = call()
graph.replay()
torch.cuda.synchronize()
check(got)
print("went on")
"""


def test_cold_call_under_capture_is_refused_before_anything_and_the_process_goes_on(device, tmp_path):
    assert process.run(COLD_CAPTURE, CUTEFORGE_CACHE_DIR=tmp_path / "cache").split("\n")[:2] == ["refused", "went on"]


def test_explicit_stream_with_inputs_freed_at_once(device):
    """Memory the caller frees while the side stream is still behind is not handed out again: the call records it."""
    want = rotary.run(rotary.draw(rotary.HALVES, LAYOUT, device), LAYOUT)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(4):
        x = rotary.draw(rotary.HALVES, LAYOUT, device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        got = rotary_qk_wrapper(x.x, x.k, **x.lookup, interleaved=False, stream=side)
        shapes = [(t.shape, t.dtype) for t in (x.x, x.k, *x.table, x.positions)]
        del x
        thieves = [torch.full(shape, 77, dtype=dtype, device=device) for shape, dtype in shapes]
        side.synchronize()
        assert rotary.same({"out": got["q"], "k_out": got["k"]}, want)
        del thieves


def load_code(x):
    """Loading a kernel at its first launch may wait for the stream that is held."""
    execute, _ = prepared("execute", rotary.arrange(x, LAYOUT))
    execute()


def behind(memory, launch, stream):
    def check_untouched():
        for name in memory.outputs:
            memory.guards[name].check_untouched(name)

    check_while_behind(stream, launch, check_untouched)
    memory.check()


@pytest.mark.parametrize("as_handle", [False, True], ids=["torch_stream", "raw_handle"])
def test_explicit_stream_is_where_the_launch_goes(as_handle, device):
    x = rotary.draw(rotary.HALVES, LAYOUT, device)
    load_code(x)
    memory = rotary.arrange(x, LAYOUT)
    op, side = rotary.compiled(memory.inputs, memory.outputs), torch.cuda.Stream()
    stream = side.cuda_stream if as_handle else side
    behind(memory, lambda: rotary.execute(op, memory.inputs, memory.outputs, stream=stream), side)
    rotary.check(memory.outputs, x)


def test_no_stream_means_the_current_one(device):
    x = rotary.draw(rotary.HALVES, LAYOUT, device)
    load_code(x)
    memory = rotary.arrange(x, LAYOUT)
    bound, _ = prepared("bind", memory)
    execute, _ = prepared("execute", memory)
    side = torch.cuda.Stream()

    def launch():
        with torch.cuda.stream(side):
            execute()
            bound()

    behind(memory, launch, side)
    rotary.check(memory.outputs, x)


def test_handle_zero_is_the_default_stream(device):
    """Not the current one: it runs although the current stream is held."""
    x = rotary.draw(rotary.HALVES, LAYOUT, device)
    load_code(x)
    memory = rotary.arrange(x, LAYOUT)
    op, side = rotary.compiled(memory.inputs, memory.outputs), torch.cuda.Stream()
    check_not_behind(side, lambda: rotary.execute(op, memory.inputs, memory.outputs, stream=0), memory.check)
    rotary.check(memory.outputs, x)


@pytest.mark.parametrize("stream", [-1, "side", 1.5])
def test_what_is_no_stream_is_refused(stream, device):
    memory = rotary.arrange(rotary.draw(rotary.HALVES, LAYOUT, device), LAYOUT)
    op = rotary.compiled(memory.inputs, memory.outputs)
    with pytest.raises(ContractError, match=r"^stream\b"):
        rotary.execute(op, memory.inputs, memory.outputs, stream=stream)
    x = memory.inputs
    with pytest.raises(ContractError, match=r"^stream\b"):
        rotary_qk_wrapper(x.x, x.k, **x.lookup, interleaved=False, stream=stream)
    torch.cuda.synchronize()
    for name in memory.outputs:
        memory.guards[name].check_untouched(name)


def test_two_streams_at_once(device):
    """Launches share no scratch: both results are right although they overlap."""
    inputs = [rotary.draw(rotary.HALVES, rotary.LAYOUTS[-1], device, seed) for seed in (1, 2)]
    streams = [torch.cuda.Stream() for _ in inputs]
    want = [rotary.run(x, rotary.LAYOUTS[-1]._replace(in_place=False)) for x in inputs]
    for _ in range(20):
        got = [rotary_qk_wrapper(x.x, x.k, **x.lookup, interleaved=False, stream=s) for x, s in zip(inputs, streams)]
    torch.cuda.synchronize()
    for results, expected in zip(got, want, strict=True):
        assert budget.same_bits(results["q"], expected["out"])
        assert budget.same_bits(results["k"], expected["k_out"])

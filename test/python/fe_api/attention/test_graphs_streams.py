"""CUDA graphs, explicit streams."""

import gc

import pytest
import torch

from cuteforge import ContractError
from helpers import attention as attn
from helpers import process
from helpers.gpu import SLEEP_CYCLES, check_not_behind, check_while_behind, count_launches

# How a call is made: keys long enough that decode splits them.
HOWS = ("decode", "prefill", "packed")
hows = pytest.mark.parametrize("how", HOWS)
DENSE_SHAPES = {"decode": (3, 2, 4096), "prefill": (2, 130, 300)}
PACKED_LENGTHS = ([40, 0, 130, 1], [50, 3, 400, 7])
NAMES = ("q", "k", "v", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k")


def kind_of(how):
    return "prefill" if how == "packed" else how


def draw(how, device, seed=0):
    """Other numbers and other lengths in tensors of the same shapes for every seed."""
    if how == "packed":
        turned = (lens[seed % 4 :] + lens[: seed % 4] for lens in PACKED_LENGTHS)
        return attn.draw_ragged(attn.MAIN, *turned, device=device, seed=seed)
    batch, length, size = DENSE_SHAPES[how]
    lengths = [(size, 1000, 3)[(b + seed) % 3] * size // 4096 if seed else size for b in range(batch)]
    return attn.draw(attn.MAIN, batch, length, size, device=device, lengths=lengths, seed=seed)


def refill(x, how, seed):
    """Other numbers and lengths in the memory of `x`; returns them."""
    fresh = draw(how, x.q.device, seed)
    for name in NAMES:
        if getattr(x, name) is not None:
            getattr(x, name).copy_(getattr(fresh, name))
    return fresh


def prepared(entry, how, device):
    """A warm call, its inputs, and a function that gives its results."""
    call = attn.prepare(kind_of(how), draw(how, device))
    if entry == "wrapper":
        results = []

        def run():
            results[:] = attn.wrapped(kind_of(how), call.x)

        run()
        torch.cuda.synchronize()
        return run, call.x, lambda: attn.Results(*results)
    return call.bind() if entry == "bind" else call.execute, call.x, call.results


@hows
@pytest.mark.parametrize("entry", ["execute", "bind", "wrapper"])
def test_replays_follow_new_data_and_lengths(entry, how, device):
    """All are read at replay; so is what lies past the lengths, as NaN."""
    run, x, results = prepared(entry, how, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (1, 2, 3):
        fresh = refill(x, how, seed)
        for tensor in results():
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        attn.check(results(), fresh)


@hows
def test_compiled_kernel_outlives_its_op_while_a_graph_uses_it(how, device):
    """The op and every reference of ours are gone before the replay."""
    from cuteforge.runtime import compile_cache

    call = attn.prepare(kind_of(how), draw(how, device))
    results, x = call.results(), call.x
    workspace = call.workspace  # memory is the caller's to keep
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.execute()
    del call
    compile_cache.clear()
    gc.collect()
    fresh = refill(x, how, 7)
    graph.replay()
    torch.cuda.synchronize()
    attn.check(results, fresh)
    del workspace


@hows
def test_two_graphs_of_wrapper_calls_do_not_share_scratch(how, device):
    """Each replay's workspace is of its own pool: interleaved replays stay right."""
    run = [prepared("wrapper", how, device) for _ in range(2)]
    graphs = []
    for call, _, _ in run:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            call()
    fresh = [refill(x, how, seed) for seed, (_, x, _) in enumerate(run, 1)]
    streams = [torch.cuda.Stream() for _ in run]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, _, results), expected in zip(run, fresh):
        attn.check(results(), expected)


def test_prefill_is_one_launch_and_decode_at_most_two(device):
    """No fill, no copy, no host plan beside them."""
    for how, most in (("prefill", 1), ("packed", 2), ("decode", 2)):
        run, _, _ = prepared("bind", how, device)
        run()
        torch.cuda.synchronize()
        assert count_launches(run) <= most, how


COLD_CAPTURE = """
import torch
from helpers import attention as attn

for kind in attn.CLASSES:
    x = attn.draw(attn.MAIN, 3, 2, 1000, device=torch.device("cuda"))
    call = lambda: attn.wrapped(kind, x)
    check = lambda got: attn.check(attn.Results(*got), x)
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
    out = process.run(COLD_CAPTURE, CUTEFORGE_CACHE_DIR=tmp_path / "cache")
    assert out.split("\n")[:-1] == ["refused", "went on"] * 2


@hows
def test_explicit_stream_with_inputs_freed_at_once(how, device):
    """Memory the caller frees while the side stream is still behind is not handed out again: the call records it."""
    want = attn.Results(*attn.wrapped(kind_of(how), draw(how, device)))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        x = draw(how, device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        got = attn.wrapped(kind_of(how), x, stream=side)
        shapes = [(t.shape, t.dtype) for t in (x.q, x.k, x.v, *x.optional.values())]
        del x
        thieves = [torch.full(shape, 77, dtype=dtype, device=device) for shape, dtype in shapes]
        side.synchronize()
        assert attn.same(attn.Results(*got), want)
        del thieves


@hows
def test_explicit_stream_with_converted_inputs(how, device):
    """The copies of what the kernel cannot read are made on that stream, and live as long as it needs them."""
    want = attn.Results(*attn.wrapped(kind_of(how), draw(how, device)))
    side = torch.cuda.Stream()
    x = draw(how, device)
    x = x.with_(**{name: t.long() for name, t in x.optional.items()}, k=x.k.mT.contiguous().mT)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
    got = attn.wrapped(kind_of(how), x, stream=side)
    del x
    thieves = [torch.full((2**20,), 77, dtype=torch.int32, device=device) for _ in range(8)]
    side.synchronize()
    assert attn.same(attn.Results(*got), want)
    del thieves


def load_code(how, device):
    """Loading a kernel at its first launch may wait for the stream that is held."""
    attn.run(kind_of(how), draw(how, device))


def behind(call, launch, stream):
    check_while_behind(stream, launch, call.check_untouched)
    call.check_memory()


@pytest.mark.parametrize("as_handle", [False, True], ids=["torch_stream", "raw_handle"])
@hows
def test_explicit_stream_is_where_the_launch_goes(how, as_handle, device):
    load_code(how, device)
    call, side = attn.prepare(kind_of(how), draw(how, device)), torch.cuda.Stream()
    stream = side.cuda_stream if as_handle else side
    behind(call, lambda: call.execute(stream=stream), side)
    attn.check(call.results(), call.x)


@hows
def test_no_stream_means_the_current_one(how, device):
    load_code(how, device)
    call, side = attn.prepare(kind_of(how), draw(how, device)), torch.cuda.Stream()
    bound = call.bind()

    def launch():
        with torch.cuda.stream(side):
            call.execute()
            bound()

    behind(call, launch, side)
    attn.check(call.results(), call.x)


@hows
def test_handle_zero_is_the_default_stream(how, device):
    """Not the current one: it runs although the current stream is held."""
    load_code(how, device)
    call, side = attn.prepare(kind_of(how), draw(how, device)), torch.cuda.Stream()
    check_not_behind(side, lambda: call.execute(stream=0), call.check_memory)
    attn.check(call.results(), call.x)


@pytest.mark.parametrize("stream", [-1, "side", 1.5])
@hows
def test_what_is_no_stream_is_refused(how, stream, device):
    call = attn.prepare(kind_of(how), draw(how, device))
    for attempt in (call.execute, call.bind):
        with pytest.raises(ContractError, match=r"^stream\b"):
            attempt(stream=stream)
    with pytest.raises(ContractError, match=r"^stream\b"):
        attn.wrapped(kind_of(how), call.x, stream=stream)
    torch.cuda.synchronize()
    call.check_untouched()


@hows
def test_two_streams_at_once(how, device):
    """Launches share no scratch: both results are right although they overlap."""
    inputs = [draw(how, device, seed) for seed in (1, 2)]
    want = [attn.Results(*attn.wrapped(kind_of(how), x)) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(10):
        got = [attn.wrapped(kind_of(how), x, stream=stream) for x, stream in zip(inputs, streams)]
    torch.cuda.synchronize()
    for results, expected in zip(got, want, strict=True):
        assert attn.same(attn.Results(*results), expected)

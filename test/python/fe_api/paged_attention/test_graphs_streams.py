"""CUDA graphs with lengths, tables and rows that change between replays; explicit streams."""

import gc

import pytest
import torch

from cuteforge import ContractError
from helpers import paged, process
from helpers.gpu import SLEEP_CYCLES, check_while_behind
from helpers.paged import CAUSAL, MAIN, Batch

WIDTH = 64  # columns of the table
ROWS = (4, 1, 0, 2)
# What a replay finds, by how many pages of 16 each request may have: nothing, all of the table, one page, anything.
REPLAYS = ((0, 0, 0, 0), (1024, 1024, 1024, 1024), (1, 16, 17, 1024), (1000, 3, 0, 129), (5, 5, 5, 5))
TOKENS = ((7, 100, 0, 23), (130, 0, 0, 0), (1, 1, 127, 1), (33, 32, 32, 33), (0, 0, 65, 65))


def at(kind, replay, device, rows=ROWS):
    """Operands of one replay: all of one shape, the table as wide as the longest request may be."""
    lengths = REPLAYS[replay]
    queries = TOKENS[replay] if kind == "prefill" else 2
    full = Batch((16 * WIDTH,) * len(lengths), 16, queries, rows=rows, spare_columns=0)
    x = paged.draw(CAUSAL, full, device, seed=replay, page_seed=replay)
    x = paged.with_lengths(x, lengths)
    # Past the lengths is nothing to be read, in the table and in the pool.
    for row, length in zip(rows, lengths):
        stale = x.page_table[row, -(-length // 16) :].clone()
        x.page_table[row, -(-length // 16) :] = 2**31 - 1
        for cache in x.pools:
            cache[stale.long()] = torch.nan
    return paged.appending(x) if kind == "append" else x


def refill(x, fresh):
    """The numbers of `fresh` in the memory of `x`."""
    for name in ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", *x.optional):
        if getattr(x, name) is not None:
            getattr(x, name).copy_(getattr(fresh, name))


class Prepared:
    """A warm call of one of the entries, and where its results are."""

    def __init__(self, entry, x):
        self.results, self._x = {}, x
        if entry == "wrapper":
            self.launch = self._call_wrapper
            self.launch()
            torch.cuda.synchronize()
            return
        self.outputs = paged.Outputs.of(x)
        self.results = self.outputs.tensors
        op = paged.make_op(x, self.results).compile()
        self._scratch = paged.workspace_of(op, x.q.device)
        positional, named = paged.arguments(x, self.results)
        named["workspace"] = None if self._scratch is None else self._scratch.tensor
        self.launch = (
            op.bind(*positional, **named) if entry == "bind" else lambda **on: op.execute(*positional, **named, **on)
        )

    def _call_wrapper(self):
        self.results.update(paged.call_wrapper(self._x).items())


KINDS = ("decode", "append", "prefill")


@pytest.mark.parametrize("entry", ["execute", "bind", "wrapper"])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_follow_new_lengths_tables_rows_and_data(kind, entry, device):
    """Captured with short requests, right for any up to the table width."""
    x = at(kind, 4, device)
    prepared = Prepared(entry, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch()
    for replay, rows in enumerate((ROWS, ROWS, ROWS[::-1], (0, 1, 2, 4), ROWS)):
        refill(x, at(kind, replay, device, rows))
        guard = paged.PoolGuard(x)
        for tensor in prepared.results.values():
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        guard.check()
        paged.check(prepared.results, x)


def test_graph_captured_with_long_requests_serves_short_ones(device):
    """And again long ones: no state is left in the scratch memory."""
    x = at("decode", 1, device)
    prepared = Prepared("execute", x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch()
    for replay in (2, 1, 0, 1, 3, 1):
        refill(x, at("decode", replay, device))
        graph.replay()
        torch.cuda.synchronize()
        paged.check(prepared.results, x)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_kernel_outlives_its_op_while_a_graph_uses_it(kind, device):
    from cuteforge.runtime import compile_cache

    x = at(kind, 3, device)
    prepared = Prepared("execute", x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch()
    del prepared.launch
    compile_cache.clear()
    gc.collect()
    refill(x, at(kind, 2, device))
    graph.replay()
    torch.cuda.synchronize()
    paged.check(prepared.results, x)


COLD_CAPTURE = """
import torch
from helpers import paged

x = paged.draw(paged.MAIN, paged.edges(16, {queries}), torch.device("cuda"))
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        paged.call_wrapper(x)
except RuntimeError as error:
    assert "compile" in str(error), error
    print("refused")
paged.check(paged.call_wrapper(x), x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = paged.call_wrapper(x)
graph.replay()
torch.cuda.synchronize()
paged.check(got, x)
print("went on")
"""


@pytest.mark.parametrize("queries", [0, paged.PREFILL_QUERIES], ids=["decode", "prefill"])
def test_cold_call_under_capture_is_refused_before_anything_and_the_process_goes_on(queries, device, tmp_path):
    code = COLD_CAPTURE.format(queries=queries)
    assert process.run(code, CUTEFORGE_CACHE_DIR=tmp_path / "cache").split("\n")[:2] == ["refused", "went on"]


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_stream_with_inputs_freed_at_once(kind, device):
    """Memory the caller frees while the side stream is still behind is not handed out again: the call records it."""
    want = paged.run(at(kind, 3, device))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(4):
        x = at(kind, 3, device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        got = paged.call_wrapper(x, stream=side)
        shapes = [(t.shape, t.dtype) for t in (*x.positional, *x.optional.values())]
        del x
        thieves = [torch.full(shape, 77, dtype=dtype, device=device) for shape, dtype in shapes]
        side.synchronize()
        assert paged.same(got, want)
        del thieves


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_wrapper_converts_and_copies_on_the_stream_given(kind, device):
    """int64 tables and rows that the kernel cannot read, changed on the side stream just before."""
    x = at(kind, 3, device)
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


def load_code(kind, device):
    """Loading a kernel at its first launch may wait for the stream that is held."""
    paged.run(at(kind, 3, device))


def behind(prepared, launch, stream):
    check_while_behind(stream, launch, prepared.outputs.check_untouched)
    prepared.outputs.check()


@pytest.mark.parametrize("as_handle", [False, True], ids=["torch_stream", "raw_handle"])
@pytest.mark.parametrize("kind", KINDS)
def test_explicit_stream_is_where_the_launch_goes(kind, as_handle, device):
    load_code(kind, device)
    x, side = at(kind, 3, device), torch.cuda.Stream()
    prepared = Prepared("execute", x)
    stream = side.cuda_stream if as_handle else side
    behind(prepared, lambda: prepared.launch(stream=stream), side)
    paged.check(prepared.results, x)


@pytest.mark.parametrize("entry", ["execute", "bind"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_no_stream_means_the_current_one(kind, entry, device):
    load_code(kind, device)
    x, side = at(kind, 3, device), torch.cuda.Stream()
    prepared = Prepared(entry, x)

    def launch():
        with torch.cuda.stream(side):
            prepared.launch()

    behind(prepared, launch, side)
    paged.check(prepared.results, x)


@pytest.mark.parametrize("stream", [-1, "side", 1.5])
def test_what_is_no_stream_is_refused(stream, device):
    x = at("append", 3, device)
    guard, prepared = paged.PoolGuard(x.with_(new_k=None, new_v=None)), Prepared("execute", x)
    for attempt in (prepared.launch, lambda **on: paged.call_wrapper(x, **on)):
        with pytest.raises(ContractError, match=r"^stream\b"):
            attempt(stream=stream)
    torch.cuda.synchronize()
    prepared.outputs.check_untouched()
    guard.check()


def test_two_streams_at_once(device):
    """Launches share no scratch: both results are right although they overlap."""
    batch = Batch((8192, 5, 4096), 16)
    inputs = [paged.draw(MAIN, batch, device, seed) for seed in (1, 2)]
    streams, want = [torch.cuda.Stream() for _ in inputs], [paged.run(x) for x in inputs]
    for _ in range(20):
        got = [paged.call_wrapper(x, stream=stream) for x, stream in zip(inputs, streams)]
    torch.cuda.synchronize()
    for results, expected in zip(got, want, strict=True):
        assert paged.same(results, expected)

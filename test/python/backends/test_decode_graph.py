"""Replayed decode steps: what the same step gives eagerly, whatever the padding, and nothing stored where it should not
be."""

import re

import pytest
import torch

from cuteforge.errors import ContractError
from cuteforge.families.attention.wrapper import paged_gqa_decode_wrapper
from cuteforge.serving.decode_graph import DecodeGraph
from cuteforge.serving.kv_cache import CacheFull, KVCache
from helpers.kv_cache import attend, poisoned, snapshot
from helpers.nonsense import NONSENSE, refusal

HEADS, KV_HEADS, D = 8, 2, 64
SIZES = (1, 2, 4, 6)
PROMPTS = (5, 1, 16, 31, 17, 2)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def make_cache(device, dtype, layers=2):
    limits = {"num_pages": 40, "page_size": 4, "max_requests": 6, "max_seqlen": 64}
    return poisoned(KVCache(layers, KV_HEADS, D, **limits, dtype=dtype, device=device))


def draw(rows, device, dtype, seed=0):
    """q of all heads; k and v are parts of it, so that a step has one input more than it needs only once."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HEADS, D, generator=generator).to(device=device, dtype=dtype)


def split(x):
    return x, x[:, :KV_HEADS], x[:, KV_HEADS : 2 * KV_HEADS]


class Model:
    """Layers of attention alone: no product whose algorithm depends on the batch size. Counts its calls."""

    def __init__(self, cache, attention):
        self.cache, self.attention, self.calls = cache, attention, []

    def __call__(self, x, tokens):
        self.calls.append(len(x))
        for layer in range(self.cache.num_layers):
            x = x + self.attention(self.cache, layer, *split(x))
        return {"x": x, "positions": self.cache.batch.positions.clone(), "next": (tokens + 1,)}


def attend_by_kernel(cache, layer, q, k, v):
    """With one split the bits of a request do not depend on the others of the batch, padding rows included."""
    cache.append(layer, k, v)
    b = cache.batch
    pools = cache.k_pool(layer), cache.v_pool(layer)
    options = {"seqlens_k": b.seqlens_k, "page_table_rows": b.page_table_rows, "num_splits": 1}
    return paged_gqa_decode_wrapper(q, *pools, b.page_table, **options)["out"]


def attend_fused(cache, layer, q, k, v):
    """As `attend_by_kernel`, the kernel stores the new tokens."""
    b = cache.batch
    options = {"seqlens_k": b.seqlens_k, "page_table_rows": b.page_table_rows, "num_splits": 1}
    pools = cache.k_pool(layer), cache.v_pool(layer)
    new = {"new_k": k.contiguous(), "new_v": v.contiguous()}
    return paged_gqa_decode_wrapper(q, *pools, b.page_table, **options, **new)["out"]


def prefilled(device, dtype):
    """A cache of six requests with prompts drawn per request."""
    cache = make_cache(device, dtype)
    requests = [cache.add() for _ in PROMPTS]
    cache.bind_prefill(requests, PROMPTS)
    for layer in range(cache.num_layers):
        cache.append(layer, *split(draw(sum(PROMPTS), device, dtype, seed=layer))[1:])
    return cache, requests


# Indices into the requests of each step: every captured size, with and without padding, steady loops, changes of order.
STEPS = ((0, 1, 2), (0, 1, 2), (0, 1, 2), (4,), (3, 0, 5, 1, 2), (3, 0, 5, 1, 2), (5, 4, 3, 2, 1, 0), (2, 0), (1, 4, 0))


def run_steps(cache, requests, device, dtype, call):
    """The results of all steps, and at the end the pools but for the scratch page."""
    got = []
    for i, members in enumerate(STEPS):
        inputs = draw(len(members), device, dtype, seed=10 + i), torch.tensor(members, device=device)
        results = call([requests[m] for m in members], *inputs)
        got.append(
            {"x": results["x"].clone(), "positions": results["positions"].clone(), "next": results["next"][0].clone()}
        )
    pools = [pool(layer)[1:].clone() for pool in (cache.k_pool, cache.v_pool) for layer in range(cache.num_layers)]
    return got, pools


def unpadded(cache, model):
    """Steps as eager code does them: bound to the requests alone."""

    def call(requests, *inputs):
        cache.bind_decode(requests)
        return model(*inputs)

    return call


def check_same(got, want):
    for step, expected in zip(got[0], want[0], strict=True):
        assert step.keys() == expected.keys()
        for name, tensor in step.items():
            assert torch.equal(tensor, expected[name]), name
    for pool, expected in zip(got[1], want[1], strict=True):
        assert torch.equal(pool.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_on_a_cpu_the_step_is_called_with_padding_and_gives_the_same():
    """Every size, rows of no request between them and the step: bits, positions and pools are those of an unpadded
    loop."""
    results, calls = [], []
    for is_padded in (True, False):
        cache, requests = prefilled("cpu", torch.float32)
        model = Model(cache, attend)
        call = DecodeGraph(model, cache, SIZES) if is_padded else unpadded(cache, model)
        results.append(run_steps(cache, requests, "cpu", torch.float32, call))
        calls.append(model.calls)
    check_same(*results)
    assert calls == [[4, 4, 4, 1, 6, 6, 6, 2, 4], [3, 3, 3, 1, 5, 5, 6, 2, 3]]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ahead", [True, False], ids=["captured_ahead", "captured_when_needed"])
@pytest.mark.parametrize("attention", [attend_by_kernel, attend_fused], ids=["append", "fused"])
def test_graphs_equal_eager_steps_bit_for_bit(attention, ahead):
    results = []
    for kind in ("graph", "padded", "unpadded"):
        cache, requests = prefilled("cuda", torch.bfloat16)
        model = Model(cache, attention)
        call = unpadded(cache, model)
        if kind != "unpadded":
            call = DecodeGraph(model, cache, SIZES, use_graphs=None if kind == "graph" else False)
        if kind == "graph" and ahead:
            call.capture(draw(1, "cuda", torch.bfloat16), torch.zeros(1, dtype=torch.int64, device="cuda"))
        results.append(run_steps(cache, requests, "cuda", torch.bfloat16, call))
        if kind == "graph":
            assert len(model.calls) == 3 * len(SIZES)
    for others in results[1:]:
        check_same(results[0], others)


@pytest.mark.gpu
@needs_gpu
def test_capture_touches_no_request():
    cache, requests = prefilled("cuda", torch.bfloat16)
    pools = [pool(layer) for pool in (cache.k_pool, cache.v_pool) for layer in range(cache.num_layers)]
    before, lengths = [pool[1:].clone() for pool in pools], [cache.seqlen(r) for r in requests]
    graph = DecodeGraph(Model(cache, attend_fused), cache, SIZES)
    graph.capture(draw(1, "cuda", torch.bfloat16), torch.zeros(1, dtype=torch.int64, device="cuda"))
    for pool, expected in zip(pools, before):
        assert torch.equal(pool[1:].nan_to_num(7.0), expected.nan_to_num(7.0))
    assert [cache.seqlen(r) for r in requests] == lengths


def test_default_sizes_reach_every_number_of_requests():
    cache = make_cache("cpu", torch.float32)
    assert DecodeGraph(lambda: None, cache).batch_sizes == (1, 2, 4, 6)


@pytest.mark.parametrize("sizes", [(), (0, 1), (4, 7)])
def test_sizes_that_no_batch_can_have_are_refused(sizes):
    with pytest.raises(ContractError, match=r"^batch_sizes: wanted some from 1 to max_requests = 6, got"):
        DecodeGraph(lambda: None, make_cache("cpu", torch.float32), sizes)


REFUSED = {
    "too_many": ((0, 1, 2, 3, 4), [(5, 3)], ContractError, r"^requests: wanted at most 4, the largest size, got 5$"),
    "rows": ((0, 1), [(3, 3)], ContractError, r"^inputs\[0\]: wanted 2 rows, one a request, got shape \(3, 3\)$"),
    "shape": ((0, 1), [(2, 4)], ContractError, r"^inputs\[0\]: wanted rows of float32 and shape \(3,\), .* \(4,\)$"),
    "count": ((0, 1), [(2, 3), (2,)], ContractError, r"^inputs: wanted 1, as in the first call, got 2$"),
    "full": ((0, 1), [(2, 3)], CacheFull, r"^num_pages: needed 2 more"),
}


@pytest.mark.parametrize(("members", "shapes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_calls_that_do_not_fit_are_refused_before_the_step(members, shapes, error, message):
    cache = KVCache(1, 1, 8, num_pages=5, page_size=1, max_requests=5, max_seqlen=8, device="cpu")
    requests, calls = [cache.add() for _ in range(5)], []
    graph = DecodeGraph(lambda x: calls.append(x), cache, (1, 2, 4))
    graph(requests[:4], torch.zeros(4, 3))
    with pytest.raises(error, match=message):
        graph([requests[m] for m in members], *(torch.zeros(shape) for shape in shapes))
    assert len(calls) == 1
    assert [cache.seqlen(r) for r in requests] == [1, 1, 1, 1, 0]


def test_the_step_keeps_no_graph_of_gradients():
    cache = make_cache("cpu", torch.float32)
    weight = torch.ones(3, requires_grad=True)
    assert not DecodeGraph(lambda x: x * weight, cache)([cache.add()], torch.ones(1, 3)).requires_grad


def test_inputs_that_require_grad_leave_no_graph_in_the_buffers():
    cache = make_cache("cpu", torch.float32)
    graph, request = DecodeGraph(lambda x: x, cache), cache.add()
    for _ in range(2):
        assert not graph([request], torch.ones(1, 3, requires_grad=True)).requires_grad
    assert not any(buffer.requires_grad for buffer in graph._inputs)


# What is refused or fails: before the first call that succeeds, and after.


@pytest.mark.parametrize("when", ["full", "unknown", "twice", "rows"])
def test_a_refused_first_call_pins_no_shapes_and_changes_nothing(when):
    cache = KVCache(1, 1, 8, num_pages=1, page_size=1, max_requests=4, max_seqlen=8, device="cpu")
    first, second = cache.add(), cache.add()
    graph = DecodeGraph(lambda x: x, cache)
    before = snapshot(cache)
    requests, error = {
        "full": ([first, second], CacheFull),
        "unknown": ([first, 7], ContractError),
        "twice": ([first, first], ContractError),
        "rows": ([first], ContractError),
    }[when]
    with pytest.raises(error):
        graph(requests, torch.zeros(2, 3))
    assert snapshot(cache) == before
    assert graph([first], torch.ones(1, 4, 5, dtype=torch.int64)).tolist() == torch.ones(1, 4, 5).tolist()


def test_a_refused_call_leaves_nothing_of_a_stored_step_to_undo():
    """``try: graph(…); except: cache.rollback()`` takes back a step that failed, never the one before."""
    cache, requests = prefilled("cpu", torch.float32)
    graph = DecodeGraph(failing_once(cache, None), cache, SIZES)
    graph(requests[:2], draw(2, "cpu", torch.float32))
    lengths = [cache.seqlen(r) for r in requests]
    for given, inputs in (([7, 8], 2), (None, 2), (requests[:2], 3), (requests * 2, 12)):
        assert refusal(graph, given, draw(inputs, "cpu", torch.float32))
        cache.rollback()
        assert [cache.seqlen(r) for r in requests] == lengths


def failing_once(cache, at):
    """Two layers of attention, and once an exception before layer `at`; its calls."""
    calls = []

    def step(x):
        calls.append(len(x))
        for layer in range(cache.num_layers + 1):
            if len(calls) == 1 and layer == at:
                raise KeyError(at)
            if layer < cache.num_layers:
                x = x + attend(cache, layer, *split(x))
        return x

    return step


@pytest.mark.parametrize("at", range(3))
def test_a_step_that_raises_is_undone_and_the_graph_works_on(at):
    """The first call pins no shapes either."""
    results = []
    for fails in (True, False):
        cache, requests = prefilled("cpu", torch.float32)
        step = failing_once(cache, at if fails else None)
        graph = DecodeGraph(step, cache, SIZES)
        before, free = [cache.seqlen(r) for r in requests], cache.num_free_pages
        if fails:
            with pytest.raises(KeyError):
                graph(requests[:3], draw(3, "cpu", torch.float32))
            assert ([cache.seqlen(r) for r in requests], cache.num_free_pages) == (before, free)
            assert cache.batch is None
            assert graph._inputs is None
        results.append([graph(requests[:n], draw(n, "cpu", torch.float32, seed=n)) for n in (3, 3, 2, 6)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_results_without_rows_are_refused_and_the_call_undone():
    cache = make_cache("cpu", torch.float32)
    request = cache.add()
    with pytest.raises(ContractError, match=r"^step: wanted results of one row a request, got shape \(\)$"):
        DecodeGraph(lambda x: x.sum(), cache)([request], torch.ones(1, 3))
    assert cache.seqlen(request) == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ahead", [True, False], ids=["capture", "call"])
@pytest.mark.parametrize("at", [1, 2, 3], ids=["warm_up", "again", "capture"])
def test_a_step_that_raises_while_it_is_captured_leaves_a_graph_that_works(at, ahead):
    """The failure is in one of the three calls of a capture; results are those of an eager loop."""
    cache, requests = prefilled("cuda", torch.bfloat16)
    other, others = prefilled("cuda", torch.bfloat16)
    model, calls = Model(cache, attend_by_kernel), []

    def step(x, tokens):
        calls.append(len(x))
        if len(calls) == at:
            raise KeyError(at)
        return model(x, tokens)

    graph = DecodeGraph(step, cache, SIZES)
    inputs = draw(3, "cuda", torch.bfloat16), torch.arange(3, device="cuda")
    with pytest.raises(Exception):  # noqa: B017, PT011 - torch may say that the capture was invalidated instead
        graph.capture(*inputs) if ahead else graph(requests[:3], *inputs)
    assert [cache.seqlen(r) for r in requests] == list(PROMPTS)
    assert graph._inputs is None
    torch.cuda.synchronize()
    eager = unpadded(other, Model(other, attend_by_kernel))
    for _ in range(3):
        assert torch.equal(graph(requests[:3], *inputs)["x"], eager(others[:3], *inputs)["x"])


@pytest.mark.gpu
@needs_gpu
def test_a_replay_counts_as_stored():
    """Pages of a prompt whose last token came in a replay are shared."""
    for attention, is_shared in ((attend_by_kernel, True), (attend_fused, False)):
        limits = {"num_pages": 20, "page_size": 1, "max_requests": 4, "max_seqlen": 16}
        cache = KVCache(2, KV_HEADS, D, **limits, device="cuda")
        request = cache.add([1, 2, 3])
        cache.bind_prefill([request], [2])
        cache.mark_stored()
        DecodeGraph(Model(cache, attention), cache)(
            [request], draw(1, "cuda", torch.bfloat16), torch.zeros(1, device="cuda")
        )
        assert cache.is_stored == is_shared
        assert cache.cached_tokens(cache.add([1, 2, 3, 4])) == (3 if is_shared else 2)


ARGUMENTS = {
    "step": ("function", "class"),
    "cache": (),
    "batch_sizes": ("None",),
    "use_graphs": ("None",),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_nonsense_is_refused_by_name(argument):
    """A bool of use_graphs wants a GPU, which these caches do not have."""
    given = {"step": len, "cache": make_cache("cpu", torch.float32)}
    for name, value in NONSENSE.items():
        if name not in ARGUMENTS[argument]:
            message = refusal(DecodeGraph, **{**given, argument: value})
            assert re.match(rf"{argument}(\[0\])?:", message), (name, message)


@pytest.mark.parametrize("is_first", [True, False])
def test_nonsense_of_a_call_is_refused_by_name_and_changes_nothing(is_first):
    cache = make_cache("cpu", torch.float32)
    requests = [cache.add(), cache.add()]
    graph = DecodeGraph(lambda x: x, cache)
    if not is_first:
        graph(requests, torch.ones(2, 3))
    before, inputs = snapshot(cache), torch.ones(2, 3)
    rows = ("matrix", "int_tensor") if is_first else ()  # two of them: as good as any in a first call
    for name, value in NONSENSE.items():
        if name not in ("empty", "tuple"):
            assert re.match(r"requests?(\[0\])?:", refusal(graph, value, inputs)), name
        if name not in rows:
            assert refusal(graph, requests, value).startswith("inputs[0]:"), name
            assert refusal(graph.capture, value).startswith("inputs[0]:"), name
        assert snapshot(cache) == before, name
    assert graph(requests, inputs).shape == (2, 3)

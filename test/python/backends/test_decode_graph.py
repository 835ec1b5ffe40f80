"""Replayed decode steps: what the same step gives eagerly, whatever the padding, and nothing stored where it should not be."""

import pytest
import torch

from cuteforge.backends.decode_graph import DecodeGraph
from cuteforge.backends.kv_cache import CacheFull, KVCache
from cuteforge.errors import ContractError
from cuteforge.gqa.wrapper import paged_gqa_decode_wrapper
from helpers.kv_cache import attend, poisoned

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
    """Every size, rows of no request between them and the step: bits, positions and pools are those of an unpadded loop."""
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

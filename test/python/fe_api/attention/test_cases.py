"""Public bug reports as cases, where dense attention has the same kind of fault to fear.

Captures are also in fe_api/lifecycle. Cold caches and forks are what all families share, and are tested with the
compressor.
"""

import itertools
import math

import pytest
import torch

from cuteforge import ContractError, attn_decode, attn_prefill, gqa_decode_wrapper, gqa_prefill_wrapper
from helpers import attention as attn
from helpers import budget, gpu, process
from helpers.packs import offsets

kinds = pytest.mark.parametrize("kind", **attn.both_ops)
HEAD_RATIOS = ((28, 4), (40, 8), (24, 4), (14, 2), (33, 3), (32, 2), (64, 1))


@kinds
@pytest.mark.parametrize("heads", HEAD_RATIOS, ids=str)
def test_every_head_ratio(heads, kind, device):
    """V of KV head j holds j: out is h // group exactly, whatever Q and K are; decode and prefill take the same
    heads."""
    num_heads, kv_heads = heads
    config = attn.MAIN._replace(group=num_heads // kv_heads)
    x = attn.draw(config, 3, 1, 513, kv_heads, device=device, lengths=[1, 17, 513])
    v = torch.arange(kv_heads, device=device, dtype=x.v.dtype)[:, None].expand(x.v.shape).contiguous()
    out = attn.run(kind, attn.with_lengths(x.with_(v=v), [1, 17, 513])).out
    want = torch.arange(num_heads, device=device) // config.group
    assert torch.equal(out, want[:, None].expand(out.shape).to(out.dtype))


@kinds
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("capacity", "lengths"), [(3, [1, 3]), (4096, [1, 4095])])
def test_slots_past_the_length_hold_anything(capacity, lengths, poison, kind, device):
    """fp16, one head, D = 64, q = 0.5, K = 0 and V = 1: out = 1, lse = ln(length)."""
    q = torch.full((2, 1, 1, 64), 0.5, dtype=torch.float16, device=device)
    k, v = (torch.full((2, capacity, 1, 64), poison, dtype=torch.float16, device=device) for _ in range(2))
    for b, n in enumerate(lengths):
        k[b, :n], v[b, :n] = 0, 1
    seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=device)
    for num_splits in (None, 1, 7):
        results = attn.run(kind, attn.Inputs(q, k, v, seqlens_k=seqlens_k, causal=True), num_splits=num_splits)
        assert (results.out == 1).all()
        want = torch.tensor(lengths, device=device, dtype=torch.float32).log()[:, None, None]
        torch.testing.assert_close(results.lse, want, rtol=1e-6, atol=1e-6)


@kinds
@pytest.mark.parametrize("size", [31, 32, 33, 34, 63, 64, 65, 66, 97])
def test_one_physical_head_expanded(size, kind, device):
    """Hq = 16 over Hkv = 8 heads of stride 0."""
    x = attn.draw(attn.GROUPS[1], 2, 1, size, 1, device=device, lengths=[size, size - 5])
    q = torch.cat([x.q] * 8, 2)
    k, v = (t.expand(-1, -1, 8, -1) for t in (x.k, x.v))
    expanded = x.with_(q=q, k=k, v=v)
    copied = x.with_(q=q, k=k.contiguous(), v=v.contiguous())
    want = attn.run(kind, copied)
    attn.check(want, copied)
    try:
        assert attn.same(attn.run(kind, expanded), want)
    except ContractError as refusal:
        assert str(refusal).startswith(("k", "v"))
    assert attn.same(attn.Results(*attn.wrapped(kind, expanded)), want)


@kinds
def test_causal_corner_with_fewer_queries_than_keys(kind, device):
    """Q = K = 0 and V[j] = j: 1.5 and 2.0; the other corner gives 0 and 0.5."""
    zeros = torch.zeros(1, 5, 4, 128, dtype=torch.bfloat16, device=device)
    v = torch.arange(5, device=device, dtype=torch.bfloat16).view(1, 5, 1, 1).expand(1, 5, 1, 128).contiguous()
    lengths = torch.tensor([5], dtype=torch.int32, device=device)
    x = attn.Inputs(zeros[:, :2].contiguous(), zeros[:, :, :1].contiguous(), v, seqlens_k=lengths, causal=True)
    results = attn.run(kind, x)
    assert (results.out[0, 0] == 1.5).all() and (results.out[0, 1] == 2.0).all()
    torch.testing.assert_close(results.lse[0, 0], torch.tensor([4.0, 5.0], device=device).log())


def test_ragged_batch_with_empty_sequences(device):
    """Hq = 9, Hkv = 3, D = 64, longest query 1, V = index inside the sequence: rows 1.0 and 2.0."""
    q = torch.randn(2, 9, 64, device=device).bfloat16()
    k = torch.zeros(8, 3, 64, dtype=torch.bfloat16, device=device)
    index = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4], dtype=torch.bfloat16, device=device)
    v = index[:, None, None].expand(8, 3, 64).contiguous()
    cuts = (torch.tensor(c, dtype=torch.int32, device=device) for c in ([0, 1, 1, 2], [0, 3, 3, 8]))
    results = attn.run("prefill", attn.Inputs(q, k, v, *cuts, causal=True))
    assert (results.out[0] == 1).all() and (results.out[1] == 2).all()
    want = torch.tensor([3.0, 5.0], device=device).log().expand(9, 2)
    torch.testing.assert_close(results.lse, want)


def test_more_than_2_31_query_elements(device):
    """3000 sequences of 100 tokens, 64 heads: the first and last three equal their stand-alone calls."""
    gpu.require_free_memory(16, device)
    count, length, config = 3000, 100, attn.GROUPS[6]
    generator = torch.Generator(device=device).manual_seed(0)
    shapes = ((count * length, heads, 128) for heads in (64, 8, 8))
    q, k, v = (torch.empty(s, dtype=config.dtype, device=device).normal_(generator=generator) for s in shapes)
    cuts = offsets([length] * count).to(device)
    out = gqa_prefill_wrapper(q, k, v, cu_seqlens_q=cuts, cu_seqlens_k=cuts, causal=True, return_lse=True)["out"]
    for first in (0, (count - 3) * length):
        run = slice(first, first + 3 * length)
        part = attn.Inputs(*(t[run].clone() for t in (q, k, v)), *[offsets([length] * 3).to(device)] * 2, causal=True)
        assert budget.same_bits(out[run], attn.run("prefill", part).out), first


@kinds
def test_requests_more_than_2_31_elements_apart(kind, device):
    """Few elements far apart: five requests 2**30 elements from each other, by stride."""
    gpu.require_free_memory(12, device)
    x = attn.draw(attn.MAIN, 5, 2, 40, device=device)
    want = attn.run(kind, x)
    pitch = 2**30 + 8
    memory = torch.empty(4 * pitch + x.k[0].numel(), dtype=x.k.dtype, device=device)
    far = memory.as_strided(x.k.shape, (pitch, *x.k.stride()[1:]))
    far.copy_(x.k)
    assert attn.same(attn.run(kind, x.with_(k=far)), want)
    far.copy_(x.v)
    assert attn.same(attn.run(kind, x.with_(v=far)), want)


@kinds
def test_products_past_the_range_of_fp16(kind, device):
    """q = k = 32 everywhere, 16 keys, V[j] = j: the last query has out 7.5 and lse 11588.01."""
    q = torch.full((1, 16, 4, 128), 32, dtype=torch.float16, device=device)
    v = torch.arange(16, device=device, dtype=torch.float16).view(1, 16, 1, 1).expand(1, 16, 1, 128).contiguous()
    lengths = torch.tensor([16], dtype=torch.int32, device=device)
    x = attn.Inputs(q, q[:, :, :1].contiguous(), v, seqlens_k=lengths, causal=True)
    out, lse = attn.run(kind, x)
    rows = torch.arange(16, device=device)
    assert (out[0] == (rows / 2)[:, None, None]).all()
    torch.testing.assert_close(lse[0, 0], 131072 * 128**-0.5 + (rows + 1.0).log(), rtol=1e-6, atol=0)
    assert abs(float(lse[0, 0, -1]) - 11588.01) < 0.01


@pytest.mark.multi_gpu
@kinds
def test_operands_of_a_gpu_that_is_not_current(kind, device):
    """Right on each device, and the current device stays what it was."""
    for index in (1, 0):
        x = attn.draw(attn.MAIN, 3, 2, 1000, device=torch.device("cuda", index))
        with torch.cuda.device(0):
            attn.check(attn.run(kind, x), x)
            got = attn.wrapped(kind, x)
            assert got["out"].device.index == index
            assert torch.cuda.current_device() == 0
            attn.check(attn.Results(*got), x)


@pytest.mark.multi_gpu
@kinds
def test_operands_on_two_gpus_are_refused_by_name(kind, device):
    x = attn.draw(attn.MAIN, 3, 2, 100, device=torch.device("cuda", 0))
    for name in ("k", "v", "seqlens_k"):
        with pytest.raises(ContractError, match=rf"^{name}\b.*cuda:0.*cuda:1"):
            attn.wrapped(kind, x.with_(**{name: gpu.moved(getattr(x, name), 1)}))


@kinds
@pytest.mark.parametrize("name", ["q", "k", "v", "seqlens_k", "mask"])
def test_cpu_operand_is_named_with_both_devices(name, kind, device):
    x = attn.draw(attn.MAIN, 3, 2, 100, device=device)
    x = x.with_(mask=torch.ones(3, 100, dtype=torch.bool, device=device))
    with pytest.raises(ContractError, match=rf"(?i)^{name}\b.*cuda.*cpu"):
        attn.wrapped(kind, x.with_(**{name: getattr(x, name).cpu()}))


@kinds
def test_warm_capture_with_lengths_changed_in_place(kind, device):
    call = attn.prepare(kind, attn.draw(attn.MAIN, 3, 2, 1000, device=device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.execute()
    for lengths in ([1000, 1000, 1000], [0, 1, 2], [999, 64, 65]):
        fresh = attn.draw(attn.MAIN, 3, 2, 1000, device=device, seed=lengths[0], lengths=lengths)
        for name in ("q", "k", "v", "seqlens_k"):
            getattr(call.x, name).copy_(getattr(fresh, name))
        call.poison()
        graph.replay()
        torch.cuda.synchronize()
        attn.check(call.results(), fresh)
    call.check_memory()


def variants(device):
    """Same shape, other things that a launch cache may forget: scale, strides, dtype, causal, lengths."""
    x = attn.draw(attn.MAIN, 2, 4, 100, device=device)
    yield x.with_(softmax_scale=128**-0.5)
    yield x.with_(softmax_scale=3 * 128**-0.5)
    yield attn.LAYOUTS["head_major"](x)
    yield attn.draw(attn.MAIN_FP16, 2, 4, 100, device=device)
    yield x.with_(causal=False)
    yield attn.draw(attn.MAIN, 2, 4, 100, device=device, flags=attn.FLAGS[2])


@kinds
def test_results_do_not_depend_on_call_order(kind, device):
    inputs = list(variants(device))
    want = [attn.run(kind, x) for x in inputs]
    for results, x in zip(want, inputs):
        attn.check(results, x)
    for order in itertools.islice(itertools.permutations(range(len(inputs))), 0, 720, 17):
        for i in order:
            assert attn.same(attn.Results(*attn.wrapped(kind, inputs[i])), want[i]), (order, i)


@kinds
def test_parameters_work_under_no_grad(kind, device):
    x = attn.draw(attn.MAIN, 3, 2, 100, device=device)
    want = attn.run(kind, x)
    given = x.with_(**{name: torch.nn.Parameter(getattr(x, name)) for name in ("q", "k", "v")})
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert attn.same(attn.Results(*attn.wrapped(kind, given)), want)
            assert attn.same(attn.run(kind, given), want)


@kinds
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_operands_that_require_grad_are_refused_by_name(name, kind, device):
    """There is no backward kernel, and no output silently lacks a graph."""
    call = attn.prepare(kind, attn.draw(attn.MAIN, 3, 2, 100, device=device))
    x = call.x.with_(**{name: getattr(call.x, name).detach().clone().requires_grad_()})
    with pytest.raises(ContractError, match=rf"^{name}\b.*grad"):
        attn.wrapped(kind, x)
    thin = {"decode": attn_decode, "prefill": attn_prefill}[kind]
    with pytest.raises(ContractError, match=rf"^{name}\b.*grad"):
        thin(x.q, x.k, x.v)
    _, named = call.arguments
    for attempt in (call.op.execute, call.op.bind):
        with pytest.raises(ContractError, match=rf"^{name}\b.*requires_grad"):
            attempt(x.q, x.k, x.v, call.out.tensor, **named)
    torch.cuda.synchronize()
    call.check_untouched()


EMPTY = {"no_requests": (0, 2, 100), "no_queries": (3, 0, 100), "no_keys": (3, 2, 0), "nothing": (0, 0, 0)}
ENTRIES = ("class", "bind", "wrapper", "stream", "capture")


def run_through(entry, kind, x, device):
    """The results of one call."""
    if entry in ("class", "bind"):
        call = attn.prepare(kind, x)
        call.execute() if entry == "class" else call.bind()()
        torch.cuda.synchronize()
        call.check_memory()
        return call.results()
    if entry == "stream":
        return attn.Results(*attn.wrapped(kind, x, stream=torch.cuda.Stream()))
    results = attn.wrapped(kind, x)
    return attn.Results(*(gpu.captured(lambda: attn.wrapped(kind, x), device) if entry == "capture" else results))


@kinds
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_nothing_to_do(sizes, entry, kind, device):
    """Results of the right shape; queries without keys give 0 and -inf; the next call is right."""
    normal = attn.draw(attn.MAIN, 3, 2, 100, device=device)
    attn.run(kind, normal)
    x = attn.draw(attn.MAIN, *sizes, device=device)
    out, lse = run_through(entry, kind, x, device)
    torch.cuda.synchronize()
    assert out.shape == x.out_shape and lse.shape == x.lse_shape
    assert not out.any() and lse.isneginf().all()
    attn.check(attn.run(kind, normal), normal)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("lens", [([], []), ([0, 0], [0, 0]), ([0], [5]), ([3], [0])], ids=str)
def test_nothing_to_do_in_a_pack(lens, entry, device):
    normal = attn.draw_ragged(attn.MAIN, [5, 40], [7, 40], device=device)
    attn.run("prefill", normal)
    x = attn.draw_ragged(attn.MAIN, *lens, device=device, spare_tokens=0)
    out, lse = run_through(entry, "prefill", x, device)
    torch.cuda.synchronize()
    assert out.shape == x.out_shape and lse.shape == x.lse_shape
    assert not out.any() and lse.isneginf().all()
    attn.check(attn.run("prefill", normal), normal)


BOUNDED_CACHE = """
import torch
from helpers import attention as attn
from cuteforge.runtime import compile_cache

device = torch.device("cuda")
for turn in range(2):
    for config in (attn.HEAD_DIMS[0], attn.HEAD_DIMS[1], attn.HEAD_DIMS[4], attn.HEAD_DIMS[6]):
        for kind in attn.CLASSES:
            x = attn.draw(config, 3, 3, 1000, device=device)
            attn.check(attn.Results(*attn.wrapped(kind, x)), x)
            assert compile_cache.stats().size <= 3
print("right")
"""


def test_evicted_configurations_load_again(device):
    """More of them than the cache may hold, twice round; the directory on disk spares the compiles."""
    assert process.run(BOUNDED_CACHE, CUTEFORGE_CACHE_SIZE=3).split() == ["right"]


@kinds
def test_wrapper_positions_follow_the_signature(kind, device):
    """q, k, v by position and by name."""
    x = attn.draw(attn.MAIN, 2, 3, 50, device=device, flags=attn.FLAGS[2])
    wrapper = {"decode": gqa_decode_wrapper, "prefill": gqa_prefill_wrapper}[kind]
    by_name = wrapper(v=x.v, k=x.k, q=x.q, causal=True, return_lse=True)
    assert attn.same(attn.Results(*by_name), attn.run(kind, x))

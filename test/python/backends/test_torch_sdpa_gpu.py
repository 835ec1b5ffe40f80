"""torch's own attention on a GPU by our kernels: right results and gradients, our kernels in the profile, and the way
back."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from cuteforge.families.attention import reference
from cuteforge.integrations.aten_attention import Served
from cuteforge.integrations.torch_sdpa import register
from helpers import aten, budget, gpu
from helpers.packs import offsets
from helpers.policy import check, draw

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
HEADS, KV_HEADS, D = 8, 2, 64
NAMES_OF_OURS = re.compile(r"(attention|prefill_sm90a)_")
NAMES_OF_TORCHS = re.compile(r"flash_fwd|cudnn|fmha|cutlassF", re.IGNORECASE)
# Lq > Lk too: the first queries of the last request see no key.
LENS_Q, LENS_K = (70, 1, 130, 40), (70, 300, 200, 9)
needs_pages = pytest.mark.skipif(not aten.VARLEN_HAS_PAGES, reason="this torch's varlen_attn takes no pages")


class Log:
    """How often our kernels served a call, and how often they handed one on."""

    served = handed_on = 0


@pytest.fixture
def log(monkeypatch):
    """What becomes of the calls that reach us."""
    log = Log()

    def watched(method):
        def run(*args):
            result = method(*args)
            log.served += result is not None
            log.handed_on += result is None
            return result

        return run

    for name in ("flash", "cudnn"):
        monkeypatch.setattr(Served, name, watched(getattr(Served, name)))
    return log


@pytest.fixture
def served(log):
    with register():
        yield log
    assert log.served


def by_token(device, length=300, num_keys=300, dtype=BF16, heads=HEADS, kv_heads=KV_HEADS, d=D):
    return draw(2, length, num_keys, heads, kv_heads, d, dtype=dtype, device=device)


def attend(q, k, v, **options):
    """`scaled_dot_product_attention` of tokens before heads."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*by_head, enable_gqa=True, **options).transpose(1, 2)


# As torch chooses: cuDNN comes first on sm_90 and sm_100, and its place is taken too.
ROADS = {"as torch chooses": contextlib.nullcontext, "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize(("length", "causal"), [(1, False), (5, False), (130, False), (300, True)])
def test_sdpa_gives_the_exact_result(device, served, road, dtype, d, length, causal):
    q, k, v = by_token(device, length, dtype=dtype, d=d)
    with ROADS[road]():
        check(attend(q, k, v, is_causal=causal), q, k, v, causal=causal)
    assert (served.served, served.handed_on) == (1, 0)


@pytest.mark.parametrize("road", ROADS)
def test_a_head_dim_that_torch_pads(device, served, road):
    """Flash attention gets 72 with a scale of 66**-0.5."""
    q, k, v = by_token(device, d=66)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if road == "flash" else contextlib.nullcontext():
        check(attend(q, k, v, is_causal=True), q, k, v, causal=True)


def test_heads_first_and_scale(device, served):
    q, k, v = (x.transpose(1, 2).contiguous() for x in by_token(device))
    out = scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    assert out.stride() == torch.empty_like(q).stride()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check(out.transpose(1, 2), q, k, v, softmax_scale=0.3)


def graded(q, k, v, attention):
    """The gradients of a loss that every element of the result counts in, in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view(out.shape)
    (out.double() * weights).sum().backward()
    return [x.grad for x in leaves]


def exact_attention(q, k, v, causal):
    """In fp64 by plain operators, as autograd follows them. Aligned at the last query and the last key."""
    group_size = q.shape[2] // k.shape[2]
    q, k, v = (x.double() for x in (q, k.repeat_interleave(group_size, 2), v.repeat_interleave(group_size, 2)))
    scores = torch.einsum("blhd,bshd->bhls", q, k) * q.shape[-1] ** -0.5
    if causal:
        cut = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        sees = cut.any(-1, keepdim=True)
        # a query without a key gives 0 and has no gradient; a row of -inf would make NaN of it
        weights = scores.masked_fill(~cut & sees, -torch.inf).softmax(-1).masked_fill(~sees, 0)
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bhls,bshd->blhd", weights, v)


def check_gradients(got, torchs, q, k, v, attention):
    """Against those of `attention` in fp64, within the budget that torch's gradients set."""
    exact = graded(q.double(), k.double(), v.double(), attention)
    for name, x, theirs, want in zip(("dq", "dk", "dv"), got, torchs, exact, strict=True):
        budget.assert_within_budget(x, want, theirs, name)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
@pytest.mark.parametrize(("length", "causal"), [(300, True), (130, False), (5, False)])
def test_torchs_backward_takes_our_forward(device, log, kv_heads, length, causal):
    q, k, v = by_token(device, length, kv_heads=kv_heads)

    def flash(*x):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend(*x, is_causal=causal)

    torchs = graded(q, k, v, flash)
    with register():
        got = graded(q, k, v, flash)
    assert (log.served, log.handed_on) == (1, 0)
    check_gradients(got, torchs, q, k, v, lambda *x: exact_attention(*x, causal))


def test_training_without_cudnn_is_served(device, log):
    q, k, v = by_token(device, kv_heads=HEADS)
    with register(keep_cudnn=False):
        got = graded(q, k, v, lambda *x: attend(*x, is_causal=True))
    assert (log.served, log.handed_on) == (1, 0)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torchs = graded(q, k, v, lambda *x: attend(*x, is_causal=True))
    check_gradients(got, torchs, q, k, v, lambda *x: exact_attention(*x, True))


@pytest.mark.parametrize("length", [5, 130, 299])
def test_causal_lower_right(device, log, length):
    q, k, v = by_token(device, length, kv_heads=HEADS)

    def aligned(*x):
        by_head = (y.transpose(1, 2) for y in x)
        return scaled_dot_product_attention(*by_head, attn_mask=causal_lower_right(length, 300)).transpose(1, 2)

    torchs = graded(q, k, v, aligned)
    with register():
        check(aligned(q, k, v), q, k, v, causal=True)
        got = graded(q, k, v, aligned)
    assert (log.served, log.handed_on) == (2, 0)
    check_gradients(got, torchs, q, k, v, lambda *x: exact_attention(*x, True))


# Packed requests and pages.


def packed(device, lens_q=LENS_Q, lens_k=LENS_K, dtype=BF16, kv_heads=KV_HEADS):
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((sum(lens_q), HEADS, D), *[(sum(lens_k), kv_heads, D)] * 2)
    return [torch.randn(shape, device=device, dtype=dtype, generator=generator) for shape in shapes]


def call_packed(q, k, v, window=(-1, 0), lens_q=LENS_Q, lens_k=LENS_K, **options):
    cuts = [offsets(lens).to(q.device) for lens in (lens_q, lens_k)]
    sizes = max(lens_q), max(lens_k)
    return varlen.varlen_attn(q, k, v, *cuts, *sizes, window_size=window, **aten.VARLEN_GQA, **options)


def exact_packed(q, k, v, causal=True, lens_q=LENS_Q, lens_k=LENS_K):
    parts = zip(q.split(lens_q), k.split(lens_k), v.split(lens_k))
    return torch.cat([exact_attention(*(x[None] for x in part), causal)[0] for part in parts])


def test_varlen_attn_gives_the_exact_result_and_log_sum_exps(device, served):
    q, k, v = packed(device)
    out, lse = call_packed(q, k, v, return_aux=varlen.AuxRequest(lse=True))
    torch.testing.assert_close(out.double(), exact_packed(q, k, v), rtol=0, atol=0.02)
    assert lse.shape == (HEADS, sum(LENS_Q))
    for request, (first, end) in enumerate(zip(offsets(LENS_Q), offsets(LENS_Q)[1:])):
        start, stop = offsets(LENS_K)[request : request + 2]
        _, want = reference.attend(q[None, first:end], k[None, start:stop], v[None, start:stop], causal=True)
        torch.testing.assert_close(lse[:, first:end], want[0].float(), rtol=0, atol=0.02)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (50, 0)])
def test_torchs_backward_takes_packed_requests(device, log, window):
    """Requests with more queries than keys too: a query without a key has a log-sum-exp of -inf."""
    q, k, v = packed(device)
    torchs = graded(q, k, v, lambda *x: call_packed(*x, window=window))
    with register():
        got = graded(q, k, v, lambda *x: call_packed(*x, window=window))
    assert (log.served, log.handed_on) == (1, 0)
    if window[0] < 0:
        check_gradients(got, torchs, q, k, v, lambda *x: exact_packed(*x, causal=window[1] == 0))
    for x, theirs in zip(got, torchs):
        torch.testing.assert_close(x, theirs, rtol=0.02, atol=0.02)


def paged(device, lens_q, lens_k, page_size):
    columns = -(-max(lens_k) // page_size)
    generator = torch.Generator(device).manual_seed(1)
    table = torch.randperm(len(lens_k) * columns, device=device, generator=generator).view(-1, columns).int()
    shapes = ((sum(lens_q), HEADS, D), *[(table.numel(), page_size, KV_HEADS, D)] * 2)
    return [torch.randn(shape, device=device, dtype=BF16, generator=generator) for shape in shapes], table


@needs_pages
@pytest.mark.parametrize("page_size", [256, 16])
@pytest.mark.parametrize("lens_q", [(70, 1, 130, 3), (1, 1, 1, 1)])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_varlen_attn_over_pages_gives_the_exact_result(device, served, page_size, lens_q, num_splits):
    """Pages of 16 tokens are ours alone: torch's kernel takes multiples of 256."""
    lens_k = (70, 300, 520, 9)
    (q, k, v), table = paged(device, lens_q, lens_k, page_size)
    lengths, cuts = torch.tensor(lens_k, device=device, dtype=torch.int32), offsets(lens_q).to(device)
    options = {"seqused_k": lengths, "block_table": table, "num_splits": num_splits, **aten.VARLEN_GQA}
    options |= {"window_size": (-1, 0), "return_aux": varlen.AuxRequest(lse=True)}
    out, lse = varlen.varlen_attn(q, k, v, cuts, None, max(lens_q), max(lens_k), **options)
    assert served.handed_on == 0
    for request, (first, end) in enumerate(zip(offsets(lens_q), offsets(lens_q)[1:])):
        keys, values = (x[table[request].long()].flatten(0, 1)[None, : lens_k[request]] for x in (k, v))
        want, want_lse = reference.attend(q[None, first:end], keys, values, causal=True, out_dtype=torch.float64)
        torch.testing.assert_close(out[first:end].double(), want[0], rtol=0, atol=0.02)
        torch.testing.assert_close(lse[:, first:end], want_lse[0].float(), rtol=0, atol=0.02)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out")
def test_varlen_attn_out_writes_where_it_is_told(device, served):
    q, k, v = packed(device)
    cuts, sizes = [offsets(lens).to(device) for lens in (LENS_Q, LENS_K)], (max(LENS_Q), max(LENS_K))
    out = torch.full_like(q, torch.nan)
    options = {"window_size": (-1, 0)} | aten.VARLEN_GQA
    with torch.no_grad():
        varlen.varlen_attn_out(out, q, k, v, *cuts, *sizes, **options)
    assert torch.equal(out, call_packed(q, k, v))


# Models, compilers, graphs.


def names_of_kernels(call) -> list[str]:
    """What ran on the GPU, as a profile names it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.fixture
def profiler(device):
    """Skips where a profile shows not even a kernel of torch's: the driver may keep its counters to the superuser."""
    x = torch.ones(64, device=device)
    if not names_of_kernels(lambda: x + x):
        pytest.skip("torch's profiler sees no kernels on this machine")


@pytest.fixture
def transformers():
    """Of any version: a model with torch's attention needs nothing of our adapter."""
    return pytest.importorskip("transformers")


def check_profile(call, count: int) -> None:
    """At least `count` kernels of ours run in a call, and no attention of torch's."""
    names = names_of_kernels(call)
    ours = [name for name in names if NAMES_OF_OURS.match(name)]
    assert len(ours) >= count, sorted(set(names))
    assert not [name for name in names if NAMES_OF_TORCHS.search(name)]


# `transformers` and `profiler` come before `served`, which asks at the end whether anything was served: a skip is not.


def test_a_model_of_transformers_gives_what_eager_attention_gives(device, transformers, served):
    """Nothing in it is changed: its attention is torch's."""
    model = aten.tiny_llama(transformers).to(device, BF16)
    tokens = torch.arange(2 * 90, device=device).view(2, 90) % 99 + 1
    with torch.no_grad():
        got = model(tokens).logits
        model.float().set_attn_implementation("eager")
        want = model(tokens).logits
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0.05)
    assert (served.served, served.handed_on) == (2, 0)


def test_a_profile_of_a_model_of_transformers_shows_our_kernels(device, transformers, profiler, served):
    """A prompt and three steps of decode, in two layers."""
    model = aten.tiny_llama(transformers).to(device, BF16)
    tokens = torch.arange(2 * 90, device=device).view(2, 90) % 99 + 1

    def run():
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **aten.FOUR_TOKENS)

    with torch.no_grad():
        run()  # compiles
        check_profile(run, 2 * 4)
    assert (served.served, served.handed_on) == (2 * 2 * 4, 0)


def test_a_profile_of_a_layer_shows_our_kernels_and_torchs_after_the_way_back(device, profiler, log):
    """A module as people write it, and the same check fails once torch serves it again."""
    torch.manual_seed(0)
    layer = aten.Layer().to(device, BF16)
    x = torch.randn(2, 90, 512, device=device, dtype=BF16)
    with torch.no_grad():
        want = layer(x)
        with register():
            got = layer(x)  # compiles
            check_profile(lambda: layer(x), 1)
        names = names_of_kernels(lambda: layer(x))
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    assert (log.served, log.handed_on) == (2, 0)
    assert not [name for name in names if NAMES_OF_OURS.match(name)]
    assert [name for name in names if NAMES_OF_TORCHS.search(name)], sorted(set(names))


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("length", [1, 300])
def test_a_captured_call_gives_the_same(device, served, road, length):
    q, k, v = by_token(device, length)
    with ROADS[road](), torch.no_grad():
        want = attend(q, k, v, is_causal=length == 300)
        got = gpu.captured(lambda: attend(q, k, v, is_causal=length == 300), device)
    assert torch.equal(got, want)
    assert (served.served, served.handed_on) == (2, 0)


@pytest.mark.parametrize("road", ROADS)
def test_a_compiled_function_is_one_graph_and_has_the_strides_that_it_expects(device, served, fresh_compiler, road):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in by_token(device))
    compiled = torch.compile(lambda *x: attend(*x, is_causal=True) * 2, backend=fresh_compiler, fullgraph=True)
    with ROADS[road](), torch.no_grad():
        got, want = compiled(q, k, v), attend(q, k, v, is_causal=True) * 2
    assert torch.equal(got, want)
    assert got.stride() == want.stride()
    assert served.handed_on == 0


def test_the_current_stream_is_the_one_that_it_runs_on(device, served):
    """The work waits where the stream waits: what is read is written on it before."""
    q, k, v = by_token(device)
    want, late = attend(q, k, v), torch.zeros_like(q)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(gpu.SLEEP_CYCLES // 20)
        late.copy_(q)
        got = attend(late, k, v)
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.multi_gpu
def test_tensors_on_another_gpu_than_the_current_one(device, served):
    q, k, v = by_token(device)
    there = [gpu.moved(x, 1) for x in (q, k, v)]
    assert torch.equal(attend(*there, is_causal=True).cpu(), attend(q, k, v, is_causal=True).cpu())
    assert served.handed_on == 0


def test_context_parallel_on_one_gpu(device, log, tmp_path):
    """A ring of one: torch's code splits, calls the operator and merges by log-sum-exps; more need more GPUs."""
    experimental = pytest.importorskip("torch.distributed.tensor.experimental")
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    q, k, v = (x.transpose(1, 2).contiguous() for x in by_token(device, 256, 256, kv_heads=HEADS))
    check_q = [x.transpose(1, 2).clone() for x in (q, k, v)]
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (1,))
        rings = experimental.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2])
        with register(keep_cudnn=False), rings, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            # by the module, where context parallel puts its own
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    finally:
        torch.distributed.destroy_process_group()
    assert (log.served, log.handed_on) == (1, 0)
    check(out.transpose(1, 2), *check_q, causal=True)


# What is handed on, and the way back.

ELSEWHERE = {
    "fp32": ({"dtype": torch.float32}, {}),
    "dropout": ({}, {"dropout_p": 0.3}),
    "mask": ({}, {"attn_mask": True}),
    "head dim 320": ({"d": 320}, {}),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_is_not_served_gives_the_same_bits_as_without_us(device, log, case):
    sizes, options = ELSEWHERE[case]
    q, k, v = by_token(device, **sizes)
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand(300, 300, device=device) > 0.3}

    def run():
        torch.manual_seed(3)
        return attend(q, k, v, **options)

    want = run()
    with register():
        assert torch.equal(run(), want)
    assert log.served == 0


def test_cudnns_training_stays_cudnns(device, log):
    """Its forward and its backward go together."""
    q, k, v = by_token(device, kv_heads=HEADS)

    def cudnn(*x):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(*x, is_causal=True)

    try:
        want = graded(q, k, v, cudnn)
    except RuntimeError as error:
        pytest.skip(f"no cuDNN attention here: {error}")
    with register():
        got = graded(q, k, v, cudnn)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)  # partial sums are added in any order
    assert (log.served, log.handed_on) == (0, 1)


def test_switched_off_torch_serves(device, log, monkeypatch):
    q, k, v = by_token(device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        want = attend(q, k, v)
        with register():
            attend(q, k, v)
            monkeypatch.setenv("CUTEFORGE_KERNELS", "0")
            assert torch.equal(attend(q, k, v), want)
    assert (log.served, log.handed_on) == (1, 1)


@pytest.mark.parametrize("road", ROADS)
def test_after_the_way_back_torch_serves_as_before(device, log, road):
    q, k, v = by_token(device)
    with ROADS[road]():
        want = attend(q, k, v, is_causal=True)
        with register():
            attend(q, k, v, is_causal=True)
        assert torch.equal(attend(q, k, v, is_causal=True), want)
    assert (log.served, log.handed_on) == (1, 0)

"""torch's own attention by our kernels, on CPU twins of the operators: what is served, and what is handed on."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, varlen
from torch.nn.functional import scaled_dot_product_attention

from cuteforge import attn_backend
from cuteforge.families.attention import reference
from cuteforge.integrations import torch_sdpa
from cuteforge.integrations.aten_attention import FlashCall
from cuteforge.integrations.torch_sdpa import CUDNN, FORWARD, FORWARD_INTO
from helpers import aten, budget
from helpers.aten import BF16, HEADS, KV_HEADS, LENGTHS, D, dense, packed, paged, split
from helpers.packs import offsets

needs_out = pytest.mark.skipif(not aten.HAS_OUT, reason="this torch's flash attention takes no output to write to")
HANDED_ON = object()


def dense_call(q, k, v, causal=False, **options):
    sizes = None, None, q.shape[1], k.shape[1]
    fixed = {"dropout_p": 0.0, "is_causal": causal, "return_debug_mask": False}
    return torch.ops.aten._flash_attention_forward(q, k, v, *sizes, **(fixed | options))


def check(got, q, k, v, **options):
    oracle, lse = reference.attend(q, k, v, **options, out_dtype=torch.float64)
    eager, _ = reference.attend(q, k, v, **options, compute_dtype=q.dtype)
    budget.assert_within_budget(got[0], oracle, eager, "out")
    torch.testing.assert_close(got[1], lse.float(), rtol=0, atol=2e-2)


@pytest.fixture
def log(monkeypatch):
    with aten.served(monkeypatch) as log:
        yield log


@pytest.fixture(autouse=True)
def torch_as_it_was():
    yield
    assert current_flash_attention_impl() is None
    assert torch.backends.cuda.cudnn_sdp_enabled()


# What is served.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 3, 16, 17, 20])
def test_dense_calls_are_served(log, length, causal):
    q, k, v = dense(length)
    check(dense_call(q, k, v, causal), q, k, v, causal=causal)
    assert log.ops == ["GQADecode" if length <= 16 else "GQAPrefill"]


@pytest.mark.parametrize("options", [{"scale": 0.5}, {"window_size_left": 3, "window_size_right": 2}], ids=str)
def test_scale_and_window_reach_the_kernel(log, options):
    q, k, v = dense()
    window = (3, 2) if len(options) == 2 else None
    check(dense_call(q, k, v, **options), q, k, v, softmax_scale=options.get("scale"), window=window)


@pytest.mark.parametrize("left", [-1, None])
def test_a_negative_side_of_a_window_is_no_limit(log, left):
    q, k, v = dense(17)
    check(dense_call(q, k, v, window_size_left=left, window_size_right=2), q, k, v, window=(None, 2))


LAYOUTS = {
    "tokens first": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a wider row": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "part of a projection": lambda x: torch.stack([x, x], 2)[:, :, 0],
}


@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_shapes_strides_and_types_that_torch_expects(log, layout, length):
    """torch.compile plans with what the meta kernel says."""
    q, k, v = (LAYOUTS[layout](x) for x in dense(length))
    got = dense_call(q, k, v, True)
    want = dense_call(
        *(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (q, k, v)), True
    )
    assert log.ops
    for x, y in zip(got, want, strict=True):
        sizes = [size for size in zip(x.shape, x.stride()) if size[0] != 1]
        assert sizes == [size for size in zip(y.shape, y.stride()) if size[0] != 1]
        assert x.dtype == y.dtype
    check(got, q, k, v, causal=True)


def padded(x):
    """Packed tokens as ``(B, L, H, D)``, and their lengths."""
    return reference.unpack(x, offsets(LENGTHS))


def test_packed_calls_are_served(log):
    (q, k, v), options = packed()
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, **options)
    (qs, lens), (ks, _), (vs, _) = map(padded, (q, k, v))
    want, want_lse = reference.attend(qs, ks, vs, lens_q=lens, lens_k=lens, causal=True)
    for b, (first, end) in enumerate(zip(offsets(LENGTHS), offsets(LENGTHS)[1:])):
        torch.testing.assert_close(out[first:end].float(), want[b, : end - first].float(), rtol=0, atol=2e-2)
        torch.testing.assert_close(lse[:, first:end], want_lse[b, :, : end - first].float(), rtol=0, atol=2e-2)
    assert log.ops == ["GQAPrefill"]


@needs_out
@pytest.mark.parametrize("is_paged", [False, True] if aten.HAS_PAGES else [False])
def test_the_output_is_written_where_the_caller_says(log, is_paged):
    (q, k, v), options = paged((1, 1, 1), (9, 1, 6)) if is_paged else packed()
    fixed = {name: options.pop(name) for name in FlashCall._fields[3:10]}
    want = torch.ops.aten._flash_attention_forward(q, k, v, *fixed.values(), **options)
    out = torch.full_like(q, torch.nan)
    lse = torch.ops.aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, *fixed.values(), **options)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert len(log.ops) == 2


@pytest.mark.parametrize("causal", [False, True])
def test_inference_by_cudnn_is_served(log, causal):
    q, k, v = dense()
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(*by_head, None, False, 0.0, causal, scale=0.3)
    assert log.ops == ["GQAPrefill"]
    assert out.stride() == torch.empty_like(by_head[0]).stride()
    assert lse is None
    assert rest[2:4] == [20, 20]
    oracle, _ = reference.attend(q, k, v, causal=causal, softmax_scale=0.3)
    torch.testing.assert_close(out.transpose(1, 2).double(), oracle.double(), rtol=0, atol=2e-2)


# As torch 2.11 declares it: without pages and splits.
WITHOUT_PAGES = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None) -> (Tensor output, "
    "Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
)


@pytest.fixture
def without_pages(monkeypatch):
    """An operator that takes what that of torch 2.11 takes, and the log of our ops."""
    served, log = aten.served_on_cpu(monkeypatch)

    def before(keys, query, *args, **options):
        return tuple(torch.full((1,), torch.nan) for _ in range(5))

    with torch.library._scoped_library("cuteforge_test", "FRAGMENT") as library:
        library.define(FORWARD + WITHOUT_PAGES)
        library.impl(FORWARD, torch_sdpa.kernels_of(served)[FORWARD](before), "CPU", with_keyset=True)
        yield torch.ops.cuteforge_test._flash_attention_forward, log


def test_an_operator_without_pages_serves_dense_calls_scales_and_windows(without_pages):
    attend, log = without_pages
    q, k, v = dense()
    window = {"window_size_left": 3, "window_size_right": 2}
    check(attend(*flash_args(q, k, v), scale=0.5, **window), q, k, v, softmax_scale=0.5, window=(3, 2))
    check(attend(*flash_args(q, k, v, causal=True)), q, k, v, causal=True)
    check(attend(*flash_args(q[:, :1], k, v)), q[:, :1], k, v)
    assert log.ops == ["GQAPrefill", "GQAPrefill", "GQADecode"]


def test_an_operator_without_pages_serves_packed_calls(without_pages):
    attend, log = without_pages
    (q, k, v), options = packed()
    out = attend(q, k, v, **options)[0]
    (qs, lens), (ks, _), (vs, _) = map(padded, (q, k, v))
    want, _ = reference.attend(qs, ks, vs, lens_q=lens, lens_k=lens, causal=True)
    torch.testing.assert_close(out.float(), reference.pack(want, offsets(LENGTHS)).float(), rtol=0, atol=2e-2)
    assert log.ops == ["GQAPrefill"]


def test_an_operator_without_pages_hands_on_what_is_not_served(without_pages):
    attend, log = without_pages
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    for args, options in (
        (flash_args(*dense(), dropout_p=0.1), {}),
        (flash_args(*dense()), {"seqused_k": lengths}),
        (flash_args(*dense()), {"alibi_slopes": torch.zeros(HEADS)}),
    ):
        assert attend(*args, **options)[0].isnan()
    assert not log.ops


# What is handed on.


def handed_on(monkeypatch, name, *args, **options):
    """Whether a kernel calls the one before it, with all that it was called with."""
    served, log = aten.served_on_cpu(monkeypatch)
    seen = []

    def before(*args, **options):
        seen.append((args, options))
        return HANDED_ON

    kernel = torch_sdpa.kernels_of(served)[name](before)
    result = kernel("keys", *args, **options)
    if result is not HANDED_ON:
        assert log.ops
        return False
    ((got, got_options),) = seen
    assert got[0] == "keys"
    assert all(x is y for x, y in zip(got[1:], args, strict=True))
    assert got_options == options
    return not log.ops


def flash_args(q, k, v, dropout_p=0.0, causal=False, debug=False):
    return q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, debug


NOT_SERVED = {
    "dropout": lambda: (flash_args(*dense(), dropout_p=0.1), {}),
    "debug mask": lambda: (flash_args(*dense(), debug=True), {}),
    "fp32": lambda: (flash_args(*dense(dtype=torch.float32)), {}),
    "head dim 20": lambda: (flash_args(*dense(d=20)), {}),
    "head dim 264": lambda: (flash_args(*dense(d=264)), {}),
    "no keys": lambda: (flash_args(*dense(num_keys=0)), {}),
    "no requests": lambda: (flash_args(*dense(batch=0)), {}),
    "head groups that do not divide": lambda: (flash_args(dense()[0][:, :, :3], *dense()[1:]), {}),
    "another dtype": lambda: (flash_args(dense()[0].half(), *dense()[1:]), {}),
    "columns first": lambda: (
        flash_args(dense()[0].transpose(-1, -2).contiguous().transpose(-1, -2), *dense()[1:]),
        {},
    ),
    "alibi": lambda: (flash_args(*dense()), {"alibi_slopes": torch.zeros(HEADS)}),
    "one split": lambda: (flash_args(*dense()), {"num_splits": 1}),
    "lengths of dense keys": lambda: (flash_args(*dense()), {"seqused_k": torch.tensor([3, 4], dtype=torch.int32)}),
    "an option of a later torch": lambda: (flash_args(*dense()), {"sinks": torch.zeros(HEADS)}),
    "lengths of packed keys": lambda: split(packed(seqused_k=torch.tensor(LENGTHS, dtype=torch.int32))),
    "no offsets of keys": lambda: split(packed(cum_seq_k=None)),
    "offsets in int64": lambda: split(packed(cum_seq_q=offsets(LENGTHS).long())),
    "pages without lengths": lambda: split(paged((2, 1), (5, 6), seqused_k=None)),
    "table in int64": lambda: split(paged((2, 1), (5, 6), block_table=torch.ones(2, 2, dtype=torch.int64))),
}


@pytest.mark.parametrize("case", NOT_SERVED)
def test_what_the_kernels_do_not_serve_goes_to_the_kernel_that_was_there(monkeypatch, case):
    args, options = NOT_SERVED[case]()
    assert handed_on(monkeypatch, FORWARD, *args, **options)


@needs_out
@pytest.mark.parametrize("case", ["dropout", "fp32", "offsets in int64"])
def test_so_it_does_where_the_output_is_given(monkeypatch, case):
    args, options = NOT_SERVED[case]()
    assert handed_on(monkeypatch, FORWARD_INTO, torch.empty_like(args[0]), *args, **options)


@needs_out
@pytest.mark.parametrize("case", ["shape", "dtype"])
def test_an_output_of_another_shape_or_dtype_is_left_to_torch(monkeypatch, case):
    args, out = flash_args(*dense()), dense()[0]
    assert handed_on(monkeypatch, FORWARD_INTO, out[:1] if case == "shape" else out.float(), *args)
    assert not handed_on(monkeypatch, FORWARD_INTO, out, *args)


@pytest.mark.parametrize("case", ["bias", "log-sum-exps", "dropout", "causal of another length", "fp32"])
def test_what_cudnn_does_beyond_inference_stays_with_it(monkeypatch, case):
    q, k, v = (x.transpose(1, 2) for x in dense(17, 20, dtype=torch.float32 if case == "fp32" else BF16))
    bias = torch.zeros(17, 20, dtype=BF16) if case == "bias" else None
    dropout, causal = 0.1 * (case == "dropout"), case == "causal of another length"
    assert handed_on(monkeypatch, CUDNN, q, k, v, bias, case == "log-sum-exps", dropout, causal)
    assert case != "bias" or not handed_on(monkeypatch, CUDNN, q, k, v, None, False)


def test_switched_off_nothing_is_served(monkeypatch):
    args = flash_args(*dense())
    assert not handed_on(monkeypatch, FORWARD, *args)
    monkeypatch.setenv("CUTEFORGE_KERNELS", "0")
    assert handed_on(monkeypatch, FORWARD, *args)


@pytest.mark.parametrize(("backend", "is_ours"), [("torch_native", False), ("cuda", True)])
def test_who_asks_for_another_backend_gets_torchs_kernel(monkeypatch, backend, is_ours):
    args = flash_args(*dense())
    with attn_backend(backend):
        assert handed_on(monkeypatch, FORWARD, *args) is not is_ours
    monkeypatch.setenv("CUTEFORGE_BACKEND", backend)
    assert handed_on(monkeypatch, FORWARD, *args) is not is_ours


def test_a_kernel_that_refuses_at_the_launch_hands_on(monkeypatch):
    served, log = aten.served_on_cpu(monkeypatch)
    log.is_off = True
    assert served.flash(FlashCall(*flash_args(*dense()))) is None


def test_without_a_kernel_of_torch_a_call_that_is_handed_on_says_so(log):
    """`_flash_attention_forward` has none on a CPU."""
    with pytest.raises(NotImplementedError, match="aten::_flash_attention_forward has no kernel of torch for CPU"):
        dense_call(*dense(), dropout_p=0.5)


# torch's functions.


def by_head(length=20, **options):
    return [x.transpose(1, 2) for x in dense(length, **options)]


def test_sdpa_is_served_and_gets_its_heads_as_they_are(log):
    q, k, v = by_head()
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert log.calls == [("GQAPrefill", (2, 20, HEADS, D), (2, 20, KV_HEADS, D))]
    check((out.transpose(1, 2), reference.attend(*dense(), causal=True)[1].float()), *dense(), causal=True)


def test_a_gradient_takes_our_log_sum_exps(log):
    leaves = [x.detach().requires_grad_() for x in by_head(dtype=BF16)]
    scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).float().square().sum().backward()
    assert log.ops == ["GQAPrefill"]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expanded = [exact[0], *(x.repeat_interleave(HEADS // KV_HEADS, 1) for x in exact[1:])]
    scores = expanded[0] @ expanded[1].transpose(-1, -2) * D**-0.5
    scores = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    (scores.softmax(-1) @ expanded[2]).square().sum().backward()
    for x, y in zip(leaves, exact):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("case", ["mask", "dropout", "fp32"])
def test_sdpa_that_is_not_served_gives_what_torch_gives(monkeypatch, case):
    q, k, v = by_head(dtype=torch.float32 if case == "fp32" else BF16)
    options = {"enable_gqa": True, "dropout_p": 0.5 * (case == "dropout")}
    options |= {"attn_mask": torch.rand(20, 20) > 0.3} if case == "mask" else {}

    def run():
        torch.manual_seed(0)
        return scaled_dot_product_attention(q, k, v, **options)

    want = run()
    with aten.served(monkeypatch) as log:
        assert torch.equal(run(), want)
    assert not log.ops


def test_when_the_library_is_gone_torch_serves_again(monkeypatch):
    q, k, v = by_head()
    want = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with aten.served(monkeypatch) as log:
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert len(log.ops) == 1
    assert torch.equal(scaled_dot_product_attention(q, k, v, enable_gqa=True), want)
    assert len(log.ops) == 1


def test_inference_mode_and_modes_that_look_on(log):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = by_head()
    with torch.inference_mode():
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with FlopCounterMode(display=False):
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert len(log.ops) == 2


def test_vmap_gives_what_torch_gives(monkeypatch):
    q, k, v = (torch.stack([x, -x]) for x in by_head())
    attend = torch.func.vmap(lambda *x: scaled_dot_product_attention(*x, enable_gqa=True))
    want = attend(q, k, v)
    with aten.served(monkeypatch):
        torch.testing.assert_close(attend(q, k, v), want, rtol=0, atol=2e-2)


def test_a_compiled_function_is_one_graph(log, fresh_compiler):
    q, k, v = by_head()
    attend = torch.compile(
        lambda *x: scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) * 2,
        backend=fresh_compiler,
        fullgraph=True,
    )
    out = attend(q, k, v)
    assert log.ops == ["GQAPrefill"]
    assert torch.equal(out, scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) * 2)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_varlen_attn_is_served(log, fresh_compiler, is_compiled):
    (q, k, v), options = packed()
    cuts = options["cum_seq_q"]
    attend = lambda *x: varlen.varlen_attn(*x, cuts, cuts, 7, 7, window_size=(3, 0), **aten.VARLEN_GQA)  # noqa: E731
    if is_compiled:
        attend = torch.compile(attend, backend=fresh_compiler, fullgraph=True)
    out = attend(q, k, v)
    assert log.ops == ["GQAPrefill"]
    (qs, lens), (ks, _), (vs, _) = map(padded, (q, k, v))
    want, _ = reference.attend(qs, ks, vs, lens_q=lens, lens_k=lens, window=(3, 0))
    torch.testing.assert_close(out.float(), reference.pack(want, cuts).float(), rtol=0, atol=2e-2)


def test_a_model_of_transformers_is_served_as_it_is(log):
    """Any transformers will do: its `sdpa` is torch's."""
    transformers = pytest.importorskip("transformers")
    model = aten.tiny_llama(transformers).to(BF16)
    tokens = torch.arange(2 * 20).view(2, 20) % 99 + 1
    with torch.no_grad():
        model.generate(tokens, attention_mask=torch.ones_like(tokens), **aten.FOUR_TOKENS)
    assert log.ops == ["GQAPrefill"] * 2 + ["GQADecode"] * 6

"""torch's own attention by our kernels, on CPU twins of the operators: what is served, what is handed on, and the way
back."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls, restore_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from cuteforge import ContractError, UnsupportedError, attn_backend
from cuteforge.families.attention import reference
from cuteforge.integrations import torch_sdpa, versions
from cuteforge.integrations.aten_attention import FlashCall
from cuteforge.integrations.torch_sdpa import CUDNN, FORWARD, FORWARD_INTO, register
from helpers import aten, budget
from helpers.packs import offsets

BF16 = torch.bfloat16
HEADS, KV_HEADS, D = 4, 2, 16
LENGTHS = (5, 1, 7)
HANDED_ON = object()


def draw(*shapes, dtype=BF16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def dense(length=20, num_keys=20, batch=2, dtype=BF16, d=D):
    """q, k, v with tokens before heads."""
    return draw((batch, length, HEADS, d), *[(batch, num_keys, KV_HEADS, d)] * 2, dtype=dtype)


def dense_call(q, k, v, causal=False, **options):
    sizes = None, None, q.shape[1], k.shape[1]
    fixed = {"dropout_p": 0.0, "is_causal": causal, "return_debug_mask": False}
    return torch.ops.aten._flash_attention_forward(q, k, v, *sizes, **(fixed | options))


def packed(**options):
    """q, k, v of requests one after another, and what else the operator takes."""
    total = sum(LENGTHS)
    q, k, v = draw((total, HEADS, D), *[(total, KV_HEADS, D)] * 2)
    cuts = offsets(LENGTHS)
    fixed = {"cum_seq_q": cuts, "cum_seq_k": cuts, "max_q": max(LENGTHS), "max_k": max(LENGTHS)}
    return (q, k, v), fixed | {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False} | options


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


def paged(lens_q, lens_k, page_size=4, **options):
    """A call over pages; the keys of each request are in pages of their own."""
    batch, columns = len(lens_q), -(-max(lens_k) // page_size)
    q, k, v = draw((sum(lens_q), HEADS, D), *[(batch * columns + 1, page_size, KV_HEADS, D)] * 2)
    table = torch.arange(1, batch * columns + 1, dtype=torch.int32).view(batch, columns)
    fixed = {"cum_seq_q": offsets(lens_q), "cum_seq_k": None, "max_q": max(lens_q), "max_k": max(lens_k)}
    fixed |= {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False, "block_table": table}
    return (q, k, v), fixed | {"seqused_k": torch.tensor(lens_k, dtype=torch.int32)} | options


@pytest.mark.parametrize(("lens_q", "op"), [((2, 1, 6), "PagedGQAPrefill"), ((1, 1, 1), "PagedGQADecode")])
@pytest.mark.parametrize("as_offsets", [False, True])
def test_pages_are_served(log, lens_q, op, as_offsets):
    """Lengths come as such, or as offsets of the keys."""
    lens_k = (9, 1, 6)
    (q, k, v), options = paged(lens_q, lens_k)
    if as_offsets:
        options |= {"seqused_k": None, "cum_seq_k": offsets(lens_k)}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, **options)
    assert log.ops == [op]
    assert lse.is_contiguous()
    assert out.shape == q.shape
    for b, (first, end) in enumerate(zip(offsets(lens_q), offsets(lens_q)[1:])):
        keys, values = (x[options["block_table"][b].long()].flatten(0, 1)[None, : lens_k[b]] for x in (k, v))
        want, want_lse = reference.attend(q[None, first:end], keys, values, causal=True)
        torch.testing.assert_close(out[first:end].float(), want[0].float(), rtol=0, atol=2e-2)
        torch.testing.assert_close(lse[:, first:end], want_lse[0].float(), rtol=0, atol=2e-2)


@pytest.mark.parametrize(("lens_q", "max_q"), [((1, 1, 1), 2), ((2, 0, 1), 2), ((1, 1, 0), 1)])
def test_only_one_query_token_for_each_request_is_a_decode(log, lens_q, max_q):
    (q, k, v), options = paged(lens_q, (9, 1, 6), max_q=max_q)
    torch.ops.aten._flash_attention_forward(q, k, v, **options)
    assert log.ops == ["PagedGQAPrefill"]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (3, 2), (-1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_window_of_a_step_of_decode(log, window, causal):
    (q, k, v), options = paged((1, 1, 1), (9, 1, 6), is_causal=causal)
    options |= {"window_size_left": window[0], "window_size_right": window[1]}
    out = torch.ops.aten._flash_attention_forward(q, k, v, **options)[0]
    assert log.ops == ["PagedGQADecode"]
    for b, count in enumerate((9, 1, 6)):
        keys, values = (x[options["block_table"][b].long()].flatten(0, 1)[None, :count] for x in (k, v))
        left = None if window[0] < 0 else window[0]
        want, _ = reference.attend(q[None, b : b + 1], keys, values, window=(left, None))
        torch.testing.assert_close(out[b].float(), want[0, 0].float(), rtol=0, atol=2e-2)


@pytest.mark.skipif(not hasattr(torch.ops.aten, FORWARD_INTO), reason="this torch has no such operator")
@pytest.mark.parametrize("is_paged", [False, True])
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


def split(call):
    """Arguments by position, and those by name."""
    tensors, options = call
    fixed = [options.pop(name) for name in FlashCall._fields[3:10]]
    return (*tensors, *fixed), options


@pytest.mark.parametrize("case", NOT_SERVED)
def test_what_the_kernels_do_not_serve_goes_to_the_kernel_that_was_there(monkeypatch, case):
    args, options = NOT_SERVED[case]()
    assert handed_on(monkeypatch, FORWARD, *args, **options)


@pytest.mark.parametrize("case", ["dropout", "fp32", "offsets in int64"])
def test_so_it_does_where_the_output_is_given(monkeypatch, case):
    args, options = NOT_SERVED[case]()
    assert handed_on(monkeypatch, FORWARD_INTO, torch.empty_like(args[0]), *args, **options)


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


def test_arguments_that_contradict_each_other_are_refused_by_name(log):
    """As by torch's kernel, which raises too."""
    (q, k, v), options = paged((2, 1), (5, 6))
    with pytest.raises(ContractError, match="page_table"):
        torch.ops.aten._flash_attention_forward(q, k, v, **options | {"block_table": options["block_table"][:1]})


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


def test_one_in_the_other_the_inner_one_serves_and_hands_on_to_the_outer_one(monkeypatch):
    q, k, v = by_head()
    with aten.served(monkeypatch) as outer, aten.served(monkeypatch) as inner:
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert (len(outer.ops), len(inner.ops)) == (0, 1)
        inner.is_off = True
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert (len(outer.ops), len(inner.ops)) == (1, 1)


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


varlen = pytest.importorskip("torch.nn.attention.varlen")
VARLEN_OPTIONS = getattr(varlen.varlen_attn, "__kwdefaults__", None) or {}
needs_pages = pytest.mark.skipif("block_table" not in VARLEN_OPTIONS, reason="this torch's varlen_attn has no pages")


@needs_pages
@pytest.mark.parametrize("is_compiled", [False, True])
def test_varlen_attn_is_served(log, fresh_compiler, is_compiled):
    (q, k, v), options = packed()
    cuts = options["cum_seq_q"]
    attend = lambda *x: varlen.varlen_attn(*x, cuts, cuts, 7, 7, window_size=(3, 0), enable_gqa=True)  # noqa: E731
    if is_compiled:
        attend = torch.compile(attend, backend=fresh_compiler, fullgraph=True)
    out = attend(q, k, v)
    assert log.ops == ["GQAPrefill"]
    (qs, lens), (ks, _), (vs, _) = map(padded, (q, k, v))
    want, _ = reference.attend(qs, ks, vs, lens_q=lens, lens_k=lens, window=(3, 0))
    torch.testing.assert_close(out.float(), reference.pack(want, cuts).float(), rtol=0, atol=2e-2)


@needs_pages
@pytest.mark.parametrize("num_splits", [None, 4])
def test_varlen_attn_over_pages_is_served(log, num_splits):
    (q, k, v), options = paged((1, 1, 1), (9, 1, 6))
    shared = {name: options[name] for name in ("seqused_k", "block_table")} | {"enable_gqa": True}
    out = varlen.varlen_attn(q, k, v, options["cum_seq_q"], None, 1, 9, num_splits=num_splits, **shared)
    assert log.ops == ["PagedGQADecode"]
    assert torch.equal(out, torch.ops.aten._flash_attention_forward(q, k, v, **options)[0])


# `register`, and the way back.


def overridden(name=FORWARD):
    """The kernel of torch's operator on CUDA tensors, by the file that registered it; empty without one."""
    table = torch._C._dispatch_dump_table(f"aten::{name}").splitlines()
    return any(line.startswith("CUDA: registered at") and "torch_sdpa.py" in line for line in table)


def test_register_serves_and_the_handle_goes_back():
    handle = register()
    assert handle.is_active
    assert current_flash_attention_impl() == "cuteforge"
    assert all(overridden(name) for name in torch_sdpa.kernels_of(None))
    handle.remove()
    assert not handle.is_active
    assert not any(overridden(name) for name in torch_sdpa.kernels_of(None))
    handle.remove()


def test_registering_twice_is_free_and_the_second_handle_takes_nothing_back():
    with register() as first:
        with register():
            assert first.is_active
        assert first.is_active
        assert overridden()
    assert not overridden()


def test_of_two_names_the_last_one_serves_and_gives_back_to_the_first():
    with register("one") as one, register("two") as two:
        assert two.is_active
        assert not one.is_active
        two.remove()
        assert one.is_active
        assert overridden()
    assert {"one", "two"} <= set(list_flash_attention_impls())


def test_a_handle_that_something_else_has_replaced_does_nothing():
    one = register("one")
    with register("two") as two:
        one.remove()
        assert two.is_active
    one.remove()


def test_torchs_own_way_back_works_too():
    handle = register()
    restore_flash_attention_impl()
    assert not handle.is_active
    assert not overridden()
    handle.remove()


def test_an_error_in_the_block_goes_back():
    with pytest.raises(ZeroDivisionError), register():
        _ = 1 / 0
    assert not overridden()


def test_cudnn_stays_on_unless_it_is_asked_for():
    with register():
        assert torch.backends.cuda.cudnn_sdp_enabled()
    with register(keep_cudnn=False):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with register("other"):
            assert torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_that_was_off_stays_off():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with register(keep_cudnn=False):
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("name", ["FA4", "", None, 3])
def test_a_name_that_is_torchs_or_none_is_refused(name):
    with pytest.raises(ContractError, match=r"^name: wanted"):
        register(name)


def test_an_active_name_keeps_what_it_was_registered_with():
    with register(), pytest.raises(ContractError, match="keep_cudnn: wanted True, with which 'cuteforge' is active"):
        register(keep_cudnn=False)


def test_registering_warns_of_nothing(recwarn):
    with register():
        pass
    assert not recwarn.list


def test_an_operator_that_takes_other_arguments_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"torch: wanted aten::_flash_attention_forward\(query, mask\), got"):
        versions.require_torch_operator(FORWARD, ("query", "mask"))
    with pytest.raises(UnsupportedError, match="torch: wanted one with aten::_no_such_operator, got"):
        versions.require_torch_operator("_no_such_operator", ())


def test_a_torch_without_the_registry_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    with pytest.raises(
        UnsupportedError, match=r"torch: wanted one with torch.nn.attention.activate_flash_attention_impl"
    ):
        versions.require_torch_registry()

"""Refusals: the argument is named, nothing is launched, and the next call works; by the constructor or check_support,
execute and bind."""

import pytest
import torch

from cuteforge import ContractError, TensorSpec, UnsupportedError
from helpers import attention as attn
from helpers import budget
from helpers.canary import strided_copy

POSITIONAL = ("q", "k", "v", "out")
# How a call is made, and its optional operands.
HOWS = ("decode", "prefill", "packed")


def kind_of(how):
    return "prefill" if how == "packed" else how


def inputs(how, device, masked=False):
    if how == "packed":
        return attn.draw_ragged(attn.MAIN, [5, 0, 40], [7, 3, 90], device=device)
    x = attn.draw(attn.MAIN, 3, 4, 100, device=device)
    return x.with_(mask=torch.rand(3, 1, 4, 100, device=device) < 0.5) if masked else x


class Call:
    """A compiled op with its operands by name, guarded outputs, and the same operands as samples of a new op."""

    def __init__(self, how, device, masked=False, num_splits=None):
        self.kind = kind_of(how)
        self.prepared = attn.prepare(self.kind, inputs(how, device, masked), num_splits=num_splits)
        x = self.prepared.x
        named = self.prepared.named
        self.workspace = named.pop("workspace")
        self.operands = {"q": x.q, "k": x.k, "v": x.v, "out": self.prepared.out.tensor, **named}

    def split(self, replaced):
        given = {**self.operands, **replaced}
        return [given.pop(name) for name in POSITIONAL], given

    def check_support(self, **replaced):
        positional, named = self.split(replaced)
        attn.CLASSES[self.kind](*positional, **named, **self.prepared.x.options).check_support()

    def execute(self, **replaced):
        positional, named = self.split(replaced)
        self.prepared.op.execute(*positional, **named, workspace=self.workspace)
        torch.cuda.synchronize()

    def bind(self, **replaced):
        positional, named = self.split(replaced)
        return self.prepared.op.bind(*positional, **named, workspace=self.workspace)

    def refuses(self, name, error=ContractError, of_samples=True, **replaced):
        """All three raise with `name` first in the text, nothing is written, then the op still works."""
        for attempt in (self.check_support, self.execute, self.bind)[0 if of_samples else 1 :]:
            with pytest.raises(error, match=rf"^{name}\b"):
                attempt(**replaced)
        torch.cuda.synchronize()
        self.prepared.check_untouched()
        self.execute()
        self.prepared.check_memory()


def misaligned(tensor):
    return strided_copy(tensor, tensor.stride(), offset=1)


def columns_strided(tensor):
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def heads_misaligned(tensor):
    *outer, heads, width = tensor.shape
    stride = [1, width + 1, heads * (width + 1)]
    stride += [stride[-1] * tensor.shape[1]] if len(outer) == 2 else []
    return strided_copy(tensor, stride[::-1])


# (case, argument named, what replaces it given the good tensor); for every way to call.
BAD_OPERANDS = (
    ("fp32", "q", lambda t: t.float()),
    ("integers", "q", lambda t: t.int()),
    ("two_dims", "q", lambda t: t[..., 0, 0]),
    ("columns_strided", "q", columns_strided),
    ("base_misaligned", "q", misaligned),
    ("heads_misaligned", "q", heads_misaligned),
    ("on_cpu", "q", lambda t: t.cpu()),
    ("none", "q", lambda t: None),
    ("a_list", "q", lambda t: [1, 2]),
    ("other_dtype", "k", lambda t: t.half()),
    ("narrower", "k", lambda t: t[..., :-8]),
    ("one_dim_more", "k", lambda t: t[None]),
    ("columns_strided", "k", columns_strided),
    ("base_misaligned", "k", misaligned),
    ("heads_misaligned", "k", heads_misaligned),
    ("on_cpu", "k", lambda t: t.cpu()),
    ("none", "k", lambda t: None),
    ("other_dtype", "v", lambda t: t.float()),
    ("fewer_tokens", "v", lambda t: t[..., :-1, :, :]),
    ("fewer_heads", "v", lambda t: t[..., :-1, :]),
    ("columns_strided", "v", columns_strided),
    ("base_misaligned", "v", misaligned),
    ("heads_misaligned", "v", heads_misaligned),
    ("on_cpu", "v", lambda t: t.cpu()),
    ("other_dtype", "out", lambda t: torch.empty_like(t, dtype=torch.float16)),
    ("fewer_tokens", "out", lambda t: t[..., :-1, :, :]),
    ("fewer_heads", "out", lambda t: t[..., :-1, :]),
    ("narrower", "out", lambda t: t[..., :-8]),
    ("overlaps_itself", "out", lambda t: t[..., :1, :, :].expand(t.shape)),
    ("columns_strided", "out", columns_strided),
    ("base_misaligned", "out", misaligned),
    ("on_cpu", "out", lambda t: torch.empty_like(t, device="cpu")),
    ("none", "out", lambda t: None),
    ("bf16", "lse", lambda t: t.bfloat16()),
    ("fewer_heads", "lse", lambda t: t[..., :-1, :]),
    ("transposed", "lse", lambda t: t.transpose(-1, -2).contiguous()),
    ("on_cpu", "lse", lambda t: t.cpu()),
)  # fmt: skip
# By way to call; these operands are optional.
BAD_OPTIONAL = (
    *(
        (how, case, "seqlens_k", change)
        for how in ("decode", "prefill")
        for case, change in (
            ("int64", lambda t: t.long()),
            ("floats", lambda t: t.float()),
            ("one_more", lambda t: torch.cat((t, t[:1]))),
            ("two_dims", lambda t: t[None]),
            ("strided", lambda t: t.repeat_interleave(2)[::2]),
            ("on_cpu", lambda t: t.cpu()),
            ("a_list", lambda t: t.tolist()),
        )
    ),
    *(
        ("packed", case, name, change)
        for name in ("cu_seqlens_q", "cu_seqlens_k")
        for case, change in (
            ("int64", lambda t: t.long()),
            ("floats", lambda t: t.float()),
            ("two_dims", lambda t: t[None]),
            ("strided", lambda t: t.repeat_interleave(2)[::2]),
            ("on_cpu", lambda t: t.cpu()),
        )
    ),
    ("packed", "one_less", "cu_seqlens_k", lambda t: t[:-1]),
)
BAD_MASKS = (
    ("floats", lambda t: t.float()),
    ("uint8", lambda t: t.to(torch.uint8)),
    ("additive", lambda t: torch.zeros(t.shape, dtype=torch.bfloat16, device=t.device)),
    ("other_heads", lambda t: t.expand(-1, 3, -1, -1)),
    ("other_queries", lambda t: t[:, :, :2]),
    ("other_batch", lambda t: t[:2]),
    ("fewer_keys", lambda t: t[..., :-1].contiguous()),
    ("five_dims", lambda t: t[None]),
    ("one_dim", lambda t: t[0, 0, 0]),
    ("columns_strided", columns_strided),
    ("on_cpu", lambda t: t.cpu()),
)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("case", "name", "replace"), BAD_OPERANDS, ids=[f"{n}-{c}" for c, n, _ in BAD_OPERANDS])
def test_bad_operand_is_refused_by_name(how, case, name, replace, device):
    """A base can only be seen to be misaligned when the memory is there."""
    call = Call(how, device)
    changed = {name: replace(call.operands[name])}
    call.refuses(name, of_samples=case != "base_misaligned", **changed)


@pytest.mark.parametrize(
    ("how", "case", "name", "replace"), BAD_OPTIONAL, ids=[f"{h}-{n}-{c}" for h, c, n, _ in BAD_OPTIONAL]
)
def test_bad_lengths_are_refused_by_name(how, case, name, replace, device):
    call = Call(how, device)
    either = "(cu_seqlens_q|cu_seqlens_k)" if case == "one_less" else name
    call.refuses(either, **{name: replace(call.operands[name])})


@pytest.mark.parametrize("how", ["decode", "prefill"])
@pytest.mark.parametrize(("case", "replace"), BAD_MASKS, ids=[c for c, _ in BAD_MASKS])
def test_bad_mask_is_refused_by_name(how, case, replace, device):
    call = Call(how, device, masked=True)
    call.refuses("mask", mask=replace(call.operands["mask"]))


@pytest.mark.parametrize("how", HOWS)
def test_a_call_without_an_operand_of_the_sample_or_with_another_is_refused(how, device):
    """An op compiled with lengths, mask or lse does not take a call for one without; the text has the operand."""
    call = Call(how, device, masked=how != "packed")
    lacking = [name for name in call.operands if name not in POSITIONAL]
    extra = {"packed": {"seqlens_k": torch.ones(3, dtype=torch.int32, device=device)}}.get(how, {})
    bare = attn.prepare(call.kind, inputs("prefill", device).with_(seqlens_k=None, causal=False), lse=False)
    for attempt in (call.execute, call.bind):
        for name in lacking:
            with pytest.raises(ContractError, match=rf"\b{name}\b"):
                attempt(**{name: None})
        for name, tensor in extra.items():
            with pytest.raises(ContractError, match=rf"\b{name}\b"):
                attempt(**{name: tensor})
    lengths = torch.ones(3, dtype=torch.int32, device=device)
    positional, named = bare.arguments
    for name, tensor in (("seqlens_k", lengths), ("lse", torch.empty(bare.x.lse_shape, device=device))):
        for attempt in (bare.op.execute, bare.op.bind):
            with pytest.raises(ContractError, match=rf"\b{name}\b"):
                attempt(*positional, **{**named, name: tensor})
    torch.cuda.synchronize()
    call.prepared.check_untouched(), bare.check_untouched()


def test_packed_needs_both_offsets(device):
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        Call("packed", device).refuses("cu_seqlens_[qk]", **{name: None})


def test_offsets_go_with_packed_operands_only(device):
    call, packed = Call("prefill", device), Call("packed", device)
    offsets = {name: packed.operands[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    for attempt in (call.check_support, call.execute):
        with pytest.raises(ContractError, match="wanted .*got"):
            attempt(**offsets, seqlens_k=None)
    lengths = torch.ones(3, dtype=torch.int32, device=device)
    for attempt in (packed.check_support, packed.execute):
        with pytest.raises(ContractError, match="wanted .*got"):
            attempt(cu_seqlens_q=None, cu_seqlens_k=None, seqlens_k=lengths)


@pytest.mark.parametrize("how", HOWS)
def test_another_head_dim_or_dtype_than_compiled_is_refused(how, device):
    for change in (lambda t: t[..., :64].contiguous(), lambda t: t.half()):
        call = Call(how, device)
        changed = {name: change(call.operands[name]) for name in POSITIONAL}
        call.refuses("[qkv]", of_samples=False, **changed)


def samples(kind, d=128, dv=None, heads=8, kv_heads=2, dtype="bfloat16", **named):
    shapes = ((2, 4, heads, d), (2, 9, kv_heads, d), (2, 9, kv_heads, dv or d), (2, 4, heads, dv or d))
    return attn.CLASSES[kind](*(TensorSpec(shape, dtype) for shape in shapes), **named)


kinds = pytest.mark.parametrize("kind", **attn.both_ops)


@kinds
@pytest.mark.parametrize("heads", [(7, 2), (1, 2), (8, 3), (0, 2), (2, 0)])
def test_heads_have_to_be_a_multiple_of_kv_heads(heads, kind):
    with pytest.raises(ContractError, match=r"^[qkv]\b.*(multiple|head)"):
        samples(kind, heads=heads[0], kv_heads=heads[1]).check_support()


@kinds
@pytest.mark.parametrize(
    ("d", "dv"), [(7, None), (4, None), (100, None), (264, None), (512, None), (128, 64), (192, 96)]
)
def test_head_dims_that_are_not_served_are_refused_by_name(d, dv, kind):
    limit = ".*256" if d > 256 else ""
    with pytest.raises((ContractError, UnsupportedError), match=rf"^[qkv]\b{limit}"):
        samples(kind, d, dv).check_support()


@kinds
def test_what_is_served_is_accepted_from_metadata_alone(kind):
    """Every multiple of 8 up to 256, and (192, 128); any group; nothing is launched or compiled."""
    for d in range(8, 257, 8):
        assert samples(kind, d).check_support() is True
    assert samples(kind, 192, 128).check_support() is True
    for group in (1, 2, 3, 5, 6, 7, 11, 16, 33, 64, 128):
        assert samples(kind, heads=2 * group, dtype="float16").check_support() is True


@kinds
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), "1", torch.ones(1)])
def test_scale_is_a_finite_number(scale, kind, device):
    with pytest.raises(ContractError, match=r"^softmax_scale\b"):
        samples(kind, softmax_scale=scale).check_support()
    call = Call(kind, device)
    with pytest.raises(ContractError, match=r"^softmax_scale\b"):
        attn.wrapped(kind, call.prepared.x, softmax_scale=scale)
    positional, named = call.prepared.arguments
    with pytest.raises(ContractError, match=r"^softmax_scale\b"):
        call.prepared.op.execute(*positional, **named, softmax_scale=scale)
    call.prepared.check_untouched()


@pytest.mark.parametrize("num_splits", [0, -1, 1.5, "2"])
def test_num_splits_is_a_positive_integer(num_splits, device):
    with pytest.raises(ContractError, match=r"^num_splits\b"):
        samples("decode", num_splits=num_splits).check_support()
    with pytest.raises(ContractError, match=r"^num_splits\b"):
        attn.wrapped("decode", inputs("decode", device), num_splits=num_splits)


def long_call(device):
    call = attn.prepare("decode", attn.draw(attn.MAIN, 1, 1, 4096, device=device), num_splits=7)
    assert call.workspace is not None, "7 splits of 4096 keys leave partial results somewhere"
    return call


def test_bad_workspace_is_refused_by_name(device):
    call = long_call(device)
    good = call.workspace.tensor
    cases = (None, good[:-1], good.view(torch.int8), good.cpu(), misaligned(good), good.tolist()[:4])
    for bad in cases:
        positional, named = call.arguments
        for attempt in (call.op.execute, call.op.bind):
            with pytest.raises(ContractError, match=r"^workspace\b"):
                attempt(*positional, **{**named, "workspace": bad})
    torch.cuda.synchronize()
    call.check_untouched()
    call.workspace.check_untouched("workspace")
    call.execute()
    torch.cuda.synchronize()
    attn.check(call.results(), call.x)


def test_workspace_may_be_larger_than_asked(device):
    call = long_call(device)
    large = torch.empty(2 * call.workspace.tensor.numel() + 7, dtype=torch.uint8, device=device)
    positional, named = call.arguments
    call.op.execute(*positional, **{**named, "workspace": large})
    torch.cuda.synchronize()
    attn.check(call.results(), call.x)


def test_one_split_and_prefill_need_no_workspace(device):
    assert attn.prepare("decode", inputs("decode", device), num_splits=1).op.workspace_bytes() == 0
    assert attn.prepare("prefill", inputs("prefill", device)).op.workspace_bytes() == 0


@pytest.mark.parametrize("how", HOWS)
def test_outputs_share_memory_with_nothing(how, device):
    call = Call(how, device)
    q = call.operands["q"]
    with pytest.raises(ContractError, match=r"^(out|q)\b"):
        call.bind(out=q)
    lse = call.operands["out"].view(torch.float32).flatten()[: call.operands["lse"].numel()]
    with pytest.raises(ContractError, match=r"^(out|lse)\b"):
        call.bind(lse=lse.view(call.operands["lse"].shape))
    torch.cuda.synchronize()
    call.prepared.check_untouched()


@pytest.mark.parametrize("how", HOWS)
def test_checked_launch_names_the_same_argument(how, device, monkeypatch):
    call = Call(how, device)
    monkeypatch.setenv("CUTEFORGE_FAST_LAUNCH", "0")
    call.refuses("v", v=call.operands["v"][..., :-1, :, :])
    with pytest.raises(ContractError, match=r"^(out|q)\b"):
        call.execute(out=call.operands["q"])


@pytest.mark.parametrize(("bad", "index"), [([0, 5, 3, 45], 2), ([0, -5, 5, 45], 1), ([0, 5, 5, 1000], 3)])
def test_checked_mode_names_the_first_bad_offset(bad, index, device, monkeypatch):
    """Offsets start at 0, do not fall, and end inside the tokens."""
    call = Call("packed", device)
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    call.execute()
    table = torch.tensor(bad, dtype=torch.int32, device=device)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        for attempt in (call.execute, call.bind):
            with pytest.raises(ContractError, match=rf"^{name}\b.*\b{index}\b"):
                attempt(**{name: table})


@pytest.mark.parametrize("kind", **attn.both_ops)
def test_checked_mode_names_the_first_length_past_the_memory(kind, device, monkeypatch):
    call = Call(kind, device)
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    with pytest.raises(ContractError, match=r"^seqlens_k\b.*101.*\b1\b"):
        call.execute(seqlens_k=torch.tensor([100, 101, 102], dtype=torch.int32, device=device))


LAYOUTS = {"base_misaligned": misaligned, "heads_misaligned": heads_misaligned, "columns_strided": columns_strided}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrappers_copy_inputs_that_the_kernel_cannot_read(layout, how, device):
    x, change = inputs(how, device), LAYOUTS[layout]
    want = attn.run(kind_of(how), x)
    for names in (("q",), ("k",), ("v",), ("q", "k", "v")):
        got = attn.wrapped(kind_of(how), x.with_(**{name: change(getattr(x, name)) for name in names}))
        assert attn.same(attn.Results(*got), want), names


@pytest.mark.parametrize("how", HOWS)
def test_wrappers_convert_int64_indices(how, device):
    x = inputs(how, device)
    want = attn.run(kind_of(how), x)
    tables = {name: t.long() for name, t in x.optional.items()}
    assert attn.same(attn.Results(*attn.wrapped(kind_of(how), x.with_(**tables))), want)
    strided = {name: t.repeat_interleave(2)[::2] for name, t in tables.items()}
    assert attn.same(attn.Results(*attn.wrapped(kind_of(how), x.with_(**strided))), want)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_wrappers_refuse_lengths_of_other_types_by_name(dtype, how, device):
    x = inputs(how, device)
    for name, table in x.optional.items():
        with pytest.raises(ContractError, match=rf"^{name}\b"):
            attn.wrapped(kind_of(how), x.with_(**{name: table.to(dtype)}))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("case", "replace"),
    [
        ("other_dtype", lambda t: t.half()),
        ("fewer_tokens", lambda t: t[..., :-1, :, :]),
        ("narrower", lambda t: t[..., :-8]),
        ("misaligned", misaligned),
    ],
)
def test_wrapper_refuses_an_out_that_it_cannot_write(case, replace, how, device):
    """A copy would take the result away from the caller's memory: right or refused by name."""
    x = inputs(how, device)
    want = attn.run(kind_of(how), x)
    out = replace(torch.zeros_like(want.out))
    try:
        attn.wrapped(kind_of(how), x, out=out)
    except ContractError as refusal:
        assert str(refusal).startswith("out") and not out.any()
    else:
        assert case == "misaligned" and budget.same_bits(out, want.out)

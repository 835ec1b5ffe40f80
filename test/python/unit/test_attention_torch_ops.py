"""The torch ops of attention and merge_state on the CPU, where they compute the eager reference: values, writes,
tracing, refusals.

Wrappers serve CUDA tensors only. Where a test follows a wrapper into its op, the CPU stands in for the GPU.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from cuteforge import (
    ContractError,
    TupleDict,
    UnsupportedError,
    attn_decode,
    attn_paged_decode,
    attn_paged_prefill,
    attn_prefill,
    merge_state,
)
from cuteforge.families.attention import reference, torch_ops
from cuteforge.op import torch_library
from cuteforge.op.road import Road
from helpers import attention as attn
from helpers import budget, paged
from helpers.stub_gpu import stub_wrappers
from helpers.torch_ops import TRANSFORMS, OpLog, assert_same_bits

OPS = torch.ops.cuteforge
MERGE = OPS.merge_state.default
SMALL = attn.Config(16, 16, attn.BF16, 2, "small enough to compile for")
LATENT = attn.Config(192, 128, attn.FP16, 3, "values narrower than keys")
CONFIG = {"softmax_scale": None, "causal": False, "num_splits": None}
OPTIONS = {"window": (3, 1), "softcap": 2.0, "sinks": torch.linspace(-1, 2, 4)}


class Case(NamedTuple):
    """A call of one op: what it takes, in the order of its schema, and the same call of its wrapper."""

    op: Any
    arguments: dict[str, Any]
    wrapped: Callable[..., TupleDict]
    check: Callable[[tuple], None]

    def with_(self, **replaced) -> tuple:
        """Arguments of the op."""
        assert replaced.keys() <= self.arguments.keys()
        return tuple({**self.arguments, **replaced}.values())


def arguments_of(op, given: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    given = dict(given)
    given["window_left"], given["window_right"] = given.pop("window", None) or (None, None)
    assert given.keys() <= {*names, "num_splits"}
    return {name: given.get(name, CONFIG.get(name)) for name in names}


def dense_case(kind: str, x: attn.Inputs) -> Case:
    op = {"decode": OPS.gqa_decode, "prefill": OPS.gqa_prefill}[kind].default
    arguments = arguments_of(op, {"q": x.q, "k": x.k, "v": x.v, **x.optional, **x.options})
    return Case(
        op, arguments, lambda **more: attn.wrapped(kind, x, **more), lambda got: attn.check(attn.Results(*got), x)
    )


def paged_case(x: paged.Inputs) -> Case:
    op = OPS.paged_gqa_decode if x.new_k is None else OPS.paged_gqa_decode_append
    op = (op if x.is_decode else OPS.paged_gqa_prefill).default
    names = ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q")
    given = {**dict(zip(names, x.positional)), **x.optional, **x.options}
    expected = x.with_(k_cache=x.k_cache.clone(), v_cache=x.v_cache.clone())  # an op that appends writes those of x

    def check(got) -> None:
        paged.check(dict(zip(("out", "lse"), got)), expected)

    return Case(op, arguments_of(op, given), lambda **more: paged.call_wrapper(x, **more), check)


def packed(**options) -> attn.Inputs:
    return attn.draw_ragged(SMALL, (3, 0, 9), (5, 4, 21), device="cpu", **options)


def masked(x: attn.Inputs) -> attn.Inputs:
    generator = torch.Generator().manual_seed(7)
    return x.with_(mask=torch.rand(x.q.shape[0], x.q.shape[1], x.k.shape[1], generator=generator) < 0.5)


CASES: dict[str, Callable[[], Case]] = {
    "decode": lambda: dense_case("decode", attn.draw(SMALL, 3, 2, 40, device="cpu")),
    "decode_latent": lambda: dense_case("decode", attn.draw(LATENT, 2, 1, 33, device="cpu", softmax_scale=-0.5)),
    "decode_masked": lambda: dense_case("decode", masked(attn.draw(SMALL, 3, 4, 40, device="cpu"))),
    "prefill": lambda: dense_case("prefill", attn.draw(SMALL, 2, 20, 33, device="cpu", flags=attn.FLAGS[2])),
    "packed": lambda: dense_case("prefill", packed()),
    "packed_full": lambda: dense_case("prefill", packed(causal=False)),
    "decode_options": lambda: dense_case("decode", attn.draw(SMALL, 3, 2, 40, device="cpu", **OPTIONS)),
    "packed_options": lambda: dense_case("prefill", packed(**OPTIONS, mask=torch.ones(3, 21, dtype=torch.bool))),
    "paged_options": lambda: paged_case(
        paged.small("prefill", "cpu").with_(**{**OPTIONS, "sinks": torch.linspace(-1, 2, 8)})
    ),
    **{f"paged_{kind}": lambda kind=kind: paged_case(paged.small(kind, "cpu")) for kind in paged.KINDS},
    "paged_one_token": lambda: paged_case(paged.draw(paged.MAIN, paged.edges(16), "cpu")),
    "paged_tokens": lambda: paged_case(paged.draw(paged.CAUSAL, paged.Batch((5, 9), 1, 3, place="flat"), "cpu")),
}
FUNCTIONAL = [name for name in CASES if name != "paged_append"]
each_case = pytest.mark.parametrize("name", CASES)
each_functional = pytest.mark.parametrize("name", FUNCTIONAL)


def parts(shape=(5, 3, 16), dtype=torch.bfloat16, seed=0):
    """o_a, lse_a, o_b, lse_b."""
    generator = torch.Generator().manual_seed(seed)
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    one, other = (
        (torch.randn(shape, generator=generator).to(dtype), torch.randn(lse_shape, generator=generator))
        for _ in range(2)
    )
    return *one, *other


# Values.


@each_case
def test_results_are_those_of_the_reference(name):
    case = CASES[name]()
    case.check(case.op(*case.arguments.values()))


@each_case
def test_wrapper_gives_what_the_op_gives(name, cpu_as_gpu):
    """Where something follows the call. Without return_lse there is none."""
    want = CASES[name]()
    want = want.op(*want.arguments.values())
    with OpLog() as log:
        got = CASES[name]().wrapped()
        alone = CASES[name]().wrapped(return_lse=False)
    assert log.seen == [CASES[name]().op] * 2
    assert isinstance(got, TupleDict) and list(got.keys()) == ["out", "lse"] and list(alone.keys()) == ["out"]
    assert_same_bits((*got, *alone), (*want, want[0]))


def test_thin_functions_are_seen_too(cpu_as_gpu):
    x, y, z = attn.draw(SMALL, 2, 3, 9, device="cpu"), paged.small("decode", "cpu"), paged.small("prefill", "cpu")
    y, z = (t.with_(page_table=t.page_table[t.rows], page_table_rows=None) for t in (y, z))
    with OpLog() as log:
        attn_decode(x.q, x.k, x.v)
        attn_prefill(x.q, x.k, x.v, is_causal=True)
        attn_paged_decode(*y.positional, y.seqlens_k)
        attn_paged_prefill(*z.positional, z.seqlens_k, is_causal=True, scale=0.1)
    assert log.seen == [
        o.default for o in (OPS.gqa_decode, OPS.gqa_prefill, OPS.paged_gqa_decode, OPS.paged_gqa_prefill)
    ]


def test_tokens_of_no_request_are_empty_rows():
    x = packed()
    q = torch.cat((torch.full_like(x.q[:2], torch.nan), x.q, torch.full_like(x.q[:1], torch.nan)))
    case = dense_case("prefill", x.with_(q=q, cu_seqlens_q=x.cu_seqlens_q + 2))
    out, lse = case.op(*case.arguments.values())
    outside = torch.tensor([0, 1, -1])
    assert not out[outside].any() and lse[:, outside].isneginf().all()
    attn.check(attn.Results(out[2:-1], lse[:, 2:-1]), x)


# Appending to the pools.


def test_append_writes_the_last_positions_and_nothing_else():
    x = paged.small("append", "cpu")
    guard, case = paged.PoolGuard(x), paged_case(x)
    versions = [pool._version for pool in x.pools]
    case.check(case.op(*case.arguments.values()))
    guard.check()
    assert all(pool._version > before for pool, before in zip(x.pools, versions)), "a graph would not notice the write"


@pytest.mark.parametrize("page", [-1, 10**6])
def test_append_without_a_page_stores_nothing(page):
    """The new token is attended to all the same."""
    x = paged.appending(paged.draw(paged.MAIN, paged.Batch((17, 33, 1), 16), "cpu"))
    x.page_table[torch.arange(3), (x.lens - 1).long() // 16] = page
    guard, case = paged.PoolGuard(x), paged_case(x)
    case.check(case.op(*case.arguments.values()))
    guard.check()


@pytest.mark.parametrize("name", ["q", "k_cache", "new_v"])
def test_append_refuses_what_would_need_a_graph(name):
    """A pool in which a gradient is lost is never left behind."""
    case = CASES["paged_append"]()
    tensor = case.arguments[name].clone().requires_grad_()
    with pytest.raises(ContractError, match=rf"^{name}: wanted a tensor that does not require grad"):
        case.op(*case.with_(**{name: tensor}))
    with torch.no_grad():
        assert not any(r.requires_grad for r in case.op(*case.with_(**{name: tensor})))


@pytest.mark.parametrize("missing", ["new_k", "new_v"])
def test_append_names_the_half_that_is_missing(missing, cpu_as_gpu):
    x = paged.small("append", "cpu")
    with OpLog(), pytest.raises(ContractError, match=rf"^{missing}\b"):
        paged.call_wrapper(x.with_(**{missing: None}))


@pytest.fixture
def kernels_are_stubs(monkeypatch):
    yield from stub_wrappers(monkeypatch)


@pytest.mark.parametrize("entry", ["append", "out"])
def test_launch_counts_what_it_writes(entry, kernels_are_stubs):
    """As torch's own ops do: what was saved for a backward may not change unseen."""
    x = paged.small("append" if entry == "append" else "decode", "cpu")
    written = torch.zeros_like(x.q) if entry == "out" else x.k_cache
    leaf = torch.ones_like(written, requires_grad=True)
    loss = (leaf * written).sum()
    with torch.no_grad():
        paged.call_wrapper(x, **({"out": written} if entry == "out" else {}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Autograd.


@each_functional
def test_differentiating_is_refused_by_name(name):
    """The result itself may be used."""
    case = CASES[name]()
    q = case.arguments["q"].clone().requires_grad_()
    out, lse = case.op(*case.with_(q=q))
    case.check((out.detach(), lse.detach()))
    for result in (out, lse):
        with pytest.raises(UnsupportedError, match=rf"^{case.op.name()} has no derivative"):
            torch.autograd.grad(result.sum(), q, retain_graph=True)


def test_differentiating_a_merge_is_refused_by_name():
    o_a, *rest = parts()
    o_a.requires_grad_()
    out, _ = MERGE(o_a, *rest)
    with pytest.raises(UnsupportedError, match="^cuteforge::merge_state has no derivative"):
        out.sum().backward()


@pytest.mark.parametrize("traced", [False, True])
@each_case
def test_wrappers_refuse_what_requires_grad(name, traced, cpu_as_gpu):
    """Never an output that silently has no graph, with or without the op."""
    case = CASES[name]()
    case.arguments["q"].requires_grad_()
    refusal = pytest.raises(ContractError, match=r"^q: wanted a tensor that does not require grad")
    with OpLog() if traced else nullcontext(), refusal:
        case.wrapped()
    with OpLog(), torch.no_grad():
        assert not any(r.requires_grad for r in case.wrapped())


def test_merge_refuses_what_requires_grad(cpu_as_gpu):
    inputs = parts()
    inputs[3].requires_grad_()
    with pytest.raises(ContractError, match=r"^lse_b: wanted a tensor that does not require grad"):
        merge_state(*inputs)


def functions_of(name):
    """(q -> result) through the op and through the wrapper."""
    if name == "merge":
        inputs = parts()
        return inputs[0], (lambda q: MERGE(q, *inputs[1:])[0], lambda q: merge_state(q, *inputs[1:])["out"])
    case = CASES[name]()
    x = paged.small("decode", "cpu") if name.startswith("paged") else attn.draw(SMALL, 3, 2, 40, device="cpu")
    wrapped = {"paged_decode": paged.call_wrapper, "decode": lambda x: attn.wrapped("decode", x)}.get(name)
    functions = [lambda q: case.op(*case.with_(q=q))[0]]
    return case.arguments["q"], functions + ([lambda q: wrapped(x.with_(q=q))["out"]] if wrapped else [])


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["decode", "packed", "paged_decode", "paged_append", "paged_prefill", "merge"])
def test_torch_func_is_refused_by_name(name, transform, cpu_as_gpu):
    """By the op; by a wrapper at the latest, as it refuses tensors that require grad before."""
    q, (of_op, *of_wrapper) = functions_of(name)
    with pytest.raises(UnsupportedError, match=r"^cuteforge::\w+ .*torch\.(func|vmap)"):
        TRANSFORMS[transform](of_op, q)
    for function in of_wrapper:
        with pytest.raises((UnsupportedError, ContractError), match=r"^cuteforge::\w+ .*torch\.(func|vmap)|^(q|o_a)\b"):
            TRANSFORMS[transform](function, q)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", ["decode", "packed", "paged_decode", "paged_append", "paged_prefill", "merge"])
def test_forward_mode_is_refused_and_no_tangent_is_lost(name, context, cpu_as_gpu):
    primal, functions = functions_of(name)
    with forward_ad.dual_level(), context():
        q = forward_ad.make_dual(primal, primal)
        for function in functions:
            with pytest.raises(UnsupportedError, match=r"^cuteforge::\w+ has no forward-mode derivative"):
                function(q)


def test_autocast_and_default_dtype_change_nothing():
    want = CASES["decode"]()
    want = want.op(*want.arguments.values())
    case = CASES["decode"]()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.float16):
            got = case.op(*case.arguments.values())
    finally:
        torch.set_default_dtype(before)
    assert_same_bits(got, want)


# What torch asks of an op.


@each_case
def test_opcheck(name):
    case = CASES[name]()
    torch.library.opcheck(case.op, case.with_())


@pytest.mark.parametrize("shape", [(2, 4, 3, 8), (5, 3, 256), (0, 3, 8), (2, 0, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck_of_merges(shape, dtype):
    torch.library.opcheck(MERGE, parts(shape, dtype))


def test_opcheck_of_empty_calls():
    for batch, length, size in ((0, 2, 9), (2, 0, 9), (2, 2, 0)):
        case = dense_case("decode", attn.draw(SMALL, batch, length, size, device="cpu", lengths=[0] * batch))
        if length:
            torch.library.opcheck(case.op, case.with_())
    case = dense_case("prefill", attn.draw_ragged(SMALL, (), (), device="cpu"))
    torch.library.opcheck(case.op, case.with_())
    case = paged_case(paged.draw(paged.MAIN, paged.Batch((0, 0)), "cpu"))
    torch.library.opcheck(case.op, case.with_())


@pytest.mark.parametrize("layout", ["head_major", "gaps", "fused"])
def test_opcheck_of_strided_operands_and_int64_lengths(layout):
    x = attn.draw(SMALL, 3, 2, 40, device="cpu")
    want = dense_case("decode", x)
    strided = attn.LAYOUTS[layout](x.with_(seqlens_k=x.seqlens_k.long()))
    case = dense_case("decode", strided)
    torch.library.opcheck(case.op, case.with_())
    assert_same_bits(case.op(*case.with_()), want.op(*want.with_()))


def test_opcheck_of_strided_parts():
    inputs = parts()
    strided = [
        t.t().contiguous().t() if t.dim() == 2 else t.transpose(0, 1).contiguous().transpose(0, 1) for t in inputs
    ]
    torch.library.opcheck(MERGE, tuple(strided))
    assert_same_bits(MERGE(*strided), MERGE(*inputs))


# merge_state.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 4, 3, 8), (5, 3, 16)])
def test_merge_is_that_of_the_reference(shape, dtype):
    inputs = parts(shape, dtype)
    out, lse = MERGE(*inputs)
    oracle = reference.merge(*(t.double() for t in inputs))
    assert out.dtype == dtype and lse.dtype == torch.float32
    budget.assert_within_budget(out, oracle[0], reference.merge(*inputs)[0], "out")
    torch.testing.assert_close(lse.double(), oracle[1], rtol=1e-6, atol=1e-6)


def test_merge_ignores_what_an_empty_part_holds():
    """NaN, too; on either side; and two empty parts are an empty one."""
    o, lse, *_ = parts()
    junk, nothing = torch.full_like(o, torch.nan), torch.full_like(lse, -torch.inf)
    for inputs in ((o, lse, junk, nothing), (junk, nothing, o, lse)):
        assert_same_bits(MERGE(*inputs), (o, lse))
    out, empty = MERGE(junk, nothing, junk, nothing)
    assert not out.any() and empty.isneginf().all()


# Refusals.

REFUSED = (
    ("decode", "q", {"q": torch.zeros(3, 2, 5, 16, dtype=torch.bfloat16)}),
    ("decode", "q", {"q": torch.zeros(3, 17, 4, 16, dtype=torch.bfloat16)}),
    ("decode", "q", {"q": torch.zeros(3, 4, 16, dtype=torch.bfloat16)}),
    ("decode", "k", {"k": torch.zeros(3, 40, 2, 16)}),
    ("decode", "v", {"v": torch.zeros(3, 40, 2, 24, dtype=torch.bfloat16)}),
    ("decode", "seqlens_k", {"seqlens_k": torch.zeros(3)}),
    ("decode", "seqlens_k", {"seqlens_k": torch.tensor([1, 41, 2], dtype=torch.int32)}),
    ("decode", "mask", {"mask": torch.ones(40, dtype=torch.bool)}),
    ("decode", "mask", {"mask": torch.ones(3, 40, dtype=torch.uint8)}),
    ("decode", "softmax_scale", {"softmax_scale": float("nan")}),
    ("decode", "num_splits", {"num_splits": 0}),
    ("packed", "cu_seqlens_k", {"cu_seqlens_k": None}),
    ("packed", "cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 9, 3, 12], dtype=torch.int32)}),
    ("packed", "cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0, 9, 9, 99], dtype=torch.int32)}),
    ("packed", "seqlens_k", {"seqlens_k": torch.zeros(3, dtype=torch.int32)}),
    ("paged_decode", "seqlens_k", {"seqlens_k": None}),
    ("paged_decode", "seqlens_k", {"seqlens_k": torch.full((5,), 10**6, dtype=torch.int32)}),
    ("paged_decode", "page_table", {"page_table": torch.full((9, 9), -1, dtype=torch.int32)}),
    ("paged_decode", "page_table_rows", {"page_table_rows": torch.full((5,), 99, dtype=torch.int32)}),
    ("paged_append", "new_v", {"new_v": torch.zeros(5, 2, 64, dtype=torch.bfloat16)}),
    ("paged_append", "k_cache", {"k_cache": torch.zeros(17, 16, 2, 256, dtype=torch.bfloat16)[..., ::2]}),
    ("paged_prefill", "cu_seqlens_q", {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}),
)  # fmt: skip


@pytest.mark.parametrize(("case", "name", "replaced"), REFUSED, ids=[f"{c}-{n}" for c, n, _ in REFUSED])
def test_cpu_refuses_what_the_kernels_refuse(case, name, replaced):
    """And what would point outside the operands; the pools stay as they are."""
    case = CASES[case]()
    pools = [case.arguments[n] for n in ("k_cache", "v_cache") if n in case.arguments]
    before = [pool.clone() for pool in pools]
    with pytest.raises((ContractError, UnsupportedError), match=rf"^{name}\b"):
        case.op(*case.with_(**replaced))
    assert_same_bits(pools, before)


@pytest.mark.parametrize("left", [0, 15, 16, 30])
def test_pages_before_a_window_may_have_been_given_away(left):
    """Of 64 keys in pages of 16 the query at the last one sees the `left` before it: the first pages that none of them
    is in may be any number."""
    q, pool = torch.randn(1, 4, 64).bfloat16(), torch.randn(2, 4, 16, 2, 64).bfloat16()
    table, lengths = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    op, (k_cache, v_cache) = OPS.paged_gqa_decode.default, pool
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": table, "seqlens_k": lengths}

    def run(table):
        return op(*arguments_of(op, {**given, "page_table": table, "window": (left, None)}).values())

    first = (63 - left) // 16
    want = run(table)
    for number in (-1, 99):
        table[:, :first] = number
        assert_same_bits(run(table), want)
    table[:, first] = -1
    with pytest.raises(ContractError, match=rf"^page_table: .*got -1 at index 0, {first}"):
        run(table)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("o_a", lambda o, lse: (o[0], lse, o, lse)),
        ("o_a", lambda o, lse: (o.double(), lse, o, lse)),
        ("lse_a", lambda o, lse: (o, lse[:, 1:], o, lse)),
        ("o_b", lambda o, lse: (o, lse, o.float(), lse)),
        ("lse_b", lambda o, lse: (o, lse, o, lse.half())),
        ("o_a", lambda o, lse: (o[..., :12], lse, o[..., :12], lse)),
    ],
)
def test_merge_refuses_what_the_kernel_refuses(name, inputs):
    with pytest.raises((ContractError, UnsupportedError), match=rf"^{name}\b"):
        MERGE(*inputs(*parts()[:2]))


@pytest.mark.parametrize("traced", [False, True])
@each_case
def test_wrappers_refuse_the_cpu_on_every_path(name, traced):
    with OpLog() if traced else torch.no_grad(), pytest.raises(ContractError, match=r"^q: wanted a CUDA device.*cpu"):
        CASES[name]().wrapped()


def test_merge_refuses_the_cpu_on_every_path():
    for context in (OpLog(), torch.no_grad()):
        with context, pytest.raises(ContractError, match=r"^o_a: wanted a CUDA device.*cpu"):
            merge_state(*parts())


def test_wrappers_name_what_is_no_tensor(cpu_as_gpu):
    x = attn.draw(SMALL, 3, 2, 40, device="cpu")
    for name in ("q", "k", "v"):
        for context in (OpLog(), torch.no_grad()):
            with context, pytest.raises(ContractError, match=rf"^{name}\b"):
                attn.wrapped("decode", x.with_(**{name: [1.0]}))
    with pytest.raises(ContractError, match=r"^o_a\b"):
        merge_state(None, *parts()[1:])


def test_registering_again_is_harmless():
    case = CASES["paged_append"]()
    want = case.op(*case.with_())
    for module in (torch_ops, torch_library, torch_ops):
        importlib.reload(module)
    case = CASES["paged_append"]()
    assert_same_bits(OPS.paged_gqa_decode_append(*case.with_()), want)


def test_eager_calls_skip_the_dispatcher(monkeypatch):
    launched = []
    for module in ("road", "merge.api"):
        module = importlib.import_module(f"cuteforge.families.attention.{module}")
        monkeypatch.setattr(module, "call_op", None)
    monkeypatch.setattr(Road, "launch", lambda road, *_: launched.append(road) or (None, None))
    for name in CASES:
        CASES[name]().wrapped()
    merge_state(*parts())
    assert len(launched) == len(CASES) + 1


# Writing to memory of the caller's.


def test_result_is_copied_into_other_memory(cpu_as_gpu):
    case = CASES["decode"]()
    want = case.op(*case.with_())
    out = torch.full_like(want[0], torch.nan)
    with OpLog():
        got = case.wrapped(out=out)
    assert got["out"] is out
    assert_same_bits(tuple(got), want)


@pytest.mark.parametrize("wrong", [lambda t: t.float(), lambda t: t[:1], lambda t: t[..., :8]])
def test_other_memory_of_another_kind_is_refused_by_name(wrong, cpu_as_gpu):
    case = CASES["decode"]()
    with OpLog(), pytest.raises(ContractError, match=r"^out: wanted torch\.bfloat16 of shape"):
        case.wrapped(out=wrong(torch.zeros_like(case.arguments["q"])))


# torch.compile and export.


def dense_step(q, k, v, seqlens_k, mask):
    """Decode and prefill around other work, joined."""
    options = {"seqlens_k": seqlens_k, "mask": mask, "return_lse": True}
    first = attn.WRAPPERS["decode"](q * 2, k, v, **options, causal=True)
    second = attn.WRAPPERS["prefill"](q, k, v, **options, softmax_scale=0.5)
    joined = merge_state(*tuple(first), *tuple(second))  # torch 2.11 and 2.12 trace no two bare stars
    return joined["out"] + 1, joined["lse"]


@pytest.mark.parametrize(("dynamic", "num_sizes", "num_graphs"), [(False, 2, 2), (True, 3, 1)])
def test_wrappers_compile_into_one_graph(dynamic, num_sizes, num_graphs, cpu_as_gpu, fresh_compiler):
    """fullgraph; with dynamic shapes one graph serves every B, L, S and number of heads. No two extents of the first
    call are equal."""
    compiled = torch.compile(dense_step, backend=fresh_compiler, fullgraph=True, dynamic=dynamic)
    for batch, length, size, heads in ((3, 2, 40, 5), (5, 4, 71, 3), (2, 6, 19, 6))[:num_sizes]:
        x = masked(attn.draw(SMALL, batch, length, size, heads, device="cpu"))
        inputs = (x.q, x.k, x.v, x.seqlens_k, x.mask)
        with OpLog():
            want = dense_step(*inputs)
        assert_same_bits(compiled(*inputs), want)
    assert fresh_compiler.frame_count == num_graphs


# Two calls of each kind, of which the first has no two extents that are equal.
RAGGED = {
    "packed": lambda: (
        packed(kv_heads=3),
        attn.draw_ragged(SMALL, (4, 7, 2, 6), (9, 8, 2, 33), 2, device="cpu", spare_tokens=2),
    ),
    "paged_prefill": lambda: paged_pair((3, 8, 1, 0, 5), (5, 0, 2)),
    "paged_decode": lambda: paged_pair(4, 2),
}


def paged_pair(queries, other_queries):
    batches = paged.Batch((9, 40, 5, 0, 11), 3, queries), paged.Batch((3, 17, 25), 7, other_queries, kv_heads=3)
    return tuple(paged.draw(paged.CAUSAL, batch, "cpu") for batch in batches)


@pytest.mark.parametrize(("dynamic", "num_graphs"), [(False, 2), (True, 1)])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_and_paged_wrappers_compile_into_one_graph(name, dynamic, num_graphs, cpu_as_gpu, fresh_compiler):
    calls = RAGGED[name]()
    call = paged.call_wrapper if name.startswith("paged") else lambda x: attn.wrapped("prefill", x)

    def step(*tensors):
        x = calls[0].with_(**dict(zip(names, tensors)))
        return tuple(call(x))

    names = [n for n, value in vars(calls[0]).items() if isinstance(value, torch.Tensor)]
    compiled = torch.compile(step, backend=fresh_compiler, fullgraph=True, dynamic=dynamic)
    for x in calls:
        tensors = [getattr(x, n) for n in names]
        with OpLog():
            want = step(*tensors)
        assert_same_bits(compiled(*tensors), want)
    assert fresh_compiler.frame_count == num_graphs


@pytest.mark.parametrize("dynamic", [False, True])
def test_scale_may_change_between_compiled_calls(dynamic, cpu_as_gpu, fresh_compiler):
    case = CASES["decode"]()
    compiled = torch.compile(attn.WRAPPERS["decode"], backend=fresh_compiler, fullgraph=True, dynamic=dynamic)
    operands = [case.arguments[name] for name in ("q", "k", "v")]
    for scale in (0.5, 0.25, 2.0):
        got = compiled(*operands, seqlens_k=case.arguments["seqlens_k"], causal=True, softmax_scale=scale)
        assert_same_bits(got, case.op(*case.with_(softmax_scale=scale))[:1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_appends_reach_the_pools(backend, cpu_as_gpu, fresh_compiler):
    """Pools that are inputs, and views of one buffer that is an input; read again after the write."""

    def step(q, pool, table, lengths, new):
        k_cache, v_cache = pool.unbind(1)
        options = {"seqlens_k": lengths, "new_k": new, "new_v": new}
        out = paged.paged_gqa_decode_wrapper(q, k_cache, v_cache, table, **options)["out"]
        return out, pool.isnan().sum()

    x = paged.appending(paged.draw(paged.MAIN, paged.Batch((17, 33, 1), 16, place="pages_interleaved"), "cpu"))
    pool = torch.stack(x.pools, 1)
    runs = []
    for function in (step, torch.compile(step, backend=backend, fullgraph=True)):
        memory = pool.clone()
        with torch.no_grad(), OpLog() if function is step else nullcontext():
            runs.append((*function(x.q, memory, x.page_table, x.seqlens_k, x.new_k), memory))
    assert_same_bits(*runs)
    assert runs[0][1] < pool.isnan().sum()


def test_compiled_wrapper_writes_the_pools(cpu_as_gpu, fresh_compiler):
    x, y = paged.small("append", "cpu"), paged.small("append", "cpu")
    compiled = torch.compile(paged.call_wrapper, backend=fresh_compiler, fullgraph=True)
    with torch.no_grad():
        with OpLog():
            want = paged.call_wrapper(x)
        got = compiled(y)
    assert isinstance(got, TupleDict)
    assert_same_bits((*got, *y.pools), (*want, *x.pools))


def test_stream_and_grad_are_refused_inside_a_compiled_function(cpu_as_gpu, fresh_compiler):
    x = attn.draw(SMALL, 3, 2, 40, device="cpu")
    compiled = torch.compile(attn.WRAPPERS["decode"], backend=fresh_compiler, fullgraph=True)
    with pytest.raises(Exception, match="stream: wanted None under torch.compile, got int"):
        compiled(x.q, x.k, x.v, stream=0)
    with pytest.raises(Exception, match="k: wanted a tensor that does not require grad"):
        compiled(x.q, x.k.requires_grad_(), x.v)


class Model(torch.nn.Module):
    """A step that needs no GPU to be exported for one."""

    def forward(self, q, k_cache, v_cache, table, lengths, new):
        options = {"seqlens_k": lengths, "return_lse": True}
        first = paged.paged_gqa_decode_wrapper(q, k_cache, v_cache, table, new_k=new, new_v=new, **options)
        second = paged.paged_gqa_decode_wrapper(q, k_cache, v_cache, table, **options)
        return merge_state(first["out"].unsqueeze(1), first["lse"], second["out"].unsqueeze(1), second["lse"])["out"]


@pytest.mark.parametrize("strict", [True, False])
def test_export_for_a_gpu_on_a_machine_without_one(strict):
    x = paged.appending(paged.draw(paged.MAIN, paged.Batch((17, 33, 1)), "cpu"))
    tensors = (*x.positional, x.seqlens_k, x.new_k)
    with FakeTensorMode(), torch.no_grad():
        inputs = tuple(torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in tensors)
        result = Model()(*inputs)
        exported = torch.export.export(Model(), inputs, strict=strict)
    assert result.shape == (3, 1, *x.q.shape[1:]) and result.device.type == "cuda"
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert OPS.paged_gqa_decode_append.default in called and OPS.paged_gqa_decode.default in called and MERGE in called

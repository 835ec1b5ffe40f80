"""The rotary embedding's torch ops on the CPU, where they compute the eager reference: graph, writes in place, tracing,
refusals.

Wrappers serve CUDA tensors only. Where a test follows a wrapper into its op, the CPU stands in for the GPU.
"""

import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from cuteforge import (
    ContractError,
    TupleDict,
    UnsupportedError,
    rotary_emb,
    rotary_qk_wrapper,
    rotary_wrapper,
)
from cuteforge.families.rotary import reference, road, torch_ops
from cuteforge.op import torch_library
from helpers import budget, rotary
from helpers.stub_gpu import stub_wrappers
from helpers.torch_ops import TRANSFORMS, OpLog, assert_same_bits

OPS = torch.ops.cuteforge
ONE, BOTH = OPS.rotary.default, OPS.rotary_qk.default
ONE_INPLACE, BOTH_INPLACE = OPS.rotary_.default, OPS.rotary_qk_.default
HALVES = rotary.Config(8, 8, rotary.FP32, False, torch.int64, "positions, split halves")
BY_TOKEN = rotary.Config(8, 4, rotary.FP32, True, None, "a table by token, half of the head passes")
BF16 = rotary.Config(8, 8, rotary.BF16, True, torch.int32, "rounded results")
LAYOUT = rotary.TWO_PACKED._replace(tokens=(7,), heads=3)
DENSE = LAYOUT._replace(tokens=(2, 5))
each_config = pytest.mark.parametrize("config", [HALVES, BY_TOKEN, BF16], ids=lambda c: c.label)


def draw(config=HALVES, layout=LAYOUT, seed=0):
    return rotary.draw(config, layout, "cpu", seed)


def angles(x):
    """freqs_cis, cos, sin, positions."""
    return tuple(x.lookup.get(name) for name in ("freqs_cis", "cos", "sin", "positions"))


def rest(x, inverse=False):
    """What follows the heads in every op."""
    return (*angles(x), x.interleaved, inverse)


def options(x, **more):
    """The same for a wrapper."""
    return {**x.lookup, "interleaved": x.interleaved, **more}


def leaves(x, needed=(True, True)):
    return tuple(t.clone().requires_grad_(need) for t, need in zip((x.x, x.k), needed, strict=True))


def reference_of(values, x, inverse=False, dtype=rotary.FP32):
    table = x.table if x.positions is None else x.table[:2]
    return reference.rotate(values, table, x.positions, interleaved=x.interleaved, inverse=inverse, compute_dtype=dtype)


# Autograd.


@each_config
@pytest.mark.parametrize("inverse", [False, True])
def test_results_and_gradients_are_those_of_the_reference(config, inverse):
    """Forward the rotation, backward the other direction, bit for bit; close to autograd of the reference in fp64."""
    x, grads = draw(config), draw(config, seed=1)
    q, k = leaves(x)
    results = BOTH(q, k, *rest(x, inverse))
    got = torch.autograd.grad(results, (q, k), (grads.x, grads.k))
    assert_same_bits([r.detach() for r in results], [reference_of(t, x, inverse) for t in (x.x, x.k)])
    assert_same_bits(got, [reference_of(t, x, not inverse) for t in (grads.x, grads.k)])
    exact = x.x.double().requires_grad_()
    (want,) = torch.autograd.grad(reference_of(exact, x, inverse, torch.float64), exact, grads.x.double())
    torch.testing.assert_close(got[0], want.to(config.dtype), rtol=1e-2 if config is BF16 else 1e-5, atol=1e-5)


@each_config
def test_one_tensor_is_the_same_as_one_of_two(config):
    x, grads = draw(config), draw(config, seed=1)
    (q, _), both = leaves(x), leaves(x)
    out = ONE(q, *rest(x))
    want = BOTH(*both, *rest(x))
    assert budget.same_bits(out.detach(), want[0].detach())
    got = torch.autograd.grad(out, q, grads.x)
    assert_same_bits(got, torch.autograd.grad(want, both, (grads.x, grads.k))[:1])


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_what_requires_grad_gets_one(needed):
    """And only its result is part of the graph."""
    x, grads = draw(), draw(seed=1)
    inputs = leaves(x, needed)
    results = BOTH(*inputs, *rest(x))
    assert tuple(r.requires_grad for r in results) == needed
    with OpLog() as log:
        sum((r * g).sum() for r, g in zip(results, (grads.x, grads.k))).backward()
    assert log.seen == [ONE]
    for leaf, need, grad in zip(inputs, needed, (grads.x, grads.k), strict=True):
        assert (leaf.grad is not None) == need
        assert not need or budget.same_bits(leaf.grad, reference_of(grad, x, True))


def test_backward_is_one_launch_of_what_is_used():
    x, grads = draw(), draw(seed=1)
    q, k = leaves(x)
    results = BOTH(q, k, *rest(x))
    with OpLog() as log:
        torch.autograd.grad(results, (q, k), (grads.x, grads.k), retain_graph=True)
        got = torch.autograd.grad(results[1], (q, k), grads.k, allow_unused=True)
    assert log.seen == [BOTH, ONE]
    assert got[0] is None and budget.same_bits(got[1], reference_of(grads.k, x, True))


def test_the_graph_keeps_the_angles_only():
    """Not the heads, which may be written over."""
    x, kept = draw(), []
    q, _ = leaves(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = ONE(q, *rest(x))
    assert kept == [t.shape for t in (*x.table, x.positions)]
    q.data.zero_()
    out.sum().backward()
    assert budget.same_bits(q.grad, reference_of(torch.ones_like(x.x), x, True))


def test_table_changed_after_the_forward_is_noticed():
    x = draw()
    out = ONE(leaves(x)[0], *rest(x))
    x.table[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradient_expanded_from_a_scalar():
    """What `out.sum().backward()` hands over has strides of 0."""
    x = draw()
    q, _ = leaves(x)
    ONE(q, *rest(x)).sum().backward()
    assert budget.same_bits(q.grad, reference_of(torch.ones_like(x.x), x, True))


@each_config
def test_second_derivative(config):
    """A rotation is linear, so its gradient is an op with a gradient; against the reference in fp64."""
    x = draw(config)

    def second(rotate, q):
        out = rotate(q)
        (first,) = torch.autograd.grad((out**3).sum(), q, create_graph=True)
        return torch.autograd.grad((first**2).sum(), q)[0]

    got = second(lambda t: ONE(t, *rest(x)), leaves(x)[0])
    want = second(lambda t: reference_of(t, x, dtype=torch.float64), x.x.double().requires_grad_())
    close = {"rtol": 0.1, "atol": 0.1 * want.abs().max().item()} if config is BF16 else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(got, want.to(config.dtype), **close)


def test_positions_outside_the_table_have_nan_gradients():
    x = draw()
    x.positions[2] = -1
    q, _ = leaves(x)
    out = ONE(q, *rest(x))
    out.sum().backward()
    outside = torch.arange(7) == 2
    for result in (out.detach(), q.grad):
        assert result[outside].isnan().all() and result[~outside].isfinite().all()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_grad_mode(context):
    x = draw()
    with context():
        results = BOTH(*leaves(x), *rest(x))
    assert not any(r.requires_grad for r in results)
    assert_same_bits(results, [reference_of(t, x) for t in (x.x, x.k)])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    x = draw()
    q, _ = leaves(x)
    checkpoint(ONE, q, *rest(x), use_reentrant=use_reentrant).sum().backward()
    assert budget.same_bits(q.grad, reference_of(torch.ones_like(x.x), x, True))


def test_autocast_changes_nothing():
    x = draw()
    q, _ = leaves(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = ONE(q, *rest(x))
        out.sum().backward()
    assert budget.same_bits(out.detach(), reference_of(x.x, x))
    assert budget.same_bits(q.grad, reference_of(torch.ones_like(x.x), x, True))


def with_grad_on(x, name):
    """`x` with a table that requires grad."""
    if name == "freqs_cis":
        return x.with_(table=x.table.clone().requires_grad_())
    return x.with_(table=tuple(t.clone().requires_grad_(n == name) for n, t in zip(("cos", "sin"), x.table)))


@pytest.mark.parametrize("name", ["cos", "sin", "freqs_cis"])
def test_tables_that_require_grad_are_refused_by_name(name, cpu_as_gpu):
    """There is no gradient for them, and none is silently left out. Without grad mode they are as good as others."""
    x = with_grad_on(draw(BY_TOKEN if name == "freqs_cis" else HALVES), name)
    calls = (
        lambda: ONE(x.x, *rest(x)),
        lambda: BOTH(x.x, x.k, *rest(x)),
        lambda: ONE_INPLACE(x.x, *rest(x)),
        lambda: rotary_wrapper(x.x, **options(x)),
        lambda: rotary_qk_wrapper(x.x, x.k, **options(x), q_out=x.x, k_out=x.k),
    )
    before = x.x.clone()
    for call in calls:
        with pytest.raises(ContractError, match=rf"^{name}: wanted a tensor that does not require grad"):
            call()
    assert budget.same_bits(x.x, before)
    with torch.no_grad():
        assert budget.same_bits(ONE(x.x, *rest(x)), reference_of(x.x, x))


def call_of(entry, x):
    """q -> what becomes of it, through an op or a wrapper."""
    return {
        "op": lambda q: ONE(q, *rest(x)),
        "qk_op": lambda q: BOTH(q, x.k, *rest(x))[0],
        "inplace_op": lambda q: ONE_INPLACE(q, *rest(x)),
        "wrapper": lambda q: rotary_wrapper(q, **options(x))["out"],
        "qk_wrapper": lambda q: rotary_qk_wrapper(q, x.k, **options(x))["q"],
        "inplace_wrapper": lambda q: rotary_wrapper(q, **options(x), out=q)["out"],
    }[entry]


ENTRIES = ("op", "qk_op", "inplace_op", "wrapper", "qk_wrapper", "inplace_wrapper")


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_torch_func_is_refused_by_name(entry, transform, cpu_as_gpu):
    x = draw()
    with pytest.raises(UnsupportedError, match=r"^cuteforge::rotary(_qk)?_? .*torch\.(func|vmap)"):
        TRANSFORMS[transform](call_of(entry, x), x.x.clone())


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("entry", ENTRIES)
def test_forward_mode_is_refused_and_no_tangent_is_lost(entry, context, cpu_as_gpu):
    x = draw()
    with forward_ad.dual_level(), context():
        q = forward_ad.make_dual(x.x, x.x)
        with pytest.raises(UnsupportedError, match=r"^cuteforge::rotary(_qk)? has no forward-mode derivative"):
            call_of(entry, x)(q)


# In place and into memory of the caller's.


@each_config
def test_inplace_ops_write_what_the_others_return(config):
    """Slices of one fused buffer, and nothing else of it."""
    x = draw(config)
    want = [reference_of(t, x) for t in (x.x, x.k)]
    memory = rotary.arrange(x, rotary.FUSED._replace(tokens=(7,), heads=3))
    placed = memory.inputs
    assert BOTH_INPLACE(placed.x, placed.k, *rest(x)) is None
    memory.check()
    assert_same_bits((placed.x, placed.k), want)
    alone = x.x.clone()
    ONE_INPLACE(alone, *rest(x))
    assert budget.same_bits(alone, want[0])


@pytest.mark.parametrize("entry", ["op", "wrapper"])
@pytest.mark.parametrize("fused", [False, True], ids=["own_memory", "slices_of_one_buffer"])
def test_in_place_on_inner_nodes_of_a_graph(fused, entry, cpu_as_gpu):
    """The gradient is that of the functional op; the write is counted."""
    x, grads = draw(), draw(seed=1)

    def rotated(in_place):
        q, k = inputs = leaves(x)
        if fused:
            buffer = torch.cat((q, k), -2) * 2
            q, k = buffer[:, : q.shape[1]], buffer[:, q.shape[1] :]
        else:
            q, k = q * 2, k * 2
        if not in_place:
            results = BOTH(q, k, *rest(x))
        elif entry == "op":
            results, version = (q, k), q._version
            BOTH_INPLACE(q, k, *rest(x))
            assert q._version > version
        else:
            results = rotary_qk_wrapper(q, k, **options(x), q_out=q, k_out=k)
            assert results["q"] is q and results["k"] is k
        loss = sum((r * g).sum() for r, g in zip(results, (grads.x, grads.k)))
        return *(r.detach() for r in results), *torch.autograd.grad(loss, inputs)

    assert_same_bits(rotated(in_place=True), rotated(in_place=False))


LEAVES = {
    "leaf": lambda t: t,
    "view_of_a_leaf": lambda t: t[:, :2],
    "one_of_many_views": lambda t: (t * 1).split((1, 2), 1)[0],
}


@pytest.mark.parametrize("kind", LEAVES)
@pytest.mark.parametrize("entry", ["inplace_op", "inplace_wrapper"])
def test_torch_s_rules_for_writing_in_place_hold(entry, kind, cpu_as_gpu):
    """Refused, and nothing is written."""
    x = draw()
    leaf, _ = leaves(x)
    target = LEAVES[kind](leaf)
    before = target.detach().clone()
    with pytest.raises(RuntimeError, match="leaf Variable|modified inplace"):
        call_of(entry, x)(target)
    assert budget.same_bits(target.detach(), before)
    with torch.no_grad():
        ONE_INPLACE(target, *rest(x))
    assert budget.same_bits(target.detach(), reference_of(before, x))


@pytest.fixture
def kernels_are_stubs(request, monkeypatch):
    """The wrapper launches on CPU tensors; the op of torch has a kernel for them."""
    if request.node.callspec.params["entry"] == "wrapper":
        yield from stub_wrappers(monkeypatch)
    else:
        yield None


@pytest.mark.parametrize("entry", ["op", "wrapper"])
def test_write_without_grad_mode_is_noticed_by_the_graph_before_it(entry, kernels_are_stubs):
    """As for torch's own ops: what was saved for a backward may not change unseen."""
    x = draw()
    q = leaves(x)[0] * 1
    loss = (q * q).sum()
    with torch.no_grad():
        if entry == "op":
            ONE_INPLACE(q, *rest(x))
        else:
            rotary_wrapper(q, **options(x), out=q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("entry", ["op", "wrapper"])
def test_tensors_of_inference_mode_are_written(entry, kernels_are_stubs):
    """They have no version to count."""
    x = draw()
    with torch.inference_mode():
        q = x.x.clone()
        if entry == "op":
            ONE_INPLACE(q, *rest(x))
            assert budget.same_bits(q, reference_of(x.x, x))
        else:
            assert rotary_wrapper(q, **options(x), out=q)["out"] is q


def test_other_memory_joins_the_graph(cpu_as_gpu):
    """`out` of the caller's, and only one of two: returned as given, with the gradient of the rotation."""
    x, grads = draw(), draw(seed=1)
    q, k = leaves(x)
    out = torch.full_like(x.x, torch.nan)
    results = rotary_qk_wrapper(q, k, **options(x), q_out=out)
    assert results["q"] is out and results["k"] is not k
    got = torch.autograd.grad(tuple(results), (q, k), (grads.x, grads.k))
    assert_same_bits([r.detach() for r in results], [reference_of(t, x) for t in (x.x, x.k)])
    assert_same_bits(got, [reference_of(t, x, True) for t in (grads.x, grads.k)])


WRONG_TARGETS = {
    "dtype": lambda t: t.double(),
    "broadcast": lambda t: t.new_empty(2, *t.shape),
    "fewer_tokens": lambda t: t[:-1].clone(),
}


@pytest.mark.parametrize("kind", WRONG_TARGETS)
def test_other_memory_of_another_kind_is_refused_by_name(kind, cpu_as_gpu):
    """A copy would convert or broadcast."""
    x = draw()
    q, k = leaves(x)
    with pytest.raises(ContractError, match=r"^out: wanted torch\.float32 of shape"):
        rotary_wrapper(q, **options(x), out=WRONG_TARGETS[kind](x.x))
    with pytest.raises(ContractError, match=r"^k_out: wanted torch\.float32 of shape"):
        rotary_qk_wrapper(q, k, **options(x), k_out=WRONG_TARGETS[kind](x.k))


# What torch asks of an op.


@each_config
@pytest.mark.parametrize("needed", [(False, False), (True, True), (False, True)])
def test_opcheck(config, needed):
    x = draw(config)
    torch.library.opcheck(ONE, (leaves(x, needed)[1], *rest(x)))
    torch.library.opcheck(BOTH, (*leaves(x, needed), *rest(x, True)))


@each_config
def test_opcheck_of_the_ops_in_place(config):
    x = draw(config)
    torch.library.opcheck(ONE_INPLACE, (x.x.clone(), *rest(x)))
    torch.library.opcheck(BOTH_INPLACE, (x.x.clone(), x.k.clone(), *rest(x)))
    torch.library.opcheck(ONE_INPLACE, (leaves(x)[0] * 1, *rest(x)))


def test_opcheck_of_slices_and_dense_tokens():
    x = draw(layout=DENSE)
    placed = rotary.arrange(x, rotary.FUSED._replace(tokens=DENSE.tokens, heads=3)).inputs
    torch.library.opcheck(BOTH, (placed.x, placed.k, *rest(x)))
    torch.library.opcheck(BOTH_INPLACE, (placed.x, placed.k, *rest(x)))


@pytest.mark.parametrize("tokens", [(0,), (0, 5), (5, 0)])
def test_opcheck_of_no_tokens(tokens):
    x = draw(layout=LAYOUT._replace(tokens=tokens))
    torch.library.opcheck(BOTH, (*leaves(x), *rest(x)))
    torch.library.opcheck(BOTH_INPLACE, (x.x, x.k, *rest(x)))


REFUSED = (
    ("q", {"q": torch.zeros(7, 3)}),
    ("q", {"q": torch.zeros(7, 3, 8, dtype=torch.float64)}),
    ("k", {"k": torch.zeros(6, 2, 8)}),
    ("k", {"k": torch.zeros(7, 2, 8, dtype=torch.bfloat16)}),
    ("cos", {"cos": torch.zeros(9, 4, dtype=torch.bfloat16)}),
    ("cos", {"cos": None}),
    ("sin", {"sin": torch.zeros(9, 4)}),
    ("positions", {"positions": torch.zeros(6, dtype=torch.int64)}),
    ("positions", {"positions": torch.zeros(7)}),
    ("freqs_cis", {"freqs_cis": torch.zeros(7, 4, 2)}),
)


@pytest.mark.parametrize(("name", "replaced"), REFUSED, ids=[n for n, _ in REFUSED])
def test_cpu_refuses_what_the_kernel_refuses(name, replaced):
    """In place too, before anything is written."""
    x = draw()
    given = {"q": x.x, "k": x.k, "freqs_cis": None, **x.lookup, **replaced}
    before = given["q"].clone()
    for op in (BOTH, BOTH_INPLACE):
        with pytest.raises(ContractError, match=rf"^{name}\b"):
            op(**given, interleaved=False, inverse=False)
    assert budget.same_bits(given["q"], before)


def test_registering_again_is_harmless():
    x = draw()
    for module in (torch_ops, torch_library, torch_ops):
        importlib.reload(module)
    assert budget.same_bits(OPS.rotary(x.x, *rest(x)), reference_of(x.x, x))


# Wrappers.


@pytest.mark.parametrize("needed", [(False, False), (True, False), (False, True)])
def test_wrappers_refuse_the_cpu_on_every_path(needed):
    """They never fall back, whether or not a graph is recorded."""
    x = draw(BY_TOKEN)
    q, k = leaves(x, needed)
    for call in (
        lambda: rotary_qk_wrapper(q, k, **options(x)),
        lambda: rotary_qk_wrapper(q * 1, k * 1, **options(x), q_out=x.x, k_out=x.k),
    ):
        with pytest.raises(ContractError, match=r"^q: wanted a CUDA device.*cpu"):
            call()
    with pytest.raises(ContractError, match=r"^x: wanted a CUDA device.*cpu"):
        rotary_emb(q, x.table)


def test_wrappers_name_what_is_no_tensor_when_a_graph_is_recorded(cpu_as_gpu):
    x = draw()
    q, k = leaves(x)
    for name, arguments in (("k", (q, None)), ("q", ([1.0], k))):
        with pytest.raises(ContractError, match=rf"^{name}\b"):
            rotary_qk_wrapper(*arguments, **options(x))
    for name in ("cos", "sin", "positions"):
        with pytest.raises(ContractError, match=rf"^{name}\b"):
            rotary_wrapper(q, **options(x, **{name: None}))


def test_eager_calls_without_a_graph_skip_the_dispatcher(monkeypatch):
    x = draw(BY_TOKEN)
    launched = []

    def launch(self, *call):
        launched.append(len(self.heads))
        return (None,) * len(self.heads)

    monkeypatch.setattr(road.RotaryRoad, "launch", launch)
    monkeypatch.setattr(road, "call_op", None)
    rotary_emb(x.x, x.table)
    rotary_wrapper(x.x, **options(x), out=x.x)
    rotary_qk_wrapper(x.x, x.k, **options(x), k_out=x.k)
    with torch.no_grad():
        rotary_qk_wrapper(*leaves(x), **options(x))
    with torch.inference_mode():
        rotary_wrapper(torch.nn.Parameter(x.x), **options(x))
    assert launched == [1, 1, 2, 2, 1]


def test_dispatch_modes_see_the_wrappers(cpu_as_gpu):
    """Counters, tracers and selective checkpointing follow ops, not launches."""
    x = draw(BY_TOKEN)
    with OpLog() as log:
        rotary_emb(x.x, x.table)
        rotary_qk_wrapper(x.x, x.k, **options(x))
        rotary_wrapper(x.x, **options(x), out=x.x)
        rotary_qk_wrapper(x.x, x.k, **options(x), q_out=x.x, k_out=x.k)
        rotary_wrapper(x.x, **options(x), out=torch.empty_like(x.x))
    assert log.seen == [ONE, BOTH, ONE_INPLACE, BOTH_INPLACE, ONE]


# torch.compile and export.


def attention_input(q, k, lookup, in_place, **flags):
    """A step around the wrapper, on tensors that it made itself."""
    q, k = q * 2, k * 2
    targets = {"q_out": q, "k_out": k} if in_place else {}
    results = rotary_qk_wrapper(q, k, **lookup, **targets, **flags)
    return results["q"] + 1, results["k"] + 1


@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "in_place"])
@pytest.mark.parametrize(("dynamic", "num_sizes", "num_graphs"), [(False, 2, 2), (True, 3, 1)])
def test_wrapper_compiles_into_one_graph(dynamic, num_sizes, num_graphs, in_place, cpu_as_gpu, fresh_compiler):
    """fullgraph, forward and backward; with dynamic shapes one graph serves every number of tokens and heads."""
    compiled = torch.compile(attention_input, backend=fresh_compiler, fullgraph=True, dynamic=dynamic)
    for seed, (tokens, heads) in enumerate(((7, 3), (12, 6), (31, 4))[:num_sizes]):
        x = draw(layout=LAYOUT._replace(tokens=(tokens,), heads=heads), seed=seed)
        runs = []
        for function in (compiled, attention_input):
            inputs = leaves(x)
            results = function(*inputs, x.lookup, in_place, interleaved=False)
            runs.append((*(r.detach() for r in results), *torch.autograd.grad([r.sum() for r in results], inputs)))
        assert_same_bits(*runs)
    assert fresh_compiler.frame_count == num_graphs


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_writes_reach_the_caller_s_memory(backend, context, cpu_as_gpu, fresh_compiler):
    """Slices of a fused buffer that is an input, rotated in place, and another input for results."""

    def step(qkv, buffer, lookup):
        q, k = qkv[:, :3], qkv[:, 3:5]
        rotary_qk_wrapper(q, k, **lookup, interleaved=False, q_out=q, k_out=k)
        rotary_wrapper(q, **lookup, interleaved=False, inverse=True, out=buffer)
        return qkv * 2

    x = draw()
    q, k = (reference_of(t, x) for t in (x.x, x.k))
    want = torch.cat((q, k, x.k), 1)
    with context():
        qkv, buffer = torch.cat((x.x, x.k, x.k), 1), torch.full_like(x.x, torch.nan)
        doubled = torch.compile(step, backend=backend, fullgraph=True)(qkv, buffer, x.lookup)
    assert_same_bits((qkv, buffer, doubled), (want, reference_of(q, x, True), want * 2))


def test_inductor_keeps_values_and_gradients(cpu_as_gpu, fresh_compiler):
    x = draw()
    q, k = leaves(x)
    compiled = torch.compile(rotary_qk_wrapper, backend="inductor", fullgraph=True, dynamic=True)
    results = compiled(q, k, **options(x))
    assert isinstance(results, TupleDict) and list(results.keys()) == ["q", "k"]
    assert_same_bits([r.detach() for r in results], [reference_of(t, x) for t in (x.x, x.k)])
    grads = torch.autograd.grad([r.sum() for r in results], (q, k))
    assert_same_bits(grads, [reference_of(torch.ones_like(t), x, True) for t in (x.x, x.k)])


def test_stream_is_refused_inside_a_compiled_function(cpu_as_gpu, fresh_compiler):
    x = draw()
    compiled = torch.compile(rotary_wrapper, backend=fresh_compiler, fullgraph=True)
    with pytest.raises(Exception, match="stream: wanted None under torch.compile, got int"):
        compiled(x.x, **options(x), stream=0)


def test_tables_that_require_grad_are_refused_inside_a_compiled_function(cpu_as_gpu, fresh_compiler):
    x = with_grad_on(draw(), "sin")
    compiled = torch.compile(rotary_wrapper, backend=fresh_compiler, fullgraph=True)
    with pytest.raises(Exception, match="sin: wanted a tensor that does not require grad"):
        compiled(x.x, **options(x))


class Model(torch.nn.Module):
    """A step that needs no GPU to be exported for one."""

    def forward(self, q, k, freqs_cis):
        k = k * 2
        rotary_wrapper(k, freqs_cis, out=k)
        return rotary_emb(q, freqs_cis), k


@pytest.mark.parametrize("strict", [True, False])
def test_export_for_a_gpu_on_a_machine_without_one(strict):
    x = draw(BY_TOKEN)
    with FakeTensorMode():
        inputs = tuple(torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (x.x, x.k, x.table))
        results = Model()(*inputs)
        exported = torch.export.export(Model(), inputs, strict=strict)
    assert [(r.shape, r.dtype, r.device.type) for r in results] == [(t.shape, t.dtype, "cuda") for t in (x.x, x.k)]
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert ONE in called and ONE_INPLACE in called

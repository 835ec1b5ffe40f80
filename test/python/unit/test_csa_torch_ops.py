"""The compressor's torch ops on the CPU, where they compute the eager reference: graph, tracing, refusals.

Wrappers serve CUDA tensors only. Where a test follows a wrapper into its op, the CPU stands in for the GPU.
"""

import importlib
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from cuteforge import (
    ContractError,
    TupleDict,
    UnsupportedError,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from cuteforge.families.csa.compressor import reference, road, torch_ops
from cuteforge.op import torch_library, tracing
from cuteforge.op.road import Road
from helpers import budget, csa, process
from helpers.packs import Pack
from helpers.torch_ops import TRANSFORMS, OpLog, assert_same_bits

FORWARD = torch.ops.cuteforge.csa_compressor_forward.default
BACKWARD = torch.ops.cuteforge.csa_compressor_backward.default
SMALL = csa.Config(4, 2, 16, csa.FP32, "small enough to compile for")
HCA = csa.Config(16, 1, 8, csa.FP32, "one window")
BF16 = csa.Config(4, 2, 16, csa.BF16, "rounded results")
PACK = Pack((9, 0, 4, 23), 4, extra_tokens=2, extra_rows=1)


def draw(config=SMALL, pack=PACK, **options):
    return csa.inputs(config, Pack(pack.lengths, config.ratio, pack.extra_tokens, pack.extra_rows), "cpu", **options)


def leaves(x, needed=(True, True, True)):
    """Inputs of their own memory; kv, score and ape require grad where `needed` says so."""
    copies = [t.clone().requires_grad_(need) for t, need in zip(x.tensors[:3], needed, strict=True)]
    return (*copies, *x.tensors[3:])


def config_of(x):
    return x.total_comp, x.ratio, x.coff


def graph_of(x):
    """The op's inputs that require grad, and its result."""
    inputs = leaves(x)
    return inputs[:3], FORWARD(*inputs, *config_of(x))


def explicit_gradients(x):
    return BACKWARD(*x.tensors, x.grad_out, x.ratio, x.coff, True)


def wrapped(*inputs, **options):
    return csa_compressor_forward_wrapper(*inputs, **options)["out"]


# Autograd.


@pytest.mark.parametrize("config", [SMALL, HCA, BF16], ids=lambda c: c.label)
def test_gradients_are_those_of_fp64_autograd(config):
    """Through the op, against autograd of the reference in fp64; poison where no block reads never shows."""
    x = draw(config)
    inputs, out = graph_of(x)
    grads = torch.autograd.grad(out, inputs, x.grad_out)
    exact = reference.compress_backward_autograd(*x.tensors, x.grad_out, **x.config, compute_dtype=torch.float64)
    for name, got, want, leaf in zip(exact._fields, grads, exact, inputs, strict=True):
        assert got.dtype == leaf.dtype and got.isfinite().all(), name
        torch.testing.assert_close(got, want.to(got.dtype), rtol=1.6e-2 if config is BF16 else 1e-4, atol=1e-4)
    assert_same_bits(grads, explicit_gradients(x))


@pytest.mark.parametrize("needed", [n for n in itertools.product((True, False), repeat=3) if any(n)])
def test_only_what_requires_grad_gets_one(needed):
    x = draw()
    inputs = leaves(x, needed)
    FORWARD(*inputs, *config_of(x)).backward(x.grad_out)
    for leaf, need, want in zip(inputs[:3], needed, explicit_gradients(x), strict=True):
        assert (leaf.grad is not None) == need
        assert not need or budget.same_bits(leaf.grad, want)


def test_gradient_expanded_from_a_scalar():
    """What `out.sum().backward()` hands over has strides of 0."""
    x = draw(poison=False)
    inputs, out = graph_of(x)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert_same_bits(grads, explicit_gradients(x.with_(grad_out=torch.ones_like(x.grad_out))))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_grad_mode(context):
    x = draw(poison=False)
    with context():
        out = FORWARD(*leaves(x), *config_of(x))
    assert not out.requires_grad
    assert budget.same_bits(out, FORWARD(*x.tensors, *config_of(x)))


def test_input_changed_after_the_forward_is_noticed():
    x = draw()
    inputs = leaves(x)
    kv = inputs[0] * 1
    out = FORWARD(kv, *inputs[1:], *config_of(x))
    kv.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivative_is_refused_by_name():
    """A first one with create_graph works; differentiating it does not."""
    x = draw()
    inputs, out = graph_of(x)
    grads = torch.autograd.grad(out, inputs, x.grad_out, create_graph=True)
    assert_same_bits([g.detach() for g in grads], explicit_gradients(x))
    for grad in grads:
        with pytest.raises(UnsupportedError, match="^cuteforge::csa_compressor_backward has no derivative"):
            torch.autograd.grad(grad.sum(), inputs[0], retain_graph=True)


def call_of(entry, x, others):
    """kv -> out, through the op or the wrapper."""
    if entry == "op":
        return lambda kv: FORWARD(kv, *others, *config_of(x))
    return lambda kv: wrapped(kv, *others, **x.config, total_comp=x.total_comp)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("entry", ["op", "wrapper"])
def test_torch_func_is_refused_by_name(entry, transform, requires_grad, cpu_as_gpu):
    x = draw()
    _, *others = leaves(x, (False, requires_grad, requires_grad))
    with pytest.raises(UnsupportedError, match=r"^cuteforge::csa_compressor_forward .*torch\.(func|vmap)"):
        TRANSFORMS[transform](call_of(entry, x, others), x.kv)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("entry", ["op", "wrapper"])
def test_forward_mode_is_refused_and_no_tangent_is_lost(entry, context, cpu_as_gpu):
    x = draw()
    with forward_ad.dual_level(), context():
        kv = forward_ad.make_dual(x.kv, x.kv)
        with pytest.raises(UnsupportedError, match="^cuteforge::csa_compressor_forward has no forward-mode derivative"):
            call_of(entry, x, x.tensors[1:])(kv)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    x = draw()
    inputs = leaves(x)
    checkpoint(FORWARD, *inputs, *config_of(x), use_reentrant=use_reentrant).backward(x.grad_out)
    assert_same_bits([leaf.grad for leaf in inputs[:3]], explicit_gradients(x))


@pytest.mark.parametrize("config", [SMALL, BF16], ids=lambda c: c.label)
def test_autocast_changes_nothing(config):
    x = draw(config)
    want = FORWARD(*x.tensors, *config_of(x))
    inputs = leaves(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = FORWARD(*inputs, *config_of(x))
        grads = torch.autograd.grad(out, inputs[:3], x.grad_out)
    assert budget.same_bits(out.detach(), want)
    assert_same_bits(grads, explicit_gradients(x))


# What torch asks of an op.


@pytest.mark.parametrize("config", [SMALL, HCA, BF16], ids=lambda c: c.label)
@pytest.mark.parametrize("needed", [(False, False, False), (True, True, True), (False, False, True)])
def test_opcheck_of_the_forward(config, needed):
    x = draw(config, poison=False)
    torch.library.opcheck(FORWARD, (*leaves(x, needed), *config_of(x)))


@pytest.mark.parametrize("deterministic", [True, False])
def test_opcheck_of_the_backward(deterministic):
    x = draw(poison=False)
    torch.library.opcheck(BACKWARD, (*x.tensors, x.grad_out, x.ratio, x.coff, deterministic))


@pytest.mark.parametrize(
    "pack", [Pack((), 4), Pack((0, 0), 4), Pack((3, 2), 4)], ids=["nothing", "no_tokens", "no_rows"]
)
def test_opcheck_of_empty_calls(pack):
    x = draw(pack=pack)
    torch.library.opcheck(FORWARD, (*leaves(x), *config_of(x)))
    torch.library.opcheck(BACKWARD, (*x.tensors, x.grad_out, x.ratio, x.coff, True))


def test_opcheck_of_int64_offsets_and_strided_rows():
    x = draw(poison=False)
    wide = x.with_(kv=x.kv.repeat(1, 2)[:, : x.kv.shape[1]], score=x.score.t().contiguous().t())
    odd = wide.with_(cu_seqlens=x.cu_seqlens.long(), cu_seqlens_comp=x.cu_seqlens_comp.long())
    torch.library.opcheck(FORWARD, (*odd.tensors, *config_of(x)))
    assert_same_bits(explicit_gradients(odd), explicit_gradients(x))


REFUSED = (
    ("kv", ContractError, {"kv": torch.zeros(38, 33)}),
    ("kv", ContractError, {"kv": torch.zeros(38, 32, dtype=torch.float64)}),
    ("score", ContractError, {"score": torch.zeros(37, 32)}),
    ("ape", ContractError, {"ape": torch.zeros(5, 32)}),
    ("cu_seqlens_comp", ContractError, {"cu_seqlens_comp": torch.zeros(2, dtype=torch.int32)}),
)


@pytest.mark.parametrize(("name", "error", "replaced"), REFUSED)
def test_cpu_refuses_what_the_kernels_refuse(name, error, replaced):
    x = draw()
    x = x.with_(**replaced)
    with pytest.raises(error, match=rf"^{name}\b"):
        FORWARD(*x.tensors, 10, 4, 2)
    with pytest.raises(error, match=rf"^{name}\b"):
        BACKWARD(*x.tensors, x.grad_out, 4, 2, True)


def test_cpu_refuses_the_configurations_that_the_kernels_refuse():
    x = draw()
    with pytest.raises(ContractError, match="^coff"):
        FORWARD(*x.tensors, 10, 4, 3)
    with pytest.raises(ContractError, match="^total_comp"):
        FORWARD(*x.tensors, -1, 4, 2)
    with pytest.raises(UnsupportedError, match="^ratio"):
        FORWARD(torch.zeros(600, 4), torch.zeros(600, 4), torch.zeros(300, 4), *x.tensors[3:], 1, 300, 2)


def test_registering_again_is_harmless():
    """Reloaded modules, and modules imported a second time after they were dropped."""
    x = draw(poison=False)
    want = FORWARD(*x.tensors, *config_of(x))
    for module in (torch_ops, torch_library, torch_ops):
        importlib.reload(module)
    assert budget.same_bits(torch.ops.cuteforge.csa_compressor_forward(*x.tensors, *config_of(x)), want)
    process.run(IMPORT_TWICE)


IMPORT_TWICE = """
import gc, sys, torch
from cuteforge.families.csa import compressor
for name in [name for name in sys.modules if name.startswith("cuteforge")]:
    del sys.modules[name]
del compressor, name
gc.collect()
from cuteforge.families.csa import compressor
table = torch.tensor([0, 8], dtype=torch.int32)
tokens = torch.zeros(8, 4, requires_grad=True)
out = torch.ops.cuteforge.csa_compressor_forward(tokens, tokens, torch.zeros(4, 4), table, table // 4, 2, 4, 2)
out.sum().backward()
assert tokens.grad is not None
"""


# Wrappers.


def test_wrapper_records_the_graph_of_the_op(cpu_as_gpu):
    x = draw()
    inputs = leaves(x)
    result = csa_compressor_forward_wrapper(*inputs, **x.config, total_comp=x.total_comp)
    assert isinstance(result, TupleDict) and list(result.keys()) == ["out"]
    assert_same_bits(torch.autograd.grad(result["out"], inputs[:3], x.grad_out), explicit_gradients(x))


@pytest.mark.parametrize("needed", [(False, False, False), (True, False, True)])
def test_wrappers_refuse_the_cpu_on_every_path(needed):
    """They never fall back, whether or not a graph is recorded."""
    x = draw()
    inputs = leaves(x, needed)
    with pytest.raises(ContractError, match=r"^kv: wanted a CUDA device.*cpu"):
        csa_compressor_forward_wrapper(*inputs, **x.config, total_comp=x.total_comp)
    with torch.no_grad(), pytest.raises(ContractError, match=r"^kv: wanted a CUDA device.*cpu"):
        csa_compressor_backward_wrapper(*inputs, x.grad_out, **x.config)


def test_wrapper_names_what_is_no_tensor_when_a_graph_is_recorded():
    x = draw()
    inputs = leaves(x)
    for position, name in enumerate(("score", "ape", "cu_seqlens", "cu_seqlens_comp"), start=1):
        operands = [t if i != position else None for i, t in enumerate(inputs)]
        with pytest.raises(ContractError, match=rf"^{name}\b"):
            csa_compressor_forward_wrapper(*operands, **x.config, total_comp=x.total_comp)


def test_eager_calls_without_a_graph_skip_the_dispatcher(monkeypatch):
    x = draw()
    launched = []
    monkeypatch.setattr(Road, "launch", lambda self, *_: launched.append(type(self)) or (None,) * 3)
    monkeypatch.setattr(road, "call_op", None)
    csa_compressor_forward_wrapper(*x.tensors, **x.config, total_comp=x.total_comp)
    with torch.no_grad():
        csa_compressor_forward_wrapper(*leaves(x), **x.config, total_comp=x.total_comp)
    with torch.inference_mode():
        parameters = [torch.nn.Parameter(t) for t in x.tensors[:3]]
        csa_compressor_forward_wrapper(*parameters, *x.tensors[3:], **x.config, total_comp=x.total_comp)
    csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config)
    assert launched == [road.ForwardRoad] * 3 + [road.BackwardRoad]


def test_dispatch_modes_see_the_wrappers(cpu_as_gpu):
    """Counters, tracers and selective checkpointing follow ops, not launches."""
    x = draw()
    with OpLog() as log:
        csa_compressor_forward_wrapper(*x.tensors, **x.config, total_comp=x.total_comp)
        csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config)
    assert log.seen == [FORWARD, BACKWARD]


def test_backward_wrapper_refuses_to_be_differentiated():
    x = draw()
    with pytest.raises(ContractError, match="^score: wanted a tensor that does not require grad"):
        tracing.refuse_grad(("kv", "score"), (x.kv, x.score.clone().requires_grad_()), "op")
    with torch.no_grad():
        tracing.refuse_grad(("kv", "score"), (x.kv, x.score.clone().requires_grad_()), "op")


# torch.compile and export.


@pytest.mark.parametrize(("dynamic", "num_packs", "num_graphs"), [(False, 2, 2), (True, 3, 1)])
def test_wrapper_compiles_into_one_graph(dynamic, num_packs, num_graphs, cpu_as_gpu, fresh_compiler):
    """fullgraph, forward and backward; with dynamic shapes one graph serves every T, B and N."""

    def step(*inputs, total_comp):
        return wrapped(*inputs, total_comp=total_comp) * 2

    compiled = torch.compile(step, backend=fresh_compiler, fullgraph=True, dynamic=dynamic)
    for seed, lengths in enumerate(((20, 7), (9, 31, 4), (12, 0, 5, 8))[:num_packs]):
        x = draw(pack=Pack(lengths, 4, extra_tokens=seed, extra_rows=seed), seed=seed)
        inputs = leaves(x)
        out = compiled(*inputs, total_comp=x.total_comp)
        grads = torch.autograd.grad(out, inputs[:3], x.grad_out / 2)
        assert budget.same_bits(out.detach(), FORWARD(*x.tensors, *config_of(x)) * 2)
        assert_same_bits(grads, explicit_gradients(x))
    assert fresh_compiler.frame_count == num_graphs


def test_inductor_keeps_values_and_gradients(cpu_as_gpu, fresh_compiler):
    x = draw()
    inputs = leaves(x)
    compiled = torch.compile(wrapped, backend="inductor", fullgraph=True, dynamic=True)
    out = compiled(*inputs, total_comp=x.total_comp)
    assert budget.same_bits(out.detach(), FORWARD(*x.tensors, *config_of(x)))
    assert_same_bits(torch.autograd.grad(out, inputs[:3], x.grad_out), explicit_gradients(x))


def test_wrappers_return_their_dicts_from_a_compiled_function(cpu_as_gpu, fresh_compiler):
    x = draw()
    compiled = torch.compile(csa_compressor_backward_wrapper, backend=fresh_compiler, fullgraph=True)
    result = compiled(*x.tensors, x.grad_out, **x.config)
    assert isinstance(result, TupleDict) and list(result.keys()) == ["grad_kv", "grad_score", "grad_ape"]
    assert_same_bits(tuple(result), explicit_gradients(x))


def test_compiled_backward_wrapper_refuses_to_be_differentiated(cpu_as_gpu, fresh_compiler):
    """As the eager one: it records no graph."""
    x = draw()
    compiled = torch.compile(csa_compressor_backward_wrapper, backend=fresh_compiler, fullgraph=True)
    with pytest.raises(Exception, match="kv: wanted a tensor that does not require grad"):
        compiled(*leaves(x), x.grad_out, **x.config)


def test_stream_is_refused_inside_a_compiled_function(cpu_as_gpu, fresh_compiler):
    x = draw()
    compiled = torch.compile(wrapped, backend=fresh_compiler, fullgraph=True)
    with pytest.raises(Exception, match="stream: wanted None under torch.compile, got int"):
        compiled(*x.tensors, total_comp=x.total_comp, stream=0)


@pytest.mark.parametrize("capture_scalar_outputs", [False, True])
def test_row_count_read_from_the_offsets(capture_scalar_outputs, cpu_as_gpu, fresh_compiler):
    """total_comp=None: a graph break by default, an unbacked size where scalars are captured."""
    x = draw(pack=Pack((9, 0, 4, 23), 4), poison=False)
    inputs = leaves(x)
    with torch._dynamo.config.patch(capture_scalar_outputs=capture_scalar_outputs):
        compiled = torch.compile(wrapped, backend=fresh_compiler, fullgraph=capture_scalar_outputs)
        grads = torch.autograd.grad(compiled(*inputs), inputs[:3], x.grad_out)
    assert_same_bits(grads, explicit_gradients(x))
    assert (fresh_compiler.frame_count == 1) or not capture_scalar_outputs


class Model(torch.nn.Module):
    """A step that needs no GPU to be exported for one."""

    def forward(self, kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out):
        out = wrapped(kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp=kv.shape[0] // 4)
        grads = csa_compressor_backward_wrapper(kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
        return out, *tuple(grads)  # torch 2.11 and 2.12 trace no bare star beside another value


@pytest.mark.parametrize("strict", [True, False])
def test_export_for_a_gpu_on_a_machine_without_one(strict):
    x = draw(pack=Pack((32,), 4))
    with FakeTensorMode():
        inputs = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (*x.tensors, x.grad_out)]
        results = Model()(*inputs)
        exported = torch.export.export(Model(), tuple(inputs), strict=strict)
    assert [(r.shape, r.dtype, r.device.type) for r in results] == [
        (t.shape, t.dtype, "cuda") for t in (x.grad_out, x.kv, x.score, x.ape)
    ]
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert FORWARD in called and BACKWARD in called

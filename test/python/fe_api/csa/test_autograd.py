"""Training through the compressor: the wrapper's graph, torch.compile and captures, with the kernels."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

from cuteforge import (
    ContractError,
    UnsupportedError,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from helpers import budget, csa
from helpers.canary import padded_copy
from helpers.gpu import SLEEP_CYCLES
from helpers.packs import Pack
from helpers.torch_ops import assert_same_bits

FORWARD = torch.ops.cuteforge.csa_compressor_forward.default
BACKWARD = torch.ops.cuteforge.csa_compressor_backward.default
MAIN = pytest.mark.parametrize("config", [csa.CSA, csa.HCA, csa.ODD, csa.CSA_FP32], ids=lambda c: c.label)


def leaves(x, needed=(True, True, True)):
    """Inputs of their own memory; kv, score and ape require grad where `needed` says so."""
    copies = [t.detach().clone().requires_grad_(need) for t, need in zip(x.tensors[:3], needed, strict=True)]
    return (*copies, *x.tensors[3:])


def forward(x, inputs, **options):
    return csa_compressor_forward_wrapper(*inputs, **x.config, total_comp=x.total_comp, **options)["out"]


@MAIN
def test_gradients_are_the_backward_wrapper_s_bit_for_bit(config, device):
    x = csa.small(config, device)
    inputs = leaves(x)
    out = forward(x, inputs)
    grads = torch.autograd.grad(out, inputs[:3], x.grad_out)
    assert budget.same_bits(out.detach(), csa.run_forward(x))
    assert_same_bits(grads, csa.run_backward(x))
    assert_same_bits(grads, csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config))


@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_what_requires_grad_gets_one(needed, device):
    x = csa.small(csa.CSA, device)
    inputs = leaves(x, needed)
    forward(x, inputs).backward(x.grad_out)
    for leaf, need, want in zip(inputs[:3], needed, csa.run_backward(x), strict=True):
        assert (leaf.grad is not None) == need
        assert not need or budget.same_bits(leaf.grad, want)


def test_layouts_that_the_kernels_do_not_read(device):
    """Misaligned inputs, int64 offsets, and the gradient of a sum, whose strides are 0: copied, as by the wrappers."""
    x = csa.small(csa.CSA, device, poison=False)
    odd = x.with_(
        kv=padded_copy(x.kv, x.kv.shape[1], offset=1),
        cu_seqlens=x.cu_seqlens.long(),
        cu_seqlens_comp=x.cu_seqlens_comp.long(),
    )
    kv, score, ape = (t.detach().requires_grad_() for t in odd.tensors[:3])
    grads = torch.autograd.grad(forward(x, (kv, score, ape, *odd.tensors[3:])).sum(), (kv, score, ape))
    assert_same_bits(grads, csa.run_backward(x.with_(grad_out=torch.ones_like(x.grad_out))))


def test_autocast_and_deterministic_mode_change_nothing(device):
    x = csa.small(csa.CSA, device)
    inputs = leaves(x)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cuda", torch.float16):
            out = forward(x, inputs)
            grads = torch.autograd.grad(out, inputs[:3], x.grad_out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert budget.same_bits(out.detach(), csa.run_forward(x))
    assert_same_bits(grads, csa.run_backward(x))


def test_backward_wrapper_refuses_to_be_differentiated(device):
    x = csa.small(csa.CSA, device)
    with pytest.raises(ContractError, match="^kv: wanted a tensor that does not require grad"):
        csa_compressor_backward_wrapper(*leaves(x), x.grad_out, **x.config)


def test_second_derivative_is_refused_by_name(device):
    x = csa.small(csa.CSA, device)
    inputs = leaves(x)
    grads = torch.autograd.grad(forward(x, inputs), inputs[:3], x.grad_out, create_graph=True)
    assert_same_bits([g.detach() for g in grads], csa.run_backward(x))
    with pytest.raises(UnsupportedError, match="^cuteforge::csa_compressor_backward has no derivative"):
        torch.autograd.grad(grads[0].sum(), inputs[0])


def test_transforms_of_torch_func_are_refused_by_name(device):
    """A batched tensor has no memory to launch on; a tangent would be lost."""
    x = csa.small(csa.CSA, device)
    others = x.tensors[1:]
    for transform in (
        lambda f: torch.func.vmap(f)(x.kv[None]),
        lambda f: torch.func.grad(lambda t: f(t).sum())(x.kv),
        lambda f: torch.func.jvp(f, (x.kv,), (x.kv,)),
    ):
        with pytest.raises(UnsupportedError, match="^cuteforge::csa_compressor_forward"):
            transform(lambda kv: forward(x, (kv, *others)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, device):
    x = csa.small(csa.CSA, device)
    inputs = leaves(x)
    checkpoint(lambda *t: forward(x, t), *inputs, use_reentrant=use_reentrant).backward(x.grad_out)
    assert_same_bits([leaf.grad for leaf in inputs[:3]], csa.run_backward(x))


def test_explicit_stream_with_the_graph_freed_at_once(device):
    """Forward and backward run on the side stream; memory freed by the caller meanwhile is not handed out again."""
    x = csa.small(csa.CSA, device)
    want, want_grads = csa.run_forward(x), csa.run_backward(x)
    side = torch.cuda.Stream()
    for _ in range(4):
        inputs = leaves(x)
        shapes = [(t.shape, t.dtype) for t in inputs[:3]]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        out = forward(x, inputs, stream=side)
        grads = torch.autograd.grad(out, inputs[:3], x.grad_out)
        out = out.detach()
        del inputs
        thieves = [torch.full(shape, 77, dtype=dtype, device=device) for shape, dtype in shapes]
        torch.cuda.synchronize()
        assert budget.same_bits(out, want)
        assert_same_bits(grads, want_grads)
        del thieves


def test_captured_training_step_follows_new_data(device):
    """Forward and backward in one graph; a replay equals the eager step on the same numbers, bit for bit."""
    x = csa.inputs(csa.CSA, Pack((100, 57, 99), 4, extra_tokens=3, extra_rows=5), device)
    inputs = leaves(x)
    results = []

    def step():
        results.clear()
        out = forward(x, inputs)
        results.extend((out.detach(), *torch.autograd.grad(out, inputs[:3], x.grad_out)))

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (1, 2):
        fresh = csa.inputs(csa.CSA, x.pack, device, seed=seed)
        with torch.no_grad():
            for leaf, values in zip(inputs[:3], fresh.tensors[:3], strict=True):
                leaf.copy_(values)
        x.grad_out.copy_(fresh.grad_out)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, (csa.run_forward(fresh), *csa.run_backward(fresh)))


@MAIN
def test_opcheck(config, device):
    x = csa.small(config, device, poison=False)
    torch.library.opcheck(FORWARD, (*x.tensors, x.total_comp, x.ratio, x.coff))
    torch.library.opcheck(FORWARD, (*leaves(x), x.total_comp, x.ratio, x.coff))
    torch.library.opcheck(BACKWARD, (*x.tensors, x.grad_out, x.ratio, x.coff, True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step_is_one_graph(backend, dynamic, device):
    """fullgraph; with dynamic shapes one graph serves every T, B and N. Same bits as eager."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def step(*inputs, total_comp):
        return csa_compressor_forward_wrapper(*inputs, total_comp=total_comp)["out"]

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic)
    packs = [Pack((40, 7), 4, extra_tokens=2), Pack((9, 31, 4), 4, extra_rows=2), Pack((12, 0, 5, 80), 4, 1, 1)]
    for seed, pack in enumerate(packs if dynamic else packs[:1]):
        x = csa.inputs(csa.CSA, pack, device, seed=seed)
        inputs = leaves(x)
        out = compiled(*inputs, total_comp=x.total_comp)
        assert budget.same_bits(out.detach(), csa.run_forward(x))
        assert_same_bits(torch.autograd.grad(out, inputs[:3], x.grad_out), csa.run_backward(x))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compiled_backward_wrapper(device):
    x = csa.small(csa.CSA, device)
    torch._dynamo.reset()
    compiled = torch.compile(csa_compressor_backward_wrapper, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(*x.tensors, x.grad_out, **x.config), csa.run_backward(x))
    torch._dynamo.reset()


@pytest.mark.multi_gpu
def test_gradients_on_a_device_that_is_not_current(device):
    x = csa.small(csa.CSA, torch.device("cuda", 1))
    inputs = leaves(x)
    grads = torch.autograd.grad(forward(x, inputs), inputs[:3], x.grad_out)
    assert torch.cuda.current_device() == device.index
    assert_same_bits(grads, csa.run_backward(x))

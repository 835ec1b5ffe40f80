"""Training through the rotary embedding: the wrappers' graph, in place and not, torch.compile and captures, with the
kernel."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cuteforge import ContractError, UnsupportedError, rotary_emb, rotary_qk_wrapper, rotary_wrapper
from helpers import budget, gpu, rotary
from helpers.canary import strided_copy
from helpers.torch_ops import assert_same_bits

LAYOUT = rotary.TWO_PACKED
OPS = torch.ops.cuteforge
ONE, BOTH = OPS.rotary.default, OPS.rotary_qk.default
ONE_INPLACE, BOTH_INPLACE = OPS.rotary_.default, OPS.rotary_qk_.default
MAIN = pytest.mark.parametrize("config", [*rotary.MAIN_CONFIGS, rotary.HALVES_FP32], ids=lambda c: c.label)


def draw(config, device, layout=LAYOUT):
    """Operands and the gradients of their results."""
    x, grads = (rotary.draw(config, layout, device, seed) for seed in (0, 1))
    return x, (grads.x, grads.k)


def leaves(x, needed=(True, True)):
    return tuple(t.detach().clone().requires_grad_(need) for t, need in zip((x.x, x.k), needed, strict=True))


def options(x, **more):
    return {**x.lookup, "interleaved": x.interleaved, **more}


def rest(x, inverse=False):
    """What follows the heads in every op."""
    angles = (x.lookup.get(name) for name in ("freqs_cis", "cos", "sin", "positions"))
    return (*angles, x.interleaved, inverse)


def rotated(x, heads, inverse=False):
    """What the class makes of `heads`."""
    results = rotary.run(x.with_(x=heads[0].detach(), k=heads[1].detach()), LAYOUT, inverse=inverse)
    return results["out"], results["k_out"]


@MAIN
@pytest.mark.parametrize("inverse", [False, True])
def test_gradients_are_the_other_rotation_bit_for_bit(config, inverse, device):
    x, grads = draw(config, device)
    q, k = leaves(x)
    results = rotary_qk_wrapper(q, k, **options(x), inverse=inverse)
    assert_same_bits([r.detach() for r in results], rotated(x, (x.x, x.k), inverse))
    want = rotated(x, grads, not inverse)
    assert_same_bits(torch.autograd.grad(tuple(results), (q, k), grads), want)
    out = rotary_wrapper(q, **options(x), inverse=inverse)["out"]
    assert_same_bits(torch.autograd.grad(out, q, grads[0]), want[:1])


def test_thin_function_carries_the_graph(device):
    x, grads = draw(rotary.BY_TOKEN, device)
    q, _ = leaves(x)
    assert_same_bits(torch.autograd.grad(rotary_emb(q, x.table), q, grads[0]), rotated(x, grads, True)[:1])


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_what_requires_grad_gets_one(needed, device):
    x, grads = draw(rotary.HALVES, device)
    inputs = leaves(x, needed)
    results = rotary_qk_wrapper(*inputs, **options(x))
    assert tuple(r.requires_grad for r in results) == needed
    sum((r * g).sum() for r, g in zip(results, grads)).backward()
    for leaf, need, want in zip(inputs, needed, rotated(x, grads, True), strict=True):
        assert (leaf.grad is not None) == need
        assert not need or budget.same_bits(leaf.grad, want)


def test_a_training_step_is_two_launches(device):
    """q and k together, forward and backward, and nothing around them."""
    x, grads = draw(rotary.HALVES, device)
    inputs = leaves(x)

    def step():
        return torch.autograd.grad(tuple(rotary_qk_wrapper(*inputs, **options(x))), inputs, grads)

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    assert gpu.count_launches(step) == 2


def test_second_derivative_rotates_again(device):
    x, _ = draw(rotary.HALVES_FP32, device)
    q, k = leaves(x)
    out = rotary_wrapper(q, **options(x))["out"]
    (first,) = torch.autograd.grad((out * out).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad((first * x.x).sum(), q)
    forward = rotated(x, (x.x, x.k))
    assert_same_bits([second], rotated(x, (2 * forward[0], forward[1]), True)[:1])


def test_positions_outside_the_table_have_nan_gradients(device):
    x, grads = draw(rotary.HALVES, device)
    x.positions[3] = rotary.MAX_POS
    inputs = leaves(x)
    results = rotary_qk_wrapper(*inputs, **options(x))
    for got, want in zip(torch.autograd.grad(tuple(results), inputs, grads), rotated(x, grads, True), strict=True):
        assert got[3].isnan().all() and got.isnan().any(-1).any(-1).sum() == 1
        assert budget.same_values(got, want)


def test_layouts_that_the_kernel_does_not_read(device):
    """A misaligned input, and the gradient of a sum, whose strides are 0: copied, as by the wrappers."""
    x, _ = draw(rotary.HALVES, device)
    q = strided_copy(x.x, x.x.stride(), offset=1).requires_grad_()
    out = rotary_wrapper(q, **options(x))["out"]
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert_same_bits(
        [out.detach(), grad], [rotated(x, (x.x, x.k))[0], rotated(x, (torch.ones_like(x.x), x.k), True)[0]]
    )


def test_autocast_and_deterministic_mode_change_nothing(device):
    x, grads = draw(rotary.HALVES, device)
    inputs = leaves(x)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cuda", torch.float16):
            results = rotary_qk_wrapper(*inputs, **options(x))
            got = torch.autograd.grad(tuple(results), inputs, grads)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits([r.detach() for r in results], rotated(x, (x.x, x.k)))
    assert_same_bits(got, rotated(x, grads, True))


@pytest.mark.parametrize("name", ["cos", "sin", "freqs_cis"])
def test_tables_that_require_grad_are_refused_by_name(name, device):
    config = rotary.BY_TOKEN if name == "freqs_cis" else rotary.HALVES
    x, _ = draw(config, device)
    given = options(x, **{name: x.lookup[name].clone().requires_grad_()})
    for heads in ((x.x, x.k), leaves(x)):
        with pytest.raises(ContractError, match=rf"^{name}: wanted a tensor that does not require grad"):
            rotary_qk_wrapper(*heads, **given)
    with torch.no_grad():
        assert_same_bits(tuple(rotary_qk_wrapper(x.x, x.k, **given)), rotated(x, (x.x, x.k)))


def test_transforms_of_torch_func_are_refused_by_name(device):
    """A batched tensor has no memory to launch on; a tangent would be lost."""
    x, _ = draw(rotary.HALVES, device)
    for transform in (
        lambda f: torch.func.vmap(f)(x.x[None]),
        lambda f: torch.func.grad(lambda t: f(t).sum())(x.x),
        lambda f: torch.func.jvp(f, (x.x,), (x.x,)),
    ):
        with pytest.raises(UnsupportedError, match="^cuteforge::rotary"):
            transform(lambda q: rotary_wrapper(q, **options(x))["out"])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, device):
    x, grads = draw(rotary.HALVES, device)
    q, _ = leaves(x)
    checkpoint(lambda t: rotary_wrapper(t, **options(x))["out"], q, use_reentrant=use_reentrant).backward(grads[0])
    assert budget.same_bits(q.grad, rotated(x, grads, True)[0])


# In place.


@MAIN
@pytest.mark.parametrize("fused", [False, True], ids=["own_memory", "slices_of_one_buffer"])
def test_in_place_on_inner_nodes_of_a_graph(config, fused, device):
    """The gradients of the rotation out of place, and its results in the tensors that were given."""
    x, grads = draw(config, device)
    inputs = leaves(x)
    if fused:
        buffer = torch.cat((*inputs, inputs[1]), -2)
        q, k = buffer[:, : x.x.shape[1]], buffer[:, x.x.shape[1] : -x.k.shape[1]]
    else:
        q, k = (t * 1 for t in inputs)
    results = rotary_qk_wrapper(q, k, **options(x), q_out=q, k_out=k)
    assert results["q"] is q and results["k"] is k
    assert_same_bits([r.detach() for r in results], rotated(x, (x.x, x.k)))
    assert_same_bits(torch.autograd.grad(tuple(results), inputs, grads), rotated(x, grads, True))


def test_leaves_and_their_views_are_not_written(device):
    """As torch has it for any operation in place."""
    x, _ = draw(rotary.HALVES, device)
    leaf, _ = leaves(x)
    for target in (leaf, leaf[:, :4]):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            rotary_wrapper(target, **options(x), out=target)
    torch.cuda.synchronize()
    assert budget.same_bits(leaf.detach(), x.x)


def test_write_without_grad_mode_is_noticed_by_the_graph_before_it(device):
    x, _ = draw(rotary.HALVES, device)
    q = leaves(x)[0] * 1
    loss = (q * q).sum()
    with torch.no_grad():
        rotary_wrapper(q, **options(x), out=q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Streams, captures, devices.


def test_explicit_stream_with_the_graph_freed_at_once(device):
    """Forward and backward run on the side stream; memory freed by the caller meanwhile is not handed out again."""
    x, grads = draw(rotary.HALVES, device)
    want, want_grads = rotated(x, (x.x, x.k)), rotated(x, grads, True)
    side = torch.cuda.Stream()
    for _ in range(4):
        inputs = leaves(x)
        shapes = [(t.shape, t.dtype) for t in inputs]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(gpu.SLEEP_CYCLES // 10)
        results = tuple(rotary_qk_wrapper(*inputs, **options(x), stream=side))
        got = torch.autograd.grad(results, inputs, grads)
        results = [r.detach() for r in results]
        del inputs
        thieves = [torch.full(shape, 77, dtype=dtype, device=device) for shape, dtype in shapes]
        torch.cuda.synchronize()
        assert_same_bits(results, want)
        assert_same_bits(got, want_grads)
        del thieves


def test_captured_training_step_follows_new_data(device):
    """Forward and backward in one graph; a replay equals the eager step on the same numbers, bit for bit."""
    x, grads = draw(rotary.HALVES, device)
    inputs = leaves(x)
    kept = []

    def step():
        results = tuple(rotary_qk_wrapper(*inputs, **options(x)))
        kept[:] = (*(r.detach() for r in results), *torch.autograd.grad(results, inputs, grads))

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (2, 3):
        fresh = rotary.draw(rotary.HALVES, LAYOUT, device, seed)
        with torch.no_grad():
            inputs[0].copy_(fresh.x), inputs[1].copy_(fresh.k)
        x.positions.copy_(fresh.positions)
        for result in kept:
            result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(kept, (*rotated(fresh, (fresh.x, fresh.k)), *rotated(fresh, grads, True)))


@pytest.mark.multi_gpu
def test_gradients_on_a_device_that_is_not_current(device):
    x, grads = draw(rotary.HALVES, torch.device("cuda", 1))
    inputs = leaves(x)
    got = torch.autograd.grad(tuple(rotary_qk_wrapper(*inputs, **options(x))), inputs, grads)
    assert torch.cuda.current_device() == device.index
    assert_same_bits(got, rotated(x, grads, True))


# torch.compile.


@MAIN
def test_opcheck(config, device):
    x, _ = draw(config, device)
    torch.library.opcheck(ONE, (leaves(x)[0], *rest(x)))
    torch.library.opcheck(BOTH, (*leaves(x), *rest(x, True)))
    torch.library.opcheck(BOTH, (x.x, x.k, *rest(x)))
    torch.library.opcheck(ONE_INPLACE, (x.x.clone(), *rest(x)))
    torch.library.opcheck(BOTH_INPLACE, (x.x.clone(), x.k.clone(), *rest(x)))


@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "in_place"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step_is_one_graph(dynamic, backend, in_place, device, fresh_compiler):
    """fullgraph; with dynamic shapes one graph serves every number of tokens and heads. Same bits as eager."""
    fresh_compiler.backend = backend

    def step(q, k, lookup):
        q, k = q * 1, k * 1
        targets = {"q_out": q, "k_out": k} if in_place else {}
        return tuple(rotary_qk_wrapper(q, k, **lookup, **targets, interleaved=False))

    compiled = torch.compile(step, backend=fresh_compiler, fullgraph=True, dynamic=dynamic)
    sizes = [(37, 8), (12, 6), (501, 4)]
    for tokens, heads in sizes if dynamic else sizes[:1]:
        x, grads = draw(rotary.HALVES, device, LAYOUT._replace(tokens=(tokens,), heads=heads))
        inputs = leaves(x)
        results = compiled(*inputs, x.lookup)
        assert_same_bits([r.detach() for r in results], rotated(x, (x.x, x.k)))
        assert_same_bits(torch.autograd.grad(results, inputs, grads), rotated(x, grads, True))
    assert fresh_compiler.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_inference_writes_into_the_fused_buffer(backend, device, fresh_compiler):
    """And nothing else of it."""
    x, _ = draw(rotary.HALVES, device)
    fresh_compiler.backend = backend
    heads, kv_heads = x.x.shape[1], x.k.shape[1]

    def step(qkv, lookup):
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        rotary_qk_wrapper(q, k, **lookup, interleaved=False, q_out=q, k_out=k)
        return qkv * 2

    with torch.inference_mode():
        qkv = torch.cat((x.x, x.k, x.k), 1)
        doubled = torch.compile(step, backend=fresh_compiler, fullgraph=True)(qkv, x.lookup)
    want = torch.cat((*rotated(x, (x.x, x.k)), x.k), 1)
    assert_same_bits((qkv, doubled), (want, want * 2))

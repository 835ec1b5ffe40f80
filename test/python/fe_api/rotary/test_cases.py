"""Public bug reports as cases, where the rotary op has the same kind of fault to fear.

Captures are also in fe_api/lifecycle. The caches that all families share are tested with the compressor.
"""

import itertools

import pytest
import torch

from cuteforge import ContractError, RotaryEmbedding, rotary_emb, rotary_qk_wrapper, rotary_table, rotary_wrapper
from cuteforge.families.rotary import reference
from helpers import budget, gpu, process, rotary
from helpers.canary import Canary, Slices


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
@pytest.mark.parametrize("storage", ["token_major", "head_major"])
def test_one_key_head_is_rotated(storage, in_place, interleaved, device):
    """fp32, q of 2 heads and k of 1, two tokens; both storages behind the same (B, L, H, D)."""
    generator = torch.Generator(device=device).manual_seed(0)

    def heads(count):
        shape = (1, 2, count, 128) if storage == "token_major" else (1, count, 2, 128)
        tensor = torch.randn(shape, generator=generator, device=device)
        return tensor if storage == "token_major" else tensor.transpose(1, 2)

    q, k = heads(2), heads(1)
    positions = torch.tensor([[5, 17]], device=device)
    x = rotary.Inputs(q.clone(), k.clone(), rotary_table(32, 128, device=device), positions, interleaved)
    targets = {"q_out": q, "k_out": k} if in_place else {}
    got = rotary_qk_wrapper(q, k, **x.lookup, interleaved=interleaved, **targets)
    assert not torch.equal(got["k"], x.k)
    rotary.check({"out": got["q"], "k_out": got["k"]}, x)


@pytest.mark.parametrize("tokens", [(1,), (1, 1), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_strides_of_size_1_dims_say_nothing(stride, tokens, device):
    """Whatever is recorded as the stride of a dim of one element, misaligned or 0."""
    layout = rotary.TWO_PACKED._replace(tokens=tokens, heads=1, kv_heads=1)
    x = rotary.draw(rotary.HALVES, layout, device)
    want = rotary.run(x, layout)

    def odd(tensor):
        strides = [stride if n == 1 else s for n, s in zip(tensor.shape, tensor.stride())]
        return tensor.as_strided(tensor.shape, strides)

    got = rotary_qk_wrapper(odd(x.x), odd(x.k), **x.lookup, interleaved=False)
    assert budget.same_bits(got["q"], want["out"]) and budget.same_bits(got["k"], want["k_out"])
    q, k = odd(x.x.clone()), odd(x.k.clone())
    rotary_qk_wrapper(q, k, **x.lookup, interleaved=False, q_out=q, k_out=k)
    assert budget.same_bits(q, want["out"]) and budget.same_bits(k, want["k_out"])


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_slices_of_wider_buffers_with_other_strides(index, interleaved, device):
    """The report's shapes: q (8, 64, 64) strides (16384, 256, 1), k (8, 1, 64) strides (2624, 64, 1), fp32 cache
    (203008, 64)."""
    generator = torch.Generator(device=device).manual_seed(0)
    q_buffer = torch.randn(8, 64, 256, generator=generator, device=device).bfloat16()
    k_buffer = torch.randn(8, 2624, generator=generator, device=device).bfloat16()
    q, k = q_buffer[..., 192:], k_buffer[:, 2560:].unflatten(1, (1, 64))
    assert q.stride() == (16384, 256, 1) and k.stride() == (2624, 64, 1)
    guards = Slices(q_buffer, q), Slices(k_buffer, k)
    cache = torch.cat(rotary_table(203_008, 64, device=device), 1)
    cos, sin = cache.chunk(2, 1)
    positions = torch.tensor([0, 1, 77, 4096, 100_003, 203_007, 203_006, 2], dtype=index, device=device)
    x = rotary.Inputs(q.clone(), k.clone(), (cos, sin), positions, interleaved)
    rotary_qk_wrapper(q, k, **x.lookup, interleaved=interleaved, q_out=q, k_out=k)
    torch.cuda.synchronize()
    rotary.check({"out": q, "k_out": k}, x)
    for guard in guards:
        guard.check_guards()


RO_3_POSITIONS = (257, 1857, 4095, 15962, 65537, 1000003)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_angles_at_long_positions(interleaved, autocast, device):
    """x = 1, D = 128: within one bf16 ulp of the fp64 angles, table and rotation both made under autocast."""
    positions = torch.tensor(RO_3_POSITIONS, device=device)
    x = torch.ones(len(RO_3_POSITIONS), 1, 128, dtype=torch.bfloat16, device=device)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        cos, sin = rotary_table(max(RO_3_POSITIONS) + 1, 128, device=device)
        got = rotary_wrapper(x, cos=cos, sin=sin, positions=positions, interleaved=interleaved)["out"]
    frequency = 10000.0 ** (-torch.arange(64, dtype=torch.float64, device=device) / 64)
    angle = positions[:, None] * frequency
    first, second = angle.cos() - angle.sin(), angle.cos() + angle.sin()
    want = torch.stack((first, second), -1).flatten(1) if interleaved else torch.cat((first, second), -1)
    error = (got[:, 0].double() - want).abs()
    # The fp32 table itself is off by 2**-25 of 1, which shows where cos and sin cancel.
    assert bool((error <= budget.ulp(want, torch.bfloat16) + 2.0**-23).all()), error.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_table_of_another_precision_is_refused_by_name(dtype, device):
    x = rotary.draw(rotary.HALVES, rotary.PACKED, device)
    cos, sin = (t.to(dtype) for t in x.table)
    with pytest.raises(ContractError, match=r"^cos\b.*float32"):
        rotary_wrapper(x.x, cos=cos, sin=sin, positions=x.positions)
    with pytest.raises(ContractError, match=r"^sin\b.*float32"):
        rotary_wrapper(x.x, cos=x.table[0], sin=sin, positions=x.positions)
    by_token = rotary.draw(rotary.BY_TOKEN, rotary.PACKED, device)
    with pytest.raises(ContractError, match=r"^freqs_cis\b.*float32"):
        rotary_wrapper(by_token.x, by_token.table.to(dtype))


ROTATED = {False: [-1.9841, 1.9599, 2.4624, 4.0198], True: [-1.1426, 1.9221, 2.9599, 4.0298]}


@pytest.mark.parametrize("interleaved", ROTATED, ids=["halves", "interleaved"])
@pytest.mark.parametrize("by_token", [False, True], ids=["positions", "freqs_cis"])
def test_the_pairing_flag_is_obeyed(by_token, interleaved, device):
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], device=device)
    cos, sin = rotary_table(2, 4, device=device)
    table = {"cos": cos, "sin": sin, "positions": torch.tensor([1], device=device)}
    if by_token:
        table = {"freqs_cis": torch.stack((cos[1:], sin[1:]), -1)}
    want = torch.tensor(ROTATED[interleaved], device=device)
    for keys in ({}, {"k": x.clone()}):
        call = rotary_qk_wrapper if keys else rotary_wrapper
        for result in call(x, **keys, **table, interleaved=interleaved):
            torch.testing.assert_close(result.flatten(), want, rtol=0, atol=1e-4)


@pytest.mark.multi_gpu
def test_operands_of_a_gpu_that_is_not_current(device):
    """Right on each device, and the current device stays what it was."""
    for index in (1, 0):
        x = rotary.draw(rotary.HALVES, rotary.FUSED, torch.device("cuda", index))
        with torch.cuda.device(0):
            rotary.check(rotary.run(x, rotary.FUSED), x)
            assert rotary_wrapper(x.x, **x.lookup)["out"].device.index == index
            assert torch.cuda.current_device() == 0


@pytest.mark.multi_gpu
def test_operands_on_two_gpus_are_refused_by_name(device):
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, torch.device("cuda", 0))
    with pytest.raises(ContractError, match=r"^k\b.*cuda:0.*cuda:1"):
        rotary_qk_wrapper(x.x, gpu.moved(x.k, 1), **x.lookup)
    with pytest.raises(ContractError, match=r"^positions\b.*cuda:0.*cuda:1"):
        rotary_wrapper(x.x, **{**x.lookup, "positions": gpu.moved(x.positions, 1)})


@pytest.mark.parametrize("name", ["q", "k", "cos", "sin", "positions", "freqs_cis"])
def test_cpu_operand_is_named_with_both_devices(name, device):
    config = rotary.BY_TOKEN if name == "freqs_cis" else rotary.HALVES
    x = rotary.draw(config, rotary.TWO_PACKED, device)
    operands = {"q": x.x, "k": x.k, **x.lookup}
    operands[name] = operands[name].cpu()
    with pytest.raises(ContractError, match=rf"(?i)^{name}\b.*cuda.*cpu"):
        rotary_qk_wrapper(**operands)


def test_warm_capture_with_positions_changed_in_place(device):
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device)
    memory = rotary.arrange(x, rotary.TWO_PACKED)
    op = rotary.compiled(memory.inputs, memory.outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotary.execute(op, memory.inputs, memory.outputs)
    for seed in (1, 2, 3):
        fresh = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device, seed)
        for name in ("x", "k", "positions"):
            getattr(memory.inputs, name).copy_(getattr(fresh, name))
        for tensor in memory.outputs.values():
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        rotary.check(memory.outputs, fresh)
    memory.check()


def variants(device):
    """Same shape, other things that a launch cache may forget: pairing, direction, width, dtype, index, kind of
    table."""
    layout = rotary.TWO_PACKED
    for config in (*rotary.MAIN_CONFIGS, rotary.HALVES_FP32):
        yield rotary.draw(config, layout, device), {}
    x = rotary.draw(rotary.HALVES, layout, device)
    yield x, {"inverse": True}
    yield x.with_(positions=x.positions.int()), {}


def test_results_do_not_depend_on_call_order(device):
    calls = list(variants(device))
    want = [rotary.run(x, rotary.TWO_PACKED, **options) for x, options in calls]
    for order in itertools.islice(itertools.permutations(range(len(calls))), 0, 5040, 61):
        for i in order:
            x, options = calls[i]
            got = rotary_qk_wrapper(x.x, x.k, **x.lookup, interleaved=x.interleaved, **options)
            assert rotary.same({"out": got["q"], "k_out": got["k"]}, want[i]), (order, i)


FORK = """
import os
import cuteforge, torch
assert not torch.cuda.is_initialized()
spec = lambda *shape, dtype="bfloat16": cuteforge.TensorSpec(shape, dtype)
x, table, positions = spec(8, 4, 128), spec(99, 64, dtype="float32"), spec(8, dtype="int64")
cuteforge.RotaryEmbedding(x, (table, table), x, positions).check_support()
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    try:
        from helpers import rotary
        inputs = rotary.draw(rotary.HALVES, rotary.FUSED, torch.device("cuda"))
        rotary.check(rotary.run(inputs, rotary.FUSED), inputs)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_import_and_support_touch_no_gpu_and_fork_works(device):
    process.run(FORK)


def test_parameters_work_under_no_grad(device):
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device)
    want = rotary.run(x, rotary.TWO_PACKED)
    q, k = torch.nn.Parameter(x.x), torch.nn.Parameter(x.k)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = rotary_qk_wrapper(q, k, **x.lookup, interleaved=False)
            assert rotary.same({"out": got["q"], "k_out": got["k"]}, want)
            out = {"out": torch.empty_like(x.x), "k_out": torch.empty_like(x.k)}
            rotary.execute(rotary.compiled(x.with_(x=q, k=k), out), x.with_(x=q, k=k), out)
            assert rotary.same(out, want)


@pytest.mark.parametrize("name", ["x", "k", "cos"])
def test_class_refuses_operands_that_require_grad_by_name(name, device):
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device)
    memory = rotary.arrange(x, rotary.TWO_PACKED)
    op = rotary.compiled(memory.inputs, memory.outputs)
    given = memory.inputs
    if name == "cos":
        given = given.with_(table=(given.table[0].clone().requires_grad_(), given.table[1]))
    else:
        given = given.with_(**{name: getattr(given, name).detach().requires_grad_()})
    with pytest.raises(ContractError, match=rf"^{name}\b.*requires_grad"):
        rotary.execute(op, given, memory.outputs)
    torch.cuda.synchronize()
    for output in ("out", "k_out"):
        memory.guards[output].check_untouched(output)


@pytest.mark.parametrize("config", rotary.MAIN_CONFIGS, ids=lambda c: c.label)
def test_wrappers_give_the_right_graph_or_refuse(config, device):
    """The gradient is the inverse rotation, also through the thin function."""
    x = rotary.draw(config, rotary.TWO_PACKED, device)
    q, k = (torch.nn.Parameter(t) for t in (x.x, x.k))
    grads = rotary.draw(config, rotary.TWO_PACKED, device, seed=1)
    want = rotary.run(x.with_(x=grads.x, k=grads.k), rotary.TWO_PACKED, inverse=True)
    try:
        results = rotary_qk_wrapper(q, k, **x.lookup, interleaved=x.interleaved)
    except ContractError as refusal:
        assert str(refusal).startswith(("q", "x"))
        return
    got = torch.autograd.grad(tuple(results), (q, k), (grads.x, grads.k))
    assert rotary.same(dict(zip(("out", "k_out"), got)), want)
    if config.index is None:
        (got,) = torch.autograd.grad(rotary_emb(q, x.table), q, grads.x)
        assert budget.same_bits(got, want["out"])


def test_a_leaf_is_not_rotated_in_place(device):
    """As torch has it for any leaf that requires grad: refused, and nothing written."""
    x = rotary.draw(rotary.HALVES, rotary.PACKED, device)
    leaf = torch.nn.Parameter(x.x.clone())
    with pytest.raises((ContractError, RuntimeError)):
        rotary_wrapper(leaf, **x.lookup, interleaved=False, out=leaf)
    assert budget.same_bits(leaf.detach(), x.x)


EMPTY = {"no_tokens": (0,), "no_batch": (0, 5), "batches_of_nothing": (5, 0)}


@pytest.mark.parametrize("tokens", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("config", [rotary.HALVES, rotary.BY_TOKEN], ids=lambda c: c.label)
@pytest.mark.parametrize("how", ["class", "bind", "wrapper", "stream", "capture"])
def test_nothing_to_do(how, config, tokens, device):
    """Empty results of the right shape, nothing launched, and the next call is right."""
    layout = rotary.TWO_PACKED._replace(tokens=tokens)
    x, normal = rotary.draw(config, layout, device), rotary.draw(config, rotary.TWO_PACKED, device)
    rotary.run(normal, rotary.TWO_PACKED)
    if how in ("class", "bind"):
        out, k_out = torch.empty_like(x.x), torch.empty_like(x.k)
        op = RotaryEmbedding(x.x, x.table, out, x.positions, k=x.k, k_out=k_out, interleaved=x.interleaved).compile()
        run = op.execute if how == "class" else lambda *args, **named: op.bind(*args, **named)()
        run(x.x, x.table, out, x.positions, k=x.k, k_out=k_out)
    else:
        stream = {"stream": torch.cuda.Stream()} if how == "stream" else {}

        def call():
            return rotary_qk_wrapper(x.x, x.k, **x.lookup, interleaved=x.interleaved, **stream)

        call()
        out, k_out = gpu.captured(call, device) if how == "capture" else call()
    torch.cuda.synchronize()
    assert out.shape == x.x.shape and k_out.shape == x.k.shape
    rotary.check(rotary.run(normal, rotary.TWO_PACKED), normal)


def test_the_policy_of_other_libraries_gives_the_same_numbers(device):
    """The complex product of model code, fp32, against the interleaved kernel."""
    x = rotary.draw(rotary.BY_TOKEN._replace(dtype=torch.float32), rotary.DENSE, device)
    angles = torch.view_as_complex(x.table)[:, :, None]
    want = torch.view_as_real(torch.view_as_complex(x.x.unflatten(-1, (-1, 2))) * angles).flatten(-2)
    torch.testing.assert_close(rotary_emb(x.x, x.table), want)
    torch.testing.assert_close(reference.rotate(x.x, x.table), want)
    guard = Canary(x.x.shape, torch.float32, device)
    assert rotary_wrapper(x.x, x.table, out=guard.tensor)["out"] is guard.tensor
    torch.cuda.synchronize()
    guard.check("out")

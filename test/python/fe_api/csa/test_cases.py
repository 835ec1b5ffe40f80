"""Public bug reports as cases, where the compressor has the same kind of fault to fear.

Captures are also in fe_api/lifecycle, and so are cold caches and eviction, at the full width of the report.
"""

import itertools

import pytest
import torch

from cuteforge import (
    ContractError,
    CSACompressorBackward,
    CSACompressorForward,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from cuteforge.families.csa.compressor import reference
from helpers import budget, csa, process
from helpers.canary import Canary, padded_copy
from helpers.gpu import captured, moved
from helpers.packs import Pack, offsets

D = csa.ONE_WINDOW.d


def plain(rows, lengths, device):
    """Ratio 4, coff 1, score and ape 0, every column of kv row ``t`` equal to ``rows[t]``."""
    pack = Pack(tuple(lengths), 4, extra_tokens=len(rows) - sum(lengths))
    x = csa.inputs(csa.ONE_WINDOW, pack, device, poison=False)
    kv = torch.tensor(rows, device=device).to(x.kv.dtype)[:, None].repeat(1, D)
    return x.with_(kv=kv, score=torch.zeros_like(x.score), ape=torch.zeros_like(x.ape))


@pytest.mark.parametrize("tail", [1e4, torch.nan])
@pytest.mark.parametrize("beyond", [0, 5])
def test_tokens_after_the_last_block_are_not_pooled(tail, beyond, device):
    x = plain([1.0, 2.0, 3.0, 4.0, *[tail] * 3, *[torch.nan] * beyond], [7], device)
    assert (csa.run_forward(x) == 2.5).all()
    grads = csa.run_backward(x)
    assert not grads.grad_kv[4:].any()
    assert not grads.grad_score[4:].any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("optional", [False, True])
def test_segments_that_start_at_a_full_block(optional, device):
    x = plain([float(t) for t in range(20)], [3, 4, 5, 0, 8], device)
    options = {"total_comp": 4, "head_dim": D, "stream": torch.cuda.current_stream()} if optional else {}
    out = csa_compressor_forward_wrapper(*x.tensors, **x.config, **options)["out"]
    want = torch.tensor([4.5, 8.5, 13.5, 17.5], device=device, dtype=out.dtype)
    assert torch.equal(out, want[:, None].expand(4, D))
    assert torch.equal(csa.run_forward(x), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_position_bias_is_never_reinterpreted(dtype, device):
    x = csa.small(csa.CSA, device)
    ape = (torch.arange(4, device=device) / 2)[:, None].repeat(1, x.ape.shape[1])
    x = x.with_(ape=ape)
    want = csa.run_forward(x)
    csa.check_forward(want, x)
    try:
        got = csa_compressor_forward_wrapper(
            x.kv, x.score, ape.to(dtype), *x.tensors[3:], **x.config, total_comp=x.total_comp
        )["out"]
    except ContractError as refusal:
        assert str(refusal).startswith("ape")
    else:
        assert budget.same_bits(got, want)


def test_int64_offsets(device):
    """Read as int32 pairs they would be [0, 0, length, 0, ...]: other segments."""
    x = csa.small(csa.CSA, device)
    tables = (x.cu_seqlens.long(), x.cu_seqlens_comp.long())
    got = csa_compressor_forward_wrapper(*x.tensors[:3], *tables, **x.config, total_comp=x.total_comp)["out"]
    assert budget.same_bits(got, csa.run_forward(x))


def test_shapes_are_no_compile_key(device):
    """In-process half; test_cache.py counts all compiles of 200 random shapes in a cold process."""
    from cuteforge.runtime import compile_cache

    def call(tokens, segments):
        x = csa.inputs(csa.CSA, Pack((tokens // segments,) * segments, 4), device)
        csa_compressor_forward_wrapper(*x.tensors, **x.config, total_comp=x.total_comp)
        csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config)
        stats = compile_cache.stats()
        return stats.compiles, stats.disk_hits, stats.size

    first = call(500, 1)
    assert all(call(tokens, segments) == first for tokens, segments in ((501, 2), (5000, 9), (1024, 4), (4, 1)))


def test_twenty_backward_runs(device):
    """T = 4096, D = 128; determinism flags are in test_determinism.py."""
    x = csa.inputs(csa.CSA, Pack((4096,), 4), device)
    want = csa.run_backward(x)
    for _ in range(19):
        assert all(budget.same_bits(a, b) for a, b in zip(csa.run_backward(x), want, strict=True))


@pytest.mark.multi_gpu
def test_operands_of_a_gpu_that_is_not_current(device):
    """Right on each device, and the current device stays what it was."""
    for index in (1, 0):
        x = csa.small(csa.CSA, torch.device("cuda", index))
        with torch.cuda.device(0):
            csa.check_forward(csa.run_forward(x), x)
            csa.check_backward(csa.run_backward(x), x)
            out = csa_compressor_forward_wrapper(*x.tensors, **x.config)["out"]
            assert out.device.index == index
            assert torch.cuda.current_device() == 0


@pytest.mark.multi_gpu
def test_operands_on_two_gpus_are_refused_by_name(device):
    x = csa.small(csa.CSA, torch.device("cuda", 0))
    out = Canary.like(x.grad_out)
    op = CSACompressorForward(*x.tensors, out.tensor, **x.config).compile()
    with pytest.raises(ContractError, match=r"^score\b.*cuda:0.*cuda:1"):
        op.execute(x.kv, moved(x.score, 1), *x.tensors[2:], out.tensor)
    with pytest.raises(ContractError, match=r"^stream\b"):
        op.execute(*x.tensors, out.tensor, stream=torch.cuda.Stream(torch.device("cuda", 1)))
    torch.cuda.synchronize()
    out.check_untouched()


@pytest.mark.parametrize("position", range(5))
def test_cpu_operand_is_named_with_both_devices(position, device):
    x = csa.small(csa.CSA, device)
    tensors = [t.cpu() if i == position else t for i, t in enumerate(x.tensors)]
    name = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")[position]
    with pytest.raises(ContractError, match=rf"(?i)^{name}\b.*cuda.*cpu"):
        csa_compressor_forward_wrapper(*tensors, **x.config, total_comp=x.total_comp)


def test_warm_capture_with_lengths_changed_in_place(device):
    x = csa.inputs(csa.CSA, Pack((80,), 4, extra_rows=2), device, poison=False)
    out = torch.empty_like(x.grad_out)
    op = CSACompressorForward(*x.tensors, out, **x.config).compile()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.execute(*x.tensors, out)
    for length in (80, 41, 7):
        x.cu_seqlens.copy_(offsets([length]))
        x.cu_seqlens_comp.copy_(offsets([length // 4]))
        x.kv.neg_()
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        csa.check_forward(out, x)


def variants(device):
    """Same shape, other things that a launch cache may forget: dtype, windows, strides, ratio."""
    pitched = csa.small(csa.CSA, device)
    yield csa.small(csa.CSA, device)
    yield pitched.with_(kv=padded_copy(pitched.kv, 512), score=padded_copy(pitched.score, 264))
    yield csa.small(csa.CSA_FP32, device)
    yield csa.small(csa.ONE_WINDOW, device)


def test_results_do_not_depend_on_call_order(device):
    inputs = list(variants(device))
    want = [csa.run_forward(x) for x in inputs]
    for order in itertools.permutations(range(len(inputs))):
        for i in order:
            x = inputs[i]
            got = csa_compressor_forward_wrapper(*x.tensors, **x.config, total_comp=x.total_comp)["out"]
            assert budget.same_bits(got, want[i]), (order, i)


FORK = """
import os
import cuteforge, torch
assert not torch.cuda.is_initialized()
spec = lambda *shape, dtype="bfloat16": cuteforge.TensorSpec(shape, dtype)
matrix, table = spec(64, 256), spec(2, dtype="int32")
op = cuteforge.CSACompressorForward(matrix, matrix, spec(4, 256, dtype="float32"), table, table, spec(16, 128))
op.check_support()
meta = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
cuteforge.CSACompressorForward(meta, meta, *list(op.samples.values())[2:]).check_support()
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    try:
        from helpers import csa
        x = csa.small(csa.CSA, torch.device("cuda"))
        csa.check_forward(csa.run_forward(x), x)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_import_and_support_touch_no_gpu_and_fork_works(device):
    process.run(FORK)


def parameters(x):
    return [torch.nn.Parameter(t) for t in (x.kv, x.score, x.ape)]


def test_parameters_work_under_no_grad(device):
    x = csa.small(csa.CSA, device)
    want, want_grads = csa.run_forward(x), csa.run_backward(x)
    kv, score, ape = parameters(x)
    y = x.with_(kv=kv, score=score, ape=ape)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert budget.same_bits(csa.run_forward(y), want)
            got = csa_compressor_forward_wrapper(*y.tensors, **x.config, total_comp=x.total_comp)["out"]
            assert budget.same_bits(got, want)
            grads = csa_compressor_backward_wrapper(*y.tensors, x.grad_out, **x.config)
            assert all(budget.same_bits(a, b) for a, b in zip(grads, want_grads, strict=True))


@pytest.mark.parametrize("position", range(3))
def test_class_refuses_operands_that_require_grad_by_name(position, device):
    x = csa.small(csa.CSA, device)
    tensors = list(x.tensors)
    tensors[position] = torch.nn.Parameter(tensors[position])
    name = ("kv", "score", "ape")[position]
    out = Canary.like(x.grad_out)
    forward = CSACompressorForward(*x.tensors, out.tensor, **x.config).compile()
    grads = [Canary.like(t) for t in (x.kv, x.score, x.ape)]
    buffers = [grad.tensor for grad in grads]
    backward = CSACompressorBackward(*x.tensors, x.grad_out, *buffers, **x.config).compile()
    workspace = torch.empty(backward.workspace_bytes(), dtype=torch.uint8, device=device)
    workspace = workspace if workspace.numel() else None
    with pytest.raises(ContractError, match=rf"^{name}\b.*requires_grad"):
        forward.execute(*tensors, out.tensor)
    with pytest.raises(ContractError, match=rf"^{name}\b.*requires_grad"):
        backward.execute(*tensors, x.grad_out, *buffers, workspace=workspace)
    torch.cuda.synchronize()
    for canary in (out, *grads):
        canary.check_untouched()


def test_wrapper_gives_the_right_graph_or_refuses(device):
    x = csa.small(csa.CSA, device)
    kv, score, ape = parameters(x)
    try:
        out = csa_compressor_forward_wrapper(kv, score, ape, *x.tensors[3:], **x.config, total_comp=x.total_comp)["out"]
    except ContractError as refusal:
        assert str(refusal).startswith("kv")
        return
    grads = torch.autograd.grad(out, (kv, score, ape), x.grad_out)
    csa.check_backward(reference.CompressorGrads(*grads), x)


def empty_calls(device):
    """(what, inputs): no segments, no tokens, no rows; each has rows of the other kinds where that is possible."""
    for name, pack in {
        "nothing": Pack((), 4),
        "no_tokens": Pack((0, 0), 4),
        "no_rows": Pack((3, 2), 4),
        "no_segments": Pack((), 4, extra_tokens=8),
    }.items():
        yield name, csa.inputs(csa.CSA, pack, device)


def check_empty(out, grads, x, name):
    assert out.shape == (0, x.head_dim), name
    assert [g.shape for g in grads] == [x.kv.shape, x.score.shape, x.ape.shape], name
    assert not any(g.any() for g in grads), name


@pytest.mark.parametrize("how", ["class", "wrapper", "stream", "capture"])
def test_nothing_to_do(how, device):
    """Empty results of the right shape, gradients all zero, and the next call is right."""
    normal = csa.small(csa.CSA, device)
    csa.run_backward(normal)
    for name, x in empty_calls(device):
        if how == "class":
            check_empty(csa.run_forward(x), csa.run_backward(x), x, name)
            continue
        options = {"stream": torch.cuda.Stream()} if how == "stream" else {}

        def call(x=x, options=options):
            out = csa_compressor_forward_wrapper(*x.tensors, **x.config, total_comp=0, **options)["out"]
            return out, csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config, **options)

        out, grads = captured(call, device) if how == "capture" else call()
        torch.cuda.synchronize()
        check_empty(out, grads, x, name)
    csa.check_forward(csa.run_forward(normal), normal)
    csa.check_backward(csa.run_backward(normal), normal)

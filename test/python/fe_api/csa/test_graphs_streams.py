"""CUDA graphs, explicit streams, devices."""

import gc

import pytest
import torch

from cuteforge import (
    ContractError,
    CSACompressorBackward,
    CSACompressorForward,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from helpers import budget, csa, process
from helpers.canary import Canary
from helpers.gpu import SLEEP_CYCLES, check_not_behind, check_while_behind
from helpers.packs import Pack, offsets

ROOM = Pack((64,), 4, extra_tokens=192, extra_rows=48)


def static_inputs(device):
    """Room for 256 tokens, 64 rows and 3 segments; contents change between replays."""
    x = csa.inputs(csa.CSA, ROOM, device, poison=False)
    cu = torch.tensor([0, 64, 64, 64], dtype=torch.int32, device=device)
    return x.with_(cu_seqlens=cu, cu_seqlens_comp=cu // 4)


def refill(x, lengths, seed):
    """New numbers and other segments in the same memory."""
    fresh = csa.inputs(csa.CSA, ROOM, x.kv.device, seed=seed, poison=False)
    for name in ("kv", "score", "ape", "grad_out"):
        getattr(x, name).copy_(getattr(fresh, name))
    x.cu_seqlens.copy_(offsets(lengths))
    x.cu_seqlens_comp.copy_(offsets([n // 4 for n in lengths]))


REPLAYS = ((1, [100, 57, 99]), (2, [4, 0, 8]), (3, [0, 0, 0]), (4, [256, 0, 0]))


@pytest.mark.parametrize("entry", ["execute", "bind", "wrapper"])
def test_replays_follow_new_data_and_fewer_rows(entry, device):
    """The capture holds capacities; lengths and numbers are read at replay."""
    x = static_inputs(device)
    out = Canary.like(x.grad_out)
    grads = [Canary.like(t) for t in (x.kv, x.score, x.ape)]
    results, run = prepared(entry, x, out.tensor, [grad.tensor for grad in grads])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed, lengths in REPLAYS:
        refill(x, lengths, seed)
        for tensor in results:
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        csa.check_forward(results[0], x)
        eager = csa.eager_backward(x)
        budget.assert_same_values(results[1], eager.grad_kv, "grad_kv")
        budget.assert_same_values(results[2], eager.grad_score, "grad_score")
        torch.testing.assert_close(results[3], eager.grad_ape, rtol=1e-4, atol=1e-4)
    for canary in (out, *grads):
        canary.check_guards()


def prepared(entry, x, out, grads):
    """(out, grad_kv, grad_score, grad_ape) that a call writes, and the call, warm."""
    if entry == "wrapper":
        return prepared_wrapper(x)
    forward = CSACompressorForward(*x.tensors, out, **x.config).compile()
    backward = CSACompressorBackward(*x.tensors, x.grad_out, *grads, **x.config).compile()
    workspace = torch.full((max(1, backward.workspace_bytes()),), 255, dtype=torch.uint8, device=out.device)
    if entry == "bind":
        calls = (
            forward.bind(*x.tensors, out),
            backward.bind(*x.tensors, x.grad_out, *grads, workspace=workspace),
        )
        return (out, *grads), lambda: [call() for call in calls]

    def execute():
        forward.execute(*x.tensors, out)
        backward.execute(*x.tensors, x.grad_out, *grads, workspace=workspace)

    return (out, *grads), execute


def prepared_wrapper(x):
    results = []

    def run():
        results.clear()
        results.append(csa_compressor_forward_wrapper(*x.tensors, **x.config, total_comp=x.total_comp)["out"])
        results.extend(csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config))

    run()
    torch.cuda.synchronize()
    return results, run


def test_compiled_kernel_outlives_its_op_while_a_graph_uses_it(device):
    """The op and every reference of ours are gone before the replay."""
    from cuteforge.runtime import compile_cache

    x = static_inputs(device)
    out = torch.empty_like(x.grad_out)
    graph = torch.cuda.CUDAGraph()
    op = CSACompressorForward(*x.tensors, out, **x.config).compile()
    with torch.cuda.graph(graph):
        op.execute(*x.tensors, out)
    del op
    compile_cache.clear()
    gc.collect()
    refill(x, [33, 1, 200], 7)
    graph.replay()
    torch.cuda.synchronize()
    csa.check_forward(out, x)


COLD_CAPTURE = """
import torch
from helpers import csa
from cuteforge import csa_compressor_forward_wrapper as forward

x = csa.small(csa.CSA, torch.device("cuda"))
torch.cuda.synchronize()
try:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(*x.tensors, **x.config, total_comp=x.total_comp)["out"]
except RuntimeError as error:
    assert "compile" in str(error), error
    print("refused")
else:
    graph.replay()
    torch.cuda.synchronize()
    csa.check_forward(out, x)
    print("captured")
warm = forward(*x.tensors, **x.config, total_comp=x.total_comp)["out"]
csa.check_forward(warm, x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = forward(*x.tensors, **x.config, total_comp=x.total_comp)["out"]
graph.replay()
torch.cuda.synchronize()
csa.check_forward(out, x)
print("went on")
"""


def test_cold_call_under_capture_is_refused_before_anything_and_the_process_goes_on(device, tmp_path):
    lines = process.run(COLD_CAPTURE, CUTEFORGE_CACHE_DIR=tmp_path / "cache").split("\n")
    assert lines[0] == "refused" and "went on" in lines


def test_explicit_stream_with_inputs_freed_at_once(device):
    """Memory the caller frees while the side stream is still behind is not handed out again: the call records it."""
    reference = csa.small(csa.CSA, device)
    want, want_grads = csa.run_forward(reference), csa.run_backward(reference)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(4):
        x = csa.small(csa.CSA, device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        out = csa_compressor_forward_wrapper(*x.tensors, **x.config, total_comp=x.total_comp, stream=side)["out"]
        grads = csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config, stream=side)
        shapes = [(t.shape, t.dtype) for t in (*x.tensors, x.grad_out)]
        del x
        thieves = [torch.full(shape, 77, dtype=dtype, device=device) for shape, dtype in shapes]
        side.synchronize()
        assert budget.same_bits(out, want)
        assert all(budget.same_bits(a, b) for a, b in zip(grads, want_grads, strict=True))
        del thieves


def loaded_op(device):
    """A forward whose code is there: loading it at its first launch may wait for a stream that is held. With its inputs
    and where it writes."""
    x = csa.small(csa.CSA, device)
    csa.run_forward(x)
    out = Canary.like(x.grad_out)
    return CSACompressorForward(*x.tensors, out.tensor, **x.config).compile(), x, out


@pytest.mark.parametrize("as_handle", [False, True], ids=["torch_stream", "raw_handle"])
def test_explicit_stream_is_where_the_launch_goes(as_handle, device):
    (op, x, out), side = loaded_op(device), torch.cuda.Stream()
    stream = side.cuda_stream if as_handle else side
    check_while_behind(side, lambda: op.execute(*x.tensors, out.tensor, stream=stream), out.check_untouched)
    out.check("out")
    csa.check_forward(out.tensor, x)


def test_handle_zero_is_the_default_stream(device):
    """Not the current one: it runs although the current stream is held."""
    (op, x, out), side = loaded_op(device), torch.cuda.Stream()
    check_not_behind(side, lambda: op.execute(*x.tensors, out.tensor, stream=0), out.check)
    csa.check_forward(out.tensor, x)


def test_no_stream_means_the_current_one(device):
    (op, x, out), side = loaded_op(device), torch.cuda.Stream()
    bound = op.bind(*x.tensors, out.tensor)

    def launch():
        with torch.cuda.stream(side):
            op.execute(*x.tensors, out.tensor)
            bound()

    check_while_behind(side, launch, out.check_untouched)
    csa.check_forward(out.tensor, x)


@pytest.mark.parametrize("stream", [-1, "side", 1.5])
def test_what_is_no_stream_is_refused(stream, device):
    x = csa.small(csa.CSA, device)
    out = Canary.like(x.grad_out)
    op = CSACompressorForward(*x.tensors, out.tensor, **x.config).compile()
    with pytest.raises(ContractError, match=r"^stream\b"):
        op.execute(*x.tensors, out.tensor, stream=stream)
    torch.cuda.synchronize()
    out.check_untouched()

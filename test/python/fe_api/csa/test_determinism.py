"""Bitwise repeatability, and what the flags of torch about it do."""

import warnings

import pytest
import torch

from cuteforge import CSACompressorBackward, csa_compressor_backward_wrapper
from helpers import budget, csa
from helpers.packs import Pack

RUNS = 20


@pytest.fixture
def deterministic_mode():
    """Sets torch's deterministic mode; restored afterwards."""
    mode, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def long_inputs(config, device):
    return csa.inputs(config, Pack((4096 // config.ratio * config.ratio, 513, 3 * config.ratio), config.ratio), device)


@pytest.mark.parametrize("config", [csa.CSA, csa.CSA_WIDE, csa.ODD, csa.HCA], ids=lambda c: c.label)
def test_twenty_runs_have_the_same_bits(config, device):
    """Every run gets fresh poisoned buffers, so nothing is equal because it was left over."""
    x = long_inputs(config, device)
    out, grads = csa.run_forward(x), csa.run_backward(x)
    for _ in range(RUNS - 1):
        assert budget.same_bits(csa.run_forward(x), out)
        assert all(budget.same_bits(a, b) for a, b in zip(csa.run_backward(x), grads, strict=True))


def test_bits_do_not_depend_on_what_else_runs(device):
    """A busy GPU changes when CTAs run, not what is added in which order."""
    x = long_inputs(csa.CSA, device)
    want = csa.run_backward(x)
    busy, other = torch.randn(2048, 2048, device=device), torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(other):
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
        assert all(budget.same_bits(a, b) for a, b in zip(csa.run_backward(x), want, strict=True))


def test_atomic_mode_keeps_kv_and_score_gradients_bitwise(device):
    x = long_inputs(csa.CSA, device)
    want = csa.run_backward(x)
    for _ in range(RUNS):
        grads = csa.run_backward(x, deterministic=False)
        assert budget.same_bits(grads.grad_kv, want.grad_kv)
        assert budget.same_bits(grads.grad_score, want.grad_score)


def atomic_calls(x):
    """The three ways to ask for the atomic mode: class, bound class, wrapper."""
    buffers = [torch.empty_like(t) for t in (x.kv, x.score, x.ape)]
    operands = (*x.tensors, x.grad_out, *buffers)
    op = CSACompressorBackward(*operands, **x.config, deterministic=False).compile()
    workspace = torch.empty(op.workspace_bytes(), dtype=torch.uint8, device=x.kv.device)
    workspace = workspace if workspace.numel() else None
    yield lambda: op.execute(*operands, workspace=workspace)
    yield lambda: op.bind(*operands, workspace=workspace)()
    yield lambda: csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config, deterministic=False)


def test_strict_mode_refuses_the_atomic_mode(device, deterministic_mode):
    x = csa.small(csa.CSA, device)
    for call in atomic_calls(x):
        deterministic_mode(True)
        with pytest.raises(RuntimeError, match="deterministic"):
            call()
        deterministic_mode(False)
        call()
    torch.cuda.synchronize()


def test_warn_only_mode_warns_about_the_atomic_mode(device, deterministic_mode):
    x = csa.small(csa.CSA, device)
    deterministic_mode(True, warn_only=True)
    for call in atomic_calls(x):
        with pytest.warns(UserWarning, match="deterministic"):
            call()
    torch.cuda.synchronize()


@pytest.mark.parametrize("warn_only", [False, True])
def test_default_mode_is_silent_and_right_under_both(warn_only, device, deterministic_mode):
    """Strict mode also makes torch.empty fill memory with NaN: another poison."""
    x = csa.small(csa.CSA, device)
    want = csa.run_backward(x)
    deterministic_mode(True, warn_only=warn_only)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config)
    deterministic_mode(False)
    assert all(budget.same_bits(a, b) for a, b in zip(got, want, strict=True))

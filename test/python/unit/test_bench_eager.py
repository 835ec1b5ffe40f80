"""The baseline in plain torch computes what the kernels compute; else every ratio to it would be of two different
things."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

from cuteforge import rotary_table
from cuteforge.families.csa.compressor import reference as compressor
from cuteforge.families.rotary import reference as rotary

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_csa  # noqa: E402
import bench_rotary  # noqa: E402
import eager  # noqa: E402
import harness  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_eager_rotation_is_that_of_the_reference(interleaved):
    q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
    cos, sin = rotary_table(32, 16)
    positions = torch.tensor([3, 0, 31, 5, 5, 1, 2])
    turned = eager.rotary(q, k, cos, sin, positions, interleaved=interleaved)()
    for x, got in zip((q, k), turned, strict=True):
        wanted = rotary.rotate(x, (cos, sin), positions, interleaved=interleaved)
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize(("ratio", "coff"), [(4, 2), (4, 1), (8, 2)])
def test_eager_compressor_is_that_of_the_reference(ratio, coff):
    segments, blocks, d = 3, 5, 6
    kv, score = (torch.randn(segments * blocks * ratio, coff * d) for _ in range(2))
    ape, grad_out = torch.randn(ratio, coff * d), torch.randn(segments * blocks, d)
    steps = torch.arange(segments + 1)
    packed = (kv, score, ape, steps * blocks * ratio, steps * blocks)

    (out,) = eager.compressor_forward(kv, score, ape, segments=segments, coff=coff)()
    torch.testing.assert_close(out, compressor.compress_forward(*packed, ratio=ratio, coff=coff), **CLOSE)

    grads = eager.compressor_backward(kv, score, ape, grad_out, segments=segments, coff=coff)
    wanted = compressor.compress_backward(*packed, grad_out, ratio=ratio, coff=coff)
    for _ in range(2):  # call after call, as it is timed
        for got, want in zip(grads(), wanted, strict=True):
            torch.testing.assert_close(got, want, **CLOSE)


def test_results_are_copied_to_where_the_check_looks():
    target = torch.zeros(3)
    eager.writing(lambda: (torch.ones(3),), (target,))()
    assert target.tolist() == [1, 1, 1]


class OnCpu(torch.overrides.TorchFunctionMode):
    """Tensors that a benchmark makes on the GPU are made on the CPU instead."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: "cpu" if name == "device" else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


@pytest.mark.parametrize("direction", bench_csa.DIRECTIONS)
def test_eager_compressor_passes_the_check_of_the_benchmark(direction):
    with OnCpu():
        problem = bench_csa.Problem(bench_csa.Shape(2, 64, 16, 4, 2))
        bench_csa.gated_eager(problem, direction)()
    for result in problem.results(direction).values():
        assert result.isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_eager_rotation_passes_the_check_of_the_benchmark(interleaved):
    with OnCpu():
        problem = bench_rotary.Problem(bench_rotary.Shape(48, interleaved))
        before = problem.q.clone()
        bench_rotary.gated_eager(problem)
    assert not torch.equal(problem.q, before)


def test_a_wrong_baseline_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(eager, "_turn_halves", lambda x, cos, sin: x)
    with OnCpu(), pytest.raises(harness.GateError, match="torch eager"):
        bench_rotary.gated_eager(bench_rotary.Problem(bench_rotary.Shape(48)))

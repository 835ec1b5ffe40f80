"""The sweep's pure parts: what a seed draws, and what the times come to."""

from __future__ import annotations

import pathlib
import random
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_sweep  # noqa: E402
from bench_sweep import Timed  # noqa: E402


@pytest.mark.parametrize("draws", [bench_sweep.decodes, bench_sweep.prefills, bench_sweep.packs, bench_sweep.masked])
def test_a_seed_draws_the_same_sizes_and_another_draws_others(draws):
    first, again, other = (list(draws(random.Random(seed), 12)) for seed in ("1", "1", "2"))
    assert first == again and len(first) == 12
    assert first != other


def test_sizes_are_within_their_limits():
    for shape, page_size in bench_sweep.decodes(random.Random(3), 40):
        assert bench_sweep.KEY_BYTES[0] < shape.bytes < bench_sweep.KEY_BYTES[1]
        assert page_size in bench_sweep.PAGE_SIZES
    for shape in bench_sweep.prefills(random.Random(3), 40):
        assert bench_sweep.FLOPS[0] < shape.flops < bench_sweep.FLOPS[1]
        assert shape.q_len == shape.kv_len or shape.causal
    for shape, pattern in bench_sweep.masked(random.Random(3), 40):
        assert pattern in bench_sweep.PATTERNS and shape.kv_len**2 < bench_sweep.MASK_BYTES


@pytest.mark.parametrize("pattern", bench_sweep.PATTERNS)
def test_a_masked_problem_is_checked_with_its_mask(pattern, monkeypatch):
    """What eager code gives passes, and what it gives without the mask does not."""
    from cuteforge.families.attention import reference

    monkeypatch.setattr("attention_problem.DEVICE", "cpu")
    monkeypatch.setattr("bench_sweep.DEVICE", "cpu")
    shape = bench_sweep.Shape(2, 40, 40, bench_sweep.Heads(4, 2, 16))
    problem = bench_sweep.Masked(shape, pattern)
    problem.check(reference.attend(*problem.inputs, mask=problem.mask)[0], "eager")
    with pytest.raises(AssertionError, match="is off by"):
        problem.check(reference.attend(*problem.inputs)[0], "eager without the mask")


def test_the_summary_names_the_worst_sizes_first():
    times = [Timed("decode", name, us, {"a": 2.0, "b": 4.0}) for name, us in (("x", 1.0), ("y", 4.0), ("z", 2.0))]
    head, *worst = bench_sweep.summary("decode", times).splitlines()
    assert head == "decode: 3 sizes, geometric mean 1.000, median 1.000, worst 2.000, 1 above 1.02"
    assert [line.split()[1] for line in worst] == ["y:", "z:", "x:"]

"""Speed of the rotary embedding: q and k in place in one launch, growth, host time.

    python benchmarks/bench_rotary.py                          all cases; writes benchmarks/results/<gpu>/rotary.json
    python benchmarks/bench_rotary.py --quick --cases 8192     a few of them; only prints

Every problem passes a check against fp64 before it is timed; a failed check ends the run without a figure.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import eager
import harness
import peers
import runner
from harness import Bar, Row
from runner import Run

PEER = peers.FlashinferRope.name
HEADS, KV_HEADS, D = 32, 8, 128
# Sequences of this length one after another: the table is small beside the tokens, as in use.
MAX_POS = 8192
CHECK_TOKENS = 8192  # compared with fp64 at once: 335 MB for each intermediate

# Medians of 20 of a few us differ by 5 % from one run to the next.
SHORT_TOKENS, SHORT_REPEATS = 1024, 5
COPY_CEILING, SAME_SIZE_COPY, SAME_SIZE_NEG = "copy ceiling", "same-size copy", "same-size neg_"
CEILING_SHARE = 0.95
CEILING_FROM_TOKENS = 8192


@dataclass(frozen=True)
class Shape:
    """`tokens` packed tokens of q and k, and how their pairs lie."""

    tokens: int
    interleaved: bool = False

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens {'interleaved' if self.interleaved else 'halves'}"

    @property
    def bytes(self) -> int:
        """Bytes that must move, bf16: q and k read and written. The table and the positions, 1/40 of it, are not
        counted."""
        return 2 * 2 * self.tokens * (HEADS + KV_HEADS) * D

    @property
    def bars(self) -> tuple[Bar, ...]:
        peer = Bar("ratio", 1.0, PEER)
        return (peer, Bar("ratio", 1 / CEILING_SHARE, COPY_CEILING)) if self.tokens >= CEILING_FROM_TOKENS else (peer,)


SPEED = (
    *(Shape(tokens) for tokens in (16, 1024, 8192, 32768, 131072)),
    *(Shape(tokens, interleaved=True) for tokens in (16, 8192, 32768)),
)
QUICK_SPEED = (SPEED[0], SPEED[2])
GROWTH = tuple(Shape(tokens) for tokens in (8192, 32768, 131072, 524288, 1048576))
# A kernel shorter than a launch, so that the queue stays empty while the host is timed.
HOST = Shape(64)


class Problem:
    """Tensors of one shape, allocated once: bf16, random; turned in place, call after call."""

    def __init__(self, shape: Shape) -> None:
        import torch

        import cuteforge

        torch.manual_seed(0)
        self.shape = shape
        self.q, self.k = (
            torch.randn(shape.tokens, heads, D, dtype=torch.bfloat16, device="cuda") for heads in (HEADS, KV_HEADS)
        )
        self.cos, self.sin = cuteforge.rotary_table(MAX_POS, D, device="cuda")
        self.positions = torch.arange(shape.tokens, device="cuda") % MAX_POS

    @property
    def lookup(self) -> dict:
        return {"cos": self.cos, "sin": self.sin, "positions": self.positions, "interleaved": self.shape.interleaved}

    def op(self):
        """The compiled op, with its operands and keywords."""
        import cuteforge

        operands, keys = (self.q, (self.cos, self.sin), self.q, self.positions), {"k": self.k, "k_out": self.k}
        op = cuteforge.RotaryEmbedding(*operands, **keys, interleaved=self.shape.interleaved).compile()
        return op, operands, keys

    def bound(self) -> Callable[[], object]:
        op, operands, keys = self.op()
        return op.bind(*operands, **keys)

    def execute(self) -> Callable[[], object]:
        op, operands, keys = self.op()
        return functools.partial(op.execute, *operands, **keys)

    def wrapper(self) -> Callable[[], object]:
        """The allocating entry."""
        import cuteforge

        return functools.partial(cuteforge.rotary_qk_wrapper, self.q, self.k, **self.lookup)

    def policy(self) -> Callable[[], object]:
        """The entry that chooses a backend, of one tensor."""
        import cuteforge

        return functools.partial(cuteforge.apply_rotary_emb, self.q, **self.lookup)

    def copy(self) -> Callable[[], object]:
        """torch's copy of as many bytes."""
        import torch

        source = torch.zeros(self.shape.bytes // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return functools.partial(target.copy_, source)

    def negation(self) -> Callable[[], object]:
        """torch's kernel of as many bytes that reads and writes in place, as we do, and has nothing to look up."""
        import torch

        return torch.zeros(self.shape.bytes // 4, dtype=torch.bfloat16, device="cuda").neg_

    def check(self, call: Callable[[], object], who: str) -> None:
        """Runs `call` once and compares all it wrote with fp64; AssertionError names the first tensor over its
        budget."""
        before = {"q": self.q.clone(), "k": self.k.clone()}
        call()
        for name, values in before.items():
            for start in range(0, self.shape.tokens, CHECK_TOKENS):
                tokens = slice(start, start + CHECK_TOKENS)
                error, budget = self._error_and_budget(values[tokens], getattr(self, name)[tokens], tokens)
                if not error <= budget:
                    where = f"{who}, {self.shape.name}, tokens from {start}"
                    raise AssertionError(f"{where}: {name} is off by {error:.3g}, allowed {budget:.3g}")

    def _error_and_budget(self, values, got, tokens: slice) -> tuple[float, float]:
        """Largest error, and 2 x (fp32 eager's error + one ulp of the largest value)."""
        import torch

        from cuteforge.families.rotary import reference

        table, positions = (self.cos, self.sin), self.positions[tokens]
        rotate = functools.partial(reference.rotate, values, table, positions, interleaved=self.shape.interleaved)
        exact = rotate(compute_dtype=torch.float64, out_dtype=torch.float64)
        error, eager_error = ((t.double() - exact).abs().max().item() for t in (got, rotate()))
        ulp = torch.finfo(got.dtype).eps * 2.0 ** math.floor(math.log2(exact.abs().max().item()))
        return error, 2 * (eager_error + ulp)


def gated_eager(problem: Problem) -> Callable[[], object]:
    """The same in plain torch, which has passed the check."""
    call = eager.rotary(problem.q, problem.k, **problem.lookup)
    harness.require_green(lambda: problem.check(eager.writing(call, (problem.q, problem.k)), eager.NAME))
    return call


def gated_candidates(problem: Problem, peer: peers.FlashinferRope | None) -> dict[str, Callable[[], object]]:
    """Bound calls of ours, which has passed the check, and of the peer, if it has."""
    candidates = {"ours": problem.bound()}
    harness.require_green(lambda: problem.check(candidates["ours"], "ours"))
    if peer is not None:
        try:
            call = peer.rotate(problem.q, problem.k, **problem.lookup)
            problem.check(call, PEER)
            candidates[PEER] = call
        except Exception as error:  # whatever another library does on this GPU, our figures stand without it
            print(f"{PEER} is not measured: {error}", file=sys.stderr)
    return candidates


def speed_rows(run: Run) -> Iterator[Row]:
    """Each number of tokens against the copy ceiling, torch's kernels of the same size, plain torch, and the peer."""
    for shape in filter(lambda s: run.wants(s.name), QUICK_SPEED if run.quick else SPEED):
        problem = Problem(shape)
        moves = {SAME_SIZE_COPY: problem.copy(), SAME_SIZE_NEG: problem.negation()}
        repeats = run.repeats * (SHORT_REPEATS if shape.tokens <= SHORT_TOKENS else 1)
        us = harness.measure_group({**gated_candidates(problem, run.peer), **moves}, repeats=repeats)
        us |= runner.eager_us(shape.name, gated_eager(problem), repeats)
        beside = {COPY_CEILING: run.floor_us(shape.bytes)} | {name: us[name] for name in us if name != "ours"}
        yield run.row(shape.name, "rotate", us["ours"], shape.bytes, beside, shape.bars)


def growth_rows(run: Run) -> Iterator[Row]:
    """Time per token from 8 k to 1 M tokens."""
    if run.wants("growth rotate"):
        calls = {s.name: gated_candidates(Problem(s), None)["ours"] for s in GROWTH}
        us = harness.measure_group(calls, repeats=run.repeats)
        tokens, size_bytes = {s.name: s.tokens for s in GROWTH}, {s.name: s.bytes for s in GROWTH}
        yield from runner.growth_rows(run, "rotate", us, tokens, size_bytes)


def host_rows(run: Run) -> Iterator[Row]:
    """Host time per call of each entry, beside a raw launch and the peer's."""
    if run.wants("host rotate"):
        problem = Problem(HOST)
        gated = gated_candidates(problem, run.peer if getattr(run.peer, "has_host_time", False) else None)
        entries = {"execute": problem.execute(), "wrapper": problem.wrapper(), "policy": problem.policy()}
        calls = {"bound": gated.pop("ours"), **entries}
        yield from runner.host_rows(calls, "rotate", gated)


SECTIONS = (speed_rows, growth_rows, host_rows)


def main(argv: Sequence[str] | None = None) -> None:
    find_peer = peers.find_flashinfer_rope
    runner.run_benchmark("rotary", __doc__.splitlines()[0], PEER, find_peer, SECTIONS, (growth_rows,), argv)


if __name__ == "__main__":
    main()

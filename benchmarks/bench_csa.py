"""Speed of the CSA/HCA compressor: forward, backward, short segments, growth, host time and start-up.

    python benchmarks/bench_csa.py                          all cases; writes benchmarks/results/<gpu>/csa.json
    python benchmarks/bench_csa.py --quick --cases fwd      a few of them; only prints

Every problem passes a check against fp64 before it is timed; a failed check ends the run without a figure.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import eager
import harness
import peers
import runner
from harness import Bar, Row
from runner import Run

PEER = peers.CudnnCompressor.name
ATOMIC = "ours atomic"
DIRECTIONS = ("fwd", "bwd")


@dataclass(frozen=True)
class Shape:
    """A pack of `segments` equal segments of `tokens` tokens, with its bars against the peer per direction."""

    segments: int
    tokens: int
    d: int
    ratio: int
    coff: int
    fwd: tuple[Bar, ...] = ()
    bwd: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.segments}x{self.tokens} d{self.d} r{self.ratio} c{self.coff}"

    @property
    def num_tokens(self) -> int:
        return self.segments * self.tokens

    @property
    def num_rows(self) -> int:
        return self.segments * (self.tokens // self.ratio)

    def bytes(self, direction: str) -> int:
        """Bytes that must move, bf16: kv and score read (and their gradients written), out or grad_out once."""
        streams = {"fwd": 2, "bwd": 4}[direction]
        return 2 * (streams * self.num_tokens * self.coff * self.d + self.num_rows * self.d)


def at_most(limit: float) -> Bar:
    return Bar("ratio", limit, PEER)


SPEED = (
    Shape(1, 8192, 128, 4, 2, fwd=(at_most(0.75),), bwd=(at_most(0.65),)),
    Shape(3, 8192, 128, 4, 2, fwd=(at_most(0.7),), bwd=(at_most(0.7),)),
    Shape(1, 8192, 512, 4, 2, fwd=(at_most(0.7),), bwd=(at_most(0.8),)),
    Shape(3, 8192, 512, 4, 2, fwd=(at_most(0.7),), bwd=(at_most(0.75),)),
    Shape(16, 8192, 512, 4, 2, fwd=(at_most(0.68), Bar("tbps", 3.8)), bwd=(at_most(0.72), Bar("tbps", 3.8))),
    Shape(3, 8192, 512, 128, 1, fwd=(at_most(0.65),), bwd=(at_most(0.65),)),
    Shape(16, 8192, 512, 128, 1, fwd=(at_most(0.75),), bwd=(at_most(0.6),)),
)
QUICK_SPEED = (SPEED[1], SPEED[5])
DETERMINISM_BAR = Bar("ratio", 1.05, ATOMIC)

# The same number of tokens, so the ratio of times is the ratio of times per token.
SHORT, LONG = Shape(4096, 32, 512, 4, 2), Shape(16, 8192, 512, 4, 2)
SHORT_BAR = 1.3

GROWTH = tuple(Shape(segments, 8192, 128, 4, 2) for segments in (1, 4, 16, 64, 128))

# Kernels shorter than a launch, so that the queue stays empty while the host is timed.
HOST = Shape(4, 256, 128, 4, 2)

IMPORT_BAR = Bar("us", 50e3)
# The clock starts when torch is imported, its CUDA context exists and the inputs are there: what is timed is this
# library's own work, the DSL's import and the compile or load included. The context's time is reported beside it.
FIRST_USE = """
import json, sys, time
import torch
def now():
    torch.cuda.synchronize()
    return time.perf_counter() * 1e6
start = time.perf_counter() * 1e6
torch.manual_seed(0)
kv, score = (torch.randn(8192, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
ape = torch.randn(4, 256, device="cuda")
cu, cuc = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (8192, 2048))
inputs_ready = now()
import cuteforge
out = cuteforge.csa_compressor_forward_wrapper(kv, score, ape, cu, cuc, total_comp=2048)["out"]
done = now()
print(json.dumps({"cuda_us": inputs_ready - start, "first_us": done - inputs_ready,
                  "checksum": out.double().abs().sum().item(), "imported_cutlass": "cutlass" in sys.modules}))
"""
IMPORT = """
import json, time
start = time.perf_counter()
import cuteforge
print(json.dumps({"us": (time.perf_counter() - start) * 1e6}))
"""


class Problem:
    """Tensors of one shape, allocated once: bf16 inputs, random; outputs uninitialised."""

    def __init__(self, shape: Shape) -> None:
        import torch

        torch.manual_seed(0)
        width = shape.coff * shape.d
        randn = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        self.shape = shape
        self.kv, self.score = randn(shape.num_tokens, width), randn(shape.num_tokens, width)
        self.ape = torch.randn(shape.ratio, width, device="cuda")
        steps = torch.arange(shape.segments + 1, dtype=torch.int32, device="cuda")
        self.cu_seqlens = steps * shape.tokens
        self.cu_seqlens_comp = steps * (shape.tokens // shape.ratio)
        self.out, self.grad_out = randn(shape.num_rows, shape.d), randn(shape.num_rows, shape.d)
        self.grad_kv, self.grad_score = torch.empty_like(self.kv), torch.empty_like(self.score)
        self.grad_ape = torch.empty_like(self.ape)

    @property
    def inputs(self) -> tuple:
        return self.kv, self.score, self.ape, self.cu_seqlens, self.cu_seqlens_comp

    @property
    def config(self) -> dict[str, int]:
        return {"ratio": self.shape.ratio, "coff": self.shape.coff}

    def operands(self, direction: str) -> tuple:
        if direction == "fwd":
            return *self.inputs, self.out
        return *self.inputs, self.grad_out, self.grad_kv, self.grad_score, self.grad_ape

    def results(self, direction: str) -> dict:
        if direction == "fwd":
            return {"out": self.out}
        return {"grad_kv": self.grad_kv, "grad_score": self.grad_score, "grad_ape": self.grad_ape}


@dataclass(frozen=True)
class Ours:
    """One compiled op of this library on a problem's buffers: the ways to call it that a benchmark compares."""

    op: object
    operands: tuple
    keywords: dict

    @classmethod
    def build(cls, problem: Problem, direction: str, deterministic: bool = True) -> Ours:
        import torch

        import cuteforge

        operands = problem.operands(direction)
        if direction == "fwd":
            return cls(cuteforge.CSACompressorForward(*operands, **problem.config).compile(), operands, {})
        op = cuteforge.CSACompressorBackward(*operands, **problem.config, deterministic=deterministic).compile()
        workspace = torch.empty(op.workspace_bytes(), dtype=torch.uint8, device="cuda")
        return cls(op, operands, {"workspace": workspace} if workspace.numel() else {})

    def bound(self) -> Callable[[], object]:
        return self.op.bind(*self.operands, **self.keywords)

    def execute(self) -> Callable[[], object]:
        return functools.partial(self.op.execute, *self.operands, **self.keywords)


def wrapper_call(problem: Problem, direction: str) -> Callable[[], object]:
    """The allocating entry; total_comp is given, as the call would otherwise wait for the device."""
    import cuteforge

    if direction == "fwd":
        wrapper = functools.partial(cuteforge.csa_compressor_forward_wrapper, total_comp=problem.shape.num_rows)
        return functools.partial(wrapper, *problem.inputs, **problem.config)
    wrapper = cuteforge.csa_compressor_backward_wrapper
    return functools.partial(wrapper, *problem.inputs, problem.grad_out, **problem.config)


def policy_call(problem: Problem) -> Callable[[], object]:
    """The entry that chooses a backend; it has no backward of its own."""
    import cuteforge

    *tensors, cu_seqlens_comp = problem.inputs
    options = {"cu_seqlens_comp": cu_seqlens_comp, "total_comp": problem.shape.num_rows, **problem.config}
    return functools.partial(cuteforge.compress, *tensors, **options)


class Oracle:
    """fp64 results of a problem and the error each result may have: 2 x (fp32 eager's error + one ulp of the largest).

    grad_ape sums one term per output row in fp32 in an order of the kernel's own, so it gets sqrt(N) ulps, not one.
    """

    def __init__(self, problem: Problem, direction: str) -> None:
        import torch

        self.problem, self.direction = problem, direction
        self.exact = self._eager(torch.float64, torch.float64)
        self.budgets = {}
        for name, result in self._eager(torch.float32, None).items():
            steps = math.sqrt(problem.shape.num_rows) if name == "grad_ape" else 1
            largest = self.exact[name].abs().max().item()
            ulp = torch.finfo(result.dtype).eps * 2.0 ** math.floor(math.log2(largest))
            self.budgets[name] = 2 * (self._error(name, result) + steps * ulp)

    def check(self, call: Callable[[], object], who: str, unchecked: Sequence[str] = ()) -> None:
        """Runs `call` on poisoned outputs and raises AssertionError naming the first result over its budget."""
        results = self.problem.results(self.direction)
        for name, tensor in results.items():
            tensor.fill_(0.0 if name in unchecked else math.nan)
        call()
        for name in results.keys() - set(unchecked):
            error = self._error(name, results[name])
            if not error <= self.budgets[name]:
                where = f"{self.problem.shape.name} {self.direction}"
                raise AssertionError(f"{who}, {where}: {name} is off by {error:.3g}, allowed {self.budgets[name]:.3g}")

    def _eager(self, compute_dtype, result_dtype) -> dict:
        from cuteforge.families.csa.compressor import reference

        problem, config = self.problem, {**self.problem.config, "compute_dtype": compute_dtype}
        if self.direction == "fwd":
            rows = problem.shape.num_rows
            out = reference.compress_forward(*problem.inputs, rows, **config, out_dtype=result_dtype)
            return {"out": out}
        grads = reference.compress_backward(*problem.inputs, problem.grad_out, **config, grad_dtype=result_dtype)
        return dict(zip(("grad_kv", "grad_score", "grad_ape"), grads, strict=True))

    def _error(self, name: str, result) -> float:
        return (result.double() - self.exact[name]).abs().max().item()


def gated_candidates(
    problem: Problem, direction: str, peer: peers.CudnnCompressor | None, atomic: bool = False
) -> dict:
    """Bound calls of ours, ours atomic (backward, if asked) and the peer; those of ours have passed the check."""
    oracle = Oracle(problem, direction)
    candidates = {"ours": Ours.build(problem, direction).bound()}
    harness.require_green(lambda: oracle.check(candidates["ours"], "ours"))
    if atomic and direction == "bwd":
        candidates[ATOMIC] = Ours.build(problem, direction, deterministic=False).bound()
        harness.require_green(lambda: oracle.check(candidates[ATOMIC], ATOMIC))
    if peer is not None:
        launch = peer.forward if direction == "fwd" else peer.backward
        call = launch(*problem.operands(direction), **problem.config)
        try:
            oracle.check(call, PEER, unchecked=("grad_ape",) if direction == "bwd" else ())
            candidates[PEER] = call
        except Exception as error:  # whatever another library does on this GPU, our figures stand without it
            print(f"{PEER} is not measured: {error}", file=sys.stderr)
    return candidates


def gated_eager(problem: Problem, direction: str) -> Callable[[], object]:
    """The same in plain torch, by autograd in the backward, which has passed the check."""
    shape, inputs = problem.shape, (problem.kv, problem.score, problem.ape)
    blocks = {"segments": shape.segments, "coff": shape.coff}
    if direction == "fwd":
        call = eager.compressor_forward(*inputs, **blocks)
    else:
        call = eager.compressor_backward(*inputs, problem.grad_out, **blocks)
    checked = eager.writing(call, tuple(problem.results(direction).values()))
    harness.require_green(lambda: Oracle(problem, direction).check(checked, eager.NAME))
    return call


def speed_rows(run: Run) -> Iterator[Row]:
    """Each pack against the peer and plain torch; the backward also deterministic against atomic."""
    for shape in QUICK_SPEED if run.quick else SPEED:
        for direction in filter(lambda d: run.wants(f"{shape.name} {d}"), DIRECTIONS):
            problem = Problem(shape)
            candidates = gated_candidates(problem, direction, run.peer, atomic=True)
            us = harness.measure_group(candidates, repeats=run.repeats)
            us |= runner.eager_us(f"{shape.name} {direction}", gated_eager(problem, direction), run.repeats)
            size_bytes, beside = shape.bytes(direction), {n: us[n] for n in us if n in (PEER, eager.NAME)}
            yield run.row(shape.name, direction, us["ours"], size_bytes, beside, getattr(shape, direction))
            if direction == "bwd":
                name, beside = f"{shape.name} deterministic", {ATOMIC: us[ATOMIC]}
                yield run.row(name, direction, us["ours"], size_bytes, beside, (DETERMINISM_BAR,))


def short_rows(run: Run) -> Iterator[Row]:
    """Many short segments against few long ones, as many tokens."""
    for direction in filter(lambda d: run.wants(f"{SHORT.name} {d}"), DIRECTIONS):
        calls = {s.name: gated_candidates(Problem(s), direction, None)["ours"] for s in (SHORT, LONG)}
        us = harness.measure_group(calls, repeats=run.repeats)
        bars = (Bar("ratio", SHORT_BAR, LONG.name),)
        beside = {LONG.name: us[LONG.name]}
        yield run.row(SHORT.name, direction, us[SHORT.name], SHORT.bytes(direction), beside, bars)


def growth_rows(run: Run) -> Iterator[Row]:
    """Time per token from 8 k to 1 M tokens."""
    for direction in filter(lambda d: run.wants(f"growth {d}"), DIRECTIONS):
        calls = {s.name: gated_candidates(Problem(s), direction, None)["ours"] for s in GROWTH}
        us = harness.measure_group(calls, repeats=run.repeats)
        tokens, size_bytes = {s.name: s.num_tokens for s in GROWTH}, {s.name: s.bytes(direction) for s in GROWTH}
        yield from runner.growth_rows(run, direction, us, tokens, size_bytes)


def host_rows(run: Run) -> Iterator[Row]:
    """Host time per call of each entry, beside a raw launch and the peer's launch."""
    for direction in filter(lambda d: run.wants(f"host {d}"), DIRECTIONS):
        problem = Problem(HOST)
        gated = gated_candidates(problem, direction, run.peer)
        ours = Ours.build(problem, direction)
        calls = {"bound": gated.pop("ours"), "execute": ours.execute(), "wrapper": wrapper_call(problem, direction)}
        if direction == "fwd":
            calls["policy"] = policy_call(problem)
        yield from runner.host_rows(calls, direction, gated)


def start_rows(run: Run) -> Iterator[Row]:
    """First use in a fresh process with an empty cache, the next process, and the import alone."""
    if run.wants("start first use"):
        yield from runner.first_use_rows(run, FIRST_USE)
    if run.wants("start import"):
        us = statistics.median(harness.run_fresh(IMPORT)["us"] for _ in range(5))
        yield Row("import cuteforge", "start", us, bars=(IMPORT_BAR,))


SECTIONS = (speed_rows, short_rows, growth_rows, host_rows, start_rows)


def main(argv: Sequence[str] | None = None) -> None:
    find_peer = peers.find_cudnn_compressor
    runner.run_benchmark("csa", __doc__.splitlines()[0], PEER, find_peer, SECTIONS, (growth_rows,), argv)


if __name__ == "__main__":
    main()

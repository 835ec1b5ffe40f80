"""Speed of GQA attention: decode, prefill, ragged prefill, growth, host time and start-up.

    python benchmarks/bench_attention.py                            all cases; writes
    benchmarks/results/<gpu>/attention.json
    python benchmarks/bench_attention.py --quick --cases decode     a few of them; only prints

Every problem passes a check against fp64 before it is timed; a failed check ends the run without a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import peers
import runner
from attention_problem import (
    DECODE,
    LLAMA,
    QUICK_DECODE,
    Dense,
    Heads,
    Packed,
    Shape,
    build_rivals,
    dense_rivals,
    gated,
    measure,
    measure_eager,
    ragged_lengths,
)
from harness import Bar, Row
from peers import CUDNN_SDPA, FLASH_SDPA
from runner import Run

FA4 = peers.FlashAttention4.name
# flash-attn-4 does not split the keys of a decode, which took it 1.2 to 14 times as long as cuDNN, and compiles 3 s for
# each shape.
DECODE_PEERS = (CUDNN_SDPA, FLASH_SDPA)
PREFILL_PEERS = (CUDNN_SDPA, FLASH_SDPA, FA4)


def prefill(batch: int, length: int, heads: Heads = LLAMA, causal: bool = True) -> Shape:
    return Shape(batch, length, length, heads, causal)


PREFILL = (
    prefill(1, 16384),
    prefill(4, 4096),
    prefill(4, 4096, causal=False),
    prefill(2, 8192, Heads(32, 32, 64)),
    prefill(2, 8192, Heads(16, 4, 256)),
    prefill(1, 2048),
)
QUICK_PREFILL = (PREFILL[1], PREFILL[5])
# 16 k tokens in sequences of every length, which the pages for users draw; two of them are in PREFILL already.
LENGTHS = tuple(prefill(16384 // length, length) for length in (512, 1024, 2048, 8192))
# Also through the code for every GPU of this compute capability, which has nothing newer than mma.sync.
PORTABLE = (PREFILL[1], PREFILL[2])
PORTABLE_BAR = Bar("ratio", 1.0, FLASH_SDPA)


@dataclass(frozen=True)
class Ragged:
    """Causal requests of `lengths` tokens, and how many times as fast as the peer they must run."""

    name: str
    lengths: tuple[int, ...]
    speedup: float = 1.0

    @property
    def flops(self) -> int:
        return sum(LLAMA.flops(n, n, causal=True) for n in self.lengths)

    @property
    def bars(self) -> tuple[Bar, ...]:
        return (Bar("ratio", 1 / self.speedup, FA4),)


# 31 640 tokens; long and short ones in turn, as requests come.
MIXED = (777, 4096, 64, 1024, 8192, 7, 500, 6001, 129, 2048, 33, 4000, 512, 257, 3000, 1000)
RAGGED = (
    Ragged("ragged 4x4096 causal", (4096,) * 4),
    Ragged("ragged 32x512 causal", (512,) * 32, 1.3),
    Ragged("ragged 16 mixed causal", MIXED, 1.05),
)

GROWTH = tuple(Shape(4, 1, kv_len) for kv_len in (4096, 16384, 65536, 262144, 524288))
GROWTH_TOKENS, GROWTH_BATCHES = 32768, (1, 4, 16, 64, 256, 1024)

# Kernels shorter than a launch, so that the queue stays empty while the host is timed.
HOST = {"decode": Shape(4, 1, 128), "prefill": Shape(1, 64, 64, causal=True)}

# The clock starts when torch is imported, its CUDA context exists and the inputs are there.
FIRST_USE = """
import json, sys, time
import torch
def now():
    torch.cuda.synchronize()
    return time.perf_counter() * 1e6
start = time.perf_counter() * 1e6
torch.manual_seed(0)
q = torch.randn(16, 1, 32, 128, dtype=torch.bfloat16, device="cuda")
k, v = (torch.randn(16, 4096, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
inputs_ready = now()
import cuteforge
out = cuteforge.gqa_decode_wrapper(q, k, v)["out"]
done = now()
print(json.dumps({"cuda_us": inputs_ready - start, "first_us": done - inputs_ready,
                  "checksum": out.double().abs().sum().item(), "imported_cutlass": "cutlass" in sys.modules}))
"""


def peers_of(run: Run) -> dict:
    return run.peer or {}


def candidates(run: Run, problem: Dense, names: Sequence[str]) -> dict:
    """Ours, and the peers `names` that compute the same."""
    return {"ours": gated(problem), **build_rivals(dense_rivals(peers_of(run), names, problem), problem)}


def decode_rows(run: Run) -> Iterator[Row]:
    """One query token a request, against the read ceiling and the peers."""
    for shape in filter(lambda s: run.wants(f"{s.name} decode"), QUICK_DECODE if run.quick else DECODE):
        problem = Dense(shape)
        us = measure(run, candidates(run, problem, DECODE_PEERS)) | measure_eager(run, problem)
        ours = us.pop("ours")
        yield run.row(shape.name, "decode", ours, shape.bytes, us, shape.all_bars(us), "read_tbps")


def prefill_rows(run: Run) -> Iterator[Row]:
    """As many queries as keys, against the matmul ceiling and the peers."""
    shapes = QUICK_PREFILL if run.quick else (*PREFILL, *LENGTHS)
    for shape in filter(lambda s: run.wants(f"{s.name} prefill"), shapes):
        problem = Dense(shape)
        calls = candidates(run, problem, PREFILL_PEERS)
        if shape in PORTABLE and (arch := portable_arch()):
            calls["portable"] = gated(problem, "portable", arch)
        us = measure(run, calls) | measure_eager(run, problem)
        ours, portable = us.pop("ours"), us.pop("portable", None)
        yield run.row(shape.name, "prefill", ours, shape.flops, us, shape.all_bars(us), "matmul_tflops")
        if portable:
            bars = (PORTABLE_BAR,)
            yield run.row(f"{shape.name} portable", "prefill", portable, shape.flops, us, bars, "matmul_tflops")


def portable_arch() -> str | None:
    """The target of this GPU without instructions of its architecture only; None where it has none of those."""
    from cuteforge.runtime.arch import resolve_arch

    name = resolve_arch(None, 0).name
    return name.removesuffix("a") if name.endswith("a") else None


def ragged_rows(run: Run) -> Iterator[Row]:
    """Packed requests of equal and of very different lengths."""
    for case in filter(lambda c: run.wants(f"{c.name} prefill"), RAGGED[-1:] if run.quick else RAGGED):
        problem = Packed(case.name, case.lengths)
        us = measure(run, {"ours": gated(problem), **build_rivals(packed_rivals(run, problem), problem)})
        us |= measure_eager(run, problem)
        ours = us.pop("ours")
        yield run.row(case.name, "prefill", ours, case.flops, us, case.bars, "matmul_tflops")


def packed_rivals(run: Run, problem: Packed) -> dict:
    peer, operands = peers_of(run).get(FA4), (*problem.inputs, problem.cu_seqlens, max(problem.q_lens))
    return {} if peer is None else {FA4: lambda: peer.attend_packed(*operands, causal=True)}


def length_growth_rows(run: Run) -> Iterator[Row]:
    """Time per key of a decode from 4 k to 512 k keys."""
    if run.wants("growth decode"):
        us = measure(run, {s.name: gated(Dense(s)) for s in GROWTH})
        keys, size_bytes = {s.name: s.kv_len for s in GROWTH}, {s.name: s.bytes for s in GROWTH}
        yield from runner.growth_rows(run, "decode", us, keys, size_bytes, ceiling="read_tbps")


def batch_growth_rows(run: Run) -> Iterator[Row]:
    """The same number of packed tokens in ever more, shorter requests, which have fewer operations."""
    if run.wants("growth prefill"):
        cases = {f"{n} requests": Ragged(f"{n} requests", ragged_lengths(n, GROWTH_TOKENS)) for n in GROWTH_BATCHES}
        us = measure(run, {name: gated(Packed(name, case.lengths)) for name, case in cases.items()})
        tokens, flops = dict.fromkeys(cases, GROWTH_TOKENS), {name: case.flops for name, case in cases.items()}
        options = {"ceiling": "matmul_tflops", "label": f"{GROWTH_TOKENS} tokens in {{case}}"}
        yield from runner.growth_rows(run, "prefill", us, tokens, flops, **options)


def host_rows(run: Run) -> Iterator[Row]:
    """Host time per call of each entry, beside a raw launch and the peers' calls."""
    for metric, shape in HOST.items():
        if run.wants(f"host {metric}"):
            problem = Dense(shape)
            beside = candidates(run, problem, PREFILL_PEERS if shape.causal else DECODE_PEERS)
            ours = {"bound": beside.pop("ours"), "execute": problem.execute()}
            ours |= {"wrapper": problem.wrapper(), "policy": problem.policy()}
            yield from runner.host_rows(ours, metric, beside)


def start_rows(run: Run) -> Iterator[Row]:
    """First use in a fresh process with an empty cache, and in the next ones."""
    if run.wants("start first use"):
        # One warm process: each takes 5 s, most of it torch's.
        yield from runner.first_use_rows(run, FIRST_USE, "first decode", warm_processes=1)


SECTIONS = (decode_rows, prefill_rows, ragged_rows, length_growth_rows, batch_growth_rows, host_rows, start_rows)
SLOW = (length_growth_rows, batch_growth_rows, start_rows)


def main(argv: Sequence[str] | None = None) -> None:
    description = __doc__.splitlines()[0]
    runner.run_benchmark("attention", description, "libraries", peers.find_attention, SECTIONS, SLOW, argv)


if __name__ == "__main__":
    main()

"""Speed of attention on sizes that a seed draws, so that no rule is made for the sizes that are timed.

    python benchmarks/bench_sweep.py 7                          decode and prefill, dense, paged, packed, with masks
    python benchmarks/bench_sweep.py 7 --cases decode --count 20

Every size passes a check against fp64 before it is timed. Prints each size, and for each group the geometric mean, the
median and the worst ten of our time over that of the fastest peer. Writes no record: no two seeds are alike.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import harness
import peers
from attention_problem import DEVICE, Dense, Heads, Packed, Shape, build_rivals, dense_rivals, gated, measure
from bench_attention import CUDNN_SDPA, DECODE_PEERS, FA4, PREFILL_PEERS, packed_rivals
from bench_paged_attention import paged_copy
from runner import Run

COUNT = 40  # sizes of a group
WORST = 10  # that are listed
SLOWER = 1.02  # than the fastest peer; those are counted
DECODE_HEADS = tuple(
    Heads(*sizes)
    for sizes in (
        (32, 8, 128), (64, 8, 128), (64, 4, 128), (8, 1, 128), (32, 32, 128), (40, 8, 128),
        (12, 2, 64), (40, 8, 64), (32, 8, 64), (16, 4, 256), (28, 4, 128),
    )
)  # fmt: skip
PREFILL_HEADS = tuple(
    Heads(*sizes)
    for sizes in ((32, 8, 128), (64, 8, 128), (32, 32, 128), (32, 32, 64), (12, 2, 64), (16, 4, 256), (8, 1, 128))
)
PAGE_SIZES = (1, 16, 16, 64, 128)
KEY_BYTES = 3e5, 6e8  # of all keys and values of a decode
FLOPS = 2e9, 8e12  # of a prefill
MASK_BYTES = 4e9  # at most, a byte for each score


@dataclass(frozen=True)
class Timed:
    """A size of a group: our time and those beside it, in us."""

    group: str
    name: str
    us: float
    beside: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Our time over the least beside it."""
        return self.us / min(self.beside.values())


def log_uniform(draw: random.Random, least: float, most: float) -> int:
    return round(2 ** draw.uniform(math.log2(least), math.log2(most)))


def decodes(draw: random.Random, count: int) -> Iterator[tuple[Shape, int]]:
    """Decodes of one token, each with a page size."""
    while count:
        heads, batch, keys = draw.choice(DECODE_HEADS), log_uniform(draw, 1, 512), log_uniform(draw, 64, 65536)
        shape = Shape(batch, 1, keys, heads)
        if KEY_BYTES[0] < shape.bytes < KEY_BYTES[1]:
            count -= 1
            yield shape, draw.choice(PAGE_SIZES)


def prefills(draw: random.Random, count: int) -> Iterator[Shape]:
    """Prefills with as many queries as keys, most of them causal, and some of fewer queries."""
    while count:
        heads, batch, keys = draw.choice(PREFILL_HEADS), log_uniform(draw, 1, 32), log_uniform(draw, 128, 65536)
        is_chunk = draw.random() < 0.2
        queries = log_uniform(draw, 32, keys / 2) if is_chunk else keys
        shape = Shape(batch, queries, keys, heads, causal=is_chunk or draw.random() < 0.75)
        if FLOPS[0] < shape.flops < FLOPS[1]:
            count -= 1
            yield shape


def packs(draw: random.Random, count: int) -> Iterator[tuple[str, list[int], Heads]]:
    """Packed causal requests of unlike lengths."""
    for i in range(count):
        heads, longest = draw.choice(PREFILL_HEADS), log_uniform(draw, 64, 8192)
        lengths = [draw.randint(1, longest) for _ in range(log_uniform(draw, 2, 64))]
        yield f"pack {i}: {len(lengths)} to {longest} {heads.name}", lengths, heads


PATTERNS = ("padding", "random", "random by head", "causal", "window", "documents")


class Masked(Dense):
    """A prefill with a boolean mask, of a pattern of `PATTERNS`."""

    def __init__(self, shape: Shape, pattern: str) -> None:
        import torch

        super().__init__(shape)
        self.name, keys = f"{shape.name} {pattern}", torch.arange(shape.kv_len, device=DEVICE)
        rows, cols = keys[:, None], keys[None]
        if pattern == "padding":
            lengths = torch.randint(shape.kv_len // 2, shape.kv_len + 1, (shape.batch, 1), device=DEVICE)
            self.mask = cols < lengths
        elif pattern.startswith("random"):
            heads = shape.heads.heads if "head" in pattern else 1
            self.mask = torch.rand(shape.batch, heads, *[shape.kv_len] * 2, device=DEVICE) < 0.7
        else:
            near, same = rows - cols < shape.kv_len // 8, rows * 5 // shape.kv_len == cols * 5 // shape.kv_len
            kept = {"causal": cols <= rows, "window": (cols <= rows) & near, "documents": same}[pattern]
            self.mask = kept.expand(shape.batch, 1, -1, -1).contiguous()
        self.tensors = {"mask": self.mask}

    def check(self, out, who: str) -> None:
        """The first and the last request, with fp64."""
        import torch

        from cuteforge.families.attention import reference

        for b in {0, self.shape.batch - 1}:
            one = slice(b, b + 1)
            operands = tuple(x[one] for x in self.inputs)
            exact, _ = reference.attend(*operands, mask=self.mask[one], compute_dtype=torch.float32)
            error = (out[one].double() - exact.double()).abs().max().item()
            if not error <= 0.02:
                raise AssertionError(f"{who}, {self.name}: request {b} is off by {error:.3g}")

    def torch_call(self) -> Callable[[], object]:
        """torch's own attention with the same mask, by cuDNN."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.transpose(1, 2) for x in self.inputs)
        mask = self.mask[:, None, None] if self.mask.dim() == 2 else self.mask
        mask = mask.expand(-1, -1, q.shape[2], -1)

        def call():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                attend = torch.nn.functional.scaled_dot_product_attention
                return attend(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

        return call


def masked(draw: random.Random, count: int) -> Iterator[tuple[Shape, str]]:
    """Prefills of as many queries as keys, each with a pattern."""
    while count:
        heads, batch, keys = draw.choice(PREFILL_HEADS), log_uniform(draw, 1, 16), log_uniform(draw, 128, 8192)
        shape = Shape(batch, keys, keys, heads)
        if FLOPS[0] < shape.flops < FLOPS[1] and batch * heads.heads * keys**2 < MASK_BYTES:
            count -= 1
            yield shape, draw.choice(PATTERNS)


def mask_times(run: Run, draw: random.Random, count: int) -> Iterator[Timed]:
    """Masks beside cuDNN, and padding beside our own lengths."""
    for shape, pattern in masked(draw, count):
        problem = Masked(shape, pattern)
        rivals = build_rivals({CUDNN_SDPA: problem.torch_call} if run.peer else {}, problem)
        us = measure(run, {"ours": gated(problem), **rivals})
        ours = us.pop("ours")
        if us:
            yield Timed("masks", problem.name, ours, us)


def decode_times(run: Run, draw: random.Random, count: int) -> Iterator[Timed]:
    """Dense decode beside the peers, and pages beside the dense peers and beside our own dense decode."""
    for shape, page_size in decodes(draw, count):
        dense = Dense(shape)
        paged = paged_copy(dense, page_size)
        calls = {"dense": gated(dense), "paged": gated(paged)}
        us = measure(run, calls | build_rivals(dense_rivals(run.peer or {}, DECODE_PEERS, dense), dense))
        ours, pages = us.pop("dense"), us.pop("paged")
        if us:
            yield Timed("decode", shape.name, ours, us)
            yield Timed("paged decode, over dense peers", paged.name, pages, us)
        yield Timed("paged decode, over our dense", paged.name, pages, {"ours dense": ours})


def prefill_times(run: Run, draw: random.Random, count: int) -> Iterator[Timed]:
    """Prefill beside the peers, torch's own of which are causal only from the first key on, so that chunks have one
    peer; and pages beside our own dense prefill."""
    for shape in prefills(draw, count):
        dense = Dense(shape)
        paged = paged_copy(dense, draw.choice(PAGE_SIZES))
        names = PREFILL_PEERS if shape.q_len == shape.kv_len or not shape.causal else (FA4,)
        calls = {"dense": gated(dense), "paged": gated(paged)}
        us = measure(run, calls | build_rivals(dense_rivals(run.peer or {}, names, dense), dense))
        ours, pages = us.pop("dense"), us.pop("paged")
        if us:
            yield Timed("prefill", shape.name, ours, us)
        yield Timed("paged prefill, over our dense", paged.name, pages, {"ours dense": ours})


def pack_times(run: Run, draw: random.Random, count: int) -> Iterator[Timed]:
    """Packed prefill beside flash-attn-4."""
    for name, lengths, heads in packs(draw, count):
        problem = Packed(name, lengths, heads)
        us = measure(run, {"ours": gated(problem), **build_rivals(packed_rivals(run, problem), problem)})
        ours = us.pop("ours")
        if us:
            yield Timed("packed prefill", name, ours, us)


SECTIONS = {"decode": decode_times, "prefill": prefill_times, "packed": pack_times, "masks": mask_times}


def summary(group: str, times: Sequence[Timed]) -> str:
    """What a group came to, with its worst sizes."""
    ranked = sorted(times, key=lambda timed: -timed.ratio)
    ratios = [timed.ratio for timed in ranked]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    slower = sum(ratio > SLOWER for ratio in ratios)
    head = f"{group}: {len(ratios)} sizes, geometric mean {mean:.3f}, median {statistics.median(ratios):.3f}, "
    lines = [f"{head}worst {ratios[0]:.3f}, {slower} above {SLOWER}"]
    for timed in ranked[:WORST]:
        beside = ", ".join(f"{name} {us:.1f}" for name, us in timed.beside.items())
        lines.append(f"    {timed.ratio:.2f}  {timed.name}: {timed.us:.1f} us; {beside}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.common_parser(__doc__.splitlines()[0])
    parser.add_argument("seed", type=int, help="what the sizes are drawn from")
    parser.add_argument("--count", type=int, default=COUNT, help=f"sizes of a group (default {COUNT})")
    args = parser.parse_args(argv)
    peer, status = (None, "left out") if args.no_peer else peers.find_attention()
    print(f"{harness.environment()['gpu']}; peers: {status}; seed {args.seed}")
    run = Run(peer, {}, args.repeats or (5 if args.quick else 10), args.quick, args.cases)
    times: list[Timed] = []
    for name, section in SECTIONS.items():
        if run.wants(name):
            # each section draws anew: the sizes of one do not depend on whether another runs
            draw = random.Random(f"{args.seed} {name}")
            for timed in section(run, draw, args.count):
                times.append(timed)
                print(f"{timed.ratio:6.3f}  {timed.group}  {timed.name}  {timed.us:.1f} us", file=sys.stderr)
    for group in dict.fromkeys(timed.group for timed in times):
        print(summary(group, [timed for timed in times if timed.group == group]))


if __name__ == "__main__":
    main()

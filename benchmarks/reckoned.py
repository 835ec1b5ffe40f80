"""What the cases of the records would take on GPUs that we do not have: by the published bandwidth and peak of each.

Nothing here is measured but the time of the record. `render_results.py` writes it into docs/other_gpus.md.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attention_problem
import bench_attention
import bench_paged_attention
import harness

# Rows that repeat another one, and those that no ceiling bounds.
LEFT_OUT = re.compile(r"growth .*|.* deterministic")
DEVICE_METRICS = ("fwd", "bwd", "rotate", "decode", "prefill")


class Gpu(NamedTuple):
    """Published figures of a GPU.

    Attributes:
        tbps: of its memory, 1e12 bytes a second.
        tflops: dense products of bf16 with sums in fp32.
        source: the document that has them.
    """

    tbps: float
    tflops: float
    source: str

    def us(self, work: Work) -> float:
        """The longer of what the memory and what the tensor cores take."""
        return max(work.bytes / self.tbps, work.flops / self.tflops) * 1e-6


class Work(NamedTuple):
    """What a case has to move, and to multiply."""

    bytes: int
    flops: int


GPUS = {
    "H200": Gpu(4.8, 989.5, "NVIDIA H200 datasheet, SXM; half of the peak with sparsity"),
    "A100": Gpu(2.039, 312, "NVIDIA A100 80GB datasheet, SXM"),
    "L20": Gpu(0.864, 119.5, "NVIDIA L20 datasheet"),
    "B200": Gpu(8.0, 2250, "NVIDIA DGX B200 and HGX B200 datasheets, an eighth; half of the peak with sparsity"),
    "RTX 5090": Gpu(1.792, 209.5, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
}


def is_fixed(row: Mapping[str, Any]) -> bool:
    """Whether a row is a case of fixed size whose device time was measured."""
    return row["metric"] in DEVICE_METRICS and not LEFT_OUT.fullmatch(row["case"])


@functools.cache
def attention_work() -> dict[tuple[str, str], Work]:
    """By case and metric, whatever keys lie in."""
    paged, dense = bench_paged_attention, bench_attention
    prefills = (*dense.PREFILL, *dense.LENGTHS, *paged.PREFILL)
    works = {(shape.name, "decode"): Work(shape.bytes, shape.flops) for shape in attention_problem.DECODE}
    works |= {(shape.name, "prefill"): Work(shape.bytes, shape.flops) for shape in prefills}
    for ragged in dense.RAGGED:
        tokens = sum(ragged.lengths)
        works[ragged.name, "prefill"] = Work(attention_problem.LLAMA.bytes(tokens, tokens), ragged.flops)
    return works


def work_of(row: Mapping[str, Any]) -> Work:
    """Bytes and operations of a row. A record holds one of them, the one that bounds the case on the GPU of the record:
    of attention the other follows from the shape. A case that no benchmark has now counts by what its row holds."""
    case = re.sub(r" page \d+$| portable$", "", row["case"])
    held = Work(row["bytes"] or 0, row["flops"] or 0)
    return attention_work().get((case, row["metric"]), held)


def render(titles: Mapping[str, str], reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The published figures, then a table for each record."""
    facts = [(name, f"{gpu.tbps:g}", f"{gpu.tflops:g}", gpu.source) for name, gpu in GPUS.items()]
    sections = [_table(("GPU", "TB/s", "TFLOP/s, bf16", "by"), ("---", "---:", "---:", "---"), facts)]
    sections += [_family(title, report) for family, title in titles.items() for report in reports[family]]
    return "\n\n".join(sections)


def _family(title: str, report: Mapping[str, Any]) -> str:
    harness.check_report(report)
    header = ("case", "metric", f"{report['gpu']}, measured", *(f"{name}, reckoned" for name in GPUS))
    lines = [_cells(row, report["gpu"]) for row in filter(is_fixed, report["rows"])]
    rule = ("---", "---", *("---:" for _ in header[2:]))
    ceilings, measured_on = report["ceilings"], report["gpu"]
    reached = f"read {ceilings['read_tbps']:.2f} TB/s and multiplied {ceilings['matmul_tflops']:.0f} TFLOP/s"
    facts = f"Times in µs. In its run of {report['date'][:10]} the {measured_on} {reached} at most."
    return f"### {title}\n\n{facts}\n\n{_table(header, rule, lines)}"


def _cells(row: Mapping[str, Any], measured_on: str) -> tuple[str, ...]:
    """Beside the GPU of the record, how much of the measured time is reckoned."""
    work, us = work_of(row), row["ours_us"]
    reckoned = {name: gpu.us(work) for name, gpu in GPUS.items()}
    shares = {name: f" ({time / us:.0%})" if name in measured_on else "" for name, time in reckoned.items()}
    return row["case"], row["metric"], _us(us), *(_us(time) + shares[name] for name, time in reckoned.items())


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _table(header: Sequence[str], rule: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))

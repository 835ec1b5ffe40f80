"""What one who chooses a library asks of the records: how fast is each library at my size? The selection that tables
and drawings share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import bench_csa
import bench_rotary
import eager
import peers

OURS = "cuteforge"
ATTENTION_PEERS = (peers.CUDNN_SDPA, peers.FLASH_SDPA, peers.FlashAttention4.name, eager.NAME)
PAGED_PEERS = (f"{peers.FlashAttention4.name} page 16", eager.NAME)
UNITS = {"flops": "TFLOP/s", "bytes": "TB/s"}


class Case(NamedTuple):
    """One size, by its label, and the speed of every library that was measured there."""

    label: str
    speeds: Mapping[str, float]


@dataclass(frozen=True)
class Panel:
    """Cases of one kind that differ in size only.

    Args:
        title: of the table and of the drawing.
        size: what the numbers of a label are.
        metric, pattern: which rows of the family's record; the groups of `pattern` are the sizes.
        libraries: names in the record of whoever does the same work, in the order in which they are shown.
        work: "flops" or "bytes", which a row holds.
        ceiling: key of what the GPU reaches at most.
        label: of the numbers of a case.
    """

    title: str
    size: str
    family: str
    metric: str
    pattern: str
    libraries: tuple[str, ...]
    work: str
    ceiling: str
    label: str

    @property
    def unit(self) -> str:
        return UNITS[self.work]

    def cases(self, report: Mapping[str, Any]) -> list[Case]:
        """Smallest first: by the last number of the label, then by the one before it."""
        found = []
        for row in report["rows"]:
            match = re.fullmatch(self.pattern, row["case"])
            if match and row["metric"] == self.metric and row[self.work]:
                sizes = tuple(map(int, match.groups()))
                found.append((sizes[::-1], Case(self.label.format(*sizes), self._speeds(row))))
        return [case for _, case in sorted(found, key=lambda pair: pair[0])]

    def _speeds(self, row: Mapping[str, Any]) -> dict[str, float]:
        """By library, ours first; without those that the record lacks."""
        us = {OURS: row["ours_us"]} | {name: row["peers_us"].get(name) for name in self.libraries}
        return {name: row[self.work] / time * 1e-6 for name, time in us.items() if time}


def names_in(cases: Sequence[Case]) -> list[str]:
    """Every library of `cases`, once, ours first."""
    return list(dict.fromkeys(name for case in cases for name in case.speeds))


PREFILL = Panel(
    "Prefill, causal", "sequences × tokens", "attention", "prefill", r"(\d+)x(\d+) h32/8 d128 causal",
    ATTENTION_PEERS, "flops", "matmul_tflops", "{}×{}",
)  # fmt: skip
DECODE = Panel(
    "Decode, one token a request", "requests × context", "attention", "decode", r"(\d+)x(\d+) h32/8 d128",
    ATTENTION_PEERS, "bytes", "read_tbps", "{}×{}",
)  # fmt: skip
PAGED_PREFILL = Panel(
    "Prefill over pages of 16, causal", "sequences × tokens", "paged_attention", "prefill",
    r"(\d+)x(\d+) h32/8 d128 causal page 16", PAGED_PEERS, "flops", "matmul_tflops", "{}×{}",
)  # fmt: skip
PAGED_DECODE = Panel(
    "Decode over pages of 16", "requests × context", "paged_attention", "decode", r"(\d+)x(\d+) h32/8 d128 page 16",
    PAGED_PEERS, "bytes", "read_tbps", "{}×{}",
)  # fmt: skip
ROTARY = Panel(
    "Rotary of q and k, halves", "tokens", "rotary", "rotate", r"(\d+) tokens halves",
    (bench_rotary.PEER, eager.NAME), "bytes", "copy_tbps", "{}",
)  # fmt: skip
ROTARY_PAIRS = Panel(
    "Rotary of q and k, interleaved", "tokens", "rotary", "rotate", r"(\d+) tokens interleaved",
    (bench_rotary.PEER, eager.NAME), "bytes", "copy_tbps", "{}",
)  # fmt: skip
COMPRESSOR_FORWARD = Panel(
    "CSA compressor, forward, d 512", "segments × tokens", "csa", "fwd", r"(\d+)x(8192) d512 r4 c2",
    (bench_csa.PEER, eager.NAME), "bytes", "copy_tbps", "{}×{}",
)  # fmt: skip
COMPRESSOR_BACKWARD = Panel(
    "CSA compressor, backward, d 512", "segments × tokens", "csa", "bwd", r"(\d+)x(8192) d512 r4 c2",
    (bench_csa.PEER, eager.NAME), "bytes", "copy_tbps", "{}×{}",
)  # fmt: skip
TABLES = (
    PREFILL,
    DECODE,
    PAGED_PREFILL,
    PAGED_DECODE,
    ROTARY,
    ROTARY_PAIRS,
    COMPRESSOR_FORWARD,
    COMPRESSOR_BACKWARD,
)
# By the name of the drawing.
DRAWINGS = {
    "speed_attention": (PREFILL, DECODE),
    "speed_pointwise": (ROTARY, COMPRESSOR_FORWARD, COMPRESSOR_BACKWARD),
}

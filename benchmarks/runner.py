"""What a benchmark of a kernel family is made of: the run that its sections share, sections of every family, its `main`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ceilings
import harness
from harness import Bar, Row

RAW = "raw launch"
# Host time of each entry, as multiples of a raw launch.
HOST_BARS = {"bound": 1.2, "execute": 1.7, "wrapper": 2.8}
GROWTH_BAR = 1.1
GROWTH_REFERENCE = "best smaller, scaled"


@dataclass(frozen=True)
class Run:
    """What the sections of a benchmark share.

    Args:
        peer: another library, None where there is none to measure.
        ceiling: of the card, measured in this run.
        patterns: only cases whose name contains one of these; all when empty.
    """

    peer: Any
    ceiling: Mapping[str, float]
    repeats: int
    quick: bool
    patterns: Sequence[str] = ()

    def wants(self, name: str) -> bool:
        return not self.patterns or any(pattern in name for pattern in self.patterns)

    def row(self, case: str, metric: str, us: float, size_bytes: int, beside: Mapping, bars: tuple[Bar, ...]) -> Row:
        """A row of a memory-bound case, with the time that a copy of as many bytes takes."""
        return Row(case, metric, us, beside, self.floor_us(size_bytes), size_bytes, bars=bars)

    def floor_us(self, size_bytes: int) -> float:
        return size_bytes / self.ceiling["copy_tbps"] * 1e-6


Section = Callable[[Run], Iterator[Row]]


def growth_rows(
    run: Run, metric: str, us: Mapping[str, float], tokens: Mapping[str, int], size_bytes: Mapping[str, int]
) -> Iterator[Row]:
    """Rows of one kernel at growing sizes: each against its time if every token cost what it costs at the best smaller size.

    A fixed launch latency makes small sizes dearer per token; what must not happen is that a larger one is.

    Args:
        us, tokens, size_bytes: by case, smallest first.
    """
    best_us_per_token = None
    for case, case_us in us.items():
        beside = {} if best_us_per_token is None else {GROWTH_REFERENCE: best_us_per_token * tokens[case]}
        bars = (Bar("ratio", GROWTH_BAR, GROWTH_REFERENCE),) if beside else ()
        yield run.row(f"growth {tokens[case]} tokens", metric, case_us, size_bytes[case], beside, bars)
        best_us_per_token = min(filter(None, (best_us_per_token, case_us / tokens[case])))


def host_rows(
    calls: Mapping[str, Callable[[], Any]], suffix: str, peers: Mapping[str, Callable[[], Any]]
) -> Iterator[Row]:
    """Host time per call of the entries that HOST_BARS names, beside a raw launch and the peers' launches.

    Args:
        suffix: follows the entry's name in the row.
    """
    us = harness.measure_host({RAW: ceilings.raw_launch(), **calls, **peers})
    beside = {name: us[name] for name in (RAW, *peers)}
    for entry, limit in HOST_BARS.items():
        yield Row(f"{entry} {suffix}", "host", us[entry], beside, bars=(Bar("ratio", limit, RAW),))


def run_benchmark(
    family: str,
    description: str,
    peer_name: str,
    find_peer: Callable[[], tuple[Any, str]],
    sections: Sequence[Section],
    slow: Sequence[Section],
    argv: Sequence[str] | None,
) -> None:
    """The `main` of a benchmark: command line, facts and ceilings, the sections in order, table and record.

    Args:
        find_peer: the peer and its version, or None and the reason; not asked with `--no-peer`.
        slow: sections that `--quick` leaves out.
    """
    args = harness.common_parser(description).parse_args(argv)
    peer, peer_status = (None, "left out") if args.no_peer else find_peer()
    facts = harness.environment()
    print(f"{facts['gpu']}, driver {facts['driver']}; peer {peer_name}: {peer_status}")
    repeats = args.repeats or (5 if args.quick else 20)
    run = Run(peer, harness.measure_ceilings(repeats), repeats, args.quick, args.cases)
    rows = [row for section in sections if not (args.quick and section in slow) for row in section(run)]
    harness.publish(family, args, run.ceiling, rows, facts)

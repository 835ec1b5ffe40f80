"""What a benchmark of a kernel family is made of: the run that its sections share, sections of every family, its
`main`."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ceilings
import eager
import harness
from harness import Bar, Row

RAW = "raw launch"
# Host time of each entry, as multiples of a raw launch.
HOST_BARS = {"bound": 1.25, "execute": 2.2, "wrapper": 3.0, "policy": 3.0}
GROWTH_BAR = 1.1
GROWTH_REFERENCE = "best smaller, scaled"

COLD_BAR, WARM_BAR = Bar("us", 3.0e6), Bar("us", 0.3e6)
CUDA_START = "torch's CUDA start"


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

    def row(
        self,
        case: str,
        metric: str,
        us: float,
        work: int,
        beside: Mapping[str, float],
        bars: tuple[Bar, ...],
        ceiling: str = "copy_tbps",
    ) -> Row:
        """A row of a case that one ceiling bounds, with the time that its work takes there.

        Args:
            work: bytes that must move, or floating point operations under the ceiling "matmul_tflops".
        """
        unit = "flops" if ceiling == "matmul_tflops" else "bytes"
        return Row(case, metric, us, beside, self.floor_us(work, ceiling), bars=bars, **{unit: work})

    def floor_us(self, work: int, ceiling: str = "copy_tbps") -> float:
        return work / self.ceiling[ceiling] * 1e-6


Section = Callable[[Run], Iterator[Row]]


def growth_rows(
    run: Run,
    metric: str,
    us: Mapping[str, float],
    tokens: Mapping[str, int],
    work: Mapping[str, int],
    *,
    ceiling: str = "copy_tbps",
    label: str = "{tokens} tokens",
) -> Iterator[Row]:
    """Rows of one kernel at growing sizes: each against its time if every token cost what it costs at the best smaller
    size.

    A fixed launch latency makes small sizes dearer per token; what must not happen is that a larger one is.

    Args:
        us, tokens, work: by case, smallest first; `work` and `ceiling` as in `Run.row`.
        label: how a row is named, of its `case` and `tokens`.
    """
    best_us_per_token = None
    for case, case_us in us.items():
        beside = {} if best_us_per_token is None else {GROWTH_REFERENCE: best_us_per_token * tokens[case]}
        bars = (Bar("ratio", GROWTH_BAR, GROWTH_REFERENCE),) if beside else ()
        name = f"growth {label.format(case=case, tokens=tokens[case])}"
        yield run.row(name, metric, case_us, work[case], beside, bars, ceiling)
        best_us_per_token = min(filter(None, (best_us_per_token, case_us / tokens[case])))


def host_rows(
    calls: Mapping[str, Callable[[], Any]],
    suffix: str,
    peers: Mapping[str, Callable[[], Any]],
    bars: Mapping[str, float] = HOST_BARS,
) -> Iterator[Row]:
    """Host time per call of the entries in `calls`, which `bars` names, beside a raw launch and the peers' launches.

    Args:
        suffix: follows the entry's name in the row.
    """
    us = harness.measure_host({RAW: ceilings.raw_launch(), **calls, **peers})
    beside = {name: us[name] for name in (RAW, *peers)}
    for entry, limit in bars.items():
        if entry not in calls:
            continue
        yield Row(f"{entry} {suffix}", "host", us[entry], beside, bars=(Bar("ratio", limit, RAW),))


def first_use_rows(run: Run, code: str, label: str = "first use", warm_processes: int = 3) -> Iterator[Row]:
    """A first use in a fresh process with an empty cache, and in the next processes.

    Args:
        code: for `harness.run_fresh`; prints an object with `cuda_us` (creating the context and the inputs),
            `first_us`, a `checksum` of the result, and whether it `imported_cutlass`.
    """
    with tempfile.TemporaryDirectory() as cache:
        env = {"CUTEFORGE_CACHE_DIR": cache}
        cold, *warm = (harness.run_fresh(code, env) for _ in range(1 + (1 if run.quick else warm_processes)))
    harness.require_green(lambda: check_same_results(cold, warm))
    yield start_row(f"{label}, cold", [cold], COLD_BAR)
    yield start_row(f"{label}, warm", warm, WARM_BAR)


def start_row(case: str, processes: Sequence[Mapping[str, Any]], bar: Bar) -> Row:
    first_us, cuda_us = (statistics.median(p[key] for p in processes) for key in ("first_us", "cuda_us"))
    imported = any(p["imported_cutlass"] for p in processes)
    print(f"{case}: cutlass {'was' if imported else 'was not'} imported", file=sys.stderr)
    return Row(case, "start", first_us, {CUDA_START: cuda_us}, bars=(bar,))


def check_same_results(cold: Mapping[str, Any], warm: Sequence[Mapping[str, Any]]) -> None:
    """A kernel loaded from disk computes what the freshly compiled one did."""
    sums = {process["checksum"] for process in (cold, *warm)}
    if len(sums) != 1 or not math.isfinite(cold["checksum"]):
        raise AssertionError(f"the cold and the warm processes disagree: checksums {sorted(sums)}")


def best_peer_bar(limit: float, peers_us: Mapping[str, float]) -> Bar:
    """At most `limit` times the time of the fastest of the peers that were measured; plain torch is none."""
    names = [name for name in peers_us if name != eager.NAME]
    return Bar("ratio", limit, min(names, key=peers_us.__getitem__, default="any peer"))


def eager_us(case: str, call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """The time of plain torch, under its name; nothing if a call takes too long, which is printed.

    It is measured by itself, after the others of its case: among them it made short kernels slower (rotary of 16 tokens
    5.6 us instead of 5.3), and they would wait for the scrubs that its many launches need.
    """
    options = {"scrubs": eager.SCRUBS}
    us = harness.measure_group({eager.NAME: call}, repeats=1, **options)[eager.NAME]
    if us > eager.MOST_US:
        print(f"{eager.NAME} is not measured on {case}: a call takes {us * 1e-3:.0f} ms", file=sys.stderr)
        return {}
    return harness.measure_group({eager.NAME: call}, repeats=repeats, **options)


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
    if peer is not None:
        facts["versions"] |= {f"peer {peer_name}": peer_status}
    repeats = args.repeats or (5 if args.quick else 20)
    run = Run(peer, harness.measure_ceilings(repeats), repeats, args.quick, args.cases)
    rows = [row for section in sections if not (args.quick and section in slow) for row in section(run)]
    harness.publish(family, args, run.ceiling, rows, facts)

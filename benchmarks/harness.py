"""What every benchmark shares: timing, ceilings of the card, the correctness gate, bars, table and JSON record.

Imports neither torch nor cutlass at module level: statistics, schema, bars and table work on a machine without a GPU.
The method is described in docs/dev/benchmarking.md.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ceilings

RESULTS_DIR = pathlib.Path(__file__).resolve().parent / "results"
METRICS = ("fwd", "bwd", "rotate", "decode", "prefill", "host", "start")
CEILINGS = ("copy_tbps", "read_tbps", "matmul_tflops", "raw_launch_us")
DISTRIBUTIONS = (
    "cuteforge",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "nvidia-cudnn-frontend",
    "flashinfer-python",
    "flash-attn-4",
)

# The scrub must outlast the host's work for one timed call (event records and launch, about 20 us), or host time leaks
# into the device figure: four times the L2 takes over 50 us to write.
SCRUB_L2_MULTIPLE = 4
WARM_UP_SECONDS = 0.03


class GateError(RuntimeError):
    """The correctness gate of a family is red: its speeds are not reported."""


def require_green(gate: Callable[[], None]) -> None:
    """Runs a family's check against fp64.

    Args:
        gate: returns if the results are right and raises if they are not.

    Raises:
        GateError: the gate raised. Callers let it end the run, so no table is printed and no record is written.
    """
    try:
        gate()
    except Exception as error:
        raise GateError(f"correctness gate failed, so no speed is reported: {error}") from error


def round_robin(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Each name `repeats` times, interleaved, the first place rotating so that no candidate always follows another."""
    for turn in range(repeats):
        shift = turn % len(names)
        yield from (*names[shift:], *names[:shift])


def measure_group(
    candidates: Mapping[str, Callable[[], Any]], *, repeats: int = 20, flush: bool = True, scrubs: int = 1
) -> dict[str, float]:
    """Median device time of each candidate, measured side by side on torch's current stream and device.

    Args:
        candidates: name -> callable that enqueues its work on the current stream, on buffers allocated beforehand.
        repeats: event-timed single calls per candidate, interleaved with the other candidates' calls.
        flush: overwrite the L2 cache before each timed call.
        scrubs: how often; each gives the host over 50 us to enqueue the call. More than one for a peer that takes
        longer.

    Returns:
        name -> median microseconds, in the order given. About 2 us of launch latency is included.
    """
    import torch

    if not candidates:
        return {}
    _warm_up(candidates, torch.cuda.synchronize)
    scrub = _l2_scrubber(torch.cuda.current_device()) if flush else None
    events: dict[str, list] = {name: [] for name in candidates}
    for name in round_robin(list(candidates), repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(scrubs if scrub is not None else 0):
            scrub.zero_()
        start.record()
        candidates[name]()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(s.elapsed_time(e) * 1e3 for s, e in pairs) for name, pairs in events.items()}


def measure_host(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    batches: int = 40,
    calls: int = 50,
    synchronize: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Host time per call of each candidate, measured side by side while the launch queue is not full.

    Args:
        candidates: name -> callable; each enqueues short device work, so that `calls` of them fit in the queue.
        batches: batches per candidate, interleaved with the other candidates' batches.
        calls: back-to-back calls per batch; the device is drained before each batch, outside the clock.
        synchronize: drains the device; `torch.cuda.synchronize` when None.

    Returns:
        name -> median over the batches of microseconds per call.
    """
    if synchronize is None:
        import torch

        synchronize = torch.cuda.synchronize
    if not candidates:
        return {}
    _warm_up(candidates, synchronize)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for name in round_robin(list(candidates), batches):
        call = candidates[name]
        synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        samples[name].append((time.perf_counter_ns() - start) / calls / 1e3)
    synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}


def measure_ceilings(repeats: int = 20) -> dict[str, float]:
    """What this card can do, by the same method as the kernels: TB/s, TFLOP/s and microseconds of host time."""
    import torch

    size_bytes, edge = 1 << 30, 8192
    src = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    a, b = (torch.randn(edge, edge, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    us = measure_group(
        {
            "matmul": lambda: torch.mm(a, b, out=product),
            "copy": lambda: dst.copy_(src),
            "read": ceilings.reader(src),
        },
        repeats=repeats,
    )
    return {
        "copy_tbps": tbps(2 * size_bytes, us["copy"]),
        "read_tbps": tbps(size_bytes, us["read"]),
        "matmul_tflops": 2 * edge**3 / us["matmul"] * 1e-6,
        "raw_launch_us": measure_host({"raw": ceilings.raw_launch()})["raw"],
    }


def tbps(size_bytes: float, us: float) -> float:
    """Bytes moved in `us` microseconds, as TB/s (1e12 bytes)."""
    return size_bytes / us * 1e-6


def speed(size_bytes: int | None, flops: int | None, us: float) -> str:
    """What a case of so many bytes, or floating point operations, reached; empty where neither is known."""
    if flops:
        return f"{flops / us * 1e-6:.0f} TFLOP/s"
    return f"{tbps(size_bytes, us):.2f} TB/s" if size_bytes else ""


def run_fresh(code: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs `code` in a fresh interpreter that can import cuteforge.

    Args:
        code: Python source whose last line of output is one JSON object.
        env: environment variables added to this process's.

    Returns:
        That object.

    Raises:
        RuntimeError: the interpreter failed; the text holds its error output.
    """
    paths = [str(_package_root()), os.environ.get("PYTHONPATH", "")]
    child_env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(env or {})}
    done = subprocess.run([sys.executable, "-c", code], env=child_env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a fresh interpreter failed with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@dataclass(frozen=True)
class Bar:
    """One target of a row.

    Args:
        kind: "ratio" (ours at most `limit` times the time of peer `to`), "tbps" (at least `limit` TB/s of the row's
            bytes) or "us" (at most `limit` microseconds).
        limit: the bound, in the unit of `kind`.
        to: the peer, a key of the row's `peers_us`; for "ratio" only.
    """

    kind: str
    limit: float
    to: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("ratio", "tbps", "us"):
            raise ValueError(f"kind: wanted ratio, tbps or us, got {self.kind!r}")
        if (self.kind == "ratio") != bool(self.to):
            raise ValueError(f"to: wanted a peer's name for a ratio and none otherwise, got {self.to!r}")

    def value(self, row: Row) -> float | None:
        """The row's figure in this bar's unit; None where the peer was not measured."""
        if self.kind == "us":
            return row.ours_us
        if self.kind == "tbps":
            return tbps(row.bytes, row.ours_us) if row.bytes else None
        peer_us = row.peers_us.get(self.to)
        return row.ours_us / peer_us if peer_us else None

    def is_met(self, row: Row) -> bool | None:
        """None where the peer was not measured."""
        value = self.value(row)
        if value is None:
            return None
        return value >= self.limit if self.kind == "tbps" else value <= self.limit

    def verdict(self, row: Row) -> str:
        """One phrase for the table, e.g. `MISSED 0.81x of cudnn-frontend (bar <= 0.7x)`."""
        value, is_met = self.value(row), self.is_met(row)
        sign, unit = (">=", " TB/s") if self.kind == "tbps" else ("<=", "x" if self.kind == "ratio" else " us")
        whose = f" of {self.to}" if self.to else ""
        if value is None:
            return f"not measured{whose} (bar {sign} {_number(self.limit)}{unit})"
        word = "met" if is_met else "MISSED"
        return f"{word} {_number(value)}{unit}{whose} (bar {sign} {_number(self.limit)}{unit})"


@dataclass(frozen=True)
class Row:
    """One measured case. `bars` are judged in the table; the JSON record holds only what was measured.

    Args:
        case: the shape in words, e.g. "3x8192 d512 r4 c2".
        metric: one of METRICS.
        ours_us: microseconds of this library.
        peers_us: name -> microseconds of what was measured beside it.
        floor_us: the least time that the bytes or FLOPs allow at the measured ceiling, if known.
        bytes: bytes that must move, if known.
        flops: floating point operations, if they bound the case.
        bars: the targets.
    """

    case: str
    metric: str
    ours_us: float
    peers_us: Mapping[str, float] = field(default_factory=dict)
    floor_us: float | None = None
    bytes: int | None = None
    flops: int | None = None
    bars: tuple[Bar, ...] = ()

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric: wanted one of {', '.join(METRICS)}, got {self.metric!r}")

    def record(self) -> dict[str, Any]:
        """The row as the JSON record holds it."""
        names = ("case", "metric", "ours_us", "peers_us", "floor_us", "bytes", "flops")
        return {**{name: getattr(self, name) for name in names}, "peers_us": dict(self.peers_us)}


def environment() -> dict[str, Any]:
    """Facts that a figure depends on: GPU, driver, versions, date (UTC) and the digest of the library's sources.

    Raises:
        SystemExit: there is no CUDA GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("a benchmark needs a CUDA GPU; torch sees none")
    from cuteforge.runtime.sources import source_digest

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **_distribution_versions()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source_digest": source_digest(),
    }


def build_report(facts: Mapping[str, Any], ceiling: Mapping[str, float], rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON record: the environment, the ceilings of the same run, and the rows."""
    return {**facts, "ceilings": dict(ceiling), "rows": [row.record() for row in rows]}


def check_report(report: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first key of `report` that departs from the record's schema."""
    _check_keys("report", report, ("gpu", "driver", "versions", "date", "source_digest", "ceilings", "rows"))
    _check_keys("ceilings", report["ceilings"], CEILINGS)
    for index, row in enumerate(report["rows"]):
        where = f"rows[{index}]"
        _check_keys(where, row, ("case", "metric", "ours_us", "peers_us", "floor_us", "bytes", "flops"))
        if row["metric"] not in METRICS:
            raise ValueError(f"{where}.metric: wanted one of {', '.join(METRICS)}, got {row['metric']!r}")
        for name, us in {"ours_us": row["ours_us"], **row["peers_us"]}.items():
            if not (isinstance(us, (int, float)) and 0 < us < float("inf")):
                raise ValueError(f"{where} {name}: wanted a positive number of microseconds, got {us!r}")


def write_report(report: Mapping[str, Any], family: str, directory: pathlib.Path = RESULTS_DIR) -> pathlib.Path:
    """Checks the record and writes it to `<directory>/<gpu-slug>/<family>.json`; returns that path."""
    check_report(report)
    path = directory / gpu_slug(report["gpu"]) / f"{family}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def gpu_slug(name: str) -> str:
    """A GPU's name as a folder name: `NVIDIA H200` -> `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def format_table(rows: Sequence[Row]) -> str:
    """The rows as aligned plain text; each bar of a row on a line of its own."""
    lines = [("case", "metric", "ours us", "speed", "floor us", "beside it, us", "bar")]
    for row in rows:
        verdicts = [bar.verdict(row) for bar in row.bars] or [""]
        lines.append((*_cells(row), verdicts[0]))
        lines += [("",) * 6 + (verdict,) for verdict in verdicts[1:]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numeric = (2, 3, 4)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def summarize_bars(rows: Sequence[Row]) -> str:
    """How many bars were met, missed and not measured."""
    outcomes = [bar.is_met(row) for row in rows for bar in row.bars]
    return f"bars: {outcomes.count(True)} met, {outcomes.count(False)} missed, {outcomes.count(None)} not measured"


def common_parser(description: str) -> argparse.ArgumentParser:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few cases and repeats; for trying the benchmark itself")
    parser.add_argument("--cases", nargs="+", default=[], metavar="TEXT", help="only cases whose name contains a TEXT")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help=f"where records go (default {RESULTS_DIR})")
    parser.add_argument("--no-peer", action="store_true", help="do not load or measure other libraries")
    parser.add_argument("--repeats", type=int, default=None, help="event-timed calls per case (default 20, quick 5)")
    return parser


def publish(
    family: str, args: argparse.Namespace, ceiling: Mapping[str, float], rows: Sequence[Row], facts: Mapping[str, Any]
) -> None:
    """Prints the table and writes the record.

    A partial run (`--quick`, `--cases`, `--no-peer`) is written only where `--out` names a folder: it must not replace
    the record of a full one.
    """
    print("ceilings: " + ", ".join(f"{name} {_number(value)}" for name, value in ceiling.items()))
    print(format_table(rows))
    print(summarize_bars(rows))
    if args.out or not (args.quick or args.cases or args.no_peer):
        print("written:", write_report(build_report(facts, ceiling, rows), family, args.out or RESULTS_DIR))


def _warm_up(candidates: Mapping[str, Callable[[], Any]], synchronize: Callable[[], None]) -> None:
    """Loads every kernel and raises the clocks, which fall while a case compiles or the fp64 check runs."""
    deadline = time.perf_counter() + WARM_UP_SECONDS
    while True:
        for call in candidates.values():
            call()
        synchronize()
        if time.perf_counter() > deadline:
            return


@functools.cache
def _l2_scrubber(device_index: int):
    import torch

    l2_bytes = torch.cuda.get_device_properties(device_index).L2_cache_size
    return torch.empty(SCRUB_L2_MULTIPLE * l2_bytes, dtype=torch.uint8, device=f"cuda:{device_index}")


def _package_root() -> pathlib.Path:
    import cuteforge

    return pathlib.Path(cuteforge.__file__).resolve().parents[1]


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _distribution_versions() -> dict[str, str]:
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _check_keys(where: str, mapping: Mapping[str, Any], names: Sequence[str]) -> None:
    if set(mapping) != set(names):
        raise ValueError(f"{where}: wanted the keys {', '.join(names)}, got {', '.join(mapping)}")


def _number(value: float) -> str:
    """Three significant digits, and never an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _cells(row: Row) -> tuple[str, ...]:
    peers = ", ".join(f"{name} {_number(us)}" for name, us in row.peers_us.items())
    floor = "" if row.floor_us is None else f"{row.floor_us:.1f}"
    return (row.case, row.metric, _number(row.ours_us), speed(row.bytes, row.flops, row.ours_us), floor, peers)

"""Draws the benchmark records: the speed of each library, how near the ceilings, and growth. Needs matplotlib, no GPU.

    python benchmarks/plots.py DIR                            every record in benchmarks/results, as PNG and SVG
    python benchmarks/plots.py docs/assets/plots --format svg    those in the docs
    python benchmarks/plots.py DIR --results OTHER            the records in OTHER

Writes DIR/<gpu>/<name>.<format>; names are speed_<what>, roofline, growth, and peers_<family>.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import harness
import runner
import speeds

FORMATS = ("png", "svg")
GROWTH = "growth "
# What stands beside a time and is no other implementation: ceilings, and other paths and sizes of this library.
NOT_PEERS = ("ours", "page ", "copy ceiling", runner.GROWTH_REFERENCE)
_WIDTH, _BAR_HEIGHT = 9, 0.17  # inches
_LABEL_GAP = 0.008  # of a ratio

Report = Mapping[str, Any]


class Point(NamedTuple):
    """One case under a ceiling: the work of a launch (bytes or operations) and the speed reached (TB/s or TFLOP/s)."""

    series: str
    work: float
    speed: float


class Comparison(NamedTuple):
    """Time of ours as a multiple of that of each other implementation of the same work."""

    case: str
    ratios: Mapping[str, float]


def load_records(results_dir: pathlib.Path) -> dict[str, dict[str, Report]]:
    """GPU -> family -> record, as the folders and files of `results_dir` name them.

    Raises:
        ValueError: a record departs from the schema; names the file.
    """
    records: dict[str, dict[str, Report]] = {}
    for path in sorted(results_dir.glob("*/*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        try:
            harness.check_report(report)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        records.setdefault(path.parent.name, {})[path.stem] = report
    return records


def roofline_points(families: Mapping[str, Report], work: str) -> list[Point]:
    """Every case whose record holds its `work`: "bytes" or "flops"."""
    return [
        Point(f"{family} {row['metric']}", row[work], row[work] / row["ours_us"] * 1e-6)
        for family, report in families.items()
        for row in report["rows"]
        if row[work]
    ]


def comparisons(report: Report) -> list[Comparison]:
    """The kernels that were measured beside others; host time and start-up are in the tables only."""
    cases = {row["case"] for row in report["rows"]}
    found = []
    for row in report["rows"]:
        peers = {n: us for n, us in row["peers_us"].items() if n not in cases and not n.startswith(NOT_PEERS)}
        if peers and row["metric"] not in ("host", "start"):
            ratios = {name: row["ours_us"] / us for name, us in peers.items()}
            found.append(Comparison(f"{row['case']}, {row['metric']}", ratios))
    return found


def growth_series(report: Report) -> dict[str, list[tuple[float, float]]]:
    """Series -> (microseconds that the work takes at the ceiling, microseconds of ours), in the order of the record."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in report["rows"]:
        if row["case"].startswith(GROWTH) and row["floor_us"]:
            # A series is what differs in numbers only.
            kind = re.sub(r"\d+", "n", row["case"].removeprefix(GROWTH))
            series.setdefault(f"{row['metric']}, {kind}", []).append((row["floor_us"], row["ours_us"]))
    return series


def render(
    records: Mapping[str, Mapping[str, Report]], directory: pathlib.Path, formats: Sequence[str]
) -> list[pathlib.Path]:
    """Draw all records; returns the files."""
    return [
        path
        for gpu, families in records.items()
        for name, figure in draw(families)
        for path in _save(figure, directory / gpu / name, formats)
    ]


def draw(families: Mapping[str, Report]) -> Iterator[tuple[str, Any]]:
    """Name and figure of each drawing of one GPU."""
    for name, panels in speeds.DRAWINGS.items():
        if any(panel.family in families and panel.cases(families[panel.family]) for panel in panels):
            yield name, draw_speeds(families, panels)
    yield "roofline", draw_roofline(families)
    yield "growth", draw_growth(families)
    for family, report in families.items():
        if found := comparisons(report):
            yield f"peers_{family}", draw_peers(family, report, found)


def draw_roofline(families: Mapping[str, Report]):
    """Speed against the work of a launch, under the ceilings of the card: memory left, arithmetic right."""
    figure, (memory, arithmetic) = _figure(2, 4.2)
    _draw_ceilings(memory, families, ("copy_tbps", "read_tbps"), "TB/s")
    _draw_points(memory, roofline_points(families, "bytes"), 1e-6, "MB moved by a launch", "TB/s")
    _draw_ceilings(arithmetic, families, ("matmul_tflops",), "TFLOP/s")
    _draw_points(arithmetic, roofline_points(families, "flops"), 1e-9, "GFLOP of a launch", "TFLOP/s")
    _title(figure, families, "speed under the measured ceilings")
    return figure


def draw_speeds(families: Mapping[str, Report], panels: Sequence[speeds.Panel]):
    """For each size one bar a library, higher is faster, under what the GPU reaches at most."""
    shown = [(panel, panel.cases(families[panel.family])) for panel in panels if panel.family in families]
    shown = [(panel, cases) for panel, cases in shown if cases]
    names = list(dict.fromkeys(name for _, cases in shown for name in speeds.names_in(cases)))
    figure, all_axes = _figure(len(shown), 3.4)
    for axes, (panel, cases) in zip(all_axes, shown, strict=True):
        _draw_speed_bars(axes, cases, names)
        ceiling = families[panel.family]["ceilings"][panel.ceiling]
        axes.axhline(ceiling, color="black", linewidth=0.8, linestyle="--")
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.size, fontsize=8)
        axes.set_ylabel(panel.unit, fontsize=8)
        axes.set_ylim(0, 1.08 * ceiling)
        axes.tick_params(labelsize=7)
    _name_colors(figure, names)
    used = {panel.family: families[panel.family] for panel, _ in shown}
    _title(figure, used, "speed, higher is faster; dashed: the measured ceiling")
    return figure


def _draw_speed_bars(axes, cases: Sequence[speeds.Case], names: Sequence[str]) -> None:
    """A group of bars a case; a library keeps its color in every panel, and leaves no gap where it was not measured."""
    for x, case in enumerate(cases):
        width = 0.8 / len(case.speeds)
        for place, (name, speed) in enumerate(case.speeds.items()):
            left = x - 0.4 + place * width
            axes.bar(left, speed, width=0.92 * width, align="edge", color=f"C{names.index(name)}")
    axes.grid(False, axis="x")
    axes.set_xticks(range(len(cases)), [case.label for case in cases])


def draw_peers(family: str, report: Report, found: Sequence[Comparison]):
    """Bars of ours / peer for each case; left of 1 ours takes less time."""
    names = list(dict.fromkeys(name for comparison in found for name in comparison.ratios))
    num_bars = sum(len(comparison.ratios) + 1 for comparison in found)
    figure, (axes,) = _figure(1, 1.2 + _BAR_HEIGHT * num_bars)
    y, ticks = 0.0, []
    for comparison in found:
        ticks.append(y + (len(comparison.ratios) - 1) / 2)
        for name, ratio in comparison.ratios.items():
            axes.barh(y, ratio, height=0.9, color=f"C{names.index(name)}")
            # not crossed by the line at 1
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
            axes.text(ratio + _LABEL_GAP, y, f"{ratio:.2f}", va="center", fontsize=6, bbox=box)
            y += 1
        y += 1
    axes.grid(False, axis="y")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(ticks, [comparison.case for comparison in found], fontsize=7)
    axes.set_ylim(y - 0.5, -1)
    axes.set_xlabel("time of ours / time of the other; below 1 ours is faster")
    _name_colors(figure, names)
    _title(figure, {family: report}, f"{family} beside others")
    return figure


def draw_growth(families: Mapping[str, Report]):
    """Time against what the same work takes at the ceiling, both logarithmic: a line along the diagonal keeps its cost
    per token."""
    figure, (axes,) = _figure(1, 4.6)
    series = {f"{family} {name}": p for family, report in families.items() for name, p in growth_series(report).items()}
    for name, points in series.items():
        axes.plot(*zip(*points), marker="o", markersize=4, label=name)
    if series:
        ends = [limit(x for points in series.values() for x, _ in points) for limit in (min, max)]
        axes.plot(ends, ends, color="black", linewidth=0.8, linestyle="--", label="the ceiling itself")
        axes.legend(fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="µs at the measured ceiling", ylabel="µs")
    axes.minorticks_off()
    _title(figure, families, "growth")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path, metavar="DIR", help="where the drawings go")
    parser.add_argument("--results", type=pathlib.Path, default=harness.RESULTS_DIR, metavar="DIR", help="the records")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=FORMATS)
    args = parser.parse_args(argv)
    records = load_records(args.results)
    if not records:
        print(f"no records in {args.results}", file=sys.stderr)
        return 1
    for path in render(records, args.directory, args.format):
        print("written:", path)
    return 0


def _figure(num_axes: int, height: float):
    """A figure that belongs to no window, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = [figure.add_subplot(1, num_axes, index + 1) for index in range(num_axes)]
    for each in axes:
        each.grid(True, linewidth=0.3)
        each.set_axisbelow(True)
    return figure, axes


def _draw_ceilings(axes, families: Mapping[str, Report], names: Sequence[str], unit: str) -> None:
    """The highest that a run measured of each."""
    for name, style in zip(names, ("-", "--")):
        ceiling = max(report["ceilings"][name] for report in families.values())
        kind = name.partition("_")[0]
        label = f"{kind} {harness._number(ceiling)} {unit}"
        axes.axhline(ceiling, color="black", linewidth=0.8, linestyle=style, label=label)


def _draw_points(axes, points: Sequence[Point], unit: float, xlabel: str, ylabel: str) -> None:
    for name in dict.fromkeys(point.series for point in points):
        own = [(point.work * unit, point.speed) for point in points if point.series == name]
        axes.plot(*zip(*own), marker="o", markersize=4, linestyle="none", label=name)
    if points:
        axes.set(xscale="log", ylim=(0, None))
        axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend(fontsize=7)


def _name_colors(figure, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=f"C{index}", label=name) for index, name in enumerate(names)]
    figure.legend(handles=patches, fontsize=7, loc="outside lower center", ncols=len(names))


def _title(figure, families: Mapping[str, Report], what: str) -> None:
    """What it shows, of which GPU, from records of which days."""
    gpus, days = (
        {report[key][:10] if key == "date" else report[key] for report in families.values()} for key in ("gpu", "date")
    )
    figure.suptitle(f"{', '.join(sorted(gpus))}: {what} ({', '.join(sorted(days))})", fontsize=10)


def _save(figure, stem: pathlib.Path, formats: Sequence[str]) -> Iterator[pathlib.Path]:
    """The same record gives the same bytes: no date, no random ids. Text stays text, which keeps a file small."""
    import matplotlib

    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix in formats:
        path = stem.with_suffix(f".{suffix}")
        metadata = {"Date": None} if suffix == "svg" else None
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": stem.name}):
            figure.savefig(path, dpi=150, metadata=metadata)
        yield path


if __name__ == "__main__":
    sys.exit(main())

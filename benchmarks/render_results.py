"""Writes the benchmark records into the docs, between two markers: what was measured, and how it stands to its targets.

python benchmarks/render_results.py            docs/api/<family>.md of every family, docs/performance.md,
docs/other_gpus.md, docs/dev/performance.md, README.md
python benchmarks/render_results.py --check    only says whether they are current; exit status 1 if one is not
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import attention_problem
import bench_attention
import bench_csa
import bench_paged_attention
import bench_rotary
import eager
import harness
import peers
import plots
import reckoned
import runner
import speeds
from harness import Bar, Row

DOCS_DIR = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGES_DIR, README = DOCS_DIR / "api", DOCS_DIR.parent / "README.md"
PERFORMANCE_PAGE, TARGETS_PAGE = DOCS_DIR / "performance.md", DOCS_DIR / "dev" / "performance.md"
RECKONED_PAGE = DOCS_DIR / "other_gpus.md"
TITLES = {
    "attention": "Attention",
    "paged_attention": "Paged attention",
    "rotary": "Rotary embedding",
    "csa": "CSA / HCA compressor",
}
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
NO_RESULTS = (
    "No record yet: `python benchmarks/bench_{family}.py` on a GPU writes one, "
    "`python benchmarks/render_results.py` this section."
)
HEADER, RULE = (
    ("case", "metric", "µs", "speed", "of ceiling", "beside it"),
    ("---", "---", "---:", "---:", "---:", "---"),
)
SUMMARY_HEADER = ("", "beside", "cases", "best", "median", "worst", "beside torch eager, median")
SUMMARY_RULE = ("---", "---", "---:", "---:", "---:", "---:", "---:")
TARGET_HEADER, TARGET_RULE = ("case", "metric", "µs", "target"), ("---", "---", "---:", "---")


@dataclass(frozen=True)
class Group:
    """Cases of one kind, and who does the same work: `peers`, or every library that was measured."""

    title: str
    family: str
    metric: str
    peers: tuple[str, ...] = ()
    is_portable: bool = False  # for the instructions that every GPU has

    def ratios(self, reports: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[str]]:
        """Of each case our time over that of the fastest of them, and their names."""
        worst, names = [], {}
        for beside in self._comparisons(reports):
            ratios = {n: x for n, x in beside.items() if n != eager.NAME and (not self.peers or n in self.peers)}
            if ratios:
                worst.append(max(ratios.values()))
                # pages of another size do not make another library
                names |= dict.fromkeys(name.partition(" page ")[0] for name in ratios)
        return worst, list(names)

    def eager_ratios(self, reports: Sequence[Mapping[str, Any]]) -> list[float]:
        """Our time over that of plain torch, of the cases where it was measured."""
        return [beside[eager.NAME] for beside in self._comparisons(reports) if eager.NAME in beside]

    def _comparisons(self, reports: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, float]]:
        """Ratios by name, of each case of the group."""
        for comparison in (comparison for report in reports for comparison in plots.comparisons(report)):
            case, _, metric = comparison.case.rpartition(", ")
            if metric == self.metric and case.endswith(" portable") is self.is_portable:
                yield comparison.ratios


GROUPS = (
    Group("decode", "attention", "decode"),
    Group("prefill, dense and ragged", "attention", "prefill"),
    Group("prefill by `mma.sync`, as compiled for other GPUs", "attention", "prefill", (peers.FLASH_SDPA,), True),
    Group("decode of pages, the others' keys mostly dense", "paged_attention", "decode"),
    Group("prefill of pages", "paged_attention", "prefill"),
    Group("rotary of q and k", "rotary", "rotate", (bench_rotary.PEER,)),
    Group("compressor forward", "csa", "fwd", (bench_csa.PEER,)),
    Group("compressor backward", "csa", "bwd", (bench_csa.PEER,)),
)


def render_summary(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One line for each group of kernels: our time over that of the fastest other, of the best case, the middle one and
    the worst; over that of plain torch the middle one, as there is no contest."""
    lines = []
    for group in GROUPS:
        ratios, names = group.ratios(reports[group.family])
        if ratios:
            extremes = (min(ratios), statistics.median(ratios), max(ratios))
            plain = group.eager_ratios(reports[group.family])
            last = f"{statistics.median(plain):.2f}" if plain else "–"
            counts = (group.title, ", ".join(names), str(len(ratios)))
            lines.append((*counts, *(f"{ratio:.2f}" for ratio in extremes), last))
    return _table(SUMMARY_HEADER, SUMMARY_RULE, *lines)


def render_speeds(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """For one who chooses: of each panel the speed of every library, then what a call and a first use cost."""
    sections = [_speed_section(panel, report) for panel in speeds.TABLES for report in reports[panel.family]]
    sections += [_host_section(reports), _start_section(reports)]
    return "\n\n".join(filter(None, sections)) or NO_RESULTS.format(family="*")


def _speed_section(panel: speeds.Panel, report: Mapping[str, Any]) -> str:
    """Empty where the record holds no such case."""
    harness.check_report(report)
    cases = panel.cases(report)
    if not cases:
        return ""
    names = speeds.names_in(cases)
    digits = 0 if panel.work == "flops" else 2
    lines = [(case.label, *(_speed(case.speeds.get(name), digits) for name in names)) for case in cases]
    ceiling = f"{report['ceilings'][panel.ceiling]:.{digits}f}"
    facts = f"{panel.unit} on one {report['gpu']}, whose measured ceiling is {ceiling}. Run of {report['date'][:10]}."
    rule = ("---", *("---:" for _ in names))
    return f"### {panel.title}\n\n{facts}\n\n{_table((panel.size, *names), rule, *lines)}"


def _speed(speed: float | None, digits: int) -> str:
    return "–" if speed is None else f"{speed:.{digits}f}"


def _host_section(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One line for each kernel: what its entries take, and the calls of others that the same run timed."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for family, title in TITLES.items():
        for row in (row for report in reports[family] for row in report["rows"] if row["metric"] == "host"):
            entry, _, suffix = row["case"].partition(" ")
            others = (f"{name} {us:.1f}" for name, us in row["peers_us"].items() if name != runner.RAW)
            line = lines.setdefault((title, suffix), {"others": ", ".join(others)})
            line[entry] = f"{row['ours_us']:.1f}"
    if not lines:
        return ""
    columns = (*runner.HOST_BARS, "others")
    body = [(f"{title}, {kind}", *(line.get(name, "–") for name in columns)) for (title, kind), line in lines.items()]
    header = ("µs of the CPU for one call", "bound", "`execute`", "wrapper", "function that chooses", "others")
    return f"### What a call costs on the host\n\n{_table(header, ('---', *['---:'] * 4, '---'), *body)}"


def _start_section(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Seconds of a fresh process, and what of the start is torch's own."""
    lines = [
        (TITLES[family], row["case"], _seconds(row["ours_us"]), _seconds(row["peers_us"].get(runner.CUDA_START)))
        for family in TITLES
        for report in reports[family]
        for row in report["rows"]
        if row["metric"] == "start"
    ]
    if not lines:
        return ""
    header = ("", "in a fresh process", "seconds", "torch's CUDA start beside it")
    return f"### What a first use costs\n\n{_table(header, ('---', '---', '---:', '---:'), *lines)}"


def _seconds(us: float | None) -> str:
    return "" if us is None else f"{us * 1e-6:.2g}"


def render(family: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """The markdown between the markers of a family's page; one table for each report, which `harness.check_report`
    accepts."""
    return "\n\n".join(map(render_report, reports)) if reports else NO_RESULTS.format(family=family)


def render_report(report: Mapping[str, Any]) -> str:
    """What was measured on one GPU: a sentence of facts, then a table."""
    harness.check_report(report)
    ceilings, versions = report["ceilings"], report["versions"]
    facts = (
        f"**{report['gpu']}**, driver {report['driver']}, {', '.join(f'{k} {v}' for k, v in versions.items())}, "
        f"{report['date']}. "
        f"Measured ceilings: copy {ceilings['copy_tbps']:.2f} TB/s, read {ceilings['read_tbps']:.2f} TB/s, "
        f"matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, launch {ceilings['raw_launch_us']:.2f} µs."
    )
    return f"{facts}\n\n{_table(HEADER, RULE, *map(_cells, report['rows']))}"


def render_targets(family: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """Of each record, how many targets were met, and every one with its verdict."""
    return "\n\n".join(_targets(family, report) for report in reports) if reports else NO_RESULTS.format(family=family)


def _targets(family: str, report: Mapping[str, Any]) -> str:
    harness.check_report(report)
    rows = [Row(**row, bars=bars_of(family, row)) for row in report["rows"]]
    facts = f"**{report['gpu']}**, {report['date']}: {harness.summarize_bars(rows).removeprefix('bars: ')}."
    lines = [(row.case, row.metric, _us(row.ours_us), _verdicts(row)) for row in rows if row.bars]
    return f"{facts}\n\n{_table(TARGET_HEADER, TARGET_RULE, *lines)}"


def _verdicts(row: Row) -> str:
    return "; ".join(bar.verdict(row).replace("MISSED", "**missed**") for bar in row.bars)


def bars_of(family: str, row: Mapping[str, Any]) -> tuple[Bar, ...]:
    """The targets of a row, which its record does not hold; none for a case that no benchmark has now."""
    case, metric, peers_us = row["case"], row["metric"], row["peers_us"]
    if metric == "host":
        return (Bar("ratio", runner.HOST_BARS[case.split()[0]], runner.RAW),)
    if metric == "start":
        by_end = {"cold": runner.COLD_BAR, "warm": runner.WARM_BAR, "cuteforge": bench_csa.IMPORT_BAR}
        return (by_end[case.split()[-1]],)
    if case.startswith("growth"):
        is_first = runner.GROWTH_REFERENCE not in peers_us
        return () if is_first else (Bar("ratio", runner.GROWTH_BAR, runner.GROWTH_REFERENCE),)
    if " page " in case:
        return _paged_bars(case, metric, peers_us)
    if family == "attention":
        return _attention_bars(case, metric, peers_us)
    return _pointwise_bars().get((family, case, metric), ())


def _attention_bars(case: str, metric: str, peers_us: Mapping[str, float]) -> tuple[Bar, ...]:
    if case.endswith(" portable"):
        return (bench_attention.PORTABLE_BAR,)
    if case.startswith("ragged "):
        return next((ragged.bars for ragged in bench_attention.RAGGED if ragged.name == case), ())
    prefill = (*bench_attention.PREFILL, *bench_attention.LENGTHS)
    shapes = attention_problem.DECODE if metric == "decode" else prefill
    return next((shape.all_bars(peers_us) for shape in shapes if shape.name == case), ())


def _paged_bars(case: str, metric: str, peers_us: Mapping[str, float]) -> tuple[Bar, ...]:
    paged = bench_paged_attention
    name, _, page_size = case.rpartition(" page ")
    page_limit = paged.PAGED_LIMIT if int(page_size) >= 16 else paged.SINGLE_TOKEN_LIMIT
    if metric == "decode" and page_size == "1":
        return (Bar("ratio", page_limit, paged.page_name(16)),)
    shapes = attention_problem.DECODE if metric == "decode" else paged.PREFILL
    libraries_us = {peer: us for peer, us in peers_us.items() if peer != paged.OURS_DENSE}
    shape = next((shape for shape in shapes if shape.name == name), None)
    return (*shape.all_bars(libraries_us), Bar("ratio", page_limit, paged.OURS_DENSE)) if shape else ()


@functools.cache
def _pointwise_bars() -> dict[tuple[str, str, str], tuple[Bar, ...]]:
    """By family, case and metric."""
    bars = {("rotary", shape.name, "rotate"): shape.bars for shape in bench_rotary.SPEED}
    for shape in bench_csa.SPEED:
        bars |= {("csa", shape.name, direction): getattr(shape, direction) for direction in bench_csa.DIRECTIONS}
        bars["csa", f"{shape.name} deterministic", "bwd"] = (bench_csa.DETERMINISM_BAR,)
    for direction in bench_csa.DIRECTIONS:
        short = Bar("ratio", bench_csa.SHORT_BAR, bench_csa.LONG.name)
        bars["csa", bench_csa.SHORT.name, direction] = (short,)
    return bars


def replace_section(page: str, body: str) -> str:
    """`page` with `body` between the markers.

    Raises:
        ValueError: the page does not hold each marker once, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"wanted {BEGIN} and {END} once each, in this order")
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


def rendered_pages(results_dir: pathlib.Path = harness.RESULTS_DIR) -> dict[pathlib.Path, str]:
    """Every page with results as it should be with the records in `results_dir`."""
    reports = {family: _reports(results_dir, family) for family in TITLES}
    bodies = {PAGES_DIR / f"{family}.md": render(family, reports[family]) for family in TITLES}
    sections = (f"### {title}\n\n{render_targets(family, reports[family])}" for family, title in TITLES.items())
    bodies[PERFORMANCE_PAGE] = render_speeds(reports)
    bodies[RECKONED_PAGE] = reckoned.render(TITLES, reports)
    bodies[TARGETS_PAGE] = "\n\n".join(sections)
    bodies[README] = render_summary(reports)
    return {path: replace_section(path.read_text(encoding="utf-8"), body) for path, body in bodies.items()}


def _reports(results_dir: pathlib.Path, family: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results_dir.glob(f"*/{family}.json"))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is not current")
    args = parser.parse_args(argv)
    stale = {path: text for path, text in rendered_pages().items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        print(f"{'not current' if args.check else 'written'}: {path}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    us, peers = row["ours_us"], row["peers_us"]
    share = f"{row['floor_us'] / us:.0%}" if row["floor_us"] else ""
    beside = ", ".join(f"{name} {_us(peer)} ({us / peer:.2f}x)" for name, peer in peers.items())
    return row["case"], row["metric"], _us(us), harness.speed(row["bytes"], row["flops"], us), share, beside


def _table(*lines: Sequence[str]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _us(us: float) -> str:
    """Microseconds with the digits that a repetition would confirm."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


if __name__ == "__main__":
    sys.exit(main())

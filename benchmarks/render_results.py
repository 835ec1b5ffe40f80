"""Writes the benchmark records into the API pages: a table for each GPU, between two markers.

python benchmarks/render_results.py            docs/api/<family>.md for every family with a page
python benchmarks/render_results.py --check    only says whether they are current; exit status 1 if one is not
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import harness

PAGES_DIR = pathlib.Path(__file__).resolve().parents[1] / "docs" / "api"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
NO_RESULTS = "No record yet: `python benchmarks/bench_{family}.py` on a GPU writes one, `python benchmarks/render_results.py` this section."
HEADER = ("case", "metric", "µs", "speed", "of ceiling", "beside it")


def render(family: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """The markdown between the markers of a family's page; one table for each report, which `harness.check_report` accepts."""
    return "\n\n".join(map(render_report, reports)) if reports else NO_RESULTS.format(family=family)


def render_report(report: Mapping[str, Any]) -> str:
    """What was measured on one GPU: a sentence of facts, then a table."""
    harness.check_report(report)
    ceilings, versions = report["ceilings"], report["versions"]
    facts = (
        f"**{report['gpu']}**, driver {report['driver']}, {', '.join(f'{k} {v}' for k, v in versions.items())}, {report['date']}. "
        f"Measured ceilings: copy {ceilings['copy_tbps']:.2f} TB/s, read {ceilings['read_tbps']:.2f} TB/s, "
        f"matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, launch {ceilings['raw_launch_us']:.2f} µs."
    )
    rule = ("---", "---", "---:", "---:", "---:", "---")
    lines = (HEADER, rule, *map(_cells, report["rows"]))
    return facts + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    """Every family's page as it should be with the records in `results_dir`."""
    pages = {}
    for path in sorted(PAGES_DIR.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if BEGIN in text:
            records = sorted(results_dir.glob(f"*/{path.stem}.json"))
            reports = [json.loads(record.read_text(encoding="utf-8")) for record in records]
            pages[path] = replace_section(text, render(path.stem, reports))
    return pages


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


def _us(us: float) -> str:
    """Microseconds with the digits that a repetition would confirm."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


if __name__ == "__main__":
    sys.exit(main())

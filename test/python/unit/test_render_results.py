"""The speed tables in the docs say what the records say."""

from __future__ import annotations

import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import render_results  # noqa: E402

REPORT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "versions": {"torch": "2.11"},
    "date": "2026-01-01T00:00:00+00:00",
    "source_digest": "0" * 64,
    "ceilings": {"copy_tbps": 4.0, "read_tbps": 4.1, "matmul_tflops": 770.0, "raw_launch_us": 5.125},
    "rows": [
        {
            "case": "3x8192 d512", "metric": "fwd", "ours_us": 30.0, "peers_us": {"peer": 40.0},
            "floor_us": 24.0, "bytes": 96_000_000, "flops": None,
        },
        {
            "case": "import cuteforge", "metric": "start", "ours_us": 12345.6, "peers_us": {},
            "floor_us": None, "bytes": None, "flops": None,
        },
    ],
}  # fmt: skip
PAGE = f"# Title\n\n{render_results.BEGIN}\nold\n{render_results.END}\n\nafter\n"


def test_a_row_holds_time_bandwidth_share_and_ratio():
    lines = render_results.render_report(REPORT).splitlines()
    assert "| 3x8192 d512 | fwd | 30.0 | 3.20 TB/s | 80% | peer 40.0 (0.75x) |" in lines
    assert "| import cuteforge | start | 12,346 |  |  |  |" in lines
    assert "NVIDIA H200" in lines[0]
    assert "copy 4.00 TB/s" in lines[0]


def test_only_the_section_changes_and_once_is_enough():
    page = render_results.replace_section(PAGE, "new")
    assert page.startswith("# Title\n\n")
    assert page.endswith("\n\nafter\n")
    assert "old" not in page
    assert render_results.replace_section(page, "new") == page


@pytest.mark.parametrize(
    "page", ["no markers", PAGE.replace(render_results.END, ""), PAGE + PAGE, "\n".join(reversed(PAGE.splitlines()))]
)
def test_a_page_without_one_section_is_refused(page):
    with pytest.raises(ValueError, match="once each"):
        render_results.replace_section(page, "new")


def test_a_damaged_record_is_refused():
    with pytest.raises(ValueError, match="ceilings"):
        render_results.render("csa", [{**REPORT, "ceilings": {}}])


def test_without_a_record_the_page_says_how_to_make_one():
    assert "benchmarks/bench_csa.py" in render_results.render("csa", [])


def test_pages_are_current_with_the_committed_records():
    """After a benchmark: python benchmarks/render_results.py."""
    stale = [path.name for path, text in render_results.rendered_pages().items() if path.read_text() != text]
    assert stale == []

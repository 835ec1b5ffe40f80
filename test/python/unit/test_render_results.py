"""The speed tables in the docs say what the records say."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import reckoned  # noqa: E402
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


def test_the_summary_has_the_best_the_middle_and_the_worst_case_of_each_group():
    """Over the fastest other of each case; what is no other library, and what is for other GPUs, is not mixed in. Plain
    torch has a column of its own, with a dash where no record has it."""
    row = {**REPORT["rows"][0], "metric": "prefill", "ours_us": 30.0}
    cases = {
        "a": {"torch cuDNN": 40.0, "flash-attn-4": 60.0, "torch eager": 300.0},
        "b": {"torch cuDNN": 25.0, "flash-attn-4": 50.0, "torch eager": 20.0},
        "c": {"flash-attn-4": 30.0},
        "c portable": {"torch FA2": 15.0, "torch cuDNN": 10.0},
        "alone": {},
        "beside plain torch only": {"torch eager": 100.0},
    }
    pages = {"d page 16": {"flash-attn-4 page 16": 20.0, "ours dense": 10.0}}
    reports = {
        family: [{**REPORT, "rows": [{**row, "case": case, "peers_us": us} for case, us in of.items()]}]
        for family, of in (("attention", cases), ("paged_attention", pages))
    }
    reports |= {"rotary": [], "csa": []}
    lines = render_results.render_summary(reports).splitlines()[2:]
    assert lines == [
        "| prefill, dense and ragged | torch cuDNN, flash-attn-4 | 3 | 0.75 | 1.00 | 1.20 | 0.30 |",
        "| prefill by `mma.sync`, as compiled for other GPUs | torch FA2 | 1 | 2.00 | 2.00 | 2.00 | – |",
        "| prefill of pages | flash-attn-4 | 1 | 1.50 | 1.50 | 1.50 | – |",
    ]


def reports_of(**families):
    return {family: families.get(family, []) for family in render_results.TITLES}


def test_speeds_have_a_column_for_every_library_that_was_measured():
    """Plain torch too, once a record holds it; a library that one case lacks leaves a dash there, not a gap in the
    columns."""
    small = {**REPORT["rows"][0], "case": "1x8192 d512 r4 c2", "peers_us": {"cudnn-frontend": 60.0}}
    large = {**small, "case": "16x8192 d512 r4 c2", "ours_us": 24.0, "peers_us": {"torch eager": 96.0}}
    other = {**small, "case": "1x8192 d128 r4 c2"}
    lines = render_results.render_speeds(reports_of(csa=[{**REPORT, "rows": [large, other, small]}])).splitlines()
    assert lines[0] == "### CSA compressor, forward, d 512"
    assert lines[2] == "TB/s on one NVIDIA H200, whose measured ceiling is 4.00. Run of 2026-01-01."
    assert lines[4:] == [
        "| segments × tokens | cuteforge | cudnn-frontend | torch eager |",
        "| --- | ---: | ---: | ---: |",
        "| 1×8192 | 3.20 | 1.60 | – |",
        "| 16×8192 | 4.00 | – | 1.00 |",
    ]


def test_host_time_and_start_up_have_tables_of_their_own():
    host = {**REPORT["rows"][1], "metric": "host", "peers_us": {"raw launch": 4.0, "peer": 9.0}}
    rows = [{**host, "case": "bound fwd", "ours_us": 5.0}, {**host, "case": "wrapper fwd", "ours_us": 11.0}]
    start = {**REPORT["rows"][1], "case": "first use, cold", "ours_us": 3.77e6}
    page = render_results.render_speeds(reports_of(csa=[{**REPORT, "rows": [*rows, start]}]))
    assert "| CSA / HCA compressor, fwd | 5.0 | – | 11.0 | – | peer 9.0 |" in page
    assert "| CSA / HCA compressor | first use, cold | 3.8 |  |" in page


def test_every_panel_finds_its_cases_in_the_committed_records():
    """A case that was renamed in a benchmark would silently leave the page and the picture of the README."""
    for panel in render_results.speeds.TABLES:
        records = sorted(BENCHMARKS.glob(f"results/*/{panel.family}.json"))
        assert all(len(panel.cases(json.loads(record.read_text()))) >= 3 for record in records)


def test_a_target_is_shown_met_missed_or_not_measured():
    """A miss stands out; a peer that was not there is not taken for one that was beaten."""
    rows = [
        {**REPORT["rows"][0], "case": "3x8192 d512 r4 c2", "peers_us": {"cudnn-frontend": 40.0}},
        {**REPORT["rows"][1], "case": "bound fwd", "metric": "host", "ours_us": 6.0, "peers_us": {"raw launch": 6.0}},
    ]
    lines = render_results.render_targets("csa", [{**REPORT, "rows": rows}]).splitlines()
    assert lines[0] == "**NVIDIA H200**, 2026-01-01T00:00:00+00:00: 1 met, 1 missed, 0 not measured."
    assert "| 3x8192 d512 r4 c2 | fwd | 30.0 | **missed** 0.75x of cudnn-frontend (bar <= 0.7x) |" in lines
    assert "| bound fwd | host | 6.0 | met 1x of raw launch (bar <= 1.25x) |" in lines
    alone = {**REPORT, "rows": [{**rows[0], "case": "16 tokens halves", "metric": "rotate", "peers_us": {}}]}
    assert "0 met, 0 missed, 1 not measured" in render_results.render_targets("rotary", [alone])


def test_targets_of_pages_are_against_dense_keys_pages_of_16_and_libraries():
    beside = {render_results.bench_paged_attention.OURS_DENSE: 20.0, "torch cuDNN": 30.0}
    row = {"case": "1x512 h32/8 d128 page 16", "metric": "decode", "peers_us": beside}
    best, absolute, dense = render_results.bars_of("paged_attention", row)
    assert (best.to, best.limit) == ("torch cuDNN", 0.7)
    assert (absolute.kind, dense.to) == ("us", render_results.bench_paged_attention.OURS_DENSE)
    (single,) = render_results.bars_of("paged_attention", {**row, "case": "1x512 h32/8 d128 page 1"})
    assert single.to == "page 16"


@pytest.mark.parametrize(
    "record", sorted(BENCHMARKS.glob("results/*/*.json")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_every_committed_row_has_its_target(record):
    """A case that was renamed in a benchmark would silently lose its target, and so a miss. The smallest of a growth
    has none."""
    rows = json.loads(record.read_text())["rows"]
    without = [row["case"] for row in rows if not render_results.bars_of(record.stem, row)]
    smallest = [row["case"] for row in rows if row["case"].startswith("growth") and not row["peers_us"]]
    assert without == smallest


def test_a_reckoned_time_is_the_longer_of_reading_and_multiplying():
    gpu = reckoned.Gpu(2.0, 100.0, "")
    assert gpu.us(reckoned.Work(8_000_000, 0)) == pytest.approx(4.0)
    assert gpu.us(reckoned.Work(8_000_000, 600_000_000)) == pytest.approx(6.0)


def test_reckoned_times_stand_beside_the_measured_one_and_its_share():
    """Of cases of fixed size on the device: not of growth, host and start, and once for a case that has two rows."""
    rows = [
        REPORT["rows"][0],
        {**REPORT["rows"][0], "case": "3x8192 d512 deterministic"},
        {**REPORT["rows"][0], "case": "growth 8192 tokens"},
        REPORT["rows"][1],
    ]
    lines = reckoned.render(render_results.TITLES, reports_of(csa=[{**REPORT, "rows": rows}])).splitlines()
    assert [line for line in lines if "8192" in line or "import" in line] == [
        "| 3x8192 d512 | fwd | 30.0 | 20.0 (67%) | 47.1 | 111 | 12.0 | 53.6 |"
    ]
    assert "| case | metric | NVIDIA H200, measured | H200, reckoned | A100, reckoned |" in "\n".join(lines)


def test_work_of_attention_has_bytes_and_operations():
    """A record holds what bounds a case on its GPU; on another the other one may. Short requests have so few keys that
    a B200 multiplies them sooner than it reads them."""
    row = {"case": "ragged 32x512 causal", "metric": "prefill", "bytes": None, "flops": 68_719_476_736}
    work = reckoned.work_of(row)
    assert work == (335_544_320, row["flops"])
    assert reckoned.GPUS["B200"].us(work) == pytest.approx(work.bytes / 8e6)
    held = {**row, "case": "what no benchmark has now"}
    assert reckoned.work_of(held) == (0, row["flops"])


@pytest.mark.parametrize("family", ["attention", "paged_attention"])
def test_the_work_of_every_committed_case_of_attention_is_known_and_is_the_recorded_one(family):
    for record in BENCHMARKS.glob(f"results/*/{family}.json"):
        for row in filter(reckoned.is_fixed, json.loads(record.read_text())["rows"]):
            work = reckoned.work_of(row)
            assert work.bytes and work.flops, row["case"]
            assert row["bytes"] in (None, work.bytes) and row["flops"] in (None, work.flops), row["case"]


def test_every_page_with_a_section_is_rendered():
    root = BENCHMARKS.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    with_section = {page for page in pages if render_results.BEGIN in page.read_text()}
    assert with_section == set(render_results.rendered_pages())


def test_pages_are_current_with_the_committed_records():
    """After a benchmark: python benchmarks/render_results.py."""
    stale = [path.name for path, text in render_results.rendered_pages().items() if path.read_text() != text]
    assert stale == []

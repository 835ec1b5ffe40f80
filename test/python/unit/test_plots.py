"""The drawings of the benchmark records: which figures they hold, and that they are drawn without a GPU."""

from __future__ import annotations

import copy
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import plots  # noqa: E402
import runner  # noqa: E402

MAX_SVG_BYTES = 60_000  # of a drawing in the docs


def row(case, metric="fwd", us=10.0, peers=(), floor_us=8.0, size_bytes=32_000_000, flops=None) -> dict:
    return {
        "case": case, "metric": metric, "ours_us": us, "peers_us": dict(peers), "floor_us": floor_us,
        "bytes": size_bytes, "flops": flops,
    }  # fmt: skip


REPORT = {
    "gpu": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2.11"}, "date": "2026-01-02T00:00:00+00:00",
    "source_digest": "0" * 64,
    "ceilings": {"copy_tbps": 4.0, "read_tbps": 4.1, "matmul_tflops": 770.0, "raw_launch_us": 5.0},
    "rows": [
        row("3x8192 d512", peers={"library": 20.0, "torch": 5.0, "ours atomic": 9.0, "copy ceiling": 8.0}),
        row("3x8192 d512", "prefill", us=100.0, size_bytes=None, flops=40_000_000_000),
        row("4096x32 d512", peers={"3x8192 d512": 11.0}),
        row("1x1024 page 1", peers={"page 16": 11.0, "library page 1": 40.0}),
        row("growth 8 tokens", us=10.0, floor_us=2.0),
        row("growth 16 tokens", us=15.0, floor_us=4.0, peers={runner.GROWTH_REFERENCE: 20.0}),
        row("growth 16 tokens in 2 requests", us=12.0, floor_us=3.0),
        row("wrapper", "host", peers={"library": 4.0}, floor_us=None, size_bytes=None),
    ],
}  # fmt: skip


@pytest.fixture
def results(tmp_path):
    """A folder with one record."""
    folder = tmp_path / "results"
    (folder / "nvidia-h200").mkdir(parents=True)
    (folder / "nvidia-h200" / "csa.json").write_text(json.dumps(REPORT))
    return folder


def test_bars_are_other_implementations_of_the_same_work():
    """Neither ceilings, other paths and sizes of ours, growth, nor host time."""
    assert plots.comparisons(REPORT) == [
        ("3x8192 d512, fwd", {"library": 0.5, "torch": 2.0}),
        ("1x1024 page 1, fwd", {"library page 1": 0.25}),
    ]


def test_a_point_is_work_and_speed():
    flops = plots.roofline_points({"csa": REPORT}, "flops")
    assert flops == [("csa prefill", 40_000_000_000, pytest.approx(400.0))]
    assert plots.roofline_points({"csa": REPORT}, "bytes")[0] == ("csa fwd", 32_000_000, pytest.approx(3.2))


def test_growth_series_differ_in_more_than_numbers():
    assert plots.growth_series(REPORT) == {
        "fwd, n tokens": [(2.0, 10.0), (4.0, 15.0)],
        "fwd, n tokens in n requests": [(3.0, 12.0)],
    }


def test_a_damaged_record_is_named(results):
    damaged = copy.deepcopy(REPORT)
    damaged["rows"][0]["ours_us"] = -1
    (results / "nvidia-h200" / "rotary.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=r"rotary.json: rows\[0\] ours_us"):
        plots.load_records(results)


def test_no_records_is_status_1(tmp_path, capsys):
    assert plots.main([str(tmp_path / "drawn"), "--results", str(tmp_path)]) == 1
    assert "no records in" in capsys.readouterr().err


def test_every_drawing_is_written_in_both_formats(results, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    assert plots.main([str(tmp_path / "drawn"), "--results", str(results)]) == 0
    drawn = tmp_path / "drawn" / "nvidia-h200"
    names = {"roofline", "growth", "peers_csa"}
    assert {path.name for path in drawn.iterdir()} == {
        f"{name}.{suffix}" for name in names for suffix in ("png", "svg")
    }
    bars = (drawn / "peers_csa.svg").read_text()
    assert all(text in bars for text in ("library", "0.50", "2.00", "3x8192 d512, fwd", "NVIDIA H200", "2026-01-02"))


def test_speeds_are_drawn_for_every_library_of_a_case(tmp_path):
    """The picture of the README: one bar a library, plain torch included, under the measured ceiling."""
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    cases = {"peers": {"cudnn-frontend": 20.0, "torch eager": 80.0}}
    rows = [row(f"{n}x8192 d512 r4 c2", direction, **cases) for n in (1, 16) for direction in ("fwd", "bwd")]
    ((name, figure),) = [
        drawn for drawn in plots.draw({"csa": {**REPORT, "rows": rows}}) if drawn[0].startswith("speed")
    ]
    assert name == "speed_pointwise"
    forward, backward = figure.axes
    assert [[label.get_text() for label in axes.get_xticklabels()] for axes in (forward, backward)] == [
        ["1×8192", "16×8192"]
    ] * 2
    assert sorted(bar.get_height() for bar in forward.patches) == pytest.approx([0.4, 0.4, 1.6, 1.6, 3.2, 3.2])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["cuteforge", "cudnn-frontend", "torch eager"]


def test_the_same_record_gives_the_same_bytes(results, tmp_path):
    """Else every rendering would change the drawings in the docs."""
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    for folder in ("a", "b"):
        plots.main([str(tmp_path / folder), "--results", str(results), "--format", "svg"])
    for path in (tmp_path / "a").rglob("*.svg"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_records_of_this_checkout_can_be_drawn():
    for families in plots.load_records(ROOT / "benchmarks" / "results").values():
        assert plots.roofline_points(families, "bytes")
        assert any(map(plots.comparisons, families.values()))
        assert any(map(plots.growth_series, families.values()))


def test_drawings_in_the_docs_are_small():
    sizes = {path: path.stat().st_size for path in (ROOT / "docs" / "assets").rglob("*.svg")}
    assert sizes
    assert [path for path, size in sizes.items() if size > MAX_SVG_BYTES] == []

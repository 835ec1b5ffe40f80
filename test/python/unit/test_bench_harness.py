"""The benchmarks' pure parts: a wrong statistic, bar or schema would make every published figure wrong."""

from __future__ import annotations

import json
import math
import pathlib
import sys
import types

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_csa  # noqa: E402
import bench_rotary  # noqa: E402
import ceilings  # noqa: E402
import flashinfer_rope  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
import runner  # noqa: E402
from harness import Bar, Row  # noqa: E402

ROW = Row("3x8192", "fwd", 30.0, {"peer": 40.0}, floor_us=25.0, bytes=120_000_000)
CEILINGS = {"copy_tbps": 4.28, "read_tbps": 4.2, "matmul_tflops": 770.0, "raw_launch_us": 5.1}
FACTS = {"gpu": "NVIDIA H200", "driver": "580", "versions": {}, "date": "2026-01-01", "source_digest": "0" * 64}


def test_round_robin_interleaves_and_rotates_the_first_place():
    turns = list(harness.round_robin(["a", "b", "c"], 4))
    assert turns == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]


class FakeDevice:
    """A clock that candidates advance, with events that read it, in place of a GPU."""

    def __init__(self, monkeypatch):
        import torch

        self.now_us, self.log = 0.0, []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        scrub = types.SimpleNamespace(zero_=lambda: self.run("scrub", 1000.0))
        monkeypatch.setattr(harness, "_l2_scrubber", lambda index: scrub)

    def run(self, what, us):
        self.log.append(what)
        self.now_us += us


class FakeEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.device.log.append("record")
        self.at_us = self.device.now_us

    def elapsed_time(self, end):
        return (end.at_us - self.at_us) / 1e3


def test_measure_group_is_the_median_and_leaves_the_flush_outside_the_events(monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 0.0)
    device = FakeDevice(monkeypatch)
    costs = iter((7.0, 9.0, 500.0, 10.0, 8.0, 9.0))  # the warm-up call, then five timed ones with one outlier
    us = harness.measure_group(
        {"steady": lambda: device.run("steady", 3.0), "noisy": lambda: device.run("noisy", next(costs))}, repeats=5
    )
    assert list(us) == ["steady", "noisy"]
    assert us == pytest.approx({"steady": 3.0, "noisy": 9.0})
    timed = device.log[2:]
    assert timed[:4] == ["scrub", "record", "steady", "record"]
    assert timed.count("scrub") == timed.count("record") / 2 == 10


def test_measure_group_without_flush_does_not_scrub(monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 0.0)
    device = FakeDevice(monkeypatch)
    harness.measure_group({"a": lambda: device.run("a", 1.0)}, repeats=2, flush=False)
    assert "scrub" not in device.log


def test_scrubs_give_a_slow_host_time_before_the_events(monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 0.0)
    device = FakeDevice(monkeypatch)
    harness.measure_group({"a": lambda: device.run("a", 1.0)}, repeats=2, scrubs=3)
    assert device.log[1:] == ["scrub", "scrub", "scrub", "record", "a", "record"] * 2


def test_measure_host_divides_by_the_calls_and_drains_outside_the_clock(monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP_SECONDS", 0.0)
    now_ns = [0]
    monkeypatch.setattr(harness.time, "perf_counter_ns", lambda: now_ns[0])

    def advance(ns):
        now_ns[0] += ns

    us = harness.measure_host(
        {"a": lambda: advance(2_000), "b": lambda: advance(5_000)},
        batches=3,
        calls=4,
        synchronize=lambda: advance(10_000_000),
    )
    assert us == {"a": 2.0, "b": 5.0}


def test_nothing_to_measure_is_empty():
    assert harness.measure_group({}) == {}
    assert harness.measure_host({}, synchronize=lambda: None) == {}


@pytest.mark.parametrize(
    ("bar", "value", "is_met", "verdict"),
    [
        (Bar("ratio", 0.75, "peer"), 0.75, True, "met 0.75x of peer (bar <= 0.75x)"),
        (Bar("ratio", 0.7, "peer"), 0.75, False, "MISSED 0.75x of peer (bar <= 0.7x)"),
        (Bar("ratio", 0.7, "absent"), None, None, "not measured of absent (bar <= 0.7x)"),
        (Bar("tbps", 3.8), 4.0, True, "met 4 TB/s (bar >= 3.8 TB/s)"),
        (Bar("tbps", 4.1), 4.0, False, "MISSED 4 TB/s (bar >= 4.1 TB/s)"),
        (Bar("us", 30.0), 30.0, True, "met 30 us (bar <= 30 us)"),
        (Bar("us", 29.0), 30.0, False, "MISSED 30 us (bar <= 29 us)"),
    ],
)
def test_bar_says_met_missed_or_not_measured(bar, value, is_met, verdict):
    assert bar.value(ROW) == (None if value is None else pytest.approx(value))
    assert bar.is_met(ROW) is is_met
    assert bar.verdict(ROW) == verdict


def test_malformed_bars_and_rows_are_refused():
    with pytest.raises(ValueError, match="kind"):
        Bar("percent", 1.0)
    with pytest.raises(ValueError, match="to"):
        Bar("ratio", 1.0)
    with pytest.raises(ValueError, match="to"):
        Bar("us", 1.0, "peer")
    with pytest.raises(ValueError, match="metric"):
        Row("case", "speed", 1.0)


def test_record_has_exactly_the_schema_and_survives_json(tmp_path):
    row = Row("a", "bwd", 2.0, {"peer": 3.0}, bars=(Bar("us", 1.0),))
    path = harness.write_report(harness.build_report(FACTS, CEILINGS, [row]), "csa", tmp_path)
    assert path == tmp_path / "nvidia-h200" / "csa.json"
    record = json.loads(path.read_text())
    assert set(record) == {"gpu", "driver", "versions", "date", "source_digest", "ceilings", "rows"}
    assert set(record["ceilings"]) == {"copy_tbps", "read_tbps", "matmul_tflops", "raw_launch_us"}
    assert record["rows"] == [
        {
            "case": "a",
            "metric": "bwd",
            "ours_us": 2.0,
            "peers_us": {"peer": 3.0},
            "floor_us": None,
            "bytes": None,
            "flops": None,
        }
    ]


@pytest.mark.parametrize("us", [0.0, -1.0, math.nan, math.inf, None])
def test_a_time_that_is_no_time_is_not_written(us, tmp_path):
    for row in (Row("a", "fwd", us), Row("a", "fwd", 1.0, {"peer": us})):
        with pytest.raises(ValueError, match=r"rows\[0\]"):
            harness.write_report(harness.build_report(FACTS, CEILINGS, [row]), "csa", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_record_with_a_missing_ceiling_is_refused():
    with pytest.raises(ValueError, match="ceilings"):
        harness.check_report(harness.build_report(FACTS, {"copy_tbps": 4.0}, []))


def test_table_lists_every_bar_on_a_line_of_its_own():
    row = Row("16x8192", "fwd", 150.0, {"peer": 220.0}, 136.0, 571 * 10**6, bars=(Bar("us", 160.0), Bar("tbps", 3.9)))
    head, first, second = harness.format_table([row]).splitlines()
    assert head.split()[:2] == ["case", "metric"]
    assert "peer 220" in first
    assert "3.81" in first
    assert first.endswith("met 150 us (bar <= 160 us)")
    assert second.strip() == "MISSED 3.81 TB/s (bar >= 3.9 TB/s)"
    assert second.index("MISSED") == first.index("met 150")
    assert harness.summarize_bars([row]) == "bars: 1 met, 1 missed, 0 not measured"


def test_speed_has_the_unit_of_what_bounds_the_case():
    assert harness.speed(None, 77 * 10**9, 100.0) == "770 TFLOP/s"
    assert harness.speed(42 * 10**7, None, 100.0) == "4.20 TB/s"
    assert harness.speed(None, None, 100.0) == ""
    assert "770 TFLOP/s" in harness.format_table([Row("a", "prefill", 100.0, flops=77 * 10**9)])


def test_red_gate_stops_the_run_and_names_the_reason():
    harness.require_green(lambda: None)

    def red():
        raise AssertionError("out is off by 3")

    with pytest.raises(harness.GateError, match="out is off by 3"):
        harness.require_green(red)


def test_red_gate_prints_no_speed_and_writes_no_record(monkeypatch, capsys, tmp_path):
    def red_section(run):
        yield ROW
        harness.require_green(lambda: 1 / 0)

    monkeypatch.setattr(harness, "environment", lambda: FACTS)
    monkeypatch.setattr(harness, "measure_ceilings", lambda repeats: CEILINGS)
    monkeypatch.setattr(bench_csa, "SECTIONS", (red_section,))
    with pytest.raises(harness.GateError):
        bench_csa.main(["--no-peer", "--out", str(tmp_path)])
    assert "30" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--quick"], ["--cases", "fwd"], ["--no-peer"]])
def test_partial_run_does_not_replace_the_full_record(flags, monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS_DIR", tmp_path / "full")
    parser = harness.common_parser("")
    harness.publish("csa", parser.parse_args(flags), CEILINGS, [ROW], FACTS)
    assert not list(tmp_path.iterdir())
    harness.publish("csa", parser.parse_args([*flags, "--out", str(tmp_path / "mine")]), CEILINGS, [ROW], FACTS)
    assert (tmp_path / "mine" / "nvidia-h200" / "csa.json").exists()
    harness.publish("csa", parser.parse_args([]), CEILINGS, [ROW], FACTS)
    assert (tmp_path / "full" / "nvidia-h200" / "csa.json").exists()


def test_csa_bytes_are_those_of_the_formula():
    shape = bench_csa.Shape(3, 8192, 512, 4, 2)
    tokens, rows, width = 24576, 6144, 1024
    assert shape.bytes("fwd") == 2 * tokens * width * 2 + rows * 512 * 2
    assert shape.bytes("bwd") == 4 * tokens * width * 2 + rows * 512 * 2


def test_every_csa_bar_refers_to_something_measured():
    for shape in bench_csa.SPEED:
        bars = shape.fwd + shape.bwd
        assert shape.fwd
        assert shape.bwd
        assert all(bar.to in ("", bench_csa.PEER) for bar in bars)
    assert bench_csa.SHORT.num_tokens == bench_csa.LONG.num_tokens


def test_rotary_bytes_and_bars_are_those_of_the_contract():
    """q of 32 heads and k of 8, D = 128, read and written; 0.95 of the copy ceiling from 8192 tokens on."""
    shape = bench_rotary.Shape(8192)
    assert shape.bytes == 8192 * 40 * 128 * 2 * 2
    limits = {bar.to: bar.limit for bar in shape.bars}
    assert limits == {"flashinfer": 1.0, bench_rotary.COPY_CEILING: pytest.approx(1 / 0.95)}
    assert [bar.to for bar in bench_rotary.Shape(1024).bars] == ["flashinfer"]
    assert {16, 1024, 8192, 32768} <= {s.tokens for s in bench_rotary.SPEED}
    assert bench_rotary.GROWTH[0].tokens == 8192
    assert bench_rotary.GROWTH[-1].tokens == 1 << 20


def test_growth_is_judged_against_the_best_smaller_size():
    tokens = {"a": 10, "b": 20, "c": 40, "d": 80, "e": 160}
    per_token = dict(zip(tokens, (9.0, 4.0, 5.0, 4.0, 3.0), strict=True))
    us, run = {case: per_token[case] * tokens[case] for case in tokens}, runner.Run(None, CEILINGS, 20, False)
    rows = list(runner.growth_rows(run, "fwd", us, tokens, dict.fromkeys(tokens, 1000)))
    assert [row.case for row in rows] == [f"growth {n} tokens" for n in tokens.values()]
    assert rows[0].bars == ()
    ratios = [row.bars[0].value(row) for row in rows[1:]]
    assert ratios == pytest.approx([4 / 9, 5 / 4, 1.0, 3 / 4])
    assert [row.bars[0].is_met(row) for row in rows[1:]] == [True, False, True, True]


def test_a_row_is_held_against_the_ceiling_that_bounds_it():
    run = runner.Run(None, CEILINGS, 20, False)
    copied, read = (run.row("a", "decode", 9.0, 42, {}, (), **named) for named in ({}, {"ceiling": "read_tbps"}))
    multiplied = run.row("a", "prefill", 9.0, 77, {}, (), "matmul_tflops")
    assert [row.floor_us for row in (copied, read, multiplied)] == pytest.approx([42 / 4.28e6, 1e-5, 1e-7])
    assert [(row.bytes, row.flops) for row in (copied, read, multiplied)] == [(42, None), (42, None), (None, 77)]


def test_growth_rows_have_the_name_that_is_asked_for():
    run, cases = runner.Run(None, CEILINGS, 20, False), {"few": 7.0, "many": 8.0}
    tokens = dict.fromkeys(cases, 10)
    rows = list(
        runner.growth_rows(run, "prefill", cases, tokens, tokens, ceiling="matmul_tflops", label="{case} of {tokens}")
    )
    assert [row.case for row in rows] == ["growth few of 10", "growth many of 10"]
    assert [row.flops for row in rows] == [10, 10]


def test_best_peer_is_the_fastest_that_was_measured():
    assert runner.best_peer_bar(0.7, {"a": 3.0, "b": 2.0}) == Bar("ratio", 0.7, "b")
    bar = runner.best_peer_bar(0.7, {})
    assert bar.is_met(Row("a", "decode", 1.0)) is None


def test_first_use_rows_are_one_cold_and_a_median_of_warm_processes(monkeypatch, capsys):
    first_us, folders = iter((3.1e6, 0.2e6, 0.4e6, 0.25e6)), set()

    def run_fresh(code, env):
        folders.add(env["CUTEFORGE_CACHE_DIR"])
        return {"first_us": next(first_us), "cuda_us": 1e6, "checksum": 2.0, "imported_cutlass": False}

    monkeypatch.setattr(harness, "run_fresh", run_fresh)
    cold, warm = runner.first_use_rows(runner.Run(None, CEILINGS, 20, False), "code", "first decode")
    assert (cold.case, cold.ours_us, cold.bars[0].is_met(cold)) == ("first decode, cold", 3.1e6, False)
    assert (warm.case, warm.ours_us, warm.bars[0].is_met(warm)) == ("first decode, warm", 0.25e6, True)
    assert len(folders) == 1


def test_host_rows_stand_beside_the_raw_launch(monkeypatch):
    monkeypatch.setattr(ceilings, "raw_launch", lambda: None)
    us = {runner.RAW: 5.0, "bound": 5.5, "execute": 8.0, "wrapper": 20.0, "peer": 9.0}
    monkeypatch.setattr(harness, "measure_host", lambda calls: {name: us[name] for name in calls})
    rows = list(runner.host_rows(dict.fromkeys(("bound", "execute", "wrapper")), "fwd", {"peer": None}))
    assert [(row.case, row.ours_us, row.bars[0].is_met(row)) for row in rows] == [
        ("bound fwd", 5.5, True),
        ("execute fwd", 8.0, True),
        ("wrapper fwd", 20.0, False),
    ]
    assert all(row.peers_us == {runner.RAW: 5.0, "peer": 9.0} for row in rows)


def test_warm_process_with_another_result_is_red():
    cold = {"checksum": 2.0}
    runner.check_same_results(cold, [{"checksum": 2.0}])
    with pytest.raises(AssertionError, match="disagree"):
        runner.check_same_results(cold, [{"checksum": 2.5}])
    with pytest.raises(AssertionError, match="disagree"):
        runner.check_same_results({"checksum": math.inf}, [])


def test_absent_peer_is_a_reason_and_not_an_error(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.find_cudnn_compressor() == (None, "not installed")


def test_broken_peer_is_a_reason_and_leaves_no_stub_modules(monkeypatch, tmp_path):
    folder = tmp_path / "cudnn" / "csa" / "compressor"
    folder.mkdir(parents=True)
    (tmp_path / "cudnn" / "__init__.py").write_text("raise OSError('no backend library')")
    (folder / "compressor_sm100.py").write_text("raise ImportError('no such DSL')")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = types.ModuleType("cudnn.earlier")
    monkeypatch.setitem(sys.modules, "cudnn.earlier", before)
    peer, reason = peers.find_cudnn_compressor()
    assert peer is None
    assert "no such DSL" in reason
    assert {name for name in sys.modules if name.split(".")[0] == "cudnn"} == {"cudnn.earlier"}
    assert sys.modules["cudnn.earlier"] is before


def test_rotary_peer_turns_the_given_buffers(monkeypatch):
    import torch

    assert peers.find_flashinfer_rope()[0] is None
    calls = []
    module = types.SimpleNamespace(apply_rope_with_cos_sin_cache_inplace=lambda *a, **named: calls.append((a, named)))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: module)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: "0.7")
    peer, version = peers.find_flashinfer_rope()
    assert version == "0.7"
    q, k, cos, sin = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.ones(9, 4), torch.zeros(9, 4)
    positions = torch.arange(3)
    peer.rotate(q, k, cos, sin, positions, interleaved=True)()
    ((given_positions, given_q, given_k, head_dim, cache), named) = calls[0]
    assert given_positions is positions
    assert (given_q.data_ptr(), given_q.shape, given_k.shape) == (q.data_ptr(), (3, 32), (3, 16))
    assert (head_dim, named) == (8, {"is_neox": False})
    assert torch.equal(cache, torch.cat((cos, sin), 1))


@pytest.mark.parametrize("arguments", [[], ["--no-peer"]])
def test_a_record_names_the_peer_that_was_measured(arguments, monkeypatch):
    """A peer need not be a distribution, whose version would be among the others."""
    published = []
    monkeypatch.setattr(harness, "environment", lambda: {**FACTS, "versions": {"torch": "2.11"}})
    monkeypatch.setattr(harness, "measure_ceilings", lambda repeats: CEILINGS)
    monkeypatch.setattr(harness, "publish", lambda *args: published.append(args[-1]))
    runner.run_benchmark("csa", "", "someone", lambda: (object(), "1.2"), (), (), arguments)
    (facts,) = published
    assert facts["versions"] == {"torch": "2.11"} | ({} if arguments else {"peer someone": "1.2"})


HEADER = """
template <int A>
int vec_apply_llama_rope_cos_sin(A) {
}

/* of the next */
template <int B>
int vec_apply_llama_rope_interleave(B) {
}
template <int C>
int vec_apply_llama_rope_cos_sin_interleave_reuse_half(C) {
}

template <int D>
void scale_store_partial_chunk(D) {
}
template <int E>
void BatchQKApplyRotaryPosIdsCosSinCacheHeadParallelismKernel(E) {
}

template <int F>
void BatchQKApplyRotaryPosIdsCosSinCacheKernel(F) {
}

template <int G>
void RopeQuantizeKernel(G) {
}
"""


def test_rotary_kernels_are_cut_out_of_the_header():
    source = flashinfer_rope.source_of(HEADER, "#include <cuda.h>\n#include <cuda_bf16.h>")
    assert [x for x in "ABCDEFG" if f"template <int {x}>" in source] == ["A", "C", "E", "F"]
    assert "of the next" not in source and "<cuda.h>" not in source and "<cuda_bf16.h>" in source


class FakeDriver:
    """16 CTAs an SM of the kernel of all heads; notes what is launched."""

    def __init__(self):
        self.launches = []

    def cuModuleLoadData(self, code):
        return 0, code

    def cuModuleGetFunction(self, module, name):
        return 0, name.decode()

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, smem):
        return 0, 16

    def cuLaunchKernel(self, *args):
        self.launches.append(args)
        return (0,)


@pytest.mark.parametrize(("tokens", "kernel", "grid"), [(3, "by head", (1, 6, 1)), (300, "all heads", (38, 1, 1))])
def test_built_rotary_kernels_are_launched_as_flashinfer_does(tokens, kernel, grid, tmp_path, monkeypatch):
    """By head while a CTA of tokens for all heads would leave SMs idle: here one SM, and 16 CTAs of 8 tokens."""
    import torch

    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=1)
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(driver=driver))
    names = {f"{kind}, {pairs}": f"{kind}, {pairs}" for kind in flashinfer_rope.KERNELS for pairs in ("true", "false")}
    (tmp_path / flashinfer_rope.FACTS).write_text(json.dumps({"version": "abc", "names": names}))
    (tmp_path / flashinfer_rope.CUBIN).write_bytes(b"code")
    monkeypatch.setenv(flashinfer_rope.ENVIRONMENT, str(tmp_path))
    peer, version = peers.find_flashinfer_rope()
    assert version == "abc" and not peer.has_host_time
    q, k, cos = torch.zeros(tokens, 4, 128), torch.zeros(tokens, 2, 128), torch.ones(9, 64)
    peer.rotate(q, k, cos, cos, torch.arange(tokens), interleaved=True)()
    ((function, *dims, smem, stream, (values, types_), _),) = driver.launches
    assert (function, tuple(dims), smem, stream) == (f"{kernel}, true", (*grid, 16, 8, 1), 0, 5)
    assert values[:4] == (q.data_ptr(), k.data_ptr()) * 2 and values[6:10] == (tokens, 4, 2, 128)
    assert values[10:] == (512, 128, 256, 128) * 2 and len(types_) == 18


def test_a_rotary_peer_that_does_not_load_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(flashinfer_rope.ENVIRONMENT, str(tmp_path / "missing"))
    peer, reason = peers.find_flashinfer_rope()
    assert peer is None and reason.startswith("installed, but not usable")


def test_peer_kernels_are_chosen_by_ratio_and_called_on_the_given_buffers():
    calls = []
    general = types.SimpleNamespace(run_fwd=lambda *a: calls.append(("fwd", a)), run_bwd=lambda *a: calls.append(a))
    wide = types.SimpleNamespace(
        run_fwd_r128=lambda *a: calls.append(("fwd128", a)), run_bwd_r128=lambda *a: calls.append(("bwd128", a))
    )
    peer = peers.CudnnCompressor(general, wide)
    out = types.SimpleNamespace(shape=(6, 512))
    peer.forward(1, 2, 3, 4, 5, out, ratio=4, coff=2)()
    peer.backward(1, 2, 3, 4, 5, out, 7, 8, 9, ratio=128, coff=1)()
    assert calls == [
        ("fwd", (1, 2, 3, 4, 5, out, 6, 4, 512, 2)),
        ("bwd128", (1, 2, 3, 4, 5, out, 7, 8, 9, 6, 128, 512, 1)),
    ]


def test_ceiling_kernels_compile_without_a_gpu():
    assert ceilings.compile_empty("--gpu-arch=sm_90a")
    assert ceilings.compile_read("--gpu-arch=sm_90a")


def test_benchmarks_import_without_torch_or_cutlass():
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import json, bench_csa, bench_rotary;"
        "import bench_attention, bench_paged_attention;"
        "print(json.dumps(sorted({'torch', 'cutlass', 'tvm_ffi'} & set(sys.modules))))"
    )
    assert harness.run_fresh(code) == []


def test_a_failing_fresh_interpreter_shows_its_error_output():
    with pytest.raises(RuntimeError, match="no such thing"):
        harness.run_fresh("raise ValueError('no such thing')")

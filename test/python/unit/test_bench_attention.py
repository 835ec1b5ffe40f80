"""The attention benchmarks' pure parts and their gate: a kernel that is wrong anywhere must not get a figure."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest
import torch

import cuteforge
from cuteforge.families.attention import reference

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import attention_problem  # noqa: E402
import bench_attention  # noqa: E402
import bench_paged_attention  # noqa: E402
import ceilings  # noqa: E402
import eager  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
import runner  # noqa: E402
from attention_problem import Dense, Heads, Packed, Shape  # noqa: E402

CEILINGS = {"copy_tbps": 4.28, "read_tbps": 4.2, "matmul_tflops": 770.0, "raw_launch_us": 5.1}
SMALL = Heads(8, 2, 16)
DECODE = Shape(3, 1, 48, SMALL)
PREFILL = Shape(2, 80, 96, SMALL, causal=True)


def attend(q, k, v, causal):
    return reference.attend(q, k, v, causal=causal, compute_dtype=torch.float64)[0]


class StubOp:
    """The documented life cycle of an op, with the reference in place of a kernel."""

    def __init__(self, *operands, causal=False, **tensors):
        self.causal = causal

    def compile(self, arch=None):
        return self

    def workspace_bytes(self):
        return 32

    def bind(self, *operands, **keywords):
        return lambda: self.execute(*operands, **keywords)

    def execute(self, *operands, workspace=None, **tensors):
        assert workspace.nbytes == 32
        operands[-1].copy_(self.compute(*operands[:-1], **tensors))

    def compute(self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None):
        if cu_seqlens_q is None:
            return attend(q, k, v, self.causal)
        assert self.causal
        return packed_attend(q, cu_seqlens_q, *(reference.unpack(x, cu_seqlens_k) for x in (k, v)))


class StubPagedOp(StubOp):
    def compute(self, q, k_cache, v_cache, page_table, cu_seqlens_q=None, *, seqlens_k):
        k, v = (reference.gather_pages(cache, page_table, seqlens_k) for cache in (k_cache, v_cache))
        if cu_seqlens_q is None:
            return reference.attend(q, k, v, lens_k=seqlens_k)[0]
        assert self.causal
        return packed_attend(q, cu_seqlens_q, (k, seqlens_k), (v, seqlens_k))


def packed_attend(q, cu_seqlens_q, keys, values):
    padded, lens_q = reference.unpack(q, cu_seqlens_q)
    out, _ = reference.attend(padded, keys[0], values[0], lens_q=lens_q, lens_k=keys[1], causal=True)
    return reference.pack(out, cu_seqlens_q)


@pytest.fixture(autouse=True)
def reference_as_kernel(monkeypatch):
    monkeypatch.setattr(attention_problem, "DEVICE", "cpu")
    for name in ("GQADecode", "GQAPrefill"):
        monkeypatch.setattr(cuteforge, name, StubOp, raising=False)
        monkeypatch.setattr(cuteforge, f"Paged{name}", StubPagedOp, raising=False)
    for name in ("gqa_decode", "gqa_prefill", "paged_gqa_decode", "paged_gqa_prefill"):
        monkeypatch.setattr(cuteforge, f"{name}_wrapper", lambda *_, **__: None, raising=False)


@pytest.fixture
def timed(monkeypatch):
    """Every candidate of a group takes 10 us, ours included, and plain torch 90; the groups that were measured."""
    groups = []

    def measure(run, calls):
        groups.append(list(calls))
        return dict.fromkeys(calls, 10.0)

    for module in (bench_attention, bench_paged_attention):
        monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(runner, "eager_us", lambda case, call, repeats: {eager.NAME: 90.0})
    monkeypatch.setattr(ceilings, "raw_launch", lambda: None)
    monkeypatch.setattr(harness, "measure_host", lambda calls: dict.fromkeys(calls, 5.0))
    return groups


def problems():
    decode, prefill = Dense(DECODE), Dense(PREFILL)
    return {
        "dense decode": decode,
        "dense prefill": prefill,
        "packed prefill": Packed("packed", (40, 3, 7, 600), SMALL),
        "paged decode": bench_paged_attention.paged_copy(decode, 16),
        "token pool decode": bench_paged_attention.paged_copy(decode, 1),
        "paged prefill": bench_paged_attention.paged_copy(prefill, 16),
    }


PROBLEMS = ("dense decode", "dense prefill", "packed prefill", "paged decode", "token pool decode", "paged prefill")


@pytest.mark.parametrize("name", PROBLEMS)
def test_gate_passes_right_results(name):
    problem = problems()[name]
    attention_problem.gated(problem)()
    problem.execute()()


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("value", [7.0, torch.nan])
def test_gate_stops_at_one_wrong_row(name, row, value):
    problem = problems()[name]
    call = problem.bound()

    def wrong():
        call()
        problem.out[row] = value

    with pytest.raises(AssertionError, match=problem.name):
        problem.check_ours(wrong, "ours")


def test_gate_stops_at_a_row_that_was_not_written():
    problem = Dense(DECODE)
    with pytest.raises(AssertionError, match="not every element was written"):
        problem.check_ours(lambda: None, "ours")


def test_gate_sees_the_other_causal_corner():
    problem = Dense(PREFILL)
    offset = PREFILL.kv_len - PREFILL.q_len

    def top_left():
        problem.out.copy_(attend(problem.q, problem.k[:, :-offset], problem.v[:, :-offset], True))

    with pytest.raises(AssertionError, match="off by"):
        problem.check_ours(top_left, "ours")


def test_long_requests_are_compared_at_both_ends_and_inside():
    assert list(attention_problem.checked_rows(512)) == [slice(0, 512)]
    first, inside, last = attention_problem.checked_rows(4096)
    assert (first.start, inside.start, last.stop) == (0, 2049, 4096)


def test_bytes_and_flops_are_those_of_the_formula():
    """K, V, q and out once for decode; two products for prefill, causal at half of the square."""
    assert Shape(64, 1, 4096).bytes == 2 * (2 * 64 * 4096 * 8 * 128 + 2 * 64 * 32 * 128)
    assert Shape(4, 4096, 4096).flops == 4 * 4 * 32 * 128 * 4096**2
    assert Shape(4, 4096, 4096, causal=True).flops == 4 * 4 * 32 * 128 * 4096**2 // 2
    assert Shape(8, 512, 4096, causal=True).flops == 8 * 4 * 32 * 128 * (512 * 4096 - 512**2 // 2)


def test_shapes_and_bars_are_those_of_the_contract():
    limits = {(s.batch, s.kv_len): (s.peer_limit, *(bar.limit for bar in s.bars)) for s in bench_attention.DECODE}
    assert limits == {
        (1, 512): (0.7, 7.0), (1, 8192): (0.7, 15.0), (16, 4096): (0.93, 3.9), (64, 4096): (1.0, 4.15),
        (16, 8192): (0.93, 4.0), (8, 32768): (1.0,), (128, 1024): (0.93,),
    }  # fmt: skip
    assert sum(bench_attention.MIXED) == 31640
    assert (len(bench_attention.MIXED), min(bench_attention.MIXED), max(bench_attention.MIXED)) == (16, 7, 8192)
    assert [case.bars[0].limit for case in bench_attention.RAGGED] == pytest.approx([1.0, 1 / 1.3, 1 / 1.05])
    assert (bench_attention.GROWTH[0].kv_len, bench_attention.GROWTH[-1].kv_len) == (4096, 524288)
    assert bench_paged_attention.GROWTH_BATCHES[0] == 1
    assert bench_paged_attention.GROWTH_BATCHES[-1] == 1024


@pytest.mark.parametrize("batch", [1, 4, 1024])
def test_ragged_lengths_differ_and_keep_the_total(batch):
    lengths, mean = attention_problem.ragged_lengths(batch, 32768), 32768 / batch
    assert sum(lengths) == 32768
    assert len(lengths) == batch
    assert all(0.4 * mean < n < 1.7 * mean for n in lengths)
    assert batch == 1 or len(set(lengths)) >= min(batch, 30)


def test_growth_pool_holds_every_request_once(monkeypatch):
    monkeypatch.setattr(bench_paged_attention, "GROWTH_TOKENS", 512)
    for batch, problem in zip((1, 4, 32), bench_paged_attention.ragged_decodes((1, 4, 32)).values(), strict=True):
        used = problem.page_table[problem.page_table >= 0].tolist()
        assert len(set(used)) == len(used)
        assert max(used) < len(problem.caches[0])
        assert sum(problem.kv_lens) == 512
        assert len(problem.kv_lens) == batch
        attention_problem.gated(problem)


def math_peer(name):
    return peers.TorchSdpa(name, torch.nn.attention.SDPBackend.MATH)


def run_with(found=None, quick=False, patterns=()):
    return runner.Run(found, CEILINGS, 20, quick, patterns)


def test_sdpa_peer_passes_the_gate():
    for shape in (DECODE, Shape(2, 64, 64, SMALL, causal=True)):
        problem = Dense(shape)
        rivals = attention_problem.dense_rivals({"math": math_peer("math")}, ("math", "absent"), problem)
        assert list(attention_problem.build_rivals(rivals, problem)) == ["math"]


def test_a_peer_that_fails_or_computes_something_else_is_named_and_left_out(capsys):
    problem = Dense(DECODE)
    rivals = {"wrong": lambda: lambda: torch.zeros_like(problem.out), "broken": lambda: 1 / 0}
    assert attention_problem.build_rivals(rivals, problem) == {}
    text = capsys.readouterr().err
    assert f"wrong is not measured on {DECODE.name}: AssertionError" in text
    assert f"broken is not measured on {DECODE.name}: ZeroDivisionError" in text


def test_dense_sections_judge_ours_against_the_best_peer(monkeypatch, timed):
    monkeypatch.setattr(bench_attention, "DECODE", (DECODE,))
    square = Shape(1, 64, 64, SMALL, causal=True)
    for name in ("PREFILL", "PORTABLE"):
        monkeypatch.setattr(bench_attention, name, (square,))
    monkeypatch.setattr(bench_attention, "LENGTHS", ())
    monkeypatch.setattr(bench_attention, "portable_arch", lambda: "sm_90")
    run = run_with({name: math_peer(name) for name in (peers.CUDNN_SDPA, peers.FLASH_SDPA)})
    (decode,) = bench_attention.decode_rows(run)
    prefill, portable = bench_attention.prefill_rows(run)
    for row in (decode, prefill, portable):
        assert list(row.peers_us) == [peers.CUDNN_SDPA, peers.FLASH_SDPA, eager.NAME]
        assert row.bars[0].is_met(row)
    assert decode.floor_us == pytest.approx(DECODE.bytes / 4.2e6)
    assert prefill.floor_us == pytest.approx(square.flops / 770e6)
    assert (prefill.flops, prefill.bytes) == (square.flops, None)
    assert timed == [["ours", *run.peer], ["ours", *run.peer, "portable"]]


def test_without_peers_the_bar_is_not_measured(monkeypatch, timed):
    """Plain torch stands beside every case, and is no peer."""
    monkeypatch.setattr(bench_attention, "DECODE", (DECODE,))
    (row,) = bench_attention.decode_rows(run_with())
    assert row.peers_us == {eager.NAME: 90.0}
    assert row.bars[0].verdict(row) == "not measured of any peer (bar <= 1x)"


def test_paged_sections_stand_beside_dense_and_page_16(monkeypatch, timed):
    monkeypatch.setattr(bench_paged_attention, "DECODE", (DECODE,))
    monkeypatch.setattr(bench_paged_attention, "PREFILL", {PREFILL: (16, 1)})
    run = run_with({peers.CUDNN_SDPA: math_peer(peers.CUDNN_SDPA)})
    sixteen, one = bench_paged_attention.decode_rows(run)
    assert {bar.to: bar.limit for bar in sixteen.bars} == {peers.CUDNN_SDPA: 1.0, "ours dense": 1.05}
    assert {bar.to: bar.limit for bar in one.bars} == {"page 16": 1.1}
    prefills = list(bench_paged_attention.prefill_rows(run))
    assert [row.bars[-1].limit for row in prefills] == [1.05, 1.1]
    assert all(bar.is_met(row) is not False for row in (sixteen, one, *prefills) for bar in row.bars)
    assert all(row.peers_us[eager.NAME] == 90.0 for row in (sixteen, one, *prefills))


@pytest.mark.parametrize("name", PROBLEMS)
def test_plain_torch_passes_the_check_and_gives_the_layout_of_q(name):
    problem = problems()[name]
    call = problem.eager()
    assert call().shape == problem.inputs[0].shape
    problem.check(call(), eager.NAME)


def test_plain_torch_is_left_out_where_it_takes_too_much_memory(monkeypatch, capsys):
    """And says so, before anything is allocated; packed requests come one after another."""
    monkeypatch.setattr(runner, "eager_us", lambda *_: {eager.NAME: 90.0})
    run, problem = run_with(), Dense(PREFILL)
    assert problem.eager_bytes == eager.SCORE_BYTES * 2 * 8 * 80 * 96
    assert Packed("packed", (40, 600), SMALL).eager_bytes == eager.SCORE_BYTES * 8 * 600 * 600
    assert attention_problem.measure_eager(run, problem) == {eager.NAME: 90.0}
    monkeypatch.setattr(eager, "MOST_BYTES", problem.eager_bytes - 1)
    assert attention_problem.measure_eager(run, problem) == {}
    assert f"torch eager is not measured on {PREFILL.name}: " in capsys.readouterr().err


def test_plain_torch_that_is_wrong_has_no_figure(monkeypatch, capsys):
    monkeypatch.setattr(runner, "eager_us", lambda *_: {eager.NAME: 90.0})
    monkeypatch.setattr(eager, "_hidden", lambda q, kv_len: torch.zeros(q.shape[1], kv_len, dtype=torch.bool))
    assert attention_problem.measure_eager(run_with(), Dense(PREFILL)) == {}
    assert "off by" in capsys.readouterr().err


def test_plain_torch_is_measured_by_itself_unless_a_call_takes_too_long(monkeypatch, capsys):
    groups = []

    def measure_group(calls, **options):
        groups.append((list(calls), options))
        return dict.fromkeys(calls, 90.0)

    monkeypatch.setattr(harness, "measure_group", measure_group)
    assert runner.eager_us("case", lambda: None, 20) == {eager.NAME: 90.0}
    once, twenty = ({"repeats": n, "scrubs": eager.SCRUBS} for n in (1, 20))
    assert groups == [([eager.NAME], once), ([eager.NAME], twenty)]
    monkeypatch.setattr(eager, "MOST_US", 80.0)
    assert runner.eager_us("case", lambda: None, 20) == {}
    assert "torch eager is not measured on case: a call takes 0 ms" in capsys.readouterr().err
    assert groups[2:] == [([eager.NAME], once)]


def test_host_sections_time_every_entry(monkeypatch, timed):
    for module, entries in ((bench_attention, 4), (bench_paged_attention, 3)):
        rows = list(module.host_rows(run_with(patterns=("host",))))
        assert len(rows) == 2 * entries
        assert {row.metric for row in rows} == {"host"}


def test_growth_of_the_batch_has_a_row_for_each(monkeypatch, timed):
    monkeypatch.setattr(bench_attention, "GROWTH_TOKENS", 64)
    monkeypatch.setattr(bench_attention, "GROWTH_BATCHES", (1, 4))
    first, second = bench_attention.batch_growth_rows(run_with())
    assert (first.case, second.case) == ("growth 64 tokens in 1 requests", "growth 64 tokens in 4 requests")
    assert second.flops < first.flops
    assert second.bars[0].is_met(second)


def test_flash_attention_4_gets_what_its_interface_names():
    calls = []

    def public(*operands, **named):
        calls.append((operands, named))
        return "out", "lse"

    peer = peers.FlashAttention4(public, public)
    assert peer.attend(1, 2, 3, causal=True)() == "out"
    assert peer.attend_packed(1, 2, 3, "cu", 9, causal=True)() == "out"
    peer.attend_paged(1, 2, 3, "table", "lens", 9, causal=False)()
    peer.attend_paged(1, 2, 3, "table", "lens", 9, causal=True, cu_seqlens_q="cu", max_seqlen_q=4)()
    paged = {"seqused_k": "lens", "max_seqlen_k": 9, "page_table": "table"}
    both = {"cu_seqlens_q": "cu", "cu_seqlens_k": "cu", "max_seqlen_q": 9, "max_seqlen_k": 9}
    assert [named for _, named in calls] == [
        {"causal": True},
        {**both, "causal": True},
        {**paged, "causal": False},
        {**paged, "cu_seqlens_q": "cu", "max_seqlen_q": 4, "causal": True},
    ]
    assert all(operands == (1, 2, 3) for operands, _ in calls)


def test_peers_in_attention_are_found_or_a_reason(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found, status = peers.find_attention()
    assert list(found) == [peers.CUDNN_SDPA, peers.FLASH_SDPA]
    assert status.endswith("flash-attn-4: not installed")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: types.SimpleNamespace())

    def no_such_release(name):
        raise ImportError("built for another DSL")

    monkeypatch.setattr(peers.importlib, "import_module", no_such_release)
    found, status = peers.find_attention()
    assert found == {}
    assert status.count("built for another DSL") == 3

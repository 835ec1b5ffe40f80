"""What the families say of a call on an architecture, without a GPU: the plan is that of a launch."""

from __future__ import annotations

import dataclasses

import pytest

from cuteforge import (
    CSACompressorBackward,
    CSACompressorForward,
    GQADecode,
    GQAPrefill,
    PagedGQADecode,
    PagedGQAPrefill,
    RotaryEmbedding,
    TensorSpec,
    UnsupportedError,
)
from cuteforge.families.attention import explain as attention
from cuteforge.families.csa.compressor import explain as compressor
from cuteforge.families.rotary import explain as rotary
from cuteforge.runtime import kernel_facts
from cuteforge.runtime.arch import resolve_arch

H200, A100 = resolve_arch("sm_90a", None), resolve_arch("sm_80", None)


def spec(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(shape, dtype, device="cuda")


def decode(requests, keys, heads=32, kv_heads=8, tokens=1, d=128, **options):
    q, kv = spec(requests, tokens, heads, d), spec(requests, keys, kv_heads, d)
    return GQADecode(q, kv, kv, q, **options)


def paged_decode(requests, keys, **options):
    q, pool = spec(requests, 32, 128), spec(4096, 16, 8, 128)
    table, lengths = spec(requests, keys // 16, dtype="int32"), spec(requests, dtype="int32")
    return PagedGQADecode(q, pool, pool, table, q, seqlens_k=lengths, **options)


def prefill(requests, tokens, d=128, heads=32, **options):
    q, kv = spec(requests, tokens, heads, d), spec(requests, tokens, 8, d)
    return GQAPrefill(q, kv, kv, q, causal=True, **options)


# The ways that test_attention_plan.py knows for these sizes.
@pytest.mark.parametrize(
    ("requests", "keys", "cluster", "splits", "ctas", "threads", "kernels", "why"),
    [
        (1, 512, 8, 8, 64, 128, 1, "cluster"),
        (3, 700, 4, 12, 96, 128, 1, "cluster"),
        (16, 4096, 1, 16, 128, 128, 1, "nothing to join"),
        (17, 1500, 1, 33, 264, 64, 2, "equal shares"),
    ],
)
def test_the_plan_of_a_decode_is_what_its_host_makes(requests, keys, cluster, splits, ctas, threads, kernels, why):
    facts = attention.describe(decode(requests, keys), H200)
    plan = facts.plan
    assert (plan.cluster, plan.splits, plan.ctas, plan.kernels) == (cluster, splits, ctas, kernels)
    assert plan.threads == threads
    assert why in facts.reasons[-1]


def test_splits_that_are_asked_for_are_told():
    facts = attention.describe(decode(5, 8192, num_splits=7), H200)
    assert (facts.plan.splits, facts.plan.ctas) == (35, 280)
    assert "num_splits is 7" in facts.reasons[-1]
    whole = attention.describe(decode(5, 8192, num_splits=1), H200)
    assert (whole.plan.splits, whole.plan.ctas) == (None, 40)


@pytest.mark.parametrize(("requests", "keys", "why"), [(128, 256, "nothing to join"), (3, 32768, "equal shares")])
def test_pages_are_planned_by_the_width_of_the_table(requests, keys, why):
    assert why in attention.describe(paged_decode(requests, keys), H200).reasons[-1]


def test_a_gpu_without_clusters_gets_none():
    facts = attention.describe(decode(1, 8192), A100)
    assert facts.arch == "sm_80"
    assert (facts.plan.cluster, facts.plan.kernels) == (1, 2)
    assert f"{A100.num_sms} SMs" in facts.reasons[-1]
    assert "4 query rows a KV head" in facts.reasons[1]


def test_prefill_of_sm_90a_goes_in_rounds_and_says_how_high_its_row_tiles_are():
    few, many = (attention.describe(prefill(1, tokens), H200) for tokens in (2048, 8192))
    masked = attention.describe(prefill(1, 8192, mask=spec(1, 8192, dtype="bool")), H200)
    assert (masked.kernel, masked.tile) == (many.kernel, many.tile)
    assert few.kernel == many.kernel == "attention.forward_sm90a.kernel"
    assert (few.tile.tile_m, many.tile.tile_m) == (128, 192)
    assert few.plan.ctas == many.plan.ctas == 132
    assert "65536 query rows are few" in few.reasons[1]
    assert "262144 query rows are many" in many.reasons[1]


def test_prefill_elsewhere_has_a_cta_for_each_work_tile():
    facts = attention.describe(prefill(2, 100), A100)
    assert facts.kernel == "attention.forward.kernel"
    assert facts.plan.ctas == 2 * 8 * -(-100 * 4 // facts.tile.tile_m)
    assert "sm_90a only" in facts.reasons[0]


def test_packed_queries_are_counted_as_the_kernel_counts_them():
    q, pool = spec(300, 32, 128), spec(64, 16, 8, 128)
    table, offsets, lengths = spec(3, 64, dtype="int32"), spec(4, dtype="int32"), spec(3, dtype="int32")
    facts = attention.describe(PagedGQAPrefill(q, pool, pool, table, offsets, q, seqlens_k=lengths), A100)
    # A request may end anywhere, so there is a row tile more for each.
    least = -(-300 * 4 // facts.tile.tile_m)
    assert 8 * least <= facts.plan.ctas <= 8 * (least + 3)


def test_calls_without_rows_launch_nothing():
    facts = attention.describe(decode(0, 512), H200)
    assert facts.plan.ctas == 0
    assert "nothing is launched" in facts.reasons[-1]


def test_rotary_of_two_tensors():
    q, k, table = spec(64, 32, 128), spec(64, 8, 128), spec(64, 64, 2, dtype="float32")
    facts = rotary.describe(RotaryEmbedding(q, table, q, k=k, k_out=k), H200)
    assert facts.kernel == "rotary.kernel"
    # 16 threads rotate a head, so 8 of a token's groups fit a CTA; a thread rotates two heads.
    assert facts.plan == kernel_facts.LaunchPlan(64 * (32 + 8) // 2 // 8, 128)


@pytest.mark.parametrize(("ratio", "coff", "why"), [(4, 2, "a warp holds"), (128, 1, "share a window")])
def test_compressor_forward_and_backward(ratio, coff, why):
    tokens, d, rows = 4096, 128, 4096 // ratio
    kv, ape, offsets = spec(tokens, coff * d), spec(ratio, coff * d, dtype="float32"), spec(2, dtype="int32")
    inputs = kv, kv, ape, offsets, offsets
    forward = CSACompressorForward(*inputs, spec(rows, d), ratio, coff)
    backward = CSACompressorBackward(*inputs, spec(rows, d), kv, kv, ape, ratio, coff)
    for op, name in ((forward, "forward"), (backward, "backward")):
        facts = compressor.describe(op, H200)
        assert facts.kernel == f"csa.compressor.{name}"
        assert 0 < facts.plan.ctas <= H200.num_sms * facts.tile.ctas_per_sm
        assert why in facts.reasons[0]
        assert f"{rows} rows" in facts.reasons[-1]


def test_without_a_compiler_all_but_the_plan_is_told(monkeypatch):
    def missing(key):
        raise UnsupportedError("nvidia-cutlass-dsl: not installed")

    monkeypatch.setattr(kernel_facts, "load_kernel", missing)
    facts = attention.describe(decode(1, 512), H200)
    assert facts.plan is None
    assert facts.reasons[-1] == "the plan is not known: nvidia-cutlass-dsl: not installed"
    assert "plan    not known" in str(facts)


def test_facts_print_as_lines_and_do_not_change():
    facts = attention.describe(decode(1, 512), H200)
    lines = str(facts).split("\n")
    assert lines[0] == "kernel  attention.forward.kernel, sm_90a with 132 SMs"
    assert lines[1].startswith("tile    m_blocks 1, row_warps 1, key_warps 4, tile_n 16")
    assert lines[2] == "plan    64 CTAs of 128 threads, clusters of 8, 8 splits"
    assert lines[3].startswith("why     decode: ")
    assert len(lines) == 3 + len(facts.reasons)
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.arch = "sm_80"
    assert hash(facts) == hash(attention.describe(decode(1, 512), H200))

"""`explain` for an architecture: what a GPU that is not here would run."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cuteforge import (
    AttentionBackend,
    ContractError,
    KVCache,
    UnsupportedError,
    apply_rotary_emb,
    attention,
    compress,
    explain,
)
from cuteforge.backends import kernels


def qkv(requests=1, tokens=1, keys=512, heads=32, kv_heads=8, d=128, device="meta", dtype=torch.bfloat16):
    sizes = (tokens, heads), (keys, kv_heads), (keys, kv_heads)
    return [torch.empty(requests, length, count, d, dtype=dtype, device=device) for length, count in sizes]


def test_without_an_architecture_a_cpu_runs_no_kernel():
    decision = explain(*qkv(device="cpu"))
    assert decision.chosen == "torch_native"
    assert decision.kernel is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_decode_on_an_h200_is_planned_on_a_laptop(device):
    decision = explain(attention, *qkv(device=device), arch="sm_90a")
    assert decision.chosen == "cuda"
    facts = decision.kernel
    assert (facts.kernel, facts.arch, facts.num_sms) == ("attention.forward.kernel", "sm_90a", 132)
    assert (facts.plan.ctas, facts.plan.cluster) == (64, 8)
    printed = str(decision).split("\n")
    assert printed[0] == "attention: cuda (by priority)"
    assert "  kernel  attention.forward.kernel, sm_90a with 132 SMs" in printed
    assert "  plan    64 CTAs of 128 threads, clusters of 8, 8 splits" in printed


def test_the_other_backends_still_say_why_not():
    verdicts = {v.name: v.refusal for v in explain(*qkv(), arch="sm_90a", window=(8, 0)).verdicts}
    assert verdicts["cuda"] is None
    assert verdicts["flash"].startswith("takes no window")


def test_prefill_and_the_arguments_of_the_call_reach_the_kernel():
    q, k, v = qkv(2, 4096, 4096)
    plain = explain(attention, q, k, v, is_causal=True, arch="sm_90a").kernel
    assert plain.kernel == "attention.forward_sm90a.kernel"
    mask = torch.empty(2, 4096, dtype=torch.bool, device="meta")
    masked = explain(attention, q, k, v, attn_mask=mask, arch="sm_90a").kernel
    assert masked.kernel == "attention.forward_sm90a.kernel"
    assert explain(attention, q, k, v, attn_mask=mask, arch="sm_80").kernel.kernel == "attention.forward.kernel"
    assert explain(attention, q, k, v, is_causal=True, arch="sm_80").kernel.arch == "sm_80"


def test_over_a_cache_the_paged_kernel_is_told():
    cache = KVCache(1, 8, 128, num_pages=64, max_requests=4, max_seqlen=256, dtype=torch.bfloat16, device="cpu")
    requests = [cache.add(), cache.add()]
    cache.bind_prefill(requests, [30, 5])
    new = [torch.zeros(35, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8)]
    assert explain(attention, *new, cache, 0, is_causal=True, arch="sm_90a").kernel.kernel.startswith("attention.")
    cache.bind_decode(requests)
    token = [torch.zeros(2, 1, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8)]
    facts = explain(attention, *token, cache, 0, arch="sm_90a").kernel
    assert facts.kernel == "attention.forward.kernel"
    assert facts.plan.splits is not None


def test_what_the_kernels_refuse_on_an_architecture_has_no_facts():
    fp32 = explain(*qkv(dtype=torch.float32), arch="sm_90a")
    assert (fp32.chosen, fp32.kernel) == ("torch_native", None)
    nothing = explain(*qkv(dtype=torch.float32), arch="sm_90a", backend="cuda")
    assert (nothing.chosen, nothing.kernel) == (None, None)


def test_a_tile_that_does_not_fit_a_small_gpu_is_a_refusal(monkeypatch):
    def too_large(op, dims, arch):
        raise UnsupportedError(f"q: D does not fit {arch.name}")

    monkeypatch.setattr(kernels.GQADecode, "_check_arch", too_large)
    decision = explain(*qkv(), arch="sm_86")
    assert decision.chosen != "cuda"
    assert decision.verdicts[0].refusal == "q: D does not fit sm_86"


@pytest.mark.parametrize(
    ("arch", "error"), [("hopper", ContractError), ("sm_75", UnsupportedError), (90, ContractError)]
)
def test_an_architecture_that_is_none_is_refused_by_name(arch, error):
    with pytest.raises(error, match="arch: "):
        explain(attention, *qkv(), arch=arch)


def test_a_call_that_the_kernel_would_refuse_is_refused():
    q, k, v = qkv()
    with pytest.raises(ContractError, match="v: "):
        explain(attention, q, k, v[:, :100], arch="sm_90a")
    with pytest.raises(ContractError, match="attn_mask: "):
        explain(attention, q, k, v, attn_mask=torch.empty(3, 512, dtype=torch.bool, device="meta"), arch="sm_90a")


def test_a_backend_of_a_user_is_asked_as_on_cuda_and_may_have_no_facts():
    class Own(AttentionBackend):
        name = "own"

        def refuse(self, request):
            return None if request.device.type == "cuda" else "CUDA only"

        def fwd_decode(self, *operands):
            raise NotImplementedError

        fwd_prefill = fwd_decode

    decision = explain(attention, *qkv(), backend=Own(), arch="sm_90a")
    assert (decision.chosen, decision.kernel) == ("own", None)


def test_rotary():
    x = torch.empty(4, 32, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(100, 64, device="meta")
    positions = torch.empty(4, dtype=torch.int32, device="meta")
    decision = explain(apply_rotary_emb, x, cos=table, sin=table, positions=positions, interleaved=False, arch="sm_80")
    assert decision.chosen == "cuda"
    assert decision.kernel.kernel == "rotary.kernel"
    assert decision.kernel.plan.ctas > 0


@pytest.mark.parametrize("total_comp", [None, 1024])
def test_compressor(total_comp):
    device = "cpu" if total_comp is None else "meta"
    kv = torch.empty(4096, 256, dtype=torch.bfloat16, device=device)
    ape, offsets = torch.empty(4, 256, device=device), torch.tensor([0, 4096], dtype=torch.int32).to(device)
    decision = explain(compress, kv, kv, ape, offsets, ratio=4, coff=2, total_comp=total_comp, arch="sm_90a")
    assert decision.chosen == "cuda"
    assert decision.kernel.kernel == "csa.compressor.forward"
    assert "1024 rows" in decision.kernel.reasons[-1]


def test_a_decision_is_data():
    decision = explain(attention, *qkv(), arch="sm_90a")
    assert decision == explain(attention, *qkv(), arch="sm_90a")
    assert hash(decision) == hash(explain(attention, *qkv(), arch="sm_90a"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.kernel = None

"""The forward kernel against eager fp32 and fp64, on every path, layout and kind of special value."""

import pytest
import torch

from cuteforge import CSACompressorForward, csa_compressor_forward_wrapper
from helpers import budget, csa, csa_inputs, gpu
from helpers.canary import Canary, padded_copy
from helpers.packs import Pack


@pytest.mark.parametrize("case", **csa.case_table)
def test_case(case, device):
    """Poison sits in every element no block pools; see the row's ``guards`` for the path it is there for."""
    x = case.inputs(device)
    csa.check_forward(csa.run_forward(x), x)


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA, csa.ODD], ids=lambda c: c.label)
def test_poison_in_tails_never_leaks(config, device):
    x = csa.small(config, device)
    real = csa.run_forward(x)[: x.pack.real_rows]
    assert real.isfinite().all()
    clean = csa.small(config, device, poison=False)
    assert budget.same_bits(real, csa.run_forward(clean)[: x.pack.real_rows])


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA, csa.ODD], ids=lambda c: c.label)
def test_capacity_rows_are_all_the_eager_padding_row(config, device):
    """More rows than blocks, as a static capacity has: each is the window of the first tokens."""
    x = csa.inputs(config, Pack((2 * config.ratio,), config.ratio, extra_tokens=3, extra_rows=300), device)
    out = csa.run_forward(x)
    assert out.isfinite().all()
    assert not torch.equal(out[1], out[0])
    assert budget.same_bits(out[2:], out[:1].expand_as(out[2:]))


def test_truncated_total_comp_is_a_prefix(device):
    x = csa.small(csa.CSA, device)
    whole = csa.run_forward(x)
    short = x.with_(grad_out=x.grad_out[: x.pack.real_rows - 3])
    assert budget.same_bits(csa.run_forward(short), whole[: short.total_comp])


@pytest.mark.parametrize("config", [csa.CSA, csa.ODD, csa.CSA_FP32, csa.HCA], ids=lambda c: c.label)
def test_row_pitch_changes_nothing(config, device):
    """Padded rows in kv, score, ape and out, and offset tables that are views at an odd element."""
    x = csa.small(config, device)
    width = config.coff * config.d
    cu, cuc = (padded_copy(t.view(1, -1), t.numel() + 3, offset=1)[0] for t in (x.cu_seqlens, x.cu_seqlens_comp))
    strided = x.with_(
        kv=padded_copy(x.kv, width + 64),
        score=padded_copy(x.score, width + 8),
        ape=padded_copy(x.ape, width + 5, offset=3),
        cu_seqlens=cu,
        cu_seqlens_comp=cuc,
    )
    got = csa.run_forward(strided, row_pitch=config.d + 16)
    assert budget.same_bits(got, csa.run_forward(x))


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA, csa.CSA_FP32], ids=lambda c: c.label)
@pytest.mark.parametrize("special", csa_inputs.FORWARD_SPECIALS)
def test_special_values_propagate_as_in_eager(special, config, device):
    x = csa_inputs.with_special(special, config, device)
    csa.check_forward(csa.run_forward(x), x)


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA], ids=lambda c: c.label)
def test_all_scores_minus_inf_give_nan(config, device):
    """As softmax does; the other rows stay finite."""
    x = csa_inputs.with_dead_blocks(config, device)
    out = csa.run_forward(x)
    assert out[:2].isnan().all()
    assert out[2:].isfinite().all()
    csa.check_forward(out, x)


def test_infinite_value_at_weight_zero_is_nan_as_in_eager(device):
    """0 * inf is NaN in the contract's formula; a kernel that skips weight 0 would differ."""
    x = csa.inputs(csa.CSA, Pack((8,), 4), device)
    kv, score = x.kv.clone(), x.score.clone()
    kv[1], score[1] = torch.inf, -torch.inf
    x = x.with_(kv=kv, score=score)
    csa.check_forward(csa.run_forward(x), x)


@pytest.mark.parametrize("magnitude", [1e-30, 60.0, 3e4, 3e38])
def test_scores_of_any_magnitude(magnitude, device):
    """Scores whose exponential overflows or underflows fp32, and the range of bf16's largest values."""
    x = csa.small(csa.CSA, device)
    x = x.with_(score=(x.score.sign() * magnitude).to(x.score.dtype))
    csa.check_forward(csa.run_forward(x), x)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_absent_block_ignores_its_half_of_ape(value, device):
    """In a segment's first block the preceding window is not there, so neither is its ape."""
    x = csa.inputs(csa.CSA, Pack((4,) * 33, 4), device)
    ape = x.ape.clone()
    ape[:, : csa.CSA.d] = value
    assert budget.same_bits(csa.run_forward(x.with_(ape=ape)), csa.run_forward(x))


@pytest.mark.parametrize("name", csa_inputs.DAMAGED)
def test_damaged_offsets_touch_nothing_outside(name, device):
    """All output is written, nothing else is, and no NaN of the surroundings is read. Where the output table is
    monotone the rows are also those of the documented rule: no block of its segment means capacity padding."""
    x = csa_inputs.damaged(name, device)
    out = csa.run_forward(x)
    assert out.isfinite().all()
    if csa_inputs.is_monotone(x.cu_seqlens_comp):
        csa.check_forward(out, x)


def test_no_segments_at_all(device):
    """B = 0 with rows: capacity padding only."""
    x = csa.inputs(csa.CSA, Pack((), 4, extra_tokens=9, extra_rows=3), device, poison=False)
    csa.check_forward(csa.run_forward(x), x)


def test_wrapper_equals_class_with_and_without_optional_arguments(device):
    x = csa.small(csa.CSA, device)
    whole = csa.run_forward(x)
    got = csa_compressor_forward_wrapper(*x.tensors, total_comp=x.total_comp)
    assert list(got.keys()) == ["out"] and budget.same_bits(got["out"], whole)
    got = csa_compressor_forward_wrapper(*x.tensors, 4, csa.CSA.d, 2)
    assert budget.same_bits(got[0], whole[: x.pack.real_rows])


def test_bound_call_follows_new_contents(device):
    x = csa.small(csa.CSA, device)
    out = Canary((x.total_comp, x.head_dim), x.kv.dtype, device)
    call = CSACompressorForward(*x.tensors, out.tensor, **x.config).compile().bind(*x.tensors, out.tensor)
    for _ in range(2):
        call()
        torch.cuda.synchronize()
        out.check("out")
        csa.check_forward(out.tensor, x)
        x.kv.neg_()


def test_more_than_2_31_elements(device):
    """Element offsets of kv and score pass 2**31; the first rows and the last segments equal their stand-alone
    calls."""
    gpu.require_free_memory(16, device)
    x = csa_inputs.big(csa.CSA_WIDE, device)
    out = csa_compressor_forward_wrapper(*x.tensors, **x.config, total_comp=x.total_comp)["out"]
    head, tail = csa.run_forward(csa_inputs.big_head(x)), csa.run_forward(csa_inputs.big_tail(x))
    assert budget.same_bits(out[: len(head)], head)
    assert budget.same_bits(out[-len(tail) :], tail)


def test_row_offsets_past_2_31_by_stride(device):
    """Few elements, far apart: 64-bit offsets are judged on strides, not on element counts."""
    gpu.require_free_memory(8, device)
    config = csa.CSA
    pack = Pack((40_000 - 9, 9), config.ratio)
    x = csa.inputs(config, pack, device)
    wide = torch.empty((pack.num_tokens, 2**16), dtype=config.dtype, device=device)
    width = config.coff * config.d
    far = x.with_(kv=wide[:, :width].copy_(x.kv), score=wide[:, width : 2 * width].copy_(x.score))
    assert budget.same_bits(csa.run_forward(far), csa.run_forward(x))

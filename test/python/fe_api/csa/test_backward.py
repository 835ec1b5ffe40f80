"""The backward kernel against eager autograd, on every path, layout and kind of special value."""

import pytest
import torch

from cuteforge import CSACompressorBackward, csa_compressor_backward_wrapper
from cuteforge.families.csa.compressor import reference
from helpers import budget, csa, csa_inputs, gpu
from helpers.canary import Canary, padded_copy
from helpers.packs import Pack


@pytest.mark.parametrize("case", **csa.case_table)
def test_case(case, device):
    """Buffers start as NaN and must be fully written; see the row's ``guards`` for the path it is there for."""
    x = case.inputs(device)
    csa.check_backward(csa.run_backward(x), x)


@pytest.mark.parametrize("config", [csa.CSA, csa.CSA_FP16, csa.CSA_FP32, csa.ODD], ids=lambda c: c.label)
def test_eager_formulas_are_autograd_on_this_gpu(config, device):
    """The bitwise comparisons above use explicit formulas; here they are shown to be autograd's own bits on CUDA."""
    x = csa.small(config, device)
    explicit, auto = csa.eager_backward(x), reference.compress_backward_autograd(*x.tensors, x.grad_out, **x.config)
    budget.assert_same_values(explicit.grad_kv, auto.grad_kv, "grad_kv")
    budget.assert_same_values(explicit.grad_score, auto.grad_score, "grad_score")


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA, csa.ODD], ids=lambda c: c.label)
def test_poison_in_tails_and_padding_rows_never_leaks(config, device):
    """NaN in unread tokens and in the gradients of padding rows leaves all three results as without it."""
    poisoned = csa.run_backward(csa.small(config, device))
    assert all(grad.isfinite().all() for grad in poisoned)
    clean = csa.run_backward(csa.small(config, device, poison=False))
    assert all(budget.same_bits(a, b) for a, b in zip(poisoned, clean, strict=True))


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA], ids=lambda c: c.label)
def test_truncated_grad_out_gives_zeros_past_it(config, device):
    """Blocks without a row of grad_out consume nothing: their positions are exact zeros."""
    x = csa.small(config, device)
    short = x.with_(grad_out=x.grad_out[: x.pack.real_rows - 3])
    grads, eager = csa.run_backward(short), csa.eager_backward(short)
    for grad, want, full in zip(grads[:2], eager[:2], csa.run_backward(x)[:2], strict=True):
        kept = want != 0
        assert not grad[~kept].any()
        assert torch.equal(grad[kept], full[kept])


@pytest.mark.parametrize("pack", [Pack((), 4, 9, 0), Pack((3, 0, 2), 4, 4, 0), Pack((3, 2), 4, 0, 6)])
def test_nothing_pooled_gives_exact_zeros(pack, device):
    """No segments, only short ones, or only padding rows: every gradient is written, as 0."""
    x = csa.inputs(csa.CSA, pack, device)
    assert not any(grad.any() for grad in csa.run_backward(x))


@pytest.mark.parametrize("config", [csa.CSA, csa.ODD, csa.CSA_FP32, csa.HCA], ids=lambda c: c.label)
def test_row_pitch_changes_nothing(config, device):
    """Padded rows in every operand; the gaps of the gradients stay unwritten (canaries)."""
    x = csa.small(config, device)
    width = config.coff * config.d
    strided = x.with_(
        kv=padded_copy(x.kv, width + 8),
        score=padded_copy(x.score, width + 64),
        ape=padded_copy(x.ape, width + 5, offset=3),
        grad_out=padded_copy(x.grad_out, config.d + 16),
    )
    got, want = csa.run_backward(strided, row_pitch=width + 32), csa.run_backward(x)
    assert all(budget.same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA, csa.CSA_FP32], ids=lambda c: c.label)
@pytest.mark.parametrize("special", csa_inputs.SPECIALS)
def test_special_values_propagate_as_in_eager(special, config, device):
    """NaN and infinities are where eager has them, and never in what no block pools."""
    x = csa_inputs.with_special(special, config, device)
    grads = check_specials(x)
    assert not grads.grad_kv[x.unconsumed].any()
    assert not grads.grad_score[x.unconsumed].any()


def check_specials(x):
    grads, eager = csa.run_backward(x), csa.eager_backward(x)
    for field in grads._fields:
        budget.assert_same_specials(getattr(grads, field), getattr(eager, field), field)
    return grads


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA], ids=lambda c: c.label)
def test_minus_inf_scores_have_gradient_zero(config, device):
    x = csa.inputs(config, Pack.named("exact_multiples", config.ratio), device)
    score = x.score.clone()
    score[1] = -torch.inf
    x = x.with_(score=score)
    grads = csa.run_backward(x)
    assert not grads.grad_kv[1].any() and not grads.grad_score[1].any()
    csa.check_backward(grads, x)


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA], ids=lambda c: c.label)
def test_all_scores_minus_inf_give_nan(config, device):
    grads = check_specials(csa_inputs.with_dead_blocks(config, device))
    assert grads.grad_kv[0, -1].isnan()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_absent_block_ignores_its_half_of_ape(value, device):
    x = csa.inputs(csa.CSA, Pack((4,) * 33, 4), device)
    ape = x.ape.clone()
    ape[:, : csa.CSA.d] = value
    got, want = csa.run_backward(x.with_(ape=ape)), csa.run_backward(x)
    assert all(budget.same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert not got.grad_ape[:, : csa.CSA.d].any()


@pytest.mark.parametrize("name", csa_inputs.DAMAGED)
def test_damaged_offsets_touch_nothing_outside(name, device):
    """Nothing outside the buffers is written (canaries). With monotone tables every element is, with the gradients of
    the documented rule; otherwise blocks may share tokens or have none, and what is written there is not defined."""
    x = csa_inputs.damaged(name, device)
    monotone = csa_inputs.is_monotone(x.cu_seqlens) and csa_inputs.is_monotone(x.cu_seqlens_comp)
    grads = csa.run_backward(x, fully=monotone)
    if monotone:
        eager = csa.eager_backward(x)
        budget.assert_same_values(grads.grad_kv, eager.grad_kv, "grad_kv")
        budget.assert_same_values(grads.grad_score, eager.grad_score, "grad_score")


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA], ids=lambda c: c.label)
def test_grad_ape_over_many_rows(config, device):
    """Tens of thousands of addends of both signs: the fixed-order sum stays within the fp64 budget."""
    x = csa.inputs(
        config, Pack((200 * config.ratio, 0, 16_000 // config.ratio * config.ratio * 4), config.ratio), device
    )
    csa.check_backward(csa.run_backward(x), x)


def test_atomic_mode_agrees(device):
    """deterministic=False may reorder grad_ape only."""
    x = csa.small(csa.CSA, device)
    grads = csa.run_backward(x, deterministic=False)
    csa.check_backward(grads, x)
    fixed = csa.run_backward(x)
    assert budget.same_bits(grads.grad_kv, fixed.grad_kv) and budget.same_bits(grads.grad_score, fixed.grad_score)


def test_wrapper_equals_class(device):
    x = csa.small(csa.CSA, device)
    got = csa_compressor_backward_wrapper(*x.tensors, x.grad_out, 4, csa.CSA.d, 2)
    assert list(got.keys()) == ["grad_kv", "grad_score", "grad_ape"]
    assert all(budget.same_bits(a, b) for a, b in zip(got, csa.run_backward(x), strict=True))


def test_bound_call_overwrites_its_buffers(device):
    """A second call on the same buffers and workspace gives the same result: nothing accumulates across calls."""
    x = csa.small(csa.CSA, device)
    grads = [Canary.like(t) for t in (x.kv, x.score, x.ape)]
    buffers = [grad.tensor for grad in grads]
    op = CSACompressorBackward(*x.tensors, x.grad_out, *buffers, **x.config).compile()
    workspace = torch.full((max(1, op.workspace_bytes()),), 255, dtype=torch.uint8, device=device)
    call = op.bind(*x.tensors, x.grad_out, *buffers, workspace=workspace)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    for got, want in zip(buffers, csa.run_backward(x), strict=True):
        assert budget.same_bits(got, want)


def test_more_than_2_31_elements(device):
    """Element offsets of all four matrices pass 2**31; the first tokens and the last segments equal their stand-alone
    calls, but for the half of the first tokens that a later block reads."""
    gpu.require_free_memory(24, device)
    x = csa_inputs.big(csa.CSA_WIDE, device)
    grads = csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config)
    head, tail = csa.run_backward(csa_inputs.big_head(x)), csa.run_backward(csa_inputs.big_tail(x))
    for name in ("grad_kv", "grad_score"):
        whole, first, last = grads[name], getattr(head, name), getattr(tail, name)
        assert budget.same_bits(whole[: len(first), x.head_dim :], first[:, x.head_dim :]), name
        assert budget.same_bits(whole[-len(last) :], last), name

"""The test helpers themselves: a guard that cannot fail guards nothing."""

import hypothesis
import pytest
import torch

from helpers import budget
from helpers.canary import Canary, Slices, padded_copy, strided_copy
from helpers.packs import PACKS, Pack, draw

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pitch", "offset"), [(None, 0), (7, 0), (9, 3)])
def test_canary_sees_outside_writes_and_missed_elements(dtype, pitch, offset):
    canary = Canary((4, 5), dtype, "cpu", pitch, offset)
    assert canary.tensor.isnan().all()
    canary.check_untouched()
    with pytest.raises(AssertionError, match="20 elements never written"):
        canary.check()
    canary.tensor.fill_(torch.nan)
    canary.check()
    past = canary.tensor.as_strided((1,), (1,), canary.tensor.storage_offset() + 5 + 3 * canary.tensor.stride(0))
    past.fill_(0)
    with pytest.raises(AssertionError, match="1 elements outside"):
        canary.check_guards()
    with pytest.raises(AssertionError, match="should have been"):
        canary.check_untouched()


def test_canary_holds_empty_and_one_dim_tensors():
    for shape, dtype in (((0, 5), torch.float32), ((0,), torch.uint8), ((3,), torch.int32)):
        canary = Canary(shape, dtype, "cpu")
        assert canary.tensor.shape == shape
        canary.tensor.fill_(1)
        canary.check()


def test_canary_of_any_strides_sees_writes_between_its_elements():
    canary = Canary((2, 3, 4), torch.bfloat16, "cpu", stride=(4, 10, 1))
    assert canary.tensor.stride() == (4, 10, 1)
    canary.tensor.fill_(1)
    canary.check()
    canary.tensor.as_strided((1,), (1,), canary.tensor.storage_offset() + 8).fill_(0)
    with pytest.raises(AssertionError, match="1 elements outside"):
        canary.check_guards()


def test_strided_copy_keeps_values_between_nans():
    source = torch.arange(24.0).view(2, 3, 4)
    copy = strided_copy(source, (20, 6, 1), offset=1)
    assert torch.equal(copy, source)
    assert copy.stride() == (20, 6, 1)
    assert copy.as_strided((2, 20), (20, 1))[:, 16:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_may_change_and_nothing_beside_them(dtype):
    buffer = torch.full((3, 5, 2), torch.nan, dtype=dtype)
    views = buffer[:, :2], buffer[:, 3:4]
    guard = Slices(buffer, *views)
    for view in views:
        view.fill_(7)
    guard.check_guards()
    buffer[2, 2, 1] = 0
    with pytest.raises(AssertionError, match=r"1 elements outside were written, first at \[2, 2, 1\]"):
        guard.check_guards()


def test_padded_copy_keeps_values_between_nans():
    source = torch.arange(6.0).view(2, 3)
    copy = padded_copy(source, 5, offset=1)
    assert torch.equal(copy, source)
    assert copy.stride() == (5, 1)
    assert copy.as_strided((2, 5), (5, 1))[:, 3:].isnan().all()


def test_ulp():
    assert budget.ulp(torch.tensor([1.0, 1.5, 2.0, 0.99]), torch.bfloat16).tolist() == [2**-7, 2**-7, 2**-6, 2**-8]
    for dtype in DTYPES:
        one = torch.ones((), dtype=dtype)
        assert budget.ulp(one, dtype) == float(torch.finfo(dtype).eps)


def test_same_values_and_same_bits():
    nan, zeros = torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, -0.0])
    assert budget.same_values(nan, zeros)
    assert not budget.same_bits(nan, zeros)
    assert not budget.same_values(nan, nan.double())
    with pytest.raises(AssertionError, match="1 of 2 differ"):
        budget.assert_same_values(nan, torch.tensor([torch.nan, 1.0]), "x")


@pytest.mark.parametrize("check", [budget.assert_within_budget, budget.assert_as_close])
def test_budgets_accept_the_rounded_truth_and_refuse_more(check):
    truth = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eager = truth.float()
    check(truth.bfloat16(), truth, eager.bfloat16(), "x")
    with pytest.raises(AssertionError, match="error"):
        check(truth.bfloat16() * 1.1, truth, eager.bfloat16(), "x")
    with pytest.raises(AssertionError, match="NaN"):
        check(truth.bfloat16().index_fill(0, torch.tensor([3]), torch.nan), truth, eager.bfloat16(), "x")


def test_one_rounding_step():
    eager = torch.tensor([1.0, -3.0])
    step = torch.tensor([2**-7, 0.0])
    budget.assert_one_rounding_step((eager + step).bfloat16(), eager, eager.abs(), 4, "x")
    with pytest.raises(AssertionError, match="more than a step"):
        budget.assert_one_rounding_step((eager + 2 * step).bfloat16(), eager, eager.abs(), 4, "x")


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_packs_are_what_they_say(name, ratio):
    pack = Pack.named(name, ratio, extra_tokens=2, extra_rows=3)
    assert pack.cu_seqlens()[-1] + 2 == pack.num_tokens
    assert pack.cu_seqlens_comp()[-1] + 3 == pack.total_comp
    for coff in (1, 2):
        unused = pack.unconsumed(coff)
        blocks = torch.tensor([length // ratio for length in pack.lengths])
        assert (~unused).sum(0)[-1] == blocks.sum() * ratio
        assert (~unused).sum(0)[0] == ((blocks - coff + 1).clamp(min=0)).sum() * ratio


def test_poison_is_where_nothing_is_pooled():
    x = draw(Pack.named("ragged", 4, extra_tokens=2, extra_rows=3), 2, 3)
    assert torch.equal(x.kv.isnan(), x.unconsumed)
    assert torch.equal(x.score.isnan(), x.unconsumed)
    assert x.grad_out.isnan().all(1).tolist() == [row >= x.pack.real_rows for row in range(x.total_comp)]


def test_drawn_examples_have_no_time_limit():
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check

"""Memory of the same kinds again and again: new each time, contiguous, of the shapes and dtypes that were asked for."""

import pytest
import torch

from cuteforge.runtime.allocate import allocations

KINDS = [((2, 1, 4, 8), torch.bfloat16), ((5,), torch.uint8), ((2, 0, 3), torch.float32)]


BY_LENGTH = [((4, 8), torch.bfloat16), ((0,), torch.float16), ((), torch.int32)]


def check(device):
    make = allocations(KINDS, device)
    check_kinds(KINDS, make([]), make([]), device)
    make, given = allocations(KINDS, device, BY_LENGTH), [torch.zeros(7, 2, device=device)]
    for length in (0, 1, 6):
        kinds = [((length, *rest), dtype) for rest, dtype in BY_LENGTH]
        check_kinds(kinds + KINDS, make(given, length), make(given, length), device)
    assert [len(x) for x in make(given)[:3]] == [7, 7, 7]


def check_kinds(kinds, first, second, device):
    for (shape, dtype), x, y in zip(kinds, first, second, strict=True):
        assert x.shape == shape and x.dtype == dtype and x.is_contiguous() and x.device == device
        assert x.numel() == 0 or x.data_ptr() != y.data_ptr()


def test_on_the_cpu():
    check(torch.device("cpu"))


@pytest.mark.gpu
def test_on_a_gpu(device):
    check(device)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_on_a_gpu_that_is_not_the_current_one():
    with torch.cuda.device(0):
        check(torch.device("cuda", 1))

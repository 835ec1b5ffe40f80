"""Memory of the same kinds again and again: new each time, contiguous, of the shapes and dtypes that were asked for."""

import pytest
import torch

from cuteforge.runtime.allocate import allocations

KINDS = [((2, 1, 4, 8), torch.bfloat16), ((5,), torch.uint8), ((2, 0, 3), torch.float32)]


def check(device):
    make = allocations(KINDS, device)
    first, second = make(), make()
    for (shape, dtype), x, y in zip(KINDS, first, second, strict=True):
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

"""Memory of kinds that are known: new each time, of the shape, strides and dtype that were asked for, on the device,
whichever is current."""

import pytest
import torch

from cuteforge.op.allocate import current_device, ways_to_empty

KINDS = [
    ((2, 1, 4, 8), (32, 32, 8, 1), torch.bfloat16),
    ((5,), (1,), torch.uint8),
    ((2, 0, 3), (3, 3, 1), torch.float32),
    ((3, 4), (8, 1), torch.int32),
]


def check(empty, device):
    for shape, strides, dtype in KINDS:
        x, y = empty(shape, strides, dtype), empty(shape, strides, dtype)
        assert x.shape == shape and x.stride() == strides and x.dtype == dtype and x.device == device
        assert x.numel() == 0 or x.data_ptr() != y.data_ptr()


def test_on_the_cpu():
    for empty in ways_to_empty(torch.device("cpu")):
        check(empty, torch.device("cpu"))


@pytest.mark.gpu
def test_on_a_gpu(device):
    assert current_device() == torch.cuda.current_device()
    for empty in ways_to_empty(device):
        check(empty, device)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_on_a_gpu_that_is_not_the_current_one():
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        assert current_device() == 0
        check(ways_to_empty(other)[1], other)

"""A class that writes a tensor tells autograd so: a graph that saved the tensor before refuses to use it."""

import pytest
import torch

from helpers import rotary

ENTRIES = ("call", "execute", "bind")


def turn_in_place(entry, x, tensor, **options):
    """Rotate `tensor` in place by an op made for `x`."""
    op = rotary.compiled(x, {"out": x.x})
    operands = (tensor, x.table, tensor, x.positions)
    if entry == "bind":
        op.bind(*operands, **options)()
    elif entry == "execute":
        op.execute(*operands, **options)
    else:
        op(*operands, **options)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_gradient_through_what_was_rotated_in_place_is_refused(entry, device):
    """x was saved for the gradient of its square; its memory then changed by way of a view."""
    x = rotary.draw(rotary.HALVES_FP32, rotary.PACKED, device)
    leaf = x.x.clone().requires_grad_()
    saved = leaf * 1
    square = saved * saved
    with torch.no_grad():
        turn_in_place(entry, x, saved.view(saved.shape))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()

"""What tests of every family's torch ops share: transforms to refuse, and a log of what the dispatcher sees."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import budget

# (function of one tensor, tensor) -> the transformed function, called.
TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap_of_grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda t: f(t).sum()))(x[None]),
}


class OpLog(TorchDispatchMode):
    """Within it, `seen` lists the ops of this library that are called, outermost first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cuteforge":
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def assert_same_bits(got, want) -> None:
    """Tensor by tensor."""
    assert all(budget.same_bits(a, b) for a, b in zip(got, want, strict=True))

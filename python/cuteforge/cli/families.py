"""What the commands need to know of a kernel family: one line in `FAMILIES`, one module beside this one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Name -> module with `demo_cases(device) -> list[Case]` and `sample_ops(device) -> {label: op}`.
FAMILIES = {
    "csa": "cuteforge.cli.csa",
    "rotary": "cuteforge.cli.rotary",
    "attention": "cuteforge.cli.attention",
}


@dataclass(frozen=True)
class Case:
    """One op on one real input, and the ways to compute its results (name -> tensor).

    Attributes:
        name: what runs, e.g. "CSA forward".
        size_bytes: bytes that must move at least.
        exact: the fp64 oracle.
        eager: the fp32 eager code, rounded to the dtypes of the results; its error sets the budget.
        fallback: what runs in place of the kernel without a GPU.
        bind: compiles for the GPU; returns a launch and the poisoned buffers that it writes.
        compile_for: compiles for an architecture name; needs no GPU.
    """

    name: str
    size_bytes: int
    exact: Callable[[], Mapping[str, torch.Tensor]]
    eager: Callable[[], Mapping[str, torch.Tensor]]
    fallback: Callable[[], Mapping[str, torch.Tensor]]
    bind: Callable[[], tuple[Callable[[], None], Mapping[str, torch.Tensor]]]
    compile_for: Callable[[str], Any]


def load(family: str) -> ModuleType:
    """The module of `family`, a key of `FAMILIES`."""
    return importlib.import_module(FAMILIES[family])

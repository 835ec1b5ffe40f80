"""What the commands need to know of a kernel family: one line in `FAMILIES`, one module beside this one."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cuteforge.errors import ContractError

if TYPE_CHECKING:
    import torch

# Name -> module with `demo_cases(device) -> list[Case]`, `sample_ops(device) -> {label: op}`, `OPS` (name -> function
# that makes an op on samples, from `head_dim`, `dtype`, `device` and options of its own) and `PRESETS`.
FAMILIES = {
    "csa": "cuteforge.cli.families.csa",
    "rotary": "cuteforge.cli.families.rotary",
    "attention": "cuteforge.cli.families.attention",
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


@dataclass(frozen=True)
class Presets:
    """What `warmup` compiles of a family: each of `ops` with every head dim and dtype.

    Attributes:
        ops: names of `OPS`, with options.
    """

    ops: tuple[tuple[str, Mapping[str, Any]], ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Configuration:
    """An op to compile, by plain values: it travels to other processes, and in files.

    Attributes:
        op: a name of the family's `OPS`.
        options: keywords for it, all but `device`.
    """

    family: str
    op: str
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """E.g. "decode, head dim 128, dtype bfloat16"."""
        words = ((name.replace("_", " "), value) for name, value in self.options.items())
        return ", ".join([self.op, *(name if value is True else f"{name} {value}" for name, value in words)])

    def build_op(self, device: str = "cuda"):
        """The op, on samples of `device`, which need not exist; nothing is compiled.

        Raises:
            ContractError: the family has no such op, or the op no such options.
            UnsupportedError: an option of a value that no kernel serves.
        """
        if self.family not in FAMILIES:
            raise ContractError(f"family: wanted one of {', '.join(FAMILIES)}, got {self.family!r}")
        ops = load(self.family).OPS
        if self.op not in ops:
            raise ContractError(f"op: wanted one of {', '.join(ops)} in {self.family}, got {self.op!r}")
        try:
            return ops[self.op](device=device, **self.options)
        except (TypeError, ValueError) as error:
            raise ContractError(f"{self.op}: {error}") from error


def preset_configurations(
    family: str, head_dims: Sequence[int] = (), dtypes: Sequence[str] = ()
) -> Iterator[Configuration]:
    """The presets of a family, with other head dims or dtypes where some are given."""
    presets = load(family).PRESETS
    pairs = itertools.product(head_dims or presets.head_dims, dtypes or presets.dtypes)
    for (head_dim, dtype), (op, options) in itertools.product(pairs, presets.ops):
        yield Configuration(family, op, {**options, "head_dim": head_dim, "dtype": dtype})


def split_builder(builder: str) -> tuple[str, str]:
    """Family and kernel: "cuteforge.families.csa.compressor.forward:build" is csa, compressor.forward."""
    family, _, kernel = builder.partition(":")[0].removeprefix("cuteforge.families.").partition(".")
    return family, kernel


def load(family: str) -> ModuleType:
    """The module of `family`, a key of `FAMILIES`."""
    return importlib.import_module(FAMILIES[family])

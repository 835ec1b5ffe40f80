"""What a kernel module hands to the compiler. Kernels import this file, so it is short and seldom changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Build:
    """What a builder returns.

    Attributes:
        host: the `@cute.jit` host function.
        args: example arguments: fake tensors, scalars, the stream.
        name: a C identifier, the entry's symbol.
        options: extra compiler options.
    """

    host: Callable
    args: Sequence[Any]
    name: str
    options: str = ""

"""How a compiled function of the host returns numbers. Traced; imports cutlass inside functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def store_results(results: Sequence[Any], address: Any) -> None:
    """Store whole numbers, as Int64 one after another, at an address of the host. Called while a function is traced."""
    from cutlass import Int64, cute

    pointer = cute.make_ptr(Int64, address, cute.AddressSpace.generic, assumed_align=8)
    stored = cute.make_tensor(pointer, cute.make_layout(len(results)))
    for i, result in enumerate(results):
        stored[i] = Int64(result)

"""What every family makes from its table of operands: names in a kernel, and the tensors of a compiled entry. Pure
Python."""

from __future__ import annotations

from collections.abc import Sequence


def device_name(name: str) -> str:
    """What kernels call an operand: mQ, mPageTable."""
    return "m" + "".join(word.capitalize() for word in name.split("_"))


def entry_operands(names: Sequence[str], entry: Sequence[str]) -> tuple[str | None, ...]:
    """What a compiled entry takes of an op: its own operands in its order, None for those that the op does not have.

    Args:
        names: the operands of the op.
        entry: those of the compiled entry, in its order.
    """
    return tuple(name if name in names else None for name in entry)

"""What every family makes from its table of operands: names in a kernel, and the tensors of a compiled entry. Pure
Python."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter


def device_name(name: str) -> str:
    """What kernels call an operand: mQ, mPageTable."""
    return "m" + "".join(word.capitalize() for word in name.split("_"))


class Arrangement:
    """The operands of an op -> what its compiled entry takes: None for those that the op does not have.

    Args:
        names: the operands of the op, in the order of its signature.
        entry: those of the compiled entry, in its order.

    Attributes:
        places: for each operand of the entry its index among those of the op; their number for None.
    """

    def __init__(self, names: Sequence[str], entry: Sequence[str]) -> None:
        self.places = [names.index(name) if name in names else len(names) for name in entry]
        self._pick = itemgetter(*self.places)

    def __call__(self, operands: tuple) -> tuple:
        return self._pick((*operands, None))

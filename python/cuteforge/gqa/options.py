"""Options of attention that are numbers: checked, and as the scalars of a launch. Pure Python: no torch, no cutlass."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from cuteforge.errors import ContractError

Window = tuple[int | None, int | None]
UNLIMITED: Window = (None, None)
_MOST_KEYS = 2**31 - 1  # no request has more: a longer window limits nothing


@dataclass(frozen=True)
class ScoreOptions:
    """Which scores count, and what becomes of them.

    Args:
        window: keys before and after a query's own position that it sees, None for all on that side.
        softcap: what scores are capped at, None for no cap.
    """

    causal: bool
    window: Window
    softcap: float | None

    @property
    def left(self) -> int | None:
        """Keys before a query's position that it sees."""
        return self.window[0]

    @property
    def right(self) -> int | None:
        """Keys after it, 0 with causality."""
        return 0 if self.causal else self.window[1]

    @property
    def facts(self) -> dict[str, bool]:
        """What a kernel is compiled for; that a query sees no later key is causality, however it was said."""
        return {
            "causal": self.right == 0,
            "has_left": self.left is not None,
            "has_right": bool(self.right),
            "has_softcap": self.softcap is not None,
        }


def checked_window(value: Any) -> Window:
    """`value` as a pair.

    Raises:
        ContractError: no pair of None or ints of 0 or more. A negative one, which elsewhere means no limit, is refused.
    """
    if value is None:
        return UNLIMITED
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(map(_is_limit, value)):
        raise ContractError(f"window: wanted None or (left, right), each None or an int of 0 or more, got {value!r}")
    left, right = (None if side is None else min(int(side), _MOST_KEYS) for side in value)
    return left, right


def _is_limit(side: Any) -> bool:
    return side is None or (isinstance(side, numbers.Integral) and not isinstance(side, bool) and side >= 0)


def checked_softcap(value: Any) -> float | None:
    """`value` as a float; None for 0, which is no cap.

    Raises:
        ContractError: no finite number of 0 or more; a tensor is none.
    """
    if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value) and value >= 0):
        raise ContractError(f"softcap: wanted None or a finite number of 0 or more, got {value!r}")
    return float(value) if value else None


def checked_scale(value: Any) -> float | None:
    """`value` as a float, or None.

    Raises:
        ContractError: no finite number; a tensor is none.
    """
    if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
        raise ContractError(f"softmax_scale: wanted a finite number, got {value!r}")
    return None if value is None else float(value)

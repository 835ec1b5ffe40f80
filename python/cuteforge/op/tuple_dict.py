"""The ordered dict that wrappers return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

import torch


# Names are str. To mypy a dict iterates over its keys, whatever `__iter__` says, unless they are Any.
class TupleDict(dict[Any, torch.Tensor]):
    """A dict of named results that unpacks like a tuple.

    ``r["out"]`` looks up a name, ``r[0]`` and ``r[:2]`` the values in creation order. Iterating and unpacking
    (``out, lse = r``) give the values. All else is a dict: ``in`` tests names; ``keys()``, ``items()``, ``**r``.
    """

    @overload
    def __getitem__(self, key: str | int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[torch.Tensor, ...]: ...
    def __getitem__(self, key: str | int | slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return tuple(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values())

    def __reversed__(self) -> Iterator[torch.Tensor]:
        return reversed(self.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def copy(self) -> TupleDict:
        """A shallow copy."""
        return type(self)(self)

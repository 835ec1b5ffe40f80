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

    Examples:
        >>> import torch
        >>> from cuteforge import TupleDict
        >>> results = TupleDict(out=torch.zeros(2), lse=torch.ones(3))
        >>> out, lse = results
        >>> results["lse"] is results[1] is lse
        True
        >>> list(results.copy().keys())
        ['out', 'lse']
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

"""Tiles that ask less and less of a GPU, for choosing the first that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

Tile = TypeVar("Tile")
# A tile that asks less, or None if the step has nothing left to take.
Step = Callable[[Any], Any]


def relaxed(tile: Tile, *steps: Step) -> Iterator[Tile]:
    """`tile`, then smaller ones: each time, the first step that can still take something away does."""
    while tile is not None:
        yield tile
        tile = next(filter(None, (step(tile) for step in steps)), None)


def fewer(name: str, least: int = 1) -> Step:
    """One less of the field `name`, down to `least`."""
    return lambda tile: replace(tile, **{name: getattr(tile, name) - 1}) if getattr(tile, name) > least else None


def halved(name: str, least: int = 1) -> Step:
    """Half of the field `name`, down to `least`."""
    return lambda tile: replace(tile, **{name: getattr(tile, name) // 2}) if getattr(tile, name) > least else None

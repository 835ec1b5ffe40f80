"""Calls like an earlier one, written out: compare the tensors, allocate the results, launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from cuteforge.op.allocate import current_device, ways_to_empty
from cuteforge.op.generated import code_of
from cuteforge.op.guards import Likeness, Varying
from cuteforge.op.launch import count_writes


class Launcher(NamedTuple):
    """A compiled entry on one GPU.

    Attributes:
        entry: ``entry(*operands, *scalars, current_handle)``.
        operands: names of what the entry takes, in its order; None for one that the op does not have.
        as_bytes: names of those that it takes as bytes, since a compiled entry has no type for bools.
        scalars: the run-time scalars of the op there.
        device: the index of the GPU.
        current_handle: ``current_handle(device)`` is the handle of torch's current stream.
    """

    entry: Callable[..., None]
    operands: tuple[str | None, ...]
    as_bytes: frozenset[str]
    scalars: tuple
    device: int
    current_handle: Callable[[int], int]


class Result(NamedTuple):
    """A tensor that a call allocates, contiguous; an extent of None is the length of the call."""

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Variation:
    """How other calls may differ from one and still be served like it.

    Attributes:
        length_of: the length of a call, as the name of a tensor that is given and a dim; None where the caller says it.
        growing: for a result that has the length as an extent, the dim that it is.
        varying: by the name of a given tensor, what of it may vary; see `guards.Likeness`.
        agree: whether extents that vary go together, as far as the entry does not say; asked of the tensors `agreeing`.
    """

    length_of: tuple[str, int] | None = None
    growing: Mapping[str, int] = field(default_factory=dict)
    varying: Mapping[str, Varying] = field(default_factory=dict)
    agree: Callable[..., bool] | None = None
    agreeing: Sequence[str] = ()


@dataclass(frozen=True)
class Recipe:
    """What holds for all calls of one kind, apart from the launcher.

    Attributes:
        given: the operand that each tensor of a call is; None for one that is not given.
        results: the other operands, which are allocated.
        device: where.
        scalars: of the launch, after those of the op; None where each call brings its own.
        written: names of the given tensors that are written, for torch's counts of versions.
        returned: names of what a call returns; None for its results.
        variation: how the calls may differ.
    """

    given: Sequence[str | None]
    results: Sequence[Result] = ()
    device: torch.device = torch.device("cuda")
    scalars: tuple | None = ()
    written: Sequence[str] = ()
    returned: Sequence[str] | None = None
    variation: Variation = Variation()


Serve = Callable[..., tuple | None]


class Replay(NamedTuple):
    """The launch that all calls of one kind have in common."""

    launcher: Launcher
    recipe: Recipe

    def reordered(self, given: Sequence[str | None], **varying: Varying) -> Replay:
        """The same for calls that are given their tensors in another order, and may vary otherwise in those named."""
        before = self.recipe.variation
        variation = replace(before, varying={**before.varying, **varying})
        return Replay(self.launcher, replace(self.recipe, given=given, variation=variation))

    def likeness(self, tensors: Sequence[Any]) -> Likeness:
        """How the tensors of other calls have to be like those of one."""
        given, variation = self.recipe.given, self.recipe.variation
        indices = [given.index(name) for name in variation.agreeing]
        return Likeness(tensors, [variation.varying.get(name) for name in given], variation.agree, indices)

    def written_out(self, tensors: Sequence[Any]) -> tuple[Serve, Callable[..., bool]]:
        """``serve(tensors, length=None, scalars=())`` for tensors like these, and ``is_alike(*tensors)``, as code:
        interpreting the recipe takes as long as the launch (0.5 us of 1.6).

        `serve` returns None for tensors that are not alike; otherwise it launches, and returns what the call returns.
        It raises what the entry raises. For rotary of q and k::

            def is_alike(x, k, _2, cos, sin, positions, _6, _7):
                return _2 is None and _6 is None and _7 is None and guard(x, k, cos, sin, positions)

            def serve(tensors, length=None, scalars=()):
                x, k, _2, cos, sin, positions, _6, _7, = tensors
                if not (_2 is None and _6 is None and _7 is None and guard(x, k, cos, sin, positions)):
                    return None
                length = x.shape[0]
                empty = here if current_device() == device else elsewhere
                out = empty((length, out_1, out_2, ), (out_step_0, out_step_1, out_step_2, ), out_dtype)
                k_out = empty((length, k_out_1, k_out_2, ), (k_out_step_0, k_out_step_1, k_out_step_2, ), k_out_dtype)
                entry(x, out, k, k_out, None, cos, sin, positions, scalar_0, current_handle(device))
                return (out, k_out, )
        """
        given = [name or f"_{i}" for i, name in enumerate(self.recipe.given)]
        condition, names = self.likeness(tensors).condition(given)
        body, others = self._body()
        lines = [
            f"def is_alike({', '.join(given)}):",
            f"    return {condition}",
            "",
            "def serve(tensors, length=None, scalars=()):",
            f"    {', '.join(given)}, = tensors",
            f"    if not ({condition}):",
            "        return None",
            *(f"    {line}" for line in body),
        ]
        names |= others
        exec(code_of("\n".join(lines), "replay", "exec"), names)
        return names["serve"], names["is_alike"]

    def _body(self) -> tuple[list[str], dict[str, Any]]:
        """Allocations and launch: the lines, and what is behind the names in them."""
        launcher, recipe = self
        here, elsewhere = ways_to_empty(recipe.device)
        scalars = {f"scalar_{i}": x for i, x in enumerate((*launcher.scalars, *(recipe.scalars or ())))}
        names = {
            "entry": launcher.entry, "current_handle": launcher.current_handle, "device": launcher.device,
            "current_device": current_device, "here": here, "elsewhere": elsewhere, "count_writes": count_writes,
            "uint8": torch.uint8, **scalars,
        }  # fmt: skip
        lines = []
        if recipe.results and recipe.variation.length_of is not None:
            lines.append("length = {}.shape[{}]".format(*recipe.variation.length_of))
        if recipe.results:
            lines.append("empty = here if current_device() == device else elsewhere")
        for result in recipe.results:
            source, numbers = _allocation(result)
            lines.append(source)
            names |= numbers
        operands = [f"{name}.view(uint8)" if name in launcher.as_bytes else str(name) for name in launcher.operands]
        by_call = ["*scalars"] if recipe.scalars is None else []
        lines.append(f"entry({', '.join((*operands, *scalars, *by_call))}, current_handle(device))")
        if recipe.written:
            # does not raise, or the caller would launch again: the guard tells tensors of inference mode apart
            lines.append(f"count_writes({_tuple(recipe.written)})")
        returned = [result.name for result in recipe.results] if recipe.returned is None else recipe.returned
        lines.append(f"return {_tuple(returned)}")
        return lines, names


def _allocation(result: Result) -> tuple[str, dict[str, Any]]:
    """The line that allocates a result, and the values of the names in it.

    The text is the same for all sizes, and compiled once.
    """
    name, shape = result.name, result.shape
    sizes, steps, numbers = [], [], {f"{name}_dtype": result.dtype}
    for dim, extent in enumerate(shape):
        later = shape[dim + 1 :]
        numbers[f"{name}_{dim}"] = extent
        numbers[f"{name}_step_{dim}"] = math.prod(max(n, 1) for n in later if n is not None)
        sizes.append("length" if extent is None else f"{name}_{dim}")
        steps.append(f"{name}_step_{dim} * length" if None in later else f"{name}_step_{dim}")
    return f"{name} = empty({_tuple(sizes)}, {_tuple(steps)}, {name}_dtype)", numbers


def _tuple(terms: Iterable[str]) -> str:
    """Their source."""
    return f"({''.join(f'{term}, ' for term in terms)})"

"""A launch on tensors of a known kind, written out: nothing is left to look up, and results are allocated at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from cuteforge.op.allocate import current_device, ways_to_empty
from cuteforge.op.generated import code_of
from cuteforge.op.guards import Varying
from cuteforge.op.launch import count_writes


class Launcher(NamedTuple):
    """A compiled entry on one GPU.

    Attributes:
        entry: ``entry(*operands, *scalars, raw_stream)``.
        operands: names of what the entry takes, in its order; None for one that the op does not have.
        as_bytes: names of those that it takes as bytes, since a compiled entry has no type for bools.
        scalars: the run-time scalars of the op there.
        device: the index of the GPU.
        raw_stream: ``raw_stream(device)`` is the handle of torch's current stream.
    """

    entry: Callable[..., None]
    operands: tuple[str | None, ...]
    as_bytes: frozenset[str]
    scalars: tuple
    device: int
    raw_stream: Callable[[int], int]


class Result(NamedTuple):
    """A tensor that a call allocates, contiguous; an extent of None is the length of the call."""

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Recipe:
    """What holds for all calls of one kind, apart from the launcher.

    Attributes:
        given: the operand that each tensor of a call is; None for one that is not given.
        results: the other operands, which are allocated.
        device: where.
        scalars: of the launch, after those of the op; None where each call brings its own.
        length_of: the length of a call, as the name of a tensor that is given and a dim; None where the caller says it.
        written: names of the given tensors that are written, for torch's counts of versions.
        returned: names of what a call returns; None for its results.
        varying: by the name of a given tensor, what of it may vary; see `guard_of`.
        agree: whether extents that vary go together, as far as the entry does not say; asked of the tensors `agreeing`.
    """

    given: Sequence[str | None]
    results: Sequence[Result] = ()
    device: torch.device = torch.device("cuda")
    scalars: tuple | None = ()
    length_of: tuple[str, int] | None = None
    written: Sequence[str] = ()
    returned: Sequence[str] | None = None
    varying: Mapping[str, Varying] = field(default_factory=dict)
    agree: Callable[..., bool] | None = None
    agreeing: Sequence[str] = ()


class Replay:
    """The launch that all calls of one kind have in common.

    Attributes:
        run: ``run(tensors, length=None, scalars=())`` launches on the tensors of a call, and returns what it returns.
            Raises what the entry raises.
        varying, agree, agreeing: as `guard_of` takes them.
    """

    __slots__ = ("_launcher", "_recipe", "agree", "agreeing", "run", "varying")

    def __init__(self, launcher: Launcher, recipe: Recipe) -> None:
        self._launcher, self._recipe = launcher, recipe
        self.run = _written_out(launcher, recipe)
        self.agree, self.agreeing = recipe.agree, [recipe.given.index(name) for name in recipe.agreeing]
        self.varying = [recipe.varying.get(name) for name in recipe.given]

    def reordered(self, given: Sequence[str | None], **varying: Varying) -> Replay:
        """The same for calls that are given their tensors in another order, and may vary otherwise in those named."""
        recipe = self._recipe
        return Replay(self._launcher, replace(recipe, given=given, varying={**recipe.varying, **varying}))


def _written_out(launcher: Launcher, recipe: Recipe) -> Callable[..., tuple]:
    """`Replay.run` as code: interpreting the recipe takes as long as the launch (0.5 us of 1.6).

    For rotary of q and k::

        def run(tensors, length=None, scalars=()):
            (x, k, _, _, _, cos, sin, positions, ) = tensors
            length = x.shape[0]
            empty = here if current_device() == device else elsewhere
            out = empty((length, out_1, out_2, ), (out_step_0, out_step_1, out_step_2, ), out_dtype)
            k_out = empty((length, k_out_1, k_out_2, ), (k_out_step_0, k_out_step_1, k_out_step_2, ), k_out_dtype)
            entry(x, out, k, k_out, cos, sin, positions, scalar_0, raw_stream(device))
            return (out, k_out, )
    """
    here, elsewhere = ways_to_empty(recipe.device)
    scalars = {f"scalar_{i}": x for i, x in enumerate((*launcher.scalars, *(recipe.scalars or ())))}
    names = {
        "entry": launcher.entry, "raw_stream": launcher.raw_stream, "device": launcher.device,
        "current_device": current_device, "here": here, "elsewhere": elsewhere, "count_writes": count_writes,
        "uint8": torch.uint8, **scalars,
    }  # fmt: skip
    lines = ["def run(tensors, length=None, scalars=()):", f"{_tuple(name or '_' for name in recipe.given)} = tensors"]
    if recipe.results and recipe.length_of is not None:
        lines.append("length = {}.shape[{}]".format(*recipe.length_of))
    if recipe.results:
        lines.append("empty = here if current_device() == device else elsewhere")
    for result in recipe.results:
        source, numbers = _allocation(result)
        lines.append(source)
        names |= numbers
    operands = [f"{name}.view(uint8)" if name in launcher.as_bytes else str(name) for name in launcher.operands]
    by_call = ["*scalars"] if recipe.scalars is None else []
    lines.append(f"entry({', '.join((*operands, *scalars, *by_call))}, raw_stream(device))")
    if recipe.written:
        # does not raise, or the caller would launch again: the guard tells tensors of inference mode apart
        lines.append(f"count_writes({_tuple(recipe.written)})")
    returned = [result.name for result in recipe.results] if recipe.returned is None else recipe.returned
    lines.append(f"return {_tuple(returned)}")
    exec(code_of("\n    ".join(lines), "replay", "exec"), names)
    return names["run"]


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

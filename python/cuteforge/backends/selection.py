"""How a policy function chooses: candidates that refuse in sentences, an order, and the decision as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from cuteforge.errors import UnsupportedError
from cuteforge.runtime import env

if TYPE_CHECKING:
    from cuteforge.runtime.kernel_facts import KernelFacts

ARGUMENT, CONTEXT, ENVIRONMENT, PRIORITY = "argument", "context", "environment", "priority"
# Who asks for a backend this way gets it or an error; the others fall through to the next that serves the call.
STRICT = (ARGUMENT, CONTEXT)
# A model has a handful of kinds of calls; a program that goes through more starts again.
_MAX_CHOICES = 1024

_grad_enabled = torch.is_grad_enabled


class Candidate(NamedTuple):
    """One implementation of a policy function.

    Attributes:
        refuse: facts of a call -> why it is not served, or None.
        run: takes the call's arguments.
    """

    name: str
    refuse: Callable[[Any], str | None]
    run: Callable[..., Any]


class Wish(NamedTuple):
    """Where a choice comes from, and the candidate that was asked for; None by priority."""

    source: str
    candidate: Any = None


@dataclass(frozen=True)
class Verdict:
    """What one candidate says of a call.

    Attributes:
        name: of the candidate.
        refusal: a sentence that says why it does not serve the call; None where it does.

    Examples:
        >>> import torch
        >>> from cuteforge import explain
        >>> x, freqs_cis = torch.randn(8, 4, 64), torch.randn(8, 32, 2)
        >>> explain("apply_rotary_emb", x, freqs_cis).verdicts[0]
        Verdict(name='cuda', refusal='the kernels run on CUDA, this call is on cpu')
    """

    name: str
    refusal: str | None


@dataclass(frozen=True)
class Decision:
    """Which candidate serves a call and why; prints as a table.

    Attributes:
        function: the policy function.
        chosen: name of the candidate that runs; None where the call raises UnsupportedError.
        source: ``"argument"``, ``"context"``, ``"environment"`` or ``"priority"``: what put the candidates in order.
        verdicts: of every candidate, in the order in which they are asked.
        kernel: what runs on the GPU, where a kernel of the library is chosen: architecture, tile, plan and reasons.

    Examples:
        >>> import torch
        >>> from cuteforge import explain
        >>> x, freqs_cis = torch.randn(8, 4, 64), torch.randn(8, 32, 2)
        >>> decision = explain("apply_rotary_emb", x, freqs_cis)
        >>> decision.chosen, decision.source
        ('torch_native', 'priority')
        >>> [verdict.name for verdict in decision.verdicts]
        ['cuda', 'torch_native']
    """

    function: str
    chosen: str | None
    source: str
    verdicts: tuple[Verdict, ...]
    kernel: KernelFacts | None = None

    def __str__(self) -> str:
        rows = [(v.name, "chosen" if v.name == self.chosen else v.refusal or "serves the call") for v in self.verdicts]
        width = max(len(name) for name, _ in rows)
        title = f"{self.function}: {self.chosen or 'nothing serves this call'} (by {self.source})"
        kernel = [] if self.kernel is None else str(self.kernel).split("\n")
        table = [f"  {name:<{width}}  {state}" for name, state in rows]
        return "\n".join([title, *table, *(f"  {line}" for line in kernel)])


class Policy:
    """The choices of one policy function, each made once.

    Args:
        name: of the function.
        candidates: them, in the order of their priority.
        wish_for: the argument `backend` of a call -> what is wanted here and now.
        refusal_of: (candidate, facts of a call) -> why it is not served, or None.
    """

    def __init__(
        self,
        name: str,
        candidates: Callable[[], Iterable[Any]],
        wish_for: Callable[[Any], Wish],
        refusal_of: Callable[[Any, Any], str | None] = lambda candidate, request: candidate.refuse(request),
    ) -> None:
        self._name, self._candidates, self._wish_for, self._refusal_of = name, candidates, wish_for, refusal_of
        # (facts of a call, what was asked for, environment) -> the candidate that serves it.
        self._chosen: dict[tuple, Any] = {}
        self.forget = self._chosen.clear

    def choose(self, request: Any, backend: Any, context: Any = None) -> Any:
        """The candidate that serves a call: the wished one, or the first that does not refuse.

        Args:
            request: the facts of the call.
            backend: its argument.
            context: what the context asks for.

        Raises:
            UnsupportedError: nothing serves the call; lists every refusal.
        """
        key = (request, backend, context, env.backend(), env.kernels())
        try:
            return self._chosen.get(key) or self._choose(key)
        except TypeError:
            self._wish_for(backend)  # what cannot be hashed is no backend
            raise

    def _choose(self, key: tuple) -> Any:
        chosen = self._first_that_serves(key[0], self._wish_for(key[1]))
        if len(self._chosen) >= _MAX_CHOICES:
            self._chosen.clear()
        self._chosen[key] = chosen
        return chosen

    def decide(
        self, request: Any, backend: Any, describe: Callable[[Any], KernelFacts | None] = lambda candidate: None
    ) -> Decision:
        """As `choose`, but asks every candidate and returns what they say.

        Args:
            describe: the candidate that is chosen -> the kernel that it runs.
        """
        wish = self._wish_for(backend)
        ordered = _in_order(self._candidates(), wish)
        verdicts = tuple(Verdict(candidate.name, self._refusal_of(candidate, request)) for candidate in ordered)
        eligible = verdicts[:1] if wish.source in STRICT else verdicts
        chosen = next((c for c, v in zip(ordered, eligible) if v.refusal is None), None)
        if chosen is None:
            return Decision(self._name, None, wish.source, verdicts)
        return Decision(self._name, chosen.name, wish.source, verdicts, describe(chosen))

    def _first_that_serves(self, request: Any, wish: Wish) -> Any:
        refusals, candidates = [], self._candidates()
        for candidate in [wish.candidate] if wish.source in STRICT else _in_order(candidates, wish):
            refusal = self._refusal_of(candidate, request)
            if refusal is None:
                return candidate
            refusals.append(f"{candidate.name}: {refusal}")
        asked = f", asked for by {wish.source}" if wish.source in STRICT else ""
        raise UnsupportedError(f"{self._name}: no backend serves this call{asked}: {'. '.join(refusals)}")


def _in_order(candidates: Iterable[Any], wish: Wish) -> Sequence[Any]:
    if wish.candidate is None:
        return tuple(candidates)
    return (wish.candidate, *(c for c in candidates if c is not wish.candidate))


def constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that torch.compile calls while it traces, and whose result becomes a constant of the graph.

    `torch.compiler.assume_constant_result` sets the same mark, but imports torch._dynamo first, which takes a second.
    """
    function._dynamo_marked_constant = True
    return function


@constant_result
def _is_transformed() -> bool:
    """Whether a transform of torch.func or forward mode is active, in what torch.compile traces as well."""
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def derivative_of(*tensors: torch.Tensor) -> str | None:
    """What a call has to be differentiated by: ``"graph"``, a graph of autograd in grad mode; ``"transform"``,
    torch.func
    or forward mode; or None.
    """
    if _is_transformed():
        return "transform"
    if _grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return "graph"
    return None


def dtype_named(text: str) -> torch.dtype:
    """The dtype that prints as `text`."""
    return getattr(torch, text.removeprefix("torch."))


def constants(*sizes: int) -> tuple[int, ...]:
    """Sizes as constants of the graph that torch.compile traces, even if it treats them as variables."""
    return tuple([index(size) for size in sizes])

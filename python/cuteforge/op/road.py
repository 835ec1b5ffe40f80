"""The road of a call: recall it, or validate, look up the op, and launch.

Wrappers, policy functions and torch ops all take it. A family has a `Road` for each of its wrappers, whose hooks say
what differs. An `Invocation` is the call as a value once its arguments have been checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cuteforge.errors import ContractError
from cuteforge.op import recall
from cuteforge.op.base import APIBase
from cuteforge.op.readable import readable
from cuteforge.op.replay import Recipe, Replay, Result, Variation
from cuteforge.runtime import env
from cuteforge.runtime.streams import Stream, is_capturing, record_streams, stream_context

Tensors = dict[str, torch.Tensor]
_NO_CONTEXT = nullcontext()


@dataclass(frozen=True)
class Invocation:
    """One call whose arguments have been checked, as far as results can be allocated and an op can be looked up.

    Attributes:
        inputs: the tensors to read that were given, by name.
        outputs: those to write that were given; the others are allocated.
        options: what no tensor says, as the family's road takes it.
        length: an extent of the results that no tensor says.
    """

    inputs: Tensors
    outputs: Tensors = field(default_factory=dict)
    options: Any = ()
    length: int | None = None


class Road(ABC):
    """How the calls of one wrapper are served.

    Attributes:
        inputs, outputs: names of the tensors that a caller may give, in the order of `call`.
        never_copied: names of inputs that ops read as they are, whatever their layout.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    never_copied: tuple[str, ...] = ()

    # Hooks of a family.

    @abstractmethod
    def validate(self, tensors: tuple, options: tuple, length: int | None) -> Invocation:
        """Check the arguments of a call as far as results and look-up need it; the op checks everything else.

        Raises:
            ContractError, UnsupportedError: names the argument.
        """

    @abstractmethod
    def is_followed(self, call: Invocation) -> bool:
        """Whether autograd, torch.compile or a mode follows the call, so that it has to go through the dispatcher."""

    @abstractmethod
    def dispatch(self, call: Invocation) -> tuple:
        """The results, by way of the torch op."""

    @abstractmethod
    def new_results(self, call: Invocation) -> Tensors:
        """All outputs by name, those that were given among them, in the order that a call returns them."""

    @abstractmethod
    def op_key(self, call: Invocation) -> Hashable:
        """What the op of the call is compiled for, the GPU included."""

    @abstractmethod
    def make(self, call: Invocation, results: Tensors) -> APIBase:
        """The op, not compiled."""

    def are_exact(self, options: tuple) -> bool:
        """Whether the memory may be asked for these options: 1 is no flag, though it equals True. Quick."""
        return True

    def scalars(self, op: Any, call: Invocation) -> tuple:
        """Run-time scalars of the launch, after those of the op."""
        return ()

    def kept_in_place(self, call: Invocation) -> tuple[str, ...]:
        """Names of inputs that are never copied, since the op writes them."""
        return ()

    def variation(self, op: Any, call: Invocation) -> Variation | None:
        """How later calls may differ from this one and be served like it; None if it is not to be remembered."""
        return Variation()

    # The road.

    def call(
        self, tensors: tuple, options: tuple, stream: Stream | None = None, length: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Serve a call of the wrapper.

        Args:
            tensors: those named in `inputs` and `outputs`, None for what was not given.
            options: what no tensor says.
        """
        key = None
        if stream is None and self.are_exact(options):
            key = (self, options)
            results = recall.recall(key, tensors, length)
            if results is not None:
                return results
        call = self.validate(tensors, options, length)
        with asked_stream(stream, *tensors):
            if self.is_followed(call):
                return self.dispatch(call)
            return self.launch(call, key, tensors)

    def find(self, tensors: tuple, options: tuple) -> Replay | None:
        """The replay that is remembered of a call like this one."""
        return recall.find((self, options), tensors)

    def launch(self, call: Invocation, key: Hashable = None, tensors: tuple = ()) -> tuple[torch.Tensor, ...]:
        """Serve a call on CUDA tensors that neither autograd nor torch.compile follows.

        Inputs are looked at closely only when the op refuses them: then those that it cannot read are copied, on
        torch's current stream. In checked mode the op looks at the contents of those that were given, before a copy
        cuts an index off.

        Args:
            key, tensors: what the call is remembered by; None for a call that is not.

        Raises:
            ContractError: as the op's, when copies do not help.
            UnsupportedError: as the op's, or CUTEFORGE_KERNELS=0.
        """
        results = self.new_results(call)
        try:
            op, operands = self._launch_on(call, results)
        except ContractError:
            copied = self._readable(call)
            if all(copied.inputs[name] is x for name, x in call.inputs.items()):
                raise
            if env.check() and not is_capturing():
                self.make(copied, results).check_given(tuple(call.inputs.values()))
            self._launch_on(copied, results)
        else:
            if key is not None and not op._is_empty(operands):
                recall.remember(key, tensors, self._replay, op, call, results, tensors)
        return tuple(results.values())

    def _launch_on(self, call: Invocation, results: Tensors) -> tuple[APIBase, tuple]:
        key = self.op_key(call)
        op = recall.op_of(key)
        if op is None:
            env.require_kernels()  # before anything is compiled; the launch of an op that exists asks itself
            op = recall.keep_op(key, self.make(call, results).compile())
        named = {**call.inputs, **results}
        names = op.signature.names
        if "workspace" in names:
            first = next(iter(call.inputs.values()))
            size = op.workspace_bytes_on(first.get_device())
            named["workspace"] = torch.empty(size, dtype=torch.uint8, device=first.device)
        operands = tuple([named[name] for name in names])
        op._launch(operands, None, self.scalars(op, call))
        return op, operands

    def _readable(self, call: Invocation) -> Invocation:
        kept = (*self.kept_in_place(call), *self.never_copied)
        return replace(call, inputs={n: x if n in kept else self.copy(x) for n, x in call.inputs.items()})

    # what a kernel reads of an input that it refused
    copy = staticmethod(readable)

    def _replay(self, op: Any, call: Invocation, results: Tensors, tensors: tuple) -> Replay | None:
        """The replay of calls like one that `op` has just served."""
        variation = self.variation(op, call)
        if variation is None:
            return None
        allocated = {name: x for name, x in results.items() if name not in call.outputs}
        new = [_result(name, x, variation.growing.get(name)) for name, x in allocated.items()]
        first = next(iter(results.values()))
        index = first.get_device()
        if "workspace" in op.signature.names:
            new.append(Result("workspace", (op.workspace_bytes_on(index),), torch.uint8))
        names = (*self.inputs, *self.outputs)
        given = [None if x is None else name for name, x in zip(names, tensors)]
        written = (*self.kept_in_place(call), *call.outputs)
        scalars, returned = self.scalars(op, call), tuple(results)
        return Replay(op._launcher(index), Recipe(given, new, first.device, scalars, written, returned, variation))


def _result(name: str, x: torch.Tensor, growing: int | None) -> Result:
    shape: list[int | None] = list(x.shape)
    if growing is not None:
        shape[growing] = None
    return Result(name, tuple(shape), x.dtype)


def asked_stream(stream: Any, *given: Any) -> AbstractContextManager:
    """A context for all the work of a wrapper, on the stream that was asked for; None is torch's current one.

    The stream becomes torch's current one: what is allocated, copied and launched inside belongs to it. The caller's
    tensors belong to other streams, so they are recorded on it: torch does not reuse their memory while the stream
    may still read or write it.

    Args:
        given: the arguments of the call that may be tensors; the first one is a tensor.

    Raises:
        ContractError: not a stream; a stream of another GPU; or a stream inside a compiled function, where
            torch.compile orders the launches.
    """
    if stream is None:
        return _NO_CONTEXT
    if is_dynamo_compiling():
        raise ContractError(f"stream: wanted None under torch.compile, got {type(stream).__name__}")
    if not given[0].is_cuda:
        return _NO_CONTEXT  # the op refuses the tensor by name
    device = given[0].get_device()
    record_streams(
        [x for x in given if isinstance(x, torch.Tensor) and x.is_cuda and x.get_device() == device], stream, device
    )
    return stream_context(stream, device)

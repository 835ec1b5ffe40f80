"""The road of the compressor's wrappers: what is checked, what is allocated, which op serves a call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from cuteforge.arguments import flag, integer, kind_of
from cuteforge.errors import ContractError
from cuteforge.families.csa.compressor.api import CSACompressorBackward, CSACompressorForward
from cuteforge.families.csa.compressor.checks import check_window, refuse_atomics_if_asked
from cuteforge.families.csa.compressor.operands import BACKWARD, FORWARD, inputs_of
from cuteforge.op.checks import check_layout
from cuteforge.op.replay import Variation
from cuteforge.op.road import Invocation, Road, Tensors, asked_stream
from cuteforge.op.torch_library import call_op
from cuteforge.op.tracing import is_traced, needs_op, refuse_grad

_Tensor = torch.Tensor
_CONTIGUOUS = torch.contiguous_format
MOST_ROWS = 2**31 - 1  # offsets are int32


class Options(NamedTuple):
    """What no tensor says of a call."""

    ratio: int
    coff: int
    deterministic: bool = True


class _CompressorRoad(Road):
    """What the roads of both directions share."""

    inputs = inputs_of(FORWARD)
    # of a call, as in `op.replay.Variation`
    length_of: tuple[str, int] | None = None
    growing: Mapping[str, int]

    def are_exact(self, options: tuple) -> bool:
        # ratio, head_dim and coff
        return type(options[0]) is int and type(options[1]) is not bool and type(options[2]) is int

    @abstractmethod
    def torch_op(self, call: Invocation) -> tuple[str, tuple]:
        """Name of the op of torch, and its arguments."""

    def dispatch(self, call: Invocation) -> tuple:
        name, arguments = self.torch_op(call)
        results = call_op(name, call.inputs, arguments)
        return results if isinstance(results, tuple) else (results,)

    def op_key(self, call: Invocation) -> Hashable:
        kv = call.inputs["kv"]
        return (self, kv.dtype, kv.shape[1], call.options, kv.get_device())

    def variation(self, op: Any, call: Invocation) -> Variation | None:
        """Any number of tokens, segments and rows."""
        return Variation(self.length_of, self.growing, op._varying, op._agree, op._agreeing)


class ForwardRoad(_CompressorRoad):
    """The length of a call is its number of output rows."""

    growing = {"out": 0}

    def validate(self, tensors: tuple, options: tuple, length: int | None = None) -> Invocation:
        return Invocation(dict(zip(self.inputs, tensors)), options=checked_options(tensors[0], *options), length=length)

    def is_followed(self, call: Invocation) -> bool:
        return needs_op(*(call.inputs[name] for name in ("kv", "score", "ape")))

    def torch_op(self, call: Invocation) -> tuple[str, tuple]:
        options = call.options
        return FORWARD, (*call.inputs.values(), call.length, options.ratio, options.coff)

    def new_results(self, call: Invocation) -> Tensors:
        kv = call.inputs["kv"]
        return {"out": kv.new_empty((call.length, kv.shape[1] // call.options.coff))}

    def make(self, call: Invocation, results: Tensors) -> CSACompressorForward:
        return CSACompressorForward(**call.inputs, **results, ratio=call.options.ratio, coff=call.options.coff)


class BackwardRoad(_CompressorRoad):
    """The length of a call is its number of tokens."""

    inputs = inputs_of(BACKWARD)
    length_of = ("kv", 0)
    growing = {"grad_kv": 0, "grad_score": 0}

    def are_exact(self, options: tuple) -> bool:
        return super().are_exact(options) and type(options[3]) is bool

    def validate(self, tensors: tuple, options: tuple, length: int | None = None) -> Invocation:
        *sizes, deterministic = options
        checked = checked_options(tensors[0], *sizes, flag("deterministic", deterministic))
        check_window(checked.ratio, checked.coff)  # before grad_ape gets a row for each token of it
        return Invocation(dict(zip(self.inputs, tensors)), options=checked)

    def is_followed(self, call: Invocation) -> bool:
        return is_traced(call.inputs["kv"])

    def torch_op(self, call: Invocation) -> tuple[str, tuple]:
        refuse_grad(call.inputs, call.inputs.values(), CSACompressorBackward.__name__)
        return BACKWARD, (*call.inputs.values(), *call.options)

    def new_results(self, call: Invocation) -> Tensors:
        return new_gradients(call.inputs["kv"], call.options.ratio)

    def make(self, call: Invocation, results: Tensors) -> CSACompressorBackward:
        return CSACompressorBackward(**call.inputs, **results, **call.options._asdict())

    def launch(self, call: Invocation, key: Hashable = None, tensors: tuple = ()) -> tuple:
        if not call.options.deterministic:
            refuse_atomics_if_asked()
        return super().launch(call, key, tensors)

    def variation(self, op: Any, call: Invocation) -> Variation | None:
        # a call that may use atomics is not remembered: torch's deterministic mode may be on at the next one
        return super().variation(op, call) if call.options.deterministic else None


def checked_options(kv: Any, ratio: Any, head_dim: Any, coff: Any, deterministic: bool = True) -> Options:
    """What is needed to allocate the results; the op checks everything else."""
    if isinstance(kv, _Tensor):
        check_layout("kv", kv)
    shape = kv.shape if isinstance(kv, _Tensor) else ()
    if len(shape) != 2:
        got = f"shape {tuple(shape)}" if isinstance(kv, _Tensor) else kind_of(kv)
        raise ContractError(f"kv: wanted a tensor of shape (T, coff*d), got {got}")
    ratio, coff = integer("ratio", ratio, least=1), integer("coff", coff)
    if coff not in (1, 2):
        raise ContractError(f"coff: wanted 1 or 2, got {coff}")
    head_dim = integer("head_dim", head_dim, least=1, or_none=True)
    columns = shape[1]
    if columns % coff or (head_dim is not None and columns != coff * head_dim):
        wanted = f"coff*d with coff = {coff}" + ("" if head_dim is None else f" and d = {head_dim}")
        raise ContractError(f"kv: wanted {wanted} columns, got {columns}")
    return Options(ratio, coff, deterministic)


def new_gradients(kv: torch.Tensor, ratio: int) -> Tensors:
    """Uninitialised gradients by name."""
    grads = {name: torch.empty_like(kv, memory_format=_CONTIGUOUS) for name in ("grad_kv", "grad_score")}
    return grads | {"grad_ape": kv.new_empty((ratio, kv.shape[1]), dtype=torch.float32)}


def read_row_count(inputs: tuple, options: tuple, stream: Any) -> int:
    """The last offset of the output rows, read from the device on the stream that was asked for.

    Raises:
        ContractError: names an argument that the reading depends on.
    """
    checked_options(inputs[0], *options)
    offsets = inputs[4]
    if not isinstance(offsets, _Tensor) or offsets.dim() != 1 or not len(offsets):
        raise ContractError("cu_seqlens_comp: wanted a tensor of shape (B+1), to read total_comp from")
    with asked_stream(stream, *inputs):
        count = int(offsets[-1])
    if is_traced(offsets):
        torch._check(count >= 0, lambda: "cu_seqlens_comp: wanted a last offset of 0 or more")
        torch._check(count <= MOST_ROWS, lambda: f"cu_seqlens_comp: wanted a last offset of at most {MOST_ROWS}")
    return row_count(count)


def row_count(total_comp: Any) -> int:
    """`total_comp` as a number of rows."""
    return integer("total_comp", total_comp, least=0, most=MOST_ROWS)


FORWARD_ROAD, BACKWARD_ROAD = ForwardRoad(), BackwardRoad()

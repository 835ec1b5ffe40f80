"""The road of the rotary wrappers: what is checked, what is allocated, which op serves a call."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import torch

from cuteforge.arguments import flag, kind_of
from cuteforge.errors import ContractError
from cuteforge.families.rotary.api import RotaryEmbedding, direction, positions_not_wanted
from cuteforge.op.checks import check_layout
from cuteforge.op.readable import dense
from cuteforge.op.replay import Variation
from cuteforge.op.road import Invocation, Road, Tensors
from cuteforge.op.torch_library import call_op
from cuteforge.op.tracing import needs_op

_Tensor = torch.Tensor
_CONTIGUOUS = torch.contiguous_format
TABLE = ("freqs_cis", "cos", "sin", "positions")
Tables = dict[str, torch.Tensor]  # freqs_cis, or cos, sin and positions


class RotaryRoad(Road):
    """The road of one tensor of heads, or of q and k.

    Inside, q and its result have the names that the op gives to the first tensor of heads: x and out.

    Attributes:
        heads: names of the tensors of heads.
        caller_names: what the wrapper calls heads and results.
        torch_op: the op of torch.
    """

    copy = staticmethod(dense)  # the kernel reads int64 positions

    def __init__(self, heads: tuple[str, ...], outputs: tuple[str, ...], caller_names: dict[str, str], torch_op: str):
        self.heads, self.outputs, self.caller_names, self.torch_op = heads, outputs, caller_names, torch_op
        self.inputs = (*heads, *TABLE)

    def are_exact(self, options: tuple) -> bool:
        return type(options[0]) is bool and type(options[1]) is bool

    def validate(self, tensors: tuple, options: tuple, length: int | None = None) -> Invocation:
        named = dict(zip((*self.inputs, *self.outputs), tensors))
        for name in self.heads:
            check_heads(named[name], self.caller_names[name])
        table = table_of(*(named[name] for name in TABLE))
        interleaved, inverse = options
        options = flag("interleaved", interleaved), flag("inverse", inverse)
        outputs = {name: named[name] for name in self.outputs if named[name] is not None}
        return Invocation({name: named[name] for name in self.heads} | table, outputs, options)

    def is_followed(self, call: Invocation) -> bool:
        return needs_op(*call.inputs.values(), *call.outputs.values())

    def dispatch(self, call: Invocation) -> tuple:
        inputs, outputs = call.inputs, call.outputs
        heads = tuple(inputs[name] for name in self.heads)
        operands = {self.caller_names.get(name, name): x for name, x in (inputs | outputs).items()}
        arguments = (*heads, *(inputs.get(name) for name in TABLE), *call.options)
        if outputs and all(outputs.get(name) is x for name, x in zip(self.outputs, heads)):
            call_op(f"{self.torch_op}_", operands, arguments)
            return heads
        for (name, target), x in zip(self.new_results(call).items() if outputs else (), heads):
            _check_target(self.caller_names[name], target, x)
        results = call_op(self.torch_op, operands, arguments)
        results = results if len(heads) > 1 else (results,)
        return tuple(
            outputs[name].copy_(result) if name in outputs else result for name, result in zip(self.outputs, results)
        )

    def new_results(self, call: Invocation) -> Tensors:
        # `empty_like` takes 0.5 us less than `new_empty(x.shape)`
        return {
            name: call.outputs[name]
            if name in call.outputs
            else torch.empty_like(call.inputs[head], memory_format=_CONTIGUOUS)
            for name, head in zip(self.outputs, self.heads)
        }

    def op_key(self, call: Invocation) -> Hashable:
        given, x = call.inputs, call.inputs["x"]
        if "freqs_cis" in given:
            half, index_dtype = given["freqs_cis"].shape[-2], None
        else:
            half, index_dtype = given["cos"].shape[-1], given["positions"].dtype
        sizes = (x.dim(), x.shape[-1], half)
        return ("rotary", self.heads, x.dtype, sizes, call.options[0], index_dtype, x.get_device())

    def make(self, call: Invocation, results: Tensors) -> RotaryEmbedding:
        return op_of(call.inputs, results, call.options[0])

    def scalars(self, op: Any, call: Invocation) -> tuple:
        return direction(call.options[1])

    def variation(self, op: RotaryEmbedding, call: Invocation) -> Variation:
        """Any number of tokens or batches. The shape of a result that is allocated is that of its heads."""
        new = [head for head, name in zip(self.heads, self.outputs) if name not in call.outputs]
        varying = {**op._varying, **dict.fromkeys(new, 0)}
        return Variation(length_of=("x", 0), growing=dict.fromkeys(self.outputs, 0), varying=varying)

    def launch(self, call: Invocation, key: Hashable = None, tensors: tuple = ()) -> tuple:
        try:
            return super().launch(call, key, tensors)
        except ContractError as error:
            if len(self.heads) == 1:
                raise
            raise self.in_terms_of_caller(error) from error

    def in_terms_of_caller(self, error: ContractError) -> ContractError:
        """An error of the op by the names that the wrapper has for its tensors."""
        names = "|".join(self.caller_names)
        pattern = rf"(?:^|(?<=that of )|(?<=shared with ))({names})\b"
        text = re.sub(pattern, lambda match: self.caller_names[match[1]], str(error))
        return ContractError(text)


def op_of(inputs: dict[str, Any], results: dict[str, Any], interleaved: bool) -> RotaryEmbedding:
    """The op of operands by name."""
    table = inputs["freqs_cis"] if "freqs_cis" in inputs else (inputs["cos"], inputs["sin"])
    keys = {"k": inputs["k"], "k_out": results["k_out"]} if "k" in inputs else {}
    return RotaryEmbedding(inputs["x"], table, results["out"], inputs.get("positions"), **keys, interleaved=interleaved)


def check_heads(x: Any, name: str) -> None:
    """What is needed to allocate the result; the op checks everything else."""
    if isinstance(x, _Tensor):
        check_layout(name, x)
    if not isinstance(x, _Tensor) or x.dim() not in (3, 4):
        got = f"shape {tuple(x.shape)}" if isinstance(x, _Tensor) else kind_of(x)
        raise ContractError(f"{name}: wanted a tensor of shape (T, H, D) or (B, L, H, D), got {got}")


def table_of(freqs_cis: Any, cos: Any, sin: Any, positions: Any) -> Tables:
    """What was given of the two kinds of table, checked as far as the look-up of the op needs it."""
    if (freqs_cis is None) == (cos is None and sin is None):
        got = "none" if freqs_cis is None else "both"
        raise ContractError(f"freqs_cis: wanted either freqs_cis or cos and sin, got {got}")
    if freqs_cis is None:
        table = {"cos": cos, "sin": sin, "positions": positions}
    else:
        table = {"freqs_cis": freqs_cis}
    for name, tensor in table.items():
        if not isinstance(tensor, _Tensor):
            raise ContractError(f"{name}: wanted a tensor, got {kind_of(tensor)}")
    for name, tensor in table.items():
        check_layout(name, tensor)
    if freqs_cis is None:
        if cos.dim() != 2:
            raise ContractError(f"cos: wanted shape (max_pos, rotary_dim/2), got {tuple(cos.shape)}")
        return table
    if positions is not None:
        raise positions_not_wanted(positions)
    if freqs_cis.dim() < 2:
        raise ContractError(f"freqs_cis: wanted shape (T, rotary_dim/2, 2), got {tuple(freqs_cis.shape)}")
    return table


def _check_target(name: str, target: Any, x: torch.Tensor) -> None:
    """Refuse what a copy would convert or broadcast."""
    if isinstance(target, _Tensor):
        check_layout(name, target)
    if isinstance(target, _Tensor) and (target.shape != x.shape or target.dtype != x.dtype):
        wanted, got = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (x, target))
        raise ContractError(f"{name}: wanted {wanted}, got {got}")


ONE = RotaryRoad(("x",), ("out",), {"x": "x", "out": "out"}, "rotary")
QUERIES_AND_KEYS = RotaryRoad(
    ("x", "k"), ("out", "k_out"), {"x": "q", "k": "k", "out": "q_out", "k_out": "k_out"}, "rotary_qk"
)

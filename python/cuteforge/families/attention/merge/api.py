"""The join of two partial results as a class, and as one call that allocates."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from cuteforge.arguments import kind_of
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.attention.merge.config import ACCESS_BYTES, MergeTraits
from cuteforge.families.attention.problem import MAX_HEAD_DIM
from cuteforge.op.base import APIBase, Sample
from cuteforge.op.readable import dense
from cuteforge.op.road import Invocation, Road, Tensors
from cuteforge.op.signature import Dims, Operand, Signature, TensorSpec
from cuteforge.op.torch_library import call_op, check_layout, is_traced, refuse_grad
from cuteforge.op.tuple_dict import TupleDict
from cuteforge.runtime.arch import Arch
from cuteforge.runtime.compile_cache import KernelKey
from cuteforge.runtime.streams import Stream

FLOATS = ("bfloat16", "float16", "float32")
INPUT_NAMES = ("o_a", "lse_a", "o_b", "lse_b")
# By the rank of o: layout, dims of o and of lse.
_LAYOUTS = {4: ("batch", "B L H D", "B H L"), 3: ("packed", "T H D", "H T")}


@functools.cache
def signature_of(rank: int) -> Signature:
    """The operands of one layout, in the order of the compiled entry."""
    _, o, lse = _LAYOUTS[rank]

    def part(suffix: str, dtypes: tuple[str, ...]) -> tuple[Operand, Operand]:
        rows = Operand(f"o_{suffix}", o, dtypes, align_bytes=ACCESS_BYTES)
        return rows, Operand(f"lse_{suffix}", lse, ("float32",), align_bytes=4)

    return Signature(
        *part("a", FLOATS),
        *part("b", ("=o_a",)),
        Operand("out", o, ("=o_a",), align_bytes=ACCESS_BYTES, role="out", in_place_of="o_a"),
        Operand("lse", lse, ("float32",), align_bytes=4, role="out", in_place_of="lse_a"),
    )


class MergeState(APIBase):
    """Joins the results of attention over two disjoint sets of keys into that over both.

    Dims: B batch, L query tokens, T packed tokens, H heads, D = 8, 16, ... 256.

    Args:
        o_a, o_b, out: ``(B, L, H, D)`` or ``(T, H, D)`` bf16, fp16 or fp32, one dtype. Any strides; last dim contiguous, rows 16-byte aligned.
        lse_a, lse_b, lse: ``(B, H, L)`` or ``(H, T)`` fp32, natural log; last dim contiguous.

    `out` may be `o_a`, and `lse` `lse_a`, to add to a running result; they overlap nothing otherwise. A part whose lse is -inf has seen no key:
    the other stays as it is, and what the part holds, NaN too, does not matter. Two such parts give 0 and -inf.
    All sizes but D may differ from call to call without compiling again.

    ``execute(o_a, lse_a, o_b, lse_b, out, lse, stream=None)`` writes all of `out` and `lse`.

    Numerics: fp32, the weights normalised before they are used, one rounding at the store.
    """

    def __init__(self, o_a: Sample, lse_a: Sample, o_b: Sample, lse_b: Sample, out: Sample, lse: Sample) -> None:
        self._rank = len(TensorSpec.of(o_a, "o_a").shape)
        if self._rank not in _LAYOUTS:
            raise ContractError(f"o_a: wanted shape (B, L, H, D) or (T, H, D), got {self._rank} dims")
        super().__init__(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b, out=out, lse=lse)

    @property
    def signature(self) -> Signature:
        return signature_of(self._rank)

    def _check_relations(self, dims: Dims) -> None:
        if dims["D"] % 8 or not 0 < dims["D"] <= MAX_HEAD_DIM:
            raise UnsupportedError(f"o_a: the kernel serves D = 8, 16, ... {MAX_HEAD_DIM}, got D = {dims['D']}")

    def _kernel_key(self, dims: Dims, arch: Arch) -> KernelKey:
        traits = MergeTraits(self.samples["o_a"].dtype, dims["D"], _LAYOUTS[self._rank][0])
        return KernelKey("cuteforge.families.attention.merge.kernel:build", traits, arch.name)

    def _is_empty(self, operands: tuple) -> bool:
        return operands[4].numel() == 0  # out


def merge_state(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, *, stream: Stream | None = None
) -> TupleDict:
    """Join the results of attention over two disjoint sets of keys; see `MergeState` for the operation, shapes and numerics.

    Args:
        o_a, o_b: ``(B, L, H, D)`` or ``(T, H, D)``.
        lse_a, lse_b: ``(B, H, L)`` or ``(H, T)`` fp32.
        stream: where allocation, copies and launch happen. None is torch's current stream on o_a's device, and the only
            choice under torch.compile.

    Returns:
        ``TupleDict(out, lse)``, shapes and dtypes of o_a and lse_a.

    If the kernel cannot read an input's strides or alignment, the input is copied first, on the launch stream. Never
    falls back to another implementation.

    Raises:
        ContractError: the arguments contradict each other, or one requires grad in grad mode; names the argument. Nothing was launched.
        UnsupportedError: a head dim or a GPU that the kernel does not serve.
    """
    results = ROAD.call((o_a, lse_a, o_b, lse_b), (), stream)
    return TupleDict(out=results[0], lse=results[1])


class MergeRoad(Road):
    """The road of `merge_state`."""

    inputs = INPUT_NAMES
    copy = staticmethod(dense)

    def validate(self, tensors: tuple, options: tuple = (), length: int | None = None) -> Invocation:
        check_outputs(tensors[0])
        refuse_grad(INPUT_NAMES, tensors, "merge_state")
        return Invocation(dict(zip(INPUT_NAMES, tensors)))

    def is_followed(self, call: Invocation) -> bool:
        return is_traced(call.inputs["o_a"])

    def dispatch(self, call: Invocation) -> tuple:
        return call_op("merge_state", call.inputs, tuple(call.inputs.values()))

    def new_results(self, call: Invocation) -> Tensors:
        return dict(zip(("out", "lse"), new_merged(call.inputs["o_a"])))

    def op_key(self, call: Invocation) -> Hashable:
        o_a = call.inputs["o_a"]
        return ("merge_state", o_a.dtype, o_a.dim(), o_a.shape[-1], o_a.get_device())

    def make(self, call: Invocation, results: Tensors) -> MergeState:
        return MergeState(**call.inputs, **results)


ROAD = MergeRoad()


def new_merged(o_a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (out, lse)."""
    *batch, tokens, heads, _ = o_a.shape
    return o_a.new_empty(o_a.shape), o_a.new_empty((*batch, heads, tokens), dtype=torch.float32)


def check_outputs(o_a: Any) -> None:
    """What is needed to allocate the results; the op checks everything else."""
    if isinstance(o_a, torch.Tensor):
        check_layout("o_a", o_a)
    if not isinstance(o_a, torch.Tensor) or o_a.dim() not in _LAYOUTS:
        got = f"shape {tuple(o_a.shape)}" if isinstance(o_a, torch.Tensor) else kind_of(o_a)
        raise ContractError(f"o_a: wanted a tensor of shape (B, L, H, D) or (T, H, D), got {got}")

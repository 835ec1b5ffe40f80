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
from cuteforge.op.checks import check_layout
from cuteforge.op.dims import Dims
from cuteforge.op.readable import dense
from cuteforge.op.road import Invocation, Road, Tensors
from cuteforge.op.signature import Operand, Signature
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.op.torch_library import call_op
from cuteforge.op.tracing import is_traced, refuse_grad
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
    """Joins the results of attention over two disjoint sets of keys into the result over both.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) * o_a + exp(lse_b - lse) * o_b`` (the online
    softmax of arXiv 1805.02867).

    Dims: B batch, L query tokens, T packed tokens, H heads, D = 8, 16, ... 256.

    Args:
        o_a, o_b, out: ``(B, L, H, D)`` or ``(T, H, D)``; bf16, fp16 or fp32, all of one dtype. Any strides, if the last
            dim is contiguous and every row starts at a multiple of 16 bytes.
        lse_a, lse_b, lse: ``(B, H, L)`` or ``(H, T)`` fp32, natural logarithms; the last dim is contiguous.

    `out` may be `o_a`, and `lse` may be `lse_a`, to add to a running result. They overlap nothing else. A part whose
    lse is -inf has seen no key: the other part stays as it is, and what the empty part holds does not matter, NaN
    included. Two empty parts give 0 and -inf. All sizes but D may differ from call to call without compiling again.

    ``execute(o_a, lse_a, o_b, lse_b, out, lse, stream=None)`` writes all of `out` and `lse`.

    Numerics: fp32; the weights are normalised before they are used, and the result is rounded once.

    Raises:
        ContractError: the samples contradict each other; names the operand.
        UnsupportedError: by `check_support`, a head dim or a GPU that the kernel does not serve.

    Examples:
        >>> import torch
        >>> from cuteforge import MergeState
        >>> o_a, o_b = torch.randn(2, 8, 4, 64, device="cuda")  # 8 tokens of 4 heads
        >>> lse_a, lse_b = torch.zeros(2, 4, 8, device="cuda")  # both sets of keys weigh the same
        >>> out, lse = torch.empty_like(o_a), torch.empty_like(lse_a)
        >>> op = MergeState(o_a, lse_a, o_b, lse_b, out, lse).compile()
        >>> op.signature.names
        ('o_a', 'lse_a', 'o_b', 'lse_b', 'out', 'lse')
        >>> op.execute(o_a, lse_a, o_b, lse_b, out, lse)
        >>> torch.testing.assert_close(out, (o_a + o_b) / 2)
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
    """Join the results of attention over two disjoint sets of keys; see `MergeState` for the operation, shapes and
    numerics.

    Args:
        o_a, o_b: ``(B, L, H, D)`` or ``(T, H, D)``.
        lse_a, lse_b: ``(B, H, L)`` or ``(H, T)`` fp32.
        stream: where allocation, copies and launch happen. None is torch's current stream on o_a's device, and the only
            choice under torch.compile.

    Returns:
        ``TupleDict(out, lse)``: new tensors with the shapes and dtypes of o_a and lse_a.

    If the kernel cannot read an input's strides or alignment, the input is copied first, on the launch stream. Never
    falls back to another implementation.

    Raises:
        ContractError: the arguments contradict each other, or one requires grad in grad mode; names the argument.
            Nothing was launched.
        UnsupportedError: a head dim or a GPU that the kernel does not serve.

    Examples:
        >>> import torch
        >>> from cuteforge import gqa_decode_wrapper, merge_state
        >>> q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 256, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> first = gqa_decode_wrapper(q, k[:, :100], v[:, :100], return_lse=True)
        >>> second = gqa_decode_wrapper(q, k[:, 100:], v[:, 100:], return_lse=True)
        >>> out, lse = merge_state(*first, *second)
        >>> bool((out - gqa_decode_wrapper(q, k, v)["out"]).abs().max() < 0.02)
        True
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

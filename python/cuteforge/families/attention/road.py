"""The road of the attention wrappers: what is checked, what is allocated, which op serves a call."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from cuteforge.arguments import flag, kind_of
from cuteforge.errors import ContractError
from cuteforge.families.attention.api import (
    GQADecode,
    GQAPrefill,
    PagedGQADecode,
    PagedGQAPrefill,
    decode_rows,
)
from cuteforge.families.attention.base import AttentionOp
from cuteforge.families.attention.forward.config import MANY_KEYS, ROW_BLOCK, Load, are_many
from cuteforge.families.attention.forward_sm90a.config import few_rows
from cuteforge.families.attention.operands import (
    APPENDED,
    DECODE,
    PAGED_DECODE,
    PAGED_PREFILL,
    POOLS,
    PREFILL,
    inputs_of,
)
from cuteforge.families.attention.options import (
    Window,
    checked_scale,
    checked_softcap,
    checked_splits,
    checked_window,
)
from cuteforge.op.checks import check_layout
from cuteforge.op.replay import Variation
from cuteforge.op.road import Invocation, Road, Tensors
from cuteforge.op.torch_library import call_op
from cuteforge.op.tracing import is_traced, refuse_grad
from cuteforge.runtime.arch import resolve_arch

_Tensor = torch.Tensor
_CONTIGUOUS = torch.contiguous_format
# Shapes of q by rank.
_PACKED_QUERIES = {3: "(T, Hq, D)"}
_QUERIES = {
    GQADecode: {4: "(B, L, Hq, D)"},
    GQAPrefill: {4: "(B, L, Hq, D)"},
    PagedGQADecode: {4: "(B, L, Hq, D)", 3: "(B, Hq, D)"},
}
# The torch op of each class, and the one that writes the pools.
OPS = {GQADecode: DECODE, GQAPrefill: PREFILL, PagedGQADecode: PAGED_DECODE, PagedGQAPrefill: PAGED_PREFILL}
APPEND_OP = f"{PAGED_DECODE}_append"
DECODE_OPS = (GQADecode, PagedGQADecode)


class Options(NamedTuple):
    """What no tensor says of a call; `num_splits` is None in prefill."""

    causal: bool
    window: Window
    softcap: float | None
    num_splits: int | None
    softmax_scale: float | None
    return_lse: bool

    @property
    def compiled(self) -> dict[str, Any]:
        """Those that an op is made with."""
        options = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        return options if self.num_splits is None else options | {"num_splits": self.num_splits}


class AttentionRoad(Road):
    """The road of one wrapper."""

    outputs = ("out",)
    never_copied = ("bias",)  # any strides are read, and a copy of expanded ones may be very large

    def __init__(self, op: type[AttentionOp]) -> None:
        self.op = op
        self.inputs = inputs_of(OPS[op])

    def are_exact(self, options: tuple) -> bool:
        return type(options[0]) is bool and type(options[-1]) is bool

    def validate(self, tensors: tuple, options: tuple, length: int | None = None) -> Invocation:
        named = dict(zip((*self.inputs, *self.outputs), tensors))
        given = {name: x for name, x in named.items() if x is not None}
        for name, x in given.items():
            if not isinstance(x, _Tensor):
                raise ContractError(f"{name}: wanted a torch.Tensor, got {kind_of(x)}")
        self.check_queries(named)
        causal, window, softcap, splits, scale, return_lse = options
        checked = Options(
            flag("causal", causal), checked_window(window), checked_softcap(softcap), checked_splits(splits),
            checked_scale(scale, is_traced(tensors[0])), flag("return_lse", return_lse),
        )  # fmt: skip
        outputs = {"out": given.pop("out")} if "out" in given else {}
        refuse_grad(given, given.values(), self.op.__name__)
        return Invocation(given, outputs, checked)

    def check_queries(self, tensors: dict[str, Any]) -> None:
        """What is needed to allocate the results; the op checks everything else.

        Args:
            tensors: the inputs by name, None for those not given.
        """
        op = self.op
        for name in op._REQUIRED[:-1]:
            if not isinstance(tensors[name], _Tensor):
                raise ContractError(f"{name}: wanted a torch.Tensor, got {kind_of(tensors[name])}")
            check_layout(name, tensors[name])
        op._check_presence({name: x for name, x in tensors.items() if x is not None})
        is_packed = op is PagedGQAPrefill or tensors.get("cu_seqlens_q") is not None
        shapes = _PACKED_QUERIES if is_packed else _QUERIES[op]
        rank = tensors["q"].dim()
        if rank not in shapes:
            raise ContractError(f"q: wanted shape {' or '.join(shapes.values())}, got {rank} dims")
        if is_packed and tensors["cu_seqlens_q"].dim() != 1:
            raise ContractError(f"cu_seqlens_q: wanted shape (B+1), got {tensors['cu_seqlens_q'].dim()} dims")
        ranks = (3, 4) if "k_cache" in tensors else (rank,)
        for name in op._REQUIRED[1:3]:
            if tensors[name].dim() not in ranks:
                raise ContractError(f"{name}: wanted {' or '.join(map(str, ranks))} dims, got {tensors[name].dim()}")

    def is_followed(self, call: Invocation) -> bool:
        return is_traced(call.inputs["q"])

    def dispatch(self, call: Invocation) -> tuple:
        given, options = call.inputs, call.options
        appends = any(name in given for name in APPENDED)
        inputs = [given.get(name) for name in self.inputs if appends or name not in APPENDED]
        scalars = [options.softmax_scale, options.causal, *options.window, options.softcap]
        if self.op in DECODE_OPS:
            scalars.append(options.num_splits)
        name = APPEND_OP if appends else OPS[self.op]
        out, lse = call_op(name, given | call.outputs, (*inputs, *scalars))
        return (_copied(out, call.outputs["out"]) if call.outputs else out, lse)

    def new_results(self, call: Invocation) -> Tensors:
        """Uninitialised out and lse, but what was given."""
        given = call.inputs
        q, values = given["q"], given["v" if "v" in given else "v_cache"]
        if call.outputs:
            results = dict(call.outputs)
        elif q.shape[-1] == values.shape[-1]:
            results = {"out": torch.empty_like(q, memory_format=_CONTIGUOUS)}
        else:
            results = {"out": q.new_empty((*q.shape[:-1], values.shape[-1]))}
        if call.options.return_lse:
            if "cu_seqlens_q" in given:
                shape = (q.shape[1], q.shape[0])
            else:
                shape = (q.shape[0], q.shape[-2], q.shape[1] if q.dim() == 4 else 1)
            results["lse"] = q.new_empty(shape, dtype=torch.float32)
        return results

    def op_key(self, call: Invocation) -> Hashable:
        given, options = call.inputs, call.options
        q, keys, values = (given[name] for name in self.op._REQUIRED[:3])
        if self.op in DECODE_OPS:
            rows = min(-(-decode_rows(q.shape, keys.shape[-2]) // ROW_BLOCK), 4), self._has_many_tiles(q, keys, values)
        else:
            rows = q.numel() <= _most_elems_of_few_rows(given)
        mask_rank = given["mask"].dim() if "mask" in given else 0
        bias_dtype = given["bias"].dtype if "bias" in given else None
        sizes = (q.shape[-1], values.shape[-1], q.dim(), keys.dim(), mask_rank, bias_dtype, rows)
        # of the options all but the scale, which comes with each launch
        return (self.op, tuple(given), q.dtype, sizes, options._replace(softmax_scale=None), q.get_device())

    def _has_many_tiles(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """What a decode's tile is chosen by, beside its rows."""
        if not q.is_cuda:
            return False  # the op refuses it by name
        load, widest = Load(q.shape[0] * keys.shape[-2], keys.shape[1]), max(q.shape[-1], values.shape[-1])
        return are_many(self.op is PagedGQADecode, widest, load, resolve_arch(None, q.get_device()).num_sms)

    def make(self, call: Invocation, results: Tensors) -> AttentionOp:
        return self.op(**call.inputs, **results, **call.options.compiled)

    def scalars(self, op: AttentionOp, call: Invocation) -> tuple:
        return (op._scale_of(call.options.softmax_scale),)

    def kept_in_place(self, call: Invocation) -> tuple[str, ...]:
        return POOLS if "new_k" in call.inputs else ()

    def variation(self, op: AttentionOp, call: Invocation) -> Variation:
        """The number of tokens and of keys may differ: the entry compares them, but for those of a mask or bias. From
        one decode to the next there is a key more."""
        given = call.inputs
        tokens = _token_dim(given)
        # what has scores' extents
        by_score = {name: given[name].dim() - 1 for name in ("mask", "bias") if name in given}
        if call.outputs or (by_score and tokens == 0):
            return Variation()
        varying = {"k": tokens, "v": tokens} if "k" in given else {}
        if by_score:
            varying |= by_score
            if "k" not in given:
                return Variation(varying=varying)
            return Variation(varying=varying, agree=_cover_keys, agreeing=("k", *by_score))
        if self.op in DECODE_OPS:
            if "k" not in given:
                return Variation(varying=varying)
            # as many keys as another tile is better for are another call
            are_few = given["k"].shape[1] < MANY_KEYS
            return Variation(varying=varying, agree=lambda k: (k.shape[1] < MANY_KEYS) == are_few, agreeing=("k",))
        # without tokens nothing is launched, and as many as another tile is better for are another call
        most = _most_elems_of_few_rows(given)
        least, most = (1, most) if given["q"].numel() <= most else (most + 1, math.inf)
        return Variation(
            length_of=("q", tokens),
            growing={"out": tokens, "lse": -1},
            varying={"q": tokens, **varying},
            agree=lambda q: least <= q.numel() <= most,
            agreeing=("q",),
        )


def _token_dim(given: Tensors) -> int:
    return 0 if "cu_seqlens_q" in given else 1


def _cover_keys(k: torch.Tensor, *by_score: torch.Tensor) -> bool:
    return all(x.shape[-1] == k.shape[1] for x in by_score)


def _most_elems_of_few_rows(given: Tensors) -> int:
    """Elements of q up to which prefill has few rows: what an op's tile is chosen by."""
    q, keys = given["q"], given["k" if "k" in given else "k_cache"]
    if not q.is_cuda:
        return 0  # the op refuses it by name
    requests = given["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in given else q.shape[0]
    return few_rows(requests, keys.shape[-2], resolve_arch(None, q.get_device()).num_sms) * q.shape[-1]


def _copied(result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` with the result in it. Refuses what a copy would convert or broadcast."""
    if out.shape != result.shape or out.dtype != result.dtype:
        wanted, got = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (result, out))
        raise ContractError(f"out: wanted {wanted}, got {got}")
    return out.copy_(result)


ROADS: dict[type, AttentionRoad] = {op: AttentionRoad(op) for op in OPS}

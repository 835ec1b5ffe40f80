"""One-call attention: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

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
from cuteforge.families.attention.forward.config import ROW_BLOCK
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
from cuteforge.families.attention.options import Window, checked_scale, checked_softcap, checked_splits, checked_window
from cuteforge.op import recall
from cuteforge.op.base import TupleDict
from cuteforge.op.cache import readable, run_op
from cuteforge.op.torch_library import asked_stream, call_op, check_layout, is_traced, refuse_grad
from cuteforge.runtime.arch import resolve_arch
from cuteforge.runtime.streams import Stream

_Tensor = torch.Tensor
_CONTIGUOUS = torch.contiguous_format
# Shapes of q by rank.
_PACKED_QUERIES = {3: "(T, Hq, D)"}
_QUERIES = {
    GQADecode: {4: "(B, L, Hq, D)"},
    GQAPrefill: {4: "(B, L, Hq, D)"},
    PagedGQADecode: {4: "(B, L, Hq, D)", 3: "(B, Hq, D)"},
}
# The torch op of each class, the one that writes the pools, and what the wrappers take.
OPS = {GQADecode: DECODE, GQAPrefill: PREFILL, PagedGQADecode: PAGED_DECODE, PagedGQAPrefill: PAGED_PREFILL}
APPEND_OP = f"{PAGED_DECODE}_append"
_INPUTS = {op: inputs_of(name) for op, name in OPS.items()}


def gqa_decode_wrapper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seqlens_k: torch.Tensor | None = None, mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, causal: bool = False, softmax_scale: float | None = None, window: Window | None = None,
    softcap: float | None = None, num_splits: int | None = None, return_lse: bool = False, out: torch.Tensor | None = None,
    stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of a few query tokens over dense keys and values; see `GQADecode` for the operation, arguments and
    numerics.

    Args:
        q, k, v: ``(B, L, Hq, D)``, ``(B, S, Hkv, D)``, ``(B, S, Hkv, Dv)``, bf16 or fp16 on one GPU.
        seqlens_k: ``(B,)`` int32, or int64, which is converted.
        sinks: ``(Hq,)`` fp32.
        return_lse: also return the log-sum-exp.
        out: where to write the result; it overlaps no input. None allocates it.
        stream: where allocation, copies and launch happen. None is torch's current stream on q's device, and the only
            choice under torch.compile.

    Returns:
        ``TupleDict(out=(B, L, Hq, Dv))`` in the dtype of q, with ``lse=(B, Hq, L)`` fp32 if asked for.

    If the kernel cannot read an input's strides or alignment, the input is copied first, on the launch stream. Never
    falls back to another implementation.

    Raises:
        ContractError: the arguments contradict each other, or one requires grad in grad mode; names the argument.
            Nothing was launched.
        UnsupportedError: a head dim or a GPU that the kernel does not serve.

    Examples:
        >>> import torch
        >>> from cuteforge import gqa_decode_wrapper
        >>> q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> seqlens_k = torch.tensor([512, 1], device="cuda", dtype=torch.int32)
        >>> out, lse = gqa_decode_wrapper(q, k, v, seqlens_k=seqlens_k, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 1, 32, 128]), torch.Size([2, 32, 1]))
        >>> torch.equal(out[1, 0], v[1, 0].repeat_interleave(4, dim=0))  # request 1 has one key
        True
    """
    tensors = (q, k, v, seqlens_k, mask, sinks)
    return _attend(GQADecode, tensors, out, return_lse, stream, softmax_scale, (causal, window, softcap, num_splits))


def gqa_prefill_wrapper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None, mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None, return_lse: bool = False,
    out: torch.Tensor | None = None, stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of many query tokens, dense or packed.

    See `GQAPrefill` for the operation, and `gqa_decode_wrapper` for `return_lse`, `out`, `stream`, copies and errors.
    Index tensors may be int64, which is converted.

    Returns:
        ``TupleDict(out=(B, L, Hq, Dv))``, or ``(T, Hq, Dv)`` if packed, with ``lse=(B, Hq, L)`` or ``(Hq, T)`` if asked
            for.

    Examples:
        >>> import torch
        >>> from cuteforge import gqa_prefill_wrapper
        >>> q = torch.randn(25, 32, 128, device="cuda", dtype=torch.bfloat16)  # prompts of 20 and 5 tokens, packed
        >>> k, v = torch.randn(2, 25, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)
        >>> packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        >>> out = gqa_prefill_wrapper(q, k, v, **packed, causal=True, window=(8, 0))["out"]
        >>> out.shape
        torch.Size([25, 32, 128])
        >>> torch.equal(out[20], v[20].repeat_interleave(4, dim=0))  # the first query of request 1 sees one key
        True
    """
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqlens_k, mask, sinks)
    return _attend(GQAPrefill, tensors, out, return_lse, stream, softmax_scale, (causal, window, softcap))


def paged_gqa_decode_wrapper(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, *, seqlens_k: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None, page_table_rows: torch.Tensor | None = None, new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None, mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, window: Window | None = None, softcap: float | None = None, num_splits: int | None = None,
    return_lse: bool = False, out: torch.Tensor | None = None, stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of a few query tokens over pages.

    See `PagedGQADecode` for the operation, and `gqa_decode_wrapper` for `return_lse`, `out`, `stream`, copies and
    errors. Index tensors may be int64, which is converted. With `new_k` and `new_v` the call writes the pools. They are
    then never copied: pools whose layout the kernel does not take are refused by name.

    Returns:
        ``TupleDict(out)``, of q's shape with Dv in place of D, with ``lse=(B, Hq, L)`` if asked for.

    Examples:
        >>> import torch
        >>> from cuteforge import paged_gqa_decode_wrapper
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> seqlens_k = torch.tensor([20, 5], device="cuda", dtype=torch.int32)  # the new tokens included
        >>> q = torch.randn(2, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> new = dict(zip(("new_k", "new_v"), torch.randn(2, 2, 8, 128, device="cuda", dtype=torch.bfloat16)))
        >>> out = paged_gqa_decode_wrapper(q, k_cache, v_cache, page_table, seqlens_k=seqlens_k, **new)["out"]
        >>> torch.equal(k_cache[7, 3], new["new_k"][0])  # token 19 of request 0 is stored: page 7, slot 3
        True
    """
    tensors = (q, k_cache, v_cache, page_table, seqlens_k, kv_indptr, page_table_rows, new_k, new_v, mask, sinks)
    return _attend(
        PagedGQADecode, tensors, out, return_lse, stream, softmax_scale, (causal, window, softcap, num_splits)
    )


def paged_gqa_prefill_wrapper(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, *,
    seqlens_k: torch.Tensor | None = None, kv_indptr: torch.Tensor | None = None, page_table_rows: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
    window: Window | None = None, softcap: float | None = None, return_lse: bool = False, out: torch.Tensor | None = None,
    stream: Stream | None = None,
) -> TupleDict:  # fmt: skip
    """Attention of packed query tokens over pages.

    See `PagedGQAPrefill` for the operation, and `gqa_decode_wrapper` for `return_lse`, `out`, `stream`, copies and
    errors. Index tensors may be int64, which is converted.

    Returns:
        ``TupleDict(out=(T, Hq, Dv))``, with ``lse=(Hq, T)`` if asked for.

    Examples:
        >>> import torch
        >>> from cuteforge import paged_gqa_prefill_wrapper
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)  # prompts of 20 and 5 tokens
        >>> q, seqlens_k = torch.randn(25, 32, 128, device="cuda", dtype=torch.bfloat16), cu_seqlens.diff()
        >>> options = {"seqlens_k": seqlens_k, "causal": True, "return_lse": True}
        >>> out, lse = paged_gqa_prefill_wrapper(q, k_cache, v_cache, page_table, cu_seqlens, **options)
        >>> out.shape, lse.shape
        (torch.Size([25, 32, 128]), torch.Size([32, 25]))
    """
    tensors = (q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, kv_indptr, page_table_rows, mask, sinks)
    return _attend(PagedGQAPrefill, tensors, out, return_lse, stream, softmax_scale, (causal, window, softcap))


def attn_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None
) -> torch.Tensor:  # fmt: skip
    """``gqa_decode_wrapper(...)["out"]`` under the argument names that model code uses. Never another implementation.

    Args:
        q, k, v: ``(B, L, Hq, D)``, ``(B, S, Hkv, D)``, ``(B, S, Hkv, Dv)``, bf16 or fp16, with L from 1 to 16.
        mask: bool, True keeps a score; shapes as in `GQADecode`.
        is_causal: as `causal` in `GQADecode`.
        scale: of the scores; None is ``D**-0.5``.

    Returns:
        ``(B, L, Hq, Dv)``, dtype of q.

    Raises:
        ContractError: the arguments contradict each other; names the argument as the wrapper does.
        RuntimeError: the kernel does not run here (UnsupportedError).

    Examples:
        >>> import torch
        >>> from cuteforge import attn_decode
        >>> q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> mask = torch.arange(512, device="cuda") < torch.tensor([[512], [40]], device="cuda")  # (B, S)
        >>> attn_decode(q, k, v, mask).shape
        torch.Size([2, 1, 32, 128])
    """
    return gqa_decode_wrapper(q, k, v, mask=mask, causal=is_causal, softmax_scale=scale)["out"]


def attn_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None
) -> torch.Tensor:  # fmt: skip
    """``gqa_prefill_wrapper(...)["out"]`` of dense tensors; arguments, result and errors as `attn_decode`, with any L.

    Examples:
        >>> import torch
        >>> from cuteforge import attn_prefill
        >>> q = torch.randn(2, 64, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> attn_prefill(q, k, v, is_causal=True).shape
        torch.Size([2, 64, 32, 128])
    """
    return gqa_prefill_wrapper(q, k, v, mask=mask, causal=is_causal, softmax_scale=scale)["out"]


def attn_paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seqlens_k: torch.Tensor,
    mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """``paged_gqa_decode_wrapper(...)["out"]``; see `PagedGQADecode` for the shapes, and `attn_decode` for the rest.

    Examples:
        >>> import torch
        >>> from cuteforge import attn_paged_decode
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> seqlens_k = torch.tensor([20, 5], device="cuda", dtype=torch.int32)
        >>> q = torch.randn(2, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> attn_paged_decode(q, k_cache, v_cache, page_table, seqlens_k).shape
        torch.Size([2, 32, 128])
    """
    config = {"seqlens_k": seqlens_k, "mask": mask, "causal": is_causal, "softmax_scale": scale}
    return paged_gqa_decode_wrapper(q, k_cache, v_cache, page_table, **config)["out"]


def attn_paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seqlens_k: torch.Tensor,
    mask: torch.Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """``paged_gqa_prefill_wrapper(...)["out"]``; see `PagedGQAPrefill` for the shapes, and `attn_decode` for the rest.

    Examples:
        >>> import torch
        >>> from cuteforge import attn_paged_prefill
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 10 pages of 16
        >>> page_table = torch.tensor([[3, 7], [1, -1]], device="cuda", dtype=torch.int32)
        >>> cu_seqlens_q = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)  # prompts of 20 and 5 tokens
        >>> q, lens = torch.randn(25, 32, 128, device="cuda", dtype=torch.bfloat16), cu_seqlens_q.diff()
        >>> attn_paged_prefill(q, k_cache, v_cache, page_table, cu_seqlens_q, lens, is_causal=True).shape
        torch.Size([25, 32, 128])
    """
    config = {"seqlens_k": seqlens_k, "mask": mask, "causal": is_causal, "softmax_scale": scale}
    return paged_gqa_prefill_wrapper(q, k_cache, v_cache, page_table, cu_seqlens_q, **config)["out"]


# How a wrapper runs.

Tensors = dict[str, Any]


def _attend(
    op: type, inputs: tuple, out: Any, return_lse: bool, stream: Any, softmax_scale: float | None, options: tuple
) -> TupleDict:  # fmt: skip
    """Run a wrapper: its inputs, None for those not given, and its options."""
    known_as = None
    # a number is no flag, though it may be equal to one
    if out is None and stream is None and type(options[0]) is bool and type(return_lse) is bool:
        known_as = (op, return_lse, softmax_scale, options)
        results = recall.serve(known_as, inputs)
        if results is not None:
            return TupleDict(out=results[0], lse=results[1]) if return_lse else TupleDict(out=results[0])
    tensors = dict(zip(_INPUTS[op], inputs))
    given = {name: x for name, x in tensors.items() if x is not None}
    _check_tensors(given if out is None else {**given, "out": out})
    check_queries(tensors, op)
    traced = is_traced(inputs[0])
    config, return_lse = _checked_options(options), flag("return_lse", return_lse)
    softmax_scale = checked_scale(softmax_scale, traced)
    refuse_grad(given, given.values(), op.__name__)
    with asked_stream(stream, *inputs, out):
        if traced:
            results = _attend_by_op(op, tensors, given, out, softmax_scale, config)
        else:
            results = run_attention(op, given, out, return_lse, softmax_scale, config, known_as)
    return TupleDict(out=results[0], lse=results[1]) if return_lse else TupleDict(out=results[0])


def _checked_options(options: tuple) -> dict[str, Any]:
    """The options by name, equal ones in the same form: they become part of a key."""
    causal, window, softcap, *splits = options
    config = {"causal": flag("causal", causal), "window": checked_window(window), "softcap": checked_softcap(softcap)}
    return {**config, "num_splits": checked_splits(splits[0])} if splits else config


def _check_tensors(given: Tensors) -> None:
    for name, x in given.items():
        if not isinstance(x, _Tensor):
            raise ContractError(f"{name}: wanted a torch.Tensor, got {kind_of(x)}")


def known_dense_call(op: type, q: Any, k: Any, v: Any, mask: Any, causal: bool, softmax_scale: float | None) -> Any:
    """What `gqa_decode_wrapper` or `gqa_prefill_wrapper` has remembered of a call with these arguments and no others, or None."""
    given = {"q": q, "k": k, "v": v, "mask": mask}
    inputs = tuple(map(given.get, _INPUTS[op]))
    options = (causal, None, None, None) if op is GQADecode else (causal, None, None)
    return recall.find((op, False, softmax_scale, options), inputs)


def run_attention(
    op: type,
    given: Tensors,
    out: Any,
    return_lse: bool,
    softmax_scale: float | None,
    config: Mapping[str, Any],
    known_as: Hashable = None,
) -> tuple:
    """(out, lse or None), launched on CUDA tensors that neither autograd nor torch.compile tracks.

    Args:
        known_as: the key under which the call is to be kept, of `op.recall`.
    """
    new_out, lse = new_results(given, return_lse)
    results = {"out": new_out if out is None else out}
    if return_lse:
        results["lse"] = lse
    names, inputs = tuple(given), tuple(given.values())
    q, keys = inputs[0], inputs[1]
    if "num_splits" in config:
        rows = min(-(-decode_rows(q.shape, keys.shape[-2]) // ROW_BLOCK), 4)
    else:
        rows = q.numel() <= _most_elems_of_few_rows(given)
    key = (
        op, names, return_lse, q.dtype, q.shape[-1], inputs[2].shape[-1], q.dim(), keys.dim(), given["mask"].dim() if "mask" in given else 0,
        tuple(config.values()), rows, q.get_device(),
    )  # fmt: skip
    compiled = run_op(key, _make, inputs, _launch, _readable, (op, names, results, softmax_scale, config))
    if compiled is not None and results["out"].numel():
        tensors = tuple(map(given.get, _INPUTS[op]))
        recall.keep(known_as, tensors, _call_of, compiled, given, results, softmax_scale)
    return results["out"], lse


def _call_of(op: Any, given: Tensors, results: Tensors, softmax_scale: float | None) -> recall.Call:
    """The call that `op` has just served: `given` by the caller, `results` allocated for it."""
    q, (varying, agree) = given["q"], _variations(type(op), given)
    if "q" in varying:
        # tokens: a dim of q and out, and the last of lse
        dims, length_of = {"out": varying["q"], "lse": -1}, ("q", varying["q"])
    else:
        dims, length_of = {}, None
    new = [_result(name, x, dims.get(name)) for name, x in results.items()]
    if op._splits:
        new.append(recall.Result("workspace", (op._workspace_bytes(q.get_device()),), torch.uint8))
    names = [name if name in given else None for name in _INPUTS[type(op)]]
    facts = {"length_of": length_of, "varying": varying, "written": POOLS if "new_k" in given else (), **agree}
    return recall.Call(op, names, new, q.device, (op._scale_of(softmax_scale),), **facts)


def _result(name: str, x: torch.Tensor, growing: int | None) -> recall.Result:
    shape: list[int | None] = list(x.shape)
    if growing is not None:
        shape[growing] = None
    return recall.Result(name, tuple(shape), x.dtype)


def _variations(op: type, given: Tensors) -> tuple[dict[str, int], dict[str, Any]]:
    """`varying` of a `recall.Call`, and how it is to agree: tokens and keys, whose numbers the entry compares but for those of a mask. From one
    decode to the next there is a key more."""
    dim, is_dense, has_mask = 0 if "cu_seqlens_q" in given else 1, "k" in given, "mask" in given
    if has_mask and dim == 0:
        return {}, {}
    varying = {"k": dim, "v": dim} if is_dense else {}
    if has_mask:
        agree = {"agree": lambda mask, k: mask.shape[-1] == k.shape[1], "agreeing": ("mask", "k")} if is_dense else {}
        return {**varying, "mask": given["mask"].dim() - 1}, agree
    if op in (GQADecode, PagedGQADecode):
        return varying, {}
    # without tokens nothing is launched, and as many as another tile is better for are another call
    most = _most_elems_of_few_rows(given)
    least, most = (1, most) if given["q"].numel() <= most else (most + 1, math.inf)
    return {"q": dim, **varying}, {"agree": lambda q: least <= q.numel() <= most, "agreeing": ("q",)}


def _most_elems_of_few_rows(given: Tensors) -> int:
    """Elements of q up to which prefill has few rows: what an op's tile is chosen by."""
    q, keys = given["q"], given["k" if "k" in given else "k_cache"]
    if not q.is_cuda:
        return 0  # the op refuses it by name
    requests = given["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in given else q.shape[0]
    return few_rows(requests, keys.shape[-2], resolve_arch(None, q.get_device()).num_sms) * q.shape[-1]


def _make(*call: Any) -> Any:
    *inputs, op, names, results, _, config = call
    return op(**dict(zip(names, inputs)), **results, **config)


def _launch(
    op: Any, inputs: tuple, _: type, names: tuple[str, ...], results: Tensors, scale: float | None, __: Any
) -> None:
    tensors = {**dict(zip(names, inputs)), **results}
    if op._splits:
        q = inputs[0]
        tensors["workspace"] = torch.empty(op._workspace_bytes(q.get_device()), dtype=torch.uint8, device=q.device)
    op._launch(tuple([tensors[name] for name in op.signature.names]), None, (op._scale_of(scale),))


def new_results(given: Tensors, with_lse: bool) -> tuple:
    """Uninitialised (out, lse or None) for inputs by name."""
    q, values = given["q"], given["v" if "v" in given else "v_cache"]
    if q.shape[-1] == values.shape[-1]:
        out = torch.empty_like(q, memory_format=_CONTIGUOUS)
    else:
        out = q.new_empty((*q.shape[:-1], values.shape[-1]))
    if not with_lse:
        return out, None
    if "cu_seqlens_q" in given:
        shape = (q.shape[1], q.shape[0])
    else:
        shape = (q.shape[0], q.shape[-2], q.shape[1] if q.dim() == 4 else 1)
    return out, q.new_empty(shape, dtype=torch.float32)


def _readable(inputs: tuple, op: type, names: tuple[str, ...], *_: Any) -> tuple:
    """The inputs, `readable`. Pools that are written are left as they are: a copy would lose the writes."""
    written = POOLS if "new_k" in names else ()
    return tuple(x if name in written else readable(x) for name, x in zip(names, inputs))


def check_queries(tensors: Tensors, op: type) -> None:
    """What is needed to allocate the results; the op checks everything else."""
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


def _attend_by_op(
    op: type,
    tensors: Tensors,
    given: Tensors,
    out: Any,
    softmax_scale: float | None,
    config: Mapping[str, Any],
) -> tuple:
    """As `run_attention`, seen by what follows the call."""
    appends = any(name in given for name in APPENDED)
    inputs = [x for name, x in tensors.items() if appends or name not in APPENDED]
    causal, window, softcap, *rest = config.values()
    name = APPEND_OP if appends else OPS[op]
    operands = given if out is None else {**given, "out": out}
    results = call_op(name, operands, (*inputs, softmax_scale, causal, *window, softcap, *rest))
    return (results[0] if out is None else _copied(results[0], out), results[1])


def _copied(result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` with the result in it. Refuses what a copy would convert or broadcast."""
    if out.shape != result.shape or out.dtype != result.dtype:
        wanted, got = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (result, out))
        raise ContractError(f"out: wanted {wanted}, got {got}")
    return out.copy_(result)

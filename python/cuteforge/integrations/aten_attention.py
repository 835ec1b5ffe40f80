"""The calls of torch's own attention that the kernels serve, with results as torch's operators return them.

Dims: B requests, L query tokens, S keys, T packed tokens, P pages of ps tokens, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import _are_functorch_transforms_active

from cuteforge.backends import registry
from cuteforge.backends.cuda import CudaBackend
from cuteforge.backends.interface import DECODE, PREFILL, Request
from cuteforge.errors import UnsupportedError
from cuteforge.families.attention import GQADecode, GQAPrefill, PagedGQADecode, PagedGQAPrefill
from cuteforge.families.attention.api import MAX_DECODE_TOKENS
from cuteforge.families.attention.road import DECODE_OPS, ROADS, AttentionRoad
from cuteforge.op import recall
from cuteforge.op.allocate import Empty, current_device, ways_to_empty
from cuteforge.runtime import env

_UINT64 = torch.uint64
_DTYPES = torch.bfloat16, torch.float16
_INDICES = "cu_seqlens_q", "cu_seqlens_k", "page_table", "seqlens_k", "kv_indptr"

Results = tuple[torch.Tensor, ...]
Call = Callable[[AttentionRoad, tuple, tuple], Results]


class FlashCall(NamedTuple):
    """The arguments of ``aten::_flash_attention_forward``, under its names and in its order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cum_seq_q: torch.Tensor | None
    cum_seq_k: torch.Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    return_debug_mask: bool
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    num_splits: int | None = None

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """The window as our ops take it; torch also writes no limit as -1, and the right side of a causal one."""
        left, right = self.window_size_left, self.window_size_right
        left = None if left is None or left < 0 else left
        right = None if self.is_causal or right is None or right < 0 else right
        return None if left is None and right is None else (left, right)


class CudnnCall(NamedTuple):
    """The arguments of ``aten::_scaled_dot_product_cudnn_attention``, under its names and in its order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: torch.Tensor | None
    compute_log_sumexp: bool
    dropout_p: float = 0.0
    is_causal: bool = False
    return_debug_mask: bool = False
    scale: float | None = None


class _Plan(NamedTuple):
    """An op of ours that serves a call.

    Attributes:
        tensors: by the names of the op.
        options: `causal`, `window`, `softcap`, `num_splits`, `softmax_scale` and `return_lse`, as its road takes them.
    """

    op: type
    tensors: dict[str, Any]
    options: tuple


def refuse_on_gpu(request: Request) -> str | None:
    """Why the kernels do not serve calls with these facts on the GPU of `request`, or None."""
    return CudaBackend().refuse(request)


def call_on_gpu(road: AttentionRoad, tensors: tuple, options: tuple) -> Results:
    return road.call(tensors, options)


class Served:
    """torch's attention by our kernels, where they serve it.

    Args:
        refuse: the facts of a call -> why the kernels do not serve it here, or None. Asked once for equal facts.
        call: runs an op by its road.

    Its methods return None for a call that is to be handed on. They launch below autograd and record no graph.
    """

    def __init__(self, refuse: Callable[[Request], str | None] = refuse_on_gpu, call: Call = call_on_gpu) -> None:
        self._call = call

        @functools.lru_cache(maxsize=1024)
        def is_served(request: Request, kernels_are_on: bool) -> bool:
            return refuse(request) is None

        self._is_served = is_served

    def flash(self, call: FlashCall, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Output and log-sum-exps of ``_flash_attention_forward``.

        Args:
            call: dense, ``(B, L, Hq, D)`` and ``(B, S, Hkv, D)``; packed, ``(T, Hq, D)`` and ``(Tk, Hkv, D)`` with
                offsets; or packed queries over pages ``(P, ps, Hkv, D)``.
            out: where to write the output. None allocates it with the strides of ``empty_like(query)``.

        Returns:
            The output like the query, and ``(B, Hq, L)``, or ``(Hq, T)`` if packed, fp32: natural logarithms.
        """
        if call.dropout_p or call.return_debug_mask or call.alibi_slopes is not None:
            return None
        if call.num_splits is not None and (call.num_splits == 1 or call.num_splits < 0):
            return None  # one split promises the same bits whatever else is in the batch; our prefill does not
        plan = _plan_of(call, out)
        results = None if plan is None else self._run(plan)
        if results is None:
            return None
        out, lse = results
        # (T, Hq, 1) of a step of decode
        return out, lse[..., 0].t().contiguous() if plan.op is PagedGQADecode else lse

    def cudnn(self, call: CudnnCall) -> torch.Tensor | None:
        """The output of ``_scaled_dot_product_cudnn_attention``, ``(B, Hq, L, D)``, of a call that asks for nothing
        else."""
        if call.attn_bias is not None or call.compute_log_sumexp or call.dropout_p or call.return_debug_mask:
            return None
        if call.query.dim() != 4 or call.key.dim() != 4 or call.value.dim() != 4:
            return None
        q, k, v = (x.transpose(1, 2) for x in call[:3])
        if call.is_causal and q.shape[1] != k.shape[1]:
            return None  # aligned at the upper left there
        results = self._run(_dense(q, k, v, (call.is_causal, None, call.scale, False), None, None))
        return None if results is None else results[0].transpose(1, 2)

    def _run(self, plan: _Plan) -> Results | None:
        """The results of an op; None if our kernels are not to serve it."""
        if not _is_wanted() or _are_functorch_transforms_active():
            return None
        if not torch.is_grad_enabled():
            return self._run_below_autograd(plan)
        with torch.no_grad():  # who called us records the graph
            return self._run_below_autograd(plan)

    def _run_below_autograd(self, plan: _Plan) -> Results | None:
        road = ROADS[plan.op]
        tensors = tuple(map(plan.tensors.get, (*road.inputs, *road.outputs)))
        results = recall.recall((road, plan.options), tensors)
        if results is not None:
            return results  # like a call that has been through all that follows
        if not (_agree(plan) and self._is_served(_facts(plan), env.kernels())):
            return None
        try:
            return self._call(road, tensors, plan.options)
        except UnsupportedError:
            return None  # nothing was launched


def _is_wanted() -> bool:
    """Whether nobody asks `cuteforge.attention` for another backend here."""
    if registry.context_backend() is None and env.backend() is None:
        return True
    return registry.wish_for(None).candidate.name == CudaBackend.name


def _facts(plan: _Plan) -> Request:
    q, k = plan.tensors["q"], plan.tensors["k" if "k" in plan.tensors else "k_cache"]
    is_paged = "k_cache" in plan.tensors
    fwd = DECODE if plan.op in DECODE_OPS else PREFILL
    causal, window = plan.options[:2]
    sizes = q.shape[-1], q.shape[-1], q.shape[-2], k.shape[-2]
    return Request(q.device, q.dtype, *sizes, fwd, is_paged, False, causal, None, () if window is None else ("window",))


def _plan_of(call: FlashCall, out: torch.Tensor | None) -> _Plan | None:
    """None for a call that no op of ours takes. `_agree` looks at the tensors."""
    if call.block_table is not None:
        return _paged(call, out)
    if call.seqused_k is not None:
        return None  # lengths beside packed keys
    q, k, v = call[:3]
    if call.cum_seq_q is None and call.cum_seq_k is None:
        if q.dim() != 4:
            return None
        return _dense(q, k, v, (call.is_causal, call.window, call.scale, True), call.num_splits, out)
    if call.cum_seq_q is None or call.cum_seq_k is None:
        return None
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": call.cum_seq_q, "cu_seqlens_k": call.cum_seq_k}
    tensors["out"] = _like(q, out)
    return _Plan(GQAPrefill, tensors, (call.is_causal, call.window, None, None, call.scale, True))


def _dense(q, k, v, scores: tuple, num_splits: int | None, out: torch.Tensor | None) -> _Plan:
    """Of tokens before heads. `scores`: `causal`, `window`, `softmax_scale` and `return_lse`."""
    causal, window, scale, return_lse = scores
    tensors = {"q": q, "k": k, "v": v, "out": _like(q, out)}
    length = q.shape[1]
    if length > MAX_DECODE_TOKENS:
        return _Plan(GQAPrefill, tensors, (causal, window, None, None, scale, return_lse))
    # One query token sees all keys either way: no second kernel for it.
    return _Plan(GQADecode, tensors, (causal and length > 1, window, None, num_splits or None, scale, return_lse))


def _paged(call: FlashCall, out: torch.Tensor | None) -> _Plan | None:
    """Of packed queries over pages."""
    q, k, v, starts = *call[:3], call.cum_seq_q
    if starts is None or (call.seqused_k is None and call.cum_seq_k is None):
        return None
    tensors = {"q": q, "k_cache": k, "v_cache": v, "page_table": call.block_table, "out": _like(q, out)}
    tensors |= {"seqlens_k": call.seqused_k} if call.seqused_k is not None else {"kv_indptr": call.cum_seq_k}
    # torch says that the tokens are the requests' in sum: as many tokens as requests, none with two, are one for each
    if call.max_q == 1 and q.shape[0] == starts.shape[0] - 1:
        left = call.window and call.window[0]
        window = None if left is None else (left, None)  # no key comes after the only query
        return _Plan(PagedGQADecode, tensors, (False, window, None, call.num_splits or None, call.scale, True))
    tensors["cu_seqlens_q"] = starts
    return _Plan(PagedGQAPrefill, tensors, (call.is_causal, call.window, None, None, call.scale, True))


def _agree(plan: _Plan) -> bool:
    """Whether dims, dtypes, devices and sizes are those of a call that torch's kernel takes and ours does too."""
    given = plan.tensors
    is_paged = "k_cache" in given
    q, k, v = given["q"], given["k_cache" if is_paged else "k"], given["v_cache" if is_paged else "v"]
    query_dims = 4 if "k" in given and "cu_seqlens_q" not in given else 3
    if q.dim() != query_dims or k.dim() != (4 if is_paged else query_dims):
        return False
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or (query_dims == 4 and q.shape[0] != k.shape[0]):
        return False
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        return False
    if not (q.numel() and k.numel()) or q.shape[-2] % k.shape[-2]:
        return False
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return False
    return all(given[name].dtype is torch.int32 for name in _INDICES if given.get(name) is not None)


def _like(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
    """What the op is to write; None where it allocates a tensor with the strides of ``empty_like(q)`` itself."""
    return out if out is not None or q.is_contiguous() else torch.empty_like(q)


def new_generator_state(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``_flash_attention_forward`` returns after its log-sum-exps: the generator's state, an unused number and the
    debug mask, of the shapes that torch expects. Nothing is dropped, so no kernel reads them."""
    index = out.get_device()
    here, elsewhere = _ways_to_empty(index)
    empty = here if index >= 0 and current_device() == index else elsewhere
    return empty((2,), (1,), _UINT64), empty((), (), _UINT64), empty((0,), (1,), out.dtype)


@functools.cache
def _ways_to_empty(index: int) -> tuple[Empty, Empty]:
    return ways_to_empty(torch.device("cpu") if index < 0 else torch.device("cuda", index))

"""Running the paged attention ops in tests: guarded memory, oracles. The operands come from `paged_inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuteforge import PagedGQADecode, PagedGQAPrefill, paged_gqa_decode_wrapper, paged_gqa_prefill_wrapper
from cuteforge.families.attention import reference
from helpers import biases, budget
from helpers.attention import cap_slack, check_lse, score_slack
from helpers.canary import Canary
from helpers.packs import offsets
from helpers.paged_inputs import (
    CAUSAL,
    CAUSAL_FP16,
    CONFIGS,
    FP16,
    FP32,
    KINDS,
    MAIN,
    MASKS,
    PAGE_SIZES,
    PLACES,
    PREFILL_QUERIES,
    Batch,
    Inputs,
    appending,
    columns_apart,
    draw,
    edges,
    misaligned,
    put,
    put_last,
    rows_misaligned,
    small,
    with_lengths,
    with_mask,
)

__all__ = [
    "CAUSAL",
    "CAUSAL_FP16",
    "CONFIGS",
    "FP16",
    "KINDS",
    "MAIN",
    "MASKS",
    "PAGE_SIZES",
    "PLACES",
    "PREFILL_QUERIES",
    "Batch",
    "appending",
    "columns_apart",
    "draw",
    "edges",
    "misaligned",
    "offsets",
    "put",
    "rows_misaligned",
    "small",
    "with_lengths",
    "with_mask",
]


def expected(x: Inputs, compute_dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """What the op gives, unrounded, in its layout: out and lse."""
    if x.is_decode:
        q = x.q if x.q.dim() == 4 else x.q[:, None]
        lens_q = None
    else:
        q, lens_q = reference.unpack(x.q, x.cu_seqlens_q)
    k, v = dense_kv(x)
    options = {"mask": x.mask, "bias": x.bias, "sinks": x.sinks, **x.options}
    options |= {"compute_dtype": compute_dtype, "out_dtype": compute_dtype}
    out, lse = reference.attend(q, k, v, lens_q=lens_q, lens_k=x.lens, **options)
    if x.is_decode:
        return (out if x.q.dim() == 4 else out[:, 0]), lse
    packed_lse = reference.pack(lse.transpose(1, 2)[..., None], x.cu_seqlens_q)
    return reference.pack(out, x.cu_seqlens_q), packed_lse[..., 0].t()


def dense_kv(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """``(B, max length, Hkv, D)`` keys and values, the last position from new_k and new_v where there are such."""
    in_pool = x.lens if x.new_k is None else (x.lens - 1).clamp(min=0)
    k, v = (reference.gather_pages(cache, x.page_table, in_pool, x.page_table_rows) for cache in x.pools)
    if x.new_k is None:
        return k, v
    full = (x.lens > 0).nonzero().flatten()
    grown = tuple(torch.cat((t, t.new_zeros(len(t), 1, *t.shape[2:])), 1) for t in (k, v))
    for values, new in zip(grown, (x.new_k, x.new_v)):
        values[full, x.lens[full].long() - 1] = new[full]
    return grown


def check(results: Mapping[str, torch.Tensor], x: Inputs, requests: Sequence[int] | None = None) -> None:
    """`results` against fp64, within the computed budget; of `requests` only, if given."""
    if not len(x.lens) or not x.q.numel():
        return
    truth, eager, single = (expected(x, dtype) for dtype in (torch.float64, x.q.dtype, FP32))
    got_out, truth_out, eager_out = (_of_requests(t, x, requests) for t in (results["out"], truth[0], eager[0]))
    budget.assert_within_budget(got_out, truth_out, eager_out, "out")
    truth_lse, single_lse = (_lse_of_requests(t, x, requests) for t in (truth[1], single[1]))
    blind_lse = _lse_of_requests(expected(x.with_(sinks=None))[1], x, requests)
    empty = blind_lse.isneginf().transpose(-1, -2).reshape(got_out.shape[:-1])
    assert not got_out[empty].any(), "out: a row that sees no key is not 0"
    if "lse" in results:
        check_lse(_lse_of_requests(results["lse"], x, requests), truth_lse, single_lse, _lse_slack(x), "lse")


def _lse_slack(x: Inputs) -> float:
    """As for dense operands."""
    scale = x.q.shape[-1] ** -0.5 if x.softmax_scale is None else abs(x.softmax_scale)
    return score_slack(x.q, dense_kv(x)[0], scale) + cap_slack(x.softcap) + biases.slack(x.bias)


def _of_requests(out: torch.Tensor, x: Inputs, requests: Sequence[int] | None) -> torch.Tensor:
    """The rows of `out`, or of anything whose first dim is the requests (decode) or the tokens (prefill)."""
    if requests is None:
        return out
    if x.is_decode:
        return out[list(requests)]
    starts = x.cu_seqlens_q.tolist()
    return torch.cat([out[starts[b] : starts[b + 1]] for b in requests])


def _lse_of_requests(lse: torch.Tensor, x: Inputs, requests: Sequence[int] | None) -> torch.Tensor:
    return _of_requests(lse, x, requests) if x.is_decode else _of_requests(lse.t(), x, requests).t()


# Running.


@dataclass(frozen=True)
class Outputs:
    """Poisoned results in guarded memory."""

    guards: Mapping[str, Canary]

    @classmethod
    def of(cls, x: Inputs, lse: bool = True) -> Outputs:
        *tokens, heads, _ = x.q.shape
        dv = x.v_cache.shape[-1]
        guards = {"out": Canary((*tokens, heads, dv), x.q.dtype, x.q.device)}
        if lse:
            shape = (tokens[0], heads, tokens[1] if len(tokens) == 2 else 1) if x.is_decode else (heads, tokens[0])
            guards["lse"] = Canary(shape, FP32, x.q.device)
        return cls(guards)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: guard.tensor for name, guard in self.guards.items()}

    def check(self) -> None:
        for name, guard in self.guards.items():
            guard.check(name)

    def check_untouched(self) -> None:
        for name, guard in self.guards.items():
            guard.check_untouched(name)


class PoolGuard:
    """Every bit of the memory that holds the pools keeps its value, but for the positions that a call appends."""

    def __init__(self, x: Inputs) -> None:
        self._memory = {t.untyped_storage().data_ptr(): _whole_memory(t) for t in x.pools}
        self._want = {pointer: memory.clone() for pointer, memory in self._memory.items()}
        for cache, new in zip(x.pools, (x.new_k, x.new_v)):
            if new is not None:
                copy = self._want[cache.untyped_storage().data_ptr()]
                put_last(x, copy.as_strided(cache.shape, cache.stride(), cache.storage_offset()), new)

    def check(self) -> None:
        for pointer, memory in self._memory.items():
            changed = (memory.view(torch.int16) != self._want[pointer].view(torch.int16)).nonzero()
            where = f"first at element {changed[0].item()} of the memory" if len(changed) else ""
            assert not len(changed), f"pool: {len(changed)} elements are not what they should be, {where}"


def _whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the allocation that `tensor` is a view of."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def make_op(x: Inputs, outputs: Mapping[str, torch.Tensor], **config):
    """The op for `x`, not compiled."""
    kind = PagedGQADecode if x.is_decode else PagedGQAPrefill
    return kind(*x.positional, outputs["out"], **x.optional, lse=outputs.get("lse"), **{**x.options, **config})


def workspace_of(op, device) -> Canary | None:
    """Scratch memory full of ones bits, NaN or -1 to whoever reads it; None where the op needs none."""
    if not op.workspace_bytes():
        return None
    scratch = Canary((op.workspace_bytes(),), torch.uint8, device)
    scratch.tensor.fill_(255)
    return scratch


def arguments(x: Inputs, outputs: Mapping[str, torch.Tensor]) -> tuple[tuple, dict[str, Any]]:
    """Positional and named operands of `execute` and `bind`."""
    named = {**x.optional, "lse": outputs.get("lse"), "softmax_scale": x.softmax_scale}
    return (*x.positional, outputs["out"]), named


def run(
    x: Inputs, *, lse: bool = True, entry: str = "execute", stream=None, num_splits: int | None = None
) -> dict[str, torch.Tensor]:
    """What the class writes (`out` and `lse`); outputs, scratch memory and pools are guarded."""
    outputs, pool = Outputs.of(x, lse), PoolGuard(x)
    splits = {"num_splits": num_splits} if x.is_decode else {}
    op = make_op(x, outputs.tensors, **splits).compile()
    scratch = workspace_of(op, x.q.device)
    positional, named = arguments(x, outputs.tensors)
    named |= {"workspace": None if scratch is None else scratch.tensor, "stream": stream}
    if entry == "bind":
        op.bind(*positional, **named)()
    else:
        op.execute(*positional, **named)
    torch.cuda.synchronize(x.q.device)
    outputs.check()
    pool.check()
    if scratch is not None:
        scratch.check_guards("workspace")
    return {name: tensor.clone() for name, tensor in outputs.tensors.items()}


def call_wrapper(x: Inputs, **options):
    """The wrapper on `x`: a TupleDict of out and lse."""
    wrapper = paged_gqa_decode_wrapper if x.is_decode else paged_gqa_prefill_wrapper
    return wrapper(*x.positional, **x.optional, **{**x.options, "return_lse": True, **options})


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two runs have the same bits."""
    return a.keys() == b.keys() and all(budget.same_bits(t, b[name]) for name, t in a.items())

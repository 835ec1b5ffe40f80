"""Attention and `merge_state` as ops of torch: what torch.compile, export and dispatch modes follow.

On CUDA they launch the kernels as the wrappers do; on a CPU they compute the eager reference in fp32. They have no
derivative. Every attention op
returns out and lse. The op that appends to pools writes them, and so is one of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.families.attention import reference
from cuteforge.families.attention.api import PagedGQADecode
from cuteforge.families.attention.checks import check_contents
from cuteforge.families.attention.merge.api import INPUT_NAMES, MergeState, check_outputs, new_merged
from cuteforge.families.attention.merge.api import ROAD as MERGE_ROAD
from cuteforge.families.attention.operands import APPENDED, PAGED_DECODE, POOLS, schema_of
from cuteforge.families.attention.road import APPEND_OP, DECODE_OPS, OPS, ROADS, Options
from cuteforge.op.road import Invocation, Tensors
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.op.torch_library import register_op, register_updating_op

_CONFIG = "float? softmax_scale, bool causal, int? window_left, int? window_right, float? softcap"
Results = tuple[torch.Tensor, torch.Tensor]


def _invocation(op: type, names: tuple[str, ...], arguments: tuple) -> Invocation:
    """The arguments of an op as a call, checked as far as the results need it."""
    tensors = dict(zip(names, arguments))
    ROADS[op].check_queries(tensors)
    softmax_scale, causal, left, right, softcap, *splits = arguments[len(names) :]
    options = Options(causal, (left, right), softcap, splits[0] if splits else None, softmax_scale, return_lse=True)
    return Invocation({name: x for name, x in tensors.items() if x is not None}, options=options)


def _run_on_cpu(op: type, call: Invocation) -> Results:
    """The reference, after the checks that the kernel makes, contents included: a model meets its errors there too."""
    options = call.options
    given = {name: x.to(torch.int32) if x.dtype is torch.int64 else x for name, x in call.inputs.items()}
    results = ROADS[op].new_results(call)
    written = POOLS if "new_k" in given else ()
    specs = {name: _spec(x, name in written) for name, x in {**given, **results}.items()}
    op(**specs, **options.compiled, softmax_scale=options.softmax_scale).check_support()
    if results["out"].numel():
        # as given: a copy of int64 cuts an index off
        check_contents(call.inputs, options.window[0])
        names = ("causal", "window", "softcap", "softmax_scale")
        _attend_on_cpu(given, {name: getattr(options, name) for name in names}, **results)
    return results["out"], results["lse"]


def _spec(x: torch.Tensor, keep_strides: bool) -> TensorSpec:
    """As for a tensor on a GPU. A wrapper copies what the kernel cannot read, but not what it writes."""
    return TensorSpec(tuple(x.shape), x.dtype, tuple(x.stride()) if keep_strides else None)


def _attend_on_cpu(given: Tensors, options: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out and lse, and the pools where the call appends; packed tokens of no request see no key."""
    q, k, v, lens_q, lens_k = given["q"], given.get("k"), given.get("v"), None, given.get("seqlens_k")
    if "page_table" in given:
        k, v, lens_k = _paged_keys(given)
    elif "cu_seqlens_k" in given:
        (k, lens_k), (v, _) = (reference.unpack(x, given["cu_seqlens_k"]) for x in (k, v))
    cuts = given.get("cu_seqlens_q")
    if cuts is not None:
        q, lens_q = reference.unpack(q, cuts)
    q = q[:, None] if q.dim() == 3 else q
    sinks = given.get("sinks")
    options |= {"lens_q": lens_q, "lens_k": lens_k, "mask": given.get("mask"), "bias": given.get("bias")}
    options |= {"sinks": sinks}
    results = reference.attend(q, k, v, **options, compute_dtype=torch.float32)
    if cuts is None:
        out.copy_(results[0].reshape(out.shape))
        lse.copy_(results[1])
    else:
        out.zero_()
        lse.copy_(reference.blind_lse(lse, sinks))
        cuts = cuts.tolist()
        for first, end, rows, sums in zip(cuts, cuts[1:], *results):
            out[first:end], lse[:, first:end] = rows[: end - first], sums[:, : end - first]
    if "new_k" in given:
        _store_new(given, lens_k)


def _paged_keys(given: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, values, lengths) of all requests, with the appended ones at their ends."""
    lens = given["seqlens_k"] if "seqlens_k" in given else given["kv_indptr"].diff()
    lens = lens.clamp(min=0)
    table, rows = given["page_table"], given.get("page_table_rows")
    # The page of an appended position may be no page of the pool.
    stored = (lens - 1).clamp(min=0) if "new_k" in given else lens
    keys_values = [reference.gather_pages(given[name], table, stored, rows) for name in POOLS]
    if "new_k" in given:
        appended = lens > 0
        keys_values = [torch.cat((x, x.new_zeros(x.shape[0], 1, *x.shape[2:])), 1) for x in keys_values]
        for tokens, name in zip(keys_values, APPENDED):
            tokens[appended, stored[appended].long()] = given[name][appended]
    return *keys_values, lens


def _store_new(given: Tensors, lens: torch.Tensor) -> None:
    """Store the appended keys and values in the pools, those without a page nowhere."""
    requests = lens.nonzero()[:, 0]
    rows = given["page_table_rows"].long()[requests] if "page_table_rows" in given else requests
    position = lens[requests].long() - 1
    for name, pool in zip(APPENDED, (given[name] for name in POOLS)):
        pages = pool if pool.dim() == 4 else pool.unsqueeze(1)
        page, slot = given["page_table"][rows, position // pages.shape[1]].long(), position % pages.shape[1]
        kept = (page >= 0) & (page < pages.shape[0])
        pages[page[kept], slot[kept]] = given[name][requests[kept]]


def _register(op: type, name: str, schema: str, register: Any = register_op) -> None:
    names = tuple(argument.split()[-1] for argument in schema.split(", "))

    def cuda(*arguments: Any) -> Results:
        return ROADS[op].launch(_invocation(op, names, arguments))

    def cpu(*arguments: Any) -> Results:
        return _run_on_cpu(op, _invocation(op, names, arguments))

    def fake(*arguments: Any) -> Results:
        return tuple(ROADS[op].new_results(_invocation(op, names, arguments)).values())

    config = _CONFIG + (", int? num_splits" if op in DECODE_OPS else "")
    register(f"{name}({schema}, {config}) -> (Tensor, Tensor)", cuda=cuda, cpu=cpu, fake=fake)


def _merge_cuda(*inputs: torch.Tensor) -> Results:
    check_outputs(inputs[0])
    return MERGE_ROAD.launch(Invocation(dict(zip(INPUT_NAMES, inputs))))


def _merge_cpu(*inputs: torch.Tensor) -> Results:
    """The reference; what an empty part holds does not matter, as in the kernel."""
    results = _merge_fake(*inputs)
    MergeState(*(_spec(x, False) for x in (*inputs, *results))).check_support()
    o_a, lse_a, o_b, lse_b = inputs
    parts = [
        o.masked_fill(lse.isneginf().transpose(-1, -2).unsqueeze(-1), 0) for o, lse in ((o_a, lse_a), (o_b, lse_b))
    ]
    for result, value in zip(results, reference.merge(parts[0], lse_a, parts[1], lse_b)):
        result.copy_(value)
    return results


def _merge_fake(o_a: torch.Tensor, *_: torch.Tensor) -> Results:
    check_outputs(o_a)
    return new_merged(o_a)


for _op, _name in OPS.items():
    _register(_op, _name, schema_of(_name))
_register(PagedGQADecode, APPEND_OP, schema_of(PAGED_DECODE, appends=True), register_updating_op)
register_op(
    f"merge_state({', '.join(f'Tensor {name}' for name in INPUT_NAMES)}) -> (Tensor, Tensor)",
    cuda=_merge_cuda,
    cpu=_merge_cpu,
    fake=_merge_fake,
)

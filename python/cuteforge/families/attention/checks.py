"""Relations between operands of attention that neither the table of an op nor its compiled entry knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.attention.problem import MAX_HEAD_DIM
from cuteforge.op.dims import Dims

_INT32 = torch.iinfo(torch.int32)
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "kv_indptr")


def check_relations(dims: Dims, samples: Mapping[str, Any], queries: str, keys: str) -> None:
    """Refuse head counts, head dims, masks and tables that do not go together.

    Args:
        samples: the operands by name.
        queries, keys: names of their layouts.
    """
    is_paged = "page_table" in samples
    if dims["Hkv"] < 1 or dims["Hq"] < 1 or dims["Hq"] % dims["Hkv"]:
        raise ContractError(f"q: wanted a multiple of Hkv = {dims['Hkv']} heads, got Hq = {dims['Hq']}")
    if dims["D"] % 8 or not 0 < dims["D"] <= MAX_HEAD_DIM:
        raise UnsupportedError(f"q: the kernel serves D = 8, 16, ... {MAX_HEAD_DIM}, got D = {dims['D']}")
    if dims["Dv"] != dims["D"] and (dims["D"], dims["Dv"]) != (192, 128):
        name = "v_cache" if is_paged else "v"
        raise UnsupportedError(f"{name}: the kernel serves Dv = D, and (192, 128), got ({dims['D']}, {dims['Dv']})")
    for name in _OFFSETS:
        if name in samples and dims["B"] < 0:
            raise ContractError(f"{name}: wanted shape (B+1), at least one offset, got (0)")
    if is_paged and dims.get("ps", 1) < 1:
        raise ContractError("k_cache: wanted pages of at least one token, got ps = 0")
    if is_paged and "page_table_rows" not in samples and dims["R"] != dims["B"]:
        raise ContractError(f"page_table: wanted a row for each of B = {dims['B']} requests, got R = {dims['R']}")
    extents = score_extents(dims, queries, keys)
    for name in ("mask", "bias"):
        for symbol, wanted in extents.items():
            got = dims.get(symbol[0] + name[0], wanted)
            if got != wanted and (got != 1 or symbol == "S"):
                raise ContractError(f"{name}: wanted {symbol} = {wanted}{'' if symbol == 'S' else ' or 1'}, got {got}")


def score_extents(dims: Dims, queries: str, keys: str) -> Dims:
    """Extents that the dims of a mask or bias must have, whose symbols begin with the letters of these. Of what differs
    from request to request it may have any number."""
    extents = {"B": dims["B"], "Hq": dims["Hq"]}
    if queries != "packed":
        extents["L"] = dims.get("L", 1)
    if keys == "batch":
        extents["S"] = dims["S"]
    return extents


class ShapeCheck:
    """Whether the shapes of a call may be right, as far as the compiled entry of an op does not see it; False also for
    no tensors.

    A quick look at every launch; who gets False runs the whole table for the error.

    Args:
        names: the operands of the op, in order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        indices = {name: index for index, name in enumerate(names)}
        self._cu_seqlens_q = indices.get("cu_seqlens_q")
        self._offsets = [indices[name] for name in _OFFSETS if name in indices]
        by_request = ("seqlens_k", "page_table_rows") + (() if "page_table_rows" in indices else ("page_table",))
        # q has the requests of the lengths, where it has any: the entry compares them
        self._by_request = [indices[name] for name in by_request if name in indices]
        self._is_paged = "page_table" in indices
        self._mask, self._bias = indices.get("mask"), indices.get("bias")

    def __call__(self, operands: tuple) -> bool:
        try:
            q, k = operands[0].shape, operands[1].shape
            if k[-2] < 1 or q[-2] < 1 or q[-2] % k[-2]:
                return False
            batch = q[0] if self._cu_seqlens_q is None else operands[self._cu_seqlens_q].shape[0] - 1
            if batch < 0 or (self._is_paged and len(k) == 4 and k[1] < 1):
                return False
            for index in self._offsets:
                if operands[index].shape[0] != batch + 1:
                    return False
            for index in self._by_request:
                if operands[index].shape[0] != batch:
                    return False
            if self._bias is not None and not self._agrees(operands[self._bias].shape, q, k, batch):
                return False
            if self._mask is None:
                return True
            mask = operands[self._mask]
            # the entry takes the bytes of a mask for what they are, whatever their type
            return mask.dtype is torch.bool and self._agrees(mask.shape, q, k, batch)
        except (AttributeError, IndexError):
            return False

    def _agrees(self, shape: torch.Size, q: torch.Size, k: torch.Size, batch: int) -> bool:
        """Whether a mask or bias has the extents of the scores."""
        is_packed = self._cu_seqlens_q is not None
        tokens = None if is_packed else q[1] if len(q) == 4 else 1
        wanted = [batch, *[q[-2]][: len(shape) == 4], *[tokens][: len(shape) > 2]]
        outer = all(want is None or got in (1, want) for got, want in zip(shape, wanted))
        return outer and (is_packed or self._is_paged or shape[-1] == k[1])


def check_contents(tensors: Mapping[str, torch.Tensor], left: int | None) -> None:
    """Read offsets, lengths and page numbers, and refuse what points outside the operands. Synchronizes.

    Kernels read int32, so int64 values outside its range are refused too: page 2**32 + 1 would be read as page 1.

    Args:
        left: keys before its own that a query sees, None for all: pages that no query sees may have been given away.

    Raises:
        ContractError: names the operand and the first bad index.
    """
    q = tensors["q"]
    if "cu_seqlens_q" in tensors:
        _check_offsets("cu_seqlens_q", tensors["cu_seqlens_q"], q.shape[0])
    if "cu_seqlens_k" in tensors:
        _check_offsets("cu_seqlens_k", tensors["cu_seqlens_k"], tensors["k"].shape[0])
    if "kv_indptr" in tensors:
        _check_offsets("kv_indptr", tensors["kv_indptr"], _INT32.max)
    if "page_table" in tensors:
        _check_pages(tensors, left)
    elif "seqlens_k" in tensors:
        _check_range("seqlens_k", tensors["seqlens_k"], _INT32.min, tensors["k"].shape[1] + 1)


def _check_pages(tensors: Mapping[str, torch.Tensor], left: int | None) -> None:
    pool, table = tensors["k_cache"], tensors["page_table"]
    page_size = pool.shape[1] if pool.dim() == 4 else 1
    name = "seqlens_k" if "seqlens_k" in tensors else "kv_indptr"
    lengths = tensors[name] if name == "seqlens_k" else tensors[name].diff()
    _check_range(name, lengths, _INT32.min, table.shape[1] * page_size + 1)
    rows = tensors.get("page_table_rows")
    if rows is not None:
        _check_range("page_table_rows", rows, 0, table.shape[0])
        table = table[rows.long()]
    # The page of an appended token may be negative: nothing is stored then.
    read = lengths - 1 if "new_k" in tensors else lengths
    columns = torch.arange(table.shape[1], device=table.device) * page_size
    used = columns[None] < read[:, None]
    if left is not None:
        used &= columns[None] + page_size > (lengths - _num_queries(tensors) - left)[:, None]
    wraps = (columns[None] < lengths[:, None]) & ((table < _INT32.min) | (table > _INT32.max))
    bad = (used & ((table < 0) | (table >= pool.shape[0])) | wraps).nonzero()
    if len(bad):
        request, column = bad[0].tolist()
        row = request if rows is None else int(rows[request])
        got = int(table[request, column])
        raise ContractError(
            f"page_table: wanted page numbers in [0, {pool.shape[0]}), got {got} at index {row}, {column}"
        )


def _num_queries(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | int:
    """Query tokens of each request."""
    q = tensors["q"]
    return tensors["cu_seqlens_q"].diff() if "cu_seqlens_q" in tensors else q.shape[1] if q.dim() == 4 else 1


def _check_offsets(name: str, offsets: torch.Tensor, most: int) -> None:
    values = offsets.tolist()
    for index, offset in enumerate(values):
        low = values[index - 1] if index else 0
        if not low <= offset <= most:
            raise ContractError(f"{name}: wanted ascending offsets from 0 up to {most}, got {offset} at index {index}")


def _check_range(name: str, values: torch.Tensor, low: int, end: int) -> None:
    """Refuse values outside ``[low, end)``."""
    where = ((values >= end) | (values < low)).nonzero()
    if len(where):
        index = int(where[0])
        got = int(values[index])
        wanted = f"at most {end - 1}" if low == _INT32.min <= got else f"in [{low}, {end})"
        raise ContractError(f"{name}: wanted values {wanted}, got {got} at index {index}")

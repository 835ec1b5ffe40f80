"""The tensors that say which tokens a step brings, where they are stored and what they attend to.

Dims: ``R`` rows and ``C`` columns of the page table, ``B`` requests of a batch, ``T`` new tokens of all of them,
``P`` pages of ``ps`` tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cuteforge.serving.kv_pool import check_bytes
from cuteforge.serving.page_allocator import SCRATCH_PAGE, TableEntry


@dataclass(frozen=True)
class Batch:
    """The step that a cache is bound to, as attention takes it. All tensors are views of the cache's own, which later
    steps change in place.

    Attributes:
        page_table: ``(R, C)`` int32.
        page_table_rows: ``(B,)`` int32, the row of each request.
        seqlens_k: ``(B,)`` int32, tokens of each request, the new ones included; 0 for a padding row.
        cu_seqlens_q: ``(B+1,)`` int32, where the new tokens of each request start among all; 0, 1, … in decode.
        slots: ``(T,)`` int64, where in the flat pool ``(P*ps, Hkv, D)`` each new token goes; 0, in the scratch page,
            for a padding row.
        positions: ``(T,)`` int32, of each new token in its request; 0 for a padding row.
        is_decode: one new token for each request.
        max_new: the most new tokens of a request.

    Examples:
        >>> import torch
        >>> from cuteforge import KVCache
        >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
        >>> cache.bind_prefill([cache.add(), cache.add()], [3, 2])
        >>> batch = cache.batch
        >>> batch.seqlens_k.tolist(), batch.cu_seqlens_q.tolist(), batch.positions.tolist()
        ([3, 2], [0, 3, 5], [0, 1, 2, 0, 1])
    """

    page_table: torch.Tensor
    page_table_rows: torch.Tensor
    seqlens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    is_decode: bool
    max_new: int


class BatchTensors:
    """The page table and the metadata of one batch at a time, allocated once and written in place.

    All work is on torch's current stream, and waits for nothing.

    Args:
        num_rows, num_columns: of the page table.
        most_new: the most new tokens of a batch, padding rows included.
        page_size: tokens of a page.
        device: of the tensors.
    """

    def __init__(self, num_rows: int, num_columns: int, most_new: int, page_size: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        check_bytes("max_requests", "a page table", num_rows * num_columns * torch.int32.itemsize)
        self._page_size, self._device = page_size, device
        self._page_table = zeros(num_rows, num_columns)
        self._rows, self._seqlens, self._cu_seqlens = zeros(num_rows), zeros(num_rows), zeros(num_rows + 1)
        self._positions, self._slots = zeros(most_new), zeros(most_new, dtype=torch.int64)

    def write(self, rows: list[int], seqlens: list[int], counts: list[int], num_padding: int, is_decode: bool) -> Batch:
        """A batch of the requests in the rows of the page table, padding rows after them.

        Args:
            rows: of the requests.
            seqlens: tokens of each request, the new ones included.
            counts: new tokens of each request.
        """
        num_rows, padding = len(rows) + num_padding, [0] * num_padding
        # A padding row has a query, which sees no key: it takes a place among the new tokens.
        offsets = list(itertools.accumulate([*counts, *[1] * num_padding], initial=0))
        buffers = (self._rows[:num_rows], self._seqlens[:num_rows], self._cu_seqlens[: num_rows + 1])
        for buffer, values in zip(buffers, (rows + padding, seqlens + padding, offsets)):
            buffer.copy_(self._on_host(values, torch.int32), non_blocking=True)
        positions, slots = self._positions[: offsets[-1]], self._slots[: offsets[-1]]
        max_new = max(counts, default=min(num_padding, 1))
        batch = Batch(self._page_table, *buffers, slots, positions, is_decode, max_new)
        self._locate(batch)
        return batch

    def advance(self, rows: Sequence[int], entries: list[TableEntry]) -> None:
        """Count one more token for each request of a decode.

        Args:
            rows: of the requests in the page table, in the order of the batch.
            entries: what the page table got for the new tokens.
        """
        for counter in (self._seqlens, self._positions, self._slots):
            counter[: len(rows)].add_(1)
        if entries:
            index_of_row = {row: i for i, row in enumerate(rows)}
            starts = self._upload([[index_of_row[e.row] for e in entries], [e.page * self._page_size for e in entries]])
            self._slots.index_copy_(0, *starts)

    def list_pages(self, entries: list[TableEntry]) -> None:
        """Write new entries of the page table."""
        if entries:
            columns = self._page_table.shape[1]
            indices, pages = self._upload([[e.row * columns + e.column for e in entries], [e.page for e in entries]])
            self._page_table.view(-1).index_copy_(0, indices, pages.int())

    def _locate(self, batch: Batch) -> None:
        """Write where the new tokens are, in their requests and in the flat pool. On the device, since a prefill may
        bring 100,000 of them."""
        num_rows, num_tokens = len(batch.page_table_rows), len(batch.slots)
        token = torch.arange(num_tokens, dtype=torch.int32, device=self._device)
        # The number of tokens is given: finding it would wait for the device.
        request = torch.arange(num_rows, device=self._device).repeat_interleave(
            batch.cu_seqlens_q.diff(), output_size=num_tokens
        )
        # The last new token is the last one of its request. A padding row has none: -1.
        position = batch.seqlens_k[request] + token - batch.cu_seqlens_q[request + 1]
        is_padding = position < 0
        position = position.clamp_(min=0)
        page = self._page_table[batch.page_table_rows[request], position // self._page_size].long()
        batch.positions.copy_(position)
        slots = page * self._page_size + position % self._page_size
        batch.slots.copy_(slots.masked_fill_(is_padding, SCRATCH_PAGE * self._page_size))

    def _upload(self, values: list[list[int]]) -> torch.Tensor:
        """int64 on the device."""
        return self._on_host(values, torch.int64).to(self._device, non_blocking=True)

    def _on_host(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        """In pinned memory for a GPU, so that a copy does not wait; torch keeps the memory until the copy is done."""
        return torch.tensor(values, dtype=dtype, pin_memory=self._device.type == "cuda")

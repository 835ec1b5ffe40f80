"""Keys and values of many requests in the pages of one pool, and what attention over them needs to know of a step.

Dims: ``P`` pages of ``ps`` tokens, ``Hkv`` KV heads, ``D`` and ``Dv`` head dims of keys and values, ``R`` rows and
``C`` columns of the page table, ``B`` requests of a batch, ``T`` new tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuteforge.arguments import integer, integers
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.op.checks import usable_device
from cuteforge.op.tracing import refuse_grad
from cuteforge.runtime.streams import is_capturing
from cuteforge.serving.batch import Batch, BatchTensors
from cuteforge.serving.kv_pool import KVPool
from cuteforge.serving.page_allocator import CacheFull, PageAllocator, Request, TableEntry

__all__ = ["Batch", "CacheFull", "KVCache"]

_MAX_INT32 = 2**31 - 1
_MAX_PAGES = _MAX_INT32 - 1  # page numbers are int32, and page 0 is scratch


class KVCache:
    """A paged cache of keys and values for all layers of a model.

    A step of a model has three parts. `bind_prefill` or `bind_decode` says which new tokens come and reserves their
    pages. Each layer then stores their keys and values (`append`) and attends, reading `batch`. Binding already counts
    the new tokens, so store them before you bind again. If a step fails half-way, `rollback` undoes its bind.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        num_pages: that requests can hold. The pool has one more: page 0 is scratch, where padding rows of a batch
            store.
        page_size: tokens of a page.
        max_requests: requests at a time, R.
        max_seqlen: tokens that a request may have; the table has ``C = ceil(max_seqlen / page_size)`` columns.
        v_head_dim: Dv; None is `head_dim`.
        dtype: of the pool, a floating one, or its name.
        device: of the pool, as torch takes it.

    The pool is one allocation of ``num_layers * (num_pages + 1) * page_size * num_kv_heads * (head_dim + v_head_dim)``
    elements, all keys before all values, not initialised: what no token was stored to holds anything, NaN too. Pool and
    metadata are allocated here and nowhere else, and changed in place, on torch's current stream and without waiting
    for it: captured graphs stay right. Not thread-safe.

    Raises:
        ContractError: an argument of another type, or out of range.
        UnsupportedError: torch cannot use the device here.

    Examples:
        >>> import torch
        >>> from cuteforge import KVCache, attention
        >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
        >>> request = cache.add()
        >>> cache.bind_prefill([request], [20])
        >>> q, (k, v) = torch.randn(20, 8, 64), torch.randn(2, 20, 2, 64)
        >>> prompt = attention(q, k, v, cache, is_causal=True)
        >>> cache.bind_decode([request])
        >>> token = attention(q[:1], k[:1], v[:1], cache)
        >>> prompt.shape, token.shape, cache.seqlen(request), cache.num_free_pages
        (torch.Size([20, 8, 64]), torch.Size([1, 8, 64]), 21, 6)
        >>> cache.free(request)
    """

    num_layers: int
    page_size: int
    max_requests: int
    max_seqlen: int
    device: torch.device
    dtype: torch.dtype

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *,
        num_pages: int, page_size: int = 16, max_requests: int = 256, max_seqlen: int, v_head_dim: int | None = None,
        dtype: torch.dtype | str = torch.bfloat16, device: torch.device | str = "cuda",
    ) -> None:  # fmt: skip
        heads = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        heads["v_head_dim"] = head_dim if v_head_dim is None else v_head_dim
        limits = {"page_size": page_size, "max_requests": max_requests, "max_seqlen": max_seqlen}
        num_pages = integer("num_pages", num_pages, least=1, most=_MAX_PAGES)
        self.num_layers, num_kv_heads, *dims = _checked_sizes(heads)
        self.page_size, self.max_requests, self.max_seqlen = _checked_sizes(limits)
        self.dtype, device = _checked_dtype(dtype), _checked_device(device)
        self.batch: Batch | None = None
        # The requests of the batch; and of a decode their numbers and the number of rows.
        self._bound: list[Request] = []
        self._decode_key: tuple[list[int], int] | None = None
        # A bit for each layer that does not have the batch's tokens yet.
        self._missing = 0
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._pool = KVPool(self.num_layers, num_pages + 1, self.page_size, num_kv_heads, dims, self.dtype, device)
            self.device = self._pool.device
            # New tokens all have a place of their own in the pool, but for padding rows.
            most_new = max(num_pages * self.page_size, self.max_requests)
            columns = -(-self.max_seqlen // self.page_size)
            self._tensors = BatchTensors(self.max_requests, columns, most_new, self.page_size, self.device)
        self._allocator = PageAllocator(num_pages, self.page_size, self.max_requests, self.max_seqlen)

    @classmethod
    def contiguous(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, *, batch: int, max_seqlen: int, page_size: int = 16,
        v_head_dim: int | None = None, dtype: torch.dtype | str = torch.bfloat16, device: torch.device | str = "cuda",
    ) -> KVCache:  # fmt: skip
        """A cache for `batch` requests that is never full before `max_seqlen`: each request has its own run of C pages,
        in order.

        Row r of the table is ``1 + r*C, …, r*C + C`` from `add` on, and nothing is shared.
        ``k_pool(layer)[1:].view(batch, C*ps, Hkv, D)`` is the dense cache; requests take its rows in order while none
        is freed. Arguments and errors as in the constructor.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache.contiguous(1, 2, 64, batch=4, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> cache.k_pool(0)[1:].view(4, 64, 2, 64).shape
            torch.Size([4, 64, 2, 64])
        """
        sizes = {"batch": batch, "max_seqlen": max_seqlen, "page_size": page_size}
        batch, max_seqlen, page_size = _checked_sizes(sizes)
        num_pages = batch * -(-max_seqlen // page_size)
        if num_pages > _MAX_PAGES:
            wanted = f"batch * ceil(max_seqlen / page_size) of at most {_MAX_PAGES} pages"
            raise ContractError(f"batch: wanted {wanted}, got {num_pages}")
        limits = {"page_size": page_size, "max_requests": batch, "max_seqlen": max_seqlen}
        heads = {"v_head_dim": v_head_dim, "dtype": dtype, "device": device}
        cache = cls(num_layers, num_kv_heads, head_dim, num_pages=num_pages, **limits, **heads)
        cache._allocator = PageAllocator(num_pages, **limits, owns_runs=True)
        return cache

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds; the scratch page does not count."""
        return self._allocator.num_free_pages

    def k_pool(self, layer: int) -> torch.Tensor:
        """Keys of a layer, ``(P, ps, Hkv, D)`` with ``P = num_pages + 1``: a view of the pool.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> cache.k_pool(0).shape
            torch.Size([9, 16, 2, 64])
        """
        return self._pool.keys[self._checked_layer(layer)]

    def v_pool(self, layer: int) -> torch.Tensor:
        """Values of a layer, ``(P, ps, Hkv, Dv)``: a view of the pool.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> sizes = {"v_head_dim": 128, "num_pages": 8, "max_seqlen": 64}
            >>> cache = KVCache(1, 2, 192, **sizes, dtype=torch.float32, device="cpu")
            >>> cache.v_pool(0).shape
            torch.Size([9, 16, 2, 128])
        """
        return self._pool.values[self._checked_layer(layer)]

    def _checked_layer(self, layer: Any) -> int:
        number = layer if type(layer) is int else integer("layer", layer)
        if not 0 <= number < self.num_layers:
            raise ContractError(f"layer: wanted one in [0, {self.num_layers}), got {layer!r}")
        return number

    def add(self, tokens: Sequence[int] | None = None) -> int:
        """A new request without tokens, or with those of its prompt that the cache already has.

        Args:
            tokens: ids of the prompt. If another request's whole pages hold exactly its start, both share them, and
                need not compute them again: `cached_tokens`. A page can be shared once a step has stored it in every
                layer, for as long as some request holds it. If an earlier step began the page and this one filled it,
                that is from the next bind on. Only full pages are shared, and they are never written again, so nothing
                is copied on a write. The last token of the prompt is never shared: a model has to compute at least one.

        Returns:
            The request's number, never used again after `free`.

        Raises:
            ContractError: not a sequence of int, or longer than max_seqlen.
            CacheFull: there are max_requests requests.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> prompt = list(range(40))
            >>> first = cache.add(prompt)
            >>> cache.bind_prefill([first], [40])
            >>> cache.append(0, *torch.randn(2, 40, 2, 64))
            >>> cache.cached_tokens(cache.add(prompt))  # two full pages of 16 tokens
            32
        """
        return self._allocator.add(tokens).id

    def free(self, request: int) -> None:
        """Give back a request: its row, and those of its pages that no other request shares. If it is in the bound
        batch, nothing is bound any more.

        Raises:
            ContractError: there is no such request.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> request = cache.add()
            >>> cache.bind_prefill([request], [20])
            >>> cache.num_free_pages
            6
            >>> cache.free(request)
            >>> cache.num_free_pages
            8
        """
        if self._allocator[request] in self._bound:
            self._unbind()
        self._allocator.free(request)

    def _unbind(self) -> None:
        self.batch, self._bound, self._decode_key, self._missing = None, [], None, 0

    def seqlen(self, request: int) -> int:
        """Tokens of a request, those included that the bound batch brings."""
        return self._allocator[request].num_tokens

    def cached_tokens(self, request: int) -> int:
        """Leading tokens of its prompt that were there when the request was added: the prefill starts after them.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> cache.cached_tokens(cache.add([1, 2, 3]))  # no other request has these tokens
            0
        """
        return self._allocator[request].num_cached

    def bind_prefill(self, requests: Sequence[int], lengths: Sequence[int]) -> None:
        """The next calls bring ``lengths[i]`` new tokens of ``requests[i]``, packed in this order. A prompt may come in
        several parts.

        Raises:
            ContractError: a request is unknown or there twice, a length is below 0, or a request would be longer than
                max_seqlen.
            CacheFull: too few pages are free. As with every error, nothing was changed.
            RuntimeError: torch's current stream is being captured.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> first, second = cache.add(), cache.add()
            >>> cache.bind_prefill([first, second], [20, 3])
            >>> cache.append(0, *torch.randn(2, 23, 2, 64))
        """
        self.keep_stored()
        bound = self._find(integers("requests", requests))
        counts = integers("lengths", lengths, least=0)
        if len(counts) != len(bound):
            raise ContractError(f"lengths: wanted {len(bound)}, one a request, got {len(counts)}")
        self._bind(bound, counts)
        self._decode_key = None

    def bind_decode(self, requests: Sequence[int], *, pad_to: int | None = None) -> None:
        """The next calls bring one new token of each request.

        If the requests are those of the last call in the same order, this is `step`: counters advance on the device, in
        place.

        Args:
            requests: in the order of the tokens.
            pad_to: rows of the batch. Rows past the requests have no tokens and store to the scratch page. None adds no
                rows.

        Raises:
            ContractError: as `bind_prefill`, or `pad_to` is below the number of requests or above max_requests.
            CacheFull, RuntimeError: as `bind_prefill`.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> requests = [cache.add(), cache.add()]
            >>> cache.bind_decode(requests, pad_to=4)
            >>> cache.batch.seqlens_k.tolist()
            [1, 1, 0, 0]
        """
        self.keep_stored()
        numbers, num_rows = self._decode_rows(requests, pad_to)
        if self._decode_key == (numbers, num_rows):
            self.step()
            return
        bound = self._find_padded(numbers, num_rows)
        self._bind(bound, [1] * len(bound), num_padding=num_rows - len(bound), is_decode=True)
        self._decode_key = numbers, num_rows

    def check_decode(self, requests: Sequence[int], *, pad_to: int | None = None) -> None:
        """Raise what `bind_decode` would raise, and change nothing.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> cache.check_decode([cache.add()], pad_to=1000)
            Traceback (most recent call last):
            cuteforge.errors.ContractError: pad_to: wanted from 1 to max_requests = 256, got 1000
        """
        bound = self._find_padded(*self._decode_rows(requests, pad_to))
        self._allocator.check_room(bound, [1] * len(bound))

    def _decode_rows(self, requests: Any, pad_to: Any) -> tuple[list[int], int]:
        numbers = integers("requests", requests)
        return numbers, len(numbers) if pad_to is None else integer("pad_to", pad_to, least=0)

    def _find_padded(self, numbers: list[int], num_rows: int) -> list[Request]:
        bound = self._find(numbers)
        if not len(bound) <= num_rows <= self.max_requests:
            raise ContractError(
                f"pad_to: wanted from {len(bound)} to max_requests = {self.max_requests}, got {num_rows}"
            )
        return bound

    def step(self) -> None:
        """One more new token for each request of the bound decode: three additions on the device, and an upload when a
        request starts a page.

        Raises:
            RuntimeError: no decode is bound, or torch's current stream is being captured.
            ContractError, CacheFull: as `bind_decode`.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> cache.bind_decode([cache.add()])
            >>> cache.append(0, *torch.randn(2, 1, 2, 64))
            >>> cache.step()
            >>> cache.batch.positions.tolist()
            [1]
        """
        if self._decode_key is None:
            raise RuntimeError("step: no decode is bound; call bind_decode first")
        self.keep_stored()
        rows = [request.row for request in self._bound]
        self._begin(self._bound, [1] * len(rows), lambda entries: self._tensors.advance(rows, entries))

    def rollback(self) -> None:
        """Undo the last bind: its requests have the tokens and pages that they had before, and nothing is bound.

        For steps that fail half-way: call it where you handle the error, then bind again. It does nothing if there is
        nothing to undo: before the first bind, after a rollback, and when a bind was refused after a step that every
        layer has stored (`keep_stored`). Requests that were freed meanwhile stay freed. No device work.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> request = cache.add()
            >>> cache.bind_prefill([request], [20])
            >>> cache.rollback()
            >>> cache.seqlen(request), cache.num_free_pages
            (0, 8)
        """
        if self._allocator.rollback():
            self._unbind()

    def keep_stored(self) -> None:
        """If every layer has stored the last step, keep it: `rollback` no longer undoes it.

        Every bind does this first, even one that is then refused: who asks for the next step has accepted the last.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> request = cache.add()
            >>> cache.bind_decode([request])
            >>> cache.append(0, *torch.randn(2, 1, 2, 64))
            >>> cache.keep_stored()
            >>> cache.rollback()
            >>> cache.seqlen(request)
            1
        """
        if self._allocator.is_stored:
            self._allocator.is_final = True

    def mark_stored(self, layer: int | None = None) -> None:
        """Say that a layer has the new tokens, if something other than `append` stored them: a graph, or a kernel that
        takes ``new_k`` and ``new_v``.

        The pages of a step are never shared while a layer is not marked.

        Args:
            layer: None: all of them.

        Raises:
            ContractError: no layer of the cache.
            RuntimeError: no batch is bound.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> cache.bind_decode([cache.add()])
            >>> cache.k_pool(0)[1, 0] = cache.v_pool(0)[1, 0] = 0.5  # page 1 has the token
            >>> cache.mark_stored()
            >>> cache.is_stored
            True
        """
        self._check_bound("mark_stored")
        self._mark(self._missing if layer is None else 1 << self._checked_layer(layer))

    @property
    def is_stored(self) -> bool:
        """Whether every layer has the tokens of the bound batch; False where nothing is bound.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> cache.bind_decode([cache.add()])
            >>> before = cache.is_stored
            >>> cache.append(0, *torch.randn(2, 1, 2, 64))
            >>> before, cache.is_stored
            (False, True)
        """
        return self.batch is not None and not self._missing

    def _mark(self, layers: int) -> None:
        if self._missing:
            self._missing &= ~layers
            if not self._missing:
                self._allocator.finish_step()

    def _check_bound(self, name: str) -> None:
        if self.batch is None:
            raise RuntimeError(f"{name}: no batch is bound; call bind_prefill or bind_decode first")

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the new tokens' keys and values in a layer, on torch's current stream, without waiting for it. Can be
        captured.

        Args:
            k, v: ``(T, Hkv, D)`` and ``(T, Hkv, Dv)`` in the cache's dtype and on its device, any strides, one token
                for each of ``batch.slots``.

        Raises:
            ContractError: names what differs, or requires grad in grad mode: a cache keeps no graph.
            RuntimeError: no batch is bound.

        Examples:
            >>> import torch
            >>> from cuteforge import KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> cache.bind_decode([cache.add()])
            >>> k, v = torch.randn(2, 1, 2, 64)
            >>> cache.append(0, k, v)
            >>> torch.equal(cache.k_pool(0).flatten(0, 1)[cache.batch.slots], k)
            True
        """
        self._check_bound("append")
        layer, slots = self._checked_layer(layer), self.batch.slots
        self._pool.check_new(len(slots), k, v)
        refuse_grad("kv", (k, v), "KVCache.append")
        self._pool.store(layer, slots, k, v)
        self._mark(1 << layer)

    def _find(self, numbers: list[int]) -> list[Request]:
        bound, seen = [], {}
        for i, number in enumerate(numbers):
            bound.append(self._allocator[number])
            if (first := seen.setdefault(number, i)) != i:
                raise ContractError(f"requests: wanted each once, got request {number} at {first} and {i}")
        return bound

    def _begin(self, requests: list[Request], counts: list[int], write: Callable[[list[TableEntry]], None]) -> None:
        """Reserve ``counts[i]`` new tokens for each request, and let `write` update the batch: all of it or nothing."""
        # What a capture records would be copied again, from memory that is no longer there, at each replay.
        if is_capturing():
            raise RuntimeError("a cache is bound before a capture and before each replay, not under capture")
        entries = self._allocator.reserve(requests, counts)
        try:
            self._tensors.list_pages(entries)
            write(entries)
        except BaseException:
            self.rollback()
            raise
        self._missing = (1 << self.num_layers) - 1

    def _bind(self, bound: list[Request], counts: list[int], *, num_padding: int = 0, is_decode: bool = False) -> None:
        """Reserve ``counts[i]`` new tokens of each request, then write all metadata of the batch, padding rows after
        the requests."""
        self._begin(bound, counts, lambda _: self._write(bound, counts, num_padding, is_decode))

    def _write(self, bound: list[Request], counts: list[int], num_padding: int, is_decode: bool) -> None:
        rows, seqlens = [request.row for request in bound], [request.num_tokens for request in bound]
        self.batch = self._tensors.write(rows, seqlens, counts, num_padding, is_decode)
        self._bound = bound


def _checked_sizes(sizes: dict[str, Any]) -> list[int]:
    return [integer(name, value, least=1, most=_MAX_INT32) for name, value in sizes.items()]


def _checked_dtype(dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ContractError(f"dtype: wanted a floating torch.dtype or its name, got {dtype!r:.80}")
    return found


def _checked_device(device: Any) -> torch.device:
    found = usable_device(device)
    if found.type == "meta":
        raise UnsupportedError("device: wanted one with memory, got meta")
    return found

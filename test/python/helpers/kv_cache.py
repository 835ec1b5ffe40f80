"""Caches in tests: poisoned pools, plain attention over what a cache holds, and the dense attention it has to equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuteforge.families.attention import reference
from cuteforge.serving.kv_cache import KVCache


def poisoned(cache: KVCache) -> KVCache:
    """`cache` with NaN wherever nothing was stored."""
    for layer in range(cache.num_layers):
        cache.k_pool(layer).fill_(torch.nan)
        cache.v_pool(layer).fill_(torch.nan)
    return cache


def attend(cache: KVCache, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Store the new tokens, then causal attention of each over its request: ``(T, Hq, Dv)``, read by page table and
    lengths alone."""
    cache.append(layer, k, v)
    b = cache.batch
    keys, values = (
        reference.gather_pages(pool, b.page_table, b.seqlens_k, b.page_table_rows)
        for pool in (cache.k_pool(layer), cache.v_pool(layer))
    )
    queries, lens_q = reference.unpack(q, b.cu_seqlens_q)
    out, _ = reference.attend(queries, keys, values, lens_q=lens_q, lens_k=b.seqlens_k, causal=True)
    return reference.pack(out, b.cu_seqlens_q)


class Dense:
    """Requests with all of their tokens drawn beforehand, and how many each has brought to a cache so far."""

    def __init__(
        self, num_layers: int, heads: tuple[int, int], dims: tuple[int, int], length: int, **kind: Any
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        (q_heads, kv_heads), (d, dv) = heads, dims

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(**kind)

        shapes = (q_heads, d), (kv_heads, d), (kv_heads, dv)
        self._draw = lambda: [[normal(length, *shape) for shape in shapes] for _ in range(num_layers)]
        self._tokens: dict[int, list[list[torch.Tensor]]] = {}
        self.brought: dict[int, int] = {}

    def add(self, request: int, like: int | None = None, cached: int = 0) -> None:
        """Tokens of `request`: its own, or the start of those of `like`, of which `cached` are in the cache."""
        self._tokens[request] = self._draw() if like is None else self._tokens[like]
        self.brought[request] = cached

    def bring(self, layer: int, requests: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
        """The next tokens' q, k, v, packed."""
        spans = [(r, self.brought[r], self.brought[r] + n) for r, n in zip(requests, counts)]
        return [torch.cat([self._tokens[r][layer][i][first:end] for r, first, end in spans]) for i in range(3)]

    def want(self, layer: int, requests: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Their attention, each request alone and dense."""
        outs = []
        for request, count in zip(requests, counts):
            end = self.brought[request] + count
            q, k, v = (x[:end].unsqueeze(0) for x in self._tokens[request][layer])
            outs.append(reference.attend(q[:, end - count :], k, v, causal=True)[0][0])
        return torch.cat(outs)

    def check(self, cache: KVCache, requests: Sequence[int], counts: Sequence[int]) -> None:
        """Bring the tokens of a bound batch, layer by layer, and compare."""
        for layer in range(cache.num_layers):
            got = attend(cache, layer, *self.bring(layer, requests, counts))
            torch.testing.assert_close(got, self.want(layer, requests, counts), rtol=0, atol=1e-6)
        for request, count in zip(requests, counts):
            self.brought[request] += count


def facts(cache: KVCache) -> dict[str, Any]:
    """What the bound batch says, with the entries of the table that may be read."""
    b = cache.batch
    columns = -(-b.seqlens_k // cache.page_size)
    pages = [b.page_table[row, :n].tolist() for row, n in zip(b.page_table_rows.tolist(), columns.tolist())]
    names = ("page_table_rows", "seqlens_k", "cu_seqlens_q", "slots", "positions")
    return {"pages": pages, "is_decode": b.is_decode, "max_new": b.max_new} | {
        name: getattr(b, name).tolist() for name in names
    }


def snapshot(cache: KVCache) -> list[Any]:
    """All that a refused call must leave alone: requests, pages, what can be shared, the batch and the memory behind
    it."""
    allocator, batch = cache._allocator, cache.batch
    lent = {n: {**vars(r), "pages": list(r.pages), "node": id(r.node)} for n, r in allocator._requests.items()}
    free = list(allocator._free_pages), list(allocator._free_rows), list(allocator._references)
    tensors = [x for x in vars(cache._tensors).values() if isinstance(x, torch.Tensor)]
    assert len(tensors) == 6  # the page table, and five of the batch
    bound = batch, list(cache._bound), cache._missing, None if batch is None else len(batch.slots)
    return [lent, free, set(allocator._prefixes._node_of), bound, [x.tolist() for x in tensors]]

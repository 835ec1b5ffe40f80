"""Operands of paged attention in tests: configurations to compile, batches, pools in pages, tables, masks.

Everything that a call must not read is poisoned: pages that no request uses and the tails of last pages hold NaN, table
entries past a request's length hold page numbers far outside the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from helpers.canary import strided_copy
from helpers.packs import offsets

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
PAGE_SIZES = (1, 2, 3, 7, 16, 48, 64, 128, 256, 512)
# Page numbers that fault, or read other memory, wherever they are used.
STALE = (-1, 2**31 - 1, -(2**31), 2**30)
SPARE_PAGES = 3


class Config(NamedTuple):
    """What a kernel is compiled for, and the path the configuration guards."""

    dtype: torch.dtype
    d: int
    dv: int
    group: int
    causal: bool
    guards: str

    @property
    def label(self) -> str:
        width = f"{self.d}" if self.d == self.dv else f"{self.d}-{self.dv}"
        kind = "causal" if self.causal else "full"
        return f"{str(self.dtype).removeprefix('torch.')}-d{width}-g{self.group}-{kind}"


CONFIGS = (
    Config(BF16, 128, 128, 4, False, "the common head"),
    Config(BF16, 128, 128, 4, True, "the common head, causal"),
    Config(FP16, 64, 64, 8, True, "fp16, half the width"),
    Config(FP16, 80, 80, 5, False, "head dim no multiple of 32, odd group"),
    Config(BF16, 192, 128, 8, True, "values narrower than keys, as in latent attention"),
    Config(BF16, 256, 256, 1, False, "the widest head; as many KV heads as query heads"),
    Config(BF16, 128, 128, 7, False, "a group that fills no tile of rows"),
    Config(BF16, 128, 128, 16, False, "a group that fills a tile of rows"),
    Config(BF16, 128, 128, 33, False, "a group longer than two tiles of rows"),
)
MAIN, CAUSAL, CAUSAL_FP16 = CONFIGS[:3]


class Batch(NamedTuple):
    """Run-time facts of a call: none may matter to what is compiled."""

    lengths: tuple[int, ...]
    page_size: int = 16
    queries: int | tuple[int, ...] = 0  # decode: L, 0 for q (B, Hq, D); prefill: tokens of each request
    kv_heads: int = 2
    rows: tuple[int, ...] | None = None  # page_table_rows
    by_indptr: bool = False
    place: str = "contiguous"
    spare_columns: int = 2


def edge_lengths(page_size: int) -> tuple[int, ...]:
    """Empty, around one page, many pages, and exactly as long as the table is wide (with no spare columns)."""
    columns = -(-1000 // page_size) + 1
    return (0, 1, page_size - 1, page_size, page_size + 1, 1000, columns * page_size)


def edges(page_size: int, queries: int | tuple[int, ...] = 0, **facts: Any) -> Batch:
    return Batch(edge_lengths(page_size), page_size, queries, spare_columns=0, **facts)


# Query tokens beside `edge_lengths`: none, one, fewer and more than the keys, around a tile of rows.
PREFILL_QUERIES = (3, 1, 0, 17, 64, 129, 200)

Fill = Callable[..., torch.Tensor]
# How the pools lie in memory: (fill(*shape), P, ps, Hkv, D, Dv) -> k_cache, v_cache.
PLACES: dict[str, Callable[..., Sequence[torch.Tensor]]] = {
    "contiguous": lambda fill, p, ps, h, d, dv: (fill(p, ps, h, d), fill(p, ps, h, dv)),
    "pages_interleaved": lambda fill, p, ps, h, d, dv: fill(p, 2, ps, h, d).unbind(1),
    "tokens_interleaved": lambda fill, p, ps, h, d, dv: fill(p, ps, 2, h, d).unbind(2),
    "heads_interleaved": lambda fill, p, ps, h, d, dv: fill(p, ps, h, d + dv).split((d, dv), -1),
    "head_major": lambda fill, p, ps, h, d, dv: (fill(p, h, ps, d).transpose(1, 2), fill(p, h, ps, dv).transpose(1, 2)),
    "all_pages_of_a_head": lambda fill, p, ps, h, d, dv: (fill(h, p, ps, d).permute(1, 2, 0, 3), fill(p, ps, h, dv)),
    "other_strides": lambda fill, p, ps, h, d, dv: (
        fill(p, ps + 1, h, d)[:, :ps],
        fill(p, h + 1, ps, dv)[:, 1:].transpose(1, 2),
    ),
    "gaps": lambda fill, p, ps, h, d, dv: (
        fill(p, ps + 2, h + 1, d + 8)[:, 1:-1, :h, :d],
        fill(p, ps, h, dv + 16)[..., 8:-8],
    ),
    "tokens_before_pages": lambda fill, p, ps, h, d, dv: (
        fill(ps, p, h, d).transpose(0, 1),
        fill(ps, p, h, dv).transpose(0, 1),
    ),
    "flat": lambda fill, p, ps, h, d, dv: (fill(p * ps, h, d), fill(p * ps, h, dv)),
}


@dataclass(frozen=True)
class Inputs:
    """Operands of one call but the outputs. `cu_seqlens_q` is None for decode."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    page_table_rows: torch.Tensor | None = None
    new_k: torch.Tensor | None = None
    new_v: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    causal: bool = False
    softmax_scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None

    def with_(self, **replaced) -> Inputs:
        return replace(self, **replaced)

    @property
    def is_decode(self) -> bool:
        return self.cu_seqlens_q is None

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_cache, self.v_cache

    @property
    def positional(self) -> tuple[torch.Tensor, ...]:
        """What comes before `out`."""
        first = (self.q, *self.pools, self.page_table)
        return first if self.is_decode else (*first, self.cu_seqlens_q)

    @property
    def optional(self) -> dict[str, torch.Tensor]:
        """What is passed by keyword, where it is given."""
        names = ("seqlens_k", "kv_indptr", "page_table_rows", "new_k", "new_v", "mask", "bias", "sinks")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """What else is passed by keyword."""
        names = ("causal", "softmax_scale", "window", "softcap")
        return {name: getattr(self, name) for name in names}

    @property
    def lens(self) -> torch.Tensor:
        """KV tokens of each request, on the device."""
        return (self.kv_indptr.diff() if self.seqlens_k is None else self.seqlens_k).clamp(min=0)

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[1] if self.k_cache.dim() == 4 else 1

    @property
    def rows(self) -> torch.Tensor:
        """The table row of each request."""
        batch = torch.arange(len(self.lens), device=self.q.device)
        return batch if self.page_table_rows is None else self.page_table_rows.long()


class KV(NamedTuple):
    """Keys and values of all table rows, row after row, and where each row ends."""

    k: torch.Tensor
    v: torch.Tensor
    lengths: tuple[int, ...]


def draw(config: Config, batch: Batch, device, seed: int = 0, page_seed: int = 0) -> Inputs:
    """Normal operands; the numbers follow `seed`, which page is where follows `page_seed`."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(config.dtype)

    lengths = row_lengths(batch)
    kv = KV(*(normal(sum(lengths), batch.kv_heads, width) for width in (config.d, config.dv)), lengths)
    heads = config.group * batch.kv_heads
    if isinstance(batch.queries, tuple):
        q, cu_seqlens_q = normal(sum(batch.queries), heads, config.d), offsets(batch.queries).to(device)
    else:
        tokens = (len(batch.lengths), batch.queries) if batch.queries else (len(batch.lengths),)
        q, cu_seqlens_q = normal(*tokens, heads, config.d), None
    k_cache, v_cache, table = paged(kv, batch, page_seed)
    rows = None if batch.rows is None else torch.tensor(batch.rows, dtype=INT32, device=device)
    x = Inputs(q, k_cache, v_cache, table, cu_seqlens_q, page_table_rows=rows, causal=config.causal)
    return with_lengths(x, batch.lengths, batch.by_indptr)


def with_lengths(x: Inputs, lengths: Sequence[int], by_indptr: bool = False) -> Inputs:
    """`x` with other KV lengths, which its pools must hold. Offsets start away from 0: only their differences count."""
    if by_indptr:
        return x.with_(seqlens_k=None, kv_indptr=offsets(lengths).to(x.q.device) + 5)
    return x.with_(seqlens_k=torch.tensor(lengths, dtype=INT32, device=x.q.device), kv_indptr=None)


def row_lengths(batch: Batch) -> tuple[int, ...]:
    """Tokens of each table row: of the longest request that uses it; if rows are named, none uses the last one."""
    rows = range(len(batch.lengths)) if batch.rows is None else batch.rows
    count = len(batch.lengths) if batch.rows is None else max(batch.rows) + 2
    return tuple(max((n for n, r in zip(batch.lengths, rows) if r == row), default=0) for row in range(count))


def paged(kv: KV, batch: Batch, page_seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kv` in the pages of poisoned pools, in random order: k_cache, v_cache, page_table."""
    device, page_size = kv.k.device, batch.page_size
    counts = [-(-n // page_size) for n in kv.lengths]
    num_pages = sum(counts) + SPARE_PAGES
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page_seed))
    columns = max(counts, default=0) + batch.spare_columns
    entries = torch.arange(len(counts) * columns).view(len(counts), columns)
    table = torch.tensor(STALE, dtype=INT32)[entries % len(STALE)]
    for row, pages in enumerate(order[: sum(counts)].split(counts) if counts else ()):
        table[row, : len(pages)] = pages
    table = table.to(device)

    def fill(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=kv.k.dtype, device=device)

    widths = kv.k.shape[-1], kv.v.shape[-1]
    k_cache, v_cache = PLACES[batch.place](fill, num_pages, page_size, batch.kv_heads, *widths)
    counts_by_row = torch.tensor(kv.lengths, dtype=torch.int64, device=device)
    row = torch.arange(len(kv.lengths), device=device).repeat_interleave(counts_by_row)
    position = torch.cat([torch.arange(n, device=device) for n in (0, *kv.lengths)])
    for cache, values in ((k_cache, kv.k), (v_cache, kv.v)):
        put(cache, table, row, position, values)
    return k_cache, v_cache, table


def put(cache: torch.Tensor, table: torch.Tensor, row, position, values: torch.Tensor) -> None:
    """Write `values` at the positions of table rows; a page number that is not in the pool stores nothing."""
    pages = cache if cache.dim() == 4 else cache[:, None]
    if not position.numel():
        return
    page = table[row, position // pages.shape[1]].long()
    kept = (page >= 0) & (page < len(pages))
    pages[page[kept], (position % pages.shape[1])[kept]] = values[kept]


def appending(x: Inputs, seed: int = 99) -> Inputs:
    """`x` with its last position in new_k and new_v, and NaN in the pool where that goes."""
    generator = torch.Generator(device=x.q.device).manual_seed(seed)
    new = {}
    for name, cache in zip(("new_k", "new_v"), x.pools):
        shape = (len(x.lens), *cache.shape[-2:])
        new[name] = torch.randn(shape, generator=generator, device=x.q.device).to(cache.dtype)
        put_last(x, cache, torch.full_like(new[name], torch.nan))
    return x.with_(**new)


def put_last(x: Inputs, cache: torch.Tensor, values: torch.Tensor) -> None:
    """Write one value for each request at its last position."""
    full = x.lens > 0
    put(cache, x.page_table, x.rows[full], x.lens[full].long() - 1, values[full])


MASKS = {
    "columns": lambda b, heads, rows, cols: (b, cols),
    "rows": lambda b, heads, rows, cols: (b, rows, cols),
    "one_for_all": lambda b, heads, rows, cols: (1, rows, cols),
    "heads": lambda b, heads, rows, cols: (b, heads, rows, cols),
    "one_head": lambda b, heads, rows, cols: (b, 1, rows, cols),
    "one_row_for_all": lambda b, heads, rows, cols: (1, heads, 1, cols),
}


def with_mask(x: Inputs, kind: str, cols: int | None = None, rows: int | None = None, seed: int = 5) -> Inputs:
    """`x` with a mask that keeps half, as wide as the longest request and as high as the most queries by default."""
    device, most = x.q.device, int(x.lens.max())
    queries = int(x.cu_seqlens_q.diff().max()) if not x.is_decode else x.q.shape[1] if x.q.dim() == 4 else 1
    rows, cols = max(1, queries) if rows is None else rows, most if cols is None else cols
    shape = MASKS[kind](len(x.lens), x.q.shape[-2], rows, cols)
    generator = torch.Generator(device=device).manual_seed(seed)
    return x.with_(mask=torch.rand(shape, generator=generator, device=device) < 0.5)


# One of each kind of call: what is compiled for each differs in the operands, not only in their extents.
KINDS = ("decode", "append", "prefill", "indptr")


def small(kind: str, device) -> Inputs:
    """Operands of one of `KINDS`, all extents different: B 5, L 2, R 9 (B without rows), P 17, ps 16, Hq 8, Hkv 2."""
    queries = (3, 0, 20, 5, 1) if kind == "prefill" else 2
    rows = (6, 1, 7, 0, 3) if kind != "indptr" else None
    batch = Batch((40, 3, 17, 100, 1), 16, queries, rows=rows, by_indptr=kind == "indptr")
    x = draw(CAUSAL if kind == "prefill" else MAIN, batch, device)
    return appending(x) if kind == "append" else with_mask(x, "rows") if kind == "indptr" else x


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a base that is no multiple of 16 bytes."""
    return strided_copy(tensor, tensor.stride(), offset=1)


def columns_apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last dim is not contiguous."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def rows_misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose rows are an odd number of elements apart."""
    return strided_copy(tensor, tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1).stride())

"""GQA attention, dense and paged, for the commands: its demo input and its sample ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cuteforge import GQADecode, GQAPrefill, MergeState, PagedGQADecode, PagedGQAPrefill, TensorSpec
from cuteforge.cli.families import Case, Presets
from cuteforge.families.attention import reference
from cuteforge.families.attention.api import MAX_DECODE_TOKENS

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PAGE_SIZE = 16
SPARE_PAGES = 5  # of the pool, in no table


@dataclass(frozen=True)
class Use:
    """One op, and the queries and keys of each request."""

    op: type
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]

    @property
    def is_decode(self) -> bool:
        return self.op in (GQADecode, PagedGQADecode)

    @property
    def is_paged(self) -> bool:
        return self.op in (PagedGQADecode, PagedGQAPrefill)


# An empty request, one key, the edges of a page, long ones.
_DECODE_LENGTHS = (4099, 0, 1, 16, 17, 2500)
USES = {
    "attention decode": Use(GQADecode, (1,) * len(_DECODE_LENGTHS), _DECODE_LENGTHS),
    "attention prefill, causal": Use(GQAPrefill, (255, 255), (390, 390)),
    "paged decode": Use(PagedGQADecode, (1,) * len(_DECODE_LENGTHS), _DECODE_LENGTHS),
    # New keys only, three tokens after a long context, no query, one key before.
    "paged prefill, causal": Use(PagedGQAPrefill, (257, 3, 0, 130), (257, 1500, 40, 131)),
}


@dataclass(frozen=True)
class Problem:
    """Input of one use, bf16, on one device; all that lies past a length, or in no table, is NaN.

    Attributes:
        padded: q ``(B, L, Hq, D)``, k and v ``(B, S, Hkv, D)``, as the oracle reads them.
        inputs, tensors: operands of the op before `out`, and by keyword.
    """

    use: Use
    padded: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def draw(cls, use: Use, device: str) -> Problem:
        # Drawn on the CPU, so that every machine checks the same input.
        generator = torch.Generator().manual_seed(0)
        parts = ((use.lens_q, HEADS), (use.lens_k, KV_HEADS), (use.lens_k, KV_HEADS))
        q, k, v = padded = tuple(_draw_padded(lens, heads, generator) for lens, heads in parts)
        seqlens_k = torch.tensor(use.lens_k, dtype=torch.int32)
        if use.is_paged:
            table = _draw_page_table(use.lens_k, generator)
            inputs, tensors = (q, *(_page_pool(x, table) for x in (k, v)), table), {"seqlens_k": seqlens_k}
        else:
            inputs, tensors = padded, {"seqlens_k": seqlens_k} if use.is_decode else {}
        if use.is_paged and not use.is_decode:
            offsets = _offsets(use.lens_q)
            inputs = (reference.pack(q, offsets), *inputs[1:], offsets)
        move = {name: x.to(device) for name, x in tensors.items()}
        return cls(use, *(tuple(x.to(device) for x in operands) for operands in (padded, inputs)), move)

    def attend(self, compute_dtype=torch.bfloat16, out_dtype=None) -> dict[str, torch.Tensor]:
        lens_q, lens_k = (torch.tensor(lens) for lens in (self.use.lens_q, self.use.lens_k))
        options = {"compute_dtype": compute_dtype, "out_dtype": out_dtype, "causal": not self.use.is_decode}
        out, _ = reference.attend(*self.padded, lens_q=lens_q, lens_k=lens_k, **options)
        packed = self.inputs[0].dim() == 3
        return {"out": reference.pack(out, _offsets(self.use.lens_q)) if packed else out}

    def bind(self):
        q = self.inputs[0]
        out = torch.full_like(q, torch.nan)
        op = self.use.op(*self.inputs, out, **self.tensors, causal=not self.use.is_decode).compile()
        workspace = torch.full((op.workspace_bytes(),), 0xFF, dtype=torch.uint8, device=q.device)
        launch = op.bind(*self.inputs, out, **self.tensors, workspace=workspace if workspace.numel() else None)
        return launch, {"out": out}

    def size_bytes(self) -> int:
        """q, k and v read within their lengths, out written."""
        return 4 * HEAD_DIM * (sum(self.use.lens_q) * HEADS + sum(self.use.lens_k) * KV_HEADS)


def demo_cases(device: str) -> list[Case]:
    """Decode and prefill, dense and paged, input on `device`."""
    return [_case(name, Problem.draw(use, device)) for name, use in USES.items()]


def sample_ops(device: str) -> dict[str, Any]:
    """Label -> op on samples of `device`, which need not exist; nothing is compiled."""
    merge = _merge(head_dim=HEAD_DIM, dtype="bfloat16", device=device)
    return {**{name: _sample(use, device) for name, use in USES.items()}, "merge of two parts": merge}


def _case(name: str, problem: Problem) -> Case:
    return Case(
        name,
        problem.size_bytes(),
        exact=lambda: problem.attend(torch.float64, torch.float64),
        # The kernels multiply the weights in bf16, so the eager code that sets the budget does, too.
        eager=problem.attend,
        fallback=lambda: problem.attend(torch.float32),
        bind=problem.bind,
        compile_for=lambda arch: _sample(problem.use).compile(arch),
    )


def _sample(use: Use, device: str = "cuda"):
    # work tiles as many as those of the input, of one KV head
    options = {"tokens": 1, "requests": len(use.lens_k) * KV_HEADS} if use.is_decode else {}
    group = HEADS // KV_HEADS
    return _MAKERS[use.op](head_dim=HEAD_DIM, dtype="bfloat16", device=device, group=group, **options)


def _draw_padded(lens: tuple[int, ...], heads: int, generator: torch.Generator) -> torch.Tensor:
    """``(B, longest, heads, D)``, NaN past the lengths."""
    x = torch.randn(len(lens), max(lens), heads, HEAD_DIM, generator=generator).bfloat16()
    for request, length in zip(x, lens):
        request[length:] = torch.nan
    return x


def _draw_page_table(lens: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Pages in random order, -1 past the last one of a request."""
    counts = [-(-n // PAGE_SIZE) for n in lens]
    pages = torch.randperm(sum(counts) + SPARE_PAGES, generator=generator).int()[: sum(counts)].split(counts)
    return torch.nn.utils.rnn.pad_sequence(pages, batch_first=True, padding_value=-1)


def _page_pool(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The tokens of ``x (B, S, Hkv, D)`` in the pages that `table` names; NaN in all others."""
    used = table >= 0
    tokens = x.new_full((x.shape[0], table.shape[1] * PAGE_SIZE, *x.shape[2:]), torch.nan)
    tokens[:, : x.shape[1]] = x
    pool = x.new_full((int(used.sum()) + SPARE_PAGES, PAGE_SIZE, *x.shape[2:]), torch.nan)
    pool[table[used].long()] = tokens.view(*table.shape, *pool.shape[1:])[used]
    return pool


def _offsets(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lens)).cumsum(0).int()


@dataclass(frozen=True)
class _Samples:
    """Specs of one head dim, dtype and device, of one request with one key or page.

    Of all sizes only the numbers of query rows and, in decode, of requests decide what is compiled: they choose the
    tile.
    """

    head_dim: int
    dtype: str
    device: str

    def heads(self, *shape: int) -> TensorSpec:
        return TensorSpec((*shape, self.head_dim), self.dtype, device=self.device)

    def ints(self, *shape: int) -> TensorSpec:
        return TensorSpec(shape, "int32", device=self.device)

    def lse(self, wanted: bool, *shape: int) -> TensorSpec | None:
        return TensorSpec(shape, "float32", device=self.device) if wanted else None


def _decode(
    *,
    head_dim: int,
    dtype: str,
    device: str = "cuda",
    group: int = 4,
    tokens: int = 1,
    requests: int = 1,
    seqlens: bool = True,
    causal: bool = False,
    lse: bool = False,
) -> GQADecode:
    s = _Samples(head_dim, dtype, device)
    q, kv = s.heads(requests, tokens, group), s.heads(requests, 1, 1)
    lens = s.ints(requests) if seqlens else None
    return GQADecode(q, kv, kv, q, seqlens_k=lens, lse=s.lse(lse, requests, group, tokens), causal=causal)


def _prefill(
    *,
    head_dim: int,
    dtype: str,
    device: str = "cuda",
    group: int = 4,
    tokens: int = 1,
    packed: bool = False,
    causal: bool = True,
    lse: bool = False,
) -> GQAPrefill:
    s = _Samples(head_dim, dtype, device)
    if packed:
        q, kv, offsets, sums = s.heads(tokens, group), s.heads(1, 1), s.ints(2), s.lse(lse, group, tokens)
        return GQAPrefill(q, kv, kv, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, lse=sums, causal=causal)
    q, kv = s.heads(1, tokens, group), s.heads(1, 1, 1)
    return GQAPrefill(q, kv, kv, q, lse=s.lse(lse, 1, group, tokens), causal=causal)


def _paged_decode(
    *,
    head_dim: int,
    dtype: str,
    device: str = "cuda",
    group: int = 4,
    tokens: int | None = None,
    requests: int = 1,
    append: bool = False,
    causal: bool = False,
    lse: bool = False,
) -> PagedGQADecode:
    """A decode over pages.

    Args:
        tokens: None for q ``(B, Hq, D)``, a number for ``(B, L, Hq, D)``.
        append: whether the newest key and value come by themselves.
    """
    s = _Samples(head_dim, dtype, device)
    q = s.heads(requests, group) if tokens is None else s.heads(requests, tokens, group)
    pool, new = s.heads(1, PAGE_SIZE, 1), s.heads(requests, 1) if append else None
    sums = s.lse(lse, requests, group, tokens or 1)
    tensors = {"seqlens_k": s.ints(requests), "new_k": new, "new_v": new, "lse": sums}
    return PagedGQADecode(q, pool, pool, s.ints(requests, 1), q, **tensors, causal=causal)


def _paged_prefill(
    *,
    head_dim: int,
    dtype: str,
    device: str = "cuda",
    group: int = 4,
    tokens: int = 1,
    causal: bool = True,
    lse: bool = False,
) -> PagedGQAPrefill:
    s = _Samples(head_dim, dtype, device)
    q, pool = s.heads(tokens, group), s.heads(1, PAGE_SIZE, 1)
    tensors = {"seqlens_k": s.ints(1), "lse": s.lse(lse, group, tokens)}
    return PagedGQAPrefill(q, pool, pool, s.ints(1, 1), s.ints(2), q, **tensors, causal=causal)


@dataclass(frozen=True)
class Sizes:
    """A call of attention: `requests` with `tokens` queries and `keys` keys each.

    Attributes:
        page_size: tokens of a page; None for dense keys.
    """

    requests: int
    tokens: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool = False
    page_size: int | None = None


def paged_sample(sizes: Sizes) -> PagedGQADecode | PagedGQAPrefill:
    """An op over pages on samples of these sizes: decode up to 16 tokens a request, else prefill."""
    s, columns = _Samples(sizes.head_dim, sizes.dtype, "cuda"), -(-sizes.keys // sizes.page_size)
    requests, tokens, heads = sizes.requests, sizes.tokens, sizes.heads
    pool = s.heads(max(requests * columns, 1), sizes.page_size, sizes.kv_heads)
    table, lengths = s.ints(requests, columns), s.ints(requests)
    if tokens <= MAX_DECODE_TOKENS:
        q = s.heads(requests, heads) if tokens == 1 else s.heads(requests, tokens, heads)
        return PagedGQADecode(q, pool, pool, table, q, seqlens_k=lengths, causal=sizes.causal)
    q = s.heads(requests * tokens, heads)
    return PagedGQAPrefill(q, pool, pool, table, s.ints(requests + 1), q, seqlens_k=lengths, causal=sizes.causal)


def _merge(*, head_dim: int, dtype: str, device: str = "cuda", packed: bool = False) -> MergeState:
    s = _Samples(head_dim, dtype, device)
    o, lse = (s.heads(1, 1), s.lse(True, 1, 1)) if packed else (s.heads(1, 1, 1), s.lse(True, 1, 1, 1))
    return MergeState(o, lse, o, lse, o, lse)


OPS = {
    "decode": _decode,
    "prefill": _prefill,
    "paged decode": _paged_decode,
    "paged prefill": _paged_prefill,
    "merge": _merge,
}
_MAKERS = {GQADecode: _decode, GQAPrefill: _prefill, PagedGQADecode: _paged_decode, PagedGQAPrefill: _paged_prefill}
# More than the few tokens of an SM, on any GPU: on sm_90a prefill then has another tile.
MANY_TOKENS = 1 << 20
# With more work tiles than SMs decode has another tile.
MANY_REQUESTS = 1024
# One group serves all up to 16 query heads for a KV head: they fill the same rows of a matrix instruction.
PRESETS = Presets(
    (
        ("decode", {}),
        ("decode", {"requests": MANY_REQUESTS}),
        ("decode", {"seqlens": False}),
        ("decode", {"seqlens": False, "requests": MANY_REQUESTS}),
        ("prefill", {}),
        ("prefill", {"tokens": MANY_TOKENS}),
        ("prefill", {"packed": True}),
        ("prefill", {"packed": True, "tokens": MANY_TOKENS}),
        ("paged decode", {}),
        ("paged decode", {"requests": MANY_REQUESTS}),
        ("paged decode", {"append": True}),
        ("paged decode", {"append": True, "requests": MANY_REQUESTS}),
        ("paged prefill", {}),
        ("paged prefill", {"tokens": MANY_TOKENS}),
        ("merge", {}),
    ),
    head_dims=(64, 128),
    dtypes=("bfloat16", "float16"),
)

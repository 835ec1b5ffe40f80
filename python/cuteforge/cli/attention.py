"""GQA attention, dense and paged, for the commands: its demo input and its sample ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cuteforge import GQADecode, GQAPrefill, PagedGQADecode, PagedGQAPrefill, TensorSpec
from cuteforge.attention import reference
from cuteforge.cli.families import Case

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
    "attention prefill, causal": Use(GQAPrefill, (511, 511), (700, 700)),
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
        return cls(use, *(tuple(x.to(device) for x in group) for group in (padded, inputs)), move)

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
    return {name: _sample(use, device) for name, use in USES.items()}


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
    """For one request of one query and one key or page: sizes are no part of what is compiled."""
    q, cache = (TensorSpec((1, n, h, HEAD_DIM), "bfloat16", device=device)
                for n, h in ((1, HEADS), (PAGE_SIZE if use.is_paged else 1, KV_HEADS)))  # fmt: skip
    table, lens, offsets = (TensorSpec(shape, "int32", device=device) for shape in ((1, 1), (1,), (2,)))
    inputs, tensors = (q, cache, cache), {"seqlens_k": lens} if use.is_paged or use.is_decode else {}
    if use.is_paged:
        inputs = (*inputs, table)
    if use.is_paged and not use.is_decode:
        q = TensorSpec((1, HEADS, HEAD_DIM), "bfloat16", device=device)
        inputs = (q, *inputs[1:], offsets)
    return use.op(*inputs, q, **tensors, causal=not use.is_decode)


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

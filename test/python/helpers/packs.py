"""Ragged packs: named segment lengths, and compressor operands drawn for them with everything unused poisoned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

Lengths = Callable[[int], list[int]]


def _ragged(ratio: int) -> list[int]:
    return [5 * ratio + 1, 0, ratio, 2 * ratio - 1, 1, 9 * ratio + ratio // 2, 3 * ratio, 17 * ratio + 3]


# Lengths by ratio, so that every pack has the same block structure at every ratio.
PACKS: dict[str, Lengths] = {
    "one_long": lambda ratio: [max(67 * ratio, 2048) + ratio - 1],
    "ragged": _ragged,
    "empties_between": lambda ratio: [0, 3 * ratio, 0, 0, 2 * ratio + 1, 0, 4 * ratio, 0],
    "shorter_than_ratio": lambda ratio: [max(1, ratio - 1)] * 5 + [ratio],
    "exact_multiples": lambda ratio: [ratio, 4 * ratio, 2 * ratio, 8 * ratio],
    "one_token": lambda ratio: [1],
    "many_short": lambda ratio: [2 * ratio, 1, ratio - 1, ratio] * 1024,
    "one_token_100k": lambda ratio: [1] * 100_000,
}


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """``[0, l0, l0 + l1, ...]`` int32 on the CPU."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Pack:
    """Segment lengths plus capacity on both axes: ``extra_tokens`` after the last segment, ``extra_rows`` of output."""

    lengths: tuple[int, ...]
    ratio: int
    extra_tokens: int = 0
    extra_rows: int = 0

    @classmethod
    def named(cls, name: str, ratio: int, **capacity: int) -> Pack:
        return cls(tuple(PACKS[name](ratio)), ratio, **capacity)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) + self.extra_tokens

    @property
    def real_rows(self) -> int:
        return sum(length // self.ratio for length in self.lengths)

    @property
    def total_comp(self) -> int:
        return self.real_rows + self.extra_rows

    def cu_seqlens(self) -> torch.Tensor:
        return offsets(self.lengths)

    def cu_seqlens_comp(self) -> torch.Tensor:
        return offsets([length // self.ratio for length in self.lengths])

    def unconsumed(self, coff: int) -> torch.Tensor:
        """``(T, coff)`` bool on the CPU: column halves that no block pools (tails, last blocks, capacity)."""
        cu = self.cu_seqlens().long()
        token = torch.arange(self.num_tokens)
        segment = (torch.searchsorted(cu, token, right=True) - 1).clamp(max=max(0, len(self.lengths) - 1))
        lengths = torch.tensor(self.lengths or (0,))
        start = cu[:-1] if self.lengths else cu
        block = (token - start[segment]) // self.ratio
        count = torch.where(token < cu[-1], lengths[segment] // self.ratio, 0)
        # The first half of a coff 2 row is read one block later, so the last block's goes unread.
        return torch.stack([block >= count - (coff - 1 - half) for half in range(coff)], 1)


@dataclass(frozen=True)
class Inputs:
    """Operands of one compressor call and their configuration; ``pack`` is the structure they were drawn for."""

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_comp: torch.Tensor
    grad_out: torch.Tensor
    ratio: int
    coff: int
    pack: Pack

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The five inputs in signature order."""
        return self.kv, self.score, self.ape, self.cu_seqlens, self.cu_seqlens_comp

    @property
    def config(self) -> dict[str, int]:
        return {"ratio": self.ratio, "coff": self.coff}

    @property
    def total_comp(self) -> int:
        return self.grad_out.shape[0]

    @property
    def head_dim(self) -> int:
        return self.ape.shape[1] // self.coff

    @property
    def unconsumed(self) -> torch.Tensor:
        """``(T, coff * d)`` bool: elements of kv and score that no block pools."""
        return self.pack.unconsumed(self.coff).to(self.kv.device).repeat_interleave(self.head_dim, 1)

    def with_(self, **tensors) -> Inputs:
        return replace(self, **tensors)


def draw(
    pack: Pack, coff: int, d: int, dtype=torch.bfloat16, device="cpu", seed: int = 0, poison: bool = True
) -> Inputs:
    """Normal operands. ``poison``: NaN in every kv and score element no block pools and in padding rows' gradients.

    Forward padding rows pool tokens ``0 .. ratio - 1`` whatever owns them, so there poison shows up as in eager code.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * scale

    kv = normal(pack.num_tokens, coff * d).to(dtype)
    score = normal(pack.num_tokens, coff * d, scale=2.0).to(dtype)
    grad_out = normal(pack.total_comp, d).to(dtype)
    if poison:
        unused = pack.unconsumed(coff).to(device)
        for tensor in (kv, score):
            tensor.view(pack.num_tokens, coff, d).masked_fill_(unused.unsqueeze(-1), torch.nan)
        grad_out[pack.real_rows :] = torch.nan
    cu, cuc = (t.to(device) for t in (pack.cu_seqlens(), pack.cu_seqlens_comp()))
    return Inputs(kv, score, normal(pack.ratio, coff * d), cu, cuc, grad_out, pack.ratio, coff, pack)

"""The rotary embedding for the commands: its demo input and its sample ops."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from cuteforge import RotaryEmbedding, TensorSpec, rotary_table
from cuteforge.cli.families import Case, Presets
from cuteforge.families.rotary import reference

NUM_TOKENS = 4099
HEADS, KV_HEADS = 32, 8
MAX_POS = 131072
# As published with the model.
LLAMA_3_1 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """One use of the op: the heads, how their columns pair, and the table."""

    head_dim: int
    rotary_dim: int
    interleaved: bool
    base: float
    scaling: dict[str, Any] | None = None


USES = {
    "rotary halves": Use(128, 128, False, 500000.0, LLAMA_3_1),
    "rotary interleaved, partial": Use(96, 64, True, 10000.0),
}


@dataclass(frozen=True)
class Problem:
    """q and k of one use, bf16, slices of one fused buffer, on one device."""

    use: Use
    heads: dict[str, torch.Tensor]
    table: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor

    @classmethod
    def draw(cls, use: Use, device: str) -> Problem:
        # Drawn on the CPU, so that every machine checks the same input.
        generator = torch.Generator().manual_seed(0)
        fused = torch.randn(NUM_TOKENS, HEADS + 2 * KV_HEADS, use.head_dim, generator=generator).bfloat16().to(device)
        positions = torch.randint(MAX_POS, (NUM_TOKENS,), generator=generator)
        positions[-1] = MAX_POS - 1
        table = rotary_table(MAX_POS, use.rotary_dim, use.base, use.scaling, device)
        heads = {"q": fused[:, :HEADS], "k": fused[:, HEADS : HEADS + KV_HEADS]}
        return cls(use, heads, table, positions.to(device))

    def rotate(self, compute_dtype=torch.float32, out_dtype=None) -> dict[str, torch.Tensor]:
        options = {"interleaved": self.use.interleaved, "compute_dtype": compute_dtype, "out_dtype": out_dtype}
        return {name: reference.rotate(x, self.table, self.positions, **options) for name, x in self.heads.items()}

    def bind(self):
        out = {name: torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device) for name, x in self.heads.items()}
        operands = (self.heads["q"], self.table, out["q"], self.positions)
        keys = {"k": self.heads["k"], "k_out": out["k"]}
        op = RotaryEmbedding(*operands, **keys, interleaved=self.use.interleaved).compile()
        return op.bind(*operands, **keys), out

    def size_bytes(self) -> int:
        """q and k read and written, the table's rows and the positions read."""
        tokens = 2 * sum(x.numel() * x.itemsize for x in self.heads.values())
        return tokens + NUM_TOKENS * (4 * self.use.rotary_dim + self.positions.itemsize)


def demo_cases(device: str) -> list[Case]:
    """Both pairings, q and k in one launch, input on `device`."""
    return [_case(name, Problem.draw(use, device)) for name, use in USES.items()]


def sample_ops(device: str) -> dict[str, Any]:
    """Label -> op on samples of `device`, which need not exist; nothing is compiled."""
    return {name: _sample(use, device) for name, use in USES.items()}


def _case(name: str, problem: Problem) -> Case:
    return Case(
        name,
        problem.size_bytes(),
        exact=lambda: problem.rotate(torch.float64, torch.float64),
        eager=problem.rotate,
        fallback=problem.rotate,
        bind=problem.bind,
        compile_for=lambda arch: _sample(problem.use).compile(arch),
    )


def _sample(use: Use, device: str = "cuda") -> RotaryEmbedding:
    return _make(use.interleaved, use.head_dim, "bfloat16", use.rotary_dim, device=device)


def _make(
    interleaved: bool,
    head_dim: int,
    dtype: str,
    rotary_dim: int | None = None,
    *,
    dense: bool = False,
    positions: str | None = "int64",
    keys: bool = True,
    device: str = "cuda",
) -> RotaryEmbedding:
    """For one token and head each: sizes are no part of what is compiled.

    Args:
        rotary_dim: all columns when None.
        dense: ``(B, L, H, D)`` instead of ``(T, H, D)``.
        positions: their dtype; None for a table with a row for each token.
        keys: q and k in one launch.
    """
    tokens, pairs = (1, 1) if dense else (1,), (head_dim if rotary_dim is None else rotary_dim) // 2
    heads = TensorSpec((*tokens, 1, head_dim), dtype, device=device)
    row = TensorSpec((1, pairs), "float32", device=device)
    table = TensorSpec((*tokens, pairs, 2), "float32", device=device) if positions is None else (row, row)
    position_spec = None if positions is None else TensorSpec(tokens, positions, device=device)
    k = heads if keys else None
    return RotaryEmbedding(heads, table, heads, position_spec, k=k, k_out=k, interleaved=interleaved)


OPS = {"halves": functools.partial(_make, False), "interleaved": functools.partial(_make, True)}
PRESETS = Presets(
    tuple((op, options) for op in OPS for options in ({}, {"dense": True})),
    head_dims=(64, 128),
    dtypes=("bfloat16", "float16"),
)

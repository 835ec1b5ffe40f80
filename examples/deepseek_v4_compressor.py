"""Training steps through the KV compressors of DeepSeek-V4-style models, on a packed batch.

    python examples/deepseek_v4_compressor.py                  # the GPU, or without one the CPU
    python examples/deepseek_v4_compressor.py --steps 50 --dim 128

Two compressors learn to give the rows of a teacher: CSA (ratio 4, coff 2: windows of 8 tokens that overlap) and HCA
(ratio 128, coff 1). Before the
first step the gradients of `cuteforge.compress` are compared with those of an eager loop over segments and blocks. The
exit status is 1 where
they differ by more than rounding, or a loss did not fall.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import cuteforge

# Tokens of the packed segments: shorter than a block of 4 or of 128, whole blocks, a tail, none.
SEGMENTS = (512, 3, 0, 300, 129, 80)
GRADIENTS = ("kv", "score", "ape")


@dataclass(frozen=True)
class Kind:
    name: str
    ratio: int
    coff: int


KINDS = (Kind("CSA", ratio=4, coff=2), Kind("HCA", ratio=128, coff=1))


class Compressor(nn.Module):
    """One row of ``(N, dim)`` for each `ratio` tokens of a segment, pooled by learned gates from hidden states ``(T,
    hidden)``.

    On a GPU keys and gates are bf16, as attention wants them; weights and the bias of each place in a window (`ape`)
    stay fp32.
    """

    def __init__(self, hidden: int, dim: int, kind: Kind, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.kv_proj = nn.Linear(hidden, kind.coff * dim, bias=False)
        self.score_proj = nn.Linear(hidden, kind.coff * dim, bias=False)
        self.ape = nn.Parameter(torch.randn(kind.ratio, kind.coff * dim))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_proj(x).to(self.dtype), self.score_proj(x).to(self.dtype)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, num_rows: int) -> torch.Tensor:
        return pool(*self.project(x), self.ape, cu_seqlens, num_rows, self.kind)


def pool(kv, score, ape, cu_seqlens: torch.Tensor, num_rows: int, kind: Kind) -> torch.Tensor:
    # With the number of rows given, nothing waits for the device.
    return cuteforge.compress(kv, score, ape, cu_seqlens, ratio=kind.ratio, coff=kind.coff, total_comp=num_rows)


def eager_pool(kv, score, ape, segments: Sequence[int], kind: Kind) -> torch.Tensor:
    """The same in plain torch: a loop over segments and blocks."""
    ratio, d = kind.ratio, ape.shape[1] // kind.coff
    values, logits = kv.float(), score.float()
    rows, first = [], 0
    for length in segments:
        for start in range(first, first + length // ratio * ratio, ratio):
            parts = [(start, slice((kind.coff - 1) * d, None))]
            if kind.coff == 2 and start > first:
                parts.insert(0, (start - ratio, slice(0, d)))
            window = torch.cat([values[t : t + ratio, columns] for t, columns in parts])
            gates = torch.cat([logits[t : t + ratio, columns] + ape[:, columns] for t, columns in parts])
            rows.append((window * gates.softmax(0)).sum(0))
        first += length
    return torch.stack(rows).to(kv.dtype)


def gradient_errors(
    model: Compressor, x: torch.Tensor, cu_seqlens: torch.Tensor, segments: Sequence[int]
) -> dict[str, float]:
    """How far gradients of `compress` are from those of eager autograd, as parts of the largest element."""
    leaves = [t.detach().requires_grad_() for t in (*model.project(x), model.ape)]
    eager_out = eager_pool(*leaves, segments, model.kind)
    grad_out = torch.randn_like(eager_out)
    wanted = torch.autograd.grad(eager_out, leaves, grad_out)
    got = torch.autograd.grad(pool(*leaves, cu_seqlens, len(eager_out), model.kind), leaves, grad_out)
    return {
        name: ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for name, a, b in zip(GRADIENTS, got, wanted)
    }


def train(
    model: Compressor, x: torch.Tensor, cu_seqlens: torch.Tensor, target: torch.Tensor, steps: int
) -> list[float]:
    """Losses before each of the steps and after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for step in range(steps + 1):
        loss = (model(x, cu_seqlens, len(target)).float() - target).square().mean()
        losses.append(loss.detach())
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    # Read at the end: each read would wait for the device.
    return torch.stack(losses).tolist()


def run(kind: Kind, options: argparse.Namespace, table: Table) -> bool:
    """One compressor; adds a row. Whether gradients are right and the loss fell."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(options.seed)
    segments = [options.scale * length for length in SEGMENTS]
    cu_seqlens = torch.tensor([0, *segments], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    # The same numbers on every device.
    x = torch.randn(sum(segments), options.hidden).to(device)
    teacher, model = (Compressor(options.hidden, options.dim, kind, dtype).to(device) for _ in range(2))
    with torch.no_grad():
        target = eager_pool(*teacher.project(x), teacher.ape, segments, kind).float()

    errors = gradient_errors(model, x, cu_seqlens, segments)
    # Both sum in fp32, in other orders, and round once to the gradient's dtype: by half an ulp at most, more where the
    # sums differ across a boundary.
    limit = {"kv": torch.finfo(dtype).eps, "score": torch.finfo(dtype).eps, "ape": 0.0}
    gradients_ok = all(errors[name] <= limit[name] + 1e-5 for name in GRADIENTS)
    losses = train(model, x, cu_seqlens, target, options.steps)
    ok = gradients_ok and losses[-1] < losses[0]
    cells = (f"{error:.1e}" for error in errors.values())
    table.add_row(
        kind.name, str(len(target)), *cells, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", "ok" if ok else "FAILED"
    )
    return ok


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"steps": 20, "hidden": 64, "dim": 64, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--scale", type=int, default=1, help="times the lengths of all segments; default 1")
    options = parser.parse_args(argv)
    if min(options.steps, options.hidden, options.dim, options.scale) < 1:
        parser.error("--steps, --hidden, --dim and --scale: wanted 1 or more")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train both compressors; 0 if gradients agree and losses fell, else 1."""
    options, console = parse(argv), Console(highlight=False)
    gradients = [f"error of grad_{name}" for name in GRADIENTS]
    table = Table("", "rows", *gradients, "loss before", f"after {options.steps} steps", "")
    results = [run(kind, options, table) for kind in KINDS]
    console.print(f"{options.device}: {sum(SEGMENTS) * options.scale} tokens in {len(SEGMENTS)} segments")
    console.print(table)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

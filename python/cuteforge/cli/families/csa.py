"""The CSA/HCA compressor for the commands: its demo input and its sample ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cuteforge import CSACompressorBackward, CSACompressorForward, TensorSpec
from cuteforge.cli.families import Case, Presets
from cuteforge.families.csa.compressor import reference

# Long, short and empty segments: some give no row at ratio 4 (3 tokens), some none at ratio 128 (127), most have a
# tail.
SEGMENT_LENGTHS = (8195, 0, 1, 3, 130, 261, 0, 4096, 127, 2050, 129, 0, 1024)
EXTRA_TOKENS = 5  # past the last segment
EXTRA_ROWS = 7  # past the last segment's rows: capacity
HEAD_DIM = 512
# The two uses in DeepSeek-V4-style models: name -> (ratio, coff).
CONFIGS = {"CSA": (4, 2), "HCA": (128, 1)}


@dataclass(frozen=True)
class Problem:
    """Input of one configuration, bf16, on one device; `grad_out` is NaN in the rows whose gradients are ignored."""

    inputs: tuple[torch.Tensor, ...]
    grad_out: torch.Tensor
    config: Mapping[str, int]

    @classmethod
    def draw(cls, ratio: int, coff: int, device: str) -> Problem:
        # Drawn on the CPU, so that every machine checks the same input.
        generator = torch.Generator().manual_seed(0)
        num_tokens, width = sum(SEGMENT_LENGTHS) + EXTRA_TOKENS, coff * HEAD_DIM
        kv = torch.randn(num_tokens, width, generator=generator).bfloat16()
        score = (2 * torch.randn(num_tokens, width, generator=generator)).bfloat16()
        ape = torch.randn(ratio, width, generator=generator)
        cu_seqlens = torch.tensor((0, *SEGMENT_LENGTHS)).cumsum(0).int()
        cu_seqlens_comp = reference.build_cu_seqlens_comp(cu_seqlens, ratio)
        num_rows = int(cu_seqlens_comp[-1])
        grad_out = torch.randn(num_rows + EXTRA_ROWS, HEAD_DIM, generator=generator).bfloat16()
        grad_out[num_rows:] = torch.nan
        inputs = tuple(t.to(device) for t in (kv, score, ape, cu_seqlens, cu_seqlens_comp))
        return cls(inputs, grad_out.to(device), {"ratio": ratio, "coff": coff})

    def forward(self, compute_dtype=torch.float32, out_dtype=None) -> dict[str, torch.Tensor]:
        rows = self.grad_out.shape[0]
        out = reference.compress_forward(
            *self.inputs, rows, **self.config, compute_dtype=compute_dtype, out_dtype=out_dtype
        )
        return {"out": out}

    def backward(self, compute_dtype=torch.float32, grad_dtype=None) -> dict[str, torch.Tensor]:
        options = {**self.config, "compute_dtype": compute_dtype, "grad_dtype": grad_dtype}
        return reference.compress_backward(*self.inputs, self.grad_out, **options)._asdict()

    def autograd(self) -> dict[str, torch.Tensor]:
        return reference.compress_backward_autograd(*self.inputs, self.grad_out, **self.config)._asdict()

    def bind_forward(self):
        out = torch.full_like(self.grad_out, torch.nan)
        op = CSACompressorForward(*self.inputs, out, **self.config).compile()
        return op.bind(*self.inputs, out), {"out": out}

    def bind_backward(self):
        kv, score, ape = self.inputs[:3]
        grads = tuple(torch.full_like(t, torch.nan) for t in (kv, score, ape))
        op = CSACompressorBackward(*self.inputs, self.grad_out, *grads, **self.config).compile()
        workspace = torch.full((op.workspace_bytes(),), 0xFF, dtype=torch.uint8, device=kv.device)
        launch = op.bind(*self.inputs, self.grad_out, *grads, workspace=workspace)
        return launch, dict(zip(reference.CompressorGrads._fields, grads))

    def size_bytes(self, backward: bool) -> int:
        """kv and score read, and in the backward pass their gradients written; out written or grad_out read."""
        return (4 if backward else 2) * self.inputs[0].nbytes + self.grad_out.nbytes


def demo_cases(device: str) -> list[Case]:
    """Forward and backward of both configurations, input on `device`."""
    cases = []
    for name, config in CONFIGS.items():
        problem = Problem.draw(*config, device)
        cases += [_forward_case(name, problem), _backward_case(name, problem)]
    return cases


def sample_ops(device: str) -> dict[str, Any]:
    """Label -> op on samples of `device`, which need not exist; nothing is compiled."""
    ops = {}
    for name, config in CONFIGS.items():
        ops[f"{name} forward"] = _sample_forward(*config, device)
        ops[f"{name} backward"] = _sample_backward(*config, device)
    return ops


def _forward_case(name: str, problem: Problem) -> Case:
    return Case(
        f"{name} forward",
        problem.size_bytes(backward=False),
        exact=lambda: problem.forward(torch.float64, torch.float64),
        eager=problem.forward,
        fallback=problem.forward,
        bind=problem.bind_forward,
        compile_for=lambda arch: _sample_forward(**problem.config).compile(arch),
    )


def _backward_case(name: str, problem: Problem) -> Case:
    return Case(
        f"{name} backward",
        problem.size_bytes(backward=True),
        exact=lambda: problem.backward(torch.float64, torch.float64),
        eager=problem.backward,
        fallback=problem.autograd,
        bind=problem.bind_backward,
        compile_for=lambda arch: _sample_backward(**problem.config).compile(arch),
    )


def _samples(
    head_dim: int | None, dtype: str, ratio: int, coff: int, device: str
) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """The inputs and one pooled row, for one block: sizes are no part of what is compiled. Head dim None: that of the
    demo.
    """
    head_dim = HEAD_DIM if head_dim is None else head_dim
    tokens = TensorSpec((ratio, coff * head_dim), dtype, device=device)
    ape = TensorSpec((ratio, coff * head_dim), "float32", device=device)
    offsets = TensorSpec((2,), "int32", device=device)
    return (tokens, tokens, ape, offsets, offsets), TensorSpec((1, head_dim), dtype, device=device)


def _sample_forward(
    ratio: int = 4, coff: int = 2, device: str = "cuda", *, head_dim: int | None = None, dtype: str = "bfloat16"
) -> CSACompressorForward:
    inputs, pooled = _samples(head_dim, dtype, ratio, coff, device)
    return CSACompressorForward(*inputs, pooled, ratio, coff)


def _sample_backward(
    ratio: int = 4,
    coff: int = 2,
    device: str = "cuda",
    *,
    head_dim: int | None = None,
    dtype: str = "bfloat16",
    deterministic: bool = True,
) -> CSACompressorBackward:
    inputs, pooled = _samples(head_dim, dtype, ratio, coff, device)
    return CSACompressorBackward(*inputs, pooled, *inputs[:3], ratio, coff, deterministic)


OPS = {"forward": _sample_forward, "backward": _sample_backward}
PRESETS = Presets(
    tuple((op, {"ratio": ratio, "coff": coff}) for ratio, coff in CONFIGS.values() for op in OPS),
    head_dims=(128, 512),  # of the indexer, and of the attention
    dtypes=("bfloat16",),
)

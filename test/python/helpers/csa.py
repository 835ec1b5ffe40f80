"""Running the compressor in tests: guarded outputs, oracles, and the configurations the GPU suite compiles."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cuteforge import CSACompressorBackward, CSACompressorForward
from cuteforge.families.csa.compressor import reference
from helpers import budget
from helpers.canary import Canary
from helpers.packs import Inputs, Pack, draw

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Up to here results are compared with eager fp32 bit by bit, above with fp64.
MAX_BITWISE_RATIO = 16


class Config(NamedTuple):
    """What a kernel is compiled for, and the path the configuration guards."""

    ratio: int
    coff: int
    d: int
    dtype: torch.dtype
    guards: str

    @property
    def label(self) -> str:
        return f"r{self.ratio}c{self.coff}d{self.d}-{str(self.dtype).removeprefix('torch.')}"


CONFIGS = (
    Config(4, 2, 128, BF16, "CSA: two windows, whole vectors"),
    Config(4, 2, 512, BF16, "CSA at the model's head dim: several column chunks"),
    Config(4, 2, 576, BF16, "head dim no multiple of 512"),
    Config(4, 2, 65, BF16, "odd head dim: scalar accesses, the second half misaligned"),
    Config(4, 2, 1, BF16, "one column"),
    Config(4, 2, 96, FP16, "fp16, head dim no multiple of 64"),
    Config(4, 2, 128, FP32, "fp32: half the elements a vector"),
    Config(4, 1, 128, BF16, "one window at ratio 4"),
    Config(128, 1, 512, BF16, "HCA: the window shared by the warps of a CTA"),
    Config(128, 1, 128, BF16, "HCA with one column chunk"),
    Config(128, 1, 65, FP16, "long window, odd head dim"),
    Config(128, 1, 96, FP32, "long window, fp32"),
    Config(128, 2, 128, BF16, "long window with a preceding block"),
    Config(1, 1, 128, BF16, "ratio 1: a softmax over one entry"),
    Config(1, 2, 96, BF16, "ratio 1 with a preceding block"),
    Config(2, 1, 65, FP16, "ratio 2, odd head dim, fp16"),
    Config(2, 2, 512, BF16, "ratio 2, wide"),
    Config(3, 1, 576, BF16, "ratio no power of two"),
    Config(3, 2, 1, FP32, "ratio no power of two, one column"),
    Config(3, 2, 128, FP16, "ratio no power of two, preceding block"),
    Config(8, 1, 128, BF16, "ratio 8"),
    Config(8, 2, 128, BF16, "window of 16"),
    Config(8, 2, 96, FP32, "window of 16, fp32"),
    Config(16, 1, 512, BF16, "the last bitwise ratio, one window"),
    Config(16, 2, 128, BF16, "the last bitwise ratio, window of 32"),
    Config(16, 2, 65, FP32, "the last bitwise ratio, odd head dim, fp32"),
    Config(17, 1, 128, BF16, "the first ratio compared with fp64"),
    Config(17, 2, 96, FP16, "window of 34"),
    Config(64, 1, 128, BF16, "ratio 64"),
    Config(64, 2, 512, BF16, "window of 128, wide"),
    Config(100, 1, 576, BF16, "long window that no power of two divides"),
    Config(100, 2, 65, BF16, "window of 200, odd head dim"),
    Config(256, 1, 128, BF16, "the largest ratio"),
    Config(256, 2, 512, BF16, "the largest window, 512 entries"),
    Config(256, 2, 1, FP32, "the largest window, one column"),
)
CSA, CSA_WIDE, HCA = CONFIGS[0], CONFIGS[1], CONFIGS[8]
ODD, CSA_FP16, CSA_FP32, ONE_WINDOW = CONFIGS[3], CONFIGS[5], CONFIGS[6], CONFIGS[7]


class Case(NamedTuple):
    """One row of a case table."""

    config: Config
    pack: str
    extra_tokens: int
    extra_rows: int
    guards: str

    @property
    def label(self) -> str:
        return f"{self.config.label}-{self.pack}"

    def inputs(self, device, **options) -> Inputs:
        pack = Pack.named(self.pack, self.config.ratio, extra_tokens=self.extra_tokens, extra_rows=self.extra_rows)
        return inputs(self.config, pack, device, **options)


_PACKS_AT_MAIN_CONFIGS = (
    ("one_long", 0, 0, "one segment over many CTAs"),
    ("empties_between", 0, 3, "empty segments first, last and between full ones"),
    ("shorter_than_ratio", 0, 0, "segments that give no row"),
    ("exact_multiples", 0, 0, "no tails, no capacity: nothing beyond the last block"),
    ("one_token", 0, 0, "fewer tokens than a block and no row at all"),
    ("many_short", 3, 0, "4096 segments of one or two blocks"),
    ("one_token_100k", 0, 9, "100 000 segments; rows are capacity padding only"),
)
CASES = (
    *(Case(config, "ragged", 5, 7, config.guards) for config in CONFIGS),
    *(Case(config, *row) for config in (CSA, CSA_WIDE, ODD, CSA_FP32, HCA) for row in _PACKS_AT_MAIN_CONFIGS),
    *(Case(config, "one_token_100k", 0, 0, "100 000 rows of one token") for config in CONFIGS if config.ratio == 1),
    *(Case(config, "many_short", 0, 5, "4096 segments") for config in CONFIGS if config.ratio in (1, 3, 16)),
)
case_table = {"argvalues": CASES, "ids": [case.label for case in CASES]}


def inputs(config: Config, pack: Pack, device, **options) -> Inputs:
    return draw(pack, config.coff, config.d, config.dtype, device, **options)


def small(config: Config, device, **options) -> Inputs:
    """A ragged pack with capacity on both axes."""
    return inputs(config, Pack.named("ragged", config.ratio, extra_tokens=5, extra_rows=7), device, **options)


def run_forward(x: Inputs, *, row_pitch: int | None = None, stream=None) -> torch.Tensor:
    """``out``, written by the class into a poisoned, guarded buffer."""
    out = Canary((x.total_comp, x.head_dim), x.kv.dtype, x.kv.device, row_pitch)
    op = CSACompressorForward(*x.tensors, out.tensor, **x.config).compile()
    op.execute(*x.tensors, out.tensor, stream=stream)
    torch.cuda.synchronize(x.kv.device)
    out.check("out")
    return out.tensor


def run_backward(
    x: Inputs, *, deterministic: bool = True, row_pitch: int | None = None, stream=None, fully: bool = True
) -> reference.CompressorGrads:
    """The gradients, written by the class into poisoned, guarded buffers; the workspace is poisoned and guarded too.

    ``fully``: every element has to be written, not only nothing outside.
    """
    grads = [Canary.like(x.kv, row_pitch), Canary.like(x.score, row_pitch), Canary.like(x.ape)]
    buffers = [grad.tensor for grad in grads]
    op = CSACompressorBackward(*x.tensors, x.grad_out, *buffers, **x.config, deterministic=deterministic).compile()
    workspace = Canary((op.workspace_bytes(),), torch.uint8, x.kv.device)
    op.execute(*x.tensors, x.grad_out, *buffers, workspace=workspace_or_none(workspace), stream=stream)
    torch.cuda.synchronize(x.kv.device)
    for name, grad in zip(reference.CompressorGrads._fields, grads, strict=True):
        grad.check(name) if fully else grad.check_guards(name)
    workspace.check_guards("workspace")
    return reference.CompressorGrads(*buffers)


def workspace_or_none(workspace: Canary) -> torch.Tensor | None:
    return workspace.tensor if workspace.tensor.numel() else None


def eager_forward(x: Inputs, compute_dtype=FP32, out_dtype=None) -> torch.Tensor:
    return reference.compress_forward(
        *x.tensors, x.total_comp, **x.config, compute_dtype=compute_dtype, out_dtype=out_dtype
    )


def eager_backward(x: Inputs, compute_dtype=FP32, grad_dtype=None) -> reference.CompressorGrads:
    return reference.compress_backward(
        *x.tensors, x.grad_out, **x.config, compute_dtype=compute_dtype, grad_dtype=grad_dtype
    )


def check_forward(out: torch.Tensor, x: Inputs) -> None:
    """Spec: within one rounding step of fp32 eager up to ratio 16, above as close to fp64; always within budget."""
    eager = eager_forward(x, FP32, FP32)
    oracle = eager_forward(x, torch.float64, torch.float64)
    if x.ratio <= MAX_BITWISE_RATIO:
        mass = eager_forward(x.with_(kv=x.kv.abs()), FP32, FP32)
        budget.assert_one_rounding_step(out, eager, mass, x.coff * x.ratio, "out")
    else:
        budget.assert_as_close(out, oracle, eager, "out")
    budget.assert_within_budget(out, oracle, eager_forward(x, None), "out")


def check_backward(grads: reference.CompressorGrads, x: Inputs) -> None:
    """Spec: fp32 eager autograd's values up to ratio 16, above as close to fp64; grad_ape within the fp64 budget."""
    eager = eager_backward(x)
    oracle = eager_backward(x, torch.float64, torch.float64)
    if x.ratio <= MAX_BITWISE_RATIO:
        budget.assert_same_values(grads.grad_kv, eager.grad_kv, "grad_kv")
        budget.assert_same_values(grads.grad_score, eager.grad_score, "grad_score")
    else:
        num_sums = max(1, x.total_comp * x.head_dim)
        budget.assert_as_close(grads.grad_kv, oracle.grad_kv, eager.grad_kv, "grad_kv", num_sums)
        budget.assert_as_close(grads.grad_score, oracle.grad_score, eager.grad_score, "grad_score", num_sums)
    budget.assert_within_budget(grads.grad_ape, oracle.grad_ape, eager.grad_ape, "grad_ape")
    for name, grad in (("grad_kv", grads.grad_kv), ("grad_score", grads.grad_score)):
        assert not grad[x.unconsumed].any(), f"{name}: positions no block pools are not exactly 0"

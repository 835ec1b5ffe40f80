"""Biases of attention's scores: drawn, and laid out in memory in every way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def draw(shape: Sequence[int], dtype: torch.dtype, device, masked: float = 0.2, seed: int = 7) -> torch.Tensor:
    """Normal numbers times two; a part is -inf, and so is the first row of the last head whole."""
    generator = torch.Generator(device=device).manual_seed(seed)
    bias = 2 * torch.randn(shape, generator=generator, device=device)
    bias[torch.rand(shape, generator=generator, device=device) < masked] = -torch.inf
    if masked and bias.numel():
        bias[0, -1, 0] = -torch.inf
    return bias.to(dtype)


def slack(bias: torch.Tensor | None) -> float:
    """What a log-sum-exp may be off by because a bias is added in units of log2: two roundings of its largest
    number."""
    if bias is None:
        return 0.0
    finite = bias[bias.isfinite()]
    return float(finite.abs().max()) * 2.0**-21 if finite.numel() else 0.0


def _placed(bias: torch.Tensor, pitch: int, offset: int) -> torch.Tensor:
    """A copy whose rows are `pitch` elements apart, from element `offset` on, between NaN."""
    rows = bias.numel() // max(bias.shape[-1], 1)
    memory = bias.new_full((offset + rows * pitch,), torch.nan)
    outer = [pitch]
    for extent in reversed(bias.shape[1:-1]):
        outer.insert(0, outer[0] * extent)
    view = memory.as_strided(bias.shape, (*outer, 1), offset)
    view.copy_(bias)
    return view


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "base_misaligned": lambda x: _placed(x, x.shape[-1] + x.shape[-1] % 2, 1),
    "odd_rows": lambda x: _placed(x, x.shape[-1] + 1 - x.shape[-1] % 2, 0),
    "even_rows": lambda x: _placed(x, x.shape[-1] + 2 + x.shape[-1] % 2, 0),
    "columns_apart": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "heads_innermost": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}

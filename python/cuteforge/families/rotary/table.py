"""Tables of cos and sin for a rotary embedding.

Angles are formed in fp64 and stored as fp32: at position 10**6 an fp32 angle would already be off by 0.03.
Plain frequencies are ``base ** (-2 * i / rotary_dim)`` for pair ``i`` (RoFormer, arXiv 2104.09864, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cuteforge.arguments import integer
from cuteforge.errors import ContractError
from cuteforge.families.rotary.scaling import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Scaling,
    YarnScaling,
    host_number,
    parse_scaling,
)
from cuteforge.op.checks import usable_device

__all__ = ["LinearScaling", "Llama3Scaling", "NTKScaling", "YarnScaling", "rotary_frequencies", "rotary_table"]

_DEFAULT_BASE = 10000.0
# Elements of cos worked on at once: 32 MiB for each fp64 intermediate, whatever the length of the table.
_CHUNK_ELEMENTS = 1 << 22
# Limits that no real table reaches: positions fit int32, even where torch makes them int64.
_MOST_POSITIONS, _MOST_COLUMNS = 2**31 - 1, 2**16


def rotary_table(
    max_pos: int,
    rotary_dim: int,
    base: float | None = None,
    scaling: Scaling | Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a rotary embedding: ``amplitude * cos(position * frequency)``, and the same with sin.

    Pair i has the frequency ``base ** (-2 * i / rotary_dim)`` radians per position (RoFormer, arXiv 2104.09864, section
    3.2.2), which `scaling` may change. The amplitude is 1, but for YaRN.

    Args:
        max_pos: the table has positions 0 to ``max_pos - 1``.
        rotary_dim: rotated columns of a head, even, 2 or more.
        base: above 1. None: ``rope_theta`` of `scaling`, else 10000.
        scaling: None, or how frequencies are scaled for longer contexts: a `LinearScaling`, `NTKScaling`,
            `Llama3Scaling` or `YarnScaling` of this module, or ``config.rope_scaling`` of transformers as it is:
            ``{"rope_type": "linear" | "ntk" | "llama3" | "yarn" | "default", …}`` (or ``"type"``) with the fields of
            that class as keys.
        device: of the results; None is torch's default device.

    Returns:
        ``(cos, sin)``, both fp32 ``(max_pos, rotary_dim / 2)``, contiguous, new memory.

    Numerics: angles, cosines and sines are fp64, rounded once at the end.

    Raises:
        ContractError: names the argument, or the key of `scaling`.
        UnsupportedError: a type of transformers that one table cannot serve.

    Examples:
        >>> import torch
        >>> from cuteforge import rotary_table
        >>> cos, sin = rotary_table(4096, 128)
        >>> cos.shape, cos.dtype
        (torch.Size([4096, 64]), torch.float32)
        >>> llama = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        ...          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        >>> cos, sin = rotary_table(131072, 128, scaling=llama)
        >>> torch.equal(cos[0], torch.ones(64))
        True
    """
    max_pos = integer("max_pos", max_pos, least=0, most=_MOST_POSITIONS)
    frequencies, amplitude = rotary_frequencies(rotary_dim, base, scaling)
    device = None if device is None else usable_device(device)
    frequency = torch.tensor(frequencies, dtype=torch.float64, device=device)
    cos, sin = (torch.empty(max_pos, len(frequencies), dtype=torch.float32, device=device) for _ in range(2))
    rows = max(1, _CHUNK_ELEMENTS // len(frequencies))
    for start in range(0, max_pos, rows):
        stop = min(start + rows, max_pos)
        angle = torch.arange(start, stop, dtype=torch.float64, device=device)[:, None] * frequency
        cos[start:stop] = angle.cos() * amplitude
        sin[start:stop] = angle.sin() * amplitude
    return cos, sin


def rotary_frequencies(
    rotary_dim: int, base: float | None = None, scaling: Scaling | Mapping[str, Any] | None = None
) -> tuple[list[float], float]:
    """Radians per position of each of the ``rotary_dim / 2`` pairs, and the amplitude of cos and sin; see
    `rotary_table`."""
    rotary_dim = integer("rotary_dim", rotary_dim, least=2, most=_MOST_COLUMNS)
    if rotary_dim % 2:
        raise ContractError(f"rotary_dim: wanted an even number, got {rotary_dim}")
    chosen, theta = parse_scaling(scaling)
    base = _checked_base(base, theta)
    frequencies = [base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    if chosen is None:
        return frequencies, 1.0
    return chosen.scale(frequencies, rotary_dim, base), chosen.amplitude


def _checked_base(base: Any, theta: float | None) -> float:
    """The argument `base`, or ``rope_theta`` of `scaling`, as a float."""
    if base is None:
        return _DEFAULT_BASE if theta is None else theta
    base = host_number("base", base, 1.0)
    if base == 1:
        raise ContractError(f"base: wanted a number above 1, got {base}")
    if theta not in (None, base):
        raise ContractError(f"base: wanted None or {theta}, rope_theta of scaling, got {base}")
    return base

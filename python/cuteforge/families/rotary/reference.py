"""Rotary embedding in eager torch: the oracle of tests and benchmarks, and the fallback where no kernel serves.

Runs on CPU and CUDA. Dims: ``T`` packed tokens, or ``B`` batch and ``L`` tokens; ``H`` heads, ``D`` head dim. Column
pair ``(a, b)`` of a head is ``(2i, 2i + 1)`` if interleaved, else ``(i, i + rotary_dim / 2)``, and becomes
``(a cos - b sin, b cos + a sin)`` (RoFormer, arXiv 2104.09864, equation 34). Columns from ``rotary_dim`` on stay as
they are.
"""

from __future__ import annotations

import torch

Table = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def rotate(
    x: torch.Tensor,
    table: Table,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = True,
    inverse: bool = False,
    compute_dtype: torch.dtype | None = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x` with the pairs of every head rotated by its token's angles; out of place.

    Args:
        x: ``(T, H, D)`` or ``(B, L, H, D)``.
        table: ``freqs_cis (…, rotary_dim / 2, 2)`` with the leading dims of the tokens; or ``(cos, sin)``, each
            ``(max_pos, rotary_dim / 2)``, looked up at `positions`.
        positions: ``(T,)`` or ``(B, L)`` int32 or int64. A token outside the table becomes NaN in all columns.
        inverse: rotate back. This is the transpose, hence the backward; it undoes the rotation where cos² + sin² = 1.
        compute_dtype: arithmetic; None is the dtype of `x`.
        out_dtype: None is the dtype of `x`.

    Differentiable in `x` and the table. The gradient of a token outside the table is NaN, as from the inverse rotation.
    """
    dtype = compute_dtype or x.dtype
    cos, sin, outside = _token_angles(table, positions)
    cos, sin = (t.to(dtype).unsqueeze(-2) for t in (cos, -sin if inverse else sin))
    rotary_dim = 2 * cos.shape[-1]
    a, b = _split_pairs(x[..., :rotary_dim].to(dtype), interleaved)
    rotated = _join_pairs(a * cos - b * sin, b * cos + a * sin, interleaved)
    out = torch.cat((rotated.to(out_dtype or x.dtype), x[..., rotary_dim:].to(out_dtype or x.dtype)), -1)
    if outside is None:
        return out
    # A factor, not a selection: it reaches the gradient as well, and times 1 changes nothing.
    factor = torch.ones(outside.shape, dtype=out.dtype, device=out.device).masked_fill(outside, torch.nan)
    return out * factor[..., None, None]


def _token_angles(table: Table, positions: torch.Tensor | None):
    """(cos, sin) of each token, ``(…, rotary_dim / 2)``, and which tokens lie outside the table (None: none can)."""
    if isinstance(table, torch.Tensor):
        return *table.unbind(-1), None
    cos, sin = table
    outside = (positions < 0) | (positions >= cos.shape[0])
    if not cos.shape[0]:
        cos, sin = (t.new_zeros(1, t.shape[1]) for t in table)
    row = positions.masked_fill(outside, 0).long()
    return cos[row], sin[row], outside


def _split_pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second column of every pair, each ``(…, rotary_dim / 2)``."""
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)


def _join_pairs(a: torch.Tensor, b: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)

"""What the compressor's classes check besides their table of operands."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from cuteforge.arguments import integer, kind_of
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.csa.compressor.config import MAX_RATIO


def check_window(ratio: Any, coff: Any) -> tuple[int, int]:
    """`ratio` and `coff` as ints.

    Raises:
        ContractError: no ints, or no window.
        UnsupportedError: a window that is too long.
    """
    ratio, coff = integer("ratio", ratio), integer("coff", coff)
    if coff not in (1, 2):
        raise ContractError(f"coff: wanted 1 or 2, got {coff}")
    if ratio < 1:
        raise ContractError(f"ratio: wanted 1 to {MAX_RATIO}, got {ratio}")
    if ratio > MAX_RATIO:
        raise UnsupportedError(f"ratio: the kernels serve 1 to {MAX_RATIO}, got {ratio}")
    return ratio, coff


def check_offsets(cu_seqlens: torch.Tensor, cu_seqlens_comp: torch.Tensor, num_tokens: int, ratio: int) -> None:
    """Read both offset tables and refuse what does not describe segments of `num_tokens` tokens. Synchronizes.

    Raises:
        ContractError: names the table and the first bad index.
    """
    tokens, rows = cu_seqlens.tolist(), cu_seqlens_comp.tolist()
    for index, offset in enumerate(tokens):
        low = tokens[index - 1] if index else 0
        if not low <= offset <= num_tokens:
            raise ContractError(
                f"cu_seqlens: wanted ascending offsets in [0, {num_tokens}], got {offset} at index {index}"
            )
    for index, offset in enumerate(rows):
        wanted = rows[index - 1] + (tokens[index] - tokens[index - 1]) // ratio if index else 0
        if offset != wanted:
            raise ContractError(
                f"cu_seqlens_comp: wanted {wanted} (one row for every {ratio} tokens), got {offset} at index {index}"
            )


def too_few_tokens(num_rows: int, num_tokens: int, ratio: int) -> str:
    return f"kv: wanted at least ratio = {ratio} tokens for N = {num_rows} rows, got T = {num_tokens}"


def check_no_workspace(workspace: Any) -> None:
    """A tensor that is not needed does no harm; anything else must be a mistake."""
    if workspace is not None and not isinstance(workspace, torch.Tensor):
        raise ContractError(f"workspace: wanted None with deterministic=False, got {kind_of(workspace)}")


def refuse_atomics_if_asked() -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "CSACompressorBackward(deterministic=False) adds grad_ape up with atomics, whose order differs from run to run"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(f"{message}; torch.use_deterministic_algorithms(True) is set: pass deterministic=True")
    warnings.warn(message, stacklevel=4)

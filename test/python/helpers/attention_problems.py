"""Problems of attention kernels by what tells calls apart, for tests of what is selected and compiled."""

from __future__ import annotations

from typing import Any

from cuteforge.families.attention.problem import Problem


def problem_of(
    dtype: str,
    head_dim: int,
    v_dim: int,
    queries: str,
    keys: str = "batch",
    *,
    lengths: str | None = None,
    mask_rank: int = 0,
    bias: str = "",
    has_lse: bool = False,
    has_rows: bool = False,
    appends: bool = False,
    has_sinks: bool = False,
    **limits: Any,
) -> Problem:
    """A `Problem` whose operands are given by flags; `lengths` is ``"seqlens"`` or ``"indptr"``, `bias` its dtype,
    `limits` are the rest of its fields."""
    given = {
        "seqlens_k": lengths == "seqlens",
        "kv_indptr": lengths == "indptr",
        "page_table_rows": has_rows,
        "new_k": appends,
        "new_v": appends,
        "mask": mask_rank > 0,
        "bias": bool(bias),
        "sinks": has_sinks,
        "lse": has_lse,
    }
    names = tuple(name for name, is_given in given.items() if is_given)
    return Problem(dtype, head_dim, v_dim, queries, keys, given=names, mask_rank=mask_rank, bias_dtype=bias, **limits)

"""Attention over dense, packed and paged keys and values."""

from cuteforge.families.attention import torch_ops as _torch_ops  # noqa: F401  # registers the ops
from cuteforge.families.attention.api import GQADecode, GQAPrefill, PagedGQADecode, PagedGQAPrefill
from cuteforge.families.attention.merge.api import MergeState, merge_state
from cuteforge.families.attention.wrapper import (
    attn_decode,
    attn_paged_decode,
    attn_paged_prefill,
    attn_prefill,
    gqa_decode_wrapper,
    gqa_prefill_wrapper,
    paged_gqa_decode_wrapper,
    paged_gqa_prefill_wrapper,
)

__all__ = [
    "GQADecode",
    "GQAPrefill",
    "MergeState",
    "PagedGQADecode",
    "PagedGQAPrefill",
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "gqa_decode_wrapper",
    "gqa_prefill_wrapper",
    "merge_state",
    "paged_gqa_decode_wrapper",
    "paged_gqa_prefill_wrapper",
]

"""Attention over dense, packed and paged keys and values."""

from cuteforge.attention.api import GQADecode, GQAPrefill, PagedGQADecode, PagedGQAPrefill
from cuteforge.attention.wrapper import (
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
    "PagedGQADecode",
    "PagedGQAPrefill",
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "gqa_decode_wrapper",
    "gqa_prefill_wrapper",
    "paged_gqa_decode_wrapper",
    "paged_gqa_prefill_wrapper",
]

"""Rotary position embedding: tables, and the rotation of one tensor or of q and k in one launch."""

from cuteforge.families.rotary import torch_ops as _torch_ops  # noqa: F401  # registers the ops
from cuteforge.families.rotary.api import RotaryEmbedding
from cuteforge.families.rotary.table import rotary_table
from cuteforge.families.rotary.wrapper import rotary_emb, rotary_qk_wrapper, rotary_wrapper

__all__ = ["RotaryEmbedding", "rotary_emb", "rotary_qk_wrapper", "rotary_table", "rotary_wrapper"]

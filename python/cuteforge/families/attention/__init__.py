"""Attention over dense, packed and paged keys and values."""

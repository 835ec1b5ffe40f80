"""Compressed sparse attention: kernels that shorten a KV stream."""

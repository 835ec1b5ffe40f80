"""Compile, cache and launch kernels. Knows no kernel family; imports torch, cutlass and tvm_ffi inside functions."""

from cuteforge.runtime.env import configure_logging

configure_logging()

"""Keys of the tiny kernels; imports no cutlass, so a process whose kernels are all on disk can use it."""

from dataclasses import dataclass

from cuteforge.runtime.compile_cache import KernelKey


@dataclass(frozen=True)
class TinyTraits:
    """Compile-time facts of the tiny kernel, and two hooks for tests of the build itself."""

    dtype: str = "float32"
    num_threads: int = 128
    options: str = ""
    needs_file: str = ""
    build_log: str = ""


def tiny_key(arch: str = "sm_90a", **traits) -> KernelKey:
    """Key of the kernel that `tiny_kernel.build` makes from these traits."""
    return KernelKey("helpers.tiny_kernel:build", TinyTraits(**traits), arch)

"""The smallest kernels that the run time can build, for its own tests. Import it only where cutlass is wanted."""

from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cuteforge.runtime.build import Build
from helpers.tiny_traits import TinyTraits

_DTYPES = {"float32": cutlass.Float32, "float16": cutlass.Float16, "int32": cutlass.Int32}


@cute.kernel
def _scale_kernel(
    x: cute.Tensor, y: cute.Tensor, factor: cutlass.Int32, n: cutlass.Int32, num_threads: cutlass.Constexpr
):
    i = cute.arch.block_idx()[0] * num_threads + cute.arch.thread_idx()[0]
    if i < n:
        y[i] = x[i] * factor.to(x.element_type)


def build(traits: TinyTraits) -> Build:
    """y = x * factor over n elements; entry(x, y, factor, raw_stream). Fails while `traits.needs_file` is missing."""
    if traits.needs_file and not Path(traits.needs_file).exists():
        raise RuntimeError(f"{traits.needs_file} is not there yet")
    if traits.build_log:
        with open(traits.build_log, "a") as log:
            log.write("built\n")
    num_threads = traits.num_threads

    @cute.jit
    def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Int32, stream: cuda.CUstream):
        n = cute.size(x)
        if n > 0:
            grid = (cute.ceil_div(n, num_threads), 1, 1)
            _scale_kernel(x, y, factor, n, num_threads).launch(grid=grid, block=(num_threads, 1, 1), stream=stream)

    n = cute.sym_int()
    x, y = (make_fake_compact_tensor(_DTYPES[traits.dtype], (n,), assumed_align=4) for _ in range(2))
    return Build(scale, (x, y, cutlass.Int32(1), make_fake_stream()), "tiny_scale", traits.options)

"""A kernel for the arithmetic of `cuteforge.device`: each row of its result is one function of two vectors.

Import it only where cutlass is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cuteforge.device import math
from cuteforge.runtime.build import Build
from cuteforge.runtime.compile_cache import KernelKey

NUM_THREADS = 128
FUNCTIONS = {
    "mul_rn": math.mul_rn,
    "add_rn": math.add_rn,
    "fma_rn": lambda a, b: math.fma_rn(a, b, a),
    "rcp_rn": lambda a, b: math.rcp_rn(b),
    "div_by": lambda a, b: math.div_by(a, -b, math.rcp_rn(b)),
    "div_rn": math.div_rn,
    "exp_accurate": lambda a, b: math.exp_accurate(a),
    "exp_fast": lambda a, b: math.exp_fast(a),
    "exp2_fast": lambda a, b: math.exp2_fast(a),
    "tanh_scaled": lambda a, b: math.tanh_scaled((b, -a, a, b * 0.5), 2 * math.LOG2_E)[2],
    "sum_rn": lambda a, b: math.sum_rn((a, b, a)),
    "dot": lambda a, b: math.dot((a, b), (b, b)),
    "max_of": lambda a, b: math.max_of((a, b)),
    "where": lambda a, b: math.where(a > b, a, -7.0),
    "unfused": lambda a, b: math.add_rn(math.mul_rn(a, b), a),
    "left to the compiler": lambda a, b: a * b + a,
}


@dataclass(frozen=True)
class FunctionTraits:
    names: tuple[str, ...] = tuple(FUNCTIONS)


@cute.kernel
def _apply(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, names: cutlass.Constexpr):
    i = cute.arch.block_idx()[0] * NUM_THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        for row in cutlass.range_constexpr(len(names)):
            out[row, i] = Float32(FUNCTIONS[names[row]](x[i], y[i]))


def build(traits: FunctionTraits) -> Build:
    """entry(x (n), y (n), out (functions, n), raw_stream), fp32."""

    @cute.jit
    def apply(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        grid = (cute.ceil_div(cute.size(x), NUM_THREADS), 1, 1)
        _apply(x, y, out, traits.names).launch(grid=grid, block=(NUM_THREADS, 1, 1), stream=stream)

    n = cute.sym_int()
    x, y = (make_fake_compact_tensor(Float32, (n,), assumed_align=4) for _ in range(2))
    out = make_fake_compact_tensor(Float32, (len(traits.names), n), stride_order=(1, 0), assumed_align=4)
    return Build(apply, (x, y, out, make_fake_stream()), "device_functions")


def key(arch: str, traits: FunctionTraits | None = None) -> KernelKey:
    return KernelKey("helpers.device_kernel:build", traits or FunctionTraits(), arch)

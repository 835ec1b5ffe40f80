"""flashinfer's rotary kernels where neither its package nor nvcc is: cut out of its header, compiled by NVRTC, launched
by the driver.

    python benchmarks/flashinfer_rope.py <checkout of flashinfer> <nvidia/cu13 of the CUDA wheels> <folder>
    CUTEFORGE_BENCH_FLASHINFER_ROPE=<folder> python benchmarks/bench_rotary.py

The wheels are nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl; no GPU is needed to build. The folder is not
for a repository.
"""

from __future__ import annotations

import ctypes
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

ENVIRONMENT = "CUTEFORGE_BENCH_FLASHINFER_ROPE"
CUBIN, FACTS = "flashinfer_rope.cubin", "flashinfer_rope.json"

# bf16, as `BatchQKApplyRotaryPosIdsCosSinCache` of pos_enc.cuh cuts it.
HEAD_DIM, ACCESS_ELEMS, CTA_THREADS = 128, 8, 128
CTA_X, CTA_Y = HEAD_DIM // ACCESS_ELEMS, CTA_THREADS // (HEAD_DIM // ACCESS_ELEMS)
# A CTA of many tokens for each head, or one for all heads.
KERNELS = {
    "by head": "BatchQKApplyRotaryPosIdsCosSinCacheHeadParallelismKernel",
    "all heads": "BatchQKApplyRotaryPosIdsCosSinCacheKernel",
}
# From the start of the first text up to that of the second: the two kernels, and the two functions that they call.
CUTS = (
    ("vec_apply_llama_rope_cos_sin(", "vec_apply_llama_rope_interleave("),
    ("vec_apply_llama_rope_cos_sin_interleave_reuse_half(", "scale_store_partial_chunk("),
    (KERNELS["by head"] + "(", "RopeQuantizeKernel("),
)
NO_DEVICE_HEADERS = [f"#include <{name}>" for name in ("cuda.h", "cuda_runtime.h", "cuda_fp4.h", "type_traits")]
PREAMBLE = """
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
namespace std { using namespace cuda::std; }
using namespace cuda::std;
"""
OFFSET = """
__device__ __forceinline__ size_t get_elem_offset_impl(size_t n, size_t h, size_t i, size_t stride_n, size_t stride_h) {
  return n * stride_n + h * stride_h + i;
}
"""


def source_of(positions: str, vectors: str) -> str:
    """What NVRTC compiles, of the texts of pos_enc.cuh and vec_dtypes.cuh: no host code, no header that it lacks."""
    vectors = "\n".join(line for line in vectors.splitlines() if line not in NO_DEVICE_HEADERS)
    parts = []
    for first, last in CUTS:
        start = positions.rindex("template <", 0, positions.index(first))
        # up to the end of a function: a comment that precedes what follows is not taken along
        end = positions.rindex("\n}\n", start, positions.index(last, start))
        parts.append(positions[start:end] + "\n}\n")
    return f"{PREAMBLE}{vectors}\nnamespace flashinfer {{\n{OFFSET}{''.join(parts)}}}\n"


def build(checkout: pathlib.Path, cuda: pathlib.Path, folder: pathlib.Path) -> None:
    """Compile for sm_90a with the flags of flashinfer's own build, and write the code and its facts."""
    ctypes.CDLL(str(next((cuda / "lib").glob("libnvrtc.so*"))), mode=ctypes.RTLD_GLOBAL)
    from cuda.bindings import nvrtc

    include = checkout / "include" / "flashinfer"
    source = source_of(*((include / name).read_text() for name in ("pos_enc.cuh", "vec_dtypes.cuh")))
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"rope.cu", 0, [], []))
    sizes = f"{HEAD_DIM}, {ACCESS_ELEMS}, {CTA_X}"
    instances = {
        f"{kind}, {interleaved}": f"flashinfer::{kernel}<{interleaved}, {sizes}, __nv_bfloat16, long long>"
        for kind, kernel in KERNELS.items()
        for interleaved in ("false", "true")
    }
    for instance in instances.values():
        _checked(nvrtc.nvrtcAddNameExpression(program, instance.encode()))
    folders = [cuda / "include", cuda / "include" / "cccl"]
    options = ["--gpu-architecture=sm_90a", "-use_fast_math", "-std=c++17", *(f"-I{path}" for path in folders)]
    if int(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]):
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.decode())
    code = bytes(bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program))))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    names = {key: _checked(nvrtc.nvrtcGetLoweredName(program, x.encode())).decode() for key, x in instances.items()}
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], text=True, capture_output=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CUBIN).write_bytes(code)
    facts = {"version": f"{commit.stdout.strip()}, kernel by NVRTC", "names": names}
    (folder / FACTS).write_text(json.dumps(facts, indent=1))


class RopeKernels:
    """The kernels of a folder that `build` wrote, launched as flashinfer launches them: bf16, head dim 128, int64
    positions, in place.

    The launches are the driver's, through Python: their host time says nothing about flashinfer.
    """

    name = "flashinfer"
    has_host_time = False

    def __init__(self, folder: pathlib.Path) -> None:
        import torch
        from cuda.bindings import driver

        torch.cuda.current_stream()  # the driver is asked for a context below
        facts = json.loads((folder / FACTS).read_text())
        self.version, self._driver = facts["version"], driver
        module = _checked(driver.cuModuleLoadData((folder / CUBIN).read_bytes()))
        self._functions = {
            key: _checked(driver.cuModuleGetFunction(module, name.encode())) for key, name in facts["names"].items()
        }

    def rotate(self, q, k, cos, sin, positions, *, interleaved: bool) -> Callable[[], Any]:
        """As `peers.FlashinferRope.rotate`."""
        import torch

        pairs = str(interleaved).lower()
        num_ctas = -(-q.shape[0] // CTA_Y)
        all_heads = self._functions[f"all heads, {pairs}"]
        resident = _checked(self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(all_heads, CTA_THREADS, 0))
        if num_ctas >= resident * torch.cuda.get_device_properties(q.device).multi_processor_count:
            function, grid = all_heads, (num_ctas, 1, 1)
        else:
            function, grid = self._functions[f"by head, {pairs}"], (num_ctas, q.shape[1] + k.shape[1], 1)
        table = torch.cat((cos, sin), 1)
        pointers = [x.data_ptr() for x in (q, k, q, k, table, positions)]
        sizes = [q.shape[0], q.shape[1], k.shape[1], 2 * cos.shape[1]]
        strides = [*q.stride()[:2], *k.stride()[:2]] * 2
        types = [ctypes.c_void_p] * 6 + [ctypes.c_uint32] * 4 + [ctypes.c_size_t] * 8
        stream = torch.cuda.current_stream().cuda_stream
        arguments = ((*pointers, *sizes, *strides), tuple(types))
        launch = functools.partial(
            self._driver.cuLaunchKernel, function, *grid, CTA_X, CTA_Y, 1, 0, stream, arguments, 0
        )
        launch.table = table  # kept as long as the launch
        return launch


def _checked(result: tuple) -> Any:
    """What a call of the bindings returned, after its status."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"{status}")
    return values[0] if values else None


if __name__ == "__main__":
    build(*map(pathlib.Path, sys.argv[1:]))

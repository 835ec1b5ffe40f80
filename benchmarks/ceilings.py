"""The two kernels behind the measured ceilings: an empty one for the launch, a read-only one for the bandwidth.

The DSL evaluates annotations and rewrites source, so this module must not postpone annotations and defines the kernels
inside functions: importing it costs nothing and needs no GPU.
"""

from collections.abc import Callable

READ_THREADS = 256
READ_LOADS = 8  # 16-byte loads in flight per thread: 32 KiB a CTA, enough to saturate the memory of an H200
READ_TILE_BYTES = READ_THREADS * READ_LOADS * 16


def compile_empty(options: str = ""):
    """Compiled host function `(p0, p1, p2, p3, n, stream)` that launches an empty kernel on n CTAs.

    Args:
        options: further compile options; without `--gpu-arch` the code is for the current GPU.
    """
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute

    @cute.kernel
    def empty_kernel():
        pass

    @cute.jit
    def launch_empty(
        p0: cute.Pointer,
        p1: cute.Pointer,
        p2: cute.Pointer,
        p3: cute.Pointer,
        n: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        empty_kernel().launch(grid=(n, 1, 1), block=(32, 1, 1), stream=stream)

    return _compile(launch_empty, num_pointers=4, options=options)


def compile_read(options: str = ""):
    """Compiled host function `(src, sink, tiles, stream)` that reads `tiles * READ_TILE_BYTES` bytes of fp32 at src.

    Nothing is written unless a thread's sum is -1, which zeros never give; the compiler cannot know that, so it keeps
    the loads.
    """
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute

    @cute.kernel
    def read_kernel(src: cute.Pointer, sink: cute.Pointer):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        layout = cute.make_layout((4, READ_THREADS, READ_LOADS))
        gSrc = cute.make_tensor(src + cutlass.Int64(bidx) * (READ_TILE_BYTES // 4), layout)
        rSrc = cute.make_rmem_tensor((4, READ_LOADS), cutlass.Float32)
        for i in cutlass.range_constexpr(READ_LOADS):
            cute.autovec_copy(gSrc[None, tidx, i], rSrc[None, i])
        total = rSrc.load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        if total == cutlass.Float32(-1.0):
            cute.make_tensor(sink, cute.make_layout(1))[0] = total

    @cute.jit
    def launch_read(src: cute.Pointer, sink: cute.Pointer, tiles: cutlass.Int32, stream: cuda.CUstream):
        read_kernel(src, sink).launch(grid=(tiles, 1, 1), block=(READ_THREADS, 1, 1), stream=stream)

    return _compile(launch_read, num_pointers=2, options=options)


def raw_launch() -> Callable[[], None]:
    """The least that a launch from Python costs: raw TVM-FFI function, integer pointers, stream handle in hand."""
    import torch

    entry = compile_empty().__tvm_ffi_object__()
    stream = torch.cuda.current_stream().cuda_stream
    pointer = 0x100  # never dereferenced; any multiple of 16 will do
    return lambda: entry(pointer, pointer, pointer, pointer, 1, stream)


def reader(src) -> Callable[[], None]:
    """Callable that reads all of `src`, a CUDA tensor of zeros whose bytes are a multiple of READ_TILE_BYTES."""
    import torch

    if src.nbytes % READ_TILE_BYTES:
        raise ValueError(f"src: wanted a multiple of {READ_TILE_BYTES} bytes, got {src.nbytes}")
    entry = compile_read().__tvm_ffi_object__()
    sink = torch.zeros(16, dtype=torch.uint8, device=src.device)
    tiles, stream = src.nbytes // READ_TILE_BYTES, torch.cuda.current_stream().cuda_stream
    return lambda: entry(src.data_ptr(), sink.data_ptr(), tiles, stream)


def _compile(host, num_pointers: int, options: str):
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    pointers = [make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=16) for _ in range(num_pointers)]
    arguments = (*pointers, cutlass.Int32(1), make_fake_stream())
    return cute.compile(host, *arguments, options=f"--enable-tvm-ffi {options}".strip())

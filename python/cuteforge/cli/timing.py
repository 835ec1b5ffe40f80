"""Device time of one launch, and what the GPU can copy: the figures beside the demo's checks.

The benchmarks of a source checkout measure more carefully.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

# Writing four times the L2 leaves none of the input there, and outlasts the host's work for the timed call.
FLUSH_L2_MULTIPLE = 4
REPEATS = 20
MAX_COPY_BYTES = 1 << 30


def median_us(launch: Callable[[], object]) -> float:
    """Median microseconds of single launches on torch's current stream, each after the L2 cache was overwritten.

    About 2 us of launch latency is inside.
    """
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(FLUSH_L2_MULTIPLE * l2_bytes, dtype=torch.uint8, device="cuda")
    launch()
    pairs = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        launch()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)


def copy_tbps() -> float:
    """TB/s, read and written together, of a copy much larger than the L2 cache.

    A memory-bound kernel is compared with it.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    src = torch.zeros(min(MAX_COPY_BYTES, free_bytes // 4), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    return 2 * src.nbytes / median_us(lambda: dst.copy_(src)) * 1e-6

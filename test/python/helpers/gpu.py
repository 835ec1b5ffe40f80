"""What tests of several families need from a GPU: free memory, captures, a stream that is behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

# About two seconds on a 2 GHz clock: long enough that work which does not wait for it is seen to be wrong, where many processes share the GPU too.
SLEEP_CYCLES = 4_000_000_000

_Results = TypeVar("_Results")


def require_free_memory(gib: int, device) -> None:
    """Skip where the GPU cannot hold the case."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free:.0f}")


def moved(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A copy on another GPU, by way of the host: not every machine lets its GPUs reach each other's memory."""
    return tensor.cpu().to(torch.device("cuda", index))


def check_while_behind(
    stream: torch.cuda.Stream, launch: Callable[[], None], check_untouched: Callable[[], None]
) -> None:
    """`launch()` while `stream` is behind a long sleep: nothing may be written until that is over.

    The code of the kernel has to be there already. That of the check is brought here: torch loads a kernel at its first launch, which may wait for
    all of the GPU, the sleep too.
    """
    check_untouched()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    launch()
    torch.cuda.default_stream().synchronize()
    check_untouched()
    assert not stream.query(), "the sleep was too short to show anything"
    stream.synchronize()


def captured(call: Callable[[], _Results], device) -> _Results:
    """The results of one replay. One launch of torch's own keeps the graph from being empty, which torch warns about."""
    graph, filler = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
    with torch.cuda.graph(graph):
        filler.add_(1)
        results = call()
    graph.replay()
    return results


def count_launches(call: Callable[[], object]) -> int:
    """Nodes of a graph that captures `call`, which has to be warm: its launches, copies and fills."""
    from cuda.bindings import runtime

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    status, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(init_value=graph.raw_cuda_graph()))
    assert status == runtime.cudaError_t.cudaSuccess, status
    return count

"""What tests of several families need from a GPU: free memory, captures, a stream that is behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

# About two seconds on a 2 GHz clock. No test may fail for a sleep that was too short: what has to be seen while a
# stream is behind is looked at inside `held`.
SLEEP_CYCLES = 4_000_000_000
HELD_AT_MOST_S = 60

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


@contextlib.contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[None]:
    """What is put on `stream` inside the block waits until the block ends, however long that takes.

    A sleep would be over too early where the host is slow or other processes have the GPU. What waits for the stream
    itself would wait for ever, so that after a minute it is let go, and the test fails. Code that torch or the driver
    loads at its first launch may do so: it has to be there already.
    """
    from cuda.bindings import driver

    gate = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    is_one = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    (status,) = driver.cuStreamWaitValue32(stream.cuda_stream, gate.data_ptr(), 1, is_one)
    assert status == driver.CUresult.CUDA_SUCCESS, status
    too_late = threading.Timer(HELD_AT_MOST_S, gate.fill_, (1,))
    too_late.start()
    try:
        yield
        assert not gate.item(), f"something waited for the stream that was held, {HELD_AT_MOST_S} s long"
        assert not stream.query()
    finally:
        too_late.cancel()
        gate.fill_(1)
        stream.synchronize()


def check_while_behind(
    stream: torch.cuda.Stream, launch: Callable[[], None], check_untouched: Callable[[], None]
) -> None:
    """`launch()` while `stream` is held: nothing may be written until it is let go. The code of the kernel has to be
    there already."""
    check_untouched()
    torch.cuda.synchronize()
    with held(stream):
        launch()
        torch.cuda.default_stream().synchronize()
        check_untouched()


def check_not_behind(stream: torch.cuda.Stream, launch: Callable[[], None], check: Callable[[], None]) -> None:
    """`launch()` with `stream` as the current one, which is held: all is written meanwhile. The code has to be there
    already."""
    with pytest.raises(AssertionError, match="never written"):
        check()
    torch.cuda.synchronize()
    with held(stream):
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.default_stream().synchronize()
        check()


def captured(call: Callable[[], _Results], device) -> _Results:
    """The results of one replay. One launch of torch's own keeps the graph from being empty, which torch warns
    about."""
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

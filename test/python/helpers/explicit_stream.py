"""A call on a stream that is behind, with operands that the caller frees and whose memory he writes again at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from helpers import budget
from helpers.gpu import SLEEP_CYCLES

Tensors = dict[str, torch.Tensor]
# New operands; and the results of a call on them, on a stream or on torch's current one.
Draw = Callable[[], Tensors]
Call = Callable[[Tensors, torch.cuda.Stream | None], Mapping[str, torch.Tensor]]

_MOST_THIEVES = 256
_MOST_STOLEN_BYTES = 2**28


def check_operands_freed_at_once(draw: Draw, call: Call) -> None:
    """The results are those of a call that nothing disturbs.

    `call` runs on a stream that sleeps. Its operands are freed while it sleeps, and all memory that the allocator then
    hands out is overwritten.
    """
    want = _values(call(draw(), None))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Loads every kernel: CUDA loads one at its first launch, which may wait until all of the GPU is idle.
    _call_behind(draw, call, stream, 1)
    for cycles in (SLEEP_CYCLES // 8, SLEEP_CYCLES, 4 * SLEEP_CYCLES):
        got, was_behind = _call_behind(draw, call, stream, cycles)
        assert all(budget.same_bits(a, b) for a, b in zip(got, want, strict=True))
        if was_behind:
            return
    pytest.fail("the stream was never behind, so nothing was shown")


def _call_behind(draw: Draw, call: Call, stream: torch.cuda.Stream, cycles: int) -> tuple[list[torch.Tensor], bool]:
    """The results of a call behind a sleep, and whether the sleep outlasted the writes to the memory of its
    operands."""
    tensors = draw()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
    storages = [x.untyped_storage() for x in tensors.values()]
    freed = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del storages
    results = call(tensors, stream)
    tensors.clear()
    thieves = [block for address, size in freed.items() for block in _overwritten(address, size)]
    torch.cuda.current_stream().synchronize()
    was_behind = not stream.query()
    stream.synchronize()
    del thieves
    return _values(results), was_behind


def _overwritten(address: int, size: int) -> list[torch.Tensor]:
    """New blocks of `size` bytes, filled: the last one at `address`, unless that is still in use."""
    blocks = []
    for _ in range(min(_MOST_THIEVES, max(4, _MOST_STOLEN_BYTES // max(size, 1)))):
        blocks.append(torch.full((size,), 77, dtype=torch.uint8, device="cuda"))
        if blocks[-1].data_ptr() == address:
            break
    return blocks


def _values(results: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().clone() for x in results.values()]

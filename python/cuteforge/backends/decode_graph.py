"""A model's decode step as CUDA graphs, one for each of a few batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuteforge.backends.kv_cache import KVCache
from cuteforge.errors import ContractError

# The first call compiles kernels and lets libraries set themselves up, which a capture must not see.
_WARM_UP_CALLS = 2


class DecodeGraph:
    """Decode steps over a `KVCache`, replayed: a call costs one launch, whatever the model launches.

    A call binds the cache to one new token of each request, copies the inputs into buffers of its own, adds padding rows up to the next size of
    `batch_sizes`, and replays the graph of that size. On a CPU it calls `step` instead, on the same buffers.

    Args:
        step: the model's decode step, ``step(*inputs) -> results``. Each input is a tensor with one row for each request, and so is each tensor of
            the results: a tensor, or tuples, lists and dicts of them. It reads ``cache.batch`` (tables, lengths, ``positions``) and stores each
            layer's keys and values once, as `attention` does. It must launch the same at each call: nothing on the host may depend on data.
        cache: is bound by this object; prefills and other steps may come between calls.
        batch_sizes: rows to capture; None: 1, 2, 4, … and the cache's max_requests.
        use_graphs: None: on a GPU. False: call `step` there too, with the same padding; results are the same bit for bit.

    A graph is captured when its size is first needed, or ahead by `capture`. That calls `step` three times on padding rows only: lengths of 0,
    inputs of 0, stores to the scratch page; no request is touched. Padding rows of a call have the same, and a model whose rows mix sees them. As
    libraries may choose another algorithm for another batch size, a padded call may differ from one without padding by rounding.
    `step` runs without gradients.

    Results are views of memory that the next call of the same size overwrites.

    Raises:
        ContractError: batch_sizes that are empty, or above max_requests.
    """

    def __init__(
        self, step: Callable[..., Any], cache: KVCache, batch_sizes: Sequence[int] | None = None, *, use_graphs: bool | None = None
    ) -> None:  # fmt: skip
        sizes = _powers_of_two(cache.max_requests) if batch_sizes is None else sorted(set(batch_sizes))
        if not sizes or sizes[0] < 1 or sizes[-1] > cache.max_requests:
            raise ContractError(f"batch_sizes: wanted some from 1 to max_requests = {cache.max_requests}, got {sizes}")
        self.batch_sizes: tuple[int, ...] = tuple(sizes)
        self._step, self._cache = step, cache
        self._use_graphs = cache.device.type == "cuda" if use_graphs is None else use_graphs
        self._inputs: tuple[torch.Tensor, ...] | None = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __call__(self, requests: Sequence[int], *inputs: torch.Tensor) -> Any:
        """One step.

        Args:
            requests: B numbers of the cache.
            inputs: ``(B, …)``, on the cache's device. Shapes past the first dim and dtypes are those of the first call.

        Returns:
            What `step` returns, B rows of each tensor.

        Raises:
            ContractError: more requests than the largest size, or an input that differs; nothing was changed.
            ContractError, CacheFull: as `KVCache.bind_decode`.
        """
        count = len(requests)
        size = next((size for size in self.batch_sizes if size >= count), None)
        if size is None:
            raise ContractError(f"requests: wanted at most {self.batch_sizes[-1]}, the largest size, got {count}")
        buffers = self._buffers(count, inputs)
        if self._use_graphs and size not in self._graphs:
            self._capture(size)
        self._cache.bind_decode(requests, pad_to=size)
        for buffer, new in zip(buffers, inputs):
            buffer[:count].copy_(new)
            buffer[count:size].zero_()
        return _first_rows(self._run(size), count)

    def capture(self, *inputs: torch.Tensor) -> None:
        """Capture all sizes now, the largest first, whose memory the others reuse.

        Args:
            inputs: as in a call, of any number of rows; only their shapes past the first dim and dtypes count.
        """
        self._buffers(None, inputs)
        if self._use_graphs:
            for size in reversed(self.batch_sizes):
                if size not in self._graphs:
                    self._capture(size)

    def _run(self, size: int) -> Any:
        if not self._use_graphs:
            return self._call_step(size)
        graph, results = self._graphs[size]
        with torch.cuda.device(self._cache.device):
            graph.replay()
        return results

    def _call_step(self, size: int) -> Any:
        with torch.no_grad():
            return self._step(*(buffer[:size] for buffer in self._inputs))

    def _capture(self, size: int) -> None:
        self._cache.bind_decode((), pad_to=size)
        for buffer in self._inputs:
            buffer[:size].zero_()
        with torch.cuda.device(self._cache.device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_CALLS):
                    self._call_step(size)
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                results = self._call_step(size)
        # Results of all graphs stay alive, so that sharing memory reuses only what lies between inputs and results.
        self._pool = graph.pool()
        self._graphs[size] = graph, results

    def _buffers(self, count: int | None, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The static inputs, which `inputs` must fit; made at the first call, for the largest size."""
        for i, x in enumerate(inputs):
            self._check_input(f"inputs[{i}]", x, count)
        if self._inputs is None:
            # Buffers made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._inputs = tuple(x.new_zeros((self.batch_sizes[-1], *x.shape[1:])) for x in inputs)
        if len(inputs) != len(self._inputs):
            raise ContractError(f"inputs: wanted {len(self._inputs)}, as in the first call, got {len(inputs)}")
        for i, (x, buffer) in enumerate(zip(inputs, self._inputs)):
            if (wanted := _row(buffer)) != (got := _row(x)):
                raise ContractError(f"inputs[{i}]: wanted rows of {wanted}, as in the first call, got {got}")
        return self._inputs

    def _check_input(self, name: str, x: Any, count: int | None) -> None:
        if not isinstance(x, torch.Tensor):
            raise ContractError(f"{name}: wanted a torch.Tensor, got {type(x).__name__}")
        if x.device != self._cache.device:
            raise ContractError(f"{name}: wanted a tensor on {self._cache.device}, got one on {x.device}")
        if x.dim() == 0 or count not in (None, len(x)):
            raise ContractError(f"{name}: wanted {count or 'some'} rows, one a request, got shape {tuple(x.shape)}")


def _powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, … below `largest`, and `largest`."""
    return [2**i for i in range((largest - 1).bit_length())] + [largest]


def _row(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} and shape {tuple(x.shape[1:])}"


def _first_rows(results: Any, count: int) -> Any:
    """`results` with `count` rows of each tensor."""
    if isinstance(results, torch.Tensor):
        return results[:count]
    if isinstance(results, dict):
        return {name: _first_rows(value, count) for name, value in results.items()}
    if isinstance(results, (tuple, list)):
        rows = [_first_rows(value, count) for value in results]
        return type(results)(*rows) if hasattr(results, "_fields") else type(results)(rows)
    return results

"""A model's decode step as CUDA graphs, one for each of a few batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cuteforge.arguments import integers
from cuteforge.errors import ContractError
from cuteforge.op.checks import check_layout
from cuteforge.serving.kv_cache import KVCache

# The first call compiles kernels and lets libraries set themselves up, which a capture must not see.
_WARM_UP_CALLS = 2


_Tensors = tuple[torch.Tensor, ...]


class _Graph(NamedTuple):
    """A captured step of one size, with its outputs. `stores_all`: it stores the new tokens in every layer."""

    graph: torch.cuda.CUDAGraph
    results: Any
    stores_all: bool


class DecodeGraph:
    """Decode steps over a `KVCache`, replayed: a call costs one launch, whatever the model launches.

    A call binds the cache to one new token of each request, copies the inputs into buffers of its own, adds padding
    rows up to the next size of `batch_sizes`, and replays the graph of that size. On a CPU it calls `step` instead, on
    the same buffers.

    Args:
        step: the model's decode step, ``step(*inputs) -> results``. Each input is a tensor with one row for each
            request, and so is each tensor of the results: a tensor, or tuples, lists and dicts of them. It reads
            ``cache.batch`` (tables, lengths, ``positions``) and stores each layer's keys and values once, as
            `attention` does. It must launch the same at each call: nothing on the host may depend on data.
        cache: is bound by this object; prefills and other steps may come between calls.
        batch_sizes: rows to capture; None: 1, 2, 4, … and the cache's max_requests.
        use_graphs: None: on a GPU. False: call `step` there too, with the same padding; results are the same bit for
            bit.

    A graph is captured when its size is first needed, or ahead by `capture`. That calls `step` three times on padding
    rows only: lengths of 0, inputs of 0, stores to the scratch page; no request is touched. Padding rows of a call have
    the same, and a model whose rows mix sees them. As libraries may choose another algorithm for another batch size, a
    padded call may differ from one without padding by rounding. `step` runs without gradients. If it raises, the bind
    is undone (`KVCache.rollback`) and the object stays usable.

    Results are views of memory that the next call of the same size overwrites.

    Raises:
        ContractError: an argument has the wrong type; batch_sizes is empty or goes above max_requests; graphs are
            asked for and the cache is not on a GPU.

    Examples:
        >>> import torch
        >>> from cuteforge import DecodeGraph, KVCache, attention
        >>> cache = KVCache(1, 2, 64, num_pages=64, max_requests=8, max_seqlen=256, device="cuda")
        >>> def step(x):  # a model of one layer that turns (B, 64) into (B, 64)
        ...     q, kv = x[:, None].repeat(1, 8, 1), x[:, None].repeat(1, 2, 1)
        ...     return attention(q, kv, kv, cache).mean(1)
        >>> decode = DecodeGraph(step, cache)
        >>> x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
        >>> decode.capture(x)
        >>> requests = [cache.add(), cache.add(), cache.add()]
        >>> torch.equal(decode(requests, x), x)  # each token sees only itself
        True
    """

    def __init__(
        self, step: Callable[..., Any], cache: KVCache, batch_sizes: Sequence[int] | None = None, *, use_graphs: bool |
        None = None
    ) -> None:  # fmt: skip
        if not callable(step):
            raise ContractError(f"step: wanted a callable, got {step!r:.80}")
        if not isinstance(cache, KVCache):
            raise ContractError(f"cache: wanted a KVCache, got {type(cache).__name__}")
        has_graphs = cache.device.type == "cuda"
        if use_graphs is not None and not isinstance(use_graphs, bool):
            raise ContractError(f"use_graphs: wanted None or a bool, got {use_graphs!r:.80}")
        if use_graphs and not has_graphs:
            raise ContractError(f"use_graphs: wanted None or False for a cache on {cache.device}, got True")
        self.batch_sizes: tuple[int, ...] = _checked_sizes(batch_sizes, cache.max_requests)
        self._step, self._cache = step, cache
        self._use_graphs = has_graphs if use_graphs is None else use_graphs
        # Static inputs, of the largest size; None before the first call that succeeds.
        self._inputs: tuple[torch.Tensor, ...] | None = None
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None

    def __call__(self, requests: Sequence[int], *inputs: torch.Tensor) -> Any:
        """One step.

        Args:
            requests: B numbers of the cache.
            inputs: ``(B, …)``, on the cache's device. Shapes past the first dim and dtypes are those of the first call.

        Returns:
            What `step` returns, B rows of each tensor.

        Raises:
            ContractError: more requests than the largest size, or an input that differs.
            ContractError, CacheFull: as `KVCache.bind_decode`. After these errors nothing was changed.

        Examples:
            >>> import torch
            >>> from cuteforge import DecodeGraph, KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_requests=4, max_seqlen=64, dtype=torch.float32, device="cpu")
            >>> def step(x):
            ...     cache.append(0, *x.expand(2, 2, len(x), 64).transpose(1, 2))
            ...     return x + cache.batch.positions[:, None]
            >>> decode, request = DecodeGraph(step, cache), cache.add()
            >>> [decode([request], torch.zeros(1, 64))[0, 0].item() for _ in range(3)]
            [0.0, 1.0, 2.0]
        """
        # As a bind does, also where the call is refused before.
        self._cache.keep_stored()
        requests = integers("requests", requests)
        count = len(requests)
        size = next((size for size in self.batch_sizes if size >= count), None)
        if size is None:
            raise ContractError(f"requests: wanted at most {self.batch_sizes[-1]}, the largest size, got {count}")
        buffers = self._buffers(count, inputs)
        if self._use_graphs and size not in self._graphs:
            # A capture binds the cache to padding: what is refused is refused before.
            self._cache.check_decode(requests, pad_to=size)
            self._capture(size, buffers)
        self._cache.bind_decode(requests, pad_to=size)
        try:
            _fill(buffers, inputs, count, size)
            results = _first_rows(self._run(size, buffers), count)
        except BaseException:
            self._cache.rollback()
            raise
        self._inputs = buffers
        return results

    def capture(self, *inputs: torch.Tensor) -> None:
        """Capture all sizes now, the largest first, whose memory the others reuse.

        Args:
            inputs: as in a call, of any number of rows; only their shapes past the first dim and dtypes count.

        Examples:
            >>> import torch
            >>> from cuteforge import DecodeGraph, KVCache
            >>> cache = KVCache(1, 2, 64, num_pages=8, max_requests=4, max_seqlen=64, device="cuda")
            >>> decode = DecodeGraph(lambda x: x * cache.batch.seqlens_k[:, None], cache, batch_sizes=[2, 4])
            >>> decode.capture(torch.zeros(1, 64, device="cuda"))
            >>> decode.batch_sizes
            (2, 4)
        """
        buffers = self._buffers(None, inputs)
        if self._use_graphs:
            for size in reversed(self.batch_sizes):
                if size not in self._graphs:
                    self._capture(size, buffers)
        self._inputs = buffers

    def _run(self, size: int, buffers: _Tensors) -> Any:
        if not self._use_graphs:
            return self._call_step(size, buffers)
        captured = self._graphs[size]
        with torch.cuda.device(self._cache.device):
            captured.graph.replay()
        if captured.stores_all:
            self._cache.mark_stored()
        return captured.results

    def _call_step(self, size: int, buffers: _Tensors) -> Any:
        with torch.no_grad():
            return self._step(*(buffer[:size] for buffer in buffers))

    def _capture(self, size: int, buffers: _Tensors) -> None:
        self._cache.bind_decode((), pad_to=size)
        try:
            self._graphs[size] = self._captured(size, buffers)
        except BaseException:
            self._cache.rollback()
            raise
        # The graph reads these from now on.
        self._inputs = buffers

    def _captured(self, size: int, buffers: _Tensors) -> _Graph:
        _fill(buffers, (), 0, size)
        with torch.cuda.device(self._cache.device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    for _ in range(_WARM_UP_CALLS):
                        self._call_step(size, buffers)
            finally:
                current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                results = self._call_step(size, buffers)
        # Results of all graphs stay alive, so that sharing memory reuses only what lies between inputs and results.
        self._pool = graph.pool()
        return _Graph(graph, results, self._cache.is_stored)

    def _buffers(self, count: int | None, inputs: _Tensors) -> _Tensors:
        """The static inputs, checked against `inputs`. Before the first call that succeeds: new ones, made to fit."""
        for i, x in enumerate(inputs):
            self._check_input(f"inputs[{i}]", x, count)
        if self._inputs is None:
            # Buffers made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                return tuple(x.new_zeros((self.batch_sizes[-1], *x.shape[1:])) for x in inputs)
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
        check_layout(name, x)
        if x.dim() == 0 or count not in (None, len(x)):
            raise ContractError(f"{name}: wanted {count or 'some'} rows, one a request, got shape {tuple(x.shape)}")


def _checked_sizes(batch_sizes: Any, largest: int) -> tuple[int, ...]:
    sizes = _powers_of_two(largest) if batch_sizes is None else sorted(set(integers("batch_sizes", batch_sizes)))
    if not sizes or sizes[0] < 1 or sizes[-1] > largest:
        raise ContractError(f"batch_sizes: wanted some from 1 to max_requests = {largest}, got {sizes}")
    return tuple(sizes)


def _powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, … below `largest`, and `largest`."""
    return [2**i for i in range((largest - 1).bit_length())] + [largest]


def _fill(buffers: _Tensors, inputs: _Tensors, count: int, size: int) -> None:
    """Write `inputs` to the first `count` rows of the buffers, and 0 from there to `size`. Leaves no autograd graph."""
    with torch.no_grad():
        for i, buffer in enumerate(buffers):
            if count:
                buffer[:count].copy_(inputs[i])
            buffer[count:size].zero_()


def _row(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} and shape {tuple(x.shape[1:])}"


def _first_rows(results: Any, count: int) -> Any:
    """`results` with `count` rows of each tensor."""
    if isinstance(results, torch.Tensor):
        if results.dim() == 0 or len(results) < count:
            raise ContractError(f"step: wanted results of one row a request, got shape {tuple(results.shape)}")
        return results[:count]
    if isinstance(results, dict):
        return {name: _first_rows(value, count) for name, value in results.items()}
    if isinstance(results, (tuple, list)):
        rows = [_first_rows(value, count) for value in results]
        return type(results)(*rows) if hasattr(results, "_fields") else type(results)(rows)
    return results

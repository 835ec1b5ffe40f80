"""The memory of a cache: keys and values of all layers in pages."""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.errors import ContractError
from cuteforge.op.checks import check_layout

_MAX_BYTES = 2**60  # of one allocation, far from where its size in bytes would wrap


class KVPool:
    """One allocation, all keys before all values, not initialised.

    Args:
        num_layers, num_pages, page_size, num_kv_heads: extents.
        dims: head dims of keys and of values.
        dtype, device: of the memory.

    Attributes:
        keys, values: of each layer, ``(num_pages, page_size, num_kv_heads, dim)``: views.
        device: of the memory, with its index.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, dims: list[int],
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        tokens = num_pages * page_size
        sizes = [num_layers * tokens * num_kv_heads * dim for dim in dims]
        check_bytes("num_pages", "a pool", sum(sizes) * dtype.itemsize)
        memory = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = memory[: sizes[0]], memory[sizes[0] :]
        flat = [part.view(num_layers, tokens, num_kv_heads, dim) for part, dim in zip(parts, dims)]
        # Views of each layer, made once: by slot and by page.
        self._flat = [[pool[layer] for layer in range(num_layers)] for pool in flat]
        self.keys, self.values = [[layer.unflatten(0, (-1, page_size)) for layer in pool] for pool in self._flat]
        self.device = memory.device

    def check_new(self, num_tokens: int, k: Any, v: Any) -> None:
        """Raises ContractError unless k and v are that many tokens of a layer."""
        for name, new, layers in zip("kv", (k, v), self._flat):
            if not isinstance(new, torch.Tensor):
                raise ContractError(f"{name}: wanted a torch.Tensor, got {type(new).__name__}")
            check_layout(name, new)
            pool = layers[0]
            wanted = (num_tokens, *pool.shape[1:]), pool.dtype, pool.device
            got = tuple(new.shape), new.dtype, new.device
            if got != wanted:
                raise ContractError(f"{name}: wanted {_describe(*wanted)}, got {_describe(*got)}")

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the keys and values of tokens to their slots, ``(T,)`` int64."""
        for new, layers in zip((k, v), self._flat):
            layers[layer].index_copy_(0, slots, new)


def check_bytes(name: str, what: str, num_bytes: int) -> None:
    """Refuse what no device has memory for."""
    if num_bytes > _MAX_BYTES:
        raise ContractError(f"{name}: wanted {what} of at most {_MAX_BYTES} bytes, got sizes that need {num_bytes}")


def _describe(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {shape} on {device}"

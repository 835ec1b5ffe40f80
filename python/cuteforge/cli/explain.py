"""`explain`: which backend serves a call of given sizes on an architecture, and the kernel's tile and plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cuteforge import apply_rotary_emb, attention, compress, explain
from cuteforge.cli.families.attention import Sizes, paged_sample
from cuteforge.errors import ContractError
from cuteforge.families.attention.explain import describe
from cuteforge.runtime.arch import resolve_arch

_DTYPES = ("bfloat16", "float16", "float32")


def run(function: str, arch: str | None = None, dtype: str = "bfloat16", **sizes: Any) -> int:
    """Print what a call runs. Needs no GPU: the call is made of tensors without memory.

    Args:
        function: a key of `CALLS`.
        arch: e.g. "sm_90a"; None takes CUTEFORGE_ARCH, else the GPU here.
        dtype: of the call's floating tensors.
        sizes: those that `CALLS[function]` takes.

    Returns:
        0; 1 where no backend serves the call.

    Raises:
        ContractError: the sizes contradict each other, or an argument is none that there is.
        UnsupportedError: neither an architecture nor a GPU; or, of pages, what the kernel does not serve.
    """
    if dtype not in _DTYPES:
        raise ContractError(f"--dtype: wanted one of {', '.join(_DTYPES)}, got {dtype!r}")
    target = resolve_arch(arch, None)
    decision = CALLS[function](target.name, dtype, sizes)
    print(decision)
    return 1 if getattr(decision, "chosen", "cuda") is None else 0


def _attention(arch: str, dtype: str, given: Mapping[str, Any]) -> Any:
    sizes = Sizes(dtype=dtype, **given)
    if sizes.page_size is not None:
        return describe(paged_sample(sizes), resolve_arch(arch, None))
    q = _tensor(dtype, sizes.requests, sizes.tokens, sizes.heads, sizes.head_dim)
    k = _tensor(dtype, sizes.requests, sizes.keys, sizes.kv_heads, sizes.head_dim)
    return explain(attention, q, k, k, is_causal=sizes.causal, arch=arch)


def _rotary(arch: str, dtype: str, sizes: Mapping[str, Any]) -> Any:
    tokens, half = sizes["tokens"], (sizes["rotary_dim"] or sizes["head_dim"]) // 2
    x, freqs_cis = _tensor(dtype, tokens, sizes["heads"], sizes["head_dim"]), _tensor("float32", tokens, half, 2)
    return explain(apply_rotary_emb, x, freqs_cis, interleaved=not sizes["halves"], arch=arch)


def _compress(arch: str, dtype: str, sizes: Mapping[str, Any]) -> Any:
    tokens, ratio, coff = sizes["tokens"], sizes["ratio"], sizes["coff"]
    columns = coff * sizes["head_dim"]
    kv, ape, offsets = _tensor(dtype, tokens, columns), _tensor("float32", ratio, columns), _tensor("int32", 2)
    return explain(compress, kv, kv, ape, offsets, ratio=ratio, coff=coff, total_comp=tokens // ratio, arch=arch)


CALLS: Mapping[str, Callable[[str, str, Mapping[str, Any]], Any]] = {
    "attention": _attention,
    "rotary": _rotary,
    "compress": _compress,
}


def _tensor(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=getattr(torch, dtype), device="meta")

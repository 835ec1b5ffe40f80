"""One-call rotary embedding: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import torch

from cuteforge.api_base import TupleDict
from cuteforge.errors import ContractError
from cuteforge.op_cache import run_op
from cuteforge.rotary.api import RotaryEmbedding
from cuteforge.runtime.streams import stream_context

_NO_CONTEXT = contextlib.nullcontext()


def rotary_wrapper(
    x: torch.Tensor,
    freqs_cis: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = True,
    inverse: bool = False,
    out: torch.Tensor | None = None,
    stream: Any = None,
) -> TupleDict:
    """Rotary embedding of one tensor; see `RotaryEmbedding` for the operation, shapes and numerics.

    Args:
        x: ``(T, H, D)`` or ``(B, L, H, D)``.
        freqs_cis: ``(T, rotary_dim/2, 2)`` or ``(B, L, rotary_dim/2, 2)``; or else
        cos, sin, positions: ``(max_pos, rotary_dim/2)`` twice, and ``(T,)`` or ``(B, L)``.
        interleaved: pairs ``(2i, 2i+1)``, else ``(i, i + rotary_dim/2)``.
        inverse: turn back.
        out: None allocates it; `x` itself rotates in place.
        stream: where allocation, copies and launch happen; None is torch's current stream of x's device.

    Returns:
        ``TupleDict(out)``, shape and dtype of x.

    Raises:
        ContractError: the arguments contradict each other; names the argument. Nothing was launched.
        UnsupportedError: a GPU or a head dim that the kernel does not serve.
    """
    with _NO_CONTEXT if stream is None else stream_context(stream, x.device):
        out = _result(x, out, "x")
        _rotate((x,), (out,), _table(freqs_cis, cos, sin, positions), positions, interleaved, inverse, stream)
    return TupleDict(out=out)


def rotary_qk_wrapper(
    q: torch.Tensor,
    k: torch.Tensor,
    freqs_cis: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = True,
    inverse: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    stream: Any = None,
) -> TupleDict:
    """Rotary embedding of queries and keys in one launch; arguments as `rotary_wrapper`.

    `q` and `k` have their own head counts and strides, and may be slices of one fused buffer; ``q_out=q, k_out=k`` rotates in place and
    touches nothing outside the slices.

    Returns:
        ``TupleDict(q, k)``.
    """
    with _NO_CONTEXT if stream is None else stream_context(stream, q.device):
        q_out, k_out = _result(q, q_out, "q"), _result(k, k_out, "k")
        table = _table(freqs_cis, cos, sin, positions)
        try:
            _rotate((q, k), (q_out, k_out), table, positions, interleaved, inverse, stream)
        except ContractError as error:
            raise ContractError(_in_terms_of_q(str(error))) from error
    return TupleDict(q=q_out, k=k_out)


def rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Interleaved rotary embedding, out of place: ``rotary_wrapper(x, freqs_cis)["out"]``. Never another implementation.

    Raises:
        RuntimeError: the kernel does not run here (UnsupportedError).
    """
    return rotary_wrapper(x, freqs_cis)["out"]


def _rotate(sources: tuple, targets: tuple, table: tuple, positions, interleaved: bool, inverse: bool, stream) -> None:
    """Launch the cached op."""
    half = table[0].shape[-2 if positions is None else -1]
    index_dtype = None if positions is None else positions.dtype
    x = sources[0]
    key = ("rotary", x.dtype, x.dim(), x.shape[-1], half, interleaved, index_dtype, len(sources), x.get_device())
    call = functools.partial(_arguments, targets, len(table), positions is not None)

    def make(*inputs):
        positional, named = call(inputs)
        return RotaryEmbedding(*positional, **named, interleaved=interleaved)

    def launch(op, inputs: tuple) -> None:
        positional, named = call(inputs)
        op.execute(*positional, **named, inverse=inverse, stream=stream)

    run_op(key, make, (*sources, *table, *(() if positions is None else (positions,))), launch)


def _arguments(targets: tuple, table_length: int, has_positions: bool, inputs: tuple) -> tuple[tuple, dict[str, Any]]:
    """Flat inputs (sources, table, positions) as the class takes them."""
    count = len(targets)
    table = inputs[count : count + table_length]
    positional = (inputs[0], table[0] if table_length == 1 else table, targets[0])
    named = {"k": inputs[1], "k_out": targets[1]} if count == 2 else {}
    return ((*positional, inputs[-1]) if has_positions else positional), named


def _in_terms_of_q(text: str) -> str:
    """An error of the class, which calls the first tensor x and its result out, by the names of `rotary_qk_wrapper`."""
    text = re.sub(r"^x:|(?<=that of )x\b|(?<=shared with )x\b", lambda match: match[0].replace("x", "q"), text)
    return re.sub(r"^out:|(?<=shared with )out\b", lambda match: match[0].replace("out", "q_out"), text)


def _table(freqs_cis: Any, cos: Any, sin: Any, positions: Any) -> tuple:
    """``(freqs_cis,)`` or ``(cos, sin)``: what was given, checked as far as the cache key needs it."""
    if (freqs_cis is None) == (cos is None and sin is None):
        raise ContractError(
            "freqs_cis: wanted either freqs_cis or cos and sin, got " + ("none" if freqs_cis is None else "both")
        )
    named = {"freqs_cis": freqs_cis} if freqs_cis is not None else {"cos": cos, "sin": sin, "positions": positions}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise ContractError(f"{name}: wanted a tensor, got {type(tensor).__name__}")
    if freqs_cis is None:
        return cos, sin
    if positions is not None:
        raise ContractError("positions: wanted None with freqs_cis, which has a row for each token, got a tensor")
    if freqs_cis.dim() < 2:
        raise ContractError(f"freqs_cis: wanted shape (T, rotary_dim/2, 2), got {tuple(freqs_cis.shape)}")
    return (freqs_cis,)


def _result(x: Any, out: Any, name: str) -> torch.Tensor:
    """`out`, or new memory of the shape of `x`."""
    if not isinstance(x, torch.Tensor) or x.dim() not in (3, 4):
        got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ContractError(f"{name}: wanted a tensor of shape (T, H, D) or (B, L, H, D), got {got}")
    return x.new_empty(x.shape) if out is None else out

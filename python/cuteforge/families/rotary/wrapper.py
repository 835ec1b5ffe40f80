"""One-call rotary embedding: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

import torch

from cuteforge.families.rotary.road import ONE, QUERIES_AND_KEYS
from cuteforge.op.tuple_dict import TupleDict
from cuteforge.runtime.streams import Stream


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
    stream: Stream | None = None,
) -> TupleDict:
    """Rotary embedding of one tensor; see `RotaryEmbedding` for the operation, shapes and numerics.

    Args:
        x: ``(T, H, D)`` or ``(B, L, H, D)``.
        freqs_cis: ``(T, rotary_dim/2, 2)`` or ``(B, L, rotary_dim/2, 2)``; or else
        cos, sin, positions: ``(max_pos, rotary_dim/2)`` twice, and ``(T,)`` or ``(B, L)``.
        interleaved: pairs ``(2i, 2i+1)``, else ``(i, i + rotary_dim/2)``.
        inverse: turn back.
        out: None allocates it; `x` itself rotates in place.
        stream: where allocation, copies and launch happen, and the backward's; None is torch's current stream of x's device, and the only
            choice under torch.compile.

    Returns:
        ``TupleDict(out)``, shape and dtype of x. In grad mode it carries a graph for x, differentiable any number of times.

    In place on a tensor that requires grad, and into another `out` where torch follows the call, the result is computed apart and copied there.

    Raises:
        ContractError: the arguments contradict each other; names the argument. Nothing was launched.
        UnsupportedError: a GPU or a head dim that the kernel does not serve.
        RuntimeError: in place on a leaf that requires grad, or on a view of one.
    """
    (out,) = ONE.call((x, freqs_cis, cos, sin, positions, out), (interleaved, inverse), stream)
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
    stream: Stream | None = None,
) -> TupleDict:
    """Rotary embedding of queries and keys in one launch; arguments as `rotary_wrapper`.

    `q` and `k` have their own head counts and strides, and may be slices of one fused buffer; ``q_out=q, k_out=k`` rotates in place and
    touches nothing outside the slices.

    Returns:
        ``TupleDict(q, k)``.
    """
    tensors = (q, k, freqs_cis, cos, sin, positions, q_out, k_out)
    q, k = QUERIES_AND_KEYS.call(tensors, (interleaved, inverse), stream)
    return TupleDict(q=q, k=k)


def rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Interleaved rotary embedding, out of place: ``rotary_wrapper(x, freqs_cis)["out"]``. Never another implementation.

    Raises:
        RuntimeError: the kernel does not run here (UnsupportedError).
    """
    return rotary_wrapper(x, freqs_cis)["out"]

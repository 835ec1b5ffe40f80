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
        x: ``(T, H, D)`` or ``(B, L, H, D)``, bf16, fp16 or fp32.
        freqs_cis: fp32 ``(T, rotary_dim/2, 2)`` or ``(B, L, rotary_dim/2, 2)``. Give either this or the next three.
        cos, sin, positions: fp32 ``(max_pos, rotary_dim/2)`` twice, and int32 or int64 ``(T,)`` or ``(B, L)``.
        interleaved: pairs ``(2i, 2i+1)``, else ``(i, i + rotary_dim/2)``.
        inverse: rotate back.
        out: None allocates it; `x` itself rotates in place.
        stream: where allocation, copies and launch happen, and the backward's. None is torch's current stream on x's
            device, and the only choice under torch.compile.

    Returns:
        ``TupleDict(out)``, shape and dtype of x. In grad mode it carries a graph for x, differentiable any number of
        times.

    If `x` requires grad and is rotated in place, the result is computed in new memory and copied into `x`. The same
    holds for another `out` where torch follows the call (torch.compile, say).

    Raises:
        ContractError: the arguments contradict each other; names the argument. Nothing was launched.
        UnsupportedError: a GPU or a head dim that the kernel does not serve.
        RuntimeError: in place on a leaf that requires grad, or on a view of one.

    Examples:
        >>> import torch
        >>> from cuteforge import rotary_table, rotary_wrapper
        >>> x = torch.randn(2, 8, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> cos, sin = rotary_table(4096, 64, device="cuda")  # turns 64 of the 128 columns
        >>> positions = torch.arange(8, device="cuda").expand(2, 8).contiguous()
        >>> out = rotary_wrapper(x, cos=cos, sin=sin, positions=positions, interleaved=False)["out"]
        >>> torch.equal(out[..., 64:], x[..., 64:])
        True
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
    """Rotary embedding of queries and keys in one launch; arguments, gradients and errors as in `rotary_wrapper`.

    `q` and `k` have head counts and strides of their own, and may be slices of one fused buffer. ``q_out=q, k_out=k``
    rotates in place and touches nothing outside the slices.

    Returns:
        ``TupleDict(q, k)``.

    Examples:
        >>> import torch
        >>> from cuteforge import rotary_qk_wrapper, rotary_table
        >>> qkv = torch.randn(8, 32 + 8 + 8, 128, device="cuda", dtype=torch.bfloat16)
        >>> q, k, v = qkv.split((32, 8, 8), dim=1)
        >>> cos, sin = rotary_table(4096, 128, device="cuda")
        >>> table = {"cos": cos, "sin": sin, "positions": torch.arange(8, device="cuda")}
        >>> results = rotary_qk_wrapper(q, k, **table, q_out=q, k_out=k)  # in place
        >>> results["q"] is q
        True
    """
    tensors = (q, k, freqs_cis, cos, sin, positions, q_out, k_out)
    q, k = QUERIES_AND_KEYS.call(tensors, (interleaved, inverse), stream)
    return TupleDict(q=q, k=k)


def rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Interleaved rotary embedding, out of place: ``rotary_wrapper(x, freqs_cis)["out"]``. Never another
    implementation.

    Args:
        x: ``(T, H, D)`` or ``(B, L, H, D)``, bf16, fp16 or fp32.
        freqs_cis: fp32 ``(T, rotary_dim/2, 2)`` or ``(B, L, rotary_dim/2, 2)``, cos and sin of each token.

    Returns:
        Shape and dtype of x; differentiable for x.

    Raises:
        ContractError: the arguments contradict each other; names the argument.
        RuntimeError: the kernel does not run here (UnsupportedError).

    Examples:
        >>> import torch
        >>> from cuteforge import rotary_emb
        >>> x = torch.randn(8, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> angles = torch.outer(torch.arange(8), 10000 ** -torch.arange(0, 1, 1 / 64)).to(device="cuda")
        >>> rotary_emb(x, torch.stack((angles.cos(), angles.sin()), dim=-1)).shape
        torch.Size([8, 32, 128])
    """
    return rotary_wrapper(x, freqs_cis)["out"]

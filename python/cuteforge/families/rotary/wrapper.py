"""One-call rotary embedding: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

import re
from typing import Any

import torch

from cuteforge.arguments import flag, kind_of
from cuteforge.errors import ContractError
from cuteforge.families.rotary.api import RotaryEmbedding, direction, positions_not_wanted
from cuteforge.op import recall
from cuteforge.op.base import TupleDict
from cuteforge.op.cache import run_op
from cuteforge.op.torch_library import asked_stream, call_op, check_layout, needs_op
from cuteforge.runtime.streams import Stream

# By the number of tensors.
_OPS = {1: "rotary", 2: "rotary_qk"}
SOURCE_NAMES = {1: ("x",), 2: ("q", "k")}
_TARGET_NAMES = {1: ("out",), 2: ("q_out", "k_out")}
_ANGLE_NAMES = {1: ("freqs_cis",), 3: ("cos", "sin", "positions")}

# Module globals: the launch path reads them at every call.
_Tensor = torch.Tensor
_CONTIGUOUS = torch.contiguous_format

Heads = tuple[torch.Tensor, ...]  # (x,) or (q, k)
Angles = tuple[torch.Tensor, ...]  # (freqs_cis,) or (cos, sin, positions)


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
        inverse: turn back.
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
    (out,) = _rotate((x, out, freqs_cis, cos, sin, positions), interleaved, inverse, stream)
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
    q, k = _rotate((q, k, q_out, k_out, freqs_cis, cos, sin, positions), interleaved, inverse, stream)
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


def run_rotary(
    sources: Heads, targets: Heads, angles: Angles, interleaved: bool, inverse: bool
) -> RotaryEmbedding | None:
    """Launch on CUDA tensors that neither autograd nor torch.compile tracks. Returns as `run_op`."""
    x, table = sources[0], angles[0]
    shape = x.shape
    half, index_dtype = (table.shape[-1], angles[2].dtype) if len(angles) > 1 else (table.shape[-2], None)
    key = ("rotary", x.dtype, len(shape), shape[-1], half, interleaved, index_dtype, len(sources), x.get_device())
    try:
        return run_op(key, _make, (*sources, *angles), _launch, None, (targets, interleaved, inverse))
    except ContractError as error:
        if len(sources) == 1:
            raise
        raise in_terms_of_q(error) from error


def new_results(sources: Heads) -> Heads:
    """Uninitialised results for `sources`. `empty_like` takes 0.5 us less than `new_empty(x.shape)`."""
    return tuple([torch.empty_like(x, memory_format=_CONTIGUOUS) for x in sources])


def _make(*call: Any) -> RotaryEmbedding:
    """The op of a call of `run_op`."""
    *inputs, targets, interleaved, _ = call
    positional, keys = class_arguments(tuple(inputs), targets)
    return RotaryEmbedding(*positional, **keys, interleaved=interleaved)


def _launch(op: RotaryEmbedding, inputs: tuple, targets: Heads, _: bool, inverse: bool) -> None:
    """Launch `op`, whose operands are a source and its target, then the other two, then the angles."""
    if len(targets) == 1:
        operands = (inputs[0], targets[0]) + inputs[1:]
    else:
        operands = (inputs[0], targets[0], inputs[1], targets[1]) + inputs[2:]
    op._launch(operands, None, direction(inverse))


def class_arguments(inputs: tuple, targets: tuple) -> tuple[tuple, dict[str, Any]]:
    """Heads and angles, one after the other, and targets as `RotaryEmbedding` takes them."""
    keys = {} if len(targets) == 1 else {"k": inputs[1], "k_out": targets[1]}
    angles = inputs[len(targets) :]
    if len(angles) == 1:
        return (inputs[0], angles[0], targets[0]), keys
    return (inputs[0], angles[:2], targets[0], angles[2]), keys


def in_terms_of_q(error: ContractError) -> ContractError:
    """An error of the class, which calls the first tensor x and its result out, by the names of `rotary_qk_wrapper`."""
    text = re.sub(r"^x:|(?<=that of )x\b|(?<=shared with )x\b", lambda match: match[0].replace("x", "q"), str(error))
    return ContractError(re.sub(r"^out:|(?<=shared with )out\b", lambda match: match[0].replace("out", "q_out"), text))


def check_heads(x: Any, name: str) -> None:
    """What is needed to allocate the result; the op checks everything else."""
    if isinstance(x, _Tensor):
        check_layout(name, x)
    if not isinstance(x, _Tensor) or x.dim() not in (3, 4):
        got = f"shape {tuple(x.shape)}" if isinstance(x, _Tensor) else kind_of(x)
        raise ContractError(f"{name}: wanted a tensor of shape (T, H, D) or (B, L, H, D), got {got}")


def angles_of(freqs_cis: Any, cos: Any, sin: Any, positions: Any) -> Angles:
    """What was given of the two kinds of table, checked as far as the cache key needs it."""
    if (freqs_cis is None) == (cos is None and sin is None):
        got = "none" if freqs_cis is None else "both"
        raise ContractError(f"freqs_cis: wanted either freqs_cis or cos and sin, got {got}")
    angles = (cos, sin, positions) if freqs_cis is None else (freqs_cis,)
    for tensor in angles:
        if not isinstance(tensor, _Tensor):
            name = next(n for n, t in zip(_ANGLE_NAMES[len(angles)], angles) if t is tensor)
            raise ContractError(f"{name}: wanted a tensor, got {kind_of(tensor)}")
    for name, tensor in zip(_ANGLE_NAMES[len(angles)], angles):
        check_layout(name, tensor)
    if freqs_cis is None:
        if cos.dim() != 2:
            raise ContractError(f"cos: wanted shape (max_pos, rotary_dim/2), got {tuple(cos.shape)}")
        return angles
    if positions is not None:
        raise positions_not_wanted(positions)
    if freqs_cis.dim() < 2:
        raise ContractError(f"freqs_cis: wanted shape (T, rotary_dim/2, 2), got {tuple(freqs_cis.shape)}")
    return angles


def _rotate(tensors: tuple, interleaved: bool, inverse: bool, stream: Any) -> Heads:
    """The rotated heads, each in its target, or in new memory where that is None.

    Args:
        tensors: x, or q and k; as many targets; freqs_cis, cos, sin and positions. None for what was not given.
    """
    known_as = None
    # a number is no flag, though it may be equal to one
    if stream is None and type(interleaved) is bool and type(inverse) is bool:
        known_as = _key_of(len(tensors), interleaved, inverse)
        results = recall.serve(known_as, tensors)
        if results is not None:
            return results
    count = (len(tensors) - 4) // 2
    sources, targets, table = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    for x, name in zip(sources, SOURCE_NAMES[count]):
        check_heads(x, name)
    angles = angles_of(*table)
    interleaved, inverse = flag("interleaved", interleaved), flag("inverse", inverse)
    with asked_stream(stream, *tensors):
        if any(target is not None for target in targets):
            targets = tuple(map(_given_or_new, targets, sources))
        else:
            targets = ()
        if needs_op(*sources, *targets, *angles):
            return _rotate_by_op(sources, targets, angles, (interleaved, inverse))
        results = targets or new_results(sources)
        op = run_rotary(sources, results, angles, interleaved, inverse)
        if op is not None:
            recall.keep(known_as, tensors, _call_of, op, tensors, results, inverse)
        return results


def _key_of(*call: Any) -> tuple:
    """Of a call in `op.recall`: how many tensors it may have, which pairs, which way."""
    return ("rotary", *call)


def known_rotation(tensors: tuple, interleaved: bool, inverse: bool) -> recall.Call | None:
    """What `rotary_wrapper` has remembered of a call with these tensors, as `_rotate` takes them, and no other arguments."""
    return recall.find(_key_of(len(tensors), interleaved, inverse), tensors)


def _call_of(op: RotaryEmbedding, tensors: tuple, results: Heads, inverse: bool) -> recall.Call:
    """The call that `op` has just served, of any number of tokens or batches."""
    heads, targets = ("x", "k")[: len(results)], ("out", "k_out")[: len(results)]
    names = (*heads, *targets, "freqs_cis", "cos", "sin", "positions")
    given = [None if x is None else name for name, x in zip(names, tensors)]
    new = {target: (head, x) for target, head, x in zip(targets, heads, results) if target not in given}
    # the shape of a result that is allocated is that of its heads
    varying = op._varying | {head: 0 for head, _ in new.values()}
    allocated = [recall.Result(name, (None, *x.shape[1:]), x.dtype) for name, (_, x) in new.items()]
    written = [name for name in targets if name not in new]
    facts = {"length_of": ("x", 0), "written": written, "returned": targets, "varying": varying}
    return recall.Call(op, given, allocated, results[0].device, direction(inverse), **facts)


def _rotate_by_op(sources: Heads, targets: Heads, angles: Angles, config: tuple) -> Heads:
    """As `_rotate`, seen by what follows the call."""
    count = len(sources)
    target_names = _TARGET_NAMES[count] if targets else ()
    names = (*SOURCE_NAMES[count], *target_names, *_ANGLE_NAMES[len(angles)])
    operands = dict(zip(names, (*sources, *targets, *angles)))
    arguments = (*sources, *_op_angles(angles), *config)
    if targets and all(target is x for target, x in zip(targets, sources)):
        call_op(f"{_OPS[count]}_", operands, arguments)
        return targets
    for name, target, x in zip(target_names, targets, sources):
        _check_target(name, target, x)
    results = call_op(_OPS[count], operands, arguments)
    results = results if count > 1 else (results,)
    return tuple(target.copy_(result) for target, result in zip(targets, results)) if targets else results


def _op_angles(angles: Angles) -> tuple:
    """``freqs_cis, cos, sin, positions`` as the ops of torch take them."""
    return (*angles, None, None, None) if len(angles) == 1 else (None, *angles)


def _given_or_new(out: Any, x: torch.Tensor) -> Any:
    return torch.empty_like(x, memory_format=_CONTIGUOUS) if out is None else out


def _check_target(name: str, target: Any, x: torch.Tensor) -> None:
    """Refuse what a copy would convert or broadcast."""
    if isinstance(target, _Tensor):
        check_layout(name, target)
    if isinstance(target, _Tensor) and (target.shape != x.shape or target.dtype != x.dtype):
        wanted, got = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (x, target))
        raise ContractError(f"{name}: wanted {wanted}, got {got}")

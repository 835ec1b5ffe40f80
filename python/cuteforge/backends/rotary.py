"""`apply_rotary_emb`: rotary embedding by the kernel, or in eager torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from cuteforge.arguments import flag
from cuteforge.backends import registry
from cuteforge.backends.interface import require_tensor
from cuteforge.backends.kernels import Spec, arch_of, kernel_refusals, spec_like, target_of
from cuteforge.backends.selection import (
    Candidate,
    Decision,
    Policy,
    constant_result,
    constants,
    derivative_of,
    dtype_named,
)
from cuteforge.errors import ContractError
from cuteforge.families.rotary import RotaryEmbedding, reference, rotary_wrapper
from cuteforge.families.rotary import explain as family
from cuteforge.families.rotary.wrapper import Angles, angles_of, check_heads, known_rotation
from cuteforge.op import recall
from cuteforge.op.torch_library import is_traced, without_autocast
from cuteforge.runtime import env
from cuteforge.runtime.arch import Arch
from cuteforge.runtime.kernel_facts import KernelFacts

# By the number of tensors.
_NAMES = {1: ("freqs_cis",), 3: ("cos", "sin", "positions")}


class Request(NamedTuple):
    """The facts of a call that decide who serves it.

    Attributes:
        device, dtype, head_dim: of x.
        half: ``rotary_dim / 2``.
        index_dtype: of positions; None with `freqs_cis`.
        derivative: as `selection.derivative_of`, by x; ``"table"`` where the table requires grad.
        target: the architecture that `explain` asks for.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    half: int
    index_dtype: torch.dtype | None
    derivative: str | None
    target: Arch | None = None


def apply_rotary_emb(
    x: torch.Tensor, freqs_cis: torch.Tensor | None = None, *, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, interleaved: bool = True, inverse: bool = False,
    backend: registry.ATTN_BACKEND | str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rotary embedding of one tensor, out of place, by the kernel on a GPU that runs it and in eager torch elsewhere.

    Args:
        x: ``(T, H, D)`` or ``(B, L, H, D)``, bf16, fp16 or fp32.
        freqs_cis: ``(T, rotary_dim/2, 2)`` or ``(B, L, rotary_dim/2, 2)`` fp32, cos and sin of each token; or complex64 without the last dim. Of x
            ``(B, L, H, D)`` the first dim may be missing: the same angles for every b. Or else
        cos, sin, positions: ``(max_pos, rotary_dim/2)`` fp32 twice, and ``(T,)`` or ``(B, L)`` int32 or int64. A token outside the table becomes NaN.
        interleaved: pairs ``(2i, 2i+1)``, else ``(i, i + rotary_dim/2)``.
        inverse: turn back.
        backend: ``"cuda"`` or ``"torch_native"``: that one, or an error. None: the one of CUTEFORGE_BACKEND, else the first that serves the call.

    Returns:
        Shape and dtype of x, new memory; differentiable for x, and by torch_native for the table.

    Numerics: fp32 with one rounding at the end, by either.

    Raises:
        ContractError: the arguments contradict each other; names the argument.
        UnsupportedError: the backend that was asked for does not serve the call.
    """
    table, known_as = (freqs_cis, cos, sin, positions), None
    tensors = (x, None, *table)
    if not is_dynamo_compiling():
        known_as = "apply_rotary_emb", interleaved, inverse, backend, env.backend()
        results = recall.serve(known_as, tensors)
        if results is not None:
            return results[0]
    angles = _angles(x, *table)
    interleaved, inverse = flag("interleaved", interleaved, or_number=True), flag("inverse", inverse, or_number=True)
    request = _facts(x, angles)
    chosen = _choose_traced(request, backend) if is_dynamo_compiling() else _policy.choose(request, backend)
    result = chosen.run(x, angles, interleaved, inverse)
    # angles of another form are new tensors at each call
    if chosen.name == "cuda" and all(any(a is given for given in table) for a in angles) and not is_traced(x):
        recall.keep(known_as, tensors, known_rotation, tensors, interleaved, inverse)
    return result


def explain_rotary_emb(
    x, freqs_cis=None, *, cos=None, sin=None, positions=None, interleaved=True, inverse=False, backend=None, arch=None
) -> Decision:
    """What `apply_rotary_emb` would do with these arguments; see `explain.explain`."""
    target = target_of(arch)
    interleaved = flag("interleaved", interleaved, or_number=True)
    flag("inverse", inverse, or_number=True)
    angles = _angles(x, freqs_cis, cos, sin, positions)
    request = _facts(x, angles)
    if target is not None:
        request = request._replace(device=torch.device("cuda"), target=target)

    def describe(chosen: Candidate) -> KernelFacts | None:
        gpu = arch_of(x.device, target)
        return family.describe(_op_of(x, angles, interleaved), gpu) if gpu and chosen.name == "cuda" else None

    return _policy.decide(request, backend, describe)


def _op_of(x: torch.Tensor, angles: Angles, interleaved: bool) -> RotaryEmbedding:
    """The op that a call launches, on specs of its tensors."""
    spec, specs = spec_like(x), tuple(map(spec_like, angles))
    table, positions = (specs[0], None) if len(specs) == 1 else (specs[:2], specs[2])
    return RotaryEmbedding(spec, table, spec, positions, interleaved=interleaved)


def _angles(x: Any, freqs_cis: Any, cos: Any, sin: Any, positions: Any) -> Angles:
    """(freqs_cis,) or (cos, sin, positions), real and with the dims of x."""
    for name, tensor in (("x", x), ("freqs_cis", freqs_cis), ("cos", cos), ("sin", sin), ("positions", positions)):
        if tensor is not None or name == "x":
            require_tensor(name, tensor)
    check_heads(x, "x")
    if isinstance(freqs_cis, torch.Tensor) and freqs_cis.is_complex():
        freqs_cis = torch.view_as_real(freqs_cis.resolve_conj())
    angles = angles_of(freqs_cis, cos, sin, positions)
    if len(angles) == 1 and x.dim() == 4 and freqs_cis.dim() == 3:
        return (freqs_cis.expand(x.shape[0], *freqs_cis.shape),)
    return angles


def _facts(x: torch.Tensor, angles: Angles) -> Request:
    if not angles[0].dim():
        raise ContractError("cos: wanted shape (max_pos, rotary_dim/2), got ()")
    half, index_dtype = (angles[0].shape[-2], None) if len(angles) == 1 else (angles[0].shape[-1], angles[2].dtype)
    table = angles if len(angles) == 1 else angles[:2]
    derivative = "table" if derivative_of(*table) == "graph" else derivative_of(x)
    return Request(x.device, x.dtype, x.shape[-1], half, index_dtype, derivative)


def _refuse_kernel(request: Request) -> str | None:
    refusals = list(kernel_refusals(request.device, lambda spec: _sample_op(request, spec), request.target))
    if request.derivative == "table":
        refusals.append("the kernel has no gradient for the table, which requires grad")
    if request.derivative == "transform":
        refusals.append("the kernel is not served by torch.func and forward-mode differentiation")
    return "; ".join(refusals) or None


def _sample_op(request: Request, spec: Spec) -> RotaryEmbedding:
    """The op of such calls, for one token."""
    x = spec(1, 1, request.head_dim, dtype=request.dtype)
    if request.index_dtype is None:
        return RotaryEmbedding(x, spec(1, request.half, 2, dtype="float32"), x)
    table = spec(1, request.half, dtype="float32")
    return RotaryEmbedding(x, (table, table), x, spec(1, dtype=request.index_dtype))


def _run_kernel(x: torch.Tensor, angles: Angles, interleaved: bool, inverse: bool) -> torch.Tensor:
    named = dict(zip(_NAMES[len(angles)], angles))
    return rotary_wrapper(x, **named, interleaved=interleaved, inverse=inverse)["out"]


@without_autocast
def _run_eager(x: torch.Tensor, angles: Angles, interleaved: bool, inverse: bool) -> torch.Tensor:
    _check_angles(x, angles)
    table, positions = (angles[0], None) if len(angles) == 1 else (angles[:2], angles[2])
    dtype = torch.promote_types(x.dtype, torch.float32)
    return reference.rotate(x, table, positions, interleaved=interleaved, inverse=inverse, compute_dtype=dtype)


def _check_angles(x: torch.Tensor, angles: Angles) -> None:
    """Refuse by name what torch would broadcast, or refuse by no name."""
    tokens, names = tuple(x.shape[:-2]), _NAMES[len(angles)]
    first = angles[0]
    half = first.shape[-2] if len(angles) == 1 else first.shape[-1]
    shapes = ((*tokens, half, 2),) if len(angles) == 1 else ((first.shape[0], half), (first.shape[0], half), tokens)
    for name, tensor, shape in zip(names, angles, shapes):
        if tuple(tensor.shape) != shape:
            raise ContractError(f"{name}: wanted shape {shape}, got {tuple(tensor.shape)}")
        if tensor.device != x.device:
            raise ContractError(f"{name}: wanted a tensor on {x.device}, as x, got one on {tensor.device}")
        dtypes = (torch.int32, torch.int64) if name == "positions" else (torch.float32,)
        if tensor.dtype not in dtypes:
            raise ContractError(f"{name}: wanted dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if not x.is_floating_point():
        raise ContractError(f"x: wanted a floating dtype, got {x.dtype}")
    if 2 * half > x.shape[-1]:
        raise ContractError(f"{names[0]}: wanted rotary_dim of at most D = {x.shape[-1]}, got {2 * half}")


def _choose_traced(request: Request, backend: Any) -> Candidate:
    """The candidate for a call that torch.compile traces, chosen once for a graph."""
    sizes = constants(request.head_dim, request.half)
    index_dtype = None if request.index_dtype is None else str(request.index_dtype)
    facts = (str(request.device), str(request.dtype), sizes, index_dtype, request.derivative)
    return _CANDIDATES[_name_traced(*facts, backend)]


@constant_result
def _name_traced(
    device: str, dtype: str, sizes: tuple[int, ...], index_dtype: str | None, derivative: str | None, backend: Any
) -> str:
    indices = None if index_dtype is None else dtype_named(index_dtype)
    request = Request(torch.device(device), dtype_named(dtype), *sizes, indices, derivative)
    return _policy.choose(request, backend).name


_CANDIDATES = {
    "cuda": Candidate("cuda", _refuse_kernel, _run_kernel),
    "torch_native": Candidate("torch_native", lambda request: None, _run_eager),
}
_policy = Policy("apply_rotary_emb", _CANDIDATES.values, lambda backend: registry.wish_among(_CANDIDATES, backend))

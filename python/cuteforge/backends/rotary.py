"""`apply_rotary_emb`: rotary embedding by the kernel, or in eager torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
from cuteforge.families.rotary.road import ONE, Tables, check_heads, op_of, table_of
from cuteforge.op import recall
from cuteforge.op.tracing import is_traced, without_autocast
from cuteforge.runtime import env
from cuteforge.runtime.arch import Arch

if TYPE_CHECKING:
    from cuteforge.runtime.kernel_facts import KernelFacts


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
    x: torch.Tensor, freqs_cis: torch.Tensor | None = None, *, cos: torch.Tensor | None = None, sin: torch.Tensor | None
    = None,
    positions: torch.Tensor | None = None, interleaved: bool = True, inverse: bool = False,
    backend: registry.ATTN_BACKEND | str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rotary embedding of one tensor, out of place: by the kernel on a GPU that runs it, and in eager torch elsewhere.

    See `RotaryEmbedding` for the operation.

    Args:
        x: ``(T, H, D)`` or ``(B, L, H, D)``, bf16, fp16 or fp32.
        freqs_cis: cos and sin of each token: fp32 ``(T, rotary_dim/2, 2)`` or ``(B, L, rotary_dim/2, 2)``, or complex64
            without the last dim. For x of four dims the first one may be missing: all b then have the same angles. Give
            either this or the next three.
        cos, sin, positions: fp32 ``(max_pos, rotary_dim/2)`` twice, and int32 or int64 ``(T,)`` or ``(B, L)``. A token
            whose position is not in the table becomes NaN.
        interleaved: pairs ``(2i, 2i+1)``, else ``(i, i + rotary_dim/2)``.
        inverse: rotate back.
        backend: ``"cuda"`` or ``"torch_native"``: use this one or raise. None: the one of CUTEFORGE_BACKEND, else the
            first that serves the call.

    Returns:
        Shape and dtype of x, new memory. Differentiable for x, and by torch_native for the table too.

    Numerics: fp32 and one rounding at the end, by either backend.

    Raises:
        ContractError: the arguments contradict each other; names the argument.
        UnsupportedError: the backend that was asked for does not serve the call.

    Examples:
        >>> import torch
        >>> from cuteforge import apply_rotary_emb, rotary_table
        >>> x = torch.randn(2, 8, 4, 64)
        >>> cos, sin = rotary_table(1024, 64)
        >>> table = {"cos": cos, "sin": sin, "positions": torch.arange(8).expand(2, 8)}
        >>> turned = apply_rotary_emb(x, **table, interleaved=False)
        >>> torch.testing.assert_close(apply_rotary_emb(turned, **table, interleaved=False, inverse=True), x)
    """
    given, known_as = (freqs_cis, cos, sin, positions), None
    tensors = (x, *given, None)
    if not is_dynamo_compiling():
        known_as = "apply_rotary_emb", interleaved, inverse, backend, env.backend()
        results = recall.recall(known_as, tensors)
        if results is not None:
            return results[0]
    table = _table(x, *given)
    interleaved, inverse = flag("interleaved", interleaved, or_number=True), flag("inverse", inverse, or_number=True)
    request = _facts(x, table)
    chosen = _choose_traced(request, backend) if is_dynamo_compiling() else _policy.choose(request, backend)
    result = chosen.run(x, table, interleaved, inverse)
    # a table of another form is a new tensor at each call
    if known_as is not None and chosen.name == "cuda" and not is_traced(x):
        if all(any(tensor is one for one in given) for tensor in table.values()):
            recall.remember(known_as, tensors, ONE.find, tensors, (interleaved, inverse))
    return result


def explain_rotary_emb(
    x, freqs_cis=None, *, cos=None, sin=None, positions=None, interleaved=True, inverse=False, backend=None, arch=None
) -> Decision:
    """What `apply_rotary_emb` would do with these arguments; see `explain.explain`."""
    target = target_of(arch)
    interleaved = flag("interleaved", interleaved, or_number=True)
    flag("inverse", inverse, or_number=True)
    table = _table(x, freqs_cis, cos, sin, positions)
    request = _facts(x, table)
    if target is not None:
        request = request._replace(device=torch.device("cuda"), target=target)

    def describe(chosen: Candidate) -> KernelFacts | None:
        gpu = arch_of(x.device, target)
        if gpu is None or chosen.name != "cuda":
            return None
        from cuteforge.families.rotary import explain as family

        inputs = {name: spec_like(tensor) for name, tensor in {"x": x, **table}.items()}
        return family.describe(op_of(inputs, {"out": inputs["x"]}, interleaved), gpu)

    return _policy.decide(request, backend, describe)


def _table(x: Any, freqs_cis: Any, cos: Any, sin: Any, positions: Any) -> Tables:
    """freqs_cis, or cos, sin and positions, real and with the dims of x."""
    for name, tensor in (("x", x), ("freqs_cis", freqs_cis), ("cos", cos), ("sin", sin), ("positions", positions)):
        if tensor is not None or name == "x":
            require_tensor(name, tensor)
    check_heads(x, "x")
    if isinstance(freqs_cis, torch.Tensor) and freqs_cis.is_complex():
        freqs_cis = torch.view_as_real(freqs_cis.resolve_conj())
    table = table_of(freqs_cis, cos, sin, positions)
    if freqs_cis is not None and x.dim() == 4 and freqs_cis.dim() == 3:
        return {"freqs_cis": freqs_cis.expand(x.shape[0], *freqs_cis.shape)}
    return table


def _facts(x: torch.Tensor, table: Tables) -> Request:
    angles = [tensor for name, tensor in table.items() if name != "positions"]
    derivative = "table" if derivative_of(*angles) == "graph" else derivative_of(x)
    if "freqs_cis" in table:
        half, index_dtype = table["freqs_cis"].shape[-2], None
    else:
        half, index_dtype = table["cos"].shape[-1], table["positions"].dtype
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


def _run_kernel(x: torch.Tensor, table: Tables, interleaved: bool, inverse: bool) -> torch.Tensor:
    return rotary_wrapper(x, **table, interleaved=interleaved, inverse=inverse)["out"]


@without_autocast
def _run_eager(x: torch.Tensor, table: Tables, interleaved: bool, inverse: bool) -> torch.Tensor:
    _check_table(x, table)
    angles = table["freqs_cis"] if "freqs_cis" in table else (table["cos"], table["sin"])
    dtype = torch.promote_types(x.dtype, torch.float32)
    options = {"interleaved": interleaved, "inverse": inverse, "compute_dtype": dtype}
    return reference.rotate(x, angles, table.get("positions"), **options)


def _check_table(x: torch.Tensor, table: Tables) -> None:
    """Refuse by name what torch would broadcast, or refuse by no name."""
    tokens = tuple(x.shape[:-2])
    if "freqs_cis" in table:
        half = table["freqs_cis"].shape[-2]
        shapes = {"freqs_cis": (*tokens, half, 2)}
    else:
        max_pos, half = table["cos"].shape
        shapes = {"cos": (max_pos, half), "sin": (max_pos, half), "positions": tokens}
    for name, shape in shapes.items():
        tensor = table[name]
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
        raise ContractError(f"{next(iter(table))}: wanted rotary_dim of at most D = {x.shape[-1]}, got {2 * half}")


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

"""`compress`: the CSA/HCA compressor by the kernels, or in eager torch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from cuteforge.arguments import integer
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
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.csa.compressor import (
    CSACompressorBackward,
    CSACompressorForward,
    csa_compressor_forward_wrapper,
    reference,
)
from cuteforge.families.csa.compressor.road import FORWARD_ROAD, checked_options, new_gradients
from cuteforge.op import recall
from cuteforge.op.checks import require_one_device
from cuteforge.op.readable import readable
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.op.torch_library import register_op
from cuteforge.op.tracing import is_traced, without_autocast
from cuteforge.runtime import env
from cuteforge.runtime.arch import Arch

if TYPE_CHECKING:
    from cuteforge.runtime.kernel_facts import KernelFacts

_NAMES = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
_INPUTS = ", ".join(f"Tensor {name}" for name in _NAMES)


class Request(NamedTuple):
    """The facts of a call that decide who serves it.

    Attributes:
        device, dtype: of kv.
        columns: ``coff*d``.
        derivative: as `selection.derivative_of`.
        target: the architecture that `explain` asks for.
    """

    device: torch.device
    dtype: torch.dtype
    columns: int
    ratio: int
    coff: int
    derivative: str | None
    target: Arch | None = None


def compress(
    kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, cu_seqlens: torch.Tensor, *, ratio: int = 4, coff: int =
    2,
    cu_seqlens_comp: torch.Tensor | None = None, total_comp: int | None = None,
    backend: registry.ATTN_BACKEND | str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Gated pooling of a packed token stream: by the kernels on a GPU that runs them, and in eager torch elsewhere.

    Dims: T packed tokens, B segments, N output rows, d head dim. See `CSACompressorForward` for the operation and its
    numerics.

    Args:
        kv, score: ``(T, coff*d)`` bf16, fp16 or fp32, of one dtype.
        ape: ``(ratio, coff*d)`` fp32.
        cu_seqlens: ``(B+1,)`` int32, or int64, which is converted.
        ratio, coff: tokens of a block, and the blocks that a row pools, 1 or 2. The kernels serve ratios up to 256,
            eager torch any.
        cu_seqlens_comp: ``(B+1,)``, where each segment's rows start. None builds it on the device: ``len_s // ratio``
            rows for each segment.
        total_comp: N. None reads ``cu_seqlens_comp[-1]``, which waits for the GPU; with a number nothing waits. More
            rows than that are padding up to a fixed capacity; with fewer the rest is left out.
        backend: ``"cuda"`` or ``"torch_native"``: use this one or raise. None: the one of CUTEFORGE_BACKEND, else the
            first that serves the call.

    Returns:
        ``(N, d)``, dtype of kv, new memory; once differentiable for kv, score and ape.

    Raises:
        ContractError: the arguments contradict each other; names the argument.
        UnsupportedError: the backend that was asked for does not serve the call.

    Examples:
        >>> import torch
        >>> from cuteforge import compress
        >>> kv, score = torch.randn(2, 25, 2 * 64)  # segments of 20 and 5 tokens
        >>> ape = torch.zeros(4, 2 * 64, requires_grad=True)
        >>> out = compress(kv, score, ape, torch.tensor([0, 20, 25]), ratio=4, coff=2)
        >>> out.shape
        torch.Size([6, 64])
        >>> out.sum().backward()
    """
    inputs, known_as = (kv, score, ape, cu_seqlens, cu_seqlens_comp), None
    if type(total_comp) is int and total_comp >= 0 and not is_dynamo_compiling():
        known_as = "compress", ratio, coff, type(ratio), type(coff), backend, env.backend()
        results = recall.recall(known_as, inputs, total_comp)
        if results is not None:
            return results[0]
    ratio, coff, total_comp = _checked(kv, score, ape, cu_seqlens, ratio, coff, cu_seqlens_comp, total_comp)
    request = _facts(kv, score, ape, ratio, coff)
    chosen = _choose_traced(request, backend) if is_dynamo_compiling() else _policy.choose(request, backend)
    if cu_seqlens_comp is None:
        cu_seqlens_comp = reference.build_cu_seqlens_comp(cu_seqlens, ratio)
    result = chosen.run(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, total_comp)
    # offsets that are built are new at each call
    if chosen.name == "cuda" and inputs[-1] is not None and known_as is not None and not is_traced(kv):
        recall.remember(known_as, inputs, FORWARD_ROAD.find, inputs, (ratio, None, coff))
    return result


def explain_compress(
    kv, score, ape, cu_seqlens, *, ratio=4, coff=2, cu_seqlens_comp=None, total_comp=None, backend=None, arch=None
) -> Decision:
    """What `compress` would do with these arguments; see `explain.explain`."""
    target = target_of(arch)
    ratio, coff, total_comp = _checked(kv, score, ape, cu_seqlens, ratio, coff, cu_seqlens_comp, total_comp)
    request = _facts(kv, score, ape, ratio, coff)
    if target is not None:
        request = request._replace(device=torch.device("cuda"), target=target)

    def describe(chosen: Candidate) -> KernelFacts | None:
        gpu = arch_of(kv.device, target)
        if gpu is None or chosen.name != "cuda":
            return None
        from cuteforge.families.csa.compressor import explain as family

        # as many as there can be, where that would have to be read from the device
        rows = kv.shape[0] // ratio if total_comp is None else total_comp
        offsets = TensorSpec(tuple(cu_seqlens.shape), "int32")
        out = TensorSpec((rows, kv.shape[1] // coff), kv.dtype)
        inputs = *map(spec_like, (kv, score, ape)), offsets, offsets
        return family.describe(CSACompressorForward(*inputs, out, ratio, coff), gpu)

    return _policy.decide(request, backend, describe)


def _checked(kv, score, ape, cu_seqlens, ratio, coff, cu_seqlens_comp, total_comp) -> tuple[int, int, int | None]:
    """Check what both backends need, before anything is computed from it. Returns ratio, coff and total_comp.

    Raises:
        ContractError: names the argument.
    """
    tensors = dict(zip(_NAMES, (kv, score, ape, cu_seqlens, cu_seqlens_comp)))
    if cu_seqlens_comp is None:
        del tensors["cu_seqlens_comp"]
    for name, x in tensors.items():
        if name.startswith("cu_seqlens"):
            _check_offsets(name, x)
        else:
            require_tensor(name, x)
    require_one_device(tensors)
    ratio, coff = integer("ratio", ratio, 1), integer("coff", coff, 1)
    checked_options(kv, ratio, None, coff)
    if total_comp is not None:
        total_comp = integer("total_comp", total_comp, 0)
    elif kv.is_meta:
        raise ContractError(
            "total_comp: wanted a number of rows: cu_seqlens is on the meta device, which holds no values, got None"
        )
    return ratio, coff, total_comp


def _facts(kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, ratio: int, coff: int) -> Request:
    return Request(kv.device, kv.dtype, kv.shape[1], ratio, coff, derivative_of(kv, score, ape))


def _check_offsets(name: str, offsets: Any) -> None:
    if not isinstance(offsets, torch.Tensor):
        raise ContractError(f"{name}: wanted a tensor of shape (B+1), got {type(offsets).__name__}")
    require_tensor(name, offsets)
    if offsets.dim() != 1 or not len(offsets):
        raise ContractError(f"{name}: wanted a tensor of shape (B+1), got shape {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ContractError(f"{name}: wanted dtype int32 or int64, got {offsets.dtype}")


# The kernels.


def _refuse_kernel(request: Request) -> str | None:
    refusals = list(kernel_refusals(request.device, lambda spec: _sample_op(request, spec), request.target))
    if request.derivative == "transform":
        refusals.append("the kernels are not served by torch.func and forward-mode differentiation")
    return "; ".join(refusals) or None


def _sample_op(request: Request, spec: Spec) -> CSACompressorForward:
    """The op of such calls, for one block."""
    ratio, columns, coff = request.ratio, request.columns, request.coff
    tokens, offsets = spec(ratio, columns, dtype=request.dtype), spec(2, dtype="int32")
    ape, out = spec(ratio, columns, dtype="float32"), spec(1, columns // coff, dtype=request.dtype)
    return CSACompressorForward(tokens, tokens, ape, offsets, offsets, out, ratio, coff)


def _run_kernel(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, total_comp) -> torch.Tensor:
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    return csa_compressor_forward_wrapper(*inputs, ratio, None, coff, total_comp)["out"]


# Eager torch, as an op: its backward is the kernels' formula, which keeps no window alive and ignores the gradients of
# capacity padding.


def _run_eager(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, total_comp) -> torch.Tensor:
    total_comp = _last_offset(cu_seqlens_comp) if total_comp is None else total_comp
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    return torch.ops.cuteforge.csa_compressor_eager.default(*inputs, total_comp, ratio, coff)


def _last_offset(cu_seqlens_comp: torch.Tensor) -> int:
    count = int(cu_seqlens_comp[-1])
    if is_compiling():
        torch._check(count >= 0)
    elif count < 0:
        raise ContractError(f"cu_seqlens_comp: wanted a last offset of 0 or more, got {count}")
    return count


def _forward(kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp: int, ratio: int, coff: int) -> torch.Tensor:
    inputs = tuple(map(readable, (kv, score, ape, cu_seqlens, cu_seqlens_comp)))
    out = _forward_fake(*inputs, total_comp, ratio, coff)
    _check_contract(CSACompressorForward, (*inputs, out), ratio, coff)
    return reference.compress_forward(*inputs, total_comp, ratio, coff)


def _forward_fake(kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp, ratio: int, coff: int) -> torch.Tensor:
    return kv.new_empty((total_comp, kv.shape[1] // coff))


def _backward(kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio: int, coff: int) -> tuple:
    inputs = tuple(map(readable, (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)))
    _check_contract(CSACompressorBackward, (*inputs, *new_gradients(kv, ratio).values()), ratio, coff)
    return tuple(reference.compress_backward(*inputs, ratio, coff))


def _backward_fake(kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio: int, coff: int) -> tuple:
    return tuple(new_gradients(kv, ratio).values())


def _check_contract(op_class: type, tensors: tuple, ratio: int, coff: int) -> None:
    """Refuse what contradicts the signature of the kernels. Their limits are none of eager torch."""
    require_one_device(dict(zip(_NAMES, tensors)))
    with contextlib.suppress(UnsupportedError):
        op_class(*(TensorSpec(tuple(t.shape), t.dtype) for t in tensors), ratio, coff).check_support()


def _save(ctx: Any, inputs: tuple, out: torch.Tensor) -> None:
    *tensors, _, ctx.ratio, ctx.coff = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad_out: torch.Tensor) -> tuple:
    op = torch.ops.cuteforge.csa_compressor_eager_backward.default
    grads = op(*ctx.saved_tensors, grad_out, ctx.ratio, ctx.coff)
    needed = (grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad))
    return (*needed, None, None, None, None, None)


register_op(
    f"csa_compressor_eager_backward({_INPUTS}, Tensor grad_out, int ratio, int coff) -> (Tensor, Tensor, Tensor)",
    cuda=without_autocast(_backward),
    cpu=_backward,
    fake=_backward_fake,
)
register_op(
    f"csa_compressor_eager({_INPUTS}, SymInt total_comp, int ratio, int coff) -> Tensor",
    cuda=without_autocast(_forward),
    cpu=_forward,
    fake=_forward_fake,
    save=_save,
    backward=_differentiate,
)


# The choice.


def _refuse_eager(request: Request) -> str | None:
    if request.derivative == "transform":
        return "eager torch is an op here, not served by torch.func and forward-mode differentiation"
    return None


def _choose_traced(request: Request, backend: Any) -> Candidate:
    """The candidate for a call that torch.compile traces, chosen once for a graph."""
    sizes = constants(request.columns, request.ratio, request.coff)
    return _CANDIDATES[_name_traced(str(request.device), str(request.dtype), sizes, request.derivative, backend)]


@constant_result
def _name_traced(device: str, dtype: str, sizes: tuple[int, ...], derivative: str | None, backend: Any) -> str:
    request = Request(torch.device(device), dtype_named(dtype), *sizes, derivative)
    return _policy.choose(request, backend).name


_CANDIDATES = {
    "cuda": Candidate("cuda", _refuse_kernel, _run_kernel),
    "torch_native": Candidate("torch_native", _refuse_eager, _run_eager),
}
_policy = Policy("compress", _CANDIDATES.values, lambda backend: registry.wish_among(_CANDIDATES, backend))

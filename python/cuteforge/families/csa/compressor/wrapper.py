"""One-call compressor: allocate the results, reuse a compiled op, launch."""

from __future__ import annotations

from typing import Any

import torch

from cuteforge.arguments import flag, integer, kind_of
from cuteforge.errors import ContractError
from cuteforge.families.csa.compressor.api import CSACompressorBackward, CSACompressorForward, check_window
from cuteforge.families.csa.compressor.operands import BACKWARD, inputs_of
from cuteforge.op import recall
from cuteforge.op.base import TupleDict
from cuteforge.op.cache import readable, run_op
from cuteforge.op.torch_library import asked_stream, call_op, check_layout, is_traced, needs_op, refuse_grad
from cuteforge.runtime.streams import Stream

# Module globals: the launch path reads them at every call.
_Tensor = torch.Tensor
_CONTIGUOUS = torch.contiguous_format
_MOST_ROWS = 2**31 - 1  # offsets are int32
_INPUT_NAMES = inputs_of(BACKWARD)  # those of the forward come first

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def csa_compressor_forward_wrapper(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_comp: torch.Tensor,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    total_comp: int | None = None,
    stream: Stream | None = None,
) -> TupleDict:
    """Gated pooling of a packed token stream; see `CSACompressorForward` for the operation and its numerics.

    Dims: T packed tokens, B segments, N output rows, d head dim.

    Args:
        kv, score: ``(T, coff*d)`` bf16, fp16 or fp32, one dtype.
        ape: ``(ratio, coff*d)`` fp32.
        cu_seqlens, cu_seqlens_comp: ``(B+1,)`` offsets; int32, or int64 which is converted.
        ratio, coff: the window: 1 to 256 tokens a block, 1 or 2 blocks.
        head_dim: d; None takes it from kv.
        total_comp: N. None reads ``cu_seqlens_comp[-1]``, which synchronizes. More rows than that is capacity padding, fewer truncates.
        stream: where allocation, copies and launch happen, and the backward's; None is torch's current stream of kv's device, and the
            only choice under torch.compile.

    Returns:
        ``TupleDict(out=(N, d))``, dtype of kv. In grad mode it carries a graph for kv, score and ape, once differentiable.

    An operand whose strides or alignment the kernel does not read is copied first, on the launch stream. Never falls back to another
    implementation.

    Raises:
        ContractError: the arguments contradict each other; names the argument. Nothing was launched.
        UnsupportedError: a GPU or a ratio that the kernels do not serve.
    """
    inputs, known_as = (kv, score, ape, cu_seqlens, cu_seqlens_comp), None
    if stream is None and type(total_comp) is int and 0 <= total_comp <= _MOST_ROWS:
        known_as = _key_of("csa forward", ratio, head_dim, coff)
        results = recall.serve(known_as, inputs, total_comp)
        if results is not None:
            return TupleDict(out=results[0])
    ratio, coff = check_sizes(kv, head_dim, ratio, coff)
    with asked_stream(stream, *inputs):
        return TupleDict(out=_forward(inputs, total_comp, ratio, coff, known_as))


def csa_compressor_backward_wrapper(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_comp: torch.Tensor,
    grad_out: torch.Tensor,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    deterministic: bool = True,
    stream: Stream | None = None,
) -> TupleDict:
    """Gradients of the compressor; see `CSACompressorBackward` for the operation and its numerics.

    Args:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim, coff, stream: as in `csa_compressor_forward_wrapper`.
        grad_out: ``(N, d)``, dtype of kv; rows at or past ``cu_seqlens_comp[-1]`` are ignored.
        deterministic: False sums grad_ape with atomics instead of a workspace in a fixed order.

    Returns:
        ``TupleDict(grad_kv=(T, coff*d), grad_score=(T, coff*d), grad_ape=(ratio, coff*d))``; the first two in the dtype of kv, the last fp32.

    Raises:
        ContractError, UnsupportedError: as the forward wrapper; also for an operand that requires grad in grad mode, since no graph is
            recorded.
        RuntimeError: ``deterministic=False`` while torch asks for deterministic algorithms.
    """
    inputs, known_as = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out), None
    # whether atomics may be used is asked of torch at each call
    if stream is None and deterministic is True:
        known_as = _key_of("csa backward", ratio, head_dim, coff)
        results = recall.serve(known_as, inputs)
        if results is not None:
            return TupleDict(grad_kv=results[0], grad_score=results[1], grad_ape=results[2])
    ratio, coff = check_sizes(kv, head_dim, ratio, coff)
    deterministic = flag("deterministic", deterministic)
    with asked_stream(stream, *inputs):
        grad_kv, grad_score, grad_ape = _backward(inputs, ratio, coff, deterministic, known_as)
    return TupleDict(grad_kv=grad_kv, grad_score=grad_score, grad_ape=grad_ape)


def new_gradients(kv: torch.Tensor, ratio: int) -> Gradients:
    """Uninitialised ``grad_kv, grad_score, grad_ape``."""
    grad_kv = torch.empty_like(kv, memory_format=_CONTIGUOUS)
    grad_score = torch.empty_like(kv, memory_format=_CONTIGUOUS)
    return grad_kv, grad_score, kv.new_empty((ratio, kv.shape[1]), dtype=torch.float32)


def run_forward(inputs: tuple, total_comp: int, ratio: int, coff: int, known_as: tuple | None = None) -> torch.Tensor:
    """The forward wrapper on CUDA tensors that neither autograd nor torch.compile tracks.

    Args:
        known_as: the key under which the call is to be kept, of `op.recall`.
    """
    kv = inputs[0]
    columns = kv.shape[1]
    out = kv.new_empty((total_comp, columns // coff))
    config = (ratio, coff)
    key = ("csa forward", kv.dtype, columns, config, kv.get_device())
    op = run_op(key, _make_forward, inputs, _launch_forward, _readable, (out, config))
    if op is not None:
        recall.keep(known_as, inputs, _forward_call, op, out)
    return out


def run_backward(inputs: tuple, ratio: int, coff: int, deterministic: bool, known_as: tuple | None = None) -> Gradients:
    """The backward wrapper, as `run_forward`."""
    check_window(ratio, coff)  # before grad_ape gets a row for each token of it
    kv = inputs[0]
    grads = new_gradients(kv, ratio)
    config = (ratio, coff, deterministic)
    key = ("csa backward", kv.dtype, kv.shape[1], config, kv.get_device())
    op = run_op(key, _make_backward, inputs, _launch_backward, _readable, (grads, config))
    if op is not None:
        recall.keep(known_as, inputs, _backward_call, op, grads)
    return grads


def _forward(inputs: tuple, total_comp: int | None, ratio: int, coff: int, known_as: tuple | None) -> torch.Tensor:
    """The forward wrapper on torch's current stream."""
    kv, score, ape, _, cu_seqlens_comp = inputs
    if total_comp is None:
        total_comp = _last_offset(cu_seqlens_comp)
    total_comp = row_count(total_comp)
    if not needs_op(kv, score, ape):
        return run_forward(inputs, total_comp, ratio, coff, known_as)
    operands = dict(zip(_INPUT_NAMES, inputs))
    return call_op("csa_compressor_forward", operands, (*inputs, total_comp, ratio, coff))


def _backward(inputs: tuple, ratio: int, coff: int, deterministic: bool, known_as: tuple | None) -> Gradients:
    """The backward wrapper, as `_forward`."""
    if not is_traced(inputs[0]):
        return run_backward(inputs, ratio, coff, deterministic, known_as)
    refuse_grad(_INPUT_NAMES, inputs, CSACompressorBackward.__name__)
    operands = dict(zip(_INPUT_NAMES, inputs))
    return call_op("csa_compressor_backward", operands, (*inputs, ratio, coff, deterministic))


# Calls that are known: of any number of tokens, segments and rows.


def _key_of(name: str, *config: Any) -> tuple:
    """With the types: True is no ratio."""
    return (name, *config, *map(type, config))


def known_forward(inputs: tuple, ratio: int, coff: int) -> recall.Call | None:
    """What `csa_compressor_forward_wrapper` has remembered of a call with these arguments and no others."""
    return recall.find(_key_of("csa forward", ratio, None, coff), inputs)


def _forward_call(op: CSACompressorForward, out: torch.Tensor) -> recall.Call:
    return _call_of(op, [recall.Result("out", (None, out.shape[1]), out.dtype)], out.device)


def _backward_call(op: CSACompressorBackward, grads: Gradients) -> recall.Call:
    *by_token, grad_ape = grads
    results = [
        *(recall.Result(name, (None, x.shape[1]), x.dtype) for name, x in zip(("grad_kv", "grad_score"), by_token)),
        recall.Result("grad_ape", tuple(grad_ape.shape), grad_ape.dtype),
        recall.Result("workspace", (op.workspace_bytes_on(grad_ape.get_device()),), torch.uint8),
    ]
    return _call_of(op, results, grad_ape.device, length_of=("kv", 0))


def _call_of(op: Any, results: list[recall.Result], device: torch.device, **facts: Any) -> recall.Call:
    """The call that `op` has just served; what is no result was given."""
    given = op.signature.names[: -len(results)]
    return recall.Call(op, given, results, device, agree=op._agree, agreeing=op._agreeing, varying=op._varying, **facts)


# What `run_op` calls.


def _make_forward(*call: Any) -> CSACompressorForward:
    *inputs, out, config = call
    return CSACompressorForward(*inputs, out, *config)


def _launch_forward(op: CSACompressorForward, inputs: tuple, out: torch.Tensor, _: tuple) -> None:
    op._launch((*inputs, out))


def _make_backward(*call: Any) -> CSACompressorBackward:
    *inputs, grads, config = call
    return CSACompressorBackward(*inputs, *grads, *config)


def _launch_backward(op: CSACompressorBackward, inputs: tuple, grads: Gradients, _: tuple) -> None:
    needed = op.workspace_bytes_on(inputs[0].get_device())
    workspace = inputs[0].new_empty(needed, dtype=torch.uint8) if needed else None
    op.execute(*inputs, *grads, workspace)


def _readable(inputs: tuple, *_: Any) -> tuple:
    return tuple(map(readable, inputs))


def check_sizes(kv: Any, head_dim: int | None, ratio: int, coff: int) -> tuple[int, int]:
    """What is needed to allocate the results; the op checks everything else. Returns ratio and coff."""
    if isinstance(kv, _Tensor):
        check_layout("kv", kv)
    shape = kv.shape if isinstance(kv, _Tensor) else ()
    if len(shape) != 2:
        got = f"shape {tuple(shape)}" if isinstance(kv, _Tensor) else kind_of(kv)
        raise ContractError(f"kv: wanted a tensor of shape (T, coff*d), got {got}")
    ratio, coff = integer("ratio", ratio, least=1), integer("coff", coff)
    if coff not in (1, 2):
        raise ContractError(f"coff: wanted 1 or 2, got {coff}")
    head_dim = integer("head_dim", head_dim, least=1, or_none=True)
    columns = shape[1]
    if columns % coff or (head_dim is not None and columns != coff * head_dim):
        wanted = f"coff*d with coff = {coff}" + ("" if head_dim is None else f" and d = {head_dim}")
        raise ContractError(f"kv: wanted {wanted} columns, got {columns}")
    return ratio, coff


def _last_offset(cu_seqlens_comp: Any) -> int:
    if not isinstance(cu_seqlens_comp, torch.Tensor) or cu_seqlens_comp.dim() != 1 or not len(cu_seqlens_comp):
        raise ContractError("cu_seqlens_comp: wanted a tensor of shape (B+1), to read total_comp from")
    count = int(cu_seqlens_comp[-1])
    if is_traced(cu_seqlens_comp):
        torch._check(count >= 0, lambda: "cu_seqlens_comp: wanted a last offset of 0 or more")
        torch._check(count <= _MOST_ROWS, lambda: f"cu_seqlens_comp: wanted a last offset of at most {_MOST_ROWS}")
    return count


def row_count(total_comp: Any) -> int:
    return integer("total_comp", total_comp, least=0, most=_MOST_ROWS)

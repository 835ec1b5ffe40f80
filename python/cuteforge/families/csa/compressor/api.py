"""The compressor ops as classes: validate, compile, launch into buffers that the caller gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cuteforge.arguments import flag, integer, kind_of
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.csa.compressor.config import (
    MAX_RATIO,
    Problem,
    Traits,
    max_ctas,
    select_traits,
    workspace_bytes,
)
from cuteforge.families.csa.compressor.operands import BACKWARD, FORWARD, ROWS, entry_names, given_of, signature_of
from cuteforge.op.base import APIBase, Sample
from cuteforge.op.guards import ANY_SHAPE
from cuteforge.op.operand_table import entry_operands
from cuteforge.op.signature import Dims, Signature, TensorSpec
from cuteforge.runtime.arch import Arch, resolve_arch
from cuteforge.runtime.compile_cache import KernelKey
from cuteforge.runtime.streams import Stream


class _Compressor(APIBase):
    """What forward and backward share: configuration, checks, and the choice of the kernel."""

    _BUILDER: str
    _BACKWARD: bool
    # of rows that are read in runs the number; of an output of fixed extents nothing
    _varying = {
        row.name: 0 if row.operand.max_pitch_bytes else ANY_SHAPE
        for row in ROWS
        if row.operand.max_pitch_bytes or not row.operand.is_written
    }
    _agreeing = ("kv",)
    deterministic: bool = True

    def __init__(self, ratio: int, coff: int, **samples: Any) -> None:
        super().__init__(**samples)
        self.ratio: int = integer("ratio", ratio)
        self.coff: int = integer("coff", coff)

    def _known(self) -> Dims:
        return {"ratio": self.ratio, "coff": self.coff}

    def check_support(self) -> bool:
        check_window(self.ratio, self.coff)
        return super().check_support()

    def _check_relations(self, dims: Dims) -> None:
        if dims["d"] < 1:
            raise ContractError(f"kv: wanted at least one column for each half, got d = {dims['d']}")
        if dims["B"] < 0:
            raise ContractError("cu_seqlens: wanted shape (B+1), at least one offset, got (0)")
        if dims["N"] > 0 and dims["T"] < self.ratio:
            raise ContractError(_too_few_tokens(dims["N"], dims["T"], self.ratio))

    def _traits(self, dims: Dims, arch: Arch) -> Traits:
        problem = Problem(self.samples["kv"].dtype, dims["d"], self.ratio, self.coff, given_of(self.samples))
        return select_traits(problem, arch, self._BACKWARD, self.deterministic)

    def _check_arch(self, dims: Dims, arch: Arch) -> None:
        self._traits(dims, arch)

    def _kernel_key(self, dims: Dims, arch: Arch) -> KernelKey:
        return KernelKey(self._BUILDER, self._traits(dims, arch), arch.name)

    def _scalars(self, arch: Arch) -> tuple[int, ...]:
        return (max_ctas(self._traits(self.dims, arch), arch),)

    def _check_contents(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_offsets(tensors["cu_seqlens"], tensors["cu_seqlens_comp"], tensors["kv"].shape[0], self.ratio)

    def workspace_bytes_on(self, device_index: int | None) -> int:
        return 0

    def _check_operands(self, operands: tuple) -> None:
        try:
            # `operands[5]` has a row for each output row
            fits = self._agree(operands[0]) or operands[5].shape[0] == 0
        except (AttributeError, IndexError):
            fits = False  # no tensors: the table says which
        if not fits:
            self.check_call(operands)

    def _agree(self, kv: torch.Tensor) -> bool:
        """Whether there are tokens for a row. Without one there may be calls without rows, each of which is looked at."""
        return kv.shape[0] >= self.ratio


class CSACompressorForward(_Compressor):
    """Gated pooling of a packed token stream: ``out[r, j] = sum_k v_k * softmax_k(score_k + ape_k)``.

    Dims: T packed tokens, B segments, N output rows, d head dim. The window of a row is described in the API page of the family; the
    operation is the compressor of DeepSeek-V4 (CSA: ratio 4, coff 2; HCA: ratio 128, coff 1).

    Args:
        kv, score: ``(T, coff*d)`` bf16, fp16 or fp32, one dtype. Any row pitch; base and rows aligned to the largest power of two, at most
            16, that divides ``d * itemsize`` bytes.
        ape: ``(ratio, coff*d)`` fp32.
        cu_seqlens, cu_seqlens_comp: ``(B+1,)`` int32 offsets of the segments' tokens and output rows.
        out: ``(N, d)``, dtype of kv. N may exceed or fall short of ``cu_seqlens_comp[-1]``.
        ratio: tokens of a block, 1 to 256.
        coff: 1, a window is one block; 2, a window is a block and the one before it.

    Samples may be tensors, meta tensors or `TensorSpec`s. T, B and N may differ from call to call without compiling again.

    Numerics: fp32 arithmetic, rounded once. NaN and Inf propagate as in the eager computation; a score of -inf has weight 0, a window of
    -inf only gives NaN. The result is the same bits at every run.
    """

    signature: Signature = signature_of(FORWARD)
    _BUILDER = "cuteforge.families.csa.compressor.forward:build"
    _BACKWARD = False

    def __init__(
        self,
        kv: Sample,
        score: Sample,
        ape: Sample,
        cu_seqlens: Sample,
        cu_seqlens_comp: Sample,
        out: Sample,
        ratio: int = 4,
        coff: int = 2,
    ) -> None:
        super().__init__(
            ratio, coff, kv=kv, score=score, ape=ape, cu_seqlens=cu_seqlens, cu_seqlens_comp=cu_seqlens_comp, out=out
        )

    def execute(
        self,
        kv: torch.Tensor,
        score: torch.Tensor,
        ape: torch.Tensor,
        cu_seqlens: torch.Tensor,
        cu_seqlens_comp: torch.Tensor,
        out: torch.Tensor,
        stream: Stream | None = None,
    ) -> None:
        """Write all of `out`; it must not overlap an input. No allocation, copy, device read or synchronization.

        Args:
            stream: None for torch's current stream, else a torch stream, a CUstream or a raw handle.

        Raises:
            ContractError: an operand disagrees with the compiled signature, by name; nothing was launched.
        """
        self._launch((kv, score, ape, cu_seqlens, cu_seqlens_comp, out), stream)


class CSACompressorBackward(_Compressor):
    """Gradients of `CSACompressorForward` for a given gradient of its result.

    Args:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff: as in the forward pass.
        grad_out: ``(N, d)``, dtype of kv. Gradients of rows at or past ``cu_seqlens_comp[-1]`` are ignored, NaN included.
        grad_kv, grad_score: ``(T, coff*d)``, dtype of kv. Fully overwritten, with exact 0 where no window reads.
        grad_ape: ``(ratio, coff*d)`` fp32. Fully overwritten.
        deterministic: True sums grad_ape in a fixed order through a workspace: the same bits at every run. False uses atomics and no
            workspace; it raises under ``torch.use_deterministic_algorithms(True)``, or warns if that is set to warn only.

    Numerics: for ratio <= 16, grad_kv and grad_score equal the fp32 eager autograd on CUDA bit for bit before the one rounding to the
    dtype of kv. grad_kv and grad_score are the same bits at every run in either mode.
    """

    _BUILDER = "cuteforge.families.csa.compressor.backward:build"
    _BACKWARD = True

    def __init__(
        self,
        kv: Sample,
        score: Sample,
        ape: Sample,
        cu_seqlens: Sample,
        cu_seqlens_comp: Sample,
        grad_out: Sample,
        grad_kv: Sample,
        grad_score: Sample,
        grad_ape: Sample,
        ratio: int = 4,
        coff: int = 2,
        deterministic: bool = True,
    ) -> None:
        self.deterministic: bool = flag("deterministic", deterministic)
        workspace = {"workspace": TensorSpec((0,), "uint8")} if self.deterministic else {}
        self.signature: Signature = signature_of(BACKWARD, tuple(workspace))
        super().__init__(
            ratio, coff, kv=kv, score=score, ape=ape, cu_seqlens=cu_seqlens, cu_seqlens_comp=cu_seqlens_comp,
            grad_out=grad_out, grad_kv=grad_kv, grad_score=grad_score, grad_ape=grad_ape, **workspace,
        )  # fmt: skip
        if not self.deterministic:
            self._entry_operands = entry_operands(self.signature.names, entry_names(BACKWARD))
        self._workspace_bytes: dict[int | None, int] = {}

    def workspace_bytes(self) -> int:
        """Bytes of the uint8 workspace that `execute` takes: the same for all T, B and N; 0 without `deterministic`."""
        return self.workspace_bytes_on(self._sample_device())

    def workspace_bytes_on(self, device_index: int | None) -> int:
        """`workspace_bytes` for operands of another GPU than the samples'."""
        if not self.deterministic:
            return 0
        if device_index not in self._workspace_bytes:
            arch = resolve_arch(self._compiled.arch.name if self._compiled else None, device_index)
            traits = self._traits(self.dims, arch)
            self._workspace_bytes[device_index] = workspace_bytes(traits, max_ctas(traits, arch))
        return self._workspace_bytes[device_index]

    def execute(
        self,
        kv: torch.Tensor,
        score: torch.Tensor,
        ape: torch.Tensor,
        cu_seqlens: torch.Tensor,
        cu_seqlens_comp: torch.Tensor,
        grad_out: torch.Tensor,
        grad_kv: torch.Tensor,
        grad_score: torch.Tensor,
        grad_ape: torch.Tensor,
        workspace: torch.Tensor | None = None,
        stream: Stream | None = None,
    ) -> None:
        """Write all of grad_kv, grad_score and grad_ape; they overlap no other operand. No allocation, copy, device read or synchronization.

        Args:
            workspace: uint8, at least `workspace_bytes()`, 16-byte aligned, contents free before and after. Two calls that may run at the
                same time need two.
            stream: None for torch's current stream, else a torch stream, a CUstream or a raw handle.

        Raises:
            ContractError: an operand disagrees with the compiled signature, by name; nothing was launched.
            RuntimeError: atomics were chosen and torch asks for deterministic algorithms.
        """
        operands = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, grad_kv, grad_score, grad_ape)
        if self.deterministic:
            operands = (*operands, workspace)
        else:
            _check_no_workspace(workspace)
            refuse_atomics_if_asked()
        self._launch(operands, stream)

    def bind(
        self,
        *operands: torch.Tensor,
        workspace: torch.Tensor | None = None,
        stream: Stream | None = None,
        **named: torch.Tensor,
    ) -> Callable[[], None]:
        """As `APIBase.bind`; the workspace belongs to the bound launch alone."""
        if self.deterministic:
            named["workspace"] = workspace
        else:
            _check_no_workspace(workspace)
            refuse_atomics_if_asked()
        return super().bind(*operands, stream=stream, **named)

    def _check_operands(self, operands: tuple) -> None:
        if self.deterministic:
            self._check_workspace(operands[0], operands[-1])
        super()._check_operands(operands)

    def _check_workspace(self, kv: Any, workspace: Any) -> None:
        if not isinstance(kv, torch.Tensor) or not kv.is_cuda:
            return  # the table refuses it by name
        device_index = kv.get_device()
        needed = self.workspace_bytes_on(device_index)
        wanted = f"shape (W) with W >= {needed}, dtype uint8, on cuda:{device_index}"
        if not isinstance(workspace, torch.Tensor):
            raise ContractError(f"workspace: wanted {wanted}, got {kind_of(workspace)}")
        fits = workspace.dim() == 1 and workspace.shape[0] >= needed and workspace.dtype is torch.uint8
        if not fits or workspace.device.index != device_index:
            got = f"shape {tuple(workspace.shape)}, {workspace.dtype}, on {workspace.device}"
            raise ContractError(f"workspace: wanted {wanted}, got {got}")


def check_window(ratio: Any, coff: Any) -> tuple[int, int]:
    """`ratio` and `coff` as ints.

    Raises:
        ContractError: no ints, or no window.
        UnsupportedError: a window that is too long.
    """
    ratio, coff = integer("ratio", ratio), integer("coff", coff)
    if coff not in (1, 2):
        raise ContractError(f"coff: wanted 1 or 2, got {coff}")
    if ratio < 1:
        raise ContractError(f"ratio: wanted 1 to {MAX_RATIO}, got {ratio}")
    if ratio > MAX_RATIO:
        raise UnsupportedError(f"ratio: the kernels serve 1 to {MAX_RATIO}, got {ratio}")
    return ratio, coff


def check_offsets(cu_seqlens: torch.Tensor, cu_seqlens_comp: torch.Tensor, num_tokens: int, ratio: int) -> None:
    """Read both offset tables and refuse what does not describe segments of `num_tokens` tokens. Synchronizes.

    Raises:
        ContractError: names the table and the first bad index.
    """
    tokens, rows = cu_seqlens.tolist(), cu_seqlens_comp.tolist()
    for index, offset in enumerate(tokens):
        low = tokens[index - 1] if index else 0
        if not low <= offset <= num_tokens:
            raise ContractError(
                f"cu_seqlens: wanted ascending offsets in [0, {num_tokens}], got {offset} at index {index}"
            )
    for index, offset in enumerate(rows):
        wanted = rows[index - 1] + (tokens[index] - tokens[index - 1]) // ratio if index else 0
        if offset != wanted:
            raise ContractError(
                f"cu_seqlens_comp: wanted {wanted} (one row for every {ratio} tokens), got {offset} at index {index}"
            )


def _too_few_tokens(num_rows: int, num_tokens: int, ratio: int) -> str:
    return f"kv: wanted at least ratio = {ratio} tokens for N = {num_rows} rows, got T = {num_tokens}"


def _check_no_workspace(workspace: Any) -> None:
    """A tensor that is not needed does no harm; anything else must be a mistake."""
    if workspace is not None and not isinstance(workspace, torch.Tensor):
        raise ContractError(f"workspace: wanted None with deterministic=False, got {kind_of(workspace)}")


def refuse_atomics_if_asked() -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "CSACompressorBackward(deterministic=False) adds grad_ape up with atomics, whose order differs from run to run"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(f"{message}; torch.use_deterministic_algorithms(True) is set: pass deterministic=True")
    warnings.warn(message, stacklevel=4)

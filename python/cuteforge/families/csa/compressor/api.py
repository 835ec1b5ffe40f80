"""The compressor ops as classes: validate, compile, launch into buffers that the caller gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cuteforge.arguments import flag, integer, kind_of
from cuteforge.errors import ContractError
from cuteforge.families.csa.compressor.checks import (
    check_no_workspace,
    check_offsets,
    check_window,
    refuse_atomics_if_asked,
    too_few_tokens,
)
from cuteforge.families.csa.compressor.config import (
    Problem,
    Traits,
    max_ctas,
    select_traits,
    workspace_bytes,
)
from cuteforge.families.csa.compressor.operands import BACKWARD, FORWARD, ROWS, entry_names, given_of, signature_of
from cuteforge.op.base import APIBase, Sample
from cuteforge.op.dims import Dims
from cuteforge.op.guards import ANY_SHAPE
from cuteforge.op.operand_table import entry_operands
from cuteforge.op.signature import Signature
from cuteforge.op.tensor_spec import TensorSpec
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
            raise ContractError(too_few_tokens(dims["N"], dims["T"], self.ratio))

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
        """`workspace_bytes` for operands of another GPU than the samples': 0, as the forward pass needs none.

        Examples:
            >>> from cuteforge import CSACompressorForward, TensorSpec
            >>> tokens, ape = TensorSpec((8, 64), "bfloat16"), TensorSpec((4, 64), "float32")
            >>> cuts, out = TensorSpec((2,), "int32"), TensorSpec((2, 32), "bfloat16")
            >>> CSACompressorForward(tokens, tokens, ape, cuts, cuts, out).workspace_bytes_on(0)
            0
        """
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
        """Whether there are tokens for a row. Without one there may be calls without rows, each of which is looked
        at."""
        return kv.shape[0] >= self.ratio


class CSACompressorForward(_Compressor):
    """Gated pooling of a packed token stream: ``out[r, j] = sum_k v_k * softmax_k(score_k + ape_k)``.

    This is the compressor of DeepSeek-V4: CSA has ratio 4 and coff 2, HCA has ratio 128 and coff 1. Every `ratio`
    tokens of a segment are a block and give one row of `out`; tokens left over at the end of a segment give none. Row r
    pools, for column j:

    * with coff 1 the tokens of its block, column j;
    * with coff 2 the tokens of the block before, column j (none for the first block of a segment), and the tokens of
      its own block, column ``d + j``.

    `ape` is added to the scores by the token's place in its block. No row sees another segment.

    Dims: T packed tokens, B segments, N output rows, d head dim, any number from 1.

    Args:
        kv, score: ``(T, coff*d)`` bf16, fp16 or fp32, of one dtype. Any distance between rows up to 2**31 - 1 bytes;
            base and rows are aligned to the largest power of two, at most 16, that divides ``d * itemsize`` bytes.
        ape: ``(ratio, coff*d)`` fp32.
        cu_seqlens, cu_seqlens_comp: ``(B+1,)`` int32, where each segment's tokens and rows start; a segment of n tokens
            has ``n // ratio`` rows.
        out: ``(N, d)``, dtype of kv; overlaps no input. N may exceed or fall short of ``cu_seqlens_comp[-1]``: rows
            past it are computed from tokens 0 to ``ratio - 1`` as a first block, rows that do not fit are left out.
        ratio: tokens of a block, 1 to 256.
        coff: 1 or 2, the blocks that a row pools.

    T, B and N may differ from call to call without compiling again.

    Numerics: fp32, and the result is rounded once. NaN and Inf propagate as in the eager computation: a score of -inf
    has weight 0, and a row whose scores are all -inf is NaN. Every run gives the same bits.

    Raises:
        ContractError: the samples contradict each other; names the operand.
        UnsupportedError: by `check_support`, a ratio or a GPU that the kernel does not serve.

    Examples:
        >>> import torch
        >>> from cuteforge import CSACompressorForward
        >>> kv, score = torch.randn(2, 25, 2 * 64, device="cuda", dtype=torch.bfloat16)  # segments of 20 and 5 tokens
        >>> ape = torch.randn(4, 2 * 64, device="cuda")
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)
        >>> cu_seqlens_comp = torch.tensor([0, 5, 6], device="cuda", dtype=torch.int32)  # a row for every 4 tokens
        >>> out = torch.empty(6, 64, device="cuda", dtype=torch.bfloat16)
        >>> op = CSACompressorForward(kv, score, ape, cu_seqlens, cu_seqlens_comp, out, ratio=4, coff=2).compile()
        >>> op.execute(kv, score, ape, cu_seqlens, cu_seqlens_comp, out)
        >>> bool(out.isfinite().all())
        True
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
        """Write all of `out`, which overlaps no input. No allocation, copy, device read or synchronization.

        Args:
            stream: None for torch's current stream, else a torch stream, a CUstream or a raw handle.

        Raises:
            ContractError: an operand disagrees with the compiled signature; names it. Nothing was launched.
            RuntimeError: the op is not compiled.
        """
        self._launch((kv, score, ape, cu_seqlens, cu_seqlens_comp, out), stream)


class CSACompressorBackward(_Compressor):
    """Gradients of `CSACompressorForward` for a given gradient of its result.

    With ``p_k`` the weights of a row, ``g = grad_out``, ``dp_k = g * v_k`` and ``s = sum_k dp_k * p_k``: each entry of
    the row adds ``g * p_k`` to grad_kv, and ``dz_k = p_k * (dp_k - s)`` to grad_score and to its row of grad_ape.

    Args:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff: as in the forward pass.
        grad_out: ``(N, d)``, dtype of kv. Gradients of rows at or past ``cu_seqlens_comp[-1]`` are ignored, NaN
            included.
        grad_kv, grad_score: ``(T, coff*d)``, dtype of kv. All of them is written, with exact 0 where no row reads.
        grad_ape: ``(ratio, coff*d)`` fp32. All of it is written.
        deterministic: True sums grad_ape in a fixed order through a workspace and gives the same bits at every run.
            False uses atomics and no workspace; it raises under ``torch.use_deterministic_algorithms(True)``, or warns
            if that is set to warn only.

    The gradients overlap no other operand.

    Numerics: fp32, each gradient rounded once. For ratio <= 16, grad_kv and grad_score equal the fp32 eager autograd on
    CUDA bit for bit before that rounding. They are the same bits at every run, whatever `deterministic` says.

    Raises:
        ContractError, UnsupportedError: as `CSACompressorForward`.

    Examples:
        >>> import torch
        >>> from cuteforge import CSACompressorBackward
        >>> kv, score = torch.randn(2, 25, 64, device="cuda", dtype=torch.bfloat16)
        >>> ape, grad_out = torch.zeros(4, 64, device="cuda"), torch.ones(6, 64, device="cuda", dtype=torch.bfloat16)
        >>> cu_seqlens = torch.tensor([0, 20, 25], device="cuda", dtype=torch.int32)
        >>> cu_seqlens_comp = torch.tensor([0, 5, 6], device="cuda", dtype=torch.int32)
        >>> grads = torch.empty_like(kv), torch.empty_like(score), torch.empty_like(ape)
        >>> tensors = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, *grads)
        >>> op = CSACompressorBackward(*tensors, ratio=4, coff=1).compile()
        >>> workspace = torch.empty(op.workspace_bytes(), device="cuda", dtype=torch.uint8)
        >>> op.execute(*tensors, workspace=workspace)
        >>> bool(grads[0][24].eq(0).all())  # the last token is in no block
        True
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
            ratio,
            coff,
            kv=kv,
            score=score,
            ape=ape,
            cu_seqlens=cu_seqlens,
            cu_seqlens_comp=cu_seqlens_comp,
            grad_out=grad_out,
            grad_kv=grad_kv,
            grad_score=grad_score,
            grad_ape=grad_ape,
            **workspace,
        )
        if not self.deterministic:
            self._entry_operands = entry_operands(self.signature.names, entry_names(BACKWARD))
        self._workspace_bytes: dict[int | None, int] = {}

    def workspace_bytes(self) -> int:
        """Bytes of the uint8 workspace that `execute` takes: the same for all T, B and N; 0 without `deterministic`."""
        return self.workspace_bytes_on(self._sample_device())

    def workspace_bytes_on(self, device_index: int | None) -> int:
        """`workspace_bytes` for operands of another GPU than the samples'.

        Examples:
            >>> import torch
            >>> from cuteforge import CSACompressorBackward
            >>> kv, ape = torch.empty(8, 64, device="cuda"), torch.empty(4, 64, device="cuda")
            >>> cuts, grad_out = torch.empty(2, device="cuda", dtype=torch.int32), torch.empty(2, 32, device="cuda")
            >>> op = CSACompressorBackward(kv, kv, ape, cuts, cuts, grad_out, kv, kv, ape)
            >>> op.workspace_bytes_on(torch.cuda.current_device()) == op.workspace_bytes()
            True
        """
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
        """Write all of grad_kv, grad_score and grad_ape. No allocation, copy, device read or synchronization.

        Args:
            workspace: uint8 of at least `workspace_bytes()` bytes, 16-byte aligned, where that is not 0. Its contents
                do not matter before or after. Two calls that may run at the same time need two.
            stream: None for torch's current stream, else a torch stream, a CUstream or a raw handle.

        Raises:
            ContractError: an operand disagrees with the compiled signature; names it. Nothing was launched.
            RuntimeError: the op is not compiled, or it uses atomics and torch asks for deterministic algorithms.
        """
        operands = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, grad_kv, grad_score, grad_ape)
        if self.deterministic:
            operands = (*operands, workspace)
        else:
            check_no_workspace(workspace)
            refuse_atomics_if_asked()
        self._launch(operands, stream)

    def bind(
        self,
        *operands: torch.Tensor,
        workspace: torch.Tensor | None = None,
        stream: Stream | None = None,
        **named: torch.Tensor,
    ) -> Callable[[], None]:
        """Validate once, and return a function that launches on these very buffers; arguments and errors as in
        `execute`.

        The workspace must serve no other launch that may run at the same time.

        Examples:
            >>> import torch
            >>> from cuteforge import CSACompressorBackward
            >>> kv, score = torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16)
            >>> ape = torch.zeros(4, 64, device="cuda")
            >>> grad_out = torch.ones(2, 64, device="cuda", dtype=torch.bfloat16)
            >>> cuts = torch.tensor([[0, 8], [0, 2]], device="cuda", dtype=torch.int32)
            >>> grads = torch.empty_like(kv), torch.empty_like(score), torch.empty_like(ape)
            >>> tensors = (kv, score, ape, *cuts, grad_out, *grads)
            >>> op = CSACompressorBackward(*tensors, ratio=4, coff=1, deterministic=False).compile()
            >>> launch = op.bind(*tensors)
            >>> launch()
            >>> bool((grads[0].float().sum(0) - 2).abs().max() < 0.02)  # the weights of each of two rows add up to 1
            True
        """
        if self.deterministic:
            named["workspace"] = workspace
        else:
            check_no_workspace(workspace)
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

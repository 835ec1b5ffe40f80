"""What the attention ops share: operands that may be absent, their table, checks, and the launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cuteforge.arguments import flag, kind_of
from cuteforge.errors import ContractError
from cuteforge.families.attention.checks import ShapeCheck, check_contents, check_relations
from cuteforge.families.attention.forward.config import Traits, select_prefill, workspace_bytes
from cuteforge.families.attention.forward_sm90a.config import few_rows, select_warpgroups
from cuteforge.families.attention.operands import MASK_DIMS, Layout, entry_operands, given_of, signature_of
from cuteforge.families.attention.options import ScoreOptions, checked_scale, checked_softcap, checked_window
from cuteforge.families.attention.problem import Problem
from cuteforge.families.attention.work.traits import limits_of
from cuteforge.op.base import APIBase
from cuteforge.op.dims import Dims
from cuteforge.op.signature import Signature
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.runtime.arch import Arch, resolve_arch
from cuteforge.runtime.compile_cache import KernelKey
from cuteforge.runtime.streams import Stream

_MASK_SHAPES = "2, 3 or 4 dims, (B, S), (B, L, S) or (B, 1|Hq, 1|L, S)"


class AttentionOp(APIBase):
    """What the ops share: operands that may be absent, checks, and the scalars of a launch."""

    _REQUIRED: tuple[str, ...]
    num_splits: int | None = None

    def __init__(
        self, causal: bool, softmax_scale: float | None, window: Any, softcap: float | None, **samples: Any
    ) -> None:
        given = {name: x for name, x in samples.items() if x is not None or name in self._REQUIRED}
        ranks = {name: len(TensorSpec.of(x, name).shape) for name, x in given.items()}
        self.options: ScoreOptions = ScoreOptions(
            flag("causal", causal), checked_window(window), checked_softcap(softcap)
        )
        self.softmax_scale: float | None = checked_scale(softmax_scale)
        self._optional = tuple(name for name in given if name not in self._REQUIRED)
        self._check_presence(given)
        if "mask" in ranks and ranks["mask"] not in MASK_DIMS:
            raise ContractError(f"mask: wanted {_MASK_SHAPES}, got {ranks['mask']} dims")
        if ranks.get("bias", 4) != 4:
            raise ContractError(f"bias: wanted 4 dims, (B|1, Hq|1, L|1, S), got {ranks['bias']}")
        self._queries, self._keys = self._layouts(ranks, given)
        if self._splits:
            given["workspace"] = TensorSpec((0,), "uint8")
        layout = Layout(self._queries, self._keys, ranks.get("mask", 0))
        self.signature: Signature = signature_of(layout, tuple(given))
        super().__init__(**given)
        self._entry_operands = entry_operands(self.signature.names)
        self._as_bytes = frozenset(("mask",)) & given.keys()
        self._takes_workspace = self._splits
        # of a head dim of 0 the table says what is wrong
        usual = max((1, *self.samples["q"].shape)[-1], 1) ** -0.5
        self._usual_scale = usual if self.softmax_scale is None else self.softmax_scale
        self._shapes = ShapeCheck(self.signature.names)

    @staticmethod
    def _check_presence(given: Mapping[str, Any]) -> None:
        """Refuse operands that need one another, or exclude one another."""

    def _layouts(self, ranks: Mapping[str, int], given: Mapping[str, Any]) -> tuple[str, str]:
        """Names of the layouts of queries and keys, from ranks and presence."""
        raise NotImplementedError

    @property
    def _splits(self) -> bool:
        """Whether several CTAs may share the keys of a work tile, which takes a workspace."""
        return False

    def _select(self, problem: Problem, arch: Arch) -> Traits:
        # The samples' rows choose the tile; it serves any number.
        return select_warpgroups(problem, arch, self._has_few_rows(arch)) or select_prefill(problem, arch)

    def _has_few_rows(self, arch: Arch) -> bool:
        samples, (q, keys) = self.samples, (self.samples[name].shape for name in self._REQUIRED[:2])
        requests = samples["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in samples else q[0]
        return math.prod(q[:-1]) <= few_rows(requests, keys[-2], arch.num_sms)

    # Hooks of APIBase.

    def _known(self) -> Dims:
        return {"L": 1} if self._queries == "single" else {}

    def _check_relations(self, dims: Dims) -> None:
        check_relations(dims, self.samples, self._queries, self._keys)

    def _traits(self, dims: Dims, arch: Arch) -> Traits:
        samples, facts = self.samples, self.options.facts
        if self._queries == "single":
            # the only query is at the last key
            facts |= {"causal": False, "has_right": False}
        problem = Problem(
            dtype=samples["q"].dtype,
            head_dim=dims["D"],
            v_dim=dims["Dv"],
            queries=self._queries,
            keys=self._keys,
            given=given_of(samples),
            mask_rank=len(samples["mask"].shape) if "mask" in samples else 0,
            bias_dtype=samples["bias"].dtype if "bias" in samples else "",
            **facts,
        )
        return self._select(problem, arch)

    def _check_arch(self, dims: Dims, arch: Arch) -> None:
        self._traits(dims, arch)

    def _kernel_key(self, dims: Dims, arch: Arch) -> KernelKey:
        traits = self._traits(dims, arch)
        return KernelKey(traits.builder, traits, arch.name)

    def _scalars(self, arch: Arch) -> tuple[Any, ...]:
        traits, options = self._traits(self.dims, arch), self.options
        right = options.right if traits.problem.has_right else None
        return *limits_of(traits, arch, self.num_splits or 0), options.left, right, options.softcap

    def _check_operands(self, operands: tuple) -> None:
        if self._splits:
            self._check_workspace(operands[0], operands[-1])
        if not self._shapes(operands):
            self.check_call(operands)

    def _is_empty(self, operands: tuple) -> bool:
        return operands[len(self._REQUIRED) - 1].numel() == 0  # out

    def _check_contents(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_contents(tensors, self.options.left)

    # Launching.

    def execute(
        self, *operands: torch.Tensor, softmax_scale: float | None = None, workspace: torch.Tensor | None = None,
        stream: Stream | None = None, **named: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write all of `out`, and of `lse` where there is one. No allocation, copy, device read or synchronization.

        Args:
            operands, named: tensors like the samples, in their order or by their names. Pass exactly the optional ones
                that the op was made with.
            softmax_scale: None for that of the op.
            workspace: uint8 of at least `workspace_bytes()` bytes, 16-byte aligned, where that is not 0. Its contents
                do not matter before or after. Two calls that may run at the same time need two.
            stream: None for torch's current stream, else a torch stream, a CUstream or a raw handle.

        Raises:
            ContractError: an operand disagrees with the compiled signature; names it. Nothing was launched.
            RuntimeError: the op is not compiled.

        Examples:
            >>> import torch
            >>> from cuteforge import GQAPrefill
            >>> q, k, v = torch.randn(3, 1, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
            >>> out = torch.empty_like(q)
            >>> op = GQAPrefill(q, k, v, out).compile()
            >>> op.execute(q, k, v, out, softmax_scale=0.0)  # all keys weigh the same
            >>> bool((out - v.float().mean(1, keepdim=True)).abs().max() < 0.02)
            True
        """
        self._launch(self._gather(operands, named, workspace), stream, (self._scale_of(softmax_scale),))

    def bind(
        self, *operands: torch.Tensor, softmax_scale: float | None = None, workspace: torch.Tensor | None = None,
        stream: Stream | None = None, **named: torch.Tensor | None,
    ) -> Callable[[], None]:  # fmt: skip
        """Validate once, and return a function that launches on these very buffers; arguments and errors as in
        `execute`.

        The workspace must serve no other launch that may run at the same time.

        Examples:
            >>> import torch
            >>> from cuteforge import GQADecode
            >>> q = torch.randn(4, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
            >>> k, v = torch.randn(2, 4, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
            >>> out, seqlens_k = torch.empty_like(q), torch.full((4,), 100, device="cuda", dtype=torch.int32)
            >>> op = GQADecode(q, k, v, out, seqlens_k=seqlens_k).compile()
            >>> workspace = torch.empty(op.workspace_bytes(), device="cuda", dtype=torch.uint8)
            >>> launch = op.bind(q, k, v, out, seqlens_k=seqlens_k, workspace=workspace)
            >>> for _ in range(3):
            ...     launch()
            ...     _ = seqlens_k.add_(1)
        """
        return self._bind(self._gather(operands, named, workspace), stream, (self._scale_of(softmax_scale),))

    def _scale_of(self, softmax_scale: float | None) -> float:
        return self._usual_scale if softmax_scale is None else checked_scale(softmax_scale)

    def _gather(self, operands: tuple, named: dict[str, Any], workspace: Any) -> tuple:
        """The operands of a call in the order of the signature; others than the samples' are refused."""
        if not named and not self._optional and len(operands) == len(self._REQUIRED) and self._compiled is not None:
            if self._takes_workspace:
                return (*operands, workspace)
            if workspace is None:
                return operands
        if len(operands) != len(self._REQUIRED):
            operands = self._required(operands, named)
        if len(named) != len(self._optional) or not all(map(named.__contains__, self._optional)):
            named = self._check_optional(named)
        operands = (*operands, *[named[name] for name in self._optional])
        if self._compiled is None:
            self._load_again(operands)
        if self._splits:
            return (*operands, workspace)
        if workspace is not None and not isinstance(workspace, torch.Tensor):
            raise ContractError(f"workspace: wanted None, as none is needed, got {kind_of(workspace)}")
        return operands

    def _required(self, operands: tuple, named: dict[str, Any]) -> tuple:
        """Positional operands with those that were given by name, which are taken out of `named`."""
        rest = self._REQUIRED[len(operands) :]
        missing = [name for name in rest if name not in named]
        if len(operands) > len(self._REQUIRED) or missing:
            problem = f"missing {missing}, {len(operands)} positional"
            raise TypeError(f"{type(self).__name__} takes the operands {', '.join(self._REQUIRED)}: {problem}")
        return (*operands, *(named.pop(name) for name in rest))

    def _check_optional(self, named: dict[str, Any]) -> dict[str, Any]:
        """`named` without None. Refuses other operands than the samples'."""
        given = {name: x for name, x in named.items() if x is not None}
        for name in self._optional:
            if name not in given:
                raise ContractError(f"{name}: wanted a tensor, as in the samples, got None")
        for name in given:
            if name not in self._optional:
                raise ContractError(f"{name}: wanted None, as in the samples, got {kind_of(given[name])}")
        return given

    def workspace_bytes(self) -> int:
        """Bytes of the uint8 workspace that `execute` takes: the same for all sizes, 0 where none is needed.

        Examples:
            >>> import torch
            >>> from cuteforge import GQADecode
            >>> q = torch.empty(4, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
            >>> k = torch.empty(4, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
            >>> GQADecode(q, k, k, q).workspace_bytes() > 0
            True
            >>> GQADecode(q, k, k, q, num_splits=1).workspace_bytes()
            0
        """
        return self.workspace_bytes_on(self._sample_device())

    def workspace_bytes_on(self, device_index: int | None) -> int:
        """`workspace_bytes` for operands on another GPU than that of the samples.

        Examples:
            >>> import torch
            >>> from cuteforge import GQADecode
            >>> q = torch.empty(4, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
            >>> k = torch.empty(4, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
            >>> op = GQADecode(q, k, k, q)
            >>> op.workspace_bytes_on(torch.cuda.current_device()) == op.workspace_bytes()
            True
        """
        if not self._splits:
            return 0
        arch = resolve_arch(self._compiled.arch.name if self._compiled else None, device_index)
        return workspace_bytes(self._traits(self.dims, arch), arch)

    def _check_workspace(self, q: Any, workspace: Any) -> None:
        """Refuse a workspace that is too small."""
        if not isinstance(q, torch.Tensor) or not q.is_cuda:
            return  # the table refuses q by name
        needed = self._workspace_bytes(q.get_device())
        if type(workspace) is torch.Tensor and workspace.dtype is torch.uint8 and workspace.dim() == 1:
            if workspace.numel() >= needed and workspace.device == q.device:
                return
        wanted = f"shape (W) with W >= {needed}, dtype uint8, on {q.device}"
        got = kind_of(workspace)
        if isinstance(workspace, torch.Tensor):
            got = f"shape {tuple(workspace.shape)}, {workspace.dtype}, on {workspace.device}"
        raise ContractError(f"workspace: wanted {wanted}, got {got}")

    @functools.cached_property
    def _workspace_bytes(self) -> Callable[[int], int]:
        return functools.cache(self.workspace_bytes_on)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_workspace_bytes"}

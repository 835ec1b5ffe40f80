"""The rotary op as a class: validates, compiles, launches into buffers that the caller gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from cuteforge.arguments import flag, kind_of
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.families.rotary.config import MAX_HEAD_DIM, Problem, Traits
from cuteforge.families.rotary.operands import ROWS, TOKENS, entry_names, given_of, signature_of
from cuteforge.op.base import APIBase, Sample
from cuteforge.op.dims import Dims
from cuteforge.op.guards import ANY_SHAPE
from cuteforge.op.operand_table import entry_operands
from cuteforge.op.signature import Signature
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.runtime.arch import Arch
from cuteforge.runtime.compile_cache import KernelKey
from cuteforge.runtime.streams import Stream

_FORTH, _BACK = (0,), (1,)
_T = TypeVar("_T")
# (cos, sin)
Pair = tuple[_T, _T] | list[_T]


class RotaryEmbedding(APIBase):
    """Turns pairs of columns of every head by the angle of their token; for one tensor, or for q and k in one launch.

    ``(a, b) -> (a cos - b sin, a sin + b cos)`` (RoFormer, arXiv 2104.09864). Pair i is the columns ``(2i, 2i+1)`` if
    `interleaved`, else ``(i, i + rotary_dim/2)``.

    Dims: T packed tokens, or B requests of L tokens; H heads, Hk heads of k; D head dim, up to 1024.

    Args:
        x, out: ``(T, H, D)`` or ``(B, L, H, D)``; bf16, fp16 or fp32, both of one dtype. Any strides, if the last dim
            is contiguous. Base, tokens and heads are aligned to the widest access, at most 16 bytes, that divides a
            head and its rotated columns. `out` may be `x`; apart from that it overlaps no operand.
        table: ``freqs_cis``, fp32 ``(T, rotary_dim/2, 2)`` or ``(B, L, rotary_dim/2, 2)``, the cosines and sines of
            each token; or ``(cos, sin)``, fp32 ``(max_pos, rotary_dim/2)`` each, as `rotary_table` makes them, with
            `positions`.
        positions: ``(T,)`` or ``(B, L)`` int32 or int64, rows of the table; only with ``(cos, sin)``. A token whose
            position is not in the table becomes NaN.
        k, k_out: as `x` and `out`, with Hk heads. Both or neither.
        interleaved: which columns form a pair.

    ``rotary_dim``, twice the width of the table, is at most D; the columns past it are copied. T, B, L, H and the
    length of the table may differ from call to call without compiling again.

    Numerics: fp32. One of the two products is rounded, the other is fused with the sum (fma), and the result is rounded
    once when it is stored.

    Raises:
        ContractError: the samples contradict each other; names the operand.
        UnsupportedError: by `check_support`, a head dim or a GPU that the kernel does not serve.

    Examples:
        >>> import torch
        >>> from cuteforge import RotaryEmbedding, rotary_table
        >>> x = torch.randn(8, 32, 128, device="cuda", dtype=torch.bfloat16)
        >>> table, positions = rotary_table(4096, 128, device="cuda"), torch.arange(8, device="cuda")
        >>> out = torch.empty_like(x)
        >>> op = RotaryEmbedding(x, table, out, positions, interleaved=False).compile()
        >>> op.signature.names
        ('x', 'out', 'cos', 'sin', 'positions')
        >>> op.execute(x, table, out, positions)
        >>> torch.equal(out[0], x[0])  # position 0 is not turned
        True
    """

    _varying = {row.name: 0 if row.is_output else ANY_SHAPE for row in ROWS}

    def __init__(
        self,
        x: Sample,
        table: Sample | Pair[Sample],
        out: Sample,
        positions: Sample | None = None,
        *,
        k: Sample | None = None,
        k_out: Sample | None = None,
        interleaved: bool = True,
    ) -> None:
        operands = named_operands(x, table, out, positions, k, k_out)
        spec = TensorSpec.of(x, "x")
        if len(spec.shape) not in TOKENS:
            raise ContractError(f"x: wanted shape (T, H, D) or (B, L, H, D), got {len(spec.shape)} dims")
        self.interleaved: bool = flag("interleaved", interleaved)
        self._kind = (len(spec.shape), spec.dtype, self.interleaved, given_of(operands))
        super().__init__(**operands)
        self._entry_operands = entry_operands(self.signature.names, entry_names())
        self._num_operands, self._has_keys = len(operands), k is not None

    @property
    def signature(self) -> Signature:
        return signature_of(*self._kind)

    def _check_relations(self, dims: Dims) -> None:
        table = "freqs_cis" if "freqs_cis" in self.samples else "cos"
        if not 0 < 2 * dims["half"] <= dims["D"]:
            raise ContractError(f"{table}: wanted 1 to {dims['D'] // 2} pairs for D = {dims['D']}, got {dims['half']}")
        if dims["D"] > MAX_HEAD_DIM:
            raise UnsupportedError(f"x: the kernel serves a head dim up to {MAX_HEAD_DIM}, got D = {dims['D']}")

    def _kernel_key(self, dims: Dims, arch: Arch) -> KernelKey:
        rank, dtype, interleaved, given = self._kind
        positions = self.samples["positions"].dtype if "positions" in given else None
        traits = Traits(Problem(dtype, dims["D"], 2 * dims["half"], interleaved), rank, given, positions)
        return KernelKey("cuteforge.families.rotary.kernel:build", traits, arch.name)

    def _check_contents(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if "positions" in tensors:
            check_positions(tensors["positions"], tensors["cos"].shape[0])

    def execute(
        self,
        x: torch.Tensor,
        table: torch.Tensor | Pair[torch.Tensor],
        out: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        k: torch.Tensor | None = None,
        k_out: torch.Tensor | None = None,
        inverse: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """Write all of `out` and `k_out`. No allocation, copy, device read or synchronization.

        Args:
            inverse: rotate back, by the negative angles. This is also the backward of the rotation.
            stream: None for torch's current stream, else a torch stream, a CUstream or a raw handle.

        Raises:
            ContractError: an operand disagrees with the compiled signature; names it. Nothing was launched.
            RuntimeError: the op is not compiled.

        Examples:
            >>> import torch
            >>> from cuteforge import RotaryEmbedding, rotary_table
            >>> x = torch.randn(8, 32, 128, device="cuda")
            >>> table, positions = rotary_table(4096, 128, device="cuda"), torch.arange(8, device="cuda")
            >>> turned = x.clone()
            >>> op = RotaryEmbedding(turned, table, turned, positions).compile()
            >>> op.execute(turned, table, turned, positions)  # in place
            >>> op.execute(turned, table, turned, positions, inverse=True)
            >>> torch.testing.assert_close(turned, x, atol=1e-4, rtol=1e-4)
        """
        self._launch(self._operands(x, table, out, positions, k, k_out), stream, direction(inverse))

    def bind(
        self, x: torch.Tensor, table: torch.Tensor | Pair[torch.Tensor], out: torch.Tensor,
        positions: torch.Tensor | None = None, *,
        k: torch.Tensor | None = None, k_out: torch.Tensor | None = None,
        inverse: bool = False, stream: Stream | None = None,
    ) -> Callable[[], None]:  # fmt: skip
        """Validate once, and return a function that launches on these very buffers; arguments and errors as in
        `execute`.

        Examples:
            >>> import torch
            >>> from cuteforge import RotaryEmbedding, rotary_table
            >>> x = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
            >>> table = rotary_table(4096, 128, device="cuda")
            >>> positions = torch.zeros(4, device="cuda", dtype=torch.int64)
            >>> out = torch.empty_like(x)
            >>> launch = RotaryEmbedding(x, table, out, positions).compile().bind(x, table, out, positions)
            >>> for _ in range(3):
            ...     launch()
            ...     _ = positions.add_(1)
        """
        return self._bind(self._operands(x, table, out, positions, k, k_out), stream, direction(inverse))

    def _operands(self, x, table, out, positions, k, k_out) -> tuple:
        """In signature order. A call with other operands than the sample's is refused."""
        angles = table if isinstance(table, (tuple, list)) else (table,)
        if positions is not None:
            angles = (*angles, positions)
        has_keys = k is not None or k_out is not None
        operands = (x, out, k, k_out, *angles) if has_keys else (x, out, *angles)
        if len(operands) != self._num_operands or has_keys is not self._has_keys:
            given = ", ".join(named_operands(x, table, out, positions, k, k_out))
            raise ContractError(f"operands: wanted {', '.join(self.samples)} (those of the samples), got {given}")
        return operands


def named_operands(x, table, out, positions, k, k_out) -> dict[str, Any]:
    """The operands of a call by name, in signature order.

    Raises:
        ContractError: a table without its other half, positions without a table for them, or k without k_out.
    """
    if (k is None) != (k_out is None):
        name, other = ("k_out", "k") if k_out is None else ("k", "k_out")
        raise ContractError(f"{name}: wanted a tensor, as {other} is given, got None")
    operands = {"x": x, "out": out} | ({} if k is None else {"k": k, "k_out": k_out})
    if isinstance(table, (tuple, list)):
        if len(table) != 2:
            raise ContractError(f"table: wanted (cos, sin) or freqs_cis, got {len(table)} tensors")
        if positions is None:
            raise ContractError("positions: wanted a tensor for the table (cos, sin), got None")
        return operands | {"cos": table[0], "sin": table[1], "positions": positions}
    if positions is not None:
        raise positions_not_wanted(positions)
    return operands | {"freqs_cis": table}


def positions_not_wanted(positions: Any) -> ContractError:
    wanted = "None with freqs_cis, which has a row for each token"
    return ContractError(f"positions: wanted {wanted}, got {kind_of(positions)}")


def direction(inverse: bool) -> tuple[int]:
    """The scalar of a launch."""
    if inverse is False:
        return _FORTH
    return _BACK if inverse is True or flag("inverse", inverse) else _FORTH


def check_positions(positions: torch.Tensor, max_pos: int) -> None:
    """Read the positions and refuse those outside the table. Synchronizes.

    Raises:
        ContractError: names the first bad index.
    """
    bad = ((positions < 0) | (positions >= max_pos)).nonzero()
    if len(bad):
        index = tuple(bad[0].tolist())
        got = f"{positions[index].item()} at index {', '.join(map(str, index))}"
        raise ContractError(f"positions: wanted values in [0, {max_pos}), got {got}")

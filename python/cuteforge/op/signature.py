"""Tensor metadata and the validation table of an op. Pure Python: tensors are read through their attributes.

A family lists its operands once; `Signature.bind` solves the symbols that their dims share and refuses, by name, the
operand that disagrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from cuteforge.errors import ContractError
from cuteforge.op.dims import Dims, Term
from cuteforge.op.overlap import are_disjoint, overlaps_itself
from cuteforge.op.tensor_spec import ITEMSIZE, TensorSpec, contiguous_stride, format_shape

if TYPE_CHECKING:
    pass


_ROLES = ("in", "out", "update", "scratch")


@dataclass(frozen=True)
class Operand:
    """One row of a `Signature`.

    Args:
        name: the argument's name, first word of every error about it.
        dims: one term for each dim, separated by spaces: an integer, a symbol, a product ``coff*d``, a sum ``B+1``.
        dtypes: accepted names, or ``("=kv",)``: the dtype of operand ``kv``.
        align_bytes: required of the base pointer and of every pitch but the last dim's: bytes, or a function of the
            solved dims, which then also hold ``itemsize``, the operand's bytes an element.
        max_pitch_bytes: the largest pitch that the kernels can step over, None for any.
        dense_dims: innermost dims that are contiguous together; pitches are those of the dims before. 0 for an operand
            that is read element by element, with any strides.
        in_place_of: the operand whose very memory an output may be: same address, same strides.
        role: ``"in"`` is read, ``"out"`` written, ``"update"`` both, ``"scratch"`` is memory to work in. All but the
            first must overlap neither themselves nor another operand.

    The last dim must be contiguous, stride 1 or at most one element long, unless `dense_dims` is 0.
    """

    name: str
    dims: str
    dtypes: tuple[str, ...]
    align_bytes: int | Callable[[Mapping[str, int]], int] = 1
    role: Literal["in", "out", "update", "scratch"] = "in"
    max_pitch_bytes: int | None = None
    in_place_of: str | None = None
    dense_dims: int = 1
    terms: tuple[Term, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"{self.name}: role is one of {', '.join(_ROLES)}, not {self.role!r}")
        unknown = [dtype for dtype in self.dtypes if dtype not in ITEMSIZE and not dtype.startswith("=")]
        if unknown or not self.dtypes:
            raise ValueError(f"{self.name}: dtypes {self.dtypes} are not among {tuple(ITEMSIZE)}")
        object.__setattr__(self, "terms", tuple(Term.parse(self.name, text) for text in self.dims.split()))

    @property
    def is_written(self) -> bool:
        """Whether a launch writes it."""
        return self.role != "in"

    @property
    def dtype_of(self) -> str | None:
        """The operand whose dtype this one shares, if any."""
        return self.dtypes[0][1:] if self.dtypes[0].startswith("=") else None

    def alignment(self, dims: Mapping[str, int], itemsize: int) -> int:
        """Bytes that the base pointer and the pitches must be divisible by."""
        return self.align_bytes({**dims, "itemsize": itemsize}) if callable(self.align_bytes) else self.align_bytes

    def check_layout(self, spec: TensorSpec, dims: Mapping[str, int]) -> None:
        """Refuse strides that the kernels do not read.

        Raises:
            ContractError: negative or misaligned strides, a last dim that is not contiguous, an output that overlaps
                itself.
        """
        if any(s < 0 for s in spec.stride):
            raise ContractError(f"{self.name}: wanted strides of 0 or more, got {format_shape(spec.stride)}")
        if self.dense_dims and spec.shape and spec.shape[-1] > 1 and spec.stride[-1] != 1:
            raise ContractError(f"{self.name}: wanted a contiguous last dim (stride 1), got stride {spec.stride[-1]}")
        num_outer = len(spec.shape) - self.dense_dims
        dense = contiguous_stride(spec.shape)[num_outer:]
        for got, wanted, extent in zip(spec.stride[num_outer:], dense, spec.shape[num_outer:]):
            if extent > 1 and got != wanted:
                tail = f"the last {self.dense_dims} dims contiguous (strides {format_shape(dense)})"
                raise ContractError(f"{self.name}: wanted {tail}, got strides {format_shape(spec.stride)}")
        align = self.alignment(dims, spec.itemsize)
        for stride, extent in zip(spec.stride[:num_outer], spec.shape[:num_outer]):
            if extent > 1 and stride * spec.itemsize % align:
                got = f"stride {stride} ({stride * spec.itemsize} bytes)"
                raise ContractError(f"{self.name}: wanted every row aligned to {align} bytes, got {got}")
        self.check_steps(spec.shape, spec.stride, spec.itemsize)

    def check_steps(self, shape: Sequence[int], stride: Sequence[int], itemsize: int) -> None:
        """Refuse the strides that no compiled entry notices and that a contiguous tensor cannot have.

        Raises:
            ContractError: rows further apart than ``max_pitch_bytes``, an output of which two elements share an
            address.
        """
        if self.max_pitch_bytes:
            num_outer = len(shape) - self.dense_dims
            for step, extent in zip(stride[:num_outer], shape[:num_outer]):
                if extent > 1 and step * itemsize > self.max_pitch_bytes:
                    wanted = f"rows at most {self.max_pitch_bytes} bytes apart"
                    raise ContractError(f"{self.name}: wanted {wanted}, got stride {step} ({step * itemsize} bytes)")
        if self.is_written and overlaps_itself(shape, stride):
            got = f"shape {format_shape(shape)} with strides {format_shape(stride)}"
            raise ContractError(f"{self.name}: wanted an output whose elements do not overlap, got {got}")


class Signature:
    """The operands of an op, in the order in which the class and its compiled entry take them.

    Raises:
        ValueError: two operands of one name, or ``"=name"`` without such an operand before it.
    """

    def __init__(self, *operands: Operand) -> None:
        self.operands: tuple[Operand, ...] = operands
        self.names: tuple[str, ...] = tuple(operand.name for operand in operands)
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"operand names repeat: {self.names}")
        for i, operand in enumerate(operands):
            if operand.dtype_of is not None and operand.dtype_of not in self.names[:i]:
                raise ValueError(f"{operand.name}: no operand {operand.dtype_of!r} before it")

    def bind(self, specs: Mapping[str, TensorSpec], known: Mapping[str, int]) -> Dims:
        """`solve`, then `check_layouts`."""
        dims = self.solve(specs, known)
        self.check_layouts(specs, dims)
        return dims

    def solve(self, specs: Mapping[str, TensorSpec], known: Mapping[str, int]) -> Dims:
        """Solve every symbol, and check device, dtype, rank and shape of all operands.

        Args:
            specs: a TensorSpec, or a tensor, for each operand.
            known: symbols fixed by configuration.

        Returns:
            All symbols, the known ones included.

        Raises:
            ContractError: an operand disagrees with its row or with an earlier one; the text starts with its name.
            ValueError: the table does not determine a symbol (a mistake in the table, not in the call).
        """
        specs = {name: TensorSpec.of(specs[name], name) for name in self._all_of(specs)}
        _check_devices(specs)
        dims = dict(known)
        pending = [row for operand in self.operands for row in self._bind_row(operand, specs, dims)]
        self._solve_pending(pending, specs, dims)
        return dims

    def check_layouts(self, specs: Mapping[str, TensorSpec], dims: Mapping[str, int]) -> None:
        """Check strides and pitches of all operands, once it is known that their dims are served.

        Raises:
            ContractError: names the operand.
        """
        for operand in self.operands:
            operand.check_layout(TensorSpec.of(specs[operand.name], operand.name), dims)

    def bind_pointers(self, tensors: Mapping[str, Any], dims: Mapping[str, int] = MappingProxyType({})) -> None:
        """Check what only real memory shows: base alignment, and that no output shares memory with another operand.

        Args:
            tensors: a torch tensor with storage for each operand.
            dims: as `bind` returned them; needed where an ``align_bytes`` is a function.

        Raises:
            ContractError: names the operand.
        """
        blocks = [_Block(op, t.data_ptr(), TensorSpec.of(t, op.name)) for op, t in self._pairs(tensors)]
        for block in blocks:
            align = block.operand.alignment(dims, block.spec.itemsize)
            if block.spec.numel and block.pointer % align:
                got = f"address {block.pointer:#x}"
                raise ContractError(f"{block.operand.name}: wanted a base aligned to {align} bytes, got {got}")
        for out in blocks:
            for other in blocks:
                if out.operand.is_written and other is not out and out.clashes_with(other):
                    got = f"memory shared with {other.operand.name}"
                    raise ContractError(f"{out.operand.name}: wanted memory of its own for an output, got {got}")

    def _all_of(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        for name in self.names:
            if given.get(name) is None:
                raise ContractError(f"{name}: wanted a tensor, got None")
        return self.names

    def _pairs(self, tensors: Mapping[str, Any]) -> Iterator[tuple[Operand, Any]]:
        return zip(self.operands, (tensors[name] for name in self._all_of(tensors)))

    def _bind_row(self, operand: Operand, specs: Mapping[str, TensorSpec], dims: Dims) -> list[_Equation]:
        """Check dtype and rank, solve what the row determines, and return the terms it leaves open."""
        spec = specs[operand.name]
        _check_dtype(operand, spec, specs)
        before = dict(dims)
        if len(spec.shape) != len(operand.terms):
            raise _shape_error(operand, spec, before)
        equations = [_Equation(operand, term, n) for term, n in zip(operand.terms, spec.shape)]
        return [eq for eq in equations if not eq.settle(dims, spec, before)]

    def _solve_pending(self, pending: list[_Equation], specs: Mapping[str, TensorSpec], dims: Dims) -> None:
        """Terms with two unknowns wait for a later row to solve one of them."""
        while pending:
            still_open = [eq for eq in pending if not eq.settle(dims, specs[eq.operand.name], dict(dims))]
            if len(still_open) == len(pending):
                unknown = ", ".join(sorted(pending[0].term.unknowns(dims)))
                raise ValueError(f"{pending[0].operand.name}: the operands do not determine {unknown}")
            pending = still_open


@dataclass(frozen=True)
class _Equation:
    """``term == extent``, from one dim of one operand."""

    operand: Operand
    term: Term
    extent: int

    def settle(self, dims: Dims, spec: TensorSpec, before: Mapping[str, int]) -> bool:
        """Check the equation or solve its only unknown into `dims`; False while more than one is unknown."""
        reduced = self.term.reduce(dims)
        rest = self.extent - sum(c for c, symbols in reduced if not symbols)
        open_products = [(c, symbols) for c, symbols in reduced if symbols]
        if not open_products:
            if rest:
                raise _shape_error(self.operand, spec, before)
            return True
        coefficient, symbols = open_products[0]
        if len(open_products) > 1 or len(symbols) > 1:
            return False
        if coefficient == 0 or rest < 0 or rest % coefficient:
            raise _shape_error(self.operand, spec, before)
        dims[symbols[0]] = rest // coefficient
        return True


@dataclass(frozen=True)
class _Block:
    """The memory of one operand."""

    operand: Operand
    pointer: int
    spec: TensorSpec

    @property
    def end(self) -> int:
        return self.pointer + self.spec.span * self.spec.itemsize

    def clashes_with(self, other: _Block) -> bool:
        """Whether this output shares memory with another operand other than by being computed in place of it."""
        one_memory = self.pointer == other.pointer and self.spec == other.spec
        is_in_place = self.operand.in_place_of == other.operand.name or other.operand.in_place_of == self.operand.name
        return self.overlaps(other) and not (one_memory and is_in_place)

    def overlaps(self, other: _Block) -> bool:
        """Whether both have a byte in common; slices of one buffer, column ranges or head ranges, do not."""
        if not self.spec.numel or not other.spec.numel:
            return False
        return not are_disjoint(self._dims_bytes(), other._dims_bytes(), other.pointer - self.pointer)

    def _dims_bytes(self) -> list[tuple[int, int]]:
        """``(stride in bytes, extent)``, largest stride first; the element itself is the last."""
        size = self.spec.itemsize
        return [(stride * size, extent) for stride, extent in reversed(self.spec.outer_dims())] + [(1, size)]


def _shape_error(operand: Operand, spec: TensorSpec, dims: Mapping[str, int]) -> ContractError:
    symbolic = format_shape(term.text for term in operand.terms)
    values = format_shape(term.render(dims) for term in operand.terms)
    wanted = symbolic if values == symbolic else f"{symbolic} = {values}"
    return ContractError(f"{operand.name}: wanted shape {wanted}, got {format_shape(spec.shape)}")


def _check_dtype(operand: Operand, spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> None:
    other = operand.dtype_of
    allowed = operand.dtypes if other is None else (specs[other].dtype,)
    if spec.dtype not in allowed:
        wanted = " or ".join(allowed) + (f" (that of {other})" if other else "")
        raise ContractError(f"{operand.name}: wanted dtype {wanted}, got {spec.dtype}")


def _check_devices(specs: Mapping[str, TensorSpec]) -> None:
    """All operands on one GPU; "meta" goes with any device, "cuda" with any GPU."""
    anchor = None
    for name, spec in specs.items():
        if spec.device == "meta":
            continue
        anchor_spec = None if anchor is None else specs[anchor]
        if not _same_gpu(spec, anchor_spec):
            wanted = "a CUDA device" if anchor is None else f"device {anchor_spec.device} (that of {anchor})"
            raise ContractError(f"{name}: wanted {wanted}, got {spec.device}")
        if anchor is None or anchor_spec.device_index is None:
            anchor = name


def _same_gpu(spec: TensorSpec, anchor: TensorSpec | None) -> bool:
    if spec.device.partition(":")[0] != "cuda":
        return False
    indices = {spec.device_index, None if anchor is None else anchor.device_index}
    return len(indices - {None}) <= 1

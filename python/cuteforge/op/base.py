"""The life of an op: check_support, compile, execute, bind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeVar

import torch

from cuteforge.arguments import kind_of
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.op.dims import Dims
from cuteforge.op.guards import Varying
from cuteforge.op.launch import bound_launch, count_writes, entry_of, translate_error
from cuteforge.op.recall import Replays
from cuteforge.op.replay import Launcher, Recipe, Replay, Variation
from cuteforge.op.signature import Signature
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.runtime import env
from cuteforge.runtime.arch import Arch, resolve_arch, runs_on
from cuteforge.runtime.compile_cache import Kernel, KernelKey, load_kernel
from cuteforge.runtime.streams import Stream, current_stream_query, is_capturing, record_streams, stream_handle

# Module globals: the launch path reads them at every call.
_Tensor = torch.Tensor
# Types without a dispatch of their own. Others are asked.
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_grad_enabled = torch.is_grad_enabled
current_handle = current_stream_query()
_Op = TypeVar("_Op", bound="APIBase")
Sample = torch.Tensor | TensorSpec
"""What an op class takes for each operand: a tensor, real, meta or fake, or a `TensorSpec`. Only shape, dtype, stride
and device are read.

Examples:
    >>> import torch
    >>> from cuteforge import MergeState, TensorSpec
    >>> o, lse = torch.empty(8, 4, 64, device="meta"), TensorSpec((4, 8), "float32")
    >>> MergeState(o, lse, o, lse, o, lse).check_support()
    True
"""


class _Compiled:
    """What `compile` leaves behind: replaced as a whole, so a launch in another thread sees the old or the new one."""

    __slots__ = ("arch", "kernel", "replays", "scalars")

    def __init__(self, kernel: Kernel, arch: Arch) -> None:
        self.kernel = kernel
        self.arch = arch
        # By device index; a device is in it once it is known to run the code.
        self.scalars: dict[int, tuple[int, ...]] = {}
        self.replays = Replays()


class APIBase:
    """One op for one configuration: validates, compiles, launches into buffers that the caller gives.

    A family names its operands in `signature` and implements `_kernel_key`; the other hooks have defaults. Samples give
    shape, dtype, stride and device only. Extents that the compile key does not hold may differ from call to call.
    Nothing here allocates, copies, converts, reads device memory or falls back. Ops may be deep-copied and pickled; the
    copy loads its kernel again when it is first used.

    Args:
        samples: a tensor (real, meta or fake) or TensorSpec for each operand of `signature`.

    Raises:
        TypeError: a name is missing or unknown.
        ContractError: a sample is no tensor.
    """

    signature: Signature
    # Names of what the compiled entry takes, None for what the op does not have; without it, the operands in their
    # order.
    _entry_operands: tuple[str | None, ...] | None = None
    # Operands that the entry takes as bytes: it has no type for bools.
    _as_bytes: frozenset[str] = frozenset()
    # What of an operand may differ among calls that are alike, by its name: see `guards.guard_of`.
    _varying: Mapping[str, Varying] = {}
    # Whether extents of the operands `agreeing` go together, as far as the compiled entry does not say.
    _agree: Callable[..., bool] | None = None
    _agreeing: tuple[str, ...] = ()

    def __init__(self, **samples: Any) -> None:
        ordered = self._ordered((), samples)
        self.samples: dict[str, TensorSpec] = {
            name: TensorSpec.of(x, name) for name, x in zip(self.signature.names, ordered)
        }
        # Operands that may have strides which the compiled entry does not refuse.
        self._stepped = tuple(i for i, x in enumerate(self.signature.operands) if x.is_written or x.max_pitch_bytes)
        self._written = _pick_written(self.signature)
        self._may_be_empty = type(self)._is_empty is not APIBase._is_empty
        self._dims: Dims | None = None
        self._compiled: _Compiled | None = None
        self._was_compiled = False
        self._arch_name: str | None = None

    # Hooks of a family.

    def _known(self) -> Mapping[str, int]:
        """Symbols of the signature that the configuration fixes."""
        return {}

    def _check_relations(self, dims: Dims) -> None:
        """Raise ContractError or UnsupportedError for what the signature cannot say."""

    def _check_arch(self, dims: Dims, arch: Arch) -> None:
        """Raise UnsupportedError for what a GPU with the facts `arch` does not serve."""

    def _kernel_key(self, dims: Dims, arch: Arch) -> KernelKey:
        """The binary that serves `dims` on `arch`."""
        raise NotImplementedError

    def _scalars(self, arch: Arch) -> tuple[int, ...]:
        """Run-time scalars that follow the tensors; constant for an op on a GPU with the facts `arch`."""
        return ()

    def _check_operands(self, operands: tuple) -> None:
        """Raise ContractError for what the compiled entry does not see. Quick; takes anything for operands, of which
        the table says what is wrong."""

    def _is_empty(self, operands: tuple) -> bool:
        """Whether these operands leave nothing to do; then nothing is launched."""
        return False

    def _check_contents(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ContractError for bad values in the inputs, e.g. offsets out of order. May read device memory, so it
        runs with CUTEFORGE_CHECK=1 only.

        Args:
            tensors: the inputs by name; their shapes have been checked. Indices may still be int64.
        """

    # Life cycle.

    @property
    def dims(self) -> Dims:
        """The size of every dim that the operands share, by its name, worked out from the samples. Raises as
        `check_support`.

        Examples:
            >>> from cuteforge import RotaryEmbedding, TensorSpec
            >>> x, table = TensorSpec((8, 4, 128), "bfloat16"), TensorSpec((8, 64, 2), "float32")
            >>> RotaryEmbedding(x, table, x).dims
            {'T': 8, 'H': 4, 'D': 128, 'half': 64}
        """
        if self._dims is None:
            self.check_support()
        return self._dims

    def check_support(self) -> bool:
        """Return True, or raise. Needs neither a GPU nor a compiler. On a machine with a GPU, samples on it are also
        checked against it.

        Raises:
            ContractError: the samples contradict each other or the signature; names the operand.
            UnsupportedError: a valid call that this op does not serve; names the limit.

        Examples:
            >>> from cuteforge import RotaryEmbedding, TensorSpec
            >>> x, table = TensorSpec((8, 4, 128), "bfloat16"), TensorSpec((8, 64, 2), "float32")
            >>> RotaryEmbedding(x, table, x).check_support()
            True
            >>> RotaryEmbedding(x, table, TensorSpec((8, 4, 64), "bfloat16")).check_support()
            Traceback (most recent call last):
            cuteforge.errors.ContractError: out: wanted shape (T, H, D) = (8, 4, 128), got (8, 4, 64)
        """
        dims = self.signature.solve(self.samples, self._known())
        # whether a head dim is served matters more than how its rows lie
        self._check_relations(dims)
        self.signature.check_layouts(self.samples, dims)
        index = self._sample_device()
        if index is not None and index < torch.cuda.device_count():
            self._check_arch(dims, resolve_arch(None, index))
        self._dims = dims
        return True

    def compile(self: _Op, arch: str | None = None) -> _Op:
        """Compile, or load the kernel from a cache, and return self. Free when already compiled.

        Args:
            arch: e.g. ``"sm_90a"``. None takes CUTEFORGE_ARCH, else the samples' GPU, else the current GPU.

        Raises:
            ContractError, UnsupportedError: as `check_support`, or for an unknown `arch`.
            RuntimeError: a CUDA graph is being captured and the kernel is not compiled yet.

        Examples:
            >>> import torch
            >>> from cuteforge import RotaryEmbedding, rotary_table
            >>> x = torch.randn(8, 4, 128, device="cuda", dtype=torch.bfloat16)
            >>> table, positions = rotary_table(1024, 128, device="cuda"), torch.arange(8, device="cuda")
            >>> op = RotaryEmbedding(x, table, x, positions).compile()
            >>> op.compile() is op
            True
        """
        self._compile_for(arch, self._sample_device())
        return self

    def workspace_bytes(self) -> int:
        """Bytes of scratch memory that `execute` takes; 0 for an op without a workspace.

        Examples:
            >>> from cuteforge import RotaryEmbedding, TensorSpec
            >>> x, table = TensorSpec((8, 4, 128), "bfloat16"), TensorSpec((8, 64, 2), "float32")
            >>> RotaryEmbedding(x, table, x).workspace_bytes()
            0
        """
        return 0

    def execute(self, *operands: torch.Tensor, stream: Stream | None = None, **named: torch.Tensor) -> None:
        """Launch on `operands`, given in the order of the signature or by name. Each output counts as written, as with
        torch's own ops.

        Args:
            stream: None for torch's current stream on the operands' device, or any `Stream`; the operands are then
                recorded on it.

        Raises:
            ContractError: an operand is refused; names it. Nothing was launched.
            UnsupportedError: the op is compiled for an architecture that the operands' device does not run.
            RuntimeError: the op is not compiled.

        Examples:
            >>> import torch
            >>> from cuteforge import MergeState
            >>> o, lse = torch.randn(8, 4, 64, device="cuda"), torch.zeros(4, 8, device="cuda")
            >>> out, new_lse = torch.empty_like(o), torch.empty_like(lse)
            >>> op = MergeState(o, lse, o, lse, out, new_lse).compile()
            >>> op.execute(o, lse, o_b=o, lse_b=lse, out=out, lse=new_lse)
            >>> torch.testing.assert_close(out, o)
        """
        self._launch(self._ordered(operands, named), stream)

    def bind(self, *operands: torch.Tensor, stream: Stream | None = None, **named: torch.Tensor) -> Callable[[], None]:
        """Validate once, and return a function that launches on these very buffers: for decode loops and graph capture.

        The function keeps the operands alive and validates nothing. It launches on `stream`, or on the stream that is
        torch's current one when it is called. Arguments and errors as in `execute`.

        Examples:
            >>> import torch
            >>> from cuteforge import MergeState
            >>> o, lse = torch.randn(8, 4, 64, device="cuda"), torch.zeros(4, 8, device="cuda")
            >>> out, new_lse = torch.empty_like(o), torch.empty_like(lse)
            >>> launch = MergeState(o, lse, o, lse, out, new_lse).compile().bind(o, lse, o, lse, out, new_lse)
            >>> _ = o.fill_(2.0)
            >>> launch()
            >>> torch.testing.assert_close(out, o)
        """
        return self._bind(self._ordered(operands, named), stream)

    def _bind(self, operands: tuple, stream: Any = None, call_scalars: tuple = ()) -> Callable[[], None]:
        env.require_kernels()
        compiled = self._compiled or self._load_again(operands)
        self._explain_unreadable(operands)
        self._check_operands(operands)
        self.check_call(operands)
        scalars = self._prepare_device(compiled, operands)
        if self._is_empty(operands):
            return _launch_nothing
        if env.check() and not is_capturing():
            self._check_contents(dict(zip(self.signature.names, operands)))
        arranged = self._arranged(operands)
        bound = bound_launch(compiled.kernel, arranged, scalars + call_scalars, stream, self._written(operands))
        if stream is not None:
            # Once is enough: what counts is the stream's work at the time the memory is freed.
            record_streams(operands, stream, operands[0].get_device())
        return bound

    def __call__(self, *operands: torch.Tensor, **named: Any) -> None:
        """Compile if needed, then `execute`.

        Examples:
            >>> import torch
            >>> from cuteforge import MergeState
            >>> o, lse = torch.randn(8, 4, 64, device="cuda"), torch.zeros(4, 8, device="cuda")
            >>> out, new_lse = torch.empty_like(o), torch.empty_like(lse)
            >>> MergeState(o, lse, o, lse, out, new_lse)(o, lse, o, lse, out, new_lse)
            >>> torch.testing.assert_close(out, o)
        """
        if self._compiled is None:
            self._compile_for(self._arch_name, _device_index((*operands, *named.values())))
        return self.execute(*operands, **named)

    def check_call(self, operands: tuple[Any, ...]) -> None:
        """Check real operands against the whole signature, alignment and overlap included, without launching anything.

        Args:
            operands: all of the signature, in its order.

        Raises:
            ContractError, UnsupportedError: as `execute` would; names the operand.

        Examples:
            >>> import torch
            >>> from cuteforge import MergeState
            >>> o, lse = torch.randn(8, 4, 64, device="cuda"), torch.zeros(4, 8, device="cuda")
            >>> out, new_lse = torch.empty_like(o), torch.empty_like(lse)
            >>> op = MergeState(o, lse, o, lse, out, new_lse)
            >>> op.check_call((o, lse, o, lse, out, lse))
            Traceback (most recent call last):
            cuteforge.errors.ContractError: lse: wanted memory of its own for an output, got memory shared with lse_b
        """
        self._check_kinds(operands)
        tensors = dict(zip(self.signature.names, operands, strict=True))
        specs = {name: TensorSpec.of(tensor, name) for name, tensor in tensors.items()}
        self._check_compiled_dtypes(specs)
        dims = self.signature.solve(specs, self._known())
        self._check_relations(dims)
        if fixed := self._compiled_extents(dims):
            dims = self.signature.solve(specs, {**self._known(), **fixed})
        self.signature.check_layouts(specs, dims)
        self.signature.bind_pointers(tensors, dims)

    def check_given(self, inputs: tuple[Any, ...]) -> None:
        """Check what the inputs of a wrapper hold, before they are converted: indices may still be int64. Waits for the
        GPU.

        Args:
            inputs: all operands but the outputs, in the order of the signature. The op's samples are copies of them.

        Raises:
            ContractError, UnsupportedError: as `check_support`.
            ContractError: an index is wrong; names the operand and the place in it.

        Examples:
            >>> import torch
            >>> from cuteforge import RotaryEmbedding, rotary_table
            >>> x, (cos, sin) = torch.randn(2, 4, 128, device="cuda"), rotary_table(1024, 128, device="cuda")
            >>> positions = torch.tensor([3, 5000], device="cuda")
            >>> op = RotaryEmbedding(x, (cos, sin), x, positions)
            >>> op.check_given((x, cos, sin, positions))
            Traceback (most recent call last):
            cuteforge.errors.ContractError: positions: wanted values in [0, 1024), got 5000 at index 1
        """
        self.check_support()
        names = (row.name for row in self.signature.operands if row.role in ("in", "update"))
        self._check_contents(dict(zip(names, inputs, strict=True)))

    # The launch path. One call into C++ tells operands like earlier ones; the compiled entry checks extents, alignment
    # and devices of all. Every line counts: a look at a tensor takes 0.04 us, on the host of an H200 0.1.

    def _launch(self, operands: tuple, stream: Any = None, call_scalars: tuple = ()) -> None:
        """Launch on `operands`, all of `signature` in its order; see `execute`.

        Args:
            call_scalars: run-time scalars of this call, which follow those of the op.
        """
        compiled = self._compiled or self._load_again(operands)
        is_plain = stream is None and env.launch_is_plain()
        try:
            if is_plain:
                for serve in compiled.replays.serves:
                    if serve(operands, None, call_scalars) is not None:
                        return
            if is_plain or compiled.replays.find(operands) is None:
                self._look_at(compiled, operands)
                if self._may_be_empty and self._is_empty(operands):
                    return self.check_call(operands)
            self._launch_as_asked(compiled, operands, stream, call_scalars)
        except (ContractError, UnsupportedError):
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain_unreadable(operands)
            self._explain(error, operands)
            raise

    def _look_at(self, compiled: _Compiled, operands: tuple) -> None:
        """Check operands that are like none before, as far as the entry does not; remember them if it is time."""
        self._check_operands(operands)
        grad_enabled = _grad_enabled()
        for tensor in operands:
            if type(tensor) is not _Tensor or (grad_enabled and tensor.requires_grad):
                self._check_kinds(operands)
                break
        device = operands[0].get_device()
        if device not in compiled.scalars:
            self._prepare_device(compiled, operands)
        for i in self._stepped:
            x = operands[i]
            if not x.is_contiguous():
                self.signature.operands[i].check_steps(x.shape, x.stride(), x.itemsize)
        if compiled.replays.is_due() and not self._is_empty(operands):
            names = self.signature.names
            variation = Variation(varying=self._varying, agree=self._agree, agreeing=self._agreeing)
            written = self._written(names)
            recipe = Recipe(names, scalars=None, written=written, returned=(), variation=variation)
            compiled.replays.add(operands, Replay(self._launcher(device), recipe))

    def _launch_as_asked(self, compiled: _Compiled, operands: tuple, stream: Any, call_scalars: tuple) -> None:
        """Launch on a stream that was asked for, with what environment variables ask for."""
        if not env.launch_is_plain():
            self._check_on_request(operands)
        device = operands[0].get_device()
        handle = current_handle(device) if stream is None else stream_handle(stream, device)
        scalars = compiled.scalars[device]
        entry_of(compiled.kernel)(*self._arranged(operands), *scalars, *call_scalars, handle)
        count_writes(self._written(operands))
        if stream is not None:
            record_streams(operands, stream, device)

    def _launcher(self, device_index: int) -> Launcher:
        """How the compiled op is launched on a GPU on which it has been launched before."""
        compiled, names = self._compiled, self._entry_operands or self.signature.names
        scalars = compiled.scalars[device_index]
        return Launcher(compiled.kernel.entry, names, self._as_bytes, scalars, device_index, current_handle)

    def _arranged(self, operands: tuple) -> tuple:
        """The operands as the compiled entry takes them."""
        if self._entry_operands is None:
            return operands
        named = dict(zip(self.signature.names, operands))
        named |= {name: named[name].view(torch.uint8) for name in self._as_bytes}
        return tuple(map(named.get, self._entry_operands))

    def _explain(self, error: Exception, operands: tuple) -> None:
        """Raise the error that names what a compiled entry refused; return when `error` says it best."""
        self.check_call(operands)
        named = translate_error(error)
        if named is not error:
            raise named from error

    def _explain_unreadable(self, operands: tuple) -> None:
        """Raise the error that names an operand which torch does not tell the shape of."""
        if any(getattr(x, "is_nested", False) for x in operands):
            self.check_call(operands)

    def _check_on_request(self, operands: tuple) -> None:
        """The checks that environment variables turn on, and the refusal where one switches the kernels off."""
        env.require_kernels()
        # A capturing stream cannot be synchronized with, so contents are out of reach then.
        checks_contents = env.check() and not is_capturing()
        if checks_contents or not env.fast_launch():
            self.check_call(operands)
        if checks_contents:
            self._check_contents(dict(zip(self.signature.names, operands)))

    def _check_kinds(self, operands: tuple) -> None:
        """Refuse what is no plain tensor with memory, and what autograd would have to follow."""
        grad_enabled = _grad_enabled()
        for name, x in zip(self.signature.names, operands, strict=True):
            if type(x) in _PLAIN_TYPES and not x.is_meta and not (grad_enabled and x.requires_grad):
                continue
            if not isinstance(x, _Tensor):
                raise ContractError(f"{name}: wanted a torch.Tensor, got {kind_of(x)}")
            # A subclass with a dispatch of its own (fake, distributed, quantized) has no memory to hand over.
            if type(x).__torch_dispatch__ is not _Tensor.__torch_dispatch__:
                raise ContractError(f"{name}: wanted a plain tensor with device memory, got a {type(x).__name__}")
            if x.is_meta:
                raise ContractError(f"{name}: wanted a tensor with device memory, got a meta tensor")
            if x.requires_grad and grad_enabled:
                raise ContractError(
                    f"{name}: wanted a tensor that does not require grad, got requires_grad=True; "
                    f"{type(self).__name__} records no graph: call it under torch.no_grad() or use the differentiable "
                    "function of this op"
                )

    def _prepare_device(self, compiled: _Compiled, operands: tuple) -> tuple[int, ...]:
        """First launch on a device: refuse one that cannot run the code, and find its scalars."""
        device = operands[0].get_device()
        if device < 0:
            self.check_call(operands)
        capability = torch.cuda.get_device_capability(device)
        if not runs_on(compiled.arch.name, capability):
            raise UnsupportedError(
                f"{type(self).__name__} is compiled for {compiled.arch.name}, "
                f"which cuda:{device} of compute capability {capability[0]}.{capability[1]} does not run"
            )
        scalars = self._scalars(resolve_arch(compiled.arch.name, device))
        compiled.scalars[device] = scalars
        return scalars

    # Compiling.

    def _sample_device(self) -> int | None:
        return next((s.device_index for s in self.samples.values() if s.device_index is not None), None)

    def _compile_for(self, arch_name: str | None, device_index: int | None) -> _Compiled:
        compiled = self._compiled
        if compiled is not None and arch_name in (None, compiled.arch.name):
            return compiled
        dims = self.dims
        arch = resolve_arch(arch_name, device_index)
        compiled = _Compiled(load_kernel(self._kernel_key(dims, arch)), arch)
        self._compiled, self._was_compiled, self._arch_name = compiled, True, arch_name
        return compiled

    def _load_again(self, operands: tuple) -> _Compiled:
        """Compile a copy of a compiled op for the operands' device."""
        if not self._was_compiled:
            raise RuntimeError(f"{type(self).__name__} is not compiled: call compile() first")
        return self._compile_for(self._arch_name, _device_index(operands))

    def _check_compiled_dtypes(self, specs: Mapping[str, TensorSpec]) -> None:
        for name, spec in specs.items():
            if spec.dtype != self.samples[name].dtype:
                wanted = f"dtype {self.samples[name].dtype} (that of the sample)"
                raise ContractError(f"{name}: wanted {wanted}, got {spec.dtype}")

    def _compiled_extents(self, dims: Dims) -> Dims:
        """The samples' value of every symbol that differs now and was compiled in: it changes the compile key."""
        if self._compiled is None:
            return {}
        arch, samples = self._compiled.arch, self.dims
        key = self._kernel_key(samples, arch)
        changed = [name for name, value in samples.items() if dims[name] != value]
        return {n: samples[n] for n in changed if self._kernel_key({**samples, n: dims[n]}, arch) != key}

    def _ordered(self, operands: tuple, named: Mapping[str, Any]) -> tuple:
        """Positional and named operands in signature order."""
        names = self.signature.names
        if not named and len(operands) == len(names):
            return operands
        positional = dict(zip(names, operands))
        misplaced = [name for name in named if name not in names or name in positional]
        missing = [name for name in names if name not in positional and name not in named]
        if len(operands) > len(names) or misplaced or missing:
            problem = f"missing {missing}, unknown or repeated {misplaced}, {len(operands)} positional"
            raise TypeError(f"{type(self).__name__} takes the operands {', '.join(names)}: {problem}")
        given = {**positional, **named}
        return tuple(given[name] for name in names)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}


def _pick_written(signature: Signature) -> Callable[[tuple], tuple]:
    """A function from the operands to those a launch writes, scratch memory aside. It can be copied and pickled."""
    indices = [i for i, row in enumerate(signature.operands) if row.role in ("out", "update")]
    return itemgetter(slice(indices[0], indices[0] + 1)) if len(indices) == 1 else itemgetter(*indices)


def _device_index(values: Iterable[Any]) -> int | None:
    """The GPU of the first CUDA tensor."""
    return next((x.get_device() for x in values if isinstance(x, _Tensor) and x.is_cuda), None)


def _launch_nothing() -> None:
    """The bound launch of operands that leave nothing to do."""

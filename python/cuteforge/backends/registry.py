"""The attention backends by name, and how one is asked for."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cuteforge.backends.cuda import CudaBackend
from cuteforge.backends.flash import FlashAttnBackend
from cuteforge.backends.interface import AttentionBackend
from cuteforge.backends.selection import ARGUMENT, CONTEXT, ENVIRONMENT, PRIORITY, Wish
from cuteforge.backends.torch_native import TorchNativeBackend
from cuteforge.errors import ContractError
from cuteforge.runtime import env

_Backend = TypeVar("_Backend", bound="AttentionBackend | type[AttentionBackend]")


class ATTN_BACKEND(enum.Enum):
    """The library's own attention backends. The value of a member is the backend's name.

    Examples:
        >>> import torch
        >>> from cuteforge import ATTN_BACKEND, attention
        >>> [backend.value for backend in ATTN_BACKEND]
        ['cuda', 'flash', 'torch_native']
        >>> q = k = v = torch.randn(1, 16, 8, 64)
        >>> attention(q, k, v, backend=ATTN_BACKEND.TORCH_NATIVE).shape
        torch.Size([1, 16, 8, 64])
    """

    CUDA = CudaBackend.name
    FLASH = FlashAttnBackend.name
    TORCH_NATIVE = TorchNativeBackend.name


# The ways to ask for a backend.
Backend = ATTN_BACKEND | str | AttentionBackend | type[AttentionBackend]

# Largest priority first. Replaced, never changed, so that readers need no lock.
_backends: dict[str, AttentionBackend] = {}
_lock = threading.Lock()
# Called when a backend was registered: what was decided before may be decided otherwise.
_listeners: list[Callable[[], None]] = []
# What `attn_backend` asks for. A thread starts without, an async task with what its creator has.
_context: contextvars.ContextVar[AttentionBackend | None] = contextvars.ContextVar("attn_backend", default=None)


def register_backend(backend: _Backend) -> _Backend:
    """Make a backend known by its name. With a priority of 0 or more it also takes part in every choice. Usable as a
    class decorator.

    Args:
        backend: an `AttentionBackend`, or its class, which is called without arguments. A later one of the same name
            replaces it.

    Returns:
        `backend`.

    Raises:
        ContractError: it is no backend, or its name is no text.

    Examples:
        >>> import torch
        >>> from cuteforge import TorchNativeBackend, attention, register_backend
        >>> @register_backend
        ... class Counted(TorchNativeBackend):
        ...     name, priority, calls = "counted", -1, 0  # below 0: only where it is asked for
        ...     def forward(self, *operands, **options):
        ...         Counted.calls += 1
        ...         return super().forward(*operands, **options)
        >>> q = k = v = torch.randn(1, 16, 8, 64)
        >>> out = attention(q, k, v, backend="counted")
        >>> Counted.calls
        1
    """
    global _backends
    instance = _instance_of(backend, "backend") if _is_backend_class(backend) else backend
    if not isinstance(instance, AttentionBackend):
        raise ContractError(f"backend: wanted an AttentionBackend or a class of them, got {backend!r}")
    _check_name(instance, "backend")
    with _lock:
        known = {**_backends, instance.name: instance}
        _backends = dict(sorted(known.items(), key=lambda item: -item[1].priority))
    for listener in _listeners:
        listener()
    return backend


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` after each registration."""
    _listeners.append(listener)


def backends() -> dict[str, AttentionBackend]:
    """The registered backends by name, largest priority first."""
    return _backends


def resolve(backend: Any, argument: str = "backend") -> AttentionBackend:
    """The backend that a member of ATTN_BACKEND, a name, a class or an instance means.

    A class is the registered instance of it, or a new one.

    Raises:
        ContractError: none of these, or a name that is not registered; names `argument`.
    """
    if isinstance(backend, AttentionBackend):
        _check_name(backend, argument)
        return backend
    if _is_backend_class(backend):
        known = next((known for known in _backends.values() if type(known) is backend), None)
        return known or _instance_of(backend, argument)
    name = backend.value if isinstance(backend, ATTN_BACKEND) else backend
    if name not in _backends if isinstance(name, str) else True:
        wanted = "a member of ATTN_BACKEND, an AttentionBackend, or one of " + ", ".join(_backends)
        raise ContractError(f"{argument}: wanted {wanted}, got {backend!r}")
    return _backends[name]


def _is_backend_class(backend: Any) -> bool:
    return isinstance(backend, type) and issubclass(backend, AttentionBackend)


def _instance_of(backend: type[AttentionBackend], argument: str) -> AttentionBackend:
    """A new instance, which takes no arguments."""
    try:
        instance = backend()
    except TypeError as error:  # abstract, or wants arguments
        wanted = "an AttentionBackend, or a class of them that takes no arguments"
        raise ContractError(f"{argument}: wanted {wanted}, got {backend.__name__}: {error}") from error
    _check_name(instance, argument)
    return instance


def _check_name(backend: AttentionBackend, argument: str) -> None:
    if not isinstance(getattr(backend, "name", None), str):
        raise ContractError(f"{argument}: wanted a name of type str, got {getattr(backend, 'name', None)!r}")


@contextlib.contextmanager
def attn_backend(backend: Backend) -> Iterator[AttentionBackend]:
    """Inside this context `attention` runs on this backend or raises, in this thread and in the async tasks that start
    here.

    Args:
        backend: a member of ATTN_BACKEND, a name, an AttentionBackend or a class of them.

    Yields the backend. Contexts nest, and the argument `backend` of a call wins over them. A compiled function keeps
    the backend that was in force when it was traced.

    Raises:
        ContractError: there is no such backend.

    Examples:
        >>> import torch
        >>> from cuteforge import attention, attn_backend
        >>> q = k = v = torch.randn(1, 16, 8, 64)
        >>> with attn_backend("torch_native") as backend:
        ...     out = attention(q, k, v)
        >>> backend.name
        'torch_native'
    """
    chosen = resolve(backend)
    token = _context.set(chosen)
    try:
        yield chosen
    finally:
        _context.reset(token)


def context_backend() -> AttentionBackend | None:
    """What `attn_backend` asks for here."""
    return _context.get()


def wish_for(backend: Any) -> Wish:
    """What is wanted of a call with the argument `backend`: argument before context before environment before
    priority."""
    if backend is not None:
        return Wish(ARGUMENT, resolve(backend))
    if (chosen := _context.get()) is not None:
        return Wish(CONTEXT, chosen)
    if (name := env.backend()) is not None:
        return Wish(ENVIRONMENT, resolve(name, "CUTEFORGE_BACKEND"))
    return Wish(PRIORITY)


def wish_among(candidates: dict[str, Any], backend: Any) -> Wish:
    """As `wish_for`, for a policy function with candidates of its own. What the environment names may be none of
    them."""
    if backend is not None:
        name = backend.value if isinstance(backend, ATTN_BACKEND) else backend
        if not isinstance(name, str) or name not in candidates:
            raise ContractError(f"backend: wanted one of {', '.join(candidates)}, got {backend!r}")
        return Wish(ARGUMENT, candidates[name])
    name = env.backend()
    if name is not None and resolve(name, "CUTEFORGE_BACKEND").name in candidates:
        return Wish(ENVIRONMENT, candidates[name])
    return Wish(PRIORITY)


for _own in (CudaBackend, FlashAttnBackend, TorchNativeBackend):
    register_backend(_own)

"""A compiled kernel, and the key that names it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cuteforge.errors import ContractError


class Identity(NamedTuple):
    """A key as texts, the same in every process."""

    builder: str
    traits: str
    arch: str


@dataclass(frozen=True)
class KernelKey:
    """What was compiled in, and nothing else.

    Attributes:
        builder: "module:function"; the function takes the traits and returns a `Build`. Imported only to compile; it
            must not load kernels itself.
        traits: frozen dataclass of plain values. Its `repr` names the binary, so it must hold all of it.
        arch: compile target, e.g. "sm_90a".
    """

    builder: str
    traits: Hashable
    arch: str

    @property
    def identity(self) -> Identity:
        """The key as texts, the same in every process.

        Raises:
            ContractError: `builder` is not "module:function", or the repr of the traits contains an address.
        """
        module, colon, function = self.builder.partition(":")
        if not (module and colon and function.isidentifier()):
            raise ContractError(f'builder: wanted "module:function", got {self.builder!r}')
        traits = repr(self.traits)
        if " at 0x" in traits:
            raise ContractError(f"traits: wanted a repr made of values only, got one with an address: {traits}")
        return Identity(self.builder, traits, self.arch)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        key: what it was compiled for.
        entry: positional function `entry(*tensors, *scalars, raw_stream)`, a `tvm_ffi.Function`; thread-safe. Its
            device code is loaded at the first call and never unloaded. Calling one whose `key.arch` does not run on
            the GPU is an error of the caller.
        origin: where this `load_kernel` found it.
    """

    key: KernelKey
    entry: Callable[..., None]
    origin: Literal["memory", "disk", "compiled"]

"""The compiled entries of the compressor: what they are compiled with."""

from typing import Any

from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from cuteforge.device.fake_operands import FakeOperands
from cuteforge.families.csa.compressor.config import Traits
from cuteforge.families.csa.compressor.operands import entry_names, signature_of
from cuteforge.runtime.build import Build


def build_entry(kernel: Any, op: str) -> Build:
    """A kernel of an op, for `runtime.compile_cache`. After the tensors its entry takes the CTAs that fill the GPU
    once, and a stream."""
    return Build(kernel, (*fake_operands(op, kernel.traits), Int32(1), make_fake_stream()), op)


def fake_operands(op: str, traits: Traits) -> tuple:
    """All tensors of the entry of an op in its order, None for those that the op does not have."""
    problem = traits.problem
    fake = FakeOperands({"d": problem.head_dim, "ratio": problem.ratio, "coff": problem.coff})
    given = tuple(name for name in entry_names(op) if traits.takes(name))
    tensors = {row.name: fake.row(row, {"kv": problem.dtype}) for row in signature_of(op, given).operands}
    return tuple(map(tensors.get, entry_names(op)))

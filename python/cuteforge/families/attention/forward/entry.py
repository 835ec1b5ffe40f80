"""The compiled entry of the attention kernels: one list of operands and scalars for all of them."""

import cuda.bindings.driver as cuda
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.device.dtypes import DTYPES
from cuteforge.families.attention.forward.fake_operands import operands, scalars
from cuteforge.families.attention.operands import DEVICE_NAMES
from cuteforge.families.attention.work.counts import Counts, Operands
from cuteforge.families.attention.work.limits import Limits
from cuteforge.families.attention.work.traits import WorkTraits
from cuteforge.runtime.build import Build


class Entry:
    """Base of the kernels for one compile key; calling it launches."""

    def __init__(self, traits: WorkTraits):
        self.traits = traits
        self.dtype = DTYPES[traits.problem.dtype]

    @cute.jit
    def __call__(self, *arguments):
        """Launch the kernels.

        Args:
            arguments: the tensors of `operands.entry_rows()`, None for those that the op does not have; then those of
                `Limits`; how many keys before and after its own a query sees; the cap and the scale of the scores; the
                stream.
        """
        tensors, numbers = arguments[: len(DEVICE_NAMES)], arguments[len(DEVICE_NAMES) :]
        *limits, left, right, softcap, scale, stream = numbers
        given = (*tensors, left, right, softcap)
        counts = Counts(self.traits, Operands(*given))
        if counts.work_tiles > 0:
            self.launch(given, counts, Limits(*limits), scale, stream)

    def launch(self, given: tuple, counts: Counts, limits: Limits, scale: Float32, stream: cuda.CUstream) -> None:
        """Launch on what `Operands` takes, with at least one work tile."""
        raise NotImplementedError


def build_entry(entry: Entry, name: str) -> Build:
    """The kernel of an entry, for `runtime.compile_cache`."""
    traits = entry.traits
    args = (*operands(traits.problem, traits.splits), *scalars(traits.problem), make_fake_stream())
    return Build(entry.__call__, args, name)

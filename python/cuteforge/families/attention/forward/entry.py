"""What the compiled entries of the attention kernels take: one list of operands and scalars for all of them."""

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.device.dtypes import DTYPES
from cuteforge.families.attention.forward.config import Traits
from cuteforge.families.attention.forward.fake_operands import operands, scalars
from cuteforge.families.attention.work.counts import Counts, Operands
from cuteforge.runtime.compile_cache import Build


class Entry:
    """Base of the kernels for one `Traits`; calling it launches."""

    def __init__(self, traits: Traits):
        self.traits = traits
        self.dtype = DTYPES[traits.problem.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        mMask: cute.Tensor | None,
        mLengths: cute.Tensor | None,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mNewK: cute.Tensor | None,
        mNewV: cute.Tensor | None,
        mSinks: cute.Tensor | None,
        mWorkspace: cute.Tensor | None,
        max_ctas: Int32,
        most_splits: Int32,
        left: Int32 | None,
        right: Int32 | None,
        softcap: Float32 | None,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Args: CTAs that fill the GPU once; the most of them that may share a unit's keys, 0 for any; how many keys before and after its own a query
        sees; the cap and the scale of the scores."""
        tensors = (mQ, mK, mV, mOut, mLse, mMask, mLengths, mCuQ, mCuK, mTable, mRows, mNewK, mNewV, mSinks, mWorkspace)
        given = (*tensors, left, right, softcap)
        counts = Counts(self.traits, Operands(*given))
        if counts.work_tiles > 0:
            self.launch(given, counts, max_ctas, most_splits, scale, stream)

    def launch(self, given: tuple, counts: Counts, max_ctas, most_splits, scale, stream) -> None:
        """Launch on what `Operands` takes, with at least one unit of work."""
        raise NotImplementedError


def build_entry(entry: Entry, name: str) -> Build:
    """The kernel of an entry, for `runtime.compile_cache`."""
    traits = entry.traits
    args = (*operands(traits.problem, traits.splits), *scalars(traits.problem), make_fake_stream())
    return Build(entry.__call__, args, name)

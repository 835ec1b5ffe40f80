"""What the compiled entries of the attention kernels take: one list of operands and scalars for all of them."""

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.device.dtypes import DTYPES
from cuteforge.gqa.config import Traits
from cuteforge.gqa.fake_operands import operands
from cuteforge.gqa.work import Counts, Operands
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
        mWorkspace: cute.Tensor | None,
        max_ctas: Int32,
        most_splits: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Args: CTAs that fill the GPU once; the most of them that may share a unit's keys, 0 for any; the scale of the scores."""
        tensors = (mQ, mK, mV, mOut, mLse, mMask, mLengths, mCuQ, mCuK, mTable, mRows, mNewK, mNewV, mWorkspace)
        counts = Counts(self.traits, Operands(*tensors))
        if counts.units > 0:
            self.launch(tensors, counts, max_ctas, most_splits, scale, stream)

    def launch(self, tensors: tuple, counts: Counts, max_ctas, most_splits, scale, stream) -> None:
        """Launch on operands with at least one unit of work."""
        raise NotImplementedError


def build_entry(entry: Entry, name: str) -> Build:
    """The kernel of an entry, for `runtime.compile_cache`."""
    scalars = (Int32(0), Int32(0), Float32(0.0))
    args = (*operands(entry.traits.problem, entry.traits.splits), *scalars, make_fake_stream())
    return Build(entry.__call__, args, name)

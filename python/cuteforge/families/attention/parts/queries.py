"""A warp's query rows as left operands of the product with the keys: in registers, or in shared memory where they would
not fit.

They carry the sign of the scale, and are 0 for a scale of 0, so that scores are taken times a positive factor.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from cuteforge.device.copy import gmem_run, smem_words
from cuteforge.device.math import select
from cuteforge.device.mma_sm80 import OperandLanes, in_register, ldmatrix_x4
from cuteforge.device.swizzled_rows import CHUNK_BYTES
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.work.traits import ROW_BLOCK
from cuteforge.runtime.arch import WARP

SIGN_BITS = 0x80008000


class RegisterQueries(TraceConstant):
    """Operands of all steps, loaded once."""

    def __init__(self, work, rows: list, scale, lane):
        self.blocks = [[_load_halves(work, row, scale, lane) for row in halves] for halves in rows]

    def operands(self, step: int) -> list:
        """The left operand of each row block for 16 columns of the head dim."""
        return [(a[2 * step], b[2 * step], a[2 * step + 1], b[2 * step + 1]) for a, b in self.blocks]


@cute.jit
def _load_halves(work, row: Int32, scale, lane: Int32):
    """Two columns of each chunk of a row."""
    traits = work.traits
    chunks = traits.ring.rows.first.filled_chunks
    rQ = cute.make_rmem_tensor(2 * traits.k_steps, Uint32)
    for chunk in cutlass.range_constexpr(2 * traits.k_steps):
        rQ[chunk] = in_register(0)
    if row < work.num_rows and scale != 0.0:
        address = work.query_address(work.ops.mQ, row) + Int64(lane % 4 * 4)
        for chunk in cutlass.range_constexpr(chunks):
            rQ[chunk] = gmem_run(Uint32, address + chunk * CHUNK_BYTES, 1)[0] ^ _sign(scale)
    return [rQ[i] for i in range(2 * traits.k_steps)]


class SharedQueries(TraceConstant):
    """Rows in shared memory, read again for every tile of keys. Only the warp's own lanes touch them."""

    def __init__(self, work, first_row, scale, address, lane):
        self.traits, self.work = work.traits, work
        self.rows = self.traits.ring.rows.first
        self.address = address
        self._load(first_row, scale, lane)
        self.lane_address = address + OperandLanes(lane, self.rows).rows_summed

    @cute.jit
    def _load(self, first_row: Int32, scale, lane: Int32):
        chunks = 2 * self.traits.k_steps
        for i in cutlass.range(lane, ROW_BLOCK * self.traits.tile.m_blocks * chunks, WARP, unroll=4):
            row, chunk = i // chunks, i % chunks
            words = cute.make_rmem_tensor(4, Uint32)
            words.fill(0)
            is_column = chunk < self.rows.filled_chunks
            if first_row + row < self.work.num_rows and scale != 0.0 and is_column:
                address = self.work.query_address(self.work.ops.mQ, first_row + row)
                loaded = gmem_run(Uint32, address + Int64(chunk * CHUNK_BYTES), 4).load()
                for word in cutlass.range_constexpr(4):
                    words[word] = loaded[word] ^ _sign(scale)
            smem_words(self.address + self.rows.offset(row, chunk), 4).store(words.load())
        cute.arch.sync_warp()

    def operands(self, step: int) -> list:
        """The left operand of each row block for 16 columns of the head dim."""
        address = self.rows.along(self.lane_address, 2 * step)
        block_bytes = ROW_BLOCK * self.rows.pitch_bytes
        return [ldmatrix_x4(address + block * block_bytes) for block in range(self.traits.tile.m_blocks)]


def load_queries(work, rows: list, first_row, scale, address, lane):
    """The query rows of a warp.

    Args:
        rows: the lane's packed rows by block and half; first_row: the warp's first.
        address: of the warp's part of shared memory, if it has one.
    """
    if work.traits.tile.queries_in_smem:
        return SharedQueries(work, first_row, scale, address, lane)
    return RegisterQueries(work, rows, scale, lane)


def _sign(scale):
    return select(scale < 0.0, Uint32(SIGN_BITS), Uint32(0))

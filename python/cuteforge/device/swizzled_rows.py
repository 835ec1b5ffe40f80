"""How rows lie in shared memory for `ldmatrix`: without pads, the 16-byte chunks of a row exchanged by the row's
number.

The eight rows of an 8x8 matrix then lie in different banks, and what a warp copies of a line of global memory stays
within one line of shared memory. Rows with pads did not: a line cut in two is asked for twice, and decode sent 2.6
requests and 1.5 sectors to L2 for each it needed (H200, ncu).
Pure Python: no cutlass; rows, chunks and addresses may be numbers of either.
"""

import math
from dataclasses import dataclass

CHUNK_BYTES = 16
OPERAND_BYTES = 32  # of a row, in one matrix instruction: 16 columns of 2 bytes
LINE_CHUNKS = 8  # of 128 bytes
BANKED_ROWS = 8  # rows of a matrix that are read at once
ALIGNMENT = CHUNK_BYTES * BANKED_ROWS  # of the first row's address, for `down` and `along`


@dataclass(frozen=True)
class SwizzledRows:
    """Rows of `row_bytes` bytes, a multiple of 16, rounded up to whole operands."""

    row_bytes: int

    @property
    def filled_chunks(self) -> int:
        """Chunks that hold data; a last one may be there only to fill an operand."""
        return self.row_bytes // CHUNK_BYTES

    @property
    def chunks(self) -> int:
        return -(-self.row_bytes // OPERAND_BYTES) * (OPERAND_BYTES // CHUNK_BYTES)

    @property
    def pitch_bytes(self) -> int:
        return self.chunks * CHUNK_BYTES

    @property
    def exchanged(self) -> int:
        """Adjacent chunks that are exchanged among each other: so many that `8 / exchanged` rows in turn begin in
        different banks by themselves."""
        return math.gcd(self.chunks, BANKED_ROWS)

    def offset(self, row, chunk):
        """Byte offset of a chunk of a row."""
        return row * self.pitch_bytes + (chunk ^ self._exchange(row)) * CHUNK_BYTES

    def down(self, address, rows):
        """From the address of a chunk to that `rows` rows further, where `rows` has no bit of the first row's
        number."""
        return (address ^ (self._exchange(rows) * CHUNK_BYTES)) + rows * self.pitch_bytes

    def along(self, address, chunks: int):
        """From the address of a chunk to that `chunks` further, where `chunks` has no bit of the first chunk's
        number."""
        nearby = chunks % self.exchanged
        return (address ^ (nearby * CHUNK_BYTES)) + (chunks - nearby) * CHUNK_BYTES

    def _exchange(self, row):
        """What the numbers of a row's chunks are exchanged by."""
        return (row >> (BANKED_ROWS // self.exchanged).bit_length() - 1) & (self.exchanged - 1)


def lanes_of_row(*row_bytes: int) -> int:
    """Lanes that copy one row of each width together: a line at a time, so that an address is found once for all lines
    of a row; half a line where that leaves none of them idle."""
    half = LINE_CHUNKS // 2
    return half if math.gcd(*(x // CHUNK_BYTES for x in row_bytes), LINE_CHUNKS) == half else LINE_CHUNKS

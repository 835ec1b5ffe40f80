"""What a rotary kernel is compiled for, and how its work is cut. Pure Python: no torch, no cutlass.

A pair of columns is rotated by the angle of its token and its place; all heads of a token share the angles. So a thread keeps the cosines and
sines of a few adjacent pairs in registers and goes through several heads of one token.
"""

from dataclasses import dataclass

from cuteforge.tensor_spec import ITEMSIZE

MAX_ACCESS_BYTES = 16
NUM_THREADS = 256
HEADS_PER_THREAD = 8
HEADS_IN_FLIGHT = 4  # loaded before the first is rotated: with two 16-byte accesses each, 128 bytes a thread
MAX_HEAD_DIM = 1024  # a CTA has a thread for each access of a head


@dataclass(frozen=True)
class Problem:
    """Facts of a call that fix the arithmetic."""

    dtype: str
    head_dim: int
    rotary_dim: int
    interleaved: bool

    @property
    def access_elems(self) -> int:
        """Elements of the widest access that divides a head and the columns it must not straddle: the alignment that operands need."""
        unbroken = self.rotary_dim if self.interleaved else self.rotary_dim // 2
        elems = MAX_ACCESS_BYTES // ITEMSIZE[self.dtype]
        while self.head_dim % elems or unbroken % elems:
            elems //= 2
        return elems

    @property
    def align_bytes(self) -> int:
        return self.access_elems * ITEMSIZE[self.dtype]

    @property
    def pairs_per_unit(self) -> int:
        """Adjacent pairs that a thread rotates in each head."""
        return max(self.access_elems // 2, 1) if self.interleaved else self.access_elems

    @property
    def table_align_bytes(self) -> int:
        """Alignment of the rows of cos and of sin."""
        return min(MAX_ACCESS_BYTES, 4 * self.pairs_per_unit)


@dataclass(frozen=True)
class Traits:
    """The compile key: everything that the trace reads."""

    problem: Problem
    rank: int
    has_keys: bool
    positions: str | None  # dtype; None when the table has a row for each token, cos and sin next to each other

    @property
    def rotary_units(self) -> int:
        """Threads that rotate one head."""
        return self.problem.rotary_dim // 2 // self.problem.pairs_per_unit

    @property
    def copy_units(self) -> int:
        """Threads that copy the columns past the rotated ones of one head."""
        return (self.problem.head_dim - self.problem.rotary_dim) // self.problem.access_elems

    @property
    def units(self) -> int:
        return self.rotary_units + self.copy_units

    @property
    def tokens_per_cta(self) -> int:
        return max(NUM_THREADS // self.units, 1)

    @property
    def num_threads(self) -> int:
        """Threads of a CTA, whole warps."""
        return -(-self.units * self.tokens_per_cta // 32) * 32

    @property
    def ctas_per_sm(self) -> int:
        """CTAs whose registers an SM holds: 80 a thread for 96 KB of loads in flight, more where columns are copied as well."""
        if self.num_threads > 256:
            return 1
        return 2 if self.copy_units else 3

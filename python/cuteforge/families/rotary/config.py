"""What a rotary kernel is compiled for, and how its work is cut. Pure Python: no torch, no cutlass.

A pair of columns is rotated by an angle that depends on its token and on the number of the pair; all heads of a token
share the angles. So a thread keeps the cosines and sines of a few adjacent pairs in registers, and rotates these pairs
of one or more heads of one token: a bundle. A task is a token and one of its bundles.
"""

from dataclasses import dataclass
from typing import Any

from cuteforge.op.tensor_spec import ITEMSIZE

MAX_ACCESS_BYTES = 16
MAX_HEAD_DIM = 1024  # a CTA has a thread for each access of a head


@dataclass(frozen=True)
class Tile:
    """How the work is cut; no choice changes a bit of the result.

    A thread reads all that it rotates before it writes anything: `accesses_per_thread` are in flight at once, and a
    thread has as many heads as they make.
    """

    # us for 131072 tokens of 32 + 8 heads on an H200, 64 and 128 threads: 641.5 and 640.1 of halves, 638.4 and 637.3 of
    # interleaved pairs; for 8192 tokens 45.6 and 44.8, 45.2 and 45.0.
    num_threads: int = 128
    # With 64 threads, 2, 4 and 8 accesses: 644, 646 and 653 of halves, 640, 641 and 651 of interleaved pairs.
    accesses_per_thread: int = 2
    threads_per_sm: int = 1024  # whose registers an SM holds at least: up to 64 each


@dataclass(frozen=True)
class Problem:
    """Facts of a call that fix the arithmetic."""

    dtype: str
    head_dim: int
    rotary_dim: int
    interleaved: bool

    @property
    def access_elems(self) -> int:
        """Elements of the widest access that divides a head and the columns it must not straddle: the alignment that
        operands need."""
        unbroken = self.rotary_dim if self.interleaved else self.rotary_dim // 2
        elems = MAX_ACCESS_BYTES // ITEMSIZE[self.dtype]
        while self.head_dim % elems or unbroken % elems:
            elems //= 2
        return elems

    @property
    def align_bytes(self) -> int:
        return self.access_elems * ITEMSIZE[self.dtype]

    @property
    def accesses_per_head(self) -> int:
        """Of one thread: a stretch of interleaved pairs is one, unless an access is narrower than a pair; split halves
        are two."""
        return 2 * self.pairs_per_thread // self.access_elems

    @property
    def pairs_per_thread(self) -> int:
        """Adjacent pairs that a thread rotates in each head."""
        return max(self.access_elems // 2, 1) if self.interleaved else self.access_elems

    @property
    def table_align_bytes(self) -> int:
        """Alignment of the rows of cos and of sin."""
        return min(MAX_ACCESS_BYTES, 4 * self.pairs_per_thread)


@dataclass(frozen=True)
class Traits:
    """The compile key: everything that the trace reads.

    Attributes:
        rank: of x.
        given: the optional operands that the op has, in the order of `operands.ROWS`.
        positions: their dtype; None when the table has a row for each token, cos and sin next to each other.
    """

    problem: Problem
    rank: int
    given: tuple[str, ...]
    positions: str | None
    tile: Tile = Tile()

    @property
    def has_keys(self) -> bool:
        """Whether keys are rotated in the same launch as queries."""
        return "k" in self.given

    @property
    def rotary_threads(self) -> int:
        """Threads that rotate one head."""
        return self.problem.rotary_dim // 2 // self.problem.pairs_per_thread

    @property
    def copy_threads(self) -> int:
        """Threads that copy the columns past the rotated ones of one head."""
        return (self.problem.head_dim - self.problem.rotary_dim) // self.problem.access_elems

    @property
    def threads_per_head(self) -> int:
        return self.rotary_threads + self.copy_threads

    @property
    def tasks_per_cta(self) -> int:
        return max(self.tile.num_threads // self.threads_per_head, 1)

    @property
    def num_threads(self) -> int:
        """Threads of a CTA, whole warps."""
        return -(-self.threads_per_head * self.tasks_per_cta // 32) * 32

    @property
    def heads_per_thread(self) -> int:
        return max(self.tile.accesses_per_thread // self.problem.accesses_per_head, 1)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs whose registers an SM holds."""
        return max(self.tile.threads_per_sm // self.num_threads, 1)

    def bundles_of(self, heads: Any) -> Any:
        """Bundles of so many heads: of an int or of a run-time number, as `grid`."""
        return (heads + (self.heads_per_thread - 1)) // self.heads_per_thread

    def grid(self, num_tokens: Any, heads: Any, key_heads: Any | None) -> tuple[Any, Any]:
        """(CTAs, bundles of a token); `key_heads` is None without keys."""
        tasks, bundles = self.tasks_per_cta, self.bundles_of(heads)
        if key_heads is not None:
            bundles += self.bundles_of(key_heads)
        return num_tokens // tasks * bundles + (num_tokens % tasks * bundles + (tasks - 1)) // tasks, bundles

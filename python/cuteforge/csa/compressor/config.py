"""What a compressor kernel is compiled for, and how its work is cut. Pure Python: no torch, no cutlass.

The window of one output row has ``coff * ratio`` entries; an entry is one token's value and score in one column. Every (token, column) is
used by at most one window, so the kernels read each input once and are bound by memory.
"""

from dataclasses import dataclass

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
WARP = 32
MAX_RATIO = 256


@dataclass(frozen=True)
class Problem:
    """Facts of a call that fix the arithmetic."""

    dtype: str
    head_dim: int
    ratio: int
    coff: int

    @property
    def window(self) -> int:
        """Entries that one output row pools."""
        return self.coff * self.ratio

    @property
    def row_elems(self) -> int:
        """Elements of one token's row of kv or score."""
        return self.coff * self.head_dim

    @property
    def vector_elems(self) -> int:
        """Elements of the widest access, at most 16 bytes, that divides a half row: what alignment the operands must have."""
        elems = 16 // ITEMSIZE[self.dtype]
        while self.head_dim % elems:
            elems //= 2
        return elems


@dataclass(frozen=True)
class Tile:
    """How a CTA works.

    A warp owns ``32 * cols_per_lane`` adjacent columns and walks over consecutive output rows. It copies the window of each row into its
    own ring of ``num_stages`` shared-memory slots. With ``split_window`` the warps of a CTA share the window of one row instead.
    """

    num_warps: int
    warps_along_cols: int
    cols_per_lane: int
    num_stages: int
    ctas_per_sm: int
    split_window: bool = False


@dataclass(frozen=True)
class Traits:
    """The compile key: everything that the trace reads."""

    problem: Problem
    tile: Tile
    backward: bool = False
    deterministic: bool = True
    dependent_launch: bool = False  # sm_90 and up: a kernel may start before the one it waits for has ended

    @property
    def slots(self) -> int:
        """Window entries that one warp handles."""
        parts = self.tile.num_warps if self.tile.split_window else 1
        return -(-self.problem.window // parts)

    @property
    def chunk_cols(self) -> int:
        """Columns that one warp handles."""
        return WARP * self.tile.cols_per_lane

    @property
    def runs_per_entry(self) -> int:
        """Copies of the widest access that make up a warp's columns of one window entry."""
        return max(self.chunk_cols // self.problem.vector_elems, 1)

    @property
    def runs_per_window(self) -> int:
        """Copies of the widest access that make up a warp's part of a window, of values or scores."""
        return self.slots * self.runs_per_entry

    @property
    def copy_rounds(self) -> int:
        """Rounds in which the lanes of a warp make those copies."""
        return -(-self.runs_per_window // WARP)

    @property
    def num_chunks(self) -> int:
        """Column chunks of a row."""
        return -(-self.problem.head_dim // self.chunk_cols)

    @property
    def stage_elems(self) -> int:
        """Elements of one slot of a warp's ring: values, scores, and for the backward pass a run of grad_out."""
        return (2 * self.slots + self.backward) * self.chunk_cols

    @property
    def ring_elems(self) -> int:
        """Elements of all rings of a CTA."""
        return self.tile.num_warps * self.tile.num_stages * self.stage_elems

    @property
    def has_spare_slots(self) -> bool:
        """Whether the last warps of a split window have slots past its end."""
        return self.tile.split_window and self.slots * self.tile.num_warps > self.problem.window

    @property
    def warps_along_cols(self) -> int:
        return 1 if self.tile.split_window else self.tile.warps_along_cols

    @property
    def warps_along_rows(self) -> int:
        """Runs of rows that a CTA works on at a time."""
        return 1 if self.tile.split_window else self.tile.num_warps // self.tile.warps_along_cols

    @property
    def chunk_groups(self) -> int:
        """CTAs that share the columns of one run of rows."""
        return -(-self.num_chunks // self.warps_along_cols)


def max_ctas(traits: Traits, arch) -> int:
    """CTAs that fill the GPU once."""
    return arch.num_sms * traits.tile.ctas_per_sm


def workspace_bytes(traits: Traits, num_ctas: int) -> int:
    """Partial sums of the gradient of ape: one for each group of CTAs, whatever the number of rows."""
    groups = max(num_ctas // traits.chunk_groups, 1)
    return groups * traits.problem.window * traits.problem.head_dim * 4


def select_tile(problem: Problem, backward: bool, arch) -> Tile:
    """The tile for a problem on a GPU."""
    if problem.ratio > 16:
        return Tile(8, 1, 2, 3, 2, True)
    return Tile(8, 1, 2, 4, 2)

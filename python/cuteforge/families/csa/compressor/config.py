"""What a compressor kernel is compiled for, and how its work is cut. Pure Python: no torch, no cutlass.

The pooled window of one output row, here just "window", has ``coff * ratio`` entries; an entry is one token's value and
score in one column. Every (token, column) is used by at most one window, so the kernels read each input once and are
bound by memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuteforge.errors import UnsupportedError
from cuteforge.op.relax import fewer, halved, relaxed
from cuteforge.op.tensor_spec import ITEMSIZE
from cuteforge.runtime.arch import WARP, Arch

MAX_RATIO = 256
MAX_EAGER_RATIO = 16  # up to here a window stays in one warp and gradients have the bits of the eager computation
SMEM_ALIGNMENT = 128


@dataclass(frozen=True)
class Problem:
    """Facts of a call that fix the arithmetic.

    Attributes:
        given: the operands of `operands.ROWS` that the op has though it could do without, in the order of the rows.
    """

    dtype: str
    head_dim: int
    ratio: int
    coff: int
    given: tuple[str, ...] = ()

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
        """Elements of the widest access, at most 16 bytes, that divides a half row: what alignment the operands must
        have."""
        elems = 16 // ITEMSIZE[self.dtype]
        while self.head_dim % elems:
            elems //= 2
        return elems

    @property
    def vector_bytes(self) -> int:
        return self.vector_elems * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Tile:
    """How a CTA works.

    A warp owns ``active_lanes * cols_per_lane`` adjacent columns and takes output rows one after another. It copies the
    window of each row into its own ring of ``num_stages`` stages in shared memory. With ``split_window`` the warps of a
    CTA share the window of one row instead.

    ``resident`` keeps ape and, backward, the sums for the whole kernel, and the weights of a window between the two
    passes over it, in registers; otherwise ape is read, the weights are computed and the sums are updated in memory
    each time. Fewer ``active_lanes`` than 32 are for windows that no ring would hold otherwise.
    """

    num_warps: int
    cols_per_lane: int
    num_stages: int
    ctas_per_sm: int
    split_window: bool = False
    resident: bool = True
    active_lanes: int = WARP


@dataclass(frozen=True)
class Traits:
    """The compile key: everything that the trace reads."""

    problem: Problem
    tile: Tile
    backward: bool = False
    deterministic: bool = True
    dependent_launch: bool = False  # sm_90 and up: a kernel may start before the one it waits for has ended

    def takes(self, name: str) -> bool:
        """Whether the op has an optional operand."""
        return self.deterministic if name == "workspace" else name in self.problem.given

    @property
    def slots(self) -> int:
        """Window entries that one warp handles. The warps of a split window each stay in one of its blocks."""
        if not self.tile.split_window:
            return self.problem.window
        return -(-self.problem.ratio // self.warps_per_block)

    @property
    def warps_per_block(self) -> int:
        """Warps that share one block of a split window."""
        return self.tile.num_warps // self.problem.coff

    @property
    def strip_cols(self) -> int:
        """Columns that one warp handles."""
        return self.tile.active_lanes * self.tile.cols_per_lane

    @property
    def runs_per_entry(self) -> int:
        """Copies of the widest access that make up a warp's columns of one window entry."""
        return max(self.strip_cols // self.problem.vector_elems, 1)

    @property
    def runs_per_window(self) -> int:
        """Copies of the widest access that make up a warp's part of a window, of values or scores."""
        return self.slots * self.runs_per_entry

    @property
    def copy_rounds(self) -> int:
        """Rounds in which the lanes of a warp make those copies."""
        return -(-self.runs_per_window // WARP)

    @property
    def num_strips(self) -> int:
        """Strips of columns of a row."""
        return -(-self.problem.head_dim // self.strip_cols)

    @property
    def stage_elems(self) -> int:
        """Elements of one stage of a warp's ring: values, scores, and for the backward pass a run of grad_out."""
        return (2 * self.slots + self.backward) * self.strip_cols

    @property
    def ring_elems(self) -> int:
        """Elements of all rings of a CTA."""
        return self.tile.num_warps * self.tile.num_stages * self.stage_elems

    @property
    def has_spare_slots(self) -> bool:
        """Whether the last warp of a block has slots past its end."""
        return self.tile.split_window and self.slots * self.warps_per_block > self.problem.ratio

    @property
    def rows_per_cta(self) -> int:
        """Rows that a CTA works on at a time."""
        return 1 if self.tile.split_window else self.tile.num_warps

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: rings, row codes, and the parts of a split window (max, sum, mean; two buffers)."""
        codes = self.tile.num_warps * self.tile.num_stages * 4
        parts = 2 * 3 * self.tile.num_warps * WARP * self.tile.cols_per_lane * 4 if self.tile.split_window else 0
        return self.ring_elems * ITEMSIZE[self.problem.dtype] + codes + parts + SMEM_ALIGNMENT


def max_ctas(traits: Traits, arch: Arch) -> int:
    """CTAs that fill the GPU once."""
    return arch.num_sms * traits.tile.ctas_per_sm


def workspace_bytes(traits: Traits, num_ctas: int) -> int:
    """Partial sums of the gradient of ape: one for each team of CTAs, whatever the number of rows."""
    teams = max(num_ctas // traits.num_strips, 1)
    return teams * traits.problem.window * traits.problem.head_dim * 4


def select_traits(problem: Problem, arch: Arch, backward: bool, deterministic: bool = True) -> Traits:
    """The first tile that fits the GPU, in the order of measured speed.

    Raises:
        UnsupportedError: a window that no tile holds in this GPU's shared memory.
    """
    dependent_launch = backward and arch.major >= 9
    refusals = []
    for tile in _relaxed(_backward_tile(problem) if backward else _forward_tile(problem)):
        traits = Traits(problem, tile, backward, deterministic, dependent_launch)
        refusal = why_not(traits, arch)
        if refusal is None:
            return traits
        refusals.append(refusal)
    raise UnsupportedError(
        f"ratio: a window of {problem.window} {problem.dtype} entries does not fit {arch.name}: {refusals[-1]}"
    )


def why_not(traits: Traits, arch: Arch) -> str | None:
    """Why a GPU cannot run a tile, None if it can."""
    return arch.why_not_resident(traits.tile, traits.smem_bytes, traits.tile.ctas_per_sm)


# The limits below are of registers: a lane holds about slots * cols_per_lane of each of ape, weights, values and,
# backward, sums, and copies narrower than 4 bytes take an address each. The tests compile what comes out for every
# architecture with spills as errors. Two stages, one window in flight a warp, are as fast as three or better: more
# bytes in flight than about 64 KB an SM slow the DRAM down (H200, 131072 tokens, backward: 296 us with 2 stages, 309
# with 3).


def _forward_tile(problem: Problem) -> Tile:
    window, is_narrow = problem.window, problem.vector_bytes < 4
    if problem.ratio <= MAX_EAGER_RATIO:
        most = 4 if window <= 8 and not is_narrow else 2 if window <= 16 else 1
        cols = _cols_per_lane(problem, most)
        if cols == 4:
            return Tile(4, cols, 2, 4)
        return Tile(8, cols, 2, 1 if is_narrow else 3 if window <= 8 else 2)
    if window <= 256:
        cols = _cols_per_lane(problem, 2 if window <= 128 else 1)
        return Tile(8, cols, 2, 1 if is_narrow else 2, split_window=True)
    return Tile(16, 1, 2, 1, split_window=True, resident=False)


def _backward_tile(problem: Problem) -> Tile:
    window = problem.window
    if problem.ratio <= MAX_EAGER_RATIO:
        cols = _cols_per_lane(problem, 2 if window <= 8 else 1)
        return Tile(16, cols, 2, 1) if window <= 16 else Tile(8, cols, 2, 1)
    if window <= 128:
        return Tile(8, _cols_per_lane(problem, 2), 2, 1, split_window=True)
    is_resident = window <= 256 and problem.dtype != "float32" and problem.vector_bytes >= 4
    return Tile(16, 1, 2, 1, split_window=True, resident=is_resident)


def _cols_per_lane(problem: Problem, most: int) -> int:
    """The largest power of two up to `most` with the fewest columns past the last one."""
    choices = [cols for cols in (4, 2, 1) if cols <= most]
    return min(choices, key=lambda cols: -(-problem.head_dim // (WARP * cols)) * cols)


def _relaxed(tile: Tile) -> Iterator[Tile]:
    """`tile`, then what takes less and less shared memory."""
    return relaxed(tile, fewer("ctas_per_sm"), fewer("num_stages"), halved("cols_per_lane"), _half_the_lanes)


def _half_the_lanes(tile: Tile) -> Tile | None:
    return replace(tile, active_lanes=WARP // 2) if tile.split_window and tile.active_lanes == WARP else None

"""What a prefill kernel of sm_90a is compiled for. Pure Python: no torch, no cutlass.

A warpgroup multiplies 64 query rows; up to three of them share the tiles of keys and values that a fourth group of
warps copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

from cuteforge.device.panels import panels_bytes
from cuteforge.families.attention.problem import Problem
from cuteforge.families.attention.work.traits import WorkTraits, why_not
from cuteforge.runtime.arch import Arch

WARPGROUP = 4  # warps
ROWS = 64  # of a warpgroup
PRODUCER_WARPS = 4
TOKEN_WARPS = 2  # of them, where TMA copies the keys and the values: one each
PAGE_BOX = 16  # keys, of pages that have a multiple of them; other pages are copied row by row
SMEM_ALIGNMENT = 1024
MAX_BUFFER_BYTES = 225 * 1024  # beside barriers
FIELDS_BYTES = 32  # what the producer warps tell of a work tile, but for a mask
LIVE_TILES_BYTES = 16  # what they tell of a mask, and room for what each of two warps finds
FIELDS_AHEAD = 8  # work tiles of packed queries: a lane of a producer warp looks each up


class Registers(NamedTuple):
    """Registers of a thread of the consumer warps, and of the producer warps."""

    consumer: int
    producer: int


# Registers a thread by the number of consumer warpgroups: theirs, and the producer warps'. Together at most 64 K.
REGISTERS = {2: Registers(232, 40), 3: Registers(160, 32)}
PAGED_REGISTERS = {**REGISTERS, 3: Registers(152, 56)}  # who looks rows up needs more
PAGED_MASK_REGISTERS = Registers(224, 56)  # of two warpgroups: who looks for live tiles as well, too
# Of three warpgroups, for a lane's part of a tile.
TILE_REGISTERS, PAGED_TILE_REGISTERS = 128, 124
MAX_TILE_KEYS = 128
# A cap and a window need registers of their own.
OPTION_REGISTERS = 6
MAX_OPTION_KEYS, MAX_PAGED_OPTION_KEYS = 96, 80
# Of two warpgroups with a bias, for a lane's part of a tile. With four more, fp32 in pages with all options spills 8
# bytes; with 12 more beside a mask, fp32 24 and fp16 in pages of one token 48 (ptxas of CUDA 12).
BIAS_TILE_REGISTERS, PAGED_BIAS_TILE_REGISTERS, BESIDE_MASK = 184, 180, 12
BIAS_GROUP_REGISTERS = 16  # of what is loaded when it is wanted
FEW_ROWS = 768  # of an SM: four row tiles of three warpgroups


class Barrier(IntEnum):
    """The named barriers of a CTA.

    Attributes:
        CTA: of all its threads.
        PING_PONG: the first of one for each warpgroup, which waits there until it may start products.
        QUERY_WARPS: of the producer warps of the queries.
    """

    CTA = 0
    PING_PONG = 1
    QUERY_WARPS = 4


@dataclass(frozen=True)
class WarpgroupTile:
    """How a CTA works on a work tile.

    Attributes:
        warpgroups: that multiply, 64 rows each.
        tile_n: keys that they take at a time.
        num_stages: tiles of keys, and of values, on their way.
    """

    warpgroups: int
    tile_n: int
    num_stages: int

    m_blocks: ClassVar[int] = 1
    ctas_per_sm: ClassVar[int] = 1

    @property
    def tile_m(self) -> int:
        """Rows of a CTA."""
        return ROWS * self.warpgroups

    @property
    def consumer_warps(self) -> int:
        return WARPGROUP * self.warpgroups


@dataclass(frozen=True)
class WarpgroupTraits(WorkTraits):
    """The compile key: everything that the trace reads."""

    tile: WarpgroupTile

    builder: ClassVar[str] = "cuteforge.families.attention.forward_sm90a.kernel:build"
    in_rounds: ClassVar[bool] = True

    @property
    def registers(self) -> Registers:
        if self.problem.is_paged and self.finds_live_tiles and self.problem.v_dim <= 128:
            return PAGED_MASK_REGISTERS
        return (PAGED_REGISTERS if self.problem.is_paged else REGISTERS)[self.tile.warpgroups]

    @property
    def keeps_mask_bytes(self) -> bool:
        return self.tile.warpgroups == 2 and self.problem.v_dim <= 192

    @property
    def bias_is_ahead(self) -> bool:
        """Whether the bias of a tile of keys is loaded before the products that it is added to are waited for."""
        return bias_is_ahead(self.problem)

    @property
    def box_rows(self) -> int:
        """Keys that one instruction of TMA copies: a tile where they lie in one piece, a part of a page; 0 where each
        may lie elsewhere."""
        if self.problem.is_paged:
            return PAGE_BOX if self.problem.has_page_size else 0
        return self.tile.tile_n

    @property
    def query_stages(self) -> int:
        """Two where they fit: the queries of the next work tile come while those of this one are in use."""
        query_bytes, *_ = self._sizes
        return 2 if 2 * query_bytes + self._token_bytes <= MAX_BUFFER_BYTES else 1

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of a tile of queries, keys and values."""
        tokens = [panels_bytes(row_bytes, self.tile.tile_n) for row_bytes in self.row_bytes]
        return panels_bytes(self.row_bytes.key, self.tile.tile_m), *tokens

    @property
    def _token_bytes(self) -> int:
        return self.tile.num_stages * sum(self._sizes[1:])

    @property
    def rings(self) -> tuple[tuple[int, int], ...]:
        """(size, stages) of the buffers of queries, keys and values."""
        stages = self.query_stages, self.tile.num_stages, self.tile.num_stages
        return tuple(zip(self._sizes, stages, strict=True))

    @property
    def buffer_bytes(self) -> int:
        return sum(size * stages for size, stages in self.rings)

    @property
    def num_barriers(self) -> int:
        """Two for each stage, and one for values that end within a tile."""
        return 2 * sum(stages for _, stages in self.rings) + 1

    @property
    def finds_live_tiles(self) -> bool:
        return self.problem.mask_rank > 0

    @property
    def work_bytes(self) -> int:
        """What the producer warps tell of a work tile."""
        return FIELDS_BYTES + (LIVE_TILES_BYTES if self.finds_live_tiles else 0)

    @property
    def slots_bytes(self) -> int:
        """Where the warps that look for live tiles tell each other, for this work tile and the next."""
        return 2 * TOKEN_WARPS * LIVE_TILES_BYTES if self.finds_live_tiles else 0

    @property
    def fields_bytes(self) -> int:
        """Of the work tiles whose queries are there, of the next ones, and of what is looked for."""
        return self.query_stages * self.work_bytes + self.ahead_bytes + self.slots_bytes

    @property
    def ahead_bytes(self) -> int:
        """Fields of the next work tiles, by producer warp; nothing where finding them takes no search."""
        return PRODUCER_WARPS * FIELDS_AHEAD * FIELDS_BYTES if self.problem.packs_queries else 0

    @property
    def smem_bytes(self) -> int:
        return self.buffer_bytes + self.fields_bytes + 8 * self.num_barriers + SMEM_ALIGNMENT


def few_rows(requests: int, kv_heads: int, num_sms: int) -> int:
    """Up to how many query rows, tokens times heads, smaller row tiles are better: some for each SM, so that none has a
    tile more than others for long (H200, 1x2048 d128, 65536 rows: 68.2 us, 71.3 with larger ones), and requests whose
    rows hardly fill one."""
    return max(FEW_ROWS * num_sms, 2 * ROWS * requests * kv_heads)


def select_warpgroups(problem: Problem, arch: Arch, has_few_rows: bool = False) -> WarpgroupTraits | None:
    """Traits for many query rows; None where the portable kernel has to do, on other GPUs.

    Args:
        has_few_rows: by `few_rows`. The bits of the results do not depend on it.
    """
    if arch.name != "sm_90a":
        return None
    candidates = [WarpgroupTraits(problem, _tile(problem, has_few_rows, stages)) for stages in (3, 2)]
    fitting = [traits for traits in candidates if why_not(traits, arch) is None]
    # queries of the next work tile that come in time are worth more than a third stage
    return next((traits for traits in fitting if traits.query_stages > 1), fitting[-1] if fitting else None)


def _tile(problem: Problem, has_few_rows: bool, num_stages: int) -> WarpgroupTile:
    """Three warpgroups where a lane then has registers for enough keys: the weights of one are found while the products
    of two others run (H200, 4x4096 d128 full: 1721 us with two and 128 keys, of 2600 cycles for 2048 of products; 1643
    with three and 80)."""
    if problem.has_bias:
        return WarpgroupTile(2, _most_keys_with_bias(problem), num_stages)
    if problem.widest <= 128:
        # With three, the registers of a lane hold only a mask of one row, beside dense keys and tiles of at most 96.
        # Tiles of fewer keys would fit too, but a mask that keeps all must give the bits of no mask.
        fits_three = problem.mask_rank == 0 or (problem.mask_rank == 2 and not problem.is_paged and problem.widest > 64)
        return WarpgroupTile(3 if fits_three and not has_few_rows else 2, _most_keys(problem), num_stages)
    is_wide = problem.widest > 192 or problem.v_dim > 128
    return WarpgroupTile(2, 80 if is_wide else MAX_TILE_KEYS, num_stages)


def _most_keys(problem: Problem) -> int:
    """Of a tile of three warpgroups: sums of results take half a register a lane for each column, scores and weights
    3/4 for each key."""
    room = (PAGED_TILE_REGISTERS if problem.is_paged else TILE_REGISTERS) - problem.v_dim // 2
    most = MAX_TILE_KEYS
    if problem.has_softcap and problem.has_left:
        room -= OPTION_REGISTERS
        most = MAX_PAGED_OPTION_KEYS if problem.is_paged else MAX_OPTION_KEYS
    return min(room * 4 // 3 // 16 * 16, most)


def _most_keys_with_bias(problem: Problem) -> int:
    """Of a tile of two warpgroups: beside the sums of results, scores and weights, what is added to the scores."""
    if not bias_is_ahead(problem):
        room = BIAS_TILE_REGISTERS - BIAS_GROUP_REGISTERS - problem.v_dim // 2
        return room * 4 // 3 // 16 * 16
    room = (PAGED_BIAS_TILE_REGISTERS if problem.is_paged else BIAS_TILE_REGISTERS) - problem.v_dim // 2
    room -= BESIDE_MASK if problem.mask_rank > 0 else 0
    room_of_key = 5 if problem.bias_dtype == "float32" else 4  # quarters of a register
    return min(room * 4 // room_of_key // 16 * 16, MAX_TILE_KEYS)


def bias_is_ahead(problem: Problem) -> bool:
    """Whether the bias of a tile of keys is loaded before its scores are waited for: where registers hold it."""
    return problem.v_dim <= 192

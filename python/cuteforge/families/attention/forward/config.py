"""What the portable forward kernel is compiled for, and the choice of its tiles. Pure Python: no torch, no cutlass.

A work tile is one KV head of one request with some of the query rows that read it: the heads of its group times the
query tokens, packed token by token. Row blocks of 16 fill the left side of the matrix instructions. The warps of a CTA
form a grid, `row_warps` along the rows and `key_warps` along the keys: warps of the same keys share a ring,
and take every `key_warps`-th tile of keys. Decode has many warps along the keys, prefill one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

from cuteforge.device.swizzled_rows import ALIGNMENT
from cuteforge.errors import UnsupportedError
from cuteforge.families.attention.keys.ring_shape import RingShape
from cuteforge.families.attention.problem import Problem
from cuteforge.families.attention.work.traits import ROW_BLOCK, WorkTraits, max_ctas, why_not
from cuteforge.op.relax import fewer, halved, relaxed
from cuteforge.runtime.arch import Arch

SMEM_ALIGNMENT = ALIGNMENT
PARTS = 2  # unfinished row tiles of a CTA: one that began before its share, one that goes on after it
MAX_WAVES = 4
MAX_WORKSPACE_BYTES = 64 * 2**20
MANY_KEYS = 2048  # of a request
MAX_CLUSTER = 8  # the largest size that every GPU with clusters takes
LARGE_SMEM_BYTES = 160 * 1024  # of a CTA: A100, Hopper, B200


class Barrier(IntEnum):
    """The named barriers of a CTA.

    Attributes:
        CTA: of all its threads.
        KEY_WARP: the first of one for each key warp: of the warps that share its ring.
    """

    CTA = 0
    KEY_WARP = 1


@dataclass(frozen=True)
class Tile:
    """How a CTA works on a work tile.

    Attributes:
        m_blocks: row blocks of a warp.
        row_warps: warps along the rows.
        key_warps: warps along the keys.
        tile_n: keys that a warp takes at a time.
        num_stages: tiles of a ring.
        queries_in_smem: whether query rows, `4 * m_blocks * D / 16` registers a lane, are read from shared memory for
            every tile of keys instead. Where they fit registers that cost 20 % (H200, prefill, D = 256).
    """

    m_blocks: int
    row_warps: int
    key_warps: int
    tile_n: int
    num_stages: int
    ctas_per_sm: int
    queries_in_smem: bool = False

    @property
    def tile_m(self) -> int:
        """Rows of a CTA."""
        return ROW_BLOCK * self.m_blocks * self.row_warps

    @property
    def num_warps(self) -> int:
        return self.row_warps * self.key_warps

    @property
    def granule_keys(self) -> int:
        """Keys of a granule, the tiles that all key warps take at once."""
        return self.key_warps * self.tile_n


@dataclass(frozen=True)
class Traits(WorkTraits):
    """The compile key: everything that the trace reads.

    Attributes:
        splits: whether several CTAs may share the keys of a work tile and leave partial results, which a second kernel
            joins.
        dependent_launch: a kernel may start before the one it waits for has ended (sm_90 and up).
        cluster: the most CTAs that share a work tile and join through each other's shared memory (sm_90 and up).
    """

    splits: bool = False
    dependent_launch: bool = False
    cluster: int = 0

    builder: ClassVar[str] = "cuteforge.families.attention.forward.kernel:build"

    @property
    def ring(self) -> RingShape:
        """The ring of the warps that read the same keys."""
        tile = self.tile
        return RingShape(self.row_bytes, tile.tile_n, tile.num_stages, tile.row_warps)

    @property
    def granule_bytes(self) -> int:
        """Bytes of the keys and values of a granule."""
        return self.tile.granule_keys * sum(self.row_bytes)

    @property
    def reads_keys_once(self) -> bool:
        return self.tile.key_warps > 1

    @property
    def mask_is_ahead(self) -> bool:
        return self.problem.widest <= 192

    @property
    def lookups_ahead(self) -> int:
        """Tiles between the look-up of a page and the copies that need it: two where registers hold that many (H200,
        128 requests of 1024 keys in pages of one token: 163 us, 168 with one, 161 with three, which gained nothing
        elsewhere)."""
        return 2 if self.problem.is_paged and self.tile.key_warps > 1 and self.problem.widest <= 128 else 1

    @property
    def bias_is_ahead(self) -> bool:
        """Whether the bias of a tile of keys is loaded before the products that it is added to: where it takes few
        registers."""
        return self.tile.m_blocks * self.tile.tile_n <= 32 and self.problem.v_dim <= 192

    @property
    def join_pitch(self) -> int:
        """Row pitch, in fp32 elements, of the shared memory in which the key warps add up their results."""
        return self.problem.v_dim + 4

    @property
    def join_bytes(self) -> int:
        """Shared memory in which the results of the key warps meet: a matrix and three numbers a row from each."""
        tile = self.tile
        return tile.key_warps * tile.tile_m * (self.join_pitch + 3) * 4 if tile.key_warps > 1 else 0

    @property
    def query_bytes(self) -> int:
        """Shared memory for the query rows, after the rings."""
        return self.tile.tile_m * self.ring.rows.first.pitch_bytes if self.tile.queries_in_smem else 0

    @property
    def streams_bytes(self) -> int:
        """Shared memory for the rings, used again where the results meet."""
        return max(self.tile.key_warps * self.ring.bytes, self.join_bytes)

    @property
    def part_bytes(self) -> int:
        """Shared memory for the rows that a CTA of a cluster joins, after the query rows: their parts, the log-sum-exps
        of these, a barrier."""
        return self.tile.tile_m * (self.join_pitch + 1) * 4 + 8 if self.cluster else 0

    @property
    def smem_bytes(self) -> int:
        return self.streams_bytes + self.query_bytes + self.part_bytes + SMEM_ALIGNMENT

    @property
    def keeps_sums(self) -> bool:
        return self.problem.has_lse or self.splits


def workspace_bytes(traits: Traits, arch: Arch) -> int:
    """Workspace for the parts of as many CTAs as are ever launched to share work tiles."""
    return min(MAX_WAVES * max_ctas(traits, arch) * cta_workspace_bytes(traits), MAX_WORKSPACE_BYTES)


def cta_workspace_bytes(traits: Traits) -> int:
    """Workspace of one CTA: fp32 rows and their log-sum-exps."""
    return PARTS * traits.tile.tile_m * (traits.problem.v_dim + 1) * 4


class Load(NamedTuple):
    """How much decode has to do, as far as the tile follows from it; any tile serves any load.

    Attributes:
        work_tiles: KV heads of all requests.
        keys: of a request.
    """

    work_tiles: int
    keys: int


LIGHT = Load(1, 1)


def select_decode(problem: Problem, rows: int, arch: Arch, splits: bool, load: Load = LIGHT) -> Traits:
    """Traits for a few query rows a KV head: G * L of them.

    Without splits the load does not matter: a request gives the same bits in any batch.

    Raises:
        UnsupportedError: no tile fits the GPU's shared memory.
    """
    return _first_that_fits(problem, _decode_tile(problem, rows, arch, load if splits else LIGHT), arch, splits)


def are_many(is_paged: bool, widest: int, load: Load, num_sms: int) -> bool:
    """Whether decode has so many work tiles that two CTAs an SM are better than one with twice the warps or stages:
    while one starts or ends, the other reads.

    Of pages, and of narrow rows, from where clusters of eight no longer fit. Of wide dense rows, where every SM has a
    work tile and more, unless they are so long that starts and ends do not matter (H200: 80 requests of 194 keys take
    18.8 us instead of 27.5, 512 of 2048 keys 142 instead of 136).
    """
    if is_paged or widest <= 64:
        return load.work_tiles * MAX_CLUSTER > num_sms
    return load.work_tiles > num_sms and load.keys < MANY_KEYS


def select_prefill(problem: Problem, arch: Arch) -> Traits:
    """Traits for many query rows."""
    return _first_that_fits(problem, _prefill_tile(problem, arch), arch, False)


def _first_that_fits(problem: Problem, tile: Tile, arch: Arch, splits: bool) -> Traits:
    is_new = splits and arch.major >= 9
    refusals = []
    for candidate in _relaxed(tile):
        for cluster in (MAX_CLUSTER, 0) if is_new else (0,):
            traits = Traits(problem, candidate, splits=splits, dependent_launch=is_new, cluster=cluster)
            refusal = why_not(traits, arch)
            if refusal is None:
                return traits
            refusals.append(refusal)
    raise UnsupportedError(f"q: D = {problem.head_dim} does not fit {arch.name}: {refusals[-1]}")


def _decode_tile(problem: Problem, rows: int, arch: Arch, load: Load) -> Tile:
    """A warp holds 16 rows of results in `v_dim / 2` registers a lane: more row blocks take more warps.

    Of pages, tiles of 32 keys, a look-up for each lane: what a warp does to find its rows is half as often between its
    products (H200, 64 requests of 4096 keys: pages of 16 264 us against 267, of 1 267 against 297).
    """
    if rows <= ROW_BLOCK and problem.widest <= 128 and arch.smem_bytes_per_cta >= LARGE_SMEM_BYTES:
        is_wide = problem.widest > 64
        many = are_many(problem.is_paged, problem.widest, load, arch.num_sms)
        if problem.is_paged and many:
            return Tile(1, 1, 2, 32, 2, 2) if is_wide else Tile(1, 1, 4, 32, 2, 2)
        if problem.is_paged:
            return Tile(1, 1, 4, 32, 2 if is_wide else 4, 1)
        if many:
            return Tile(1, 1, 2 if is_wide else 4, 16, 4, 2)
    blocks, in_smem = -(-rows // ROW_BLOCK), problem.widest > 192 and _lacks_registers(problem, arch)
    if blocks == 1:
        return Tile(1, 1, 4, 16, 3 if problem.widest > 128 else 4, 1, in_smem)
    return Tile(1, 2, 4, 16, 3, 1, in_smem) if blocks == 2 else Tile(1, 4, 2, 16, 3, 1, in_smem)


def _prefill_tile(problem: Problem, arch: Arch) -> Tile:
    """Two row blocks a warp halve what is read from shared memory for each product, where registers hold the results of
    both."""
    widest, lacks_registers = problem.widest, _lacks_registers(problem, arch)
    if widest > 128:
        in_smem = widest > 192 and (lacks_registers or problem.has_options or problem.has_lse)
        is_small = widest > 192 and (problem.mask_rank > 0 or problem.has_bias)
        return Tile(1, 4, 1, 16 if is_small else 32, 2, 1, in_smem or problem.has_bias)
    if widest > 64:
        return Tile(1, 8, 1, 64, 2, 1) if lacks_registers else Tile(2, 4, 1, 32, 2, 2, queries_in_smem=True)
    return Tile(2, 4, 1, 32 if lacks_registers else 64, 2, 2)


def _lacks_registers(problem: Problem, arch: Arch) -> bool:
    """Whether a tile that just fits the 255 registers of a thread elsewhere would spill: with a mask, with a bias, and
    where the assembler needs more of them."""
    return problem.mask_rank > 0 or problem.has_bias or arch.major >= 10


def _relaxed(tile: Tile) -> Iterator[Tile]:
    """`tile`, then what takes less and less shared memory."""
    smaller = halved("key_warps", 2), halved("tile_n", 16), halved("row_warps")
    return relaxed(tile, fewer("ctas_per_sm"), fewer("num_stages", 2), *smaller)

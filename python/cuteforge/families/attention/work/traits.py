"""What the shared parts of attention kernels read of a compile key. Pure Python: no torch, no cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cuteforge.families.attention.keys.element import Element
from cuteforge.families.attention.problem import Problem
from cuteforge.families.attention.work.limits import Limits
from cuteforge.runtime.arch import Arch

ROW_BLOCK = 16  # query rows of a matrix instruction


class RowBytes(NamedTuple):
    """Bytes of a key, as many as of a query, and of a value."""

    key: int
    value: int


@dataclass(frozen=True)
class WorkTraits:
    """Base of the compile keys: the problem, and how a CTA works on a tile of it.

    Attributes:
        tile: has `tile_m` and `tile_n`, rows and keys that a CTA works on at a time; `m_blocks`, row blocks of a warp;
            `ctas_per_sm`.
        in_rounds: whether a CTA takes one work tile after another, instead of the GPU starting a CTA for each where one
            has ended.
        splits: whether several CTAs may share the keys of a work tile.
        cluster: the most CTAs of a cluster, 0 for none.
    """

    problem: Problem
    tile: Any

    in_rounds: ClassVar[bool] = False
    splits: ClassVar[bool] = False
    cluster: ClassVar[int] = 0

    @property
    def element(self) -> Element:
        """An element of the keys and values."""
        return Element(self.problem.dtype)

    @property
    def row_bytes(self) -> RowBytes:
        """Bytes of a key and of a value."""
        return RowBytes(self.element.row_bytes(self.problem.head_dim), self.element.row_bytes(self.problem.v_dim))

    @property
    def k_steps(self) -> int:
        """Matrix instructions along the head dim."""
        return -(-self.problem.head_dim // 16)

    @property
    def v_tiles(self) -> int:
        """Matrix instructions along the value dim."""
        return self.problem.v_dim // 8

    @property
    def reads_keys_once(self) -> bool:
        """Whether keys and values pass through L2 without being wanted again: they then make room for themselves
        instead of pushing out what is there, whose dirty lines would have to be written back first. In prefill the row
        tiles of a head read them again."""
        return False

    @property
    def keeps_sums(self) -> bool:
        """Whether the sums of the weights before rounding are wanted, of which log-sum-exps are made."""
        return True

    @property
    def finds_live_tiles(self) -> bool:
        """Whether the tiles of keys that a mask leaves anything of are looked for, so that others are skipped."""
        return False

    @property
    def mask_is_ahead(self) -> bool:
        """Whether the mask of a tile of keys is looked up before the products that it is for."""
        return True

    @property
    def keeps_mask_bytes(self) -> bool:
        """Whether registers hold a lane's bytes of a mask until the scores are there. Otherwise only the bits of them,
        which then have to be waited for."""
        return True

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        raise NotImplementedError


def max_ctas(traits: WorkTraits, arch: Arch) -> int:
    """CTAs that fill the GPU once."""
    return arch.num_sms * traits.tile.ctas_per_sm


def max_clustered(traits: WorkTraits, arch: Arch) -> int:
    """CTAs of clusters of more than two that run at once."""
    return arch.clustered_sms * traits.tile.ctas_per_sm


def limits_of(traits: WorkTraits, arch: Arch, most_splits: int) -> Limits:
    """What a launch is told."""
    return Limits(max_ctas(traits, arch), max_clustered(traits, arch), most_splits)


def why_not(traits: WorkTraits, arch: Arch) -> str | None:
    """Why a GPU cannot run a tile, None if it can."""
    return arch.why_not_resident(traits.tile, traits.smem_bytes, traits.tile.ctas_per_sm)

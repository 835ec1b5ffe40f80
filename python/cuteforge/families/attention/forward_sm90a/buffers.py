"""Shared memory of a CTA: buffers of queries, keys and values, and what each work tile is."""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from cuteforge.device.copy import smem_words
from cuteforge.device.stages_sm90 import BARRIERS, Stages
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.forward_sm90a.config import (
    PRODUCER_WARPS,
    SMEM_ALIGNMENT,
    TOKEN_WARPS,
    WarpgroupTraits,
)
from cuteforge.families.attention.work.tile import TileFields, WorkTile
from cuteforge.runtime.arch import WARP

KEYS, VALUES = 0, 1  # of `Buffers.tokens`
NO_WORK = -1  # instead of a request: there is nothing left to do


class Buffers(TraceConstant):
    """Shared memory of a CTA."""

    def __init__(self, traits: WarpgroupTraits):
        self.traits = traits
        smem = cutlass.memory.SmemAllocator()
        address = smem.allocate(traits.buffer_bytes, byte_alignment=SMEM_ALIGNMENT).toint()
        self.fields = smem.allocate(traits.fields_bytes, byte_alignment=16).toint()
        barriers = smem.allocate_tensor(Int64, cute.make_layout(traits.num_barriers)).iterator
        rings = []
        for size, num_stages in traits.rings:
            rings.append(Stages(address, size, num_stages, barriers))
            address, barriers = address + num_stages * size, barriers + BARRIERS * num_stages
        self.queries, *self.tokens = rings
        self.loaded = barriers  # counts the values of a tile that are loaded before the rest of it becomes zeros

    def ahead(self, warp):
        """Where a producer warp keeps the fields of the next work tiles; None where it need not."""
        traits = self.traits
        first = self.fields + traits.query_stages * traits.work_bytes
        return first + warp * (traits.ahead_bytes // PRODUCER_WARPS) if traits.ahead_bytes else None

    @property
    def slots(self):
        """Where the warps that look for live tiles tell each other."""
        return self.fields + (self.traits.fields_bytes - self.traits.slots_bytes)

    @cute.jit
    def init(self, by_tma):
        """By one thread.

        Args:
            by_tma: as in `ProducerWarp`.
        """
        readers = self.traits.tile.consumer_warps
        # one more arrival says that the fields are written
        self.queries.init((PRODUCER_WARPS - TOKEN_WARPS if by_tma else PRODUCER_WARPS) * WARP + 1, readers)
        for stages in self.tokens:
            stages.init(1 if by_tma else PRODUCER_WARPS // 2 * WARP, readers)
        cute.arch.mbarrier_init(self.loaded, 1)
        cute.arch.mbarrier_init_fence()

    def publish_work(self, stage, work: WorkTile | None) -> None:
        """By one thread: write what the work tile is, or that there is none, before its queries count as there."""
        fields = (Int32(NO_WORK),) if work is None else work.fields()[: TileFields.count(self.traits)]
        words = self._work_words(stage)
        for i, value in enumerate(fields):
            words[i] = Uint32(value)
        cute.arch.mbarrier_arrive(self.queries.full_barrier(stage))

    def read_work(self, stage) -> TileFields:
        """The fields of a work tile, for all lanes of a warp."""
        words = self._work_words(stage)
        count = TileFields.count(self.traits)
        fields = TileFields(*(cute.arch.make_warp_uniform(Int32(words[i])) for i in range(count)))
        cute.arch.sync_warp()  # every lane has read them before lane 0 releases the stage
        return fields

    def _work_words(self, stage):
        size = self.traits.work_bytes
        return smem_words(self.fields + stage * size, 4, size // 4)

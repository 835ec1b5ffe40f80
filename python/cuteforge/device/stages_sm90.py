"""Buffers in shared memory that some warps fill and others read, with a pair of barriers each: full, and free again
(sm_90 and up)."""

from cutlass import Int32, cute

from cuteforge.device.math import select
from cuteforge.device.traced import TraceConstant

BARRIERS = 2  # of a stage


class Stages(TraceConstant):
    """A ring of buffers of one size. Who uses it keeps a stage and a phase, both 0 at first, which `next` moves on.

    Args:
        address: of the first buffer.
        barriers: `BARRIERS * num_stages` of them.
    """

    def __init__(self, address, size: int, num_stages: int, barriers: cute.Pointer):
        self.base, self.size, self.num_stages, self.barriers = address, size, num_stages, barriers

    def init(self, filling: int, reading: int) -> None:
        """By one thread: how many arrivals make a stage full, and free."""
        for stage in range(self.num_stages):
            cute.arch.mbarrier_init(self.full_barrier(stage), filling)
            cute.arch.mbarrier_init(self.empty_barrier(stage), reading)

    def address(self, stage):
        return self.base + stage * self.size

    def full_barrier(self, stage):
        return self.barriers + stage

    def empty_barrier(self, stage):
        return self.barriers + (self.num_stages + stage)

    def consumer_wait(self, stage, phase) -> None:
        cute.arch.mbarrier_wait(self.full_barrier(stage), phase)

    def producer_acquire(self, stage, phase) -> None:
        """Passes at once in the first round."""
        cute.arch.mbarrier_wait(self.empty_barrier(stage), phase ^ 1)

    def producer_commit(self, stage) -> None:
        """This thread's arrival once its asynchronous copies so far have ended."""
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full_barrier(stage))

    @cute.jit
    def consumer_release(self, stage: Int32, lane: Int32):
        """One arrival for each warp that has read the stage."""
        if lane == 0:
            cute.arch.mbarrier_arrive(self.empty_barrier(stage))

    def next(self, stage, phase):
        is_last = stage == self.num_stages - 1
        return select(is_last, Int32(0), stage + 1), select(is_last, phase ^ 1, phase)

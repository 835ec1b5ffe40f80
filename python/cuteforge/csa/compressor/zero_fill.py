"""Exact zeros for the gradients of tokens that no window consumes."""

import cutlass
from cutlass import Int32, cute

from cuteforge.csa.compressor.config import Problem
from cuteforge.device.copy import Rows
from cuteforge.device.segments import WARP, lane_count_le
from cuteforge.device.traced import TraceConstant


class ZeroFill(TraceConstant):
    """Finds the unconsumed (token, column half) pairs by token, one token a lane, and stores 0 there.

    A half is the columns that one window reads of a token: all of them for coff 1. For coff 2 the second half is read by the token's own
    block and the first half by the block after it. The rule is that of `WindowStream`: what a row consumes is never filled.
    """

    def __init__(self, problem: Problem, mCu, mCuComp, num_tokens, num_rows, outputs: tuple[Rows, Rows]):
        self.problem = problem
        self.mCu, self.mCuComp = mCu, mCuComp
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self.outputs = outputs

    @cute.jit
    def run(self, warp: Int32, num_warps: Int32, lane: Int32):
        """Fill the share of `warp` out of `num_warps` over the whole grid."""
        for base in cutlass.range(warp * WARP, self.num_tokens, num_warps * WARP, unroll=1):
            token = base + lane
            blocks_after = Int32(1)
            if token < self.num_tokens:
                blocks_after = self._blocks_from(token)
            for half in cutlass.range_constexpr(self.problem.coff):
                needed = Int32(self.problem.coff - half)
                unread = cute.arch.vote_ballot_sync(token < self.num_tokens and blocks_after < needed)
                self._fill(base, unread, half, lane)

    @cute.jit
    def _blocks_from(self, token: Int32) -> Int32:
        """How many blocks of the token's segment have an output row, counted from the token's own block on; 0 outside every segment."""
        num_segments = self.mCu.shape[0] - 1
        ratio = self.problem.ratio
        segment = lane_count_le(self.mCu, num_segments + 1, token) - 1
        count = Int32(0)
        if segment >= 0 and segment < num_segments:
            begin, end = self.mCu[segment], self.mCu[segment + 1]
            row_begin, row_end = self.mCuComp[segment], self.mCuComp[segment + 1]
            if begin >= 0 and end <= self.num_tokens and end > begin:
                rows = cutlass.min(row_end, self.num_rows) - row_begin
                count = cutlass.min((end - begin) // ratio, rows) - (token - begin) // ratio
        return count

    @cute.jit
    def _fill(self, base: Int32, unread: Int32, half: int, lane: Int32):
        """Zero the half of every token whose bit is set; the whole warp stores one token at a time."""
        elems = self.problem.vector_elems
        while unread != 0:
            bit = cute.arch.popc((unread & -unread) - 1)
            unread = unread & (unread - 1)
            for col in cutlass.range(lane * elems, self.problem.head_dim, WARP * elems, unroll=1):
                for rows in self.outputs:
                    rows.run(rows.at(rows.column(half * self.problem.head_dim + col), base + bit), elems).fill(0.0)

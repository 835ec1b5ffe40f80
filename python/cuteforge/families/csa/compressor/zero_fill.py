"""Exact zeros for the gradients of tokens that no window consumes."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from cuteforge.device.traced import TraceConstant
from cuteforge.families.csa.compressor.matrix_rows import Rows
from cuteforge.families.csa.compressor.row_workers import RowWorker
from cuteforge.families.csa.compressor.segments import lane_count_le
from cuteforge.runtime.arch import WARP


class Outputs(NamedTuple):
    """The gradients by token."""

    kv: Rows
    score: Rows


class ZeroFill(TraceConstant):
    """Finds the unconsumed (token, column half) pairs by token, one token a lane, and stores 0 there.

    A half is the columns that one window reads of a token: all of them for coff 1. For coff 2 the second half is read
    by the token's own block and the first half by the block after it. The rule is that of `RowWorker`: what a row
    consumes is never filled.
    """

    def __init__(self, rows: RowWorker, num_rows, outputs: Outputs):
        self.rows = rows
        self.problem = rows.traits.problem
        self.mCuSeqlens, self.mCuSeqlensComp = rows.mCuSeqlens, rows.mCuSeqlensComp
        self.num_tokens, self.num_rows = rows.num_tokens, num_rows
        self.outputs = outputs

    @cute.jit
    def run(self):
        """Fill this warp's share: the tokens are dealt out to all warps of the grid, 32 at a time."""
        first_token, tokens_a_round = self.rows.grid_warp * WARP, self.rows.num_grid_warps * WARP
        for base in cutlass.range(first_token, self.num_tokens, tokens_a_round, unroll=1):
            token = base + self.rows.lane
            block, first, end = Int32(0), Int32(0), Int32(0)
            if token < self.num_tokens:
                block, first, end = self._blocks_around(token)
            for half in cutlass.range_constexpr(self.problem.coff):
                reader = block + (self.problem.coff - 1 - half)
                unread = cute.arch.vote_ballot_sync(token < self.num_tokens and (reader < first or reader >= end))
                self._fill(base, unread, half)

    @cute.jit
    def _blocks_around(self, token: Int32):
        """(block of the token in its segment, first block with an output row, one past the last); no blocks outside
        every segment."""
        num_segments = self.rows.num_segments
        segment = lane_count_le(self.mCuSeqlens, num_segments + 1, token) - 1
        block, first, end = Int32(0), Int32(0), Int32(0)
        if segment >= 0 and segment < num_segments:
            token_begin, token_end = self.mCuSeqlens[segment], self.mCuSeqlens[segment + 1]
            row_begin, row_end = self.mCuSeqlensComp[segment], self.mCuSeqlensComp[segment + 1]
            if token_begin >= 0:
                block = (token - token_begin) // self.problem.ratio
                first = cutlass.max(-row_begin, 0)
                rows = cutlass.min(row_end, self.num_rows) - row_begin
                end = cutlass.min((cutlass.min(token_end, self.num_tokens) - token_begin) // self.problem.ratio, rows)
        return block, first, end

    @cute.jit
    def _fill(self, base: Int32, unread: Int32, half: int):
        """Zero the half of every token whose bit is set; the whole warp stores one token at a time."""
        elems = self.problem.vector_elems
        while unread != 0:
            bit = cute.arch.popc((unread & -unread) - 1)
            unread = unread & (unread - 1)
            for col in cutlass.range(self.rows.lane * elems, self.problem.head_dim, WARP * elems, unroll=1):
                for rows in self.outputs:
                    rows.run(rows.at(rows.column(half * self.problem.head_dim + col), base + bit), elems).fill(0.0)

"""Which output rows a worker pools, and where in the packed tokens each of them starts."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from cuteforge.device.traced import Operands, TraceConstant
from cuteforge.families.csa.compressor.config import Traits
from cuteforge.families.csa.compressor.segments import warp_bracket
from cuteforge.runtime.arch import WARP

NO_ROW = -(2**31)  # code of a row that has no block of its own
ROW_LIMIT = 2**31 - 1
MAX_LOG_ROWS = 3


class SegmentState(NamedTuple):
    """A segment that was looked up: its rows from `begin` to `end`, its first token, and how many blocks it has."""

    begin: Any
    end: Any
    token: Any
    blocks: Any


class RowWorker(TraceConstant):
    """The share of the rows that one worker pools. A worker is a warp, or all warps of a CTA that split a window.

    The workers take ``2**log_rows`` rows at a time, one worker after another.
    """

    def __init__(self, traits: Traits, ops: Operands, num_rows, log_rows):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        gdim, _, _ = cute.arch.grid_dim()
        self.traits = traits
        self.mCuSeqlens, self.mCuSeqlensComp = ops.mCuSeqlens, ops.mCuSeqlensComp
        self.num_tokens, self.num_segments = ops.mKv.shape[0], ops.mCuSeqlens.shape[0] - 1
        self.lane = tidx % WARP
        self.warp = cute.arch.make_warp_uniform(tidx // WARP)
        self.grid_warp = bidx * traits.tile.num_warps + self.warp
        self.num_grid_warps = gdim * traits.tile.num_warps
        self.strip = bidx % traits.num_strips
        self.team = bidx // traits.num_strips
        self.log_rows = log_rows
        self.num_workers = gdim // traits.num_strips * traits.rows_per_cta
        self.index = self.team * traits.rows_per_cta + (0 if traits.tile.split_window else self.warp)
        full_rounds = num_rows // (self.num_workers << log_rows)
        rest = num_rows - ((full_rounds * self.num_workers + self.index) << log_rows)
        self.count = (full_rounds << log_rows) + cutlass.max(cutlass.min(rest, 1 << log_rows), 0)

    def row(self, step):
        """The row that this worker takes in its step `step`, out of `count`."""
        round_index, rest = step >> self.log_rows, step & ((1 << self.log_rows) - 1)
        return ((round_index * self.num_workers + self.index) << self.log_rows) + rest

    @cute.jit
    def guess(self, row: Int32) -> Int32:
        """The code of a row if all segments before it were multiples of the ratio and it were not their first; NO_ROW
        past the tokens."""
        problem = self.traits.problem
        token = row * problem.ratio
        code = Int32(NO_ROW)
        if row >= problem.coff - 1 and row < self.num_tokens // problem.ratio:
            code = token
        return code

    @cute.jit
    def locate(self, row: Int32, begin: Int32, end: Int32, token: Int32, blocks: Int32):
        """Row code of `row`, and the `SegmentState` for the next call, of which the last one is taken apart.

        The code is the first token t0 of the row's own block, or ~t0 for the first block of a segment. A row without a
        block (capacity padding) pools the first tokens in the forward pass, and is NO_ROW in the backward pass.
        """
        if row >= end or row < begin:
            begin, end, token, blocks = self._find_segment(row)
        block = row - begin
        code = Int32(NO_ROW if self.traits.backward else ~0)
        # a damaged table can make the difference wrap to a negative number
        if block >= 0 and block < blocks:
            code = token + block * self.traits.problem.ratio
            if block == 0:
                code = ~code
        return code, SegmentState(begin, end, token, blocks)

    @cute.jit
    def _find_segment(self, row: Int32):
        """State of the segment that holds `row`; outside every segment there are no blocks."""
        segment, row_begin, row_end, token_begin, token_end = warp_bracket(
            self.mCuSeqlensComp, self.mCuSeqlens, self.num_segments + 1, row, self.lane
        )
        begin = row
        end = Int32(ROW_LIMIT)
        token = token_begin
        blocks = Int32(0)
        if segment < self.num_segments:
            end = row_end
            if segment >= 0:
                begin = row_begin
                # blocks past the last token, and a segment that starts before the first, do not exist
                if token >= 0:
                    blocks = (cutlass.min(token_end, self.num_tokens) - token) // self.traits.problem.ratio
        return SegmentState(begin, end, token, blocks)


def launch_shape(traits: Traits, teams) -> dict:
    """Launch arguments of a kernel over windows. The register limit and the shared memory are such that `ctas_per_sm`
    CTAs fit."""
    return {
        "grid": (teams * traits.num_strips, 1, 1),
        "block": (WARP * traits.tile.num_warps, 1, 1),
        "min_blocks_per_mp": traits.tile.ctas_per_sm,
        "preferred_smem_carveout": 100,  # percent
    }


@cute.jit
def row_plan(traits: Traits, num_rows: Int32, max_ctas: Int32):
    """(teams of CTAs, log2 of the rows that a worker takes at a time), for about `max_ctas` CTAs.

    The workers sweep over the rows together, so that at any time the GPU works on one
    region of memory: an own region for each worker opens thousands of DRAM pages at once (6 % slower at 131072 tokens).
    Taking up to 8 rows at a time saves segment look-ups; at most 1/16 of a worker's rows, so that the shares stay
    equal.
    """
    teams = cutlass.max(max_ctas // traits.num_strips, 1)
    teams = cutlass.min(teams, (num_rows + traits.rows_per_cta - 1) // traits.rows_per_cta)
    rows_per_worker = num_rows // cutlass.max(teams * traits.rows_per_cta, 1)
    log_rows = Int32(0)
    for log2 in cutlass.range_constexpr(1, MAX_LOG_ROWS + 1):
        if rows_per_worker >= 16 << log2:
            log_rows = Int32(log2)
    return teams, log_rows

"""Streaming the windows of consecutive output rows through shared memory, one ring a warp.

Consecutive output rows of a segment read consecutive tokens, and no element is used twice. So a warp owns a chunk of columns and a run of
rows, and copies whole windows ahead of their use: the ring keeps ``num_stages - 1`` windows in flight for each warp, which is what hides the
memory latency, whatever number of registers the arithmetic takes. Only the warp's own lanes touch its ring, so a warp barrier orders it.
"""

from collections.abc import Callable

import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.csa.compressor.config import Traits
from cuteforge.device.copy import Rows, copy_or_zero, evict_first_policy, load_fp32, smem_run, store_run
from cuteforge.device.math import select
from cuteforge.device.segments import WARP, warp_bracket
from cuteforge.device.traced import TraceConstant

NO_ROW = -(2**31)  # row code of a row that has no block of its own
ROW_LIMIT = 2**31 - 1
MAX_RUN_LOG2 = 3


class WindowStream(TraceConstant):
    """The windows of this warp's rows. Holds values of the trace that never change; what the row loop changes is passed in and out."""

    def __init__(self, traits: Traits, smem, mKV, mScore, mCu, mCuComp, mGradOut, num_rows, run_log2):
        self.traits = traits
        self.mCu, self.mCuComp = mCu, mCuComp
        self.num_tokens = mKV.shape[0]
        self.num_segments = mCu.shape[0] - 1
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        gdim, _, _ = cute.arch.grid_dim()
        self.lane = tidx % WARP
        self.warp = cute.arch.make_warp_uniform(tidx // WARP)
        self._place(bidx, gdim)
        self._share_rows(num_rows, run_log2)
        self._allocate(smem, mKV.element_type)
        self.inputs = (Rows(mKV), Rows(mScore))
        self.policy = None if traits.backward else evict_first_policy()
        self.grad_out = Rows(mGradOut) if traits.backward else None
        self.copies = [self._copy_lane(part) for part in range(traits.copy_rounds)]

    def _place(self, bidx, gdim) -> None:
        """Which columns, rows and window entries are this warp's. The CTAs of a group have different columns of the same rows."""
        traits = self.traits
        self.chunk_col = bidx % traits.num_chunks * traits.chunk_cols
        self.col = self.chunk_col + self.lane * traits.tile.cols_per_lane
        self.group = bidx // traits.num_chunks
        self.num_row_lanes = gdim // traits.num_chunks * traits.rows_per_cta
        self.row_lane = self.group * traits.rows_per_cta
        if traits.tile.split_window:
            self.block = self.warp // traits.warps_per_block if traits.problem.coff == 2 else 0
            self.first_place = self.warp % traits.warps_per_block * traits.slots
        else:
            self.row_lane += self.warp

    def _share_rows(self, num_rows, run_log2) -> None:
        """Runs of 2**run_log2 rows go to the lanes in turn."""
        self.run_log2 = run_log2
        full_runs = num_rows // (self.num_row_lanes << run_log2)
        rest = num_rows - ((full_runs * self.num_row_lanes + self.row_lane) << run_log2)
        self.count = (full_runs << run_log2) + cutlass.max(cutlass.min(rest, 1 << run_log2), 0)

    def row(self, step):
        """The row that this lane takes in its step `step`, out of `count`."""
        run, place = step >> self.run_log2, step & ((1 << self.run_log2) - 1)
        return ((run * self.num_row_lanes + self.row_lane) << self.run_log2) + place

    def grid_warp(self):
        """(number of this warp in the grid, warps of the grid, lane), for work that has nothing to do with rows."""
        bidx, _, _ = cute.arch.block_idx()
        gdim, _, _ = cute.arch.grid_dim()
        num_warps = self.traits.tile.num_warps
        return bidx * num_warps + self.warp, gdim * num_warps, self.lane

    def _allocate(self, smem, dtype) -> None:
        tile = self.traits.tile
        self.sRings = smem.allocate_tensor(dtype, cute.make_layout(self.traits.ring_elems), byte_alignment=128).iterator
        self.sRing = self.sRings + self.warp * (tile.num_stages * self.traits.stage_elems)
        sCodes = smem.allocate_tensor(Int32, cute.make_layout((tile.num_stages, tile.num_warps)))
        self.sCode = sCodes[None, self.warp]

    def _copy_lane(self, part: int):
        """What this lane copies of a window in round `part`: (window entry, ring offset, whether it exists, address of its columns in row 0
        of each input)."""
        problem, traits = self.traits.problem, self.traits
        run = self.lane + part * WARP
        slot, col = run // traits.runs_per_entry, run % traits.runs_per_entry * problem.vector_elems
        block, place = self.position(slot)
        entry = block * problem.ratio + place
        half_col = block * problem.head_dim
        exists = (self.chunk_col + col < problem.head_dim) & (place < problem.ratio)
        columns = [rows.column(half_col + self.chunk_col + col) for rows in self.inputs]
        return entry, slot * traits.chunk_cols + col, exists, columns

    @cute.jit
    def start(self):
        """Start copying the first windows; returns the segment state.

        The first window is fetched before its segment is known, as if no segment had a tail, and again if that was wrong: a look-up
        takes as long as the window itself (together 1.5 us of 8 for 8192 tokens).
        """
        num_stages = self.traits.tile.num_stages
        state = (Int32(0), Int32(0), Int32(0), Int32(0))
        if num_stages > 1 and self.count > 0:
            row = self.row(0)
            guess = self._guess(row)
            if guess != NO_ROW:
                self._copy_window(guess, Int32(0))
            code, *state = self._locate(row, *state)
            state = tuple(state)
            if code != guess:
                # two copies to one place are not ordered
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                self._copy_located(code, Int32(0))
            self._copy_row(row, code, Int32(0))
        cute.arch.cp_async_commit_group()
        for stage in cutlass.range(1, num_stages - 1, unroll=1):
            if stage < self.count:
                state = self._issue(self.row(stage), stage, state)
            cute.arch.cp_async_commit_group()
        return state

    @cute.jit
    def _guess(self, row: Int32) -> Int32:
        """The code of a row if all segments before it were multiples of the ratio and it were not their first; NO_ROW past the tokens."""
        problem = self.traits.problem
        token = row * problem.ratio
        code = Int32(NO_ROW)
        if row >= problem.coff - 1 and row < self.num_tokens // problem.ratio:
            code = token
        return code

    @cute.jit
    def advance(self, step: Int32, stage: Int32, state):
        """Wait for the window of `step` in ring slot `stage`, and start the copy `num_stages - 1` steps ahead into the slot read last.

        With one slot there is nothing ahead: the window is copied here.
        """
        num_stages = self.traits.tile.num_stages
        if cutlass.const_expr(num_stages == 1):
            cute.arch.sync_warp()
            state = self._issue(self.row(step), stage, state)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
        else:
            cute.arch.cp_async_wait_group(num_stages - 2)
            cute.arch.sync_warp()
            ahead = step + (num_stages - 1)
            if ahead < self.count:
                free = select(stage == 0, Int32(num_stages - 1), stage - 1)
                state = self._issue(self.row(ahead), free, state)
            cute.arch.cp_async_commit_group()
        return state

    @cute.jit
    def next_stage(self, stage: Int32) -> Int32:
        return select(stage == self.traits.tile.num_stages - 1, Int32(0), stage + 1)

    @cute.jit
    def _issue(self, row: Int32, stage: Int32, state):
        code, *state = self._locate(row, *state)
        self._copy_located(code, stage)
        self._copy_row(row, code, stage)
        return tuple(state)

    @cute.jit
    def _copy_located(self, code: Int32, stage: Int32):
        if cutlass.const_expr(self.traits.backward):
            if code != NO_ROW:
                self._copy_window(code, stage)
        else:
            self._copy_window(code, stage)

    @cute.jit
    def _copy_row(self, row: Int32, code: Int32, stage: Int32):
        """What belongs to the row itself: its code, and its run of grad_out."""
        self.sCode[stage] = code
        if cutlass.const_expr(self.traits.backward):
            self._copy_grad_out(row, stage)

    @cute.jit
    def _locate(self, row: Int32, begin: Int32, end: Int32, token: Int32, blocks: Int32):
        """Row code of `row`, and the segment state (rows begin..end, first token, number of blocks) for the next call.

        The code is the first token t0 of the row's own block, or ~t0 for the first block of a segment. A row without a block (capacity
        padding) pools the first tokens in the forward pass, and is NO_ROW in the backward pass.
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
        return code, begin, end, token, blocks

    @cute.jit
    def _find_segment(self, row: Int32):
        """State of the segment that holds `row`; outside every segment there are no blocks."""
        segment, row_begin, row_end, token_begin, token_end = warp_bracket(
            self.mCuComp, self.mCu, self.num_segments + 1, row, self.lane
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
        return begin, end, token, blocks

    @cute.jit
    def _copy_window(self, code: Int32, stage: Int32):
        """Start copying the window of a row into ring slot `stage`. Entries before a segment's first token become 0."""
        problem, traits = self.traits.problem, self.traits
        token = self.first_token(code)
        first_entry = (
            select(code < 0, Int32(problem.ratio), Int32(0)) if cutlass.const_expr(problem.coff == 2) else Int32(0)
        )
        base = stage * traits.stage_elems
        for part in cutlass.range_constexpr(traits.copy_rounds):
            if cutlass.const_expr((part + 1) * WARP <= traits.runs_per_window):
                self._copy_round(part, token, first_entry, base)
            elif self.lane + part * WARP < traits.runs_per_window:
                self._copy_round(part, token, first_entry, base)

    def _copy_round(self, part: int, token, first_entry, base) -> None:
        entry, offset, exists, columns = self.copies[part]
        wanted = exists & (entry >= first_entry)
        for index, (rows, column) in enumerate(zip(self.inputs, columns)):
            line = base + index * self.traits.slots * self.traits.chunk_cols
            copy_or_zero(
                rows,
                rows.at(column, token + entry),
                smem_run(self.sRing, line + offset, self.traits.problem.vector_elems),
                wanted,
                self.policy,
            )

    @cute.jit
    def _copy_grad_out(self, row: Int32, stage: Int32):
        traits, elems = self.traits, self.traits.problem.vector_elems
        base = stage * traits.stage_elems + 2 * traits.slots * traits.chunk_cols
        for part in cutlass.range_constexpr(-(-traits.runs_per_entry // WARP)):
            col = (self.lane + part * WARP) * elems
            if col < traits.chunk_cols:
                address = self.grad_out.at(self.grad_out.column(self.chunk_col + col), row)
                exists = self.chunk_col + col < traits.problem.head_dim
                copy_or_zero(self.grad_out, address, smem_run(self.sRing, base + col, elems), exists, self.policy)

    def read_values(self, stage, slot: int):
        """This lane's columns of the values of window entry `slot`, as fp32."""
        return self._read(stage, slot)

    def read_scores(self, stage, slot: int):
        return self._read(stage, self.traits.slots + slot)

    def read_grad_out(self, stage):
        return self._read(stage, 2 * self.traits.slots)

    def _read(self, stage, line: int):
        cols = self.traits.tile.cols_per_lane
        offset = stage * self.traits.stage_elems + line * self.traits.chunk_cols + self.lane * cols
        return load_fp32(smem_run(self.sRing, offset, cols))

    def first_token(self, code):
        """Token of window entry 0; for the first block of a segment and coff 2 it lies before the segment."""
        return select(code < 0, ~code, code) - (self.traits.problem.coff - 1) * self.traits.problem.ratio

    def position(self, slot):
        """(block of the window, place in it) of this warp's entry `slot`: Python ints if `slot` is one and the window is not split.

        The place is the entry's row of ape, the block its half of the columns; ``block * ratio + place`` counts its tokens.
        """
        if self.traits.tile.split_window:
            return self.block, self.first_place + slot
        return slot // self.traits.problem.ratio, slot % self.traits.problem.ratio

    def is_valid(self, slot: int, is_first):
        """Whether window entry `slot` takes part in a row; None when it always does."""
        block, place = self.position(slot)
        conditions = []
        if self.traits.problem.coff == 2 and not (isinstance(block, int) and block == 1):
            conditions.append(~(is_first & (block == 0)))
        if self.traits.has_spare_slots:
            conditions.append(place < self.traits.problem.ratio)
        if not conditions:
            return None
        return conditions[0] if len(conditions) == 1 else conditions[0] & conditions[1]

    def store(self, rows: Rows, row, half_col, values) -> None:
        """Store this lane's columns of one row; `half_col` is the offset of the column half."""
        address = rows.at(rows.column(half_col + self.col), row)
        whole = self.traits.problem.vector_elems % self.traits.tile.cols_per_lane == 0
        store_run(rows, address, values, self.col, self.traits.problem.head_dim, whole)

    def load_ape(self, mApe: cute.Tensor) -> Callable[[int], list]:
        """A function from window entry to this lane's columns of ape; 0 past the last column."""
        slots = range(self.traits.slots)
        if self.traits.tile.resident:
            return [self._load_ape_entry(mApe, slot) for slot in slots].__getitem__
        return lambda slot: self._load_ape_entry(mApe, slot)

    @cute.jit
    def _load_ape_entry(self, mApe: cute.Tensor, slot: int):
        problem = self.traits.problem
        block, place = self.position(slot)
        columns = []
        for c in cutlass.range_constexpr(self.traits.tile.cols_per_lane):
            value = Float32(0.0)
            wanted = self.col + c < problem.head_dim
            if cutlass.const_expr(self.traits.has_spare_slots):
                wanted = wanted and place < problem.ratio
            if wanted:
                value = mApe[place, block * problem.head_dim + self.col + c]
            columns.append(value)
        return columns


def launch_shape(traits: Traits, groups) -> dict:
    """Launch arguments of a kernel over windows. The register limit and the shared memory are such that `ctas_per_sm` CTAs fit."""
    return {
        "grid": (groups * traits.num_chunks, 1, 1),
        "block": (WARP * traits.tile.num_warps, 1, 1),
        "min_blocks_per_mp": traits.tile.ctas_per_sm,
        "preferred_smem_carveout": 100,  # percent
    }


@cute.jit
def row_plan(traits: Traits, num_rows: Int32, max_ctas: Int32):
    """(groups of CTAs that share no columns, log2 of the rows that a lane takes at a time), for about `max_ctas` CTAs.

    A lane is a warp, or the warps of a split window. The lanes sweep over the rows together, so that at any time the GPU works on one
    region of memory: an own region for each lane opens thousands of DRAM pages at once (6 % slower at 131072 tokens). Taking up to 8 rows
    at a time saves segment look-ups; at most 1/16 of a lane's rows, so that the shares stay equal.
    """
    groups = cutlass.max(max_ctas // traits.num_chunks, 1)
    groups = cutlass.min(groups, (num_rows + traits.rows_per_cta - 1) // traits.rows_per_cta)
    rows_per_lane = num_rows // cutlass.max(groups * traits.rows_per_cta, 1)
    run_log2 = Int32(0)
    for log2 in cutlass.range_constexpr(1, MAX_RUN_LOG2 + 1):
        if rows_per_lane >= 16 << log2:
            run_log2 = Int32(log2)
    return groups, run_log2

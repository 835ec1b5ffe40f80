"""Streaming the windows of consecutive output rows through shared memory, one ring a warp.

Consecutive output rows of a segment read consecutive tokens, and no element is used twice. So a warp owns a chunk of columns and a run of
rows, and copies whole windows ahead of their use: the ring keeps ``num_stages - 1`` windows in flight for each warp, which is what hides the
memory latency, whatever number of registers the arithmetic takes. Only the warp's own lanes touch its ring, so a warp barrier orders it.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cuteforge.csa.compressor.config import Traits
from cuteforge.device.copy import Rows, copy_or_zero, load_fp32, prefetch_l2, smem_run, store_run
from cuteforge.device.math import select
from cuteforge.device.segments import WARP, warp_count_le
from cuteforge.device.traced import TraceConstant

NO_ROW = -(2**31)  # row code of a row that has no block of its own
ROW_LIMIT = 2**31 - 1


class WindowStream(TraceConstant):
    """The windows of this warp's rows. Holds values of the trace that never change; what the row loop changes is passed in and out."""

    def __init__(self, traits: Traits, smem, mKV, mScore, mCu, mCuComp, mGradOut, bidx, tidx):
        self.traits = traits
        self.mCu, self.mCuComp = mCu, mCuComp
        self.num_tokens = mKV.shape[0]
        self.num_segments = mCu.shape[0] - 1
        self.lane = tidx % WARP
        self.warp = cute.arch.make_warp_uniform(tidx // WARP)
        self._place(bidx)
        self._allocate(smem, mKV.element_type)
        self.inputs = (Rows(mKV), Rows(mScore))
        self.grad_out = Rows(mGradOut) if traits.backward else None
        self.copies = [self._copy_lane(part) for part in range(-(-traits.slots * traits.runs_per_entry // WARP))]

    def _place(self, bidx) -> None:
        """Which columns, rows and window entries are this warp's."""
        traits = self.traits
        self.chunk_col = (
            bidx % traits.chunk_groups * traits.warps_along_cols + self.warp % traits.warps_along_cols
        ) * traits.chunk_cols
        self.col = self.chunk_col + self.lane * traits.tile.cols_per_lane
        self.row_lane = bidx // traits.chunk_groups * traits.warps_along_rows
        if not traits.tile.split_window:
            self.row_lane += self.warp // traits.warps_along_cols
        self.first_slot = self.warp * traits.slots if traits.tile.split_window else 0

    def _allocate(self, smem, dtype) -> None:
        tile = self.traits.tile
        self.sRings = smem.allocate_tensor(dtype, cute.make_layout(self.traits.ring_elems), byte_alignment=128).iterator
        self.sRing = self.sRings + self.warp * (tile.num_stages * self.traits.stage_elems)
        sCodes = smem.allocate_tensor(Int32, cute.make_layout((tile.num_stages, tile.num_warps)))
        self.sCode = sCodes[None, self.warp]

    def _copy_lane(self, part: int):
        """What this lane copies of a window in round `part`: (window entry, ring offset, whether at all, address of the columns in row 0 of
        each input)."""
        problem, traits = self.traits.problem, self.traits
        run = self.lane + part * WARP
        slot, col = run // traits.runs_per_entry, run % traits.runs_per_entry * problem.vector_elems
        entry = self.first_slot + slot
        wanted = (
            (self.chunk_col + col < problem.head_dim)
            & (run < traits.slots * traits.runs_per_entry)
            & (entry < problem.window)
        )
        half_col = select(entry >= problem.ratio, Int32(problem.head_dim), Int32(0)) if problem.coff == 2 else 0
        columns = [rows.column(half_col + self.chunk_col + col) for rows in self.inputs]
        return entry, slot * traits.chunk_cols + col, wanted, columns

    @cute.jit
    def prefetch(self, row: Int32):
        """Bring the window of `row` near while its segment is still being looked up, as if no segment had a tail.

        With tails the guess is a few tokens early: then it brings what another warp needs. Never reads outside the tokens.
        """
        problem = self.traits.problem
        if self.lane < self.num_segments:
            prefetch_l2(self.mCu.iterator.toint() + Int64(self.lane * 4))
        token = (row - (problem.coff - 1)) * problem.ratio
        for entry, _, wanted, columns in self.copies:
            if wanted and token + entry >= 0 and token + entry < self.num_tokens:
                for rows, column in zip(self.inputs, columns):
                    prefetch_l2(rows.at(column, token + entry))

    @cute.jit
    def start(self, row_begin: Int32, row_end: Int32):
        """Start copying the first windows; returns the segment state."""
        state = (Int32(0), Int32(0), Int32(0), Int32(0))
        for stage in cutlass.range(self.traits.tile.num_stages - 1, unroll=1):
            if row_begin + stage < row_end:
                state = self._issue(row_begin + stage, stage, state)
            cute.arch.cp_async_commit_group()
        return state

    @cute.jit
    def advance(self, row: Int32, row_end: Int32, stage: Int32, state):
        """Wait for the window of `row` in ring slot `stage`, and start the copy `num_stages - 1` rows ahead into the slot read last."""
        num_stages = self.traits.tile.num_stages
        cute.arch.cp_async_wait_group(num_stages - 2)
        cute.arch.sync_warp()
        ahead = row + (num_stages - 1)
        if ahead < row_end:
            free = select(stage == 0, Int32(num_stages - 1), stage - 1)
            state = self._issue(ahead, free, state)
        cute.arch.cp_async_commit_group()
        return state

    @cute.jit
    def next_stage(self, stage: Int32) -> Int32:
        return select(stage == self.traits.tile.num_stages - 1, Int32(0), stage + 1)

    @cute.jit
    def _issue(self, row: Int32, stage: Int32, state):
        code, *state = self._locate(row, *state)
        self.sCode[stage] = code
        if cutlass.const_expr(self.traits.backward):
            if code != NO_ROW:
                self._copy_window(code, stage)
                self._copy_grad_out(row, stage)
        else:
            self._copy_window(code, stage)
        return tuple(state)

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
        if block < blocks:
            code = token + block * self.traits.problem.ratio
            if block == 0:
                code = ~code
        return code, begin, end, token, blocks

    @cute.jit
    def _find_segment(self, row: Int32):
        """State of the segment that holds `row`; rows outside every segment, and segments that do not fit the tokens, have no blocks."""
        segment = warp_count_le(self.mCuComp, self.num_segments + 1, row, self.lane) - 1
        begin = row
        end = Int32(ROW_LIMIT)
        token = Int32(0)
        blocks = Int32(0)
        if segment >= 0 and segment < self.num_segments:
            begin = self.mCuComp[segment]
            end = self.mCuComp[segment + 1]
            token = self.mCu[segment]
            token_end = self.mCu[segment + 1]
            if token >= 0 and token_end <= self.num_tokens and token_end > token:
                blocks = (token_end - token) // self.traits.problem.ratio
        elif segment < 0:
            end = self.mCuComp[0]
        return begin, end, token, blocks

    @cute.jit
    def _copy_window(self, code: Int32, stage: Int32):
        """Start copying the window of a row into ring slot `stage`. Entries before a segment's first token become 0."""
        problem, traits = self.traits.problem, self.traits
        token = self.first_token(code)
        first_entry = select(code < 0, Int32(problem.ratio), Int32(0)) if cutlass.const_expr(problem.coff == 2) else 0
        base = stage * traits.stage_elems
        for entry, offset, wanted, columns in self.copies:
            present = wanted & (entry >= first_entry) if cutlass.const_expr(problem.coff == 2) else wanted
            for index, (rows, column) in enumerate(zip(self.inputs, columns)):
                dst = smem_run(
                    self.sRing, base + offset + index * traits.slots * traits.chunk_cols, problem.vector_elems
                )
                copy_or_zero(rows, rows.at(column, token + entry), dst, present)

    @cute.jit
    def _copy_grad_out(self, row: Int32, stage: Int32):
        traits, elems = self.traits, self.traits.problem.vector_elems
        base = stage * traits.stage_elems + 2 * traits.slots * traits.chunk_cols
        for part in cutlass.range_constexpr(-(-traits.runs_per_entry // WARP)):
            col = (self.lane + part * WARP) * elems
            if col < traits.chunk_cols:
                address = self.grad_out.at(self.grad_out.column(self.chunk_col + col), row)
                copy_or_zero(
                    self.grad_out,
                    address,
                    smem_run(self.sRing, base + col, elems),
                    self.chunk_col + col < traits.problem.head_dim,
                )

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

    def entry(self, slot: int):
        """Index in the window of this warp's entry `slot`: a Python int unless the window is split over warps."""
        return self.first_slot + slot

    def ape_position(self, slot: int):
        """Row of ape, and offset of its column half, for window entry `slot`."""
        problem = self.traits.problem
        entry = self.entry(slot)
        if problem.coff == 1:
            return entry, 0
        if isinstance(entry, int):
            return entry % problem.ratio, (entry // problem.ratio) * problem.head_dim
        is_own = entry >= problem.ratio
        return entry - select(is_own, Int32(problem.ratio), Int32(0)), select(is_own, Int32(problem.head_dim), Int32(0))

    def is_valid(self, slot: int, is_first):
        """Whether window entry `slot` takes part in a row; None when it always does."""
        problem = self.traits.problem
        entry = self.entry(slot)
        conditions = []
        if problem.coff == 2 and (self.traits.tile.split_window or slot < problem.ratio):
            before_segment = entry < problem.ratio
            conditions.append(~(is_first & before_segment) if self.traits.tile.split_window else ~is_first)
        if self.traits.has_spare_slots:
            conditions.append(entry < problem.window)
        if not conditions:
            return None
        return conditions[0] if len(conditions) == 1 else conditions[0] & conditions[1]

    def store(self, rows: Rows, row, half_col, values) -> None:
        """Store this lane's columns of one row; `half_col` is the offset of the column half."""
        address = rows.at(rows.column(half_col + self.col), row)
        whole = self.traits.problem.vector_elems % self.traits.tile.cols_per_lane == 0
        store_run(rows, address, values, self.col, self.traits.problem.head_dim, whole)

    @cute.jit
    def load_ape(self, mApe: cute.Tensor):
        """This lane's columns of ape, one list for each window entry; 0 past the last column."""
        problem = self.traits.problem
        rApe = []
        for slot in cutlass.range_constexpr(self.traits.slots):
            row, half_col = self.ape_position(slot)
            columns = []
            for c in cutlass.range_constexpr(self.traits.tile.cols_per_lane):
                value = Float32(0.0)
                wanted = self.col + c < problem.head_dim
                if cutlass.const_expr(self.traits.has_spare_slots):
                    wanted = wanted and self.entry(slot) < problem.window
                if wanted:
                    value = mApe[row, half_col + self.col + c]
                columns.append(value)
            rApe.append(columns)
        return rApe


@cute.jit
def row_plan(traits: Traits, num_rows: Int32, max_ctas: Int32):
    """(CTAs, consecutive rows of one warp or split window), for about `max_ctas` CTAs with equal shares."""
    groups = cutlass.max(max_ctas // traits.chunk_groups, 1)
    lanes = groups * traits.warps_along_rows
    rows_per_lane = (num_rows + lanes - 1) // lanes
    rows_per_group = rows_per_lane * traits.warps_along_rows
    return (num_rows + rows_per_group - 1) // rows_per_group * traits.chunk_groups, rows_per_lane

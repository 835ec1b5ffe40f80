"""Streaming the windows of consecutive output rows through shared memory, one ring a warp.

Consecutive output rows of a segment read consecutive tokens, and no element is used twice. So a warp owns a strip of
columns and some rows, and copies whole windows ahead of their use: the ring keeps ``num_stages - 1`` windows in flight
for each warp, which is what hides the memory latency, whatever number of registers the arithmetic takes. Only the
warp's own lanes touch its ring, so a warp barrier orders it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.device.copy import ReadOnce, load_fp32
from cuteforge.device.math import select
from cuteforge.device.traced import Operands, TraceConstant
from cuteforge.families.csa.compressor.matrix_rows import Rows, copy_or_zero, smem_run, store_run
from cuteforge.families.csa.compressor.row_workers import NO_ROW, RowWorker, SegmentState
from cuteforge.runtime.arch import WARP


class LaneCopy(NamedTuple):
    """What a lane copies of a window in one round.

    Attributes:
        entry: of the window.
        offset: in a stage.
        exists: whether there is such an entry, with such columns.
        columns: address of the columns in row 0 of each input.
    """

    entry: Any
    offset: Any
    exists: Any
    columns: list


class WindowStream(TraceConstant):
    """The windows of this warp's rows, in its columns. What the row loop changes, the segment state and the stage, is
    passed in and out."""

    def __init__(self, rows: RowWorker, smem, ops: Operands):
        traits = rows.traits
        self.traits, self.rows = traits, rows
        self.lane, self.warp = rows.lane, rows.warp
        self.strip_col = rows.strip * traits.strip_cols
        self.col = self.strip_col + self.lane * traits.tile.cols_per_lane
        if traits.tile.active_lanes < WARP:
            self.col = select(self.lane < traits.tile.active_lanes, self.col, Int32(traits.problem.head_dim))
        if traits.tile.split_window:
            self.block = self.warp // traits.warps_per_block if traits.problem.coff == 2 else 0
            self.first_ape_row = self.warp % traits.warps_per_block * traits.slots
        self._allocate(smem, ops.mKv.element_type)
        self.inputs = (Rows(ops.mKv), Rows(ops.mScore))
        # backward it makes no difference, or costs 4 % (3x8192, d 512), 6 % from half a gigabyte on
        self.hint = None if traits.backward else ReadOnce()
        self.grad_out = Rows(ops.mGradOut) if traits.backward else None
        self.copies = [self._lane_copy(part) for part in range(traits.copy_rounds)]

    def _allocate(self, smem, dtype) -> None:
        tile = self.traits.tile
        self.sRings = smem.allocate_tensor(dtype, cute.make_layout(self.traits.ring_elems), byte_alignment=128).iterator
        self.sRing = self.sRings + self.warp * (tile.num_stages * self.traits.stage_elems)
        sCodes = smem.allocate_tensor(Int32, cute.make_layout((tile.num_stages, tile.num_warps)))
        self.sCode = sCodes[None, self.warp]

    def _lane_copy(self, part: int):
        """What this lane copies of a window in round `part`."""
        problem, traits = self.traits.problem, self.traits
        run = self.lane + part * WARP
        slot, col = run // traits.runs_per_entry, run % traits.runs_per_entry * problem.vector_elems
        block, ape_row = self.position(slot)
        entry = block * problem.ratio + ape_row
        half_col = block * problem.head_dim
        exists = (self.strip_col + col < problem.head_dim) & (ape_row < problem.ratio)
        columns = [rows.column(half_col + self.strip_col + col) for rows in self.inputs]
        return LaneCopy(entry, slot * traits.strip_cols + col, exists, columns)

    @cute.jit
    def start(self):
        """Start copying the first windows; returns the segment state.

        The first window is fetched before its segment is known, as if no segment had a tail, and again if that was
        wrong. With the look-up in one round (`warp_bracket`) this took 8192 tokens of d 128 from 8.4 to 7.8 us forward.
        """
        num_stages = self.traits.tile.num_stages
        state = SegmentState(Int32(0), Int32(0), Int32(0), Int32(0))
        if num_stages > 1 and self.rows.count > 0:
            row = self.rows.row(0)
            guess = self.rows.guess(row)
            if guess != NO_ROW:
                self._copy_window(guess, Int32(0))
            code, state = self.rows.locate(row, *state)
            if code != guess:
                # two copies to one address are not ordered
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                self._copy_located(code, Int32(0))
            self._copy_row(row, code, Int32(0))
        cute.arch.cp_async_commit_group()
        for stage in cutlass.range(1, num_stages - 1, unroll=1):
            if stage < self.rows.count:
                state = self._issue(self.rows.row(stage), stage, state)
            cute.arch.cp_async_commit_group()
        return state

    @cute.jit
    def advance(self, step: Int32, stage: Int32, state):
        """Wait for the window of `step` in a stage, and start the copy `num_stages - 1` steps ahead into the stage read
        last.

        With one stage there is nothing ahead: the window is copied here.
        """
        num_stages = self.traits.tile.num_stages
        if cutlass.const_expr(num_stages == 1):
            cute.arch.sync_warp()
            state = self._issue(self.rows.row(step), stage, state)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
        else:
            cute.arch.cp_async_wait_group(num_stages - 2)
            cute.arch.sync_warp()
            ahead = step + (num_stages - 1)
            if ahead < self.rows.count:
                free = select(stage == 0, Int32(num_stages - 1), stage - 1)
                state = self._issue(self.rows.row(ahead), free, state)
            cute.arch.cp_async_commit_group()
        return state

    @cute.jit
    def next_stage(self, stage: Int32) -> Int32:
        return select(stage == self.traits.tile.num_stages - 1, Int32(0), stage + 1)

    @cute.jit
    def _issue(self, row: Int32, stage: Int32, state):
        code, state = self.rows.locate(row, *state)
        self._copy_located(code, stage)
        self._copy_row(row, code, stage)
        return state

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
    def _copy_window(self, code: Int32, stage: Int32):
        """Start copying the window of a row into a stage. Entries before a segment's first token become 0."""
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
        copy = self.copies[part]
        wanted = copy.exists & (copy.entry >= first_entry)
        for index, (rows, column) in enumerate(zip(self.inputs, copy.columns)):
            line = base + index * self.traits.slots * self.traits.strip_cols
            copy_or_zero(
                rows,
                rows.at(column, token + copy.entry),
                smem_run(self.sRing, line + copy.offset, self.traits.problem.vector_elems),
                wanted,
                self.hint,
            )

    @cute.jit
    def _copy_grad_out(self, row: Int32, stage: Int32):
        traits, elems = self.traits, self.traits.problem.vector_elems
        base = stage * traits.stage_elems + 2 * traits.slots * traits.strip_cols
        for part in cutlass.range_constexpr(-(-traits.runs_per_entry // WARP)):
            col = (self.lane + part * WARP) * elems
            if col < traits.strip_cols:
                address = self.grad_out.at(self.grad_out.column(self.strip_col + col), row)
                exists = self.strip_col + col < traits.problem.head_dim
                copy_or_zero(self.grad_out, address, smem_run(self.sRing, base + col, elems), exists, self.hint)

    def read_values(self, stage, slot: int):
        """This lane's columns of the values of window entry `slot`, as fp32."""
        return self._read(stage, slot)

    def read_scores(self, stage, slot: int):
        return self._read(stage, self.traits.slots + slot)

    def read_grad_out(self, stage):
        return self._read(stage, 2 * self.traits.slots)

    def _read(self, stage, line: int):
        cols = self.traits.tile.cols_per_lane
        offset = stage * self.traits.stage_elems + line * self.traits.strip_cols + self.lane * cols
        return load_fp32(smem_run(self.sRing, offset, cols))

    def first_token(self, code):
        """Token of window entry 0; for the first block of a segment and coff 2 it lies before the segment."""
        return select(code < 0, ~code, code) - (self.traits.problem.coff - 1) * self.traits.problem.ratio

    def position(self, slot):
        """(block of the window, row of ape) of this warp's entry `slot`: Python ints if `slot` is one and the window is
        not split.

        The row of ape is the token within the block, the block the half of the columns; ``block * ratio + ape_row``
        counts the tokens.
        """
        if self.traits.tile.split_window:
            return self.block, self.first_ape_row + slot
        return slot // self.traits.problem.ratio, slot % self.traits.problem.ratio

    def is_valid(self, slot: int, is_first):
        """Whether window entry `slot` takes part in a row; None when it always does."""
        block, ape_row = self.position(slot)
        conditions = []
        if self.traits.problem.coff == 2 and not (isinstance(block, int) and block == 1):
            conditions.append(~(is_first & (block == 0)))
        if self.traits.has_spare_slots:
            conditions.append(ape_row < self.traits.problem.ratio)
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
        block, ape_row = self.position(slot)
        columns = []
        for c in cutlass.range_constexpr(self.traits.tile.cols_per_lane):
            value = Float32(0.0)
            wanted = self.col + c < problem.head_dim
            if cutlass.const_expr(self.traits.has_spare_slots):
                wanted = wanted and ape_row < problem.ratio
            if wanted:
                value = mApe[ape_row, block * problem.head_dim + self.col + c]
            columns.append(value)
        return columns

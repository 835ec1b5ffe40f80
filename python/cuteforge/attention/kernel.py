"""The attention kernel: decode and prefill, dense, ragged and paged, from one source.

Each group of warps streams its share of the keys and values through a ring of its own (device/kv_ring.py). A warp multiplies its query rows, held in
registers, with a tile of keys, turns the scores into weights (device/softmax.py), and adds up the weighted values. The weights of a row are summed by
the same matrix instructions that multiply them with the values, as rounded, so that equal values come out exact. Groups of a CTA meet in shared
memory, CTAs that share the keys of a unit in a workspace (combine.py).
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_stream

from cuteforge.attention.combine import Combine
from cuteforge.attention.config import (
    MAX_SPLITS,
    ROW_BLOCK,
    SPLIT_COST_TILES,
    SPLIT_WAVES,
    WARP,
    Traits,
    partial_row_bytes,
)
from cuteforge.attention.fake_operands import operands
from cuteforge.attention.mask import ScoreMask
from cuteforge.attention.result import GroupJoin, Results
from cuteforge.attention.work import Counts, Operands, Unit
from cuteforge.device.copy import gmem_run
from cuteforge.device.dtypes import DTYPES
from cuteforge.device.kv_ring import KVRing
from cuteforge.device.math import LOG2_E, select
from cuteforge.device.mma_sm80 import OperandLanes, in_register, ldmatrix_x4, left_operand, mma_16x8x16, ones_operand
from cuteforge.device.softmax import HALVES, OnlineSoftmax
from cuteforge.device.traced import named_kernel
from cuteforge.runtime.compile_cache import Build


@named_kernel("attention")
class Attention:
    """The kernel for one `Traits`; calling it launches."""

    def __init__(self, traits: Traits):
        self.traits = traits
        self.dtype = DTYPES[traits.problem.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        mMask: cute.Tensor | None,
        mLengths: cute.Tensor | None,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mNewK: cute.Tensor | None,
        mNewV: cute.Tensor | None,
        mWorkspace: cute.Tensor | None,
        max_ctas: Int32,
        most_splits: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Args: CTAs that fill the GPU once; the most of them that may share a unit's keys, 0 for any; the scale of the scores."""
        tensors = (mQ, mK, mV, mOut, mLse, mMask, mLengths, mCuQ, mCuK, mTable, mRows, mNewK, mNewV, mWorkspace)
        ops = Operands(*tensors)
        counts = Counts(self.traits, ops)
        splits = Int32(1)
        if cutlass.const_expr(self.traits.splits):
            splits = self._choose_splits(ops, counts, most_splits, max_ctas)
        if counts.units > 0:
            self.kernel(*tensors, scale, splits).launch(
                grid=(counts.units * splits, 1, 1),
                block=(WARP * self.traits.tile.num_warps, 1, 1),
                min_blocks_per_mp=self.traits.tile.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
            )
            if cutlass.const_expr(self.traits.splits):
                if splits > 1:
                    Combine(self.traits).launch(ops, counts, splits, stream)

    @cute.jit
    def _choose_splits(self, ops: Operands, counts: Counts, most_splits: Int32, max_ctas: Int32):
        """How many CTAs share a unit's keys: what lets the last of them end first, as many as the workspace has room for."""
        tile, problem = self.traits.tile, self.traits.problem
        tile_keys = tile.key_warps * tile.tile_n
        tiles = (counts.longest_keys(problem, ops) + tile_keys - 1) // tile_keys
        rows = counts.requests * counts.kv_heads * counts.group * counts.tokens
        limit = cutlass.min(tiles, MAX_SPLITS)
        limit = cutlass.min(limit, SPLIT_WAVES * max_ctas // cutlass.max(counts.units, 1))
        if most_splits > 0:
            limit = cutlass.min(limit, most_splits)
        bytes_of_a_split = Int64(rows) * partial_row_bytes(problem.v_dim)
        if bytes_of_a_split * Int64(limit) > Int64(ops.mWorkspace.shape[0]):
            limit = Int32(Int64(ops.mWorkspace.shape[0]) // cutlass.max(bytes_of_a_split, Int64(1)))
        best = Int32(1)
        least = _waves(counts.units, max_ctas) * (tiles + SPLIT_COST_TILES)
        for splits in cutlass.range(2, limit + 1):
            cost = _waves(counts.units * splits, max_ctas) * ((tiles + splits - 1) // splits + SPLIT_COST_TILES)
            cost += SPLIT_COST_TILES
            if cost < least:
                least = cost
                best = splits
        return best

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        mMask: cute.Tensor | None,
        mLengths: cute.Tensor | None,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mNewK: cute.Tensor | None,
        mNewV: cute.Tensor | None,
        mWorkspace: cute.Tensor | None,
        scale: Float32,
        splits: Int32,
    ):
        if cutlass.const_expr(self.traits.dependent_launch):
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        ops = Operands(
            mQ, mK, mV, mOut, mLse, mMask, mLengths, mCuQ, mCuK, mTable, mRows, mNewK, mNewV, mWorkspace
        )  # fmt: skip
        lane, warp = tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP)
        unit = Unit(self.traits, ops, Counts(self.traits, ops), bidx // splits, lane)
        smem = cutlass.memory.SmemAllocator()
        sMemory = smem.allocate(self.traits.smem_bytes - 128, byte_alignment=128)
        results = Results(unit, splits, bidx % splits)
        self._attend(unit, results, sMemory.toint(), scale, lane, warp)

    @cute.jit
    def _attend(self, unit: Unit, results, sAddress: Int32, scale: Float32, lane: Int32, warp: Int32):
        """One warp's part: its rows, its group's keys."""
        tile = self.traits.tile
        group, row_warp = warp // tile.row_warps, warp % tile.row_warps
        first_row = unit.first_row + row_warp * (ROW_BLOCK * tile.m_blocks)
        rows = [
            [first_row + (block * ROW_BLOCK + half * 8) + lane // 4 for half in range(HALVES)]
            for block in range(tile.m_blocks)
        ]
        shape = self.traits.ring
        source = unit.source()
        ring = KVRing(shape, sAddress + group * shape.bytes, row_warp, lane, source, unit.k_len)
        ring.clear_pads()
        if cutlass.const_expr(self.traits.problem.appends):
            if warp == 0 and results.split == 0 and unit.first_row == 0:
                source.append(lane)
        begin, count = self._share(unit, results, group)
        queries = self._load_queries(unit, rows, scale, lane)
        factor = select(scale == 0.0, Float32(1.0), cutlass.max(scale, -scale) * LOG2_E)
        softmax = OnlineSoftmax(tile.m_blocks, Float32(factor), self.traits.keeps_sums)
        rO = cute.make_rmem_tensor((tile.m_blocks, self.traits.v_tiles, 4), Float32)
        rWeight = cute.make_rmem_tensor((tile.m_blocks, 1, 4), Float32)
        rO.fill(0.0)
        rWeight.fill(0.0)
        mask = ScoreMask(unit, rows, lane)
        self._stream(unit, ring, mask, queries, softmax, rO, rWeight, begin, count, group, lane)
        if cutlass.const_expr(tile.key_warps == 1):
            results.store_fragments(rows, softmax, rO, rWeight, lane)
        else:
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            join = GroupJoin(self.traits, sAddress)
            join.put(group, row_warp, softmax, rO, rWeight, lane)
            cute.arch.sync_threads()
            join.store(results, unit, softmax.factor, warp * WARP + lane)

    @cute.jit
    def _share(self, unit: Unit, results, group: Int32):
        """(first tile, number of tiles) of a group of warps; its tiles are `key_warps` apart."""
        tile = self.traits.tile
        keys = cutlass.max(unit.key_limit(unit.last_row()), 0)
        if unit.first_row >= unit.num_rows:
            keys = Int32(0)
        tiles = (keys + tile.tile_n - 1) // tile.tile_n
        per_split = (tiles + results.splits - 1) // results.splits
        # whole turns of all groups, so that only the last split ends unevenly
        per_split = (per_split + tile.key_warps - 1) // tile.key_warps * tile.key_warps
        begin = results.split * per_split + group
        end = cutlass.min((results.split + 1) * per_split, tiles)
        return begin, cutlass.max(end - begin + (tile.key_warps - 1), 0) // tile.key_warps

    @cute.jit
    def _load_queries(self, unit: Unit, rows: list, scale: Float32, lane: Int32):
        """The warp's query rows as left operands, by block and step; with the sign of the scale, 0 for a scale of 0."""
        traits = self.traits
        sign = select(scale < 0.0, Uint32(0x80008000), Uint32(0))
        blocks = []
        for block in cutlass.range_constexpr(traits.tile.m_blocks):
            halves = []
            for half in cutlass.range_constexpr(HALVES):
                row = rows[block][half]
                rQ = cute.make_rmem_tensor(2 * traits.k_steps, Uint32)
                for chunk in cutlass.range_constexpr(2 * traits.k_steps):
                    rQ[chunk] = in_register(0)
                if row < unit.num_rows and scale != 0.0:
                    address = unit.query_address(unit.ops.mQ, row) + Int64(lane % 4 * 4)
                    for chunk in cutlass.range_constexpr(traits.problem.head_dim // 8):
                        rQ[chunk] = gmem_run(Uint32, address + chunk * 16, 1)[0] ^ sign
                halves.append(rQ)
            blocks.append(
                [
                    (halves[0][2 * k], halves[1][2 * k], halves[0][2 * k + 1], halves[1][2 * k + 1])
                    for k in range(traits.k_steps)
                ]
            )
        return blocks

    @cute.jit
    def _stream(
        self, unit, ring, mask, queries, softmax, rO, rWeight, begin: Int32, count: Int32, group: Int32, lane: Int32
    ):
        """Go through the group's tiles, the copies `num_stages - 1` tiles ahead and the look-ups one tile further."""
        tile, num_stages = self.traits.tile, self.traits.tile.num_stages
        step = tile.key_warps
        found = ring.lookup(begin)
        for ahead in cutlass.range_constexpr(num_stages - 1):
            if ahead < count:
                ring.issue(begin + ahead * step, Int32(ahead), found)
            cute.arch.cp_async_commit_group()
            found = ring.lookup(begin + (ahead + 1) * step)
        stage = Int32(0)
        for turn in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(num_stages - 2)
            self._sync_group(group)
            if turn + (num_stages - 1) < count:
                free = select(stage == 0, Int32(num_stages - 1), stage - 1)
                ring.issue(begin + (turn + (num_stages - 1)) * step, free, found)
            cute.arch.cp_async_commit_group()
            found = ring.lookup(begin + (turn + num_stages) * step)
            self._attend_tile(ring, mask, queries, softmax, rO, rWeight, begin + turn * step, stage, lane)
            stage = select(stage == num_stages - 1, Int32(0), stage + 1)

    @cute.jit
    def _sync_group(self, group: Int32):
        """Wait for the warps that share a ring."""
        tile = self.traits.tile
        if cutlass.const_expr(tile.row_warps == 1):
            cute.arch.sync_warp()
        elif cutlass.const_expr(tile.key_warps == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=group + 1, number_of_threads=WARP * tile.row_warps)

    @cute.jit
    def _attend_tile(self, ring, mask, queries, softmax, rO, rWeight, tile: Int32, stage: Int32, lane: Int32):
        shape = ring.shape
        keys = ring.base + stage * shape.stage_bytes
        rS = cute.make_rmem_tensor((self.traits.tile.m_blocks, shape.tile_n // 8, 4), Float32)
        self._multiply_keys(keys + OperandLanes(lane, shape.k_pitch_bytes).rows_as_columns, queries, rS)
        mask.apply(rS, tile)
        softmax.update(rS, rO, rWeight)
        values = keys + shape.v_offset_bytes + OperandLanes(lane, shape.v_pitch_bytes).rows_summed
        self._multiply_values(values, rS, rO, rWeight)

    def _multiply_keys(self, address, queries, rS) -> None:
        """rS = queries @ keys^T."""
        pitch = self.traits.ring.k_pitch_bytes
        for pair in range(rS.shape[1] // 2):
            sums = [[(Float32(0.0),) * 4] * 2 for _ in queries]
            for k in range(self.traits.k_steps):
                b = ldmatrix_x4(address + (pair * 16 * pitch + k * 32))
                for block, steps in enumerate(queries):
                    sums[block] = [
                        mma_16x8x16(self.dtype, steps[k], b[2 * i : 2 * i + 2], sums[block][i]) for i in range(2)
                    ]
            for block, both in enumerate(sums):
                for i, values in enumerate(both):
                    _put(rS, block, 2 * pair + i, values)

    def _multiply_values(self, address, rS, rO, rWeight) -> None:
        """rO += weights @ values, rWeight += the rows' sums of the weights as rounded."""
        pitch, ones = self.traits.ring.v_pitch_bytes, ones_operand(self.dtype)
        for step in range(rS.shape[1] // 2):
            weights = [
                left_operand(self.dtype, _get(rS, block, 2 * step), _get(rS, block, 2 * step + 1))
                for block in range(rS.shape[0])
            ]
            for block, a in enumerate(weights):
                _put(rWeight, block, 0, mma_16x8x16(self.dtype, a, ones, _get(rWeight, block, 0)))
            for n in range(0, self.traits.v_tiles, 2):
                b = ldmatrix_x4(address + (step * 16 * pitch + n * 16), transposed=True)
                for i in range(min(2, self.traits.v_tiles - n)):
                    for block, a in enumerate(weights):
                        values = mma_16x8x16(self.dtype, a, b[2 * i : 2 * i + 2], _get(rO, block, n + i))
                        _put(rO, block, n + i, values)


def _get(rX: cute.Tensor, block: int, n: int) -> tuple:
    return tuple(rX[block, n, e] for e in range(4))


def _put(rX: cute.Tensor, block: int, n: int, values) -> None:
    for e, value in enumerate(values):
        rX[block, n, e] = value


def _waves(ctas, max_ctas):
    return (ctas + max_ctas - 1) // max_ctas


def build(traits: Traits) -> Build:
    """The kernel for `traits`, for `runtime.compile_cache`."""
    scalars = (Int32(0), Int32(0), Float32(0.0))
    args = (*operands(traits.problem, traits.splits), *scalars, make_fake_stream())
    return Build(Attention(traits).__call__, args, "attention")

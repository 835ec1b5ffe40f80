"""Numbers of the caller's that are added to the scores."""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from cuteforge.device.copy import as_fp32, broadcast_offset, gmem_run, pair_to_fp32
from cuteforge.device.dtypes import DTYPES
from cuteforge.device.math import LOG2_E, fma_rz, select
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.parts.mask import found_anew
from cuteforge.families.attention.parts.scores import score_factor
from cuteforge.families.attention.parts.softmax import HALVES
from cuteforge.families.attention.work.tile import WorkTile

GROUP = 4  # eights of columns that are loaded at once, where nothing is loaded ahead
NEG_INF_PAIRS = {"bfloat16": 0xFF80FF80, "float16": 0xFC00FC00, "float32": 0xFF800000}


class ScoreBias(TraceConstant):
    """Turns scores into ``(|scale| * score + bias) * log2(e)``, which the softmax takes as they are. Capped scores are
    between -1 and 1, and are taken times the cap instead of the scale. Without a bias it leaves scores alone.

    Args:
        rows: a lane's packed rows, by block and half.
        scale: of the scores, which have its sign already.
    """

    def __init__(self, work: WorkTile, rows: list, scale, lane):
        self.traits, self.work, self.rows = work.traits, work, rows
        self.factor = score_factor(scale, work.ops.softcap)
        self.first_col = lane % 4 * 2

    def look_up(self, tile):
        """What is added to a lane's scores of a tile of keys, by block and half; None if it is not loaded ahead."""
        if not (self.traits.problem.has_bias and self.traits.bias_is_ahead):
            return None
        cols = range(self.traits.tile.tile_n // 8)
        return [[self._pairs(row, tile, cols) for row in halves] for halves in self.rows]

    @cute.jit
    def add(self, rS: cute.Tensor, tile: Int32, found: list | None):
        """Add to the scores of a tile of keys, `rS` (m_blocks, n_tiles, 4); `found` is what was looked up for it."""
        if cutlass.const_expr(self.traits.problem.has_bias):
            for block in cutlass.range_constexpr(rS.shape[0]):
                for half in cutlass.range_constexpr(HALVES):
                    self._add_row(rS, tile, block, half, None if found is None else found[block][half])

    def _add_row(self, rS, tile, block: int, half: int, pairs) -> None:
        step = GROUP if pairs is None else rS.shape[1]
        for first in range(0, rS.shape[1], step):
            cols = range(first, min(first + step, rS.shape[1]))
            words = self._pairs(self.rows[block][half], tile, cols) if pairs is None else pairs
            for i, n in enumerate(cols):
                for e, bias in enumerate(_pair(self.traits.problem.bias_dtype, words, i)):
                    at = block, n, 2 * half + e
                    # toward 0: the lowest number of fp32, with which models mask, stays one
                    rS[at] = fma_rz(bias, LOG2_E, rS[at] * self.factor)

    def _pairs(self, row, tile, cols: range):
        """The lane's pairs of a row in the columns of some matrix instructions."""
        return BiasRow(self.work, row).pairs(tile * self.traits.tile.tile_n + self.first_col, cols)


def _pair(dtype: str, words: cute.Tensor, index: int) -> list:
    """The two numbers of a pair in fp32."""
    if dtype == "float32":
        return [as_fp32(words[2 * index + e]) for e in range(2)]
    return pair_to_fp32(DTYPES[dtype], words[index])


class BiasRow(TraceConstant):
    """One row of a bias (B, H, L, S) with any strides; outer dims of extent 1 are broadcast.

    A row that the bias lacks is -inf, and so are columns.
    """

    def __init__(self, work: WorkTile, row):
        mBias = work.ops.mBias
        self.dtype, self.itemsize = work.traits.problem.bias_dtype, mBias.element_type.width // 8
        if work.traits.v_tiles > 24 and work.traits.reads_keys_once:
            row = found_anew(row)
        token, head = work.token_and_head(row)
        offset, exists = broadcast_offset(mBias, (work.batch, head, token))
        self.address = mBias.iterator.toint() + offset * self.itemsize
        self.step = Int64(mBias.stride[3]) * self.itemsize
        self.num_cols = select(exists & (row < work.num_rows), mBias.shape[3], Int32(0))

    @cute.jit
    def pairs(self, first: Int32, cols: cutlass.Constexpr):
        """A lane's pairs, 8 apart from `first + 8 * cols[0]` on: a word each, or two of fp32."""
        words_each = self.itemsize // 2
        words = cute.make_rmem_tensor(len(cols) * words_each, Uint32)
        words.fill(NEG_INF_PAIRS[self.dtype])
        is_dense = (self.step == self.itemsize) & ((self.address & (2 * self.itemsize - 1)) == 0)
        if is_dense & (first + (cols[-1] * 8 + 1) < self.num_cols):
            for i in cutlass.range_constexpr(len(cols)):
                pair = gmem_run(Uint32, self.address + Int64(first + cols[i] * 8) * self.itemsize, words_each).load()
                for w in cutlass.range_constexpr(words_each):
                    words[i * words_each + w] = pair[w]
        else:
            col = first + cols[0] * 8
            address = self.address + Int64(col) * self.step
            for i in cutlass.range_constexpr(len(cols)):
                for e in cutlass.range_constexpr(2):
                    if col + (8 * i + e) < self.num_cols:
                        self._load_element(words, i, e, address + (8 * i + e) * self.step)
        return words

    def _load_element(self, words, i: int, e: int, address) -> None:
        """Number `e` of pair `i`."""
        if self.itemsize == 4:
            words[2 * i + e] = gmem_run(Uint32, address, 1)[0]
        else:
            half = Uint32(gmem_run(cutlass.Uint16, address, 1)[0])
            words[i] = (words[i] & Uint32(0xFFFF << (16 * (1 - e)))) | (half << Uint32(16 * e))

"""Where building blocks of kernels put and find things: panels, operands of matrix instructions, lanes of rows, stages.

On plain integers, and as host functions of the DSL, which run on the CPU.
"""

import itertools

import cutlass
import pytest
from cutlass import Int32, cute

from cuteforge.device import row_lanes
from cuteforge.device.math import fast_divisor
from cuteforge.device.mma_sm80 import OperandLanes
from cuteforge.device.mma_sm90 import swizzled_offset
from cuteforge.device.panels import PANEL_ROW_BYTES, num_panels, panels_bytes
from cuteforge.device.row_lanes import RowLanes
from cuteforge.device.stages_sm90 import Stages
from cuteforge.device.swizzled_rows import CHUNK_BYTES, SwizzledRows
from cuteforge.runtime.arch import WARP

LINE_BYTES = 128  # of shared memory that one access reaches
ELEMENT_BYTES = 2
ROWS = 64


# Panels.


@pytest.mark.parametrize("row_bytes", [16, 80, 128, 144, 256, 512])
def test_chunks_of_panels_fill_the_matrix_and_each_has_one_place(row_bytes):
    chunks = num_panels(row_bytes) * PANEL_ROW_BYTES // CHUNK_BYTES
    places = [swizzled_offset(row, chunk, ROWS) for row, chunk in itertools.product(range(ROWS), range(chunks))]
    assert sorted(places) == list(range(0, panels_bytes(row_bytes, ROWS), CHUNK_BYTES))
    assert chunks * CHUNK_BYTES - row_bytes in range(PANEL_ROW_BYTES)


def test_eight_rows_of_a_panel_lie_in_different_banks():
    for first, chunk in itertools.product(range(0, ROWS, 8), range(8)):
        assert len({swizzled_offset(first + i, chunk, ROWS) % LINE_BYTES for i in range(8)}) == 8


def test_panels_lie_one_after_another():
    assert swizzled_offset(0, 8, ROWS) == panels_bytes(PANEL_ROW_BYTES, ROWS)


# Operands of the matrix instructions of sm_80: four matrices of 8x8, of which lane i points to row i % 8 of matrix i //
# 8.


@pytest.mark.parametrize("cols", [16, 64, 72, 128])
@pytest.mark.parametrize(
    ("name", "corners"),
    [
        ("rows_as_columns", [(0, 0), (0, 8), (8, 0), (8, 8)]),
        ("rows_summed", [(0, 0), (8, 0), (0, 8), (8, 8)]),
    ],
)
def test_lanes_point_to_the_rows_of_the_four_matrices_in_their_order(name, corners, cols):
    """Corners as (row, column) of the block in shared memory."""
    rows = SwizzledRows(ELEMENT_BYTES * cols)
    for lane in range(WARP):
        row, col = corners[lane // 8]
        chunk = col * ELEMENT_BYTES // CHUNK_BYTES
        assert getattr(OperandLanes(lane, rows), name) == rows.offset(row + lane % 8, chunk)


# Lanes that copy rows together.

LANES = list(itertools.product((4, 8), (1, 2, 4)))


@pytest.mark.parametrize(("lanes", "num_warps"), LANES)
def test_each_chunk_of_a_round_is_copied_by_one_lane(lanes, num_warps):
    copied = [(each.row, each.chunk) for _, _, each in every_lane(lanes, num_warps)]
    per_round = WARP // lanes * num_warps
    assert sorted(copied) == list(itertools.product(range(per_round), range(lanes)))


@pytest.mark.parametrize(("lanes", "num_warps"), LANES)
def test_each_row_is_looked_up_once(lanes, num_warps):
    rows = sorted(each.looked_up() for _, _, each in every_lane(lanes, num_warps))
    assert rows == list(range(WARP * num_warps))


@pytest.mark.parametrize(("lanes", "num_warps"), LANES)
def test_a_lane_gets_the_address_of_its_own_row_of_each_round(lanes, num_warps, monkeypatch):
    """A shuffle reaches the lanes of one warp: who looked a row up is in the warp that copies it."""
    every = list(every_lane(lanes, num_warps))
    looked_up = {(warp, lane): each.looked_up() for warp, lane, each in every}
    for warp, _, each in every:
        monkeypatch.setattr(row_lanes, "shuffle_address", lambda found, lane, warp=warp: looked_up[warp, lane])
        for number in range(lanes):
            assert each.address(None, number) == each.row + number * each.per_round


def every_lane(lanes, num_warps):
    for warp, lane in itertools.product(range(num_warps), range(WARP)):
        yield warp, lane, RowLanes(lanes, num_warps, warp, lane)


# Stages.


@cute.jit
def print_stages(num_stages: cutlass.Constexpr, steps: Int32):
    stages, stage, parity = Stages(0, 16, num_stages, None), Int32(0), Int32(0)
    for _ in range(steps):
        cute.printf("{} {}", stage, parity)
        stage, parity = stages.next(stage, parity)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_stages_follow_one_another_and_each_round_turns_the_parity(num_stages, capfd):
    steps = 3 * num_stages + 1
    print_stages(num_stages, steps)
    printed = [tuple(map(int, line.split())) for line in capfd.readouterr().out.splitlines()]
    assert printed == [(step % num_stages, step // num_stages % 2) for step in range(steps)]


# Divisions by a number that the host prepares.


@cute.jit
def print_quotient(number: Int32, divisor: Int32):
    quotient, rest = divmod(number, fast_divisor(divisor))
    cute.printf("{} {}", quotient, rest)


@pytest.mark.parametrize("divisor", [0, 1, 3, 7, 64, 2**31 - 1])
@pytest.mark.parametrize("number", [0, 1, 6, 63, 1000003, 2**31 - 1])
def test_a_divisor_of_the_host_divides_exactly_and_zero_counts_as_one(number, divisor, capfd):
    print_quotient(number, divisor)
    assert tuple(map(int, capfd.readouterr().out.split())) == divmod(number, max(divisor, 1))

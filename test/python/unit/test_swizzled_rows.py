"""The layout of keys, values and queries in shared memory: each chunk has one place, and matrices of eight rows meet no
bank twice."""

import pytest

from cuteforge.device.swizzled_rows import CHUNK_BYTES, SwizzledRows

NUM_ROWS = 64
LINE_BYTES = 128  # of shared memory that one access reaches
ELEMENT_BYTES = 2
each_width = pytest.mark.parametrize("cols", range(8, 264, 8))


@each_width
def test_every_chunk_has_a_place_of_its_own(cols):
    rows = SwizzledRows(ELEMENT_BYTES * cols)
    places = {rows.offset(row, chunk) for row in range(NUM_ROWS) for chunk in range(rows.chunks)}
    assert places == set(range(0, NUM_ROWS * rows.pitch_bytes, CHUNK_BYTES))
    assert rows.chunks * 8 - cols in (0, 8)


@each_width
def test_eight_rows_of_a_chunk_lie_in_different_banks(cols):
    rows = SwizzledRows(ELEMENT_BYTES * cols)
    for first in range(0, NUM_ROWS, 8):
        for chunk in range(rows.chunks):
            banks = {rows.offset(first + i, chunk) % LINE_BYTES for i in range(8)}
            assert len(banks) == 8


@pytest.mark.parametrize("cols", range(64, 264, 64))
def test_a_line_that_is_copied_stays_one_line(cols):
    """What the pads cost: chunks of one line of global memory in two of shared memory are two requests to L2. Rows of
    other widths begin inside lines of global memory too."""
    rows = SwizzledRows(ELEMENT_BYTES * cols)
    for row in range(NUM_ROWS):
        for first in range(0, rows.chunks, LINE_BYTES // CHUNK_BYTES):
            lines = {rows.offset(row, first + i) // LINE_BYTES for i in range(LINE_BYTES // CHUNK_BYTES)}
            assert len(lines) == 1


@each_width
def test_places_further_on_are_a_few_bits_away(cols):
    """`down` and `along` agree with `offset`, from any base that is aligned."""
    rows, base = SwizzledRows(ELEMENT_BYTES * cols), 5 * LINE_BYTES
    for distance in (1, 2, 4, 8, 16):
        for row in range(distance):
            for turn in range(4):
                assert rows.down(base + rows.offset(row, 1), turn * distance) == base + rows.offset(
                    row + turn * distance, 1
                )
    for row in range(16):
        for chunk in (0, 1):
            for further in range(0, rows.chunks, 2):
                assert rows.along(base + rows.offset(row, chunk), further) == base + rows.offset(row, chunk + further)

"""How matrices lie in shared memory for the matrix instructions of sm_90. Pure Python: no cutlass.

Rows of 128 bytes, the 16-byte chunks of a row exchanged by the row's number modulo 8 (PTX ISA, 128-byte swizzling). A
wider matrix is several panels of such rows, one after another.
"""

PANEL_ROW_BYTES = 128


def num_panels(row_bytes: int) -> int:
    """Panels of a matrix with rows of so many bytes."""
    return -(-row_bytes // PANEL_ROW_BYTES)


def panels_bytes(row_bytes: int, num_rows: int) -> int:
    """Bytes of a matrix in panels."""
    return num_panels(row_bytes) * num_rows * PANEL_ROW_BYTES

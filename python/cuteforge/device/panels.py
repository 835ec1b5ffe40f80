"""How matrices lie in shared memory for the matrix instructions of sm_90. Pure Python: no cutlass.

Rows of 128 bytes, 64 columns each, the 16-byte chunks of a row exchanged by the row's number modulo 8 (PTX ISA, 128-byte swizzling); wider matrices
are panels of 64 columns one after another.
"""

PANEL_COLS = 64
ROW_BYTES = 128


def panel_bytes(cols: int, rows: int) -> int:
    """Bytes of a matrix in panels."""
    return -(-cols // PANEL_COLS) * rows * ROW_BYTES

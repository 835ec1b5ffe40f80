"""How one number of a key or a value is stored. Pure Python: no cutlass.

What the rings and the shared memory know of keys is bytes, and these come from here. An element of another width is one
more class; what turns it into an operand of the products belongs into it as well.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Element:
    """An element that is an operand of the products as it is.

    Attributes:
        dtype: its name, as in a `TensorSpec`.
        num_bytes: its width.
    """

    dtype: str
    num_bytes: int = 2

    def row_bytes(self, num_cols: int) -> int:
        """Bytes of the columns of one head."""
        return num_cols * self.num_bytes

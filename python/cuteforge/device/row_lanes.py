"""How the lanes of a few warps share out the rows of a tile that they copy."""

from cutlass import Int32, Int64, cute

from cuteforge.device.traced import TraceConstant
from cuteforge.runtime.arch import WARP

NOWHERE = 0  # the address of a row that does not exist


class RowLanes(TraceConstant):
    """One lane of `num_warps` warps: `lanes` adjacent ones copy a row together, all of them a round of rows at a time.

    Each lane also looks up the address of one row for its warp, and gets that of its own row of a round by shuffle.

    Attributes:
        row, chunk: what the lane copies of the first round; in the others the row is `per_round` rows further.
    """

    def __init__(self, lanes: int, num_warps: int, warp, lane):
        self.lanes, self.lane = lanes, lane
        self.per_warp = WARP // lanes
        self.per_round = self.per_warp * num_warps
        self.first = warp * self.per_warp
        self.row, self.chunk = self.first + lane // lanes, lane % lanes

    def looked_up(self) -> Int32:
        """The row that this lane looks up."""
        number, index = self.lane // self.per_warp, self.lane % self.per_warp
        return number * self.per_round + self.first + index

    def address(self, looked_up: Int64, number) -> Int64:
        """Of this lane's row of a round, from the lane that looked it up."""
        return shuffle_address(looked_up, number * self.per_warp + self.lane // self.lanes)


def shuffle_address(address, lane):
    """A 64-bit value of another lane."""
    low = cute.arch.shuffle_sync(Int32(address & Int64(0xFFFFFFFF)), lane)
    high = cute.arch.shuffle_sync(Int32(address >> Int64(32)), lane)
    return (Int64(high) << Int64(32)) | (Int64(low) & Int64(0xFFFFFFFF))

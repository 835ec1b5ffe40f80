"""Joining the parts of a unit that the CTAs of a cluster share: through each other's shared memory, without a workspace or a second kernel."""

import cutlass
from cutlass import Float32, Int32, cute

from cuteforge.device.copy import smem_floats
from cuteforge.device.math import LOG2_E, NEG_INF, exp2_fast, fma_rn, select
from cuteforge.device.softmax import finite_or_zero, joined_lse
from cuteforge.device.traced import TraceConstant
from cuteforge.gqa.config import WARP
from cuteforge.gqa.result import reciprocal_or_zero, store_lse, store_rounded
from cuteforge.gqa.work import Unit

COLS = 4


class ClusterPart(TraceConstant):
    """What a CTA leaves of its unit, in its own shared memory: fp32 rows, after them their log-sum-exps."""

    def __init__(self, unit: Unit, address, rank, size):
        self.traits, self.unit, self.address = unit.traits, unit, address
        self.rank, self.size = rank, size
        self.pitch_bytes = self.traits.join_pitch * 4
        self.lse_offset = self.traits.tile.tile_m * self.pitch_bytes

    def store(self, row, col, values) -> None:
        run = smem_floats(self.address + (row - self.unit.first_row) * self.pitch_bytes + col * 4, len(values))
        for i, value in enumerate(values):
            run[i] = value

    def store_lse(self, row, lse) -> None:
        smem_floats(self.address + self.lse_offset + (row - self.unit.first_row) * 4, 1)[0] = lse

    @cute.jit
    def join(self, thread: Int32):
        """All CTAs of the cluster together: four columns of a row a thread, spread over the CTAs."""
        sync_cluster()
        tile, v_dim = self.traits.tile, self.traits.problem.v_dim
        threads, runs = WARP * tile.num_warps, v_dim // COLS
        rows = cutlass.min(self.unit.num_rows - self.unit.first_row, tile.tile_m)
        for i in cutlass.range(self.rank * threads + thread, rows * runs, self.size * threads, unroll=1):
            row, col = i // runs, i % runs * COLS
            # all at once, for a load takes long: of a smaller cluster the last part again, with the weight 0
            peers = range(self.traits.cluster)
            parts = [peer_address(self.address, cutlass.min(Int32(peer), self.size - 1)) for peer in peers]
            lses = [load_peer(part + (self.lse_offset + row * 4), 1)[0] for part in parts]
            lses = [Float32(select(peer < self.size, lse, Float32(NEG_INF))) for peer, lse in zip(peers, lses)]
            values = [load_peer(part + (row * self.pitch_bytes + col * 4), COLS) for part in parts]
            if cutlass.const_expr(self.traits.problem.has_sinks):
                # one more part, of zeros
                lses.append(self.unit.sink(self.unit.first_row + row))
                values.append((Float32(0.0),) * COLS)
            sums, total, largest = _weighted(lses, values)
            scale = reciprocal_or_zero(total)
            address = self.unit.query_address(self.unit.ops.mOut, self.unit.first_row + row) + cutlass.Int64(col * 2)
            store_rounded(self.unit.ops.mOut.element_type, address, [x * scale for x in sums])
            if cutlass.const_expr(self.traits.problem.has_lse):
                if col == 0:
                    store_lse(self.unit, self.unit.first_row + row, joined_lse(largest, total))
        # nobody leaves while others read its shared memory
        sync_cluster()


def _weighted(lses: list, values: list):
    """(sums of the columns, sum of the weights, largest log-sum-exp); a part without keys has the weight 0."""
    largest = lses[0]
    for lse in lses[1:]:
        largest = cute.arch.fmax(largest, lse)
    shift = finite_or_zero(largest)
    weights = [exp2_fast((lse - shift) * LOG2_E) for lse in lses]
    sums = [Float32(0.0)] * COLS
    for weight, columns in zip(weights, values):
        sums = [fma_rn(weight, x, total) for x, total in zip(columns, sums)]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    return sums, total, largest


def sync_cluster() -> None:
    """Wait for all threads of the cluster; what they have written to shared memory is seen after it."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def peer_address(address, rank):
    """The address that `address` of this CTA's shared memory has in that of another CTA of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def load_peer(address, count: int) -> tuple:
    """1 or 4 fp32 from the shared memory of a CTA of the cluster."""
    if count == 1:
        loaded = cute.arch.inline_ptx(
            "ld.shared::cluster.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
        )
        return (loaded,)
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )

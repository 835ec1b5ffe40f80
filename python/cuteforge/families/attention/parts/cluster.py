"""Joining the parts of a work tile that the CTAs of a cluster share: each sends its rows to the CTAs that join them,
without a workspace, a second kernel or a barrier that all wait at (sm_90 and up).

A CTA joins the rows whose number leaves its rank when divided by the size of the cluster. It knows how many bytes will
come, and waits for these; who has sent its rows is free to end.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cuteforge.device.copy import smem_floats
from cuteforge.device.math import LOG2_E, NEG_INF, exp2_fast, fma_rn, select
from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.parts.result import reciprocal_or_zero, store_lse, store_rounded
from cuteforge.families.attention.parts.softmax import finite_or_zero, joined_lse
from cuteforge.families.attention.work.tile import WorkTile
from cuteforge.runtime.arch import WARP

COLS = 4


class InCluster(NamedTuple):
    """What a cluster has to do with a work tile.

    Attributes:
        joins: whether one joins its parts.
        part: where this CTA's part then goes, a `ClusterPart`.
    """

    joins: Any
    part: Any


class ClusterPart(TraceConstant):
    """What the CTAs of a cluster leave of their work. Where a CTA joins rows: from each of the CTAs those rows in fp32,
    then their log-sum-exps, and a barrier that counts the bytes.

    Args:
        address: of all that in the shared memory of this CTA.
        rank, log_size: of this CTA, and of the cluster.
    """

    def __init__(self, work: WorkTile, address, rank, log_size):
        self.traits, self.work, self.rank, self.log_size = work.traits, work, rank, log_size
        tile_m = self.traits.tile.tile_m
        self.pitch_bytes = self.traits.join_pitch * 4
        self.rows, self.lses = address, address + tile_m * self.pitch_bytes
        self.barrier = self.lses + tile_m * 4
        # rows of a tile that one CTA joins
        self.rows_each = Int32(tile_m) >> log_size

    def _work_rows(self):
        return cutlass.min(self.work.num_rows - self.work.first_row, self.traits.tile.tile_m)

    def _own_rows(self):
        """Rows of the work tile that this CTA joins."""
        size = Int32(1) << self.log_size
        return (self._work_rows() + (size - 1) - self.rank) >> self.log_size

    @cute.jit
    def begin(self, thread: Int32):
        """By all threads: let the others send."""
        if thread == 0:
            barrier = cute.make_ptr(Int64, self.barrier, cute.AddressSpace.smem, assumed_align=8)
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            row_bytes = (self.traits.problem.v_dim + 1) * 4
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, (self._own_rows() * row_bytes) << self.log_size)
        cute.arch.cluster_arrive_relaxed()

    def wait_for_peers(self) -> None:
        """By all threads, once, before anything is sent: others may have begun later."""
        cute.arch.cluster_wait()

    def store(self, row, col, values) -> None:
        """Send four columns of a row of this CTA's part."""
        peer, index = self._sent_to(row)
        self._send(self.rows + index * self.pitch_bytes + col * 4, peer, values)

    def store_lse(self, row, lse) -> None:
        peer, index = self._sent_to(row)
        self._send(self.lses + index * 4, peer, [lse])

    def _sent_to(self, row):
        """(the CTA that joins a row, index of this CTA's part of it among the rows there)."""
        row = row - self.work.first_row
        peer = row & ((Int32(1) << self.log_size) - 1)
        return peer, self.rank * self.rows_each + (row >> self.log_size)

    def _send(self, address, peer, values: list) -> None:
        send(peer_address(address, peer), values, peer_address(self.barrier, peer))

    @cute.jit
    def join(self, thread: Int32):
        """Join the rows of this CTA, four columns a thread."""
        tile, runs = self.traits.tile, self.traits.problem.v_dim // COLS
        wait_for_bytes(self.barrier)
        for i in cutlass.range(thread, self._own_rows() * runs, WARP * tile.num_warps, unroll=1):
            index, col = i // runs, i % runs * COLS
            row = self.work.first_row + (index << self.log_size) + self.rank
            lses, values = self._parts_of(index, col)
            if cutlass.const_expr(self.traits.problem.has_sinks):
                # one more part, of zeros
                lses.append(self.work.sink(row))
                values.append([Float32(0.0)] * COLS)
            sums, total, largest = _weighted(lses, values)
            scale = reciprocal_or_zero(total)
            address = self.work.query_address(self.work.ops.mOut, row) + Int64(col * 2)
            store_rounded(self.work.ops.mOut.element_type, address, [x * scale for x in sums])
            if cutlass.const_expr(self.traits.problem.has_lse):
                if col == 0:
                    store_lse(self.work, row, joined_lse(largest, total))

    def _parts_of(self, index, col) -> tuple:
        """(log-sum-exps, four columns) of a row from each CTA; past the last CTA of a smaller cluster its part again,
        with the weight 0."""
        last = (Int32(1) << self.log_size) - 1
        lses, values = [], []
        for peer in range(self.traits.cluster):
            sent = cutlass.min(Int32(peer), last) * self.rows_each + index
            lse = smem_floats(self.lses + sent * 4, 1)[0]
            lses.append(Float32(select(peer <= last, lse, Float32(NEG_INF))))
            run = smem_floats(self.rows + sent * self.pitch_bytes + col * 4, COLS)
            values.append([run[c] for c in range(COLS)])
        return lses, values


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


def peer_address(address, rank):
    """The address that `address` of this CTA's shared memory has in that of another CTA of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def send(address, values: list, barrier) -> None:
    """Store one or four fp32 in the shared memory of a CTA of the cluster, whose barrier there counts their bytes."""
    operands = [f"{{$r{i + 2}}}" for i in range(len(values))]
    vector, run = ("", operands[0]) if len(values) == 1 else (f".v{len(values)}", f"{{{', '.join(operands)}}}")
    cute.arch.inline_ptx(
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.f32 [{{$r0}}], {run}, [{{$r1}}];",
        read_only_args=[address, barrier, *values],
    )


def wait_for_bytes(barrier) -> None:
    """Wait until all bytes that a barrier expects have come; what was sent is seen after it."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], 0; @!p bra WAIT; }",
        read_only_args=[barrier],
    )

"""Speed of paged GQA attention: decode and prefill at several page sizes beside dense keys, growth, host time.

    python benchmarks/bench_paged_attention.py                          all cases; writes
                                                                        benchmarks/results/<gpu>/paged_attention.json
    python benchmarks/bench_paged_attention.py --quick --cases decode   a few of them; only prints

Every problem passes a check against fp64 before it is timed; a failed check ends the run without a figure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import eager
import peers
import runner
from attention_problem import (
    DECODE,
    LLAMA,
    QUICK_DECODE,
    Dense,
    Problem,
    Shape,
    build_rivals,
    dense_rivals,
    gated,
    int_tensor,
    measure,
    measure_eager,
    offsets,
    permutation,
    ragged_lengths,
    randn,
)
from harness import Bar, Row
from peers import CUDNN_SDPA, FLASH_SDPA
from runner import Run

FA4 = peers.FlashAttention4.name
OURS_DENSE = "ours dense"
# What pages may cost: 16 tokens and more against dense keys, single tokens against pages of 16 (decode) or dense keys
# (prefill).
PAGED_LIMIT, SINGLE_TOKEN_LIMIT = 1.05, 1.1

DECODE_PAGE_SIZES = (16, 1)
# The dense peers stand beside every decode. flash-attn-4, the paged one here, does not split keys and compiles 3 s for
# each kind of head: it is timed where one compile serves both shapes.
FA4_DECODE = (DECODE[1], DECODE[3])

# Shape -> page sizes.
PREFILL = {
    Shape(4, 4096, 4096, causal=True): (128, 16, 1),
    Shape(1, 16384, 16384, causal=True): (16,),
    Shape(8, 512, 4096, causal=True): (16,),
    Shape(1, 2048, 2048, causal=True): (16,),
}
QUICK_PREFILL = {Shape(4, 4096, 4096, causal=True): (16,)}

GROWTH_PAGE_SIZE, GROWTH_TOKENS, GROWTH_BATCHES = 16, 1 << 20, (1, 4, 16, 64, 256, 1024)

# Kernels shorter than a launch, so that the queue stays empty while the host is timed.
HOST = {"decode": Shape(4, 1, 128), "prefill": Shape(1, 64, 64, causal=True)}


class Paged(Problem):
    """Keys and values in pages: decode of q ``(B, 1, Hq, D)``, or causal prefill of packed q ``(T, Hq, D)`` with
    `q_lens`.

    Args:
        caches: k and v, ``(P, ps, Hkv, D)``.
        page_table: int32 ``(B, C)``.
    """

    def __init__(
        self, name: str, q, caches: tuple, page_table, kv_lens: Sequence[int], q_lens: Sequence[int] | None = None
    ) -> None:
        import torch

        self.name, self.caches, self.page_table = name, caches, page_table
        self.kv_lens, self.q_lens = kv_lens, q_lens or (1,) * len(kv_lens)
        self.cu_seqlens_q = None if q_lens is None else offsets(q_lens)
        self.seqlens_k = int_tensor(kv_lens)
        self.op_name, self.wrapper_name = (
            ("PagedGQADecode", "paged_gqa_decode_wrapper")
            if q_lens is None
            else ("PagedGQAPrefill", "paged_gqa_prefill_wrapper")
        )
        self.inputs = (q, *caches, page_table, *(() if q_lens is None else (self.cu_seqlens_q,)))
        self.out, self.tensors = torch.empty_like(q), {"seqlens_k": self.seqlens_k}
        self.config = {"causal": q_lens is not None}
        self._starts = None if q_lens is None else self.cu_seqlens_q.tolist()

    def request(self, b: int):
        from cuteforge.families.attention import reference

        row, length = self.page_table[b : b + 1], self.seqlens_k[b : b + 1]
        return (self.rows(self.inputs[0], b), *(reference.gather_pages(c, row, length)[0] for c in self.caches))

    def rows(self, out, b: int):
        return out[b] if self._starts is None else out[self._starts[b] : self._starts[b + 1]]

    def eager(self) -> Callable[[], Any]:
        """Of requests of equal lengths."""
        q, batch = self.inputs[0], len(self.kv_lens)
        by_request = q.view(batch, -1, *q.shape[-2:])
        call = eager.paged_attention(by_request, self.caches, self.page_table, self.kv_lens[0], **self.config)
        return lambda: call().reshape(q.shape)

    def rival(self, peer: peers.FlashAttention4) -> Callable[[], Any]:
        """The same call of a peer."""
        packed = {}
        if self.cu_seqlens_q is not None:
            packed = {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": max(self.q_lens)}
        operands = (self.inputs[0], *self.caches, self.page_table, self.seqlens_k, max(self.kv_lens))
        return peer.attend_paged(*operands, **self.config, **packed)


def paged_copy(dense: Dense, page_size: int) -> Paged:
    """The same problem with its keys and values in pages of `page_size`, in random order."""
    import torch

    shape = dense.shape
    pages = -(-shape.kv_len // page_size)
    table = permutation(shape.batch * pages).view(shape.batch, pages)
    spare = (0, 0, 0, 0, 0, pages * page_size - shape.kv_len)
    caches = tuple(x.new_empty(shape.batch * pages, page_size, *x.shape[2:]) for x in (dense.k, dense.v))
    for cache, x in zip(caches, (dense.k, dense.v), strict=True):
        cache[table.flatten().long()] = torch.nn.functional.pad(x, spare, value=math.nan).view(cache.shape)
    name, kv_lens = f"{shape.name} page {page_size}", (shape.kv_len,) * shape.batch
    if shape.q_len == 1:
        return Paged(name, dense.q, caches, table, kv_lens)
    return Paged(name, dense.q.flatten(0, 1), caches, table, kv_lens, (shape.q_len,) * shape.batch)


def ragged_decodes(batches: Sequence[int]) -> dict[str, Paged]:
    """Decodes over one pool whose `GROWTH_TOKENS` tokens belong to ever more requests."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    torch.manual_seed(0)
    num_pages = GROWTH_TOKENS // GROWTH_PAGE_SIZE + max(batches)
    caches = tuple(randn(num_pages, GROWTH_PAGE_SIZE, LLAMA.kv_heads, LLAMA.dim) for _ in range(2))
    order = permutation(num_pages)
    problems = {}
    for batch in batches:
        lengths = ragged_lengths(batch, GROWTH_TOKENS)
        counts = [-(-n // GROWTH_PAGE_SIZE) for n in lengths]
        table = pad_sequence(order[: sum(counts)].split(counts), batch_first=True, padding_value=-1)
        name = f"{batch} requests"
        problems[name] = Paged(name, randn(batch, 1, LLAMA.heads, LLAMA.dim), caches, table, lengths)
    return problems


def page_name(page_size: int) -> str:
    return f"page {page_size}"


def ours(dense: Dense, paged: Mapping[int, Paged]) -> dict[str, Callable[[], object]]:
    """Bound calls of the dense problem and of its paged copies, all checked."""
    return {OURS_DENSE: gated(dense, OURS_DENSE), **{page_name(n): gated(p) for n, p in paged.items()}}


def paged_rivals(run: Run, paged: Mapping[int, Paged]) -> dict[str, Callable[[], Any]]:
    peer, calls = (run.peer or {}).get(FA4), {}
    for page_size, problem in paged.items() if peer is not None else ():
        build = functools.partial(problem.rival, peer)
        calls |= build_rivals({f"{FA4} {page_name(page_size)}": build}, problem)
    return calls


def decode_rows(run: Run) -> Iterator[Row]:
    """Pages of 16 against dense keys and the peers, pages of 1 against pages of 16."""
    for shape in filter(lambda s: run.wants(f"{s.name} decode"), QUICK_DECODE if run.quick else DECODE):
        dense = Dense(shape)
        paged = {n: paged_copy(dense, n) for n in DECODE_PAGE_SIZES}
        calls = ours(dense, paged) | build_rivals(dense_rivals(run.peer or {}, (CUDNN_SDPA, FLASH_SDPA), dense), dense)
        if shape in FA4_DECODE:
            calls |= paged_rivals(run, {16: paged[16]})
        us = measure(run, calls)
        dense_us, page_16, page_1 = (us.pop(name) for name in (OURS_DENSE, page_name(16), page_name(1)))
        rows = (
            (
                paged[16],
                page_16,
                {OURS_DENSE: dense_us, **us},
                (*shape.all_bars(us), Bar("ratio", PAGED_LIMIT, OURS_DENSE)),
            ),
            (paged[1], page_1, {page_name(16): page_16}, (Bar("ratio", SINGLE_TOKEN_LIMIT, page_name(16)),)),
        )
        for problem, own_us, beside, bars in rows:
            beside |= measure_eager(run, problem)
            yield run.row(problem.name, "decode", own_us, shape.bytes, beside, bars, "read_tbps")


def prefill_rows(run: Run) -> Iterator[Row]:
    """Each page size against dense keys and the peer at that page size."""
    for shape, page_sizes in (QUICK_PREFILL if run.quick else PREFILL).items():
        if run.wants(f"{shape.name} prefill"):
            dense = Dense(shape)
            paged = {n: paged_copy(dense, n) for n in page_sizes}
            us = measure(run, ours(dense, paged) | paged_rivals(run, paged))
            for page_size, problem in paged.items():
                peer_us = {n: us[n] for n in us if n == f"{FA4} {page_name(page_size)}"}
                limit = PAGED_LIMIT if page_size >= 16 else SINGLE_TOKEN_LIMIT
                bars = (*shape.all_bars(peer_us), Bar("ratio", limit, OURS_DENSE))
                beside = {OURS_DENSE: us[OURS_DENSE], **peer_us, **measure_eager(run, problem)}
                own_us = us[page_name(page_size)]
                yield run.row(problem.name, "prefill", own_us, shape.flops, beside, bars, "matmul_tflops")


def growth_rows(run: Run) -> Iterator[Row]:
    """Time per token of a decode over 1 M tokens that belong to 1 to 1024 requests of different lengths."""
    if run.wants("growth decode"):
        problems = ragged_decodes(GROWTH_BATCHES)
        us = measure(run, {name: gated(problem) for name, problem in problems.items()})
        tokens = dict.fromkeys(problems, GROWTH_TOKENS)
        size_bytes = {name: LLAMA.bytes(len(p.kv_lens), GROWTH_TOKENS) for name, p in problems.items()}
        options = {"ceiling": "read_tbps", "label": f"{GROWTH_TOKENS} tokens of {{case}}"}
        yield from runner.growth_rows(run, "decode", us, tokens, size_bytes, **options)


def host_rows(run: Run) -> Iterator[Row]:
    """Host time per call of each entry, beside a raw launch and the peer's call."""
    for metric, shape in HOST.items():
        if run.wants(f"host {metric}"):
            problem = paged_copy(Dense(shape), 16)
            calls = {"bound": gated(problem), "execute": problem.execute(), "wrapper": problem.wrapper()}
            # a wrapper over pages compares three more tensors
            bars = runner.HOST_BARS | {"wrapper": 3.2}
            yield from runner.host_rows(calls, metric, paged_rivals(run, {16: problem}), bars)


SECTIONS = (decode_rows, prefill_rows, growth_rows, host_rows)


def main(argv: Sequence[str] | None = None) -> None:
    description = __doc__.splitlines()[0]
    runner.run_benchmark(
        "paged_attention", description, "libraries", peers.find_attention, SECTIONS, (growth_rows,), argv
    )


if __name__ == "__main__":
    main()

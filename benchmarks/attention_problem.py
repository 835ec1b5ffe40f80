"""What the attention benchmarks share: problems with dense, packed and paged keys and values, their check, their
candidates."""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import eager
import harness
import runner
from harness import Bar

# One call of flash-attn-4 takes the host about 80 us, one scrub of an H200 about 60: with three the device waits for no
# peer.
SCRUBS = 3
DEVICE = "cuda"
ITEM_BYTES = 2  # bf16
# Rows of a request that are compared with fp64: all of a short one, the ends and a stretch inside of a long one.
CHECK_ALL_ROWS, CHECK_ROWS = 512, 192


@dataclass(frozen=True)
class Heads:
    """`heads` query heads and `kv_heads` KV heads of `dim` columns."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def name(self) -> str:
        return f"h{self.heads}/{self.kv_heads} d{self.dim}"

    def bytes(self, num_queries: int, num_keys: int) -> int:
        """Bytes that must move: q, k and v read, out written."""
        return 2 * ITEM_BYTES * self.dim * (num_queries * self.heads + num_keys * self.kv_heads)

    def flops(self, q_len: int, kv_len: int, causal: bool) -> int:
        """Operations of both matrix products; causal queries see half of the keys of their own corner."""
        pairs = q_len * kv_len - (q_len * q_len // 2 if causal else 0)
        return 4 * self.heads * self.dim * pairs


LLAMA = Heads(32, 8, 128)


@dataclass(frozen=True)
class Shape:
    """`batch` requests of `q_len` queries and `kv_len` keys each.

    Args:
        bars: besides the one against the best peer, at most `peer_limit` times its time.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: Heads = LLAMA
    causal: bool = False
    peer_limit: float = 1.0
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        lengths = f"{self.kv_len}" if self.q_len in (1, self.kv_len) else f"{self.q_len} of {self.kv_len}"
        mask = " causal" if self.causal else (" full" if self.q_len > 1 else "")
        return f"{self.batch}x{lengths} {self.heads.name}{mask}"

    @property
    def bytes(self) -> int:
        return self.heads.bytes(self.batch * self.q_len, self.batch * self.kv_len)

    @property
    def flops(self) -> int:
        return self.batch * self.heads.flops(self.q_len, self.kv_len, self.causal)

    def all_bars(self, peers_us: Mapping[str, float]) -> tuple[Bar, ...]:
        return (runner.best_peer_bar(self.peer_limit, peers_us), *self.bars)


def decode(batch: int, kv_len: int, heads: Heads, peer_limit: float, *bars: Bar) -> Shape:
    return Shape(batch, 1, kv_len, heads, peer_limit=peer_limit, bars=bars)


# The same for dense and paged keys.
DECODE = (
    decode(1, 512, LLAMA, 0.7, Bar("us", 7.0)),
    decode(1, 8192, LLAMA, 0.7, Bar("us", 15.0)),
    decode(16, 4096, LLAMA, 0.93, Bar("tbps", 3.9)),
    decode(64, 4096, LLAMA, 1.0, Bar("tbps", 4.15)),
    decode(16, 8192, Heads(32, 4, 256), 0.93, Bar("tbps", 4.0)),
    decode(8, 32768, Heads(64, 8, 128), 1.0),
    decode(128, 1024, LLAMA, 0.93),
)
QUICK_DECODE = (DECODE[0], DECODE[2])


def ragged_lengths(batch: int, total: int) -> tuple[int, ...]:
    """`batch` lengths from about half to one and a half of the mean, the same at every run, that sum to `total`."""
    draw = random.Random(0)
    ends = list(itertools.accumulate(draw.uniform(0.5, 1.5) for _ in range(batch)))
    cuts = [round(total * end / ends[-1]) for end in (0, *ends)]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def int_tensor(values: Sequence[int]):
    import torch

    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def offsets(lengths: Sequence[int]):
    """int32 ``(B + 1,)``."""
    return int_tensor((0, *itertools.accumulate(lengths)))


def permutation(size: int):
    import torch

    return torch.randperm(size, dtype=torch.int32, device=DEVICE)


def randn(*shape: int):
    import torch

    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


class Problem:
    """Tensors of one problem, allocated once: bf16, random; and the ways to call the library on them.

    Attributes:
        op_name, wrapper_name: of cuteforge.
        inputs: positional operands before `out`.
        tensors, config: keyword operands, and what the constructor and the wrapper take besides.
        q_lens, kv_lens: of every request.
    """

    name: str
    op_name: str
    wrapper_name: str
    inputs: tuple
    out: Any
    tensors: dict[str, Any]
    config: dict[str, Any]
    q_lens: Sequence[int]
    kv_lens: Sequence[int]

    def request(self, b: int) -> tuple[Any, Any, Any]:
        """q ``(L, Hq, D)``, k and v ``(S, Hkv, D)`` of request b."""
        raise NotImplementedError

    def rows(self, out, b: int):
        """The rows ``(L, Hq, D)`` of request b in a result."""
        raise NotImplementedError

    def compiled(self, arch: str | None = None) -> tuple[Any, tuple, dict[str, Any]]:
        """The op, with its operands and keywords."""
        import torch

        import cuteforge

        operands = (*self.inputs, self.out)
        op = getattr(cuteforge, self.op_name)(*operands, **self.tensors, **self.config).compile(arch)
        size_bytes = op.workspace_bytes()
        workspace = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE) if size_bytes else None
        return op, operands, {**self.tensors, "workspace": workspace}

    def bound(self, arch: str | None = None) -> Callable[[], object]:
        op, operands, keywords = self.compiled(arch)
        return op.bind(*operands, **keywords)

    def execute(self) -> Callable[[], object]:
        op, operands, keywords = self.compiled()
        return functools.partial(op.execute, *operands, **keywords)

    def wrapper(self) -> Callable[[], object]:
        """The allocating entry."""
        import cuteforge

        return functools.partial(getattr(cuteforge, self.wrapper_name), *self.inputs, **self.tensors, **self.config)

    def policy(self) -> Callable[[], object]:
        """The call that chooses a backend; of dense problems."""
        import cuteforge

        return functools.partial(cuteforge.attention, *self.inputs, is_causal=self.config.get("causal", False))

    def eager(self) -> Callable[[], Any]:
        """The same in plain torch, in the layout of q."""
        raise NotImplementedError

    @property
    def eager_bytes(self) -> int:
        """What the scores of all requests and their weights take there."""
        pairs = sum(q_len * kv_len for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True))
        return eager.SCORE_BYTES * self.inputs[0].shape[-2] * pairs

    def check_ours(self, call: Callable[[], object], who: str) -> None:
        """Runs `call`, which writes `out`, on a poisoned one, and compares; AssertionError names the first stretch over
        its budget."""
        self.out.fill_(math.nan)
        call()
        self.check(self.out, who)

    def check(self, out, who: str) -> None:
        """Compares a few requests and heads of a result with fp64; all of it must be finite."""
        if not out.isfinite().all():
            raise AssertionError(f"{who}, {self.name}: not every element was written with a finite number")
        longest, shortest = (f(range(len(self.kv_lens)), key=self.kv_lens.__getitem__) for f in (max, min))
        for b in sorted({0, len(self.kv_lens) - 1, longest, shortest}):
            operands, got = self.request(b), self.rows(out, b)
            for kv_head in {0, operands[1].shape[1] - 1}:
                for rows in checked_rows(self.q_lens[b]):
                    self._compare(operands, got, kv_head, rows, f"{who}, {self.name}: request {b}, KV head {kv_head}")

    def _compare(self, operands: tuple, got, kv_head: int, rows: slice, where: str) -> None:
        q, k, v = operands
        group = q.shape[1] // k.shape[1]
        heads, causal = slice(kv_head * group, (kv_head + 1) * group), self.config.get("causal", False)
        # The corner is at the bottom right, so rows up to `stop` are a request of their own, with the keys up to their
        # corner.
        keys = slice(k.shape[0] - (q.shape[0] - rows.stop)) if causal else slice(None)
        part = (q[None, rows, heads], *(x[None, keys, kv_head : kv_head + 1] for x in (k, v)))
        error, budget = error_and_budget(part, causal, got[None, rows, heads])
        if not error <= budget:
            raise AssertionError(f"{where}, rows {rows.start} to {rows.stop}: off by {error:.3g}, allowed {budget:.3g}")


def checked_rows(length: int) -> Iterator[slice]:
    if length <= CHECK_ALL_ROWS:
        yield slice(0, length)
        return
    inside = length // 2 + 1  # odd for the usual lengths, so across the edges of tiles
    for start in (0, inside, length - CHECK_ROWS):
        yield slice(start, min(start + CHECK_ROWS, length))


def error_and_budget(operands: tuple, causal: bool, got) -> tuple[float, float]:
    """Largest error, and 2 x (the error of eager code in the dtype of q + one ulp of the largest value)."""
    import torch

    from cuteforge.families.attention import reference

    attend = functools.partial(reference.attend, *operands, causal=causal)
    exact, _ = attend(compute_dtype=torch.float64, out_dtype=torch.float64)
    eager, _ = attend(compute_dtype=got.dtype)
    error, eager_error = ((t.double() - exact).abs().max().item() for t in (got, eager))
    ulp = torch.finfo(got.dtype).eps * 2.0 ** math.floor(math.log2(exact.abs().max().item()))
    return error, 2 * (eager_error + ulp)


class Dense(Problem):
    """q, k and v of one length each: decode, or prefill."""

    def __init__(self, shape: Shape) -> None:
        import torch

        torch.manual_seed(0)
        heads, is_decode = shape.heads, shape.q_len == 1
        self.name, self.shape = shape.name, shape
        self.op_name, self.wrapper_name = (
            ("GQADecode", "gqa_decode_wrapper") if is_decode else ("GQAPrefill", "gqa_prefill_wrapper")
        )
        self.q = randn(shape.batch, shape.q_len, heads.heads, heads.dim)
        self.k, self.v = (randn(shape.batch, shape.kv_len, heads.kv_heads, heads.dim) for _ in range(2))
        self.inputs, self.out = (self.q, self.k, self.v), torch.empty_like(self.q)
        self.tensors, self.config = {}, {"causal": shape.causal}
        self.q_lens, self.kv_lens = [shape.q_len] * shape.batch, [shape.kv_len] * shape.batch

    def eager(self) -> Callable[[], Any]:
        return eager.attention(*self.inputs, **self.config)

    def request(self, b: int):
        return self.q[b], self.k[b], self.v[b]

    def rows(self, out, b: int):
        return out[b]


class Packed(Problem):
    """Causal prefill of requests one after another."""

    op_name, wrapper_name = "GQAPrefill", "gqa_prefill_wrapper"

    def __init__(self, name: str, lengths: Sequence[int], heads: Heads = LLAMA) -> None:
        import torch

        torch.manual_seed(0)
        self.name, self.total = name, sum(lengths)
        self.q = randn(self.total, heads.heads, heads.dim)
        self.k, self.v = (randn(self.total, heads.kv_heads, heads.dim) for _ in range(2))
        self.cu_seqlens = offsets(lengths)
        self.inputs, self.out = (self.q, self.k, self.v), torch.empty_like(self.q)
        self.tensors = {"cu_seqlens_q": self.cu_seqlens, "cu_seqlens_k": self.cu_seqlens}
        self.config = {"causal": True}
        self.q_lens = self.kv_lens = lengths
        self._starts = self.cu_seqlens.tolist()

    def eager(self) -> Callable[[], Any]:
        return eager.packed_attention(*self.inputs, self.q_lens, **self.config)

    @property
    def eager_bytes(self) -> int:
        """Of the longest request: one comes after another."""
        return eager.SCORE_BYTES * self.q.shape[1] * max(self.q_lens) ** 2

    def request(self, b: int):
        return tuple(self.rows(x, b) for x in self.inputs)

    def rows(self, out, b: int):
        return out[self._starts[b] : self._starts[b + 1]]


def build_rivals(
    rivals: Mapping[str, Callable[[], Callable[[], Any]]], problem: Problem
) -> dict[str, Callable[[], Any]]:
    """The calls of other libraries that pass the check of `problem`; of the rest, the reason is printed.

    Args:
        rivals: name -> builder of a call that returns its result in the layout of the problem's q.
    """
    calls = {}
    for name, build in rivals.items():
        try:
            call = build()
            problem.check(call(), name)
            calls[name] = call
        except Exception as error:  # whatever another library does on this GPU, our figures stand without it
            print(f"{name} is not measured on {problem.name}: {type(error).__name__}: {error}", file=sys.stderr)
    return calls


def gated(problem: Problem, who: str = "ours", arch: str | None = None) -> Callable[[], object]:
    """The bound call of a problem, which has passed the check."""
    call = problem.bound(arch)
    harness.require_green(lambda: problem.check_ours(call, who))
    return call


def dense_rivals(peers: Mapping[str, Any], names: Sequence[str], problem: Dense) -> dict[str, Callable]:
    """Builders of the calls of the peers `names` that were found."""
    operands, causal = problem.inputs, problem.shape.causal
    return {n: functools.partial(peers[n].attend, *operands, causal=causal) for n in names if n in peers}


def measure(run: runner.Run, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    return harness.measure_group(calls, repeats=run.repeats, scrubs=SCRUBS)


def measure_eager(run: runner.Run, problem: Problem) -> dict[str, float]:
    """The time of plain torch; nothing where it takes too much memory or time, or fails the check. The reason is
    printed."""
    if problem.eager_bytes > eager.MOST_BYTES:
        size = f"{problem.eager_bytes * 1e-9:.0f} GB of scores"
        print(f"{eager.NAME} is not measured on {problem.name}: {size}", file=sys.stderr)
        return {}
    calls = build_rivals({eager.NAME: problem.eager}, problem)
    return runner.eager_us(problem.name, calls[eager.NAME], run.repeats) if calls else {}

"""Running dense attention in tests: configurations to compile, inputs with poisoned unused memory, guarded outputs,
oracles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from cuteforge import GQADecode, GQAPrefill, TupleDict, gqa_decode_wrapper, gqa_prefill_wrapper
from cuteforge.families.attention import reference
from helpers import biases, budget
from helpers.canary import Canary, strided_copy
from helpers.packs import offsets

BF16, FP16 = torch.bfloat16, torch.float16
CLASSES = {"decode": GQADecode, "prefill": GQAPrefill}
WRAPPERS = {"decode": gqa_decode_wrapper, "prefill": gqa_prefill_wrapper}
both_ops = {"argvalues": tuple(CLASSES), "ids": tuple(CLASSES)}
# Elements by which the layout with gaps moves heads and tokens apart: 16 bytes.
GAP = 8
OPTIONAL = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "mask", "bias", "sinks")


class Config(NamedTuple):
    """What a kernel may be compiled for, and the path the configuration guards."""

    d: int
    dv: int
    dtype: torch.dtype
    group: int
    guards: str

    @property
    def label(self) -> str:
        width = f"d{self.d}" if self.d == self.dv else f"d{self.d}-{self.dv}"
        return f"{width}-{str(self.dtype).removeprefix('torch.')}-g{self.group}"


HEAD_DIMS = (
    Config(128, 128, BF16, 4, "the common head"),
    Config(128, 128, FP16, 4, "the common head, fp16"),
    Config(8, 8, BF16, 4, "the narrowest head: half a step of the matrix instruction"),
    Config(40, 40, FP16, 4, "an odd number of 8-column vectors"),
    Config(64, 64, FP16, 4, "half the common head"),
    Config(72, 72, BF16, 4, "one vector past a power of two"),
    Config(80, 80, FP16, 4, "no multiple of 32"),
    Config(96, 96, BF16, 4, "no power of two"),
    Config(192, 192, FP16, 4, "a wide head"),
    Config(192, 128, BF16, 4, "values narrower than keys"),
    Config(256, 256, BF16, 4, "the widest head"),
)
_GROUPS = {
    1: "a head of its own for every query head",
    2: "two rows a KV head",
    3: "no power of two",
    5: "40 over 8",
    6: "24 over 4",
    7: "28 over 4",
    8: "half a row block",
    11: "33 over 3",
    16: "one row block",
    33: "one row past two blocks",
    64: "one KV head",
}
GROUPS = tuple(Config(128, 128, BF16, group, guards) for group, guards in _GROUPS.items())
CONFIGS = (*HEAD_DIMS, *GROUPS)
MAIN, MAIN_FP16, LATENT = HEAD_DIMS[0], HEAD_DIMS[1], HEAD_DIMS[9]


class Flags(NamedTuple):
    """Which optional things a call has: part of what is compiled. The suite compiles `BASE` of every config, and all of
    `FLAGS` of MAIN."""

    causal: bool = True
    lengths: bool = True
    lse: bool = True

    @property
    def label(self) -> str:
        return "-".join(name for name, is_set in self._asdict().items() if is_set) or "plain"


BASE = Flags()
FLAGS = (
    BASE,
    Flags(False, True, True),
    Flags(True, False, True),
    Flags(False, False, False),
    Flags(False, True, False),
)


@dataclass(frozen=True)
class Inputs:
    """Operands of one call but its outputs; packed with cu_seqlens, else dense."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    causal: bool = False
    softmax_scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None

    @property
    def optional(self) -> dict[str, torch.Tensor]:
        """The optional operands that this call has, as the class and the wrapper take them."""
        given = {name: getattr(self, name) for name in OPTIONAL}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def options(self) -> dict[str, Any]:
        names = ("causal", "softmax_scale", "window", "softcap")
        return {name: getattr(self, name) for name in names}

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        *batch, tokens, heads, _ = self.q.shape
        return (*batch, heads, tokens)

    def with_(self, **replaced) -> Inputs:
        return replace(self, **replaced)

    def request(self, b: int) -> Inputs:
        """Request `b` of a dense call without a mask, alone."""
        lengths = None if self.seqlens_k is None else self.seqlens_k[b : b + 1].clone()
        return self.with_(**{n: getattr(self, n)[b : b + 1].clone() for n in ("q", "k", "v")}, seqlens_k=lengths)


class Results(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor | None


# Inputs.


def draw(
    config: Config,
    batch: int,
    length: int,
    size: int,
    kv_heads: int = 2,
    *,
    device,
    flags: Flags = BASE,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    **given,
) -> Inputs:
    """Normal dense operands. With lengths, `ragged_lengths` by default, everything past them is NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = (length, kv_heads * config.group, config.d), (size, kv_heads, config.d), (size, kv_heads, config.dv)
    q, k, v = (torch.randn(batch, *s, generator=generator, device=device).to(config.dtype) for s in shapes)
    x = Inputs(q, k, v, causal=flags.causal, **given)
    return with_lengths(x, ragged_lengths(batch, size) if lengths is None else lengths) if flags.lengths else x


def ragged_lengths(batch: int, size: int) -> list[int]:
    """The whole capacity, most of it, a single token, none at all, and so on."""
    pattern = (size, size - size // 3, min(size, 1), 0, size // 2, max(size - 1, 0))
    return [pattern[b % len(pattern)] for b in range(batch)]


def with_lengths(x: Inputs, lengths: Sequence[int]) -> Inputs:
    """`x` with seqlens_k, and its keys and values past them NaN."""
    k, v = x.k.clone(), x.v.clone()
    for b, n in enumerate(lengths):
        k[b, max(n, 0) :], v[b, max(n, 0) :] = torch.nan, torch.nan
    return x.with_(k=k, v=v, seqlens_k=torch.tensor(lengths, dtype=torch.int32, device=x.q.device))


def draw_ragged(
    config: Config,
    lens_q: Sequence[int],
    lens_k: Sequence[int],
    kv_heads: int = 2,
    *,
    device,
    causal: bool = True,
    spare_tokens: int = 3,
    seed: int = 0,
    **given,
) -> Inputs:
    """Normal packed operands; after the last request k and v have `spare_tokens` of NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    num_q, num_k = sum(lens_q), sum(lens_k) + spare_tokens
    shapes = (num_q, kv_heads * config.group, config.d), (num_k, kv_heads, config.d), (num_k, kv_heads, config.dv)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(config.dtype) for shape in shapes)
    k[sum(lens_k) :], v[sum(lens_k) :] = torch.nan, torch.nan
    cuts = (offsets(lens).to(device) for lens in (lens_q, lens_k))
    return Inputs(q, k, v, *cuts, causal=causal, **given)


# Layouts: the same values in other memory.


def _head_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _with_gaps(x: torch.Tensor) -> torch.Tensor:
    return strided_copy(x, gap_stride(x.shape))


def gap_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Heads, tokens and requests apart by 16, 48 and more bytes."""
    *batch, tokens, heads, width = shape
    head = width + GAP
    token = heads * head + 3 * GAP
    return (*([(tokens + 1) * token] if batch else []), token, head, 1)


def _fused(x: Inputs) -> Inputs:
    """k and v side by side in one buffer, and q in one that holds as many other heads."""
    heads = x.k.shape[-2]
    key_values = torch.cat((x.k, x.v), -1) if x.v.shape[-1] != x.k.shape[-1] else torch.cat((x.k, x.v), -2)
    if key_values.shape[-2] == heads:
        k, v = key_values.split((x.k.shape[-1], x.v.shape[-1]), -1)
    else:
        k, v = key_values.split(heads, -2)
    q = torch.cat((x.q, torch.full_like(x.q, torch.nan)), -2)[..., : x.q.shape[-2], :]
    return x.with_(q=q, k=k, v=v)


def _each(place: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Inputs]:
    return lambda x: x.with_(q=place(x.q), k=place(x.k), v=place(x.v))


LAYOUTS: dict[str, Callable[[Inputs], Inputs]] = {
    "contiguous": lambda x: x,
    "head_major": _each(_head_major),
    "gaps": _each(_with_gaps),
    "fused": _fused,
    "keys_head_major": lambda x: x.with_(k=_head_major(x.k)),
}


# Running.


@dataclass(frozen=True)
class Call:
    """A compiled op with guarded, poisoned outputs."""

    op: Any
    x: Inputs
    out: Canary
    lse: Canary | None
    workspace: Canary | None

    @property
    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        return (self.x.q, self.x.k, self.x.v, self.out.tensor), self.named

    @property
    def named(self) -> dict[str, Any]:
        named = {**self.x.optional, "workspace": None if self.workspace is None else self.workspace.tensor}
        return named if self.lse is None else {**named, "lse": self.lse.tensor}

    def execute(self, **options) -> None:
        positional, named = self.arguments
        self.op.execute(*positional, **named, **options)

    def bind(self, **options) -> Callable[[], None]:
        positional, named = self.arguments
        return self.op.bind(*positional, **named, **options)

    def results(self) -> Results:
        return Results(self.out.tensor, None if self.lse is None else self.lse.tensor)

    def check_memory(self) -> None:
        """Every element of the outputs was written, and nothing around them or the workspace."""
        self.out.check("out")
        if self.lse is not None:
            self.lse.check("lse")
        if self.workspace is not None:
            self.workspace.check_guards("workspace")

    def check_untouched(self) -> None:
        self.out.check_untouched("out")
        if self.lse is not None:
            self.lse.check_untouched("lse")

    def poison(self) -> None:
        """Fill the outputs with NaN before the next run."""
        for tensor in self.results():
            if tensor is not None:
                tensor.fill_(torch.nan)


def prepare(
    kind: str, x: Inputs, *, lse: bool = True, num_splits: int | None = None, out_gaps: bool = False, **options
) -> Call:
    """Compile the class for `x`; `options` replace those of `x`."""
    device = x.q.device
    out = Canary(x.out_shape, x.q.dtype, device, stride=gap_stride(x.out_shape) if out_gaps else None)
    lse_canary = Canary(x.lse_shape, torch.float32, device) if lse else None
    splits = {"num_splits": num_splits} if kind == "decode" else {}
    samples = x.optional if lse_canary is None else {**x.optional, "lse": lse_canary.tensor}
    op = CLASSES[kind](x.q, x.k, x.v, out.tensor, **samples, **{**x.options, **splits, **options}).compile()
    num_bytes = op.workspace_bytes()
    return Call(op, x, out, lse_canary, Canary((num_bytes,), torch.uint8, device) if num_bytes else None)


def run(kind: str, x: Inputs, *, stream=None, **options) -> Results:
    """What the class writes into poisoned memory; its surroundings are checked."""
    call = prepare(kind, x, **options)
    call.execute(stream=stream)
    torch.cuda.synchronize(x.q.device)
    call.check_memory()
    return call.results()


def wrapped(kind: str, x: Inputs, **options) -> TupleDict:
    """The wrapper's results, out and lse."""
    return WRAPPERS[kind](x.q, x.k, x.v, **x.optional, **{**x.options, "return_lse": True, **options})


# Judging.


def expected(x: Inputs, compute_dtype=torch.float64, out_dtype: torch.dtype | None = torch.float64) -> Results:
    """The reference, dense: packed requests side by side, ``(B, L, Hq, Dv)`` and ``(B, Hq, L)``."""
    q, k, v, lens_q, lens_k = x.q, x.k, x.v, None, x.seqlens_k
    if x.cu_seqlens_q is not None:
        q, lens_q = reference.unpack(q, x.cu_seqlens_q)
        k, lens_k = reference.unpack(k, x.cu_seqlens_k)
        v, _ = reference.unpack(v, x.cu_seqlens_k)
    out, lse = reference.attend(
        q,
        k,
        v,
        lens_q=lens_q,
        lens_k=lens_k,
        mask=x.mask,
        bias=x.bias,
        sinks=x.sinks,
        **x.options,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
    )
    return Results(out, lse)


def by_request(results: Results, x: Inputs) -> list[Results]:
    """Results of a call cut up: out ``(L, Hq, Dv)`` and lse ``(Hq, L)`` of every request."""
    if x.cu_seqlens_q is None:
        lse = [None] * len(results.out) if results.lse is None else results.lse
        return [Results(*pair) for pair in zip(results.out, lse)]
    cuts = x.cu_seqlens_q.tolist()
    runs = [slice(first, end) for first, end in zip(cuts, cuts[1:])]
    return [Results(results.out[r], None if results.lse is None else results.lse[:, r]) for r in runs]


def check(results: Results, x: Inputs) -> None:
    """Spec: each request by itself within the budget of its dtype, and queries that see nothing exactly 0 and -inf, or
    the sink of their head."""
    oracle, eager = expected(x), expected(x, x.q.dtype, x.q.dtype)
    eager_lse = expected(x, torch.float32).lse
    for b, got in enumerate(by_request(results, x)):
        rows = got.out.shape[0]
        truth = oracle.out[b, :rows]
        budget.assert_within_budget(got.out, truth, eager.out[b, :rows], f"out of request {b}")
        blind = _sees_nothing(x, b, rows)
        assert not got.out[blind.t()].any(), f"request {b}: queries that see nothing are not 0"
        if got.lse is not None:
            check_lse(got.lse, oracle.lse[b, :, :rows], eager_lse[b, :, :rows], lse_slack(x, b), f"lse of request {b}")


def _sees_nothing(x: Inputs, b: int, rows: int) -> torch.Tensor:
    """Which queries of request `b` see no key, ``(Hq, rows)``: those that have no lse without sinks."""
    return expected(x.with_(sinks=None)).lse[b, :, :rows].isneginf()


def check_lse(got: torch.Tensor, oracle: torch.Tensor, eager: torch.Tensor, slack: float, name: str) -> None:
    """fp32, -inf where the oracle is, and elsewhere within twice the error of fp32 eager code, one ulp and `slack`."""
    assert got.dtype == torch.float32 and got.shape == oracle.shape, f"{name}: {got.dtype} {got.shape}"
    finite = budget.assert_same_specials(got, oracle, name)
    if not bool(finite.any()):
        return
    truth = oracle.double()[finite]
    error, eager_error = ((t.double()[finite] - truth).abs().max() for t in (got, eager))
    limit = 2 * (eager_error + budget.ulp(truth.abs().max(), torch.float32)) + slack
    assert error <= limit, f"{name}: error {error:.3e} over {limit:.3e}"


def lse_slack(x: Inputs, b: int) -> float:
    """What scores may be off by because matrix instructions truncate the fp32 sums that eager code rounds.

    At most ``2**-23`` of the sum of magnitudes at each of the ``D / 8`` steps (an instruction adds eight products at a
    time), and four units for the scale and the logarithm; with a softcap as much as its hyperbolic tangent is off.
    """
    d = x.q.shape[-1]
    scale = d**-0.5 if x.softmax_scale is None else abs(x.softmax_scale)
    if x.cu_seqlens_q is None:
        q, k = x.q[b], x.k[b]
    else:
        q, k = (t[cuts[b] : cuts[b + 1]] for t, cuts in ((x.q, x.cu_seqlens_q), (x.k, x.cu_seqlens_k)))
    return score_slack(q, k, scale) + cap_slack(x.softcap) + biases.slack(x.bias)


def cap_slack(softcap: float | None) -> float:
    """What an error of ``2**-20`` in the tangent makes of a capped score."""
    return (softcap or 0.0) * 2.0**-20


def score_slack(q: torch.Tensor, k: torch.Tensor, scale: float) -> float:
    """`lse_slack` of given queries and keys."""
    longest = [float(t.float().nan_to_num(0).norm(dim=-1).max()) if t.numel() else 0.0 for t in (q, k)]
    return (q.shape[-1] / 8 + 4) * 2.0**-23 * (1 + scale * longest[0] * longest[1])


def same(a: Results, b: Results) -> bool:
    """Whether two runs have the same bits."""
    return all(budget.same_bits(s, t) for s, t in zip(a, b, strict=True) if s is not None)

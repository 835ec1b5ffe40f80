"""Running the rotary op in tests: configurations to compile, layouts of the call, guarded memory, oracles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from cuteforge import RotaryEmbedding, rotary_table
from cuteforge.families.rotary import reference
from helpers import budget
from helpers.canary import Canary, Slices

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAX_POS = 4096
# Bytes by which the odd layouts move heads and tokens apart: a multiple of the widest access.
GAP_BYTES = 16


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Config(NamedTuple):
    """What a kernel is compiled for, and the path the configuration guards."""

    d: int
    rotary_dim: int
    dtype: torch.dtype
    interleaved: bool
    index: torch.dtype | None  # of the positions; None: a table by token
    guards: str

    @property
    def label(self) -> str:
        pairing = "interleaved" if self.interleaved else "halves"
        index = "freqs_cis" if self.index is None else _short(self.index)
        return f"d{self.d}-{self.rotary_dim}-{_short(self.dtype)}-{pairing}-{index}"


CONFIGS = (
    Config(128, 128, BF16, True, torch.int64, "the common head, adjacent pairs"),
    Config(128, 128, BF16, False, torch.int64, "the common head, split halves"),
    Config(128, 128, BF16, True, None, "cos and sin by token"),
    Config(128, 64, BF16, False, torch.int32, "half of the head passes"),
    Config(128, 128, FP32, False, torch.int64, "fp32: half the elements an access"),
    Config(2, 2, BF16, True, torch.int64, "a single pair, adjacent"),
    Config(2, 2, FP32, False, None, "a single pair, split"),
    Config(3, 2, FP16, False, torch.int32, "odd head dim: every second head misaligned"),
    Config(8, 8, BF16, False, torch.int32, "halves of half an access"),
    Config(8, 6, FP16, True, None, "rotated columns end inside an access"),
    Config(8, 2, FP32, False, torch.int64, "two of eight columns"),
    Config(64, 64, FP16, True, torch.int32, "fp16"),
    Config(64, 64, FP32, True, torch.int64, "fp32, adjacent pairs"),
    Config(64, 16, BF16, False, None, "a quarter of the head, by token"),
    Config(65, 64, BF16, True, torch.int64, "odd head dim: scalar accesses"),
    Config(80, 80, BF16, True, torch.int64, "head dim no multiple of 32"),
    Config(80, 32, FP16, False, torch.int32, "two fifths of the head"),
    Config(96, 96, BF16, False, None, "head dim no power of two"),
    Config(96, 24, FP32, True, torch.int64, "a quarter of the head, fp32"),
    Config(128, 126, BF16, False, torch.int64, "halves of 63: scalar accesses in a wide head"),
    Config(192, 64, BF16, True, torch.int64, "a third of the head: as in latent attention"),
    Config(192, 192, FP16, False, None, "a wide head, fp16"),
    Config(256, 256, BF16, False, torch.int64, "the widest head of attention"),
    Config(256, 256, FP32, True, None, "the widest head in fp32"),
    Config(256, 2, BF16, False, torch.int32, "all but one pair passes"),
)
ADJACENT, HALVES, BY_TOKEN, PARTIAL, HALVES_FP32 = CONFIGS[:5]
MAIN_CONFIGS = (ADJACENT, HALVES, BY_TOKEN, PARTIAL)


class Layout(NamedTuple):
    """Run-time facts of a call: none may matter to the result, or to what is compiled beyond rank and number of
    tensors."""

    name: str
    tokens: tuple[int, ...]
    heads: int
    kv_heads: int  # 0: one tensor
    place: str
    in_place: bool
    guards: str


LAYOUTS = (
    Layout("packed", (37,), 5, 0, "contiguous", False, "one tensor, an odd number of heads"),
    Layout("packed_in_place", (37,), 4, 0, "contiguous", True, "one tensor onto itself"),
    Layout("two_packed", (37,), 8, 2, "contiguous", False, "two tensors with their own head counts"),
    Layout("fused_in_place", (37,), 8, 2, "fused", True, "q and k inside one qkv buffer"),
    Layout("dense", (3, 13), 4, 0, "contiguous", False, "batch and tokens apart"),
    Layout("dense_in_place", (3, 13), 6, 3, "contiguous", True, "dense, two tensors onto themselves"),
    Layout("fused", (37,), 6, 1, "fused", False, "read from the qkv buffer, write elsewhere"),
    Layout("fused_dense", (2, 19), 8, 2, "fused", True, "slices of which neither batch nor token pitch is that of x"),
    Layout("gaps", (37,), 4, 2, "gaps", False, "heads and tokens apart, inputs and outputs"),
    Layout("gaps_in_place", (2, 19), 4, 2, "gaps", True, "heads and tokens apart, onto themselves"),
    Layout("head_major", (2, 19), 4, 2, "head_major", False, "the token stride is the smallest"),
    Layout("head_major_in_place", (37,), 5, 1, "head_major", True, "packed, head-major, onto itself"),
    Layout("one_head", (37,), 1, 1, "head_major", True, "one head"),
    Layout("one_token", (1,), 32, 8, "gaps", True, "one token"),
    Layout("one_of_each", (1, 1), 1, 1, "gaps", False, "every dim but the last is 1"),
    Layout("one_batch", (1, 37), 2, 1, "head_major", True, "one batch"),
    Layout("many_heads", (9,), 130, 9, "contiguous", False, "several runs of heads a token, the last short"),
    Layout("long", (5003,), 3, 1, "contiguous", True, "many CTAs, the last short"),
)  # fmt: skip
PACKED, PACKED_IN_PLACE, TWO_PACKED, FUSED, DENSE = LAYOUTS[:5]


class Case(NamedTuple):
    """One row of a case table."""

    config: Config
    layout: Layout

    @property
    def label(self) -> str:
        return f"{self.config.label}-{self.layout.name}"


CASES = (
    *(Case(config, layout) for config in CONFIGS for layout in (PACKED, FUSED)),
    *(Case(config, layout) for config in MAIN_CONFIGS for layout in LAYOUTS if layout not in (PACKED, FUSED)),
    *(Case(config, layout) for config in (CONFIGS[7], CONFIGS[14]) for layout in LAYOUTS if layout.place == "gaps"),
)
case_table = {"argvalues": CASES, "ids": [case.label for case in CASES]}


@dataclass(frozen=True)
class Inputs:
    """Operands of one call but the outputs; `k` is None for one tensor."""

    x: torch.Tensor
    k: torch.Tensor | None
    table: reference.Table
    positions: torch.Tensor | None
    interleaved: bool

    @property
    def heads(self) -> dict[str, torch.Tensor]:
        return {"x": self.x} if self.k is None else {"x": self.x, "k": self.k}

    @property
    def lookup(self) -> dict:
        """The table as the wrappers take it."""
        if self.positions is None:
            return {"freqs_cis": self.table}
        return {"cos": self.table[0], "sin": self.table[1], "positions": self.positions}

    def with_(self, **replaced) -> Inputs:
        return replace(self, **replaced)


@dataclass(frozen=True)
class Memory:
    """Where a call reads and writes: tensors by operand name, and what guards their surroundings."""

    inputs: Inputs
    outputs: Mapping[str, torch.Tensor]
    guards: Mapping[str, Canary | Slices]

    def check(self) -> None:
        """Nothing outside was written, and of outputs of their own every element."""
        for name, guard in self.guards.items():
            guard.check_guards(name)
            if isinstance(guard, Canary) and name in self.outputs:
                guard.check_written(name)


def draw(config: Config, layout: Layout, device, seed: int = 0) -> Inputs:
    """Normal operands, contiguous; positions anywhere in the table, both ends included."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(num_heads: int) -> torch.Tensor:
        shape = (*layout.tokens, num_heads, config.d)
        return torch.randn(shape, generator=generator, device=device).to(config.dtype)

    cos, sin = rotary_table(MAX_POS, config.rotary_dim, device=device)
    positions = torch.randint(MAX_POS, layout.tokens, generator=generator, device=device)
    positions.view(-1)[:1], positions.view(-1)[1:2] = MAX_POS - 1, 0
    keys = normal(layout.kv_heads) if layout.kv_heads else None
    if config.index is None:
        table, index = torch.stack((cos[positions], sin[positions]), -1), None
    else:
        table, index = (cos, sin), positions.to(config.index)
    return Inputs(normal(layout.heads), keys, table, index, config.interleaved)


def arrange(x: Inputs, layout: Layout) -> Memory:
    """`x` again in the memory of `layout`, outputs poisoned."""
    if layout.place == "fused":
        heads, guards = _fuse(x.heads)
    else:
        strides = {name: _stride(layout.place, values) for name, values in x.heads.items()}
        guards = {name: _guarded(values, strides[name]) for name, values in x.heads.items()}
        heads = {name: guard.tensor for name, guard in guards.items()}
    placed = x.with_(**heads)
    names = {"x": "out", "k": "k_out"}
    if layout.in_place:
        return Memory(placed, {names[name]: tensor for name, tensor in heads.items()}, guards)
    place = "contiguous" if layout.place == "fused" else layout.place
    own = {
        names[name]: Canary(t.shape, t.dtype, t.device, stride=_stride(place, t)) for name, t in placed.heads.items()
    }
    return Memory(placed, {name: canary.tensor for name, canary in own.items()}, {**guards, **own})


def compiled(x: Inputs, outputs: Mapping[str, torch.Tensor]) -> RotaryEmbedding:
    keys = {} if x.k is None else {"k": x.k, "k_out": outputs["k_out"]}
    op = RotaryEmbedding(x.x, x.table, outputs["out"], x.positions, **keys, interleaved=x.interleaved)
    return op.compile()


def execute(op, x: Inputs, outputs: Mapping[str, torch.Tensor], **options) -> None:
    keys = {} if x.k is None else {"k": x.k, "k_out": outputs["k_out"]}
    op.execute(x.x, x.table, outputs["out"], x.positions, **keys, **options)


def run(x: Inputs, layout: Layout, *, inverse: bool = False, stream=None) -> dict[str, torch.Tensor]:
    """What the class writes (`out`, and `k_out` where there are keys), in the memory of `layout`; the guards are
    checked."""
    memory = arrange(x, layout)
    execute(compiled(memory.inputs, memory.outputs), memory.inputs, memory.outputs, inverse=inverse, stream=stream)
    torch.cuda.synchronize(x.x.device)
    memory.check()
    if not layout.in_place:
        assert all(budget.same_bits(a, b) for a, b in zip(memory.inputs.heads.values(), x.heads.values())), (
            "an input changed"
        )
    return {name: tensor.clone() for name, tensor in memory.outputs.items()}


def check(results: Mapping[str, torch.Tensor], x: Inputs, *, inverse: bool = False) -> None:
    """Spec: fp32 arithmetic and one rounding; other columns bit for bit; tokens outside the table NaN."""
    for (name, got), values in zip(results.items(), x.heads.values(), strict=True):
        eager = eager_of(values, x, inverse, FP32)
        oracle = eager_of(values, x, inverse, torch.float64)
        budget.assert_one_rounding_step(got, eager, _mass(values, x), 2, name)
        budget.assert_within_budget(got, oracle, eager.to(got.dtype), name)
        rotary_dim = _rotary_dim(x)
        inside = ~eager.isnan().all((-1, -2))
        passed, want = (_one_nan(t[..., rotary_dim:][inside]) for t in (got, values))
        assert budget.same_bits(passed, want), f"{name}: columns from {rotary_dim} on have changed"


def eager_of(values: torch.Tensor, x: Inputs, inverse: bool = False, compute_dtype=FP32) -> torch.Tensor:
    """The reference on one tensor of `x`, unrounded."""
    options = {"interleaved": x.interleaved, "inverse": inverse}
    return reference.rotate(
        values, x.table, x.positions, **options, compute_dtype=compute_dtype, out_dtype=compute_dtype
    )


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two runs have the same bits."""
    return a.keys() == b.keys() and all(budget.same_bits(a[name], b[name]) for name in a)


def _mass(values: torch.Tensor, x: Inputs) -> torch.Tensor:
    """Sum of the magnitudes of the two products of each element."""
    table = x.table.abs() if x.positions is None else tuple(t.abs() for t in x.table)
    positive = x.with_(table=table)
    # One direction adds the products of first columns, the other those of second ones.
    return torch.maximum(*(eager_of(values.abs(), positive, inverse) for inverse in (False, True)))


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.masked_fill(tensor.isnan(), torch.nan)


def _rotary_dim(x: Inputs) -> int:
    return 2 * (x.table.shape[-2] if x.positions is None else x.table[0].shape[-1])


def _stride(place: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor of heads in a layout."""
    *tokens, heads, d = tensor.shape
    gap = GAP_BYTES // tensor.dtype.itemsize
    if place == "head_major":
        steps = (d, tokens[-1] * d, heads * tokens[-1] * d)
        return (*((steps[2],) if len(tokens) == 2 else ()), steps[0], steps[1], 1)
    head = d + gap if place == "gaps" else d
    token = heads * head + 3 * gap if place == "gaps" else heads * head
    batch = (tokens[-1] + 1) * token if place == "gaps" else tokens[-1] * token
    return (*((batch,) if len(tokens) == 2 else ()), token, head, 1)


def _guarded(values: torch.Tensor, stride: tuple[int, ...]) -> Canary:
    canary = Canary(values.shape, values.dtype, values.device, stride=stride)
    canary.tensor.copy_(values)
    return canary


def _fuse(heads: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Slices]]:
    """All tensors, and values after them, side by side in one buffer (…, heads of q, k and v, D)."""
    *tokens, _, d = heads["x"].shape
    values = torch.randn(*tokens, heads.get("k", heads["x"]).shape[-2], d, device=heads["x"].device)
    buffer = torch.cat((*heads.values(), values.to(heads["x"].dtype)), -2)
    views, first = {}, 0
    for name, tensor in heads.items():
        views[name] = buffer[..., first : first + tensor.shape[-2], :]
        first += tensor.shape[-2]
    return views, {"fused": Slices(buffer, *views.values())}

"""Every family of ops as one row: what the tests of the life of an op, in fe_api/lifecycle, ask of it.

A row draws operands, always of the same shapes, in several versions: other numbers, lengths, tables and positions. It
makes the op and the call of the wrapper for them, and judges results by the oracle of its family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cuteforge as cf
from cuteforge.families.attention import reference
from helpers import attention as attn
from helpers import budget, csa, paged, rotary
from helpers.canary import Canary
from helpers.packs import Pack, offsets

Tensors = dict[str, torch.Tensor]
ENTRIES = ("execute", "bind", "wrapper")


class NoGuard:
    """Of operands that no call writes."""

    def __init__(self, x: Any) -> None:
        pass

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class Family:
    """A way to call an op.

    Attributes:
        versions: how many versions of the operands `draw` makes.
        draw: (device, version) -> operands, a dataclass whose fields hold tensors and tuples of tensors.
        outputs: operands -> results to be, poisoned and guarded.
        make: (operands, results) -> the op, not compiled.
        arguments: (operands, results) -> what `execute` and `bind` take, by position and by name.
        wrapper: (operands, **options) -> results by the names of `outputs`.
        judge: (results, operands) -> fails unless they are right.
        guard: of memory that a call may write in part: made before it, checked after it.
        without_writes: operands -> the same, for a guard that allows no write at all.
        most_launches: kernels, copies and fills of a bound call; None: not counted.
        long_versions: two of the versions, with work for many CTAs.
    """

    versions: int
    draw: Callable[[Any, int], Any]
    outputs: Callable[[Any], dict[str, Canary]]
    make: Callable[[Any, Tensors], Any]
    arguments: Callable[[Any, Tensors], tuple[tuple, dict[str, Any]]]
    wrapper: Callable[..., Mapping[str, torch.Tensor]]
    judge: Callable[[Mapping[str, torch.Tensor], Any], None]
    guard: Callable[[Any], Any] = NoGuard
    without_writes: Callable[[Any], Any] = lambda x: x
    most_launches: int | None = None
    long_versions: tuple[int, int] = (1, 2)

    def call(self, device, version: int = 0, arch: str | None = None) -> Call:
        """A compiled op with operands and poisoned results."""
        return Call(self, self.draw(device, version), arch)

    def refill(self, x: Any, version: int) -> None:
        """The numbers of another version in the memory of `x`."""
        fresh = tensors_of(self.draw(next(iter(tensors_of(x).values())).device, version))
        for name, tensor in tensors_of(x).items():
            tensor.copy_(fresh[name])


class Call:
    """An op with its operands `x`, its `results`, and all that guards their surroundings."""

    def __init__(self, family: Family, x: Any, arch: str | None = None) -> None:
        self.family, self.x = family, x
        self.guards = family.outputs(x)
        self.results = {name: guard.tensor for name, guard in self.guards.items()}
        self.op = family.make(x, self.results).compile(arch)
        num_bytes = self.op.workspace_bytes()
        self.scratch = None
        if num_bytes:
            # ones are NaN, or -1, to whoever reads them
            self.scratch = Canary((num_bytes,), torch.uint8, next(iter(self.results.values())).device)
            self.scratch.tensor.fill_(255)

    @property
    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        positional, named = self.family.arguments(self.x, self.results)
        return positional, named if self.scratch is None else {**named, "workspace": self.scratch.tensor}

    def execute(self, op: Any = None, **options: Any) -> None:
        positional, named = self.arguments
        (self.op if op is None else op).execute(*positional, **named, **options)

    def bind(self, **options: Any) -> Callable[[], None]:
        positional, named = self.arguments
        return self.op.bind(*positional, **named, **options)

    def call_wrapper(self, **options: Any) -> Mapping[str, torch.Tensor]:
        return self.family.wrapper(self.x, **options)

    def warm(self, entry: str) -> tuple[Callable[[], None], Tensors]:
        """A launch by `entry` that compiles and loads nothing any more, and where its results are afterwards."""
        if entry != "wrapper":
            return self.bind() if entry == "bind" else self.execute, self.results
        results: Tensors = {}

        def run() -> None:
            results.update(self.call_wrapper().items())

        run()
        torch.cuda.synchronize()
        return run, results

    def refill(self, version: int) -> None:
        self.family.refill(self.x, version)

    def poison(self) -> None:
        poison(self.results)

    def check(self) -> None:
        """The results are right, all of them were written, and nothing around them."""
        torch.cuda.synchronize()
        self.check_memory()
        self.family.judge(self.results, self.x)

    def check_memory(self) -> None:
        for name, guard in self.guards.items():
            guard.check(name)
        self.check_guards()

    def check_guards(self) -> None:
        for name, guard in self.guards.items():
            guard.check_guards(name)
        if self.scratch is not None:
            self.scratch.check_guards("workspace")

    def check_untouched(self) -> None:
        for name, guard in self.guards.items():
            guard.check_untouched(name)


def poison(results: Mapping[str, torch.Tensor]) -> None:
    for tensor in results.values():
        tensor.fill_(torch.nan)


def tensors_of(x: Any) -> Tensors:
    """The operands by name; those of a tuple by name and number."""
    found = {}
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        parts = {field.name: value}
        if isinstance(value, tuple):
            parts = {f"{field.name}.{i}": part for i, part in enumerate(value)}
        found.update({name: part for name, part in parts.items() if isinstance(part, torch.Tensor)})
    return found


def with_tensors(x: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """`x` with operands by the names of `tensors_of`."""
    replaced: dict[str, Any] = {}
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        if isinstance(value, torch.Tensor):
            replaced[field.name] = tensors[field.name]
        elif isinstance(value, tuple) and any(isinstance(part, torch.Tensor) for part in value):
            replaced[field.name] = tuple(tensors[f"{field.name}.{i}"] for i in range(len(value)))
    return dataclasses.replace(x, **replaced)


def copied(results: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in results.items()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two runs have the same names and bits."""
    return a.keys() == b.keys() and all(budget.same_bits(tensor, b[name]) for name, tensor in a.items())


# Dense attention: keys long enough that decode splits them.

DENSE_SHAPES = {"decode": (3, 2, 4096), "prefill": (2, 130, 300)}
PACKED_LENGTHS = ([40, 0, 130, 1], [50, 3, 400, 7])


def _draw_dense(kind: str) -> Callable[[Any, int], attn.Inputs]:
    def draw(device, version):
        batch, length, size = DENSE_SHAPES[kind]
        lengths = [(size, 1000, 3)[(b + version) % 3] * size // 4096 if version else size for b in range(batch)]
        return attn.draw(attn.MAIN, batch, length, size, device=device, lengths=lengths, seed=version)

    return draw


def _draw_packed(device, version: int) -> attn.Inputs:
    turned = (lengths[version % 4 :] + lengths[: version % 4] for lengths in PACKED_LENGTHS)
    return attn.draw_ragged(attn.MAIN, *turned, device=device, seed=version)


def _attention_outputs(x: attn.Inputs) -> dict[str, Canary]:
    return {
        "out": Canary(x.out_shape, x.q.dtype, x.q.device),
        "lse": Canary(x.lse_shape, torch.float32, x.q.device),
    }


def _attention(kind: str, draw: Callable[[Any, int], attn.Inputs], most_launches: int) -> Family:
    return Family(
        versions=4,
        draw=draw,
        outputs=_attention_outputs,
        make=lambda x, results: attn.CLASSES[kind](x.q, x.k, x.v, **results, **x.optional, **x.options),
        arguments=lambda x, results: ((x.q, x.k, x.v, results["out"]), {**x.optional, "lse": results["lse"]}),
        wrapper=lambda x, **options: attn.wrapped(kind, x, **options),
        judge=lambda results, x: attn.check(attn.Results(results["out"], results["lse"]), x),
        most_launches=most_launches,
    )


# Paged attention: version 0 is what a graph is captured with, requests that are short beside the table.

TABLE_COLUMNS = 64
TABLE_ROWS = ((4, 1, 0, 2), (4, 1, 0, 2), (4, 1, 0, 2), (2, 0, 1, 4), (0, 1, 2, 4), (4, 1, 0, 2))
# Nothing, all of the table, around one page, anything.
KEYS = ((5, 5, 5, 5), (0, 0, 0, 0), (1024, 1024, 1024, 1024), (1, 16, 17, 1024), (1000, 3, 0, 129), (5, 5, 5, 5))
QUERIES = ((0, 0, 65, 65), (7, 100, 0, 23), (130, 0, 0, 0), (1, 1, 127, 1), (33, 32, 32, 33), (0, 0, 65, 65))


def draw_pages(kind: str, device, version: int) -> paged.Inputs:
    """All of one shape, the table as wide as the longest request may be; nothing to be read past the lengths, in the
    table and in the pool."""
    lengths, rows = KEYS[version], TABLE_ROWS[version]
    queries = QUERIES[version] if kind == "prefill" else 2
    full = paged.Batch((16 * TABLE_COLUMNS,) * len(lengths), 16, queries, rows=rows, spare_columns=0)
    x = paged.with_lengths(paged.draw(paged.CAUSAL, full, device, seed=version, page_seed=version), lengths)
    for row, length in zip(rows, lengths):
        stale = x.page_table[row, -(-length // 16) :].clone()
        x.page_table[row, -(-length // 16) :] = 2**31 - 1
        for cache in x.pools:
            cache[stale.long()] = torch.nan
    return paged.appending(x) if kind == "append" else x


def _pages(kind: str) -> Family:
    return Family(
        versions=len(KEYS),
        draw=lambda device, version: draw_pages(kind, device, version),
        outputs=lambda x: dict(paged.Outputs.of(x).guards),
        make=paged.make_op,
        arguments=paged.arguments,
        wrapper=paged.call_wrapper,
        judge=paged.check,
        guard=paged.PoolGuard,
        without_writes=lambda x: x.with_(new_k=None, new_v=None),
        long_versions=(2, 4),
    )


# Merging.


@dataclass(frozen=True)
class Parts:
    """Operands of a merge."""

    o_a: torch.Tensor
    lse_a: torch.Tensor
    o_b: torch.Tensor
    lse_b: torch.Tensor

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return self.o_a, self.lse_a, self.o_b, self.lse_b


def _draw_parts(device, version: int) -> Parts:
    generator = torch.Generator(device=device).manual_seed(version)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    parts = [(normal(2, 130, 8, 128).bfloat16(), normal(2, 8, 130) * 3) for _ in range(2)]
    parts[version % 2][1][0] = -torch.inf  # a part without keys for some requests, whose values count for nothing
    return Parts(*parts[0], *parts[1])


def _judge_merged(results: Mapping[str, torch.Tensor], x: Parts) -> None:
    oracle, eager = reference.merge(*(t.double() for t in x.all)), reference.merge(*x.all)
    for name, truth, rounded in zip(("out", "lse"), oracle, eager):
        budget.assert_within_budget(results[name], truth, rounded, name)


MERGE = Family(
    versions=4,
    draw=_draw_parts,
    outputs=lambda x: {"out": Canary.like(x.o_a), "lse": Canary.like(x.lse_a)},
    make=lambda x, results: cf.MergeState(*x.all, **results),
    arguments=lambda x, results: ((*x.all, results["out"], results["lse"]), {}),
    wrapper=lambda x, **options: cf.merge_state(*x.all, **options),
    judge=_judge_merged,
)


# Rotary.


def _draw_heads(config: rotary.Config) -> Callable[[Any, int], rotary.Inputs]:
    def draw(device, version):
        x = rotary.draw(config, rotary.TWO_PACKED, device, version)
        if version == 3 and x.positions is not None:
            x.positions[5] = -1  # out of the table, which is no error: it is read by the kernel
        return x

    return draw


def _rotary(config: rotary.Config) -> Family:
    return Family(
        versions=4,
        draw=_draw_heads(config),
        outputs=lambda x: {"out": Canary.like(x.x), "k_out": Canary.like(x.k)},
        make=lambda x, results: cf.RotaryEmbedding(
            x.x, x.table, results["out"], x.positions, k=x.k, k_out=results["k_out"], interleaved=x.interleaved
        ),
        arguments=lambda x, results: (
            (x.x, x.table, results["out"], x.positions),
            {"k": x.k, "k_out": results["k_out"]},
        ),
        wrapper=_rotate,
        judge=rotary.check,
    )


def _rotate(x: rotary.Inputs, **options: Any) -> Tensors:
    results = cf.rotary_qk_wrapper(x.x, x.k, **x.lookup, interleaved=x.interleaved, **options)
    return {"out": results["q"], "k_out": results["k"]}


# Compressor: room for 256 tokens, 64 rows and 3 segments, of which a version uses some.

ROOM = Pack((64,), 4, extra_tokens=192, extra_rows=48)
SEGMENTS = ((64, 0, 0), (100, 57, 99), (4, 0, 8), (0, 0, 0), (256, 0, 0))
GRADS = ("grad_kv", "grad_score", "grad_ape")


def _draw_segments(device, version: int):
    x = csa.inputs(csa.CSA, ROOM, device, seed=version, poison=False)
    lengths = SEGMENTS[version]
    cuts = (offsets(lens).to(device) for lens in (lengths, [n // x.ratio for n in lengths]))
    return x.with_(**dict(zip(("cu_seqlens", "cu_seqlens_comp"), cuts)))


def _judge_grads(results: Mapping[str, torch.Tensor], x) -> None:
    """`csa.check_backward` asks the pack which tokens are used; here the offsets say it, and change."""
    eager = csa.eager_backward(x)
    for name in GRADS[:2]:
        budget.assert_same_values(results[name], getattr(eager, name), name)
    torch.testing.assert_close(results["grad_ape"], eager.grad_ape, rtol=1e-4, atol=1e-4)


FORWARD = Family(
    versions=len(SEGMENTS),
    draw=_draw_segments,
    outputs=lambda x: {"out": Canary.like(x.grad_out)},
    make=lambda x, results: cf.CSACompressorForward(*x.tensors, results["out"], **x.config),
    arguments=lambda x, results: ((*x.tensors, results["out"]), {}),
    wrapper=lambda x, **options: cf.csa_compressor_forward_wrapper(
        *x.tensors, **x.config, total_comp=x.total_comp, **options
    ),
    judge=lambda results, x: csa.check_forward(results["out"], x),
    long_versions=(1, 4),
)
BACKWARD = Family(
    versions=len(SEGMENTS),
    draw=_draw_segments,
    outputs=lambda x: {name: Canary.like(t) for name, t in zip(GRADS, (x.kv, x.score, x.ape))},
    make=lambda x, results: cf.CSACompressorBackward(*x.tensors, x.grad_out, *results.values(), **x.config),
    arguments=lambda x, results: ((*x.tensors, x.grad_out, *results.values()), {}),
    wrapper=lambda x, **options: cf.csa_compressor_backward_wrapper(*x.tensors, x.grad_out, **x.config, **options),
    judge=_judge_grads,
    long_versions=(1, 4),
)

FAMILIES = {
    "attention decode": _attention("decode", _draw_dense("decode"), most_launches=2),
    "attention prefill": _attention("prefill", _draw_dense("prefill"), most_launches=1),
    "packed attention": _attention("prefill", _draw_packed, most_launches=2),
    "paged attention decode": _pages("decode"),
    "paged attention append": _pages("append"),
    "paged attention prefill": _pages("prefill"),
    "merge": MERGE,
    "rotary by position": _rotary(rotary.HALVES),
    "rotary by token": _rotary(rotary.BY_TOKEN),
    "compressor forward": FORWARD,
    "compressor backward": BACKWARD,
}
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_name = pytest.mark.parametrize("name", FAMILIES)

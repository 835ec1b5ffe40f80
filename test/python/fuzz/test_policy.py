"""The policy functions on a CPU against their definitions in fp64: shapes, groups, masks, options, strides, dtypes;
results and gradients."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from cuteforge import apply_rotary_emb, attention, compress
from helpers import definitions
from helpers.budget import assert_within_budget

FP64 = torch.float64
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
LAYOUTS = st.sampled_from(["plain", "gaps", "transposed", "one batch", "one head"])
SEEDS = st.integers(0, 2**31 - 1)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    """What a user has set chooses no backend here."""
    monkeypatch.delenv("CUTEFORGE_BACKEND", raising=False)


def laid_out(x, layout):
    """The values of `x` in memory with NaN wherever it has none; or those of its first row everywhere, by a stride of
    0."""
    if layout in ("one batch", "one head"):
        dim = 0 if layout == "one batch" else x.dim() - 2
        return x.narrow(dim, 0, min(1, x.shape[dim])).expand_as(x)
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "gaps":
        parent = torch.full([2 * n + 1 for n in x.shape], torch.nan, dtype=x.dtype)
        view = parent[tuple(slice(1, 2 * n, 2) if n else slice(0, 0) for n in x.shape)]
        return view.copy_(x)
    return x


def weights_of(shape):
    """Of a sum over a result: numbers that every dtype has, of both signs and 0."""
    return (torch.arange(torch.Size(shape).numel()) % 7 - 3).view(shape) / 2


def derived(function, leaves, weights):
    """The result, and the gradients of the leaves under the weights."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    if not out.numel():
        return out.detach(), [torch.zeros_like(x) for x in leaves]
    grads = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves, allow_unused=True)
    return out.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)]


class Terms(NamedTuple):
    """What the terms of a sum add up to at most, each of which is rounded."""

    out: float
    gradients: float


def terms_of(leaves, shape, scale):
    """In a result of few terms the definition may be exact by chance, so that it leaves no room."""
    q, k, v = (x.abs().double() for x in leaves[:3])
    if not (q.numel() and k.numel()):
        return Terms(0.0, 0.0)
    scale = q.shape[3] ** -0.5 if scale is None else abs(scale)
    scores = scale * q.shape[3] * float(q.max() * k.max())
    out = float(v.max()) * (4 * scores + k.shape[1] + 4)
    # differences of sums over the rows of a group, which may cancel
    return Terms(out, 1.5 * shape[1] * shape[2] * shape[3] * out * max(1.0, scale * float(max(q.max(), k.max()))))


def assert_close(got, exact, rounded, terms, name):
    """Within the budget, or within one rounding, in fp32 or better, of terms that add up to so much."""
    eps = torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps
    if got.numel() and not (got.double() - exact).abs().max() <= eps * terms:
        assert_within_budget(got, exact, rounded, name)


def check_attention(function, definition, leaves, shape, scale):
    """`function` of the leaves as the definition in fp64 says, within what the definition in their own dtype makes of
    them."""
    weights = weights_of(shape)
    got, got_grads = derived(function, leaves, weights)
    want, want_grads = derived(definition, [x.double() for x in leaves], weights)
    eager, eager_grads = derived(definition, leaves, weights)
    assert got.shape == shape and got.dtype == leaves[0].dtype
    with torch.no_grad():
        alone = function(*leaves)
    terms = terms_of(leaves, shape, scale)
    for name, result in (("out without a graph", alone), ("out", got)):
        assert_close(result, want, eager, terms.out, name)
    for name, grad, exact, rounded in zip(("q", "k", "v", "sinks"), got_grads, want_grads, eager_grads):
        assert_close(grad, exact, rounded, terms.gradients, f"gradient of {name}")


sizes = st.fixed_dictionaries(
    {
        "batch": st.integers(0, 3),
        "length": st.integers(0, 6) | st.integers(14, 18),
        "num_keys": st.integers(0, 9) | st.integers(14, 18),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "dim": st.sampled_from([1, 3, 8, 16]),
        "v_dim": st.sampled_from([1, 5, 8, 16]),
    }
)
sides = st.one_of(st.none(), st.integers(0, 6), st.just(2**40))
options = st.fixed_dictionaries(
    {"is_causal": st.booleans()},
    optional={
        "scale": st.sampled_from([0.0, -0.0, -1.0, 1.0, 0.3, 0, 2]),
        "window": st.one_of(st.none(), st.tuples(sides, sides)),
        "softcap": st.sampled_from([None, 0, 0.5, 3.0, 30]),
        "fwd": st.sampled_from([None, "decode", "prefill"]),
    },
)


def draw_mask(kind, density, heads, size, generator):
    batch, length, keys = size["batch"], size["length"], size["num_keys"]
    shapes = {
        2: (batch, keys),
        3: (batch, length, keys),
        4: (batch, heads, length, keys),
        "(1, S)": (1, keys),
        "(1, L, S)": (1, length, keys),
        "(B, 1, 1, S)": (batch, 1, 1, keys),
        "(1, H, 1, S)": (1, heads, 1, keys),
        "(1, 1, L, S)": (1, 1, length, keys),
    }
    if kind is None:
        return None
    return torch.rand(shapes[kind], generator=generator) < density


def as_bias(keep, dtype, generator):
    """A mask that is added: -inf where it does not keep."""
    return torch.randn(keep.shape, generator=generator).masked_fill(~keep, -torch.inf).to(dtype)


masks = st.sampled_from([None, None, 2, 3, 4, "(1, S)", "(1, L, S)", "(B, 1, 1, S)", "(1, H, 1, S)", "(1, 1, L, S)"])


def test_attention_is_its_definition(fuzz):
    def body(size, options, dtype, layouts, mask, density, bias_dtype, with_sinks, number):
        generator = torch.Generator().manual_seed(number)
        batch, heads = size["batch"], size["kv_heads"] * size["group"]
        q = torch.randn(batch, size["length"], heads, size["dim"], generator=generator)
        k = torch.randn(batch, size["num_keys"], size["kv_heads"], size["dim"], generator=generator)
        v = torch.randn(batch, size["num_keys"], size["kv_heads"], size["v_dim"], generator=generator)
        leaves = [x.to(dtype) for x in (q, k, v)]
        if with_sinks:
            leaves.append(torch.randn(heads, generator=generator).to(dtype))
        keep = draw_mask(mask, density, heads, size, generator)
        if keep is not None and bias_dtype is not None:
            keep = as_bias(keep, dtype if bias_dtype == "as q" else bias_dtype, generator)
        plain = {name: value for name, value in options.items() if name != "fwd"}

        def run(q, k, v, sinks=None):
            laid = [laid_out(x, layout) for x, layout in zip((q, k, v), layouts)]
            return attention(*laid, attn_mask=keep, sinks=sinks, **options)

        def define(q, k, v, sinks=None):
            laid = [
                laid_out(x, "plain" if layout in ("gaps", "transposed") else layout)
                for x, layout in zip((q, k, v), layouts)
            ]
            if not q.numel() or not size["num_keys"]:
                return torch.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype) + 0 * (q.sum() + k.sum() + v.sum())
            return definitions.attention(*laid, keep, sinks=sinks, **plain)

        check_attention(run, define, leaves, (batch, size["length"], heads, size["v_dim"]), options.get("scale"))

    fuzz.check(
        body,
        examples=80,
        size=sizes,
        options=options,
        dtype=DTYPES,
        layouts=st.tuples(LAYOUTS, LAYOUTS, LAYOUTS),
        mask=masks,
        bias_dtype=st.sampled_from([None, "as q", torch.float32, torch.float64]),
        density=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
        with_sinks=st.booleans(),
        number=SEEDS,
    )


def test_rotary_is_its_definition(fuzz):
    def body(tokens, heads, half, rest, dtype, layout, by_positions, flags, number):
        generator = torch.Generator().manual_seed(number)
        interleaved, inverse, is_complex, shared = flags
        x = torch.randn(*tokens, heads, 2 * half + rest, generator=generator).to(dtype)
        if by_positions:
            table = torch.randn(2, 7, half, generator=generator)
            positions = torch.randint(-2, 9, tokens, generator=generator, dtype=[torch.int32, torch.int64][number % 2])
            outside = (positions < 0) | (positions >= 7)
        else:
            table = torch.randn(*tokens[1 if shared and len(tokens) == 2 else 0 :], half, 2, generator=generator)

        def run(x, table):
            turn = {"interleaved": interleaved, "inverse": inverse}
            if by_positions:
                return apply_rotary_emb(laid_out(x, layout), cos=table[0], sin=table[1], positions=positions, **turn)
            table = torch.view_as_complex(table) if is_complex else table
            return apply_rotary_emb(laid_out(x, layout), table, **turn)

        def define(x, table):
            laid = laid_out(x, "plain" if layout in ("gaps", "transposed") else layout)
            if not by_positions:
                return definitions.rotary(laid, table[..., 0], table[..., 1], interleaved, inverse)
            cos, sin = (t[positions.clamp(0, 6).long()] for t in table)
            return definitions.rotary(laid, cos, sin, interleaved, inverse).masked_fill(
                outside[..., None, None], torch.nan
            )

        weights = weights_of(x.shape)
        got, got_grads = derived(run, (x, table), weights)
        want, want_grads = derived(define, (x.double(), table.double()), weights)
        # fp32 arithmetic and one rounding, whatever the dtype
        wide = torch.promote_types(dtype, torch.float32)
        eager, eager_grads = derived(define, (x.to(wide), table), weights)
        assert got.shape == x.shape and got.dtype == dtype
        assert_within_budget(got, want, eager.to(dtype), "out")
        if by_positions and bool(outside.any()):
            return  # NaN there has a NaN gradient
        # that of a row which stands for all is a sum, in the dtype of x
        shared = layout in ("one batch", "one head")
        eager_grads = derived(define, (x, table.to(dtype)), weights)[1] if shared else eager_grads
        largest = float(table.abs().max()) if table.numel() else 0.0
        for name, grad, exact, rounded in zip(("x", "table"), got_grads, want_grads, eager_grads):
            terms = 4 * x.numel() * largest if name == "x" else 0.0
            assert_close(grad, exact, rounded.to(grad.dtype), terms, f"gradient of {name}")

    tokens = st.one_of(st.tuples(st.integers(0, 6)), st.tuples(st.integers(0, 3), st.integers(0, 5)))
    fuzz.check(
        body,
        examples=100,
        tokens=tokens,
        heads=st.integers(1, 4),
        half=st.integers(1, 5),
        rest=st.integers(0, 3),
        dtype=DTYPES.filter(lambda d: d != FP64),
        layout=LAYOUTS,
        by_positions=st.booleans(),
        flags=st.tuples(*[st.booleans()] * 4),
        number=SEEDS,
    )


def test_compress_is_its_definition(fuzz):
    def body(lengths, past, ratio, coff, d, dtype, layout, given, number):
        generator = torch.Generator().manual_seed(number)
        cu_seqlens = [0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0]
        tokens, count = cu_seqlens[-1] + past, sum(n // ratio for n in lengths)
        padding = {"none": 0, "padded": 2, "truncated": -1, "read": 0}[given]
        assume(count + padding >= 0 and not (padding > 0 and tokens < ratio))
        kv, score = (torch.randn(tokens, coff * d, generator=generator).to(dtype) for _ in range(2))
        kv[cu_seqlens[-1] :], score[cu_seqlens[-1] :] = torch.nan, torch.nan
        ape = torch.randn(ratio, coff * d, generator=generator)
        rows = min(count, count + padding)
        cuts = torch.tensor(cu_seqlens, dtype=[torch.int32, torch.int64][number % 2])
        total = None if given == "read" else count + padding

        def run(kv, score, ape):
            laid = [laid_out(x, "gaps" if layout == "gaps" else "plain") for x in (kv, score)]
            return compress(*laid, ape, cuts, ratio=ratio, coff=coff, total_comp=total)[:rows]

        def define(kv, score, ape):
            return definitions.compress(kv, score, ape.to(kv.dtype), cu_seqlens, ratio, coff)[:rows]

        check_compress(run, define, kv, score, ape, (rows, d))

    fuzz.check(
        body,
        examples=100,
        lengths=st.lists(st.integers(0, 14), max_size=4),
        past=st.integers(0, 5),
        ratio=st.integers(1, 5),
        coff=st.integers(1, 2),
        d=st.integers(1, 9),
        dtype=DTYPES.filter(lambda d: d != FP64),
        layout=LAYOUTS,
        given=st.sampled_from(["none", "padded", "truncated", "read"]),
        number=SEEDS,
    )


def check_compress(run, define, kv, score, ape, shape):
    weights = weights_of(shape)
    got, got_grads = derived(run, (kv, score, ape), weights)
    want, want_grads = derived(define, (kv.double(), score.double(), ape.double()), weights)
    eager, eager_grads = derived(define, (kv.float(), score.float(), ape), weights)
    assert got.shape == shape and got.dtype == kv.dtype
    assert_within_budget(got, want, eager.to(kv.dtype), "out")
    # a difference of sums over a window; that of ape also over blocks, in an order of its own
    largest = kv.nan_to_num().abs().max().double() if kv.numel() else 0.0
    for name, grad, exact, rounded in zip(("kv", "score", "ape"), got_grads, want_grads, eager_grads):
        terms = 4 * 1.5 * largest * (shape[0] if name == "ape" else 1)
        assert_close(grad, exact, rounded.to(grad.dtype), terms, f"gradient of {name}")

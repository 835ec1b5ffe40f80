"""check_support of every class on any configuration: True, or a refusal that begins with a name, without a GPU and in
no time."""

import inspect
import re
import time

import pytest
from hypothesis import strategies as st

import cuteforge
from cuteforge import ContractError, TensorSpec, UnsupportedError
from helpers.public_calls import OPS

# No call takes longer: a table is walked, nothing is compiled. Of this thread: a busy machine may stop it for seconds.
MOST_SECONDS = 0.3
# What a refusal may begin with beside the arguments: parts of a table, and a limit.
FACTS = ("cos", "sin", "freqs_cis", "D =", "arch", "device")
FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn")
INTS = ("int32", "int64", "bool", "uint8")

EXTENTS = st.one_of(st.integers(0, 4), st.sampled_from([7, 16, 17, 300, 65536, 2**31 - 1, 2**31, 2**33, 2**62]))
HEADS = st.sampled_from([1, 2, 3, 4, 8, 12, 33, 64, 0])
DIMS = st.sampled_from([8, 64, 128, 136, 192, 256, 8, 64, 128, 0, 1, 4, 12, 60, 264, 2**31])


class Draw:
    """Sizes that go together most of the time, and the specs of operands made of them."""

    def __init__(self, data):
        self._draw = data.draw
        self.float = self.one_of(*[*FLOATS[:2]] * 5, *FLOATS)
        self.index = self.one_of(*["int32"] * 12, *INTS)
        self.device = self.one_of(*["cuda", "cuda:0", "meta"] * 4, "cuda:1", "cpu")

    def __call__(self, strategy):
        return self._draw(strategy)

    def one_of(self, *values):
        return self._draw(st.sampled_from(values))

    def is_odd_one(self):
        """True now and then: something does not go together."""
        return self._draw(st.integers(0, 60)) == 60

    def spec(self, *shape, dtype=None):
        shape, dtype, stride, device, odd = (
            list(shape),
            dtype or self.float,
            None,
            self.device,
            self(st.integers(0, 60)),
        )
        if odd == 60 and shape:
            shape[self(st.integers(0, len(shape) - 1))] = self(EXTENTS)
        elif odd == 59:
            shape = shape[1:] if self(st.booleans()) else [1, *shape]
        elif odd == 58:
            dtype = self.one_of(*FLOATS, *INTS)
        elif odd == 57:
            device = self.one_of("cuda", "cuda:1", "meta", "cpu")
        elif odd == 56:
            stride = self(st.lists(st.integers(-1, 2**40), min_size=len(shape), max_size=len(shape)))
        elif odd > 48:
            stride = strides(shape, self(st.integers(0, 16)), self(st.permutations(range(len(shape)))))
        elif odd > 44 and shape:
            stride = strides(shape, 8 * odd, range(len(shape)))
        return TensorSpec(tuple(shape), dtype, stride, device)

    def maybe(self, spec):
        """An optional operand."""
        return spec() if self(st.booleans()) else None


def strides(shape, gap, order):
    """Of rows in any order, with a gap."""
    made, step = [0] * len(shape), 1
    for dim in reversed(order):
        made[dim] = step
        step *= max(1, shape[dim]) + gap
    return tuple(made)


def attention_options(draw):
    sides = st.one_of(st.none(), st.integers(0, 2**40))
    return {
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(sides, sides))),
        "softcap": draw(st.sampled_from([None, None, None, 0, 30.0, 50, 1e-9])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.0, -1, 3e38])),
    }


def dense(draw, is_packed=False):
    batch, length, keys, kv_heads, dim = draw(EXTENTS), draw(EXTENTS), draw(EXTENTS), draw(HEADS), draw(DIMS)
    heads = kv_heads * draw(st.integers(1, 5)) + draw.is_odd_one()
    v_dim = dim if not draw.is_odd_one() else draw(DIMS)
    rows, cols = ((length,), (keys,)) if is_packed else ((batch, length), (batch, keys))
    lse = (heads, length) if is_packed else (batch, heads, length)
    return {
        "q": draw.spec(*rows, heads, dim),
        "k": draw.spec(*cols, kv_heads, dim),
        "v": draw.spec(*cols, kv_heads, v_dim),
        "out": draw.spec(*rows, heads, v_dim),
        "lse": draw.maybe(lambda: draw.spec(*lse, dtype="float32")),
        "mask": draw.maybe(lambda: mask(draw, batch, heads, length, keys)),
        "bias": draw.maybe(lambda: bias(draw, batch, heads, length, keys)),
        "sinks": draw.maybe(lambda: draw.spec(heads, dtype="float32")),
        **attention_options(draw),
    }, batch


def mask(draw, batch, heads, length, keys):
    shape = draw.one_of(
        (batch, keys), (batch, length, keys), (1, keys), (batch, heads, length, keys), (1, 1, length, keys)
    )
    return draw.spec(*shape, dtype="bool")


def bias(draw, batch, heads, length, keys):
    shape = draw.one_of((batch, heads, length, keys), (1, heads, 1, keys), (1, 1, 1, keys), (batch, 1, length, keys))
    return draw.spec(*shape, dtype=draw.one_of(*["bfloat16", "float16", "float32"] * 5, "float64", "bool"))


def decode(draw):
    given, batch = dense(draw)
    lengths = draw.maybe(lambda: draw.spec(batch, dtype=draw.index))
    return {
        **given,
        "seqlens_k": lengths,
        "num_splits": draw(st.sampled_from([None, None, None, 1, 2, 64, 256, 0, 2**31])),
    }


def prefill(draw):
    is_packed = draw(st.booleans())
    given, batch = dense(draw, is_packed)
    names = ("cu_seqlens_q", "cu_seqlens_k") if is_packed else ("seqlens_k",)
    return {
        **given,
        **{name: draw.spec(batch + is_packed, dtype=draw.index) for name in names if not draw.is_odd_one()},
    }


def paged(draw, is_prefill):
    given, batch = dense(draw, is_packed=is_prefill)
    q, kv_heads, v_dim = given["q"], given.pop("k").shape[-2:], given.pop("v").shape[-1:]
    pages, page_size, rows, columns = draw(EXTENTS), draw(EXTENTS), draw(EXTENTS), draw(EXTENTS)
    pool = (pages, page_size) if draw(st.booleans()) else (pages,)
    has_rows = draw(st.booleans())
    lengths = {"seqlens_k": draw.spec(batch, dtype=draw.index)}
    if draw(st.booleans()):
        lengths = {"kv_indptr": draw.spec(batch + 1, dtype=draw.index)}
    more = (
        {"cu_seqlens_q": draw.spec(batch + 1, dtype=draw.index)}
        if is_prefill
        else {"num_splits": draw.one_of(None, 1, 7)}
    )
    if not is_prefill and draw(st.booleans()):
        more |= {"new_k": draw.spec(batch, *kv_heads), "new_v": draw.spec(batch, *kv_heads[:1], *v_dim)}
    return {
        **given,
        "q": q,
        "k_cache": draw.spec(*pool, *kv_heads),
        "v_cache": draw.spec(*pool, *kv_heads[:1], *v_dim),
        "page_table": draw.spec(rows if has_rows else batch, columns, dtype=draw.index),
        **lengths,
        **more,
        "page_table_rows": draw.spec(batch, dtype=draw.index) if has_rows else None,
    }


def merge(draw):
    shape = (draw(EXTENTS), draw(EXTENTS), draw(HEADS), draw(DIMS))
    lse = (shape[0], shape[2], shape[1])
    parts = {}
    for part in "ab":
        parts |= {f"o_{part}": draw.spec(*shape), f"lse_{part}": draw.spec(*lse, dtype="float32")}
    return {**parts, "out": draw.spec(*shape), "lse": draw.spec(*lse, dtype="float32")}


def compressor(draw, is_backward):
    tokens, rows, segments, ratio, coff = (
        draw(EXTENTS),
        draw(EXTENTS),
        draw(EXTENTS),
        draw(st.sampled_from([4, 128, 1, 2, 3, 256, 257, 0])),
        draw.one_of(1, 2, 1, 2, 1, 2, 3),
    )
    d = draw(DIMS)
    wide = (tokens, coff * d)
    offsets = {name: draw.spec(segments + 1, dtype=draw.index) for name in ("cu_seqlens", "cu_seqlens_comp")}
    given = {
        "kv": draw.spec(*wide),
        "score": draw.spec(*wide),
        "ape": draw.spec(ratio, coff * d, dtype="float32"),
        **offsets,
    }
    if not is_backward:
        return {**given, "out": draw.spec(rows, d), "ratio": ratio, "coff": coff}
    grads = {
        "grad_kv": draw.spec(*wide),
        "grad_score": draw.spec(*wide),
        "grad_ape": draw.spec(ratio, coff * d, dtype="float32"),
    }
    return {
        **given,
        "grad_out": draw.spec(rows, d),
        **grads,
        "ratio": ratio,
        "coff": coff,
        "deterministic": draw(st.booleans()),
    }


def rotary(draw):
    tokens = (draw(EXTENTS),) if draw(st.booleans()) else (draw(EXTENTS), draw(EXTENTS))
    dim = draw(DIMS)
    half = draw.one_of(dim // 2, dim // 4, 1)
    x = (*tokens, draw(HEADS), dim)
    by_positions = draw(st.booleans())
    table = draw.spec(*tokens, half, 2, dtype="float32")
    positions = None
    if by_positions:
        rows = draw(EXTENTS)
        table, positions = (
            tuple(draw.spec(rows, half, dtype="float32") for _ in "cs"),
            draw.spec(*tokens, dtype=draw.one_of("int32", "int64")),
        )
    keys = (*tokens, draw(HEADS), dim)
    pair = {"k": draw.spec(*keys), "k_out": draw.spec(*keys)} if draw(st.booleans()) else {}
    return {
        "x": draw.spec(*x),
        "table": table,
        "out": draw.spec(*x),
        "positions": positions,
        **pair,
        "interleaved": draw(st.booleans()),
    }


CONFIGURATIONS = {
    "GQADecode": decode,
    "GQAPrefill": prefill,
    "PagedGQADecode": lambda draw: paged(draw, False),
    "PagedGQAPrefill": lambda draw: paged(draw, True),
    "MergeState": merge,
    "CSACompressorForward": lambda draw: compressor(draw, False),
    "CSACompressorBackward": lambda draw: compressor(draw, True),
    "RotaryEmbedding": rotary,
}


def test_every_class_has_configurations():
    assert set(CONFIGURATIONS) == set(OPS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_check_support_is_true_or_a_named_refusal(name, fuzz):
    served = []

    def body(data):
        draw = Draw(data)
        try:
            given = CONFIGURATIONS[name](draw)
        except ContractError as error:
            assert re.match("(shape|stride|dtype|device)\\b", str(error))  # of a TensorSpec
            return
        names = [*inspect.signature(getattr(cuteforge, name)).parameters, *FACTS]
        begun = time.thread_time()
        try:
            op = getattr(cuteforge, name)(**given)
            served.append(op.check_support())
            assert served[-1] is True and op.check_support() is True
            assert op.workspace_bytes() >= 0
        except (ContractError, UnsupportedError) as error:
            assert any(str(error).startswith(name) for name in names), str(error)
        assert time.thread_time() - begun < MOST_SECONDS

    fuzz.check(body, examples=150, data=st.data())
    assert served, "nothing was served: the configurations go together too rarely"

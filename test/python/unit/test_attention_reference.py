"""The eager reference of attention against a plain loop over the contract, torch's own attention, and published
cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuteforge.families.attention import reference

FP64 = torch.float64
INF = math.inf


def normal(*shape, seed=0, dtype=FP64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def draw(batch, length, size, kv_heads, group, d=8, dv=8, seed=0, dtype=FP64):
    shapes = ((batch, length, kv_heads * group, d), (batch, size, kv_heads, d), (batch, size, kv_heads, dv))
    return tuple(normal(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes))


def mask_at(mask, b, h, i, j):
    """One entry of a mask of any rank; what it lacks is masked."""
    index = {2: (b, j), 3: (b, i, j), 4: (b, h, i, j)}[mask.dim()]
    index = [0 if n == 1 and axis < mask.dim() - 1 else at for axis, (n, at) in enumerate(zip(mask.shape, index))]
    return all(at < n for at, n in zip(index, mask.shape)) and bool(mask[tuple(index)])


def sees(position, j, causal, window):
    """Whether a query at a position has key j in its window."""
    left, right = window or (None, None)
    right = right if not causal else 0 if right is None else min(right, 0)
    return (left is None or j >= position - left) and (right is None or j <= position + right)


def bias_at(bias, b, h, i, j):
    """One number of a bias; -inf where it lacks one."""
    index = [0 if n == 1 and axis < 3 else at for axis, (n, at) in enumerate(zip(bias.shape, (b, h, i, j)))]
    return float(bias[tuple(index)]) if all(at < n for at, n in zip(index, bias.shape)) else -INF


def naive(q, k, v, lens_q, lens_k, mask, causal, scale, window=None, softcap=None, sinks=None, bias=None):
    """The contract, one query at a time in Python floats."""
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    out, lse = q.new_zeros(batch, length, heads, v.shape[-1]), q.new_full((batch, heads, length), -INF)
    for b in range(batch):
        for i in range(lens_q[b]):
            for h in range(heads):
                seen = [j for j in range(lens_k[b]) if sees(i + lens_k[b] - lens_q[b], j, causal, window)]
                seen = [j for j in seen if mask is None or mask_at(mask, b, h, i, j)]
                scores = [scale * float(q[b, i, h] @ k[b, j, h // group]) for j in seen]
                if softcap:
                    scores = [softcap * math.tanh(s / softcap) for s in scores]
                if bias is not None:
                    scores = [s + bias_at(bias, b, h, i, j) for s, j in zip(scores, seen)]
                others = [] if sinks is None else [float(sinks[h])]
                top = max([*scores, *others], default=-INF)
                if top == -INF:
                    continue
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights) + sum(math.exp(s - top) for s in others)
                lse[b, h, i] = top + math.log(total)
                out[b, i, h] = (
                    sum((w * v[b, j, h // group] for w, j in zip(weights, seen)), 0 * v[b, 0, 0]) / total if seen else 0
                )
    return out, lse


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


MASK_SHAPES = {
    "none": None,
    "keys": ("B", "S"),
    "queries": ("B", "L", "S"),
    "queries_one_batch": (1, "L", "S"),
    "keys_as_queries": ("B", 1, "S"),
    "all_heads": ("B", 1, "L", "S"),
    "by_head": ("B", "H", "L", "S"),
    "by_head_one_query": (1, "H", 1, "S"),
    "short": ("B", 1, "L", "S-2"),
    "few_rows": ("B", "H", "L-1", "S"),
}


def draw_mask(kind, batch, heads, length, size, seed=0):
    if MASK_SHAPES[kind] is None:
        return None
    extents = {"B": batch, "H": heads, "L": length, "S": size, "S-2": max(size - 2, 0), "L-1": length - 1}
    shape = [extents.get(n, n) for n in MASK_SHAPES[kind]]
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 2), st.integers(1, 3)),
    dv=st.sampled_from([8, 4]),
    mask=st.sampled_from(sorted(MASK_SHAPES)),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.0, -0.7, 2.0]),
    seed=st.integers(0, 99),
)
def test_equals_a_plain_loop(sizes, dv, mask, causal, scale, seed):
    """Every kind of mask and its broadcasts, both corners, groups, lengths; NaN past the lengths is not read."""
    batch, length, size, kv_heads, group = sizes
    q, k, v = draw(batch, length, size, kv_heads, group, dv=dv, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    lens_q, lens_k = (torch.randint(n + 1, (batch,), generator=generator) for n in (length, size))
    for b in range(batch):
        for tensor, n in ((q, lens_q[b]), (k, lens_k[b]), (v, lens_k[b])):
            tensor[b, n:] = math.nan
    given_mask = draw_mask(mask, batch, kv_heads * group, length, size, seed)
    got = reference.attend(q, k, v, lens_q=lens_q, lens_k=lens_k, mask=given_mask, causal=causal, softmax_scale=scale)
    plain = 8**-0.5 if scale is None else scale
    close(got, naive(q, k, v, lens_q.tolist(), lens_k.tolist(), given_mask, causal, plain))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 6), st.integers(1, 2), st.integers(1, 3)),
    window=st.sampled_from([None, (None, None), (0, None), (2, None), (None, 1), (1, 0), (0, 0), (2, 1), (99, 99)]),
    softcap=st.sampled_from([None, 0, 0.5, 30.0]),
    sinks=st.sampled_from(["none", "normal", "no_sink", "large"]),
    mask=st.sampled_from(["none", "by_head"]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_options_equal_a_plain_loop(sizes, window, softcap, sinks, mask, causal, seed):
    """Windows on either side, caps, sinks of -inf and such as outweigh all keys, each with the others, with masks and
    lengths."""
    batch, length, size, kv_heads, group = sizes
    q, k, v = draw(batch, length, size, kv_heads, group, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    lens_q, lens_k = (torch.randint(n + 1, (batch,), generator=generator) for n in (length, size))
    given_mask = draw_mask(mask, batch, kv_heads * group, length, size, seed)
    values = normal(kv_heads * group, seed=seed)
    values = {"none": None, "normal": values, "no_sink": torch.full_like(values, -INF), "large": values + 40}[sinks]
    options = {"window": window, "softcap": softcap, "sinks": values}
    got = reference.attend(q, k, v, lens_q=lens_q, lens_k=lens_k, mask=given_mask, causal=causal, **options)
    want = naive(q, k, v, lens_q.tolist(), lens_k.tolist(), given_mask, causal, 8**-0.5, **options)
    for b, n in enumerate(lens_q.tolist()):
        close([got[0][b, :n], got[1][b, :, :n]], [want[0][b, :n], want[1][b, :, :n]])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 6), st.integers(1, 2), st.integers(1, 3)),
    shape=st.sampled_from(["by_head", "all_heads", "by_head_one_query", "short", "few_rows"]),
    softcap=st.sampled_from([None, 0.5]),
    sinks=st.booleans(),
    mask=st.sampled_from(["none", "keys"]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bias_equals_a_plain_loop(sizes, shape, softcap, sinks, mask, causal, seed):
    """It comes after the cap and is not scaled; -inf masks, and so does what it lacks."""
    batch, length, size, kv_heads, group = sizes
    heads = kv_heads * group
    q, k, v = draw(batch, length, size, kv_heads, group, seed=seed)
    kept = draw_mask(shape, batch, heads, length, size, seed)
    bias = 3 * normal(*kept.shape, seed=seed)
    bias[~kept] = -INF
    given_mask = draw_mask(mask, batch, heads, length, size, seed + 1)
    options = {"softcap": softcap, "sinks": normal(heads, seed=seed) if sinks else None}
    got = reference.attend(q, k, v, bias=bias, mask=given_mask, causal=causal, softmax_scale=0.7, **options)
    lens = [length] * batch, [size] * batch
    close(got, naive(q, k, v, *lens, given_mask, causal, 0.7, **options, bias=bias))


def test_nan_of_a_bias_comes_out_of_the_rows_that_see_it():
    q, k, v = draw(1, 2, 3, 1, 1)
    bias = torch.zeros(1, 1, 2, 3, dtype=FP64)
    bias[..., 2] = math.nan
    out, lse = reference.attend(q, k, v, bias=bias, causal=True)
    assert out.isnan()[0, :, 0, 0].tolist() == lse.isnan()[0, 0].tolist() == [False, True]


def test_window_by_hand():
    """Two queries at keys 3 and 4 of five: one before and none after; with causality a right side counts as none."""
    zeros, values = torch.zeros(1, 5, 1, 8, dtype=FP64), torch.arange(5.0, dtype=FP64).view(1, 5, 1, 1)
    for window, causal in (((1, 0), False), ((1, None), True), ((1, 3), True)):
        out, lse = reference.attend(zeros[:, :2], zeros, values, window=window, causal=causal)
        assert out.flatten().tolist() == [2.5, 3.5]
        torch.testing.assert_close(lse.flatten(), torch.full((2,), 2.0, dtype=FP64).log())
    out, _ = reference.attend(zeros[:, :2], zeros, values, window=(None, 0))
    assert torch.equal(out, reference.attend(zeros[:, :2], zeros, values, causal=True)[0])


def test_sink_by_hand():
    """Equal scores of 0 and a sink of ln 2: a weight of 2 beside one for each key, and no value. Without a key it is
    all there is."""
    zeros, values = torch.zeros(1, 2, 1, 8, dtype=FP64), torch.ones(1, 2, 1, 1, dtype=FP64)
    sinks = torch.tensor([math.log(2)], dtype=FP64)
    out, lse = reference.attend(zeros[:, :1], zeros, values, sinks=sinks)
    torch.testing.assert_close(out.item(), 0.5)
    torch.testing.assert_close(lse.item(), math.log(4))
    for lens_k in (torch.tensor([0]), None):
        mask = None if lens_k is not None else torch.zeros(1, 2, dtype=torch.bool)
        out, lse = reference.attend(zeros, zeros, values, lens_k=lens_k, mask=mask, sinks=sinks)
        assert not out.any() and torch.equal(lse, sinks.expand(1, 1, 2))


def test_softcap_bounds_the_scores():
    q, k, v = draw(2, 3, 9, 2, 2)
    _, lse = reference.attend(100 * q, k, v, softcap=2.0)
    assert (lse <= 2 + math.log(9)).all() and (lse >= -2 + math.log(9)).all()
    close(reference.attend(q, k, v, softcap=1e6), naive(q, k, v, [3, 3], [9, 9], None, False, 8**-0.5, softcap=1e6))


@pytest.mark.parametrize("kind", ["none", "keys", "all_heads", "by_head"])
def test_equals_torch(kind):
    """Its own attention in fp64, grouped heads repeated."""
    q, k, v = draw(3, 5, 7, 2, 3)
    mask = draw_mask(kind, 3, 6, 5, 7)
    if mask is not None:
        mask[..., 0] = True  # a row that sees nothing is NaN there
    heads_first = [t.transpose(1, 2).repeat_interleave(r, 1) for t, r in ((q, 1), (k, 3), (v, 3))]
    torch_mask = mask[:, None, None] if kind == "keys" else mask
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=torch_mask).transpose(1, 2)
    torch.testing.assert_close(reference.attend(q, k, v, mask=mask)[0], want, rtol=1e-12, atol=1e-12)


def test_causal_corner_is_at_the_bottom_right():
    """Two queries, five keys; then more queries than keys, of which the early ones see nothing."""
    zeros, values = torch.zeros(1, 5, 1, 8, dtype=FP64), torch.arange(5.0, dtype=FP64).view(1, 5, 1, 1)
    out, lse = reference.attend(zeros[:, :2], zeros, values, causal=True)
    assert out.flatten().tolist() == [1.5, 2.0]
    torch.testing.assert_close(lse.flatten(), torch.tensor([4.0, 5.0], dtype=FP64).log())
    out, lse = reference.attend(zeros, zeros[:, :2], values[:, :2], causal=True)
    assert out.flatten().tolist() == [0, 0, 0, 0, 0.5]
    assert lse.flatten()[:3].tolist() == [-INF] * 3


def test_query_head_reads_its_group():
    q, k, v = draw(1, 1, 4, 4, 7)
    v = torch.arange(4.0, dtype=FP64).view(1, 1, 4, 1).expand_as(v)
    out, _ = reference.attend(q, k, v)
    torch.testing.assert_close(out[0, 0, :, 0], (torch.arange(28) // 7).double())


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_nothing_to_do(empty):
    batch, length, size = (0 if empty == name else 2 for name in ("batch", "queries", "keys"))
    out, lse = reference.attend(*draw(batch, length, size, 1, 2), causal=True)
    assert out.shape == (batch, length, 2, 8) and not out.any()
    assert lse.shape == (batch, 2, length) and lse.isneginf().all()


def test_negative_lengths_are_empty_and_long_ones_end_at_the_memory():
    q, k, v = draw(2, 1, 3, 1, 1)
    out, lse = reference.attend(q, k, v, lens_k=torch.tensor([-4, 9], dtype=torch.int32))
    assert not out[0].any() and lse[0].isneginf().all()
    close((out[1:], lse[1:]), reference.attend(q[1:], k[1:], v[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    """Results in the dtype of q unless asked otherwise, lse never below fp32; eager code of a dtype is near the
    oracle."""
    q, k, v = draw(2, 3, 9, 2, 2, dtype=dtype)
    out, lse = reference.attend(q, k, v)
    assert out.dtype == dtype and lse.dtype == FP64
    wide, _ = reference.attend(q, k, v, out_dtype=FP64)
    assert wide.dtype == FP64 and torch.equal(wide.to(dtype), out)
    eager, eager_lse = reference.attend(q, k, v, compute_dtype=dtype)
    assert eager.dtype == dtype and eager_lse.dtype == torch.float32
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(eager.double(), wide, rtol=0, atol=8 * step)
    torch.testing.assert_close(eager_lse.double(), lse, rtol=0, atol=8 * step)


def test_runs_of_queries_change_nothing(monkeypatch):
    """Long inputs are computed a few queries at a time."""
    q, k, v = draw(2, 11, 9, 1, 2)
    mask = draw_mask("by_head", 2, 2, 11, 9)
    want = reference.attend(q, k, v, mask=mask, causal=True)
    options = {"window": (2, 3), "softcap": 1.0, "sinks": normal(2)}
    want_of_options = reference.attend(q, k, v, **options)
    for limit in (1, 2 * 9 * 3):
        monkeypatch.setattr(reference, "_MAX_SCORES", limit)
        close(reference.attend(q, k, v, mask=mask, causal=True), want)
        close(reference.attend(q, k, v, **options), want_of_options)


@pytest.mark.parametrize("lens", [[3, 0, 1, 4], [0, 0], [5], []])
def test_unpack_and_pack_are_inverses(lens):
    cuts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    packed = normal(sum(lens) + 2, 2, 4)
    padded, got = reference.unpack(packed, cuts)
    assert got.tolist() == lens and got.dtype == torch.int32
    assert padded.shape == (len(lens), max(lens, default=0), 2, 4)
    assert all(not request[n:].any() for request, n in zip(padded, lens))
    assert torch.equal(reference.pack(padded, cuts), packed[: sum(lens)])


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("rows", [None, [2, 0, 2, 1]])
def test_gather_pages_finds_what_was_scattered(page_size, rows):
    """Pages in random order, unused ones NaN, stale numbers past the lengths, table rows in any order and twice."""
    lens = [5, 0, 5, 16]
    table_rows = list(range(4)) if rows is None else rows
    columns = -(-16 // page_size)
    order = torch.randperm(4 * columns, generator=torch.Generator().manual_seed(0)).view(4, columns)
    cache = torch.full((4 * columns, page_size, 2, 4), math.nan, dtype=FP64)
    tokens = normal(4, 16, 2, 4)
    for row in range(4):
        count = max((n for n, r in zip(lens, table_rows) if r == row), default=0)
        for t in range(count):
            cache[order[row, t // page_size], t % page_size] = tokens[row, t]
        order[row, -(-count // page_size) :] = -7
    index = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    given = torch.tensor(lens, dtype=torch.int32)
    for pool in (cache, cache[:, 0])[: 2 if page_size == 1 else 1]:
        got = reference.gather_pages(pool, order.to(torch.int32), given, index)
        assert got.shape == (4, 16, 2, 4)
        for b, (row, n) in enumerate(zip(table_rows, lens)):
            assert torch.equal(got[b, :n], tokens[row, :n]) and not got[b, n:].any()


def test_merge_joins_disjoint_keys():
    """Dense and packed; parts in which some queries see nothing."""
    q, k, v = draw(2, 3, 9, 2, 2)
    mask = draw_mask("by_head", 2, 4, 3, 9)
    mask[0, 1, :, :4], mask[1, 2, 2] = False, False
    want = reference.attend(q, k, v, mask=mask)
    parts = [reference.attend(q, k[:, s], v[:, s], mask=mask[..., s]) for s in (slice(4), slice(4, None))]
    close(reference.merge(*parts[0], *parts[1]), want)
    packed = [(out.flatten(0, 1), lse.transpose(0, 1).flatten(1)) for out, lse in (*parts, want)]
    close(reference.merge(*packed[0], *packed[1]), packed[2])


def test_merge_with_nothing_changes_no_bit():
    out, lse = reference.attend(*draw(2, 3, 9, 2, 2, dtype=torch.float16), compute_dtype=torch.float32)
    nothing = torch.zeros_like(out), torch.full_like(lse, -INF)
    for got in (reference.merge(out, lse, *nothing), reference.merge(*nothing, out, lse)):
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    both = reference.merge(*nothing, *nothing)
    assert torch.equal(both[0], nothing[0]) and torch.equal(both[1], nothing[1])


def test_merge_of_far_apart_parts_is_the_larger():
    out, _ = reference.attend(*draw(1, 1, 3, 1, 1))
    far = torch.full((1, 1, 1), 1e5, dtype=FP64)
    close(reference.merge(out, far, -out, -far), (out, far))

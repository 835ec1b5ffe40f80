"""The kernel against eager fp32 and fp64, for every width, pairing, dtype, layout and kind of special value."""

import pytest
import torch

from cuteforge import rotary_emb, rotary_qk_wrapper, rotary_table, rotary_wrapper
from helpers import budget, gpu, rotary
from helpers.canary import Canary, padded_copy


@pytest.mark.parametrize("case", **rotary.case_table)
def test_case(case, device):
    """Both directions, in guarded memory; see the row's config and layout for the path it is there for."""
    x = rotary.draw(case.config, case.layout, device)
    for inverse in (False, True):
        rotary.check(rotary.run(x, case.layout, inverse=inverse), x, inverse=inverse)


main_configs = pytest.mark.parametrize("config", rotary.MAIN_CONFIGS, ids=lambda c: c.label)


@main_configs
def test_layout_changes_no_bit(config, device):
    """Strides, memory of the result, in place or not, one launch or two."""
    for tokens in ((38,), (2, 19)):
        layouts = [
            layout._replace(tokens=tokens, heads=4, kv_heads=2)
            for layout in rotary.LAYOUTS
            if len(layout.tokens) == len(tokens)
        ]
        x = rotary.draw(config, layouts[0], device)
        want = rotary.run(x, layouts[0])
        for layout in layouts[1:]:
            assert rotary.same(rotary.run(x, layout), want), layout.name
        alone = rotary.run(x.with_(k=None), layouts[0]), rotary.run(x.with_(x=x.k, k=None), layouts[0])
        assert budget.same_bits(alone[0]["out"], want["out"])
        assert budget.same_bits(alone[1]["out"], want["k_out"])


@main_configs
def test_dense_equals_packed(config, device):
    dense = rotary.draw(config, rotary.DENSE, device)
    table = dense.table.flatten(0, 1) if dense.positions is None else dense.table
    positions = None if dense.positions is None else dense.positions.flatten()
    packed = dense.with_(x=dense.x.flatten(0, 1), table=table, positions=positions)
    got, want = rotary.run(packed, rotary.PACKED), rotary.run(dense, rotary.DENSE)
    assert budget.same_bits(got["out"], want["out"].flatten(0, 1))


@pytest.mark.parametrize("config", [rotary.ADJACENT, rotary.HALVES, rotary.PARTIAL], ids=lambda c: c.label)
def test_table_by_token_equals_positions(config, device):
    x = rotary.draw(config, rotary.TWO_PACKED, device)
    by_token = torch.stack([t[x.positions.long()] for t in x.table], -1)
    got = rotary.run(x.with_(table=by_token, positions=None), rotary.TWO_PACKED)
    assert rotary.same(got, rotary.run(x, rotary.TWO_PACKED))


def test_int32_and_int64_positions_agree(device):
    x = rotary.draw(rotary.HALVES, rotary.DENSE, device)
    got = rotary.run(x.with_(positions=x.positions.int()), rotary.DENSE)
    assert rotary.same(got, rotary.run(x, rotary.DENSE))


def test_same_bits_at_every_run(device):
    x = rotary.draw(rotary.ADJACENT, rotary.FUSED, device)
    want = rotary.run(x, rotary.FUSED)
    assert all(rotary.same(rotary.run(x, rotary.FUSED), want) for _ in range(5))


@main_configs
def test_inverse_undoes_the_rotation(config, device):
    """Within the two roundings in between."""
    x = rotary.draw(config, rotary.PACKED, device)
    turned = rotary.run(x, rotary.PACKED)["out"]
    back = rotary.run(x.with_(x=turned), rotary.PACKED, inverse=True)["out"]
    step = budget.ulp(x.x.abs().max(), config.dtype).item()
    torch.testing.assert_close(back, x.x, rtol=0, atol=2 * step)


# Outside a table of MAX_POS rows; those past 32 bits would land inside it if they were cut off.
OUTSIDE = (-1, rotary.MAX_POS, -(2**31), 2**31 - 1)
OUTSIDE_64 = (2**32, 2**32 + 5, -(2**32), 2**62, -(2**63), 2**63 - 1)


@pytest.mark.parametrize("layout", [rotary.TWO_PACKED, rotary.FUSED, rotary.DENSE], ids=lambda layout: layout.name)
@pytest.mark.parametrize("config", [rotary.ADJACENT, rotary.HALVES, rotary.PARTIAL], ids=lambda c: c.label)
def test_positions_outside_the_table_give_nan_rows(config, layout, device):
    """All columns, the passed ones too, and no other row."""
    x = rotary.draw(config, layout, device)
    bad = OUTSIDE + (OUTSIDE_64 if config.index is torch.int64 else ())
    positions = x.positions.clone()
    positions.view(-1)[1 : 2 * len(bad) : 2] = torch.tensor(bad, device=device).to(positions.dtype)
    x = x.with_(positions=positions)
    results = rotary.run(x, layout)
    outside = (positions < 0) | (positions >= rotary.MAX_POS)
    assert outside.sum() == len(bad)
    for result in results.values():
        assert result[outside].isnan().all()
        assert result[~outside].isfinite().all()
    rotary.check(results, x)


def test_empty_table_gives_nan(device):
    x = rotary.draw(rotary.HALVES, rotary.PACKED, device)
    x = x.with_(table=rotary_table(0, rotary.HALVES.rotary_dim, device=device))
    assert rotary.run(x, rotary.PACKED)["out"].isnan().all()


def test_cos_and_sin_may_be_halves_of_one_cache(device):
    """Rows further apart than they are long, and sin at an odd place in its row."""
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device)
    cache = padded_copy(torch.cat(x.table, 1), 2 * x.table[0].shape[1] + 4)
    halves = tuple(cache.chunk(2, 1))
    assert rotary.same(rotary.run(x.with_(table=halves), rotary.TWO_PACKED), rotary.run(x, rotary.TWO_PACKED))


def test_table_by_token_may_be_broadcast_over_the_batch(device):
    """A batch stride of 0."""
    config = rotary.BY_TOKEN
    x = rotary.draw(config, rotary.DENSE, device)
    shared = x.with_(table=x.table[:1].expand_as(x.table))
    copied = x.with_(table=x.table[:1].repeat(x.table.shape[0], 1, 1, 1))
    assert rotary.same(rotary.run(shared, rotary.DENSE), rotary.run(copied, rotary.DENSE))


@pytest.mark.parametrize("in_place", [False, True], ids=["out_of_place", "in_place"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "minus_inf"])
@pytest.mark.parametrize("config", [rotary.ADJACENT, rotary.PARTIAL], ids=lambda c: c.label)
def test_special_values_reach_their_pair_only(config, value, in_place, device):
    layout = rotary.PACKED._replace(in_place=in_place)
    x = rotary.draw(config, layout, device)
    special = x.x.clone()
    special.view(-1)[3 :: 2 * config.d + 7] = value
    x = x.with_(x=special)
    rotary.check(rotary.run(x, layout), x)


def test_nan_bits_of_passed_columns_are_kept(device):
    """ "Unchanged" is bit for bit: what shares the head may be no number of this dtype."""
    x = rotary.draw(rotary.PARTIAL, rotary.PACKED, device)
    odd = x.x.clone()
    passed = odd[..., rotary.PARTIAL.rotary_dim :]
    passed.copy_(torch.full_like(passed, 0x7FA5, dtype=torch.int16).view(odd.dtype))
    for in_place in (False, True):
        got = rotary.run(x.with_(x=odd), rotary.PACKED._replace(in_place=in_place))["out"]
        assert budget.same_bits(got[..., rotary.PARTIAL.rotary_dim :], passed), in_place


@pytest.mark.parametrize("config", [rotary.ADJACENT, rotary.HALVES_FP32], ids=lambda c: c.label)
@pytest.mark.parametrize("magnitude", [1e-38, 1e30])
def test_values_of_any_magnitude(magnitude, config, device):
    x = rotary.draw(config, rotary.PACKED, device)
    x = x.with_(x=(x.x.sign() * magnitude).to(config.dtype))
    rotary.check(rotary.run(x, rotary.PACKED), x)


@pytest.mark.parametrize(
    "sizes",
    [{"tokens": (3,), "heads": 70_001}, {"tokens": (70_001, 1), "heads": 2}, {"tokens": (1, 70_001), "heads": 2}],
    ids=["heads", "batch", "tokens"],
)
def test_no_extent_meets_a_grid_limit(sizes, device):
    """65 535 is the limit of two of the three grid dims."""
    layout = rotary.PACKED._replace(**sizes)
    x = rotary.draw(rotary.CONFIGS[8], layout, device)
    rotary.check(rotary.run(x, layout), x)


@pytest.mark.parametrize("config", [rotary.ADJACENT, rotary.BY_TOKEN], ids=lambda c: c.label)
def test_more_than_2_31_elements(config, device):
    """In place; the first, middle and last tokens equal their stand-alone calls."""
    gpu.require_free_memory(24, device)
    heads, part = 32, 1000
    tokens = 2**31 // (heads * config.d) + 3 * part
    generator = torch.Generator(device=device).manual_seed(3)
    x = torch.empty(tokens, heads, config.d, dtype=config.dtype, device=device).normal_(generator=generator)
    small = rotary.draw(config, rotary.PACKED._replace(tokens=(tokens,), heads=1), device)
    starts = (0, 2**31 // (heads * config.d) - part // 2, tokens - part)
    parts = [slice(start, start + part) for start in starts]
    before = [x[p].clone() for p in parts]
    rotary_wrapper(x, **small.lookup, interleaved=config.interleaved, out=x)
    for p, values in zip(parts, before, strict=True):
        table = small.table[p] if small.positions is None else small.table
        alone = small.with_(x=values, table=table, positions=None if small.positions is None else small.positions[p])
        assert budget.same_bits(x[p], rotary.run(alone, rotary.PACKED)["out"]), p


def test_offsets_are_64_bit_by_stride_and_by_position(device):
    """Few elements far apart: tokens 2**30 elements from each other, table rows 2**27."""
    gpu.require_free_memory(40, device)
    layout = rotary.PACKED._replace(tokens=(5,), heads=2)
    x = rotary.draw(rotary.HALVES, layout, device)
    want = rotary.run(x, layout)["out"]
    pitch, d = 2**30 + 8, x.x.shape[-1]
    far = torch.empty(4 * pitch + 2 * d, dtype=x.x.dtype, device=device).as_strided(x.x.shape, (pitch, d, 1))
    far.copy_(x.x)
    rotary_wrapper(far, **x.lookup, interleaved=False, out=far)
    assert budget.same_bits(far, want)
    del far
    half, pitch = d // 2, 2**27 + 4
    used = x.positions.unique()
    sparse = torch.empty(39 * pitch + 2 * half, device=device).as_strided((40, 2 * half), (pitch, 1))
    rows = torch.linspace(0, 39, len(used), device=device).long()
    cos, sin = sparse.chunk(2, 1)
    cos[rows], sin[rows] = (t[used.long()] for t in x.table)
    positions = rows[torch.searchsorted(used, x.positions)]
    got = rotary_wrapper(x.x, cos=cos, sin=sin, positions=positions, interleaved=False)["out"]
    assert budget.same_bits(got, want)


@main_configs
def test_wrappers_equal_the_class(config, device):
    x = rotary.draw(config, rotary.TWO_PACKED, device)
    want = rotary.run(x, rotary.TWO_PACKED)
    options = {**x.lookup, "interleaved": x.interleaved}
    one = rotary_wrapper(x.x, **options)
    assert list(one.keys()) == ["out"] and budget.same_bits(one[0], want["out"])
    both = rotary_qk_wrapper(x.x, x.k, **options)
    assert list(both.keys()) == ["q", "k"]
    assert budget.same_bits(both["q"], want["out"]) and budget.same_bits(both["k"], want["k_out"])
    back = rotary.run(x, rotary.TWO_PACKED, inverse=True)
    both = rotary_qk_wrapper(x.x, x.k, **options, inverse=True)
    assert budget.same_bits(both["q"], back["out"]) and budget.same_bits(both["k"], back["k_out"])


def test_wrappers_write_where_asked(device):
    """Into memory of the caller's, or in place; the returned tensors are those."""
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device)
    want = rotary.run(x, rotary.TWO_PACKED)
    options = {**x.lookup, "interleaved": False}
    out, k_out = Canary(x.x.shape, x.x.dtype, device), Canary(x.k.shape, x.k.dtype, device)
    got = rotary_qk_wrapper(x.x, x.k, **options, q_out=out.tensor, k_out=k_out.tensor)
    assert got["q"] is out.tensor and got["k"] is k_out.tensor
    q, k = x.x.clone(), x.k.clone()
    got = rotary_qk_wrapper(q, k, **options, q_out=q, k_out=k)
    assert got["q"] is q and got["k"] is k
    alone = x.x.clone()
    assert rotary_wrapper(alone, **options, out=alone)["out"] is alone
    torch.cuda.synchronize()
    out.check("q_out"), k_out.check("k_out")
    for result, name in ((out.tensor, "out"), (k_out.tensor, "k_out"), (q, "out"), (k, "k_out"), (alone, "out")):
        assert budget.same_bits(result, want[name])


def test_thin_function_is_the_interleaved_rotation(device):
    x = rotary.draw(rotary.BY_TOKEN, rotary.DENSE, device)
    got = rotary_emb(x.x, x.table)
    assert isinstance(got, torch.Tensor)
    assert budget.same_bits(got, rotary.run(x, rotary.DENSE)["out"])


def test_bound_call_follows_new_contents(device):
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device)
    memory = rotary.arrange(x, rotary.TWO_PACKED)
    given, outputs = memory.inputs, memory.outputs
    op = rotary.compiled(given, outputs)
    operands = (given.x, given.table, outputs["out"], given.positions)
    call = op.bind(*operands, k=given.k, k_out=outputs["k_out"])
    back = op.bind(*operands, k=given.k, k_out=outputs["k_out"], inverse=True)
    for seed in (1, 2):
        fresh = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device, seed)
        given.x.copy_(fresh.x), given.k.copy_(fresh.k), given.positions.copy_(fresh.positions)
        for launch, inverse in ((call, False), (back, True)):
            launch()
            torch.cuda.synchronize()
            rotary.check(outputs, fresh, inverse=inverse)
    memory.check()


def test_q_and_k_are_one_launch(device):
    """In place nothing else is enqueued: a graph of the warm call has one node."""
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device)
    options = {**x.lookup, "interleaved": False, "q_out": x.x, "k_out": x.k}
    rotary_qk_wrapper(x.x, x.k, **options)
    torch.cuda.synchronize()
    assert gpu.count_launches(lambda: rotary_qk_wrapper(x.x, x.k, **options)) == 1

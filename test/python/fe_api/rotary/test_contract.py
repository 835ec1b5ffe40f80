"""Refusals on real tensors: the argument is named, nothing is launched, and the next call works.

What can be refused from metadata alone is in unit/test_rotary_contract.py, which needs no GPU.
"""

import pytest
import torch

from cuteforge import ContractError, rotary_qk_wrapper, rotary_wrapper
from helpers import budget, rotary
from helpers.canary import strided_copy

NAMES = {True: ("x", "k", "cos", "sin", "positions"), False: ("x", "k", "freqs_cis")}


class Call:
    """One compiled op with its operands by name; outputs are canaries."""

    def __init__(self, device, by_position=True):
        config = rotary.HALVES if by_position else rotary.BY_TOKEN
        self.x = rotary.draw(config, rotary.TWO_PACKED, device)
        self.memory = rotary.arrange(self.x, rotary.TWO_PACKED)
        self.op = rotary.compiled(self.memory.inputs, self.memory.outputs)
        given = self.memory.inputs
        self.operands = {"x": given.x, "k": given.k, **given.lookup, **self.memory.outputs}

    def arguments(self, replaced):
        given = {**self.operands, **replaced}
        table = (given["cos"], given["sin"]) if "cos" in given else given["freqs_cis"]
        positional = (given["x"], table, given["out"], given.get("positions"))
        return positional, {"k": given["k"], "k_out": given["k_out"]}

    def execute(self, **replaced):
        positional, named = self.arguments(replaced)
        self.op.execute(*positional, **named)
        torch.cuda.synchronize()

    def bind(self, **replaced):
        positional, named = self.arguments(replaced)
        return self.op.bind(*positional, **named)

    def check_untouched(self):
        for name in self.memory.outputs:
            self.memory.guards[name].check_untouched(name)

    def refuses(self, name, error=ContractError, **replaced):
        """`execute` and `bind` raise, `name` comes first in the text, nothing is written, then the op still works."""
        for attempt in (self.execute, self.bind):
            with pytest.raises(error, match=rf"^{name}\b"):
                attempt(**replaced)
        torch.cuda.synchronize()
        self.check_untouched()
        self.execute()
        self.memory.check()


def misaligned(tensor):
    return strided_copy(tensor, tensor.stride(), offset=1)


# (case, argument named, what replaces it given the good tensor).
BAD_OPERANDS = (
    ("fewer_tokens", "out", lambda t: t[:-1]),
    ("fewer_heads", "out", lambda t: t[:, :-1]),
    ("narrower", "k", lambda t: t[..., :-8]),
    ("fewer_tokens", "k", lambda t: t[:-1]),
    ("four_dims", "k", lambda t: t[None]),
    ("two_dims", "x", lambda t: t[:, 0]),
    ("other_dtype", "x", lambda t: t.float()),
    ("other_dtype", "k", lambda t: t.half()),
    ("other_dtype", "out", lambda t: torch.empty_like(t, dtype=torch.float32)),
    ("other_dtype", "k_out", lambda t: torch.empty_like(t, dtype=torch.float16)),
    ("columns_strided", "x", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
    ("base_misaligned", "x", misaligned),
    ("base_misaligned", "k", misaligned),
    ("base_misaligned", "k_out", misaligned),
    ("heads_misaligned", "x", lambda t: strided_copy(t, (t.shape[1] * 129, 129, 1))),
    ("overlaps_itself", "out", lambda t: t[:1].expand(t.shape)),
    ("on_cpu", "x", lambda t: t.cpu()),
    ("on_cpu", "k", lambda t: t.cpu()),
    ("on_cpu", "out", lambda t: torch.empty_like(t, device="cpu")),
    ("on_meta", "k", lambda t: t.to("meta")),
    ("none", "x", lambda t: None),
    ("none", "out", lambda t: None),
    ("a_list", "x", lambda t: [1, 2]),
)  # fmt: skip
BAD_LOOKUPS = (
    ("bf16", "cos", lambda t: t.bfloat16()),
    ("fp64", "sin", lambda t: t.double()),
    ("fewer_positions", "sin", lambda t: t[:-1]),
    ("other_width_than_compiled", "cos", lambda t: t[:, :-1]),
    ("base_misaligned", "cos", misaligned),
    ("rows_misaligned", "sin", lambda t: strided_copy(t, (t.shape[1] + 1, 1))),
    ("on_cpu", "cos", lambda t: t.cpu()),
    ("none", "sin", lambda t: None),
    ("other_integers_than_compiled", "positions", lambda t: t.int()),
    ("floats", "positions", lambda t: t.float()),
    ("one_short", "positions", lambda t: t[:-1]),
    ("strided", "positions", lambda t: t.repeat_interleave(2)[::2]),
    ("on_cpu", "positions", lambda t: t.cpu()),
    ("a_list", "positions", lambda t: t.tolist()),
)  # fmt: skip
BAD_TABLES_BY_TOKEN = (
    ("bf16", lambda t: t.bfloat16()),
    ("complex", lambda t: torch.view_as_complex(t)),
    ("one_short", lambda t: t[:-1]),
    ("other_width_than_compiled", lambda t: t[:, :-1]),
    ("cos_and_sin_apart", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
    ("base_misaligned", misaligned),
    ("on_cpu", lambda t: t.cpu()),
)


@pytest.mark.parametrize("by_position", [True, False], ids=["positions", "freqs_cis"])
@pytest.mark.parametrize(("case", "name", "replace"), BAD_OPERANDS, ids=[f"{n}-{c}" for c, n, _ in BAD_OPERANDS])
def test_bad_operand_is_refused_by_name(by_position, case, name, replace, device):
    call = Call(device, by_position)
    call.refuses(name, **{name: replace(call.operands[name])})


@pytest.mark.parametrize(("case", "name", "replace"), BAD_LOOKUPS, ids=[f"{n}-{c}" for c, n, _ in BAD_LOOKUPS])
def test_bad_lookup_is_refused_by_name(case, name, replace, device):
    call = Call(device)
    named = "(cos|sin)" if "width" in case else name
    call.refuses(named, **{name: replace(call.operands[name])})


@pytest.mark.parametrize(("case", "replace"), BAD_TABLES_BY_TOKEN, ids=[c for c, _ in BAD_TABLES_BY_TOKEN])
def test_bad_table_by_token_is_refused_by_name(case, replace, device):
    call = Call(device, by_position=False)
    call.refuses("freqs_cis", freqs_cis=replace(call.operands["freqs_cis"]))


def test_another_kind_of_call_than_the_sample_is_refused(device):
    """Without keys, or with the other kind of table: nothing is taken for something else."""
    call, other = Call(device), Call(device, by_position=False)
    x, out = call.operands["x"], call.operands["out"]
    table = (call.operands["cos"], call.operands["sin"])
    keys = {name: call.operands[name] for name in ("k", "k_out")}
    for arguments, named in (
        ((x, table, out, call.operands["positions"]), {}),
        ((x, table, out), keys),
        ((x, other.operands["freqs_cis"], out), keys),
        ((x, other.operands["freqs_cis"], out, call.operands["positions"]), keys),
        ((x, table, out, call.operands["positions"]), {"k": keys["k"]}),
    ):
        for attempt in (call.op.execute, call.op.bind):
            with pytest.raises(ContractError, match="wanted .*got"):
                attempt(*arguments, **named)
    torch.cuda.synchronize()
    call.check_untouched()


def test_outputs_may_be_their_inputs_and_nothing_else(device):
    """In place is the same memory with the same strides; any other overlap is refused when bound, by name."""
    call = Call(device)
    x, k = call.operands["x"], call.operands["k"]
    tokens, heads, d = x.shape
    room = torch.empty(x.numel() + 64 * d, dtype=x.dtype, device=device)
    shifted = [room[start : start + x.numel()].view(x.shape) for start in (0, 8, d, heads * d)]
    for other in shifted[1:]:
        with pytest.raises(ContractError, match=r"^(out|x)\b"):
            call.bind(x=shifted[0], out=other)
        with pytest.raises(ContractError, match=r"^(out|x)\b"):
            call.bind(x=other, out=shifted[0])
    with pytest.raises(ContractError, match=r"^(out|x)\b"):
        call.bind(x=x, out=x.as_strided((tokens, heads, d), (d, tokens * d, 1)))
    for wrong in ({"out": k.repeat(1, 4, 1), "k_out": x[:, : k.shape[1]]}, {"k_out": call.operands["out"][:, :2]}):
        with pytest.raises(ContractError, match=r"^(out|k_out|x|k)\b"):
            call.bind(**wrong)
    call.bind(out=x, k_out=k)
    call.execute()
    call.memory.check()


@pytest.mark.parametrize("layout", [layout for layout in rotary.LAYOUTS if layout.place == "fused" and layout.in_place])
def test_slices_of_one_buffer_do_not_overlap(layout, device, monkeypatch):
    """q and k side by side in each token, packed or dense: refused neither when bound nor in a fully checked launch."""
    x = rotary.draw(rotary.HALVES, layout, device)
    memory = rotary.arrange(x, layout)
    op = rotary.compiled(memory.inputs, memory.outputs)
    given, outputs = memory.inputs, memory.outputs
    op.bind(given.x, given.table, outputs["out"], given.positions, k=given.k, k_out=outputs["k_out"])()
    torch.cuda.synchronize()
    memory.check()
    rotary.check(outputs, x)
    monkeypatch.setenv("CUTEFORGE_FAST_LAUNCH", "0")
    assert rotary.run(x, layout)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_outputs_do_not_share_memory_with_the_table(name, device):
    """fp32 throughout, so that a table of the right shape can lie in the output."""
    layout = rotary.PACKED._replace(tokens=(64,), heads=1)
    x = rotary.draw(rotary.HALVES_FP32, layout, device)
    op = rotary.compiled(x, {"out": x.x})
    table = dict(zip(("cos", "sin"), x.table)) | {name: x.x[:, 0, :64]}
    other = x.table[0][:64]
    pair = tuple(table[n] if n == name else other for n in ("cos", "sin"))
    with pytest.raises(ContractError, match=rf"^(out|x|{name})\b"):
        op.bind(x.x, pair, x.x, x.positions.clamp(max=63))


def test_checked_launch_names_the_same_argument(device, monkeypatch):
    """CUTEFORGE_FAST_LAUNCH=0 can be switched at any time."""
    call = Call(device)
    monkeypatch.setenv("CUTEFORGE_FAST_LAUNCH", "0")
    call.refuses("k", k=call.operands["k"][:-1])
    with pytest.raises(ContractError, match=r"^(out|x)\b"):
        call.execute(out=call.operands["x"][:, :, :].as_strided(call.operands["x"].shape, (128, 37 * 128, 1)))


def test_checked_mode_names_the_first_bad_position(device, monkeypatch):
    call = Call(device)
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    call.execute()
    for bad in (-1, rotary.MAX_POS, 2**40):
        positions = call.operands["positions"].clone()
        positions[3], positions[7] = bad, bad
        with pytest.raises(ContractError, match=rf"^positions\b.*{bad}.*\b3\b"):
            call.execute(positions=positions)
        with pytest.raises(ContractError, match=rf"^positions\b.*{bad}.*\b3\b"):
            call.bind(positions=positions)


LAYOUTS = {
    "misaligned_base": misaligned,
    "misaligned_heads": lambda t: strided_copy(t, (t.shape[1] * 129, 129, 1)),
    "columns_strided": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrappers_copy_inputs_that_the_kernel_cannot_read(layout, device):
    x = rotary.draw(rotary.HALVES, rotary.TWO_PACKED, device)
    want, change = rotary.run(x, rotary.TWO_PACKED), LAYOUTS[layout]
    got = rotary_qk_wrapper(change(x.x), change(x.k), **x.lookup, interleaved=False)
    assert rotary.same({"out": got["q"], "k_out": got["k"]}, want)
    positions = x.positions.repeat_interleave(2)[::2]
    table = {"cos": misaligned(x.table[0]), "sin": x.table[1].t().contiguous().t(), "positions": positions}
    got = rotary_qk_wrapper(x.x, x.k, **table, interleaved=False)
    assert rotary.same({"out": got["q"], "k_out": got["k"]}, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_is_right_or_refused_where_the_kernel_cannot_write(layout, device):
    """A copy must not take the result away from the tensor that was to be changed."""
    x = rotary.draw(rotary.HALVES, rotary.PACKED, device)
    odd = LAYOUTS[layout](x.x)
    try:
        rotary_wrapper(odd, **x.lookup, interleaved=False, out=odd)
    except ContractError as refusal:
        assert str(refusal).startswith(("x", "out"))
        assert budget.same_bits(odd, x.x)
    else:
        assert budget.same_bits(odd, rotary.run(x, rotary.PACKED)["out"])


@pytest.mark.parametrize("index", [torch.int16, torch.uint8, torch.float32, torch.bool])
def test_wrapper_refuses_positions_of_other_types_by_name(index, device):
    x = rotary.draw(rotary.HALVES, rotary.PACKED, device)
    with pytest.raises(ContractError, match=r"^positions\b"):
        rotary_wrapper(x.x, **{**x.lookup, "positions": x.positions.to(index)})


def test_a_complex_table_is_right_or_refused_by_name(device):
    """Model code keeps e^{i angle} as complex64."""
    x = rotary.draw(rotary.BY_TOKEN, rotary.DENSE, device)
    try:
        got = rotary_wrapper(x.x, torch.view_as_complex(x.table))["out"]
    except ContractError as refusal:
        assert str(refusal).startswith("freqs_cis")
    else:
        assert budget.same_bits(got, rotary.run(x, rotary.DENSE)["out"])

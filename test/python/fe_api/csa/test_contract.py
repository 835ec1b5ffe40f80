"""Refusals on real tensors: the argument is named, nothing is launched, and the next call works.

What can be refused from metadata alone is in unit/test_csa_contract.py, which needs no GPU.
"""

import pytest
import torch

from cuteforge import (
    ContractError,
    CSACompressorBackward,
    CSACompressorForward,
    UnsupportedError,
    csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper,
)
from helpers import budget, csa, gpu
from helpers.canary import Canary, padded_copy

INPUTS = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
FORWARD = (*INPUTS, "out")
BACKWARD = (*INPUTS, "grad_out", "grad_kv", "grad_score", "grad_ape")


class Call:
    """One compiled op with its operands by name; outputs are canaries."""

    def __init__(self, names, device, config=csa.CSA):
        self.x = csa.small(config, device)
        given = dict(zip(INPUTS, self.x.tensors, strict=True))
        given["grad_out"] = self.x.grad_out
        shapes = {"out": self.x.grad_out, "grad_kv": self.x.kv, "grad_score": self.x.score, "grad_ape": self.x.ape}
        self.outputs = {name: Canary.like(shapes[name]) for name in names if name in shapes}
        self.operands = {n: self.outputs[n].tensor if n in self.outputs else given[n] for n in names}
        op = CSACompressorForward if names is FORWARD else CSACompressorBackward
        self.op = op(**self.operands, **self.x.config).compile()
        self.options = {}
        if names is BACKWARD and self.op.workspace_bytes():
            self.options["workspace"] = torch.empty(self.op.workspace_bytes(), dtype=torch.uint8, device=device)

    def execute(self, **replaced):
        self.op.execute(*{**self.operands, **replaced}.values(), **self.options)
        torch.cuda.synchronize()

    def bind(self, **replaced):
        self.op.bind(*{**self.operands, **replaced}.values(), **self.options)

    def refuses(self, name, error=ContractError, **replaced):
        """`execute` and `bind` raise, `name` comes first in the text, nothing is written, then the op still works."""
        for attempt in (self.execute, self.bind):
            with pytest.raises(error, match=rf"^{name}\b"):
                attempt(**replaced)
        torch.cuda.synchronize()
        for output_name, output in self.outputs.items():
            output.check_untouched(output_name)
        self.execute()
        for output_name, output in self.outputs.items():
            output.check(output_name)


# (case, argument named, what replaces it given the good tensor). All keep the compiled dtype and widths of the others.
BAD_OPERANDS = (
    ("fewer_tokens", "score", lambda t: t[:-1]),
    ("narrower", "score", lambda t: t[:, :-8]),
    ("other_dtype", "score", lambda t: t.to(torch.float16)),
    ("three_dims", "kv", lambda t: t[None]),
    ("other_dtype_than_compiled", "kv", lambda t: t.float()),
    ("columns_not_contiguous", "kv", lambda t: t.t().contiguous().t()),
    ("base_misaligned", "kv", lambda t: padded_copy(t, t.shape[1], offset=1)),
    ("rows_misaligned", "kv", lambda t: padded_copy(t, t.shape[1] + 1)),
    ("on_cpu", "kv", lambda t: t.cpu()),
    ("on_cpu", "score", lambda t: t.cpu()),
    ("on_cpu", "ape", lambda t: t.cpu()),
    ("on_cpu", "cu_seqlens", lambda t: t.cpu()),
    ("on_meta", "score", lambda t: t.to("meta")),
    ("none", "kv", lambda t: None),
    ("none", "ape", lambda t: None),
    ("a_list", "cu_seqlens", lambda t: t.tolist()),
    ("bf16", "ape", lambda t: t.bfloat16()),
    ("fp16", "ape", lambda t: t.half()),
    ("fp64", "ape", lambda t: t.double()),
    ("one_row_short", "ape", lambda t: t[:-1]),
    ("int64", "cu_seqlens", lambda t: t.long()),
    ("int64", "cu_seqlens_comp", lambda t: t.long()),
    ("one_entry_short", "cu_seqlens_comp", lambda t: t[:-1]),
    ("strided_table", "cu_seqlens", lambda t: t.repeat_interleave(2)[::2]),
)
BAD_RESULTS = (
    ("too_wide", lambda t: t.repeat(1, 2)),
    ("other_dtype", lambda t: torch.empty_like(t, dtype=torch.float16)),
    ("on_cpu", lambda t: torch.empty_like(t, device="cpu")),
    ("none", lambda t: None),
    ("overlaps_itself", lambda t: t[:1].expand(t.shape[0], -1)),
    ("base_misaligned", lambda t: padded_copy(t, t.shape[1], offset=1)),
)


@pytest.mark.parametrize("names", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize(("case", "name", "replace"), BAD_OPERANDS, ids=[f"{n}-{c}" for c, n, _ in BAD_OPERANDS])
def test_bad_operand_is_refused_by_name(names, case, name, replace, device):
    call = Call(names, device)
    call.refuses(name, **{name: replace(call.operands[name])})


@pytest.mark.parametrize(("case", "replace"), BAD_RESULTS, ids=[c for c, _ in BAD_RESULTS])
@pytest.mark.parametrize("name", ["out", "grad_kv", "grad_score"])
def test_bad_output_is_refused_by_name(name, case, replace, device):
    call = Call(FORWARD if name == "out" else BACKWARD, device)
    call.refuses(name, **{name: replace(call.operands[name])})


def test_bad_grad_out_and_grad_ape_are_refused_by_name(device):
    call = Call(BACKWARD, device)
    call.refuses("grad_out", grad_out=call.operands["grad_out"].float())
    call = Call(BACKWARD, device)
    call.refuses("grad_ape", grad_ape=call.operands["grad_ape"].bfloat16())


@pytest.mark.parametrize(("name", "other"), [("grad_score", "grad_kv"), ("grad_kv", "kv"), ("grad_score", "score")])
def test_output_sharing_memory_is_refused_when_bound(name, other, device):
    """In-place gradients would be read after they are written."""
    call = Call(BACKWARD, device)
    with pytest.raises(ContractError, match=rf"^({name}|{other})\b"):
        call.bind(**{name: call.operands[other]})


@pytest.mark.parametrize("names", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_checked_launch_names_the_same_argument(names, device, monkeypatch):
    """CUTEFORGE_FAST_LAUNCH=0 can be switched at any time."""
    call = Call(names, device)
    monkeypatch.setenv("CUTEFORGE_FAST_LAUNCH", "0")
    call.refuses("score", score=call.operands["score"][:-1])
    if names is BACKWARD:
        with pytest.raises(ContractError, match="grad_kv"):
            call.execute(grad_kv=call.operands["kv"])


def test_checked_mode_names_the_first_bad_index(device, monkeypatch):
    call = Call(FORWARD, device)
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    call.execute()
    table = call.operands["cu_seqlens"].clone()
    table[2] = -5
    with pytest.raises(ContractError, match=r"^cu_seqlens\b.*\b2\b"):
        call.execute(cu_seqlens=table)
    comp = call.operands["cu_seqlens_comp"].clone()
    comp[1] = -1
    with pytest.raises(ContractError, match=r"^cu_seqlens_comp\b"):
        call.execute(cu_seqlens_comp=comp)


def test_rows_without_tokens_are_refused(device):
    """N > 0 needs T >= ratio: a padding row pools tokens 0 .. ratio - 1."""
    call = Call(FORWARD, device)
    kv, score = call.operands["kv"][:3], call.operands["score"][:3]
    call.refuses("(kv|out)", kv=kv, score=score)
    with pytest.raises(ContractError, match=r"^(kv|total_comp)\b"):
        csa_compressor_forward_wrapper(kv, score, *call.x.tensors[2:], **call.x.config, total_comp=1)


def test_workspace_is_refused_by_name(device):
    call = Call(BACKWARD, device)
    if not call.options:
        pytest.skip("this configuration needs no workspace")
    good = call.options["workspace"]
    for bad in (None, good[:-1], good.view(torch.int8), good.cpu()):
        call.options["workspace"] = bad
        with pytest.raises(ContractError, match="workspace"):
            call.execute()
    for output in call.outputs.values():
        output.check_untouched()


def test_row_pitch_past_32_bits_is_refused_by_name(device):
    """The kernels step over rows with a 32-bit byte pitch; a larger one is refused, not wrapped around."""
    gpu.require_free_memory(12, device)
    x = csa.small(csa.CSA, device)
    out = Canary.like(x.grad_out)
    op = CSACompressorForward(*x.tensors, out.tensor, **x.config).compile()
    pitch, width = 2**30 + 8, x.kv.shape[1]
    wide = torch.empty(4 * pitch + width, dtype=x.kv.dtype, device=device).as_strided((5, width), (pitch, 1))
    with pytest.raises(ContractError, match="^kv: wanted rows at most 2147483647 bytes apart"):
        op.execute(wide, wide, *x.tensors[2:], out.tensor)
    out.check_untouched()


@pytest.mark.parametrize("config", [csa.CSA, csa.HCA], ids=lambda c: c.label)
def test_wrapper_converts_int64_tables(config, device):
    x = csa.small(config, device)
    tables = x.cu_seqlens.long(), x.cu_seqlens_comp.long()
    got = csa_compressor_forward_wrapper(*x.tensors[:3], *tables, **x.config, total_comp=x.total_comp)["out"]
    assert budget.same_bits(got, csa.run_forward(x))
    grads = csa_compressor_backward_wrapper(*x.tensors[:3], *tables, x.grad_out, **x.config)
    assert all(budget.same_bits(a, b) for a, b in zip(grads, csa.run_backward(x), strict=True))


@pytest.mark.parametrize("junk", [None, [1.0, 2.0]], ids=["none", "list"])
@pytest.mark.parametrize("position", range(6))
def test_wrappers_refuse_what_is_no_tensor_by_name(position, junk, device):
    x = csa.small(csa.CSA, device)
    operands = [*x.tensors, x.grad_out]
    operands[position] = junk
    name = (*INPUTS, "grad_out")[position]
    if name != "grad_out":
        with pytest.raises(ContractError, match=rf"^{name}\b"):
            csa_compressor_forward_wrapper(*operands[:5], **x.config, total_comp=x.total_comp)
    with pytest.raises(ContractError, match=rf"^{name}\b"):
        csa_compressor_backward_wrapper(*operands, **x.config)


LAYOUTS = {
    "misaligned_base": lambda t: padded_copy(t, t.shape[1], offset=1),
    "misaligned_rows": lambda t: padded_copy(t, t.shape[1] + 1),
    "transposed": lambda t: t.t().contiguous().t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapper_copies_what_the_kernel_cannot_read(layout, device):
    x = csa.small(csa.CSA, device)
    change = LAYOUTS[layout]
    odd = x.with_(kv=change(x.kv), score=change(x.score), grad_out=change(x.grad_out))
    got = csa_compressor_forward_wrapper(*odd.tensors, **x.config, total_comp=x.total_comp)["out"]
    assert budget.same_bits(got, csa.run_forward(x))
    grads = csa_compressor_backward_wrapper(*odd.tensors, odd.grad_out, **x.config)
    assert all(budget.same_bits(a, b) for a, b in zip(grads, csa.run_backward(x), strict=True))


@pytest.mark.parametrize(
    ("name", "error", "options"),
    [
        ("ratio", (ContractError, UnsupportedError), {"ratio": 5}),
        ("head_dim", ContractError, {"head_dim": 64}),
        ("coff", ContractError, {"coff": 3}),
        ("total_comp", ContractError, {"total_comp": -1}),
    ],
)
def test_wrapper_refuses_bad_configuration(name, error, options, device):
    """A configuration that contradicts a tensor may name either."""
    x = csa.small(csa.CSA, device)
    with pytest.raises(error, match=f"{name}|ape|kv"):
        csa_compressor_forward_wrapper(*x.tensors, **{**x.config, "total_comp": x.total_comp, **options})

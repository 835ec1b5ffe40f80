"""Calls of the compressor like an earlier one. Whatever differs from it, the result is that of a first call, and errors
are the same."""

import pytest
import torch

from cuteforge import ContractError, compress, csa_compressor_backward_wrapper, csa_compressor_forward_wrapper
from helpers.calls import check_equal, copied, fresh

BF16, RATIO, COFF, D = torch.bfloat16, 4, 2, 64


def inputs(device, *lengths):
    """Segments of these lengths, and the number of their rows."""
    tokens, counts = torch.tensor([0, *lengths]).cumsum(0), torch.tensor([0, *(n // RATIO for n in lengths)]).cumsum(0)
    kv, score = (torch.randn(int(tokens[-1]), COFF * D, device=device).to(BF16) for _ in range(2))
    ape = torch.randn(RATIO, COFF * D, device=device)
    cu_seqlens, cu_seqlens_comp = (t.to(torch.int32).to(device) for t in (tokens, counts))
    return (kv, score, ape, cu_seqlens, cu_seqlens_comp), int(counts[-1])


def forward(given, rows):
    return csa_compressor_forward_wrapper(*given, RATIO, D, COFF, total_comp=rows)


def backward(given, rows, **options):
    grad_out = torch.linspace(-1, 1, rows * D, device=given[0].device).to(BF16).view(rows, D)
    return csa_compressor_backward_wrapper(*given, grad_out, RATIO, D, COFF, **options)


PASSES = {"forward": forward, "backward": backward}
both = pytest.mark.parametrize("name", PASSES)
LENGTHS = (40, 9), (40, 9), (400, 3, 1), (8,)


@both
def test_new_data_other_tokens_and_segments(name, device, served):
    run, calls = PASSES[name], [inputs(device, *lengths) for lengths in LENGTHS]
    got = [copied(run(*call)) for call in calls]
    assert len(served) == len(calls) - 1
    for call, result in zip(calls, got):
        check_equal(result, fresh(run, *call))


def test_more_rows_than_there_are_and_fewer(device, served):
    given, rows = inputs(device, 40, 9)
    for count in (rows, rows + 5, rows - 3, 0):
        check_equal(copied(forward(given, count)), fresh(forward, given, count))
        forward(given, rows)
    assert len(served) >= 3
    with pytest.raises(ContractError, match="^total_comp: "):
        forward(given, -1)
    with pytest.raises(ContractError, match="^total_comp: "):
        forward(given, True)
    check_equal(forward(given, None), forward(given, rows))


@both
def test_a_bad_call_after_a_good_one_is_refused_by_name(name, device, served):
    run, ((kv, score, ape, *offsets), rows) = PASSES[name], inputs(device, 40, 9)
    for _ in range(2):
        run((kv, score, ape, *offsets), rows)
    bad = {
        "score": (kv, score[:-1], ape, *offsets),
        "ape": (kv, score, ape[:2], *offsets),
        "kv": (kv[:3], score[:3], ape, *offsets),
        "cu_seqlens_comp": (kv, score, ape, offsets[0], offsets[1][:-1]),
    }
    for operand, operands in bad.items():
        with pytest.raises(ContractError, match=f"^{operand}: "):
            run(operands, rows)
    for config in ((True, D, COFF), (RATIO, 2 * D, COFF), (RATIO, D, 1)):
        with pytest.raises(ContractError):
            csa_compressor_forward_wrapper(kv, score, ape, *offsets, *config, total_comp=rows)
    check_equal(run((kv, score, ape, *offsets), rows), fresh(run, (kv, score, ape, *offsets), rows))


@both
def test_other_strides_dtypes_and_addresses(name, device, served):
    """A slice with a pitch, offsets that are converted, a view that is not aligned and is copied."""
    run, ((kv, score, ape, *offsets), rows) = PASSES[name], inputs(device, 40, 9)
    want = copied(run((kv, score, ape, *offsets), rows))
    sliced = torch.cat((kv, kv), 1)[:, : kv.shape[1]]
    shifted = torch.empty(kv.numel() + 1, dtype=BF16, device=device)[1:].view_as(kv).copy_(kv)
    for others in (
        (sliced, score, ape, *offsets),
        (shifted, score, ape, *offsets),
        (kv, score, ape, *(x.long() for x in offsets)),
        (kv, score, torch.nn.Parameter(ape, requires_grad=False), *offsets),
    ):
        for _ in range(2):
            check_equal(run(others, rows), want)
        check_equal(run((kv, score, ape, *offsets), rows), want)


def test_a_graph_is_recorded_after_calls_without_one(device, served):
    (kv, score, ape, *offsets), rows = inputs(device, 40, 9)
    parameter = torch.nn.Parameter(ape)
    with torch.no_grad():
        for _ in range(2):
            want = copied(forward((kv, score, parameter, *offsets), rows))
    assert len(served) == 1
    out = forward((kv, score, parameter, *offsets), rows)["out"]
    assert out.requires_grad and torch.equal(out.detach(), want["out"])
    out.sum().backward()
    assert parameter.grad is not None and len(served) == 1


def test_atomics_are_asked_about_at_every_call(device, served):
    given, rows = inputs(device, 40, 9)
    for _ in range(2):
        backward(given, rows, deterministic=False)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            backward(given, rows, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not served


def test_the_policy_serves_known_calls(device, served):
    for lengths in LENGTHS:
        (*tensors, cu_seqlens_comp), rows = inputs(device, *lengths)
        options = {"ratio": RATIO, "coff": COFF, "cu_seqlens_comp": cu_seqlens_comp}
        got, before = compress(*tensors, **options, total_comp=rows).clone(), len(served)
        for _ in range(2):
            assert torch.equal(compress(*tensors, **options, total_comp=rows), got)
        assert len(served) == before + 2
        # neither the number of rows nor their offsets are given
        assert torch.equal(compress(*tensors, **options), got) and torch.equal(compress(*tensors, ratio=RATIO), got)
        assert torch.equal(got, fresh(forward, (*tensors, cu_seqlens_comp), rows)["out"])
        eager = compress(*tensors, **options, total_comp=rows, backend="torch_native")
        torch.testing.assert_close(eager, got, atol=1e-2, rtol=1e-2)

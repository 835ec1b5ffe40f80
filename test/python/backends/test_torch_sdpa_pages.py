"""Flash attention of torch over pages by our kernels, on a CPU twin of the operator. A torch whose operator has no
`block_table` has none of it; test_torch_sdpa.py says that the rest is served there."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import varlen

from cuteforge import ContractError
from cuteforge.families.attention import reference
from helpers import aten
from helpers.aten import paged
from helpers.packs import offsets

pytestmark = pytest.mark.skipif(not aten.HAS_PAGES, reason="this torch's flash attention takes no pages")


@pytest.fixture
def log(monkeypatch):
    with aten.served(monkeypatch) as log:
        yield log


@pytest.mark.parametrize(("lens_q", "op"), [((2, 1, 6), "PagedGQAPrefill"), ((1, 1, 1), "PagedGQADecode")])
@pytest.mark.parametrize("as_offsets", [False, True])
def test_pages_are_served(log, lens_q, op, as_offsets):
    """Lengths come as such, or as offsets of the keys."""
    lens_k = (9, 1, 6)
    (q, k, v), options = paged(lens_q, lens_k)
    if as_offsets:
        options |= {"seqused_k": None, "cum_seq_k": offsets(lens_k)}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, **options)
    assert log.ops == [op]
    assert lse.is_contiguous()
    assert out.shape == q.shape
    for b, (first, end) in enumerate(zip(offsets(lens_q), offsets(lens_q)[1:])):
        keys, values = (x[options["block_table"][b].long()].flatten(0, 1)[None, : lens_k[b]] for x in (k, v))
        want, want_lse = reference.attend(q[None, first:end], keys, values, causal=True)
        torch.testing.assert_close(out[first:end].float(), want[0].float(), rtol=0, atol=2e-2)
        torch.testing.assert_close(lse[:, first:end], want_lse[0].float(), rtol=0, atol=2e-2)


@pytest.mark.parametrize(("lens_q", "max_q"), [((1, 1, 1), 2), ((2, 0, 1), 2), ((1, 1, 0), 1)])
def test_only_one_query_token_for_each_request_is_a_decode(log, lens_q, max_q):
    (q, k, v), options = paged(lens_q, (9, 1, 6), max_q=max_q)
    torch.ops.aten._flash_attention_forward(q, k, v, **options)
    assert log.ops == ["PagedGQAPrefill"]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (3, 2), (-1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_window_of_a_step_of_decode(log, window, causal):
    (q, k, v), options = paged((1, 1, 1), (9, 1, 6), is_causal=causal)
    options |= {"window_size_left": window[0], "window_size_right": window[1]}
    out = torch.ops.aten._flash_attention_forward(q, k, v, **options)[0]
    assert log.ops == ["PagedGQADecode"]
    for b, count in enumerate((9, 1, 6)):
        keys, values = (x[options["block_table"][b].long()].flatten(0, 1)[None, :count] for x in (k, v))
        left = None if window[0] < 0 else window[0]
        want, _ = reference.attend(q[None, b : b + 1], keys, values, window=(left, None))
        torch.testing.assert_close(out[b].float(), want[0, 0].float(), rtol=0, atol=2e-2)


def test_arguments_that_contradict_each_other_are_refused_by_name(log):
    """As by torch's kernel, which raises too."""
    (q, k, v), options = paged((2, 1), (5, 6))
    with pytest.raises(ContractError, match="page_table"):
        torch.ops.aten._flash_attention_forward(q, k, v, **options | {"block_table": options["block_table"][:1]})


@pytest.mark.skipif(not aten.VARLEN_HAS_PAGES, reason="this torch's varlen_attn takes no pages")
@pytest.mark.parametrize("num_splits", [None, 4])
def test_varlen_attn_over_pages_is_served(log, num_splits):
    (q, k, v), options = paged((1, 1, 1), (9, 1, 6))
    shared = {name: options[name] for name in ("seqused_k", "block_table")} | aten.VARLEN_GQA
    out = varlen.varlen_attn(q, k, v, options["cum_seq_q"], None, 1, 9, num_splits=num_splits, **shared)
    assert log.ops == ["PagedGQADecode"]
    assert torch.equal(out, torch.ops.aten._flash_attention_forward(q, k, v, **options)[0])

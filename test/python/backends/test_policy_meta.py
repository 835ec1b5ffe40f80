"""The meta device, which holds no values: meta results where all operands are on it, refusals by name where only some
are."""

from __future__ import annotations

import pytest
import torch

from cuteforge import ContractError, KVCache, UnsupportedError, apply_rotary_emb, attention, compress
from helpers.floor import floor_of
from helpers.policy import draw

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (1, 2)},
    "cap": {"softcap": 2.0},
    "sinks": {"sinks": torch.empty(6, device="meta")},
    "mask": {"attn_mask": torch.empty(2, 7, dtype=torch.bool, device="meta")},
    "scale 0": {"scale": 0.0, "is_causal": True},
}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("autocast", [False, True])
def test_attention(options, autocast):
    q, k, v = draw(device="meta", dv=8)
    q.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attention(q, k, v, **options)
    assert out.is_meta and out.shape == (*q.shape[:3], 8) and out.dtype == q.dtype
    out.sum().backward()
    assert q.grad.is_meta and q.grad.shape == q.shape


def test_rotary():
    x = meta(5, 2, 16)
    table = {"cos": meta(32, 8), "sin": meta(32, 8), "positions": meta(5, dtype=torch.int64)}
    for out in (apply_rotary_emb(x, **table), apply_rotary_emb(x, meta(5, 8, 2))):
        assert out.is_meta and out.shape == x.shape


def test_compress():
    inputs = meta(20, 16), meta(20, 16), meta(4, 16), meta(2, dtype=torch.int32)
    out = compress(*inputs, total_comp=5)
    assert out.is_meta and out.shape == (5, 8)
    with pytest.raises(ContractError, match="^total_comp: wanted a number of rows"):
        compress(*inputs)


def test_a_cache_is_refused_for_its_lengths_are_read():
    cache = KVCache(1, 2, 16, num_pages=4, max_requests=2, max_seqlen=16, dtype=torch.float32, device="cpu")
    cache.bind_decode([cache.add()])
    q, k = meta(1, 6, 16), meta(1, 2, 16)
    with pytest.raises(UnsupportedError, match="attention: .*meta device holds no values"):
        attention(q, k, k, cache)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_of_transformers(padded):
    transformers = pytest.importorskip("transformers", minversion=floor_of("transformers"))
    from cuteforge.integrations.transformers import register

    register()
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="cuteforge",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tokens = meta(2, 5, dtype=torch.int64)
    out = model(tokens, attention_mask=tokens if padded else None).logits
    assert out.is_meta and out.shape == (2, 5, 64)


# Mixed devices.

CPU = {
    "attention": (
        attention,
        dict(zip("qkv", draw()), attn_mask=torch.ones(2, 7, dtype=torch.bool), sinks=torch.zeros(6)),
    ),
    "apply_rotary_emb": (apply_rotary_emb, {"x": torch.zeros(5, 2, 16), "freqs_cis": torch.zeros(5, 8, 2)}),
    "apply_rotary_emb, positions": (
        apply_rotary_emb,
        {"x": torch.zeros(5, 2, 16), "cos": torch.zeros(9, 8), "sin": torch.zeros(9, 8), "positions": torch.arange(5)},
    ),
    "compress": (
        compress,
        {
            "kv": torch.zeros(20, 16),
            "score": torch.zeros(20, 16),
            "ape": torch.zeros(4, 16),
            "cu_seqlens": torch.tensor([0, 20]),
            "cu_seqlens_comp": torch.tensor([0, 5]),
        },
    ),
}


@pytest.mark.parametrize("total_comp", [None, 5])
@pytest.mark.parametrize(("function", "name"), [(f, name) for f, (_, operands) in CPU.items() for name in operands])
def test_one_operand_on_another_device_is_refused_by_name(function, name, total_comp):
    """torch calls a fake kernel as soon as one operand is on meta: its result is uninitialised memory where the first
    one is."""
    call, operands = CPU[function]
    options = {"total_comp": total_comp} if call is compress else {}
    first = next(iter(operands))
    with pytest.raises(ContractError, match="on meta" if name != first else r"on (meta|cpu)") as caught:
        call(**{**operands, name: operands[name].to("meta")}, **options)
    assert str(caught.value).startswith(name if name != first else tuple(operands))


ROTARY = (torch.zeros(5, 2, 16), torch.zeros(5, 8, 2), None, None, None, True, False)
ROTARY_QK = (torch.zeros(5, 2, 16), *ROTARY)
COMPRESSOR = (*CPU["compress"][1].values(),)
DENSE = (*draw(), None, None, None, None, None, False, None, None, None)
MERGE = (torch.zeros(3, 2, 8), torch.zeros(2, 3)) * 2
OPS = {
    "rotary": ROTARY,
    "rotary_": ROTARY,
    "rotary_qk": ROTARY_QK,
    "rotary_qk_": ROTARY_QK,
    "csa_compressor_forward": (*COMPRESSOR, 5, 4, 2),
    "csa_compressor_eager": (*COMPRESSOR, 5, 4, 2),
    "csa_compressor_backward": (*COMPRESSOR, torch.zeros(5, 8), 4, 2, True),
    "csa_compressor_eager_backward": (*COMPRESSOR, torch.zeros(5, 8), 4, 2),
    "gqa_decode": (*DENSE, None),
    "merge_state": MERGE,
}


@pytest.mark.parametrize("name", OPS)
def test_ops_of_torch_refuse_it_too(name):
    op, arguments = getattr(torch.ops.cuteforge, name).default, OPS[name]
    named = [(i, a.name) for i, a in enumerate(op._schema.arguments) if isinstance(arguments[i], torch.Tensor)]
    for i, argument in named[1:]:
        changed = (*arguments[:i], arguments[i].to("meta"), *arguments[i + 1 :])
        with pytest.raises(ContractError, match=f"^{argument}: wanted a tensor on cpu, as .*, got one on meta"):
            op(*changed)

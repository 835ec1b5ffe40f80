"""torch's own attention on a CPU: the adapter's kernels under another dispatch key, with the reference to compute; and
what the operators of the torch that is installed take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import varlen

from cuteforge import UnsupportedError
from cuteforge.backends.cuda import CudaBackend
from cuteforge.integrations import torch_sdpa
from cuteforge.integrations.aten_attention import FlashCall, Served
from cuteforge.integrations.torch_sdpa import FORWARD, FORWARD_INTO
from cuteforge.op import torch_library
from cuteforge.runtime.arch import resolve_arch
from helpers.packs import offsets

BF16 = torch.bfloat16
HEADS, KV_HEADS, D = 4, 2, 16
LENGTHS = (5, 1, 7)
SDPA_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
# What torch 2.11 lacks and later ones have, each by itself.
HAS_PAGES = "block_table" in {x.name for x in getattr(torch.ops.aten, FORWARD).default._schema.arguments}
HAS_OUT = hasattr(torch.ops.aten, FORWARD_INTO)
VARLEN_HAS_PAGES = "block_table" in varlen.varlen_attn.__kwdefaults__
# Where `varlen_attn` has no such option it takes head groups without being asked.
VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in varlen.varlen_attn.__kwdefaults__ else {}


class Log:
    """The ops of ours that ran, with the shapes of their queries and keys; when `is_off`, none runs."""

    def __init__(self) -> None:
        self.is_off = False
        self.calls: list[tuple[str, tuple, tuple]] = []

    @property
    def ops(self) -> list[str]:
        return [op for op, *_ in self.calls]


def refuse_as_on_gpu(request) -> str | None:
    """As on an H100, which is not here."""
    return CudaBackend().refuse(request._replace(device=torch.device("cuda"), target=resolve_arch("sm_90a", None)))


def served_on_cpu(monkeypatch) -> tuple[Served, Log]:
    """The adapter with our torch ops, which compute the reference on a CPU after every check of a call."""
    monkeypatch.setattr(torch_library, "_check_gpu_tensors", lambda *_: None)
    log = Log()

    def call(road, tensors, options):
        if log.is_off:
            raise UnsupportedError("switched off")
        log.calls.append((road.op.__name__, tuple(tensors[0].shape), tuple(tensors[1].shape)))
        return road.dispatch(road.validate(tensors, options))

    return Served(refuse_as_on_gpu, call), log


def sdpa_kernel_of(served: Served):
    """Return a function that builds our kernel for ``F.scaled_dot_product_attention`` on a CPU from the kernel that it
    replaces."""

    def make(before):
        def kernel(keys: Any, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
            by_token = [x.transpose(1, 2) for x in (q, k, v)]
            sizes = None, None, q.shape[2], k.shape[2]
            results = None
            if attn_mask is None:
                results = served.flash(FlashCall(*by_token, *sizes, dropout_p, is_causal, False, scale))
            if results is None:
                return before(keys, q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
            return results[0].transpose(1, 2), results[1]

        return kernel

    return make


@contextmanager
def served(monkeypatch) -> Iterator[Log]:
    """torch's attention on CPU tensors is ours inside."""
    kernels, log = served_on_cpu(monkeypatch)
    library = torch_sdpa.override("CPU", torch_sdpa.kernels_of(kernels) | {SDPA_ON_CPU: sdpa_kernel_of(kernels)})
    try:
        yield log
    finally:
        del library


# Calls.


def draw(*shapes, dtype=BF16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def dense(length=20, num_keys=20, batch=2, dtype=BF16, d=D):
    """q, k, v with tokens before heads."""
    return draw((batch, length, HEADS, d), *[(batch, num_keys, KV_HEADS, d)] * 2, dtype=dtype)


def packed(**options):
    """q, k, v of requests one after another, and what else the operator takes."""
    total = sum(LENGTHS)
    q, k, v = draw((total, HEADS, D), *[(total, KV_HEADS, D)] * 2)
    cuts = offsets(LENGTHS)
    fixed = {"cum_seq_q": cuts, "cum_seq_k": cuts, "max_q": max(LENGTHS), "max_k": max(LENGTHS)}
    return (q, k, v), fixed | {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False} | options


def paged(lens_q, lens_k, page_size=4, **options):
    """A call over pages; the keys of each request are in pages of their own."""
    batch, columns = len(lens_q), -(-max(lens_k) // page_size)
    q, k, v = draw((sum(lens_q), HEADS, D), *[(batch * columns + 1, page_size, KV_HEADS, D)] * 2)
    table = torch.arange(1, batch * columns + 1, dtype=torch.int32).view(batch, columns)
    fixed = {"cum_seq_q": offsets(lens_q), "cum_seq_k": None, "max_q": max(lens_q), "max_k": max(lens_k)}
    fixed |= {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False, "block_table": table}
    return (q, k, v), fixed | {"seqused_k": torch.tensor(lens_k, dtype=torch.int32)} | options


def split(call):
    """Arguments by position, and those by name."""
    tensors, options = call
    fixed = [options.pop(name) for name in FlashCall._fields[3:10]]
    return (*tensors, *fixed), options


# Models.

FOUR_TOKENS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def tiny_llama(transformers: Any) -> torch.nn.Module:
    """A model of two layers with attention of torch; 8 heads of 64, 2 KV heads, 100 words."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


class Layer(torch.nn.Module):
    """Attention of a model as people write it: projections around `scaled_dot_product_attention`."""

    def __init__(self, width: int = 512, heads: int = 8, kv_heads: int = 2) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q = torch.nn.Linear(width, width)
        self.kv = torch.nn.Linear(width, 2 * kv_heads * self.head_dim)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        k, v = (y.view(batch, length, -1, self.head_dim).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))

"""A call that works of every public function, constructor and method: what the fuzz tests start from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import cuteforge
from cuteforge import KVCache, TensorSpec, TorchNativeBackend
from helpers.stub_gpu import StubKernel

Arguments = dict[str, Any]


class Call(NamedTuple):
    """A function and arguments that it takes, all made anew.

    Attributes:
        signature: of the function as users see it: nonsense takes the place of each of its parameters.
        ignored: arguments without a meaning in this call, which may be anything: the layer, where there is no cache.
    """

    run: Callable[..., Any]
    arguments: Arguments
    signature: inspect.Signature
    ignored: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Parameters that an argument can be given for by name."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return list(
            dict.fromkeys(
                [*self.arguments, *(n for n, p in self.signature.parameters.items() if p.kind not in variadic)]
            )
        )

    def argument(self, name: str) -> Any:
        """What is given for a parameter, or its default."""
        default = self.signature.parameters[name].default if name in self.signature.parameters else None
        return self.arguments.get(name, default)


def of(function: Callable[..., Any], run: Callable[..., Any] | None = None, /, **arguments: Any) -> Call:
    return Call(run or function, arguments, inspect.signature(function))


# Tensors of small calls, and the same as specs.


def _floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count).reshape(shape).to(dtype)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(dtype: torch.dtype = torch.float16) -> Arguments:
    return {
        "q": _floats(2, 3, 4, 8, dtype=dtype),
        "k": _floats(2, 5, 2, 8, dtype=dtype),
        "v": _floats(2, 5, 2, 8, dtype=dtype),
    }


def _mask() -> torch.Tensor:
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 1] = False
    return mask


def paged(with_offsets: bool) -> Arguments:
    pool = {"k_cache": _floats(4, 2, 2, 8, dtype=torch.float16), "v_cache": _floats(4, 2, 2, 8, dtype=torch.float16)}
    pages = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    q = {"q": _floats(3, 4, 8, dtype=torch.float16) if with_offsets else _floats(2, 4, 8, dtype=torch.float16)}
    offsets = {"cu_seqlens_q": _ints(0, 1, 3)} if with_offsets else {}
    return {**q, **pool, "page_table": pages, **offsets}


def compressor(dtype: torch.dtype = torch.float32) -> Arguments:
    tokens = {"kv": _floats(9, 16, dtype=dtype), "score": _floats(9, 16, dtype=dtype)}
    return {**tokens, "ape": _floats(4, 16), "cu_seqlens": _ints(0, 4, 9), "cu_seqlens_comp": _ints(0, 1, 2)}


def heads() -> torch.Tensor:
    return _floats(3, 2, 8)


def angles() -> torch.Tensor:
    return _floats(3, 4, 2)


def cache(**options: Any) -> KVCache:
    sizes = {
        "num_pages": 8,
        "page_size": 2,
        "max_requests": 4,
        "max_seqlen": 8,
        "dtype": torch.float32,
        "device": "cpu",
    }
    made = KVCache(1, 2, 8, **{**sizes, **options})
    # what no token was stored to is not initialised
    for pool in (made.k_pool(0), made.v_pool(0)):
        pool.zero_()
    return made


def bound_cache() -> KVCache:
    made = cache()
    made.bind_decode([made.add(), made.add()])
    return made


def new_tokens(heads: int = 2) -> torch.Tensor:
    return _floats(2, heads, 8)


def spec(x: Any) -> Any:
    """What stands for a sample on a GPU."""
    if isinstance(x, tuple):
        return tuple(map(spec, x))
    return TensorSpec(tuple(x.shape), x.dtype, tuple(x.stride())) if isinstance(x, torch.Tensor) else x


# The classes: constructors with check_support, and the methods of an op whose kernel only notes its launches.


def _attention_samples(name: str) -> Arguments:
    if name == "GQADecode" or name == "GQAPrefill":
        tensors = dense()
        lengths = {"seqlens_k": _ints(5, 4)}
        extras = {"mask": _mask(), "bias": _floats(1, 4, 1, 5), "lse": _floats(2, 4, 3)}
        out = torch.empty_like(tensors["q"])
    else:
        tensors = paged(name == "PagedGQAPrefill")
        lengths = {"seqlens_k": _ints(4, 1), "page_table_rows": _ints(0, 1)}
        out = torch.empty_like(tensors["q"])
        extras = {
            "mask": torch.ones(2, 4, dtype=torch.bool),
            "bias": _floats(1, 4, 1, 5),
            "lse": _floats(4, 3) if name == "PagedGQAPrefill" else _floats(2, 4, 1),
        }
        if name == "PagedGQADecode":
            extras |= {"new_k": _floats(2, 2, 8, dtype=torch.float16), "new_v": _floats(2, 2, 8, dtype=torch.float16)}
    return {**tensors, "out": out, **lengths, **extras, "sinks": _floats(4)}


def _samples(name: str) -> Arguments:
    if name in ("GQADecode", "GQAPrefill", "PagedGQADecode", "PagedGQAPrefill"):
        return _attention_samples(name)
    if name == "MergeState":
        part, lse = _floats(2, 3, 4, 8, dtype=torch.float16), _floats(2, 4, 3)
        parts = {"o_a": part, "lse_a": lse, "o_b": part.clone(), "lse_b": lse.clone()}
        return {**parts, "out": part.clone(), "lse": lse.clone()}
    if name == "RotaryEmbedding":
        table = _floats(5, 4), _floats(5, 4)
        pair = {"k": heads(), "k_out": heads()}
        return {"x": heads(), "table": table, "out": heads(), "positions": _ints(0, 1, 2), **pair}
    tensors = compressor()
    if name == "CSACompressorForward":
        return {**tensors, "out": _floats(2, 8)}
    grads = {"grad_kv": tensors["kv"].clone(), "grad_score": tensors["kv"].clone(), "grad_ape": tensors["ape"].clone()}
    return {**tensors, "grad_out": _floats(2, 8), **grads}


OPS = (
    "GQADecode",
    "GQAPrefill",
    "PagedGQADecode",
    "PagedGQAPrefill",
    "MergeState",
    "CSACompressorForward",
    "CSACompressorBackward",
    "RotaryEmbedding",
)


def _constructor(name: str) -> Call:
    op_class = getattr(cuteforge, name)
    samples = {key: spec(x) for key, x in _samples(name).items()}
    return of(op_class, lambda **given: op_class(**given).check_support(), **samples)


def compiled(name: str) -> tuple[Any, Arguments]:
    """An op that passes for compiled, and tensors to launch it on: within `stub_gpu.pass_for_gpu`."""
    from cuteforge.op.base import _Compiled
    from cuteforge.runtime.arch import resolve_arch

    samples = _samples(name)
    op = getattr(cuteforge, name)(**{key: spec(x) for key, x in samples.items()})
    op.check_support()
    arch = resolve_arch("sm_90a", None)
    op._compiled = _Compiled(StubKernel(op._kernel_key(op.dims, arch)), arch)
    op._was_compiled = True
    if (size := op.workspace_bytes()) and name != "MergeState":
        samples["workspace"] = torch.zeros(size, dtype=torch.uint8)
    return op, samples


def _method(name: str, method: str) -> Call:
    op, samples = compiled(name)
    return of(getattr(op, method), **samples)


def _op_rows() -> dict[str, Callable[[], Call]]:
    rows: dict[str, Callable[[], Call]] = {}
    for name in OPS:
        rows[name] = lambda name=name: _constructor(name)
        for method in ("execute", "bind"):
            rows[f"{name}.{method}"] = lambda name=name, method=method: _method(name, method)
        rows[f"{name}.compile"] = lambda name=name: of(_uncompiled(name).compile)
    return rows


def _uncompiled(name: str) -> Any:
    return getattr(cuteforge, name)(**{key: spec(x) for key, x in _samples(name).items()})


# The policy layer.


def _attention_over_cache() -> Call:
    tokens = {"q": new_tokens(4), "k": new_tokens(), "v": new_tokens()}
    return of(cuteforge.attention, **tokens, kv_cache=bound_cache(), layer_id=0, scale=0.5)


def _enter(backend: Any) -> Any:
    with cuteforge.attn_backend(backend) as chosen:
        return chosen


def _graph() -> Any:
    def step(x):
        return x * 2

    return cuteforge.DecodeGraph(step, cache(), [1, 2, 4])


def _graph_step() -> Call:
    graph = _graph()
    requests = [graph._cache.add(), graph._cache.add()]
    return of(graph, lambda requests, x: graph(requests, x), requests=requests, x=_floats(2, 3))


def _graph_capture() -> Call:
    graph = _graph()
    return of(graph.capture, lambda x: graph.capture(x), x=_floats(2, 3))


def _cache_method(method: str, **arguments: Any) -> Call:
    return of(getattr(bound_cache(), method), **arguments)


def _bind_prefill() -> Call:
    made = cache()
    return of(made.bind_prefill, requests=[made.add(), made.add()], lengths=[2, 1])


def _bind_decode() -> Call:
    made = cache()
    return of(made.bind_decode, requests=[made.add(), made.add()], pad_to=3)


SIZES = {
    "num_layers": 1,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_seqlen": 8,
    "page_size": 2,
    "device": "cpu",
    "dtype": torch.float32,
}

CALLS: Mapping[str, Callable[[], Call]] = {
    "TensorSpec": lambda: of(TensorSpec, shape=(2, 3), dtype="float32", stride=(3, 1), device="cuda:0"),
    "TensorSpec.of": lambda: of(TensorSpec.of, x=_floats(2, 3), name="weight")._replace(ignored=("name",)),
    **_op_rows(),
    "attention": lambda: of(
        cuteforge.attention,
        **dense(torch.float32),
        attn_mask=_mask(),
        is_causal=True,
        scale=0.5,
        window=(2, 1),
        softcap=3.0,
        sinks=_floats(4),
    )._replace(ignored=("layer_id",)),
    "attention over a cache": _attention_over_cache,
    "apply_rotary_emb": lambda: of(cuteforge.apply_rotary_emb, x=heads(), freqs_cis=angles()),
    "apply_rotary_emb by positions": lambda: of(
        cuteforge.apply_rotary_emb, x=heads(), cos=_floats(5, 4), sin=_floats(5, 4), positions=_ints(0, 3, 4)
    ),
    "compress": lambda: of(cuteforge.compress, **compressor(), total_comp=2),
    "explain": lambda: of(
        cuteforge.explain,
        lambda function, q, k, v, arch: cuteforge.explain(function, q, k, v, arch=arch),
        function="attention",
        **dense(),
        arch=None,
    ),
    "is_available": lambda: of(cuteforge.is_available, name="rotary"),
    "attn_backend": lambda: of(cuteforge.attn_backend, _enter, backend="torch_native"),
    "register_backend": lambda: of(cuteforge.register_backend, backend=TorchNativeBackend),
    "gqa_decode_wrapper": lambda: of(
        cuteforge.gqa_decode_wrapper, **dense(), mask=_mask(), seqlens_k=_ints(5, 4), sinks=_floats(4), causal=True
    ),
    "gqa_prefill_wrapper": lambda: of(
        cuteforge.gqa_prefill_wrapper, **dense(), mask=_mask(), seqlens_k=_ints(5, 4), sinks=_floats(4), causal=True
    ),
    "paged_gqa_decode_wrapper": lambda: of(
        cuteforge.paged_gqa_decode_wrapper,
        **paged(False),
        seqlens_k=_ints(4, 1),
        page_table_rows=_ints(0, 1),
        sinks=_floats(4),
    ),
    "paged_gqa_prefill_wrapper": lambda: of(
        cuteforge.paged_gqa_prefill_wrapper,
        **paged(True),
        seqlens_k=_ints(4, 2),
        page_table_rows=_ints(0, 1),
        sinks=_floats(4),
    ),
    "attn_decode": lambda: of(cuteforge.attn_decode, **dense(), mask=_mask()),
    "attn_prefill": lambda: of(cuteforge.attn_prefill, **dense(), mask=_mask()),
    "attn_paged_decode": lambda: of(cuteforge.attn_paged_decode, **paged(False), seqlens_k=_ints(4, 1)),
    "attn_paged_prefill": lambda: of(cuteforge.attn_paged_prefill, **paged(True), seqlens_k=_ints(4, 2)),
    "merge_state": lambda: of(
        cuteforge.merge_state, **{n: x for n, x in _samples("MergeState").items() if n not in ("out", "lse")}
    ),
    "csa_compressor_forward_wrapper": lambda: of(
        cuteforge.csa_compressor_forward_wrapper, **compressor(), total_comp=2
    ),
    "csa_compressor_backward_wrapper": lambda: of(
        cuteforge.csa_compressor_backward_wrapper, **compressor(), grad_out=_floats(2, 8)
    ),
    "rotary_wrapper": lambda: of(cuteforge.rotary_wrapper, x=heads(), freqs_cis=angles()),
    "rotary_qk_wrapper": lambda: of(
        cuteforge.rotary_qk_wrapper,
        q=heads(),
        k=heads(),
        cos=_floats(5, 4),
        sin=_floats(5, 4),
        positions=_ints(0, 1, 4),
    ),
    "rotary_emb": lambda: of(cuteforge.rotary_emb, x=heads(), freqs_cis=angles()),
    "rotary_table": lambda: of(
        cuteforge.rotary_table, max_pos=6, rotary_dim=8, scaling={"rope_type": "linear", "factor": 2.0}, device="cpu"
    ),
    "KVCache": lambda: of(KVCache, **SIZES, num_pages=4, max_requests=2),
    "KVCache.contiguous": lambda: of(KVCache.contiguous, **SIZES, batch=2),
    "KVCache.add": lambda: of(cache().add, tokens=[1, 2, 3]),
    "KVCache.append": lambda: _cache_method("append", layer=0, k=new_tokens(), v=new_tokens()),
    "KVCache.bind_decode": _bind_decode,
    "KVCache.bind_prefill": _bind_prefill,
    "KVCache.cached_tokens": lambda: _cache_method("cached_tokens", request=0),
    "KVCache.free": lambda: _cache_method("free", request=0),
    "KVCache.seqlen": lambda: _cache_method("seqlen", request=0),
    "KVCache.k_pool": lambda: _cache_method("k_pool", layer=0),
    "KVCache.v_pool": lambda: _cache_method("v_pool", layer=0),
    "KVCache.check_decode": lambda: _cache_method("check_decode", requests=[0, 1], pad_to=3),
    "KVCache.mark_stored": lambda: _cache_method("mark_stored", layer=0),
    "KVCache.keep_stored": lambda: _cache_method("keep_stored"),
    "KVCache.rollback": lambda: _cache_method("rollback"),
    "KVCache.step": lambda: _cache_method("step"),
    "DecodeGraph": lambda: of(cuteforge.DecodeGraph, step=lambda x: x, cache=cache(), batch_sizes=[1, 2]),
    "DecodeGraph.__call__": _graph_step,
    "DecodeGraph.capture": _graph_capture,
}

# Public names and methods without a row, and why.
EXEMPT = {
    "__version__": "a text",
    "KERNEL_NAMES": "a tuple",
    "ContractError": "an exception",
    "UnsupportedError": "an exception",
    "CacheFull": "an exception",
    "TupleDict": "a dict, which takes what a dict takes",
    "ATTN_BACKEND": "an enum: Python refuses other members",
    "AttentionBackend": "abstract: its own subclasses have rows",
    "FlashAttnBackend": "needs flash-attn and a GPU",
    "TorchNativeBackend": "takes no arguments",
    "CudaBackend": "takes no arguments",
    "forward": "called by attention with arguments that it checked",
    "fwd_decode": "what forward calls",
    "fwd_prefill": "what forward calls",
    "replay": "called by the policy with arguments that it served",
    "describe": "called by explain with a call that it decided",
    "refuse": "called by the policy with a Request that it made",
    "check_support": "takes no arguments",
    "workspace_bytes": "takes no arguments",
    "workspace_bytes_on": "called by wrappers with a device that they looked up",
    "check_given": "called by wrappers with the arguments of a call",
    "check_call": "called by the launch path with the operands of a launch",
    "outer_dims": "takes no arguments",
    "__call__": "compiles, then is execute, which has a row",
}


# Classes whose methods need no row either.
WHOLLY_EXEMPT = ("TupleDict", "AttentionBackend", "FlashAttnBackend", "ATTN_BACKEND")


def public_methods(value: type) -> list[str]:
    """Names of what users call on a class or its objects."""
    own = [n for base in value.__mro__ if base.__module__.startswith("cuteforge") for n in vars(base)]
    names = [n for n in dict.fromkeys(own) if not n.startswith("_") or n == "__call__"]
    return [n for n in names if callable(getattr(value, n, None))]


def missing_rows() -> list[str]:
    """Public names and methods that have neither a row nor a reason."""
    missing = []
    for name in cuteforge.__all__:
        if (
            name in EXEMPT
            and not hasattr(cuteforge, "__exempt__")
            and name not in ("TorchNativeBackend", "CudaBackend")
        ):
            continue
        value = getattr(cuteforge, name)
        if name not in CALLS and name not in EXEMPT:
            missing.append(name)
        if inspect.isclass(value):
            missing += [f"{name}.{m}" for m in public_methods(value) if f"{name}.{m}" not in CALLS and m not in EXEMPT]
    return missing

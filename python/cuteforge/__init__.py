"""GPU kernels written in CuTe-DSL and compiled just in time.

Importing this package imports neither torch nor cutlass; a name's module is imported when the name is first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULE_OF = {
    "ContractError": "cuteforge.errors",
    "UnsupportedError": "cuteforge.errors",
    "TensorSpec": "cuteforge.tensor_spec",
    "TupleDict": "cuteforge.api_base",
    "GQADecode": "cuteforge.gqa",
    "GQAPrefill": "cuteforge.gqa",
    "MergeState": "cuteforge.gqa",
    "PagedGQADecode": "cuteforge.gqa",
    "PagedGQAPrefill": "cuteforge.gqa",
    "attn_decode": "cuteforge.gqa",
    "attn_paged_decode": "cuteforge.gqa",
    "attn_paged_prefill": "cuteforge.gqa",
    "attn_prefill": "cuteforge.gqa",
    "gqa_decode_wrapper": "cuteforge.gqa",
    "gqa_prefill_wrapper": "cuteforge.gqa",
    "merge_state": "cuteforge.gqa",
    "paged_gqa_decode_wrapper": "cuteforge.gqa",
    "paged_gqa_prefill_wrapper": "cuteforge.gqa",
    "CSACompressorForward": "cuteforge.csa.compressor",
    "CSACompressorBackward": "cuteforge.csa.compressor",
    "csa_compressor_forward_wrapper": "cuteforge.csa.compressor",
    "csa_compressor_backward_wrapper": "cuteforge.csa.compressor",
    "RotaryEmbedding": "cuteforge.rotary",
    "rotary_emb": "cuteforge.rotary",
    "rotary_qk_wrapper": "cuteforge.rotary",
    "rotary_table": "cuteforge.rotary",
    "rotary_wrapper": "cuteforge.rotary",
    "ATTN_BACKEND": "cuteforge.backends.registry",
    "AttentionBackend": "cuteforge.backends.interface",
    "CacheFull": "cuteforge.backends.kv_cache",
    "CudaBackend": "cuteforge.backends.cuda",
    "DecodeGraph": "cuteforge.backends.decode_graph",
    "FlashAttnBackend": "cuteforge.backends.flash",
    "KERNEL_NAMES": "cuteforge.backends.kernels",
    "KVCache": "cuteforge.backends.kv_cache",
    "TorchNativeBackend": "cuteforge.backends.torch_native",
    "apply_rotary_emb": "cuteforge.backends.rotary",
    "attention": "cuteforge.backends.attention",
    "attn_backend": "cuteforge.backends.registry",
    "compress": "cuteforge.backends.compressor",
    "explain": "cuteforge.backends.explain",
    "is_available": "cuteforge.backends.kernels",
    "register_backend": "cuteforge.backends.registry",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})

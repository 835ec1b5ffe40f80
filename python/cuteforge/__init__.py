"""GPU kernels written in CuTe-DSL and compiled just in time.

Importing this package imports neither torch nor cutlass; a name's module is imported when the name is first used.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

# The floor of pyproject.toml. Older releases lack what torch.compile needs to trace the policy functions.
_TORCH_FLOOR = (2, 11)
# Modules that know no torch.
_WITHOUT_TORCH = ("cuteforge.errors", "cuteforge.op.tensor_spec")

# The public names, for the run time. Type checkers read the same names from the imports below.
_MODULE_OF = {
    "ContractError": "cuteforge.errors",
    "UnsupportedError": "cuteforge.errors",
    "TensorSpec": "cuteforge.op.tensor_spec",
    "TupleDict": "cuteforge.op.tuple_dict",
    "GQADecode": "cuteforge.families.attention",
    "GQAPrefill": "cuteforge.families.attention",
    "MergeState": "cuteforge.families.attention",
    "PagedGQADecode": "cuteforge.families.attention",
    "PagedGQAPrefill": "cuteforge.families.attention",
    "attn_decode": "cuteforge.families.attention",
    "attn_paged_decode": "cuteforge.families.attention",
    "attn_paged_prefill": "cuteforge.families.attention",
    "attn_prefill": "cuteforge.families.attention",
    "gqa_decode_wrapper": "cuteforge.families.attention",
    "gqa_prefill_wrapper": "cuteforge.families.attention",
    "merge_state": "cuteforge.families.attention",
    "paged_gqa_decode_wrapper": "cuteforge.families.attention",
    "paged_gqa_prefill_wrapper": "cuteforge.families.attention",
    "CSACompressorForward": "cuteforge.families.csa.compressor",
    "CSACompressorBackward": "cuteforge.families.csa.compressor",
    "csa_compressor_forward_wrapper": "cuteforge.families.csa.compressor",
    "csa_compressor_backward_wrapper": "cuteforge.families.csa.compressor",
    "RotaryEmbedding": "cuteforge.families.rotary",
    "rotary_emb": "cuteforge.families.rotary",
    "rotary_qk_wrapper": "cuteforge.families.rotary",
    "rotary_table": "cuteforge.families.rotary",
    "rotary_wrapper": "cuteforge.families.rotary",
    "ATTN_BACKEND": "cuteforge.backends.registry",
    "AttentionBackend": "cuteforge.backends.interface",
    "CacheFull": "cuteforge.serving.kv_cache",
    "CudaBackend": "cuteforge.backends.cuda",
    "DecodeGraph": "cuteforge.serving.decode_graph",
    "FlashAttnBackend": "cuteforge.backends.flash",
    "KERNEL_NAMES": "cuteforge.backends.kernels",
    "KVCache": "cuteforge.serving.kv_cache",
    "TorchNativeBackend": "cuteforge.backends.torch_native",
    "apply_rotary_emb": "cuteforge.backends.rotary",
    "attention": "cuteforge.backends.attention",
    "attn_backend": "cuteforge.backends.registry",
    "compress": "cuteforge.backends.compressor",
    "explain": "cuteforge.backends.explain",
    "is_available": "cuteforge.backends.kernels",
    "register_backend": "cuteforge.backends.registry",
}

__all__ = ["__version__", *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from cuteforge.backends.attention import attention as attention
    from cuteforge.backends.compressor import compress as compress
    from cuteforge.backends.cuda import CudaBackend as CudaBackend
    from cuteforge.backends.explain import explain as explain
    from cuteforge.backends.flash import FlashAttnBackend as FlashAttnBackend
    from cuteforge.backends.interface import AttentionBackend as AttentionBackend
    from cuteforge.backends.kernels import KERNEL_NAMES as KERNEL_NAMES
    from cuteforge.backends.kernels import is_available as is_available
    from cuteforge.backends.registry import ATTN_BACKEND as ATTN_BACKEND
    from cuteforge.backends.registry import attn_backend as attn_backend
    from cuteforge.backends.registry import register_backend as register_backend
    from cuteforge.backends.rotary import apply_rotary_emb as apply_rotary_emb
    from cuteforge.backends.torch_native import TorchNativeBackend as TorchNativeBackend
    from cuteforge.errors import ContractError as ContractError
    from cuteforge.errors import UnsupportedError as UnsupportedError
    from cuteforge.families.attention import GQADecode as GQADecode
    from cuteforge.families.attention import GQAPrefill as GQAPrefill
    from cuteforge.families.attention import MergeState as MergeState
    from cuteforge.families.attention import PagedGQADecode as PagedGQADecode
    from cuteforge.families.attention import PagedGQAPrefill as PagedGQAPrefill
    from cuteforge.families.attention import attn_decode as attn_decode
    from cuteforge.families.attention import attn_paged_decode as attn_paged_decode
    from cuteforge.families.attention import attn_paged_prefill as attn_paged_prefill
    from cuteforge.families.attention import attn_prefill as attn_prefill
    from cuteforge.families.attention import gqa_decode_wrapper as gqa_decode_wrapper
    from cuteforge.families.attention import gqa_prefill_wrapper as gqa_prefill_wrapper
    from cuteforge.families.attention import merge_state as merge_state
    from cuteforge.families.attention import paged_gqa_decode_wrapper as paged_gqa_decode_wrapper
    from cuteforge.families.attention import paged_gqa_prefill_wrapper as paged_gqa_prefill_wrapper
    from cuteforge.families.csa.compressor import CSACompressorBackward as CSACompressorBackward
    from cuteforge.families.csa.compressor import CSACompressorForward as CSACompressorForward
    from cuteforge.families.csa.compressor import csa_compressor_backward_wrapper as csa_compressor_backward_wrapper
    from cuteforge.families.csa.compressor import csa_compressor_forward_wrapper as csa_compressor_forward_wrapper
    from cuteforge.families.rotary import RotaryEmbedding as RotaryEmbedding
    from cuteforge.families.rotary import rotary_emb as rotary_emb
    from cuteforge.families.rotary import rotary_qk_wrapper as rotary_qk_wrapper
    from cuteforge.families.rotary import rotary_table as rotary_table
    from cuteforge.families.rotary import rotary_wrapper as rotary_wrapper
    from cuteforge.op.tensor_spec import TensorSpec as TensorSpec
    from cuteforge.op.tuple_dict import TupleDict as TupleDict
    from cuteforge.serving.decode_graph import DecodeGraph as DecodeGraph
    from cuteforge.serving.kv_cache import CacheFull as CacheFull
    from cuteforge.serving.kv_cache import KVCache as KVCache
else:
    # Hidden from type checkers: with a `__getattr__` in sight they accept every name as public.
    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _MODULE_OF[name]
        if module not in _WITHOUT_TORCH:
            _check_torch(importlib.import_module("torch").__version__)
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


def _check_torch(version: str) -> None:
    """Refuse a torch below the floor before anything that needs a newer one is imported."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < _TORCH_FLOOR:
        floor = ".".join(map(str, _TORCH_FLOOR))
        raise ImportError(
            f"cuteforge needs torch>={floor}, but torch {version} is installed: pip install 'torch>={floor}'"
        )

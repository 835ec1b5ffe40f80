"""Other libraries, measured beside ours: each gives callables on preallocated buffers, or a reason why it cannot."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import flashinfer_rope

CUDNN_SDPA, FLASH_SDPA = "torch cuDNN", "torch FA2"


class CudnnCompressor:
    """The CSA compressor kernels of nvidia-cudnn-frontend, launched directly.

    Its own API refuses GPUs below compute capability 10.0, though the kernels use nothing newer than plain loads;
    called below that API, they are compiled for the current GPU. Inputs: contiguous bf16 kv, score, out and gradients,
    fp32 ape, int32 offsets. Nothing is allocated or filled by the callables.
    """

    name = "cudnn-frontend"

    def __init__(self, general: types.ModuleType, ratio128: types.ModuleType) -> None:
        # Resolved here, so that a release without these entry points is a reason for no peer, not an error later.
        self._forward = {True: ratio128.run_fwd_r128, False: general.run_fwd}
        self._backward = {True: ratio128.run_bwd_r128, False: general.run_bwd}

    def forward(self, kv, score, ape, cu_seqlens, cu_seqlens_comp, out, *, ratio: int, coff: int) -> Callable[[], Any]:
        """Callable that launches the forward kernel into `out (N, d)`."""
        num_rows, d = out.shape
        run = self._forward[ratio == 128]
        return functools.partial(run, kv, score, ape, cu_seqlens, cu_seqlens_comp, out, num_rows, ratio, d, coff)

    def backward(
        self,
        kv,
        score,
        ape,
        cu_seqlens,
        cu_seqlens_comp,
        grad_out,
        grad_kv,
        grad_score,
        grad_ape,
        *,
        ratio: int,
        coff: int,
    ) -> Callable[[], Any]:
        """Callable that launches the default (atomic) backward kernel.

        grad_kv and grad_score are overwritten; grad_ape is added to, and zeroing it is left to the caller and not
        timed.
        """
        num_rows, d = grad_out.shape
        operands = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, grad_kv, grad_score, grad_ape)
        return functools.partial(self._backward[ratio == 128], *operands, num_rows, ratio, d, coff)


def find_cudnn_compressor() -> tuple[CudnnCompressor | None, str]:
    """The peer and its version, or None and the reason, e.g. "not installed". Never raises for a missing peer."""
    spec = importlib.util.find_spec("cudnn")
    if spec is None or not spec.submodule_search_locations:
        return None, "not installed"
    try:
        with _bare_packages("cudnn", spec.submodule_search_locations, ("csa", "compressor")):
            general = importlib.import_module("cudnn.csa.compressor.compressor_sm100")
            ratio128 = importlib.import_module("cudnn.csa.compressor.compressor_sm100_r128")
        return CudnnCompressor(general, ratio128), importlib.metadata.version("nvidia-cudnn-frontend")
    except Exception as error:  # whatever another library's import does here, ours is still measured
        return None, f"installed, but not usable: {type(error).__name__}: {error}"


class FlashinferRope:
    """The rotary kernel of flashinfer that takes q and k in one launch, in place, with a table and positions."""

    name = "flashinfer"
    has_host_time = True

    def __init__(self, apply: Callable[..., None]) -> None:
        self._apply = apply

    def rotate(self, q, k, cos, sin, positions, *, interleaved: bool) -> Callable[[], Any]:
        """Callable that turns q ``(T, Hq, D)`` and k ``(T, Hk, D)`` in place; contiguous, one 16-bit dtype.

        cos, sin: fp32 ``(max_pos, rotary_dim / 2)``, joined here once. positions: int64 ``(T,)``.
        """
        import torch

        flat = (positions, q.view(q.shape[0], -1), k.view(k.shape[0], -1), q.shape[-1], torch.cat((cos, sin), 1))
        return functools.partial(self._apply, *flat, is_neox=not interleaved)


def find_flashinfer_rope() -> tuple[FlashinferRope | flashinfer_rope.RopeKernels | None, str]:
    """The peer and its version, or None and the reason. Never raises for a missing peer. The package compiles at its
    first call; without it the kernels that `flashinfer_rope.py` has built will do."""
    try:
        if importlib.util.find_spec("flashinfer") is None:
            if (folder := os.environ.get(flashinfer_rope.ENVIRONMENT)) is None:
                return None, "not installed"
            kernels = flashinfer_rope.RopeKernels(pathlib.Path(folder))
            return kernels, kernels.version
        apply = importlib.import_module("flashinfer").apply_rope_with_cos_sin_cache_inplace
        return FlashinferRope(apply), importlib.metadata.version("flashinfer-python")
    except Exception as error:  # whatever another library's import does here, ours is still measured
        return None, f"installed, but not usable: {type(error).__name__}: {error}"


class TorchSdpa:
    """`scaled_dot_product_attention` of torch, held to one backend."""

    def __init__(self, name: str, backend: Any) -> None:
        self.name = name
        self._backend = backend

    def attend(self, q, k, v, *, causal: bool) -> Callable[[], Any]:
        """Callable that returns ``(B, L, Hq, D)``. q ``(B, L, Hq, D)``, k, v ``(B, S, Hkv, D)``; causal needs L ==
        S."""
        from torch.nn.attention import sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        by_head = tuple(x.transpose(1, 2) for x in (q, k, v))
        options = {"is_causal": causal, "enable_gqa": q.shape[2] != k.shape[2]}

        def call():
            with sdpa_kernel(self._backend):
                return scaled_dot_product_attention(*by_head, **options).transpose(1, 2)

        return call


def find_cudnn_sdpa() -> tuple[TorchSdpa | None, str]:
    """torch's attention in cuDNN and the version of cuDNN, or None and the reason. Never raises for a missing peer."""
    return _find_sdpa(CUDNN_SDPA, "CUDNN_ATTENTION", lambda torch: f"cuDNN {torch.backends.cudnn.version()}")


def find_flash_sdpa() -> tuple[TorchSdpa | None, str]:
    """torch's own FlashAttention 2 and the version of torch, or None and the reason. Never raises for a missing
    peer."""
    return _find_sdpa(FLASH_SDPA, "FLASH_ATTENTION", lambda torch: f"torch {torch.__version__}")


def _find_sdpa(name: str, backend: str, version: Callable[[types.ModuleType], str]) -> tuple[TorchSdpa | None, str]:
    try:
        torch, attention = (importlib.import_module(module) for module in ("torch", "torch.nn.attention"))
        return TorchSdpa(name, getattr(attention.SDPBackend, backend)), version(torch)
    except Exception as error:  # whatever this release of torch lacks, ours is still measured
        return None, f"not usable: {type(error).__name__}: {error}"


class FlashAttention4:
    """The CuTe-DSL kernels of flash-attn-4, through its public functions. KV is not split: on Hopper it does not offer
    that.

    Each callable allocates its result, about 80 us of host time in all, and returns it in the layout of q. It compiles
    at its first call.
    """

    name = "flash-attn-4"

    def __init__(self, dense: Callable[..., Any], varlen: Callable[..., Any]) -> None:
        self._dense = dense
        self._varlen = varlen

    def attend(self, q, k, v, *, causal: bool) -> Callable[[], Any]:
        """q ``(B, L, Hq, D)``, k, v ``(B, S, Hkv, D)``."""
        return self._result_of(functools.partial(self._dense, q, k, v, causal=causal))

    def attend_packed(self, q, k, v, cu_seqlens, max_seqlen: int, *, causal: bool) -> Callable[[], Any]:
        """q ``(T, Hq, D)``, k, v ``(T, Hkv, D)``, cu_seqlens int32 ``(B + 1,)`` of both."""
        lengths = {
            f"{what}_{side}": value
            for side in "qk"
            for what, value in (("cu_seqlens", cu_seqlens), ("max_seqlen", max_seqlen))
        }
        return self._result_of(functools.partial(self._varlen, q, k, v, **lengths, causal=causal))

    def attend_paged(
        self,
        q,
        k_cache,
        v_cache,
        page_table,
        seqlens_k,
        max_seqlen_k: int,
        *,
        causal: bool,
        cu_seqlens_q=None,
        max_seqlen_q=None,
    ) -> Callable[[], Any]:
        """q ``(B, L, Hq, D)``, or ``(T, Hq, D)`` with `cu_seqlens_q`; k_cache, v_cache ``(P, ps, Hkv, D)``.

        page_table: int32 ``(B, C)``. seqlens_k: int32 ``(B,)``.
        """
        packed = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        keys = {"seqused_k": seqlens_k, "max_seqlen_k": max_seqlen_k, "page_table": page_table}
        return self._result_of(functools.partial(self._varlen, q, k_cache, v_cache, **keys, **packed, causal=causal))

    @staticmethod
    def _result_of(call: Callable[[], Any]) -> Callable[[], Any]:
        """Without the lse, which is returned beside the result."""

        def first():
            result = call()
            return result[0] if isinstance(result, tuple) else result

        return first


def find_flash_attention_4() -> tuple[FlashAttention4 | None, str]:
    """The peer and its version, or None and the reason. Never raises for a missing peer."""
    if importlib.util.find_spec("flash_attn") is None:
        return None, "not installed"
    try:
        module = importlib.import_module("flash_attn.cute")
        peer = FlashAttention4(module.flash_attn_func, module.flash_attn_varlen_func)
        return peer, importlib.metadata.version("flash-attn-4")
    except Exception as error:  # whatever another library's import does here, ours is still measured
        return None, f"installed, but not usable: {type(error).__name__}: {error}"


def find_attention() -> tuple[dict[str, TorchSdpa | FlashAttention4], str]:
    """Every peer in attention by name, and a phrase on each that was looked for."""
    finders = {
        CUDNN_SDPA: find_cudnn_sdpa,
        FLASH_SDPA: find_flash_sdpa,
        FlashAttention4.name: find_flash_attention_4,
    }
    found = {name: find() for name, find in finders.items()}
    usable = {name: peer for name, (peer, _) in found.items() if peer is not None}
    return usable, "; ".join(f"{name}: {status}" for name, (_, status) in found.items())


@contextlib.contextmanager
def _bare_packages(root: str, locations: list[str], below: tuple[str, ...]) -> Iterator[None]:
    """Lets submodules be imported without running the `__init__` of their packages.

    The package's own `__init__` loads compiled bindings and the backend library, and the family's checks the GPU; the
    kernel files need neither. What was in `sys.modules` before is put back afterwards.
    """
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == root}
    for name in before:
        del sys.modules[name]
    try:
        for depth in range(len(below) + 1):
            package = types.ModuleType(".".join((root, *below[:depth])))
            package.__path__ = ["/".join((location, *below[:depth])) for location in locations]
            sys.modules[package.__name__] = package
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == root]:
            del sys.modules[name]
        sys.modules.update(before)

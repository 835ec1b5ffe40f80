"""torch's own attention on a CPU: the adapter's kernels under another dispatch key, with the reference to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cuteforge import UnsupportedError
from cuteforge.backends.cuda import CudaBackend
from cuteforge.integrations import torch_sdpa
from cuteforge.integrations.aten_attention import FlashCall, Served
from cuteforge.op import torch_library
from cuteforge.runtime.arch import resolve_arch

SDPA_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"


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
    """What makes a kernel of the operator that ``F.scaled_dot_product_attention`` calls on a CPU."""

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

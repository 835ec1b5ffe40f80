"""Stand-ins for a GPU: kernels that only note their launches, and CPU tensors that pass for those of an sm_90 GPU until a compiled entry looks."""

from __future__ import annotations

from dataclasses import replace

import torch

from cuteforge import api_base
from cuteforge.runtime.compile_cache import KernelKey
from cuteforge.tensor_spec import TensorSpec

STREAM = 77


class StubKernel:
    """Stands in for a loaded kernel: notes launches, or refuses as a compiled entry would."""

    def __init__(self, key: KernelKey, launches: list[tuple] | None = None):
        self.key = key
        self.launches: list[tuple] = [] if launches is None else launches
        self.refuses: Exception | None = None

    def entry(self, *args) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.launches.append(args)


def pass_for_gpu(monkeypatch) -> None:
    """What a launch asks torch for: the GPU of a tensor, what it can do, and the current stream there."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(api_base, "raw_stream", lambda device: STREAM)


def pass_for_gpu_in_tables(monkeypatch) -> None:
    """What the validation tables see of tensors."""
    metadata = TensorSpec.of
    monkeypatch.setattr(TensorSpec, "of", lambda x, name: replace(metadata(x, name), device="cuda:0"))

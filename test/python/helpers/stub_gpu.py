"""Stand-ins for a GPU: kernels that only note their launches, and CPU tensors that pass for those of an sm_90 GPU until
a compiled entry looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch._C._dynamo.guards import _empty_strided_cpu

from cuteforge.families.attention import base as attention_base
from cuteforge.families.attention import road as attention_road
from cuteforge.families.csa.compressor import api as csa_api
from cuteforge.op import base as api_base
from cuteforge.op import recall, replay
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.runtime.arch import resolve_arch
from cuteforge.runtime.compile_cache import KernelKey

STREAM = 77
# Raises for the arguments of a launch that an entry of that key refuses.
Check = Callable[[KernelKey, tuple], None]


class StubKernel:
    """Stands in for a loaded kernel: notes launches, or refuses as a compiled entry would."""

    def __init__(self, key: KernelKey, launches: list[tuple] | None = None, check: Check | None = None):
        self.key = key
        self.launches: list[tuple] = [] if launches is None else launches
        self.refuses: Exception | None = None
        self._check = check

    def entry(self, *args) -> None:
        if self.refuses is not None:
            raise self.refuses
        if self._check is not None:
            self._check(self.key, args)
        self.launches.append(args)


def pass_for_gpu(monkeypatch) -> None:
    """What a launch asks torch for: the GPU of a tensor, what it can do, and the current stream there."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(api_base, "current_handle", lambda device: STREAM)


def pass_for_gpu_in_tables(monkeypatch) -> None:
    """What the validation tables see of tensors."""
    metadata = TensorSpec.of
    monkeypatch.setattr(TensorSpec, "of", lambda x, name: replace(metadata(x, name), device="cuda:0"))


def refuse_what_wrappers_copy(key: KernelKey, args: tuple) -> None:
    """As a compiled entry: of layouts and indices that it does not read. Rotary reads int64 positions."""
    reads_int64 = "rotary" in key.builder
    for x in args:
        if isinstance(x, torch.Tensor):
            if not x.is_contiguous() or x.data_ptr() % 16 or (x.dtype == torch.int64 and not reads_int64):
                raise ValueError("refused")


def stub_wrappers(monkeypatch, check: Check | None = None) -> Iterator[list[tuple]]:
    """For a fixture: wrappers run on CPU tensors. Yields the arguments of every entry that is called.

    Args:
        check: raises for arguments that entries refuse.
    """
    launched: list[tuple] = []
    monkeypatch.setattr(api_base, "load_kernel", lambda key: StubKernel(key, launched, check))
    pass_for_gpu(monkeypatch)
    pass_for_gpu_in_tables(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    sm_90a = resolve_arch("sm_90a", None)
    for module in (api_base, csa_api, attention_base, attention_road):
        monkeypatch.setattr(module, "resolve_arch", lambda name, index: sm_90a)
    monkeypatch.setattr(csa_api.CSACompressorBackward, "_check_workspace", lambda *args: None)
    monkeypatch.setattr(replay, "ways_to_empty", lambda device: (_empty_strided_cpu, None))
    monkeypatch.setattr(replay, "current_device", lambda: 0)
    # ops of one test launch into its list
    recall.forget()
    yield launched
    recall.forget()


class StubStream:
    """A stream of the GPU of `pass_for_gpu`."""

    cuda_stream, device_index = 99, 0


def stub_streams(monkeypatch) -> Callable[[], int]:
    """torch's current stream is one that is only noted. Returns the query of its handle, `STREAM` outside of any
    context."""
    handles = [STREAM]

    @contextmanager
    def stream(handle: int):
        handles.append(handle)
        yield
        handles.pop()

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(api_base, "current_handle", lambda device: handles[-1])
    return lambda: handles[-1]

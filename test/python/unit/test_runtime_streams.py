"""Stream arguments become raw handles, or are refused by name. What needs a real stream is in the GPU tests."""

from types import SimpleNamespace

import pytest
import torch

from cuteforge.errors import ContractError
from cuteforge.runtime import streams


class WithProtocol:
    """As cuda.core's Stream: a (version, handle) pair."""

    def __cuda_stream__(self):
        return 0, 77


@pytest.fixture
def current(monkeypatch):
    """torch's current stream: handle 1000 + GPU number."""
    monkeypatch.setattr(streams, "current_stream_query", lambda: lambda device_index: 1000 + device_index)


def test_none_is_the_current_stream_of_that_gpu(current):
    assert streams.stream_handle(None, 1) == 1001
    assert streams.current_stream_handle(0) == 1000


def test_zero_is_the_default_stream_and_not_the_current_one(current):
    assert streams.stream_handle(0, 1) == 0
    assert streams.stream_handle(SimpleNamespace(cuda_stream=0, device_index=1), 1) == 0


def test_kinds_of_stream(current):
    driver = pytest.importorskip("cuda.bindings.driver")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert streams.stream_handle(42, 0) == 42
    assert streams.stream_handle(driver.CUstream(43), 0) == 43
    assert streams.stream_handle(runtime.cudaStream_t(44), 0) == 44
    assert streams.stream_handle(WithProtocol(), 0) == 77
    assert streams.stream_handle(SimpleNamespace(__cuda_stream__=(0, 78)), 0) == 78
    assert streams.stream_handle(SimpleNamespace(cuda_stream=45), 0) == 45


def test_a_stream_of_another_gpu_is_refused_by_name(current):
    with pytest.raises(ContractError, match="stream: wanted a stream of cuda:0, got one of cuda:1"):
        streams.stream_handle(SimpleNamespace(cuda_stream=45, device_index=1), 0)


@pytest.mark.parametrize("stream", ["default", -1, True, 1.0, object(), torch])
def test_what_is_no_stream_is_refused(current, stream):
    with pytest.raises(ContractError, match="^stream: wanted"):
        streams.stream_handle(stream, 0)


def test_torch_without_the_raw_query_still_works(monkeypatch):
    streams.current_stream_query.cache_clear()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=500 + index))
    assert streams.current_stream_handle(3) == 503
    streams.current_stream_query.cache_clear()


def test_nothing_is_capturing_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert streams.is_capturing() is False


def test_capture_state_is_torchs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert streams.is_capturing() is True


def test_record_streams_skips_absent_operands(monkeypatch):
    recorded = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: f"default {index}")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"external {handle} {device}")
    tensor = SimpleNamespace(record_stream=recorded.append)
    streams.record_streams([tensor, None], 0, torch.device("cuda", 1))
    streams.record_streams([tensor], 99, 1)
    assert recorded == ["default 1", "external 99 1"]


def test_stream_context_enters_the_given_stream_or_only_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"external {handle} {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: ("on", stream))
    monkeypatch.setattr(torch.cuda, "device", lambda index: ("device", index))
    assert streams.stream_context(None, "cuda:1") == ("device", 1)
    assert streams.stream_context(99, torch.device("cuda", 1)) == ("on", "external 99 1")

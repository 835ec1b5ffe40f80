"""The thin launch layer, with a recording entry in place of a compiled one."""

import contextlib

import pytest
import torch

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.op.launch import bound_launch, entry_of, translate_error
from cuteforge.runtime import streams
from cuteforge.runtime.compile_cache import Kernel, KernelKey


@pytest.fixture
def calls():
    return []


@pytest.fixture
def kernel(calls):
    return Kernel(KernelKey("some.module:build", (), "sm_90a"), lambda *args: calls.append(args), "memory")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("CUTEFORGE_NVTX", raising=False)


def test_bound_launch_asks_for_the_current_stream_at_every_call(kernel, calls, monkeypatch):
    handles = iter((11, 12))
    monkeypatch.setattr(streams, "current_stream_query", lambda: lambda device_index: next(handles))
    call = bound_launch(kernel, (torch.arange(4.0),), (7,))
    call()
    call()
    assert [args[1:] for args in calls] == [(7, 11), (7, 12)]
    assert calls[0][0] is calls[1][0], "converted once"


def test_bound_launch_on_a_given_stream(kernel, calls):
    bound_launch(kernel, (torch.arange(4.0),), (), 0)()
    assert calls[0][1:] == (0,)


def test_bound_launch_keeps_the_memory_of_operands_that_the_caller_drops(kernel, calls):
    x = torch.arange(4.0)
    call = bound_launch(kernel, (x,), (), 0)
    address = x.data_ptr()
    del x
    poison = [torch.full((4,), float("nan")) for _ in range(8)]
    call()
    assert torch.from_dlpack(calls[0][0]).tolist() == [0, 1, 2, 3]
    assert torch.from_dlpack(calls[0][0]).data_ptr() == address
    del poison


def test_bound_launch_takes_parameters(kernel, calls):
    bound_launch(kernel, (torch.nn.Parameter(torch.ones(2)),), (), 0)()
    assert len(calls) == 1


def test_nvtx_range_only_on_request(kernel, calls, monkeypatch):
    ranges = []

    @contextlib.contextmanager
    def nvtx_range(text):
        ranges.append(text)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    entry_of(kernel)(0)
    bound_launch(kernel, (torch.ones(2),), (), 0)()
    assert entry_of(kernel) is kernel.entry
    assert ranges == []
    monkeypatch.setenv("CUTEFORGE_NVTX", "1")
    entry_of(kernel)(0)
    bound_launch(kernel, (torch.ones(2),), (), 0)()
    assert ranges == ["cuteforge some.module:build"] * 2
    assert len(calls) == 4


@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_a_refused_operand_becomes_a_contract_error(kind):
    error = translate_error(kind("Mismatched y.shape[0] on argument #1"))
    assert type(error) is ContractError
    assert "argument #1" in str(error)


def test_code_of_another_architecture_is_named():
    text = "Got Cuda Runtime Error: cudaErrorNoKernelImageForDevice no kernel image is available for execution"
    assert isinstance(translate_error(RuntimeError(text)), UnsupportedError)


def test_other_errors_stay_as_they_are():
    error = RuntimeError("an illegal memory access was encountered")
    assert translate_error(error) is error

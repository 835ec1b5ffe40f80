"""Fixtures and rules all tests share.

Tests under ``fe_api/`` run kernels and are marked ``gpu``, as are some elsewhere: they are skipped only where torch
sees no CUDA device. A missing capability (a second GPU, memory) is skipped by the test that needs it, with the reason.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from helpers import fuzz as fuzzing
from helpers import parallel, recorder

_GPU_TESTS = Path(__file__).parent / "fe_api"
_SETTINGS = Path(__file__).parent / "pytest.ini"
# An example that takes long, or is drawn slowly, is no fault: other processes have the machine too.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


def pytest_addoption(parser) -> None:
    parser.addoption("--gpu-record", metavar="FILE", type=Path, help="add what ran, and how it went, to FILE")
    parser.addoption(
        "--torch-record", metavar="FILE", type=Path, help="the same for this version of torch, without a GPU"
    )
    parser.addoption("--full", action="store_true", help="compile every tile for every architecture, not a selection")
    fuzzing.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config) -> None:
    """Before pytest-xdist reads its options."""
    parallel.choose_processes(config)


def pytest_configure(config) -> None:
    if config.inipath != _SETTINGS:
        # pytest looks for its settings before it knows the options below, and takes a FILE that exists for one more
        # path with tests
        raise pytest.UsageError(f"{_SETTINGS.name} was not found: write --gpu-record=FILE, with an equals sign")
    config.addinivalue_line("markers", "gpu: runs a kernel; needs a CUDA device")
    config.addinivalue_line("markers", "multi_gpu: needs two CUDA devices")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(recorder.Deselected(config), "deselected")
        return
    for option, add in (("--gpu-record", recorder.add_gpu_run), ("--torch-record", recorder.add_torch_run)):
        if path := config.getoption(option):
            config.pluginmanager.register(recorder.Recorder(path.resolve(), add), option)


def _device_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(config, items) -> None:
    fuzzing.share_time(config, items)
    for item in items:
        if _GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    devices = _device_count()
    for item in gpu_items:
        if devices == 0:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
        elif item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture
def fuzz(request) -> fuzzing.Fuzz:
    """Runs a body on drawn arguments: a few seconds, or its share of --fuzz-minutes."""
    return fuzzing.of_run(request.config)


@pytest.fixture
def device():
    """The current CUDA device; a pending asynchronous error surfaces in the test that caused it."""
    import torch

    yield torch.device("cuda", torch.cuda.current_device())
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        _leave_dead_context(error)
        raise


def _leave_dead_context(error: Exception) -> None:
    """End a worker of pytest-xdist whose CUDA context an illegal access has made useless.

    The controller reports this test as the one that crashed and starts another worker, so that no later test fails for
    it.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        print(error, flush=True)
        os._exit(1)
    pytest.exit(f"the CUDA context is lost: {error}", returncode=3)


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Wrappers go through their ops on CPU tensors, which they refuse otherwise."""
    from cuteforge.op import torch_library

    monkeypatch.setattr(torch_library, "_check_gpu_tensors", lambda *_: None)


@pytest.fixture
def fresh_compiler():
    """A backend for torch.compile that traces forward and backward and counts the graphs; nothing compiled before."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    yield torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

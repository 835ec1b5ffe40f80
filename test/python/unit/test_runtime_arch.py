"""Architecture names, facts, and which code runs where; torch's device query is replaced where a GPU is meant."""

from types import SimpleNamespace

import pytest
import torch

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.runtime import arch as arch_module
from cuteforge.runtime import clusters
from cuteforge.runtime.arch import resolve_arch, runs_on


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """No GPU, no variable, and nothing remembered from another test."""
    monkeypatch.delenv("CUTEFORGE_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arch_module._device_arch.cache_clear()
    yield
    arch_module._device_arch.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Installs a GPU of a given capability and counts the queries of its properties."""

    def install(major, minor, num_sms=132):
        queries = []
        facts = SimpleNamespace(
            name="a GPU",
            major=major,
            minor=minor,
            multi_processor_count=num_sms,
            shared_memory_per_multiprocessor=233472,
            shared_memory_per_block_optin=232448,
            L2_cache_size=50 << 20,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(clusters, "reach_of", lambda index, num_sms, smem: clusters.reach(num_sms))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: queries.append(index) or facts)
        return queries

    return install


@pytest.mark.parametrize(
    ("name", "capability", "num_sms", "smem_bytes_per_cta"),
    [
        ("sm_80", (8, 0), 108, 163 * 1024),
        ("sm_89", (8, 9), 92, 99 * 1024),
        ("sm_90", (9, 0), 132, 227 * 1024),
        ("sm_90a", (9, 0), 132, 227 * 1024),
        ("sm_100a", (10, 0), 148, 227 * 1024),
        ("sm_103a", (10, 3), 148, 227 * 1024),
        ("sm_120a", (12, 0), 170, 99 * 1024),
    ],
)
def test_facts_without_a_gpu(name, capability, num_sms, smem_bytes_per_cta):
    arch = resolve_arch(name, None)
    assert arch.name == name
    assert arch.capability == capability
    assert arch.num_sms == num_sms
    assert arch.smem_bytes_per_cta == smem_bytes_per_cta
    assert arch.smem_bytes_per_sm == smem_bytes_per_cta + 1024
    assert arch.l2_bytes >= 6 << 20


def test_explicit_name_then_variable_then_gpu(monkeypatch, gpu):
    gpu(9, 0)
    assert resolve_arch(None, 0).name == "sm_90a"
    monkeypatch.setenv("CUTEFORGE_ARCH", "sm_80")
    assert resolve_arch(None, 0).name == "sm_80"
    assert resolve_arch("sm_120a", 0).name == "sm_120a"


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_name_of_a_gpu(gpu, capability, name):
    gpu(*capability)
    assert resolve_arch(None, 0).name == name


def test_a_gpu_is_asked_once_and_its_own_facts_are_used(gpu):
    queries = gpu(9, 0, num_sms=78)
    assert resolve_arch(None, 0).num_sms == 78
    assert resolve_arch("sm_90a", 0).num_sms == 78
    assert resolve_arch(None, None).num_sms == 78
    assert queries == [0]
    assert resolve_arch("sm_80", 0).num_sms == 108


def test_neither_gpu_nor_name_says_how_to_name_one():
    with pytest.raises(UnsupportedError, match="CUTEFORGE_ARCH=sm_90a"):
        resolve_arch(None, None)


def test_a_gpu_that_is_not_there_is_refused_by_name_and_a_named_architecture_is_not(gpu):
    gpu(9, 0)
    with pytest.raises(UnsupportedError, match=r"^device: wanted one of the 8 GPUs that torch sees, got cuda:8$"):
        resolve_arch(None, 8)
    assert resolve_arch("sm_90a", 8).name == "sm_90a"


def test_gpu_below_8_0_is_refused_by_name(gpu):
    gpu(7, 5)
    with pytest.raises(UnsupportedError, match=r"cuda:0: a GPU has compute capability 7\.5"):
        resolve_arch(None, 0)


def test_names_below_8_0_are_unsupported():
    with pytest.raises(UnsupportedError, match="arch: sm_75"):
        resolve_arch("sm_75", None)


@pytest.mark.parametrize("name", ["hopper", "90a", "sm_9", "sm_80a", "sm_90b", "sm_150", "sm_90a "])
def test_what_is_no_architecture_is_refused(monkeypatch, name):
    with pytest.raises(ContractError, match="^arch: wanted"):
        resolve_arch(name, None)
    monkeypatch.setenv("CUTEFORGE_ARCH", name)
    with pytest.raises(ContractError, match="^CUTEFORGE_ARCH: wanted"):
        resolve_arch(None, None)


@pytest.mark.parametrize(
    ("name", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_100", (12, 0), False),
        ("sm_120a", (12, 1), False),
    ],
)
def test_runs_on(name, capability, runs):
    assert runs_on(name, capability) is runs


@pytest.mark.parametrize(("num_sms", "sms"), [(132, 120), (148, 128), (20, 16)])
def test_clusters_reach_about_ten_of_eleven_sms_where_no_gpu_can_be_asked(num_sms, sms):
    """Measured on an H200: 15 clusters of eight on 132 SMs."""
    assert clusters.reach(num_sms) == sms

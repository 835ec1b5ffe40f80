"""The environment table: values, errors, liveness, cost on the launch path."""

import logging
import os
import time
import timeit
from contextlib import nullcontext
from pathlib import Path

import pytest

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.runtime import env

READERS = {
    "CUTEFORGE_ARCH": env.arch,
    "CUTEFORGE_CACHE_DIR": env.cache_dir,
    "CUTEFORGE_DISK_CACHE": env.disk_cache,
    "CUTEFORGE_DISK_CACHE_SIZE": env.disk_cache_size,
    "CUTEFORGE_CACHE_SIZE": env.cache_size,
    "CUTEFORGE_FAST_LAUNCH": env.fast_launch,
    "CUTEFORGE_CHECK": env.check,
    "CUTEFORGE_NVTX": env.nvtx,
    "CUTEFORGE_LOG": env.log_level,
    "CUTEFORGE_KERNELS": env.kernels,
    "CUTEFORGE_BACKEND": env.backend,
}
# What a launch looks at.
LAUNCH_VARIABLES = ("CUTEFORGE_FAST_LAUNCH", "CUTEFORGE_CHECK", "CUTEFORGE_NVTX", "CUTEFORGE_KERNELS")


def test_every_variable_of_the_table_has_a_reader_and_its_default(monkeypatch):
    assert {variable.name for variable in env.VARIABLES} == set(READERS)
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
        assert READERS[variable.name]() == variable.default
        assert variable.meaning


def test_a_value_counts_from_the_next_read_on(monkeypatch):
    monkeypatch.delenv("CUTEFORGE_CHECK", raising=False)
    assert env.check() is False
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    assert env.check() is True
    monkeypatch.setenv("CUTEFORGE_CHECK", "off")
    assert env.check() is False
    monkeypatch.delenv("CUTEFORGE_CHECK")
    assert env.check() is False


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("CUTEFORGE_ARCH", "sm_80", "sm_80"),
        ("CUTEFORGE_CACHE_DIR", "/some/where", Path("/some/where")),
        ("CUTEFORGE_DISK_CACHE", "0", False),
        ("CUTEFORGE_DISK_CACHE", "", True),
        ("CUTEFORGE_CACHE_SIZE", "7", 7),
        ("CUTEFORGE_DISK_CACHE_SIZE", "1000", 1000),
        ("CUTEFORGE_DISK_CACHE_SIZE", "500M", 500 * 2**20),
        ("CUTEFORGE_DISK_CACHE_SIZE", "1.5 GiB", 3 * 2**29),
        ("CUTEFORGE_DISK_CACHE_SIZE", "2kb", 2048),
        ("CUTEFORGE_DISK_CACHE_SIZE", "1 B", 1),
        ("CUTEFORGE_FAST_LAUNCH", "False", False),
        ("CUTEFORGE_LOG", "debug", logging.DEBUG),
        ("CUTEFORGE_KERNELS", "0", False),
        ("CUTEFORGE_BACKEND", "torch_native", "torch_native"),
        ("CUTEFORGE_BACKEND", "", None),
    ],
)
def test_values(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    assert READERS[name]() == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CUTEFORGE_FAST_LAUNCH", "maybe"),
        ("CUTEFORGE_CACHE_SIZE", "0"),
        ("CUTEFORGE_CACHE_SIZE", "many"),
        ("CUTEFORGE_DISK_CACHE_SIZE", "0"),
        ("CUTEFORGE_DISK_CACHE_SIZE", "-1G"),
        ("CUTEFORGE_DISK_CACHE_SIZE", "lots"),
        ("CUTEFORGE_DISK_CACHE_SIZE", "1PB"),
        ("CUTEFORGE_CACHE_DIR", "~nobody-of-this-name/cache"),
        ("CUTEFORGE_LOG", "loud"),
    ],
)
def test_a_bad_value_is_refused_naming_the_variable_at_every_read(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    for _ in range(2):
        with pytest.raises(ContractError, match=f"{name}: wanted .*{text}"):
            READERS[name]()


@pytest.mark.parametrize("name", LAUNCH_VARIABLES)
def test_launch_is_plain_until_a_variable_of_it_is_set(monkeypatch, name):
    """Set to any value, the default too: only then is the value read."""
    for variable in LAUNCH_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert env.launch_is_plain()
    monkeypatch.setenv(name, "1")
    assert not env.launch_is_plain()
    monkeypatch.delenv(name)
    assert env.launch_is_plain()


@pytest.mark.parametrize(("text", "refuses"), [(None, False), ("1", False), ("0", True)])
def test_kernels_are_required_until_switched_off(monkeypatch, text, refuses):
    monkeypatch.delenv("CUTEFORGE_KERNELS", raising=False)
    if text is not None:
        monkeypatch.setenv("CUTEFORGE_KERNELS", text)
    with pytest.raises(UnsupportedError, match="CUTEFORGE_KERNELS=0") if refuses else nullcontext():
        env.require_kernels()


def processor_time(function):
    """The least of several measurements; compare it with another of the same machine."""
    return min(timeit.repeat(function, number=20_000, repeat=7, timer=time.thread_time))


def read_through_os_environ():
    return os.environ.get("CUTEFORGE_FAST_LAUNCH")


def test_looking_for_launch_variables_is_cheap_enough_for_a_launch(monkeypatch):
    """Four variables in 0.05 us, where one read through os.environ takes 0.6."""
    for variable in LAUNCH_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert processor_time(env.launch_is_plain) < processor_time(read_through_os_environ)


def test_reading_a_flag_is_cheap_enough_for_a_launch():
    """0.05 us, where a read through os.environ takes 0.6."""
    assert processor_time(env.fast_launch) < processor_time(read_through_os_environ)


def test_log_level_variable_adds_one_handler(monkeypatch):
    logger = logging.getLogger("cuteforge")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.delenv("CUTEFORGE_LOG", raising=False)
    env.configure_logging()
    assert logger.handlers == []
    monkeypatch.setenv("CUTEFORGE_LOG", "debug")
    env.configure_logging()
    env.configure_logging()
    assert len(logger.handlers) == 1
    assert logger.level == logging.DEBUG

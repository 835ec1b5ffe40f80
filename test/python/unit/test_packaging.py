"""What the package promises about itself agrees with what CI and the tools use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cuteforge

ROOT = Path(__file__).resolve().parents[3]
TEST_COMMAND = "python -m pytest test/python"
DEMO_COMMAND = "python -m cuteforge demo"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_ruff_is_pinned_the_same_everywhere():
    pins = re.findall(r"ruff==([\d.]+)", read("pyproject.toml"))
    hooks = re.findall(r"ruff==([\d.]+)", read(".pre-commit-config.yaml"))
    assert len(pins) == 1
    assert hooks == pins * 2


def test_ci_runs_the_commands_of_the_readme():
    """Each is one line of the README, which CI finds by its second half."""
    lines = read("README.md").splitlines()
    for command, install in ((DEMO_COMMAND, "pip install -e ."), (TEST_COMMAND, "pip install -e '.[test]'")):
        assert [line for line in lines if command in line] == [f"{install} && {command}"]
        assert f"'{command}'" in read(".ci/run")


def test_version_is_one_value():
    assert cuteforge.__version__ == "0.1.0"
    assert 'path = "python/cuteforge/__init__.py"' in read("pyproject.toml")


def test_licence_is_complete():
    text = read("LICENSE")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in read("pyproject.toml")


@pytest.mark.parametrize("name", sorted(cuteforge._MODULE_OF))
def test_every_exported_name_exists(name):
    assert getattr(getattr(cuteforge, name), "__name__", name) == name  # a constant has none


def test_no_compiled_artefact_is_shipped():
    binaries = {".o", ".so", ".cubin", ".ptx", ".sass", ".pyc"}
    shipped = [p for p in (ROOT / "python").rglob("*") if p.suffix in binaries and "__pycache__" not in p.parts]
    assert shipped == []

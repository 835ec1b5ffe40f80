"""What the package promises about itself agrees with what CI and the tools use."""

from __future__ import annotations

import importlib
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

import cuteforge
from helpers import process

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


def dev_extra() -> list[str]:
    (extra,) = re.findall(r"^dev = \[(.*)\]$", read("pyproject.toml"), re.MULTILINE)
    return re.findall(r'"([^"]+)"', extra)


def test_ci_installs_the_pinned_tools_and_no_others():
    """The command by which .ci/run reads the pins finds those of the extra dev."""
    (pattern,) = re.findall(r"grep -oE '([^']+)' pyproject.toml", read(".ci/run"))
    pinned = [tool for tool in dev_extra() if "==" in tool]
    assert {re.split(r"[\[=]", tool)[0] for tool in pinned} == {"ruff", "mypy", "pyright"}
    assert [match[0].strip('"') for match in re.finditer(pattern, read("pyproject.toml"))] == pinned


def test_version_is_the_newest_of_the_changelog():
    newest, date = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)[0]
    assert (cuteforge.__version__, len(date)) == (newest, 10)
    assert 'path = "python/cuteforge/__init__.py"' in read("pyproject.toml")


def torch_floor() -> str:
    (floor,) = re.findall(r'^ +"torch>=([\d.]+)",$', read("pyproject.toml"), re.MULTILINE)
    return floor


def test_torch_floor_is_one_value():
    assert ".".join(map(str, cuteforge._TORCH_FLOOR)) == torch_floor()
    assert f"torch | {torch_floor()} or newer" in read("README.md")


def use_with_torch(version: str, use: str) -> str:
    """What becomes of `use` where torch says that it is `version`; nothing of torch can be imported there."""
    code = f"""
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["torch"].__version__ = {version!r}
        import cuteforge
        try:
            {use}
        except ImportError as error:
            print(type(error).__name__, error)
    """
    return process.run(textwrap.dedent(code)).strip()


@pytest.mark.parametrize("version", ["2.10.1", "2.10.0+cpu", "1.13.1"])
@pytest.mark.parametrize("use", ["cuteforge.attention", "from cuteforge import GQADecode"])
def test_older_torch_is_refused_by_name_at_first_use(version, use):
    text = use_with_torch(version, use)
    assert text == f"ImportError cuteforge needs torch>={torch_floor()}, but torch {version} is installed: " + (
        f"pip install 'torch>={torch_floor()}'"
    )


@pytest.mark.parametrize("version", [None, "2.11.0a0+git1234", "2.11.0", "3.0.0"])
def test_torch_from_the_floor_on_is_not_refused(version):
    cuteforge._check_torch(version or torch_floor())


def test_names_that_know_no_torch_are_served_beside_any():
    assert use_with_torch("2.0.0", "print(cuteforge.ContractError.__name__, cuteforge.TensorSpec.__name__)") == (
        "ContractError TensorSpec"
    )


def test_console_script_is_the_command_line():
    (target,) = re.findall(r'^cuteforge = "(.*)"$', read("pyproject.toml"), re.MULTILINE)
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_sdist_holds_what_the_tests_read():
    """Every name in the root of the checkout that a file of tests goes through `ROOT` for, and this file."""
    (included,) = re.findall(
        r"targets.sdist\]\nonly-include = \[\n(.*?)^\]", read("pyproject.toml"), re.MULTILINE | re.DOTALL
    )
    names = set(re.findall(r'"([^"]+)"', included)) | {"pyproject.toml", ".gitignore"}
    in_git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not in_git:
        pytest.skip("no git checkout")
    assert {path.partition("/")[0] for path in in_git} == names


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

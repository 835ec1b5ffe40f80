"""The oldest transformers that the adapter serves: one number, and older ones are refused by name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cuteforge import UnsupportedError
from cuteforge.integrations.versions import TRANSFORMERS, require_transformers

ROOT = Path(__file__).resolve().parents[3]
FLOOR = ".".join(map(str, TRANSFORMERS))


def test_the_extra_says_the_same_floor():
    assert re.findall(r"transformers>=([\d.]+)", (ROOT / "pyproject.toml").read_text()) == [FLOOR]
    assert f"{FLOOR} and up" in (ROOT / "docs" / "api" / "transformers.md").read_text()


@pytest.mark.parametrize("version", [FLOOR, f"{FLOOR}.1", f"{FLOOR}.0.dev0", "5.100.0", "6.0.0rc1", "10.0"])
def test_from_the_floor_on_it_is_served(version):
    require_transformers(version)


@pytest.mark.parametrize("version", ["5.17.0", "5.3", "4.57.1", "4.99.0.dev0"])
def test_older_ones_are_refused_by_name(version):
    with pytest.raises(UnsupportedError, match=rf"^transformers: wanted {FLOOR} or newer, got {re.escape(version)}"):
        require_transformers(version)


def test_the_adapter_asks_before_it_needs_anything():
    """An older transformers lacks names that the adapter imports."""
    code = (
        "import sys, types\n"
        "old = types.ModuleType('transformers'); old.__version__ = '4.57.1'; sys.modules['transformers'] = old\n"
        "import cuteforge.integrations.transformers"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"UnsupportedError: transformers: wanted {FLOOR} or newer, got 4.57.1" in done.stderr

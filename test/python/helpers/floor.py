"""The lowest versions of packages that pyproject.toml allows: with older ones, what needs them is skipped."""

from __future__ import annotations

import re

from helpers.gpu_record import ROOT


def floor_of(package: str) -> str:
    """The version behind ``package>=`` in pyproject.toml, the one place that says it."""
    text = (ROOT / "pyproject.toml").read_text()
    (version,) = set(re.findall(rf'"{re.escape(package)}>=([\d.]+)', text))
    return version

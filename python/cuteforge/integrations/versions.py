"""What the adapters need of the libraries that they adapt to."""

from __future__ import annotations

import re

from cuteforge.errors import UnsupportedError

# The first release of transformers that the adapter serves; pyproject.toml's extra says the same.
TRANSFORMERS = (5, 24)


def require_transformers(version: str) -> None:
    """Raise UnsupportedError if this version of transformers lacks what the adapter needs. Development versions count
    as their release.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < TRANSFORMERS:
        wanted = ".".join(map(str, TRANSFORMERS))
        raise UnsupportedError(
            f"transformers: wanted {wanted} or newer, got {version}; pip install 'transformers>={wanted}'"
        )

"""What the adapters need of the libraries that they adapt to."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cuteforge.errors import UnsupportedError

# The first release of transformers that the adapter serves; pyproject.toml's extra says the same.
TRANSFORMERS = (5, 24)
# What the adapter to torch's own attention imports of torch.nn.attention and torch.library; 2.11 has all of it.
_REGISTRY = (
    "activate_flash_attention_impl",
    "current_flash_attention_impl",
    "list_flash_attention_impls",
    "register_flash_attention_impl",
    "restore_flash_attention_impl",
)


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


def require_torch_registry() -> None:
    """Raise UnsupportedError if this torch has no registry of flash attention, or does not give its kernels away."""
    import torch

    missing = [f"torch.nn.attention.{name}" for name in _REGISTRY if not hasattr(torch.nn.attention, name)]
    missing += [] if hasattr(torch.library, "get_kernel") else ["torch.library.get_kernel"]
    if missing:
        raise UnsupportedError(f"torch: wanted one with {', '.join(missing)}, got {torch.__version__}")


def require_torch_operator(name: str, arguments: Sequence[str]) -> None:
    """Check that torch's operator ``aten::<name>`` has exactly these positional arguments.

    Raises:
        UnsupportedError: it has others, or this torch has no such operator.
    """
    import torch

    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        raise UnsupportedError(f"torch: wanted one with aten::{name}, got {torch.__version__}")
    found = tuple(argument.name for argument in operator.default._schema.arguments if not argument.kwarg_only)
    if found != tuple(arguments):
        wanted, got = ", ".join(arguments), ", ".join(found)
        raise UnsupportedError(f"torch: wanted aten::{name}({wanted}), got ({got}) in {torch.__version__}")

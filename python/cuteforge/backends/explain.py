"""`explain`: what a policy function would do with a call, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuteforge.backends.attention import attention, explain_attention
from cuteforge.backends.compressor import compress, explain_compress
from cuteforge.backends.rotary import apply_rotary_emb, explain_rotary_emb
from cuteforge.backends.selection import Decision
from cuteforge.errors import ContractError

_EXPLAINERS = {attention: explain_attention, apply_rotary_emb: explain_rotary_emb, compress: explain_compress}
_BY_NAME = {function.__name__: explainer for function, explainer in _EXPLAINERS.items()}


def explain(
    function: Callable[..., torch.Tensor] | str | torch.Tensor, /, *args: Any, arch: str | None = None, **kwargs: Any
) -> Decision:
    """Which backend would serve a call of a policy function, what each says of it, and how a kernel would run.

    Launches nothing. For the plan of a kernel it compiles a function of the host, once for each kernel.

    Args:
        function: `attention`, `apply_rotary_emb` or `compress`, or the name of one. A tensor stands for q of a call of
            attention: ``explain(q, k, v)`` is ``explain(attention, q, k, v)``.
        args, kwargs: of the call. The values of tensors are not read, so they may be on the meta device.
        arch: e.g. ``"sm_90a"``: the call as if on a GPU of this architecture, whatever is here; other backends are
            asked as on CUDA. None: the call as it is.

    Returns:
        A `Decision`. It prints as a table; ``chosen`` is None where the call would raise UnsupportedError, ``kernel``
        where no kernel of the library is chosen.

    Raises:
        ContractError: no policy function, arguments that the call would refuse, or `arch` is no architecture.
        UnsupportedError: `arch` is below compute capability 8.0.

    Examples:
        >>> import torch
        >>> from cuteforge import attention, explain
        >>> q = k = v = torch.randn(1, 16, 8, 64, dtype=torch.bfloat16)
        >>> print(explain(attention, q, k, v, is_causal=True))
        attention: torch_native (by priority)
          cuda          the kernels run on CUDA, this call is on cpu
          flash         flash-attn runs on CUDA, this call is on cpu
          torch_native  chosen
    """
    if isinstance(function, torch.Tensor):
        return explain_attention(function, *args, arch=arch, **kwargs)
    explainer = _BY_NAME.get(function) if isinstance(function, str) else _find(function)
    if explainer is None:
        wanted = f"a policy function ({', '.join(_BY_NAME)}), its name, or a tensor"
        raise ContractError(f"function: wanted {wanted}, got {function!r}")
    return explainer(*args, arch=arch, **kwargs)


def _find(function: Any) -> Any:
    return next((explainer for known, explainer in _EXPLAINERS.items() if known is function), None)

"""Hugging Face transformers: `cuteforge.attention` as an attention implementation of its models.

Dims: ``B`` batch, ``L`` query tokens, ``S`` keys, ``Hq`` and ``Hkv`` heads, ``D`` and ``Dv`` head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn.functional import pad

from cuteforge import attention  # by the package, which refuses an old torch
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.integrations.versions import require_transformers
from cuteforge.op.tracing import autocasts

require_transformers(transformers.__version__)  # an older one lacks what is imported here
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask  # noqa: E402
from transformers.utils import logging  # noqa: E402
from transformers.utils.import_utils import is_tracing  # noqa: E402

# transformers' own, which warns once
_logger = logging.get_logger(__name__)
# What models pass beside queries, keys and values that changes the result.
_UNSERVED = {
    "indices": "keys are not selected by index",
    "block_indices": "keys are not selected by index",
}


def register(name: str = "cuteforge") -> None:
    """Make `cuteforge.attention` known to transformers: ``from_pretrained(…, attn_implementation=name)``,
    ``model.set_attn_implementation(name)``.

    A backend is chosen for each call as by `cuteforge.attention`: the kernels where they serve it, torch's attention
    for training, CPU and fp32.
    Registering twice is free.

    Args:
        name: of the implementation.

    Raises:
        ContractError: a name that means another implementation to transformers.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from cuteforge.integrations.transformers import register
        >>> register()
        >>> sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        >>> model.set_attn_implementation("cuteforge")
        >>> model(torch.arange(8)[None]).logits.shape
        torch.Size([1, 8, 64])
    """
    known = AttentionInterface().get(name)
    if name == "eager" or "flash" in name or "/" in name or known not in (None, attention_forward):
        raise ContractError(f"name: wanted one that transformers gives no meaning of its own, got {name!r}")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor |
    None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention of a module of transformers. Heads are views, and KV heads are not repeated.

    Args:
        module: its ``is_causal`` counts where there is neither a mask nor the argument.
        query, key, value: ``(B, Hq, L, D)``, ``(B, Hkv, S, D)``, ``(B, Hkv, S, Dv)``, any strides. Under autocast they
            are converted to its dtype.
        attention_mask: bool, True keeps a score, or of a floating dtype, added to the scores: ``(B, 1|Hq, 1|L, S)``,
            which is all there is; bool ``(B, S)``, on top of a causal mask; or None.
        scaling: of the scores; None is ``D**-0.5``.
        is_causal: query i sees key j iff ``j <= i + (S - L)``.
        options: what else the model passes. ``softcap``, sinks (``s_aux`` or ``sinks``, ``(Hq,)``) and
            ``position_bias``, ``(1|B, 1|Hq, 1|L, S)`` or ``(Hq, 1|L, S)``, which is added to the scores, are served,
            others refused where they change the result, ignored where not. ``output_attentions`` warns once.

    Returns:
        ``(B, L, Hq, Dv)``, contiguous, and None for the weights, which are not kept.

    Raises:
        UnsupportedError: dropout, a mask of integers, or an option that asks for more than a softmax over kept scores.
    """
    _check_call(module, attention_mask, dropout, key.shape[2], options)
    if attention_mask is not None:
        is_causal = attention_mask.dim() == 2
    elif is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if options.get("position_bias") is not None:
        attention_mask = _with_position_bias(attention_mask, options["position_bias"])
    q, k, v = (x.transpose(1, 2) for x in _in_autocast_dtype(query, key, value))
    served = {"scale": scaling, "softcap": options.get("softcap"), "sinks": _sinks(options)}
    # some models take a view of the result
    return attention(q, k, v, attn_mask=attention_mask, is_causal=bool(is_causal), **served).contiguous(), None


def _with_position_bias(mask: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor:
    """What is added to the scores of a call with a mask, if any, and a bias."""
    bias = bias if bias.dim() == 4 else bias[None]
    if mask is None:
        return bias
    if mask.dtype is not torch.bool:
        return bias + mask
    mask = mask if mask.dim() == 4 else mask[:, None, None]
    return torch.where(mask, bias, -torch.inf)


def _sinks(options: dict[str, Any]) -> torch.Tensor | None:
    """Models name them either way."""
    sinks = options.get("s_aux")
    return options.get("sinks") if sinks is None else sinks


def _check_call(
    module: torch.nn.Module, mask: torch.Tensor | None, dropout: float, num_keys: int, options: dict[str, Any]
) -> None:
    """Refuse what would be left out of the result."""
    if getattr(module, "compressor", None) is not None:
        raise UnsupportedError(
            "module: adds compressed keys to those that its mask was made for; use eager attention for this model"
        )
    if dropout:
        raise UnsupportedError(f"dropout: attention weights are not dropped; set the config's to 0.0, got {dropout}")
    if options.get("output_attentions") and not torch.compiler.is_compiling():
        _logger.warning_once("output_attentions: attention weights are not kept; set the attention to 'eager' for them")
    for option, limit in _UNSERVED.items():
        if options.get(option) is not None:
            raise UnsupportedError(f"{option}: {limit}; use eager attention for this model")
    if mask is not None:
        if mask.dtype is not torch.bool and not (mask.is_floating_point() and mask.dim() == 4):
            wanted = "bool, True keeps a score, or a floating dtype and 4 dims, which is added to the scores"
            raise UnsupportedError(f"attention_mask: wanted {wanted}, got {mask.dtype} and {mask.dim()} dims")
        return
    window, starts = options.get("sliding_window"), options.get("cu_seq_lens_q")
    if window is not None and num_keys > window:
        raise UnsupportedError(
            f"sliding_window: wanted a mask where {num_keys} keys are more than the window of {window}"
        )
    if starts is not None and starts.numel() > 2:
        raise UnsupportedError(
            "cu_seq_lens_q: packed sequences are told apart by a mask, pass position_ids; got no mask"
        )


def _in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torch's own attention does: norms under autocast leave queries and keys in fp32 beside values that are not."""
    device = tensors[0].device.type
    if not autocasts(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Callable =
    causal_mask_function,
    attention_mask: torch.Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, **options: Any,
) -> torch.Tensor | None:  # fmt: skip
    """The mask that all layers of a step share, as `attention_forward` takes it; called by transformers, with its
    arguments.

    Padding alone stays ``(B, S)``, or ``(B, 1, 1, S)`` without causality, a view of the caller's. Any other pattern
    (sliding window, chunks, packed sequences, a static cache, a function of the caller's) becomes ``(B, 1, L, S)``.

    A prefill reads on the host whether there is padding at all, which synchronizes once: without a mask the kernels
    mask only tiles on the diagonal, and torch's fused causal attention serves training. Decode, torch.compile and graph
    capture read nothing.
    """
    # transformers allows to skip a mask with a window only where nothing else was laid over it.
    is_inside_window = local_size is not None and kv_length < local_size
    is_causal = allow_is_causal_skip and (mask_function is causal_mask_function or is_inside_window)
    is_causal = is_causal and _ends_at_corner(q_length, kv_length, q_offset, kv_offset)
    is_full = allow_is_bidirectional_skip and (mask_function is bidirectional_mask_function or is_inside_window)
    if not (is_causal or is_full):
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
            allow_is_causal_skip=False, **options,
        )  # fmt: skip
    kept = _kept_keys(attention_mask, kv_length, kv_offset, may_read=q_length > 1)
    return kept if kept is None or is_causal else kept[:, None, None]


def _ends_at_corner(q_length: int, kv_length: int, q_offset: Any, kv_offset: Any) -> bool:
    """Whether the last query is at the last key. A static cache has keys past it, and its offset on the device."""
    return not isinstance(q_offset, torch.Tensor) and q_offset - kv_offset == kv_length - q_length


def _kept_keys(padding: torch.Tensor | None, kv_length: int, kv_offset: int, may_read: bool) -> torch.Tensor | None:
    """``(B, S)`` of a padding mask over all positions; keys past its end are masked. None: no key is."""
    if padding is None:
        return None
    kept = padding[:, kv_offset : kv_offset + kv_length]
    if (missing := kv_length - kept.shape[1]) > 0:
        kept = pad(kept, (0, missing))
    may_read = may_read and not kept.is_meta and not is_tracing(kept)
    return None if may_read and bool(kept.all()) else kept

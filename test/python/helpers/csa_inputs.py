"""Unusual compressor operands: special values, damaged offset tables, more than 2**31 elements."""

from __future__ import annotations

import torch

from helpers import csa
from helpers.canary import padded_copy
from helpers.packs import Inputs, Pack

# Where a special value goes, and which.
SPECIALS = {
    "nan_in_kv": ("kv", torch.nan),
    "inf_in_kv": ("kv", torch.inf),
    "minus_inf_in_kv": ("kv", -torch.inf),
    "nan_in_score": ("score", torch.nan),
    "inf_in_score": ("score", torch.inf),
    "minus_inf_in_score": ("score", -torch.inf),
    "nan_in_ape": ("ape", torch.nan),
    "minus_inf_in_ape": ("ape", -torch.inf),
    "nan_in_grad_out": ("grad_out", torch.nan),
    "inf_in_grad_out": ("grad_out", torch.inf),
}
FORWARD_SPECIALS = [name for name, (operand, _) in SPECIALS.items() if operand != "grad_out"]


def with_special(special: str, config: csa.Config, device) -> Inputs:
    """A ragged pack with the special value in about every second block (every fifth row of grad_out), at varying
    columns."""
    operand, value = SPECIALS[special]
    x = csa.small(config, device)
    tensor = getattr(x, operand).clone()
    elements_apart = {"ape": tensor.numel() // 2, "grad_out": 5 * config.d}.get(
        operand, 2 * config.ratio * tensor.shape[1]
    )
    tensor.view(-1)[3 :: elements_apart + 7] = value
    return x.with_(**{operand: tensor})


def with_dead_blocks(config: csa.Config, device) -> Inputs:
    """Exact blocks; the first block of segment 0 and of segment 1 has only -inf scores."""
    x = csa.inputs(config, Pack.named("exact_multiples", config.ratio), device)
    score = x.score.clone()
    score[: 2 * config.ratio] = -torch.inf
    return x.with_(score=score)


# Offset tables that lie, by what is wrong with them; None keeps the true one. 40 tokens, ratio 4.
DAMAGED = {
    "negative_start": ([-8, 12, 40], None),
    "negative_length": ([0, 40, 12], None),
    "huge": ([0, 2**31 - 1, 2**31 - 1], None),
    "lowest": ([-(2**31), -(2**31), 2**31 - 1], None),
    "past_the_end": ([0, 44, 4000], None),
    "comp_negative": (None, [-5, 3, 10]),
    "comp_huge": (None, [0, 2**31 - 1, 2**31 - 1]),
    "comp_lowest": (None, [-(2**31), -(2**31), 2**31 - 1]),
    "comp_too_many": (None, [0, 9, 10]),
    "comp_not_monotone": (None, [9, 0, 4]),
    "both_not_monotone": ([40, -1, 7], [7, 2, 9]),
}


def damaged(name: str, device) -> Inputs:
    """Operands inside NaN-filled surroundings, with the damaged tables; the true segments are 20 and 20 tokens."""
    config = csa.CSA
    x = csa.inputs(config, Pack((20, 20), config.ratio, extra_rows=3), device, poison=False)
    tables = [
        true if table is None else torch.tensor(table, dtype=torch.int32, device=device)
        for table, true in zip(DAMAGED[name], (x.cu_seqlens, x.cu_seqlens_comp), strict=True)
    ]
    cu, cuc = (padded_copy(table.view(1, -1), table.numel())[0] for table in tables)
    kv, score = (padded_copy(tensor, tensor.shape[1]) for tensor in (x.kv, x.score))
    return x.with_(kv=kv, score=score, cu_seqlens=cu, cu_seqlens_comp=cuc)


def is_monotone(table: torch.Tensor) -> bool:
    return bool((table.long().diff() >= 0).all())


# Segments after one that alone has more than 2**31 elements.
BIG_TAIL = (40, 7, 1024)


def big(config: csa.Config, device) -> Inputs:
    """More than 2**31 elements in kv and in score, drawn without fp32 intermediates."""
    bulk = 2**31 // (config.coff * config.d) + 4096
    pack = Pack((bulk, *BIG_TAIL), config.ratio)
    generator = torch.Generator(device=device).manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=config.dtype, device=device).normal_(generator=generator)

    kv, score = (normal(pack.num_tokens, config.coff * config.d) for _ in range(2))
    cu, cuc = (table.to(device) for table in (pack.cu_seqlens(), pack.cu_seqlens_comp()))
    return csa.small(config, device).with_(
        kv=kv, score=score, cu_seqlens=cu, cu_seqlens_comp=cuc, grad_out=normal(pack.total_comp, config.d), pack=pack
    )


def big_head(x: Inputs) -> Inputs:
    """The first 64 tokens of ``big`` as a segment of their own: its rows are the first ones of the whole."""
    return _stand_alone(x, Pack((64,), x.ratio), slice(0, 64), slice(0, 64 // x.ratio))


def big_tail(x: Inputs) -> Inputs:
    """The last segments of ``big`` on their own."""
    pack = Pack(BIG_TAIL, x.ratio)
    return _stand_alone(x, pack, slice(-pack.num_tokens, None), slice(-pack.total_comp, None))


def _stand_alone(x: Inputs, pack: Pack, tokens: slice, rows: slice) -> Inputs:
    cu, cuc = (table.to(x.kv.device) for table in (pack.cu_seqlens(), pack.cu_seqlens_comp()))
    parts = {"kv": x.kv[tokens], "score": x.score[tokens], "grad_out": x.grad_out[rows]}
    return x.with_(**parts, cu_seqlens=cu, cu_seqlens_comp=cuc, pack=pack)

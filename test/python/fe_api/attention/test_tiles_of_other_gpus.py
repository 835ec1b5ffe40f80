"""The tables of decode and prefill once more, with the tiles, plans and kernels that other GPUs get for them.

Prefill on a GPU of sm_90a has a kernel of its own, so that these are the tests that run the portable one.
"""

from typing import NamedTuple

import pytest
import torch

from fe_api.attention import test_decode, test_prefill
from helpers import attention as attn
from helpers import attention_samples as samples
from helpers import other_gpus

SIZE, LENGTHS = 700, {"decode": 4, "prefill": 300}
WIDTHS = (attn.MAIN, attn.HEAD_DIMS[4], attn.LATENT, attn.HEAD_DIMS[10])


def dense_op(kind, case):
    x = samples.dense(case.config, case.batch, case.length, case.size, case.kv_heads, case.flags)
    return samples.op_of(kind, x, lse=case.flags.lse, num_splits=getattr(case, "num_splits", None))


class Pack(NamedTuple):
    """A row of the table of packed prefill."""

    config: attn.Config
    pack: str
    layout: str = "contiguous"
    causal: bool = True

    @property
    def label(self) -> str:
        return f"{self.config.label}-{self.pack}-{self.layout}-{self.causal}"

    @property
    def op(self):
        return samples.op_of("prefill", samples.packed(self.config, *test_prefill.PACKS[self.pack], causal=self.causal))


class Option(NamedTuple):
    """A call with what becomes of scores: numbers, sinks, a mask of 2 or 4 dims."""

    kind: str
    config: attn.Config
    name: str
    causal: bool = True
    numbers: dict = {}
    has_sinks: bool = False
    mask_rank: int = 0
    batch: int = 5

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.config.label}-{self.name}"

    @property
    def flags(self) -> attn.Flags:
        return attn.BASE._replace(causal=self.causal)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        heads, length = 2 * self.config.group, LENGTHS[self.kind]
        return (self.batch, SIZE) if self.mask_rank == 2 else (self.batch, heads, length, SIZE)

    @property
    def op(self):
        x = samples.dense(self.config, self.batch, LENGTHS[self.kind], SIZE, 2, self.flags, **self.numbers)
        sinks = samples.sinks(x) if self.has_sinks else None
        mask = samples.mask(*self.mask_shape) if self.mask_rank else None
        return samples.op_of(self.kind, x.with_(sinks=sinks, mask=mask))

    def draw(self, device) -> attn.Inputs:
        options = {"device": device, "flags": self.flags, **self.numbers}
        x = attn.draw(self.config, self.batch, LENGTHS[self.kind], SIZE, **options)
        sinks = torch.linspace(-3, 3, x.q.shape[-2], device=device) if self.has_sinks else None
        mask = torch.rand(self.mask_shape, device=device) < 0.5 if self.mask_rank else None
        return x.with_(sinks=sinks, mask=mask)


NUMBERS = {"window": (100, None), "softcap": 20.0, "softmax_scale": 0.3}
OPTIONS = [
    option
    for kind in LENGTHS
    for option in (
        *(Option(kind, c, "all", numbers=NUMBERS, has_sinks=True, mask_rank=4) for c in WIDTHS),
        Option(kind, attn.MAIN, "window", False, {"window": (70, 30)}),
        Option(kind, attn.MAIN, "mask", False, mask_rank=2),
    )
]
PACKS = [
    *(Pack(*row) for row in test_prefill.RAGGED),
    *(Pack(attn.MAIN, pack, causal=False) for pack in ("ragged", "prefix", "many_short")),
]

DECODE = other_gpus.choices((case, dense_op("decode", case)) for case in test_decode.CASES)
PREFILL = other_gpus.choices((case, dense_op("prefill", case)) for case in test_prefill.CASES)
PACKED = other_gpus.choices((case, case.op) for case in PACKS)
WITH_OPTIONS = other_gpus.choices((case, case.op) for case in OPTIONS)


@pytest.mark.parametrize("choice", **other_gpus.table(DECODE))
def test_decode_case(choice, device):
    for arch_name, case in choice.runs:
        x = test_decode.draw(case, device)
        with choice.on(arch_name):
            got = attn.run("decode", x, lse=case.flags.lse, num_splits=case.num_splits)
        attn.check(got, x)


@pytest.mark.parametrize("choice", **other_gpus.table(PREFILL))
def test_dense_prefill_case(choice, device):
    for arch_name, case in choice.runs:
        x = test_prefill.draw(case, device)
        with choice.on(arch_name):
            got = attn.run("prefill", x, lse=case.flags.lse)
        attn.check(got, x)


@pytest.mark.parametrize("choice", **other_gpus.table(PACKED))
def test_packed_prefill_case(choice, device):
    for arch_name, case in choice.runs:
        x = attn.LAYOUTS[case.layout](test_prefill.draw_pack(case.config, case.pack, device, causal=case.causal))
        with choice.on(arch_name):
            got = attn.run("prefill", x)
        attn.check(got, x)


@pytest.mark.parametrize("choice", **other_gpus.table(WITH_OPTIONS))
def test_options(choice, device):
    for arch_name, case in choice.runs:
        x = case.draw(device)
        with choice.on(arch_name):
            got = attn.run(case.kind, x)
        attn.check(got, x)

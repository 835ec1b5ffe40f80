"""Decode and prefill over pages once more, with the tiles, plans and kernels that other GPUs get for them."""

from typing import NamedTuple

import pytest
import torch

from fe_api.paged_attention.test_paged_prefill import QUERIES
from helpers import attention_samples as samples
from helpers import other_gpus, paged
from helpers.paged import CAUSAL, MAIN, PREFILL_QUERIES, Batch, edges
from helpers.paged_inputs import Config, Inputs

LONG = Batch((4096, 0, 1, 129, 3000), 48)
MANY = Batch((300, 0, 1, 129, 77) * 8, 16, kv_heads=8)
NUMBERS = {"window": (100, None), "softcap": 20.0}


class Case(NamedTuple):
    """One row of the table."""

    config: Config
    batch: Batch
    num_splits: int | None = None
    appends: bool = False
    has_options: bool = False

    @property
    def label(self) -> str:
        return f"{self.config.label}-ps{self.batch.page_size}-{self.batch.queries or 1}-n{self.num_splits}"

    @property
    def op(self):
        x = samples.paged(self.config, self.batch)
        x = samples.appending(x) if self.appends else x
        if self.has_options:
            x = x.with_(mask=samples.mask(len(self.batch.lengths), 1000), sinks=samples.sinks(x), **NUMBERS)
        return samples.paged_op_of(x, num_splits=self.num_splits)

    def draw(self, device) -> Inputs:
        x = paged.draw(self.config, self.batch, device)
        x = paged.appending(x) if self.appends else x
        if self.has_options:
            sinks = torch.linspace(-3, 3, x.q.shape[-2], device=device)
            x = paged.with_mask(x, "columns").with_(sinks=sinks, **NUMBERS)
        return x


ROWS = (3, 0, 6, 5, 1, 4, 2)
DECODE = (
    *(Case(config, edges(ps, 5 if config.causal else 0)) for config in (MAIN, CAUSAL) for ps in paged.PAGE_SIZES),
    *(Case(c, edges(ps, 2 if c.causal else 0)) for c in paged.CONFIGS[2:] for ps in (1, 7, 64, 256)),
    *(Case(CAUSAL, edges(16, queries)) for queries in (1, 2, 16)),
    *(Case(MAIN, edges(16, kv_heads=heads)) for heads in (1, 3, 8)),
    *(Case(MAIN, batch, num_splits) for batch in (LONG, MANY) for num_splits in (None, 1, 7)),
    *(Case(MAIN, edges(ps), appends=True) for ps in paged.PAGE_SIZES),
    Case(MAIN, edges(16, queries=2, rows=ROWS, by_indptr=True)),
    Case(CAUSAL, edges(1, 4, place="flat")),
    Case(CAUSAL, edges(16, 2), has_options=True),
)
PREFILL = (
    *(Case(config, edges(ps, PREFILL_QUERIES)) for config in (MAIN, CAUSAL) for ps in paged.PAGE_SIZES),
    *(Case(c, edges(ps, PREFILL_QUERIES)) for c in paged.CONFIGS[2:] for ps in (1, 7, 64, 256)),
    *(Case(CAUSAL, edges(16, queries)) for queries in QUERIES.values()),
    Case(CAUSAL, edges(16, PREFILL_QUERIES, rows=ROWS, by_indptr=True)),
    Case(CAUSAL, edges(1, PREFILL_QUERIES, place="flat")),
    Case(CAUSAL, edges(16, PREFILL_QUERIES), has_options=True),
)
CHOICES = other_gpus.choices((case, case.op) for case in (*DECODE, *PREFILL))


@pytest.mark.parametrize("choice", **other_gpus.table(CHOICES))
def test_case(choice, device):
    for arch_name, case in choice.runs:
        x = case.draw(device)
        with choice.on(arch_name):
            got = paged.run(x, num_splits=case.num_splits)
        paged.check(got, x)

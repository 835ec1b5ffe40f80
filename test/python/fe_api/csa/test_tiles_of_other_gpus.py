"""The tiles that other GPUs get, run here: compiled for this architecture, with the facts of theirs.

Machine code of another architecture does not run here, but the schedules do: fewer CTAs, one ring slot instead of two,
half of the lanes, no dependent launch.
"""

import pytest
import torch

from helpers import csa, other_gpus
from helpers.packs import Pack

CASES = (
    ("sm_89", csa.Config(256, 2, 40, torch.float32, "one slot of a split window, half of the lanes")),
    ("sm_89", csa.Config(16, 2, 96, torch.float32, "one slot of a whole window")),
    ("sm_89", csa.Config(4, 2, 512, torch.bfloat16, "few CTAs, no dependent launch")),
    ("sm_120a", csa.Config(128, 1, 128, torch.bfloat16, "few CTAs of a split window")),
    ("sm_80", csa.Config(128, 2, 96, torch.float16, "a large ring, no dependent launch")),
    ("sm_100a", csa.Config(8, 2, 65, torch.bfloat16, "tiles as here")),
)
case_table = pytest.mark.parametrize(("arch_name", "config"), CASES, ids=[f"{a}-{c.label}" for a, c in CASES])


def some_rows(config: csa.Config, device):
    lengths = (5 * config.ratio + 1, 0, config.ratio - 1, 40 * config.ratio)
    return csa.inputs(config, Pack(lengths, config.ratio, extra_tokens=3, extra_rows=2), device)


@case_table
def test_forward(arch_name, config, device):
    x = some_rows(config, device)
    with other_gpus.chosen_for(arch_name) as asked:
        out = csa.run_forward(x)
    assert [key.arch for key in asked] == [arch_name]
    csa.check_forward(out, x)


@case_table
def test_backward(arch_name, config, device):
    x = some_rows(config, device)
    with other_gpus.chosen_for(arch_name) as asked:
        grads = csa.run_backward(x)
    assert [key.arch for key in asked] == [arch_name]
    csa.check_backward(grads, x)

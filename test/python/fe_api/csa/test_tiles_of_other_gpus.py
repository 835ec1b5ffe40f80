"""The tiles that other GPUs get, run here: compiled for this architecture, with the facts of theirs.

Machine code of another architecture does not run here, but the schedules do: fewer CTAs, one ring slot instead of two,
half of the lanes, no dependent launch.
"""

import pytest
import torch

from cuteforge.families.csa.compressor import config as tiles
from cuteforge.families.csa.compressor import reference
from cuteforge.runtime.arch import resolve_arch
from cuteforge.runtime.compile_cache import KernelKey, load_kernel
from cuteforge.runtime.streams import current_stream_handle
from helpers import csa
from helpers.canary import Canary
from helpers.packs import Pack

BUILDERS = {
    False: "cuteforge.families.csa.compressor.forward:build",
    True: "cuteforge.families.csa.compressor.backward:build",
}
CASES = (
    ("sm_89", csa.Config(256, 2, 40, torch.float32, "one slot of a split window, half of the lanes")),
    ("sm_89", csa.Config(16, 2, 96, torch.float32, "one slot of a whole window")),
    ("sm_89", csa.Config(4, 2, 512, torch.bfloat16, "few CTAs, no dependent launch")),
    ("sm_120a", csa.Config(128, 1, 128, torch.bfloat16, "few CTAs of a split window")),
    ("sm_80", csa.Config(128, 2, 96, torch.float16, "a large ring, no dependent launch")),
    ("sm_100a", csa.Config(8, 2, 65, torch.bfloat16, "tiles as here")),
)
case_table = pytest.mark.parametrize(("arch_name", "config"), CASES, ids=[f"{a}-{c.label}" for a, c in CASES])


def entry_and_ctas(config: csa.Config, arch_name: str, backward: bool):
    """The kernel that a GPU of `arch_name` would get, compiled for the one here; its CTAs, and the workspace it
    takes."""
    facts = resolve_arch(arch_name, None)
    problem = tiles.Problem(str(config.dtype).removeprefix("torch."), config.d, config.ratio, config.coff)
    traits = tiles.select_traits(problem, facts, backward)
    here = resolve_arch(None, torch.cuda.current_device())
    num_ctas = tiles.max_ctas(traits, facts)
    entry = load_kernel(KernelKey(BUILDERS[backward], traits, here.name)).entry
    return entry, num_ctas, tiles.workspace_bytes(traits, num_ctas)


def some_rows(config: csa.Config, device):
    lengths = (5 * config.ratio + 1, 0, config.ratio - 1, 40 * config.ratio)
    return csa.inputs(config, Pack(lengths, config.ratio, extra_tokens=3, extra_rows=2), device)


@case_table
def test_forward(arch_name, config, device):
    x = some_rows(config, device)
    out = Canary((x.total_comp, x.head_dim), x.kv.dtype, device)
    entry, num_ctas, _ = entry_and_ctas(config, arch_name, backward=False)
    entry(*x.tensors, out.tensor, num_ctas, current_stream_handle(device.index))
    torch.cuda.synchronize()
    out.check("out")
    csa.check_forward(out.tensor, x)


@case_table
def test_backward(arch_name, config, device):
    x = some_rows(config, device)
    grads = [Canary.like(x.kv), Canary.like(x.score), Canary.like(x.ape)]
    entry, num_ctas, workspace_bytes = entry_and_ctas(config, arch_name, backward=True)
    workspace = Canary((workspace_bytes,), torch.uint8, device)
    buffers = [grad.tensor for grad in grads]
    entry(*x.tensors, x.grad_out, *buffers, workspace.tensor, num_ctas, current_stream_handle(device.index))
    torch.cuda.synchronize()
    for name, grad in zip(reference.CompressorGrads._fields, grads, strict=True):
        grad.check(name)
    workspace.check_guards("workspace")
    csa.check_backward(reference.CompressorGrads(*buffers), x)

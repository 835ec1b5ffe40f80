"""What a rotary op runs on an architecture: kernel, tile and plan with the reasons. Needs no GPU."""

from __future__ import annotations

import math

from cuteforge.families.rotary.api import RotaryEmbedding
from cuteforge.families.rotary.config import Traits
from cuteforge.runtime.arch import Arch
from cuteforge.runtime.kernel_facts import KernelFacts, LaunchPlan, kernel_name


def describe(op: RotaryEmbedding, arch: Arch) -> KernelFacts:
    """The kernel that serves calls with the samples of `op` on a GPU of `arch`, and the plan for their sizes.

    Raises:
        ContractError, UnsupportedError: as `check_support`.
    """
    key = op._kernel_key(op.dims, arch)
    traits: Traits = key.traits
    x, key_heads = op.samples["x"].shape, op.samples["k"].shape[-2] if traits.has_keys else None
    ctas, bundles = traits.grid(math.prod(x[:-2]), x[-2], key_heads)
    plan = LaunchPlan(ctas, traits.num_threads)
    reasons = _why_tile(traits), f"{bundles} bundles of heads a token, {traits.tasks_per_cta} in a CTA"
    return KernelFacts(kernel_name(key), arch.name, arch.num_sms, traits.tile, 0, plan, reasons)


def _why_tile(traits: Traits) -> str:
    problem = traits.problem
    size = f"accesses of {problem.align_bytes} bytes, the widest that divide a head and its rotated columns"
    return f"{size}: {traits.threads_per_head} threads rotate {traits.heads_per_thread} heads of a token"

"""What a compressor op runs on an architecture: kernel, tile and plan with the reasons. Needs no GPU."""

from __future__ import annotations

from cuteforge.families.csa.compressor.api import CSACompressorBackward, CSACompressorForward
from cuteforge.families.csa.compressor.config import MAX_EAGER_RATIO, WARP, Traits, max_ctas
from cuteforge.runtime.arch import Arch
from cuteforge.runtime.compile_cache import KernelKey
from cuteforge.runtime.kernel_facts import KernelFacts, LaunchPlan, counted, host_numbers, kernel_name

_HOST_PLAN = "cuteforge.families.csa.compressor.host_plan:build"


def describe(op: CSACompressorForward | CSACompressorBackward, arch: Arch) -> KernelFacts:
    """The kernel that serves calls with the samples of `op` on a GPU of `arch`, and the plan for their sizes.

    Raises:
        ContractError, UnsupportedError: as `check_support`.
    """
    key = op._kernel_key(op.dims, arch)
    traits: Traits = key.traits
    rows = op.dims["N"]
    found = host_numbers(KernelKey(_HOST_PLAN, traits, arch.name), (rows, max_ctas(traits, arch)), 2)
    reasons = [_why_tile(traits), f"{traits.smem_bytes} of {arch.smem_bytes_per_cta} bytes of shared memory a CTA"]
    plan = None
    if isinstance(found, str):
        reasons.append(f"the plan is not known: {found}")
    else:
        groups, run_log2 = found
        plan = LaunchPlan(groups * traits.num_chunks, WARP * traits.tile.num_warps)
        chunks = f"{counted(traits.num_chunks, 'chunk')} of {traits.chunk_cols} columns"
        each = f"{counted(groups, 'CTA')} in each of {chunks}"
        reasons.append(f"{counted(rows, 'row')} for {each}, {counted(1 << run_log2, 'row')} at a time")
    return KernelFacts(kernel_name(key), arch.name, arch.num_sms, traits.tile, traits.smem_bytes, plan, tuple(reasons))


def _why_tile(traits: Traits) -> str:
    problem = traits.problem
    if traits.tile.split_window:
        return f"a ratio of {problem.ratio} is above {MAX_EAGER_RATIO}: the warps of a CTA share a window of {problem.window}"
    return f"a ratio of {problem.ratio} is up to {MAX_EAGER_RATIO}: a warp holds a window of {problem.window}"

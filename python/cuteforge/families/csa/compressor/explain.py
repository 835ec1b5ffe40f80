"""What a compressor op runs on an architecture: kernel, tile and plan with the reasons. Needs no GPU."""

from __future__ import annotations

from cuteforge.families.csa.compressor.api import CSACompressorBackward, CSACompressorForward
from cuteforge.families.csa.compressor.config import MAX_EAGER_RATIO, Traits, max_ctas
from cuteforge.runtime.arch import WARP, Arch
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
        teams, log_rows = found
        plan = LaunchPlan(teams * traits.num_strips, WARP * traits.tile.num_warps)
        strips = f"{counted(traits.num_strips, 'strip')} of {traits.strip_cols} columns"
        each = f"{counted(teams, 'CTA')} in each of {strips}"
        reasons.append(f"{counted(rows, 'row')} for {each}, {counted(1 << log_rows, 'row')} at a time")
    return KernelFacts(kernel_name(key), arch.name, arch.num_sms, traits.tile, traits.smem_bytes, plan, tuple(reasons))


def _why_tile(traits: Traits) -> str:
    problem = traits.problem
    if traits.tile.split_window:
        large = f"a ratio of {problem.ratio} is above {MAX_EAGER_RATIO}"
        return f"{large}: the warps of a CTA share a window of {problem.window}"
    return f"a ratio of {problem.ratio} is up to {MAX_EAGER_RATIO}: a warp holds a window of {problem.window}"

"""What an attention op runs on an architecture: kernel, tile and plan with the reasons. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from cuteforge.families.attention.base import AttentionOp
from cuteforge.families.attention.forward.config import Traits, workspace_bytes
from cuteforge.families.attention.forward_sm90a.config import PRODUCER_WARPS, WarpgroupTraits, few_rows
from cuteforge.families.attention.work.host_call import EXTENTS, HostPlan
from cuteforge.families.attention.work.traits import ROW_BLOCK, WorkTraits, limits_of, max_ctas
from cuteforge.runtime.arch import WARP, Arch
from cuteforge.runtime.compile_cache import KernelKey
from cuteforge.runtime.kernel_facts import KernelFacts, LaunchPlan, counted, host_numbers, kernel_name

_HOST_PLAN = "cuteforge.families.attention.work.host_plan:build"


def describe(op: AttentionOp, arch: Arch) -> KernelFacts:
    """The kernel that serves calls with the samples of `op` on a GPU of `arch`, and the plan for their sizes.

    Raises:
        ContractError, UnsupportedError: as `check_support`.
    """
    key = op._kernel_key(op.dims, arch)
    traits: Any = key.traits
    shapes = {name.removesuffix("_cache"): spec.shape for name, spec in op.samples.items()}
    host = _host_plan(traits, shapes, op, arch)
    reasons = [_why_kernel(traits, arch), *_why_tile(traits, shapes, arch)]
    plan = None
    if isinstance(host, str):
        reasons.append(f"the plan is not known: {host}")
    else:
        plan = _plan(traits, host, shapes, arch)
        reasons.append(_why_plan(traits, host, plan, arch, op.num_splits))
    return KernelFacts(kernel_name(key), arch.name, arch.num_sms, traits.tile, traits.smem_bytes, plan, tuple(reasons))


def _host_plan(traits: WorkTraits, shapes: Mapping[str, tuple], op: AttentionOp, arch: Arch) -> HostPlan | str:
    """What the host would find out; or why it cannot be asked."""
    if math.prod(shapes["out"]) == 0:
        return HostPlan(0, 0)
    # of q and k without the head dim, the last one
    given = {**shapes, "q": shapes["q"][:-1], "k": shapes["k"][:-1]}
    given["workspace"] = (workspace_bytes(traits, arch) if isinstance(traits, Traits) and traits.splits else 0,)
    numbers: list[int] = []
    for name, count in EXTENTS.items():
        extents = given.get(name, ())
        numbers += (*(0,) * (count - len(extents)), *extents)
    limits = op.options.left or 0, op.options.right or 0
    numbers += (*limits, *limits_of(traits, arch, op.num_splits or 0))
    found = host_numbers(KernelKey(_HOST_PLAN, traits, arch.name), numbers, len(HostPlan._fields))
    return found if isinstance(found, str) else HostPlan(*found)


def _plan(traits: WorkTraits, host: HostPlan, shapes: Mapping[str, tuple], arch: Arch) -> LaunchPlan:
    if isinstance(traits, WarpgroupTraits):
        threads = WARP * (PRODUCER_WARPS + traits.tile.consumer_warps)
        return LaunchPlan(min(host.work_tiles, max_ctas(traits, arch)), threads)
    threads = WARP * traits.tile.num_warps
    if not traits.splits:
        return LaunchPlan(host.work_tiles, threads)
    ctas = host.splits * shapes["k"][-2]
    return LaunchPlan(ctas, threads, 1 << host.log_cluster, host.splits, 1 + host.has_second_kernel)


def _why_kernel(traits: WorkTraits, arch: Arch) -> str:
    if isinstance(traits, WarpgroupTraits):
        return "prefill on sm_90a: consumer warpgroups multiply, producer warps copy"
    if traits.reads_keys_once:
        return "decode: few query rows, so the warps of a CTA share out the keys"
    if arch.name == "sm_90a":
        return "prefill: the portable kernel, as no tile of the one of sm_90a fits"
    return f"prefill on {arch.name}: the portable kernel, as the other one is for sm_90a only"


def _why_tile(traits: WorkTraits, shapes: Mapping[str, tuple], arch: Arch) -> Iterator[str]:
    tile, widest = traits.tile, traits.problem.widest
    if isinstance(traits, WarpgroupTraits):
        rows = math.prod(shapes["q"][:-1])
        requests = shapes["cu_seqlens_q"][0] - 1 if "cu_seqlens_q" in shapes else shapes["q"][0]
        most = few_rows(requests, shapes["k"][-2], arch.num_sms)
        if widest <= 128:
            are_few = f"{rows} query rows are {'few' if rows <= most else 'many'} ({most} and less are)"
            yield f"{are_few}: row tiles of {tile.tile_m}"
        yield f"head dims up to {widest} leave registers for tiles of {tile.tile_n} keys"
    elif traits.reads_keys_once:
        tokens = shapes["q"][1] if len(shapes["q"]) == 4 else 1
        rows = shapes["q"][-2] // max(shapes["k"][-2], 1) * tokens
        yield f"{counted(rows, 'query row')} a KV head: row tiles of {tile.tile_m}"
    else:
        yield f"head dims up to {widest}: {counted(tile.m_blocks, 'block')} of {ROW_BLOCK} query rows a warp"
    used = f"{traits.smem_bytes} of {arch.smem_bytes_per_cta} bytes of shared memory a CTA"
    yield f"{used}, {counted(tile.ctas_per_sm, 'CTA')} an SM"


def _why_plan(traits: WorkTraits, host: HostPlan, plan: LaunchPlan, arch: Arch, num_splits: int | None) -> str:
    tiles = counted(host.work_tiles, "work tile")
    if host.work_tiles == 0:
        return "there is nothing to do: nothing is launched"
    if isinstance(traits, WarpgroupTraits):
        return f"{tiles}, which at most {max_ctas(traits, arch)} CTAs take one after another"
    if not traits.splits:
        return f"{tiles}, a CTA for each"
    if num_splits is not None:
        return f"{tiles}, each cut into {counted(host.pieces, 'piece')}: num_splits is {num_splits}"
    if plan.cluster > 1:
        few = f"{tiles} would leave SMs idle, of which there are {arch.num_sms}"
        return f"{few}: a cluster for each joins its parts through shared memory"
    if host.pieces == 1:
        return f"{tiles}, a CTA for each: nothing to join costs less than equal shares"
    return f"{tiles} would not fill {arch.num_sms} SMs evenly: all keys are cut into equal shares"

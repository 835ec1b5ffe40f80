"""One compile key of each kernel of the library, with the features that trace most of it."""

from __future__ import annotations

from cuteforge.families.attention.forward.config import select_decode, select_prefill
from cuteforge.families.attention.forward_sm90a.config import select_warpgroups
from cuteforge.families.attention.merge.config import MergeTraits
from cuteforge.families.csa.compressor import config as compressor
from cuteforge.families.rotary import config as rotary
from cuteforge.runtime.arch import resolve_arch
from cuteforge.runtime.compile_cache import KernelKey
from helpers.attention_problems import problem_of

ARCH = "sm_90a"


def kernel_keys() -> dict[str, KernelKey]:
    """Name -> key."""
    arch = resolve_arch(ARCH, None)
    appending = {"keys": "pages", "lengths": "seqlens", "appends": True, "has_rows": True, "has_left": True}
    masked = {"keys": "packed", "mask_rank": 2, "has_lse": True, "causal": True, "has_softcap": True}
    packed = {"keys": "packed", "causal": True, "has_lse": True, "has_sinks": True}
    rotated = rotary.Problem("bfloat16", 128, 64, True)
    window = compressor.Problem("bfloat16", 128, 4, 2)
    attention = {
        "attention decode": select_decode(problem_of("bfloat16", 64, 64, "single", **appending), 4, arch, True),
        "attention prefill": select_prefill(problem_of("bfloat16", 64, 64, "packed", **masked), arch),
        "attention sm_90a": select_warpgroups(problem_of("bfloat16", 64, 64, "packed", **packed), arch),
    }
    others = {
        "attention merge": ("attention.merge.kernel", MergeTraits("bfloat16", 64, "packed")),
        "rotary": ("rotary.kernel", rotary.Traits(rotated, 4, ("k", "k_out", "cos", "sin", "positions"), "int32")),
        "csa forward": ("csa.compressor.forward", compressor.select_traits(window, arch, False)),
        "csa backward": ("csa.compressor.backward", compressor.select_traits(window, arch, True)),
    }
    keys = {name: KernelKey(traits.builder, traits, ARCH) for name, traits in attention.items()}
    builders = {name: (f"cuteforge.families.{module}:build", traits) for name, (module, traits) in others.items()}
    return keys | {name: KernelKey(builder, traits, ARCH) for name, (builder, traits) in builders.items()}

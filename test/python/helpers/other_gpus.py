"""What the library chooses for other GPUs, run on the one that is here.

Machine code of another architecture does not run here, but its tiles, plans and paths do once they are compiled for
this one: less shared memory, more row blocks of one warp, no clusters, no dependent launch, another number of CTAs, and
in prefill the portable kernel, which a GPU of sm_90a never gets by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from cuteforge.families.attention import base as attention_base
from cuteforge.families.attention import road as attention_road
from cuteforge.families.csa.compressor import api as csa_api
from cuteforge.op import base as api_base
from cuteforge.op.base import APIBase
from cuteforge.runtime.arch import Arch, resolve_arch
from cuteforge.runtime.compile_cache import Kernel, KernelKey, load_kernel

HERE = "sm_90a"  # the GPU that the tests run on; only by its name can choices be told apart without one
OTHERS = {"A100": "sm_80", "L20": "sm_89", "B200": "sm_100a", "RTX 5090": "sm_120a"}
_CHOOSING = (api_base, attention_base, attention_road, csa_api)


@contextmanager
def chosen_for(arch_name: str) -> Iterator[list[KernelKey]]:
    """Ops choose as on a well-known GPU of `arch_name` (its SMs, shared memory and clusters), and what they choose is
    compiled for the GPU here. Yields the keys that they ask for, which grow as kernels are loaded."""
    there, asked = resolve_arch(arch_name, None), []

    def load(key: KernelKey) -> Kernel:
        asked.append(key)
        return load_kernel(replace(key, arch=resolve_arch(None, None).name))

    with pytest.MonkeyPatch.context() as patch:
        for module in _CHOOSING:
            patch.setattr(module, "resolve_arch", lambda *_: there)
        patch.setattr(api_base, "load_kernel", load)
        patch.setattr(api_base, "runs_on", lambda *_: True)
        yield asked


class Choice(NamedTuple):
    """What is compiled once, and the calls that get it.

    Attributes:
        runs: architecture and call.
        is_own: whether a GPU of sm_90a compiles the same, and only cuts the calls otherwise.
    """

    traits: Any
    runs: list[tuple[str, Any]]
    is_own: bool

    @property
    def label(self) -> str:
        archs = "+".join(dict.fromkeys(arch for arch, _ in self.runs))
        return f"{archs}-{self.runs[0][1].label}"

    @contextmanager
    def on(self, arch_name: str) -> Iterator[None]:
        """`chosen_for`; fails if something else was chosen."""
        with chosen_for(arch_name) as asked:
            yield
        assert [(key.traits, key.arch) for key in asked] == [(self.traits, arch_name)]


def choices(calls: Iterable[tuple[Any, APIBase]]) -> list[Choice]:
    """What other GPUs get for `calls`, (call, op of its samples), where that is not what a GPU of sm_90a gets: another
    kernel, or in decode another plan. Each kernel and plan of a call once, whichever GPU it is for."""
    here, found = resolve_arch(HERE, None), {}
    for call, op in calls:
        own = _chosen(op, here)
        seen = {own}
        for arch_name in OTHERS.values():
            chosen = _chosen(op, resolve_arch(arch_name, None))
            if chosen not in seen:
                seen.add(chosen)
                traits = chosen[0]
                found.setdefault(traits, Choice(traits, [], traits == own[0])).runs.append((arch_name, call))
    return list(found.values())


def table(found: list[Choice]) -> dict[str, Any]:
    """For `parametrize`."""
    return {"argvalues": found, "ids": [choice.label for choice in found]}


def _chosen(op: APIBase, arch: Arch) -> tuple[Any, tuple]:
    """The traits, and what the plan is made from, where there is one."""
    traits = op._kernel_key(op.dims, arch).traits
    return traits, op._scalars(arch) if getattr(traits, "splits", False) else ()

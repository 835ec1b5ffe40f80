"""Kernels for a machine without a GPU: each computes what its family's reference computes, from the arguments of the
compiled entry.

With `stub_gpu` around them, calls of classes and wrappers run on CPU tensors with the right results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cuteforge.backends import compressor, cuda, kernels, rotary
from cuteforge.families.attention import operands
from cuteforge.families.rotary import operands as rotary_operands
from cuteforge.runtime import streams
from cuteforge.runtime.compile_cache import KernelKey
from helpers.stub_gpu import STREAM, StubStream, stub_streams, stub_wrappers


class _Stream(StubStream):
    """A stream that a user makes; all streams of the stand-in run in order."""

    def wait_stream(self, other: _Stream) -> None:
        pass


class CudaIsCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@contextmanager
def stand_in_gpu(monkeypatch) -> Iterator[list[tuple]]:
    """Within it "cuda" is the CPU, and a launch computes the reference. Yields the arguments of every launch."""
    stub_streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(streams, "current_stream_query", lambda: lambda index: STREAM)
    _let_policies_choose_kernels(monkeypatch)
    launches = stub_wrappers(monkeypatch, launch_reference)
    try:
        with CudaIsCpu():
            yield next(launches)
    finally:
        launches.close()


def _let_policies_choose_kernels(monkeypatch) -> None:
    """Kernels refuse only what they would refuse on a GPU with a compiler. Who asks has to forget what was chosen
    before and within."""
    refusals, gpu = kernels.kernel_refusals, torch.device("cuda", 0)
    monkeypatch.setattr(kernels, "_check_toolchain", lambda device: None)
    for policy in (cuda, rotary, compressor):
        monkeypatch.setattr(policy, "kernel_refusals", lambda device, sample, target=None: refusals(gpu, sample))


def launch_reference(key: KernelKey, args: tuple) -> None:
    """What the kernel of `key` does with ``(*tensors, *scalars, stream)``."""
    family = next(name for name in _LAUNCHES if f".{name}." in key.builder)
    # a bound launch has exported its operands
    args = tuple(torch.from_dlpack(x) if hasattr(x, "__dlpack__") and type(x) is not torch.Tensor else x for x in args)
    with torch.no_grad():
        _LAUNCHES[family](key.traits, args)


def _write(targets: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
    for target, result in zip(targets, results):
        if target is not None:
            target.copy_(result)


def _attend(traits: Any, args: tuple) -> None:
    problem, rows = traits.problem, operands.entry_rows()
    *_, left, right, softcap, scale, _ = args
    dense_names = {row.shares: row.name for row in operands.ROWS if row.shares} if problem.is_paged else {}
    given = {dense_names.get(row.name, row.name): x for row, x in zip(rows, args) if x is not None}
    if "mask" in given:
        given["mask"] = given["mask"].bool()
    name, rest = operands.PREFILL, ()
    if problem.is_paged and problem.packs_queries:
        name = operands.PAGED_PREFILL
    elif problem.is_paged:
        name, rest = operands.PAGED_DECODE, (None,)
    inputs = [given.get(each) for each in operands.inputs_of(name) if problem.appends or each not in operands.APPENDED]
    function = getattr(torch.ops.cuteforge, f"{name}_append" if problem.appends else name)
    results = function(*inputs, scale, problem.causal, left, right, softcap, *rest)
    _write((given["out"], given.get("lse")), results)


def _merge(traits: Any, args: tuple) -> None:
    *inputs, out, lse, _ = args
    _write((out, lse), torch.ops.cuteforge.merge_state(*inputs))


def _rotate(traits: Any, args: tuple) -> None:
    *tensors, inverse, _ = args
    given = dict(zip((row.name for row in rotary_operands.ROWS), tensors))
    angles = [given[name] for name in ("freqs_cis", "cos", "sin", "positions")]
    options = (traits.problem.interleaved, bool(inverse))
    if given["k"] is None:
        _write((given["out"],), (torch.ops.cuteforge.rotary(given["x"], *angles, *options),))
    else:
        results = torch.ops.cuteforge.rotary_qk(given["x"], given["k"], *angles, *options)
        _write((given["out"], given["k_out"]), results)


def _compress(traits: Any, args: tuple) -> None:
    ratio, coff = traits.problem.ratio, traits.problem.coff
    if traits.backward:
        results = torch.ops.cuteforge.csa_compressor_backward(*args[:6], ratio, coff, True)
        _write(args[6:9], results)
    else:
        out = args[5]
        _write((out,), (torch.ops.cuteforge.csa_compressor_forward(*args[:5], out.shape[0], ratio, coff),))


# By a part of the module that builds the kernel.
_LAUNCHES = {"merge": _merge, "attention": _attend, "rotary": _rotate, "csa": _compress}

"""Streams of every family: where a launch goes, what it waits for, and whose memory it keeps."""

import pytest
import torch

from cuteforge import ContractError
from helpers import lifecycle
from helpers.explicit_stream import check_operands_freed_at_once
from helpers.gpu import SLEEP_CYCLES, check_not_behind, check_while_behind
from helpers.lifecycle import each_family

ROUNDS = 10


def load_code(family, device):
    """Loading a kernel at its first launch may wait for the stream that is held."""
    family.call(device).execute()
    torch.cuda.synchronize()


@each_family
def test_operands_freed_at_once_are_still_read(family, device):
    """Operands that the kernel reads where they lie: the call records them on the stream. Copies of others:
    fe_api/test_explicit_stream.py."""
    x = family.draw(device, 0)

    def draw():
        return {name: tensor.clone() for name, tensor in lifecycle.tensors_of(x).items()}

    def call(tensors, stream):
        given = lifecycle.with_tensors(x, tensors)
        return family.wrapper(given, **({} if stream is None else {"stream": stream}))

    check_operands_freed_at_once(draw, call)


@each_family
@pytest.mark.parametrize("as_handle", [False, True], ids=["torch stream", "raw handle"])
def test_explicit_stream_is_where_the_launch_goes(as_handle, family, device):
    load_code(family, device)
    call, side = family.call(device), torch.cuda.Stream()
    stream = side.cuda_stream if as_handle else side
    check_while_behind(side, lambda: call.execute(stream=stream), call.check_untouched)
    call.check()


@each_family
@pytest.mark.parametrize("entry", ["execute", "bind"])
def test_no_stream_means_the_current_one(entry, family, device):
    load_code(family, device)
    call, side = family.call(device), torch.cuda.Stream()
    launch = call.bind() if entry == "bind" else call.execute

    def launch_on_side():
        with torch.cuda.stream(side):
            launch()

    check_while_behind(side, launch_on_side, call.check_untouched)
    call.check()


@each_family
def test_handle_zero_is_the_default_stream(family, device):
    """Not the current one: it runs although the current stream is held."""
    load_code(family, device)
    call, side = family.call(device), torch.cuda.Stream()
    check_not_behind(side, lambda: call.execute(stream=0), call.check_memory)
    call.check()


@each_family
@pytest.mark.parametrize("entry", lifecycle.ENTRIES)
@pytest.mark.parametrize("stream", [-1, "side", 1.5])
def test_what_is_no_stream_is_refused(stream, entry, family, device):
    call = family.call(device)
    guard = family.guard(family.without_writes(call.x))
    attempt = {"execute": call.execute, "bind": call.bind, "wrapper": call.call_wrapper}[entry]
    with pytest.raises(ContractError, match=r"^stream\b"):
        attempt(stream=stream)
    torch.cuda.synchronize()
    call.check_untouched()
    guard.check()


@each_family
def test_two_streams_at_once(family, device):
    """Launches share no scratch: both results are right although they overlap."""
    inputs = [family.draw(device, version) for version in family.long_versions]
    want = [lifecycle.copied(family.wrapper(x)) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        got = [family.wrapper(x, stream=stream) for x, stream in zip(inputs, streams)]
    torch.cuda.synchronize()
    for results, expected in zip(got, want, strict=True):
        assert lifecycle.same(dict(results.items()), expected)


@each_family
def test_wrapper_reads_what_the_stream_wrote_just_before(family, device):
    """Operands that are zeros until the stream, which sleeps first, has filled them."""
    x = family.draw(device, 0)
    want, tensors = lifecycle.copied(family.wrapper(family.draw(device, 0))), lifecycle.tensors_of(x)
    late = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        for name, tensor in late.items():
            tensor.copy_(tensors[name])
    got = family.wrapper(lifecycle.with_tensors(x, late), stream=side)
    side.synchronize()
    assert lifecycle.same(dict(got.items()), want)

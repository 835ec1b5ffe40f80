"""The life of an op of every family: before compile, compiled, for another GPU, copied, pickled; and that it says what
it wrote."""

import pickle
from copy import deepcopy

import pytest
import torch

from cuteforge import UnsupportedError
from helpers import lifecycle
from helpers.lifecycle import each_family

COPIES = {"deepcopy": deepcopy, "pickle": lambda op: pickle.loads(pickle.dumps(op))}
WRITERS = {
    "call": lambda call, positional, named: call.op(*positional, **named),
    "execute": lambda call, positional, named: call.op.execute(*positional, **named),
    "bind": lambda call, positional, named: call.op.bind(*positional, **named)(),
}


@each_family
def test_execute_before_compile_says_so(family, device):
    call = family.call(device)
    op = family.make(call.x, call.results)
    with pytest.raises(RuntimeError, match="compile"):
        call.execute(op)
    call.check_untouched()


@each_family
def test_call_compiles_and_executes(family, device):
    call = family.call(device)
    op = family.make(call.x, call.results)
    assert op.check_support() is True
    positional, named = call.arguments
    op(*positional, **named)
    assert op.compile() is op.compile()
    call.check()


@each_family
def test_op_for_another_arch_refuses_to_execute(family, device):
    other = "sm_80" if torch.cuda.get_device_capability(device)[0] != 8 else "sm_90a"
    call = family.call(device, arch=other)
    guard = family.guard(family.without_writes(call.x))
    with pytest.raises(UnsupportedError, match=other):
        call.execute()
    torch.cuda.synchronize()
    call.check_untouched()
    guard.check()


@each_family
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_an_op_give_the_same_bits(how, family, device):
    call = family.call(device)
    call.execute()
    call.check()
    want, copy = lifecycle.copied(call.results), COPIES[how](call.op)
    call.poison()
    call.execute(copy)
    torch.cuda.synchronize()
    assert lifecycle.same(call.results, want)


@each_family
def test_autocast_and_default_dtype_change_nothing(family, device):
    call = family.call(device)
    call.execute()
    call.check()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cuda", torch.float16):
            got = call.call_wrapper()
    finally:
        torch.set_default_dtype(before)
    assert lifecycle.same(dict(got.items()), call.results)


@each_family
@pytest.mark.parametrize("entry", WRITERS)
def test_every_write_of_a_result_counts_for_autograd(entry, family, device):
    """The version that a saved tensor is compared with grows; of tensors made in inference mode, which have none,
    nothing is asked."""
    call = family.call(device)
    positional, named = call.arguments
    before = {name: tensor._version for name, tensor in call.results.items()}
    WRITERS[entry](call, positional, named)
    assert all(tensor._version > before[name] for name, tensor in call.results.items())
    call.check()
    with torch.inference_mode():
        call.results = {name: torch.full_like(tensor, torch.nan) for name, tensor in call.results.items()}
        WRITERS[entry](call, *call.arguments)
    torch.cuda.synchronize()
    family.judge(call.results, call.x)


@each_family
@pytest.mark.parametrize("entry", WRITERS)
def test_a_capture_counts_as_a_write(entry, family, device):
    call = family.call(device)
    positional, named = call.arguments
    graph, before = torch.cuda.CUDAGraph(), {name: tensor._version for name, tensor in call.results.items()}
    with torch.cuda.graph(graph):
        WRITERS[entry](call, positional, named)
    assert all(tensor._version > before[name] for name, tensor in call.results.items())
    graph.replay()
    call.check()

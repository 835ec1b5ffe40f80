"""Nonsense of every type for every argument of everything public: an error that names the argument, or a right
answer."""

import random
from collections import defaultdict
from contextlib import ExitStack

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from cuteforge import ContractError
from cuteforge.op import base as api_base
from cuteforge.op import torch_library
from helpers import public_calls
from helpers.nonsense_calls import answer, nonsense_for, problem
from helpers.policy import restored_registry
from helpers.stub_gpu import StubKernel, pass_for_gpu, pass_for_gpu_in_tables

LAUNCHES = (".execute", ".bind")
# A normal run takes so many of each test, of some 100 for each argument; a round of a long one all of them.
SINGLES, PAIRS = 150, 50
WRAPPERS = [
    name
    for name in public_calls.CALLS
    if name.endswith("_wrapper") or name.startswith("attn_") or name in ("rotary_emb", "merge_state")
]
WRAPPERS.remove("attn_backend")


def passing_cpus(check):
    def check_all_but_devices(operands):
        try:
            check(operands)
        except ContractError as error:
            if not str(error).endswith("wanted a CUDA device, got cpu"):
                raise

    return check_all_but_devices


class _Follow(TorchDispatchMode):
    """Follows calls, so that wrappers go through their ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_gpu_needed(request, monkeypatch):
    """Ops launch on CPU tensors, to a kernel that only takes notes: their tables say what is wrong."""
    monkeypatch.delenv("CUTEFORGE_BACKEND", raising=False)
    monkeypatch.delenv("CUTEFORGE_ARCH", raising=False)
    name = request.node.callspec.params["name"] if hasattr(request.node, "callspec") else ""
    if name.endswith(LAUNCHES):
        monkeypatch.setenv("CUTEFORGE_FAST_LAUNCH", "0")
        pass_for_gpu(monkeypatch)
        pass_for_gpu_in_tables(monkeypatch)
    if name.endswith(".compile"):
        monkeypatch.setattr(api_base, "load_kernel", StubKernel)


def test_everything_public_has_a_row():
    assert public_calls.missing_rows() == []


def swept(name, round_seed, enter=lambda stack: None, without=()):
    """{what is wrong: examples} of calls with nonsense for an argument, and for two of them."""
    make = public_calls.CALLS[name]
    found, dice = defaultdict(list), random.Random(round_seed or 0)

    def run(*replace):
        """(argument, label, twist) of each."""
        call, labels = make(), {}
        for argument, label, twist in replace:
            call.arguments[argument] = twist(call.argument(argument))
            labels[argument] = label
        if what := within(lambda: problem(call, labels, want)):
            found[f"{', '.join(labels)}: {what}"].append(", ".join(labels.values()))

    def within(action):
        with ExitStack() as stack:
            stack.enter_context(restored_registry())
            enter(stack)
            return action()

    want, call = within(lambda: answer(make())), make()
    by_argument = [
        [(argument, *each) for each in nonsense_for(argument, call.argument(argument))]
        for argument in call.names
        if argument not in without
    ]
    singles = [each for choices in by_argument for each in choices]
    for each in singles if round_seed is not None else dice.sample(singles, min(SINGLES, len(singles))):
        run(each)
    for _ in range(PAIRS if len(by_argument) > 1 else 0):
        run(*map(dice.choice, dice.sample(by_argument, 2)))
    return found


def report(found):
    return "\n".join(f"{what}   [{', '.join(sorted(set(labels)))[:300]}]" for what, labels in sorted(found.items()))


@pytest.mark.parametrize("name", public_calls.CALLS)
def test_nonsense_is_refused_by_name(name, fuzz):
    def one_round(round_seed):
        found = swept(name, round_seed)
        if found:
            pytest.fail(f"{name}:\n{report(found)}", pytrace=False)

    fuzz.repeat(one_round)


@pytest.mark.parametrize("name", WRAPPERS)
def test_nonsense_is_refused_by_name_through_an_op(name, fuzz, monkeypatch):
    """As torch.compile and autograd call it. Ops serve a CPU, which has no streams: wrappers refuse it before."""
    monkeypatch.setattr(torch_library, "_check_gpu_tensors", passing_cpus(torch_library._check_gpu_tensors))

    def one_round(round_seed):
        found = swept(name, round_seed, lambda stack: stack.enter_context(_Follow()), without=("stream",))
        if found:
            pytest.fail(f"{name}:\n{report(found)}", pytrace=False)

    fuzz.repeat(one_round)

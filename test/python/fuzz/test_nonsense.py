"""Nonsense of every type for every argument of everything public: an error that names the argument, or a right answer."""

import random
from collections import defaultdict
from contextlib import ExitStack

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import public_calls
from helpers.nonsense import VALUES, nonsense_for, problem
from helpers.policy import restored_registry
from helpers.stub_gpu import pass_for_gpu, pass_for_gpu_in_tables

LAUNCHES = (".execute", ".bind")
WRAPPERS = [
    name
    for name in public_calls.CALLS
    if name.endswith("_wrapper") or name.startswith("attn_") or name in ("rotary_emb", "merge_state")
]
WRAPPERS.remove("attn_backend")


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


def test_everything_public_has_a_row():
    assert public_calls.missing_rows() == []


def swept(name, round_seed, pairs, enter=lambda stack: None):
    """{what is wrong: an example} of nonsense for each argument, then for pairs of arguments."""
    make = public_calls.CALLS[name]
    found = defaultdict(list)
    dice = random.Random(round_seed or 0)

    def run(*replace):
        """(argument, label, twist) of each."""
        call = make()
        good, labels = dict(call.arguments), {}
        for argument, label, twist in replace:
            default = call.signature.parameters[argument].default if argument in call.signature.parameters else None
            call.arguments[argument] = twist(good.get(argument, default))
            labels[argument] = label
        with ExitStack() as stack:
            stack.enter_context(restored_registry())
            enter(stack)
            if what := problem(call, labels, want):
                found[f"{', '.join(labels)}: {what}"].append(", ".join(labels.values()))

    want = answer(make, enter)
    choices = []
    for argument in make().names:
        good = make().arguments.get(argument)
        mine = [(argument, label, twist) for label, twist in nonsense_for(argument, good)]
        choices.append(mine)
        for each in mine:
            run(each)
    if len(choices) > 1:
        for _ in range(pairs):
            first, second = dice.sample(choices, 2)
            run(dice.choice(first), dice.choice(second))
    return found


def answer(make, enter):
    """Of the call without nonsense; None where it is refused too: it needs a GPU."""
    call = make()
    with ExitStack() as stack:
        stack.enter_context(restored_registry())
        enter(stack)
        try:
            return call.run(**call.arguments)
        except Exception:
            return None


def report(found):
    return "\n".join(f"{what}   [{', '.join(sorted(set(labels)))[:300]}]" for what, labels in sorted(found.items()))


@pytest.mark.parametrize("name", public_calls.CALLS)
def test_nonsense_is_refused_by_name(name, fuzz):
    def one_round(round_seed):
        found = swept(name, round_seed, pairs=100)
        assert not found, f"{name}:\n{report(found)}"

    fuzz.repeat(one_round)


@pytest.mark.parametrize("name", WRAPPERS)
def test_nonsense_is_refused_by_name_through_an_op(name, fuzz, cpu_as_gpu):
    def one_round(round_seed):
        found = swept(name, round_seed, 100, lambda stack: stack.enter_context(_Follow()))
        assert not found, f"{name}:\n{report(found)}"

    fuzz.repeat(one_round)

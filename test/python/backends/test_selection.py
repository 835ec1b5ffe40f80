"""Which backend serves a call of `attention`: order, strictness, refusals as data, isolation."""

from __future__ import annotations

import asyncio
import importlib
import threading
from contextlib import nullcontext

import pytest
import torch

import cuteforge
from cuteforge import (
    ATTN_BACKEND,
    ContractError,
    CudaBackend,
    FlashAttnBackend,
    TorchNativeBackend,
    UnsupportedError,
    attention,
    attn_backend,
    explain,
    register_backend,
)
from cuteforge.backends import flash, selection
from cuteforge.backends.interface import Request
from helpers.policy import StubBackend, draw, restored_registry

MARK = StubBackend.mark


@pytest.fixture
def stub():
    """Registered, of lower priority than what serves everything."""
    with restored_registry():
        yield register_backend(StubBackend())


def is_stub(out: torch.Tensor) -> bool:
    return bool((out == MARK).all())


def facts(**changed) -> Request:
    usual = Request(torch.device("cuda", 0), torch.bfloat16, 128, 128, 8, 2, "decode", False, False, False, None)
    return usual._replace(**changed)


def test_the_name_attention_stays_the_function_whatever_is_imported():
    """The subpackage of kernels has the same name; its own imports go on working."""
    reference = importlib.import_module("cuteforge.families.attention.reference")
    assert cuteforge.attention is attention and callable(cuteforge.attention)
    assert reference.__name__ == "cuteforge.families.attention.reference"


def test_torch_serves_a_cpu_without_being_asked():
    decision = explain(*draw())
    assert decision.chosen == "torch_native" and decision.source == "priority"
    assert [v.name for v in decision.verdicts] == ["cuda", "flash", "torch_native"]
    assert all("CUDA" in v.refusal for v in decision.verdicts[:2])


@pytest.mark.parametrize("how", [ATTN_BACKEND.TORCH_NATIVE, "torch_native", TorchNativeBackend, TorchNativeBackend()])
def test_every_way_to_ask_means_the_same(how):
    q, k, v = draw()
    want = attention(q, k, v)
    assert torch.equal(attention(q, k, v, backend=how), want)
    with attn_backend(how) as chosen:
        assert isinstance(chosen, TorchNativeBackend)
        assert torch.equal(attention(q, k, v), want)


def test_order_is_argument_context_environment_priority(stub, monkeypatch):
    q, k, v = draw()
    assert not is_stub(attention(q, k, v))
    monkeypatch.setenv("CUTEFORGE_BACKEND", "stub")
    assert is_stub(attention(q, k, v)) and explain(q, k, v).source == "environment"
    with attn_backend("torch_native"):
        assert not is_stub(attention(q, k, v)) and explain(q, k, v).source == "context"
        assert is_stub(attention(q, k, v, backend=stub)) and explain(q, k, v, backend=stub).source == "argument"
        with attn_backend("stub"):
            assert is_stub(attention(q, k, v))
        assert not is_stub(attention(q, k, v))
    monkeypatch.delenv("CUTEFORGE_BACKEND")
    assert not is_stub(attention(q, k, v))


@pytest.mark.parametrize("way", ["argument", "context"])
def test_what_is_asked_for_never_falls_back(way):
    q, k, v = draw(d=12)
    context = attn_backend(ATTN_BACKEND.CUDA) if way == "context" else nullcontext()
    argument = ATTN_BACKEND.CUDA if way == "argument" else None
    with context, pytest.raises(UnsupportedError) as caught:
        attention(q, k, v, backend=argument)
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError) and f"asked for by {way}" in text
    # Every reason, not only the first.
    assert "CUDA" in text and "float32" in text


def test_environment_falls_through_to_what_serves_the_call(monkeypatch):
    q, k, v = draw()
    monkeypatch.setenv("CUTEFORGE_BACKEND", "cuda")
    assert attention(q, k, v).shape == q.shape
    decision = explain(q, k, v)
    assert (decision.chosen, decision.source, decision.verdicts[0].name) == ("torch_native", "environment", "cuda")


def test_unknown_names_are_refused_by_name_from_everywhere(monkeypatch):
    q, k, v = draw()
    with pytest.raises(ContractError, match="backend: wanted .*torch_native, got 'cudda'"):
        attention(q, k, v, backend="cudda")
    with pytest.raises(ContractError, match="backend: wanted .*got \\[\\]"):
        attention(q, k, v, backend=[])
    with pytest.raises(ContractError, match="backend: wanted .*got 3"), attn_backend(3):
        pass
    monkeypatch.setenv("CUTEFORGE_BACKEND", "cudda")
    with pytest.raises(ContractError, match="CUTEFORGE_BACKEND: wanted .*got 'cudda'"):
        attention(q, k, v)


def test_context_is_left_on_an_error(stub):
    q, k, v = draw()
    with pytest.raises(KeyError), attn_backend(stub):
        raise KeyError
    assert not is_stub(attention(q, k, v))


def test_threads_do_not_see_the_context_of_others(stub):
    q, k, v = draw()
    entered, left, results = threading.Event(), threading.Event(), {}

    def inside():
        with attn_backend(stub):
            entered.set()
            left.wait(10)
            results["inside"] = is_stub(attention(q, k, v))

    def outside():
        entered.wait(10)
        results["outside"] = is_stub(attention(q, k, v))
        left.set()

    threads = [threading.Thread(target=f) for f in (inside, outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"inside": True, "outside": False}


def test_async_tasks_do_not_see_the_context_of_others(stub):
    q, k, v = draw()

    async def ask(backend):
        if backend is None:
            await asyncio.sleep(0)
            return is_stub(attention(q, k, v))
        with attn_backend(backend):
            await asyncio.sleep(0.01)
            return is_stub(attention(q, k, v))

    async def main():
        return await asyncio.gather(ask(stub), ask(None), ask("torch_native"))

    assert asyncio.run(main()) == [True, False, False]


def test_a_third_party_backend_is_dispatched_by_query_length_and_fwd(stub):
    for length, fwd, want in (
        (1, None, "decode"),
        (16, None, "decode"),
        (17, None, "prefill"),
        (1, "prefill", "prefill"),
        (17, "decode", "decode"),
    ):
        q, k, v = draw(length=length, num_keys=20)
        attention(q, k, v, fwd=fwd, backend="stub")
        assert stub.calls.pop() == want, (length, fwd)
    with pytest.raises(ContractError, match="fwd: wanted None, 'decode' or 'prefill', got 'both'"):
        attention(q, k, v, fwd="both")


def test_a_registered_class_with_priority_serves_at_once_and_may_refuse():
    q, k, v = draw()
    assert not is_stub(attention(q, k, v))  # decided, and to be decided again
    with restored_registry():

        @register_backend
        class First(StubBackend):
            name = "first"
            priority = 1000

            def refuse(self, request):
                return "causal only" if not request.is_causal else None

        assert is_stub(attention(q, k, v, is_causal=True))
        assert not is_stub(attention(q, k, v))
        assert explain(q, k, v).verdicts[0] == selection.Verdict("first", "causal only")
    assert not is_stub(attention(q, k, v, is_causal=True))


def test_a_backend_gets_the_options_that_it_says_it_takes_and_no_other_call_with_options(stub):
    q, k, v = draw()
    window, sinks = (2, None), torch.zeros(q.shape[2])
    attention(q, k, v, softcap=0, window=(None, None), backend="stub")  # none of which changes anything
    with pytest.raises(UnsupportedError, match="stub: takes no window and no sinks"):
        attention(q, k, v, window=window, sinks=sinks, backend="stub")
    assert explain(q, k, v, window=window, backend="stub").verdicts[0].refusal == "takes no window"
    with restored_registry():

        class Windowed(StubBackend):
            name = "windowed"
            options = ("window",)

            def fwd_decode(self, *operands, window=None):
                self.calls.append(window)
                return operands[0]

        windowed = register_backend(Windowed())
        attention(q, k, v, window=window, backend="windowed")
        assert attention(q, k, v, backend="windowed") is q
        assert windowed.calls == [window, None]
        with pytest.raises(UnsupportedError, match="windowed: takes no sinks"):
            attention(q, k, v, window=window, sinks=sinks, backend="windowed")


def test_a_sink_that_requires_grad_needs_a_backend_with_gradients():
    q, k, v = draw()
    decision = explain(q, k, v, sinks=torch.zeros(6, requires_grad=True))
    assert decision.chosen == "torch_native"
    assert "no derivative" in next(v.refusal for v in decision.verdicts if v.name == "cuda")


def test_a_second_registration_takes_the_place_of_the_first(stub):
    q, k, v = draw()
    other = register_backend(StubBackend())
    attention(q, k, v, backend="stub")
    assert other.calls and not stub.calls


@pytest.mark.parametrize("wrong", [object(), int, "cuda"])
def test_what_is_no_backend_is_not_registered(wrong):
    with pytest.raises(ContractError, match="backend: wanted an AttentionBackend"):
        register_backend(wrong)


def test_a_call_that_needs_a_gradient_goes_to_what_has_one():
    assert "no derivative" in CudaBackend().refuse(facts(derivative="graph", device=torch.device("cpu")))
    assert TorchNativeBackend().refuse(facts(derivative="graph")) is None
    q, k, v = draw()
    for leaf in (q, k, v):
        leaf.requires_grad_()
        decision = explain(q, k, v)
        assert any("no derivative" in v.refusal for v in decision.verdicts if v.name == "cuda")
        leaf.requires_grad_(False)
    q.requires_grad_()
    with torch.no_grad():
        assert "derivative" not in explain(q, k, v).verdicts[0].refusal


def test_flash_refuses_what_it_lacks(monkeypatch):
    library = flash._Library(2, None, None)
    monkeypatch.setattr(flash, "find_library", lambda: (library, ""))
    assert FlashAttnBackend().refuse(facts()) is None
    assert FlashAttnBackend().refuse(facts(derivative="graph")) is None
    for changed, reason in (
        ({"dtype": torch.float32}, "float16"),
        ({"has_mask": True}, "no mask"),
        ({"head_dim": 320, "v_dim": 320}, "256"),
        ({"is_cached": True}, "without a cache"),
        ({"derivative": "transform"}, "torch.func"),
    ):
        assert reason in FlashAttnBackend().refuse(facts(**changed)), changed


def test_flash_that_is_missing_is_a_sentence():
    library, why = flash.find_library()
    assert (library is None) == bool(why)


def test_explain_prints_as_a_table_and_names_what_was_chosen(monkeypatch):
    lines = str(explain(*draw())).splitlines()
    assert lines[0] == "attention: torch_native (by priority)"
    assert [line.split()[0] for line in lines[1:]] == ["cuda", "flash", "torch_native"] and lines[3].endswith("chosen")
    nothing = explain(*draw(), backend="cuda")
    assert nothing.chosen is None and "nothing serves this call" in str(nothing)


def test_explain_takes_functions_names_and_tensors():
    q, k, v = draw()
    assert explain(q, k, v) == explain(attention, q, k, v) == explain("attention", q, k, v)
    with pytest.raises(ContractError, match="function: wanted a policy function .*got 'attend'"):
        explain("attend", q, k, v)


def test_choices_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(selection, "_MAX_CHOICES", 4)
    policy = selection.Policy("f", lambda: [StubBackend()], lambda _: selection.Wish(selection.PRIORITY))
    for i in range(20):
        policy.choose(i, None)
    assert len(policy._chosen) <= 4


def test_a_choice_is_made_once_for_equal_facts(stub):
    q, k, v = draw()
    asked = []
    stub.refuse = lambda request: asked.append(request)
    for num_keys in (7, 9, 11):
        attention(*draw(num_keys=num_keys), backend="stub")
    assert len(asked) == 1


def test_what_is_no_call_is_refused_by_name():
    q, k, v = draw()
    with pytest.raises(ContractError, match="k: wanted a torch.Tensor, got NoneType"):
        attention(q, None, v)
    with pytest.raises(ContractError, match=r"q: wanted shape \(B, L, Hq, D\), got \(3, 6, 16\)"):
        attention(q[0], k, v)


@pytest.mark.parametrize(
    ("name", "shapes"),
    {
        "q": [(1, 4, 8, 64), (1, 4, 3, 64), (1, 4, 3, 64)],
        "k": [(1, 4, 8, 64), (2, 4, 2, 64), (2, 4, 2, 64)],
        "v": [(1, 4, 8, 64), (1, 4, 2, 64), (1, 5, 2, 64)],
    }.items(),
)
def test_explain_refuses_what_the_call_refuses_in_the_same_words(name, shapes):
    """It used to choose a backend that then refused."""
    tensors = [torch.randn(shape) for shape in shapes]
    texts = []
    for function in (cuteforge.attention, cuteforge.explain):
        with pytest.raises(ContractError, match=f"^{name}: wanted") as refused:
            function(*tensors)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]

"""Putting our kernels behind torch's own attention, and the way back: names, handles, other libraries, cuDNN's switch,
and the torches that are refused."""

from __future__ import annotations

import types

import pytest
import torch
from torch.library import Library
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls, restore_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from cuteforge import ContractError, UnsupportedError
from cuteforge.integrations import torch_sdpa, versions
from cuteforge.integrations.torch_sdpa import CUDNN, FORWARD, register
from helpers import aten


@pytest.fixture(autouse=True)
def torch_as_it_was():
    yield
    assert current_flash_attention_impl() is None
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.fixture(params=[False, True], ids=["one override", "any number of overrides"])
def overrides(request, monkeypatch):
    """A torch whose libraries, unless told, refuse what Python has overridden already, like 2.11, or take it."""
    impl = Library.impl

    def as_asked(self, *args, allow_override=request.param, **options):
        return impl(self, *args, allow_override=allow_override, **options)

    monkeypatch.setattr(Library, "impl", as_asked)
    return request.param


def overridden(name=FORWARD, by=torch_sdpa.__file__):
    """Whether a library of that file serves torch's operator on CUDA tensors."""
    table = torch._C._dispatch_dump_table(f"aten::{name}").splitlines()
    return any(line.startswith("CUDA: registered at") and by in line for line in table)


def test_register_serves_and_the_handle_goes_back():
    handle = register()
    assert handle.is_active
    assert current_flash_attention_impl() == "cuteforge"
    assert all(overridden(name) for name in torch_sdpa.kernels_of(None))
    handle.remove()
    assert not handle.is_active
    assert not any(overridden(name) for name in torch_sdpa.kernels_of(None))
    handle.remove()


def test_registering_twice_is_free_and_the_second_handle_takes_nothing_back():
    with register() as first:
        with register():
            assert first.is_active
        assert first.is_active
        assert overridden()
    assert not overridden()


def test_of_two_names_the_last_one_serves_and_gives_back_to_the_first(overrides):
    with register("one") as one, register("two") as two:
        assert two.is_active
        assert not one.is_active
        two.remove()
        assert one.is_active
        assert overridden()
    assert {"one", "two"} <= set(list_flash_attention_impls())


def test_a_library_that_was_there_before_serves_again_after_the_way_back(overrides):
    theirs = Library("aten", "IMPL", "CUDA")
    theirs.impl(FORWARD, lambda *_, **__: None, "CUDA")
    with register("one"), register("two") as two:
        assert two.is_active
        assert overridden()
    assert not overridden()
    assert overridden(by=__file__)
    del theirs
    assert not overridden(by=__file__)


def test_the_simulated_torch_does_refuse(overrides):
    """Without this the tests above could not fail."""
    first, second = (Library("aten", "IMPL", "CUDA") for _ in range(2))
    first.impl(FORWARD, lambda *_, **__: None, "CUDA")
    if overrides:
        second.impl(FORWARD, lambda *_, **__: None, "CUDA")
    else:
        with pytest.raises(RuntimeError, match="already a kernel registered from python"):
            second.impl(FORWARD, lambda *_, **__: None, "CUDA")
    del first, second


def test_one_in_the_other_the_inner_one_serves_and_hands_on_to_the_outer_one(monkeypatch, overrides):
    q, k, v = (x.transpose(1, 2) for x in aten.draw((2, 20, 4, 16), *[(2, 20, 2, 16)] * 2))
    with aten.served(monkeypatch) as outer, aten.served(monkeypatch) as inner:
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert (len(outer.ops), len(inner.ops)) == (0, 1)
        inner.is_off = True
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert (len(outer.ops), len(inner.ops)) == (1, 1)


def test_a_handle_that_something_else_has_replaced_does_nothing():
    one = register("one")
    with register("two") as two:
        one.remove()
        assert two.is_active
    one.remove()


def test_torchs_own_way_back_works_too():
    handle = register()
    restore_flash_attention_impl()
    assert not handle.is_active
    assert not overridden()
    handle.remove()


def test_an_error_in_the_block_goes_back():
    with pytest.raises(ZeroDivisionError), register():
        _ = 1 / 0
    assert not overridden()


def test_cudnn_stays_on_unless_it_is_asked_for():
    with register():
        assert torch.backends.cuda.cudnn_sdp_enabled()
    with register(keep_cudnn=False):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with register("other"):
            assert torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_that_was_off_stays_off():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with register(keep_cudnn=False):
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("name", ["FA4", "", None, 3])
def test_a_name_that_is_torchs_or_none_is_refused(name):
    with pytest.raises(ContractError, match=r"^name: wanted"):
        register(name)


def test_an_active_name_keeps_what_it_was_registered_with():
    with register(), pytest.raises(ContractError, match="keep_cudnn: wanted True, with which 'cuteforge' is active"):
        register(keep_cudnn=False)


def test_registering_warns_of_nothing(recwarn):
    with register():
        pass
    assert not recwarn.list


def test_an_operator_that_takes_other_arguments_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"torch: wanted aten::_flash_attention_forward\(query, mask\), got"):
        versions.require_torch_operator(FORWARD, ("query", "mask"))
    with pytest.raises(UnsupportedError, match="torch: wanted one with aten::_no_such_operator, got"):
        versions.require_torch_operator("_no_such_operator", ())


def test_a_torch_without_the_later_operators_is_taken(monkeypatch):
    """2.11 has none that writes to an output that is given."""
    has = {name: getattr(torch.ops.aten, name) for name in (FORWARD, CUDNN)}
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "aten", types.SimpleNamespace(**has))
        torch_sdpa._check_operators()
        assert set(torch_sdpa.kernels_of(None)) == set(has)


def test_a_torch_without_the_registry_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    with pytest.raises(
        UnsupportedError, match=r"torch: wanted one with torch.nn.attention.activate_flash_attention_impl"
    ):
        versions.require_torch_registry()

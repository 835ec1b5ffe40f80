"""What tests of the tiles of other GPUs run: that it is other GPUs' choice. No GPU, nothing compiled."""

import pytest
import torch

from cuteforge import GQADecode, TensorSpec
from cuteforge.families.attention.forward.config import Traits
from cuteforge.families.attention.work.traits import limits_of
from cuteforge.runtime.arch import resolve_arch
from fe_api.attention import test_tiles_of_other_gpus as dense
from fe_api.paged_attention import test_tiles_of_other_gpus as paged
from helpers import attention_samples as samples
from helpers import other_gpus, rotary, stub_gpu
from helpers.attention import BASE, MAIN

FOUND = {
    "decode": dense.DECODE,
    "prefill": dense.PREFILL,
    "packed": dense.PACKED,
    "options": dense.WITH_OPTIONS,
    "pages": paged.CHOICES,
}
HERE = resolve_arch(other_gpus.HERE, None)


@pytest.mark.parametrize("kind", FOUND)
def test_choices_are_the_portable_kernel_with_what_no_sm_90a_gets(kind):
    """But for decodes that sm_90a only cuts otherwise, and which have many SMs as B200 has."""
    assert FOUND[kind]
    for choice in FOUND[kind]:
        assert isinstance(choice.traits, Traits)
        if choice.is_own:
            assert choice.traits.splits and "sm_89" not in choice.label


@pytest.mark.parametrize("kind", FOUND)
def test_each_kernel_is_compiled_by_one_test_and_all_gpus_are_there(kind):
    traits = [choice.traits for choice in FOUND[kind]]
    assert len(set(traits)) == len(traits)
    archs = {arch for choice in FOUND[kind] for arch, _ in choice.runs}
    # what RTX 5090 gets in prefill, L20 or B200 has got already
    assert archs >= set(other_gpus.OTHERS.values()) - {"sm_120a"}
    assert "sm_120a" in archs or not any(choice.traits.splits for choice in FOUND[kind])


def test_gpus_that_choose_alike_for_a_call_are_one_run():
    """In prefill L20 and RTX 5090; in decode each has a plan of its own, by its SMs."""
    x = samples.dense(MAIN, 3, 1, 1000, 2, BASE)
    prefill, decode = (other_gpus.choices([("call", samples.op_of(kind, x))]) for kind in ("prefill", "decode"))
    assert [arch for choice in prefill for arch, _ in choice.runs] == ["sm_80", "sm_89", "sm_100a"]
    assert sorted(arch for choice in decode for arch, _ in choice.runs) == sorted(other_gpus.OTHERS.values())


@pytest.fixture
def launched(monkeypatch):
    """The arguments of launches on CPU tensors that pass for those of a GPU."""
    launches = []
    monkeypatch.setattr(other_gpus, "load_kernel", lambda key: stub_gpu.StubKernel(key, launches))
    monkeypatch.setenv("CUTEFORGE_ARCH", other_gpus.HERE)
    stub_gpu.pass_for_gpu(monkeypatch)
    stub_gpu.pass_for_gpu_in_tables(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    return launches


@pytest.mark.parametrize("arch_name", other_gpus.OTHERS.values())
def test_a_launch_is_told_the_other_gpus_limits_and_compiled_for_the_one_here(arch_name, launched, monkeypatch):
    loaded, there = [], resolve_arch(arch_name, None)
    stub = other_gpus.load_kernel
    monkeypatch.setattr(other_gpus, "load_kernel", lambda key: loaded.append(key) or stub(key))
    q, k = torch.zeros(2, 1, 8, 128, dtype=torch.bfloat16), torch.zeros(2, 64, 2, 128, dtype=torch.bfloat16)
    with other_gpus.chosen_for(arch_name) as asked:
        op = GQADecode(q, k, k, q).compile()
        op.execute(q, k, k, torch.empty_like(q), workspace=torch.empty(op.workspace_bytes(), dtype=torch.uint8))
    (key,) = asked
    assert key.arch == arch_name and [(other.traits, other.arch) for other in loaded] == [(key.traits, other_gpus.HERE)]
    limits = limits_of(key.traits, there, 0)
    ((*_, max_ctas, max_clustered, most_splits, _, _, _, _, _),) = launched
    assert (max_ctas, max_clustered, most_splits) == limits != limits_of(key.traits, HERE, 0)


def test_a_choice_that_is_another_than_expected_fails(launched):
    x = samples.dense(MAIN, 3, 1, 1000, 2, BASE)
    choice, *_ = other_gpus.choices([("call", samples.op_of("decode", x))])
    arch_name = choice.runs[0][0]
    with choice.on(arch_name):
        samples.op_of("decode", x).compile()
    with pytest.raises(AssertionError), choice.on(arch_name):
        samples.op_of("decode", x, lse=False).compile()
    with pytest.raises(AssertionError), choice.on(arch_name):
        pass


def test_rotary_chooses_alike_for_all_gpus():
    """So that its own tests are those of all GPUs; if this fails, it needs a table as those of attention."""
    for config in rotary.CONFIGS:
        x = TensorSpec((37, 4, config.d), str(config.dtype).removeprefix("torch."))
        half = config.rotary_dim // 2
        table, positions = TensorSpec((37, half, 2), "float32"), None
        if config.index is not None:
            table = (TensorSpec((99, half), "float32"),) * 2
            positions = TensorSpec((37,), str(config.index).removeprefix("torch."))
        op = rotary.RotaryEmbedding(x, table, x, positions, interleaved=config.interleaved)
        assert not other_gpus.choices([(config, op)])
        assert op._scalars(HERE) == ()

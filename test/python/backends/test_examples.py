"""The examples run, and their own checks would notice a wrong result."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SMALL_LLAMA = ("--layers", "2", "--new-tokens", "6", "--requests", "2", "--hidden", "128", "--intermediate", "64")
SMALL_COMPRESSOR = ("--steps", "3", "--hidden", "16", "--dim", "8")
ON_CPU = ("--device", "cpu")


def load(name: str, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look up the module of their annotations.
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny_llama(monkeypatch):
    return load("tiny_llama", monkeypatch)


@pytest.fixture
def compressor(monkeypatch):
    return load("deepseek_v4_compressor", monkeypatch)


def test_backends_of_a_cpu_agree_on_every_token(tiny_llama, capsys):
    assert tiny_llama.main([*ON_CPU, *SMALL_LLAMA]) == 0
    printed = capsys.readouterr().out
    assert "loop, eager" in printed and "torch_native, eager" in printed
    assert "all tokens agree" in printed and "DIFFER" not in printed


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(), ("--heads", "16", "--kv-heads", "2", "--head-dim", "64", "--layers", "3")])
def test_backends_of_a_gpu_agree_eager_and_graphed(tiny_llama, capsys, shape):
    assert tiny_llama.main(["--device", "cuda", "--new-tokens", "12", *shape]) == 0
    printed = capsys.readouterr().out
    for run in ("loop, eager", "cuda, eager", "cuda, graph", "torch_native, eager", "torch_native, graph"):
        assert run in printed


@pytest.mark.parametrize("layer", [0, 1])
def test_decoded_keys_stored_for_another_request_are_noticed(tiny_llama, monkeypatch, capsys, layer):
    """In one layer only, and only keys of new tokens: what a wrong slot or page would do."""
    right = tiny_llama.LoopBackend.fwd_decode

    def mixed_up(self, q, k, v, kv_cache, layer_id, *rest):
        return right(self, q, k.roll(1, 0) if layer_id == layer else k, v, kv_cache, layer_id, *rest)

    monkeypatch.setattr(tiny_llama.LoopBackend, "fwd_decode", mixed_up)
    # So few tokens back that those that decode stored are recalled.
    monkeypatch.setattr(tiny_llama, "LONGEST_LAG", 2)
    assert tiny_llama.main([*ON_CPU, *SMALL_LLAMA, "--new-tokens", "8"]) == 1
    assert "TOKENS DIFFER" in capsys.readouterr().out


def test_tokens_lead_by_more_than_bf16_rounding_moves_a_logit(tiny_llama):
    """One ulp of bf16 is 0.8 %: a lead of many makes greedy tokens comparable between backends that round
    differently."""
    generator = torch.Generator().manual_seed(1)
    config = tiny_llama.Config(256, 512, 4, 8, 4, 32, 256, 64)
    model = tiny_llama.Llama(config)
    tiny_llama.set_recalling_weights(model, (3, 1, 7, 2), generator)
    prompt = torch.randint(256, (20,), generator=generator).tolist()
    expected = tiny_llama.recalled(prompt, 13, 8, 256)
    for dtype in (torch.float32, torch.bfloat16):
        run = tiny_llama.generate(model.to(dtype), [prompt], 8, use_graphs=False, name="")
        assert run.tokens.tolist() == [expected]
        assert run.smallest_lead > 0.2


def test_weights_of_a_file_named_as_in_llama_checkpoints(tiny_llama, tmp_path, capsys):
    """A prefix, no biases, and a head tied to the embedding, as in published checkpoints."""
    torch.manual_seed(0)
    config = tiny_llama.Config(128, 64, 2, 8, 4, 32, 256, 64, has_bias=False)
    tensors = tiny_llama.Llama(config).state_dict()
    del tensors["lm_head.weight"]
    torch.save({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "weights.pt")
    assert tiny_llama.main([*ON_CPU, *SMALL_LLAMA, "--weights", str(tmp_path / "weights.pt")]) == 0
    assert "all tokens agree" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compressors_train(compressor, capsys, device):
    assert compressor.main(["--device", device, *SMALL_COMPRESSOR]) == 0
    printed = capsys.readouterr().out
    assert "CSA" in printed and "HCA" in printed and "FAILED" not in printed


def test_a_wrong_gradient_is_noticed(compressor, monkeypatch, capsys):
    """A pooling that forgets the bias of the places in its window has the right shapes and still a falling loss."""
    right = compressor.pool
    monkeypatch.setattr(compressor, "pool", lambda kv, score, ape, *rest: right(kv, score, ape * 0.5, *rest))
    assert compressor.main([*ON_CPU, *SMALL_COMPRESSOR]) == 1
    assert "FAILED" in capsys.readouterr().out

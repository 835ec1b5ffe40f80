"""`explain`: what a call of given sizes runs on an architecture, on a machine without a GPU."""

from __future__ import annotations

import pytest

from cuteforge.__main__ import main


def explained(capsys, *arguments: str, status: int = 0) -> str:
    assert main(["explain", *arguments]) == status
    return capsys.readouterr().out


def test_decode(capsys):
    text = explained(capsys, "attention", "--arch", "sm_90a", "--keys", "512")
    assert "attention: cuda (by priority)" in text
    assert "plan    64 CTAs of 128 threads, clusters of 8, 8 splits" in text


def test_prefill_with_the_kernel_of_the_architecture(capsys):
    sizes = ("--tokens", "4096", "--keys", "4096", "--causal")
    assert "attention.forward_sm90a.kernel" in explained(capsys, "attention", "--arch", "sm_90a", *sizes)
    assert "attention.forward.kernel, sm_80" in explained(capsys, "attention", "--arch", "sm_80", *sizes)


@pytest.mark.parametrize(("tokens", "word"), [("1", "decode"), ("4", "decode"), ("300", "prefill")])
def test_pages(capsys, tokens, word):
    sizes = ("--requests", "3", "--keys", "1000", "--page-size", "16", "--tokens", tokens)
    assert f"why     {word}" in explained(capsys, "attention", "--arch", "sm_90a", *sizes)


def test_rotary_and_compressor(capsys):
    assert "rotary.kernel, sm_100a" in explained(
        capsys, "rotary", "--arch", "sm_100a", "--rotary-dim", "64", "--halves"
    )
    text = explained(capsys, "compress", "--arch", "sm_90a", "--ratio", "128", "--coff", "1")
    assert "csa.compressor.forward" in text
    assert "32 rows" in text


def test_what_no_kernel_serves_says_who_does_and_why(capsys):
    text = explained(capsys, "attention", "--arch", "sm_90a", "--dtype", "float32")
    assert "attention: torch_native" in text
    assert "wanted dtype bfloat16 or float16" in text
    assert "plan" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("attention", "--arch", "sm_90a", "--heads", "6", "--kv-heads", "4", "--page-size", "16"), "Hq"),
        (("rotary", "--arch", "sm_90a", "--dtype", "int8"), "--dtype: wanted one of bfloat16"),
    ],
)
def test_sizes_that_make_no_call_are_refused_by_name(capsys, arguments, said):
    assert main(["explain", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_without_an_architecture_or_a_gpu_it_says_what_to_give(capsys, monkeypatch):
    monkeypatch.delenv("CUTEFORGE_ARCH", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["explain", "attention"]) == 1
    assert 'pass arch="sm_90a"' in capsys.readouterr().err

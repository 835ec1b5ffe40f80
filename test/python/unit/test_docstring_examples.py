"""Every public name has an example in its docstring, and the examples run and print what they say.

Without a GPU the examples that ask for one run on `reference_kernels.stand_in_gpu`: every check of a call is made, and
a launch computes the
reference in place of the kernel.
"""

from __future__ import annotations

import pytest
import torch

from helpers import examples
from helpers.floor import floor_of
from helpers.policy import restored_registry
from helpers.reference_kernels import stand_in_gpu

NAMES = sorted(examples.public_names())
METHODS = [(name, method) for name in NAMES for method in examples.methods_of(name)]
EXAMPLES = examples.all_examples()
# Examples with tensors on a GPU that launch no kernel of ours.
ONLY_ASK = {
    "APIBase.check_call",
    "APIBase.check_given",
    "APIBase.compile",
    "AttentionOp.workspace_bytes",
    "AttentionOp.workspace_bytes_on",
    "CSACompressorBackward.workspace_bytes_on",
    "DecodeGraph.capture",
}
ON_GPU = [name for name, text in EXAMPLES.items() if examples.needs_gpu(text)]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Nothing that a user has set, and nothing that an example leaves behind."""
    for variable in ("CUTEFORGE_BACKEND", "CUTEFORGE_KERNELS", "CUTEFORGE_CHECK"):
        monkeypatch.delenv(variable, raising=False)
    torch.manual_seed(0)
    with restored_registry():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_public_name_has_an_example(name):
    assert examples.code_of(examples.docstring_of(name))


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_public_method_has_an_example_or_is_in_that_of_its_class(name, method):
    assert examples.is_shown(name, method)


def test_example_that_prints_something_else_fails():
    with pytest.raises(pytest.fail.Exception, match="Expected:\n    3\nGot:\n    2"):
        examples.run("sum", ">>> 1 + 1\n3\n")


def test_text_without_a_statement_is_no_example():
    assert examples.code_of("Adds numbers.\n\nExamples:\n    add(1, 1) gives 2\n") == ""


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example_runs_without_a_gpu(name, monkeypatch):
    text = EXAMPLES[name]
    if "transformers" in examples.code_of(text):
        pytest.importorskip("transformers", minversion=floor_of("transformers"))
    if name not in ON_GPU:
        return examples.run(name, text)
    with stand_in_gpu(monkeypatch) as launches:
        examples.run(name, text)
    assert bool(launches) is (name not in ONLY_ASK)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(ON_GPU))
def test_example_runs_on_a_gpu(name):
    examples.run(name, EXAMPLES[name])
    torch.cuda.synchronize()

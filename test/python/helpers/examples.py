"""The examples in the docstrings of public names: where they are, and how they run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import cuteforge

ROOT = Path(__file__).resolve().parents[3]
_DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_ON_GPU = re.compile(r'device"?[=:] ?"cuda')


def public_objects() -> dict[str, tuple[Any, str]]:
    """The public names, and those that the reference lists: ``name -> (object, module)``."""
    shown = [path.rpartition(".") for path in _DIRECTIVE.findall((ROOT / "docs" / "reference.md").read_text())]
    listed = {name: module for module, _, name in shown if not _is_module(f"{module}.{name}")}
    # two listed names are called Request or register; a name of the package says which object it is
    modules = {**listed, **cuteforge._MODULE_OF}
    return {name: (getattr(importlib.import_module(module), name), module) for name, module in sorted(modules.items())}


def _is_module(path: str) -> bool:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        return False
    return True


def docstring_of(name: str) -> str:
    """Of a public name; a name that is neither a class nor a function has the text that follows its assignment."""
    value, module = public_objects()[name]
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for statement, following in zip(body, body[1:]):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(getattr(target, "id", None) == name for target in targets) and isinstance(following, ast.Expr):
            text = getattr(following.value, "value", "")
            return inspect.cleandoc(text) if isinstance(text, str) else ""
    return ""


def methods_of(name: str) -> list[str]:
    """Public methods and properties of a class, those that it inherits from the package included."""
    value, _ = public_objects()[name]
    if not inspect.isclass(value):
        return []
    found = {}
    for owner in reversed([each for each in value.__mro__ if each.__module__.startswith("cuteforge")]):
        for method, member in vars(owner).items():
            is_code = inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
            if is_code and (method == "__call__" or not method.startswith("_")):
                found[method] = member
    return sorted(found)


def method_docstring(name: str, method: str) -> str:
    """Of a method; one that overrides another without a text of its own has that one's."""
    return inspect.getdoc(getattr(public_objects()[name][0], method)) or ""


def owner_of(name: str, method: str) -> str:
    """The class whose text documents a method: the last one that has a text."""
    for owner in public_objects()[name][0].__mro__:
        member = vars(owner).get(method)
        if member is not None and getattr(member, "__doc__", None):
            return owner.__name__
    return name


def code_of(docstring: str) -> str:
    """The statements of the examples in a text; empty without any."""
    return "".join(example.source for example in doctest.DocTestParser().get_examples(docstring))


def is_shown(name: str, method: str) -> bool:
    """Whether a method has an example of its own, or the example of its class uses it."""
    in_class = code_of(docstring_of(name))
    used = method in in_class if method == "__call__" else re.search(rf"\.{method}\b", in_class)
    return bool(used or code_of(method_docstring(name, method)))


def all_examples() -> dict[str, str]:
    """``id -> docstring`` of every text with an example, inherited ones once."""
    texts = {name: docstring_of(name) for name in public_objects()}
    for name in public_objects():
        for method in methods_of(name):
            texts[f"{owner_of(name, method)}.{method}"] = method_docstring(name, method)
    return {name: text for name, text in texts.items() if code_of(text)}


def needs_gpu(docstring: str) -> bool:
    """Whether an example asks for tensors on a GPU."""
    return bool(_ON_GPU.search(code_of(docstring)))


def run(name: str, docstring: str) -> None:
    """Run an example as a user would paste it, and fail with doctest's report where an output is not that of the text."""
    test = doctest.DocTestParser().get_doctest(docstring, {"__name__": "__example__"}, name, None, 0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    if report:
        pytest.fail("".join(report), pytrace=False)

"""The examples in the docstrings of public names: where they are, and how they run."""

from __future__ import annotations

import ast
import doctest
import functools
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


def public_names() -> dict[str, str]:
    """The public names, and those that the reference lists, each with its module.

    Of two with one name the second is called by its module too.
    """
    paths = _DIRECTIVE.findall((ROOT / "docs" / "reference.md").read_text())
    found: dict[str, str] = {}
    for module, _, name in (path.rpartition(".") for path in paths if _file_of(path) is None):
        found[name if found.get(name, module) == module else f"{module.rpartition('.')[2]}.{name}"] = module
    return dict(sorted({**found, **cuteforge._MODULE_OF}.items()))


def _file_of(module: str) -> Path | None:
    """The source of a module, None for what is no module. Importing it might need what it integrates with."""
    path = ROOT.joinpath("python", *module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@functools.cache
def _docstrings(module: str) -> dict[str, str]:
    """Of the functions, classes and variables of a module; a variable's is the text that follows its assignment."""
    body = ast.parse(_file_of(module).read_text()).body
    found = {}
    for statement, following in zip(body, [*body[1:], None]):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = ast.get_docstring(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and _is_text(following):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            found[ast.unparse(target)] = inspect.cleandoc(following.value.value)
    return {name: text for name, text in found.items() if text}


def _is_text(statement: Any) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def docstring_of(name: str) -> str:
    """Of a public name."""
    module = public_names()[name]
    name = name.rpartition(".")[2]
    if name in _docstrings(module):
        return _docstrings(module)[name]
    made_in = getattr(getattr(importlib.import_module(module), name), "__module__", "")
    return _docstrings(made_in).get(name, "") if made_in.startswith("cuteforge.") else ""


def class_of(name: str) -> type | None:
    """The class of a public name, None where it is none. One of an integration is not looked into:
    what it integrates with may be missing."""
    module = public_names()[name]
    value = None if module.startswith("cuteforge.integrations.") else getattr(importlib.import_module(module), name)
    return value if inspect.isclass(value) else None


def methods_of(name: str) -> list[str]:
    """Public methods and properties of a class, those that it inherits from the package included."""
    owners = getattr(class_of(name), "__mro__", ())
    members = {key: x for owner in owners if owner.__module__.startswith("cuteforge") for key, x in vars(owner).items()}
    kinds = (property, classmethod, staticmethod)
    return sorted(
        key
        for key, member in members.items()
        if (inspect.isfunction(member) or isinstance(member, kinds)) and (key == "__call__" or not key.startswith("_"))
    )


def method_docstring(name: str, method: str) -> str:
    """Of a method; one that overrides another without a text of its own has that one's."""
    return inspect.getdoc(getattr(class_of(name), method)) or ""


def _documented_as(name: str, method: str) -> str:
    """The class that has the text of a method, and the method."""
    owners: tuple[Any, ...] = class_of(name).__mro__
    owner = next((o for o in owners if getattr(vars(o).get(method), "__doc__", None)), owners[0])
    return f"{owner.__name__}.{method}"


def code_of(docstring: str) -> str:
    """The statements of the examples in a text; empty without any."""
    return "".join(example.source for example in doctest.DocTestParser().get_examples(docstring))


def is_shown(name: str, method: str) -> bool:
    """Whether a method has an example of its own, or the example of its class uses it."""
    in_class = re.search(rf"(\.|def ){method}\b", code_of(docstring_of(name)))
    return bool(in_class or code_of(method_docstring(name, method)))


def all_examples() -> dict[str, str]:
    """``id -> docstring`` of every text with an example, inherited ones once."""
    texts = {name: docstring_of(name) for name in public_names()}
    for name in public_names():
        texts |= {_documented_as(name, method): method_docstring(name, method) for method in methods_of(name)}
    return {name: text for name, text in texts.items() if code_of(text)}


def needs_gpu(docstring: str) -> bool:
    """Whether an example asks for tensors on a GPU."""
    return bool(_ON_GPU.search(code_of(docstring)))


def run(name: str, docstring: str) -> None:
    """Run an example as a user would paste it; fail with doctest's report where an output is not that of the text."""
    test = doctest.DocTestParser().get_doctest(docstring, {"__name__": "__example__"}, name, None, 0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    if report:
        pytest.fail("".join(report), pytrace=False)

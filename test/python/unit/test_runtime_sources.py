"""Which files decide a kernel's key: those that it is traced from, whatever else changes in the package."""

import ast
import shutil
import time
from pathlib import Path

import pytest

import cuteforge
from cuteforge.runtime import sources
from cuteforge.runtime.sources import Import, find_imports, kernel_modules, read_kernel_sources, read_source_digest
from helpers.kernel_keys import kernel_keys

PACKAGE = Path(cuteforge.__file__).parent
BUILDERS = {name: key.builder for name, key in kernel_keys().items()}
# It takes 10 ms, with a parser 100. The fastest of five, in time of the processor.
BUDGET_S = 0.05


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The package's sources in a folder of their own, which may be edited."""
    root = tmp_path / "cuteforge"
    shutil.copytree(PACKAGE, root, ignore=shutil.ignore_patterns("__pycache__"))
    sources.forget()
    roots_of = sources._roots_of
    monkeypatch.setattr(sources, "_roots_of", lambda name: (root,) if name == "cuteforge" else roots_of(name))
    yield root
    sources._file_of.cache_clear()


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


# What changes a key.


@pytest.mark.parametrize("edit", ["\n# a comment\n", "\nNEW = 1\n"])
@pytest.mark.parametrize("room", ["cli", "backends", "serving", "integrations"])
def test_a_change_where_no_kernel_is_traced_from_changes_no_key(copied, room, edit):
    before = {name: read_kernel_sources(builder) for name, builder in BUILDERS.items()}
    for path in (copied / room).rglob("*.py"):
        append(path, edit)
    assert {name: read_kernel_sources(builder) for name, builder in BUILDERS.items()} == before


@pytest.mark.parametrize("name", BUILDERS)
def test_a_change_in_any_file_that_a_kernel_imports_changes_its_key(copied, name):
    builder = BUILDERS[name]
    digests = {read_kernel_sources(builder)["cuteforge"]}
    modules = kernel_modules(builder)
    assert len(modules) > 10
    for i, path in enumerate(modules.values(), 2):
        append(path, "\nNEW = 1\n")
        digests.add(read_kernel_sources(builder)["cuteforge"])
        assert len(digests) == i, path


@pytest.mark.parametrize("name", BUILDERS)
def test_what_calls_a_kernel_is_not_in_its_key(name):
    modules = kernel_modules(BUILDERS[name])
    callers = ("api", "wrapper", "torch_ops", "reference", "base", "explain", "compile_cache", "disk_cache")
    assert [module for module in modules if module.rpartition(".")[2] in callers] == []


def test_an_import_added_inside_a_function_joins_the_key(copied):
    builder = BUILDERS["rotary"]
    (copied / "device" / "added.py").write_text("X = 1\n")
    append(copied / "families" / "rotary" / "kernel.py", "\ndef f():\n    from cuteforge.device.added import X\n")
    before = read_kernel_sources(builder)
    assert "cuteforge.device.added" in kernel_modules(builder)
    append(copied / "device" / "added.py", "Y = 1\n")
    assert read_kernel_sources(builder) != before


def test_a_file_renamed_changes_the_key(copied):
    builder = BUILDERS["rotary"]
    before = read_kernel_sources(builder)
    kernel = copied / "families" / "rotary" / "kernel.py"
    (copied / "device" / "traced.py").rename(copied / "device" / "told.py")
    kernel.write_text(kernel.read_text().replace("cuteforge.device.traced", "cuteforge.device.told"))
    sources._file_of.cache_clear()
    assert read_kernel_sources(builder) != before


def test_a_kernel_of_another_package_has_all_its_files_and_what_they_import(copied, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kernel.py").write_text("from cuteforge.device.math import select\n")
    (mine / "notes.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = read_kernel_sources("mine.kernel:build")
    append(mine / "notes.py", "X = 1\n")
    with_notes = read_kernel_sources("mine.kernel:build")
    assert with_notes["cuteforge"] == before["cuteforge"]
    assert with_notes["mine"] != before["mine"]
    append(copied / "device" / "math.py", "X = 1\n")
    assert read_kernel_sources("mine.kernel:build")["cuteforge"] != before["cuteforge"]
    append(copied / "device" / "copy.py", "X = 1\n")
    assert read_kernel_sources("mine.kernel:build")["mine"] == with_notes["mine"]


def test_a_builder_that_is_not_there_is_refused_by_name():
    with pytest.raises(ModuleNotFoundError, match=r"cuteforge\.no\.kernel"):
        read_kernel_sources("cuteforge.no.kernel:build")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        read_kernel_sources("not_there_at_all.kernel:build")


def test_finding_them_costs_a_start_little():
    def seconds():
        sources.forget()
        started = time.process_time()
        sources.kernel_sources(BUILDERS["attention sm_90a"])
        return time.process_time() - started

    assert min(seconds() for _ in range(5)) < BUDGET_S


# The search for import statements.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a", [Import("", ("a",))]),
        ("import a.b as c, d", [Import("", ("a.b", "d"))]),
        ("from a.b import c as d, e", [Import("a.b", ("c", "e"))]),
        ("from a import *", [Import("a", ())]),
        ("from . import a", [Import(".", ("a",))]),
        ("from .. b import a", [Import("..b", ("a",))]),
        ("from .b import a", [Import(".b", ("a",))]),
        ("from a import (\n    b,  # (why)\n    c,\n)", [Import("a", ("b", "c"))]),
        ("from a import (b,\n # no d)\n c)\n", [Import("a", ("b", "c"))]),
        ("from a import b, \\\n    c", [Import("a", ("b", "c"))]),
        ("from a \\\n    import b", [Import("a", ("b",))]),
        ("from a \\\r\n    import b", [Import("a", ("b",))]),
        ("import a, \\\n    b", [Import("", ("a", "b"))]),
        ("import a; import b", [Import("", ("a",)), Import("", ("b",))]),
        ("if x: from a import b; import c", [Import("a", ("b",)), Import("", ("c",))]),
        ("def f():\n\timport a  # because", [Import("", ("a",))]),
        ("try:\n    import a\nexcept ImportError: import b", [Import("", ("a",)), Import("", ("b",))]),
        ("class A:\n    from a import b", [Import("a", ("b",))]),
        ("important = 1\nx = 'import a'\nreimport(a)", []),
    ],
)
def test_each_form_of_an_import_is_found(text, found):
    assert list(find_imports(text.encode())) == found


def parsed(content: bytes):
    """The import statements as Python's parser sees them."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            yield Import("", tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names if alias.name != "*")
            yield Import("." * node.level + (node.module or ""), names)


def test_no_import_of_the_package_is_missed():
    paths = list(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    for path in paths:
        content = path.read_bytes()
        assert set(parsed(content)) <= set(find_imports(content)), path


# The digest of a whole package, which benchmarks name.


def test_source_digest_sees_names_and_contents_of_python_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "some_package"
    (package / "sub").mkdir(parents=True)
    seen = set()

    def changed():
        digest = read_source_digest("some_package")
        new = digest not in seen
        seen.add(digest)
        return new

    (package / "__init__.py").write_text("")
    assert changed()
    (package / "sub" / "a.py").write_text("x = 1")
    assert changed()
    (package / "sub" / "a.py").write_text("x = 2")
    assert changed()
    (package / "sub" / "a.py").rename(package / "sub" / "b.py")
    assert changed()
    (package / "note.txt").write_text("")
    assert not changed()


def test_source_digest_of_modules_and_folders_without_init(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lone_module.py").write_text("x = 1")
    (tmp_path / "bare_folder").mkdir()
    (tmp_path / "bare_folder" / "a.py").write_text("x = 1")
    assert len({read_source_digest("lone_module"), read_source_digest("bare_folder"), sources.source_digest()}) == 3
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        read_source_digest("not_there_at_all")

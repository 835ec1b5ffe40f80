"""Finds the source files that a kernel is traced from, and digests them.

A trace executes the builder's module and what that imports, directly or not. These files decide the machine code; the
others of the package do not. They are found from the text of the files: nothing is imported for it.

Files are searched for import statements, not parsed: for the 44 files of prefill on sm_90a that takes 10 ms, reading
included, and `ast.parse` 95 ms. Every process pays it before it loads its first kernel from disk. The search finds
every statement that a parser finds, and sometimes a sentence that looks like one. That adds a file to the digest, and
never leaves one out. A unit test compares it with the syntax trees of all files of the package, and a compile test with
the modules that a process which compiles the kernel has really imported.

Why the digest is of bytes, comments included: to tell comments from code takes a parser again, and where the compiler
is asked for line numbers a comment does change the machine code. A comment in a file that a kernel is traced from
compiles it anew; a comment anywhere else does not.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = "cuteforge"

# What every build goes through: it passes the compiler its options.
_ALWAYS = ("cuteforge.runtime.cutlass_compat",)
# An import statement is the word, what stands before it in its line, and the names after it. It may follow a colon or a
# semicolon. A line may go on after a backslash, and names between parentheses, where there may be comments.
_WORD = re.compile(rb"import\b")
_BEFORE = re.compile(rb"(?:^|[:;])[ \t\f]*(?:from\b[ \t]*(?P<base>[\w. \t]*?)[ \t]*)?$")
_NAMES = re.compile(rb"[ \t]*\((?P<some>(?:[^()#]|#[^\n]*)*)\)|(?P<line>(?:\\\r?\n|[^\n;])*)")
_NO_NAMES = re.compile(rb"#[^\n]*|\bas\s+\w+")
_NAME = re.compile(rb"[\w.]+")


class Import(NamedTuple):
    """One import statement: `from base import names`, or with an empty base `import names`.

    A base may begin with dots.
    """

    base: str
    names: tuple[str, ...]


class SourceFile(NamedTuple):
    """What is known of a source file: the sha256 of its bytes, and its import statements."""

    sha256: str
    imports: tuple[Import, ...]


def source_digest(package: str = PACKAGE) -> str:
    """sha256 of all .py files of a top-level package or module (relative path and bytes), computed once a process."""
    return _cached_source_digest(package)


def read_source_digest(package: str) -> str:
    """`source_digest` of the files as they are now."""
    named = [(name, path.read_bytes()) for name, path in _files_of(package)]
    digest = hashlib.sha256()
    for name, content in named:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


_cached_source_digest = functools.cache(read_source_digest)


def kernel_sources(builder: str) -> Mapping[str, str]:
    """The digests of what a kernel is traced from, by top-level package. Each file is read once a process.

    Of `cuteforge` it covers the files that the builder's module imports. Of another package that the builder is in, all
    files: how they are imported is not ours to know.

    Args:
        builder: "module:function".

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    return _cached_kernel_sources(builder)


def read_kernel_sources(builder: str) -> dict[str, str]:
    """`kernel_sources` of the files as they are now."""
    return _digests(builder, read_source_file, read_source_digest)


def forget() -> None:
    """Read every file again when it is next asked for, as a new process would."""
    for cached in (_cached_source_digest, _cached_kernel_sources, _cached_source_file, _file_of, _roots_of):
        cached.cache_clear()


@functools.cache
def _cached_kernel_sources(builder: str) -> Mapping[str, str]:
    return _digests(builder, _cached_source_file, source_digest)


def _digests(builder: str, read: Callable[[Path], SourceFile], digest_of: Callable[[str], str]) -> dict[str, str]:
    digest = hashlib.sha256()
    for module, path in sorted(kernel_modules(builder, read).items()):
        digest.update(f"{module}\0{read(path).sha256}\0".encode())
    package = builder.partition(".")[0].partition(":")[0]
    return {PACKAGE: digest.hexdigest()} | ({} if package == PACKAGE else {package: digest_of(package)})


def kernel_modules(builder: str, read: Callable[[Path], SourceFile] | None = None) -> dict[str, Path]:
    """The modules of `cuteforge` that a kernel is traced from, with their files.

    Args:
        builder: "module:function".
        read: what reads a file; None for `read_source_file`.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    read = read or read_source_file
    module = builder.partition(":")[0]
    package = module.partition(".")[0]
    roots: Iterable[str] = [module]
    if package == PACKAGE and _file_of(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    if package != PACKAGE:
        roots = (own for _, path in _files_of(package) for own in _mentioned(read(path)))
    return closure((*_ALWAYS, *roots), read)


def closure(roots: Iterable[str], read: Callable[[Path], SourceFile] | None = None) -> dict[str, Path]:
    """Every module of `cuteforge` that the modules `roots` import, directly or not, with its file; the roots too.

    Imports inside functions count, and those for type checkers. A package that a module lies in does not: its
    `__init__` runs, but no name of it is used. One that names are imported from does.

    What is no module of `cuteforge` is passed over.
    """
    read = read or read_source_file
    found: dict[str, Path] = {}
    pending = list(roots)
    while pending:
        module = pending.pop()
        path = _file_of(module)
        if path is None or module in found:
            continue
        found[module] = path
        pending.extend(_imported(module, path, read(path)))
    return found


def _imported(module: str, path: Path, source: SourceFile) -> Iterator[str]:
    """The modules of `cuteforge` that a module's statements name."""
    here = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for statement in source.imports:
        base = statement.base.lstrip(".")
        level = len(statement.base) - len(base)
        if level:
            parents = here[: len(here) - (level - 1)]
            base = ".".join([*parents, base] if base else parents)
        yield from _modules_of(base, statement.names)


def _mentioned(source: SourceFile) -> Iterator[str]:
    """The modules of `cuteforge` that a file of another package names."""
    for statement in source.imports:
        yield from _modules_of(statement.base, statement.names)


def _modules_of(base: str, names: tuple[str, ...]) -> Iterator[str]:
    """`from base import names`: each name that is a module, and `base` for the others."""
    if not base:
        yield from filter(_is_own, names)
    elif _is_own(base):
        path = _file_of(base)
        is_package = path is None or path.name == "__init__.py"
        modules = [f"{base}.{name}" for name in names if _file_of(f"{base}.{name}")] if is_package else []
        yield from modules
        if len(modules) < max(len(names), 1):
            yield base


def read_source_file(path: Path) -> SourceFile:
    """A source file as it is now."""
    content = path.read_bytes()
    return SourceFile(hashlib.sha256(content).hexdigest(), tuple(find_imports(content)))


_cached_source_file = functools.cache(read_source_file)


def find_imports(content: bytes) -> Iterator[Import]:
    """Every import statement in the text of a source file, and what looks like one."""
    for word in _WORD.finditer(content):
        before = _BEFORE.search(_line_up_to(content, word.start()))
        if before is None:
            continue
        names = _NAMES.match(content, word.end())
        listed = _NO_NAMES.sub(b"", names["line"] if names["some"] is None else names["some"])
        base = (before["base"] or b"").decode().replace(" ", "")
        yield Import(base, tuple(name.decode() for name in _NAME.findall(listed)))


def _line_up_to(content: bytes, end: int) -> bytes:
    """What stands before `end` in its line, with the lines that go on there after a backslash."""
    begin = content.rfind(b"\n", 0, end) + 1
    while content.endswith((b"\\\n", b"\\\r\n"), 0, begin):
        begin = content.rfind(b"\n", 0, begin - 1) + 1
    return content[begin:end].replace(b"\r\n", b"\n").replace(b"\\\n", b" ")


def _is_own(module: str) -> bool:
    return module == PACKAGE or module.startswith(PACKAGE + ".")


@functools.cache
def _roots_of(package: str) -> tuple[Path, ...]:
    """Directories of a top-level package, or the file of a module. Its code is not run.

    Raises:
        ModuleNotFoundError: there is none.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    if spec.submodule_search_locations is not None:
        return tuple(Path(path) for path in spec.submodule_search_locations)
    return (Path(spec.origin),) if spec.origin else ()


def _files_of(package: str) -> list[tuple[str, Path]]:
    """Every .py file of a top-level package or module, with its relative path."""
    roots = _roots_of(package)
    if len(roots) == 1 and roots[0].is_file():
        return [(roots[0].name, roots[0])]
    return sorted((path.relative_to(root).as_posix(), path) for root in roots for path in root.rglob("*.py"))


@functools.cache
def _file_of(module: str) -> Path | None:
    """The file of a module of `cuteforge`, found without importing its packages; None where there is none."""
    if not _is_own(module):
        return None
    *parents, name = module.split(".")[1:] or [""]
    for root in _roots_of(PACKAGE):
        stem = os.path.join(root, *parents, name)
        for path in (stem + ".py", os.path.join(stem, "__init__.py")):
            if os.path.isfile(path):
                return Path(path)
    return None

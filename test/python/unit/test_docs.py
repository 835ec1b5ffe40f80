"""The docs hold: their code runs, their links resolve, and their tables say what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from cuteforge.runtime import env
from helpers.floor import floor_of
from helpers.policy import restored_registry

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")])
WITH_CODE = [p for p in PAGES if "```python" in p.read_text() and "dev" not in p.parts]
# A block without a marker needs a GPU.
BLOCK = re.compile(r"(?:<!-- runs: (?P<where>\w+) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ENVIRONMENT = re.compile(r"<!-- environment: begin -->\n(.*?)<!-- environment: end -->", re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
each_page_with_code = pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.relative_to(ROOT).as_posix())


def blocks(page: Path) -> list[tuple[str, str]]:
    """``(where it runs, code)``, the code on the lines it has in the page."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, match.start("code"))
        found.append((match["where"] or "gpu", "\n" * lines_before + match["code"]))
    return found


def run_blocks(page: Path, places: tuple[str, ...], monkeypatch, tmp_path) -> None:
    """Run the blocks of a page in order, in one namespace, with a cache of their own; a backend that they register is
    forgotten."""
    if "from transformers import" in page.read_text():
        pytest.importorskip("transformers", minversion=floor_of("transformers"))
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "cache"))
    namespace = {"__name__": "__docs__"}
    with restored_registry():
        for where, code in blocks(page):
            if where in places:
                exec(compile(code, str(page), "exec"), namespace)


def test_pages_with_code_are_found():
    names = {p.relative_to(ROOT).as_posix() for p in WITH_CODE}
    assert {"README.md", "docs/quickstart.md", "docs/environment.md", "docs/api/csa.md"} <= names


@each_page_with_code
def test_every_block_is_found_and_says_where_it_runs(page):
    assert len(blocks(page)) == page.read_text().count("```python")
    assert {where for where, _ in blocks(page)} <= {"cpu", "gpu"}


@each_page_with_code
def test_code_runs_without_a_gpu_where_it_says_so(page, monkeypatch, tmp_path):
    run_blocks(page, ("cpu",), monkeypatch, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@each_page_with_code
def test_code_runs_on_a_gpu(page, monkeypatch, tmp_path):
    run_blocks(page, ("cpu", "gpu"), monkeypatch, tmp_path)
    torch.cuda.synchronize()


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@each_page
def test_every_relative_link_resolves(page):
    broken = []
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@each_page
def test_every_path_of_the_sources_in_the_docs_exists(page):
    """`runtime/env.py`, `families/csa/compressor/api.py:CSACompressorForward`: files and the names in them."""
    wrong = []
    for path, name in re.findall(r"`([\w/]+/\w+\.py)(?::([\w.]+))?", page.read_text()):
        candidates = [base / path for base in (ROOT, ROOT / "python" / "cuteforge", ROOT / "python", page.parent)]
        file = next((c for c in candidates if c.exists()), None)
        if file is None or (name and any(part not in file.read_text() for part in name.split("."))):
            wrong.append(f"{path}:{name}" if name else path)
    assert wrong == []


def default_of(variable: env.Variable) -> str:
    if variable.type == "size":
        return f"{variable.default // 1024**3} GiB"
    return {None: "unset", True: "1", False: "0"}.get(variable.default, str(variable.default))


def environment_rows() -> list[list[str]]:
    """Name, default, meaning and example, as the page has them."""
    (table,) = ENVIRONMENT.findall((ROOT / "docs" / "environment.md").read_text())
    header, rule, *rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()]
    assert header == ["variable", "default", "meaning", "example"]
    assert set(rule) == {"---"}
    return rows


def test_environment_page_is_the_table_of_the_code():
    wanted = [[f"`{v.name}`", default_of(v), v.meaning] for v in env.VARIABLES]
    assert [row[:3] for row in environment_rows()] == wanted


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda v: v.name)
def test_environment_page_has_an_example_that_is_accepted_and_changes_something(variable):
    (example,) = [row[3] for row in environment_rows() if row[0] == f"`{variable.name}`"]
    name, _, value = example.strip("`").partition("=")
    assert name == variable.name
    assert variable.parse(value) != variable.default


def test_no_other_page_repeats_the_table_of_variables():
    """Two tables would drift apart."""
    with_table = [page for page in PAGES if ENVIRONMENT.search(page.read_text())]
    assert with_table == [ROOT / "docs" / "environment.md"]


PROSE_WIDTH = 120


@each_page
def test_prose_is_at_most_120_columns_wide(page):
    """Tables, code, pictures and what a program wrote are as wide as they are."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if len(line) > PROSE_WIDTH]
    assert [line for line in lines if not line.startswith(("|", "!["))] == []


ARGUMENT = re.compile(r" {4}[\w`*, ]+( \(.*\))?:")
HEADING = re.compile(r"(Args|Attributes|Raises|Returns|Examples):")


def uneven_lines(docstring: str) -> list[str]:
    """Lines that a change of width has left in the wrong column: of a description, and of a list of arguments."""
    found, section, before = [], None, ""
    for line in docstring.splitlines():
        if heading := HEADING.match(line):
            section = heading[1]
        elif line and not line.startswith(" "):
            section = None
        elif re.match(r" {4}\S", line):
            is_argument = section not in ("Args", "Attributes") or ARGUMENT.match(line)
            follows_prose = section is None and before and not before.startswith(" ") and not before.endswith("::")
            if not is_argument or follows_prose:
                found.append(line.strip())
        before = line
    return found


def test_docstrings_are_indented_as_they_are_read():
    found = {}
    for path in sorted((ROOT / "python" / "cuteforge").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (docstring := ast.get_docstring(node)):
                if lines := uneven_lines(docstring):
                    found[f"{path.name}: {node.name}"] = lines
    assert found == {}


@pytest.mark.parametrize(
    "docstring",
    ["One line.\n    Too far in.", "Args:\n    x: first\n    part.", ">>> a\n    >>> b"],
    ids=["description", "argument", "example"],
)
def test_a_line_in_the_wrong_column_is_noticed(docstring):
    assert uneven_lines(docstring)

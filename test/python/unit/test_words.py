"""One word, one meaning: words that were retired stay away, and the code uses the words of docs/dev/naming.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "cuteforge"
NAMING = ROOT / "docs" / "dev" / "naming.md"

# Names of variables, parameters, attributes, functions and classes -> what to say instead.
NAMES = {
    "by": "divisors, or what the number is",
    "ends_turn": "hands_over",
    "group": "group_size, head_group, team, bundle",
    "groups": "head_groups, teams, bundles",
    "keep": "store, remember, or where (a choice between two values)",
    "parity": "phase",
    "place": "index, address, or the name of what it numbers",
    "places": "indices, addresses",
    "raw_stream": "stream_handle",
    "tell": "publish_work",
    "told": "read_work",
    "turn": "phase, step, or ping_pong",
    "turned": "rotated",
    "unit": "work_tile, thread, task",
    "units": "work_tiles, threads, tasks",
}
# In comments and docstrings -> what to say instead.
PHRASES = {
    r"copying warps?": "producer warps",
    r"multiplying warps?": "consumer warps",
    r"warps? that (copy|multipl)\w*": "producer warps, consumer warps",
    r"ring slots?": "stages",
    r"row lanes? of": "workers",
    r"turn(s|ed)? back": "rotate back",
    r"of (one|the same) place": "that read the same keys",
    r"keys of a unit|share units|a CTA a unit": "work tile",
}


# A key of the file that `warmup --config` reads: users have it.
PUBLIC = {"cli/families/attention.py": {"group"}}


def names_in(tree: ast.AST) -> list[tuple[int, str]]:
    """``(line, name)`` of all that a file names itself, without its leading underscores."""
    kinds = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.FunctionDef: "name", ast.ClassDef: "name"}
    found = [(node.lineno, getattr(node, kinds[type(node)])) for node in ast.walk(tree) if type(node) in kinds]
    return [(line, name.lstrip("_")) for line, name in found]


def prose_in(source: str) -> list[tuple[int, str]]:
    """``(line, text)`` of every comment and every string that is no code, the line breaks in it as spaces."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [(token.start[0], token.string) for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
    return [(line, " ".join(text.split())) for line, text in texts]


def retired_in(source: str, public: Collection[str] = ()) -> list[str]:
    names = sorted(set(names_in(ast.parse(source))))
    found = [f"{line}: {name}: say {NAMES[name]}" for line, name in names if name in NAMES and name not in public]
    for line, text in prose_in(source):
        for phrase, better in PHRASES.items():
            if match := re.search(rf"\b({phrase})\b", text):
                found.append(f"{line}: {match[0]}: say {better}")
    return found


def test_no_retired_word_comes_back():
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    found = {name: retired_in(path.read_text(), PUBLIC.get(name, ())) for name, path in paths.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "place = 1",
        "def f(unit): ...",
        "x.parity",
        "self._keep()",
        '"""The copying\n    warps."""',
        "x = 1  # turn back",
    ],
)
def test_retired_words_are_found(source):
    assert retired_in(source)


@pytest.mark.parametrize("source", ["placed = 1", "x = 1  # in place", "turns = 2  # of a circle", "at_once = 4"])
def test_innocent_english_is_not(source):
    assert retired_in(source) == []


def words_of_the_page() -> list[str]:
    """The first column of each table of words, and what is in backticks below the tile parameters."""
    page = NAMING.read_text()
    rows = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    words = [word.strip(" `") for row in rows for word in row.split(",")]
    parameters = re.search(r"## Tile parameters\n(.*?)\n## ", page, re.DOTALL)[1]
    return [word for word in words if word not in ("name", "word", "prefix", "---")] + re.findall(
        r"`(\w+)`", parameters
    )


def test_the_code_uses_every_word_of_the_page():
    sources = " ".join(" ".join(path.read_text().split()) for path in sorted(PACKAGE.rglob("*.py")))
    spellings = {word: re.escape(word).replace(r"\ ", "[ _-]").replace(r"\-", "[ _-]") for word in words_of_the_page()}
    prefixes = {"m", "g", "s", "r", "t"}
    unused = [
        w for w, x in spellings.items() if w not in prefixes and not re.search(rf"(\b|_){x}(s|\b|_)", sources, re.I)
    ]
    assert len(spellings) > 60 and unused == []


def test_every_word_is_defined_once():
    words = [word for word in words_of_the_page() if not word.startswith("num_")]
    assert sorted({word for word in words if words.count(word) > 1}) == []

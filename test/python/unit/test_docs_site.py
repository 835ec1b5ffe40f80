"""The site: every page is reached from the navigation, every public name is in the reference, and it builds without a
warning."""

from __future__ import annotations

import html
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cuteforge

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
TUNING = DOCS / "dev" / "tuning"
NAV = re.compile(r"^nav:\n((?: +.*\n)+)", re.MULTILINE)
PAGE_OF_NAV = re.compile(r"^ +- [^:\n]+: (\S+\.md)$", re.MULTILINE)
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
PUBLIC = sorted(set(cuteforge.__all__) - {"__version__"})
# What public functions take and give beside public names.
OTHERS = (
    "cuteforge.op.base.Sample",
    "cuteforge.backends.interface.Request",
    "cuteforge.serving.kv_cache.Batch",
    "cuteforge.backends.selection.Decision",
    "cuteforge.backends.selection.Verdict",
    "cuteforge.integrations.transformers.register",
    "cuteforge.integrations.torch_sdpa.register",
    "cuteforge.integrations.torch_sdpa.Handle",
    "cuteforge.runtime.streams.Stream",
)
SIGNATURE = re.compile(r'<div class="[^"]*doc-signature[^"]*">(.*?)</div>', re.DOTALL)
LINE_LENGTH = 100
# The packages of the extra `docs`. What they would find wrong with navigation, names or links is also checked without
# them, here and in test_docs.
HAS_MKDOCS = all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers", "ruff")))


def module_of(name: str) -> str:
    return cuteforge._MODULE_OF[name]


def test_navigation_holds_every_page_once_but_the_tuning_logs():
    """A page outside of it is built but never found; one that is gone ends the build."""
    (nav,) = NAV.findall((ROOT / "mkdocs.yml").read_text())
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md") if path.parent != TUNING}
    assert sorted(PAGE_OF_NAV.findall(nav)) == sorted(pages)


def test_kernels_are_in_the_order_in_which_people_look_for_them():
    (nav,) = NAV.findall((ROOT / "mkdocs.yml").read_text())
    kernels = [f"api/{name}.md" for name in ("attention", "paged_attention", "rotary", "csa")]
    for text in (nav, (DOCS / "index.md").read_text()):
        places = [text.rindex(page) for page in kernels]
        assert places == sorted(places)


@pytest.mark.parametrize("log", sorted(TUNING.glob("*.md")), ids=lambda path: path.stem)
def test_tuning_log_begins_with_what_to_try_next(log):
    """That is what somebody opens it for; what was tried is below."""
    first, *_ = re.findall(r"^## (.*)$", log.read_text(), re.MULTILINE)
    assert first == "What to try next"


@pytest.mark.parametrize("name", PUBLIC)
def test_reference_holds_every_public_name(name):
    """By itself, or as a name that a module of the reference exports."""
    shown = set(DIRECTIVE.findall((DOCS / "reference.md").read_text()))
    module = importlib.import_module(module_of(name))
    is_exported = module.__name__ in shown and name in getattr(module, "__all__", ())
    assert is_exported or f"{module.__name__}.{name}" in shown


@pytest.mark.parametrize("name", OTHERS)
def test_reference_holds_what_public_functions_take_and_give(name):
    assert name in DIRECTIVE.findall((DOCS / "reference.md").read_text())


def test_support_page_has_the_versions_of_the_package():
    """pyproject.toml decides; the page repeats it."""
    project = (ROOT / "pyproject.toml").read_text()
    support = (DOCS / "support.md").read_text()
    (python,) = re.findall(r'^requires-python = "(.*)"$', project, re.MULTILINE)
    (dependencies,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    pinned = [spec for spec in re.findall(r'^ +"(.*)",$', dependencies, re.MULTILINE) if ">=" in spec]
    assert pinned
    assert [spec for spec in (python, *pinned) if f"`{spec}`" not in support] == []


@pytest.mark.skipif(not HAS_MKDOCS, reason="needs the extra docs")
def test_site_builds_without_a_warning_and_shows_every_public_name(tmp_path):
    # Not --quiet: what is not logged is not counted as a warning either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # the theme's notice about a successor of mkdocs
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "reference" / "index.html").read_text()
    missing = [name for name in PUBLIC if not re.search(rf'id="cuteforge\.[\w.]*\b{name}"', reference)]
    assert missing == []
    signatures = [html.unescape(re.sub("<[^>]+>", "", shown)) for shown in SIGNATURE.findall(reference)]
    assert len(signatures) > len(PUBLIC)
    cut_off = [line for shown in signatures for line in shown.splitlines() if len(line) > LINE_LENGTH]
    assert cut_off == []

"""Imports run one way, and importing the package costs next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "python" / "cuteforge"
LAYERS = (
    "errors",
    "arguments",
    "runtime",
    "device",
    ("op.dims", "op.overlap", "op.relax"),
    "op.tensor_spec",
    "op.signature",
    "op.operand_table",
    ("op.generated", "op.allocate", "op.launch", "op.readable", "op.tuple_dict"),
    "op.guards",
    "op.replay",
    "op.recall",
    "op.base",
    ("op.checks", "op.tracing"),
    "op.torch_library",
    "op.road",
    ("families.attention", "families.rotary", "families.csa"),
    "serving",
    "backends",
    ("integrations", "cli"),
    "__main__",
)
# Folders whose parts have places of their own.
SPLIT = ("op", "families")
RANK = {room: i for i, layer in enumerate(LAYERS) for room in ([layer] if isinstance(layer, str) else layer)}
IMPORT_BUDGET_MS = 50
# What the package must not touch when imported.
HEAVY = ("torch", "cutlass", "tvm_ffi", "cuda", "numpy", "rich")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """``(line, dotted name)`` of every import, inside functions too; ``from a import b`` may name module ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                keep = len(here) - node.level + is_package
                base = ".".join([*here[:keep], *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def typing_lines(tree: ast.AST) -> set[int]:
    """The lines under ``if TYPE_CHECKING:``, which only type checkers read."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {line for block in blocks for part in block.body for line in range(part.lineno, part.end_lineno + 1)}


def room_of(dotted: str) -> str | None:
    """The place of a module in the arrow; None for another package and for the package's own `__init__`."""
    parts = dotted.split(".")
    room = ".".join(parts[1:3] if len(parts) > 1 and parts[1] in SPLIT else parts[1:2])
    return room if parts[0] == "cuteforge" and room in RANK else None


def kernel_modules(trees: dict[str, ast.AST], packages: set[str]) -> set[str]:
    """Modules that import cutlass when they are imported themselves, outside the run time's wrapper of it."""
    found = set()
    for module, tree in trees.items():
        top = ast.Module(body=[n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], type_ignores=[])
        if any(name.split(".")[0] == "cutlass" for _, name in imports(top, module, module in packages)):
            found.add(module)
    return found


def violations(root: Path) -> list[str]:
    paths = {module_name(p, root): p for p in sorted(root.rglob("*.py"))}
    packages = {m for m, p in paths.items() if p.name == "__init__.py"}
    trees = {module: ast.parse(path.read_text()) for module, path in paths.items()}
    kernels = kernel_modules(trees, packages)
    found = []
    for module, tree in trees.items():
        for_types = typing_lines(tree)
        for line, name in imports(tree, module, module in packages):
            if reason := refusal(module, name, kernels, line in for_types):
                found.append(f"{module}:{line} imports {name}: {reason}")
    return found


def refusal(module: str, name: str, kernels: set[str], for_types: bool) -> str | None:
    """Why `module` may not import `name`, or None. What type checkers read costs no import, but follows the arrow
    too."""
    room, other, top = room_of(module), room_of(name), name.split(".")[0]
    if for_types and (module == "cuteforge" or top == "torch"):
        return None
    if module == "cuteforge":
        return "the package imports by name, lazily" if other or top in HEAVY else None
    if top == "torch" and room in ("errors", "arguments", "op.signature", "op.operand_table", "device"):
        return f"{room} knows no torch"
    if top == "cutlass" and module not in kernels and room != "runtime":
        return "only kernel files, device/ and runtime/ use cutlass"
    if other is None or room is None:
        return None
    if RANK[other] > RANK[room]:
        return f"{other} lies above {room}"
    if RANK[other] == RANK[room] and other != room:
        return f"{room} and {other} are rooms of one layer"
    is_kernel = any(k in kernels for k in (name, name.rpartition(".")[0]))
    if is_kernel and module not in kernels:
        return "kernel files are imported by the compile cache only, on a miss"
    return None


def test_no_import_runs_against_the_arrow():
    assert PACKAGE.is_dir()
    assert violations(PACKAGE) == []


def test_every_room_has_a_place_in_the_arrow():
    rooms = {p.stem for p in _modules(PACKAGE)} - set(SPLIT)
    rooms |= {f"{folder}.{p.stem}" for folder in SPLIT for p in _modules(PACKAGE / folder)}
    assert rooms == set(RANK)


def _modules(folder: Path) -> list[Path]:
    """Files and folders of Python in a folder, but for its `__init__`."""
    found = [p for p in folder.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("**/*.py")))]
    return [p for p in found if p.stem != "__init__"]


@pytest.mark.parametrize(
    ("path", "line", "why"),
    [
        ("errors.py", "import torch", "no torch"),
        ("op/signature.py", "def f():\n    import torch", "no torch"),
        ("runtime/env.py", "def f():\n    from cuteforge.families.csa import api", "lies above"),
        ("runtime/env.py", "from ..op.base import APIBase", "lies above"),
        ("device/copy.py", "from cuteforge.families.csa.api import x", "lies above"),
        ("families/csa/api.py", "from cuteforge.families.rotary.api import x", "one layer"),
        ("families/csa/api.py", "import cuteforge.backends.csa", "lies above"),
        ("families/csa/api.py", "def f():\n    from . import kernel", "compile cache only"),
        ("families/csa/api.py", "def f():\n    import cutlass", "only kernel files"),
        ("families/csa/api.py", "from cuteforge.device import copy", "compile cache only"),
        ("runtime/env.py", "if TYPE_CHECKING:\n    from cuteforge.families.csa import api", "lies above"),
        ("errors.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "no torch"),
        ("__init__.py", "if not TYPE_CHECKING:\n    import torch", "lazily"),
        ("__init__.py", "from cuteforge.errors import ContractError", "lazily"),
    ],
)
def test_the_walk_sees_each_kind_of_violation(tmp_path, path, line, why):
    root = tmp_path / "cuteforge"
    kernel = "import cutlass\nfrom cuteforge.device.copy import y\n"
    files = {
        "families/csa/kernel.py": kernel,
        "families/csa/api.py": "",
        "device/copy.py": "import cutlass\n",
        path: line,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    found = violations(root)
    assert len(found) == 1
    assert why in found[0]


@pytest.mark.parametrize(
    ("path", "name"),
    [("__init__.py", "cuteforge.families.csa.api.x"), ("__init__.py", "torch"), ("errors.py", "torch")],
)
def test_imports_for_type_checkers_cost_nothing_and_are_allowed(tmp_path, path, name):
    root = tmp_path / "cuteforge"
    root.mkdir()
    module, _, imported = name.rpartition(".")
    statement = f"from {module} import {imported}" if module else f"import {imported}"
    (root / path).write_text(f"if TYPE_CHECKING:\n    {statement}\n")
    assert violations(root) == []


def test_environment_variables_are_read_in_one_file():
    readers = [
        p for p in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(p.read_text())) if reads_own_variable(node)
    ]
    assert {p.relative_to(PACKAGE).as_posix() for p in readers} <= {"runtime/env.py"}


def reads_own_variable(node: ast.AST) -> bool:
    """``os.environ.get("CUTEFORGE_…")``, ``os.environ["CUTEFORGE_…"]``, ``os.getenv("CUTEFORGE_…")``."""
    if not isinstance(node, ast.Call | ast.Subscript):
        return False
    head, arguments = (node.func, node.args) if isinstance(node, ast.Call) else (node.value, [node.slice])
    from_environment = "environ" in ast.unparse(head) or "getenv" in ast.unparse(head)
    return from_environment and any(
        isinstance(a, ast.Constant) and str(a.value).startswith("CUTEFORGE_") for a in arguments
    )


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_leaves_torch_and_cutlass_out():
    loaded = f"[m for m in {HEAVY!r} if m in sys.modules]"
    assert run_python(f"import sys; before = {loaded}; import cuteforge; print(set({loaded}) - set(before))") == "set()"


def test_errors_and_specs_come_without_torch():
    code = "import sys, cuteforge; cuteforge.ContractError; cuteforge.TensorSpec; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_import_is_fast():
    """In time of the processor, for others may have it meanwhile; the fastest of five."""
    code = "import time; t = time.process_time(); import cuteforge; print((time.process_time() - t) * 1e3)"
    assert min(float(run_python(code)) for _ in range(5)) < IMPORT_BUDGET_MS


def test_names_are_listed_and_unknown_ones_refused():
    import cuteforge

    assert {"ContractError", "TensorSpec", "CSACompressorForward", "__version__"} <= set(dir(cuteforge))
    with pytest.raises(AttributeError, match="no attribute 'CSACompresor'"):
        _ = cuteforge.CSACompresor

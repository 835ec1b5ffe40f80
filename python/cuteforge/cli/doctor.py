"""`doctor`: what is installed, what runs on this machine, and why not otherwise.

It reports whatever is missing and never raises.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping

import cuteforge
from cuteforge.cli.families import FAMILIES, load, split_builder
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.runtime import arch as architectures
from cuteforge.runtime import cutlass_compat, disk_cache, env

DISTRIBUTIONS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings", "numpy", "rich")
LINKERS = ("cc", "gcc", "clang")
_DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_DRIVER_TIMEOUT_S = 20

Rows = Mapping[str, str]


def run() -> int:
    """Print every section; returns 0 whatever is missing."""
    for title, section in SECTIONS.items():
        _print_section(title, _probe_rows(title, section))
    return 0


def versions() -> Rows:
    """Python, torch with the CUDA it was built for, and the packages that kernels are compiled with."""
    packages = {name: _probe(lambda name=name: importlib.metadata.version(name)) for name in DISTRIBUTIONS}
    own = {"cuteforge": cuteforge.__version__, "python": platform.python_version()}
    return {**own, "torch": _probe(_torch_version), **packages}


def gpus() -> Rows:
    """The driver and each GPU that torch sees."""
    import torch

    rows = {"driver": _probe(_driver_version)}
    for index in range(torch.cuda.device_count()):
        rows[f"cuda:{index}"] = _probe(lambda index=index: _describe_gpu(index))
    return rows if len(rows) > 1 else {**rows, "GPUs": "torch sees none"}


def toolchain() -> Rows:
    """The compiler that a kernel would be built with, what would load it, and whether its object can be linked."""
    linker = next(filter(None, map(shutil.which, LINKERS)), None)
    without = f"none of {', '.join(LINKERS)} found: kernels from the disk cache load with the DSL, which takes seconds"
    return {"compiler": _probe(_compiler), "loader": _probe(_loader), "linker": linker or without}


def cache() -> Rows:
    """The disk cache: where, how full, and whether it is usable."""
    if not env.disk_cache():
        return {"disk cache": "off (CUTEFORGE_DISK_CACHE=0): kernels are kept in memory only"}
    with _warnings_of("cuteforge.runtime") as warnings:
        layers = disk_cache.LayeredCache(disk_cache.DiskCache())
        disk = layers.named
    if disk.root is None:
        return {
            "directory": _probe(lambda: str(disk_cache.default_root())),
            "usable": "no: " + ("; ".join(warnings) or "the reason was logged before"),
        }
    damaged, found = disk.verify(), disk.ls()
    entries = f"{len(found)}, {disk.size_bytes() / 2**20:.1f} MiB of at most {disk.max_bytes / 2**20:.0f}"
    return {
        "directory": str(disk.root),
        "usable": "yes" if disk.is_writable else f"to read only: {layers.place_of_new()}",
        "entries": entries + (f"; {len(damaged)} damaged, rebuilt when needed" if damaged else ""),
        **_entries_by_family(found),
    }


def environment() -> Rows:
    """The variables of the library that are set, and those of the DSL, which change the compiler or the code."""
    rows = {v.name: _probe(lambda v=v: _describe_variable(v)) for v in env.VARIABLES if v.name in os.environ}
    rows |= {name: value for name, value in sorted(os.environ.items()) if name.startswith("CUTE_DSL_")}
    return rows or {"variables": "none set"}


def ops() -> Rows:
    """For every op and GPU: the architecture it would be compiled for, or the sentence that refuses it."""
    import torch

    rows = {}
    for family in FAMILIES:
        for index in range(torch.cuda.device_count()) or (None,):
            rows |= _probe_rows(family, lambda f=family, i=index: _family_ops(f, i))
    return rows


SECTIONS: dict[str, Callable[[], Rows]] = {
    "versions": versions,
    "GPUs": gpus,
    "toolchain": toolchain,
    "disk cache": cache,
    "environment": environment,
    "ops": ops,
}


def _entries_by_family(entries: Iterable[disk_cache.Entry]) -> Rows:
    sizes: dict[str, list[int]] = {}
    for entry in entries:
        sizes.setdefault(split_builder(entry.builder)[0], []).append(entry.size_bytes)
    return {f"  {family}": f"{len(s)}, {sum(s) / 2**20:.1f} MiB" for family, s in sorted(sizes.items())}


def _family_ops(family: str, device_index: int | None) -> Rows:
    device = "cuda" if device_index is None else f"cuda:{device_index}"
    on_device = "" if device_index is None else f" on {device}"
    sample_ops = load(family).sample_ops(device)
    return {
        f"{label}{on_device}": _probe(lambda op=op: _op_status(op, device_index)) for label, op in sample_ops.items()
    }


def _op_status(op, device_index: int | None) -> str:
    import torch

    op.check_support()
    if device_index is None and env.arch() is None:
        return "no: no GPU here; set CUTEFORGE_ARCH=sm_90a, or another one, to compile for a GPU elsewhere"
    target = architectures.resolve_arch(None, device_index)
    cutlass_compat.toolchain_fingerprint()
    cutlass_compat.require_compiler()
    if device_index is None:
        return f"compiles for {target.name} (CUTEFORGE_ARCH); no GPU to run it"
    capability = torch.cuda.get_device_capability(device_index)
    if not architectures.runs_on(target.name, capability):
        return (
            f"no: CUTEFORGE_ARCH={target.name}, which compute capability {capability[0]}.{capability[1]} does not run"
        )
    return f"runs, compiled for {target.name}"


def _torch_version() -> str:
    import torch

    return f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU only'}"


def _driver_version() -> str:
    """The driver's version as its own tool says it."""
    try:
        done = subprocess.run(_DRIVER_QUERY, capture_output=True, text=True, check=True, timeout=_DRIVER_TIMEOUT_S)
        return done.stdout.split()[0]
    except FileNotFoundError:
        return "nvidia-smi is not here"
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return f"nvidia-smi does not answer: {error}"


def _describe_gpu(index: int) -> str:
    import torch

    p = torch.cuda.get_device_properties(index)
    size = f"{p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB"
    return f"{p.name}, compute capability {p.major}.{p.minor}, {size}"


def _compiler() -> str:
    facts = cutlass_compat.toolchain_fingerprint()
    cutlass_compat.require_compiler()
    return f"nvidia-cutlass-dsl {facts['nvidia-cutlass-dsl']}, {facts['cuda']}"


def _loader() -> str:
    """What loads a kernel that is on disk: found and, as far as that needs no GPU, tried."""
    import tvm_ffi

    library = cutlass_compat.runtime_library()
    if not library.exists():
        raise UnsupportedError(f"nvidia-cutlass-dsl: wanted its run-time library {library}, which is not there")
    return f"apache-tvm-ffi {tvm_ffi.__version__}, {library.name}"


def _describe_variable(variable: env.Variable) -> str:
    text = os.environ[variable.name]
    variable.parse(text)
    return text


def _probe(question: Callable[[], str]) -> str:
    """The answer, or what went wrong, as a sentence."""
    try:
        return question()
    except Exception as error:
        return _sentence(error)


def _probe_rows(title: str, section: Callable[[], Rows]) -> Rows:
    """The rows of a section, or one row that says what went wrong."""
    try:
        return section()
    except Exception as error:
        return {title: _sentence(error)}


def _sentence(error: Exception) -> str:
    if isinstance(error, importlib.metadata.PackageNotFoundError):
        return "not installed"
    # The library's own refusals are sentences; of any other error the kind helps.
    return (
        f"no: {error}"
        if isinstance(error, (ContractError, UnsupportedError))
        else f"no: {type(error).__name__}: {error}"
    )


@contextlib.contextmanager
def _warnings_of(logger_name: str) -> Iterator[list[str]]:
    """Collects what the logger warns of meanwhile, in place of printing it."""
    logger = logging.getLogger(logger_name)
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _print_section(title: str, rows: Rows) -> None:
    """A table where rich is installed, plain lines where it is not."""
    try:
        from rich.table import Table
        from rich.text import Text

        from cuteforge.cli.console import open_console
    except ImportError:
        print(title, *(f"  {name}: {value}" for name, value in rows.items()), sep="\n")
        return
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(name, Text(value, overflow="fold"))
    console = open_console()
    console.print(table)
    console.print()

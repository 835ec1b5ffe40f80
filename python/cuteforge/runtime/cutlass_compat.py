"""Every use of the DSL's and TVM-FFI's own API, and every difference between their versions.

Nothing here imports cutlass until a kernel is compiled: a process whose kernels all come from the disk cache saves the
1.2 … 2.2 s of that import.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cuteforge.errors import UnsupportedError

logger = logging.getLogger("cuteforge.runtime")

SPILLS_ARE_ERRORS = "--ptxas-options '--warn-on-spills -Werror'"
"""Compiler option that fails a build whose registers spill to local memory."""

_IR_MODULE = "cutlass._mlir._mlir_libs._cutlass_ir"
_IR_FILE = re.compile(r"_cutlass_ir\.cu(\d+)\..*\.so")
_PATH_FILE = "nvidia_cutlass_dsl_packages.pth"
_RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
# Variables of the DSL that say where to look, what to keep or what to print. Any other one may change the code.
_HARMLESS_DSL_VARIABLES = frozenset(
    "CUTE_DSL_" + name
    for name in (
        "ARCH CACHE_DIR DISABLE_FILE_CACHING DUMP_DIR ENABLE_TVM_FFI FILTER_STACKTRACE JIT_CACHE_MAX_ELEMS "
        "JIT_TIME_PROFILING KEEP LIBS LOG_LEVEL LOG_TO_CONSOLE LOG_TO_FILE NO_CACHE PRINT_IR SHOW_STACKTRACE"
    ).split()
)
_LINK_TIMEOUT_S = 60


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(f"{distribution}: not installed; cuteforge compiles its kernels with it") from None


@functools.cache
def _dsl_root() -> Path:
    """Directory of the nvidia_cutlass_dsl wheels, found without importing anything of them."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError("nvidia-cutlass-dsl: not installed; cuteforge compiles its kernels with it")
    return Path(next(iter(spec.submodule_search_locations)))


def _mlir_libs() -> Path:
    return _dsl_root() / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"


def _installed_flavours() -> list[int]:
    """CUDA majors whose compiler library is installed, ascending."""
    matches = (_IR_FILE.fullmatch(path.name) for path in _mlir_libs().iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _driver_major() -> int | None:
    """CUDA major that the driver supports; None without a driver. Initializes nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000


@functools.cache
def _predicted_flavour() -> int:
    """The CUDA flavour that `import cutlass` picks: the newest, or with a driver the newest that it supports."""
    installed, driver = _installed_flavours(), _driver_major()
    usable = [major for major in installed if driver is None or major <= driver]
    if not usable:
        raise UnsupportedError(f"nvidia-cutlass-dsl: installed for CUDA {installed}, the driver supports CUDA {driver}")
    return usable[-1]


def cuda_flavour() -> int:
    """CUDA major of the compiler in use: that of the imported cutlass, else the one an import would pick."""
    module = sys.modules.get(_IR_MODULE)
    if module is None:
        return _predicted_flavour()
    match = _IR_FILE.fullmatch(Path(module.__file__).name)
    return int(match[1]) if match else _predicted_flavour()


def _compiler_sha256(flavour: int) -> str:
    """The wheel's own digests of its compiler library; "unknown" where a release does not carry them."""
    path = _mlir_libs() / f"_cutlass_ir_version_cu{flavour}.py"
    try:
        match = re.search(r"DSO_SHA256\s*=\s*(\{.*?\})", path.read_text(), re.DOTALL)
        return ",".join(sorted(ast.literal_eval(match[1]).values())) if match else "unknown"
    except OSError:
        return "unknown"


@functools.cache
def toolchain_fingerprint() -> dict[str, str]:
    """All that decides the machine code besides sources and key: versions, CUDA flavour, the DSL's own switches.

    Imports neither cutlass nor tvm_ffi. Fixed at first use, as the DSL reads its own variables once.

    Raises:
        UnsupportedError: a package of the toolchain is missing, or no installed flavour suits the driver.
    """
    flavour = cuda_flavour()
    switches = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("CUTE_DSL_") and value and name not in _HARMLESS_DSL_VARIABLES
    }
    return {
        "nvidia-cutlass-dsl": _version("nvidia-cutlass-dsl"),
        "cuda": f"cu{flavour}",
        "compiler_sha256": _compiler_sha256(flavour),
        "apache-tvm-ffi": _version("apache-tvm-ffi"),
        "dsl_switches": repr(switches),
    }


def require_compiler() -> Any:
    """The module `cutlass.cute`.

    Raises:
        UnsupportedError: it does not import; says why, and what to do if only its path file was not read.
    """
    try:
        from cutlass import cute
    except ImportError as error:
        packages = _dsl_root() / "dsl_packages"
        remedy = ""
        if error.name == "cutlass" and packages.is_dir():
            remedy = (
                f"; nvidia-cutlass-dsl is here, but {_PATH_FILE} was not read, as after `pip install --target`: "
                f"install into a virtual environment, or add {packages} to PYTHONPATH"
            )
        raise UnsupportedError(f"cutlass: the compiler does not import: {error}{remedy}") from error
    return cute


def compile_host(host: Callable, args: Sequence[Any], *, arch: str, options: str = "") -> Any:
    """Compile a `@cute.jit` host function for `arch`. Not thread-safe: the caller holds the process's compile lock."""
    return require_compiler().compile(host, *args, options=f"--enable-tvm-ffi --gpu-arch {arch} {options}".rstrip())


def export_object(compiled: Any, path: Path, symbol: str) -> None:
    """Write what `compile_host` returned as an object file with the one visible function `symbol`."""
    # The suffix chooses the format; without one it is an object file too.
    assert path.suffix in (".o", "")
    compiled.export_to_c(str(path), function_name=symbol, export_only_tvm_ffi_symbols=True)


def runtime_library() -> Path:
    """The DSL's run-time library, which every loaded kernel needs. It may be missing."""
    return _dsl_root() / f"cu{cuda_flavour()}" / "lib" / _RUNTIME_LIBRARY


def _tvm_ffi_library() -> str:
    import tvm_ffi

    return tvm_ffi.libinfo.find_libtvm_ffi()


def link_shared(obj: Path, shared: Path) -> Path | None:
    """Link an exported object into a shared library that loads without cutlass; None where no linker can.

    The two libraries it needs are recorded by soname, so it does not tie the file to where they are installed.
    """
    linker = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if linker is None:
        return None
    # -nostdlib: the object needs neither libc nor start files, which a machine without C headers may lack.
    # -z now: a missing symbol is an error at load, not an abort at the first launch.
    command = [linker, "-shared", "-nostdlib", "-Wl,-z,now", "-o", str(shared), str(obj)]
    command += [str(runtime_library()), _tvm_ffi_library()]
    # Its temporary files go where there is room for its result.
    env = {**os.environ, "TMPDIR": str(shared.parent)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LINK_TIMEOUT_S, env=env)
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("no shared object: %s", error)
        return None
    if done.returncode != 0:
        logger.debug("no shared object: %s", done.stderr.strip())
        return None
    return shared


@functools.cache
def _preload_runtime() -> ctypes.CDLL:
    """Load the DSL's run-time library, global: a linked kernel names it by soname only."""
    return ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)


def load_shared(path: str | Path, symbol: str) -> Any:
    """The function `symbol` of a library made by `link_shared`, without importing cutlass. It is never unloaded.

    The name of its file does not matter, which TVM-FFI's own loader chooses a format by.
    """
    import tvm_ffi

    _preload_runtime()
    library = ctypes.CDLL(os.fspath(path))
    address = ctypes.cast(library["__tvm_ffi_" + symbol], ctypes.c_void_p).value
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)


def load_object(path: str | Path, symbol: str) -> Any:
    """The function `symbol` of an object file made by `export_object`. Imports cutlass, and only reads the file."""
    return getattr(require_compiler().runtime.load_module(os.fspath(path), enable_tvm_ffi=True), symbol)


def cubin_of(compiled: Any) -> bytes:
    """The machine code (an ELF image) inside what `compile_host` returned, for tests that read its SASS.

    The DSL keeps files of it only on request and names them by signature, so two variants overwrite each other; the
    lowered module holds the very bytes that will run.
    """
    (fatbin,) = _fatbins(compiled.ir_module)
    elf = fatbin[fatbin.index(b"\x7fELF") :]
    program_offset, section_offset = struct.unpack_from("<QQ", elf, 0x20)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", elf, 0x36)
    return elf[: max(section_offset + section_size * section_count, program_offset + program_size * program_count)]


def _fatbins(module: Any) -> list[bytes]:
    from cutlass._mlir import ir

    with module.context:
        globals_ = [op for op in module.body.operations if op.operation.name == "llvm.mlir.global"]
        values = [op.attributes["value"] for op in globals_ if "value" in op.attributes]
        texts = [value.value_bytes for value in values if isinstance(value, ir.StringAttr)]
    return [text for text in texts if text[:4] == b"\x50\xed\x55\xba"]

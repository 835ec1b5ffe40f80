"""Machine code of compiled kernels: what it takes of the GPU, and which instructions it is made of. Needs no GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cuteforge.runtime.build import Build
from cuteforge.runtime.cutlass_compat import SPILLS_ARE_ERRORS, compile_host, cubin_of
from cuteforge.runtime.garbage import only_new_garbage

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+),", re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
# The one 64-bit constant of a launch configuration.
_LAUNCH_SMEM = re.compile(r"store i64 (\d+), ptr %\S+, align 8")


@dataclass(frozen=True)
class KernelCode:
    """One kernel; `instructions` are its opcodes, modifiers included, in the order of the listing."""

    registers: int
    stack_bytes: int
    local_bytes: int
    instructions: tuple[str, ...]

    @functools.cached_property
    def opcodes(self) -> Counter[str]:
        return Counter(self.instructions)

    def matching(self, pattern: str) -> dict[str, int]:
        """The opcodes, modifiers included, that begin with a match of `pattern`, and how often each occurs."""
        return {opcode: count for opcode, count in self.opcodes.items() if re.match(pattern, opcode)}

    def count(self, pattern: str) -> int:
        """Instructions whose opcode begins with a match of `pattern`."""
        return sum(self.matching(pattern).values())


@dataclass(frozen=True)
class Binary:
    """What one build became: its kernels by name, and the dynamic shared memory that each launch asks for."""

    kernels: dict[str, KernelCode]
    launch_smem_bytes: list[int]


def compile_binary(build: Build, arch: str) -> Binary:
    """Compile for `arch`. Registers that spill to local memory are an error. Leaves no file behind."""
    options = f"{build.options} {SPILLS_ARE_ERRORS}".strip()
    with only_new_garbage():
        compiled = compile_host(build.host, build.args, arch=arch, options=options)
    with tempfile.TemporaryDirectory(prefix="cuteforge-sass-") as directory:
        host_code = Path(directory) / "host.ll"
        compiled.export_to_c(str(host_code), function_name=build.name)
        launch_smem_bytes = [int(size) for size in _LAUNCH_SMEM.findall(host_code.read_text())]
    return Binary(disassemble(cubin_of(compiled)), launch_smem_bytes)


def disassemble(cubin: bytes) -> dict[str, KernelCode]:
    """The kernels of an ELF image by name."""
    with tempfile.TemporaryDirectory(prefix="cuteforge-sass-") as directory:
        path = Path(directory) / "kernels.cubin"
        path.write_bytes(cubin)
        usage = _run("nvidia-cuda-cuobjdump", "cuobjdump", "-res-usage", path)
        listing = _run("nvidia-cuda-nvdisasm", "nvdisasm", "-c", "-ndf", path)
    heads = list(_SECTION.finditer(listing))
    ends = [head.start() for head in heads[1:]] + [len(listing)]
    code = {head[1]: tuple(_INSTRUCTION.findall(listing, head.end(), end)) for head, end in zip(heads, ends)}
    usages = {name: tuple(map(int, numbers)) for name, *numbers in _USAGE.findall(usage)}
    assert usages and usages.keys() == code.keys(), f"kernels by usage {list(usages)}, by listing {list(code)}"
    assert all(code.values()), f"no instruction found in {[name for name in code if not code[name]]}"
    return {name: KernelCode(*numbers, code[name]) for name, numbers in usages.items()}


@functools.cache
def _executable(distribution: str, tool: str) -> str:
    """A tool of an installed wheel: one of a CUDA toolkit nearby may be too old for the code."""
    files = importlib.metadata.files(distribution) or []
    (path,) = (file.locate() for file in files if file.stem == tool and "bin" in file.parts)
    return str(path)


def _run(distribution: str, tool: str, *arguments: object) -> str:
    done = subprocess.run([_executable(distribution, tool), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, f"{tool}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout

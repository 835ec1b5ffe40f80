"""GPU architectures: names, the facts that tile selection reads, and what runs where."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.runtime import clusters, env

_KIB = 1024
_MIB = 1024 * _KIB
_MIN_MAJOR = 8
WARP = 32  # threads
CTA_RESERVE_BYTES = 1024  # shared memory that the driver keeps for each resident CTA


@dataclass(frozen=True)
class Arch:
    """A compile target and the facts of one GPU of it.

    `name` is the compiler's (`sm_90a`); `major.minor` the compute capability; `smem_bytes_per_cta` the opt-in limit;
    `clustered_sms` those that clusters of eight CTAs reach at once (`runtime.clusters`).
    """

    name: str
    major: int
    minor: int
    num_sms: int
    smem_bytes_per_sm: int
    smem_bytes_per_cta: int
    l2_bytes: int
    clustered_sms: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, `(major, minor)`."""
        return self.major, self.minor

    def why_not_resident(self, what: object, smem_bytes: int, ctas_per_sm: int) -> str | None:
        """Why an SM does not hold `ctas_per_sm` CTAs of so much shared memory each, None if it does.

        Args:
            what: begins the sentence.
        """
        if smem_bytes > self.smem_bytes_per_cta:
            return f"{what} takes {smem_bytes} bytes of shared memory a CTA, there are {self.smem_bytes_per_cta}"
        resident = ctas_per_sm * (smem_bytes + CTA_RESERVE_BYTES)
        if resident > self.smem_bytes_per_sm:
            return f"{what} takes {resident} bytes of shared memory an SM, there are {self.smem_bytes_per_sm}"
        return None


@dataclass(frozen=True)
class _Chip:
    """A well-known GPU of a compute capability: its facts stand in where none is installed."""

    gpu: str
    num_sms: int
    smem_kib_per_sm: int
    l2_mib: int


_CHIPS = {
    (8, 0): _Chip("A100", 108, 164, 40),
    (8, 6): _Chip("RTX 3090", 82, 100, 6),
    (8, 7): _Chip("Jetson AGX Orin", 16, 164, 4),
    (8, 9): _Chip("L20", 92, 100, 96),
    (9, 0): _Chip("H200", 132, 228, 60),
    (10, 0): _Chip("B200", 148, 228, 126),
    (10, 3): _Chip("B300", 148, 228, 126),
    (11, 0): _Chip("Jetson AGX Thor", 20, 228, 32),
    (12, 0): _Chip("RTX 5090", 170, 100, 96),
    (12, 1): _Chip("GB10", 48, 100, 24),
}


def _parse(name: str, source: str) -> tuple[int, int, str]:
    """`(major, minor, suffix)` of an architecture name; `source` is what to name in errors."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", name) if isinstance(name, str) else None
    if match is None:
        raise ContractError(f"{source}: wanted an architecture such as sm_80, sm_90a or sm_120a, got {name!r}")
    major, minor, suffix = int(match[1]), int(match[2]), match[3]
    if major < _MIN_MAJOR:
        raise UnsupportedError(f"{source}: {name} is below compute capability 8.0, the lowest that cuteforge serves")
    if (major, minor) not in _CHIPS or (suffix and major < 9):
        known = ", ".join(f"sm_{a}{b}" for a, b in _CHIPS)
        raise ContractError(f"{source}: wanted one of {known} (from sm_90 up also with suffix a or f), got {name!r}")
    return major, minor, suffix


def _named_arch(name: str, source: str) -> Arch:
    major, minor, _ = _parse(name, source)
    chip = _CHIPS[major, minor]
    smem = chip.smem_kib_per_sm * _KIB
    # The driver keeps 1 KiB of shared memory for each resident CTA.
    return Arch(name, major, minor, chip.num_sms, smem, smem - _KIB, chip.l2_mib * _MIB, clusters.reach(chip.num_sms))


@functools.cache
def _device_arch(device_index: int) -> Arch:
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    major, minor = properties.major, properties.minor
    if major < _MIN_MAJOR:
        found = f"{properties.name} has compute capability {major}.{minor}"
        raise UnsupportedError(f"cuda:{device_index}: {found}; cuteforge serves 8.0 and up")
    # From 9.0 up the wgmma, TMA and tcgen05 instructions exist only in the architecture-specific target.
    name = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    num_sms, smem = properties.multi_processor_count, properties.shared_memory_per_block_optin
    return Arch(
        name,
        major,
        minor,
        num_sms,
        properties.shared_memory_per_multiprocessor,
        smem,
        properties.L2_cache_size,
        clusters.reach_of(device_index, num_sms, smem) if major >= 9 else num_sms,
    )


def _has_device(index: int = 0) -> bool:
    import torch

    return torch.cuda.is_available() and index < torch.cuda.device_count()


def resolve_arch(arch: str | None, device_index: int | None) -> Arch:
    """The architecture to compile for: `arch`, else CUTEFORGE_ARCH, else that of the GPU.

    Args:
        arch: a name such as "sm_90a", or None.
        device_index: the GPU of the operands; None when they name none, then torch's current GPU if there is one.

    The facts are those of the GPU `device_index` when the name is that GPU's, else those of a well-known GPU of that
    name (A100 for sm_80, L20 for sm_89, H200 for sm_90a, B200 for sm_100a, RTX 5090 for sm_120a). Asking about a GPU
    initializes CUDA.

    Raises:
        ContractError: not the name of an architecture.
        UnsupportedError: compute capability below 8.0, neither a name nor a GPU, or no such GPU.
    """
    name, source = (arch, "arch") if arch is not None else (env.arch(), "CUTEFORGE_ARCH")
    if name is not None:
        named = _named_arch(name, source)
        if device_index is None or not _has_device(device_index):
            return named
        device = _device_arch(device_index)
        return device if device.name == name else named
    if not _has_device():
        raise UnsupportedError('arch: no GPU here to take it from; pass arch="sm_90a" or set CUTEFORGE_ARCH=sm_90a')
    import torch

    if device_index is None:
        device_index = torch.cuda.current_device()
    if not _has_device(device_index):
        there = torch.cuda.device_count()
        raise UnsupportedError(f"device: wanted one of the {there} GPUs that torch sees, got cuda:{device_index}")
    return _device_arch(device_index)


def runs_on(arch_name: str, device_capability: tuple[int, int]) -> bool:
    """Whether code compiled for `arch_name` runs on a GPU of `device_capability`.

    Only machine code is embedded, so there is no forward compatibility across majors: `sm_90a` runs on exactly 9.0,
    `sm_86` on 8.6 … 8.9, `sm_100f` on 10.0 … 10.x.
    """
    major, minor, suffix = _parse(arch_name, "arch")
    if suffix == "a":
        return (major, minor) == tuple(device_capability)
    return major == device_capability[0] and minor <= device_capability[1]

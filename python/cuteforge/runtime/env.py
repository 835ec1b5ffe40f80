"""Every environment variable of the library: one table, read at each use.

The call that reads a bad value refuses it, with a ContractError that names the variable. Importing never fails: it
reads only CUTEFORGE_LOG, and a bad value there is ignored with a warning.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuteforge.errors import ContractError, UnsupportedError

_FLAG_WORDS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([kmgt])(?:i?b)?|b)?")
_LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _parse_flag(text: str) -> bool:
    return _FLAG_WORDS[text.lower()]


def _parse_count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _parse_path(text: str) -> Path:
    return Path(text).expanduser()


def _parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(text)
    size = int(float(found[1]) * 1024 ** "bkmgt".index(found[2] or "b"))
    if size < 1:
        raise ValueError(text)
    return size


def _parse_log_level(text: str) -> int:
    return _LOG_LEVELS[text.lower()]


_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "flag": (_parse_flag, "1 or 0"),
    "count": (_parse_count, "an integer >= 1"),
    "path": (_parse_path, "a path"),
    "size": (_parse_size, "a size such as 500M or 4GiB"),
    "text": (str, "a text"),
    "log level": (_parse_log_level, "one of " + ", ".join(_LOG_LEVELS)),
}


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its type (a key of the parser table), its default and what it means."""

    name: str
    type: str
    default: Any
    meaning: str

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; an empty text is the default.

        Raises:
            ContractError: `text` is not a value of this type; names the variable.
        """
        if not text:
            return self.default
        parser, wanted = _PARSERS[self.type]
        try:
            return parser(text)
        except (KeyError, ValueError, AttributeError, RuntimeError):
            raise ContractError(f"{self.name}: wanted {wanted}, got {text!r}") from None


# `os.environ[name]` encodes the name and decodes the value, 0.6 us a read; the mapping underneath holds the same live
# data (assignments to os.environ write through to it) and takes 0.03 us, which a launch can afford.
_environ = getattr(os.environ, "_data", os.environ)


def _raw_name(variable: Variable) -> Any:
    """The key of `variable` in `_environ`."""
    return variable.name if _environ is os.environ else os.environ.encodekey(variable.name)


def _reader(variable: Variable) -> Callable[[], Any]:
    """A function that reads `variable` now. A raw value is parsed once and remembered."""
    encoded = _environ is not os.environ
    name = _raw_name(variable)
    get = _environ.get
    parsed = {None: variable.default}

    def parse(raw: Any) -> Any:
        value = variable.parse(os.environ.decodevalue(raw) if encoded else raw)
        parsed[raw] = value
        return value

    def read() -> Any:
        raw = get(name)
        return parsed[raw] if raw in parsed else parse(raw)

    read.__doc__ = f"{variable.name}: {variable.meaning}"
    return read


_ARCH = Variable("CUTEFORGE_ARCH", "text", None, "architecture to compile for; unset: that of the GPU")
_CACHE_DIR = Variable(
    "CUTEFORGE_CACHE_DIR", "path", None, "directory of the disk cache; unset: cuteforge in the XDG cache directory"
)
_DISK_CACHE = Variable("CUTEFORGE_DISK_CACHE", "flag", True, "0 keeps compiled kernels in memory only")
_DISK_CACHE_SIZE = Variable(
    "CUTEFORGE_DISK_CACHE_SIZE",
    "size",
    2 * 1024**3,
    "limit of the disk cache; beyond it, the kernels used longest ago are removed",
)
_CACHE_SIZE = Variable(
    "CUTEFORGE_CACHE_SIZE",
    "count",
    256,
    "how many compiled kernels the process keeps in memory, and how many calls and ops, which use them, it remembers",
)
_FAST_LAUNCH = Variable("CUTEFORGE_FAST_LAUNCH", "flag", True, "0 runs the whole validation table before every launch")
_CHECK = Variable(
    "CUTEFORGE_CHECK", "flag", False, "1 also checks offsets and indices at every launch, which waits for the GPU"
)
_NVTX = Variable("CUTEFORGE_NVTX", "flag", False, "1 puts an NVTX range around every launch")
_LOG = Variable("CUTEFORGE_LOG", "log level", None, "log to stderr from this level up: debug, info, warning or error")
_KERNELS = Variable(
    "CUTEFORGE_KERNELS",
    "flag",
    True,
    "0 launches no kernel of the library; functions that choose are served by torch or flash-attn",
)
_BACKEND = Variable(
    "CUTEFORGE_BACKEND", "text", None, "backend to try first: cuda, flash, torch_native or one that was registered"
)

VARIABLES = (
    _ARCH,
    _CACHE_DIR,
    _DISK_CACHE,
    _DISK_CACHE_SIZE,
    _CACHE_SIZE,
    _FAST_LAUNCH,
    _CHECK,
    _NVTX,
    _LOG,
    _KERNELS,
    _BACKEND,
)

# The sentence that refuses a kernel then.
KERNELS_OFF = f"{_KERNELS.name}=0 switches the kernels off"

arch: Callable[[], str | None] = _reader(_ARCH)
cache_dir: Callable[[], Path | None] = _reader(_CACHE_DIR)
disk_cache: Callable[[], bool] = _reader(_DISK_CACHE)
disk_cache_size: Callable[[], int] = _reader(_DISK_CACHE_SIZE)
cache_size: Callable[[], int] = _reader(_CACHE_SIZE)
fast_launch: Callable[[], bool] = _reader(_FAST_LAUNCH)
check: Callable[[], bool] = _reader(_CHECK)
nvtx: Callable[[], bool] = _reader(_NVTX)
log_level: Callable[[], int | None] = _reader(_LOG)
kernels: Callable[[], bool] = _reader(_KERNELS)
backend: Callable[[], str | None] = _reader(_BACKEND)


# What `launch_is_plain` looks for.
_FAST_LAUNCH_NAME, _CHECK_NAME, _NVTX_NAME, _KERNELS_NAME = map(_raw_name, (_FAST_LAUNCH, _CHECK, _NVTX, _KERNELS))


def launch_is_plain() -> bool:
    """Whether none of CUTEFORGE_FAST_LAUNCH, _CHECK, _NVTX and _KERNELS is set: one look, 0.05 us for a launch.

    Reading each for its value takes 0.2 us, which only a launch under one of them pays.
    """
    return not (
        _FAST_LAUNCH_NAME in _environ or _CHECK_NAME in _environ or _NVTX_NAME in _environ or _KERNELS_NAME in _environ
    )


def require_kernels() -> None:
    """Refuse to launch one where CUTEFORGE_KERNELS=0 switches them off.

    Raises:
        UnsupportedError: names the variable.
    """
    if not kernels():
        raise UnsupportedError(KERNELS_OFF)


def configure_logging() -> None:
    """Make the logger "cuteforge" write to stderr from the level in CUTEFORGE_LOG up; unset leaves logging alone.

    Calling it again only changes the level. A value that is no level leaves logging alone too, with a warning.
    """
    logger = logging.getLogger("cuteforge")
    try:
        level = log_level()
    except ContractError as error:
        logger.warning("%s; it is ignored", error)
        return
    if level is None:
        return
    logger.setLevel(level)
    if not any(getattr(handler, "is_cuteforge_default", False) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        handler.is_cuteforge_default = True
        logger.addHandler(handler)

"""Code that is written out while the library runs. A traceback shows its lines, as those of a file."""

from __future__ import annotations

import functools
import itertools
import linecache
from types import CodeType

_next_number = itertools.count().__next__


@functools.cache
def code_of(source: str, purpose: str, mode: str) -> CodeType:
    """`source`, compiled once for the life of the process.

    The texts hold names, no sizes, so there are few of them: one for each kind of call.

    Args:
        purpose: what a traceback calls it.
        mode: as `compile` takes it: ``"exec"`` or ``"eval"``.
    """
    file = f"<cuteforge {purpose} {_next_number()}>"
    # without a time of change `linecache` never looks for a file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, mode)

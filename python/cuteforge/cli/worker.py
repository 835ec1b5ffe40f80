"""What a process of `warmup` does first. Imports little, so that it is done before the seconds that torch takes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the system end this process with its parent, however that ends: kill -9 leaves nobody time to clean up.

    An interrupt from the terminal reaches all processes at once; the parent decides what becomes of it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

"""The console that the commands print tables on."""

from __future__ import annotations

import sys

from rich.console import Console

_PLAIN_WIDTH = 120  # columns of a file or pipe, which have no width of their own


def open_console() -> Console:
    """A console on the standard output as it is now: the compiler redirects `sys.stdout` while it runs."""
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    return console

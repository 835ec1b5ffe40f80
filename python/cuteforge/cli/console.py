"""The console that the commands print tables and progress on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_PLAIN_WIDTH = 120  # columns of a file or pipe, which have no width of their own


def open_console() -> Console:
    """A console on the standard output as it is now: the compiler redirects `sys.stdout` while it runs."""
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    return console


def track(console: Console, what: str, items: Iterable, total: int) -> Iterator:
    """The items, with a bar where `console` is a terminal and nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # The compiler redirects the standard streams for itself; a bar that did so too would restore the wrong ones.
    quiet = {"disable": not console.is_terminal, "redirect_stdout": False, "redirect_stderr": False}
    with Progress(*columns, console=console, transient=True, **quiet) as progress:
        yield from progress.track(items, total=total, description=what)

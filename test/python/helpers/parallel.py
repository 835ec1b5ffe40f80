"""How many processes a run of tests takes when nobody says."""

from __future__ import annotations

import os

import pytest

from helpers.recorder import selecting_options

MOST = 15  # processes that share one GPU: more of them do not end sooner
BYTES_EACH = 3 << 29  # torch, the compiler and a kernel that is being compiled


def choose_processes(config: pytest.Config) -> None:
    """Parallel where whole folders are asked for and nothing of the command line speaks against it; ``-n`` decides
    otherwise.

    Idle processes take work from the busiest one: tests take between a millisecond and half a minute.
    """
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    if option.numprocesses is None and option.dist == "no" and not option.tx and _is_batch(config):
        option.numprocesses = default_processes()
    if option.numprocesses:
        option.dist = "worksteal" if option.dist == "no" else option.dist
        # The processes take the cores already: threads of torch that wait for one another cost three times the time.
        # Inherited by the workers.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def default_processes() -> int:
    """As many as there are cores and memory for; 0, which is this process alone, for one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(len(os.sched_getaffinity(0)), memory // BYTES_EACH, MOST)
    return most if most > 1 else 0


def _is_batch(config: pytest.Config) -> bool:
    """Whole folders, and nobody who looks on: a debugger and ``-s`` need the one process, a selection is mostly faster
    in it."""
    option = config.option
    watched = option.usepdb or option.trace or option.capture == "no" or option.setupshow or option.setuponly
    return not watched and not selecting_options(config) and all(map(os.path.isdir, config.args))

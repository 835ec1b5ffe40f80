"""Work of the commands in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from cuteforge.cli.worker import end_with_parent

_MAX_DEFAULT = 8  # a process takes 0.5 GB of memory
_Job = TypeVar("_Job")


def default_count() -> int:
    """Processes for as many CPUs as this one may use."""
    return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT)


def in_processes(
    function: Callable[[_Job], Any], jobs: Sequence[_Job], count: int
) -> Iterator[tuple[_Job, Any | BrokenProcessPool]]:
    """Each job with what `function` returns for it, as they come, from fresh processes: a compiler keeps its state in
    singletons of its process. A job whose process died comes with the error that says so.

    Args:
        function: one that another process can import by its name.
        count: the most processes at a time.
    """
    # Not forked: a child would inherit the parent's CUDA state.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    count = min(count, max(len(jobs), 1))
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=end_with_parent, initargs=(os.getpid(),))
    try:
        futures = {pool.submit(function, job): job for job in jobs}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool as error:
                yield futures[future], error
    except BaseException:
        # Interrupted: what they work on now is wanted no more.
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)

"""The bounded mapping behind the wrappers: which value goes, and that look-ups without a lock survive insertions."""

import threading

import pytest

from cuteforge.runtime.lru import LRU


@pytest.fixture
def two() -> LRU:
    """Room for two values."""
    mapping = LRU(lambda: 2)
    mapping.put("a", 1)
    mapping.put("b", 2)
    return mapping


def test_absent_key_gives_none(two):
    assert two.get("c") is None


def test_value_looked_up_longest_ago_goes_first(two):
    assert two.get("a") == 1
    two.put("c", 3)
    assert (two.get("a"), two.get("b"), two.get("c")) == (1, None, 3)


def test_first_value_of_a_key_stays_and_counts_as_used(two):
    assert two.put("a", 10) == 1
    two.put("c", 3)
    assert (two.get("a"), two.get("b"), len(two)) == (1, None, 2)


def test_bound_is_read_at_each_insertion():
    bound = 3
    mapping = LRU(lambda: bound)
    for key in range(3):
        mapping.put(key, str(key))
    bound = 1
    mapping.put(3, "3")
    assert (len(mapping), mapping.get(3)) == (1, "3")


def test_nothing_is_left_after_clear(two):
    two.clear()
    assert (len(two), two.get("a")) == (0, None)


def test_look_ups_while_other_threads_insert():
    """A look-up finds the value of its key or nothing, whatever is dropped meanwhile."""
    mapping, wrong, done = LRU(lambda: 4), [], threading.Event()

    def insert(first: int) -> None:
        for key in range(first, first + 2_000):
            mapping.put(key % 16, key % 16)

    def look_up() -> None:
        while not done.is_set():
            wrong.extend(key for key in range(16) if mapping.get(key) not in (None, key))

    readers = [threading.Thread(target=look_up) for _ in range(2)]
    writers = [threading.Thread(target=insert, args=(first,)) for first in (0, 5, 11)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not wrong
    assert len(mapping) <= 4

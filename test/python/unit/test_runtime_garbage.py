"""The garbage collector is left as it was found: after a compile, after one that fails, in a child forked meanwhile."""

import gc
import os

import pytest

from cuteforge.runtime.garbage import only_new_garbage


class Cycle:
    def __init__(self, deleted):
        self.itself, self.deleted = self, deleted

    def __del__(self):
        self.deleted.append(1)


def state():
    return gc.isenabled(), gc.get_freeze_count()


@pytest.fixture(autouse=True)
def as_before():
    """Nothing is frozen: other libraries of this process may have done so."""
    gc.unfreeze()
    assert state() == (True, 0)
    yield
    gc.unfreeze()
    gc.enable()


def test_new_objects_are_collected_when_asked_for_and_old_ones_later():
    old, new = [], []
    Cycle(old)
    with only_new_garbage():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        Cycle(new)
        gc.collect()
        assert (len(old), len(new)) == (0, 1)
    assert state() == (True, 0)
    gc.collect()
    assert len(old) == 1


def test_a_failure_leaves_it_as_it_was():
    with pytest.raises(KeyError), only_new_garbage():
        raise KeyError
    assert state() == (True, 0)


def test_what_the_user_has_frozen_or_switched_off_stays_so():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with only_new_garbage():
        assert state() == (True, frozen)
    assert state() == (True, frozen)
    gc.unfreeze()
    gc.disable()
    with only_new_garbage():
        assert state() == (False, 0)
    assert state() == (False, 0)


def test_a_child_that_is_forked_meanwhile_collects():
    with only_new_garbage():
        child = os.fork()
        if child == 0:
            os._exit(0 if state() == (True, 0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert state() == (True, 0)

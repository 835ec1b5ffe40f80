"""What tests of every family share.

Every second test of attention runs prefill with the larger row tiles: the sizes here would never choose them.
"""

import zlib

import pytest


@pytest.fixture(autouse=True)
def row_tiles(request, monkeypatch):
    if "attention" in request.node.nodeid and zlib.crc32(request.node.nodeid.encode()) % 2:
        from cuteforge.families.attention import base, road

        for module in (base, road):
            monkeypatch.setattr(module, "few_rows", lambda *_: 0)


@pytest.fixture
def served(monkeypatch):
    """A list that grows by one with each call that is served as a known one; none is known at first."""
    from cuteforge.op import recall

    recall.forget()
    counts, recall_call = [], recall.recall

    def counted(*args):
        results = recall_call(*args)
        counts.extend([1] * (results is not None))
        return results

    monkeypatch.setattr(recall, "recall", counted)
    yield counts
    recall.forget()

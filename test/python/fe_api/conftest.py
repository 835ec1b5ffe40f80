"""Every second test of attention runs prefill with the larger row tiles: the sizes here would never choose them."""

import zlib

import pytest


@pytest.fixture(autouse=True)
def row_tiles(request, monkeypatch):
    if "attention" in request.node.nodeid and zlib.crc32(request.node.nodeid.encode()) % 2:
        from cuteforge.gqa import op, wrapper

        for module in (op, wrapper):
            monkeypatch.setattr(module, "few_rows", lambda *_: 0)

"""What the tests of the policy layer share."""

import pytest


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    """What a user has set chooses no backend here."""
    monkeypatch.delenv("CUTEFORGE_BACKEND", raising=False)
    monkeypatch.delenv("CUTEFORGE_KERNELS", raising=False)

"""What tests of mappings share."""

from __future__ import annotations

import pytest

from tests.own_buckets import keep_own_buckets


@pytest.fixture(autouse=True)
def own_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans keep the framework's own gradient buckets, as what they are compared with does."""
    keep_own_buckets(monkeypatch)

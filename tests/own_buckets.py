"""Plans whose gradient buckets have the framework's own size: what a search proves."""

from __future__ import annotations

import pytest

from meshwright.planner.plan import gradient_buckets


def keep_own_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the choice of their size, which is made after the search."""
    monkeypatch.setattr(gradient_buckets, "with_gradient_buckets", lambda _, outcome: outcome)

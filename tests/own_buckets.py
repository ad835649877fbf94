"""Plans whose gradient buckets have the framework's own size: what a search proves."""

from __future__ import annotations

from functools import partial

import pytest

from meshwright.planner.plan import gradient_buckets
from meshwright.planner.search.executions import search_executions


def keep_own_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the choice of their size."""
    search = partial(search_executions, own_buckets=True)
    monkeypatch.setattr(gradient_buckets, "search_executions", search)
    monkeypatch.setattr(gradient_buckets, "with_gradient_buckets", lambda _, outcome: outcome)

"""Plans whose gradient buckets have the framework's own size: what a search proves."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.plan import best_plan as gradient_buckets
from meshwright.planner.search.loop import search_executions
from meshwright.planner.search.pricing import Outcome


def keep_own_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the choice of their size."""

    def search(*of_search: Any, **settings: Any) -> Outcome:
        return search_executions(*of_search, **{**settings, "own_buckets": True})

    monkeypatch.setattr(gradient_buckets, "search_executions", search)
    monkeypatch.setattr(gradient_buckets, "with_gradient_buckets", lambda _, outcome: outcome)

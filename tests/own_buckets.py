"""Plans whose gradient buckets have the framework's own size: what a search proves."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.plan import gradient_buckets
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.search.executions import search_executions


def keep_own_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the choice of their size."""

    def search(*args: Any, **options: Any) -> Outcome:
        return search_executions(*args, **{**options, "own_buckets": True})

    monkeypatch.setattr(gradient_buckets, "search_executions", search)
    monkeypatch.setattr(gradient_buckets, "with_gradient_buckets", lambda _, outcome: outcome)

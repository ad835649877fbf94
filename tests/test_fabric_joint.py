"""Layout and mapping together on irregular allocations: the search, the one CP-SAT model and enumeration."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from cluster_specs.fabric import is_irregular
from constraints.registry import rules_for
from planner.fabric.joint import Need
from planner.model import build_model, price_ns, solve
from planner.service import plan
from tests.irregular import Tables, enumerated_s, legal_layouts, priced_under, random_request


def one_shot_s(tables: Tables) -> float:
    """Every layout with every profile at its exact price, and the counts of slots, in one model."""
    times, needs = [], []
    for layout in tables.layouts():
        profiles = tables.pricing.profiles(layout)
        prices: list[tuple[int, Need]] = []
        if profiles is not None:
            for at, need in enumerate(profiles.needs):
                placement = profiles.rows(np.array(at))
                price = priced_under(tables.pricing, layout, placement)
                if price < inf:
                    prices.append((price_ns(price), need))
        times.append(np.array([price for price, _ in prices], dtype=np.int64))
        needs.append([need for _, need in prices])
    if not times:
        return inf
    rules = rules_for(tables.candidates.workload)
    choice = solve(build_model(tables.candidates, rules, times, needs), 0, None)
    return inf if choice.status == "infeasible" else float(times[choice.layout][choice.mapping]) * 1e-9


BLOCK = 4
"""Requests of one test: one of each kind of `random_request`."""


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 30))])
def test_the_plan_is_the_least_of_all_layouts_on_all_assignments(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        request = random_request(seed)
        assert is_irregular(request.cluster), seed
        tables = legal_layouts(request)
        least = enumerated_s(tables)
        found = plan(request)
        if least == inf:
            assert found.status == "infeasible", seed
            continue
        assert found.status == "optimal", seed
        assert found.objective.gap == 0
        assert found.objective.step_time_s == pytest.approx(least, rel=1e-9), seed
        assert one_shot_s(tables) == pytest.approx(least, abs=3e-9), seed

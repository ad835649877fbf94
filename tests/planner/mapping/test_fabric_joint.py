"""Layout and mapping together on irregular allocations: the search, the one CP-SAT model and enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.schema import FabricLevelSpec, NodeSpec
from meshwright.constraints.registry import rules_for
from meshwright.planner.mapping.joint import Need
from meshwright.planner.mapping.pricing import MappedPricing
from meshwright.planner.mapping.problem import MappingProblem, Traffic
from meshwright.planner.mapping.slots import assignment_of
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.loop import LayoutSearch, branch_of
from meshwright.planner.search.model import build_model, price_ns, solve
from meshwright.planner.search.pricing import SearchParams
from meshwright.planner.search.space import space_of
from tests.planner.mapping.irregular import (
    Tables,
    enumerated_s,
    has_parts_of_nodes,
    legal_layouts,
    priced_under,
    random_request,
)
from tests.planner.search.rows_of_rules import with_rules
from tests.soaked import some


def one_shot_s(tables: Tables) -> float:
    """Every layout with every profile at its exact price, and the counts of slots, in one model."""
    times, needs = [], []
    for layout in tables.layouts():
        profiles = tables.pricing.profiles(layout)
        prices: list[tuple[int, Need]] = []
        if profiles is not None:
            for at, need in enumerate(profiles.needs):
                placement = profiles.placement.take(at)
                price = priced_under(tables.pricing, layout, placement)
                if price < inf:
                    prices.append((price_ns(price), need))
        times.append(np.array([price for price, _ in prices], dtype=np.int64))
        needs.append([need for _, need in prices])
    if not times:
        return inf
    rules = rules_for(tables.candidates.workload)
    choice = solve(with_rules(build_model(times, needs), rules, tables.candidates), 0, None)
    return (
        inf if choice.status == "infeasible" else float(times[choice.layout][choice.mapping]) * 1e-9
    )


BLOCK = 4
"""Requests of one test: one of each kind of `random_request`."""
TOO_FEW = 71
"""Its whole nodes are too few for any plan."""


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1, BLOCK), marks=pytest.mark.soak),
        pytest.param([TOO_FEW], marks=pytest.mark.slow),
        *(
            pytest.param(range(block * BLOCK, (block + 1) * BLOCK), marks=pytest.mark.soak)
            for block in some([*range(1, 30), 0])
        ),
    ],
)
def test_the_plan_is_the_least_of_all_layouts_on_all_assignments(seeds: Sequence[int]) -> None:
    for seed in seeds:
        request = random_request(seed)
        assert is_irregular(request.cluster), seed
        tables = legal_layouts(request)
        least = enumerated_s(tables)
        found = fastest_plan(request)
        if least == inf:
            assert found.status == "infeasible", seed
            continue
        if has_parts_of_nodes(request):
            # Slots that are parts of nodes are some of the mappings that are looked at.
            price_s, bound_s = found.objective.step_time_s, found.objective.lower_bound_s
            assert price_s is not None, seed
            assert bound_s is not None, seed
            assert bound_s <= price_s <= least * (1 + 1e-9), seed
            continue
        assert found.status == "optimal", seed
        assert found.objective.gap == 0
        assert found.objective.step_time_s == pytest.approx(least, rel=1e-9), seed
        assert one_shot_s(tables) == pytest.approx(least, abs=3e-9), seed


@pytest.mark.slow
def test_the_search_leaves_layouts_and_slots_to_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight nodes on uneven leaves: the same optimum with the counts of slots in the model and without.

    Bounds stay as they were first: kept up to date they settle this request without a model.
    """
    found, posted = [], []
    monkeypatch.setattr(MappedPricing, "tightened", lambda pricing, layout, mappings: mappings)

    def counted(*arguments: Any) -> Any:
        posted.append(sum(need is not None for asked in arguments[1] for need in asked))
        return build_model(*arguments)

    monkeypatch.setattr("meshwright.planner.search.choosers.build_model", counted)
    for cells in (SearchParams().largest_cells, 0):
        params = SearchParams(largest_cells=cells)
        monkeypatch.setattr(
            "meshwright.planner.search.loop.SearchParams", lambda params=params: params
        )
        posted.clear()
        made = fastest_plan(uneven_request())
        found.append((made.status, made.objective.step_time_s))
        assert bool(sum(posted)) == bool(cells)
    assert found[0] == found[1]
    assert found[0][0] == "optimal"


def uneven_request() -> PlanRequest:
    nodes = [(leaf, pod) for leaf, pod, n in (("a", "p", 3), ("b", "p", 1), ("c", "q", 2), ("d", "q", 2))
             for _ in range(n)]  # fmt: skip
    base = random_request(0).cluster
    cluster = base.model_copy(
        update={
            "levels": tuple(
                FabricLevelSpec(name=name, gpus=gpus, oversubscription=over)
                for name, gpus, over in (("leaf", 32, 1), ("pod", 128, 2), ("core", 256, 4))
            ),
            "nodes": tuple(NodeSpec(name=f"n{i}", leaf=x, pod=y) for i, (x, y) in enumerate(nodes)),
            "gpus": 64,
        }
    )
    return replace(
        random_request(0), cluster=cluster, gpus=64, global_batch=64, pins={"tp": 8, "pp": 4}
    )


@pytest.mark.parametrize("alike", [False, True])
def test_counts_that_blocks_hold_alike_keep_pipelines_in_them(alike: bool) -> None:
    """As many slots of every stage in a pod (or leaf): neighbours are matched inside it."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        stages, leaf_pod = int(rng.integers(2, 5)), (0, 0, 1, 1, 1)
        per_pod = rng.integers(1, 4, 2)
        counts = np.zeros((5, stages), dtype=np.int64)
        for stage in range(stages):
            for leaves, slots in zip(((0, 1), (2, 3, 4)), per_pod, strict=True):
                np.add.at(counts[:, stage], rng.choice(leaves, slots), 1)
        if alike:
            counts[:] = counts[:, :1]
        problem = MappingProblem(
            stages=stages,
            slots=int(per_pod.sum()),
            traffic=Traffic(ring_bytes=1.0, hop_bytes=1.0),
            leaf_slots=tuple(int(n) for n in counts.sum(axis=1)),
            leaf_s_per_byte=(1.0,) * 5,
            leaf_pod=leaf_pod,
            pod_s_per_byte=(1.0, 1.0),
        )
        found = assignment_of(problem, counts)
        blocks = found if alike else problem.pod_of[found]
        assert np.all(blocks == blocks[0])
        held = np.array([np.bincount(row, minlength=5) for row in found]).T
        assert np.array_equal(held, counts)


@pytest.mark.parametrize("seed", [6, 9, 20])
def test_bounds_follow_what_prices_of_other_layouts_exclude(seed: int) -> None:
    """They rise to what is bounded anew, and stay on part-filled nodes (20), whose mappings are listed."""
    request = random_request(seed)
    tables = legal_layouts(request)
    before = tables.pricing.mapping_bounds(tables.candidates.layouts)
    layouts = list(tables.layouts())
    for layout, bounds in zip(layouts, before, strict=True):
        tables.pricing.exact(layout, bounds, inf)
    anew = tables.pricing.mapping_bounds(tables.candidates.layouts)
    rising = 0
    for layout, old, new in zip(layouts, before, anew, strict=True):
        tightened = tables.pricing.tightened(layout, old)
        assert np.array_equal(tightened.bound_s, new.bound_s)
        rising += tightened.least_s > old.least_s
    assert (rising > 0) == (not has_parts_of_nodes(request))


def least_bound_completed(request: PlanRequest) -> tuple[float, float]:
    """Seconds of the plan, and of the layout of the least bound as well as can be; infinite without any."""
    space, tables = space_of(request), legal_layouts(request)
    outcome = LayoutSearch(space, [branch_of(space, MappedPricing(space.workload))]).run()
    if not outcome.best:
        return inf, inf
    bounds = tables.pricing.mapping_bounds(tables.candidates.layouts)
    row = int(np.argmin([each.least_s for each in bounds]))
    completed = tables.pricing.exact(tables.candidates.layouts.scalar(row), bounds[row], inf)
    return outcome.best[0].step_time_s, inf if completed is None else completed.step_time_s


@pytest.mark.soak
def test_the_least_bound_in_place_of_the_model_is_worse_in_half_of_the_requests() -> None:
    pairs = [
        least_bound_completed(request)
        for request in map(random_request, range(30))
        if is_irregular(request.cluster) and not has_parts_of_nodes(request)
    ]
    planned = [(best_s, other_s) for best_s, other_s in pairs if best_s < inf]
    worse = sum(other_s > best_s * (1 + 1e-4) for best_s, other_s in planned)
    assert len(planned) >= 20
    assert worse * 2 >= len(planned)

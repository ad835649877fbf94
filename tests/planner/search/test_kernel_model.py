"""The model over kernels: never dearer than the truth, its solution the plan, its constraints decide."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from ortools.sat.python import cp_model

from meshwright.costmodel.estimate import stage_memory_gib
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import placement_on
from meshwright.planner.bounds.combination_costs import combination_costs, memory_rows
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.search.choosers import KernelChooser
from meshwright.planner.search.kernel_model import KernelModel
from meshwright.planner.search.loop import LayoutSearch, branch_of
from meshwright.planner.search.pricing import Certificate, SearchParams
from meshwright.planner.search.space import Space, space_of
from tests.planner.search.test_planner_optimum import request
from tests.soaked import some

ARGMIN_MISLEADS = (36, 1088, 1103, 1023, 1111, 1203)
"""Cases in which the layout of the least bound is not the best, or does not fit."""


OTHER_SIZES = (
    (2, 2),
    (2, 5),
    (1007, 1),
    (1007, 5),
    (1019, 1),
    (1019, 2),
    (1024, 1),
    (1024, 5),
    (1024, 2),
)
"""Seeds and largest numbers of combinations in a model."""


def searched(seed: int) -> tuple[Space, LayoutSearch]:
    space = space_of(request(seed))
    return space, LayoutSearch(space, [branch_of(space, CostModelPricing(space.workload))])


def leading_layers(space: Space, priced: Priced) -> list[int]:
    """Leading dense layers of each rank, virtual stage by virtual stage."""
    model = space.workload.model
    missing = model.dense_layers if model.moe_layers else 0
    leading = [0] * len(priced.stages)
    for stage in range(int(priced.layout.vpp)):
        for rank, sizes in enumerate(priced.stages):
            placed = min(missing, sizes[stage])
            leading[rank] += placed
            missing -= placed
    return leading


def check_below_the_truth(space: Space, layout: Layout, priced: Priced) -> None:
    """Seconds and GiB of the combination at the split that was priced."""
    workload = space.workload.on(int(layout.gpus))
    columns = {name: np.array([value]) for name, value in vars(layout).items()}
    table = {axis: np.array([row]) for axis, row in priced.matrix.items()}
    placement = placement_on(workload.cluster, Layout(**columns), table)
    costs = combination_costs(workload, Layout(**columns), placement)[0]
    full = bool(int(layout.recompute) & Recompute.FULL)
    amount = int(priced.layout.recompute_layers) if full else 0
    layers = [sum(sizes) for sizes in priced.stages]
    again = [sum(min(amount, size) for size in sizes) for sizes in priced.stages]
    leading, last = leading_layers(space, priced), len(layers) - 1
    loads = [
        costs.layer_s * layers[rank]
        + (costs.leading_s - costs.layer_s) * leading[rank]
        + costs.again_s * again[rank]
        + costs.first_s * (rank == 0)
        + costs.last_s * (rank == last)
        for rank in range(len(layers))
    ]
    step_s = max(
        costs.weight * max(loads) + rest_s + again_s * sum(again) for rest_s, again_s in costs.lines
    )
    assert step_s <= priced.step_time_s * (1 + 1e-9)
    used_gib = stage_memory_gib(workload, priced.layout, priced.stages)
    for rank, row in enumerate(memory_rows(workload, layout)):
        holds_gib = row.fixed_gib + row.layer_gib * layers[rank] + row.leading_gib * leading[rank]
        holds_gib -= row.relief_gib * again[rank]
        assert holds_gib <= used_gib[rank] * (1 + 1e-9)


@pytest.mark.parametrize(
    "seed", [pytest.param(2, marks=pytest.mark.soak), pytest.param(1007, marks=pytest.mark.slow)]
)
def test_combinations_never_cost_more_than_the_truth(seed: int) -> None:
    space = space_of(request(seed))
    pricing = CostModelPricing(space.workload)
    layouts = space.layouts(space.degrees(space.workload.gpus))
    rows = np.random.default_rng(seed).permutation(len(np.asarray(layouts.tp)))[:40]
    _, amounts = pricing.least_memory_gib(layouts)
    some = replace(layouts, recompute_layers=amounts).take(rows)
    checked = 0
    for row, bounds in enumerate(pricing.mapping_bounds(some)):
        every = replace(bounds, bound_s=np.full_like(bounds.bound_s, -inf))
        priced = pricing.exact(some.scalar(row), every, inf)
        if priced is not None:
            check_below_the_truth(space, some.scalar(row), priced)
            checked += 1
    assert checked


@pytest.mark.parametrize(
    "seed",
    [
        *ARGMIN_MISLEADS[:2],
        pytest.param(ARGMIN_MISLEADS[2], marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in ARGMIN_MISLEADS[3:]),
    ],
)
def test_the_least_bound_completed_exactly_is_a_worse_plan_or_none(seed: int) -> None:
    space, search = searched(seed)
    branch = branch_of(space, CostModelPricing(space.workload))
    degrees = space.degrees(space.workload.gpus)
    layouts, _, _ = branch.expanded(degrees, inf, Certificate())
    bounds = branch.pricing.mapping_bounds(layouts)
    least = int(np.argmin([each.least_s for each in bounds]))
    completed = branch.pricing.exact(layouts.scalar(least), bounds[least], inf)
    best = search.run().best[0]
    assert completed is None or completed.step_time_s > best.step_time_s * (1 + 1e-4)


@pytest.mark.parametrize(
    "seed", [1007, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 1019))]
)
def test_the_plan_is_read_from_the_last_model(seed: int) -> None:
    """Solved again by stock OR-Tools: the printed bound, and the literals and layers of the plan."""
    _, search = searched(seed)
    outcome = search.run()
    best = outcome.best[0]
    assert isinstance(search.chooser, KernelChooser)
    assert search.chooser.last is not None
    model = search.chooser.last.model
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    assert solver.objective_value / 1e9 == pytest.approx(best.step_time_s, abs=2e-9)
    assert outcome.certificate.model_bound_s == pytest.approx(best.step_time_s, abs=2e-9)
    values = {
        variable.name: value
        for variable, value in zip(
            model.proto.variables, solver.response_proto.solution, strict=True
        )
    }
    for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch"):
        assert values[f"{axis}_{getattr(best.layout, axis)}"] == 1
    for rank, sizes in enumerate(best.stages):
        assert values[f"layers_r{rank}"] == sum(sizes)


def test_hbm_decides_how_layers_are_dealt_out() -> None:
    """A kernel pinned: with less HBM rank 0, which holds the most activations, gets fewer layers."""
    asked = replace(request(1007), pins={"pp": 2, "vpp": 1, "recompute": "none"})
    asked = replace(asked, model=asked.model.model_copy(update={"layers": 8}))
    space = space_of(asked)
    search = LayoutSearch(space, [branch_of(space, CostModelPricing(space.workload))])
    search.run()
    assert isinstance(search.chooser, KernelChooser)
    assert search.chooser.last is not None
    chosen = next(each for each in search.chooser.last.combinations if len(each.memory) == 2)
    model = space.workload.model

    def first_rank(limit_gib: float) -> int | None:
        alone = replace(chosen, limit_gib=limit_gib, is_open=True, priced=None)
        leading = model.dense_layers if model.moe_layers else 0
        built = KernelModel(layers=8, leading=leading, combinations=[alone], cutoff_s=inf)
        layers = built.solve(0, None, SearchParams()).layers
        return layers[0] if layers else None

    row = chosen.memory[0]
    roomy, tight = first_rank(1000.0), first_rank(row.fixed_gib + 2.5 * row.layer_gib)
    assert roomy is not None
    assert roomy > 2
    assert tight is None or tight <= 2
    assert first_rank(row.fixed_gib + 0.5 * row.layer_gib) is None


@pytest.mark.parametrize(
    ("seed", "largest"),
    [
        (1007, 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (1019, 5))),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in some(OTHER_SIZES)),
    ],
)
def test_models_too_small_for_all_combinations_prove_the_same_optimum(
    seed: int, largest: int
) -> None:
    """What one model leaves out, a later one must take in."""
    space, search = searched(seed)
    branches = [branch_of(space, CostModelPricing(space.workload))]
    params = SearchParams(largest_master=largest, priced_per_round=1, most_unsolved=1000)
    small = LayoutSearch(space, branches, params=params).run()
    whole = search.run()
    assert (small.status, whole.status) == ("optimal", "optimal")
    assert small.best[0].step_time_s == whole.best[0].step_time_s

"""Rows on mappings in the model: what they refuse by hand, and that they decide on plans."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from ortools.sat.python import cp_model

from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.choosers import KernelChooser
from meshwright.planner.search.kernel_model import keep_inside, spare_cuts
from meshwright.planner.search.loop import LayoutSearch, branch_of, branches_of, search_exhaustively
from meshwright.planner.search.space import space_of
from tests.planner.mapping.test_cut_limit import PINS
from tests.planner.mapping.test_cut_limit import asked as with_cuts
from tests.planner.plan.test_inside_domain import asked as with_experts
from tests.planner.search.test_planner_optimum import request as random_request
from tests.soaked import some


def three_choices() -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    model = cp_model.CpModel()
    literals = [model.new_bool_var(f"choice_{index}") for index in range(3)]
    model.add_exactly_one(literals)
    return model, literals


def allowed(model: cp_model.CpModel, literals: list[cp_model.IntVar]) -> list[int]:
    """Which of the choices a model lets through, each asked alone."""
    through = []
    for index, literal in enumerate(literals):
        alone = model.clone()
        alone.add(alone.get_bool_var_from_proto_index(literal.index) == 1)
        if cp_model.CpSolver().solve(alone) == cp_model.OPTIMAL:
            through.append(index)
    return through


def test_groups_have_all_their_members_in_one_domain() -> None:
    model, literals = three_choices()
    keep_inside(model, literals, "ep", degrees=[8, 16, 8], inside=[8, 8, 4])
    assert allowed(model, literals) == [0]


def test_every_cut_has_a_row_and_what_is_not_known_is_not_used() -> None:
    model, literals = three_choices()
    uses = [{"leaf_uplink_gradients": 0.5}, {}, {"pod_bisection_micro-batches": 0.51}]
    spare_cuts(model, literals, uses, 0.5)
    assert allowed(model, literals) == [0, 1]
    assert {each.name for each in model.proto.constraints} >= {
        "bisection_leaf_uplink_gradients",
        "bisection_pod_bisection_micro-batches",
    }


@pytest.mark.parametrize(
    ("use", "is_allowed"),
    [(0.3, True), (0.3 * (1 + 5e-10), True), (0.3 * (1 + 2e-9), False), (float("inf"), False)],
)
def test_a_cut_is_as_full_as_the_rule_says(use: float, is_allowed: bool) -> None:
    model, literals = three_choices()
    spare_cuts(model, literals, [{"pod": use}, {}, {}], 0.3)
    assert (0 in allowed(model, literals)) == is_allowed


def without_rows(model: cp_model.CpModel, name: str) -> cp_model.CpModel:
    """A model whose rows of a kind let everything through."""
    loose, dropped = model.clone(), 0
    for row in loose.proto.constraints:
        if row.name.startswith(name):
            row.linear.domain.clear()
            row.linear.domain.extend([-(2**60), 2**60])
            dropped += 1
    assert dropped
    return loose


def chosen(model: cp_model.CpModel) -> tuple[float, int]:
    """Seconds of the optimum, and the number of its combination."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    values = solver.response_proto.solution
    names = [each.name for each in model.proto.variables]
    index = next(
        int(name.removeprefix("combination_"))
        for name, value in zip(names, values, strict=True)
        if value and name.startswith("combination_")
    )
    return solver.objective_value / 1e9, index


def solved(request: PlanRequest) -> tuple[float, KernelChooser]:
    """Seconds of the proven plan, and what chose it last."""
    search = LayoutSearch(space_of(request), branches_of(request, pricing_of))
    outcome = search.run()
    assert outcome.status == "optimal"
    assert isinstance(search.chooser, KernelChooser)
    return outcome.best[0].step_time_s, search.chooser


INSIDE = {
    "experts": replace(with_experts({"etp": 2}), inside_domain=("ep",)),
    "long sequences": read_request(
        model="llama-3-70b",
        cluster="dgx-h100",
        gpus=64,
        global_batch=8,
        seq_len=65_536,
        inside_domain="cp",
    ),
}


@pytest.mark.parametrize(
    "name", ["experts", pytest.param("long sequences", marks=pytest.mark.soak)]
)
def test_without_the_rows_of_the_domain_another_layout_is_chosen(name: str) -> None:
    request = INSIDE[name]
    step_s, chooser = solved(request)
    assert chooser.last is not None
    model, combinations = chooser.last.model, chooser.last.combinations
    assert chosen(model)[0] == pytest.approx(step_s, abs=2e-9)
    loose_s, index = chosen(without_rows(model, "nvlink_domain_"))
    assert loose_s < 0.99 * step_s
    other = combinations[index]
    axis = request.inside_domain[0]
    assert other.inside[axis] < int(getattr(other.layout, axis))


@pytest.mark.slow
def test_without_the_rows_of_the_cuts_another_mapping_is_chosen() -> None:
    step_s, chooser = solved(with_cuts(pin=f"{PINS},shard_groups=1", max_cut_use=0.52))
    assert chooser.last is not None
    model, combinations = chooser.last.model, chooser.last.combinations
    assert chosen(model)[0] == pytest.approx(step_s, abs=2e-9)
    loose_s, index = chosen(without_rows(model, "bisection_"))
    assert loose_s < 0.9 * step_s
    priced = combinations[index].priced
    assert priced is not None
    assert max(use for _, use in priced.cut_uses) > 0.52


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1, 3, 4, 5, 11),
        pytest.param(6, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((2, 7, 8, 9, 10))),
    ],
)
def test_the_plan_under_limits_is_that_of_pricing_every_layout(seed: int) -> None:
    draw = random.Random(seed)
    asked = replace(
        random_request(seed),
        inside_domain=draw.choice([(), ("cp",), ("ep",), ("cp", "ep")]),
        max_cut_use=draw.choice([1.0, 0.9, 0.5, 0.2]),
    )
    space = space_of(asked)
    branches = [branch_of(space, pricing_of(space.workload))]
    every = search_exhaustively(branches)
    found = LayoutSearch(space, branches).run()
    assert found.status == every.status
    prices = [outcome.best[0].step_time_s for outcome in (every, found) if outcome.best]
    assert not prices or prices[0] == pytest.approx(prices[-1], rel=1e-12)

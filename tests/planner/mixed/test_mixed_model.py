"""The model of a plan on a mixed cluster, solved again by stock OR-Tools from its file alone."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from ortools.sat.python import cp_model

from meshwright.planner.mixed.document import MixedRequest
from meshwright.planner.mixed.service import make_mixed_plan
from tests.planner.mixed.test_mixed_cuts import dense, sparing
from tests.planner.mixed.test_mixed_optimum import (
    asked,
    asked_inside,
    asked_leading,
    asked_on_hosts,
)
from tests.planner.mixed.test_mixed_unlike import asked_unlike
from tests.planner.search.test_limit_rows import without_rows
from tests.soaked import some

CASES = 12
KINDS: dict[str, Callable[[int], MixedRequest]] = {
    "alike": asked,
    "leading": asked_leading,
    "inside": asked_inside,
    "hosts": asked_on_hosts,
    "unlike": asked_unlike,
    "cuts": lambda seed: sparing(dense(seed), 0.05),
}


def parsed(path: Path) -> cp_model.CpModel:
    model = cp_model.CpModel()
    assert model.proto.parse_text_format(path.read_text(encoding="utf-8"))
    return model


def solved(model: cp_model.CpModel) -> tuple[float, set[str]]:
    """Seconds of the optimum, infinite without any, and the names of what is 1 there."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return inf, set()
    assert status == cp_model.OPTIMAL
    values = solver.response_proto.solution
    names = [variable.name for variable in model.proto.variables]
    return solver.objective_value / 1e9, {
        name for name, value in zip(names, values, strict=True) if value == 1
    }


def compare(folder: Path, kind: str, seed: int) -> str:
    """The model's optimum is the plan; whether a pipeline, a part alone or neither is."""
    path = folder / "model.txt"
    plan = make_mixed_plan(KINDS[kind](seed), model_file=path).document
    step_s = plan.objective.step_time_s
    if step_s is None:
        assert not path.exists() or solved(parsed(path))[0] == inf
        return "none"
    optimum_s, chosen = solved(parsed(path))
    assert optimum_s == pytest.approx(step_s, abs=2e-9)
    if plan.layout is None:
        return "alone"
    assert {f"tp_{plan.layout.tp}", f"pp_{plan.layout.pp}", f"dp_{plan.layout.dp}"} <= chosen
    return "pipeline"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("alike", 0),
        ("leading", 1),
        ("inside", 0),
        ("inside", 5010),
        ("unlike", 1),
        ("cuts", 2),
        ("hosts", 1),
    ],
)
def test_the_file_solved_again_gives_the_plan(tmp_path: Path, kind: str, seed: int) -> None:
    compare(tmp_path, kind, seed)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_solved_again_always_gives_the_plan(tmp_path: Path, kind: str) -> None:
    outcomes = set()
    for seed in some(range(CASES), first=8):
        outcomes.add(compare(tmp_path, kind, seed))
        (tmp_path / "model.txt").unlink(missing_ok=True)
    assert outcomes != {"none"}


def test_rows_on_memory_domains_and_cuts_stand_in_every_model(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    plan = make_mixed_plan(asked(0), model_file=path).document
    assert len(plan.runs_on) == 2
    names = {each.name for each in parsed(path).proto.constraints}
    assert {"hbm_r0", "hbm_r1", "nvlink_domain_tp"} <= names
    for part in plan.runs_on:
        assert any(each.startswith(f"bisection_{part}_") for each in names), names


def test_without_its_rows_on_cuts_the_model_chooses_what_fills_one(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    request = KINDS["cuts"](2)
    plan = make_mixed_plan(request, model_file=path).document
    free_s, _ = solved(without_rows(parsed(path), "bisection_"))
    unlimited = make_mixed_plan(sparing(request, 1.0)).document.objective.step_time_s
    assert unlimited is not None
    assert plan.objective.step_time_s is not None
    assert unlimited - 2e-9 <= free_s < 0.99 * plan.objective.step_time_s

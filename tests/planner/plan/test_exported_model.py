"""The exported model is solved again by stock OR-Tools, from its file alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from ortools.sat.python import cp_model

from meshwright.cli import main
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.recount import recounted_placement
from meshwright.planner.audit import stated_figure_faults
from meshwright.planner.mapping.joint import choice_instance
from meshwright.planner.mapping.slots import assignment_of, ranks_of
from meshwright.planner.plan.best_plan import export_model
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.plan.texts import workload_of_plan
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.run_terms import layout_from_document
from meshwright.planner.search.pricing import Certificate, Outcome
from tests.planner.mapping.irregular import has_parts_of_nodes, random_request
from tests.planner.mapping.test_stages_apart import uneven_request
from tests.planner.search.test_limit_rows import without_rows
from tests.planner.search.test_planner_optimum import request


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, str]:
    """A plan and the file of its model."""
    path = tmp_path_factory.mktemp("model") / "model.txt"
    plan = make_plan(request(1007), robustness=False, choices=False, model_file=path)
    return plan, path.read_text(encoding="utf-8")


def test_the_file_solved_again_gives_the_printed_bound(exported: tuple[Plan, str]) -> None:
    plan, text = exported
    model = cp_model.CpModel()
    assert model.proto.parse_text_format(text)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    assert plan.solver.proof is not None
    assert solver.objective_value / 1e9 == plan.solver.proof.model_bound_s
    assert not [text for text in plan.warnings if "no model" in text]


def test_what_is_chosen_carries_names(exported: tuple[Plan, str]) -> None:
    plan, text = exported
    model = cp_model.CpModel()
    model.proto.parse_text_format(text)
    variables = {variable.name for variable in model.proto.variables}
    assert plan.layout is not None
    assert plan.execution is not None
    axes = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch", "zero_stage")
    chosen = {f"{axis}_{getattr(plan.layout, axis)}" for axis in axes}
    assert chosen | {"step_ns", "layers_r0"} <= variables
    names = {each.name for each in model.proto.constraints}
    assert {"hbm_r0", "all_layers", "step_bound", "nvlink_domain_tp"} <= names
    assert any(each.startswith("bisection_") for each in names)


@pytest.mark.slow
def test_without_a_layout_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    asked = replace(request(1007), reserve_gib=9_000.0)
    plan = make_plan(asked, robustness=False, choices=False, model_file=path)
    assert not path.exists()
    assert "left no layout" in plan.warnings[-1]


def solved_again(text: str) -> tuple[float, dict[str, int]]:
    """Seconds of the optimum and what each named variable is there."""
    model = cp_model.CpModel()
    assert model.proto.parse_text_format(text)
    return solved(model)


def solved(model: cp_model.CpModel) -> tuple[float, dict[str, int]]:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    names = [variable.name for variable in model.proto.variables]
    values = zip(names, solver.response_proto.solution, strict=True)
    return solver.objective_value / 1e9, {name: value for name, value in values if name}


def counted_step_s(plan: Plan, ranks: Sequence[tuple[int, int]]) -> float:
    """A step of a plan's layout with its ranks on other GPUs, members of groups counted rank by rank."""
    assert plan.layout is not None
    assert plan.mapping is not None
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    by_stage = plan.mapping.stage_ep is not None
    placed = recounted_placement(workload.cluster, layout, ranks, by_stage=by_stage)
    estimate = estimate_layout(workload, layout, placed, stages_of(plan.layout.stages))
    return float(np.asarray(estimate.step_time_s))


def stages_of(stages: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, stages))


def ranks_in_slots(plan: Plan, chosen: dict[str, int]) -> list[tuple[int, int]]:
    """The GPU of every rank where a solution says the leaf of each slot, or how many slots leaves have."""
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    instance = choice_instance(workload, layout, stages_of(plan.layout.stages))
    problem, leaves = instance.problem, instance.slots.leaf_names
    if len(set(instance.slots.pod_names)) > 1:
        pods = [instance.slots.pod_names[pod] for pod in problem.leaf_pod]
        leaves = tuple(f"{pod}_{leaf}" for pod, leaf in zip(pods, leaves, strict=True))
    if problem.traffic.expert_slots == problem.traffic.context_slots == 1:
        counts = [
            [chosen[f"slots_of_stage_{stage}_on_{leaf}"] for stage in range(problem.stages)]
            for leaf in leaves
        ]
        return ranks_of(instance, assignment_of(problem, np.array(counts)))
    assignment = np.full((problem.stages, problem.slots), -1)
    for stage, slot, (number, leaf) in product(
        range(problem.stages), range(problem.slots), enumerate(leaves)
    ):
        if chosen[f"slot_{slot}_of_stage_{stage}_on_{leaf}"]:
            assignment[stage, slot] = number
    return ranks_of(instance, assignment)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(10, id="leaves"),
        pytest.param(4, id="pods"),
        pytest.param(14, id="context"),
        pytest.param(19, id="experts"),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(24, 48)),
    ],
)
def test_the_model_of_uneven_leaves_puts_slots_where_the_plan_is_as_fast(
    tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "model.txt"
    asked = random_request(seed)
    plan = make_plan(asked, robustness=False, choices=False, model_file=path)
    if plan.layout is None:
        assert not path.exists()
        return
    step_s = plan.objective.step_time_s
    assert step_s is not None
    optimum_s, chosen = solved_again(path.read_text(encoding="utf-8"))
    assert optimum_s == pytest.approx(step_s, abs=2e-9)
    if not has_parts_of_nodes(asked):
        assert counted_step_s(plan, ranks_in_slots(plan, chosen)) <= step_s * (1 + 1e-9)
    assert list(stated_figure_faults(plan)) == []


def test_rooms_of_leaves_decide_in_the_model_of_uneven_leaves(tmp_path: Path) -> None:
    """Without them a faster way to lie would be chosen."""
    path = tmp_path / "model.txt"
    plan = make_plan(random_request(10), robustness=False, choices=False, model_file=path)
    assert plan.objective.step_time_s is not None
    model = cp_model.CpModel()
    model.proto.parse_text_format(path.read_text(encoding="utf-8"))
    names = {each.name for each in model.proto.constraints}
    assert {"hbm_r0", "all_layers", "step_bound", "nvlink_domain_tp", "room_on_leaf_0"} <= names
    assert any(name.startswith("bisection_") for name in names)
    assert solved(without_rows(model, "room_on_leaf"))[0] < 0.999 * plan.objective.step_time_s


@pytest.mark.parametrize("seed", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (14, 35))])
def test_several_layouts_lie_in_the_model_in_every_way_that_may_be_faster(
    tmp_path: Path, seed: int
) -> None:
    """Slots of unlike grids decide: the plan is chosen, and without rooms on leaves another layout is."""
    path = tmp_path / "model.txt"
    asked = replace(random_request(seed), top_k=4)
    plan = make_plan(asked, robustness=False, choices=False, model_file=path)
    model = cp_model.CpModel()
    model.proto.parse_text_format(path.read_text(encoding="utf-8"))
    optimum_s, chosen = solved(model)
    assert optimum_s == pytest.approx(plan.objective.step_time_s, abs=2e-9)
    assert any(re.match(r"grid_\d+_slots?_", name) for name in chosen)
    assert counted_step_s(plan, ranks_in_slots(plan, chosen)) <= optimum_s * (1 + 1e-9)
    assert solved(without_rows(model, "room_on_leaf"))[0] < 0.999 * optimum_s


def test_the_model_of_unlike_stages_says_how_near_each_lies(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    plan = make_plan(uneven_request(0), robustness=False, choices=False, model_file=path)
    assert plan.mapping is not None
    assert plan.mapping.stage_ep is not None
    optimum_s, chosen = solved_again(path.read_text(encoding="utf-8"))
    assert optimum_s == pytest.approx(plan.objective.step_time_s, abs=2e-9)
    for stage, members in enumerate(plan.mapping.stage_ep):
        assert chosen[f"ep_of_stage_{stage}_in_blocks_{'_'.join(map(str, members))}"] == 1


def test_the_model_of_parts_of_nodes_places_every_rank(tmp_path: Path) -> None:
    free = (8, 6, 4)
    nodes = [
        {"name": f"n{index}", "leaf": leaf, "free_gpus": free[index]}
        for index, leaf in enumerate("aab")
    ]
    asked = read_request(
        model="gpt2-xl",
        cluster={"base": "h100-leaf-3to1", "nodes": nodes},
        gpus=18,
        global_batch=72,
        seq_len=1024,
    )
    path = tmp_path / "model.txt"
    plan = make_plan(asked, robustness=False, choices=False, model_file=path)
    step_s = plan.objective.step_time_s
    assert step_s is not None
    optimum_s, chosen = solved_again(path.read_text(encoding="utf-8"))
    assert optimum_s == pytest.approx(step_s, abs=2e-9)
    taken = Counter[int]()
    ranks = {}
    for name, value in chosen.items():
        found = re.fullmatch(r"ranks_(\d+)(?:_to_(\d+))?_on_node_(\d+)", name)
        if found is None or not value:
            continue
        first, last, node = (int(text or found[1]) for text in found.groups())
        for rank in range(first, last + 1):
            ranks[rank] = (node, taken[node])
            taken[node] += 1
    assert sorted(ranks) == list(range(18))
    assert all(count <= free[node] for node, count in taken.items())
    assert counted_step_s(plan, [ranks[rank] for rank in range(18)]) <= step_s * (1 + 1e-9)


def test_an_exhaustive_search_says_that_it_solves_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    asked = replace(request(1007), method="exhaustive")
    outcome = Outcome(status="optimal", best=(), lower_bound_s=None, certificate=Certificate())
    words = export_model(asked, outcome, path)
    assert words is not None
    assert "an exhaustive search solves none" in words
    assert not path.exists()


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    path.write_text("mine", encoding="utf-8")
    arguments = ["plan", "llama-2-7b", "--cluster", "dgx-a100", "--gpus", "8"]
    arguments += ["--global-batch", "64", "--seq-len", "4096", "--export-model", str(path)]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert path.read_text(encoding="utf-8") == "mine"

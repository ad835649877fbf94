"""The exported model is solved again by stock OR-Tools, from its file alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from ortools.sat.python import cp_model

from meshwright.cli import main
from meshwright.planner.audit import stated_figure_faults
from meshwright.planner.plan.best_plan import export_model
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.pricing import Certificate, Outcome
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


def test_a_plan_on_uneven_leaves_says_that_none_was_written_and_holds(tmp_path: Path) -> None:
    """`verify` took the words on the file for a fault of the plan."""
    nodes = [{"name": f"n{index}", "leaf": leaf} for index, leaf in enumerate("aab")]
    asked = read_request(
        model="gpt2-xl",
        cluster={"base": "h100-leaf-3to1", "nodes": nodes},
        gpus=24,
        global_batch=24,
        seq_len=1024,
        pin="tp=1,cp=1,pp=1",
    )
    path = tmp_path / "model.txt"
    plan = make_plan(asked, robustness=False, choices=False, model_file=path)
    assert not path.exists()
    assert "irregular fabrics" in plan.warnings[-1]
    assert list(stated_figure_faults(plan)) == []


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

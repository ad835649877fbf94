"""The schedule as a choice of the plan: pins, reasons, launch files, and the way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.execution_names import SCHEDULE_NAMES
from meshwright.costmodel.schedules import Schedule, schedule_named, traits
from meshwright.errors import InputError
from meshwright.frameworks.catalog import RECORDS, framework_named, planned
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.model_specs.reader import read_model
from meshwright.planner.analysis.neighbours import neighbours
from meshwright.planner.launch.torchtitan import TORCHTITAN_WRITER
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_text, read_plan
from meshwright.planner.request.plan_request import PlanRequest, parse_pins
from meshwright.planner.runs.launches.reader import complete, read_launch
from meshwright.planner.runs.run_file import run_from_mapping
from meshwright.planner.search.space import space_of
from tests.planner.runs.written_run import run_to_mapping


def request(**changes: Any) -> PlanRequest:
    base = PlanRequest(
        model=read_model("llama-3-8b"),
        cluster=read_cluster("dgx-h100"),
        gpus=16,
        global_batch=64,
        seq_len=8192,
        framework="torchtitan",
        pins={"pp": 4, "tp": 2, "cp": 1},
    )
    return replace(base, **changes)


def pinned(name: str, **changes: Any) -> PlanRequest:
    return request(pins={"pp": 4, "tp": 2, "cp": 1, "schedule": name}, **changes)


SCHEDULES = planned(TORCHTITAN.schedules)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pinned_schedule_is_planned_launched_and_read_back(name: str, tmp_path: Path) -> None:
    made = fastest_plan(pinned(name))
    assert made.status == "optimal"
    assert made.layout is not None
    assert made.layout.schedule == name
    args = TORCHTITAN_WRITER.files(made)["torchtitan_args.json"]
    path = tmp_path / "torchtitan_args.json"
    path.write_text(args, encoding="utf-8")
    read = read_launch(path)
    assert read.settings["schedule"] == name
    assert (
        complete(read, ["model=llama-3-8b", "cluster=dgx-h100"], str(path))["run"]["schedule"]
        == name
    )


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        pytest.param("megatron", "zbv", marks=pytest.mark.soak),
        pytest.param("megatron", "gpipe", marks=pytest.mark.slow),
        ("deepspeed", "gpipe"),
        pytest.param("torchtitan", "dualpipe", marks=pytest.mark.slow),
    ],
)
def test_what_a_framework_lacks_is_named(framework: str, name: str) -> None:
    made = fastest_plan(request(framework=framework, pins={"pp": 4, "schedule": name}))
    assert made.status == "infeasible"
    assert made.infeasible is not None
    assert (
        f"{framework}-schedule: {framework} runs {', '.join(planned(framework_named(framework).schedules))}"
        in (made.infeasible.conflict)
    )
    assert f"drop the pin schedule={name}" in made.infeasible.smallest_changes


@pytest.mark.slow
def test_compiled_layers_exclude_a_split_backward_pass() -> None:
    made = fastest_plan(pinned("zbv", precision="fp8"))
    assert made.infeasible is not None
    assert any(words.startswith("torchtitan-split-backward") for words in made.infeasible.conflict)
    free = fastest_plan(request(precision="fp8"))
    assert free.layout is not None
    assert free.layout.schedule in ("1f1b", "interleaved-1f1b", "breadth-first")


@pytest.mark.slow
def test_too_few_micro_batches_for_a_schedule_are_named() -> None:
    pins = {"pp": 4, "tp": 2, "dp": 2, "micro_batch": 8, "schedule": "zbv", "cp": 1}
    made = fastest_plan(request(pins=pins))
    assert made.infeasible is not None
    assert any(words.startswith("schedule-shape") for words in made.infeasible.conflict)


@pytest.mark.slow
def test_no_schedule_beats_the_chosen_one() -> None:
    best = fastest_plan(request())
    times = [
        fastest_plan(pinned(name)).objective.step_time_s for name in planned(TORCHTITAN.schedules)
    ]
    known = [seconds for seconds in times if seconds is not None]
    assert len(known) == 7
    assert best.objective.step_time_s == pytest.approx(min(known), rel=1e-12)


def test_no_plan_has_ranks_of_two_stages() -> None:
    """DualPipe's, which the bounds do not know: what a rank holds is not what it works for."""
    planned_names = {name for record in RECORDS for name in planned(record.schedules)}
    assert not any(traits(schedule_named(name)).pairs_of_ranks for name in planned_names)


def test_megatron_has_the_two_it_always_had() -> None:
    space = space_of(request(framework="megatron"))
    assert {schedule for _, schedule in space.pipelines(4)} == {int(Schedule.ONE_F_ONE_B)}
    assert space.pipelines(1) == () or space.pipelines(1) == ((1, 0),)


@pytest.mark.slow
def test_neighbours_try_other_schedules() -> None:
    made = fastest_plan(pinned("1f1b"))
    changes = {one.change for one in neighbours(made)}
    assert "schedule 1f1b -> zbv, vpp 2" in changes
    assert "schedule 1f1b -> gpipe" in changes


def test_pins_name_schedules() -> None:
    assert parse_pins("schedule=zbv,pp=4") == {"schedule": "zbv", "pp": 4}
    with pytest.raises(InputError, match="did you mean 'zbv'"):
        parse_pins("schedule=zvb")


def test_a_plan_document_carries_the_schedule(tmp_path: Path) -> None:
    made = fastest_plan(pinned("zbv"))
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(made), encoding="utf-8")
    assert read_plan(path).layout == made.layout
    path.write_text(plan_text(made).replace("schedule: zbv", "schedule: 1f1b"), encoding="utf-8")
    with pytest.raises(InputError, match="schedule"):
        read_plan(path)


def run_mapping(**settings: Any) -> dict[str, Any]:
    run = {"seq_len": 4096, "global_batch": 64, "pp": 4, "dp": 2, "tp": 1, **settings}
    return {"id": "one", "model": "llama-3-8b", "cluster": "dgx-h100", "run": run}


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_run_files_name_schedules(name: str) -> None:
    vpp = 2 if name in ("interleaved-1f1b", "breadth-first", "zbv", "dualpipe-v") else 1
    run = run_from_mapping(run_mapping(schedule=name, vpp=vpp), where="run.yaml")
    again = run_from_mapping(run_to_mapping(run), where="run.yaml")
    assert again.layout == run.layout
    assert run_to_mapping(run)["run"]["schedule"] == name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "zbv", "vpp": 1}, "vpp: 1, zbv takes 2"),
        ({"schedule": "1f1b", "vpp": 2}, "does not go with vpp 2"),
        ({"schedule": "zbv", "pp": 1, "dp": 8}, "pp is 1"),
        ({"schedule": "zb"}, "schedule"),
    ],
)
def test_run_files_with_a_schedule_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run_from_mapping(run_mapping(**settings), where="run.yaml")

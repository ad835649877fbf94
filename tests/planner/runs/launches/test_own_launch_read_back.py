"""A plan's own launch.sh, read back, has the plan's time and memory to the last digit, for every target."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel.workload import Execution
from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import FRAMEWORK_NAMES, framework_named
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.writer import legal_launch
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.runs.launches.reader import complete, read_launch
from meshwright.planner.runs.prediction import RunPrediction, planned_workload, predict_run
from meshwright.planner.runs.run_file import Run, run_from_mapping
from meshwright.planner.runs.run_terms import layout_from_document
from tests.oracles.random_plans import random_plan
from tests.planner.plan.test_planner_service import request
from tests.plans import make_plan
from tests.soaked import some

MOST_DRAWS = 20_000


@cache
def legal_plans(framework: FrameworkName, count: int) -> tuple[Plan, ...]:
    """Random plans that the framework can start."""
    rng, plans = random.Random(7), []
    for index in range(MOST_DRAWS):
        drawn = random_plan(rng, framework, index)
        if drawn is None:
            continue
        plan = drawn[0].model_copy(update={"mapping": None})
        try:
            plan_files(plan)
        except InfeasibleError:
            continue
        plans.append(plan)
        if len(plans) == count:
            return tuple(plans)
    raise AssertionError(f"{len(plans)} legal plans in {MOST_DRAWS} draws")


def priced(plan: Plan) -> RunPrediction:
    """The plan's price, from its document alone."""
    assert plan.layout is not None
    launch = legal_launch(plan, framework_named(plan.inputs.framework))
    return predict_run(
        Run(
            id="plan",
            source="",
            workload=launch.execution.applied(planned_workload(plan.inputs)),
            layout=layout_from_document(plan.layout),
            stages=tuple(tuple(rank) for rank in plan.layout.stages),
        )
    )


def read_back(plan: Plan, folder: Path) -> RunPrediction:
    """The price of launch.sh, with the model and the batch that a script's user knows."""
    for name, text in plan_files(plan).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    model = folder / "model.json"
    model.write_text(json.dumps(plan.inputs.model.model_dump(mode="json")), encoding="utf-8")
    inputs = plan.inputs
    given = [f"cluster={inputs.cluster.name}", f"model={model}"]
    given += [f"seq_len={inputs.seq_len}", f"global_batch={inputs.global_batch}"]
    script = folder / "launch.sh"
    mapping = complete(read_launch(script), given, str(script))
    return predict_run(run_from_mapping(mapping, where="launch.sh", base=folder))


def check(framework: FrameworkName, count: int, folder: Path) -> None:
    for index, plan in enumerate(legal_plans(framework, count)):
        place = folder / str(index)
        place.mkdir()
        own, again = priced(plan), read_back(plan, place)
        assert again.estimate.step_time_s == own.estimate.step_time_s, plan.layout
        assert again.memory_gib == own.memory_gib, plan.layout


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=() if name == "megatron" else pytest.mark.slow)
        for name in FRAMEWORK_NAMES
    ],
)
def test_a_launch_has_the_price_of_its_plan(framework: FrameworkName, tmp_path: Path) -> None:
    check(framework, 8, tmp_path)


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
def test_a_bucket_size_is_read_back(framework: FrameworkName, tmp_path: Path) -> None:
    """250 MB are 62.5 M gradients of 32 bits: the flag holds parameters, the plan bytes."""
    buckets = framework_named(framework).gradient_buckets
    assert buckets is not None
    for index, plan in enumerate(legal_plans(framework, 8)):
        assert plan.layout is not None
        if plan.layout.zero_stage not in buckets.zero_stages:
            continue
        execution = legal_launch(plan, framework_named(framework)).execution
        changed = {"execution": replace(execution, bucket_mb=250.0)}
        bucketed = plan.model_copy(update=changed)
        place = tmp_path / str(index)
        place.mkdir()
        own, again = priced(bucketed), read_back(bucketed, place)
        assert again.estimate.step_time_s == own.estimate.step_time_s, plan.layout
        assert again.memory_gib == own.memory_gib, plan.layout


@pytest.mark.parametrize(
    ("tp", "cp", "inner", "written"),
    [
        (1, 8, None, "4 2"),
        (2, 16, None, "4 4"),
        (1, 8, 2, "2 4"),
        (2, 8, 1, "1 8"),
        (1, 8, 8, "8 1"),
        (2, 1, None, ""),
    ],
)
def test_groups_that_swap_heads_are_read_back(
    tmp_path: Path, *, tp: int, cp: int, inner: int | None, written: str
) -> None:
    """Their sizes are in the launch whether they were given or follow from the layout."""
    plan = make_plan(tp=tp, cp=cp, dp=2, num_micro_batches=4, seq_len=65_536)
    execution = Execution(cp_comm="a2a+p2p", cp_inner=inner, dp_overlap=True, pp_overlap=True)
    plan = plan.model_copy(update={"execution": execution})
    own, again = priced(plan), read_back(plan, tmp_path)
    assert again.estimate.step_time_s == own.estimate.step_time_s
    assert again.memory_gib == own.memory_gib
    words = json.loads((tmp_path / "megatron_args.json").read_text(encoding="utf-8"))
    sizes = "--hierarchical-context-parallel-sizes"
    assert (sizes in words) == bool(written)
    if written:
        at = words.index(sizes)
        assert " ".join(words[at + 1 : at + 3]) == written


@pytest.mark.parametrize(("ep", "etp"), [(8, 1), (4, 2), (1, 1)])
def test_the_dispatcher_that_gathers_is_read_back(tmp_path: Path, ep: int, etp: int) -> None:
    plan = make_plan(
        "mixtral-8x7b", tp=2, dp=8, ep=ep, etp=etp, sequence_parallel=True, num_micro_batches=4
    )
    execution = Execution(moe_dispatch="allgather", dp_overlap=True, pp_overlap=True)
    plan = plan.model_copy(update={"execution": execution})
    own, again = priced(plan), read_back(plan, tmp_path)
    assert again.estimate.step_time_s == own.estimate.step_time_s
    assert again.memory_gib == own.memory_gib
    words = json.loads((tmp_path / "megatron_args.json").read_text(encoding="utf-8"))
    assert words[words.index("--moe-token-dispatcher-type") + 1] == "allgather"
    assert "--moe-flex-dispatcher-backend" not in words
    overlapped = plan.model_copy(update={"execution": replace(execution, ep_overlap=True)})
    with pytest.raises(InfeasibleError, match="all-gather dispatcher does not go with overlap"):
        legal_launch(overlapped, framework_named("megatron"))


@pytest.mark.soak
@pytest.mark.parametrize("framework", FRAMEWORK_NAMES)
def test_many_launches_have_the_prices_of_their_plans(
    framework: FrameworkName, tmp_path: Path
) -> None:
    check(framework, len(some(range(300))), tmp_path)


OF_THE_TRAINING_SCRIPT: dict[str, dict[str, Any]] = {
    "adam-8bit": {"framework": "fsdp2", "optimizer": "adam-8bit", "kind": "sft"},
    "muon": {"framework": "fsdp2", "optimizer": "muon"},
    "sgd": {"framework": "deepspeed", "optimizer": "sgd", "kind": "sft"},
    "dpo": {"framework": "fsdp2", "kind": "dpo"},
    "kto": {"framework": "deepspeed", "kind": "kto", "reference": "precomputed"},
    "orpo": {"framework": "fsdp2", "kind": "orpo"},
    "reward": {"framework": "deepspeed", "kind": "reward"},
    "all logits": {"framework": "fsdp2", "kind": "dpo", "loss": "all-logits"},
    "liger": {"framework": "fsdp2", "kind": "sft", "loss": "liger"},
    "saved tensors": {
        "framework": "fsdp2",
        "kind": "sft",
        "pins": {"offload_modules": "saved_tensors"},
    },
}


@pytest.mark.parametrize("case", OF_THE_TRAINING_SCRIPT)
def test_what_notes_say_of_the_training_script_is_read_back(case: str, tmp_path: Path) -> None:
    """No file beside launch.sh says it: everything was priced as pretraining with AdamW, without a word."""
    fields = {"model": load_catalog_model("qwen3-1.7b"), "gpus": 8, "seq_len": 2048}
    plan = fastest_plan(request(**fields | OF_THE_TRAINING_SCRIPT[case]))
    own, again = priced(plan), read_back(plan, tmp_path)
    assert again.estimate.step_time_s == own.estimate.step_time_s
    assert again.memory_gib == own.memory_gib
    said = read_launch(tmp_path / "launch.sh").settings
    asked = OF_THE_TRAINING_SCRIPT[case].items()
    assert all(
        said[name] == value for name, value in asked if name in ("optimizer", "loss", "reference")
    )
    assert said["seq_len"] == 2048


def test_a_plan_of_adapters_is_not_started_as_full_training(tmp_path: Path) -> None:
    """torchtitan's files were written for it, and trained every parameter."""
    asked = request(
        model=load_catalog_model("qwen3-1.7b"),
        gpus=8,
        seq_len=2048,
        framework="fsdp2",
        adapters=AdapterSpec(),
    )
    plan = fastest_plan(asked)
    with pytest.raises(InfeasibleError, match="torchtitan has no launch files for lora"):
        legal_launch(plan, framework_named("torchtitan"))


def test_another_frameworks_script_says_who_recomputes_there() -> None:
    """A DeepSpeed script named FSDP's switch, and left the layers as they were."""
    fields = {"model": load_catalog_model("qwen3-1.7b"), "gpus": 8, "seq_len": 2048}
    pins = {"recompute": "full", "zero_stage": 3, "shard_groups": 1}
    plan = fastest_plan(request(**fields, framework="fsdp2", kind="orpo", pins=pins))
    notes = {name: plan_files(plan, name)["launch.sh"] for name in ("fsdp2", "deepspeed")}
    assert "fsdp_activation_checkpointing recomputes its layers" in notes["fsdp2"]
    assert "fsdp_activation_checkpointing" not in notes["deepspeed"]
    assert "turns gradient checkpointing on" in notes["deepspeed"]

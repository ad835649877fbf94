"""Plans that train adapters: against brute force and layouts priced apart, their files, what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import meshwright
from meshwright.documents import write_files
from meshwright.errors import InputError
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.planner.audit import audit_document, audit_plan
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.plan.texts import plan_document, read_plan, workload_of_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.run_file import run_from_mapping
from tests.planner.search.plain_oracle import least_step_time_s
from tests.planner.search.test_plain_oracle import tiny_request
from tests.planner.search.test_planner_optimum import check_against_brute_force, request, search
from tests.soaked import some


def with_adapters(asked: PlanRequest, seed: int) -> PlanRequest:
    draw = random.Random(f"adapters {seed}")
    adapters = AdapterSpec(
        rank=draw.choice([4, 64, 512]),
        targets=draw.choice([("all-linear",), ("q_proj", "k_proj", "v_proj"), ("down_proj",)]),
    )
    return replace(asked, adapters=adapters)


@pytest.mark.parametrize(
    "seed", [pytest.param(2001, marks=pytest.mark.slow), pytest.param(2002, marks=pytest.mark.soak)]
)
def test_the_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(with_adapters(request(seed), seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([2000, *range(2003, 2030)]))
def test_the_search_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(with_adapters(request(seed), seed))


@pytest.mark.parametrize(
    "seed",
    [
        50,
        pytest.param(51, marks=pytest.mark.slow),
        pytest.param(53, marks=pytest.mark.soak),
    ],
)
def test_the_optimum_is_that_of_layouts_generated_apart(seed: int) -> None:
    asked = with_adapters(tiny_request(seed), seed)
    outcome, least_s = search(asked), least_step_time_s(asked)
    assert (outcome.best[0].step_time_s if outcome.best else None) == (
        None if least_s is None else pytest.approx(least_s, rel=1e-9)
    )


def planned(
    framework: FrameworkName, train: str = "lora", model: str = "llama-3-8b", **options: object
) -> Plan:
    """What its choices bring is not asked."""
    request = read_request(
        model=model,
        cluster="dgx-h100",
        gpus=8,
        global_batch=32,
        seq_len=4096,
        framework=framework,
        train=train,
        time_limit_s=60,
        **options,  # type: ignore[arg-type]
    )
    return make_plan(request, robustness=False, choices=False)


@pytest.fixture(scope="module")
def fsdp_plan() -> Plan:
    return planned("fsdp2", "qlora", lora_rank=8, lora_targets="q_proj,v_proj")


def test_a_plan_says_what_is_trained_and_is_checked_again(fsdp_plan: Plan, tmp_path: Path) -> None:
    assert fsdp_plan.status == "optimal"
    assert fsdp_plan.layout is not None
    assert (fsdp_plan.layout.tp, fsdp_plan.layout.pp) == (1, 1)
    document = plan_document(fsdp_plan)
    names = ["q_proj", "v_proj"]
    adapters = {"method": "qlora", "rank": 8, "targets": names, "matrices": names}
    assert document["inputs"]["adapters"] == adapters
    assert [need["software"] for need in document["installs"]] == ["peft and bitsandbytes"]
    file = tmp_path / "plan.yaml"
    file.write_text(json.dumps(document), encoding="utf-8")
    again = read_plan(file)
    assert workload_of_plan(again).adapters == AdapterSpec.model_validate(adapters)
    write_files(tmp_path, plan_files(fsdp_plan), force=True)
    assert audit_document(audit_plan(tmp_path))["passed"]


def test_what_trains_every_parameter_says_nothing_of_adapters() -> None:
    plan = planned("fsdp2", "full")
    assert "adapters" not in plan_document(plan)["inputs"]
    assert plan.predicted is not None
    assert plan.predicted.band_of == "optima"


def test_files_of_peft(fsdp_plan: Plan) -> None:
    files = plan_files(fsdp_plan)
    config = json.loads(files["adapter_config.json"])
    assert (config["r"], config["target_modules"]) == (8, ["q_proj", "v_proj"])
    assert "load_in_4bit=True" in files["launch.sh"]
    under_deepspeed = plan_files(planned("deepspeed"))
    assert json.loads(under_deepspeed["adapter_config.json"])["target_modules"] == "all-linear"
    assert '"$TRAIN_SCRIPT" --deepspeed "$here/ds_config.json"' in under_deepspeed["launch.sh"]


@pytest.mark.slow
def test_megatron_bridge_takes_adapters_by_its_own_names() -> None:
    plan = planned("megatron")
    overrides = json.loads(plan_files(plan)["bridge_overrides.json"])
    assert "peft.dim=16" in overrides
    assert "peft.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]" in overrides
    with pytest.raises(meshwright.InfeasibleError, match="--target bridge"):
        plan_files(plan, "megatron")
    alone = planned("megatron", lora_targets="q_proj")
    with pytest.raises(meshwright.InfeasibleError, match="no adapter beside q_proj alone"):
        plan_files(alone)


@pytest.mark.slow
def test_modules_beside_experts_are_told_apart() -> None:
    plan = planned(
        "megatron", model="deepseek-v2", lora_targets="linear_proj,gate_up_proj", pin="ep=8"
    )
    assert plan.layout is not None
    overrides = json.loads(plan_files(plan)["bridge_overrides.json"])
    modules = next(text for text in overrides if text.startswith("peft.target_modules"))
    assert modules.endswith("[linear_proj,*.mlp.linear_fc1,*.shared_experts.linear_fc1]")


@pytest.mark.parametrize(
    ("framework", "train", "options", "words"),
    [
        ("torchtitan", "lora", {}, "is not planned with torchtitan; choose --framework"),
        ("megatron", "qlora", {}, "choose --framework deepspeed or fsdp2"),
        ("fsdp2", "lora", {"lora_targets": "q_a_proj"}, "is no matrix of llama-3-8b"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    framework: FrameworkName, train: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        planned(framework, train, **options)


def test_peft_stands_beside_whole_layers() -> None:
    plan = planned("fsdp2", pin="tp=2")
    assert plan.status == "infeasible"
    assert plan.infeasible is not None
    assert "peft-degrees" in " ".join(plan.infeasible.conflict)


def test_a_run_file_says_what_it_trains() -> None:
    row = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "run": {
            "seq_len": 4096,
            "global_batch": 8,
            "gpus": 8,
            "framework": "fsdp2",
            "zero_stage": 3,
            "adapters": {"method": "lora", "rank": 4, "targets": ["o_proj"]},
        },
    }
    run = run_from_mapping(row, where="row")
    expected = AdapterSpec(rank=4, targets=("o_proj",), matrices=("o_proj",))
    assert run.workload.adapters == expected
    row["run"] = {**row["run"], "lora_rank": 4}  # type: ignore[dict-item]
    with pytest.raises(InputError, match="adapters"):
        run_from_mapping(row, where="row")

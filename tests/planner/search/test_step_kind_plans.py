"""Plans for every kind of step: against brute force, their files, what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.catalog import framework_named
from meshwright.frameworks.catalog import planned as planned_values
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.audit import audit_document, audit_plan
from meshwright.planner.launch.plan_files import next_step, plan_files
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


def of_a_kind(asked: PlanRequest, seed: int) -> PlanRequest:
    """A small problem of preference training, or of SFT, with a reference in any place that there is."""
    draw = random.Random(f"kinds {seed}")
    record = framework_named(asked.framework)
    kind = draw.choice(planned_values(record.step_kinds))
    changes: dict[str, object] = {"kind": kind}
    if "lora" in planned_values(record.adapters) and draw.random() < 0.25:
        changes["adapters"] = AdapterSpec(rank=16)
    elif STEP_KINDS[kind].reference_passes:
        places = [
            name
            for name, setting in record.references.items()
            if kind in (setting.kinds or (kind,))
        ]
        changes["reference"] = draw.choice(places)
    return replace(asked, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seed", [3014, 3036, 3037, *(pytest.param(n, marks=pytest.mark.slow) for n in (3021, 3038))]
)
def test_the_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(of_a_kind(request(seed), seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(range(3000, 3040)))
def test_the_search_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(of_a_kind(request(seed), seed))


def under_trl(seed: int) -> PlanRequest:
    framework = ("deepspeed", "fsdp2")[seed % 2]
    plain = replace(request(seed), framework=framework, precision="bf16", pins={}, forbids=())
    return of_a_kind(plain, seed)


@pytest.mark.parametrize("seed", [pytest.param(3104, marks=pytest.mark.slow)])
def test_the_search_equals_brute_force_under_trl(seed: int) -> None:
    check_against_brute_force(under_trl(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([3107, *range(3100, 3104), 3105, 3106, *range(3108, 3112)]))
def test_the_search_equals_brute_force_under_trl_many(seed: int) -> None:
    check_against_brute_force(under_trl(seed))


@pytest.mark.parametrize(
    "seed",
    [
        *(72, 73),
        pytest.param(71, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some([74, 70, 75, 76])),
    ],
)
def test_the_optimum_is_that_of_layouts_generated_apart(seed: int) -> None:
    asked = of_a_kind(tiny_request(seed), seed)
    outcome, least_s = search(asked), least_step_time_s(asked)
    assert (outcome.best[0].step_time_s if outcome.best else None) == (
        None if least_s is None else pytest.approx(least_s, rel=1e-9)
    )


SETTINGS: dict[str, Any] = {
    "model": "llama-3-8b",
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 32,
    "seq_len": 2048,
    "time_limit_s": 60,
}


@cache
def planned(framework: FrameworkName, kind: str = "dpo", **options: Any) -> Plan:
    """Made once for all that ask; what its choices bring is not asked."""
    asked = read_request(**SETTINGS | options, framework=framework, kind=kind)
    return make_plan(asked, robustness=False, choices=False)


def compared(framework: FrameworkName, kind: str, baseline: Path, **options: Any) -> Plan:
    """The plan beside a run of today."""
    return meshwright.plan(
        **SETTINGS | options,
        framework=framework,
        kind=kind,  # type: ignore[arg-type]
        robustness=False,
        baseline=baseline,
    )


@pytest.mark.parametrize(
    ("framework", "kind", "options"),
    [
        ("deepspeed", "kto", {}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("fsdp2", "dpo", {}),
                ("deepspeed", "dpo", {"reference": "offloaded"}),
                ("fsdp2", "orpo", {}),
                ("fsdp2", "reward", {}),
                ("fsdp2", "dpo", {"train": "lora", "reference": "precomputed"}),
                ("torchtitan", "sft", {}),
                ("megatron", "dpo", {}),
            )
        ),
    ],
)
def test_plans_of_every_kind_are_written_read_and_checked_again(
    framework: FrameworkName, kind: str, options: dict[str, object], tmp_path: Path
) -> None:
    plan = planned(framework, kind, **options)
    assert plan.status == "optimal"
    inputs = plan_document(plan)["inputs"]
    assert inputs["kind"] == kind
    write_files(tmp_path, plan_files(plan), force=True)
    again = workload_of_plan(read_plan(tmp_path / "plan.yaml"))
    assert (again.kind, again.reference) == (kind, inputs.get("reference"))
    assert audit_document(audit_plan(tmp_path))["passed"]


def test_pretraining_says_nothing_of_kinds() -> None:
    asked = read_request(**SETTINGS, framework="fsdp2")
    plain = make_plan(asked, robustness=False, choices=False)
    named = planned("fsdp2", "pretrain")
    assert not {"kind", "reference"} & set(plan_document(plain)["inputs"])
    assert plain.layout == named.layout
    assert plain.predicted == named.predicted


def test_fine_tuning_is_planned_as_pretraining_and_says_so() -> None:
    plan, plain = planned("fsdp2", "sft"), planned("fsdp2", "pretrain")
    assert plan.predicted == plain.predicted
    assert any("prompts are masked in the loss alone" in note for note in plan.warnings)


def test_files_say_what_the_script_trains_on() -> None:
    files = plan_files(planned("fsdp2", reference="precomputed"))
    assert "batch size per process is 1 pair," in files["launch.sh"]
    assert "precompute_ref_log_probs True" in files["launch.sh"]
    under_deepspeed = plan_files(planned("deepspeed", reference="offloaded"))
    assert '"$TRAIN_SCRIPT" --deepspeed "$here/ds_config.json"' in under_deepspeed["launch.sh"]
    assert "--ref.offload of openrlhf" in under_deepspeed["launch.sh"]


@pytest.mark.slow
def test_what_its_own_scripts_cannot_carry_is_planned_saved_and_said(tmp_path: Path) -> None:
    plan = planned("megatron")
    assert plan.status == "optimal"
    assert any("launch the plan with --target ms-swift" in note for note in plan.warnings)
    files = plan_files(plan)
    assert {"plan.yaml", "mapping/ranks.csv"} < files.keys()
    assert not any(name.startswith("launch") for name in files)
    assert "NeMo-RL" in next_step(plan, tmp_path)
    with pytest.raises(InfeasibleError, match="NeMo-RL"):
        plan_files(plan, "megatron")
    with pytest.raises(InfeasibleError, match="torchtitan has no dpo"):
        plan_files(planned("fsdp2"), "torchtitan")


@pytest.mark.parametrize(
    ("framework", "kind", "options", "words"),
    [
        ("torchtitan", "dpo", {}, "choose --framework megatron or deepspeed or fsdp2"),
        ("megatron", "orpo", {}, "choose --framework deepspeed or fsdp2"),
        ("fsdp2", "dpo", {"reference": "offloaded"}, "allowed: resident, precomputed"),
        ("megatron", "kto", {"reference": "offloaded"}, "allowed: resident"),
        ("fsdp2", "orpo", {"reference": "resident"}, "orpo has none"),
        ("fsdp2", "dpo", {"train": "lora", "reference": "resident"}, "frozen base"),
        ("fsdp2", "rlhf", {}, "is not known"),
    ],
)
def test_what_is_not_planned_is_refused(
    framework: FrameworkName, kind: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        planned(framework, kind, **options)


def test_trainers_of_preferences_take_whole_sequences() -> None:
    plan = planned("fsdp2", pin="cp=2")
    assert plan.status == "infeasible"
    assert plan.infeasible is not None
    assert "trl-degrees" in " ".join(plan.infeasible.conflict)


def test_a_run_file_says_its_kind() -> None:
    run = {
        "seq_len": 2048,
        "global_batch": 16,
        "gpus": 8,
        "framework": "deepspeed",
        "zero_stage": 3,
        "kind": "dpo",
    }
    row: dict[str, object] = {"model": "llama-3-8b", "cluster": "dgx-h100", "run": run}
    work = run_from_mapping(row, where="row").workload
    assert (work.kind, work.reference, work.tokens_per_step) == ("dpo", "resident", 65536)
    row["run"] = {**run, "kind": "kto", "reference": "offloaded"}
    with pytest.raises(InputError, match="is not planned with Megatron-DeepSpeed and kto"):
        run_from_mapping(row, where="row")
    row |= {"model": "deepseek-v3", "run": {**run, "kind": "sft", "loss": "liger"}}
    with pytest.raises(InputError, match="loss: deepseek-v3 has multi-token prediction"):
        run_from_mapping(row, where="row")


def test_today_is_compared_with_the_same_kind_alone(tmp_path: Path) -> None:
    run = {
        "seq_len": 2048,
        "global_batch": 32,
        "micro_batch": 1,
        "gpus": 8,
        "framework": "deepspeed",
        "zero_stage": 3,
        "recompute": "full",
        "kind": "dpo",
    }
    today = tmp_path / "today.yaml"
    row = {"model": "llama-3-8b", "cluster": "dgx-h100", "run": run}
    today.write_text(json.dumps(row), encoding="utf-8")
    plan = compared("deepspeed", "dpo", today)
    assert plan.baseline is not None
    assert plan.baseline.tokens_per_step == 2 * 32 * 2048
    assert plan.baseline.speed_up is not None
    assert plan.baseline.speed_up >= 1.0
    with pytest.raises(
        InputError, match="steps of another kind than the plan: plan with --kind dpo"
    ):
        compared("deepspeed", "pretrain", today)
    with pytest.raises(InputError, match="a reference that is resident; the plan's is precomputed"):
        compared("deepspeed", "dpo", today, reference="precomputed")


@pytest.mark.slow
def test_a_loss_by_chunks_makes_room_and_is_told() -> None:
    plain = planned("fsdp2", "sft", seq_len=32768, global_batch=8)
    liger = planned("fsdp2", "sft", seq_len=32768, global_batch=8, loss="liger")
    assert plain.predicted is not None
    assert liger.predicted is not None
    assert max(liger.predicted.memory_gib) < max(plain.predicted.memory_gib)
    assert plan_document(liger)["inputs"]["loss"] == "liger"
    assert "liger-kernel" in [need.software for need in liger.installs]
    assert "use_liger_kernel True" in plan_files(liger)["launch.sh"]
    assert "loss" not in plan_document(plain)["inputs"]
    chunked = planned("fsdp2", "sft", seq_len=32768, global_batch=8, loss="chunked")
    assert "loss_type chunked_nll of trl<1.15" in plan_files(chunked)["launch.sh"]
    tiled = planned("fsdp2", "sft", seq_len=32768, global_batch=8, loss="fused-head")
    assert "Its loss is fused-head: of trl>=1.15." in plan_files(tiled)["launch.sh"]
    assert "plan those with --loss fused-head" in plan_files(plain)["launch.sh"]
    assert "Trainer of transformers: those of trl>=1.15" in plan_files(liger)["launch.sh"]


@pytest.mark.parametrize("framework", ["fsdp2", "deepspeed"])
def test_preferences_are_priced_without_all_logits(framework: FrameworkName) -> None:
    """As TRL 1.16 runs them; each logit was held at 32 bits."""
    pin = {"pin": "micro_batch=2,zero_stage=3,recompute=full"}
    usual, whole = planned(framework, **pin), planned(framework, loss="all-logits", **pin)
    assert (usual.inputs.loss, whole.inputs.loss) == ("fused-head", "all-logits")
    assert usual.predicted is not None
    assert whole.predicted is not None
    assert max(usual.predicted.memory_gib) < max(whole.predicted.memory_gib) - 1
    assert "Its loss takes all logits" in plan_files(whole)["launch.sh"]
    with pytest.raises(InfeasibleError, match="plan with --loss all-logits"):
        plan_files(usual, "axolotl")


@pytest.mark.parametrize(
    ("framework", "kind", "options", "loss"),
    [
        ("deepspeed", "dpo", {"reference": "offloaded"}, None),  # OpenRLHF's trainer.
        ("fsdp2", "orpo", {}, None),
        ("fsdp2", "kto", {}, "fused-head"),
        ("fsdp2", "dpo", {"train": "lora"}, "fused-head"),
        ("fsdp2", "sft", {}, None),
        ("megatron", "dpo", {}, None),
    ],
)
def test_the_loss_is_that_of_the_kinds_trainer(
    framework: FrameworkName, kind: str, options: dict[str, object], loss: str | None
) -> None:
    assert planned(framework, kind, **options).inputs.loss == loss


@pytest.mark.parametrize(
    ("framework", "kind", "loss", "words"),
    [
        ("megatron", "sft", "liger", "choose --framework deepspeed or fsdp2"),
        ("deepspeed", "sft", "chunked", "choose --framework fsdp2"),
        ("fsdp2", "dpo", "liger", "is not what trainers of dpo take"),
        ("fsdp2", "orpo", "fused-head", "is not what trainers of orpo take"),
        ("fsdp2", "reward", "all-logits", "reward has a score"),
        ("fsdp2", "sft", "fused", "is not known"),
    ],
)
def test_a_loss_that_is_not_there_is_refused(
    framework: FrameworkName, kind: str, loss: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        planned(framework, kind, loss=loss)


def test_a_loss_by_chunks_is_compared_with_today(tmp_path: Path) -> None:
    run = {
        "seq_len": 32768,
        "global_batch": 8,
        "gpus": 8,
        "framework": "fsdp2",
        "zero_stage": 3,
        "recompute": "full",
    }
    today = tmp_path / "today.yaml"
    row = {"model": "llama-3-8b", "cluster": "dgx-h100", "run": run}
    today.write_text(json.dumps(row), encoding="utf-8")
    plan = compared("fsdp2", "sft", today, loss="liger", seq_len=32768, global_batch=8)
    assert plan.baseline is not None
    changes = " ".join(step.change for step in plan.baseline.waterfall)
    assert "loss" in changes, changes


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(3207, marks=pytest.mark.slow),
        *(
            pytest.param(seed, marks=pytest.mark.soak)
            for seed in some((*range(3200, 3207), 3213, 3220, 3221))
        ),
    ],
)
def test_the_search_equals_brute_force_with_a_loss_by_chunks(seed: int) -> None:
    plain = replace(request(seed), framework="fsdp2", precision="bf16", pins={}, forbids=())
    loss = ("liger", "chunked", "fused-head")[seed % 3]
    check_against_brute_force(replace(plain, loss=loss, model=without_mtp(plain.model)))


def without_mtp(model: ModelSpec) -> ModelSpec:
    return model.model_copy(update={"mtp_layers": 0})

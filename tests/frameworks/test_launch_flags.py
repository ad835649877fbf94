"""The launch files say what the records say: every flag of a planned value is written by some plan."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from meshwright.costmodel.workload import Execution
from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import FRAMEWORK_NAMES, RECORDS, framework_named, planned
from meshwright.frameworks.record import Framework, FrameworkName
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.reader import read_request
from tests.frameworks.test_records import settings_of
from tests.oracles.random_plans import random_plan
from tests.places import DATA
from tests.plans import make_plan

PLANS = 1200
FROM_MAPPINGS = "--use-tp-pp-dp-mapping"
"""Written where nodes hold different numbers of ranks, which no random plan has."""


EXECUTIONS = tuple(
    Execution(moe_dispatch=dispatch, dp_overlap=True, pp_overlap=True, **choices)
    for dispatch in ("alltoall", "deepep", "hybridep", "allgather")
    for choices in (
        {"tp_overlap": True, "bucket_mb": 400.0},
        {"ep_overlap": True},
        {"cuda_graph": "partial"},
        {"cuda_graph": "full"},
        {"gradient_dtype": "bf16", "moment_dtype": "bf16"},
        {"fp8_params": True},
        {"te_loss": True, "fp8_attention": True},
        {"cp_comm": "a2a"},
        {"cp_comm": "a2a+p2p"},
        {"fp8_recipe": "delayed"},
        {"offload_modules": "core_attn+attn_proj"},
    )
)


OF_EXPERTS = (
    Execution(moe_dispatch="alltoall", dp_overlap=True, pp_overlap=True, ep_overlap=True),
    Execution(moe_dispatch="allgather", dp_overlap=True, pp_overlap=True),
)
"""Which few random plans may have."""


def some_plans(framework: FrameworkName) -> Iterator[Plan]:
    """Random plans of a framework; those of Megatron with a random execution."""
    rng, executions = random.Random(4), random.Random("executions")
    for index in range(PLANS):
        drawn = random_plan(rng, framework, index)
        if drawn is None:
            continue
        plan = drawn[0]
        if framework == "megatron":
            plan = plan.model_copy(update={"execution": executions.choice(EXECUTIONS)})
        if framework == "deepspeed":
            plan = plan.model_copy(update={"execution": Execution(bucket_mb=400.0)})
        if framework == "fsdp2":
            plan = plan.model_copy(update={"execution": Execution(sync_each_batch=True)})
        yield plan


def launch_texts(framework: FrameworkName, folder: Path) -> Iterator[str]:
    """The launch files of some plans, those of random plans last."""
    if framework == "megatron":
        for name in ("qwen3-next-80b-a3b", "deepseek-v3.2", "nemotron-3-super-120b-a12b"):
            yield from plan_files(make_plan(hub_model(name), dp=8), framework).values()
        for execution in OF_EXPERTS:
            plan = make_plan("mixtral-8x7b", dp=8, ep=8, num_micro_batches=4)
            yield from texts_of(plan.model_copy(update={"execution": execution}))
    if framework == "torchtitan":
        plan = make_plan(pp=2, vpp=2, num_micro_batches=4, schedule="dualpipe-v", zero_stage=0)
        changed = plan.inputs.model_copy(update={"framework": framework})
        yield from texts_of(plan.model_copy(update={"inputs": changed}))
    for method in planned(framework_named(framework).adapters):
        adapters = AdapterSpec.model_validate({"method": method})
        # PEFT shards no weights of 8 bits, and none of 4 under DoRA.
        whole = adapters.base_bits == 8 or (adapters.decomposed and adapters.base_bits == 4)
        plan, stage = make_plan(dp=8), 1 if framework == "megatron" else 2 if whole else 3
        inputs = {"adapters": adapters}
        layout = plan.layout and plan.layout.model_copy(update={"zero_stage": stage})
        changed = plan.inputs.model_copy(update={"framework": framework, **inputs})
        yield from texts_of(plan.model_copy(update={"inputs": changed, "layout": layout}))
    for optimizer in planned(framework_named(framework).optimizers):
        plan = make_plan(dp=8)
        stage = 1 if framework == "megatron" else 2
        layout = plan.layout and plan.layout.model_copy(update={"zero_stage": stage})
        changed = plan.inputs.model_copy(update={"framework": framework, "optimizer": optimizer})
        yield from texts_of(plan.model_copy(update={"inputs": changed, "layout": layout}))
    yield from preference_texts(framework)
    yield from offload_texts(framework)
    yield from dealt_texts(framework, folder)
    for plan in some_plans(framework):
        with suppress(InfeasibleError):
            yield from texts_of(plan)


def texts_of(plan: Plan) -> list[str]:
    """The launch files of a plan, without the plan itself."""
    return [text for name, text in plan_files(plan).items() if name != "plan.yaml"]


def dealt_texts(framework: FrameworkName, folder: Path) -> Iterator[str]:
    """The launch files of a plan whose samples are dealt to ranks one by one."""
    if framework_named(framework).hybrid_context is None:
        return
    lengths = folder / "lengths.json"
    lengths.write_text(json.dumps({"300": 90, "2000": 30, "32768": 1}), encoding="utf-8")
    asked = read_request(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=8,
        lengths=lengths,
        hybrid_cp=True,
        pin="recompute=none,zero_stage=1,tp=2,cp=4",
    )
    yield from texts_of(fastest_plan(asked))


def offload_texts(framework: FrameworkName) -> Iterator[str]:
    """The launch files of plans with parameters or with inputs of recomputed layers on the host; Megatron
    offloads others.
    """
    for modules in () if framework == "megatron" else planned(framework_named(framework).offloads):
        pin = f"offload_modules={modules},recompute=full"
        asked = read_request(
            model="llama-3-8b",
            cluster="dgx-h100",
            gpus=8,
            global_batch=64,
            seq_len=8192,
            framework=framework,
            pin="parameter_offload=cpu" if modules == "parameters" else pin,
        )
        yield from texts_of(fastest_plan(asked))


def preference_texts(framework: FrameworkName) -> Iterator[str]:
    """The launch files of plans that train preferences, with the reference in every place, or have a loss."""
    record = framework_named(framework)
    launched = [kind for kind, setting in record.step_kinds.items() if not setting.in_launch]
    asked: list[dict[str, object]] = [{"loss": loss} for loss in planned(record.losses)]
    if "dpo" in launched:
        asked += [{"kind": "dpo", "reference": place} for place in planned(record.references)]
    for each in asked:
        plan = make_plan(dp=8)
        layout = plan.layout and plan.layout.model_copy(update={"zero_stage": 3})
        inputs = {"framework": framework, **each}
        changed = plan.inputs.model_copy(update=inputs)
        yield from texts_of(plan.model_copy(update={"inputs": changed, "layout": layout}))


def hub_model(name: str) -> ModelSpec:
    """A model of a kind that no catalog entry is of."""
    return read_model(DATA / "hf_configs" / f"{name}.json")


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS, ids=FRAMEWORK_NAMES)
def test_every_planned_flag_is_written(record: Framework, tmp_path: Path) -> None:
    """Plans are drawn until that is so, or there are no more of them."""
    silent = {}
    for words, setting in settings_of(record):
        key = setting.flag.removeprefix("activation-checkpoint:").split(".")[-1]
        if setting.planned and not setting.default and key != FROM_MAPPINGS:
            silent[f"{words}: {setting.flag} {setting.value}"] = {key, setting.value}
    for text in launch_texts(record.name, tmp_path):
        for wanted in silent.values():
            wanted.difference_update({word for word in wanted if word in text})
        if not any(silent.values()):
            break
    assert [words for words, wanted in silent.items() if wanted] == []

"""Gemma 4, whose windowed layers have heads of their own, from a plan to files and back to its price."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import meshwright
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError
from meshwright.frameworks.record import FrameworkName
from meshwright.planner.launch.configurations import (
    axolotl_files,
    llamafactory_files,
    swift_files,
    trl_files,
)
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.reader import price_launch


@cache
def planned(name: str, train: str, **pin: int | str) -> Plan:
    return meshwright.plan(
        name,
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=4096,
        framework="fsdp2",
        train=train,
        kind="sft",
        pin=pin,
        robustness=False,
    )


@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_plan_of_the_31b_is_written_and_read_back_to_the_digit(
    train: str, tmp_path: Path
) -> None:
    plan = planned("gemma-4-31b", train)
    assert plan.layout is not None
    assert plan.predicted is not None
    # Whole weights, gradients and states do not fit on 8 GPUs of 80 GB; adapters beside weights do.
    assert (plan.layout.optimizer_offload > 0) == (train == "full")
    assert (plan.layout.tp, plan.layout.cp, plan.layout.zero_stage) == (1, 1, 3)
    assert any("heads of 512" in warning for warning in plan.warnings)
    write_files(tmp_path / "own", plan_files(plan))
    given = ["cluster=dgx-h100", "gpus=8", "model=gemma-4-31b", "seq_len=4096", "global_batch=64"]
    own = next(price_launch(tmp_path / "own" / "launch.sh", given))
    assert own.predicted.step_time_s == plan.predicted.step_time_s
    assert "attn_implementation='sdpa'" in plan_files(plan)["launch.sh"]
    write_files(tmp_path / "stack", llamafactory_files(plan))
    given = ["cluster=dgx-h100", "gpus=8"]
    stack = next(price_launch(tmp_path / "stack" / "llama_factory.yaml", given))
    assert stack.predicted.step_time_s == plan.predicted.step_time_s
    assert stack.run.workload.attention_kernel == "sdpa"


def test_every_stack_asks_for_the_one_kernel_that_takes_the_heads() -> None:
    plan = planned("gemma-4-31b", "lora", shard_groups=1)
    assert "\nflash_attn: sdpa\n" in llamafactory_files(plan)["llama_factory.yaml"]
    assert "\nattn_implementation: sdpa\n" in axolotl_files(plan)["axolotl.yaml"]
    assert "\nattn_impl: sdpa\n" in swift_files(plan)["swift.yaml"]
    with pytest.raises(InfeasibleError, match="fused-head"):
        trl_files(plan)


def test_the_26b_is_planned_with_its_experts() -> None:
    plan, dense = planned("gemma-4-26b-a4b", "lora"), planned("gemma-4-31b", "lora")
    assert plan.predicted is not None
    assert dense.predicted is not None
    assert plan.predicted.step_time_s < dense.predicted.step_time_s
    assert plan.inputs.adapters is not None
    assert "router" in plan.inputs.adapters.matrices
    assert "experts" not in plan.inputs.adapters.matrices


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
def test_other_frameworks_say_what_they_lack(framework: FrameworkName) -> None:
    plan = meshwright.plan(
        "gemma-4-31b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=4096,
        framework=framework,
    )
    assert plan.status == "infeasible"
    assert plan.infeasible is not None
    assert f"{framework}-window-heads" in {rule.rule for rule in plan.infeasible.rules}

"""DeepSpeed deals layers out by itself: plans have its split, and can be started."""

from __future__ import annotations

import pytest

import meshwright
from meshwright.frameworks.record import FrameworkName
from meshwright.planner.launch.plan_files import writer_of


@pytest.mark.parametrize(("framework", "layers"), [("megatron", [17, 15]), ("deepspeed", [16, 16])])
def test_a_layer_is_taken_off_the_head_where_the_framework_can(
    framework: FrameworkName, layers: list[int]
) -> None:
    plan = meshwright.plan(
        "llama-3-8b",
        cluster="dgx-h100",
        gpus=2,
        global_batch=64,
        seq_len=4096,
        framework=framework,
        pin="pp=2",
        robustness=False,
    )
    assert plan.layout is not None
    assert [sum(rank) for rank in plan.layout.stages] == layers
    assert plan.solver.space is not None
    assert plan.solver.space.even_stages == (framework == "deepspeed")
    assert "launch.sh" in writer_of(framework).files(plan)

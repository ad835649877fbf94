"""What a plan says has to be installed beside the framework."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.costmodel.workload import Execution
from meshwright.planner.plan.assemble import software_needs
from meshwright.planner.plan.document import ExecutionChoice, Plan, SoftwareNeed
from meshwright.planner.plan.make_plan import make_plan as planned
from meshwright.planner.report.plan_view import first_screen
from meshwright.planner.request.reader import read_request
from tests.planner.report.test_views import text
from tests.plans import make_plan
from tests.priced_plans import priced_plan


def needs_of(plan: Plan, execution: Execution, **changes: Any) -> list[tuple[str, str, bool]]:
    assert plan.layout is not None
    inputs = plan.inputs.model_copy(update=changes)
    needs = software_needs(inputs, plan.layout, execution)
    return [(need.software, need.needed_by, need.pinned) for need in needs]


@pytest.mark.parametrize(
    ("execution", "changes", "expected"),
    [
        ({}, {}, []),
        ({"moe_dispatch": "hybridep"}, {}, [("HybridEP", "moe_dispatch=hybridep", False)]),
        (
            {"moe_dispatch": "hybridep", "tp_overlap": True},
            {"pins": {"moe_dispatch": "hybridep"}},
            [
                ("HybridEP", "moe_dispatch=hybridep", True),
                ("Transformer Engine's user buffers", "tp_overlap=on", False),
            ],
        ),
        (
            {"offload_modules": "moe_act"},
            {"pins": {"offload_modules": "moe_act"}},
            [("cuda-python and pynvml", "offload_modules=moe_act", True)],
        ),
        (
            {"moment_dtype": "bf16", "te_loss": True, "gradient_dtype": "bf16"},
            {"allow": ("bf16-moments", "te-loss", "bf16-grads")},
            [
                ("Transformer Engine's FusedAdam", "bf16-moments", False),
                ("Megatron-Bridge", "te-loss", False),
            ],
        ),
        ({}, {"framework": "torchtitan", "precision": "fp8"}, [("torchao", "fp8", False)]),
    ],
)
def test_software_is_named_with_what_needs_it(
    execution: dict[str, Any], changes: dict[str, Any], expected: list[tuple[str, str, bool]]
) -> None:
    plan = make_plan("mixtral-8x7b", dp=8, ep=8, tp=2, sequence_parallel=True)
    assert needs_of(plan, Execution(**execution), **changes) == expected


def test_layers_and_offloading_need_software_too() -> None:
    plan = make_plan("nemotron-h-8b", dp=8)
    mamba = ("mamba-ssm and causal-conv1d", "Mamba-2", False)
    assert needs_of(plan, Execution()) == [mamba]
    plan = make_plan("llama-3-8b", dp=8, optimizer_offload=100)
    compiler = ("a C++ compiler for DeepSpeed's cpu_adam", "optimizer_offload=100", False)
    assert needs_of(plan, Execution(), framework="deepspeed") == [compiler]


def test_a_pinned_choice_is_named_without_what_it_brings() -> None:
    """The line said `nothing beside megatron` of a plan whose launch files ask for HybridEP."""
    request = read_request(
        model="olmoe-1b-7b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=4096,
        pin={"moe_dispatch": "hybridep", "ep": 8},
    )
    plan = planned(request, robustness=False)
    need = SoftwareNeed(
        software="HybridEP", needed_by="moe_dispatch=hybridep", choice="moe_dispatch", pinned=True
    )
    assert need in plan.installs
    screen = text(*first_screen(plan), width=200)
    assert "HybridEP (for moe_dispatch=hybridep, pinned)" in screen
    assert not any(choice.choice == "moe_dispatch" for choice in plan.choices or ())


@pytest.mark.parametrize(
    ("without_s", "proven", "words"),
    [
        (1.1, True, "DeepEP (10.0 % slower without)"),
        (0.9, True, "DeepEP (10.0 % faster without)"),
        (None, True, "DeepEP (no plan without it)"),
        (None, False, "DeepEP (not searched without)"),
    ],
)
def test_what_was_searched_without_is_said(
    without_s: float | None, proven: bool, words: str
) -> None:
    plan = priced_plan("mixtral-8x7b", tp=1, dp=8, ep=8, num_micro_batches=4)
    assert plan.predicted is not None
    step_s = plan.predicted.step_time_s
    choice = ExecutionChoice(
        choice="moe_dispatch",
        value="deepep",
        step_time_s_without=without_s and without_s * step_s,
        proven=proven,
    )
    need = SoftwareNeed(software="DeepEP", needed_by="moe_dispatch=deepep", choice="moe_dispatch")
    plan = plan.model_copy(update={"choices": [choice], "installs": [need]})
    assert words in text(*first_screen(plan), width=200)
    assert "installs nothing" not in text(*first_screen(plan), width=200)


def test_many_plans_at_once_name_their_software_too() -> None:
    """Their choices are not searched without."""
    need = SoftwareNeed(software="DeepEP", needed_by="moe_dispatch=deepep", choice="moe_dispatch")
    plan = priced_plan("mixtral-8x7b", tp=1, dp=8, ep=8, num_micro_batches=4)
    plan = plan.model_copy(update={"installs": [need]})
    assert "DeepEP (for moe_dispatch=deepep)" in text(*first_screen(plan), width=200)

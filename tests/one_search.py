"""Requests over which every answer is held against the plan that it speaks of."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from meshwright.cluster_specs.catalog import load_cluster
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.errors import InputError
from meshwright.planner.plan.document import ExecutionChoice, Plan
from meshwright.planner.plan.make_plan import fastest_plan, make_plan
from meshwright.planner.request.plan_request import PlanRequest, parse_pins
from meshwright.planner.request.reader import read_request

MODELS = ("gpt2-xl", "llama-3-8b", "qwen3-8b", "olmoe-1b-7b", "gpt-oss-20b", "qwen3-30b-a3b")
CLUSTERS = ("dgx-h100", "dgx-a100", "dgx-b200", "hgx-h800", "l40s-pcie", "h100-leaf-3to1")
FRAMEWORKS = ("megatron", "megatron", "megatron", "torchtitan", "deepspeed", "fsdp2")
"""Megatron has the most choices."""
LISTED_EACH = 6
"""Of so many requests one names its nodes, on unequal leaves."""


def request_of(seed: int) -> PlanRequest:
    """A small request: dense or with experts, of any framework, now and then on named nodes."""
    random = Random(seed)
    gpus = random.choice((2, 4, 8, 8, 16, 16, 24))
    options: dict[str, Any] = {
        "model": random.choice(MODELS),
        "cluster": random.choice(CLUSTERS),
        "framework": random.choice(FRAMEWORKS),
        "gpus": gpus,
        "global_batch": gpus * random.choice((1, 2, 3, 6)),
        "seq_len": random.choice((1024, 2048, 4096, 8192)),
        "precision": random.choice(("bf16", "bf16", "fp8")),
        "memory_risk": random.choice((0.05, 0.5)),
    }
    if seed % LISTED_EACH == LISTED_EACH - 1:
        options |= {"cluster": listed(random), "gpus": None, "precision": "bf16"}
        options["global_batch"] = 24 * random.choice((1, 2))
    try:
        return read_request(**options)
    except InputError:
        # A device or a framework without FP8.
        return read_request(**{**options, "precision": "bf16"})


def listed(random: Random) -> ClusterSpec:
    """Three whole nodes of eight GPUs, two of them on one leaf."""
    leaves = random.choice((("a", "a", "b"), ("a", "b", "b")))
    nodes = tuple(NodeSpec(name=f"n{i}", leaf=leaf) for i, leaf in enumerate(leaves))
    return load_cluster("dgx-h100").model_copy(
        update={"nodes": nodes, "gpus": 24, "elastic": False, "name": "three nodes"}
    )


def differences(request: PlanRequest) -> tuple[Plan, list[str]]:
    """The plan with what its choices bring, and every figure that `plan` does not give back."""
    plan = make_plan(request, robustness=False)
    return plan, [
        f"{request.model.name}, {request.cluster.name}, {request.gpus}: {words}"
        for choice in plan.choices or []
        for words in _differs(request, plan, choice)
    ]


def _differs(request: PlanRequest, plan: Plan, choice: ExecutionChoice) -> list[str]:
    step_s, without_s = plan.objective.step_time_s, choice.step_time_s_without
    assert step_s is not None
    found = []
    if without_s is not None and plan.status == "optimal" and without_s < step_s * (1 - 1e-9):
        found.append(f"{choice.choice}: {without_s} s without, the plan takes {step_s} s")
    if choice.pin:
        pins = {**request.pins, **parse_pins(choice.pin)}
        again = fastest_plan(replace(request, pins=pins))
        if again.objective.step_time_s != without_s or again.status != choice.status:
            said = f"{choice.status} {without_s}"
            found.append(f"{choice.choice}: {said}, pinned {again.status} {again.objective}")
    return found

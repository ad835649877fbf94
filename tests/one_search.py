"""Requests over which every answer is held against the plan that it speaks of."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from random import Random
from typing import Any

from meshwright.cluster_specs.reader import load_cluster
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.errors import InputError
from meshwright.planner.plan.assemble import claim_of, is_closed
from meshwright.planner.plan.best_plan import best_plan
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
WITHHELD: dict[str, tuple[str, ...]] = {
    "moe_dispatch": ("deepep", "hybridep", "allgather"),
    "ep_overlap": ("ep-overlap",),
    "tp_overlap": ("tp-overlap",),
    "cuda_graph": ("cuda-graph",),
    "cp_comm": ("cp-a2a", "cp-hierarchical"),
    "compiled": ("compile",),
    "sync_each_batch": ("sync-each-batch",),
}
"""The software that leaves a choice nothing but its plain value, where it is withheld."""


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


def _differs(request: PlanRequest, plan: Plan, choice: ExecutionChoice) -> Iterator[str]:
    step_s, without_s = plan.objective.step_time_s, choice.step_time_s_without
    assert step_s is not None
    if choice.proven != is_closed(claim_of(choice.status)):
        yield f"{choice.choice}: {choice.status}, proven is {choice.proven}"
    if without_s is not None and plan.status == "optimal" and without_s < step_s * (1 - 1e-9):
        yield f"{choice.choice}: {without_s} s without, the plan takes {step_s} s"
    said = (claim_of(choice.status), without_s, choice.lower_bound_s_without)
    for words, again in _replanned(request, choice):
        if choice.proven and not _is_same(said, again):
            yield f"{choice.choice}: {said}, {words} {again}"
        elif not choice.proven and not _agree(said, again):
            yield f"{choice.choice}: {said} contradicts {words} {again}"


Answer = tuple[str, float | None, float | None]
"""What is claimed, seconds and their lower bound."""


def _is_same(one: Answer, other: Answer) -> bool:
    """Whether both claim the same, to the rounding of sums in another order."""
    pairs = zip(one[1:], other[1:], strict=True)
    same = (
        a == b or (a is not None and b is not None and isclose(a, b, rel_tol=1e-12))
        for a, b in pairs
    )
    return one[0] == other[0] and all(same)


def _agree(one: Answer, other: Answer) -> bool:
    """Whether neither has a plan below what the other proves."""
    return all(
        price_s is None or bound_s is None or price_s >= bound_s * (1 - 1e-9)
        for (_, price_s, _), (_, _, bound_s) in ((one, other), (other, one))
    )


def _replanned(request: PlanRequest, choice: ExecutionChoice) -> Iterator[tuple[str, Answer]]:
    """Answers of `plan` where the choice is pinned to its plain value, where software for another value is
    withheld, and of a search that begins with nothing where the size of buckets is the framework's own.
    """
    if not choice.pin:
        found = best_plan(request, own_buckets=True)
        yield "searched", (found.claim, found.step_time_s, found.outcome.lower_bound_s)
        return
    pins = {**request.pins, **parse_pins(choice.pin)}
    yield "pinned", _answer(replace(request, pins=pins))
    withheld = WITHHELD.get(choice.choice, ())
    if withheld:
        without = tuple(dict.fromkeys((*request.without, *withheld)))
        yield "withheld", _answer(replace(request, without=without))


def _answer(request: PlanRequest) -> Answer:
    again = fastest_plan(request, explained=False)
    objective = again.objective
    return claim_of(again.status), objective.step_time_s, objective.lower_bound_s


def main() -> None:
    """Counts tables that plan gives back: `python -m tests.one_search --tables 100 --seed 0`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first request")
    asked = parser.parse_args()
    tables = rows = proven = differing = 0
    seed = asked.seed
    while tables < asked.tables:
        plan, found = differences(request_of(seed))
        choices = plan.choices or []
        tables, rows = tables + bool(choices), rows + len(choices)
        proven += sum(choice.proven for choice in choices)
        differing += bool(found)
        for words in found:
            print(f"{seed}: {words}", flush=True)
        print(
            f"{seed}: {tables} tables, {rows} rows, {proven} proven, {differing} differ", flush=True
        )
        seed += 1


if __name__ == "__main__":
    main()

"""Random requests, and random layouts of the space that a plan prints, priced by the cost model alone.

Nothing here is the search's: degrees are drawn one by one, layers dealt out at random, axes mapped by factors
drawn at random, and a layout counts as legal where no rule's own `check` objects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.estimate import Stages, estimate_layout, stage_memory_gib
from meshwright.costmodel.execution_names import OPTIMIZERS
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import AXES, Layout
from meshwright.costmodel.placement import level_factors, placement_on
from meshwright.costmodel.schedules import schedule_named
from meshwright.costmodel.workload import Execution, Workload
from meshwright.errors import InputError
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.run_terms import RECOMPUTED, layout_from_document

ALL_LAYERS = 10**6
FULL = 32
MODELS = (
    "gpt2-xl", "llama-3-8b", "llama-2-13b", "llama-2-70b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b",
    "mixtral-8x7b", "olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2", "gemma-2-9b", "nemotron-h-8b",
    "gemma-3-12b", "gemma-4-e2b", "olmo-3-7b", "qwen3.5-9b", "qwen3-next-80b-a3b", "llama-4-scout",
    "nemotron-3-nano-30b-a3b", "granite-4.0-h-small", "mimo-v2-flash",
)  # fmt: skip
CLUSTERS = (
    "dgx-h100", "dgx-a100", "dgx-a100-40gb", "dgx-b200", "gb200-nvl72", "superpod-a100", "mi300x",
    "h100-leaf-3to1", "l40s-pcie", "jean-zay-a100", "dgx-v100", "dgx-b300", "gb300-nvl72", "hgx-h800",
)  # fmt: skip


def random_request(chance: random.Random, most_gpus: int = 64) -> PlanRequest:
    """A request that can be read; whether it has a plan is for the planner to say."""
    while True:
        cluster = chance.choice(CLUSTERS)
        gpus = chance.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 72, 96, 128))
        replicas = chance.choice((1, 2, 3, 4, 6, 8, 16, 20, 32))
        options: dict[str, Any] = {
            "model": chance.choice(MODELS),
            "cluster": cluster,
            "gpus": min(gpus, most_gpus),
            "global_batch": replicas * chance.choice((1, 2, 4, 8, 12)),
            "seq_len": chance.choice((512, 1024, 2048, 4096, 8192, 16384)),
            "framework": chance.choice(("megatron",) * 4 + ("torchtitan", "deepspeed", "fsdp2")),
            "precision": chance.choice(("bf16", "bf16", "fp8", "fp16")),
            "optimizer": chance.choice(("adam", "adam", "muon", chance.choice(OPTIMIZERS))),
            "reserve_gib": chance.choice((0.0, 0.0, 0.0, 10.0)),
            **_of_fine_tuning(chance),
        }
        try:
            request = read_request(**options)
            request.workload()
        except InputError:
            continue
        return request


def _of_fine_tuning(chance: random.Random) -> dict[str, Any]:
    """Now and then adapters, another loss, another kind of step, or what else may lie on the host."""
    options: dict[str, Any] = {}
    if chance.random() < 0.2:
        options |= {
            "train": chance.choice(("lora", "qlora", "dora")),
            "lora_rank": chance.choice((8, 64)),
        }
    if chance.random() < 0.2:
        options["loss"] = chance.choice(("liger", "chunked"))
    if chance.random() < 0.2:
        options["kind"] = chance.choice(("sft", "dpo", "kto", "orpo", "reward"))
    if chance.random() < 0.2:
        options["allow"] = chance.choice(("activation-offload", "megatron-fsdp", "bf16-grads"))
    return options


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A layout with everything decided but where its ranks stand."""

    execution: Execution
    layout: Layout
    stages: Stages


@dataclass(frozen=True, kw_only=True)
class Candidate(Decided):
    """A layout with everything decided."""

    matrix: dict[str, tuple[int, ...]]


def seconds(request: PlanRequest, candidate: Candidate) -> float | None:
    """Its step; None where it breaks a rule or does not fit."""
    layout = candidate.layout
    workload = request.workload(candidate.execution).on(int(layout.gpus))
    if not is_legal(workload, candidate):
        return None
    table = {axis: np.array([row]) for axis, row in candidate.matrix.items()}
    rows = replace(layout, micro_batch=np.array([int(layout.micro_batch)]))
    placement = placement_on(workload.cluster, layout, table)
    estimate = estimate_layout(workload, rows, placement, candidate.stages)
    return float(np.min(estimate.step_time_s))


def is_legal(workload: Workload, candidate: Decided) -> bool:
    """Whether it fits, and no rule objects."""
    memory_gib = stage_memory_gib(workload, candidate.layout, candidate.stages)
    if max(memory_gib) > usable_hbm_gib(workload):
        return False
    finished = FinishedPlan(
        workload=workload,
        layout=candidate.layout,
        stages=candidate.stages,
        memory_gib=tuple(float(gib) for gib in memory_gib),
        spans={},
    )
    return all(rule.check(finished) is None for rule in rules_for(workload))


def candidates(
    chance: random.Random, request: PlanRequest, plan: Plan, count: int
) -> Iterator[Candidate]:
    """The layouts of `decided_layouts` under mappings drawn at random; those without one are left out."""
    for decided in decided_layouts(chance, request, plan, count):
        matrix = _mapping(chance, request, decided.layout)
        if matrix is not None:
            yield Candidate(**vars(decided), matrix=matrix)


def decided_layouts(
    chance: random.Random, request: PlanRequest, plan: Plan, count: int
) -> Iterator[Decided]:
    """Draws from the printed space, and neighbours of the plan, in turns; those that cannot be made are
    left out.
    """
    for turn in range(count):
        layout = _neighbour(chance, request, plan) if turn % 2 else _drawn(chance, request, plan)
        decided = None if layout is None else _completed(chance, request, plan, layout)
        if decided is not None:
            yield decided


def _drawn(chance: random.Random, request: PlanRequest, plan: Plan) -> Layout | None:
    """Degrees of the printed space, one after the other, as far as GPUs last."""
    space = plan.solver.space
    assert space is not None
    left = request.gpus
    degrees: dict[str, int] = {}
    for axis in chance.sample(["tp", "cp", "pp", "dp"], 4):
        options = [degree for degree in getattr(space, axis) if degree <= left]
        if axis == "dp":
            options = [degree for degree in options if request.global_batch % degree == 0]
        if not options:
            return None
        # Mostly all GPUs: the last axis takes what is left.
        last = len(degrees) == 3 and chance.random() < 0.8
        degrees[axis] = max(options) if last else chance.choice(options)
        left //= degrees[axis]
    experts = {"ep": chance.choice(space.ep), "etp": chance.choice(space.etp)}
    share = request.global_batch // degrees["dp"]
    micro_batch = chance.choice([size for size in range(1, share + 1) if share % size == 0])
    kind = chance.choice(space.recompute)
    name = chance.choice(space.schedules)
    vpp = 1
    if name not in ("1f1b", "gpipe", "zb-h1") and degrees["pp"] > 1:
        vpp = chance.choice((2, 2, 3, 4, 6, 8))
    return Layout(
        **degrees,
        **experts,
        vpp=vpp,
        micro_batch=micro_batch,
        num_micro_batches=share // micro_batch,
        sequence_parallel=degrees["tp"] > 1,
        zero_stage=chance.choice(space.zero_stages),
        shard_groups=chance.choice((1, chance.choice(space.shard_groups))),
        optimizer_offload=chance.choice((0, chance.choice(space.optimizer_offloads))),
        recompute=_mask(kind),
        schedule=int(schedule_named(name)) if degrees["pp"] > 1 else 0,
    )


def _mask(kind: str) -> int:
    if kind in ("none", "full"):
        return FULL if kind == "full" else 0
    modules = {str(name): int(mask) for name, mask in RECOMPUTED.items()}
    return sum(modules[name] for name in kind.split("+"))


def _neighbour(chance: random.Random, request: PlanRequest, plan: Plan) -> Layout | None:
    """The plan's layout with a factor moved from one axis to another, or another micro-batch, recomputation,
    sharding or number of virtual stages.
    """
    assert plan.layout is not None
    space = plan.solver.space
    assert space is not None
    layout = replace(layout_from_document(plan.layout), recompute_layers=0)
    kind = chance.random()
    if kind < 0.5:
        giver, taker = chance.sample(["tp", "cp", "pp", "dp"], 2)
        factor = chance.choice((2, 2, 2, 3, 4))
        if getattr(layout, giver) % factor:
            return None
        changes = {
            giver: getattr(layout, giver) // factor,
            taker: getattr(layout, taker) * factor,
        }
        if any(value not in getattr(space, axis) for axis, value in changes.items()):
            return None
        layout = replace(layout, **changes)
        if request.global_batch % int(layout.dp):
            return None
    elif kind < 0.7:
        layout = replace(layout, recompute=_mask(chance.choice(space.recompute)))
    elif kind < 0.8:
        layout = replace(
            layout,
            zero_stage=chance.choice(space.zero_stages),
            shard_groups=chance.choice(space.shard_groups),
            optimizer_offload=chance.choice(space.optimizer_offloads),
        )
    elif kind < 0.9:
        layout = replace(layout, ep=chance.choice(space.ep), etp=chance.choice(space.etp))
    elif int(layout.vpp) > 1:
        layout = replace(layout, vpp=chance.choice((2, 3, 4, 5, 6, 8)))
    share = request.global_batch // int(layout.dp)
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    size = int(layout.micro_batch)
    if size not in sizes or chance.random() < 0.3:
        size = chance.choice(sizes)
    return replace(
        layout,
        micro_batch=size,
        num_micro_batches=share // size,
        sequence_parallel=int(layout.tp) > 1,
    )


def _completed(
    chance: random.Random, request: PlanRequest, plan: Plan, layout: Layout
) -> Decided | None:
    """With an execution, a split of the layers and a recomputed amount."""
    if (int(layout.tp) * int(layout.cp) * int(layout.dp)) % (int(layout.ep) * int(layout.etp)):
        return None
    stages = _split(chance, request.model, int(layout.pp), int(layout.vpp))
    if request.framework == "deepspeed" and stages is not None:
        # It deals layers out by itself: evenly, what is left over to the first ranks.
        stages = tuple(_even(request.model.layers, int(layout.pp)))
    if stages is None:
        return None
    if int(layout.recompute) & FULL:
        shortest = min(min(rank) for rank in stages)
        amount = chance.choice((ALL_LAYERS, chance.randint(1, shortest)))
        layout = replace(layout, recompute_layers=amount)
    executions = request.execution_options.executions()
    own = plan.execution
    if chance.random() < 0.5 and own is not None:
        alike = [
            each
            for each in executions
            if (each.moe_dispatch, each.cuda_graph) == (own.moe_dispatch, own.cuda_graph)
        ]
        executions = tuple(alike) or executions
    execution = chance.choice(executions)
    return Decided(execution=execution, layout=layout, stages=stages)


def _even(layers: int, pp: int) -> list[tuple[int, ...]]:
    return [(layers // pp + (rank < layers % pp),) for rank in range(pp)]


def _split(chance: random.Random, model: ModelSpec, pp: int, vpp: int) -> Stages | None:
    """Layers of each virtual stage: alike with some moved where there is one a rank; else alike but for the
    ends, which is what plans deal out, where embedding, head or MTP modules stand for what is missing.
    """
    layers, chunks = model.layers, pp * vpp
    if chunks > layers:
        return None
    if vpp == 1:
        counts = [layers // pp + (rank < layers % pp) for rank in range(pp)]
        chance.shuffle(counts)
        for _ in range(chance.choice((0, 0, 1, 2)) if pp > 1 else 0):
            giver, taker = chance.sample(range(pp), 2)
            if counts[giver] > 1:
                counts[giver], counts[taker] = counts[giver] - 1, counts[taker] + 1
        return tuple((count,) for count in counts)
    each = -(-layers // chunks)
    missing = each * chunks - layers
    if missing > 2 + model.mtp_layers:
        return None
    table = [[each] * vpp for _ in range(pp)]
    first = chance.randint(0, missing)
    table[0][0] -= first
    table[-1][-1] -= missing - first
    if min(min(rank) for rank in table) < 1:
        return None
    return tuple(tuple(rank) for rank in table)


def _mapping(
    chance: random.Random, request: PlanRequest, layout: Layout
) -> dict[str, tuple[int, ...]] | None:
    """Prime factors of the axes dealt to the fabric's levels at random; tp inside the innermost."""
    sizes = level_factors(request.cluster, int(layout.gpus)).tolist()
    room = list(sizes)
    matrix = {axis: [1] * len(sizes) for axis in AXES}
    if room[0] % int(layout.tp):
        return None
    matrix["tp"][0], room[0] = int(layout.tp), room[0] // int(layout.tp)
    factors = [(axis, prime) for axis in ("cp", "dp", "pp") for prime in _primes(layout, axis)]
    chance.shuffle(factors)
    for axis, prime in sorted(factors, key=lambda pair: -pair[1]):
        levels = [level for level, size in enumerate(room) if size % prime == 0]
        if not levels:
            return None
        level = chance.choice(levels)
        matrix[axis][level], room[level] = matrix[axis][level] * prime, room[level] // prime
    return {axis: tuple(row) for axis, row in matrix.items()} if prod(room) == 1 else None


def _primes(layout: Layout, axis: str) -> list[int]:
    rest, prime, primes = int(getattr(layout, axis)), 2, []
    while rest > 1:
        while rest % prime == 0:
            primes.append(prime)
            rest //= prime
        prime += 1
    return primes

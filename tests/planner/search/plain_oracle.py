"""Every layout of a tiny request, generated and priced here: no space, no bounds, no exact pricing.

Only the plain cost model and the rules' own `check` are shared with the planner. Without interleaving; all
degrees, micro-batches, expert degrees, ZeRO stages, recomputed modules and amounts, splits and mappings.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.estimate import estimate_layout, stage_memory_gib
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import AXES, Layout, Recompute
from meshwright.costmodel.placement import level_factors, placement_on
from meshwright.costmodel.workload import Workload
from meshwright.planner.request.plan_request import PlanRequest

Stages = tuple[tuple[int, ...], ...]
EVERY_LAYER = 10**6
MODULES = (Recompute.LAYERNORM, Recompute.MLP, Recompute.MOE_ACTIVATION)


def least_step_time_s(request: PlanRequest) -> float | None:
    """The least step time of any layout; None where none is legal and fits."""
    workload = request.workload()
    times = (
        seconds
        for layout in layouts(request)
        if wanted(request, layout)
        for seconds in step_times_s(workload, layout)
    )
    return min(times, default=None)


def layouts(request: PlanRequest) -> Iterator[Layout]:
    """All layouts by counting, without the recomputed amount."""
    count = range(1, request.gpus + 1)
    experts = request.model.moe.experts if request.model.moe else 1
    for tp, cp, pp, dp in product(count, repeat=4):
        if tp * cp * pp * dp > request.gpus or pp > request.model.layers:
            continue
        if request.global_batch % dp:
            continue
        share = request.global_batch // dp
        sizes = [size for size in range(1, share + 1) if share % size == 0]
        for ep, etp in product(range(1, experts + 1), count):
            if (tp * cp * dp) % (ep * etp) == 0:
                for size, sharding, mask in product(sizes, shardings(cp, dp), masks(request)):
                    zero, groups, offloaded = sharding
                    yield Layout(
                        tp=tp,
                        cp=cp,
                        pp=pp,
                        dp=dp,
                        ep=ep,
                        etp=etp,
                        micro_batch=size,
                        num_micro_batches=share // size,
                        sequence_parallel=tp > 1,
                        zero_stage=zero,
                        shard_groups=groups,
                        optimizer_offload=offloaded,
                        recompute=mask,
                    )


def shardings(cp: int, dp: int) -> list[tuple[int, int, int]]:
    """A ZeRO stage, a number of groups that dp divides into, of two ranks or more, and what is offloaded."""
    several = [n for n in range(2, dp + 1) if dp % n == 0 and dp * cp // n > 1]
    return [(0, 1, 0), *product((1,), (1, *several), (0, 25, 50, 75, 100))]


def masks(request: PlanRequest) -> list[int]:
    """Nothing, every set of modules that the model has, everything; experts whole or their activation."""
    modules = [Recompute.LAYERNORM]
    if request.model.dense_layers:
        modules.append(Recompute.MLP)
    if request.model.moe is not None:
        modules += [Recompute.MOE_ACTIVATION, Recompute.EXPERTS]
    selective = []
    for taken in product((False, True), repeat=len(modules)):
        pairs = zip(modules, taken, strict=True)
        chosen = [module for module, chosen in pairs if chosen]
        if not {Recompute.MOE_ACTIVATION, Recompute.EXPERTS} <= set(chosen):
            selective.append(sum(map(int, chosen)))
    return [*selective, int(Recompute.FULL)]


def wanted(request: PlanRequest, layout: Layout) -> bool:
    """Whether pins and forbidden choices are kept."""
    full = bool(int(layout.recompute) & Recompute.FULL)
    kind = "full" if full else "selective" if layout.recompute else "none"
    for name, value in request.pins.items():
        if (kind if name == "recompute" else getattr(layout, name)) != value:
            return False
    excluded = {
        "selective-recompute": kind == "selective",
        "full-recompute": full,
        "idle-gpus": int(layout.gpus) < request.gpus,
        "cp": int(layout.cp) > 1,
        "ep": int(layout.ep) > 1,
        "interleaving": False,
        "shard-groups": int(layout.shard_groups) > 1,
        "optimizer-offload": int(layout.optimizer_offload) > 0,
    }
    return not any(excluded[name] for name in request.forbids)


def step_times_s(workload: Workload, layout: Layout) -> Iterator[float]:
    """Seconds of a layout under every amount, split and mapping that is legal and fits."""
    on = workload.on(int(layout.gpus))
    tables = list(mappings(layout, level_factors(on.cluster, on.gpus).tolist()))
    if not tables:
        return
    stacked = {axis: np.array([table[axis] for table in tables]) for axis in AXES}
    placements = placement_on(on.cluster, layout, stacked)
    for stages in splits(workload.model.layers, int(layout.pp)):
        for amount in amounts(layout, stages):
            sized = Layout(
                **{
                    **vars(layout),
                    "recompute_layers": amount,
                }
            )
            memory_gib = stage_memory_gib(on, sized, stages)
            if max(memory_gib) > usable_hbm_gib(on):
                continue
            if legal(workload, sized, stages, memory_gib):
                seconds = estimate_layout(
                    on, _array(sized, len(tables)), placements, stages
                ).step_time_s
                yield float(np.min(seconds))


def _array(layout: Layout, count: int) -> Layout:
    """The same layout with one field as an array, which gives every part of the price its axis."""
    return Layout(**{**vars(layout), "micro_batch": np.full(count, int(layout.micro_batch))})


def amounts(layout: Layout, stages: Stages) -> list[int]:
    """Recomputed layers of each stage: Megatron's block method takes any number, of which a shorter stage
    recomputes all it has.
    """
    if not int(layout.recompute) & Recompute.FULL:
        return [0]
    return list(range(1, max(max(rank) for rank in stages) + 1))


def splits(layers: int, pp: int) -> Iterator[Stages]:
    """Every split with at least a layer on each rank."""
    for counts in product(range(1, layers + 1), repeat=pp):
        if sum(counts) == layers:
            yield tuple((count,) for count in counts)


def mappings(layout: Layout, sizes: list[int]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Every matrix whose rows multiply to the degrees and whose columns to the level sizes, tp inside."""
    rows = []
    for axis in AXES:
        degree = int(getattr(layout, axis))
        options = product(range(1, degree + 1), repeat=len(sizes))
        rows.append([row for row in options if prod(row) == degree])
    rows[AXES.index("tp")] = [row for row in rows[AXES.index("tp")] if row[0] == int(layout.tp)]
    for table in product(*rows):
        if [prod(column) for column in zip(*table, strict=True)] == sizes:
            yield dict(zip(AXES, table, strict=True))


def legal(
    workload: Workload, layout: Layout, stages: Stages, memory_gib: NDArray[np.float64]
) -> bool:
    """Whether no rule's own check objects."""
    plan = FinishedPlan(
        workload=workload,
        layout=layout,
        stages=stages,
        memory_gib=tuple(float(gib) for gib in memory_gib),
        spans={},
    )
    return all(rule.check(plan) is None for rule in rules_for(workload))

"""Layouts around a request without a plan, as tables for the rules: its own, and those with a wish lifted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.registry import rules_for
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.pipeline.schedules import schedule_named, traits
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.executions import EXECUTION_PINS
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.request_space import recompute_name, space_of
from meshwright.planner.search.space import divisors

MOST_CANDIDATES = 200_000
"""Layouts around an infeasible request that are looked at."""
PROBED_CANDIDATES = 2_000
"""Of them, to see which executions keep rules that the plainest one breaks."""


def executions_to_try(request: PlanRequest) -> list[Execution]:
    """The plainest execution, and those that differ from it in one choice and keep a rule that it breaks.

    Sliding windows are one reason: keys and values may not pass around a ring then, but heads may be swapped.
    """
    plainest, (choices, *_) = request.plainest, _relaxed_rows([request], PROBED_CANDIDATES)
    own = _table(request, plainest, choices)
    broken = {rule.name: rule.excess(own) > 0 for rule in rules_for(own.workload)}
    found = [plainest]
    if not any(is_broken.any() for is_broken in broken.values()):
        return found
    for execution in request.execution_options.executions():
        differing = [
            name for name in EXECUTION_PINS if getattr(execution, name) != getattr(plainest, name)
        ]
        if len(differing) == 1:
            table = _table(request, execution, choices)
            still = {rule.name: rule.excess(table) > 0 for rule in rules_for(table.workload)}
            none = np.zeros(len(table.memory_gib), dtype=bool)
            if any((rows & ~still.get(name, none)).any() for name, rows in broken.items()):
                found.append(execution)
    return found


def tables_around(request: PlanRequest) -> tuple[Candidates, ...]:
    """Layouts around the request: its own space and, with one wish lifted at a time, those next to it; run
    as the request would be, and as it would be with a wish lifted.
    """
    relaxed = list(_relaxed(request))
    executions = dict.fromkeys(
        execution for each in relaxed for execution in executions_to_try(each)
    )
    wishes = (request.layout_pins, request.forbids)
    others = [each for each in relaxed if (each.layout_pins, each.forbids) != wishes]
    share = MOST_CANDIDATES // len(executions)
    rows = np.unique(np.concatenate(_relaxed_rows([request, *others], share)), axis=0)
    return tuple(_table(request, execution, rows) for execution in executions)


def _relaxed(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request, and with one pin, ban or lack of software lifted at a time."""
    yield request
    for pin in request.pins:
        yield replace(request, pins=without_pin(request.pins, pin))
    for ban in request.forbids:
        yield replace(request, forbids=tuple(each for each in request.forbids if each != ban))
    for lack in request.without:
        yield replace(request, without=tuple(each for each in request.without if each != lack))


def _relaxed_rows(requests: Sequence[PlanRequest], most_rows: int) -> list[NDArray[np.int64]]:
    share = max(most_rows // len(requests), 1)
    return [_choices_around(each, share) for each in requests]


def _table(request: PlanRequest, execution: Execution, rows: NDArray[np.int64]) -> Candidates:
    """Layouts of rows of choices, run in one way."""
    workload = request.workload(execution)
    layouts = _as_layouts(rows, request)
    memory, recomputed_layers = CostModelPricing(workload).least_memory_gib(
        _priceable(layouts, request)
    )
    return Candidates(
        workload=workload,
        layouts=replace(layouts, recompute_layers=recomputed_layers),
        memory_gib=memory,
    )


def without_pin(pins: Mapping[str, int | str], name: str) -> dict[str, int | str]:
    """The pins without one of them."""
    return {key: value for key, value in pins.items() if key != name}


def _choices_around(request: PlanRequest, most_rows: int) -> NDArray[np.int64]:
    """Combinations of choices, pinned ones as pinned even where they cannot be; thinned to about `most`
    rows.
    """
    space, pins = space_of(replace(request, pins={})), request.pins

    def options(name: str, free: Sequence[int]) -> list[int]:
        return [int(pins[name])] if name in pins else list(free) or [1]

    stage = pins.get("zero_stage")
    offloads = [share for zero, share in space.offloads if stage in (None, zero)]
    masks = [m for m in space.recompute if m in (0, int(Recompute.FULL)) or "recompute" in pins]
    masks = [m for m in masks if pins.get("recompute", recompute_name(m)) == recompute_name(m)]
    axes = [
        options("tp", space.tp),
        options("cp", space.cp),
        options("pp", space.pp),
        options("dp", [d for d in divisors(request.global_batch) if d <= request.gpus]),
        options("ep", space.ep),
        options("etp", [1]),
        options("vpp", _chunks(pins, interleaving=space.interleaving)),
        options("micro_batch", [1]),
        options("zero_stage", space.zero),
        options("shard_groups", [1]),
        options("optimizer_offload", _ends(offloads)),
        masks or [int(Recompute.NONE)],
        [int(schedule_named(str(pins.get("schedule", "1f1b"))))],
    ]
    while np.prod([len(axis) for axis in axes], dtype=np.float64) > most_rows:
        longest = max(range(len(axes)), key=lambda k: len(axes[k]))
        axes[longest] = sorted({*axes[longest][::2], axes[longest][-1]})
        if len(axes[longest]) <= 2:
            break
    rows = np.array(list(product(*axes)), dtype=np.int64)
    if "optimizer_offload" not in pins:
        rows = rows[_offload_goes(rows[:, _ZERO_STAGE], rows[:, _OFFLOAD], space.offloads)]
    used = rows[:, 0] * rows[:, 1] * rows[:, 2] * rows[:, 3]
    fits = used <= request.gpus
    return rows[fits] if fits.any() else rows[[int(np.argmin(used))]]


_ZERO_STAGE, _OFFLOAD = 8, 10
"""Columns of a row of choices."""


def _offload_goes(
    zero_stages: NDArray[np.int64], shares: NDArray[np.int64], pairs: Sequence[tuple[int, int]]
) -> NDArray[np.bool_]:
    """Whether nothing is offloaded, or that share under that ZeRO stage is in the space."""
    codes = [200 * zero + share for zero, share in pairs]
    return np.asarray((shares == 0) | np.isin(200 * zero_stages + shares, codes))


def _ends(values: Sequence[int]) -> list[int]:
    """The least and the largest."""
    return sorted({min(values), max(values)}) if values else [0]


def _as_layouts(rows: NDArray[np.int64], request: PlanRequest) -> Layout:
    tp, cp, pp, dp, ep, etp, vpp, size, zero, groups, offload, mask, schedule = rows.T
    sequence_parallel = (tp > 1) & space_of(replace(request, pins={})).sequence_parallel
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        micro_batch=size,
        num_micro_batches=np.maximum(request.global_batch // (dp * size), 1),
        sequence_parallel=sequence_parallel,
        zero_stage=zero,
        shard_groups=groups,
        optimizer_offload=offload,
        recompute=mask,
        recompute_layers=np.zeros(len(rows), dtype=np.int64),
        schedule=schedule,
    )


def _chunks(pins: Mapping[str, int | str], *, interleaving: bool) -> list[int]:
    """Virtual stages that a pinned schedule takes; without one, also two where stages may be interleaved."""
    if "schedule" not in pins:
        return [1, 2] if interleaving else [1]
    name = str(pins["schedule"])
    fewest = 2 if name == "interleaved-1f1b" else traits(schedule_named(name)).fewest_chunks
    return [max(fewest, 2)] if name == "zb-h1" else [fewest]


def _priceable(layouts: Layout, request: PlanRequest) -> Layout:
    """The same layouts where the memory formulas hold: whole expert replicas, no more stages than layers."""
    pp = np.minimum(np.asarray(layouts.pp), request.model.layers)
    ep = np.minimum(layouts.ep, np.maximum(layouts.tp * layouts.cp * layouts.dp // layouts.etp, 1))
    etp = np.minimum(layouts.etp, layouts.tp * layouts.cp * layouts.dp)
    vpp = np.minimum(layouts.vpp, np.maximum(request.model.layers // pp, 1))
    return replace(layouts, pp=pp, ep=ep, etp=etp, vpp=np.where(pp > 1, vpp, 1))

"""One pipeline schedule on even chunks, played event by event: step, bubble, activations in flight."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from meshwright.costmodel.execution_names import SCHEDULE_NAMES
from meshwright.costmodel.layout import ROUNDING, Layout
from meshwright.costmodel.schedules import Schedule, in_flight, schedule_name, schedule_named
from meshwright.costmodel.simulator import simulate
from meshwright.costmodel.textbook import bubble_of_ideal, bubble_of_step
from meshwright.errors import InputError, check_choice

MOST_PASSES = 200_000
MOST_PASS_S = 1e6
MOST_LAYERS = 100_000
V_SHAPED = (Schedule.ZBV, Schedule.DUALPIPE_V)
TARGET = 0.8
"""Efficiency below which a pipeline is advised on."""


def pipeline_document(
    schedule: str,
    pp: int,
    vpp: int,
    num_micro_batches: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_share: float = 0.5,
    boundary_bytes: float | None = None,
    layers: int | None = None,
) -> dict[str, Any]:
    """A step of a schedule on even chunks: how long it takes, its bubble, activations in flight.

    Parameters
    ----------
    schedule
        One of `costmodel.execution_names.SCHEDULE_NAMES`.
    pp, vpp, num_micro_batches
        Pipeline ranks, chunks of each, and micro-batches of the step; at least 1, and at most `MOST_PASSES`
        together.
    forward_s, backward_s
        Seconds of one micro-batch through one rank, all its chunks; above 0.
    weight_share
        The part of a backward pass that gradients of weights take, from 0 to below 1, for schedules that run
        it apart.
    boundary_bytes
        Activations of one micro-batch between two stages; None where transfers are not asked for.
    layers
        Of the model, at least one for each virtual stage; None where stages are not asked for.

    Returns
    -------
    dict
        Seconds of the step, of its work and of its bubble, the micro-batches in flight on every rank, what
        would raise an efficiency below `TARGET`, the forward and backward passes, and with `boundary_bytes`
        the speed that boundaries need; with `layers` the layers and passes of each virtual stage.

    Raises
    ------
    InputError
        Where the schedule has no such shape, or there are too many passes to play.
    """
    _check(schedule, {"--pp": pp, "--vpp": vpp, "--micro-batches": num_micro_batches})
    if not (0 < forward_s < MOST_PASS_S and 0 < backward_s < MOST_PASS_S and 0 <= weight_share < 1):
        raise InputError(
            f"{forward_s * 1e3:g}, {backward_s * 1e3:g} and {weight_share:g}; times must be positive and the "
            "share from 0 to below 1",
            where="--forward-ms, --backward-ms, --weight-share",
        )
    layout = Layout(
        pp=pp,
        vpp=vpp,
        num_micro_batches=num_micro_batches,
        schedule=int(schedule_named(schedule)),
    )
    step_s = _step_s(layout, forward_s / vpp, backward_s / vpp, weight_share)
    work_s = num_micro_batches * (forward_s + backward_s)
    active = np.broadcast_to(in_flight(layout, np.arange(pp)), (pp,))
    formula = 1.0 - float(bubble_of_step(pp, num_micro_batches, vpp))
    by_formula = abs(work_s / step_s - formula) < 1e-9
    budget = 2 * MOST_PASSES

    @cache
    def efficiency_of(ranks: int, micro_batches: int) -> float:
        """Of other shapes of the schedule: by the formula where it tells this one, else played."""
        nonlocal budget
        if by_formula:
            return 1.0 - float(bubble_of_step(ranks, micro_batches, vpp))
        budget -= ranks * vpp * micro_batches
        if budget < 0:
            return 0.0
        other = replace(layout, pp=ranks, num_micro_batches=micro_batches)
        try:
            seconds = _step_s(other, forward_s / vpp, backward_s / vpp, weight_share)
        except InputError:
            return 0.0
        return micro_batches * (forward_s + backward_s) / seconds

    return {
        "schedule": schedule,
        "pp": pp,
        "vpp": vpp,
        "num_micro_batches": num_micro_batches,
        "seconds": step_s,
        "work_seconds": work_s,
        "bubble_seconds": step_s - work_s,
        "bubble_of_step": 1.0 - work_s / step_s,
        "bubble_of_ideal": step_s / work_s - 1.0,
        "efficiency": work_s / step_s,
        "textbook": {
            "bubble_of_step": float(bubble_of_step(pp, num_micro_batches, vpp)),
            "bubble_of_ideal": float(bubble_of_ideal(pp, num_micro_batches, vpp)),
        },
        "advice": _advice(pp, num_micro_batches, work_s / step_s, efficiency_of),
        "in_flight": [float(micro_batches) for micro_batches in active],
        "transfer": _transfer(boundary_bytes, layout, work_s, float(np.max(active))),
        "passes": {
            "forward": pp * vpp * num_micro_batches,
            "backward": pp * vpp * num_micro_batches,
        },
        "stages": _stages(layout, layers, work_s),
    }


def _stages(layout: Layout, layers: int | None, work_s: float) -> list[dict[str, Any]]:
    """Layers, forward passes of a step and compute of each virtual stage; the first take what is left over.

    Megatron deals virtual stages round robin, stage s to rank s mod p (Narayanan et al. 2021, arXiv
    2104.04473, figure 4); a V-shaped schedule sends the second half back (Qi et al. 2024, arXiv 2405.15362).
    """
    if layers is None:
        return []
    pp, stages = int(layout.pp), int(layout.pp) * int(layout.vpp)
    if not stages <= layers <= MOST_LAYERS:
        raise InputError(
            "must be from one for each virtual stage to " + f"{MOST_LAYERS:,}",
            where="--layers",
            value=layers,
        )
    if Schedule(int(layout.schedule)) is Schedule.DUALPIPE:
        raise InputError("dualpipe keeps every stage on two ranks; ask without", where="--layers")
    is_v = Schedule(int(layout.schedule)) in V_SHAPED
    rows = []
    for stage in range(stages):
        of_stage = layers // stages + (stage < layers % stages)
        rows.append(
            {
                "stage": stage,
                "rank": stages - 1 - stage if is_v and stage >= pp else stage % pp,
                "layers": of_stage,
                "passes": int(layout.num_micro_batches),
                "compute_s": work_s * pp * of_stage / layers,
            }
        )
    return rows


def _step_s(layout: Layout, forward_s: float, backward_s: float, weight_share: float) -> float:
    """Seconds of a step with equal chunks. Raises InputError where the schedule has no such shape."""
    chunks = int(layout.pp) * int(layout.vpp)
    schedule = Schedule(int(layout.schedule))
    try:
        timeline = simulate(
            [forward_s] * chunks,
            [backward_s] * chunks,
            pp=int(layout.pp),
            num_micro_batches=int(layout.num_micro_batches),
            schedule=schedule,
            weight_s=[weight_share * backward_s] * chunks,
        )
    except ValueError as error:
        name = schedule_name(schedule, int(layout.vpp))
        raise InputError(str(error), where=f"--schedule {name}") from error
    return timeline.seconds


def _advice(
    pp: int, num_micro_batches: int, efficiency: float, efficiency_of: Callable[[int, int], float]
) -> list[dict[str, Any]]:
    """The least doubling of micro-batches, and the least cut of stages, that reach the target.

    `efficiency_of` some ranks and micro-batches is 0 where the schedule has no such shape.
    """
    enough = TARGET - ROUNDING
    if efficiency >= TARGET:
        return []
    more = (num_micro_batches << doubled for doubled in range(1, MOST_PASSES.bit_length()))
    batches = next((each for each in more if efficiency_of(pp, each) >= enough), None)
    fewer = range(pp - 1, 0, -1)
    at = bisect_left(
        fewer, True, key=lambda ranks: efficiency_of(ranks, num_micro_batches) >= enough
    )
    ranks = fewer[at] if at < len(fewer) else None
    changes = (
        ("micro-batches", num_micro_batches, batches, (pp, batches)),
        ("stages", pp, ranks, (ranks, num_micro_batches)),
    )
    return [
        {"change": what, "from": before, "to": after, "efficiency": efficiency_of(*shape)}
        for what, before, after, shape in changes
        if after is not None
    ]


def _transfer(
    boundary_bytes: float | None, layout: Layout, work_s: float, active: float
) -> dict[str, float] | None:
    """Bytes over one boundary and over all in a step, and the speed at which they fit beside the compute."""
    if boundary_bytes is None or int(layout.pp) < 2:
        return None
    one_way = int(layout.num_micro_batches) * boundary_bytes
    boundaries = int(layout.pp) * int(layout.vpp) - 1
    if Schedule(int(layout.schedule)) in V_SHAPED:
        boundaries -= 1  # the turn of the V stays on the last rank
    return {
        "bytes_one_way": one_way,
        "bytes_both_ways": 2.0 * one_way,
        "boundaries": boundaries,
        "bytes_all_boundaries": 2.0 * one_way * boundaries,
        "needed_gbit_per_s": 2.0 * one_way * 8.0 / work_s / 1e9,
        "peak_activation_bytes": active * boundary_bytes,
    }


def _check(schedule: str, sizes: dict[str, int]) -> None:
    """Raises InputError for an unknown schedule or sizes out of range."""
    check_choice(schedule, SCHEDULE_NAMES, "--schedule", "no such schedule")
    for option, size in sizes.items():
        if size < 1:
            raise InputError("must be at least 1", where=option, value=size)
    passes = prod(sizes.values())
    if passes > MOST_PASSES:
        raise InputError(
            f"{passes:,} passes, at most {MOST_PASSES:,} are played", where=", ".join(sizes)
        )

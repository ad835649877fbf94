"""One pipeline schedule on even chunks, played event by event: step, bubble, activations in flight."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.pipeline.schedules import SCHEDULE_NAMES, in_flight, schedule_named
from meshwright.costmodel.pipeline.simulator import simulate
from meshwright.errors import InputError
from meshwright.planner.report.parts import (
    Renderable,
    count,
    counted,
    facts,
    grid,
    heading,
    percent,
    seconds,
)

MOST_PASSES = 200_000
MOST_RANKS_SHOWN = 32


def pipeline_document(
    schedule: str,
    pp: int,
    vpp: int,
    num_micro_batches: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_share: float = 0.5,
) -> dict[str, Any]:
    """A schedule of `pp` ranks with `vpp` chunks each.

    `forward_s` and `backward_s` are those of one micro-batch through one rank, all its chunks; `weight_share`
    is the part of a backward pass that gradients of weights take, for schedules that run it apart. Raises
    InputError where the schedule has no such shape or there are too many passes to play.
    """
    if schedule not in SCHEDULE_NAMES:
        raise InputError(f"--schedule: {schedule[:40]!r}, allowed are {', '.join(SCHEDULE_NAMES)}")
    for name, value in (("--pp", pp), ("--vpp", vpp), ("--micro-batches", num_micro_batches)):
        if value < 1:
            raise InputError(f"{name}: {value}, must be at least 1")
    if not (0 < forward_s < 1e6 and 0 < backward_s < 1e6 and 0 <= weight_share < 1):
        raise InputError(
            f"--forward-ms, --backward-ms, --weight-share: {forward_s * 1e3:g}, {backward_s * 1e3:g} and "
            f"{weight_share:g}; times must be positive and the share from 0 to below 1"
        )
    if pp * vpp * num_micro_batches > MOST_PASSES:
        raise InputError(
            f"--pp, --vpp, --micro-batches: {pp * vpp * num_micro_batches:,} passes, at most {MOST_PASSES:,}"
        )
    kind, chunks = schedule_named(schedule), pp * vpp
    backward = backward_s / vpp
    try:
        played = simulate(
            [forward_s / vpp] * chunks,
            [backward] * chunks,
            pp=pp,
            num_micro_batches=num_micro_batches,
            schedule=kind,
            weight_s=[weight_share * backward] * chunks,
        )
    except ValueError as error:
        raise InputError(f"--schedule {schedule}: {error}") from error
    work_s = num_micro_batches * (forward_s + backward_s)
    layout = Layout(pp=pp, vpp=vpp, num_micro_batches=num_micro_batches, schedule=int(kind))
    return {
        "schedule": schedule,
        "pp": pp,
        "vpp": vpp,
        "num_micro_batches": num_micro_batches,
        "seconds": played.seconds,
        "work_seconds": work_s,
        "bubble_seconds": played.seconds - work_s,
        "bubble_of_step": 1.0 - work_s / played.seconds,
        "in_flight": [float(x) for x in np.broadcast_to(in_flight(layout, np.arange(pp)), (pp,))],
    }


def pipeline_view(document: dict[str, Any]) -> list[Renderable]:
    """The step, and what each rank holds."""
    shape = f"{counted(document['pp'], 'rank')} of {counted(document['vpp'], 'virtual stage')}"
    shown: list[Renderable] = [
        facts(
            [
                ("schedule", f"{document['schedule']}, {shape}"),
                ("micro-batches", count(document["num_micro_batches"])),
                ("step", seconds(document["seconds"])),
                (
                    "bubble",
                    f"{seconds(document['bubble_seconds'])}, {percent(document['bubble_of_step'])}",
                ),
            ]
        ),
        heading("Micro-batches whose activations a rank holds"),
    ]
    rows = [[str(rank), f"{held:g}"] for rank, held in enumerate(document["in_flight"])]
    shown.append(grid(["rank", "in flight"], rows[:MOST_RANKS_SHOWN]))
    return shown

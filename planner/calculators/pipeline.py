"""One pipeline schedule on even chunks, played event by event: step, bubble, activations in flight."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.pipeline.schedules import SCHEDULE_NAMES, in_flight, schedule_named
from meshwright.costmodel.pipeline.simulator import simulate
from meshwright.errors import InputError

MOST_PASSES = 200_000
MOST_PASS_S = 1e6


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
    """A step of a schedule on even chunks: how long it takes, its bubble, activations in flight.

    Parameters
    ----------
    schedule
        One of `costmodel.pipeline.schedules.SCHEDULE_NAMES`.
    pp, vpp, num_micro_batches
        Pipeline ranks, chunks of each, and micro-batches of the step; at least 1, and at most `MOST_PASSES`
        together.
    forward_s, backward_s
        Seconds of one micro-batch through one rank, all its chunks; above 0.
    weight_share
        The part of a backward pass that gradients of weights take, from 0 to below 1, for schedules that run
        it apart.

    Returns
    -------
    dict
        Seconds of the step, of its work and of its bubble, and the micro-batches in flight on every rank.

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
    kind, chunks = schedule_named(schedule), pp * vpp
    backward_of_chunk_s = backward_s / vpp
    try:
        timeline = simulate(
            [forward_s / vpp] * chunks,
            [backward_of_chunk_s] * chunks,
            pp=pp,
            num_micro_batches=num_micro_batches,
            schedule=kind,
            weight_s=[weight_share * backward_of_chunk_s] * chunks,
        )
    except ValueError as error:
        raise InputError(str(error), where=f"--schedule {schedule}") from error
    work_s = num_micro_batches * (forward_s + backward_s)
    layout = Layout(pp=pp, vpp=vpp, num_micro_batches=num_micro_batches, schedule=int(kind))
    active = np.broadcast_to(in_flight(layout, np.arange(pp)), (pp,))
    return {
        "schedule": schedule,
        "pp": pp,
        "vpp": vpp,
        "num_micro_batches": num_micro_batches,
        "seconds": timeline.seconds,
        "work_seconds": work_s,
        "bubble_seconds": timeline.seconds - work_s,
        "bubble_of_step": 1.0 - work_s / timeline.seconds,
        "in_flight": [float(micro_batches) for micro_batches in active],
    }


def _check(schedule: str, sizes: dict[str, int]) -> None:
    """Raises InputError for an unknown schedule or sizes out of range."""
    if schedule not in SCHEDULE_NAMES:
        raise InputError(
            "no such schedule", where="--schedule", value=schedule, allowed=SCHEDULE_NAMES
        )
    for option, size in sizes.items():
        if size < 1:
            raise InputError("must be at least 1", where=option, value=size)
    passes = prod(sizes.values())
    if passes > MOST_PASSES:
        raise InputError(
            f"{passes:,} passes, at most {MOST_PASSES:,} are played", where=", ".join(sizes)
        )

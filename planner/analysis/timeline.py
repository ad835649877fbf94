"""A step of a plan as a timeline: every pass on every pipeline rank, then what follows the pipeline.

Passes are played in the order of the schedule (`costmodel.pipeline.simulator`) with the times of the cost
model's layers; the closed form that priced the plan may differ a little on uneven stages, and the document
says both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.pipeline.chunk_work import chunk_passes
from meshwright.costmodel.pipeline.schedules import schedule_named, traits
from meshwright.costmodel.pipeline.simulator import Timeline, simulate
from meshwright.costmodel.stage_transfers import boundary_s
from meshwright.costmodel.step_time import make_context
from meshwright.errors import InputError
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import plan_placement, workload_of_plan
from meshwright.planner.runs.predicted import Predicted, layout_from_document

MOST_PASSES = 400_000
"""Events in one file; a viewer takes a few hundred thousand."""
_AFTERWARDS = ("dp_comm", "optimizer", "step_overhead", "scale")
"""Parts of the step that follow the pipeline, in this order."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A plan's step, played."""

    timeline: Timeline
    num_micro_batches: int
    """Drawn; the plan may have more."""
    pp: int
    afterwards: tuple[tuple[str, float], ...]
    """(part of the step, seconds) after the last pass."""
    step_time_s: float
    """That the plan predicts."""
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    """By part of a layer, such as `tp_comm`: what one micro-batch waits in each chunk, both ways together."""
    p2p_s: float = 0.0
    """What a micro-batch takes from one pipeline rank to the next."""
    memory_gib: tuple[tuple[float, float], ...] = ()
    """Of each rank: what is there throughout, and the most that activations add."""

    @property
    def seconds(self) -> float:
        """From the first pass to the end of the step as it is drawn."""
        return self.timeline.seconds + sum(seconds for _, seconds in self.afterwards)


def trace_of(plan: Plan, num_micro_batches: int | None = None) -> Trace:
    """Plays a plan's step, or its first `num_micro_batches`.

    Raises InputError where the plan has no layout, the schedule needs more micro-batches, or there are more
    passes than a viewer takes.
    """
    if plan.layout is None or plan.mapping is None or plan.predicted is None:
        raise InputError(f"PLAN: status {plan.status}, there is no layout to draw")
    layout = layout_from_document(plan.layout)
    m = int(layout.num_micro_batches) if num_micro_batches is None else num_micro_batches
    if not 1 <= m <= int(layout.num_micro_batches):
        raise InputError(
            f"--micro-batches: {m}, the plan has {int(layout.num_micro_batches)}; give 1 to that many"
        )
    chunks = int(layout.pp) * int(layout.vpp)
    kinds = 3 if traits(int(layout.schedule)).splits_backward else 2
    if chunks * m * kinds > MOST_PASSES:
        raise InputError(
            f"--micro-batches: {m} of them make {chunks * m * kinds:,} passes, at most {MOST_PASSES:,}; "
            f"draw the first {MOST_PASSES // (chunks * kinds)} or fewer"
        )
    played = _played(plan, m)
    return Trace(
        timeline=played.timeline,
        waits_s=played.waits_s,
        p2p_s=played.p2p_s,
        memory_gib=tuple(_memory(plan.predicted)),
        num_micro_batches=m,
        pp=int(layout.pp),
        afterwards=tuple((name, plan.predicted.breakdown_s.get(name, 0.0)) for name in _AFTERWARDS),
        step_time_s=plan.predicted.step_time_s,
    )


def _memory(predicted: Predicted) -> Iterator[tuple[float, float]]:
    for peak_gib, parts in zip_longest(predicted.memory_gib, predicted.memory_parts_gib):
        activations_gib = parts.get("activations", 0.0) if parts else 0.0
        yield peak_gib - activations_gib, activations_gib


class _Played(NamedTuple):
    timeline: Timeline
    waits_s: dict[str, list[float]]
    p2p_s: float


def _played(plan: Plan, m: int) -> _Played:
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    workload = replace(workload_of_plan(plan), gpus=int(layout.gpus))
    stages, placement = plan_placement(workload, layout, plan)
    context = make_context(workload, layout, placement)
    passes = chunk_passes(context, stages)
    v_shaped = traits(int(layout.schedule)).v_shaped
    forward_s, backward_s, weight_s = (
        _in_model_order(x, v_shaped) for x in (passes.forward_s, passes.backward_s, passes.weight_s)
    )
    waits_s = {name: _in_model_order(seconds, v_shaped) for name, seconds in passes.waits_s.items()}
    p2p_s = float(np.asarray(boundary_s(context)))
    try:
        timeline = simulate(
            forward_s,
            backward_s,
            pp=int(layout.pp),
            num_micro_batches=m,
            schedule=schedule_named(plan.layout.schedule),
            weight_s=weight_s,
            p2p_s=p2p_s,
        )
    except ValueError as error:
        raise InputError(f"--micro-batches: {m} cannot be drawn alone: {error}") from error
    return _Played(timeline, waits_s, p2p_s)


def _in_model_order(by_rank: NDArray[np.float64], v_shaped: bool) -> list[float]:
    """Chunks [virtual stages, pp] one after the other: in turns, or down the ranks and up again."""
    rows = [row[::-1] if v_shaped and turn % 2 else row for turn, row in enumerate(by_rank)]
    return [float(seconds) for seconds in np.concatenate(rows)]

"""Layouts near a plan's: what each takes in time and in memory, and which no other beats in both.

They are reached from the plan by single changes, always from the fastest layout that was not looked at yet,
and lie in the space that the plan's proof speaks of: nothing here is faster than a plan that is optimal.
Their layers are split evenly and their mapping is the best of the fabric: prices, not proofs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from meshwright.costmodel.layout import Layout
from meshwright.planner.analysis.neighbours import layout_changes, price_evenly
from meshwright.planner.analysis.printed_space import PrintedSpace
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import workload_of_plan
from meshwright.planner.runs.predicted import LayoutDoc, layout_document, layout_from_document


@dataclass(frozen=True, kw_only=True)
class NearParams:
    """How far a plan's surroundings are looked at."""

    most_priced: int = 160
    """Layouts priced, a few milliseconds each."""
    slowest: float = 2.0
    """Step time of what is shown, over the plan's."""


@dataclass(frozen=True, kw_only=True)
class NearLayout:
    """One layout near the optimum."""

    layout: LayoutDoc
    """Without its stages."""
    step_time_s: float
    memory_gib: float
    """Of the fullest GPU."""
    is_plan: bool
    on_front: bool
    """Whether no other layout here needs neither more time nor more memory."""


def near_optimal(plan: Plan, params: NearParams | None = None) -> list[NearLayout]:
    """The plan and the layouts around it that every rule allows, of the space that the plan was chosen from,
    fastest first; none without a layout.
    """
    if plan.layout is None or plan.predicted is None:
        return []
    params = params or NearParams()
    plan_s = plan.predicted.step_time_s
    chosen = _near(layout_from_document(plan.layout), plan_s, max(plan.predicted.memory_gib))
    around = _around(plan, layout_from_document(plan.layout), plan_s, params)
    layouts = [replace(chosen, is_plan=True), *around]
    return list(_with_front(sorted(layouts, key=lambda near: (near.step_time_s, near.memory_gib))))


def _around(plan: Plan, start: Layout, start_s: float, params: NearParams) -> Iterator[NearLayout]:
    """Layouts by single changes from the fastest one at hand."""
    workload, space, seen = workload_of_plan(plan), PrintedSpace.of_plan(plan), {_key(start)}
    waiting: list[tuple[float, int, Layout]] = [(start_s, 0, start)]
    while waiting:
        _, _, layout = heappop(waiting)
        for _, changed in layout_changes(layout, workload):
            if _key(changed) in seen:
                continue
            if len(seen) > params.most_priced:
                return
            seen.add(_key(changed))
            if space.outside(layout_document(changed, ((0,),))) is not None:
                continue
            price = price_evenly(workload, changed)
            seconds, memory_gib = price.step_time_s, price.memory_gib
            if seconds is None or memory_gib is None or seconds > start_s * params.slowest:
                continue
            heappush(waiting, (seconds, len(seen), changed))
            yield _near(changed, seconds, memory_gib)


def _near(layout: Layout, step_time_s: float, memory_gib: float) -> NearLayout:
    return NearLayout(
        layout=layout_document(layout, ((0,),)),
        step_time_s=step_time_s,
        memory_gib=memory_gib,
        is_plan=False,
        on_front=False,
    )


def _key(layout: Layout) -> tuple[int, ...]:
    return tuple(int(value) for value in vars(layout).values())


def _with_front(layouts: Iterable[NearLayout]) -> Iterator[NearLayout]:
    """The same, fastest first, with those marked that need less memory than every faster one."""
    least_gib = inf
    for near in layouts:
        yield replace(near, on_front=near.memory_gib < least_gib)
        least_gib = min(least_gib, near.memory_gib)

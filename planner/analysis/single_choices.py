"""One choice of a plan at a time: its price with all else kept, and that of the best plan with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from meshwright.costmodel.layout import Layout
from meshwright.planner.analysis.neighbours import Neighbour
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.plan.best_plan import best_plan
from meshwright.planner.plan.claims import Claim, is_closed
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import LayoutDoc, layout_document, layout_from_document
from meshwright.planner.solvers.processes import side_by_side

_DOUBLED = ("tp", "cp", "pp", "dp", "ep", "vpp", "micro_batch")
"""Choices whose double and half are tried."""


@dataclass(frozen=True, kw_only=True)
class SearchWork:
    """How much work the searches for single choices may be."""

    largest_space: int = 1_000_000
    """Layouts of the plan's own space beyond which they are made on request only."""


@dataclass(frozen=True, kw_only=True)
class SingleChoice:
    """A plan with one choice made otherwise."""

    choice: str
    """Such as `tp 8`."""
    kept_pct: float | None
    """How much slower the step is with all else kept as it can be; null where a rule forbids that."""
    rule: str | None
    """That rule, in words."""
    best_pct: float | None
    """How much slower the best plan with this choice is; null where none was found."""
    best_layout: LayoutDoc | None
    status: Claim
    """Of the search for that plan."""
    proven: bool
    """Whether no plan with this choice is faster than that."""


def searches_at_once(plan: Plan, work: SearchWork | None = None) -> bool:
    """Whether the searches are short enough to be made unasked."""
    overlaps = len(PlanRequest.of_inputs(plan.inputs).execution_options.tp_overlap)
    return plan.solver.layouts_considered <= (work or SearchWork()).largest_space * overlaps


def single_choices(
    plan: Plan, changes: list[Neighbour], progress: Callable[[str], None] | None = None
) -> list[SingleChoice]:
    """What other values of single choices cost, the least loss first.

    Parameters
    ----------
    plan
        A proven or feasible plan.
    changes
        Its neighbours, as `neighbours` gives them.
    progress
        Called with a line before each search.
    """
    if plan.layout is None or plan.predicted is None:
        return []
    tasks = [
        partial(_single_choice, plan, changes, name, value, progress)
        for name, value in _choices(plan, layout_from_document(plan.layout))
    ]
    return sorted(side_by_side(tasks), key=_loss)


def _single_choice(
    plan: Plan,
    changes: list[Neighbour],
    name: str,
    value: int | str,
    progress: Callable[[str], None] | None,
) -> SingleChoice:
    """The plan with one choice made otherwise: as it stands, and the best there is."""
    if progress is not None:
        progress(f"the best plan with {name} {value}")
    pins = {**plan.inputs.pins, name: value}
    found = best_plan(PlanRequest.of_inputs(plan.inputs, pins=pins))
    best = found.outcome.best[0] if found.outcome.best else None
    kept = _kept(name, value, changes)
    return SingleChoice(
        choice=f"{name} {value}",
        kept_pct=None if kept is None else kept.slower_pct,
        rule=None if kept is None else kept.broken,
        best_pct=None if best is None else _slower_pct(best, plan),
        best_layout=None if best is None else layout_document(best.layout, best.stages),
        status=found.claim,
        proven=is_closed(found.claim),
    )


def _choices(plan: Plan, layout: Layout) -> Iterator[tuple[str, int | str]]:
    """Choices that are neither pinned nor the plan's own."""
    pins = plan.inputs.pins
    for name in _DOUBLED:
        now = int(getattr(layout, name))
        if name in pins or (name == "ep" and plan.inputs.model.moe is None):
            continue
        if name == "vpp" and int(layout.pp) == 1:
            continue
        most = plan.inputs.global_batch if name == "micro_batch" else plan.inputs.gpus
        if name == "vpp":
            most = plan.inputs.model.layers // int(layout.pp)
        if 2 * now <= most:
            yield name, 2 * now
        if now % 2 == 0:
            yield name, now // 2
    if "recompute" not in pins:
        yield "recompute", "none" if int(layout.recompute) else "full"


def _kept(name: str, value: int | str, changes: list[Neighbour]) -> Neighbour | None:
    """The neighbour with a choice that costs least; one that a rule forbids where there is no other."""
    fitting = [change for change in changes if change.settings.get(name) == value]
    allowed = [change for change in fitting if change.step_time_s is not None]
    return next(iter(allowed or fitting), None)


def _slower_pct(best: Priced, plan: Plan) -> float:
    assert plan.predicted is not None
    return 100.0 * (best.step_time_s / plan.predicted.step_time_s - 1.0)


def _loss(choice: SingleChoice) -> tuple[bool, float, str]:
    return choice.best_pct is None, choice.best_pct or 0.0, choice.choice

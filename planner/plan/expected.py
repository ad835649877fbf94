"""The plan of the least mean step time over scenarios of the constants, such as samples of a posterior.

With f_s(x) the step time of plan x in scenario s of N, no plan has a mean below that of the scenarios' own
optima, (1/N) sum_s min_x f_s(x) (Madansky 1960, Management Science 6, 'wait and see'). The nominal winner,
its runners-up and every scenario's winner are priced in all scenarios. The least mean is a plan's, the bound
says how far any other could be below it; where one plan wins every scenario the two meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.constants.calibration import Calibration
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.layout import Layout
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.plan.document import Expected
from meshwright.planner.plan.placement import group_placement
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import layout_document
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.solvers.clock import Shares

Search = Callable[[PlanRequest, Layout], Outcome]
"""The best plan for a request; the layout is likely good and priced first."""

SCENARIOS = 8
"""Samples of a posterior, in pairs that mirror each other."""
MOST_ROUNDS = 4
LARGEST_SPACE = 5_000_000
"""A search of more CP-SAT models or layouts is not repeated for every scenario unless that is asked for."""
SAME = 1e-9
"""Relative difference of means that counts as none."""
_DEGREES = ("tp", "cp", "pp", "dp", "ep", "vpp", "micro_batch")
_NAMED = (*_DEGREES, "etp", "num_micro_batches")
"""What a plan is named by, and what follows from it."""


@dataclass(frozen=True)
class Expectation:
    """What scenarios say of a nominal outcome."""

    chosen: Priced
    document: Expected


def expectation(
    request: PlanRequest,
    outcome: Outcome,
    search: Search,
    scenarios: Sequence[Calibration],
) -> Expectation:
    """The plan of the least mean among the candidates, and how far any other could be below it.

    Parameters
    ----------
    request
        What was planned.
    outcome
        Of its search with the nominal constants; has a plan.
    search
        Searches again under other constants.
    scenarios
        At least one; all count the same.
    """
    nominal = outcome.best[0]
    likely = replace(nominal.layout, recompute_layers=0)
    candidates = list(outcome.best)
    bounds = []
    shares = Shares(len(scenarios))
    for scenario in scenarios:
        asked = replace(request, top_k=1, time_limit_s=shares.next_s(), calibration=scenario)
        found = search(asked, likely)
        candidates += found.best
        bounds.append(found.lower_bound_s or 0.0)
    unlike = list(_unlike(candidates))
    prices = np.array([_prices(request, plan, scenarios) for plan in unlike])
    means = prices.mean(axis=1)
    best = int(np.argmin(means))
    lower_bound_s = min(float(np.mean(bounds)), float(means[best]))
    if means[0] <= means[best] * (1.0 + SAME):
        best = 0
    mean_s = float(means[best])
    document = Expected(
        scenarios=len(scenarios),
        step_time_s=mean_s,
        lower_bound_s=lower_bound_s,
        gap=(mean_s - lower_bound_s) / mean_s,
        nominal_step_time_s=float(means[0]),
        regret=float(means[0]) / lower_bound_s - 1.0 if lower_bound_s else None,
        same_as_nominal=best == 0,
        winners=len({int(row) for row in np.argmin(prices, axis=0)}),
        chosen=_words(unlike[best], unlike[0]),
    )
    return Expectation(unlike[best], document)


def is_quick(request: PlanRequest, outcome: Outcome) -> bool:
    """Whether the search can be repeated for every scenario without being asked for."""
    done, overlaps = outcome.certificate, len(request.execution_options.tp_overlap)
    return done.rounds <= MOST_ROUNDS and done.layouts <= LARGEST_SPACE * overlaps


def _unlike(candidates: Sequence[Priced]) -> Iterator[Priced]:
    """Each plan once, the nominal winner first."""
    seen = set()
    for plan in candidates:
        key = (plan.layout, plan.stages, repr(plan.matrix), plan.ranks, plan.execution)
        if key not in seen:
            seen.add(key)
            yield plan


def _prices(
    request: PlanRequest, plan: Priced, scenarios: Sequence[Calibration]
) -> NDArray[np.float64]:
    """Seconds of a step of a plan as it stands, in every scenario."""
    seconds = []
    for scenario in scenarios:
        workload = replace(request, calibration=scenario).workload(plan.execution)
        workload = workload.on(int(plan.layout.gpus))
        placed = group_placement(workload, plan.layout, plan.stages, plan.matrix, plan.ranks)
        estimate = estimate_layout(workload, plan.layout, placed, plan.stages)
        seconds.append(float(np.asarray(estimate.step_time_s)))
    return np.array(seconds)


def _words(plan: Priced, nominal: Priced) -> str:
    """The degrees of a plan, and what else sets it apart from the nominal winner."""
    settings, usual = _settings(plan), _settings(nominal)
    words = " ".join(f"{name} {settings[name]}" for name in _DEGREES)
    further = [name for name in settings if settings[name] != usual[name] and name not in _NAMED]
    if not further and plan.layout == nominal.layout:
        return f"{words}, another mapping or split of the layers"
    return ", ".join([words, *(f"{name} {_value(settings[name])}" for name in further)])


def _settings(plan: Priced) -> dict[str, Any]:
    layout = layout_document(plan.layout, plan.stages).model_dump(exclude={"stages"})
    return {**layout, **asdict(plan.execution)}


def _value(setting: object) -> str:
    return "by default" if setting is None or setting == [] else str(setting)

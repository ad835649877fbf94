"""Planning on a mixed cluster from end to end: each part alone, pipelines through several, what is best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

import numpy as np

from meshwright.costmodel.constants.calibrated import step_time_band
from meshwright.costmodel.constants.rates import peak_flops
from meshwright.costmodel.mixed import Segment, host_memory_gib, mixed_memory_gib, mixed_step
from meshwright.documents.versions import program_version
from meshwright.model_specs.flops import flops_per_token
from meshwright.planner.mixed.document import (
    NOT_MEASURED,
    AloneDoc,
    MixedPlan,
    MixedPredicted,
    MixedSolverDoc,
    RankDoc,
)
from meshwright.planner.mixed.kernel import MixedKernel, MixedPrice
from meshwright.planner.mixed.request import MixedRequest
from meshwright.planner.mixed.search import MixedOutcome, MixedSearch
from meshwright.planner.mixed.verify import verify_mixed
from meshwright.planner.plan.assemble import objective_of
from meshwright.planner.plan.digest import with_digest
from meshwright.planner.plan.document import Plan, Status
from meshwright.planner.plan.installs import software_needs
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.runs.predicted import ErrorBandDoc, layout_document
from meshwright.planner.search.model import solver_version

_SHARE_ALONE = 0.25
"""Of a time limit, at most, for the best plan on one part."""


@dataclass(frozen=True, kw_only=True)
class MixedResult:
    """What came out: the document, and the plan of a part where that alone is fastest."""

    document: MixedPlan
    alone: Plan | None = None


def make_mixed_plan(
    request: MixedRequest, progress: Callable[[str], None] | None = None
) -> MixedResult:
    """The fastest plan on a mixed cluster: never slower than the best on any part alone.

    Parameters
    ----------
    request
        What to plan.
    progress
        Called with one line whenever a better plan is found.

    Raises
    ------
    InputError
        If the request cannot be searched as asked.
    InternalError
        If the plan fails its own verification: a fault of the planner.
    """
    began = time.monotonic()
    limit_s = request.time_limit_s
    own_limit_s = None if limit_s is None else _SHARE_ALONE * limit_s
    alone = [
        fastest_plan(replace(part, time_limit_s=own_limit_s), progress) for part in request.parts
    ]
    prices = [plan.objective.step_time_s or inf for plan in alone]
    best_alone_s = min(prices)
    deadline = inf if limit_s is None else began + 0.95 * limit_s
    outcomes = [
        (chosen, MixedSearch(chosen, best_alone_s, deadline, progress=progress or _silent).run())
        for chosen in _choices_of_parts(request)
    ]
    chosen, outcome = min(outcomes, key=lambda pair: pair[1].price_s)
    bounds = [_least_s(plan.status, plan.objective.lower_bound_s) for plan in alone]
    bounds += [_least_s(each.status, each.lower_bound_s) for _, each in outcomes]
    bound_s = None if None in bounds else min(bound for bound in bounds if bound is not None)
    step_s = min(best_alone_s, outcome.price_s)
    single = None
    if outcome.best is None and best_alone_s < inf:
        single = with_digest(alone[prices.index(best_alone_s)])
    objective = objective_of(
        None if step_s == inf else step_s, None if bound_s in (None, inf) else bound_s
    )
    document = MixedPlan(
        status=_status(step_s, bound_s),
        objective=objective,
        runs_on=[] if single is None else [request.name_of(prices.index(best_alone_s))],
        layout=None,
        execution=None,
        predicted=None,
        ranks=[],
        nodes=[],
        alone=[_alone_document(request, part, plan) for part, plan in enumerate(alone)],
        solver=_solver_document(request, [each for _, each in outcomes], time.monotonic() - began),
        cluster=request.cluster,
        inputs=request.first.inputs(),
    )
    if outcome.best is not None and outcome.best.price is not None:
        document = _through_parts(document, chosen, outcome.best, outcome.best.price)
    document = with_digest(document)
    verify_mixed(document)
    return MixedResult(document=document, alone=single)


def _silent(_: str) -> None:
    """Says nothing."""


def _choices_of_parts(request: MixedRequest) -> Iterator[MixedRequest]:
    """The request on every two or more of its parts."""
    count = len(request.parts)
    for size in range(count, 1, -1):
        for chosen in combinations(range(count), size):
            parts = tuple(request.cluster.parts[part] for part in chosen)
            cluster = request.cluster.model_copy(update={"parts": parts})
            own = tuple(request.parts[part] for part in chosen)
            yield replace(request, cluster=cluster, parts=own)


def _least_s(status: str, lower_bound_s: float | None) -> float | None:
    """A bound as a search left it: infinite where nothing exists, None where nothing is known."""
    return inf if status == "infeasible" and lower_bound_s is None else lower_bound_s


def _status(step_s: float, bound_s: float | None) -> Status:
    if step_s < inf:
        return "optimal" if bound_s is not None and bound_s >= step_s * (1 - 1e-9) else "feasible"
    return "infeasible" if bound_s == inf else "unknown"


def _alone_document(request: MixedRequest, part: int, plan: Plan) -> AloneDoc:
    return AloneDoc(
        part=request.name_of(part),
        device=request.parts[part].cluster.device.name,
        gpus=request.parts[part].gpus,
        status=plan.status,
        step_time_s=plan.objective.step_time_s,
        lower_bound_s=plan.objective.lower_bound_s,
    )


def _solver_document(
    request: MixedRequest, outcomes: list[MixedOutcome], wall_s: float
) -> MixedSolverDoc:
    return MixedSolverDoc(
        wall_s=wall_s,
        seed=request.first.seed,
        version=solver_version(),
        program=program_version(),
        rows=sum(each.rows for each in outcomes),
        priced=sum(each.priced for each in outcomes),
        rounds=sum(each.rounds for each in outcomes),
        kernels=max(each.kernels for each in outcomes),
        model_bound_s=next((each.model_bound_s for each in outcomes if each.model_bound_s), None),
    )


def _through_parts(
    document: MixedPlan, request: MixedRequest, kernel: MixedKernel, price: MixedPrice
) -> MixedPlan:
    """The document of a pipeline through parts."""
    segments = kernel.segments_of(price.layout)
    step = mixed_step(segments, price.stages)
    breakdown_s = {name: float(np.asarray(part)) for name, part in step.parts.items()}
    execution = kernel.execution.of_layout(price.layout)
    memory_gib = mixed_memory_gib(segments, price.stages)
    leading = _leading_on_ranks(kernel.leading, price.counts)
    ranks, nodes, peak = [], [], 0.0
    stage_gpus = int(price.layout.gpus) // int(price.layout.pp)
    for segment, (part, count) in zip(segments, kernel.composition, strict=True):
        cluster = request.parts[part].cluster
        peak += count * stage_gpus * peak_flops(cluster.device, request.first.precision)
        nodes.append((request.name_of(part), count * stage_gpus // cluster.gpus_per_node))
        for rank in range(segment.first, segment.first + count):
            ranks.append(
                RankDoc(
                    rank=rank,
                    part=request.name_of(part),
                    device=cluster.device.name,
                    layers=price.counts[rank],
                    dense_layers=leading[rank],
                    memory_gib=float(memory_gib[rank]),
                    usable_gib=segment.part.limit_gib,
                )
            )
    tokens = request.first.global_batch * request.first.seq_len
    flops = flops_per_token(request.first.model, request.first.seq_len) * tokens
    predicted = MixedPredicted(
        step_time_s=price.step_time_s,
        breakdown_s=breakdown_s,
        tokens_per_s=tokens / price.step_time_s,
        mfu=flops / price.step_time_s / peak,
        host_memory_gib=host_memory_gib(segments, price.stages) or None,
        error_band=_band(segments),
    )
    layout = layout_document(price.layout, price.stages)
    return document.model_copy(
        update={
            "runs_on": [name for name, _ in nodes],
            "layout": layout,
            "execution": execution,
            "installs": software_needs(document.inputs, layout, execution),
            "predicted": predicted,
            "ranks": ranks,
            "nodes": nodes,
        }
    )


def _leading_on_ranks(leading: int, counts: Sequence[int]) -> list[int]:
    """Dense layers in front of those with experts on each rank of so many layers."""
    dealt = []
    for count in counts:
        dealt.append(min(leading, count))
        leading -= dealt[-1]
    return dealt


def _band(segments: list[Segment]) -> ErrorBandDoc:
    """The widest of the parts' bands."""
    bands = [step_time_band(each.part.workload) for each in segments]
    return ErrorBandDoc(
        low=min(band.low for band in bands),
        high=max(band.high for band in bands),
        rows=min(band.rows for band in bands),
        basis=NOT_MEASURED,
    )

"""GPUs that a plan leaves idle: where that is faster than every layout known on all of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.cluster_specs.fabric import full_levels
from meshwright.cluster_specs.naming import node_name
from meshwright.cluster_specs.places import allocation_of
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.mapping.instance import idle_nodes
from meshwright.planner.plan.document import IdleDoc
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.certificate import Outcome

ROUNDING = 1.0 + 1e-9
SHARE_OF_TIME = 0.1
"""Of a time limit, kept for the search over layouts on all GPUs."""

Searched = Callable[[PlanRequest], Outcome]


@dataclass(frozen=True, kw_only=True)
class IdleDecision:
    """What is planned, and what the search over layouts on all GPUs gave where one was run."""

    outcome: Outcome
    full: Outcome | None


def decide_on_idle_gpus(request: PlanRequest, searched: Searched) -> IdleDecision:
    """Searches; where the best layout leaves GPUs idle, searches those on all GPUs too and chooses.

    A faster layout that is known is never given up for a slower one on all GPUs; of equally fast ones the
    one on all GPUs is planned.
    """
    limit, began = request.time_limit_s, time.monotonic()
    first = request if limit is None else replace(request, time_limit_s=limit * (1 - SHARE_OF_TIME))
    outcome = searched(first)
    if not outcome.best or int(outcome.best[0].layout.gpus) == request.gpus:
        return IdleDecision(outcome=outcome, full=None)
    remaining_s = None if limit is None else max(limit - (time.monotonic() - began), 0.0)
    if remaining_s == 0:
        return IdleDecision(outcome=outcome, full=None)
    every = replace(
        request, forbids=(*request.forbids, "idle-gpus"), time_limit_s=remaining_s, top_k=1
    )
    full = searched(every)
    return IdleDecision(outcome=_chosen(outcome, full), full=full)


def _chosen(outcome: Outcome, full: Outcome) -> Outcome:
    """The plan on all GPUs where it is as fast as the one that leaves some idle, else the latter."""
    if not full.best or full.best[0].step_time_s > outcome.best[0].step_time_s * ROUNDING:
        return outcome
    all_of_them = full.best[0]
    bounds = [s for s in (outcome.lower_bound_s, all_of_them.step_time_s) if s is not None]
    bound_s = min(bounds) if outcome.lower_bound_s is not None else None
    proven = outcome.status == "optimal"
    runners_up = [priced for priced in outcome.best if priced.layout != all_of_them.layout]
    return replace(
        outcome,
        status="optimal" if proven else "feasible",
        best=(all_of_them, *runners_up[: len(outcome.best) - 1]),
        lower_bound_s=all_of_them.step_time_s if proven else bound_s,
    )


def idle_document(request: PlanRequest, best: Priced, full: Outcome | None) -> IdleDoc | None:
    """What stays idle and why; None where nothing does."""
    gpus = request.gpus - int(best.layout.gpus)
    if not gpus:
        return None
    full_s = full.best[0].step_time_s if full is not None and full.best else None
    return IdleDoc(
        gpus=gpus,
        nodes=unused_nodes(request, best),
        full_step_time_s=full_s,
        full_lower_bound_s=None if full is None else full.lower_bound_s,
        reason=_reason(request, best, full),
    )


def _reason(request: PlanRequest, best: Priced, full: Outcome | None) -> str:
    if full is None or full.status == "unknown":
        return f"no layout on all {request.gpus} GPUs was found in time"
    if not full.best:
        return (
            f"no layout in this space uses all {request.gpus} GPUs (degrees and a global batch of "
            f"{request.global_batch} must divide them, and every rule must hold)"
        )
    slower = 100.0 * (full.best[0].step_time_s / best.step_time_s - 1.0)
    bound_s = full.lower_bound_s
    how = ""
    if full.status != "optimal":
        slower_by_bound = bound_s is not None and bound_s > best.step_time_s
        how = ", proven slower by its bound" if slower_by_bound else ", as far as was searched"
    return (
        f"the best layout on all {request.gpus} GPUs takes {full.best[0].step_time_s:.4g} s, "
        f"{slower:.3g} % longer{how}"
    )


def unused_nodes(request: PlanRequest, best: Priced) -> list[str]:
    """Nodes of the allocation without a rank: of the blocks in use, as many of each as of the others."""
    cluster = request.cluster
    if best.ranks is not None:
        return [node_name(cluster, node) for node in idle_nodes(cluster, list(best.ranks))]
    gpus = int(best.layout.gpus)
    allocation = allocation_of(cluster, gpus)
    used = set(allocation.places[:, 0].tolist())
    full = full_levels(cluster)
    larger = full.blocks[full.blocks > cluster.gpus_per_node]
    block = int(larger[0]) if len(larger) else cluster.gpus
    touched = {node * cluster.gpus_per_node // block for node in used}
    in_block: Counter[int] = Counter()
    turns = []
    for node in idle_nodes(cluster, [(node, 0) for node in used]):
        number = node * cluster.gpus_per_node // block
        turns.append((number not in touched, in_block[number], node))
        in_block[number] += 1
    idle = (request.gpus - gpus) // cluster.gpus_per_node
    return [node_name(cluster, node) for node in sorted(node for *_, node in sorted(turns)[:idle])]

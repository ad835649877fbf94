"""Plans of listed allocations, judged by another search over ranks, and by plans that they must not lose to.

`python -m tests.attack.judged --cases 20 --seed 0 --files DIR` prints every fault with the command that shows
it; `--limit-s` is the time limit of a plan. Cases are numbered: `--seed 7 --cases 1` is case 7 alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.run_terms import layout_from_document
from tests.attack.allocations import Case, random_case
from tests.attack.draws import Decided, decided_layouts, is_legal
from tests.attack.own_places import PlaceSearch, placement_by_stage, placement_of_ranks

SAME = 1e-6
"""Relative: what counts as faster."""
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much one case is looked into."""

    plan_s: float = 30.0
    drawn: int = 150
    """Layouts drawn."""
    searched: int = 6
    """Of them, those whose places are searched: the fastest if all of a group lay together."""
    turns: int = 24
    """Of one search of places."""


@dataclass
class Verdict:
    """What was found of one case."""

    case: Case
    faults: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """What is faster than an optimum, but no mapping of the space that the plan prints."""
    status: str = "none"
    step_time_s: float | None = None
    lower_bound_s: float | None = None
    own_s: float = np.inf
    """The fastest that the judge found."""
    wall_s: float = 0.0

    @property
    def line(self) -> str:
        """For a table."""
        price = "-" if self.step_time_s is None else f"{self.step_time_s:.6g}"
        told = [*self.faults, *self.outside]
        kinds = ", ".join(dict.fromkeys(words.split(":")[0] for words in told)) or "ok"
        options = self.case.options
        return (
            f"{self.case.number:5d} {self.case.shape:13s} {self.case.cluster['base']:17s} "
            f"{options['model']:14s}{options['framework']:11s}"
            f"{len(self.case.cluster['nodes']):3d} nodes {options['gpus']:4d} GPUs "
            f"{self.status:10s} {price:>9s} s, own {self.own_s:.6g} s, {self.wall_s:.0f} s: {kinds}"
        )


def judged(case: Case, effort: Effort) -> Verdict:
    """Everything that is wrong with the plan of a case, in words that begin with the kind of fault."""
    began, verdict = time.monotonic(), Verdict(case=case)
    plan = _planned(case, effort, verdict, "internal error")
    if plan is not None:
        verdict.status = plan.status
        verdict.step_time_s = plan.objective.step_time_s
        verdict.lower_bound_s = plan.objective.lower_bound_s
        verdict.faults += _document_faults(plan)
        verdict.faults += _slower_than_others(case, plan, effort, verdict)
        if plan.layout is not None:
            verdict.faults += _beaten(case, plan, effort, verdict)
    verdict.wall_s = time.monotonic() - began
    return verdict


def _planned(case: Case, effort: Effort, verdict: Verdict, kind: str) -> Plan | None:
    """None, and a fault, where planning fails otherwise than by saying that there is no plan."""
    try:
        request = replace(case.request(), time_limit_s=effort.plan_s)
        return make_plan(request, robustness=False, choices=False)
    except (InputError, InfeasibleError) as error:
        verdict.faults.append(f"{kind}: a request that reads is refused: {error}")
    except Exception as error:  # noqa: BLE001 - what it is belongs into the report
        verdict.faults.append(f"{kind}: {type(error).__name__}: {str(error)[:300]}")
    return None


def _document_faults(plan: Plan) -> Iterator[str]:
    """What a plan says of itself, and its rank list."""
    price, bound = plan.objective.step_time_s, plan.objective.lower_bound_s
    if price is not None and bound is not None and bound > price * (1 + ROUNDING):
        yield f"document: bound {bound} above the step {price}"
    if plan.status == "optimal" and (price is None or bound != price):
        yield f"document: optimal at {price} with a bound of {bound}"
    if plan.layout is None or plan.mapping is None or plan.mapping.ranks is None:
        return
    cluster, ranks = plan.inputs.cluster, plan.mapping.ranks
    free = {
        index: cluster.gpus_per_node if node.free_gpus is None else node.free_gpus
        for index, node in enumerate(cluster.nodes)
    }
    per_host = Counter(node for node, _ in ranks)
    for node, count in per_host.items():
        if count > free.get(node, 0):
            yield f"rank list: {count} ranks on node {node}, which has {free.get(node)} free"
    if len(set(ranks)) < len(ranks) or any(gpu >= cluster.gpus_per_node for _, gpu in ranks):
        yield "rank list: a GPU holds two ranks, or is none of its node's"
    layout = layout_from_document(plan.layout)
    if len(ranks) != int(layout.gpus):
        yield f"rank list: {len(ranks)} places for {int(layout.gpus)} ranks"
        return
    workload = _workload(PlanRequest.of_inputs(plan.inputs), cluster, _of_plan(plan))
    placed = placement_of_ranks if plan.mapping.stage_ep is None else placement_by_stage
    placement = placed(cluster, workload.gpus, layout, ranks)
    counted_s = float(_seconds(workload, _of_plan(plan), [placement])[0])
    if price is not None and abs(counted_s - price) > SAME * price:
        yield f"rank list: counted by hand the step takes {counted_s} s, {price} s are stated"


def _of_plan(plan: Plan) -> Decided:
    assert plan.layout is not None
    assert plan.execution is not None
    return Decided(
        execution=plan.execution,
        layout=layout_from_document(plan.layout),
        stages=tuple(tuple(rank) for rank in plan.layout.stages),
    )


def _workload(request: PlanRequest, cluster: ClusterSpec, decided: Decided) -> Workload:
    own = replace(request, cluster=cluster, gpus=cluster.gpus)
    return own.workload(decided.execution).on(int(decided.layout.gpus))


def _seconds(
    workload: Workload, decided: Decided, placements: Sequence[Placement]
) -> NDArray[np.float64]:
    """The cost model's price of a layout under each of some placements."""
    rows = {
        axis: np.stack([getattr(placement, axis) for placement in placements])
        for axis in vars(placements[0])
    }
    placed = type(placements[0])(**rows)
    estimate = estimate_layout(workload, decided.layout, placed, decided.stages)
    seconds = np.broadcast_to(np.asarray(estimate.step_time_s), (len(placements),))
    return np.where(_starts(workload.cluster, decided, rows["ep"][:, 0]), seconds, np.inf)


def _starts(
    cluster: ClusterSpec, decided: Decided, ep_inside: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether a dispatcher's kernels start, [n], with so many members of an expert group in one domain.

    DeepEP and HybridEP open each other's memory: as many ranks as one domain has room for lie in one
    (deepseek-ai/DeepEP, csrc/deep_ep.cpp, Buffer::sync; deep_ep/hybrid_ep_buffer.py).
    """
    ep, ranks = int(decided.layout.ep), int(decided.layout.ep) * int(decided.layout.etp)
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    is_free = decided.execution.moe_dispatch not in ("deepep", "hybridep") or ranks > domain
    return np.asarray((ep_inside >= ep) | is_free)


def _slower_than_others(case: Case, plan: Plan, effort: Effort, verdict: Verdict) -> Iterator[str]:
    """Where the same GPUs unlisted, or a part of them, have a faster plan."""
    own_s = plan.objective.step_time_s or np.inf
    others: list[tuple[str, Case]] = list(case.parts())
    twin = case.without_list()
    if twin is not None:
        others.append(("unlisted", twin))
    for name, other in others:
        kind = "internal error" if other.cluster.get("nodes") else "unlisted"
        beside = _planned(other, effort, verdict, f"{kind} ({name})")
        if beside is None or beside.objective.step_time_s is None:
            continue
        other_s = beside.objective.step_time_s
        if other_s < own_s * (1 - SAME):
            yield (
                f"slower than {name}: {own_s} s ({plan.status}), {other_s} s ({beside.status}) "
                f"on {other.options['gpus']} GPUs"
            )


def _beaten(case: Case, plan: Plan, effort: Effort, verdict: Verdict) -> Iterator[str]:
    """The fastest rank list that the judge finds, of the plan's layout and of others."""
    price_s, bound_s = plan.objective.step_time_s, plan.objective.lower_bound_s or 0.0
    assert price_s is not None
    chance = random.Random(case.number)
    request = replace(case.request(), cluster=plan.inputs.cluster, gpus=plan.inputs.gpus)
    cluster = plan.inputs.cluster
    planned = plan.mapping.ranks if plan.mapping is not None else None
    tried = [_of_plan(plan), *_promising(chance, request, plan, effort)]
    for number, decided in enumerate(tried):
        workload = _workload(request, cluster, decided)
        search = PlaceSearch(
            cluster=cluster,
            layout=decided.layout,
            prices=lambda places, w=workload, d=decided: _seconds(w, d, places),  # type: ignore[misc]
            chance=chance,
        )
        known = planned or () if number == 0 else ()
        seconds, ranks = search.best(effort.turns, bound_s * (1 - SAME), known)
        verdict.own_s = min(verdict.own_s, seconds)
        if seconds < bound_s * (1 - SAME):
            kind = "optimum beaten" if plan.status == "optimal" else "bound beaten"
            layout = {name: int(value) for name, value in vars(decided.layout).items()}
            words = f"{price_s} s, bound {bound_s} s; {seconds} s by {layout} on {ranks}"
            if _is_outside(case, cluster, decided.layout, ranks):
                verdict.outside.append(f"outside the printed space: {words}")
                continue
            yield f"{kind}: {words}"
            return


def _is_outside(
    case: Case, cluster: ClusterSpec, layout: Layout, ranks: Sequence[tuple[int, int]]
) -> bool:
    """Whether a mapping of the judge's is none of the plan's space.

    Where no parts of nodes are taken, axes nest in whole nodes as in Megatron: as much of tp as a node holds,
    then of cp, dp and pp (docs/fabric.md, docs/limits.md). Expert groups are neighbours in their
    data-parallel axis, and no ring over their replicas lies inside them.
    """
    free = {node["free_gpus"] for node in case.cluster["nodes"]} - {0, case.per_node}
    if free or case.options["gpus"] % case.per_node != 0:
        return False
    if int(layout.ep) * int(layout.etp) > 1:
        return True
    lies, rest = placement_of_ranks(cluster, int(layout.gpus), layout, ranks), case.per_node
    for axis in ("tp", "cp", "dp", "pp"):
        nested = gcd(int(getattr(layout, axis)), rest)
        if int(getattr(lies, axis)[0]) > nested:
            return True
        rest //= nested
    return False


def _promising(
    chance: random.Random, request: PlanRequest, plan: Plan, effort: Effort
) -> Iterable[Decided]:
    """The legal layouts drawn that would be fastest if nothing left the innermost block."""
    priced: list[tuple[float, Decided]] = []
    for decided in decided_layouts(chance, request, plan, effort.drawn):
        workload = _workload(request, request.cluster, decided)
        if not is_legal(workload, decided):
            continue
        levels = len(fabric_levels(request.cluster, int(decided.layout.gpus)).names)
        priced.append(
            (float(_seconds(workload, decided, [_together(decided.layout, levels)])[0]), decided)
        )
    priced.sort(key=lambda pair: pair[0])
    least_s = plan.objective.step_time_s or np.inf
    return [decided for seconds, decided in priced[: effort.searched] if seconds < least_s]


def _together(layout: Layout, levels: int) -> Placement:
    """Every group in one block of each level."""
    whole = {
        axis: int(getattr(layout, axis)) for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
    }
    whole["dp_cp"] = whole["dp"] * whole["cp"]
    return Placement(**{axis: np.full(levels, size) for axis, size in whole.items()})


def summed_up(verdicts: Sequence[Verdict]) -> str:
    """Cases by status, and faults by kind."""
    kinds = Counter(
        kind for verdict in verdicts for kind in {fault.split(":")[0] for fault in verdict.faults}
    )
    statuses = Counter(verdict.status for verdict in verdicts)
    bad = sum(bool(verdict.faults) for verdict in verdicts)
    outside = sum(bool(verdict.outside) for verdict in verdicts)
    return (
        f"{len(verdicts)} cases, {dict(statuses)}; {bad} with faults: {dict(kinds)}; {outside} with "
        "something faster outside the printed space"
    )


def write_case(case: Case, folder: Path) -> None:
    """The cluster file that the case's command names."""
    folder.mkdir(parents=True, exist_ok=True)
    text: Any = yaml.safe_dump(case.cluster, sort_keys=False)
    (folder / f"case_{case.number}.yaml").write_text(text, encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--most-nodes", type=int, default=64)
    parser.add_argument("--limit-s", type=float, default=30.0)
    parser.add_argument("--files", type=Path, help="folder for the cluster files of faulty cases")
    given = parser.parse_args()
    effort, verdicts = Effort(plan_s=given.limit_s), []
    for number in range(given.seed, given.seed + given.cases):
        verdict = judged(random_case(number, given.most_nodes), effort)
        verdicts.append(verdict)
        print(verdict.line, flush=True)
        for fault in verdict.faults:
            print("      " + fault[:1000], flush=True)
        for words in verdict.outside:
            print("      " + words[:1000], flush=True)
        if verdict.faults:
            print("      " + verdict.case.words, flush=True)
            if given.files is not None:
                write_case(verdict.case, given.files)
    print(summed_up(verdicts))


if __name__ == "__main__":
    main()

"""Every layout of a small space that can fit, priced one by one: no bounds on time, no pruning, no solver.

Only the split of the layers is not enumerated (there are millions of splits of 32 layers over 8 stages): it
comes from `meshwright.planner.bounds.layer_split`, whose exactness has tests of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from meshwright.constraints.host_memory import HostMemory
from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.rule import FinishedPlan, Rule
from meshwright.costmodel.layout import Layout
from meshwright.errors import InputError
from meshwright.planner.bounds.any_stages import any_stages
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.search.branches import Branch
from meshwright.planner.search.certificate import Certificate, Outcome
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.pricing import Pricing
from meshwright.planner.search.space import Space

LARGEST_SPACE = 20_000


def search_exhaustively(
    branches: Sequence[Branch], *, top_k: int = 1, time_limit_s: float | None = None
) -> Outcome:
    """Prices every legal layout. Raises InputError if the space has more than `LARGEST_SPACE` layouts."""
    deadline = inf if time_limit_s is None else time.monotonic() + time_limit_s
    every, layouts = [], 0
    for branch in branches:
        every.append(branch.space.degrees(branch.space.workload.gpus))
        size = int(branch.space.layouts_per_degrees(every[-1]).sum())
        if size > LARGEST_SPACE:
            raise InputError(
                f"method: exhaustive prices every layout one by one, and there are {size}; at most "
                f"{LARGEST_SPACE} are allowed. Pin some choices (--pin tp=8,pp=4), or use --method cp-sat"
            )
        layouts += size
    certificate = Certificate(layouts=layouts, executions=len(branches))
    best: list[tuple[float, int, Priced]] = []
    status, undecided_s = "infeasible", inf
    for branch, layout in _all_layouts(branches, every, certificate):
        if time.monotonic() > deadline:
            status = "unknown"
            break
        priced = _price(layout, branch, certificate)
        undecided_s = min(undecided_s, branch.pricing.undecided_s)
        if priced is not None:
            best.append((priced.step_time_s, certificate.priced, priced))
            best = sorted(best, key=lambda entry: entry[:2])[:top_k]
    bound_s = min(best[0][0], undecided_s) if best and status != "unknown" else None
    if best:
        status = "optimal" if bound_s == best[0][0] else "feasible"
    return Outcome(
        status=status,
        best=tuple(priced for _, _, priced in best),
        lower_bound_s=bound_s,
        certificate=certificate,
    )


def _all_layouts(
    branches: Sequence[Branch], degrees: Sequence[Layout], certificate: Certificate
) -> Iterator[tuple[Branch, Layout]]:
    """Every layout of every branch that may fit."""
    for branch, own_degrees in zip(branches, degrees, strict=True):
        layouts = branch.space.layouts(own_degrees)
        for layout in _layouts(_that_may_fit(layouts, branch.pricing, certificate)):
            yield branch, layout


def _price(layout: Layout, branch: Branch, certificate: Certificate) -> Priced | None:
    """The price of one layout; None where a rule forbids it or no split of it fits."""
    broken = _first_broken(layout, branch.space, branch.rules)
    if broken is None:
        mappings = _every_mapping(branch.pricing, layout)
        priced = branch.pricing.exact(layout, mappings, inf)
        if priced is not None:
            certificate.priced += 1
            return replace(priced, execution=branch.execution)
    certificate.rule_out(broken or HbmCapacity.name, 1)
    return None


def _that_may_fit(layouts: Layout, pricing: Pricing, certificate: Certificate) -> Layout:
    """The layouts of which some split may fit; the others would need more memory under any."""
    memory_gib, _ = pricing.least_memory_gib(layouts)
    table = Candidates(workload=pricing.workload, layouts=layouts, memory_gib=memory_gib)
    fits = HbmCapacity().excess(table) <= 0
    certificate.rule_out(HbmCapacity.name, int(np.sum(~fits)))
    return layouts.take(fits)


def _layouts(layouts: Layout) -> Iterator[Layout]:
    for row in range(len(np.atleast_1d(np.asarray(layouts.tp)))):
        yield layouts.scalar(row)


def _first_broken(layout: Layout, space: Space, rules: Sequence[Rule]) -> str | None:
    """The first rule, memory aside, that the even split of a layout breaks by the rule's own check."""
    stages = any_stages(space.workload, layout)
    if stages is None:
        return "layers-by-stages"
    longest_stage = max(max(rank) for rank in stages)
    recomputed = Layout(
        **{**vars(layout), "recompute_layers": longest_stage if int(layout.recompute) & 32 else 0}
    )
    plan = FinishedPlan(
        workload=space.workload, layout=recomputed, stages=stages, memory_gib=(0.0,), spans={}
    )
    for rule in rules:
        if not isinstance(rule, HbmCapacity | HostMemory) and rule.check(plan) is not None:
            return rule.name
    return None


def _every_mapping(pricing: Pricing, layout: Layout) -> MappingBounds:
    """All mappings, with bounds that exclude none."""
    table = pricing.mappings(layout)
    count = len(next(iter(table.values())))
    return MappingBounds(matrices=table, bound_s=np.full(count, -inf))

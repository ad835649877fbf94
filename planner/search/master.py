"""One choice by CP-SAT among the layouts of the pool and the best plan so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.rule import Rule
from meshwright.costmodel.layout import Layout
from meshwright.errors import InternalError
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.experts.joint import AssumedImbalance, JointRouting
from meshwright.planner.mapping.choice.joint import Grid, Need
from meshwright.planner.search.layout_pool import LayoutPool
from meshwright.planner.search.model import (
    Candidates,
    Experts,
    bound_ns,
    build_model,
    price_ns,
    solve,
)
from meshwright.planner.search.params import SearchParams
from meshwright.planner.search.pricing import Pricing

IntArray = NDArray[np.int64]

THE_PLAN, UNDECIDED = -1, -2


class LayoutMaster:
    """The model over the pool, each with those mappings whose bound is below the cutoff."""

    def __init__(
        self,
        pricing: Pricing,
        rules: Sequence[Rule],
        layouts: LayoutPool,
        *,
        cutoff_s: float,
        params: SearchParams,
        routing: JointRouting | None = None,
    ) -> None:
        self._params = params
        self._pricing, self._rules, self._pool, self._cutoff_s = pricing, rules, layouts, cutoff_s
        self._routing = routing

    def choose(
        self, rows: IntArray, plan: Priced | None, seed: int, time_limit_s: float | None
    ) -> int:
        """The row that is chosen, or THE_PLAN, or UNDECIDED where time ran out.

        Layouts beyond the largest model are left out: their bounds are above those of all that are in it,
        so they cannot be the choice.
        """
        kept = [self._kept(int(row)) for row in rows[: self._params.largest_master]]
        pairs = np.cumsum([len(ways) for ways in kept])
        rows = rows[: max(1, int(np.searchsorted(pairs, self._params.largest_master)))]
        kept = kept[: len(rows)]
        layouts, memory = self._pool.take(rows), self._pool.memory_gib[rows]
        times = [self._times_ns(int(row), ways) for row, ways in zip(rows, kept, strict=True)]
        needs = self._needs(rows, kept)
        if plan is not None:
            one = Layout(**{name: np.array([value]) for name, value in vars(plan.layout).items()})
            layouts = _joined(layouts, one) if len(rows) else one
            memory = np.append(memory, self._pricing.least_memory_gib(one)[0])
            times.append(np.array([price_ns(plan.step_time_s)], dtype=np.int64))
            needs.append([None])
        table = Candidates(workload=self._pricing.workload, layouts=layouts, memory_gib=memory)
        built = build_model(table, self._rules, times, needs, self._experts(layouts, needs))
        choice = solve(built, seed, time_limit_s)
        if choice.status in ("unknown", "feasible"):
            return UNDECIDED
        if choice.status == "infeasible" or choice.value is None:
            raise InternalError("layouts that every rule accepts one by one were refused together")
        if choice.layout >= len(rows):
            return THE_PLAN
        need = needs[choice.layout][choice.mapping]
        if need is not None:
            layout = self._pool.scalar(int(rows[choice.layout]))
            self._pricing.use_assignment(layout, built.mapped.cells[need.grid], choice.value)
        return int(rows[choice.layout])

    def _kept(self, row: int) -> IntArray:
        """The mappings of a layout of the pool whose bound is below the cutoff."""
        bounds = self._pool.mappings[row]
        assert bounds is not None
        return np.flatnonzero(bounds.bound_s < self._cutoff_s)

    def _times_ns(self, row: int, ways: IntArray) -> IntArray:
        bounds = self._pool.mappings[row]
        assert bounds is not None
        return bound_ns(bounds.bound_s[ways])

    def _experts(self, layouts: Layout, ways: Sequence[Sequence[object]]) -> Experts | None:
        """The placements that prices assume, where measured loads are given and one model holds them."""
        if self._routing is None:
            return None
        degrees = [int(ep) for ep in np.broadcast_to(layouts.ep, len(ways))]
        if not self._routing.fits({ep for ep in degrees if ep > 1}):
            return None
        imbalance = {ep: float(self._pricing.workload.imbalance(ep)) for ep in set(degrees)}
        asked = [
            [AssumedImbalance(ep=ep, imbalance=imbalance[ep]) if ep > 1 else None for _ in mine]
            for ep, mine in zip(degrees, ways, strict=True)
        ]
        return Experts(routing=self._routing, asked=asked)

    def _needs(self, rows: IntArray, kept: Sequence[IntArray]) -> list[list[Need | None]]:
        """What mappings ask of the slots, as long as one model holds the counts of their grids."""
        found: list[list[Need | None]] = []
        grids: set[Grid] = set()
        for row, ways in zip(rows, kept, strict=True):
            asked = self._pricing.needs(self._pool.scalar(int(row)))
            mine = [asked[way] if asked else None for way in ways]
            more = grids | {need.grid for need in mine if need is not None}
            fits = sum(grid.cells for grid in more) <= self._params.largest_cells and all(
                grid.askable for grid in more
            )
            grids = more if fits else grids
            found.append(mine if fits else [None] * len(mine))
        return found


def _joined(first: Layout, second: Layout) -> Layout:
    """Two array layouts, one behind the other."""
    return Layout(
        **{
            name: np.concatenate([value, getattr(second, name)])
            for name, value in vars(first).items()
        }
    )

"""The choice among candidates on irregular fabrics: layouts, mappings and slots on leaves by CP-SAT."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout
from meshwright.errors import InternalError, OutOfTimeError
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.experts.joint import AssumedImbalance
from meshwright.planner.mapping.choice.joint import Grid, Need
from meshwright.planner.search.branches import as_array
from meshwright.planner.search.candidates import Candidate, Chooser
from meshwright.planner.search.model import (
    Candidates,
    Experts,
    bound_ns,
    build_model,
    price_ns,
    solve,
)


class SlotChooser(Chooser):
    """Chooses by the model over candidates with those mappings whose bound is below the cutoff."""

    prices_beside = 7

    def likely(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """The candidate of the least bound: its price costs less than a model of them all."""
        del best, wanted, time_limit_s
        waiting = self.opened
        return waiting[0] if waiting and waiting[0].bound_s < cutoff_s else None

    def choose(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """Solves the model over all that is open, and the best plan so far.

        Candidates beyond the largest model wait for the next one.
        """
        promising = [each for each in self.opened if each.bound_s < cutoff_s]
        if len(best) > 1 and promising:  # the best is proven already: the next ones are wanted
            return promising[0]
        largest = self._params.largest_master
        kept = [np.flatnonzero(each.mappings.bound_s < cutoff_s) for each in promising[:largest]]
        pairs = np.cumsum([len(ways) for ways in kept])
        chosen = promising[: max(1, int(np.searchsorted(pairs, largest)))]
        if not chosen:
            self.settle([], cutoff_s)
            return None
        kept = kept[: len(chosen)]
        times = [
            bound_ns(each.mappings.bound_s[ways]) for each, ways in zip(chosen, kept, strict=True)
        ]
        needs, layouts = self._needs(chosen, kept), [each.layout for each in chosen]
        if best:
            layouts.append(best[0].layout)
            times.append(np.array([price_ns(best[0].step_time_s)], dtype=np.int64))
            needs.append([None])
        table = Candidates(
            workload=self._branches[0].pricing.workload,
            layouts=as_array(best[0].layout if best else chosen[0].layout),
            memory_gib=np.zeros(1),
        )
        # Every candidate keeps the rules of its own execution: none is left to be posted.
        built = build_model(table, (), times, needs, self._experts(layouts, needs))
        self._certificate.rounds += 1
        choice = solve(built, self._seed, time_limit_s)
        if choice.status in ("unknown", "feasible"):
            raise OutOfTimeError
        if choice.status == "infeasible" or choice.value is None:
            raise InternalError("layouts that every rule accepts one by one were refused together")
        if choice.layout >= len(chosen):
            self.settle(chosen, cutoff_s)
            return None
        candidate, need = chosen[choice.layout], needs[choice.layout][choice.mapping]
        if need is not None:
            pricing = self._branches[candidate.branch].pricing
            pricing.use_assignment(candidate.layout, built.mapped.cells[need.grid], choice.value)
        return candidate

    def _experts(
        self, layouts: Sequence[Layout], ways: Sequence[Sequence[object]]
    ) -> Experts | None:
        """The placements that prices assume, where measured loads are given and one model holds them."""
        if self._routing is None:
            return None
        degrees = [int(layout.ep) for layout in layouts]
        if not self._routing.fits({ep for ep in degrees if ep > 1}):
            return None
        workload = self._branches[0].pricing.workload
        imbalance = {ep: float(workload.imbalance(ep)) for ep in set(degrees)}
        asked = [
            [AssumedImbalance(ep=ep, imbalance=imbalance[ep]) if ep > 1 else None for _ in own_ways]
            for ep, own_ways in zip(degrees, ways, strict=True)
        ]
        return Experts(routing=self._routing, asked=asked)

    def _needs(
        self, chosen: Sequence[Candidate], kept: Sequence[NDArray[np.intp]]
    ) -> list[list[Need | None]]:
        """What mappings ask of the slots, as long as one model holds the counts of their grids."""
        needs: list[list[Need | None]] = []
        grids: set[Grid] = set()
        for candidate, ways in zip(chosen, kept, strict=True):
            asked = self._branches[candidate.branch].pricing.needs(candidate.layout)
            own = [asked[way] if asked else None for way in ways]
            more = grids | {need.grid for need in own if need is not None}
            fits = sum(grid.cells for grid in more) <= self._params.largest_cells and all(
                grid.askable for grid in more
            )
            grids = more if fits else grids
            needs.append(own if fits else [None] * len(own))
        return needs

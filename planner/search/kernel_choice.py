"""The choice among candidates on regular fabrics: one CP-SAT model, solved again with what was learnt."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from meshwright.costmodel.layout import Layout
from meshwright.errors import InternalError, OutOfTimeError
from meshwright.planner.bounds.combination_costs import combination_costs, memory_rows
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.bounds.matrices import pick
from meshwright.planner.bounds.memory_fit import hbm_limit_gib
from meshwright.planner.experts.joint import AssumedImbalance, JointRouting
from meshwright.planner.search.branches import Branch
from meshwright.planner.search.candidates import Candidate, Chooser
from meshwright.planner.search.certificate import Certificate
from meshwright.planner.search.kernel_model import Combination, KernelChoice, KernelModel
from meshwright.planner.search.params import SearchParams


class KernelChooser(Chooser):
    """Chooses by a model that keeps what was promising once, and what is known of it."""

    def __init__(
        self,
        branches: Sequence[Branch],
        params: SearchParams,
        routing: JointRouting | None,
        seed: int,
        certificate: Certificate,
    ) -> None:
        super().__init__(branches, params, routing, seed, certificate)
        self._combinations: list[tuple[Candidate, Combination]] = []
        self.last: KernelModel | None = None
        """The model that was solved last."""

    def add(
        self, branch: int, layout: Layout, mappings: MappingBounds, cutoff_s: float
    ) -> Candidate:
        candidate = super().add(branch, layout, mappings, cutoff_s)
        own = self._of(self._branches[branch], candidate, cutoff_s)
        self._combinations += [(candidate, each) for each in own]
        return candidate

    def _of(self, branch: Branch, candidate: Candidate, cutoff_s: float) -> list[Combination]:
        """One combination for each mapping whose bound is below the cutoff."""
        layout, workload = candidate.layout, branch.pricing.workload.on(int(candidate.layout.gpus))
        kept = np.flatnonzero(candidate.mappings.bound_s < cutoff_s)
        table, count = pick(candidate.mappings.matrices, kept), len(kept)
        if not count:
            return []
        columns = {name: np.full(count, value) for name, value in vars(layout).items()}
        costs = combination_costs(workload, Layout(**columns), table)
        memory = tuple(memory_rows(workload, layout))
        imbalance = None
        if self._routing is not None and int(layout.ep) > 1:
            ep = int(layout.ep)
            imbalance = AssumedImbalance(ep=ep, imbalance=float(workload.imbalance(ep)))
        return [
            Combination(
                layout=layout,
                execution=branch.execution,
                matrix={axis: tuple(rows[position].tolist()) for axis, rows in table.items()},
                bound_s=float(candidate.mappings.bound_s[row]),
                costs=costs[position],
                memory=memory,
                limit_gib=hbm_limit_gib(workload),
                imbalance=imbalance,
            )
            for position, row in enumerate(kept)
        ]

    def learn(self, candidate: Candidate, priced: Priced | None) -> None:
        """Keeps the price of the best mapping; the candidate's others are no faster."""
        super().learn(candidate, priced)
        for owner, each in self._combinations:
            if owner is candidate:
                each.is_open = False
                each.priced = priced if priced and each.matrix == priced.matrix else None

    def choose(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """Solves the model. Without an answer within its work, the candidate of the least bound is next."""
        beaten = best[: wanted - 1]
        rows = self._in_model(cutoff_s, beaten)
        if not rows:
            self.settle([])
            return None
        model = self._branches[0].pricing.workload.model
        self.last = KernelModel(
            layers=model.layers,
            leading=model.dense_layers if model.moe_layers else 0,
            combinations=[each for _, each in rows],
            cutoff_s=cutoff_s,
            routing=self._routing,
        )
        self._certificate.rounds += 1
        self._certificate.model = self.last.model
        self._certificate.combinations = len(rows)
        self._certificate.kernels = len({each.kernel for _, each in rows})
        choice = self.last.solve(self._seed, time_limit_s, self._params.work)
        self._certificate.model_bound_s = None if choice.bound_s == inf else choice.bound_s
        if choice.status == "infeasible":
            self.settle(candidate for candidate, _ in rows)
            return None
        if choice.status == "unknown" and time_limit_s is not None:
            raise OutOfTimeError
        chosen = choice.combination
        if chosen is not None and chosen.is_open:
            return self._plainest(chosen)
        if choice.status == "optimal":
            _check(choice)
            self.settle(candidate for candidate, _ in rows)
            return None
        promising = [each for each in self.opened if each.bound_s < cutoff_s]
        return promising[0] if promising else None

    def _in_model(
        self, cutoff_s: float, beaten: Sequence[Priced]
    ) -> list[tuple[Candidate, Combination]]:
        """What may be the optimum, and what was priced; least bounds first.

        Where there are too many, the others wait: they are no faster than those that are in.
        """
        kept = [
            (candidate, each)
            for candidate, each in self._combinations
            if not (each.is_open and each.bound_s >= cutoff_s)
            and not any(each.priced is priced for priced in beaten)
        ]
        kept.sort(key=lambda pair: (pair[1].priced is None, pair[1].bound_s))
        return kept[: self._params.largest_master]

    def _plainest(self, chosen: Combination) -> Candidate:
        """Of what is alike but for the execution, and bounded alike, the plainest."""
        slack_s = 1e-12 * chosen.bound_s
        alike = [
            candidate
            for candidate, each in self._combinations
            if each.is_open
            and each.layout == chosen.layout
            and each.matrix == chosen.matrix
            and abs(each.bound_s - chosen.bound_s) <= slack_s
        ]
        return min(alike, key=lambda candidate: candidate.branch)


def _check(choice: KernelChoice) -> None:
    """Raises InternalError where the solution is not the plan that was priced."""
    chosen = choice.combination
    if chosen is None or chosen.priced is None:
        raise InternalError("the model chose a combination without a price")
    if choice.layers != tuple(map(sum, chosen.priced.stages)):
        raise InternalError(f"the model deals layers out as {choice.layers}, the plan otherwise")

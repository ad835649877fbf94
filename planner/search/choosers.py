"""The choice among candidates on regular fabrics: one CP-SAT model, solved again with what was learnt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.fabric import domain_gpus, inside_domains
from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import GROUPS, Layout, Placement, StagedPlacement
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.workload import Workload
from meshwright.errors import InternalError, OutOfTimeError
from meshwright.planner.bounds.combination_costs import (
    CombinationCosts,
    RankCosts,
    combination_costs,
    memory_rows,
)
from meshwright.planner.bounds.exact_cost import Matrix, Priced
from meshwright.planner.bounds.mappings import rows_under
from meshwright.planner.bounds.paces import host_limit_gib
from meshwright.planner.mapping.joint import Grid, Need
from meshwright.planner.mapping.pricing import MappedPricing, Way, cut_uses
from meshwright.planner.search.branches import Branch, Candidate, Chooser, Combination
from meshwright.planner.search.kernel_model import KernelChoice, KernelModel
from meshwright.planner.search.model import Experts, bound_ns, build_model, price_ns, solve
from meshwright.planner.search.pricing import Certificate, SearchParams

if TYPE_CHECKING:
    from meshwright.planner.experts.training import JointRouting


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
        self._taken_in = 0
        """Candidates whose combinations are known."""
        self._combinations: list[tuple[Candidate, Combination]] = []
        self._unsolved = 0
        """Models that were given up."""
        self.last: KernelModel | None = None
        """The model that was solved last."""

    def likely(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """The candidate of the least bound: a price costs less than a model.

        Of degrees that were priced before come no more at first: their other choices cost about the same.
        """
        promising = [each for each in self.opened if each.bound_s < cutoff_s]
        priced = {each.degrees for each in self.candidates if not each.is_open}
        others = [each for each in promising if each.degrees not in priced]
        return next(iter(others or promising), None)

    def _take_in(self, cutoff_s: float) -> None:
        """Makes combinations of the candidates that have none yet, as far as they matter.

        Layouts of one execution on as many GPUs are costed together.
        """
        groups: dict[tuple[int, int], list[Candidate]] = defaultdict(list)
        for each in self.candidates[self._taken_in :]:
            least_s = min(each.bound_s if each.is_open else inf, _outside_s(each).min(initial=inf))
            if each.priced or each.overfull or least_s < cutoff_s:
                groups[each.branch, int(each.layout.gpus)].append(each)
        self._taken_in = len(self.candidates)
        for (branch, gpus), own in groups.items():
            workload = self._branches[branch].pricing.workload.on(gpus)
            self._combinations += self._of(self._branches[branch], workload, own, cutoff_s)

    def _of(
        self, branch: Branch, workload: Workload, candidates: Sequence[Candidate], cutoff_s: float
    ) -> Iterator[tuple[Candidate, Combination]]:
        """A combination for each mapping that was priced or whose bound is below the cutoff.

        Those that the limits on mappings rule out come with them, for the model to decide.
        """
        owners, rows = [], []
        for candidate in candidates:
            for row in _kept_mappings(candidate, cutoff_s):
                owners.append(candidate)
                rows.append(row)
        if not owners:
            return
        columns = {
            name: np.array([getattr(owner.layout, name) for owner in owners])
            for name in vars(owners[0].layout)
        }
        table = {
            axis: np.stack(
                [
                    owner.mappings.matrices[axis][row]
                    for owner, row in zip(owners, rows, strict=True)
                ]
            )
            for axis in owners[0].mappings.matrices
        }
        layouts = Layout(**columns)
        placement = placement_on(workload.cluster, layouts, table)
        costs = combination_costs(workload, layouts, placement)
        if branch.corrections is not None:
            factors = branch.corrections.factor(workload, layouts).tolist()
            costs = [each.times(factor) for each, factor in zip(costs, factors, strict=True)]
        inside = inside_domains(workload, placement)
        memory = {owner: tuple(memory_rows(workload, owner.layout)) for owner in set(owners)}
        runs = {owner: branch.execution_of(owner.layout) for owner in set(owners)}
        limit_gib = usable_hbm_gib(workload)
        for position, (owner, row) in enumerate(zip(owners, rows, strict=True)):
            matrix = {axis: tuple(values[position].tolist()) for axis, values in table.items()}
            bound_s, outside_s = owner.mappings.bound_s[row], _outside_s(owner)[row]
            overfull = _price_of(matrix, owner.overfull)
            is_outside = bool(outside_s < bound_s)
            yield (
                owner,
                Combination(
                    layout=owner.layout,
                    execution=runs[owner],
                    matrix=matrix,
                    bound_s=float(min(bound_s, outside_s)),
                    costs=costs[position],
                    memory=memory[owner],
                    limit_gib=limit_gib,
                    imbalance=self._imbalance(workload, int(owner.layout.ep)),
                    is_open=owner.is_open or is_outside,
                    priced=None if is_outside else overfull or owner.priced,
                    inside={axis: int(members[position]) for axis, members in inside.items()},
                    is_barred=is_outside or overfull is not None,
                ),
            )

    def learn(
        self, candidate: Candidate, priced: Priced | None, overfull: Sequence[Priced] = ()
    ) -> None:
        """Keeps the price of the best mapping; the candidate's others are no faster, or not allowed.

        Parameters
        ----------
        candidate
            What was priced.
        priced
            Its price; None where no mapping that is allowed beats the cutoff.
        overfull
            Mappings that fill a cut beyond what is allowed, with their prices.
        """
        super().learn(candidate, priced, overfull)
        known = (*overfull, *([priced] if priced else []))
        for owner, each in self._combinations:
            if owner is candidate and not each.is_barred:
                each.is_open = False
                each.priced = _price_of(each.matrix, known)
                each.is_barred = each.priced is not None and each.priced is not priced

    def choose(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """Solves the model. Without an answer within its work, the candidate of the least bound is next.

        Parameters
        ----------
        cutoff_s
            Seconds that a candidate must beat.
        best
            The best prices so far, rising: the first `wanted` - 1 of them are kept out of the model.
        wanted
            How many best ones are asked for.
        time_limit_s
            Seconds that are left; None without a limit.
        """
        promising = [each for each in self.opened if each.bound_s < cutoff_s]
        if promising and self._unsolved >= self._params.most_unsolved:
            return promising[0]
        self._take_in(cutoff_s)
        rows = self._in_model(cutoff_s, best[: wanted - 1])
        choice = self._solved([each for _, each in rows], cutoff_s, time_limit_s)
        chosen = choice.combination
        if chosen is not None and chosen.is_open:
            return self._plainest(chosen)
        if choice.status in ("optimal", "infeasible"):
            if chosen is not None:
                _check(choice)
            self._settle(rows, cutoff_s)
        elif promising:
            return promising[0]
        else:
            self._settle([], cutoff_s)
        return None

    def _solved(
        self, combinations: Sequence[Combination], cutoff_s: float, time_limit_s: float | None
    ) -> KernelChoice:
        """The answer of a model of some combinations; without any, nothing is feasible."""
        if not combinations:
            return KernelChoice(status="infeasible", bound_s=inf)
        workload = self._branches[0].pricing.workload
        model = workload.model
        fewest_gpus = min(int(each.layout.gpus) for each in combinations)
        self.last = KernelModel(
            layers=model.layers,
            leading=model.dense_layers if model.moe_layers else 0,
            empty_ends=may_have_empty_ends(workload),
            max_cut_use=workload.max_cut_use,
            host_limit_gib=host_limit_gib(workload.on(fewest_gpus)),
            combinations=combinations,
            cutoff_s=cutoff_s,
            routing=self._routing,
        )
        choice = self.last.solve(self._seed, time_limit_s, self._params)
        self._unsolved += choice.status in ("unknown", "feasible")
        certificate = self._certificate
        certificate.rounds += 1
        certificate.model = self.last
        certificate.combinations = len(combinations)
        certificate.kernels = len({each.kernel for each in combinations})
        certificate.model_bound_s = None if choice.bound_s == inf else choice.bound_s
        return choice

    def _in_model(
        self, cutoff_s: float, beaten: Sequence[Priced]
    ) -> list[tuple[Candidate, Combination]]:
        """What may be the optimum, and what was priced; least bounds first.

        Where there are too many, the others wait for a later model, and what is proven makes room.
        """
        kept = [
            (candidate, each)
            for candidate, each in self._combinations
            if _matters(each, cutoff_s, beaten)
        ]
        kept.sort(key=lambda pair: _rank(pair[1], cutoff_s))
        to_beat = sum(_rank(each, cutoff_s)[0] == 0 for _, each in kept)
        return kept[: max(self._params.largest_master, to_beat + 1)]

    def _settle(self, rows: Sequence[tuple[Candidate, Combination]], cutoff_s: float) -> None:
        """No combination of the model beats the cutoff; candidates without others are out."""
        for _, each in rows:
            each.is_settled = True
        waiting = {
            candidate
            for candidate, each in self._combinations
            if each.is_waiting and each.bound_s < cutoff_s
        }
        self.settle(set(self.candidates[: self._taken_in]) - waiting, cutoff_s)

    def _plainest(self, chosen: Combination) -> Candidate:
        """Of what is alike but for the execution, and bounded alike, the plainest."""
        slack_s = 1e-12 * chosen.bound_s
        alike = [
            candidate
            for candidate, each in self._combinations
            if each.is_waiting
            and each.layout == chosen.layout
            and each.matrix == chosen.matrix
            and abs(each.bound_s - chosen.bound_s) <= slack_s
        ]
        return min(alike, key=lambda candidate: candidate.branch)


def _kept_mappings(candidate: Candidate, cutoff_s: float) -> list[int]:
    """Rows of the mappings that matter: of a priced candidate the best one, and those it may not take."""
    mappings = candidate.mappings
    outside_s = _outside_s(candidate)
    kept = (outside_s < cutoff_s) & (outside_s == outside_s.min(initial=inf))
    if candidate.is_open:
        kept |= mappings.bound_s < cutoff_s
    for priced in (candidate.priced, *candidate.overfull):
        if priced is not None:
            kept[rows_under(mappings.matrices, priced.matrix)] = True
    return [int(row) for row in np.flatnonzero(kept)]


def _outside_s(candidate: Candidate) -> NDArray[np.float64]:
    """Bounds of the mappings that leave a domain; infinite for others."""
    outside_s = candidate.mappings.outside_s
    return np.full(len(candidate.mappings.bound_s), inf) if outside_s is None else outside_s


def _price_of(matrix: Matrix, prices: Sequence[Priced]) -> Priced | None:
    """The price of one mapping among some."""
    return next((priced for priced in prices if priced.matrix == matrix), None)


def _matters(each: Combination, cutoff_s: float, beaten: Sequence[Priced]) -> bool:
    """Whether a combination may be the choice."""
    if each.is_open:
        return each.bound_s < cutoff_s
    return each.priced is not None and not any(each.priced is priced for priced in beaten)


def _rank(each: Combination, cutoff_s: float) -> tuple[int, float]:
    """What a model must have comes first: the price to beat, then what is not proven yet."""
    if each.is_barred:
        return 2, each.bound_s
    if each.priced is not None:
        is_cutoff = each.priced.step_time_s <= cutoff_s
        return (0 if is_cutoff else 2), each.bound_s
    return (2 if each.is_settled else 1), each.bound_s


def _check(choice: KernelChoice) -> None:
    """Raises InternalError where the solution is not the plan that was priced."""
    chosen = choice.combination
    if chosen is None or chosen.priced is None:
        raise InternalError("the model chose a combination without a price")
    if choice.layers != tuple(map(sum, chosen.priced.stages)):
        raise InternalError(f"the model deals layers out as {choice.layers}, the plan otherwise")


# The choice among candidates on irregular fabrics: layouts, mappings and slots on leaves by CP-SAT.


class SlotChooser(Chooser):
    """Chooses by the model over candidates with those mappings whose bound is below the cutoff."""

    prices_beside = 7

    def likely(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """The candidate of the least bound: its price costs less than a model of them all."""
        del best, wanted, time_limit_s
        waiting = self.opened
        while waiting and waiting[0].bound_s < cutoff_s:
            first, before_s = waiting[0], waiting[0].bound_s
            pricing = self._branches[first.branch].pricing
            first.mappings = pricing.tightened(first.layout, first.mappings)
            if first.bound_s == before_s:
                return first
            waiting.sort(key=lambda each: each.bound_s)
        return None

    def choose(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """Solves the model over all that is open, and the best plan so far.

        Candidates beyond the largest model wait for the next one.

        Parameters
        ----------
        cutoff_s
            Seconds that a candidate must beat.
        best
            The best prices so far, rising; the first stands in the model with its price.
        wanted
            How many best ones are asked for: of several no model decides once there is a price.
        time_limit_s
            Seconds that are left; None without a limit.

        Raises
        ------
        OutOfTimeError
            If that is too little.
        """
        promising = [each for each in self.opened if each.bound_s < cutoff_s]
        if wanted > 1 and best and promising:
            # The model would end with the best, and others are wanted.
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
        # Every candidate keeps the rules of its own execution: none is left to be posted.
        built = build_model(times, needs, self._experts(layouts, needs))
        self._certificate.rounds += 1
        choice = solve(built, self._seed, time_limit_s)
        if choice.status in ("unknown", "feasible"):
            raise OutOfTimeError
        if choice.status == "infeasible" and not best and self._routing is None:
            self.settle(chosen, cutoff_s)  # no mapping is what any of them asks for
            return None
        if choice.status == "infeasible" or choice.value is None:
            raise InternalError("layouts that every rule accepts one by one were refused together")
        if choice.layout >= len(chosen):
            self.settle(chosen, cutoff_s)
            return None
        candidate, need = chosen[choice.layout], needs[choice.layout][choice.mapping]
        if need is not None:
            pricing = self._branches[candidate.branch].pricing
            pricing.use_assignment(candidate.layout, built.mapped[need.grid], choice.value)
        return candidate

    def _experts(
        self, layouts: Sequence[Layout], ways: Sequence[Sequence[object]]
    ) -> Experts | None:
        """The placements that prices assume, where measured loads are given and one model holds them."""
        if self._routing is None:
            return None
        workload = self._branches[0].pricing.workload
        asked = [
            [self._imbalance(workload, int(layout.ep))] * len(own_ways)
            for layout, own_ways in zip(layouts, ways, strict=True)
        ]
        fits = self._routing.fits(each for own in asked for each in own)
        return Experts(routing=self._routing, asked=asked) if fits else None

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


# A plan on an irregular fabric as a model that others can solve: the ways in which its layout can lie.


def model_of_places(best: Sequence[tuple[Workload, Priced, Placement]]) -> KernelModel:
    """The choice among the best layouts of an irregular fabric, and how each of them lies there.

    Each stands in it as it was priced, and in each way that may be faster than the first, with what this asks
    of its slots. The optimum is the first one's step, as far as the search has proven that nothing faster can
    be had of the slots.

    Parameters
    ----------
    best
        The plan and others, no faster, each with the workload that it was priced on and its groups' places,
        arrays [levels].

    Returns
    -------
    KernelModel
        With all its rows.
    """
    workload, plan, placement = best[0]
    rows: list[tuple[Combination, Need | None]] = []
    domains: list[int] = []
    leaves: dict[Grid, tuple[str, ...]] = {}
    for work, priced, placed in best:
        if priced.step_time_s < plan.step_time_s:
            continue
        pricing = MappedPricing(work)
        ways = pricing.ways_below(priced, placed, plan.step_time_s)
        of_layout = _ways_as_combinations(work, priced, ways)
        for need in {need.grid: need for _, need in of_layout if need is not None}.values():
            leaves.setdefault(need.grid, pricing.leaf_names(priced.layout))
        rows += of_layout
        domains += [domain_gpus(work)] * len(of_layout)
    model = KernelModel(
        layers=workload.model.layers,
        leading=workload.model.dense_layers if workload.model.moe_layers else 0,
        combinations=[combination for combination, _ in rows],
        cutoff_s=plan.step_time_s,
        empty_ends=may_have_empty_ends(workload),
        host_limit_gib=host_limit_gib(workload),
    )
    uses = [dict(each.priced.cut_uses) if each.priced else {} for each, _ in rows]
    model.state_limits({"tp": domains}, uses)
    model.state_places([need for _, need in rows], leaves)
    MappedPricing(workload).state_places(model.model, plan, placement)
    return model


def _ways_as_combinations(
    workload: Workload, plan: Priced, ways: Sequence[Way]
) -> list[tuple[Combination, Need | None]]:
    """Ways in which a layout can lie, the plan's own first, with what each asks of the slots."""
    layout, limit_gib = replace(plan.layout, recompute_layers=0), usable_hbm_gib(workload)
    memory = memory_rows(workload, plan.layout)
    pairs = []
    for way in ways:
        inside = inside_domains(workload, way.placement)
        priced = way.priced
        if priced is plan:
            uses = cut_uses(workload, plan, way.placement)
            priced = replace(plan, cut_uses=tuple(uses.items()))
        combination = Combination(
            layout=layout,
            execution=plan.execution,
            matrix=_members_by_level(way.placement),
            bound_s=way.bound_s,
            costs=_costs_by_stage(workload, layout, way.placement),
            memory=memory,
            limit_gib=limit_gib,
            is_open=priced is None,
            priced=priced,
            inside={axis: int(members) for axis, members in inside.items()},
        )
        pairs.append((combination, way.need))
    return pairs


def _members_by_level(placement: Placement) -> Matrix:
    """Members of each group inside a block of every level, of experts by stage where stages differ."""
    members = {name: tuple(getattr(placement, name).tolist()) for name in GROUPS}
    if isinstance(placement, StagedPlacement):
        del members["ep"]
        for stage, row in enumerate(placement.stage_ep.tolist()):
            members[f"ep_of_stage_{stage}"] = tuple(row)
    return members


def _costs_by_stage(workload: Workload, layout: Layout, placement: Placement) -> CombinationCosts:
    """Of a layout under one placement; each rank's own where stages differ, and the least for all ranks."""
    columns = {name: np.asarray(getattr(placement, name))[None] for name in GROUPS}
    if not isinstance(placement, StagedPlacement):
        return combination_costs(workload, layout.flat(), Placement(**columns))[0]
    nearest = {**columns, "ep": placement.stage_ep.max(axis=0)[None]}
    every = [Placement(**nearest)]
    every += [Placement(**{**columns, "ep": row[None]}) for row in placement.stage_ep]
    least, *stages = (combination_costs(workload, layout.flat(), one)[0] for one in every)
    last = len(stages) - 1
    ranks = [
        RankCosts(
            own.layer_s,
            own.leading_s,
            own.again_s,
            own.first_s * (rank == 0) + own.last_s * (rank == last),
        )
        for rank, own in enumerate(stages)
    ]
    return replace(least, ranks=tuple(ranks))

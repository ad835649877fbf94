"""Whether slots can be put on leaves as a price asks: known mappings first, then CP-SAT; answers are kept."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import inf

import numpy as np

from meshwright.errors import InternalError
from meshwright.planner.mapping.choice.joint import Cells, Grid, Limits, Need
from meshwright.planner.mapping.instance import Instance
from meshwright.planner.mapping.problem import (
    IntArray,
    MappingProblem,
    check_assignment,
    cut_groups,
    held_by,
    loads_of,
)
from meshwright.planner.mapping.regular_orders import regular_orders
from meshwright.planner.solvers.cp_sat import repeatable_solver


@dataclass(frozen=True, kw_only=True)
class PackingParams:
    """How long CP-SAT is asked. Work is its deterministic time, about seconds on an idle core."""

    question_work: float = 0.5
    """For one question."""
    all_work: float = 30.0
    """For all questions of a search."""
    largest_choice: int = 2_000
    """Variables of a grid over which the least traffic is looked for."""
    traffic_units: int = 10**6
    """Range of that objective: the busy seconds of hostname order."""


DEFAULT_PACKING = PackingParams()


@dataclass
class _Answers:
    """What is known of a grid."""

    mappings: list[IntArray] = field(default_factory=list)
    impossible: list[Need] = field(default_factory=list)
    undecided: list[Need] = field(default_factory=list)


class Packing:
    """Answers for all layouts of a search; layouts with the same grid share them."""

    def __init__(self, seed: int = 0, params: PackingParams = DEFAULT_PACKING) -> None:
        self._answers: dict[Grid, _Answers] = {}
        self._seed, self._params, self._work_left = seed, params, params.all_work
        self.deadline = inf
        """On the clock of `time.monotonic`; no question is asked behind it."""

    def add(self, instance: Instance, assignment: IntArray) -> None:
        """Adds a mapping that is known from elsewhere."""
        check_assignment(instance.problem, assignment)
        self.mappings(instance).append(assignment)

    def mappings(self, instance: Instance) -> list[IntArray]:
        """The mappings known for an instance's grid, hostname order and the regular orders among them."""
        problem = instance.problem
        answers = self._answers.setdefault(Grid.of(problem), _Answers())
        if not answers.mappings:
            answers.mappings += [problem.hostname_assignment(), *regular_orders(problem)]
        return answers.mappings

    def impossible(self, need: Need) -> bool:
        """Whether it is known that no mapping keeps a need's limits."""
        answers = self._answers.get(need.grid)
        return answers is not None and any(need.implies(refuted) for refuted in answers.impossible)

    def find(self, instance: Instance, need: Need) -> IntArray | None:
        """A mapping that keeps a need's limits; None where there is none, or none was found in time.

        `impossible` tells the two apart.
        """
        for assignment in self.mappings(instance):
            if keeps(instance, assignment, need):
                return assignment
        answers = self._answers[need.grid]
        if self.impossible(need) or any(need.implies(refuted) for refuted in answers.undecided):
            return None
        if not need.grid.askable or self._work_left <= 0 or time.monotonic() >= self.deadline:
            answers.undecided.append(need)
            return None
        solution, decided = self._solved(instance, need)
        if solution is not None:
            answers.mappings.append(solution)
        elif decided:
            stronger = [refuted for refuted in answers.impossible if not refuted.implies(need)]
            answers.impossible = [*stronger, need]
        else:
            answers.undecided.append(need)
        return solution

    def _solved(self, instance: Instance, need: Need) -> tuple[IntArray | None, bool]:
        """(mapping, whether the question is decided)."""
        from meshwright.planner.solvers.or_tools import cp_model

        model = cp_model.CpModel()
        always = model.new_constant(1)
        cells = Cells(model, need.grid, always)
        cells.post(need, always)
        work = min(self._params.question_work, self._work_left)
        solver = repeatable_solver(self._seed, work=work)
        if np.isfinite(self.deadline):
            solver.parameters.max_time_in_seconds = max(self.deadline - time.monotonic(), 0.01)
        status = solver.solve(model)
        self._work_left -= solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return None, True
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, False
        assignment = cells.assignment(instance.problem, solver.value)
        check_assignment(instance.problem, assignment)
        if not keeps(instance, assignment, need):
            raise InternalError(
                "a mapping that CP-SAT found does not keep the limits that it was asked for"
            )
        return assignment, True


def least_traffic_within(
    instance: Instance, need: Need, params: PackingParams = DEFAULT_PACKING
) -> list[IntArray]:
    """The mapping with the least traffic among those that keep a need's limits, as far as it is found."""
    from meshwright.planner.solvers.or_tools import cp_model

    problem = instance.problem
    everything_s = loads_of(problem, problem.hostname_assignment()).total_s
    if need.grid.cells > params.largest_choice or everything_s <= 0:
        return []
    model = cp_model.CpModel()
    always = model.new_constant(1)
    cells = Cells(model, need.grid, always)
    cells.post(need, always)
    model.minimize(sum(cells.uplink_seconds(problem, everything_s / params.traffic_units)))
    solver = repeatable_solver(work=params.question_work)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    return [cells.assignment(problem, solver.value)]


def keeps(instance: Instance, assignment: IntArray, need: Need) -> bool:
    """Whether a mapping keeps a need's limits, by counting."""
    problem = instance.problem
    return _within(problem, assignment, len(problem.leaf_slots), need.leaves) and _within(
        problem, problem.pod_of[assignment], problem.pods, need.pods
    )


def _within(problem: MappingProblem, where: IntArray, blocks: int, limits: Limits) -> bool:
    if limits.together and bool(np.any(where[:-1] != where[1:])):
        return False
    size = problem.traffic.expert_slots
    by_slot = where.reshape(problem.stages, -1, size)
    kinds = (
        (limits.rings, where),
        (limits.context, where.reshape(-1, problem.traffic.context_slots)),
        (limits.expert_rings, by_slot.transpose(0, 2, 1).reshape(-1, by_slot.shape[1])),
    )
    used = np.bincount(where.reshape(-1), minlength=blocks)
    for limit, groups in kinds:
        if limit is not None and np.any(limit[0] * cut_groups(groups, blocks) > limit[1] * used):
            return False
    if limits.expert_share is None:
        return True
    members = held_by(by_slot.reshape(-1, size), blocks)
    share, of = limits.expert_share
    crossing, sent = np.sum(members * (size - members), axis=0), size * members.sum(axis=0)
    return bool(np.all(of * crossing <= share * sent))

"""Where slots go, as part of a CP-SAT model: counts per leaf and stage, and what a price asks of them.

A step's price sees of a mapping only how many members of a group the worst leaf and the worst pod hold
(`effective.Reach`). That is no linear function of the counts, but each value it can take is a limit on what a
block may cut, which is linear in them:

    its stages have their slots             sum_l n_{l,s} = slots               where the grid is used
    in the room of every leaf               sum_s n_{l,s} <= free_l
    a block that a stage is cut by          cut_{b,s} = [0 < n_{b,s} < slots]
    enough slots in use for each of them    a sum_s cut_{b,s} <= c sum_s n_{b,s}    where the need is chosen
    every pipeline in one block             n_{b,s} = n_{b,s+1}                 where the need asks for it

So a literal for each need, exact prices as its coefficients, and exact counts beside it. Groups of several
slots have a boolean for each of their slots and leaves, because which of them a block holds matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import inf, lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.layout import STAGE_AXES, Layout
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError, InternalError
from meshwright.planner.mapping.problem import (
    IntArray,
    MappingProblem,
    check_assignment,
    cut_groups,
    held_by,
    loads_of,
)
from meshwright.planner.mapping.slots import (
    Instance,
    assignment_of,
    instance_of,
    instance_on,
    joined_slots,
    regular_orders,
    whole_groups_in,
)
from meshwright.planner.solvers.programmes import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


Ratio = tuple[int, int]
"""(numerator, denominator)."""
NO_CUT: Ratio = (1, 0)


# Which grids CP-SAT is asked about.


MOST_COUNTS = 20_000
"""Counts of slots by leaf and stage, where groups are single slots."""
MOST_BOOLEANS = 300
"""Slots by leaf, where groups span several slots; these are harder."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The slots of a layout and the leaves they can be on: what layouts of other traffic share."""

    stages: int
    slots: int
    context_slots: int
    expert_slots: int
    leaf_slots: tuple[int, ...]
    leaf_pod: tuple[int, ...]

    @classmethod
    def of(cls, problem: MappingProblem) -> Grid:
        """The grid of a mapping problem."""
        return cls(
            stages=problem.stages,
            slots=problem.slots,
            context_slots=problem.traffic.context_slots,
            expert_slots=problem.traffic.expert_slots,
            leaf_slots=problem.leaf_slots,
            leaf_pod=problem.leaf_pod,
        )

    @property
    def single(self) -> bool:
        """Whether every group is cut by the slot, so that counts say everything."""
        return self.context_slots == 1 and self.expert_slots == 1

    @property
    def cells(self) -> int:
        """Variables of the grid."""
        per_stage = 1 if self.single else self.slots
        return len(self.leaf_slots) * self.stages * per_stage

    @property
    def askable(self) -> bool:
        """Whether CP-SAT is asked about its mappings."""
        most = MOST_COUNTS if self.single else MOST_BOOLEANS
        return self.cells <= most

    @cached_property
    def pod_leaves(self) -> tuple[tuple[int, ...], ...]:
        """The leaves of each pod."""
        pods = max(self.leaf_pod) + 1
        return tuple(
            tuple(np.flatnonzero(np.asarray(self.leaf_pod) == pod).tolist()) for pod in range(pods)
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the blocks of one level may do at the most. `None` is no limit.

    Pairs (a, c) of the first three: a block that cuts k groups uses at least k a / c slots; NO_CUT
    allows none.
    """

    rings: Ratio | None = None
    """Stages of which a block holds some but not all slots."""
    context: Ratio | None = None
    """Context groups that a block cuts."""
    expert_rings: Ratio | None = None
    """Rings of expert gradients that a block cuts."""
    expert_parts: tuple[int, ...] | None = None
    """Slots that a block holds at least of an expert group of which it holds some, by stage. Which stage is
    which does not count: they change places at will."""
    together: bool = False
    """Every pipeline lies in one block."""

    def implies(self, weaker: Limits) -> bool:
        """Whether whatever keeps these limits keeps the other ones.

        Parameters
        ----------
        weaker
            Of the same level and the same grid.
        """
        return (
            (self.together or not weaker.together)
            and _tighter(self.rings, weaker.rings)
            and _tighter(self.context, weaker.context)
            and _tighter(self.expert_rings, weaker.expert_rings)
            and _part_by_part(self.expert_parts, weaker.expert_parts)
        )


def _part_by_part(large: tuple[int, ...] | None, small: tuple[int, ...] | None) -> bool:
    if small is None or large is None:
        return small is None
    return all(more >= less for more, less in zip(large, small, strict=True))


def _tighter(tight: Ratio | None, wide: Ratio | None) -> bool:
    return _smaller(wide, tight) if wide is not None and tight is not None else wide is None


def _smaller(small: Ratio | None, large: Ratio | None) -> bool:
    if large is None:
        return True
    return small is not None and small[0] * large[1] <= large[0] * small[1]


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a price asks of a mapping."""

    grid: Grid
    leaves: Limits
    pods: Limits

    def implies(self, weaker: Need) -> bool:
        """Whether a mapping for this need is one for the other.

        Parameters
        ----------
        weaker
            Of any grid; one of another grid is never implied.
        """
        return (
            self.grid == weaker.grid
            and self.leaves.implies(weaker.leaves)
            and self.pods.implies(weaker.pods)
        )


class Cells:
    """The variables of one grid, zero where it is not used."""

    def __init__(self, model: cp_model.CpModel, grid: Grid, used: Any) -> None:
        self._model, self.grid = model, grid
        self._cuts: dict[tuple[str, tuple[int, ...]], list[cp_model.IntVar]] = {}
        """What needs share: the cuts of one kind in one block."""
        self._slots = self._by_slot(used) if not grid.single else None
        self.leaves = self._counts(used)
        self.pods = [self._pod_counts(pod) for pod in grid.pod_leaves]

    def _pod_counts(self, pod: Sequence[int]) -> list[Any]:
        """Slots of each stage in a pod, from those in its leaves."""
        rows = [self.leaves[leaf] for leaf in pod]
        return [sum(column) for column in zip(*rows, strict=True)]

    def _by_slot(self, used: Any) -> list[list[list[cp_model.IntVar]]]:
        """Whether a slot is on a leaf, [leaf][stage][slot]: every slot is on one."""
        grid, model = self.grid, self._model
        stages, slots = range(grid.stages), range(grid.slots)
        on_leaf = []
        for _ in grid.leaf_slots:
            on_leaf.append([[model.new_bool_var("") for _ in slots] for _ in stages])
        for stage in range(grid.stages):
            for slot in range(grid.slots):
                model.add(sum(leaf[stage][slot] for leaf in on_leaf) == used)
        # Runs of slots that cut no group are alike: those with more in the first leaf come first.
        size = lcm(grid.context_slots, grid.expert_slots)
        in_first_leaf = on_leaf[0][0]
        first = [sum(in_first_leaf[slot : slot + size]) for slot in range(0, grid.slots, size)]
        for run, after in pairwise(first):
            model.add(run >= after)
        return on_leaf

    def _counts(self, used: Any) -> list[list[Any]]:
        """n[leaf][stage], in the room of the leaves."""
        grid, model = self.grid, self._model
        if self._slots is not None:
            counts: list[list[Any]] = [[sum(row) for row in leaf] for leaf in self._slots]
        else:
            counts = [
                [model.new_int_var(0, min(free, grid.slots), "") for _ in range(grid.stages)]
                for free in grid.leaf_slots
            ]
            for column in zip(*counts, strict=True):
                model.add(sum(column) == grid.slots * used)
        for leaf, (row, free) in enumerate(zip(counts, grid.leaf_slots, strict=True)):
            model.add(sum(row) <= free * used).with_name(f"room_on_leaf_{leaf}")
        return counts

    def post(self, need: Need, chosen: Any) -> None:
        """The limits of a need hold where the literal is true.

        Parameters
        ----------
        need
            Of this grid.
        chosen
            A literal, or a constant 1.
        """
        leaves: list[tuple[int, ...]] = [(leaf,) for leaf in range(len(self.grid.leaf_slots))]
        for limits, counts, blocks in (
            (need.leaves, self.leaves, leaves),
            (need.pods, self.pods, list(self.grid.pod_leaves)),
        ):
            for row, block in enumerate(blocks):
                for kind, limit in (
                    ("rings", limits.rings),
                    ("context", limits.context),
                    ("expert_rings", limits.expert_rings),
                ):
                    if limit is not None and self._members(kind) > 1:
                        cuts = limit[0] * sum(self._cuts_of(kind, block, counts[row]))
                        most = limit[1] * sum(counts[row])
                        self._model.add(cuts <= most).only_enforce_if(chosen)
                for stage, part in enumerate(limits.expert_parts or ()):
                    if part > 1:
                        self._post_part(block, stage, part, chosen)
                if limits.together:
                    self._post_together(block, counts[row], chosen)

    def _members(self, kind: str) -> int:
        """Slots of a group of one kind, which `Limits` names."""
        grid = self.grid
        sizes = {"rings": grid.slots, "context": grid.context_slots}
        return sizes.get(kind, grid.slots // grid.expert_slots)

    def _cuts_of(
        self, kind: str, block: tuple[int, ...], counts: list[Any]
    ) -> list[cp_model.IntVar]:
        """Whether a block cuts each group of one kind; `counts` are its slots of each stage."""
        if (kind, block) not in self._cuts:
            grid, inside = self.grid, counts
            if kind == "context":
                inside = [sum(group) for group in self._groups(block, grid.context_slots)]
            elif kind == "expert_rings":
                inside = [
                    sum(self._held(block, stage, slot) for slot in slots)
                    for stage in range(grid.stages)
                    for slots in np.arange(grid.slots).reshape(-1, grid.expert_slots).T.tolist()
                ]
            self._cuts[kind, block] = [self._cut(held, self._members(kind)) for held in inside]
        return self._cuts[kind, block]

    def _post_together(self, block: tuple[int, ...], counts: list[Any], chosen: Any) -> None:
        """Neighbours that a block holds alike can be matched inside it."""
        for stage in range(1, self.grid.stages):
            if self._slots is None:
                self._model.add(counts[stage] == counts[0]).only_enforce_if(chosen)
                continue
            for slot in range(self.grid.slots):
                here, first = (self._held(block, s, slot) for s in (stage, 0))
                self._model.add(here == first).only_enforce_if(chosen)

    def _post_part(self, block: tuple[int, ...], stage: int, least: int, chosen: Any) -> None:
        """Of a stage's expert groups a block holds nothing or so many slots: the smallest part paces one."""
        from meshwright.planner.solvers.or_tools import cp_model

        size = self.grid.expert_slots
        allowed = cp_model.Domain.from_intervals([[0, 0], [least, size]])
        of_stage = self.grid.slots // size
        for group in self._groups(block, size)[stage * of_stage : (stage + 1) * of_stage]:
            posted = self._model.add_linear_expression_in_domain(sum(group), allowed)
            posted.only_enforce_if(chosen)

    def _groups(self, block: tuple[int, ...], size: int) -> list[list[Any]]:
        return [
            [self._held(block, stage, first + place) for place in range(size)]
            for stage in range(self.grid.stages)
            for first in range(0, self.grid.slots, size)
        ]

    def _held(self, block: tuple[int, ...], stage: int, slot: int) -> Any:
        assert self._slots is not None
        return sum(self._slots[leaf][stage][slot] for leaf in block)

    def _cut(self, members: Any, all_of_them: int) -> cp_model.IntVar:
        """Free to be false where a block holds nothing, or everything."""
        cut, holds_all = self._model.new_bool_var(""), self._model.new_bool_var("")
        self._model.add(members <= (all_of_them - 1) * cut + all_of_them * holds_all)
        self._model.add(members >= all_of_them * holds_all)
        return cut

    def uplink_seconds(self, problem: MappingProblem, unit_s: float) -> list[Any]:
        """Terms of an objective: rings cut and neighbours apart, in `unit_s` of busy up-links.

        Parameters
        ----------
        problem
            Of this grid; its bytes and its up-links' seconds a byte are priced.
        unit_s
            Seconds that an objective of 1 stands for, above 0; terms are rounded to whole units.
        """
        terms: list[Any] = []
        traffic = problem.traffic
        levels = (
            (self.leaves, problem.leaf_s_per_byte, [(leaf,) for leaf in range(len(self.leaves))]),
            (self.pods, problem.pod_s_per_byte, list(self.grid.pod_leaves)),
        )
        for rows, cost_s, blocks in levels:
            for row, per_byte, block in zip(rows, cost_s, blocks, strict=True):
                ring, hop = (
                    round(x * per_byte / unit_s) for x in (traffic.ring_bytes, traffic.hop_bytes)
                )
                terms += [ring * cut for cut in self._cuts_of("rings", block, row)]
                for before, after in pairwise(row):
                    apart = self._model.new_int_var(0, problem.slots, "")
                    self._model.add(apart >= after - before)
                    self._model.add(apart >= before - after)
                    terms.append(hop * apart)
        return terms

    def state_names(self, leaves: Sequence[str], prefix: str = "") -> None:
        """Names counts of slots, or the slots themselves, by stage and name of the leaf, for whoever reads
        the model.

        Parameters
        ----------
        leaves
            Names of the leaves of the grid, in their order.
        prefix
            In front of every name.
        """
        variables = self._model.proto.variables
        for leaf, stage in product(range(len(leaves)), range(self.grid.stages)):
            if self._slots is None:
                count = self.leaves[leaf][stage]
                variables[count.index].name = f"{prefix}slots_of_stage_{stage}_on_{leaves[leaf]}"
                continue
            for slot, literal in enumerate(self._slots[leaf][stage]):
                name = f"{prefix}slot_{slot}_of_stage_{stage}_on_{leaves[leaf]}"
                variables[literal.index].name = name

    def assignment(self, problem: MappingProblem, value: Callable[[Any], int]) -> IntArray:
        """The leaf of every slot, [stages, slots], in a solution that uses the grid.

        Parameters
        ----------
        problem
            Of this grid.
        value
            The value of an expression in the solution.
        """
        if self._slots is None:
            counts = [[value(n) for n in row] for row in self.leaves]
            return assignment_of(problem, np.array(counts, dtype=np.int64))
        on_leaf = np.array([[[value(x) for x in row] for row in leaf] for leaf in self._slots])
        return np.asarray(np.argmax(on_leaf, axis=0), dtype=np.int64)


def post_mappings(
    model: cp_model.CpModel,
    mappings: Sequence[Sequence[Any]],
    needs: Sequence[Sequence[Need | None]],
) -> dict[Grid, Cells]:
    """Ties every mapping literal to counts of slots that are what its price assumes; returns the counts.

    Layouts with the same grid share the counts, and mappings with the same need its limits.

    Parameters
    ----------
    model
        Where variables and rows go.
    mappings
        Literals of each layout's mappings, [layouts][mappings]; at most one of all is true.
    needs
        What each of them asks of the slots; None where it asks nothing.

    Returns
    -------
    dict of Grid to Cells
        Of the grids that some need is of.
    """
    wanted: dict[Need, list[Any]] = {}
    for ways, needs_of in zip(mappings, needs, strict=True):
        for way, need in zip(ways, needs_of, strict=True):
            if need is not None:
                wanted.setdefault(need, []).append(way)
    by_grid: dict[Grid, list[Need]] = {}
    for need in wanted:
        by_grid.setdefault(need.grid, []).append(need)
    cells: dict[Grid, Cells] = {}
    for grid, needs_of in by_grid.items():
        chosen = {}
        for need in needs_of:
            chosen[need] = model.new_bool_var("")
            model.add(sum(wanted[need]) == chosen[need])
        used = model.new_bool_var("")
        model.add(sum(chosen.values()) == used)
        cells[grid] = Cells(model, grid, used)
        for need, literal in chosen.items():
            cells[grid].post(need, literal)
    return cells


# Whether slots can be put on leaves as a price asks: known mappings first, then CP-SAT; answers are kept.


# How long CP-SAT is asked. Work is its deterministic time, about seconds on an idle core.


QUESTION_WORK = 0.5
"""For one question."""
PATIENT_WORK = 6.0
"""For one that all else waits for."""
ALL_WORK = 30.0
"""For all questions of a search."""
LARGEST_CHOICE = 2_000
"""Variables of a grid over which the least traffic is looked for."""
TRAFFIC_UNITS = 10**6
"""Range of that objective: the busy seconds of hostname order."""


@dataclass
class _Answers:
    """What is known of a grid."""

    mappings: list[IntArray] = field(default_factory=list)
    impossible: list[Need] = field(default_factory=list)
    undecided: list[tuple[Need, float]] = field(default_factory=list)


class Packing:
    """Answers for all layouts of a search; layouts with the same grid share them."""

    def __init__(self) -> None:
        self._answers: dict[Grid, _Answers] = {}
        self._work_left = ALL_WORK
        self.question_work = QUESTION_WORK
        """What may be spent on one question."""
        self.deadline = inf
        """On the clock of `time.monotonic`; no question is asked behind it."""

    def add(self, instance: Instance, assignment: IntArray) -> None:
        """Adds a mapping that is known from elsewhere.

        Parameters
        ----------
        instance
            Whose grid and leaves they are.
        assignment
            The leaf of every slot, shape [stages, slots].

        Raises
        ------
        InfeasibleError
            Where it is no assignment of this instance.
        """
        check_assignment(instance.problem, assignment)
        self.mappings(instance).append(assignment)

    def mappings(self, instance: Instance) -> list[IntArray]:
        """The mappings known for an instance's grid, hostname order and the regular orders among them.

        Parameters
        ----------
        instance
            Others with the same grid share the list.
        """
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

        Parameters
        ----------
        instance
            Of the need's grid.
        need
            What is asked.

        Returns
        -------
        array of int, shape [stages, slots], or None
            The leaf of every slot.
        """
        for assignment in self.mappings(instance):
            if keeps(instance, assignment, need):
                return assignment
        answers, work = self._answers[need.grid], self.question_work
        in_vain = (asked for asked, spent in answers.undecided if spent >= work)
        if self.impossible(need) or any(need.implies(asked) for asked in in_vain):
            return None
        if not need.grid.askable or self._work_left <= 0 or time.monotonic() >= self.deadline:
            answers.undecided.append((need, work))
            return None
        solution, decided = self._solved(instance, need)
        if solution is not None:
            answers.mappings.append(solution)
        elif decided:
            stronger = [refuted for refuted in answers.impossible if not refuted.implies(need)]
            answers.impossible = [*stronger, need]
        else:
            answers.undecided.append((need, work))
        return solution

    def _solved(self, instance: Instance, need: Need) -> tuple[IntArray | None, bool]:
        """(mapping, whether the question is decided)."""
        from meshwright.planner.solvers.or_tools import cp_model

        model = cp_model.CpModel()
        always = model.new_constant(1)
        cells = Cells(model, need.grid, always)
        cells.post(need, always)
        work = min(self.question_work, self._work_left)
        solver = repeatable_solver(0, work=work, deadline=self.deadline)
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


def least_traffic_within(instance: Instance, need: Need) -> list[IntArray]:
    """The mapping with the least traffic among those that keep a need's limits, as far as it is found.

    Parameters
    ----------
    instance
        Prices the traffic.
    need
        Of the instance's grid.

    Returns
    -------
    list of array of int, shape [stages, slots]
        One assignment; none where the grid has more than `LARGEST_CHOICE` variables, nothing is sent, or the
        solver finds none within its work.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    problem = instance.problem
    everything_s = loads_of(problem, problem.hostname_assignment()).total_s
    if need.grid.cells > LARGEST_CHOICE or everything_s <= 0:
        return []
    model = cp_model.CpModel()
    always = model.new_constant(1)
    cells = Cells(model, need.grid, always)
    cells.post(need, always)
    model.minimize(sum(cells.uplink_seconds(problem, everything_s / TRAFFIC_UNITS)))
    solver = repeatable_solver(work=QUESTION_WORK)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    return [cells.assignment(problem, solver.value)]


def keeps(instance: Instance, assignment: IntArray, need: Need) -> bool:
    """Whether a mapping keeps a need's limits, by counting.

    Parameters
    ----------
    instance
        Whose grid and leaves they are.
    assignment
        The leaf of every slot, shape [stages, slots].
    need
        Of the instance's grid. Which stage is which does not count for its expert parts.
    """
    problem = instance.problem
    sides = (
        (assignment, len(problem.leaf_slots), need.leaves),
        (problem.pod_of[assignment], problem.pods, need.pods),
    )
    if not all(_within(problem, where, blocks, limits) for where, blocks, limits in sides):
        return False
    if need.leaves.expert_parts is None and need.pods.expert_parts is None:
        return True
    wanted = [limits.expert_parts or (1,) * problem.stages for _, _, limits in sides]
    parts = [smallest_parts(problem, where, blocks).tolist() for where, blocks, _ in sides]
    return _are_dealt(list(zip(*parts, strict=True)), list(zip(*wanted, strict=True)))


def _are_dealt(parts: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> bool:
    """Whether each wish, in leaves and in pods, has a stage of its own with parts as large as that.

    The wish for the largest part in leaves first takes the stage with the smallest part in pods that will do:
    whatever is left has large enough parts in leaves for the wishes after it.
    """
    waiting = sorted(parts, key=lambda part: part[1])
    for leaf, pod in sorted(wanted, reverse=True):
        fitting = next((part for part in waiting if part[0] >= leaf and part[1] >= pod), None)
        if fitting is None:
            return False
        waiting.remove(fitting)
    return True


def smallest_parts(problem: MappingProblem, where: IntArray, blocks: int) -> IntArray:
    """Slots of the smallest part of an expert group that a block holds, by stage; `where` has the block of
    every slot, [stages, slots].

    Parameters
    ----------
    problem
        Says how many slots an expert group has.
    where
        Blocks from 0, shape [stages, slots].
    blocks
        How many blocks there are.

    Returns
    -------
    array of int, shape [stages]
        From 1 to the slots of a group.
    """
    members = held_by(where.reshape(-1, problem.traffic.expert_slots), blocks)
    parts = np.where(members > 0, members, problem.traffic.expert_slots).min(axis=1)
    return np.asarray(parts.reshape(problem.stages, -1).min(axis=1), dtype=np.int64)


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
    return True


# Slots that hold whole shard groups: the mappings that are looked at where there are several of them.
#
# A shard group is consecutive ranks of one stage. Where a slot holds whole ones, members of the data-parallel
# group in a block say all: m of them are whole groups of s, so min(m, s) of a group and m // s of those with
# the same shard are there (`data_parallel`), which is what counting them finds. Larger groups get slots of
# several nodes of a leaf. Mappings in which a leaf or a part of a node cuts a group are not looked at.


def choice_instance(workload: Workload, layout: Layout, stages: Stages) -> Instance:
    """The problem of placing a layout so that no block above a slot cuts a shard group.

    Raises InfeasibleError where the free nodes do not hold it so.

    Parameters
    ----------
    workload
        On as many GPUs as the layout.
    layout
        One layout.
    stages
        Layers of each [pipeline rank][virtual stage].
    """
    plain = instance_of(workload, layout, stages)
    return with_whole_groups(workload, layout, stages, plain)


def with_whole_groups(
    workload: Workload, layout: Layout, stages: Stages, plain: Instance
) -> Instance:
    """The same from the problem with any number of shard groups, which is returned where its slots do.

    Raises InfeasibleError as `choice_instance` does.

    Parameters
    ----------
    workload
        On as many GPUs as the layout.
    layout
        One layout.
    stages
        Layers of each [pipeline rank][virtual stage].
    plain
        The problem of the same degrees, whatever its number of shard groups.
    """
    joined = slots_of_a_group(workload, layout, plain)
    if joined is None:
        raise InfeasibleError(
            f"{int(layout.shard_groups)} shard groups of dp {int(layout.dp)} fill neither equal parts of a "
            "slot nor whole nodes"
        )
    if joined == 1:
        return plain
    slots = joined_slots(plain.slots, joined)
    wanted = int(layout.gpus) // slots.gpus
    if slots.count < wanted:
        raise InfeasibleError(
            f"leaves hold {slots.count} shard groups of {slots.gpus} GPUs whole, {wanted} are needed"
        )
    return instance_on(workload, layout, stages, slots)


def slots_of_a_group(workload: Workload, layout: Layout, plain: Instance) -> int | None:
    """Slots that are joined to one so that it holds whole shard groups, 1 where each does; None if none do.

    Those of several slots fill whole nodes with ranks that follow each other.

    Parameters
    ----------
    workload
        Its cluster says how many GPUs a node has.
    layout
        One layout with its number of shard groups.
    plain
        The problem of the same degrees with slots as small as they can be.
    """
    inside, number = plain.inside, int(layout.shard_groups)
    if whole_groups_in(layout, inside):
        return 1
    tp, cp, dp = (int(getattr(layout, axis)) for axis in STAGE_AXES)
    replicas, rest = divmod(dp, number)
    in_turn = inside.pp == 1 and (inside.cp == cp or inside.dp == 1)
    whole_nodes = plain.slots.gpus % workload.cluster.gpus_per_node == 0
    experts = (tp * cp * replicas) % int(layout.expert_group)
    if rest or experts or not in_turn or not whole_nodes or replicas % inside.dp:
        return None
    return replicas * cp // (inside.dp * inside.cp)

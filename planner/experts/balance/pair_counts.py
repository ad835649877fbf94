"""Two slots a GPU: replica counts that can be paired within a limit, or the proof that there are none.

Of replicas in falling order, first with last and so on is the pairing with the smallest largest sum (an
exchange argument). Every pair keeps to a limit T exactly if, for each size h above T / 2, replicas of h or
more are no more than those of T - h or less, which they need beside them:

    sum_e c_e ([w_e / c_e >= h] - [w_e / c_e <= T - h]) <= 0    for every h above T / 2,

linear in the choice of one count for each expert (`count_bound` has what holds for more slots). CP-SAT
chooses how many experts of equal load get each count. Where choices are many, replicas of at most SMALL T are
one choice of an expert and count as nothing, with as many more as it may have: it is still a bound. That two
replicas of an expert share no GPU is left out: a limit that is ruled out stays so, one that is not may be
missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.bound import least_counts
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.solvers.cp_sat import repeatable_solver

SMALL = 0.04
"""Of the limit: replicas below fit beside nearly everything."""
_MOST_CHOICES = 500
"""Above, CP-SAT does not find out: with as many loads as experts, most of them different."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """What experts of one load can have: `kind` [choices] of them, `count` replicas of size `replica`."""

    experts: list[NDArray[np.int64]]
    """Experts of each kind."""
    kind: NDArray[np.int64]
    count: NDArray[np.int64]
    replica: Loads
    more: NDArray[np.int64]
    """Replicas above `count` that an expert may have under the choice: of the smallest ones only."""

    @classmethod
    def of(
        cls, load: Loads, limit: float, fewest: Slots, most: int, small: float = 0.0
    ) -> _Choices:
        """The choices; replicas of at most `small` of the limit, above 0, are one choice of an expert."""
        values, kind_of = np.unique(load, return_inverse=True)
        rows: list[tuple[int, int, float, int]] = []
        for kind, value in enumerate(values.tolist()):
            least = int(fewest[kind_of == kind].min())
            last = min(max(int(np.ceil(value / (small * limit))), least), most) if small else most
            rows += [(kind, c, value / c, 0) for c in range(least, last)]
            rows.append((kind, last, 0.0 if last < most else value / last, most - last))
        kinds, counts, replicas, more = zip(*rows, strict=True)
        return cls(
            experts=[np.flatnonzero(kind_of == kind) for kind in range(len(values))],
            kind=np.array(kinds, dtype=np.int64),
            count=np.array(counts, dtype=np.int64),
            replica=np.array(replicas),
            more=np.array(more, dtype=np.int64),
        )

    def conditions(self, limit: float) -> NDArray[np.int64]:
        """Part of each choice in the condition of every size above half of `limit`, [sizes, choices]."""
        heavy = np.unique(self.replica[self.replica > limit / 2 * (1 + _ROUNDING)])[:, None]
        is_light = self.replica <= (limit - heavy) * (1 + _ROUNDING) + limit * _ROUNDING
        return np.asarray(((self.replica >= heavy).astype(np.int64) - is_light) * self.count)


def paired_counts(
    load: Loads, slots: int, gpus: int, limit: float, work: float
) -> tuple[Slots, ...] | None:
    """Counts whose replicas pair within `limit`; None where there are none, () where it stays open.

    `load` [experts] in any unit, that of `limit`; `work` is CP-SAT's deterministic time.
    """
    need = least_counts(load, slots, gpus, limit)
    if need is None:
        return None
    most = min(gpus, slots - len(load) + 1)
    choices = _Choices.of(load, limit, need[0], most)
    if len(choices.count) > _MOST_CHOICES:
        choices = _Choices.of(load, limit, need[0], most, SMALL)
    if len(choices.count) > _MOST_CHOICES:
        return ()
    answer = _chosen(choices, choices.conditions(limit), slots, work)
    if answer is None or isinstance(answer, bool):
        return None if answer is None else ()
    return (_counts(choices, *answer, len(load)),)


def _chosen(
    choices: _Choices, conditions: NDArray[np.int64], slots: int, work: float
) -> tuple[NDArray[np.int64], int] | bool | None:
    """Experts with each choice, and smallest replicas more; None if none fit, False if not found out."""
    from meshwright.planner.solvers.or_tools import cp_model

    sizes = np.array([len(experts) for experts in choices.experts], dtype=np.int64)
    model = cp_model.CpModel()
    take = [model.new_int_var(0, int(sizes[kind]), "") for kind in choices.kind]
    more = model.new_int_var(0, slots, "")
    for kind, size in enumerate(sizes.tolist()):
        model.add(sum(take[i] for i in np.flatnonzero(choices.kind == kind)) == size)
    weighted = cp_model.LinearExpr.weighted_sum
    model.add(weighted(take, choices.count.tolist()) + more == slots)
    model.add(more <= weighted(take, choices.more.tolist()))
    for condition in conditions:
        model.add(weighted(take, condition.tolist()) <= more)
    solver = repeatable_solver(0, work=work)
    solver.parameters.cp_model_probing_level = 0
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status == cp_model.UNKNOWN:
        return False
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(f"CP-SAT ended with {solver.status_name(status)} on paired counts")
    return np.array([solver.value(x) for x in take], dtype=np.int64), int(solver.value(more))


def _counts(choices: _Choices, taken: NDArray[np.int64], more: int, experts: int) -> Slots:
    """Counts [experts]; what is more goes to the experts that may have it, as many as fit to each."""
    counts = np.ones(experts, dtype=np.int64)
    of_kind = [members.tolist() for members in choices.experts]
    for i in np.flatnonzero(taken):
        for _ in range(int(taken[i])):
            extra = min(more, int(choices.more[i]))
            counts[of_kind[choices.kind[i]].pop()] = int(choices.count[i]) + extra
            more -= extra
    return counts

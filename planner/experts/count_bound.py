"""A sharper bound where hot experts fill GPUs: no replica counts leave room for the slots to be filled.

A GPU with load at most T and m slots that holds a replica of load r carries m - 1 others. For any u up to
T / (2 (m - 1)), a replica p has p >= u - max(0, u - p), so the others' sum of max(0, u - p) is at least
r + (m - 1) u - T. At most one replica of a GPU has r > T - (m - 1) u (two would exceed T), and it is none of
those below u. Summed over GPUs, with c_e replicas of expert e of load w_e / c_e:

    sum_e c_e (max(0, w_e / c_e + (m - 1) u - T) - max(0, u - w_e / c_e)) <= 0    for every such u,

linear in the choice of one count for each expert. Counts also fill the slots exactly. Where no choice keeps
to all of it, T is below every placement: shown by a linear programme's multipliers, checked by arithmetic,
or by CP-SAT over the choices that the multipliers leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from planner.experts.problem import Loads, Slots

_LEVELS = 24
_UNIT = 1_000_000
_MARGIN = 1e-9
_EXCESS_COST = 1e6
_MOST_CHOICES = 20_000
_MOST_COUNTS = 50_000


@dataclass(frozen=True, kw_only=True)
class CountBound:
    """A load that no placement is below, and counts that keep to the conditions a little above it."""

    bound: float
    counts: tuple[Slots, ...]


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """Expert and count of each choice, and its part in each condition, [levels, choices]."""

    expert: NDArray[np.int64]
    count: NDArray[np.int64]
    part: Loads


def count_bound(
    load: Loads, slots: int, gpus: int, *, low: float, high: float, work: float, steps: int = 4
) -> CountBound:
    """Bisects between `low`, a bound, and `high`, just under a load that is reached, for loads [experts].

    `work` is CP-SAT's deterministic time for each limit that the linear programme leaves open.
    """
    found: list[Slots] = []
    limit = high
    for _ in range(steps):
        answer = _counts_for(load, slots, gpus, limit, work)
        if isinstance(answer, bool):
            if answer:
                low = limit
            else:
                high = limit
        else:
            found.append(answer)
            high = limit
        if high <= low * 1.0005:
            break
        limit = (low + high) / 2
    return CountBound(bound=low, counts=tuple(found))


def _counts_for(load: Loads, slots: int, gpus: int, limit: float, work: float) -> Slots | bool:
    """Counts that keep to the conditions at `limit`; True where there are none, False where it stays open."""
    choices = _choices(load, slots, gpus, limit)
    if choices is None:
        return True
    if len(choices.expert) > _MOST_CHOICES or slots // gpus < 2:
        return False
    multiplier = _multipliers(choices, len(load))
    cost = (multiplier[:, None] * choices.part).sum(axis=0) + choices.count
    least = np.full(len(load), np.inf)
    np.minimum.at(least, choices.expert, cost)
    spare = slots - float(least.sum()) + _MARGIN * slots
    if spare < 0:
        return True
    # A choice that alone would take more slots than there are is in no solution.
    stays = cost - least[choices.expert] <= spare
    kept = _Choices(expert=choices.expert[stays], count=choices.count[stays], part=choices.part[:, stays])
    return _whole(kept, len(load), slots, work)


def _choices(load: Loads, slots: int, gpus: int, limit: float) -> _Choices | None:
    least = np.maximum(np.ceil(load / limit - 1e-9), 1).astype(np.int64)
    spare = slots - int(least.sum())
    if spare < 0 or least.max() > gpus:
        return None
    more = np.minimum(spare, gpus - least)
    expert = np.repeat(np.arange(len(load)), more + 1)
    start = np.concatenate([[0], np.cumsum(more + 1)[:-1]])
    count = least[expert] + np.arange(len(expert)) - start[expert]
    replica = load[expert] / count
    others = slots // gpus - 1
    top = limit / (2 * max(others, 1))
    small = np.unique(replica[replica < top])
    levels = np.append(np.quantile(small, np.linspace(0, 1, _LEVELS)) if len(small) else [], top)
    u = np.unique(levels)[:, None]
    part = count * (np.maximum(0, replica + others * u - limit) - np.maximum(0, u - replica))
    return _Choices(expert=expert, count=count, part=part)


def _multipliers(choices: _Choices, experts: int) -> Loads:
    """Multipliers of the conditions in the linear programme of the fewest slots over fractional choices.

    Any multipliers that are not negative give a bound on the slots. Where not even a fractional choice keeps
    to the conditions, the multipliers show that, scaled so that they need more slots than there could be.
    """
    from ortools.linear_solver import linear_solver_pb2, pywraplp

    model = linear_solver_pb2.MPModelProto()
    infinity = float("inf")
    for count in choices.count.tolist():
        model.variable.add(lower_bound=0, upper_bound=infinity, objective_coefficient=count)
    # One unit of excess costs more than any slots: the multipliers stay finite.
    model.variable.add(lower_bound=0, upper_bound=infinity, objective_coefficient=_EXCESS_COST)
    ends = np.searchsorted(choices.expert, np.arange(experts + 1)).tolist()
    for start, end in pairwise(ends):
        model.constraint.add(
            lower_bound=1, upper_bound=1, var_index=range(start, end), coefficient=[1.0] * (end - start)
        )
    for part in choices.part:
        some = np.flatnonzero(part)
        model.constraint.add(
            lower_bound=-infinity,
            upper_bound=0,
            var_index=[*some.tolist(), len(choices.count)],
            coefficient=[*part[some].tolist(), -1.0],
        )
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.LoadModelFromProto(model)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return np.zeros(len(choices.part))
    rows = solver.constraints()[experts:]
    return np.asarray(np.maximum([-row.dual_value() for row in rows], 0.0), dtype=np.float64)


def _whole(choices: _Choices, experts: int, slots: int, work: float) -> Slots | bool:
    """CP-SAT over whole choices; coefficients are rounded so that nothing possible is lost."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    y = [model.new_bool_var("") for _ in choices.expert]
    by_expert: list[list[int]] = [[] for _ in range(experts)]
    for i, e in enumerate(choices.expert.tolist()):
        by_expert[e].append(i)
    if not all(by_expert):
        return True
    for chosen in by_expert:
        model.add_exactly_one([y[i] for i in chosen])
    model.add(cp_model.LinearExpr.weighted_sum(y, choices.count.tolist()) == slots)
    for part in np.floor(choices.part * _UNIT).astype(np.int64):
        some = np.flatnonzero(part).tolist()
        model.add(cp_model.LinearExpr.weighted_sum([y[i] for i in some], part[some].tolist()) <= 0)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    solver.parameters.cp_model_probing_level = 0
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return True
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if status != cp_model.UNKNOWN:
            raise RuntimeError(f"CP-SAT ended with {solver.status_name(status)} on replica counts")
        return False
    counts = np.zeros(experts, dtype=np.int64)
    for i, e in enumerate(choices.expert.tolist()):
        if solver.value(y[i]):
            counts[e] = choices.count[i]
    return counts


def pair_bound(load: Loads, slots: int, gpus: int, keep: int = 12) -> CountBound | None:
    """For two slots per GPU: the least over all counts of the best pairing, and counts that reach it.

    Of replicas in falling order, first with last and so on is the pairing with the smallest largest sum (an
    exchange argument). It may put an expert twice on a GPU, so it is a bound. None where counts are too many.
    """
    experts, spare = len(load), slots - len(load)
    if slots != 2 * gpus or comb(slots - 1, experts - 1) > _MOST_COUNTS:
        return None
    marks = np.array(list(combinations(range(slots - 1), experts - 1)), dtype=np.int64).reshape(
        -1, experts - 1
    )
    edges = np.pad(marks, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, slots - 1)))
    counts = np.diff(edges, axis=1)
    counts = counts[(counts <= min(gpus, spare + 1)).all(axis=1)]
    order = np.argsort(-load / counts, axis=1, kind="stable")
    taken = np.take_along_axis(counts, order, axis=1)
    shares = np.take_along_axis(load / counts, order, axis=1)
    place = np.arange(slots)
    which = (place[None, :, None] >= np.cumsum(taken, axis=1)[:, None, :]).sum(axis=2)
    laid = np.take_along_axis(shares, which, axis=1)
    worst = (laid + laid[:, ::-1]).max(axis=1)
    best = np.argsort(worst, kind="stable")[:keep]
    return CountBound(bound=float(worst[best[0]]) * (1 - 1e-12), counts=tuple(counts[best]))

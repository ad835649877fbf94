"""Certified lower bounds on the balance of one layer: no placement of these loads is below them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import ROUNDING
from meshwright.planner.experts.packing import greedy_counts
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.experts.problem import Slots as Counts
from meshwright.planner.solvers.programmes import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


def balance_bound(loads: Loads, slots: int, gpus: int) -> Loads:
    """The larger of the mean and the best largest replica, whose counts are exact.

    Parameters
    ----------
    loads
        [rows, windows, experts], at least 0, in any unit. A window's bound holds for the worst window too.
    slots
        Slots of all GPUs.
    gpus
        GPUs, a divisor of `slots`.

    Returns
    -------
    Loads
        Bound of the largest GPU load [rows], in the unit of the loads.
    """
    rows, windows, experts = loads.shape
    flat = loads.reshape(rows * windows, experts)
    largest_replica = (flat / greedy_counts(flat, slots, gpus)).max(axis=1)
    bound = np.maximum(flat.sum(axis=1) / gpus, largest_replica)
    return np.asarray(bound.reshape(rows, windows).max(axis=1))


def least_counts(load: Loads, slots: int, gpus: int, limit: float) -> tuple[Counts, int] | None:
    """Replicas that each expert needs so that its GPUs stay within `limit`, and slots to spare; or None.

    An expert of load w with c replicas has c GPUs, whose other (m - 1) c slots hold at least the smallest
    replicas there are: c limit >= w + least((m - 1) c). Spare replicas may split small experts: s of them
    lower a sum of n smallest replicas to no less than that of the n - s smallest unsplit ones. Needs leave
    fewer to spare, which raises the needs: repeated until nothing changes.

    Parameters
    ----------
    load
        Of each expert, [experts].
    slots
        In all.
    gpus
        That they are divided over, evenly.
    limit
        Largest load of a GPU, in the unit of the loads.
    """
    other_slots = slots // gpus - 1
    counts = np.maximum(np.ceil(load / limit - 1e-9), 1).astype(np.int64)
    while True:
        spare = slots - int(counts.sum())
        if spare < 0 or counts.max() > gpus:
            return None
        replicas_by_load = np.sort(np.repeat(load / counts, counts))
        smallest_sums = np.concatenate([[0.0], np.cumsum(replicas_by_load)])
        extra = np.arange(spare + 1)
        replicas = counts[:, None] + extra
        unsplit = np.clip(other_slots * replicas - (spare - extra), 0, len(replicas_by_load))
        fits = (replicas <= gpus) & (
            replicas * limit * (1 + 1e-12) >= load[:, None] + smallest_sums[unsplit]
        )
        if not fits.any(axis=1).all():
            return None
        added = fits.argmax(axis=1)
        if not added.any():
            return counts, spare
        counts = counts + added


def partitions(groups: int, nodes: int) -> int:
    """Ways to split groups into `nodes` unordered sets of one size.

    Parameters
    ----------
    groups
        Things to split, a multiple of `nodes`.
    nodes
        Number of sets, from 1.
    """
    size, ways, remaining = groups // nodes, 1, groups
    for _ in range(nodes):
        ways *= comb(remaining - 1, size - 1)
        remaining -= size
    return ways


# Two slots a GPU: replica counts that can be paired within a limit, or the proof that there are none.
#
# Of replicas in falling order, first with last and so on is the pairing with the smallest largest sum (an
# exchange argument). Every pair keeps to a limit T exactly if, for each size h above T / 2, replicas of h or
# more are no more than those of T - h or less, which they need beside them:
#
#     sum_e c_e ([w_e / c_e >= h] - [w_e / c_e <= T - h]) <= 0    for every h above T / 2,
#
# linear in the choice of one count for each expert (`count_bound` has what holds for more slots). CP-SAT
# chooses how many experts of equal load get each count. Where choices are many, replicas of at most SMALL T
# are one choice of an expert and count as nothing, with as many more as it may have: it is still a bound.
# That two replicas of an expert share no GPU is left out: a limit that is ruled out stays so, one that is
# not may be missed.


SMALL = 0.04
"""Of the limit: replicas below fit beside nearly everything."""
_MOST_CHOICES = 500
"""Above, CP-SAT does not find out: with as many loads as experts, most of them different."""


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
        """The choices; replicas of at most `small` of the limit, above 0, are one choice of an expert.

        Parameters
        ----------
        load
            Of each expert, [experts].
        limit
            Largest load of a GPU, in the unit of the loads.
        fewest
            Replicas that each expert needs at the least, [experts].
        most
            Of any expert.
        small
            Share of the limit up to which replicas count as nothing; 0 where every count is a choice.
        """
        values, kind_of = np.unique(load, return_inverse=True)
        rows: list[tuple[int, int, float, int]] = []
        for kind, value in enumerate(values.tolist()):
            first = int(fewest[kind_of == kind].min())
            last = min(max(int(np.ceil(value / (small * limit))), first), most) if small else most
            rows += [(kind, c, value / c, 0) for c in range(first, last)]
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
        heavy = np.unique(self.replica[self.replica > limit / 2 * (1 + ROUNDING)])[:, None]
        is_light = self.replica <= (limit - heavy) * (1 + ROUNDING) + limit * ROUNDING
        return np.asarray(((self.replica >= heavy).astype(np.int64) - is_light) * self.count)


def paired_counts(
    load: Loads, slots: int, gpus: int, limit: float, work: float
) -> tuple[Slots, ...] | None:
    """Counts whose replicas pair within `limit`; None where there are none, () where it stays open.

    Parameters
    ----------
    load
        Of each expert, [experts].
    slots
        In all.
    gpus
        That they are divided over, evenly.
    limit
        Largest load of a GPU, in the unit of the loads.
    work
        CP-SAT's deterministic time.
    """
    need = least_counts(load, slots, gpus, limit)
    if need is None:
        return None
    most_replicas = min(gpus, slots - len(load) + 1)
    choices = _Choices.of(load, limit, need[0], most_replicas)
    if len(choices.count) > _MOST_CHOICES:
        choices = _Choices.of(load, limit, need[0], most_replicas, SMALL)
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
    extra = model.new_int_var(0, slots, "")
    for kind, size in enumerate(sizes.tolist()):
        model.add(sum(take[i] for i in np.flatnonzero(choices.kind == kind)) == size)
    weighted = cp_model.LinearExpr.weighted_sum
    model.add(weighted(take, choices.count.tolist()) + extra == slots)
    model.add(extra <= weighted(take, choices.more.tolist()))
    for condition in conditions:
        model.add(weighted(take, condition.tolist()) <= extra)
    values = solved(model, [*take, extra], work)
    if values is None or isinstance(values, bool):
        return values
    return values[:-1], int(values[-1])


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


# A sharper bound where hot experts fill GPUs: no replica counts leave room for the slots to be filled.
#
# A GPU with load at most T and m slots that holds a replica of load r carries m - 1 others. For any u up to
# T / (2 (m - 1)), a replica p has p >= u - max(0, u - p), so the others' sum of max(0, u - p) is at least r
# + (m - 1) u - T. At most one replica of a GPU has r > T - (m - 1) u (two would exceed T), and it is none of
# those below u. Summed over GPUs, with c_e replicas of expert e of load w_e / c_e:
#
#     sum_e c_e (max(0, w_e / c_e + (m - 1) u - T) - max(0, u - w_e / c_e)) <= 0    for every such u,
#
# linear in the choice of one count for each expert. Experts that T does not force to be replicated and that
# are below T / 2 are never hot: of k replicas more among them, none fill more than k for the smallest of
# them do, because h(c) = max(0, c u - w) rises faster with every c and falls with w. They are one choice,
# that of k. Counts also fill the slots exactly. CP-SAT finds counts that keep to the conditions at some u;
# the u that they break most is added, until there are no counts, so that T is below every placement, or no
# such u.


_LEVELS = 8
_CLOSE = 1.0005
_UNIT = 1_000_000
_MOST_COUNT_CHOICES = 4000
_MOST_ADDED = 30
_MOST_COUNTS = 50_000


@dataclass(frozen=True, kw_only=True)
class CountBound:
    """A load that no placement is below, and counts that keep to the conditions a little above it."""

    bound: float
    counts: tuple[Slots, ...]


def count_bound(
    load: Loads, slots: int, gpus: int, *, low: float, high: float, work: float, steps: int = 4
) -> CountBound:
    """Bisects between `low`, a bound, and `high`, just under a load that is reached, for loads [experts].

    The counts of the lowest limit come first.

    Parameters
    ----------
    load
        Of each expert, [experts].
    slots
        In all.
    gpus
        That they are divided over, evenly.
    low
        A load that no placement is below.
    high
        Just under a load that is reached.
    work
        CP-SAT's deterministic time for each limit.
    steps
        Limits that are tried, at most.
    """
    by_limit: list[tuple[Slots, ...]] = []
    limit = high
    for step in range(steps):
        answer = paired_counts(load, slots, gpus, limit, work) if slots == 2 * gpus else ()
        if answer == ():
            answer = _counts_for(load, slots, gpus, limit, work)
        if answer is None:
            low = limit
        else:
            high = limit
            by_limit.append(answer)
        if high <= low * _CLOSE:
            break
        # Often `low` is all that can be shown: that is asked before halving.
        limit = low * _CLOSE if step == 0 else (low + high) / 2
    return CountBound(
        bound=low,
        counts=tuple(counts for same_limit in reversed(by_limit) for counts in same_limit),
    )


def _counts_for(
    load: Loads, slots: int, gpus: int, limit: float, work: float
) -> tuple[Slots, ...] | None:
    """Counts that keep to the conditions at `limit`; None where there are none, () where it stays open."""
    need = least_counts(load, slots, gpus, limit)
    if need is None:
        return None
    parts = _Parts.of(load, (slots, gpus), limit, need)
    if parts is None:
        return ()
    levels = parts.first_levels()
    for _ in range(_MOST_ADDED):
        answer = _counts_at(parts, levels, work)
        if answer is None or isinstance(answer, bool):
            return None if answer is None else ()
        chosen, extra_cold = answer
        broken = parts.most_broken(chosen, extra_cold)
        if broken is None or broken in levels:
            return parts.counts(chosen, extra_cold, gpus)
        levels = np.append(levels, broken)
    return ()


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What each choice adds to the condition of a level u."""

    experts: int
    hot: NDArray[np.int64]
    """Experts with a choice of their own."""
    cold: NDArray[np.int64]
    """The others, by rising load."""
    cold_load: Loads
    start: NDArray[np.int64]
    """First choice of every hot expert, and the number of choices."""
    count: NDArray[np.int64]
    replica: Loads
    spare: int
    """Replicas to give to hot experts above the fewest, or to cold ones."""
    extra: NDArray[np.int64]
    other_slots: int
    limit: float

    @classmethod
    def of(
        cls, load: Loads, sizes: tuple[int, int], limit: float, need: tuple[Slots, int]
    ) -> _Parts | None:
        """The parts for (slots, GPUs) and what `least_counts` says; None where the conditions say nothing.

        Parameters
        ----------
        load
            Of each expert, [experts], in units of a GPU's mean load.
        sizes
            (slots, GPUs), the slots a multiple of the GPUs.
        limit
            Largest load of a GPU, in the unit of the loads.
        need
            (replicas of each expert at the least, slots to spare) at this limit.
        """
        (slots, gpus), (fewest, spare) = sizes, need
        is_hot = (load > limit / 2) | (fewest > 1)
        hot, cold = np.flatnonzero(is_hot), np.flatnonzero(~is_hot)
        ways = np.minimum(spare, gpus - fewest[hot]) + 1
        if slots // gpus < 2 or not len(hot) or not len(cold) or ways.sum() > _MOST_COUNT_CHOICES:
            return None
        start = np.concatenate([[0], np.cumsum(ways)])
        extra = np.arange(start[-1]) - np.repeat(start[:-1], ways)
        count = np.repeat(fewest[hot], ways) + extra
        cold = cold[np.argsort(load[cold], kind="stable")]
        return cls(
            experts=len(load),
            hot=hot,
            cold=cold,
            cold_load=load[cold],
            start=start,
            count=count,
            replica=np.repeat(load[hot], ways) / count,
            spare=spare,
            extra=extra,
            other_slots=slots // gpus - 1,
            limit=limit,
        )

    @property
    def top(self) -> float:
        """The highest level."""
        return self.limit / (2 * self.other_slots)

    def at(self, levels: Loads) -> tuple[Loads, Loads]:
        """Parts of the choices [levels, choices], of k replicas more for cold ones [levels, spare + 1].

        Parameters
        ----------
        levels
            u of the conditions, above 0 and at most `top`, [levels].
        """
        u = levels[:, None]
        over = np.maximum(0, self.replica + self.other_slots * u - self.limit)
        hot = self.count * (over - np.maximum(0, u - self.replica))
        rest = np.maximum(0, u - self.cold_load[1:]).sum(axis=1, keepdims=True)
        smallest = np.maximum(0, (1 + np.arange(self.spare + 1)) * u - self.cold_load[0])
        return hot, -(rest + smallest)

    def first_levels(self) -> Loads:
        small = self.cold_load[self.cold_load < self.top]
        levels = np.quantile(small, np.linspace(0, 1, _LEVELS)) if len(small) else np.zeros(0)
        return np.unique(np.append(levels, self.top))

    def most_broken(self, chosen: NDArray[np.int64], extra_cold: int) -> float | None:
        """The level whose condition is broken most: between corners of its two sides it is linear.

        Parameters
        ----------
        chosen
            Choice of each hot expert, as indices into `count`, [hot].
        extra_cold
            Replicas more among the cold experts, 0 to `spare`.
        """
        corners = np.concatenate(
            [
                (self.limit - self.replica[chosen]) / self.other_slots,
                self.replica[chosen],
                self.cold_load,
                [self.cold_load[0] / (1 + extra_cold), self.top],
            ]
        )
        levels = np.unique(corners[(corners > 0) & (corners <= self.top)])
        hot, cold = self.at(levels)
        broken = hot[:, chosen].sum(axis=1) + cold[:, extra_cold]
        worst = int(broken.argmax())
        return float(levels[worst]) if broken[worst] > 1 / _UNIT else None

    def counts(self, chosen: NDArray[np.int64], extra_cold: int, gpus: int) -> tuple[Slots, ...]:
        """Counts with `more` replicas for the smallest expert, one each for the smallest, or between.

        Parameters
        ----------
        chosen, extra_cold
            As `most_broken` takes them.
        gpus
            Counts with more replicas of one expert are left out.
        """
        base = np.ones(self.experts, dtype=np.int64)
        base[self.hot] = self.count[chosen]
        by_content: dict[bytes, Slots] = {}
        for piled in {extra_cold, 0, extra_cold // 2, max(extra_cold - 1, 0)}:
            counts = base.copy()
            counts[self.cold[0]] += piled
            rest = (
                self.cold[: extra_cold - piled]
                if piled == 0
                else self.cold[1 : 1 + extra_cold - piled]
            )
            counts[rest] += 1
            if counts.max() <= gpus and len(rest) == extra_cold - piled:
                by_content[counts.tobytes()] = counts
        return tuple(by_content.values())


def _counts_at(
    parts: _Parts, levels: Loads, work: float
) -> tuple[NDArray[np.int64], int] | bool | None:
    """Choices and replicas more for cold experts; None if there are none, False if it was not found out.

    Coefficients are rounded so that nothing possible is lost.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    y = [model.new_bool_var("") for _ in parts.count]
    z = [model.new_bool_var("") for _ in range(parts.spare + 1)]
    one_of_each(model, y, parts.start)
    model.add_exactly_one(z)
    every = y + z
    extra_replicas = [*parts.extra.tolist(), *range(parts.spare + 1)]
    model.add(cp_model.LinearExpr.weighted_sum(every, extra_replicas) == parts.spare)
    for part in np.floor(np.concatenate(parts.at(levels), axis=1) * _UNIT).astype(np.int64):
        model.add(cp_model.LinearExpr.weighted_sum(every, part.tolist()) <= 0)
    values = solved(model, every, work)
    if values is None or isinstance(values, bool):
        return values
    true = np.flatnonzero(values)
    return true[true < len(y)], int(true[-1]) - len(y)


def one_of_each(
    model: cp_model.CpModel, y: list[cp_model.IntVar], start: NDArray[np.int64]
) -> None:
    """One choice of every expert; `start` has the first of each, and their number.

    Parameters
    ----------
    model
        Gets the constraints.
    y
        Literals of all choices, those of an expert side by side.
    start
        Index of the first literal of each expert, and the number of all literals at the end.
    """
    for begin, end in pairwise(start.tolist()):
        model.add_exactly_one(y[begin:end])


def solved(
    model: cp_model.CpModel, variables: list[cp_model.IntVar], work: float
) -> NDArray[np.int64] | bool | None:
    """Values of variables in a solution; None if there is none, False if it was not found out.

    Parameters
    ----------
    model
        With an objective or without.
    variables
        Whose values are wanted.
    work
        CP-SAT's deterministic time.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    solver = repeatable_solver(0, work=work)
    solver.parameters.cp_model_probing_level = 0
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status == cp_model.UNKNOWN:
        return False
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(f"CP-SAT ended with {solver.status_name(status)} on replica counts")
    return np.array([solver.value(variable) for variable in variables], dtype=np.int64)


def all_counts(experts: int, slots: int, gpus: int) -> Counts:
    """Every way to fill the slots with at least one replica of each expert and at most one on a GPU.

    Parameters
    ----------
    experts
        At least 1, at most `slots`.
    slots
        Of all GPUs.
    gpus
        The most replicas of an expert.

    Returns
    -------
    Counts
        [ways, experts].
    """
    marks = np.array(list(combinations(range(slots - 1), experts - 1)), dtype=np.int64)
    edges = np.pad(marks, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, slots - 1)))
    counts = np.diff(edges, axis=1)
    return np.asarray(counts[(counts <= gpus).all(axis=1)])


def pair_bound(load: Loads, slots: int, gpus: int, keep: int = 12) -> CountBound | None:
    """For two slots per GPU: the least over all counts of the best pairing, and counts that reach it.

    Of replicas in falling order, first with last and so on is the pairing with the smallest largest sum (an
    exchange argument). It may put an expert twice on a GPU, so it is a bound. None where counts are too many.

    Parameters
    ----------
    load
        Of each expert, [experts].
    slots
        In all.
    gpus
        That they are divided over, evenly.
    keep
        Most counts that come back, the best first.
    """
    experts = len(load)
    if slots != 2 * gpus or comb(slots - 1, experts - 1) > _MOST_COUNTS:
        return None
    counts = all_counts(experts, slots, gpus)
    order = np.argsort(-load / counts, axis=1, kind="stable")
    taken = np.take_along_axis(counts, order, axis=1)
    shares = np.take_along_axis(load / counts, order, axis=1)
    place = np.arange(slots)
    which = (place[None, :, None] >= np.cumsum(taken, axis=1)[:, None, :]).sum(axis=2)
    laid = np.take_along_axis(shares, which, axis=1)
    worst = (laid + laid[:, ::-1]).max(axis=1)
    best = np.argsort(worst, kind="stable")[:keep]
    return CountBound(bound=float(worst[best[0]]) * (1 - 1e-12), counts=tuple(counts[best]))

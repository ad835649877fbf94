"""Schedules made job by job: what CP-SAT starts from, and often all there is to find.

Jobs are taken in some order. Each gets the size and the earliest start that make it least late, then end
before a wished makespan, then take the least units times ticks (serial schedule generation: Kolisch and
Hartmann 1999, Heuristic algorithms for the resource-constrained project scheduling problem, section 2.1).
The first orders are by slack, by due date, by length and by area; then jobs of the best order are moved.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.planner.solvers.clock import is_over

PATIENCE = 20
"""Orders in a row without a better schedule, for each job, after which the search ends."""
Values = tuple[int, ...]
"""What a schedule is judged by, in order: lateness of each priority that has due dates, last end."""


@dataclass(frozen=True, kw_only=True)
class TimedJob:
    """What the schedule knows of a job; time is in ticks."""

    demands: tuple[int, ...]
    """Units of each size."""
    ticks: tuple[int, ...]
    """Length of each size."""
    due: int | None
    late_weight: int
    """What a tick past `due` counts."""
    priority: int

    @property
    def shortest(self) -> int:
        """Ticks at its fastest size."""
        return min(self.ticks)

    @property
    def least_area(self) -> int:
        """Units times ticks at the size that takes the least."""
        return min(demand * ticks for demand, ticks in zip(self.demands, self.ticks, strict=True))

    def lateness(self, end: int) -> int:
        """Weighted ticks past the due date."""
        return 0 if self.due is None else self.late_weight * max(0, end - self.due)


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """When a job runs, and at which of its sizes."""

    size: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ListSchedule:
    """The best schedule found, and what no schedule is below."""

    runs: tuple[TimedRun, ...]
    values: Values
    bounds: Values


def due_priorities(jobs: Sequence[TimedJob]) -> list[int]:
    """Priorities of jobs with due dates, highest first: one lateness each."""
    return sorted({job.priority for job in jobs if job.due is not None}, reverse=True)


def values_of(jobs: Sequence[TimedJob], runs: Sequence[TimedRun]) -> Values:
    """What a schedule is judged by."""
    pairs = list(zip(jobs, runs, strict=True))
    late = (
        sum(job.lateness(run.end) for job, run in pairs if job.priority == priority)
        for priority in due_priorities(jobs)
    )
    return *late, max(run.end for run in runs)


def least_values(jobs: Sequence[TimedJob], units: int) -> Values:
    """Lower bounds on each value: every job at its fastest from the start; the last end also by least areas
    that are packed without a gap.
    """
    alone = [TimedRun(size=0, start=0, end=job.shortest) for job in jobs]
    *late, longest = values_of(jobs, alone)
    packed = -(-sum(job.least_area for job in jobs) // units)
    return *late, max(longest, packed)


def list_schedule(
    jobs: Sequence[TimedJob], units: int, *, seed: int, most_runs: int
) -> ListSchedule:
    """The best schedule of many orders.

    Parameters
    ----------
    jobs
        At least one; each has a size that fits.
    units
        That jobs share.
    seed
        Of the changes of order.
    most_runs
        Runs to be placed over all orders: the work, which does not depend on the machine. The search ends
        before that where nothing can be better, or with the command's time limit.
    """
    bounds = least_values(jobs, units)
    best: tuple[Values, list[TimedRun]] | None = None
    order: list[int] = []
    orders = _orders(jobs, order, random.Random(seed))
    in_vain = 0
    for _ in range(max(4, most_runs // len(jobs))):
        tried = next(orders)
        runs = _runs(jobs, tried, units, bounds[-1])
        values = values_of(jobs, runs)
        in_vain = 0 if best is None or values < best[0] else in_vain + 1
        if best is None or values <= best[0]:
            best, order[:] = (values, runs), tried
        if values == bounds or in_vain == PATIENCE * len(jobs) or is_over():
            break
    assert best is not None
    return ListSchedule(runs=tuple(best[1]), values=best[0], bounds=bounds)


def _orders(
    jobs: Sequence[TimedJob], best: Sequence[int], chance: random.Random
) -> Iterator[list[int]]:
    """The first orders, then changes of the best so far."""
    indices = range(len(jobs))

    def slack(index: int) -> tuple[bool, int]:
        job = jobs[index]
        return job.due is None, (job.due or 0) - job.shortest

    def due(index: int) -> tuple[bool, int]:
        return jobs[index].due is None, jobs[index].due or 0

    keys = (slack, due, lambda index: -jobs[index].shortest, lambda index: -jobs[index].least_area)
    for key in keys:
        by_key = sorted(indices, key=key)
        yield sorted(by_key, key=lambda index: -jobs[index].priority)
    while True:
        order = list(best)
        for _ in range(chance.choice((1, 1, 2, 4))):
            moved = order.pop(chance.randrange(len(order)))
            order.insert(chance.randrange(len(order) + 1), moved)
        yield order


def _runs(
    jobs: Sequence[TimedJob], order: Sequence[int], units: int, wished_end: int
) -> list[TimedRun]:
    """Every job's run, placed in this order."""
    profile = _Profile(units)
    runs: dict[int, TimedRun] = {}
    for index in order:
        job = jobs[index]
        best: tuple[tuple[int, int, int, int], TimedRun] | None = None
        for size, (demand, ticks) in enumerate(zip(job.demands, job.ticks, strict=True)):
            if demand > units:
                continue
            start = profile.earliest_start(demand, ticks)
            end = start + ticks
            rank = (job.lateness(end), max(0, end - wished_end), demand * ticks, end)
            if best is None or rank < best[0]:
                best = rank, TimedRun(size=size, start=start, end=end)
        assert best is not None
        runs[index] = best[1]
        profile.add(best[1], job.demands[best[1].size])
    return [runs[index] for index in range(len(jobs))]


class _Profile:
    """Units in use over time: `_used[i]` from `_times[i]` to the next; in the end none."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._times = [0]
        self._used = [0]

    def earliest_start(self, demand: int, ticks: int) -> int:
        """First moment from which so many units are free for so long."""
        most_used = self._units - demand
        start: int | None = None
        for begin, used in zip(self._times, self._used, strict=True):
            if start is not None and begin - start >= ticks:
                return start
            if used > most_used:
                start = None
            elif start is None:
                start = begin
        assert start is not None, "in the end nothing is in use"
        return start

    def add(self, run: TimedRun, demand: int) -> None:
        """Takes units for a run."""
        for index in range(self._index(run.start), self._index(run.end)):
            self._used[index] += demand

    def _index(self, moment: int) -> int:
        """Of the segment that begins there, which is made where there is none."""
        index = bisect_left(self._times, moment)
        if index == len(self._times) or self._times[index] != moment:
            self._times.insert(index, moment)
            self._used.insert(index, self._used[index - 1])
        return index

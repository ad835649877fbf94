"""What solving a mapping problem gives, and the best mapping on the way there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from meshwright.planner.mapping.assign import assignment_of
from meshwright.planner.mapping.problem import IntArray, Loads, MappingProblem, loads_of
from meshwright.planner.solvers.clock import is_over, remaining_s

MappingObjective = Literal["traffic", "busiest", "spread"]
PROVEN = 1e-6
"""Relative difference of price and bound below which they count as equal: sums of floats."""


@dataclass(frozen=True, kw_only=True)
class MappingRound:
    """One integer programme: its columns, and what came of it."""

    columns: int
    price_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class MappingSolution:
    """An assignment with its certificate. `bound_s` holds for every assignment."""

    objective: MappingObjective
    assignment: IntArray
    loads: Loads
    hostname_loads: Loads
    bound_s: float
    rounds: tuple[MappingRound, ...]
    wall_s: float

    @property
    def price_s(self) -> float:
        """The objective: seconds of all up-links, or of the busiest."""
        return self.loads.busiest_s if self.objective == "busiest" else self.loads.total_s

    @property
    def hostname_s(self) -> float:
        """The objective in hostname order."""
        loads = self.hostname_loads
        return loads.busiest_s if self.objective == "busiest" else loads.total_s

    @property
    def gap(self) -> float:
        """Of the price."""
        return (self.price_s - self.bound_s) / self.price_s if self.price_s > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no assignment is better."""
        return self.gap <= PROVEN


class Incumbent:
    """The assignment with the least traffic so far."""

    def __init__(self, problem: MappingProblem) -> None:
        self._problem = problem
        self.assignment = problem.hostname_assignment()
        self.price_s = loads_of(problem, self.assignment).total_s

    def offer(self, counts: IntArray | None) -> None:
        """Takes an assignment with these counts if it is better."""
        if counts is not None:
            self.consider(assignment_of(self._problem, counts))

    def consider(self, assignment: IntArray) -> None:
        """Takes an assignment if it is better."""
        price = loads_of(self._problem, assignment).total_s
        if price < self.price_s * (1 - 1e-12):
            self.assignment, self.price_s = assignment, price


class WorkLimits:
    """Where a search ends: processor seconds, so that a busy machine changes no answer but that of a command
    with a time limit.
    """

    def __init__(self, time_limit_s: float) -> None:
        now, self.limit_s = time.process_time(), time_limit_s
        self._start = time.monotonic()
        self._deadline, self._relaxed = now + time_limit_s, now + 0.4 * time_limit_s

    @property
    def left_s(self) -> float:
        """Processor seconds left."""
        return min(self._deadline - time.process_time(), remaining_s())

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds since the beginning."""
        return time.monotonic() - self._start

    def relaxed(self) -> bool:
        """Whether relaxations should end: at 40 % of the limit."""
        return time.process_time() > self._relaxed or is_over()

"""The fastest pipeline through several parts of a cluster: bounds, exact prices, and a CP-SAT model.

Kernels come in the order of their bounds. Those of the least bounds stand in a CP-SAT model together; its
choice is priced exactly, and the model learns the price, until it chooses what is priced. Then none of its
kernels is faster, and the next ones follow, until no kernel is left whose bound is below the price.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from meshwright.errors import InternalError, OutOfTimeError
from meshwright.planner.mixed.kernel import MixedKernel
from meshwright.planner.mixed.model import MixedChoice, MixedModel
from meshwright.planner.mixed.promising import KernelMaker, PromisingRow, promising_rows
from meshwright.planner.mixed.request import MixedRequest
from meshwright.planner.search.params import SearchParams


@dataclass(frozen=True, kw_only=True)
class MixedParams:
    """How far the search goes at a time."""

    first_priced: int = 24
    """Kernels priced by their bounds alone, so that there is a price to beat."""
    together: int = 64
    """Kernels in one model that are not priced."""
    fewest_beside: int = 4
    """Kernels priced beside a model's choice: a price takes a twentieth of a model's time."""
    most_beside: int = 32
    """Kernels priced beside a model's choice, where choices bring nothing for long."""


@dataclass
class MixedOutcome:
    """How a search ended, and what it looked at."""

    status: str = "infeasible"
    best: MixedKernel | None = None
    lower_bound_s: float | None = None
    """No pipeline through all parts is faster; None where nothing is known."""
    rows: int = 0
    """Layouts with ranks on each part whose bound was below the price to beat."""
    priced: int = 0
    """Kernels priced exactly."""
    rounds: int = 0
    """CP-SAT models solved."""
    kernels: int = 0
    """In the last CP-SAT model."""
    model_bound_s: float | None = None
    """What the last CP-SAT model proved of its kernels."""

    @property
    def price_s(self) -> float:
        """Of the best kernel; infinite without one."""
        return inf if self.best is None else self.best.price_s


@dataclass(eq=False)
class MixedSearch:
    """One search."""

    request: MixedRequest
    cutoff_s: float
    """What a plan must beat: the price of the best plan on a single part; infinite where there is none."""
    deadline: float = inf
    """On the clock of `time.monotonic`."""
    params: MixedParams = field(default_factory=MixedParams)
    progress: Callable[[str], None] = lambda _: None
    outcome: MixedOutcome = field(default_factory=MixedOutcome)
    _open: list[MixedKernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._maker = KernelMaker(self.request)

    def run(self) -> MixedOutcome:
        """The fastest pipeline through all parts that beats the cutoff, proven where time allows."""
        outcome, rows, position = self.outcome, [], 0
        try:
            rows = promising_rows(self.request, self.cutoff_s, self._look_at_clock)
            outcome.rows = len(rows)
            while position < len(rows) and rows[position].bound_s < self._limit_s:
                position = self._take_in(rows, position)
                self._close()
            outcome.lower_bound_s = self._limit_s
            outcome.status = "optimal" if outcome.best is not None else "infeasible"
        except OutOfTimeError:
            left = [each.bound_s for each in self._open]
            left += [row.bound_s for row in rows[position : position + 1]]
            outcome.lower_bound_s = min([*left, self._limit_s]) if rows else None
            outcome.status = "feasible" if outcome.best is not None else "unknown"
        if outcome.lower_bound_s == inf:
            outcome.lower_bound_s = None
        return outcome

    @property
    def _limit_s(self) -> float:
        """What a kernel must beat."""
        return min(self.cutoff_s, self.outcome.price_s)

    def _look_at_clock(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTimeError

    def _take_in(self, rows: list[PromisingRow], position: int) -> int:
        """Makes kernels of the next rows; the first of all are priced at once. Returns the next position."""
        is_first = position == 0
        while position < len(rows) and len(self._open) < self.params.together:
            if rows[position].bound_s >= self._limit_s:
                break
            self._look_at_clock()
            row = rows[position]
            gains = self._maker.gains_by_grouping(row)
            if gains and self._maker.gains_by_offloading(row, self._limit_s):
                self._open.append(self._maker.kernel(row))
            position += 1
        if is_first:
            for kernel in self._open[: self.params.first_priced]:
                self._price(kernel)
        return position

    def _close(self) -> None:
        """Prices what models choose until the open kernels are proven not to beat the best price."""
        beside = self.params.fewest_beside
        while True:
            self._open = [
                each
                for each in self._open
                if each.is_open
                and each.bound_s < self._limit_s
                and self._maker.gains_by_offloading(each, self._limit_s)
            ]
            if not self._open:
                return
            self._look_at_clock()
            before_s = self._limit_s
            choice = self._chosen()
            if choice.status == "infeasible" or (
                choice.status == "optimal" and choice.kernel is self.outcome.best
            ):
                self._check(choice)
                self._open = []
                return
            if choice.kernel is None or not choice.kernel.is_open:
                self._price(self._open[0])  # the model was not solved within its work
            else:
                self._price(choice.kernel)
            for kernel in [each for each in self._open if each.is_open][:beside]:
                if kernel.bound_s < self._limit_s:
                    self._price(kernel)
            is_better = self._limit_s < before_s
            more = min(2 * beside, self.params.most_beside)
            beside = self.params.fewest_beside if is_better else more

    def _chosen(self) -> MixedChoice:
        best = self.outcome.best
        kernels = self._open if best is None else [best, *self._open]
        names = [self.request.name_of(part) for part in range(len(self.request.parts))]
        model = MixedModel(kernels, names, self._limit_s)
        choice = model.solve(self.request.first.seed, self.deadline, SearchParams())
        outcome = self.outcome
        outcome.rounds += 1
        outcome.kernels = len(kernels)
        outcome.model_bound_s = None if choice.bound_s == inf else choice.bound_s
        return choice

    def _check(self, choice: MixedChoice) -> None:
        """Raises InternalError where the solution is not the plan that was priced."""
        best = self.outcome.best
        if choice.kernel is None or best is None or best.price is None:
            return
        if choice.counts != best.price.counts:
            raise InternalError(
                f"the model deals layers out as {choice.counts}, the plan otherwise"
            )

    def _price(self, kernel: MixedKernel) -> None:
        """Prices a kernel exactly."""
        self._look_at_clock()
        kernel.price = kernel.best_split(self._limit_s)
        kernel.is_open = False
        self.outcome.priced += 1
        if kernel.price is not None:
            self.outcome.best = kernel
            self.progress(
                f"{kernel.price.step_time_s:.4g} s a step, {len(self._open)} kernels left"
            )

"""The fit behind `python -m benchmarks.calibrate`: which constants move, on which rows, and how far.

Minimises, over the free constants c with prior p and spread s,

    sum_rows rho(log(predicted / measured) / 0.03) + sum_c (log(c / p) / s)^2,    |log(c / p)| <= 3 s,

rho(z) = 2 (sqrt(1 + z^2) - 1), which is quadratic for errors below 3 % and linear beyond, so that a run that
went wrong does not bend the rest. The priors stay quadratic. Nothing else depends on the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.constants.rates import (
    Constants,
    as_run,
    device_prefixes,
    named_constants,
)
from meshwright.costmodel.constants.records import ConstantRecord, ConstantValue, effective_paths
from meshwright.costmodel.constants.stacks import framework_prefixes
from meshwright.costmodel.layout import Placement
from meshwright.costmodel.pipeline.split import Stages
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.planner.runs.prediction import arrangement
from meshwright.planner.runs.run_file import Run

NOISE = 0.03
"""Relative error up to which a row counts in full: releases with the same layout and flags differ by 2.6 % on average."""
MOST_SPREADS = 3.0
STEP = 1e-3
"""Forward difference, in the logarithm of a constant."""
SIGNIFICANT_DIGITS = 4
MOST_STEPS = 40
ENOUGH_GAIN = 1e-5
"""A step that gains less than this share of the sum is the last along these slopes."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class _Case:
    run: Run
    stages: Stages
    placement: Placement
    stack: tuple[str, str, str]
    """Device, architecture, software profile."""

    def step_time_s(self, constants: Constants) -> float:
        """As `estimate` has it, without the traffic."""
        context = make_context(self.run.workload, self.run.layout, self.placement, constants)
        return float(np.asarray(exact_step(context, self.stages).seconds))


@dataclass(frozen=True)
class Linearisation:
    """Predictions at some values, and how they move: `slopes` [rows, constants] of log seconds by log value."""

    seconds: Floats
    slopes: Floats


class Problem:
    """The rows of a calibration, with all that does not depend on the constants worked out once."""

    def __init__(self, runs: Sequence[Run], free: Sequence[ConstantRecord]) -> None:
        steps = [(run, run.measured.step_time_s) for run in runs if run.measured is not None]
        known = [run for run, step_s in steps if step_s is not None]
        self.runs = tuple(known)
        self.free = tuple(free)
        self.measured_s = np.array([step_s for _, step_s in steps if step_s is not None])
        self._cases = [_case(run) for run in known]

    @property
    def paths(self) -> tuple[str, ...]:
        """The free constants."""
        return tuple(record.path for record in self.free)

    @cached_property
    def start(self) -> Floats:
        """Logarithms of the values in the files."""
        return np.log([_number(record.value) for record in self.free])

    @cached_property
    def priors(self) -> Floats:
        """Logarithms of the priors."""
        return np.log([_number(record.prior) for record in self.free])

    @cached_property
    def spreads(self) -> Floats:
        """Widths of the priors, in the logarithm."""
        return np.array([_number(record.spread) for record in self.free])

    def values(self, logs: Floats) -> dict[str, float]:
        """Constants by path."""
        return {path: float(np.exp(x)) for path, x in zip(self.paths, logs, strict=True)}

    def predict(self, logs: Floats, rows: Bools | None = None) -> Floats:
        """Seconds of every row, or of those asked for, with the free constants at some values."""
        overrides, tables = self.values(logs), {}
        seconds = []
        for index, case in enumerate(self._cases):
            if rows is None or rows[index]:
                if case.stack not in tables:
                    tables[case.stack] = named_constants(*case.stack, overrides)
                constants = as_run(tables[case.stack], case.run.workload)
                seconds.append(case.step_time_s(constants))
        return np.array(seconds)

    @cached_property
    def reached(self) -> Bools:
        """Rows [rows, constants] whose device and software profile a constant belongs to; all for a shared one."""
        found = {stack: _effective(*stack) for stack in {case.stack for case in self._cases}}
        return np.array(
            [[path in found[case.stack] for path in self.paths] for case in self._cases], dtype=bool
        )

    @cached_property
    def touched(self) -> Bools:
        """Rows [rows, constants] whose prediction moves when a constant goes one spread up or down."""
        base = self.predict(self.start)
        out = np.zeros_like(self.reached)
        for column in range(len(self.free)):
            for sign in (1.0, -1.0):
                asked = self.reached[:, column] & ~out[:, column]
                moved = self._moved(self.start, column, sign * self.spreads[column])
                out[asked, column] = self.predict(moved, asked) != base[asked]
        return out

    def linearise(
        self, logs: Floats, columns: Sequence[int] | None = None, among: Bools | None = None
    ) -> Linearisation:
        """Predictions and their slopes at some values; `among` [rows, constants] are those not known to be 0."""
        masks = self.reached if among is None else among
        seconds = self.predict(logs)
        slopes = np.zeros((len(self._cases), len(self.free)))
        for column in range(len(self.free)) if columns is None else columns:
            rows = masks[:, column]
            # Away from the nearer bound, so that the point tried is one that the fit may take.
            step = STEP if logs[column] <= self.priors[column] else -STEP
            moved = self.predict(self._moved(logs, column, step), rows)
            slopes[rows, column] = np.log(moved / seconds[rows]) / step
        return Linearisation(seconds, slopes)

    def _moved(self, logs: Floats, column: int, step: float) -> Floats:
        out = logs.copy()
        out[column] += step
        return out


def _effective(device: str, architecture: str, framework: str) -> set[str]:
    """Paths of the constants that price a run on a device with a software profile."""
    of_device = effective_paths(*device_prefixes(device, architecture))
    of_framework = effective_paths(*framework_prefixes(framework))
    return {*of_device.values(), *of_framework.values(), *effective_paths("shared").values()}


def _number(value: ConstantValue | None) -> float:
    assert value is not None
    return float(value)


def _case(run: Run) -> _Case:
    stages, placement = arrangement(run)
    device = run.workload.cluster.device
    return _Case(run, stages, placement, (device.name, device.architecture, run.workload.framework))


def robust_loss(squares: Floats, rows: int) -> Floats:
    """rho, rho', rho'' of squared residuals [3, n]: soft l1 for the first `rows`, the square for the priors."""
    out = np.array([squares, np.ones_like(squares), np.zeros_like(squares)])
    z = 1.0 + squares[:rows]
    out[:, :rows] = 2.0 * (np.sqrt(z) - 1.0), z**-0.5, -0.5 * z**-1.5
    return out


@dataclass(frozen=True)
class _Objective:
    """The sum that a fit makes small, over some rows and constants of a problem."""

    problem: Problem
    rows: Bools
    columns: list[int]

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """Least and largest logarithm of each moving constant."""
        priors, width = (
            self.problem.priors[self.columns],
            MOST_SPREADS * self.problem.spreads[self.columns],
        )
        return priors - width, priors + width

    def residuals(self, log_seconds: Floats, logs: Floats) -> Floats:
        """Of the rows, then of the priors; both arguments for all rows and all constants."""
        errors = (log_seconds - np.log(self.problem.measured_s))[self.rows] / NOISE
        strays = (logs - self.problem.priors) / self.problem.spreads
        return np.concatenate([errors, strays[self.columns]])

    def value(self, log_seconds: Floats, logs: Floats) -> float:
        """The sum itself."""
        squares = self.residuals(log_seconds, logs) ** 2
        return float(robust_loss(squares, int(self.rows.sum()))[0].sum())

    def linear_optimum(self, log_seconds: Floats, slopes: Floats, logs: Floats) -> Floats:
        """Where the sum would be least if the predictions at `logs` moved along `slopes`."""
        from scipy.optimize import least_squares

        of_rows = slopes[:, self.columns]
        jacobian = np.vstack(
            [of_rows[self.rows] / NOISE, np.diag(1.0 / self.problem.spreads[self.columns])]
        )

        def full(x: Floats) -> Floats:
            out = logs.copy()
            out[self.columns] = x
            return out

        low, high = self.bounds
        found = least_squares(
            lambda x: self.residuals(log_seconds + of_rows @ (x - logs[self.columns]), full(x)),
            np.clip(logs[self.columns], low + 1e-9, high - 1e-9),
            lambda x: jacobian,
            bounds=(low, high),
            loss=lambda squares: robust_loss(squares, int(self.rows.sum())),
            x_scale="jac",
        )
        return full(found.x)


def fit(
    problem: Problem,
    rows: Bools | None = None,
    columns: Sequence[int] | None = None,
    *,
    start: Floats | None = None,
    known: Linearisation | None = None,
    exact: bool = True,
    steps: int = MOST_STEPS,
) -> Floats:
    """Logarithms of the free constants that fit best; those outside `columns` stay at `start`.

    Gauss-Newton steps, each the robust optimum of the linearised rows, each kept only if the true sum falls.
    After a step the slopes are corrected by what it changed, and worked out anew when steps gain nothing more,
    or never without `exact`; at most `steps` are taken. `known` are slopes to begin with. Deterministic: the same rows, priors and start
    give the same values.
    """
    used = np.ones(len(problem.runs), dtype=bool) if rows is None else rows
    moving = list(range(len(problem.free))) if columns is None else list(columns)
    goal = _Objective(problem, used, moving)
    logs = (problem.start if start is None else start).copy()
    logs[moving] = np.clip(logs[moving], *goal.bounds)
    slopes = known.slopes if known else problem.linearise(logs, moving, problem.touched).slopes
    fresh = known is None
    log_seconds = np.log(problem.predict(logs))
    value = goal.value(log_seconds, logs)
    for _ in range(steps):
        step = goal.linear_optimum(log_seconds, slopes, logs) - logs
        before = log_seconds, logs
        gain, (value, log_seconds, logs) = _best_along(goal, step, (value, log_seconds, logs))
        slopes = _corrected(slopes, log_seconds - before[0], logs - before[1])
        if gain > ENOUGH_GAIN * value:
            fresh = False
        elif fresh or not exact:
            break
        else:
            slopes, fresh = problem.linearise(logs, moving, problem.touched).slopes, True
    return logs


def _corrected(slopes: Floats, change: Floats, step: Floats) -> Floats:
    """Slopes that agree with what a step really changed (Broyden 1965, Math. Comp. 19, equation 4.5)."""
    length = float(step @ step)
    return slopes if length == 0.0 else slopes + np.outer(change - slopes @ step, step) / length


def _best_along(
    goal: _Objective, step: Floats, known: tuple[float, Floats, Floats]
) -> tuple[float, tuple[float, Floats, Floats]]:
    """The gain of a step, or of the first of its halves that gains, and where it leads."""
    value, _, logs = known
    for halvings in range(4):
        tried = logs + step / 2.0**halvings
        log_seconds = np.log(goal.problem.predict(tried))
        found = goal.value(log_seconds, tried)
        if found < value:
            return value - found, (found, log_seconds, tried)
    return 0.0, known


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Values as they are written to the files."""
    return {path: float(f"{value:.{SIGNIFICANT_DIGITS}g}") for path, value in values.items()}

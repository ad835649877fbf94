"""The fit behind `python -m benchmarks.calibrate`: which constants move, on which rows, and how far.

Minimises, over the free constants c with prior p and spread s,

    sum_rows rho(log(predicted / measured) / 0.05) + sum_c (log(c / p) / s)^2,    |log(c / p)| <= 3 s,

rho(z) = 2 (sqrt(1 + z^2) - 1), which is quadratic for errors below 5 % and linear beyond, so that a run that
went wrong does not bend the rest. The priors stay quadratic. Nothing else depends on the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodel.constant_tables import ConstantRecord, Value, constant_records
from costmodel.constants import Constants, named_constants
from costmodel.estimate import Estimate, Stages, estimate
from costmodel.layout import Placement
from planner.prediction import arrangement
from planner.run_file import Run

NOISE = 0.05
"""Relative error up to which a row counts in full."""
MOST_SPREADS = 3.0
STEP = 1e-3
"""Forward difference, in the logarithm of a constant."""
SIGNIFICANT_DIGITS = 4

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class _Case:
    run: Run
    stages: Stages
    placement: Placement
    stack: tuple[str, str, str]
    """Device, architecture, software profile."""

    def price(self, constants: Constants) -> Estimate:
        return estimate(self.run.workload, self.run.layout, self.placement, self.stages, constants)


@dataclass(frozen=True)
class Linearisation:
    """Predictions at some values, and how they move: `slopes` [rows, constants] of log seconds by log value."""

    seconds: Floats
    slopes: Floats


class Problem:
    """The rows of a calibration, with all that does not depend on the constants worked out once."""

    def __init__(self, runs: Sequence[Run], free: Sequence[ConstantRecord]) -> None:
        known = [run for run in runs if run.measured is not None]
        self.runs = tuple(known)
        self.free = tuple(free)
        self.measured_s = np.array([run.measured.step_time_s for run in known if run.measured])
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
                seconds.append(float(case.price(tables[case.stack]).step_time_s))
        return np.array(seconds)

    @cached_property
    def touched(self) -> Bools:
        """Rows [rows, constants] whose prediction moves when a constant goes one spread up or down."""
        base = self.predict(self.start)
        out = np.zeros((len(self._cases), len(self.free)), dtype=bool)
        for column, record in enumerate(self.free):
            rows = self._reached(record)
            for sign in (1.0, -1.0):
                moved = self._moved(self.start, column, sign * self.spreads[column])
                out[rows, column] |= self.predict(moved, rows) != base[rows]
        return out

    def linearise(self, logs: Floats, columns: Sequence[int] | None = None) -> Linearisation:
        """Predictions and their slopes at some values; a column is worked out on the rows it touches."""
        seconds = self.predict(logs)
        slopes = np.zeros((len(self._cases), len(self.free)))
        for column in range(len(self.free)) if columns is None else columns:
            rows = self.touched[:, column]
            # Away from the nearer bound, so that the point tried is one that the fit may take.
            step = STEP if logs[column] <= self.priors[column] else -STEP
            moved = self.predict(self._moved(logs, column, step), rows)
            slopes[rows, column] = np.log(moved / seconds[rows]) / step
        return Linearisation(seconds, slopes)

    def _moved(self, logs: Floats, column: int, step: float) -> Floats:
        out = logs.copy()
        out[column] += step
        return out

    def _reached(self, record: ConstantRecord) -> Bools:
        """Rows that read a record at all: of its device, architecture or profile, or of all."""
        section, name = record.path.split(".")[0], record.path.split(".")[1]
        records = constant_records().values()
        aliases = {r.path.split(".")[1] for r in records if r.same_as == record.path} | {name}
        position = {"devices": 0, "architectures": 1, "frameworks": 2}.get(section)
        return np.array([position is None or case.stack[position] in aliases for case in self._cases])


def _number(value: Value | None) -> float:
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


def fit(
    problem: Problem,
    rows: Bools | None = None,
    columns: Sequence[int] | None = None,
    *,
    start: Floats | None = None,
    most_steps: int = 30,
) -> Floats:
    """Logarithms of the free constants that fit best; those outside `columns` stay at `start`.

    Deterministic: the same rows, priors and start give the same values.
    """
    from scipy.optimize import least_squares

    logs = (problem.start if start is None else start).copy()
    moving = list(range(len(problem.free))) if columns is None else list(columns)
    used = np.ones(len(problem.runs), dtype=bool) if rows is None else rows
    width = MOST_SPREADS * problem.spreads[moving]
    low, high = problem.priors[moving] - width, problem.priors[moving] + width

    def full(x: Floats) -> Floats:
        out = logs.copy()
        out[moving] = x
        return out

    def residuals(x: Floats) -> Floats:
        errors = np.log(problem.predict(full(x), used) / problem.measured_s[used]) / NOISE
        return np.concatenate([errors, (x - problem.priors[moving]) / problem.spreads[moving]])

    def slopes(x: Floats) -> Floats:
        of_rows = problem.linearise(full(x), moving).slopes[used][:, moving] / NOISE
        return np.vstack([of_rows, np.diag(1.0 / problem.spreads[moving])])

    inside = np.clip(logs[moving], low + 1e-9, high - 1e-9)
    found = least_squares(
        residuals,
        inside,
        slopes,
        bounds=(low, high),
        loss=lambda squares: robust_loss(squares, int(used.sum())),
        x_scale="jac",
        xtol=1e-5,
        ftol=1e-6,
        gtol=1e-6,
        max_nfev=most_steps,
    )
    return full(found.x)


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Values as they are written to the files."""
    return {path: float(f"{value:.{SIGNIFICANT_DIGITS}g}") for path, value in values.items()}

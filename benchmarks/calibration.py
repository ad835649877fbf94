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

from meshwright.costmodel.layout import Placement
from meshwright.costmodel.rank_load import Stages
from meshwright.costmodel.rates import Constants, as_run, device_prefixes, named_constants
from meshwright.costmodel.records import ConstantRecord, ConstantValue, effective_paths
from meshwright.costmodel.stacks import framework_prefixes
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.planner.runs.calibration import evidence
from meshwright.planner.runs.calibration.evidence import MOST_STEPS, Bools, Floats, Goal
from meshwright.planner.runs.prediction import arrangement
from meshwright.planner.runs.run_file import Run

NOISE = 0.03
"""Relative error up to which a row counts in full: releases with the same layout and flags differ by 2.6 % on average."""
MOST_SPREADS = 3.0
STEP = 1e-3
"""Forward difference, in the logarithm of a constant."""
SIGNIFICANT_DIGITS = 4


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

    `known` are slopes to begin with; without `exact` they are only corrected, never worked out anew. At most
    `steps` are taken.
    Deterministic: the same rows, priors and start give the same values.
    """
    used = np.ones(len(problem.runs), dtype=bool) if rows is None else rows
    moving = list(range(len(problem.free))) if columns is None else list(columns)
    begin = problem.start if start is None else start
    priors, spreads = problem.priors[moving], problem.spreads[moving]
    measured = np.log(problem.measured_s)

    def logs_at(x: Floats) -> Floats:
        logs = begin.copy()
        logs[moving] = priors + spreads * x
        return logs

    def in_spreads(slopes: Floats) -> Floats:
        return slopes[used][:, moving] * spreads / NOISE

    def slopes_at(x: Floats) -> Floats:
        return in_spreads(problem.linearise(logs_at(x), moving, problem.touched).slopes)

    bound = np.full(len(moving), MOST_SPREADS)
    goal = Goal(
        errors=lambda x: (np.log(problem.predict(logs_at(x))) - measured)[used] / NOISE,
        slopes=slopes_at,
        low=-bound,
        high=bound,
    )
    at_start = (begin[moving] - priors) / spreads
    slopes = None if known is None else in_spreads(known.slopes)
    return logs_at(evidence.fit(goal, at_start, slopes, exact=exact, steps=steps).x)


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Values as they are written to the files."""
    return {path: float(f"{value:.{SIGNIFICANT_DIGITS}g}") for path, value in values.items()}

"""What was measured on the user's cluster, beside what the cost model says of it, and the fit of factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import full_levels
from meshwright.cluster_specs.importers.document import read_facts
from meshwright.cluster_specs.importers.facts import SourceText
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.calibration import (
    MEMORY_FACTORS,
    MOST_SPREADS,
    NAMES,
    PRIORS,
    Calibration,
    factors_at,
    lowest_coordinates,
)
from meshwright.costmodel.collectives import isolated_fabric
from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.footprint import context_gib
from meshwright.costmodel.layout import Placement
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.workload import Workload
from meshwright.documents import read_text
from meshwright.errors import InputError
from meshwright.planner.runs.prediction import arrangement, memory_of_ranks, peak_as_measured
from meshwright.planner.runs.run_file import Run, read_runs

STEP_NOISE = 0.05
"""Relative: what is left between the layouts of one sweep once its constants are fitted (Aleph Alpha 13B)."""
MEMORY_NOISE = 0.03
"""Relative: what an allocator rounds up and keeps."""
LIMIT_NOISE = 0.1
"""Relative, of what is only known to have run or not: how much room an allocator needs is not known."""
_STEP = 0.02
"""Forward difference of a slope, in spreads."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A rate that a benchmark reached, over what the cost model takes for it with the shipped constants."""

    factors: tuple[str, ...]
    """Of `NAMES`, those whose product the rate moves with."""
    ratio: float
    noise: float
    """Relative: a benchmark alone is not a training step."""
    words: str


@dataclass(frozen=True)
class _Case:
    run: Run
    stages: Stages
    placement: Placement

    def workload(self, draft: Calibration | None) -> Workload:
        return replace(self.run.workload, calibration=draft)

    def step_time_s(self, draft: Calibration | None) -> float:
        context = make_context(self.workload(draft), self.run.layout, self.placement)
        return float(np.asarray(exact_step(context, self.stages).seconds))

    def memory_gib(self, draft: Calibration | None) -> float:
        """As the run measured it; of a run without a measured peak, of its fullest rank."""
        measured = self.run.measured if _peak_gib(self.run) is not None else None
        layout = self.run.layout
        parts = memory_of_ranks(self.workload(draft), layout, self.stages)
        return peak_as_measured(parts, float(np.asarray(context_gib(layout))), measured)


class Evidence:
    """Measured runs and benchmarks of one stack on one device, and their errors at any coordinates.

    Rows are, in this order: steps, peaks of memory, runs that are only known to have run or not, benchmarks.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        draft: Calibration,
        benchmarks: Sequence[Benchmark] = (),
        *,
        step_noise: float = STEP_NOISE,
        memory_noise: float = MEMORY_NOISE,
    ) -> None:
        cases = [_case(run, draft.framework) for run in runs]
        self.draft = draft
        self.step_noise = step_noise
        self.memory_noise = memory_noise
        self.benchmarks = tuple(benchmarks)
        self._steps = [case for case in cases if _step_s(case.run) is not None]
        self._peaks = [case for case in cases if _peak_gib(case.run) is not None]
        self._limits = [case for case in cases if _peak_gib(case.run) is None]
        self.step_logs = np.log([_step_s(case.run) or math.nan for case in self._steps])
        self._peak_logs = np.log([_peak_gib(case.run) or math.nan for case in self._peaks])

    @property
    def steps(self) -> tuple[Run, ...]:
        """Runs with a measured step."""
        return tuple(case.run for case in self._steps)

    @property
    def peaks(self) -> tuple[Run, ...]:
        """Runs with a measured peak of memory."""
        return tuple(case.run for case in self._peaks)

    @property
    def step_rows(self) -> slice:
        """Where steps stand among the rows."""
        return slice(0, len(self._steps))

    @property
    def peak_rows(self) -> slice:
        """Where peaks of memory stand among the rows."""
        return slice(len(self._steps), len(self._steps) + len(self._peaks))

    @property
    def noise(self) -> Floats:
        """Of every row, relative."""
        steps = np.full(len(self._steps), self.step_noise)
        peaks = np.full(len(self._peaks), self.memory_noise)
        limits = np.full(len(self._limits), LIMIT_NOISE)
        return np.concatenate([steps, peaks, limits, [mark.noise for mark in self.benchmarks]])

    def calibration_at(self, x: Floats) -> Calibration:
        """The stack with factors at some coordinates, not validated.

        Parameters
        ----------
        x : array of float, shape [len(NAMES)]

        Returns
        -------
        Calibration
        """
        return self.draft.model_copy(update={"factors": factors_at(x)})

    def errors(self, x: Floats) -> Floats:
        """Logarithms of predicted over measured, in units of their noise.

        Parameters
        ----------
        x : array of float, shape [len(NAMES)]

        Returns
        -------
        array of float, shape [rows]
        """
        marks = [_log_factor(mark, x) - math.log(mark.ratio) for mark in self.benchmarks]
        parts = [self._step_errors(x), self._memory_errors(x), np.array(marks)]
        return np.concatenate(parts) / self.noise

    def _step_errors(self, x: Floats) -> Floats:
        calibration = self.calibration_at(x)
        steps = np.log([case.step_time_s(calibration) for case in self._steps])
        return np.asarray(steps - self.step_logs)

    def _memory_errors(self, x: Floats) -> Floats:
        calibration = self.calibration_at(x)
        peaks = np.log([case.memory_gib(calibration) for case in self._peaks])
        beyond = [_beyond_limit(case, calibration) for case in self._limits]
        return np.concatenate([peaks - self._peak_logs, beyond])

    def slopes(self, x: Floats) -> Floats:
        """How the errors move with the coordinates.

        Parameters
        ----------
        x : array of float, shape [len(NAMES)]

        Returns
        -------
        array of float, shape [rows, len(NAMES)]
        """
        steps, memory = self._step_errors(x), self._memory_errors(x)
        slopes = np.zeros((len(self.noise), len(NAMES)))
        for index, name in enumerate(NAMES):
            moved = x.copy()
            moved[index] += _STEP
            if name in MEMORY_FACTORS:
                change = self._memory_errors(moved) - memory
                slopes[len(steps) : len(steps) + len(memory), index] = change / _STEP
            else:
                slopes[: len(steps), index] = (self._step_errors(moved) - steps) / _STEP
        for row, mark in enumerate(self.benchmarks, start=len(steps) + len(memory)):
            for name in mark.factors:
                slopes[row, NAMES.index(name)] = PRIORS[name].spread
        return slopes / self.noise[:, None]

    def goal(self) -> Goal:
        """What a fit makes small.

        Returns
        -------
        Goal
        """
        high = np.full(len(NAMES), MOST_SPREADS)
        return Goal(errors=self.errors, slopes=self.slopes, low=lowest_coordinates(), high=high)


def _case(run: Run, framework: str) -> _Case:
    stacked = replace(run, workload=replace(run.workload, framework=framework))
    return _Case(stacked, *arrangement(stacked))


def _step_s(run: Run) -> float | None:
    return None if run.measured is None else run.measured.step_time_s


def _peak_gib(run: Run) -> float | None:
    return None if run.measured is None else run.measured.memory_gib


def _beyond_limit(case: _Case, calibration: Calibration) -> float:
    """Logarithm by which a run is on the wrong side of HBM; 0 on the right side."""
    run = case.run
    room_gib = run.workload.cluster.device.hbm_gib - float(np.asarray(context_gib(run.layout)))
    over = math.log(case.memory_gib(calibration) / room_gib)
    failed = run.measured is not None and run.measured.out_of_memory
    return min(0.0, over) if failed else max(0.0, over)


def _log_factor(mark: Benchmark, x: Floats) -> float:
    moved = (PRIORS[name].at(float(x[NAMES.index(name)])) for name in mark.factors)
    return math.log(math.prod(moved))


# What `meshwright calibrate` reads: run files, and logs of nccl-tests.


RUN_FILES = (".yaml", ".yml", ".json")
MOST_LOG_BYTES = 4 * 2**20
_LOG_NOISE = 0.05
"""Relative: repeated nccl-tests, and what a step attains of what they reach."""


def read_sources(
    paths: Sequence[Path], known: Sequence[Run] = ()
) -> tuple[tuple[Run, ...], tuple[Benchmark, ...]]:
    """Runs of the run files, and rates of the nccl-tests logs on the cluster of the largest run.

    Parameters
    ----------
    paths : sequence of Path
        Run files end with one of `RUN_FILES`; all others are logs.
    known : sequence of Run, optional
        Runs that were read before.

    Returns
    -------
    tuple of runs and of benchmarks

    Raises
    ------
    InputError
        If a file cannot be read, or there is no run.
    """
    runs: list[Run] = list(known)
    for path in paths:
        if path.suffix.lower() in RUN_FILES:
            runs += read_runs(path)
    if not runs:
        raise InputError("no run file among the sources: give one with `runs:`", value=paths)
    cluster = max(runs, key=lambda run: run.workload.gpus).workload.cluster
    logs = [path for path in paths if path.suffix.lower() not in RUN_FILES]
    return tuple(runs), tuple(_rates(logs, cluster))


def _rates(logs: Sequence[Path], cluster: ClusterSpec) -> list[Benchmark]:
    """The share of its nominal rate that each log reached, over what nccl-tests usually reach there."""
    if not logs:
        return []
    texts = [SourceText(name=str(path), text=read_text(path, MOST_LOG_BYTES)) for path in logs]
    levels = full_levels(cluster)
    benchmarks = []
    for measured in read_facts("nccl-tests", texts, cluster).measured:
        level = levels.names.index(measured.level)
        links = isolated_fabric(cluster, measured.gpus, deduplicated=False).links
        rates = links.bytes_per_s
        factors: tuple[str, ...] = ("network",) if level else ("scale_up",)
        if measured.collective == "alltoall":
            rates = links.all_to_all_bytes_per_s
            # Inside a node exchanges have a factor of their own, on top of that of the links.
            factors = factors if level else ("scale_up", "exchange")
        usual = float(rates[level]) / (float(levels.gb_per_s[level]) * 1e9)
        ratio = measured.attained_fraction / usual
        benchmarks.append(
            Benchmark(
                factors=factors,
                ratio=ratio,
                noise=_LOG_NOISE,
                words=f"{measured.source}: {measured.bus_gb_per_s:.3g} GB/s over {measured.level}, "
                f"{ratio:.0%} of what is usual",
            )
        )
    return benchmarks


# Fits a few coordinates with unit normal priors to measured rows, some of which may have gone wrong.
#
# Minimises, over coordinates x within bounds,
#
#     sum_rows rho(e(x)) + sum_j x_j^2,    rho(e) = 2 (sqrt(1 + e^2) - 1),
#
# e being errors in units of their noise. rho is quadratic for errors below the noise and linear beyond, so
# that a run that went wrong does not bend the rest. The priors stay quadratic.


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_STEPS = 40
ENOUGH_GAIN = 1e-5
"""A step that gains less than this share of the sum is the last along these slopes."""
_MOST_REWEIGHTS = 200
_CLOSE = 1e-7
"""Coordinates that move less than this have arrived."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The sum that a fit makes small."""

    errors: Callable[[Floats], Floats]
    """Errors of the rows, in units of their noise, at coordinates of shape [n]."""
    slopes: Callable[[Floats], Floats]
    """How they move, [rows, n]."""
    low: Floats
    high: Floats

    def value(self, errors: Floats, x: Floats) -> float:
        """The sum itself.

        Parameters
        ----------
        errors : array of float, shape [rows]
            At `x`.
        x : array of float, shape [n]

        Returns
        -------
        float
        """
        return float(np.sum(2.0 * (np.sqrt(1.0 + errors**2) - 1.0)) + x @ x)


@dataclass(frozen=True)
class Fitted:
    """Where a fit ended."""

    x: Floats
    errors: Floats
    slopes: Floats

    def covariance(self) -> Floats:
        """Of the coordinates: the inverse of the sum's curvature, rows weighted as the fit weighted them.

        Returns
        -------
        array of float, shape [n, n]
        """
        weights = 1.0 / np.sqrt(1.0 + self.errors**2)
        curvature = self.slopes.T @ (weights[:, None] * self.slopes) + np.eye(len(self.x))
        return np.asarray(np.linalg.inv(curvature), dtype=np.float64)


def fit(
    goal: Goal,
    start: Floats,
    slopes: Floats | None = None,
    *,
    exact: bool = True,
    steps: int = MOST_STEPS,
) -> Fitted:
    """The coordinates that fit best.

    Gauss-Newton steps, each the robust optimum of the linearised rows, each kept only if the true sum falls.
    After a step the slopes are corrected by what it changed, and worked out anew when steps gain
    nothing more.
    Deterministic: the same rows and start give the same coordinates.

    Parameters
    ----------
    goal : Goal
        The sum.
    start : array of float, shape [n]
        Where to begin; moved inside the bounds.
    slopes : array of float, shape [rows, n], optional
        Known at `start`; worked out there by default.
    exact : bool
        Whether to work out the slopes anew before giving up.
    steps : int
        The most that are taken.

    Returns
    -------
    Fitted
    """
    x = np.clip(start, goal.low, goal.high)
    fresh = slopes is None
    along = goal.slopes(x) if slopes is None else slopes
    errors = goal.errors(x)
    for _ in range(steps):
        value = goal.value(errors, x)
        step = robust_optimum(errors, along, x, goal.low, goal.high) - x
        moved_errors, moved = _first_that_gains(goal, step, errors, x)
        gain = value - goal.value(moved_errors, moved)
        along = _corrected(along, moved_errors - errors, moved - x)
        errors, x = moved_errors, moved
        if gain > ENOUGH_GAIN * value:
            fresh = False
        elif fresh or not exact:
            break
        else:
            along = goal.slopes(x)
            fresh = True
    return Fitted(x, errors, along)


def _corrected(slopes: Floats, change: Floats, step: Floats) -> Floats:
    """Slopes that agree with what a step really changed (Broyden 1965, Math. Comp. 19, equation 4.5)."""
    length = float(step @ step)
    if length == 0.0:
        return slopes
    return slopes + np.outer(change - slopes @ step, step) / length


def _first_that_gains(goal: Goal, step: Floats, errors: Floats, x: Floats) -> tuple[Floats, Floats]:
    """Errors and coordinates after a step, or after the first of its halves that gains, or as before."""
    value = goal.value(errors, x)
    for halvings in range(4):
        tried = x + step / 2.0**halvings
        tried_errors = goal.errors(tried)
        if goal.value(tried_errors, tried) < value:
            return tried_errors, tried
    return errors, x


def robust_optimum(errors: Floats, slopes: Floats, x: Floats, low: Floats, high: Floats) -> Floats:
    """Where the sum would be least if the errors at `x` moved along `slopes`.

    Each round weights the rows by 1 / sqrt(1 + e^2) and solves the weighted squares, which never raises the
    sum (Huber 1981, Robust Statistics, section 7.8).

    Parameters
    ----------
    errors : array of float, shape [rows]
        At `x`, in units of their noise.
    slopes : array of float, shape [rows, n]
    x, low, high : array of float, shape [n]

    Returns
    -------
    array of float, shape [n]
    """
    optimum = x
    offset = errors - slopes @ x
    for _ in range(_MOST_REWEIGHTS):
        weights = 1.0 / np.sqrt(1.0 + (offset + slopes @ optimum) ** 2)
        weighted = slopes.T * weights
        curvature = weighted @ slopes + np.eye(len(x))
        before, optimum = optimum, box_optimum(curvature, -weighted @ offset, optimum, low, high)
        if np.max(np.abs(optimum - before), initial=0.0) < _CLOSE:
            break
    return optimum


def box_optimum(
    curvature: Floats, target: Floats, start: Floats, low: Floats, high: Floats
) -> Floats:
    """The least of x' C x / 2 - t' x within bounds, C positive definite.

    Primal active set (Nocedal and Wright 2006, Numerical Optimization, algorithm 16.3): goes to the optimum
    of the free coordinates or to the first bound on the way, and frees the coordinate whose bound holds it
    back most.

    Parameters
    ----------
    curvature : array of float, shape [n, n]
    target, start, low, high : array of float, shape [n]
        `start` within the bounds.

    Returns
    -------
    array of float, shape [n]
    """
    x = start.copy()
    free = (x > low) & (x < high)
    for _ in range(10 * len(x) + 10):
        wanted = x.copy()
        fixed = ~free
        right = target[free] - curvature[np.ix_(free, fixed)] @ x[fixed]
        wanted[free] = np.linalg.solve(curvature[np.ix_(free, free)], right)
        outside = free & ((wanted < low) | (wanted > high))
        if outside.any():
            bound = np.where(wanted < low, low, high)
            share = np.full(len(x), np.inf)
            share[outside] = (bound - x)[outside] / (wanted - x)[outside]
            first = int(np.argmin(share))
            x = np.clip(x + share[first] * (wanted - x), low, high)
            x[first] = bound[first]
            free[first] = False
            continue
        x = wanted
        pull = target - curvature @ x
        held_back = np.where(x <= low, pull, -pull)
        held_back[free | (low == high)] = 0.0
        if np.max(held_back, initial=0.0) <= _CLOSE:
            break
        free[int(np.argmax(held_back))] = True
    return x

"""Two cost models on the same measured runs: errors, regret and speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.few_shot import priced
from meshwright.planner.runs.calibration.service import calibrate_runs
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Run
from meshwright.planner.runs.validation import Prediction, RegretGroup, plan_regret, score

Floats = NDArray[np.float64]
OWN_RUNS = 5


@dataclass(frozen=True)
class Figures:
    """One line of the table: what a tool reaches on a sweep. Errors in percent, means of their sizes."""

    tool: str
    uncorrected: float
    with_factor: float
    """With one factor for the stack, from all rows."""
    with_factor_of_few: float
    """The rest's, with one factor from each draw of own runs."""
    calibrated: float | None
    """The rest's, after a calibration on each draw."""
    regret: tuple[RegretGroup, ...]
    seconds: float
    """Of the processor, for one prediction."""


def measured_steps(runs: Sequence[Run]) -> Floats:
    """Seconds of every run. Raises ValueError where one has no measured step."""
    steps = [run.measured.step_time_s for run in runs if run.measured is not None]
    if len(steps) < len(runs) or None in steps:
        raise ValueError("a run without a measured step")
    return np.array(steps, dtype=float)


def stack_factor(predicted_s: Floats, measured_s: Floats) -> float:
    """The factor of all predictions that is best in logarithms: the geometric mean of measured over predicted."""
    return float(np.exp(np.mean(np.log(measured_s / predicted_s))))


def mean_error_pct(predicted_s: Floats, measured_s: Floats) -> float:
    """Mean size of predicted over measured minus 1, in percent."""
    return float(100.0 * np.mean(np.abs(predicted_s / measured_s - 1.0)))


def draws_of(rows: int, draws: int) -> list[tuple[list[int], list[int]]]:
    """OWN_RUNS rows at random, and the rest, several times; the same ones for every tool."""
    random = np.random.default_rng(0)
    orders = [random.permutation(rows).tolist() for _ in range(draws)]
    return [(order[:OWN_RUNS], order[OWN_RUNS:]) for order in orders]


def figures_of(
    tool: str,
    runs: Sequence[Run],
    predicted_s: Floats,
    *,
    draws: int,
    seconds: float,
    calibrated: float | None = None,
) -> Figures:
    """What a tool's predictions of some runs are worth.

    Parameters
    ----------
    tool : str
        Its name in the table.
    runs : sequence of Run
        Measured runs, more than OWN_RUNS.
    predicted_s : array of float
        Its step times, uncorrected.
    draws : int
        Draws of own runs.
    seconds : float
        Of the processor, for one prediction.
    calibrated : float, optional
        Its error after a calibration, where it has one.
    """
    measured_s = measured_steps(runs)
    factor = stack_factor(predicted_s, measured_s)
    few = []
    for own, rest in draws_of(len(runs), draws):
        own_factor = stack_factor(predicted_s[own], measured_s[own])
        few.append(mean_error_pct(own_factor * predicted_s[rest], measured_s[rest]))
    by_id = {run.id: float(step) for run, step in zip(runs, predicted_s, strict=True)}
    report = score(runs, lambda run: Prediction(step_time_s=by_id[run.id]))
    return Figures(
        tool=tool,
        uncorrected=mean_error_pct(predicted_s, measured_s),
        with_factor=mean_error_pct(factor * predicted_s, measured_s),
        with_factor_of_few=float(np.mean(few)),
        calibrated=calibrated,
        regret=plan_regret(report.rows),
        seconds=seconds,
    )


def _of_its_profile(run: Run) -> Run:
    """The run as one of the stack that prices it, whatever release its source names."""
    return replace(run, framework_words=run.workload.framework)


def our_figures(runs: Sequence[Run], draws: int) -> Figures:
    """Meshwright's: the shipped constants, with a factor, and calibrated on each draw."""
    prediction_of(runs[0])
    begun_s = time.process_time()
    predicted_s = np.array([prediction_of(run).step_time_s for run in runs])
    seconds = (time.process_time() - begun_s) / len(runs)
    measured_s = measured_steps(runs)
    errors = []
    for own, rest in draws_of(len(runs), draws):
        chosen = [_of_its_profile(runs[row]) for row in own]
        stack = calibrate_runs(chosen, suggest=False).calibration
        steps_s = np.array([priced(runs[row], stack).step_time_s for row in rest])
        errors.append(mean_error_pct(steps_s, measured_s[rest]))
    calibrated = float(np.mean(errors))
    return figures_of(
        "meshwright", runs, predicted_s, draws=draws, seconds=seconds, calibrated=calibrated
    )

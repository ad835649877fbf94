"""Fits a few coordinates with unit normal priors to measured rows, some of which may have gone wrong.

Minimises, over coordinates x within bounds,

    sum_rows rho(e(x)) + sum_j x_j^2,    rho(e) = 2 (sqrt(1 + e^2) - 1),

e being errors in units of their noise. rho is quadratic for errors below the noise and linear beyond, so that
a run that went wrong does not bend the rest. The priors stay quadratic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    at = x
    offset = errors - slopes @ x
    for _ in range(_MOST_REWEIGHTS):
        weights = 1.0 / np.sqrt(1.0 + (offset + slopes @ at) ** 2)
        weighted = slopes.T * weights
        curvature = weighted @ slopes + np.eye(len(x))
        before, at = at, box_optimum(curvature, -weighted @ offset, at, low, high)
        if np.max(np.abs(at - before), initial=0.0) < _CLOSE:
            break
    return at


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

"""The fit against scipy, which shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from meshwright.planner.runs.calibration.evidence import Goal, box_optimum, fit, robust_optimum


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_the_optimum_in_a_box_is_that_of_scipy(seed: int) -> None:
    random = np.random.default_rng(seed)
    root = random.normal(size=(6, 6))
    curvature = root @ root.T + np.eye(6)
    target = 10.0 * random.normal(size=6)
    low, high = -random.uniform(0, 1, 6), random.uniform(0, 1, 6)
    x = box_optimum(curvature, target, np.zeros(6), low, high)
    expected = minimize(
        lambda y: y @ curvature @ y / 2 - target @ y,
        np.zeros(6),
        jac=lambda y: curvature @ y - target,
        bounds=list(zip(low, high, strict=True)),
        method="L-BFGS-B",
        options={"ftol": 1e-15, "gtol": 1e-12},
    )
    assert np.allclose(x, expected.x, atol=1e-6)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_the_robust_optimum_is_that_of_scipy(seed: int) -> None:
    random = np.random.default_rng(seed)
    slopes = 5.0 * random.normal(size=(9, 4))
    errors = 20.0 * random.normal(size=9)
    low, high = np.full(4, -3.0), np.array([3.0, 3.0, 0.1, 3.0])
    goal = Goal(errors=lambda x: errors + slopes @ x, slopes=lambda x: slopes, low=low, high=high)
    x = robust_optimum(errors, slopes, np.zeros(4), low, high)
    expected = minimize(
        lambda y: goal.value(goal.errors(y), y),
        np.zeros(4),
        bounds=list(zip(low, high, strict=True)),
        method="L-BFGS-B",
        options={"ftol": 1e-15, "gtol": 1e-10},
    )
    assert goal.value(goal.errors(x), x) <= expected.fun + 1e-6


def test_the_loss_is_quadratic_near_zero_and_linear_far_out() -> None:
    bound = np.full(1, 3.0)
    goal = Goal(errors=lambda x: x, slopes=lambda x: x, low=-bound, high=bound)
    none = np.zeros(1)
    assert goal.value(np.array([1e-2]), none) == pytest.approx(1e-4, rel=1e-4)
    assert goal.value(np.array([1e3]), none) == pytest.approx(2e3, rel=1e-2)
    assert goal.value(none, np.array([3.0])) == 9.0, "a prior stays quadratic"


def test_a_curved_goal_is_fitted() -> None:
    """Rows exp(x) and exp(x + y) at 1 spread noise, measured far more sharply than the prior."""

    def errors(x: np.ndarray) -> np.ndarray:
        return 1e4 * np.array([np.exp(x[0]) - 2.0, np.exp(x[0] + x[1]) - 1.0])

    def slopes(x: np.ndarray) -> np.ndarray:
        first, second = np.exp(x[0]), np.exp(x[0] + x[1])
        return 1e4 * np.array([[first, 0.0], [second, second]])

    bound = np.full(2, 3.0)
    fitted = fit(Goal(errors=errors, slopes=slopes, low=-bound, high=bound), np.zeros(2))
    assert np.allclose(fitted.x, [np.log(2.0), -np.log(2.0)], atol=1e-3)
    assert np.all(np.diag(fitted.covariance()) < 1e-3)

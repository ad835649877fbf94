"""The error band of every device class and framework, from runs predicted with their source left out.

A band is the 5th and 95th percentile of log(measured / predicted). With n rows of its own it takes
n / (n + 10) of theirs and the rest of the next wider group's: of the device class on any framework, then of the
framework on any device, then of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.frameworks.catalog import FRAMEWORK_NAMES, framework_named

KINDS_OF_MODEL = {"dense": "without experts", "experts": "with experts"}
FULL_TRUST_ROWS = 10
"""Rows at which a group's own percentiles weigh as much as the wider group's."""
OTHER = "other"


@dataclass(frozen=True)
class Outcome:
    """A measured run: its device class (None for a class of its own), its framework, measured over predicted."""

    device_class: str | None
    framework: str
    ratio: float


@dataclass(frozen=True)
class _Band:
    ends: NDArray[np.float64]
    """Logarithms of the 5th and 95th percentile."""
    rows: int
    basis: str

    def record(self) -> dict[str, float | int | str]:
        low, high = np.exp(self.ends)
        return {
            "low": round(float(low), 3), "high": round(float(high), 3), "rows": self.rows, "basis": self.basis,
        }  # fmt: skip


def percentiles(ratios: Sequence[float]) -> NDArray[np.float64]:
    """The logarithms of the 5th and 95th percentile of some ratios."""
    return np.quantile(np.log(ratios), [0.05, 0.95])


def leaning(wider: NDArray[np.float64], own: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
    """Percentiles of so many rows, leaning on a wider group's: `FULL_TRUST_ROWS` of them weigh as much."""
    return (rows * own + FULL_TRUST_ROWS * wider) / (rows + FULL_TRUST_ROWS)


def _narrowed(wider: _Band | None, outcomes: Sequence[Outcome], basis: str) -> _Band:
    """The band of some rows, leaning on a wider group; that group's own band where there are none."""
    n = len(outcomes)
    if n == 0:
        assert wider is not None, "no rows at all"
        return wider
    ratios = [outcome.ratio for outcome in outcomes]
    if wider is None:
        return _Band(percentiles(ratios), n, basis)
    return _Band(leaning(wider.ends, percentiles(ratios), n), n, basis)


def error_bands(
    outcomes: Sequence[Outcome], device_classes: Sequence[str], frameworks: Sequence[str]
) -> dict[str, dict[str, dict[str, float | int | str]]]:
    """Bands by device class and framework, `OTHER` among both, as `costmodel/data/error_bands.yaml` has them."""
    whole = _narrowed(None, outcomes, "any device and framework")

    def band(name: str | None, framework: str | None) -> _Band:
        stacks = _measured_stacks(framework or "")
        words = " or ".join(stacks)
        of_stack = [outcome for outcome in outcomes if outcome.framework in stacks]
        of_device = [
            outcome for outcome in outcomes if name is not None and outcome.device_class == name
        ]
        out = _narrowed(whole, of_stack, f"any device with {words}")
        out = _narrowed(out, of_device, f"{name} with any framework")
        both = [outcome for outcome in of_device if outcome.framework in stacks]
        return _narrowed(out, both, f"{name} with {words}")

    return {
        name or OTHER: {
            framework or OTHER: band(name, framework).record() for framework in [*frameworks, None]
        }
        for name in [*device_classes, None]
    }


def _measured_stacks(name: str) -> tuple[str, ...]:
    """The measured stacks that stand in for a framework of plans; any other stack stands for itself."""
    return framework_named(name).measured_as if name in FRAMEWORK_NAMES else (name,)

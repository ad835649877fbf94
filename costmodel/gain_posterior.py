"""By how much measured pairs of runs correct the gain that the cost model says of a setting.

A pair is two measured runs of one work that differ in some settings s, by d_s = 1 where the second has it and
-1 where the first has. With y = ln(measured ratio) - ln(predicted ratio), y = sum_s d_s theta_s + noise. The
correction theta_s of the logarithm of a step with s is N(0, sigma^2) before any pair: the cost model's own
gain is right in the mean, with the error of pairs as its spread. The posterior is that of linear regression
with a normal prior (Bishop 2006, "Pattern Recognition and Machine Learning", equations 3.49 to 3.51):

    precision = (I + sum_i w_i d_i d_i') / sigma^2,    mean = precision^-1 sum_i w_i d_i y_i / sigma^2,

for one observation of variance sigma^2 / w_i of each source that changed these settings on one class of
device with one kind of model: the mean of its pairs, which share what its authors did. A step with settings s
is expected to take exp(sum_s mean_s) times its price, the median of the posterior.
`costmodel/data/gain_posterior.yaml` has the observations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.optimum_band import model_kind
from meshwright.costmodel.records import data_table, device_class
from meshwright.costmodel.workload import Workload

TABLE = "gain_posterior.yaml"
LEAST_PAIRS = 2
"""A setting is corrected from so many pairs on."""
NEAR, HALF_NEAR, FAR = 1.0, 0.5, 0.25
"""Weight of an observation on the class of device with the kind of model, with one of both, with neither."""
OPEN = ("recompute", "vpp")
"""Choices of a layout whose settings are corrected; the other settings are those of an execution."""
_OPEN_VALUES: Mapping[str, tuple[int, ...]] = {
    "recompute": (int(Recompute.NONE), int(Recompute.CORE_ATTENTION), int(Recompute.FULL)),
    "vpp": (1, 2),
}

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GainObservation:
    """What the pairs of one source say of a change of settings."""

    source: str
    """Who published them."""
    device: str | None
    """Class of the device; None for one of a class of its own."""
    kind: str
    """dense or experts."""
    changes: Mapping[str, int]
    """1 for each setting that the second run of a pair has alone, -1 for those of the first."""
    pairs: int
    """At least 1."""
    predicted: float
    """Mean logarithm of predicted ratios, second over first."""
    measured: float
    """Of measured ones."""

    @property
    def error(self) -> float:
        """Measured minus predicted."""
        return self.measured - self.predicted


@dataclass(frozen=True, kw_only=True)
class GainShift:
    """The correction of one setting."""

    mean: float
    """Of the logarithm of the step; above 0 where the setting saves less than the cost model says."""
    deviation: float
    """Its standard deviation, above 0."""
    pairs: int
    """Of all observations in which the setting changes."""

    @property
    def factor(self) -> float:
        """What the price of a step with the setting is multiplied by."""
        return math.exp(self.mean)


def changes_between(
    first: Collection[str], second: Collection[str], settings: Collection[str]
) -> dict[str, int]:
    """Which of some settings one of two runs has alone.

    Parameters
    ----------
    first, second : collection of str
        `optimum_band.priced_settings` of the runs.
    settings : collection of str
        Those that are looked at.

    Returns
    -------
    dict of str to int
        1 for those of the second, -1 for those of the first, by name.
    """
    of_interest = sorted(set(first).symmetric_difference(second).intersection(settings))
    return {name: 1 if name in second else -1 for name in of_interest}


def gain_posterior(
    observations: Iterable[GainObservation], device: str | None, kind: str, spread: float
) -> dict[str, GainShift]:
    """Corrections of settings on a class of device with a kind of model.

    Parameters
    ----------
    observations : iterable of GainObservation
        On any device, with any model.
    device : str or None
        Class of the device; None for one that nobody has published runs of.
    kind : str
        dense or experts.
    spread : float
        Standard deviation of the prior and of an observation, above 0, of the logarithm.

    Returns
    -------
    dict of str to GainShift
        By setting, those with `LEAST_PAIRS` pairs or more; the source is this module's docstring.
    """
    rows = list(observations)
    settings = sorted({name for row in rows for name in row.changes})
    if not settings:
        return {}
    design = np.array([[float(row.changes.get(name, 0)) for name in settings] for row in rows])
    weights = np.array([_nearness(row, device, kind) for row in rows])
    errors = np.array([row.error for row in rows])
    # In units of the spread, which both prior and observations have.
    inverse = np.linalg.inv(np.eye(len(settings)) + design.T @ (weights[:, None] * design))
    means = inverse @ (design.T @ (weights * errors))
    deviations = spread * np.sqrt(np.diag(inverse))
    pairs = [sum(row.pairs for row in rows if name in row.changes) for name in settings]
    return {
        name: GainShift(mean=float(mean), deviation=float(deviation), pairs=count)
        for name, mean, deviation, count in zip(settings, means, deviations, pairs, strict=True)
        if count >= LEAST_PAIRS
    }


def _nearness(row: GainObservation, device: str | None, kind: str) -> float:
    on_class = device is not None and row.device == device
    return {2: NEAR, 1: HALF_NEAR, 0: FAR}[on_class + (row.kind == kind)]


@cache
def gain_observations() -> tuple[GainObservation, ...]:
    """What measured pairs say, read once.

    Returns
    -------
    tuple of GainObservation
        In the order of the file.
    """
    return tuple(GainObservation(**row) for row in data_table(TABLE)["observations"])


@cache
def gain_shifts(device: str | None, kind: str) -> Mapping[str, GainShift]:
    """`gain_posterior` of the observations that come with the package.

    Parameters
    ----------
    device : str or None
        Class of the device.
    kind : str
        dense or experts.

    Returns
    -------
    mapping of str to GainShift
    """
    spread = float(data_table(TABLE)["spread"]["value"])
    return gain_posterior(gain_observations(), device, kind, spread)


@dataclass(frozen=True, kw_only=True)
class GainCorrections:
    """What prices are multiplied by for the settings of their layouts."""

    shifts: Mapping[str, GainShift]

    @property
    def least(self) -> float:
        """No settings have a smaller factor; above 0 and at most 1."""
        return math.exp(math.fsum(min(shift.mean, 0.0) for shift in self.shifts.values()))

    def factor(
        self, workload: Workload, layouts: Layout, undecided: Sequence[str] = ()
    ) -> FloatArray:
        """Of some layouts under one execution.

        Parameters
        ----------
        workload : Workload
            Run as the execution says.
        layouts : Layout
            Shape [n].
        undecided : sequence of str
            Of `OPEN`, what may still be chosen: the least factor of its values is taken.

        Returns
        -------
        ndarray of float
            Above 0, [n].
        """
        shape = layouts.broadcast_shape()
        columns = {name: np.asarray(getattr(layouts, name)) for name in OPEN}
        lowest = np.full(shape, np.inf)
        for values in product(*(_OPEN_VALUES[name] for name in undecided)):
            chosen = columns | {
                name: np.asarray(value) for name, value in zip(undecided, values, strict=True)
            }
            lowest = np.minimum(
                lowest, np.broadcast_to(self._log(workload, layouts, chosen), shape)
            )
        return np.asarray(np.exp(lowest), dtype=np.float64)

    def _log(
        self, workload: Workload, layouts: Layout, chosen: Mapping[str, NDArray[np.int64]]
    ) -> FloatArray:
        full = (chosen["recompute"] & int(Recompute.FULL)) != 0
        selective = chosen["recompute"] != 0
        exchanges, splits = np.asarray(layouts.ep) > 1, np.asarray(layouts.tp) > 1
        dispatch = workload.moe_dispatch
        named = dispatch in ("alltoall", "allgather")
        terms = (
            ("recompute full", full),
            ("recompute selective", selective & ~full),
            ("vpp", chosen["vpp"] > 1),
            (f"cuda_graph {workload.cuda_graph}", np.ones(())),
            (f"moe_dispatch {dispatch if named else 'deduplicated'}", exchanges),
            ("ep_overlap", exchanges & workload.ep_overlap),
            ("tp_overlap", splits & workload.tp_overlap),
        )
        total: FloatArray = np.zeros(())
        for name, holds in terms:
            if name in self.shifts:
                total = total + self.shifts[name].mean * np.asarray(holds, dtype=np.float64)
        return total

    def of(self, settings: Iterable[str]) -> float:
        """Of one run with some settings.

        Parameters
        ----------
        settings : iterable of str
            `optimum_band.priced_settings` of the run.

        Returns
        -------
        float
            Above 0.
        """
        shifts = (self.shifts[name].mean for name in settings if name in self.shifts)
        return math.exp(math.fsum(shifts))


def gain_corrections(workload: Workload) -> GainCorrections:
    """The corrections for a work's class of device and kind of model.

    Parameters
    ----------
    workload : Workload

    Returns
    -------
    GainCorrections
    """
    device = device_class(workload.cluster.device.name)
    return GainCorrections(shifts=gain_shifts(device, model_kind(workload)))

"""What measured runs say of a run's settings: how near such runs lie, and by how much pairs correct gains.

`priced_settings` says which settings beside the sizes of groups have a price, `support_of` how near measured
runs lie to a run with these, `optimum_band` how far the fastest of them lay from plans, and `gain_posterior`
by how much pairs of runs correct what the cost model says of a setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import AXES, Layout, Recompute
from meshwright.costmodel.records import ErrorBand, data_table, device_class
from meshwright.costmodel.workload import Workload

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# The band of an optimum: how far the fastest measured steps lie from plans, by how near measured runs are.
#
# A search picks the layout that the cost model flatters most (Smith and Winkler 2006, "The optimizer's
# curse", Management Science 52(3)), so that the band of measured runs, which nobody picked by this model, is
# too narrow for it. `costmodel/data/optimum_bands.yaml` has plans against the fastest measured step of the
# same work; docs/recipes.md explains it.


BANDS_TABLE = "optimum_bands.yaml"
Support = Literal["together", "apart", "unmeasured"]
"""Whether the settings of a plan were measured in one run, each in some run, or not all of them."""
ENOUGH_RUNS = 3
"""Measured runs that make a setting, or several together, count as measured."""
OTHER_CLASS = "other"
"""Devices that nobody has published runs of."""


def priced_settings(workload: Workload, layout: Layout) -> frozenset[str]:
    """What of a run beside the sizes of its groups has a price, in words.

    Parameters
    ----------
    workload : Workload
        Precision and execution choices.
    layout : Layout
        One layout.

    Returns
    -------
    frozenset of str
        Axes in use, recomputation, precision, CUDA graphs, dispatcher, overlaps, sharding and offload, and
        the optimizer where it is not Adam.
    """
    return frozenset(word for word, has in _settings(workload, layout) if has)


def _settings(workload: Workload, layouts: Layout) -> Iterator[tuple[str, BoolArray]]:
    """Each setting in words, and which of some layouts have it; arrays broadcast as those of `layouts` do."""

    def of_all(condition: bool) -> BoolArray:
        return np.asarray(condition)

    yield f"precision {workload.precision}", of_all(True)
    recompute = np.asarray(layouts.recompute)
    full = (recompute & int(Recompute.FULL)) != 0
    yield "recompute full", full
    yield "recompute selective", (recompute != 0) & ~full
    yield "recompute none", recompute == 0
    uses = {axis: np.asarray(getattr(layouts, axis)) > 1 for axis in (*AXES, "vpp", "ep")}
    yield from ((axis, uses[axis]) for axis in (*AXES, "vpp") if axis != "dp")
    yield f"cuda_graph {workload.cuda_graph}", of_all(workload.cuda_graph != "none")
    named = workload.moe_dispatch in ("alltoall", "allgather")
    # Sources rarely say which of DeepEP and HybridEP they ran.
    yield f"moe_dispatch {workload.moe_dispatch if named else 'deduplicated'}", uses["ep"]
    yield "ep_overlap", uses["ep"] & workload.ep_overlap
    yield "tp_overlap", uses["tp"] & workload.tp_overlap
    zero_stage = np.asarray(layouts.zero_stage)
    yield from ((f"zero_stage {stage}", zero_stage == stage) for stage in (2, 3))
    yield f"optimizer {workload.optimizer}", of_all(workload.optimizer != "adam")
    on_host = workload.offload_modules != "none" or bool(workload.offload_parameters)
    yield "offload", (np.asarray(layouts.optimizer_offload) != 0) | on_host


def support_of(
    settings: frozenset[str], measured: Iterable[tuple[frozenset[str], int]]
) -> tuple[Support, int]:
    """How near measured runs lie to a run with some settings.

    Parameters
    ----------
    settings : frozenset of str
        `priced_settings` of the run.
    measured : iterable of (frozenset of str, int)
        Settings of runs on this class of device with this kind of model, and how many runs had them.

    Returns
    -------
    tuple of (str, int)
        The support, and the number of runs that had all of the settings.
    """
    runs = list(measured)
    together = sum(count for own, count in runs if settings <= own)
    if together >= ENOUGH_RUNS:
        return "together", together
    each = (sum(count for own, count in runs if word in own) for word in settings)
    return ("apart" if all(count >= ENOUGH_RUNS for count in each) else "unmeasured"), together


def measured_settings(device: str | None, kind: str) -> list[tuple[frozenset[str], int]]:
    """Settings of published runs on a class of devices with a kind of model.

    Parameters
    ----------
    device : str or None
        As `device_class` gives it; None has no runs.
    kind : str
        `model_kind` of the model.

    Returns
    -------
    list of (frozenset of str, int)
        Settings, and how many runs had them.
    """
    rows = data_table(BANDS_TABLE)["measured"].get(device, {}).get(kind, [])
    return [(frozenset(row["settings"]), int(row["runs"])) for row in rows]


def model_kind(workload: Workload) -> str:
    """Whether a model has experts, as the tables name it.

    Parameters
    ----------
    workload : Workload
        Its model is used.

    Returns
    -------
    str
        dense or experts.
    """
    return "dense" if workload.model.moe is None else "experts"


def optimum_band(workload: Workload, layout: Layout, of_runs: ErrorBand) -> ErrorBand:
    """How far the fastest measured step may lie from a plan that a search picked.

    Parameters
    ----------
    workload : Workload
        Run as the plan is.
    layout : Layout
        The plan's.
    of_runs : ErrorBand
        Of measured runs of this device class and framework, whoever picked them.

    Returns
    -------
    ErrorBand
        Measured over predicted: the lower of both lower ends and the larger of both upper ends, of measured
        runs and of plans with as much support.
    """
    device, kind = device_class(workload.cluster.device.name), model_kind(workload)
    settings = priced_settings(workload, layout)
    support, _ = support_of(settings, measured_settings(device, kind))
    record = data_table(BANDS_TABLE)["bands"][device or OTHER_CLASS][kind][support]
    return ErrorBand(
        low=min(of_runs.low, record["low"]),
        high=max(of_runs.high, record["high"]),
        rows=record["groups"],
        basis=f"the fastest measured steps over plans of {record['groups']} groups: {record['basis']}",
    )


# By how much measured pairs of runs correct the gain that the cost model says of a setting.
#
# A pair is two measured runs of one work that differ in some settings s, by d_s = 1 where the second has it
# and -1 where the first has. With y = ln(measured ratio) - ln(predicted ratio), y = sum_s d_s theta_s +
# noise. The correction theta_s of the logarithm of a step with s is N(0, sigma^2) before any pair: the cost
# model's own gain is right in the mean, with the error of pairs as its spread. The posterior is that of
# linear regression with a normal prior (Bishop 2006, "Pattern Recognition and Machine Learning", equations
# 3.49 to 3.51):
#
#     precision = (I + sum_i w_i d_i d_i') / sigma^2,    mean = precision^-1 sum_i w_i d_i y_i / sigma^2,
#
# for one observation of variance sigma^2 / w_i of each source that changed these settings on one class of
# device with one kind of model: the mean of its pairs, which share what its authors did. A step with settings
# s is expected to take exp(sum_s mean_s) times its price, the median of the posterior.
# `costmodel/data/gain_posterior.yaml` has the observations.


GAINS_TABLE = "gain_posterior.yaml"
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
        By setting, those with `LEAST_PAIRS` pairs or more; by the formula above `GAINS_TABLE`.
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
    return tuple(GainObservation(**row) for row in data_table(GAINS_TABLE)["observations"])


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
    spread = float(data_table(GAINS_TABLE)["spread"]["value"])
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
        lowest = np.full(shape, np.inf)
        for values in product(*(_OPEN_VALUES[name] for name in undecided)):
            chosen: dict[str, Any] = dict(zip(undecided, values, strict=True))
            logs = self._log(workload, replace(layouts, **chosen))
            lowest = np.minimum(lowest, np.broadcast_to(logs, shape))
        return np.asarray(np.exp(lowest), dtype=np.float64)

    def _log(self, workload: Workload, layouts: Layout) -> FloatArray:
        total: FloatArray = np.zeros(())
        for name, has in _settings(workload, layouts):
            if name in self.shifts:
                total = total + self.shifts[name].mean * np.asarray(has, dtype=np.float64)
        return total

    def of(self, settings: Iterable[str]) -> float:
        """Of one run with some settings.

        Parameters
        ----------
        settings : iterable of str
            `priced_settings` of the run.

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

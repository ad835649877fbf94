"""What measured runs say of a device class: the best utilisation reached, and how far predictions are off."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from meshwright.costmodel.constants.data_files import data_table

OTHER = "other"
"""Device classes without measured runs, and frameworks, share the bands of this name."""
POINT_ESTIMATE = 0.5
"""Memory risk at which a prediction is taken as it stands."""
_Z95 = 1.6448536269514722
"""Standard deviations from the middle of a normal distribution to its 95th percentile."""
_SLOW_NODES = 0.005
_SLOWER_BY = 0.10
ANY_FRAMEWORK = "any framework"
"""How the basis of a band ends that no run of the framework itself went into."""
GEMM_BITS = {"fp8": 8, "mxfp8": 8, "nvfp4": 4}


@dataclass(frozen=True, kw_only=True)
class MeasuredMfu:
    """Model FLOP utilisation over the dense 16-bit peak, and the run that reached it."""

    mfu: float
    run: str
    device_class: str


@dataclass(frozen=True, kw_only=True)
class ErrorBand:
    """Measured over predicted step time of runs whose source was not fitted on: 5th and 95th percentile."""

    low: float
    high: float
    rows: int
    basis: str
    """Which measured runs: of a device class and a framework, or the wider group that stands in for them."""


def device_classes() -> tuple[str, ...]:
    """Every class with measured runs.

    Returns
    -------
    tuple of str
    """
    return tuple(data_table("best_measured.yaml")["classes"])


def device_class(device_name: str) -> str | None:
    """The class that a device is judged with.

    Parameters
    ----------
    device_name : str
        As in the catalog.

    Returns
    -------
    str or None
        None for a device that nobody has published runs of.
    """
    for name, devices in data_table("best_measured.yaml")["classes"].items():
        if device_name in devices:
            return str(name)
    return None


def best_measured_mfu(device_name: str, precision: str, *, experts: bool) -> MeasuredMfu | None:
    """The best measured run of a device's class, of one kind of model, at a precision.

    Parameters
    ----------
    device_name : str
        As in the catalog.
    precision : str
        bf16, fp16, fp8, mxfp8 or nvfp4.
    experts : bool
        Whether the model has experts.

    Returns
    -------
    MeasuredMfu or None
        Of dense models where nobody has published one with experts; None where there is neither.
        `costmodel/data/best_measured.yaml` has the sources.
    """
    name = device_class(device_name)
    runs = data_table("best_measured.yaml")["best"].get(name, {})
    bits = GEMM_BITS.get(precision, 16)
    best = runs.get("dense", {}).get(bits)
    if experts:
        best = runs.get("experts", {}).get(bits, best)
    if name is None or best is None:
        return None
    return MeasuredMfu(mfu=best["mfu"], run=best["run"], device_class=name)


def error_band(device_name: str, framework: str) -> ErrorBand:
    """How far measured steps of a device's class and a software profile lie from predictions.

    Few rows lean on the rows of the device class, those on the rows of the framework, those on all; see
    docs/accuracy.md. Where nobody measured the framework on the class, the band is that of stacks that the
    fit had never seen, and says so.

    Parameters
    ----------
    device_name : str
        As in the catalog.
    framework : str
        A software profile.

    Returns
    -------
    ErrorBand
        Measured over predicted step time.
    """
    table, name = data_table("error_bands.yaml"), device_class(device_name)
    of_device = table["bands"].get(name, table["bands"][OTHER])
    band = ErrorBand(**of_device.get(framework, of_device[OTHER]))
    if name is not None and not band.basis.endswith(ANY_FRAMEWORK):
        return band
    unmeasured = ErrorBand(**table["unmeasured"])
    where = device_name if name is None else f"{name} with {framework}"
    return replace(unmeasured, basis=f"{unmeasured.basis}; none was measured on {where}")


def with_stragglers(band: ErrorBand, nodes: float) -> ErrorBand:
    """The band of a run on many nodes, of which some may be slow.

    Half a percent of machines run about 10 % slower, and pace the step of all (MegaScale, arXiv 2402.15627,
    sections 5 and 6): the upper end rises with the chance that at least one node is such.

    Parameters
    ----------
    band : ErrorBand
        Of runs that were published, mostly on few and picked nodes.
    nodes : float
        Nodes of the run, at least 1.

    Returns
    -------
    ErrorBand
    """
    chance = 1.0 - (1.0 - _SLOW_NODES) ** nodes
    return replace(band, high=band.high * (1.0 + _SLOWER_BY * chance))


def fit_probability(predicted_gib: float, room_gib: float, band: ErrorBand | None = None) -> float:
    """How likely a run is to fit, from how far measured peaks lie from predicted ones.

    The logarithm of measured over predicted is taken as normal, with the 5th and 95th percentile of the
    memory band.

    Parameters
    ----------
    predicted_gib : float
        Predicted peak of the fullest GPU, above 0.
    room_gib : float
        What is there for it, above 0.
    band : ErrorBand, optional
        Measured over predicted peaks; `memory_band` by default.

    Returns
    -------
    float
        0 to 1; more than a half says that it fits.
    """
    of_peaks = band or memory_band()
    low, high = math.log(of_peaks.low), math.log(of_peaks.high)
    spread = (high - low) / (2.0 * _Z95)
    away = (math.log(room_gib / predicted_gib) - (low + high) / 2.0) / spread
    return 0.5 * math.erfc(-away / math.sqrt(2.0))


def memory_margin(risk: float, band: ErrorBand | None = None) -> float:
    """What measured over predicted peaks exceed in a given share of runs, taken as in `fit_probability`.

    Parameters
    ----------
    risk : float
        Share of runs that may exceed it, above 0, at most 0.5. At 0.5 the prediction is taken as it stands.
    band : ErrorBand
        Of the runs that count; `memory_band` when None.

    Returns
    -------
    float
        Measured over predicted GiB, at least 1: 1 at a risk of 0.5, the band's `high` at 0.05.
    """
    if risk >= POINT_ESTIMATE:
        return 1.0
    band = band or memory_band()
    low, high = math.log(band.low), math.log(band.high)
    spread = (high - low) / (2.0 * _Z95)
    quantile = NormalDist((low + high) / 2.0, spread).inv_cdf(1.0 - risk)
    return max(math.exp(quantile), 1.0)


def memory_band() -> ErrorBand:
    """How far measured peaks of memory lie from predicted ones, on all devices and frameworks.

    Returns
    -------
    ErrorBand
        Measured over predicted GiB.
    """
    return ErrorBand(**data_table("error_bands.yaml")["memory"])

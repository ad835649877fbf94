"""The records of `costmodel/data`: every calibrated constant, its value, its source, how far it may move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any, Literal

from meshwright.documents import packaged_document

# The files of `costmodel/data`, each read once.


@cache
def data_table(name: str) -> dict[str, Any]:
    """One file as plain data, read once and shared by all callers, who may not change it.

    Parameters
    ----------
    name : str
        Name of a file of `costmodel/data`, with its ending, such as `devices.yaml`.

    Returns
    -------
    dict
        What the YAML holds.
    """
    table: dict[str, Any] = packaged_document("meshwright.costmodel", f"data/{name}")
    return table


FILES = ("devices.yaml", "frameworks.yaml")
PROVENANCE = "calibration"
"""The one section of a file that holds no constants: what the free ones were fitted on."""

ConstantValue = float | int | bool
Overrides = Mapping[str, float]
"""Other values for some constants, by path, as a calibration tries them."""


@dataclass(frozen=True, kw_only=True)
class ConstantRecord:
    """One constant, at a path such as `architectures.hopper.hbm_fraction`."""

    path: str
    file: str
    source: str
    value: ConstantValue | None = None
    """None where another record holds it."""
    same_as: str | None = None
    """Path of the record that holds the value."""
    prior: float | None = None
    """The physical value that a fit starts from; None for a pinned constant."""
    spread: float | None = None
    """Relative width, one standard deviation of the logarithm, that the prior leaves."""

    @property
    def free(self) -> bool:
        """Whether a calibration may move it."""
        return self.prior is not None


@cache
def constant_records() -> Mapping[str, ConstantRecord]:
    """Every record of both files by path.

    Returns
    -------
    mapping of str to ConstantRecord
        Keys such as `architectures.hopper.hbm_fraction`.

    Raises
    ------
    ValueError
        For a malformed record, with its path.
    """
    records: dict[str, ConstantRecord] = {}
    for file in FILES:
        document = data_table(file)
        sections = {name: node for name, node in document.items() if name != PROVENANCE}
        _collect(records, file, "", sections)
    for record in records.values():
        holder = records.get(record.same_as or record.path)
        if holder is None or holder.value is None:
            raise ValueError(
                f"{record.file}: {record.path} takes its value from {record.same_as}, has none"
            )
    return records


def _collect(records: dict[str, ConstantRecord], file: str, path: str, node: object) -> None:
    """Adds the records below a path of a file."""
    if not isinstance(node, dict):
        raise ValueError(f"{file}: {path} is {node!r}; a record with a source is needed")
    if "source" in node:
        records[path] = _record(file, path, node)
        return
    for name, child in node.items():
        _collect(records, file, f"{path}.{name}" if path else str(name), child)


def _record(file: str, path: str, node: dict[str, Any]) -> ConstantRecord:
    kinds = ({"value", "source"}, {"value", "prior", "spread", "source"}, {"as", "source"})
    if set(node) not in kinds:
        allowed = [sorted(kind) for kind in kinds]
        raise ValueError(f"{file}: {path} has {sorted(node)}; allowed are {allowed}")
    numbers = {name: node[name] for name in ("value", "prior", "spread") if name in node}
    positive = all(isinstance(x, int | float) and x > 0 for x in numbers.values())
    if "prior" in numbers and not positive:
        raise ValueError(
            f"{file}: {path}: value, prior and spread of a free constant are positive numbers"
        )
    same_as = None
    if "as" in node:
        section, _, rest = path.partition(".")
        other = str(node["as"])
        same_as = other if "." in other else f"{section}.{other}.{rest.rpartition('.')[2]}"
    source = str(node["source"])
    return ConstantRecord(path=path, file=file, source=source, same_as=same_as, **numbers)


@cache
def _fields(prefix: str) -> tuple[tuple[str, str, ConstantValue], ...]:
    """(field, path of the record that holds it, value) of every record right below a prefix."""
    records = constant_records()
    rows = []
    for path, record in records.items():
        parent, _, field = path.rpartition(".")
        if parent != prefix:
            continue
        holder = records[record.same_as or path]
        assert holder.value is not None
        rows.append((field, holder.path, holder.value))
    return tuple(rows)


def layered_values(*prefixes: str, overrides: Overrides | None = None) -> dict[str, Any]:
    """The constants below prefixes of paths; where several have one, the last prefix wins.

    Parameters
    ----------
    *prefixes : str
        Paths such as `architectures.hopper`.
    overrides : mapping of str to float, optional
        Other values, by the path of the record that holds the constant.

    Returns
    -------
    dict of str to float, int or bool
        Values by the last word of their path.
    """
    values: dict[str, Any] = {}
    for prefix in prefixes:
        for field, path, value in _fields(prefix):
            values[field] = overrides.get(path, value) if overrides else value
    return values


def effective_paths(*prefixes: str) -> dict[str, str]:
    """Path of the record behind each constant below prefixes of paths; the last prefix that has it wins.

    Parameters
    ----------
    *prefixes : str
        Paths such as `architectures.hopper`.

    Returns
    -------
    dict of str to str
        Paths by the last word of the constant's own.
    """
    return {field: path for prefix in prefixes for field, path, _ in _fields(prefix)}


def names_in(section: str) -> tuple[str, ...]:
    """Every name of a section, of both files, also where an entry changes no constant.

    Parameters
    ----------
    section : str
        A key at the top of a file, such as `frameworks`.

    Returns
    -------
    tuple of str
        In alphabetical order.
    """
    names: set[str] = set()
    for file in FILES:
        names |= set(data_table(file).get(section, {}))
    return tuple(sorted(names))


# What measured runs say of a device class: the best utilisation reached, and how far predictions are off.


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
    """Share of the peak, above 0."""
    run: str
    """The run in words."""
    device_class: str


@dataclass(frozen=True, kw_only=True)
class ErrorBand:
    """Measured over predicted step time of runs whose source was not fitted on: 5th and 95th percentile."""

    low: float
    """5th percentile, above 0."""
    high: float
    """95th percentile."""
    rows: int
    """Measured runs that it comes from."""
    basis: str
    """Which measured runs: of a device class and a framework, or the wider group that stands in for them."""
    of_own_runs: bool = False
    """Whether the user calibrated on these runs."""


def device_classes() -> tuple[str, ...]:
    """Every class of devices with measured runs.

    Returns
    -------
    tuple of str
        As `costmodel/data/best_measured.yaml` has them.
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


@dataclass(frozen=True, kw_only=True)
class MeasuredGain:
    """What one execution choice saved where runs with and without it were published."""

    gain: float
    """Share of the step without the choice, by the geometric mean; below 0 where runs were slower with it."""
    pairs: int
    """Pairs of runs, at least 1."""
    measured_on: str
    """Devices and kinds of models."""


def measured_gain(
    choice: str, value: str | bool | float, device_name: str, *, experts: bool
) -> MeasuredGain | None:
    """What published pairs of runs say of a choice, of the nearest of them.

    Those on the class of device with the kind of model; else on that class with any model; else with that
    kind of model on any device. `costmodel/data/measured_gains.yaml` has the pairs.

    Parameters
    ----------
    choice : str
        Name of an execution choice, such as `ep_overlap`.
    value : str, bool or float
        Its value, against the plain one.
    device_name : str
        As in the catalog.
    experts : bool
        Whether the model has experts.

    Returns
    -------
    MeasuredGain or None
        None where nobody has published such a pair.
    """
    rows = [
        row
        for row in data_table("measured_gains.yaml")["gains"]
        if row["choice"] == choice and value in row["value"]
    ]
    device, kind = device_class(device_name), "experts" if experts else "dense"
    on_class = [row for row in rows if device is not None and device_class(row["device"]) == device]
    with_kind = [row for row in rows if row["kind"] == kind]
    near = [row for row in on_class if row["kind"] == kind] or on_class or with_kind
    if not near:
        return None
    mean = math.exp(sum(math.log(row["ratio"]) for row in near) / len(near))
    devices = " and ".join(sorted({row["device"] for row in near}))
    words = {"dense": "dense models", "experts": "models with experts"}
    kinds = " and ".join(words[name] for name in sorted({row["kind"] for row in near}))
    return MeasuredGain(gain=1.0 - mean, pairs=len(near), measured_on=f"{devices}, {kinds}")


def choices_in_pairs() -> tuple[str, ...]:
    """Names of the execution choices of which `measured_gain` knows pairs.

    Returns
    -------
    tuple of str
        Sorted.
    """
    return tuple(sorted({row["choice"] for row in data_table("measured_gains.yaml")["gains"]}))


def adapters_band(of: Literal["step_time", "memory"]) -> ErrorBand:
    """How far measured runs that train adapters lie from predictions, on all devices and frameworks.

    Parameters
    ----------
    of : str
        step_time, or memory for peaks.

    Returns
    -------
    ErrorBand
        Measured over predicted; `costmodel/data/adapter_bands.yaml` says of how many runs.
    """
    return ErrorBand(**data_table("adapter_bands.yaml")[of])


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
        The band with a `high` up to 1.1 times as large.
    """
    chance = 1.0 - (1.0 - _SLOW_NODES) ** nodes
    return replace(band, high=band.high * (1.0 + _SLOWER_BY * chance))


def fit_probability(predicted_gib: float, room_gib: float, band: ErrorBand | None = None) -> float:
    """How likely a run is to fit, from how far measured peaks lie from predicted ones.

    The logarithm of measured over predicted is taken as normal, with the 5th and 95th percentile of the
    memory band, which `costmodel/data/error_bands.yaml` has with its runs (docs/accuracy.md).

    Parameters
    ----------
    predicted_gib : float
        Predicted peak of the fullest GPU, GiB, above 0.
    room_gib : float
        Memory that there is for it, GiB, above 0.
    band : ErrorBand, optional
        Measured over predicted peaks; `memory_band` by default.

    Returns
    -------
    float
        0 to 1; more than a half says that it fits.
    """
    logarithm = _logarithm_of_peaks(band)
    away = (math.log(room_gib / predicted_gib) - logarithm.mean) / logarithm.stdev
    return 0.5 * math.erfc(-away / math.sqrt(2.0))


def _logarithm_of_peaks(band: ErrorBand | None) -> NormalDist:
    """Of measured over predicted peaks."""
    of_peaks = band or memory_band()
    low, high = math.log(of_peaks.low), math.log(of_peaks.high)
    return NormalDist((low + high) / 2.0, (high - low) / (2.0 * _Z95))


def memory_margin(risk: float, band: ErrorBand | None = None) -> float:
    """The ratio of measured to predicted peaks that a given share of runs exceeds.

    A quantile of the distribution that `fit_probability` takes.

    Parameters
    ----------
    risk : float
        Share of runs that may exceed it, above 0, at most 0.5. At 0.5 the prediction is taken as it stands.
    band : ErrorBand, optional
        Measured over predicted peaks; `memory_band` by default.

    Returns
    -------
    float
        Measured over predicted GiB, at least 1: 1 at a risk of 0.5, the band's `high` at 0.05.
    """
    if risk >= POINT_ESTIMATE:
        return 1.0
    return max(math.exp(_logarithm_of_peaks(band).inv_cdf(1.0 - risk)), 1.0)


def memory_band() -> ErrorBand:
    """How far measured peaks of memory lie from predicted ones, on all devices and frameworks.

    Returns
    -------
    ErrorBand
        Measured over predicted GiB.
    """
    return ErrorBand(**data_table("error_bands.yaml")["memory"])

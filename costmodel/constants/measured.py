"""What measured runs say of a device class: the best utilisation reached, and how far predictions are off."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.costmodel.constants.data_files import data_table

OTHER = "other"
"""Device classes without measured runs, and frameworks, share the bands of this name."""
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
    """Every class with measured runs."""
    return tuple(data_table("best_measured.yaml")["classes"])


def device_class(device_name: str) -> str | None:
    """The class that a device is judged with; None for one that nobody has published runs of."""
    for name, devices in data_table("best_measured.yaml")["classes"].items():
        if device_name in devices:
            return str(name)
    return None


def best_measured_mfu(device_name: str, precision: str) -> MeasuredMfu | None:
    """The best measured run of a device's class at a precision; None where nobody has published one."""
    name = device_class(device_name)
    found = data_table("best_measured.yaml")["best"].get(name, {}).get(GEMM_BITS.get(precision, 16))
    if name is None or found is None:
        return None
    return MeasuredMfu(mfu=found["mfu"], run=found["run"], device_class=name)


def error_band(device_name: str, framework: str) -> ErrorBand:
    """How far measured steps of a device's class and a software profile lie from predictions.

    Few rows lean on the rows of the device class, those on the rows of the framework, those on all; see
    docs/accuracy.md.
    """
    bands = data_table("error_bands.yaml")["bands"]
    of_device = bands.get(device_class(device_name), bands[OTHER])
    return ErrorBand(**of_device.get(framework, of_device[OTHER]))


def memory_band() -> ErrorBand:
    """How far measured peaks of memory lie from predicted ones, on all devices and frameworks."""
    return ErrorBand(**data_table("error_bands.yaml")["memory"])

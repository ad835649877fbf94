"""What measured runs say of a device class: the best utilisation reached, and how far predictions are off."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

GEMM_BITS = {"fp8": 8, "mxfp8": 8, "nvfp4": 4}


@dataclass(frozen=True, kw_only=True)
class MeasuredMfu:
    """Model FLOP utilisation over the dense 16-bit peak, and the run that reached it."""

    mfu: float
    run: str
    device_class: str


@dataclass(frozen=True, kw_only=True)
class ErrorBand:
    """Measured over predicted step time of the validation runs: 5th and 95th percentile."""

    low: float
    high: float
    rows: int
    device_class: str


@cache
def _table(name: str) -> dict[str, Any]:
    text = resources.files("costmodel.data").joinpath(name).read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def device_class(device_name: str) -> str | None:
    """The class that a device is judged with; None for one that nobody has published runs of."""
    for name, devices in _table("best_measured.yaml")["classes"].items():
        if device_name in devices:
            return str(name)
    return None


def best_measured_mfu(device_name: str, precision: str) -> MeasuredMfu | None:
    """The best measured run of a device's class at a precision; None where nobody has published one."""
    name = device_class(device_name)
    found = _table("best_measured.yaml")["best"].get(name, {}).get(GEMM_BITS.get(precision, 16))
    if name is None or found is None:
        return None
    return MeasuredMfu(mfu=found["mfu"], run=found["run"], device_class=name)


def error_band(device_name: str) -> ErrorBand:
    """How far measured steps on a device's class lie from predictions; of all rows where it has too few."""
    bands = _table("error_bands.yaml")["bands"]
    name = device_class(device_name)
    chosen = name if name is not None and name in bands else "all"
    return ErrorBand(device_class=chosen, **bands[chosen])

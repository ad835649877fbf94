"""The best utilisation published for a device class: a ceiling that a sane plan stays under."""

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


@cache
def _table() -> dict[str, Any]:
    text = resources.files("costmodel.data").joinpath("best_measured.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def best_measured_mfu(device_name: str, precision: str) -> MeasuredMfu | None:
    """The best measured run of a device's class at a precision; None where nobody has published one."""
    table, bits = _table(), GEMM_BITS.get(precision, 16)
    for device_class, devices in table["classes"].items():
        if device_name in devices:
            found = table["best"].get(device_class, {}).get(bits)
            return (
                MeasuredMfu(mfu=found["mfu"], run=found["run"], device_class=device_class) if found else None
            )
    return None

"""What a calibration learned, as its command prints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwright.costmodel.calibration import Calibration
from meshwright.costmodel.rates import (
    Constants,
    calibrated_constants,
    device_rates,
    fabric_links,
    kernel_rates,
)
from meshwright.costmodel.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One constant before and after."""

    name: str
    unit: str
    assumed: float
    value: float
    low: float
    high: float
    """One posterior spread below and above the value."""
    effect_pct: float
    """Mean change of the predicted steps, or peaks of memory, that its move makes."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class RowErrors:
    """Predicted over measured of one row, minus 1, in percent."""

    id: str
    what: str
    """step time or memory."""
    measured: float
    """Seconds or GiB."""
    before_pct: float
    after_pct: float
    left_out_pct: float
    """By constants that were calibrated without this row."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A run that would teach most."""

    layout: dict[str, Any]
    """Settings of a run file that differ between suggestions."""
    step_time_s: float
    spread_pct: float
    """One spread of its own predicted step time."""
    spread_before_pct: float
    """Mean spread of the predicted step times of all layouts that were looked at, now."""
    spread_after_pct: float
    """And once this one was measured."""


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """The stack that was made, and how far it can be trusted."""

    calibration: Calibration
    rows: tuple[RowErrors, ...]
    learned: tuple[Learned, ...]
    """Largest effect first."""
    suggestions: tuple[Suggestion, ...]
    benchmarks: tuple[str, ...]
    notes: tuple[str, ...]

    def mean_error_pct(self, what: str, when: str) -> float | None:
        """Mean size of the errors of steps or of memory.

        Parameters
        ----------
        what : str
            step time or memory.
        when : str
            before, after or left_out.

        Returns
        -------
        float or None
            Percent; None without such rows.
        """
        errors = [abs(getattr(row, f"{when}_pct")) for row in self.rows if row.what == what]
        return sum(errors) / len(errors) if errors else None

    def as_document(self) -> dict[str, Any]:
        """What `calibrate --json` prints.

        Returns
        -------
        dict
        """
        whens = ("before", "after", "left_out")
        return {
            "schema": 1,
            "stack": self.calibration.model_dump(mode="json"),
            "errors": {
                what.replace(" ", "_"): {
                    f"{when}_pct": self.mean_error_pct(what, when) for when in whens
                }
                for what in ("step time", "memory")
            },
            "rows": [asdict(row) for row in self.rows],
            "constants": [asdict(constant) for constant in self.learned],
            "measure_next": [asdict(suggestion) for suggestion in self.suggestions],
            "benchmarks": list(self.benchmarks),
            "notes": list(self.notes),
        }


# What a factor means: the rate or the time that the cost model takes, before and after, in a sentence.


Read = Callable[[Workload, Constants], float]


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A quantity of the cost model, and the sentence that its change makes."""

    unit: str
    read: Read
    sentence: str
    """With `after` and `before` to fill in."""


def _gemm_tflops(workload: Workload, constants: Constants) -> float:
    return kernel_rates(workload, constants).gemm_flops / 1e12


def _attention_tflops(workload: Workload, constants: Constants) -> float:
    return kernel_rates(workload, constants).attention_forward_flops / 1e12


def _narrow_tflops(workload: Workload, constants: Constants) -> float:
    device = workload.cluster.device
    precision = "fp8" if device.peak_fp8_tflops else "bf16"
    return device_rates(device, precision, constants).gemm_flops / 1e12


def _exchange_gb_per_s(workload: Workload, constants: Constants) -> float:
    return float(fabric_links(workload, constants).all_to_all_bytes_per_s[0]) / 1e9


def _hbm_gb_per_s(workload: Workload, constants: Constants) -> float:
    return kernel_rates(workload, constants).hbm_bytes_per_s / 1e9


def _scale_up_gb_per_s(workload: Workload, constants: Constants) -> float:
    return float(fabric_links(workload, constants).bytes_per_s[0]) / 1e9


def _network_gb_per_s(workload: Workload, constants: Constants) -> float:
    rates = np.asarray(fabric_links(workload, constants).bytes_per_s)
    return float(rates[min(1, len(rates) - 1)]) / 1e9


def _of_framework(name: str, scale: float = 1.0) -> Read:
    return lambda _, constants: scale * float(getattr(constants.framework, name))


def _of_factors(name: str, neutral: float) -> Read:
    def read(workload: Workload, _: Constants) -> float:
        return neutral if workload.factors is None else float(getattr(workload.factors, name))

    return read


def _bytes_times(what: str, name: str) -> Meaning:
    sentence = f"{what} take {{after}} times the bytes that were counted"
    return Meaning(unit="x", read=_of_factors(name, 1.0), sentence=sentence)


MEANINGS: dict[str, Meaning] = {
    "gemm": Meaning(
        unit="TFLOP/s",
        read=_gemm_tflops,
        sentence="your matrix products reach {after} TFLOP/s at their best, {before} were assumed",
    ),
    "gemm_narrow": Meaning(
        unit="TFLOP/s",
        read=_narrow_tflops,
        sentence="your FP8 matrix products reach {after} TFLOP/s at their best, {before} were assumed",
    ),
    "grouped_gemm": Meaning(
        unit="x",
        read=lambda _, constants: constants.shared["grouped_gemm_factor"],
        sentence="grouped products of experts run at {after} of the dense rate, {before} were assumed",
    ),
    "attention": Meaning(
        unit="TFLOP/s",
        read=_attention_tflops,
        sentence="your attention runs forward at {after} TFLOP/s, {before} were assumed",
    ),
    "hbm": Meaning(
        unit="GB/s",
        read=_hbm_gb_per_s,
        sentence="norms, activations and the optimizer stream at {after} GB/s, {before} were assumed",
    ),
    "scale_up": Meaning(
        unit="GB/s",
        read=_scale_up_gb_per_s,
        sentence="your GPUs exchange {after} GB/s inside a node, {before} were assumed",
    ),
    "exchange": Meaning(
        unit="GB/s",
        read=_exchange_gb_per_s,
        sentence="all-to-alls move {after} GB/s a GPU inside a node, {before} were assumed",
    ),
    "network": Meaning(
        unit="GB/s",
        read=_network_gb_per_s,
        sentence="your gradients leave at {after} GB/s a GPU, {before} were assumed",
    ),
    "launch": Meaning(
        unit="ms",
        read=_of_framework("launch_layer_s", 1e3),
        sentence="your host takes {after} ms to launch a layer's forward pass, {before} were assumed",
    ),
    "layer_wait_s": Meaning(
        unit="us",
        read=_of_framework("serial_launch_s", 1e6),
        sentence="your GPUs wait {after} us a layer and pass for the host, {before} were assumed",
    ),
    "collective_wait_s": Meaning(
        unit="us",
        read=_of_framework("collective_wait_s", 1e6),
        sentence="a tensor-parallel collective waits {after} us for the slowest rank, {before} were assumed",
    ),
    "data_parallel_exposed": Meaning(
        unit="",
        read=_of_framework("dp_interference"),
        sentence="compute pays for {after} of the gradient traffic beside it, {before} were assumed",
    ),
    "expert_exposed": Meaning(
        unit="",
        read=lambda _, constants: 1.0 - constants.framework.ep_hidden,
        sentence="overlap leaves {after} of the expert all-to-all in sight, {before} were assumed",
    ),
    "recompute": Meaning(
        unit="",
        read=_of_framework("recompute_fraction"),
        sentence="full recomputation runs {after} of a forward pass again, {before} were assumed",
    ),
    "step_overhead_s": Meaning(
        unit="ms",
        read=_of_framework("step_overhead_s", 1e3),
        sentence="a step loses {after} ms beside its layers, {before} were assumed",
    ),
    "head": Meaning(
        unit="x",
        read=_of_framework("head_factor"),
        sentence="your head and loss take {after} times what was counted",
    ),
    "virtual_stage_s": Meaning(
        unit="us",
        read=_of_framework("virtual_stage_s", 1e6),
        sentence="a micro-batch loses {after} us at each virtual stage, {before} were assumed",
    ),
    "activation_memory": _bytes_times("saved activations", "activation_memory"),
    "state_memory": _bytes_times("weights, gradients and optimizer states", "state_memory"),
    "loss_memory": _bytes_times("logits and loss", "loss_memory"),
    "fixed_memory_gib": Meaning(
        unit="GiB",
        read=_of_factors("fixed_memory_gib", 0.0),
        sentence="every GPU holds {after} GiB that no tensor explains, {before} were assumed",
    ),
}
"""Of every factor of `NAMES`."""


def quantity(name: str, workload: Workload) -> float:
    """What the cost model takes for a workload, in the unit of `MEANINGS`.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    workload : Workload
        With a calibration, or without.

    Returns
    -------
    float
    """
    return MEANINGS[name].read(workload, calibrated_constants(workload))


def sentence(name: str, before: float, after: float) -> str:
    """What moved, in words.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    before, after : float
        From `quantity`.

    Returns
    -------
    str
    """
    return MEANINGS[name].sentence.format(before=f"{before:.3g}", after=f"{after:.3g}")

"""What one H200 said of itself, and the steps that were measured on it: tests/data/own_runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.calibration import Calibration
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.runs.calibration.machine import (
    Case,
    MachineReport,
    Sizes,
    Timing,
    machine_report,
)
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Run, read_runs
from tests.places import DATA

FOLDER = DATA / "own_runs"
STEPS = FOLDER / "h200_steps.yaml"
IMAGES = FOLDER / "h200_images.yaml"
MACHINE = FOLDER / "h200_machine.json"


class Recorded:
    """Gives the times that were taken on the device; what was not timed there has none."""

    sizes = Sizes()
    gpus = 1

    def __init__(self, measured: dict[str, Any]) -> None:
        self.device, self.software = measured["device"], measured["software"]
        self._points = {
            (point["kind"], point["precision"], tuple(point["sizes"])): point
            for point in measured["points"]
        }

    def seconds(self, case: Case, limit_s: float) -> Timing | None:
        del limit_s
        point = self._points.get((case.kind, case.precision, tuple(case.sizes)))
        if point is None:
            return None
        return Timing(seconds=point["seconds"], kernel=point["kernel"], repeats=point["repeats"])

    def collectives(self, cases: Sequence[Case], limit_s: float) -> list[Timing | None]:
        del limit_s
        return [None for _ in cases]


@cache
def _report(model: str, like: str) -> MachineReport:
    measured = json.loads(MACHINE.read_text(encoding="utf-8"))[model]
    return machine_report(
        Recorded(measured), load_catalog_model(model), load_cluster("dgx-h200"), like=like
    )


def _errors(measured: Callable[[Run], bool], calibration: Calibration | None = None) -> list[float]:
    """Predicted over measured seconds less 1 of the rows asked for."""
    errors = []
    for run in read_runs(STEPS, calibration):
        assert run.measured is not None
        if measured(run):
            assert run.measured.step_time_s is not None
            errors.append(prediction_of(run).step_time_s / run.measured.step_time_s - 1.0)
    return errors


def _tokens(run: Run) -> int:
    return int(run.layout.micro_batch) * run.workload.seq_len


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_operations_alone_are_near_what_is_assumed(model: str) -> None:
    factors = _report(model, "fsdp2").calibration.factors
    assert 0.85 < factors.gemm < 1.0
    assert 0.9 < factors.gemm_narrow < 1.05
    assert 0.9 < factors.attention < 1.05
    assert 0.95 < factors.hbm < 1.0


def test_the_host_launches_at_less_than_half_the_usual_rate() -> None:
    """10.4 us a launch; the usual one, of `piece_launch_s`, is fitted: 3.4 us."""
    assert 2.2 < _report("llama-3-8b", "fsdp2").calibration.factors.launch < 3.3


def test_peaks_of_adapters_are_told_within_6_percent() -> None:
    for run in read_runs(STEPS):
        if run.workload.adapters is None:
            continue
        assert run.measured is not None
        assert prediction_of(run).memory_gib == pytest.approx(run.measured.memory_gib, rel=0.06), (
            run.id
        )


def test_peaks_of_lora_without_fsdp_are_told_within_3_percent() -> None:
    """Eager norms, an input for each adapter, and 12 bytes a logit: each is needed for it."""
    found = 0
    for run in read_runs(STEPS):
        adapters = run.workload.adapters
        if adapters is None or adapters.method != "lora" or not run.workload.autocast:
            continue
        assert run.measured is not None
        assert prediction_of(run).memory_gib == pytest.approx(run.measured.memory_gib, rel=0.03), (
            run.id
        )
        found += 1
    assert found == 13


def test_peaks_with_images_are_told_within_5_percent() -> None:
    """Their steps are not: transformers' encoder attends window by window (docs/limits.md)."""
    found = 0
    for run in read_runs(IMAGES):
        vision = run.workload.model.encoder
        if vision is None or vision.use is None:
            continue
        assert run.measured is not None
        assert not vision.use.trained
        assert prediction_of(run).memory_gib == pytest.approx(run.measured.memory_gib, rel=0.05)
        found += 1
    assert found == 3


def test_peaks_of_full_training_are_told_within_3_percent() -> None:
    """Gradients come as activations go: five rows hold most at the loss, one at its first layer."""
    whole = [run for run in read_runs(STEPS) if run.workload.adapters is None]
    assert len(whole) == 6
    for run in whole:
        assert run.measured is not None
        assert prediction_of(run).memory_gib == pytest.approx(run.measured.memory_gib, rel=0.03), (
            run.id
        )


def test_steps_that_the_gpu_paces_are_told_within_12_percent() -> None:
    errors = _errors(lambda run: _tokens(run) >= 8192 and run.workload.framework == "fsdp2")
    assert len(errors) == 7
    assert max(map(abs, errors)) < 0.12


def test_compiled_steps_are_told_within_9_percent() -> None:
    errors = _errors(lambda run: run.workload.framework == "torchtitan")
    assert len(errors) == 4
    assert max(map(abs, errors)) < 0.09


def test_recomputed_steps_need_what_the_host_said_of_itself() -> None:
    """The host paces short steps: 60 % too fast as shipped, within 30 % with 17 seconds of timing."""

    def short(run: Run) -> bool:
        recomputed = run.workload.adapters is not None and int(run.layout.recompute) != 0
        return recomputed and _tokens(run) <= 2048

    assert min(_errors(short)) < -0.6
    calibrated = _report("mixtral-8x7b", "fsdp2").calibration
    assert max(map(abs, _errors(short, calibrated))) < 0.3


def test_a_machine_alone_tells_its_launches_to_every_framework() -> None:
    of_megatron = _report("llama-3-8b", "megatron-lm").calibration
    for framework in ("fsdp2", "torchtitan", "megatron-lm"):
        assert of_megatron.factors_on("h200-sxm-141gb", framework).launch > 2.2
    assert of_megatron.factors_on("h100-sxm-80gb", "fsdp2").launch == 1.0

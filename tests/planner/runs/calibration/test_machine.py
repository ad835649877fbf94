"""A machine's own word, where the machine is simulated and its constants are known."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import meshwright
from meshwright import cli
from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.calibration import Factors, MeasuredPoint
from meshwright.errors import InputError
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.report.plan_view import first_screen
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.reader import calibration_text, read_calibration
from meshwright.planner.runs.calibration import torch_timer
from meshwright.planner.runs.calibration.machine import (
    COLLECTIVES,
    AloneTimes,
    Case,
    MachineReport,
    Sizes,
    Timing,
    cases_of,
    gemm_shapes_of,
    machine_report,
    measured_points,
)
from meshwright.planner.runs.calibration.service import calibrate_runs
from meshwright.planner.runs.calibration.torch_timer import devices_like, imported_torch
from tests.planner.report.test_views import text
from tests.planner.runs.calibration.own_runs import measured_runs

HIDDEN = Factors(
    gemm=0.83,
    gemm_narrow=1.12,
    grouped_gemm=0.78,
    attention=1.3,
    hbm=0.9,
    launch=1.6,
    scale_up=0.7,
    exchange=0.85,
)


@dataclass
class SimulatedDevice:
    """A machine whose times follow from factors that nobody tells the fit, with noise and outliers."""

    factors: Factors = field(default_factory=Factors)
    cluster: str = "dgx-h100"
    noise: float = 0.0
    outliers: int = 0
    """Every so many-th time is twice as long; none with 0."""
    without: tuple[str, ...] = ()
    """Kinds and precisions that it cannot run."""
    slow: float = 1.0
    gpus: int = 8
    device: str = "simulated"
    software: str = "no software"
    sizes: Sizes = field(default_factory=Sizes)
    asked: list[Case] = field(default_factory=list)

    def seconds(self, case: Case, limit_s: float) -> Timing | None:
        del limit_s
        self.asked.append(case)
        if case.kind in self.without or case.precision in self.without:
            return None
        kernel = "cudnn" if case.kind.startswith("attention") else ""
        exact = AloneTimes(load_cluster(self.cluster)).seconds(case, kernel, self.factors)
        drawn = np.random.default_rng(len(self.asked)).standard_normal()
        outlier = 2.0 if self.outliers and len(self.asked) % self.outliers == 0 else 1.0
        return Timing(
            seconds=self.slow * exact * float(np.exp(self.noise * drawn)) * outlier,
            repeats=10,
            kernel=kernel,
        )

    def collectives(self, cases: Sequence[Case], limit_s: float) -> list[Timing | None]:
        return [self.seconds(case, limit_s) for case in cases]


def report_of(device: SimulatedDevice, model: str = "mixtral-8x7b") -> MachineReport:
    return machine_report(device, load_catalog_model(model), load_cluster(device.cluster))


@pytest.mark.parametrize(
    ("noise", "outliers", "within"),
    [
        pytest.param(0.0, 0, 0.015, marks=pytest.mark.soak),
        pytest.param(0.04, 0, 0.03, marks=pytest.mark.soak),
        pytest.param(0.04, 9, 0.045, marks=pytest.mark.slow),
    ],
)
def test_hidden_constants_are_found_in_a_moment(noise: float, outliers: int, within: float) -> None:
    began = time.perf_counter()
    report = report_of(SimulatedDevice(HIDDEN, noise=noise, outliers=outliers))
    assert time.perf_counter() - began < 30.0
    found = report.calibration.factors
    for name in ("gemm", "gemm_narrow", "grouped_gemm", "hbm", "scale_up", "exchange", "attention"):
        off = getattr(found, name) / getattr(HIDDEN, name) - 1.0
        # Copies, attention and exchanges have few times, so that noise shows in them more.
        few = 2.0 if name in ("hbm", "attention", "exchange") and noise else 1.0
        assert abs(off) < few * within, (name, off)
    assert found.launch == pytest.approx(HIDDEN.launch, rel=0.1)
    assert found.network == 1.0


def test_a_machine_as_the_catalog_has_it_moves_nothing() -> None:
    report = report_of(SimulatedDevice())
    assert {each.name for each in report.moved} == {
        "gemm", "gemm_narrow", "grouped_gemm", "attention", "hbm", "launch", "scale_up", "exchange",
    }  # fmt: skip
    assert all(abs(each.moved_pct) < 1e-3 for each in report.moved)
    assert report.notes == ()


@pytest.mark.slow
def test_what_was_measured_is_far_from_the_prior_where_the_machine_is() -> None:
    """Half the rate is 7 spreads of the prior away: beyond what a fit to runs may say."""
    report = report_of(SimulatedDevice(Factors(gemm=0.5)))
    assert report.calibration.factors.gemm == pytest.approx(0.5, rel=0.02)
    samples = report.calibration.scenarios(200, 1)
    assert np.median([each.factors.gemm for each in samples]) == pytest.approx(0.5, rel=0.05)
    # A step may lie 5 % from what products alone say.
    assert np.std(np.log([each.factors.gemm for each in samples])) == pytest.approx(0.05, rel=0.3)


@pytest.mark.slow
def test_each_class_says_how_it_moved() -> None:
    """H100: 0.6937 of 989.4 TFLOP/s are assumed in a step."""
    report = report_of(SimulatedDevice(HIDDEN))
    moved = {each.name: each for each in report.moved}
    gemm = moved["gemm"]
    assert gemm.assumed == pytest.approx(0.6937 * 989.4, rel=0.01)
    assert gemm.value == pytest.approx(0.83 * gemm.assumed, rel=0.02)
    assert gemm.moved_pct == pytest.approx(-17, abs=1.5)
    assert "your matrix products reach" in gemm.sentence
    # Four sizes on 2 and 8 GPUs; all-reduces and all-gathers are rings, and all-to-alls say of links too.
    assert (moved["exchange"].points, moved["scale_up"].points) == (8, 24)
    assert gemm.scatter_pct < 1.0


def test_what_cannot_run_is_left_as_it_was_and_said() -> None:
    device = SimulatedDevice(HIDDEN, without=("fp8", "grouped-gemm"), gpus=1)
    report = report_of(device)
    factors = report.calibration.factors
    assert (factors.gemm_narrow, factors.grouped_gemm, factors.scale_up) == (1.0, 1.0, 1.0)
    assert [note.split(" cannot")[0] for note in report.notes] == ["gemm fp8", "grouped-gemm bf16"]
    assert not any(case.kind in COLLECTIVES for case in device.asked)
    covariance = np.array(report.calibration.covariance)
    assert covariance[1, 1] == 1.0
    assert covariance[0, 0] < 0.3


@pytest.mark.slow
def test_another_machine_than_the_cluster_is_noticed() -> None:
    report = report_of(SimulatedDevice(slow=1e4))
    assert report.calibration.factors.gemm == pytest.approx(1 / 20, rel=0.02)
    assert any("is --cluster the machine" in note for note in report.notes)
    sentences = {moved.name: moved.sentence for moved in report.moved}
    assert sentences["gemm"].endswith("what was timed lies further off than a stack file holds")
    assert "2,070 were assumed" in sentences["hbm"]
    # A plan draws its constants round these: some lay beyond the edge, which ended in an internal error.
    drawn = report.calibration.scenarios(64, 0)
    assert min(each.factors.hbm for each in drawn) == 1 / 20


def test_a_slow_class_stops_when_its_next_shape_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock runs with what was timed, so that no test waits."""
    now = 0.0

    def passed() -> float:
        return now

    class Timed(SimulatedDevice):
        def seconds(self, case: Case, limit_s: float) -> Timing | None:
            nonlocal now
            timing = super().seconds(case, limit_s)
            assert timing is not None
            now += 2.0 * timing.seconds
            return timing

    monkeypatch.setattr("meshwright.planner.runs.calibration.machine.time.monotonic", passed)
    device, cluster = Timed(slow=2000.0, gpus=1), load_cluster("dgx-h100")
    cases = cases_of(load_catalog_model("mixtral-8x7b"), cluster, device.sizes, 1)
    points, notes = measured_points(device, cases, AloneTimes(cluster), 2.0)
    assert now < 120.0
    assert {point.kind for point in points} >= {"gemm", "attention", "copy", "launch"}
    assert any("shapes within the time" in note for note in notes)
    assert len(points) < len(cases)


def test_shapes_are_those_of_the_model() -> None:
    """Mixtral: 32 heads and 8 of keys of 128 over 4,096; 14,336 wide experts, gated; 32,000 words."""
    model = load_catalog_model("mixtral-8x7b")
    assert set(gemm_shapes_of(model)) >= {(6144, 4096), (4096, 4096), (32000, 4096)}
    cases = cases_of(model, load_cluster("dgx-h100"), Sizes(tokens=(4096,)), 8)
    grouped = {case.sizes for case in cases if case.kind == "grouped-gemm"}
    # 4,096 tokens choose 2 of 8 experts, all of them here or 2.
    assert (1024, 28672, 4096, 8) in grouped
    assert (4096, 4096, 14336, 2) in grouped
    gemms = [case for case in cases if case.kind == "gemm"]
    assert {case.precision for case in gemms} == {"bf16", "fp8"}
    # Forward, and the products of the gradients of input and weight.
    shapes = {case.sizes for case in gemms}
    assert {(4096, 6144, 4096), (4096, 4096, 6144), (6144, 4096, 4096)} <= shapes
    assert {case.sizes[1] for case in cases if case.kind == "all-to-all"} == {2, 8}
    # 64 tokens that choose 1 of 128 experts: each has one row at the least.
    few = cases_of(load_catalog_model("llama-4-maverick"), load_cluster("dgx-h100"), _FEW, 0)
    assert all(min(case.sizes) > 0 for case in few)
    volta = cases_of(model, load_cluster("dgx-v100"), Sizes(), 1)
    assert {case.precision for case in volta if case.kind == "gemm"} == {"fp16"}


_FEW = Sizes(tokens=(64,))


def test_a_product_alone_is_set_against_what_is_usual_alone() -> None:
    """H100: a large product reaches 0.803 of 989.4 TFLOP/s in the search of its best shape."""
    case = Case(kind="gemm", precision="bf16", sizes=(16384, 16384, 16384))
    seconds = AloneTimes(load_cluster("dgx-h100")).seconds(case, "", Factors())
    assert 2.0 * 16384**3 / seconds == pytest.approx(0.803 * 989.4e12, rel=0.03)
    copy = Case(kind="copy", sizes=(2**30,))
    seconds = AloneTimes(load_cluster("dgx-a100")).seconds(copy, "", Factors(hbm=0.5))
    assert seconds == pytest.approx(2 * 2**30 / (0.5 * 0.9 * 2039e9))


@pytest.mark.soak
def test_the_file_is_taken_by_plans(tmp_path: Path) -> None:
    report = report_of(SimulatedDevice(Factors(gemm=0.8, scale_up=0.9)))
    path = tmp_path / "machine.yaml"
    path.write_text(calibration_text(report.calibration), encoding="utf-8")
    assert path.stat().st_size < 200_000
    again = read_calibration(path)
    assert again == report.calibration
    assert again is not None
    assert again.measured is not None
    assert again.measured.points[0].kind == "gemm"
    asked: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 64, "seq_len": 4096}
    asked |= {"pin": "micro_batch=1,cp=1", "without": WITHOUT}
    plain = meshwright.plan("llama-3-8b", **asked, robustness=False)
    slower = meshwright.plan("llama-3-8b", **asked, robustness=False, calibration=path)
    assert slower.predicted is not None
    assert plain.predicted is not None
    assert 1.1 < slower.predicted.step_time_s / plain.predicted.step_time_s < 1.3
    assert f"constants calibrated: {again.name}" in " ".join(text(*first_screen(slower)).split())
    # No run of one's own was measured: the band stays that of optima.
    assert slower.predicted.band_of == "optima"
    # A device of another name keeps its constants.
    asked["cluster"] = "dgx-a100"
    elsewhere = meshwright.plan("llama-3-8b", **asked, robustness=False, calibration=path)
    shipped = meshwright.plan("llama-3-8b", **asked, robustness=False)
    assert elsewhere.objective.step_time_s == shipped.objective.step_time_s


@pytest.mark.soak
def test_beside_runs_it_is_evidence() -> None:
    report = report_of(SimulatedDevice(Factors(gemm=0.8), cluster="dgx-a100"))
    marks = {mark.factors[0]: mark for mark in report.benchmarks}
    assert marks["gemm"].ratio == pytest.approx(0.8, rel=0.02)
    runs = measured_runs(Factors(gemm=0.8), 4)
    alone = calibrate_runs(runs, suggest=False)
    both = calibrate_runs(runs, suggest=False, benchmarks=report.benchmarks)
    assert (
        abs(both.calibration.factors.gemm - 0.8) < abs(alone.calibration.factors.gemm - 0.8) + 0.01
    )
    assert "your matrix products reach" in both.benchmarks[0]


@pytest.mark.parametrize("minutes", [0.0, 500.0, float("nan")])
def test_minutes_have_a_range(minutes: float) -> None:
    with pytest.raises(InputError, match=r"must be from 0\.05 to 120"):
        machine_report(
            SimulatedDevice(),
            load_catalog_model("mixtral-8x7b"),
            load_cluster("dgx-h100"),
            minutes=minutes,
        )


@pytest.mark.parametrize(
    ("name", "memory_gib", "processors", "device"),
    [
        ("NVIDIA H100 80GB HBM3", 79.65, 132, ["h100-sxm-80gb"]),
        ("NVIDIA A100-SXM4-80GB", 79.35, 108, ["a100-sxm-80gb"]),
        ("NVIDIA A100-SXM4-40GB", 39.59, 108, ["a100-sxm-40gb"]),
        ("NVIDIA A100 80GB PCIe", 79.35, 108, ["a100-pcie-80gb"]),
        ("NVIDIA A100-PCIE-40GB", 39.59, 108, ["a100-pcie-40gb"]),
        ("NVIDIA H100 PCIe", 79.65, 114, ["h100-pcie-80gb"]),
        ("NVIDIA H100 NVL", 93.58, 132, ["h100-nvl-94gb"]),
        ("NVIDIA H200", 140.4, 132, ["h200-sxm-141gb"]),
        ("NVIDIA H200 NVL", 140.4, 132, ["h200-nvl-141gb"]),
        ("NVIDIA GH200 480GB", 95.58, 132, ["gh200-96gb"]),
        ("NVIDIA A10G", 22.49, 80, ["a10g"]),
        ("NVIDIA L4", 22.49, 58, ["l4"]),
        ("Tesla V100-SXM2-32GB", 31.75, 80, ["v100-sxm-32gb"]),
        ("NVIDIA GeForce RTX 4090", 23.6, 128, ["rtx-4090"]),
        ("A GPU of tomorrow", 80.0, 132, []),
    ],
)
def test_drivers_names_are_devices_of_the_catalog(
    name: str, memory_gib: float, processors: int, device: list[str]
) -> None:
    assert devices_like(name, memory_gib, processors) == device


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"needs PyTorch.*pip install torch"):
        imported_torch()
    path = tmp_path / "machine.yaml"
    said = CliRunner().invoke(cli.main, ["calibrate", "--measure", "-o", str(path)])
    assert said.exit_code == 2
    assert "pip install torch" in said.output
    assert not path.exists()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """What the command takes for this machine."""
    device = SimulatedDevice(HIDDEN)
    monkeypatch.setattr(torch_timer, "TorchTimer", lambda: device)
    monkeypatch.setattr(device, "is_first", True, raising=False)
    monkeypatch.setattr(device, "catalog_device", lambda: "h100-sxm-80gb", raising=False)
    return device


@pytest.mark.slow
def test_the_command_writes_a_stack(simulated: SimulatedDevice, tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    words = ["calibrate", "--measure", "--minutes", "1", "-o", str(path)]
    said = CliRunner().invoke(cli.main, words)
    assert said.exit_code == 0, said.output
    assert "your matrix products reach" in " ".join(said.stdout.split())
    assert "Price with it: --calibration" in said.stdout
    stack = read_calibration(path)
    assert stack is not None
    assert stack.device == "h100-sxm-80gb"
    assert stack.factors.gemm == pytest.approx(0.83, rel=0.02)
    assert CliRunner().invoke(cli.main, words).exit_code == 2  # the file is there already
    again = CliRunner().invoke(cli.main, [*words, "--force", "--json", "--model", "llama-3-8b"])
    document = json.loads(again.stdout)
    assert document["schema"] == 1
    assert document["stack"]["measured"]["model"] == "llama-3-8b"
    moved = {row["name"]: row for row in document["moved"]}
    assert moved["scale_up"]["moved_pct"] == pytest.approx(-30, abs=2)
    assert "grouped_gemm" not in moved
    assert simulated.asked


def test_an_interrupted_measurement_leaves_no_file(
    simulated: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulated, "seconds", interrupted)
    path = tmp_path / "machine.yaml"
    said = CliRunner().invoke(cli.main, ["calibrate", "--measure", "-o", str(path)])
    assert said.exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_neither_runs_nor_measure_is_an_error(tmp_path: Path) -> None:
    said = CliRunner().invoke(cli.main, ["calibrate", "-o", str(tmp_path / "stack.yaml")])
    assert said.exit_code == 2
    assert "--measure" in said.output


def test_a_point_of_the_file_has_a_time() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        MeasuredPoint(kind="copy", sizes=(8,), seconds=0.0, repeats=1, usual_s=1.0)

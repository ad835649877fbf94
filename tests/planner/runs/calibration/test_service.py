"""What a calibration finds where the truth is known, and what wild rows do to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.costmodel.calibration import NAMES, PRIORS, Calibration, Factors
from meshwright.errors import InputError
from meshwright.planner.report.run_view import calibration_view
from meshwright.planner.runs.calibration.evidence import Benchmark, Evidence, read_sources
from meshwright.planner.runs.calibration.service import (
    CalibrationReport,
    calibrate_runs,
    error_band_of,
)
from meshwright.planner.runs.prediction import predict_run, prediction_of
from meshwright.planner.runs.run_file import Measured, Run, run_from_mapping
from tests.planner.runs.calibration.own_runs import document, measured_runs, stack

TRUTH = Factors(gemm=0.9, hbm=0.8, scale_up=0.85, network=0.6)


def errors_pct(runs: list[Run], calibration: Calibration) -> np.ndarray:
    """Size of the errors of predicted steps under a calibration."""
    errors = []
    for run in runs:
        priced = replace(run, workload=replace(run.workload, calibration=calibration))
        assert run.measured is not None
        assert run.measured.step_time_s is not None
        errors.append(prediction_of(priced).step_time_s / run.measured.step_time_s - 1.0)
    return 100.0 * np.abs(errors)


def mean_pct(report: CalibrationReport, what: str, when: str) -> float:
    """A mean error of a report that has one."""
    mean = report.mean_error_pct(what, when)
    assert mean is not None
    return mean


@pytest.mark.slow
def test_a_few_runs_teach_what_the_others_take() -> None:
    everything = measured_runs(TRUTH, 8)
    report = calibrate_runs(everything[::2], suggest=False)
    assert mean_pct(report, "step time", "before") > 5.0
    rest = errors_pct(everything[1::2], report.calibration)
    assert rest.mean() < 2.5
    assert mean_pct(report, "step time", "left_out") < 4.0


@pytest.mark.soak
def test_the_network_is_named_with_its_rate() -> None:
    """200 Gb/s are 25 GB/s, of which 0.9 were assumed; the truth is 0.6 of that."""
    report = calibrate_runs(measured_runs(Factors(network=0.6), 8), suggest=False)
    moved = next(constant for constant in report.learned if constant.name == "network")
    assert moved.assumed == pytest.approx(22.5)
    assert moved.low < 13.5 < moved.high
    assert "your gradients leave at" in moved.sentence
    assert "22.5 were assumed" in moved.sentence


@pytest.mark.slow
def test_runs_as_predicted_move_nothing() -> None:
    report = calibrate_runs(measured_runs(Factors(), 6), suggest=False)
    assert report.learned == ()
    assert np.allclose(report.calibration.mean, 0.0, atol=1e-3)


def test_a_step_in_milliseconds_is_said() -> None:
    """The runs were said to agree with the shipped constants, and plans had a band of 5 ms to 573 s."""
    runs = measured_runs(Factors(), 3)
    assert runs[0].measured is not None
    step_s = runs[0].measured.step_time_s
    assert step_s is not None
    slip = replace(runs[0], measured=Measured(step_time_s=1000 * step_s))
    report = calibrate_runs([slip, *runs[1:]], suggest=False)
    assert [note for note in report.notes if note.startswith(f"{slip.id}: step time of ")]
    shown = str(calibration_view(report))
    assert "No constant explains what was measured" in shown
    assert "agree with the shipped" not in shown
    assert not calibrate_runs(runs, suggest=False).notes


@pytest.mark.slow
def test_three_rows_never_wreck_it() -> None:
    """One of three took five times as long as it should: the others stay near their prediction."""
    runs = measured_runs(Factors(), 3)
    slow = replace(runs[0], measured=Measured(step_time_s=5.0 * prediction_of(runs[0]).step_time_s))
    report = calibrate_runs([slow, *runs[1:]], suggest=False)
    assert errors_pct(measured_runs(Factors(), 16), report.calibration).mean() < 8.0


@pytest.mark.soak
def test_runs_that_contradict_each_other_move_little() -> None:
    """Peaks of which every second is 1.6 times the others, for a reason that no constant knows."""
    runs = measured_runs(Factors(), 6, memory=True)
    mixed = []
    for index, run in enumerate(runs):
        assert run.measured is not None
        assert run.measured.memory_gib is not None
        peak_gib = run.measured.memory_gib * (1.6 if index % 2 else 1.0)
        mixed.append(replace(run, measured=replace(run.measured, memory_gib=peak_gib)))
    report = calibrate_runs(mixed, suggest=False)
    moved = report.calibration.factors
    assert moved.activation_memory < 1.1
    assert moved.fixed_memory_gib < 2.0
    after = replace(runs[0].workload, calibration=report.calibration)
    predicted_gib = prediction_of(replace(runs[0], workload=after)).memory_gib
    assert predicted_gib == pytest.approx(prediction_of(runs[0]).memory_gib, rel=0.1)


@pytest.mark.slow
def test_memory_is_learned_from_peaks() -> None:
    truth = Factors(activation_memory=1.2, fixed_memory_gib=2.0)
    runs = measured_runs(truth, 12, memory=True)
    report = calibrate_runs(runs[::2], suggest=False)
    assert mean_pct(report, "memory", "before") > 8.0
    assert mean_pct(report, "memory", "left_out") < 3.0
    assert report.calibration.memory is not None


def test_a_run_that_fell_out_of_memory_counts() -> None:
    """A layout that is told to fit and did not: more memory is predicted afterwards."""
    run = run_from_mapping(
        document({"tp": 1, "pp": 1, "micro_batch": 2, "recompute": "none"}), where="test"
    )
    fails = replace(run, measured=Measured(step_time_s=None, out_of_memory=True))
    told_gib = prediction_of(run).memory_gib
    assert told_gib is not None
    report = calibrate_runs([fails, *measured_runs(Factors(), 2)], suggest=False)
    after = replace(run, workload=replace(run.workload, calibration=report.calibration))
    now_gib = prediction_of(after).memory_gib
    assert told_gib < 70.0
    assert now_gib is not None
    assert now_gib > 1.05 * told_gib


@pytest.mark.soak
def test_an_unknown_framework_becomes_a_stack_of_its_own() -> None:
    runs = [replace(run, framework_words="my-stack") for run in measured_runs(TRUTH, 2)]
    report = calibrate_runs(runs, suggest=False)
    assert report.calibration.name == "my-stack"
    assert "begins from" in report.notes[0]
    settings = {"tp": 1, "pp": 1, "micro_batch": 1}
    named = document(settings, framework="my-stack")
    del named["measured"]
    with pytest.raises(InputError, match="not a known framework"):
        run_from_mapping(named, where="test")
    read = run_from_mapping(named, where="test", calibration=report.calibration)
    assert read.workload.framework == report.calibration.framework


def test_runs_of_two_devices_are_refused() -> None:
    runs = measured_runs(Factors(), 2)
    work = runs[1].workload
    device = work.cluster.device.model_copy(update={"name": "another"})
    cluster = work.cluster.model_copy(update={"device": device})
    other = replace(runs[1], workload=replace(work, cluster=cluster))
    with pytest.raises(InputError, match="several devices: a100-sxm-80gb, another"):
        calibrate_runs([runs[0], other])


def of_framework(runs: list[Run], words: str) -> list[Run]:
    return [replace(run, framework_words=words) for run in runs]


@pytest.mark.soak
def test_runs_of_another_framework_tell_of_the_device_alone() -> None:
    """Two runs of one framework and eight of another, on the same slow GPUs; the other loses 80 ms a step."""
    own = measured_runs(Factors(gemm=0.8), 2)
    others = of_framework(measured_runs(Factors(gemm=0.8, step_overhead_s=0.08), 8), "nemo")
    alone = calibrate_runs(own, suggest=False).calibration
    both = calibrate_runs([*others, *own], like="megatron-lm", suggest=False)
    assert both.calibration.framework == "megatron-lm"
    assert len(both.rows) == 2
    assert abs(both.calibration.factors.gemm - 0.8) < abs(alone.factors.gemm - 0.8)
    gemm = NAMES.index("gemm")
    assert both.calibration.covariance[gemm][gemm] < 0.8 * alone.covariance[gemm][gemm]
    # The 80 ms stay with the framework that loses them: two runs at a slow rate look like some of it.
    assert both.calibration.factors.step_overhead_s < alone.factors.step_overhead_s + 0.01
    assert both.notes == ("runs of nemo (8) tell of device and network alone",)
    # Without a word the stack is of the framework with most runs.
    assert calibrate_runs([*others[:2], own[0]], suggest=False).calibration.framework == "nemo"


def test_runs_without_a_measurement_are_refused() -> None:
    with pytest.raises(InputError, match="needs 1 to 200 runs with `measured`"):
        calibrate_runs([replace(run, measured=None) for run in measured_runs(Factors(), 2)])


@pytest.mark.slow
def test_a_benchmark_moves_its_factor() -> None:
    mark = Benchmark(factors=("network",), ratio=0.7, noise=0.05, words="a log")
    report = calibrate_runs(measured_runs(Factors(), 2), benchmarks=[mark], suggest=False)
    assert 0.65 < report.calibration.factors.network < 0.85


_LOG = """\
# Collective test starting: {}_perf
{}
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
  1073741824     268435456     float     sum      -1   6000.0  180.00  {}      0
"""
_RANKS = "\n".join(
    f"#  Rank  {rank} Group  0 Pid  1 on  node0 device  {rank} [0x00] NVIDIA A100-SXM4-80GB"
    for rank in range(8)
)


def test_exchanges_inside_a_node_have_a_factor_of_their_own(tmp_path: Path) -> None:
    """Logs of a slow all-to-all counted as slow links, against those of a quick all-reduce of the node."""
    logs = {"all_reduce": "200.00", "alltoall": "100.00"}
    for name, bus in logs.items():
        (tmp_path / name).write_text(_LOG.format(name, _RANKS, bus), encoding="utf-8")
    runs = measured_runs(Factors(), 1)
    _, (ring, exchange) = read_sources([tmp_path / name for name in logs], runs)
    assert (ring.factors, exchange.factors) == (("scale_up",), ("scale_up", "exchange"))
    x = np.zeros(len(NAMES))
    evidence = Evidence(runs, stack(Factors()), [ring, exchange])
    links, swaps = PRIORS["scale_up"].at(1.0), PRIORS["exchange"].at(-2.0)
    x[[NAMES.index("scale_up"), NAMES.index("exchange")]] = 1.0, -2.0
    expected = np.log([links / ring.ratio, links * swaps / exchange.ratio])
    assert evidence.errors(x)[-2:] * ring.noise == pytest.approx(expected)
    before = evidence.errors(np.zeros(len(NAMES)))
    assert evidence.slopes(x)[-2:] @ x == pytest.approx(evidence.errors(x)[-2:] - before[-2:])


@pytest.mark.soak
def test_the_suggested_run_takes_doubt_away() -> None:
    report = calibrate_runs(measured_runs(TRUTH, 3))
    best = report.suggestions[0]
    assert best.spread_after_pct < best.spread_before_pct
    afters = [suggestion.spread_after_pct for suggestion in report.suggestions]
    assert len(afters) == 3


def test_the_band_narrows_with_good_runs() -> None:
    """No run: Student's t of 3 runs, 2.35 spreads of 5 %. Many that are 1 % off: little more than 1.6 %."""
    none = error_band_of([])
    assert none.high == pytest.approx(np.exp(2.353 * 0.05), rel=2e-3)
    many = error_band_of([1.0, -1.0] * 100)
    assert 1.015 < many.high < 1.03


def test_factors_stay_with_what_they_belong_to() -> None:
    calibration = stack(Factors(gemm=0.5, launch=2.0, state_memory=1.5))
    own = calibration.factors_on("a100-sxm-80gb", "nemo")
    assert own.gemm == 0.5
    assert own.launch == 2.0
    assert calibration.factors_on("h100-sxm-80gb", "nemo").gemm == 1.0
    other = calibration.factors_on("a100-sxm-80gb", "torchtitan")
    assert (other.launch, other.state_memory, other.gemm) == (1.0, 1.0, 0.5)


def test_head_and_virtual_stages_have_terms_of_their_own() -> None:
    """Twice the time of the head; 1 ms for each micro-batch at each of 4 virtual stages of a rank."""
    settings = {"tp": 4, "pp": 4, "vpp": 4, "micro_batch": 1, "recompute": "none"}
    run = run_from_mapping(document(settings), where="test")

    def step_s(**factors: float) -> dict[str, float]:
        stacked = replace(
            run, workload=replace(run.workload, calibration=stack(Factors(**factors)))
        )
        parts = predict_run(stacked).estimate.breakdown_s
        return {name: float(np.asarray(seconds)) for name, seconds in parts.items()}

    plain, waiting = step_s(), step_s(virtual_stage_s=1e-3)
    # 64 sequences on 2 replicas are 32 micro-batches, each at 4 virtual stages.
    assert waiting["pipeline_p2p"] - plain["pipeline_p2p"] == pytest.approx(1e-3 * 32 * 4)
    slow = step_s(head=2.0)
    assert sum(slow.values()) > sum(plain.values())
    assert slow["optimizer"] == plain["optimizer"]


@pytest.mark.soak
def test_a_slow_head_is_found() -> None:
    """Of a vocabulary of 262,144 the head is a third of the last rank's work."""
    runs = []
    for run in measured_runs(Factors(), 8):
        model = run.workload.model.model_copy(update={"vocab": 262_144})
        wide = replace(run, workload=replace(run.workload, model=model))
        true = replace(wide, workload=replace(wide.workload, calibration=stack(Factors(head=1.5))))
        runs.append(replace(wide, measured=Measured(step_time_s=prediction_of(true).step_time_s)))
    learned = calibrate_runs(runs, suggest=False).calibration
    assert 1.2 < learned.factors.head < 1.6
    assert errors_pct(runs, learned).mean() < 2.0

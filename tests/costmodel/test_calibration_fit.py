"""The fit behind `make calibrate`, on rows whose constants are known: the cost model itself made them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.calibrate import free_records, main
from benchmarks.calibration import Problem, fit, rounded
from benchmarks.cross_validation import family_of, leave_out, members, source_of
from benchmarks.error_bands import OTHER, Outcome, error_bands
from meshwright.costmodel.records import ConstantRecord, constant_records
from meshwright.planner.runs.calibration.evidence import Floats
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Run
from tests.published import published_runs

GEMM, HBM = "architectures.hopper.gemm_fraction_16bit", "architectures.hopper.hbm_fraction"


def wide(path: str) -> ConstantRecord:
    """A free constant whose prior hardly counts."""
    record = constant_records()[path]
    return replace(record, prior=record.value, spread=5.0)


@pytest.fixture(scope="module")
def runs() -> tuple[Run, ...]:
    """Dense 16-bit runs on H100, two to a model, and two on A100, which the constants do not reach."""
    found = published_runs()
    chosen: dict[tuple[str, str], list[Run]] = {}
    for run in found:
        work = run.workload
        if work.model.moe is None and work.precision == "bf16" and work.framework == "llm-foundry":
            chosen.setdefault((work.cluster.device.name, work.model.name), []).append(run)
    rows = [
        run
        for (device, _), group in chosen.items()
        if device.startswith("h100")
        for run in group[:2]
    ]
    return (
        *rows,
        *next(group for (device, _), group in chosen.items() if device.startswith("a100"))[:2],
    )


def measured_at(runs: tuple[Run, ...], seconds: Floats) -> tuple[Run, ...]:
    out = []
    for run, step_time_s in zip(runs, seconds, strict=True):
        assert run.measured is not None
        out.append(replace(run, measured=replace(run.measured, step_time_s=float(step_time_s))))
    return tuple(out)


@pytest.mark.slow
def test_a_fit_finds_the_constants_that_made_the_rows(runs: tuple[Run, ...]) -> None:
    free = [wide(GEMM), wide(HBM)]
    problem = Problem(runs, free)
    truth = problem.start + np.log([1.08, 0.93])
    again = Problem(measured_at(runs, problem.predict(truth)), free)
    assert np.abs(fit(again) - truth).max() < 0.004
    only = fit(again, columns=[1])
    assert only[0] == again.start[0]
    assert only[1] != again.start[1]


@pytest.mark.slow
def test_a_run_that_went_wrong_hardly_moves_the_rest(runs: tuple[Run, ...]) -> None:
    problem = Problem(runs, [wide(GEMM)])
    seconds = problem.predict(problem.start)
    seconds[0] *= 3.0
    found = fit(Problem(measured_at(runs, seconds), problem.free))
    assert abs(found[0] - problem.start[0]) < 0.01


def test_priors_hold_what_no_row_decides_and_bound_what_rows_do(runs: tuple[Run, ...]) -> None:
    record = replace(constant_records()[GEMM], prior=0.6, spread=0.02, value=0.63)
    idle = replace(constant_records()["architectures.blackwell.hbm_fraction"], prior=0.6, value=0.7)
    problem = Problem(runs, [record, idle])
    far = Problem(measured_at(runs, problem.predict(problem.start) / 2.0), problem.free)
    found = fit(far)
    assert found[0] == pytest.approx(np.log(0.6) + 3 * 0.02, abs=1e-6), "three spreads at the most"
    assert found[1] == pytest.approx(np.log(0.6), abs=1e-6), "no row touches it: its prior"
    assert not problem.touched[:, 1].any()
    on_h100 = [run.workload.cluster.device.name.startswith("h100") for run in runs]
    assert problem.touched[:, 0].tolist() == on_h100


@pytest.mark.slow
def test_the_fit_sees_the_step_times_that_validate_prints() -> None:
    every_ninth = published_runs()[::9]
    found = Problem(every_ninth, [constant_records()[GEMM]])
    expected = [prediction_of(run).step_time_s for run in every_ninth]
    assert found.predict(found.start) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_group_left_out_is_predicted_from_the_others(runs: tuple[Run, ...], exact: bool) -> None:
    hopper = runs[:-2]
    problem = Problem(hopper, [wide(GEMM)])
    nominal = problem.predict(problem.start)
    odd = np.arange(len(hopper)) % 2 == 1
    slow = Problem(measured_at(hopper, np.where(odd, 1.25, 1.0) * nominal), problem.free)
    best = fit(slow)
    names = {run.id: str(index % 2) for index, run in enumerate(slow.runs)}
    found = leave_out(slow, lambda run: names[run.id], best, slow.linearise(best), exact=exact)
    assert found.seconds[members(found.groups, "1")] == pytest.approx(nominal[odd], rel=0.01)
    assert (found.seconds[~odd] > 1.1 * nominal[~odd]).all()


@pytest.mark.slow
def test_families_and_sources_of_the_published_rows() -> None:
    found = published_runs()
    assert {family_of(run) for run in found} == {
        "GPT and BLOOM", "GPT-OSS", "Llama", "MPT", "Qwen3", "DeepSeek", "Nemotron",
    }  # fmt: skip
    assert len({source_of(run) for run in found}) == 11


def test_bands_lean_on_wider_groups_where_rows_are_few() -> None:
    many = [Outcome("a", "x", ratio) for ratio in np.linspace(0.9, 1.1, 21)]
    few = [Outcome("b", "y", 2.0)] * 2
    bands = error_bands([*many, *few], ["a", "b", "c"], ["x", "y", "z"])
    own = bands["a"]["x"]
    assert (own["rows"], own["basis"]) == (21, "a with x")
    assert 0.9 < float(own["low"]) < 1.0 < float(own["high"]) < 1.3
    assert bands["b"]["y"]["rows"] == 2
    assert float(bands["b"]["y"]["low"]) < 2.0, "two rows do not make a band of their own"
    assert bands["c"]["y"]["basis"] == "any device with y"
    assert bands["c"]["z"]["basis"] == "any device and framework"
    assert bands["c"]["z"] == bands[OTHER][OTHER]
    assert bands["a"]["z"]["basis"] == "a with any framework"
    reach = [
        float(band["high"]) / float(band["low"]) for of in bands.values() for band in of.values()
    ]
    assert min(reach) > 1.0


def test_a_planner_target_takes_the_band_of_the_stack_that_was_measured() -> None:
    rows = [Outcome("a", "llm-foundry", ratio) for ratio in (0.8, 0.9, 1.0)]
    bands = error_bands(rows, ["a"], ["fsdp2", "llm-foundry"])
    assert {**bands["a"]["fsdp2"], "basis": ""} == {**bands["a"]["llm-foundry"], "basis": ""}
    assert bands["a"]["fsdp2"]["basis"] == "a with llm-foundry or torchtitan-eager"


def test_written_values_have_four_digits() -> None:
    assert rounded({"a": 0.123456, "b": 0.00012341}) == {"a": 0.1235, "b": 0.0001234}


def test_a_pattern_that_matches_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {record.path for record in free_records(["architectures.hopper.*"])} >= {GEMM, HBM}
    with pytest.raises(SystemExit):
        main(["--only", "architectures.hoper.*", "--dry-run"])
    assert "architectures.hopper.hbm_fraction" in capsys.readouterr().err

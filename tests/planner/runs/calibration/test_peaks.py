"""A calibration counts a measured peak as `validate` does: of which rank, and by whose counter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.costmodel.calibration import NAMES
from meshwright.planner.runs.calibration.evidence import Evidence
from meshwright.planner.runs.calibration.service import draft_stack
from meshwright.planner.runs.prediction import predict_run, prediction_of
from meshwright.planner.runs.run_file import Measured, run_from_mapping
from tests.planner.runs.calibration.own_runs import document


@pytest.mark.parametrize(
    "counted", ["", "allocated", "first_rank", "from_driver", "allocated first_rank"]
)
def test_a_peak_as_predicted_is_no_error(counted: str) -> None:
    """Peaks of what was handed out were compared with peaks that hold stranded blocks, here 5.6 % more."""
    settings = {"tp": 1, "micro_batch": 2, "zero_stage": 3}
    run = run_from_mapping(document(settings, "torchtitan"), where="test")
    how = Measured(step_time_s=None, memory_gib=1.0, **dict.fromkeys(counted.split(), True))
    run = replace(run, measured=how)
    peak_gib = prediction_of(run).memory_gib
    run = replace(run, measured=replace(how, memory_gib=peak_gib))
    evidence = Evidence([run], draft_stack("own", "torchtitan", "a100-sxm-80gb"))
    assert evidence.errors(np.zeros(len(NAMES))) == pytest.approx([0.0], abs=1e-9)


def test_what_the_driver_shows_is_not_counted_twice_against_the_limit() -> None:
    """A run that is only known to have run takes its peak beside the context, whatever a note says."""
    run = run_from_mapping(document({"tp": 1, "micro_batch": 1}), where="test")
    prediction = predict_run(run)
    spare_gib = prediction.context_gib / 2
    room_gib = max(prediction.memory_gib) + prediction.context_gib + spare_gib
    device = run.workload.cluster.device.model_copy(update={"hbm_gib": room_gib})
    cluster = run.workload.cluster.model_copy(update={"device": device})
    just_fits = replace(run, workload=replace(run.workload, cluster=cluster))
    noted = replace(just_fits, measured=Measured(step_time_s=1.0, from_driver=True))
    evidence = Evidence([noted], draft_stack("own", "megatron-lm", "a100-sxm-80gb"))
    assert evidence.errors(np.zeros(len(NAMES)))[-1] == 0.0

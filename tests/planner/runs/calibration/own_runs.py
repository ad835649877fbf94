"""Runs that were measured on a cluster whose constants are known, for tests of calibration."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from meshwright.costmodel.calibration import NAMES, Calibration, Factors, constants_digest
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Measured, Run, run_from_mapping

MODEL = {
    "name": "own-3b", "layers": 16, "hidden": 4096, "ffn_hidden": 11008, "heads": 32, "kv_heads": 32,
    "vocab": 32000, "activation": "swiglu",
}  # fmt: skip
LAYOUTS = [
    {"tp": tp, "pp": pp, "micro_batch": size, "recompute": recompute}
    for tp, pp, size, recompute in product((1, 4), (1, 4), (1, 2), ("none", "full"))
]


def document(settings: dict[str, Any], framework: str = "megatron-lm") -> dict[str, Any]:
    """The mapping of a run on 32 A100 that measured 1 s."""
    run = {"seq_len": 2048, "global_batch": 64, "gpus": 32, "zero_stage": 1}
    return {
        "id": "-".join(str(value) for value in settings.values()),
        "model": MODEL,
        "cluster": {"device": "a100-sxm-80gb", "gpus": 32, "nic_gbps_per_gpu": 200},
        "run": {**run, "framework": framework, **settings},
        "measured": {"step_time_s": 1.0},
    }


def stack(
    factors: Factors, *, name: str = "my-stack", framework: str = "megatron-lm"
) -> Calibration:
    """A calibration on A100 with given factors."""
    size = len(NAMES)
    return Calibration.model_validate(
        {
            "name": name,
            "framework": framework,
            "device": "a100-sxm-80gb",
            "constants": constants_digest(),
            "factors": factors.model_dump(),
            "mean": [0.0] * size,
            "covariance": [[0.01 * (i == j) for j in range(size)] for i in range(size)],
            "step_time": {"low": 0.95, "high": 1.05, "rows": 7},
        }
    )


def measured_runs(truth: Factors, count: int, *, memory: bool = False) -> list[Run]:
    """Runs whose steps, and peaks where asked for, are those of the cost model under some factors."""
    runs = []
    for settings in LAYOUTS[:: max(1, len(LAYOUTS) // count)][:count]:
        run = run_from_mapping(document(settings), where="test")
        true = replace(run, workload=replace(run.workload, calibration=stack(truth)))
        figures = prediction_of(true)
        peak_gib = figures.memory_gib if memory else None
        measured = Measured(step_time_s=figures.step_time_s, memory_gib=peak_gib)
        runs.append(replace(run, measured=measured))
    return runs

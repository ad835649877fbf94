"""Runs inside llm-analysis's own interpreter: cases as JSON on the standard input, their times on the output.

    PYTHONPATH=CHECKOUT python llm_analysis_driver.py

A case holds the arguments of its classes `model`, `gpu`, `parallelism` and `analysis`, and of its `training`. An answer
holds `step_time_s` or `refused`, and `seconds` of the processor that the call took.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from typing import Any


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What llm-analysis says of one case, and how long it took."""
    config = importlib.import_module("llm_analysis.config")
    tool = importlib.import_module("llm_analysis.analysis")
    begun_s = time.process_time()
    result: dict[str, Any] = {}
    try:
        analysis = tool.LLMAnalysis(
            config.ModelConfig(**case["model"]),
            config.GPUConfig(**case["gpu"]),
            config.DtypeConfig(),
            config.ParallelismConfig(**case["parallelism"]),
            **case["analysis"],
        )
        training = dict(case["training"])
        summary = analysis.training(
            activation_recomputation=tool.ActivationRecomputation(training.pop("recomputation")),
            ds_zero=tool.DSZeRO(training.pop("zero_stage")),
            **training,
        )
        result["step_time_s"] = float(summary["latency_per_iter"])
    except (AssertionError, ValueError, TypeError) as error:
        result["refused"] = str(error)[:200] or type(error).__name__
    result["seconds"] = time.process_time() - begun_s
    return result


def main() -> None:
    """Answers every case of the standard input."""
    cases = json.load(sys.stdin)
    importlib.import_module("llm_analysis.logger").logger.setLevel("ERROR")
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(case) for case in cases]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

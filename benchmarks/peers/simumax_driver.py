"""Runs inside SimuMax's own interpreter: cases as JSON on the standard input, their times on the output.

    PYTHONPATH=CHECKOUT python simumax_driver.py

A case holds `model`, `strategy` and `system`, as SimuMax's files do. An answer holds `step_time_s` or `refused`, and
`seconds` of the processor that the call took.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from typing import Any

MS_PER_S = 1000.0


def milliseconds_of(words: Any) -> float:
    """A time as its results write it: a number, or one with a unit."""
    if not isinstance(words, str):
        return float(words)
    number, unit = words.split()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": MS_PER_S}[unit]


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What SimuMax says of one case, and how long it took."""
    config = importlib.import_module("simumax.core.config")
    begun_s = time.process_time()
    result: dict[str, Any] = {}
    try:
        tool = importlib.import_module("simumax.core.perf_llm").PerfLLM()
        tool.configure(
            strategy_config=config.StrategyConfig.init_from_dict(case["strategy"]),
            model_config=config.ModelConfig.init_from_dict(case["model"]),
            system_config=config.SystemConfig.init_from_dict(case["system"]),
        )
        tool.run_estimate()
        cost = tool.analysis_cost().data
        result["step_time_s"] = milliseconds_of(cost["duration_time_per_iter"]) / MS_PER_S
    except (AssertionError, RuntimeError, ValueError, NotImplementedError) as error:
        result["refused"] = str(error)[:200] or type(error).__name__
    result["seconds"] = time.process_time() - begun_s
    return result


def main() -> None:
    """Answers every case of the standard input."""
    cases = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(case) for case in cases]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

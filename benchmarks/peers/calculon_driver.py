"""Runs inside Calculon's own interpreter: cases as JSON on the standard input, their times on the output.

    PYTHONPATH=CHECKOUT python calculon_driver.py

A case holds `application`, `execution` and `system`, as Calculon's files do. An answer holds `step_time_s` or
`refused`, and `seconds` of the processor that the call took.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from typing import Any


def answer(calculon: Any, case: dict[str, Any]) -> dict[str, Any]:
    """What Calculon says of one case, and how long it took."""
    begun_s = time.process_time()
    result: dict[str, Any] = {}
    try:
        application = calculon.Llm.Application(case["application"])
        execution = calculon.Llm.Execution.from_json(case["execution"])
        system = calculon.System(case["system"])
        model = calculon.Llm(application, logging.getLogger("calculon"))
        model.compile(system, execution)
        model.run(system)
        result["step_time_s"] = float(model.get_total_time())
    except (AssertionError, calculon.Llm.Error) as error:
        result["refused"] = str(error) or type(error).__name__
    result["seconds"] = time.process_time() - begun_s
    return result


def main() -> None:
    """Answers every case of the standard input."""
    calculon = importlib.import_module("calculon")
    cases = json.load(sys.stdin)
    json.dump([answer(calculon, case) for case in cases], sys.stdout)


if __name__ == "__main__":
    main()

"""Asks another tool for the step times of cases, in an interpreter of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Answer:
    """A tool's step of one run, or why there is none, and the seconds of the processor that it took to say so."""

    step_time_s: float | None
    refused: str | None
    seconds: float


def drive(
    driver: Path, cases: Sequence[dict[str, Any]], checkout: Path, python: str
) -> list[Answer]:
    """A tool's answers to some cases, in their order.

    Parameters
    ----------
    driver : Path
        A script that reads cases as JSON and writes `step_time_s` or `refused`, and `seconds`, of each.
    cases : sequence of dict
        In the tool's own words.
    checkout : Path
        The tool's source, from which the driver imports it.
    python : str
        An interpreter that has what the tool imports.

    Raises
    ------
    RuntimeError
        Where that interpreter fails, with the last of what it printed.
    """
    finished = subprocess.run(
        [python, str(driver)],
        input=json.dumps(list(cases)),
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if finished.returncode:
        raise RuntimeError(f"{driver.name} did not run: {finished.stderr[-1000:]}")
    return [
        Answer(case.get("step_time_s"), case.get("refused"), case["seconds"])
        for case in json.loads(finished.stdout)
    ]

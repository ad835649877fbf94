"""SIGINT and SIGTERM at random moments of whole commands: no half files, no traceback, no process left.

MESHWRIGHT_INTERRUPTS sets how many for each command.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.places import ROOT

MOMENTS = int(os.environ.get("MESHWRIGHT_INTERRUPTS", "3"))
LONGEST_S = 300.0
STARTED_S = 1.0
"""Before that Python may still import what answers a signal."""
PLAN = "plan llama-3-8b --cluster dgx-h100 --gpus 32 --global-batch 128 --seq-len 8192 -o OUT"
COMMANDS = {
    "plan": PLAN,
    "batch": "batch IN/jobs.yaml -o OUT --workers 2 --no-cache",
    "fleet": "fleet IN/fleet.yaml --cluster dgx-h100 --gpus 64 --workers 2 --no-cache -o OUT",
    "experts": "experts IN/loads.npz --cluster dgx-h100 --gpus 32 --slots 288 -o OUT/experts.json",
    "report": "report IN/plan/plan.yaml -o OUT/report.html",
}


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it left."""

    exit_code: int
    errors: str
    files: frozenset[str]


def run(command: str, given: Path, output: Path, after_s: float | None, number: int) -> Ended:
    """Runs a command and sends it a signal after some time; all of its processes end with it."""
    words = [word.replace("IN", str(given)).replace("OUT", str(output)) for word in command.split()]
    process = subprocess.Popen(
        [sys.executable, "cli.py", *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    if after_s is not None:
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
    # Its end is that of the last process which holds the pipe.
    _, errors = process.communicate(timeout=LONGEST_S)
    files = (path.relative_to(output) for path in output.rglob("*") if path.is_file())
    return Ended(process.returncode, errors, frozenset(map(str, files)))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    job = {"model": "llama-3-8b", "global_batch": 64, "seq_len": 2048}
    matrix = {**job, "cluster": "dgx-h100", "gpus": [8, 16, 32]}
    (folder / "jobs.yaml").write_text(yaml.safe_dump({"matrix": matrix}))
    jobs = [{**job, "name": name, "max_gpus": most} for name, most in (("a", 32), ("b", 16))]
    (folder / "fleet.yaml").write_text(yaml.safe_dump({"jobs": jobs}))
    loads = np.random.default_rng(0).zipf(1.6, (8, 256)).clip(max=300) + 20
    np.savez(folder / "loads.npz", loads=loads)
    run(PLAN, folder, folder / "plan", None, 0)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("name", COMMANDS)
def test_interrupts_leave_all_or_nothing(name: str, given: Path, tmp_path: Path) -> None:
    command = COMMANDS[name]
    began = time.monotonic()
    whole = run(command, given, tmp_path / "whole", None, 0)
    took_s = time.monotonic() - began
    assert whole.exit_code == 0
    chance = random.Random(0)
    for moment in range(MOMENTS):
        output = tmp_path / str(moment)
        number = chance.choice((signal.SIGINT, signal.SIGTERM))
        after_s = STARTED_S + chance.uniform(0.0, 1.0) * (took_s - STARTED_S)
        ended = run(command, given, output, after_s, number)
        assert "Traceback" not in ended.errors
        # In the last instants, outside of any command, Python itself ends.
        assert ended.exit_code in (0, 130, -number), ended.errors
        assert not any(".part" in file for file in ended.files)
        if name == "batch":
            resumed = run(f"{command} --resume", given, output, None, 0)
            assert resumed.exit_code == 0, resumed.errors
            assert resumed.files == whole.files
        else:
            assert ended.files in (frozenset(), whole.files)

"""`calibrate --measure` really run: two processes with PyTorch on gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.planner.runs.calibration.evidence import MeasuredRates
from tests.places import ROOT

pytestmark = pytest.mark.oracle

SCRIPT = """
import json
from meshwright.planner.runs.calibration.evidence import measured_rates
rates = measured_rates()
print(json.dumps(rates and vars(rates)))
"""


def test_two_processes_measure_each_other(tmp_path: Path) -> None:
    """Our own packages are on the path behind those of the oracles, which have torch."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    own = [path for path in sys.path if path.endswith("site-packages")]
    (tmp_path / "meshwright").symlink_to(ROOT)
    path = os.pathsep.join([str(tmp_path), *own])
    processes = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [python, "-c", SCRIPT]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs[1].strip() == "null"
    rates = MeasuredRates(**json.loads(outputs[0]))
    assert rates.gemm_flops > 0
    assert rates.attention_flops > 0
    assert rates.copy_bytes_per_s > 0
    ((ranks, size_bytes, seconds),) = rates.all_reduces
    assert (ranks, size_bytes) == (2, 2.0**20)
    assert seconds > 0

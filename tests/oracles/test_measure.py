"""`calibrate --measure` really run: PyTorch on this CPU, its collectives in two processes on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.planner.request.reader import read_calibration
from tests.places import ROOT

pytestmark = pytest.mark.oracle

MODEL = """\
name: small
layers: 2
hidden: 256
ffn_hidden: 512
heads: 4
kv_heads: 2
vocab: 1024
moe: {experts: 4, top_k: 2, moe_ffn_hidden: 256}
"""
COMMAND = """
import sys
from meshwright.cli import main
main(sys.argv[1:], prog_name="meshwright")
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Our own packages are on the path behind those of the oracles, which have torch."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    own = [path for path in sys.path if path.endswith("site-packages")]
    (folder / "path").mkdir(exist_ok=True)
    (folder / "path" / "meshwright").unlink(missing_ok=True)
    (folder / "path" / "meshwright").symlink_to(ROOT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "path"), *own])}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-c", COMMAND, *words]
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_this_cpu_is_timed_and_its_file_read(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL, encoding="utf-8")
    words = ["calibrate", "--measure", "--minutes", "0.5", "--model", "model.yaml"]
    done = run(tmp_path, *words, "--cluster", "dgx-v100", "-o", "machine.yaml", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    measured = document["stack"]["measured"]
    kinds = {point["kind"] for point in measured["points"]}
    assert kinds == {"gemm", "grouped-gemm", "attention", "attention-backward", "copy", "launch"}
    assert measured["software"].startswith("torch ")
    assert measured["gpus"] == 0
    # More work takes more time.
    gemms = {
        tuple(point["sizes"]): point["seconds"]
        for point in measured["points"]
        if point["kind"] == "gemm"
    }
    smallest, largest = (
        pick(gemms, key=lambda shape: shape[0] * shape[1] * shape[2]) for pick in (min, max)
    )
    assert gemms[largest] > gemms[smallest] > 0
    # A CPU is no V100, and is said not to be.
    assert any("is --cluster the machine" in note for note in document["notes"])
    stack = read_calibration(tmp_path / "machine.yaml")
    assert stack is not None
    assert stack.factors.gemm < 0.5


def test_without_a_gpu_the_cluster_has_to_be_named(tmp_path: Path) -> None:
    done = run(tmp_path, "calibrate", "--measure", "-o", "machine.yaml")
    assert done.returncode == 2
    assert "--cluster" in done.stderr
    assert not (tmp_path / "machine.yaml").exists()


COLLECTIVES = """
import json
from meshwright.planner.runs.calibration.machine import Case
from meshwright.planner.runs.calibration.torch_timer import collectives_of_processes
kinds = ("all-reduce", "all-gather", "all-to-all")
cases = [Case(kind=kind, sizes=(size, 2)) for kind in kinds for size in (2**12, 2**22)]
timings = collectives_of_processes(cases, 2, 120.0)
print(json.dumps([timing and [timing.seconds, timing.repeats] for timing in timings]))
"""


def test_two_processes_time_their_collectives(tmp_path: Path) -> None:
    script = COLLECTIVES
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    own = [path for path in sys.path if path.endswith("site-packages")]
    (tmp_path / "meshwright").symlink_to(ROOT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *own])}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, "-c", script], env=env, capture_output=True, text=True, timeout=200, check=True
    )
    rows = json.loads(done.stdout)
    assert all(row is not None and row[0] > 0 and row[1] == 10 for row in rows)
    # 4 MiB take longer than 4 KiB.
    assert all(small[0] < large[0] for small, large in zip(rows[::2], rows[1::2], strict=True))

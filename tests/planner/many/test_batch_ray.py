"""The jobs of a batch on a real Ray cluster of two machines (two raylets), one of them killed midway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.places import ROOT

pytestmark = pytest.mark.ray

SMALL = {"model": "llama-3-8b", "cluster": "dgx-h100", "seq_len": 2048}
BATCH = {"matrix": {**SMALL, "gpus": [4, 8], "global_batch": [16, 32, 64], "seed": [0, 1]}}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def batch(jobs: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    line = [
        sys.executable,
        str(ROOT / "cli.py"),
        "batch",
        str(jobs),
        "-o",
        str(out),
        "--no-cache",
        *more,
    ]
    return subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "journal.sqlite"
    ]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump(BATCH, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A head without cores of its own, and two raylets of one core each."""
    from ray.cluster_utils import Cluster

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster, nodes
    cluster.shutdown()


def test_a_lost_machine_loses_no_job(tmp_path: Path, jobs: Path, two_machines: Any) -> None:
    cluster, nodes = two_machines
    out = tmp_path / "out"
    process = batch(jobs, out, "--engine", "ray", "--ray-address", cluster.address)
    deadline = time.monotonic() + 120
    while (
        not list((out / "plans").glob("*"))
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert process.poll() is None, "the batch ended before a machine could be lost"
    for found in nodes[0].all_processes["raylet"]:
        os.kill(found.process.pid, signal.SIGKILL)
    assert process.wait(timeout=600) == 0
    assert batch(jobs, tmp_path / "here", "--workers", "2").wait() == 0
    assert files_of(out) == files_of(tmp_path / "here")
    rows = json.loads((out / "results.json").read_text(encoding="utf-8"))["jobs"]
    assert [row["status"] for row in rows] == ["optimal"] * 12


def test_a_cluster_of_its_own(tmp_path: Path, jobs: Path) -> None:
    assert batch(jobs, tmp_path / "out", "--engine", "ray").wait(timeout=300) == 0
    assert (
        len(json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))["jobs"]) == 12
    )


def test_an_address_where_nothing_answers(tmp_path: Path, jobs: Path) -> None:
    done = batch(jobs, tmp_path / "out", "--engine", "ray", "--ray-address", "127.0.0.1:1")
    assert done.wait(timeout=60) == 2


def test_parquet_holds_what_json_does(tmp_path: Path, jobs: Path) -> None:
    from pyarrow import parquet

    assert batch(jobs, tmp_path / "out", "--workers", "2", "--format", "json,parquet").wait() == 0
    rows = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))["jobs"]
    assert parquet.read_table(tmp_path / "out/results.parquet").to_pylist() == rows

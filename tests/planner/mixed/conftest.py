"""Plans on a small mixed cluster that several files read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import meshwright
from meshwright.planner.mixed.service import MixedResult

PIN = "tp=2,micro_batch=1,zero_stage=1,recompute=none"
"""Of the plan that goes through both parts."""


def planned(folder: Path, pin: str) -> MixedResult:
    parts = [{"cluster": "dgx-h100", "gpus": 16}, {"cluster": "dgx-a100", "gpus": 16}]
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump({"name": "old-and-new", "parts": parts}))
    return meshwright.plan_mixed("llama-3-8b", cluster=path, global_batch=64, seq_len=4096, pin=pin)


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> MixedResult:
    return planned(tmp_path_factory.mktemp("mixed"), PIN)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> MixedResult:
    """No pipeline through parts has virtual stages."""
    return planned(tmp_path_factory.mktemp("alone"), "tp=2,pp=2,vpp=2,micro_batch=1,zero_stage=1")

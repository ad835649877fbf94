"""Execution settings travel into a workload and back."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from meshwright.costmodel.workload import Execution
from meshwright.planner.request.reader import read_request

CHANGED: dict[str, Any] = {
    "moe_dispatch": "deepep",
    "cuda_graph": "full",
    "cp_comm": "a2a+p2p",
    "cp_inner": 4,
    "gradient_dtype": "bf16",
    "moment_dtype": "bf16",
    "fp8_recipe": "delayed",
    "offload_modules": "moe_act",
}


@pytest.mark.parametrize("name", [setting.name for setting in fields(Execution)])
def test_a_workload_gives_back_what_was_applied(name: str) -> None:
    """A setting that `within` forgot would not be compared with a baseline's."""
    request = read_request(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=4096,
        framework="torchtitan" if name == "compiled" else "megatron",
    )
    setting = replace(Execution(), **{name: CHANGED.get(name, True)})
    if name == "cp_inner":  # it says something of groups that have both ways only
        setting = replace(setting, cp_comm="a2a+p2p")
    assert setting != Execution()
    assert Execution.within(setting.applied(request.workload())) == setting

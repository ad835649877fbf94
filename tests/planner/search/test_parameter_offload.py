"""Shards of parameters on the host or its drives as a choice of DeepSpeed: found, launched, read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.documents import write_files
from meshwright.errors import InputError
from meshwright.planner.audit import audit_document, audit_plan
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_document
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.search.loop import search_executions
from tests.planner.search.test_planner_optimum import best_of_executions
from tests.soaked import some

TIGHT: dict[str, Any] = {
    "model": "qwen3-32b",
    "cluster": "rtx-4090-pcie",
    "gpus": 8,
    "global_batch": 16,
    "seq_len": 1024,
    "framework": "deepspeed",
}
ALLOWED = {"allow": "parameter-offload"}


def request(**changes: Any) -> PlanRequest:
    return read_request(**TIGHT | changes)


def planned(**changes: Any) -> Plan:
    return meshwright.plan(robustness=False, time_limit_s=60, **TIGHT | changes)


def places(**changes: Any) -> tuple[Any, ...]:
    return request(**changes).execution_options.values["parameter_offload"]


def with_drives(asked: PlanRequest, rate: float = 20.0) -> PlanRequest:
    return replace(asked, cluster=asked.cluster.model_copy(update={"nvme_gb_per_s": rate}))


def test_without_leave_parameters_stay() -> None:
    """Drives are a choice where their rate is known; what is not priced on the host is none."""
    assert places() == ("none",)
    assert places(**ALLOWED) == ("none", "cpu")
    of_drives = with_drives(request(**ALLOWED)).execution_options.values["parameter_offload"]
    assert of_drives == ("none", "cpu", "nvme")
    assert places(train="lora", **ALLOWED) == ("none",)
    assert places(kind="dpo", **ALLOWED) == ("none",)
    assert places(framework="fsdp2", **ALLOWED) == ("none",)
    with pytest.raises(InputError, match="parameter_offload"):
        request(framework="megatron", pin="parameter_offload=cpu")
    with pytest.raises(InputError, match="parameter_offload"):
        request(pin="parameter_offload=nvme")


def test_small_cards_are_faster_with_parameters_on_the_host() -> None:
    plain, found = planned(), planned(**ALLOWED)
    assert (plain.status, found.status) == ("optimal", "optimal")
    assert "parameter_offload" not in plan_document(plain)["execution"]
    assert plan_document(found)["execution"]["parameter_offload"] == "cpu"
    assert found.layout is not None
    assert found.layout.zero_stage == 3
    assert plain.predicted is not None
    assert found.predicted is not None
    assert found.predicted.step_time_s < plain.predicted.step_time_s
    assert plain.predicted.host_memory_gib is not None
    assert found.predicted.host_memory_gib is not None
    assert found.predicted.host_memory_gib > plain.predicted.host_memory_gib


def test_a_host_without_room_keeps_them_not() -> None:
    """512 GiB hold neither the states of this model nor its shards."""
    asked = request(pin="parameter_offload=cpu")
    small = asked.cluster.model_copy(update={"host_memory_gib": 64})
    outcome = search_executions(replace(asked, cluster=small), CostModelPricing)
    assert not outcome.best


def test_files_say_where_they_lie_and_are_read_back(tmp_path: Path) -> None:
    plan = planned(model="llama-3-8b", pin="tp=1,parameter_offload=cpu")
    write_files(tmp_path, plan_files(plan), force=True)
    (path,) = tmp_path.rglob("ds_config.json")
    section = json.loads(path.read_text(encoding="utf-8"))["zero_optimization"]
    assert section["offload_param"] == {"device": "cpu", "pin_memory": True}
    run = read_launch(path)
    assert run.settings["parameter_offload"] is True
    assert run.unread == ()
    assert audit_document(audit_plan(tmp_path))["passed"]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some([*range(2, 12), 1])),
    ],
)
def test_the_search_equals_brute_force(seed: int) -> None:
    """With 3 to 6 GiB of HBM, hosts with and without room, and drives fast and slow."""
    asked = request(
        model="llama-3.2-1b",
        gpus=(2, 4)[seed % 2],
        global_batch=4,
        seq_len=(512, 2048)[seed // 2 % 2],
        forbid="shard-groups" if seed % 3 else "shard-groups,optimizer-offload",
        pin="tp=1",
        **ALLOWED,
    )
    device = asked.cluster.device.model_copy(update={"hbm_gib": (4.0, 6.0, 8.0)[seed % 3]})
    host = {
        "host_memory_gib": (None, 24, 40)[seed // 3 % 3],
        "nvme_gb_per_s": (None, 4.0, 400.0)[seed // 4 % 3],
    }
    cluster = asked.cluster.model_copy(update={"device": device, **host})
    asked = replace(asked, cluster=cluster)
    best_s = best_of_executions(asked, asked.execution_options.executions())
    outcome = search_executions(asked, CostModelPricing)
    found_s = outcome.best[0].step_time_s if outcome.best else None
    assert found_s == (None if best_s is None else pytest.approx(best_s, rel=1e-9))

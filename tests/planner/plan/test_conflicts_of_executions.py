"""Pins of execution choices, missing software and the number of GPUs take part in conflicts too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.plan.document import Infeasible
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request


def asked(model: str, pin: str, **options: Any) -> PlanRequest:
    fields = {"gpus": 16, "global_batch": 32, "seq_len": 4096, "cluster": "dgx-h100", **options}
    return read_request(model=model, pin=pin, **fields)


def refused(request: PlanRequest) -> Infeasible:
    answer = fastest_plan(request).infeasible
    assert answer is not None
    return answer


PAIRS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gpt-oss-20b", "cp=2,cp_comm=p2p", {"gpus": 8}),
    ("qwen3-30b-a3b", "moe_dispatch=deepep,ep=1,etp=1", {}),
    ("qwen3-30b-a3b", "ep_overlap=on,recompute=full", {}),
    ("qwen3-30b-a3b", "cuda_graph=partial,recompute=full", {}),
    ("qwen3-30b-a3b", "cp_comm=a2a,cp=16", {}),
    ("qwen3-30b-a3b", "offload_modules=moe_act,recompute=full", {}),
    (
        "qwen3-30b-a3b",
        "moe_dispatch=alltoall,cuda_graph=full",
        {"precision": "mxfp8", "cluster": "dgx-b200"},
    ),
)


@pytest.mark.parametrize(
    ("model", "pins", "options"),
    [
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (*PAIRS[:2], PAIRS[4])),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (PAIRS[2], PAIRS[3], PAIRS[6])),
        PAIRS[5],
    ],
)
def test_both_pins_are_named_and_dropping_either_helps(
    model: str, pins: str, options: dict[str, Any]
) -> None:
    """The rule needs both: each is in the conflict and among the changes."""
    answer = refused(asked(model, pins, **options))
    each = pins.split(",")[:2]
    assert {f"pin {pin}" for pin in each} <= set(answer.conflict)
    assert {f"drop the pin {pin}" for pin in each} <= set(answer.smallest_changes)


@pytest.mark.slow
def test_a_pin_that_no_change_of_another_mends_stands_with_its_rule() -> None:
    answer = refused(asked("qwen3-30b-a3b", "cuda_graph=full,etp=2"))
    assert "pin cuda_graph=full" in answer.conflict
    assert answer.smallest_changes == ["drop the pin cuda_graph=full"]


@pytest.mark.slow
def test_software_that_is_not_there_takes_part() -> None:
    request = asked("gpt-oss-20b", "cp=2", without="cp-a2a", gpus=8)
    answer = refused(request)
    assert {"pin cp=2", "without cp-a2a"} <= set(answer.conflict)
    assert "take cp-a2a out of --without" in answer.smallest_changes
    pins = {**request.pins, "tp": 2, "pp": 1, "micro_batch": 1}
    assert fastest_plan(replace(request, pins=pins, without=())).layout is not None


@pytest.mark.parametrize(
    ("model", "pins", "gpus", "enough"),
    [
        pytest.param("qwen3-235b-a22b", "pp=6,ep=8", 32, 48, marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", "pp=3,ep=16", 40, 48, marks=pytest.mark.soak),
    ],
)
def test_the_next_gpus_that_the_pins_divide_are_a_change(
    model: str, pins: str, gpus: int, enough: int
) -> None:
    request = asked(model, pins, gpus=gpus, global_batch=192)
    assert f"take {enough} GPUs, not {gpus}" in refused(request).smallest_changes


@pytest.mark.slow
def test_where_all_gpus_must_be_used_fewer_are_a_change_too() -> None:
    request = asked("llama-3-8b", "pp=3,tp=8", gpus=64, global_batch=48, forbid="idle-gpus")
    changes = refused(request).smallest_changes
    assert {"take 48 GPUs, not 64", "take 72 GPUs, not 64"} <= set(changes)


def test_memory_that_is_missing_is_that_of_the_leanest_way_to_run() -> None:
    """Parameters on the host need less of the GPU; what was said to be missing was counted without."""
    options = {"cluster": "rtx-4090-pcie", "gpus": 1, "global_batch": 4, "seq_len": 1024}
    request = asked("llama-3-8b", "", **options, framework="deepspeed", allow="parameter-offload")
    lean, plain = refused(request), refused(replace(request, allow=()))
    needed = [
        next(float(str(each.value)) for each in answer.changes if each.change == "device-hbm-gib")
        for answer in (lean, plain)
    ]
    assert needed[0] == 25
    assert needed[1] > 40
    larger = request.cluster.device.model_copy(update={"hbm_gib": float(needed[0])})
    on_it = request.cluster.model_copy(update={"device": larger})
    assert fastest_plan(replace(request, cluster=on_it)).layout is not None

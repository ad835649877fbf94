"""Why there is no plan, in a user's words; each change that is offered works, one step less does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.errors import InputError
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import read_launch


def asked(cluster: str = "dgx-h100", pin: str = "", precision: str = "bf16") -> PlanRequest:
    return read_request(
        model="llama-3-8b",
        cluster=cluster,
        gpus=16,
        global_batch=512,
        seq_len=4096,
        pin=pin,
        precision=precision,
    )


@pytest.mark.slow
def test_the_nearest_pins_are_named_and_work() -> None:
    request = asked(pin="dp=3")
    answer = fastest_plan(request).infeasible
    assert answer is not None
    assert any("dp 3" in words and "512" in words for words in answer.conflict)
    assert answer.smallest_changes[:2] == ["pin dp=2, not 3", "pin dp=4, not 3"]
    for change in answer.changes[:2]:
        dp = int(change.value or 0)
        pins: dict[str, int | str] = {"dp": dp, "tp": 16 // dp, "pp": 1, "cp": 1, "micro_batch": 1}
        assert fastest_plan(replace(request, pins=pins)).layout is not None


def test_fp8_on_a_device_without_it() -> None:
    answer = fastest_plan(asked("dgx-a100", precision="fp8")).infeasible
    assert answer is not None
    assert answer.conflict[0].startswith("precision-on-device: a100-sxm-80gb (ampere) has no fp8")
    assert answer.smallest_changes == ["train in bf16, not fp8"]


def test_a_cluster_of_two_devices() -> None:
    nodes = [{"name": "a", "device": "h100-sxm-80gb"}, {"name": "b", "device": "a100-sxm-80gb"}]
    mixed = {"name": "mixed", "device": "h100-sxm-80gb", "nodes": nodes}
    with pytest.raises(InputError, match=r"nodes\[0\].device: all GPUs .* are of one device"):
        cluster_from_mapping(mixed)


def test_a_toml_file_of_another_program_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("# mine\n[parallelism]\ntensor_parallel_degree = 8\n", encoding="utf-8")
    with pytest.raises(InputError, match="sections model and parallelism"):
        read_launch(path)
    path.write_text("[parallelism]\ntensor_parallel_degree = \n", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be read"):
        read_launch(path)


@pytest.mark.soak
def test_where_nothing_is_left_usable_no_negative_room_is_told() -> None:
    """It said that a GPU needs 853.4 GiB beyond the usable -847.0."""
    answer = fastest_plan(replace(asked(), reserve_gib=1000.0, without=WITHOUT)).infeasible
    assert answer is not None
    told = next(words for words in answer.conflict if words.startswith("hbm"))
    assert "and nothing is left usable" in told
    assert "-" not in told
    assert {change.change for change in answer.changes} == {
        "reserve-gib",
        "device-hbm-gib",
    }


def test_a_dispatcher_that_is_pinned_without_experts_is_said_to_change_nothing() -> None:
    plan = fastest_plan(asked(pin="moe_dispatch=deepep,tp=2,pp=1,cp=1"))
    assert "the pin moe_dispatch changes nothing: the model has no experts" in plan.warnings
    assert "moe_dispatch" not in {need.choice for need in plan.installs}


@pytest.mark.parametrize(("seq_len", "warned"), [(1024, False), (2048, True)])
def test_sequences_longer_than_learned_positions_are_said(seq_len: int, warned: bool) -> None:
    """gpt2-xl has 1,024 rows of positions; launch files make as many as the sequence has."""
    pins = {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1}
    request = read_request(
        model="gpt2-xl", cluster="dgx-h100", gpus=8, global_batch=64, seq_len=seq_len, pin=pins
    )
    told = [text for text in fastest_plan(request).warnings if "positions" in text]
    assert bool(told) == warned
    if warned:
        assert told[0].startswith("sequences of 2,048 tokens are longer than the 1,024 positions")

"""Requests are checked at birth, with what is allowed and what was probably meant."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cluster_specs.reader import load_cluster
from meshwright.errors import InputError
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.request.plan_request import PlanRequest, parse_forbids, parse_pins


def request(**changes: Any) -> PlanRequest:
    given: dict[str, Any] = {
        "model": load_catalog_model("llama-3-8b"),
        "cluster": load_cluster("superpod-h100"),
        "gpus": 16,
        "global_batch": 64,
        "seq_len": 8192,
    }
    return PlanRequest(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 0}, "gpus: 0 is out of range"),
        ({"gpus": 10**7}, "cluster 'superpod-h100' has"),
        ({"global_batch": 0}, "global_batch: 0"),
        ({"seq_len": -1}, "seq_len: -1"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"framework": "megatrn"}, "did you mean 'megatron'"),
        ({"optimizer": "lars"}, "allowed: adam, sgd, muon, lion"),
        ({"method": "magic"}, "allowed: cp-sat, exhaustive"),
        ({"forbids": ("full-recompte",)}, "did you mean 'full-recompute'"),
        ({"pins": {"mirco_batch": 8}}, "did you mean 'micro_batch'"),
        ({"pins": {"tp": 0}}, "pin tp: 0 is out of range"),
        ({"seq_len": 10**11}, "allowed: 1 to 16777216"),
        ({"time_limit_s": float("nan")}, "allowed: 0 to 31536000"),
        ({"memory_risk": 2.0}, "allowed: 1e-06 to 0.5"),
        ({"pins": {"tp": "eight"}}, "pin tp: 'eight' is not a whole number"),
        ({"pins": {"tp": True}}, "is not a whole number"),
        ({"pins": {"zero_stage": 4}}, "allowed: 0 to 3"),
        ({"pins": {"recompute": "ful"}}, "did you mean 'full'"),
        ({"reserve_gib": -1.0}, "reserve_gib"),
        ({"top_k": 0}, "top_k"),
        ({"time_limit_s": -1.0}, "time_limit_s"),
        ({"max_cut_use": 0.0}, "max_cut_use"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as raised:
        request(**changes)
    assert words in str(raised.value)


def test_nan_is_not_in_range() -> None:
    with pytest.raises(InputError, match="reserve_gib"):
        request(reserve_gib=float("nan"))


def test_pins_are_parsed() -> None:
    assert parse_pins("tp=8, pp=4,recompute=full,") == {"tp": 8, "pp": 4, "recompute": "full"}
    assert parse_pins("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp", "is not NAME=VALUE"),
        ("tp=", "is not NAME=VALUE"),
        ("tp=8,tp=4", "given twice"),
        ("tp=99999999999999999999", "not a whole number"),
        ("tp=²", "not a whole number"),
        ("tp=-1", "not a whole number"),
    ],
)
def test_pins_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_pins(text)


def test_forbids_are_parsed() -> None:
    assert parse_forbids(["cp,full-recompute", " cp "]) == ("cp", "full-recompute")


def test_the_inputs_carry_the_request() -> None:
    inputs = request(pins={"tp": 2}, forbids=("cp",), reserve_gib=3.0).inputs()
    assert (inputs.pins, inputs.forbids, inputs.reserve_gib) == ({"tp": 2}, ("cp",), 3.0)


def test_megatron_hides_what_its_launch_turns_on() -> None:
    run = request().workload()
    hidden = run.dp_overlap, run.tp_overlap, run.pp_overlap, run.ep_overlap
    assert hidden == (True, False, True, False)


def test_the_overlap_of_tensor_parallelism_is_a_choice() -> None:
    asked = request()
    runs = [asked.workload(execution) for execution in asked.execution_options.executions()]
    assert {run.tp_overlap for run in runs} == {False, True}
    pinned = request(pins={"tp_overlap": "on"})
    assert pinned.workload().tp_overlap

"""Samples dealt to ranks one by one: asked for, planned, launched, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.launch.megatron import bridge_files
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_text, read_plan
from meshwright.planner.plan.verify import faults
from meshwright.planner.report.plan_view import lengths_text
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import read_launch

ASKED: dict[str, Any] = {
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 8,
    "hybrid_cp": True,
    "pin": {"recompute": "none", "zero_stage": 1, "tp": 2, "cp": 4},
    "forbid": "optimizer-offload,shard-groups",
    "robustness": False,
}


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lengths") / "a.json"
    path.write_text(json.dumps({"300": 90, "2000": 30, "32768": 1}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def plan(lengths: Path) -> Plan:
    return meshwright.plan("llama-3-8b", lengths=lengths, **ASKED)


def test_a_plan_says_what_dealing_brings_over_whole_packs(plan: Plan) -> None:
    told = plan.lengths
    assert plan.status == "optimal"
    assert told is not None
    assert plan.predicted is not None
    assert told.planned.packing == "hybrid-cp"
    assert [other.packing for other in told.others] != []
    assert all(other.packing.startswith("first-fit") for other in told.others)
    assert told.planned.imbalance_s == plan.predicted.breakdown_s["length_imbalance"] > 0
    assert "uneven rounds cost" in lengths_text(told)
    assert any("no measured run stands behind hybrid" in text for text in plan.warnings)


def test_a_plan_read_back_holds(plan: Plan, lengths: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(plan), encoding="utf-8")
    again = read_plan(path)
    assert again == plan
    asked = {name: value for name, value in ASKED.items() if name != "robustness"}
    request = read_request(model="llama-3-8b", lengths=lengths, **asked)
    assert list(faults(request, again)) == []


def test_its_launch_says_so_and_reading_it_names_what_it_lacks(plan: Plan, tmp_path: Path) -> None:
    write_files(tmp_path, plan_files(plan))
    words = json.loads((tmp_path / "megatron_args.json").read_text(encoding="utf-8"))
    at = words.index("--max-seqlen-per-dp-cp-rank")
    assert words[at + 1] == "8192"
    assert {"--hybrid-context-parallel", "--calculate-per-token-loss"} <= set(words)
    launch = read_launch(tmp_path / "launch.sh")
    assert launch.unread == ("--hybrid-context-parallel",)
    assert "by their lengths" in launch.remarks[0]
    script = (tmp_path / "launch.sh").read_text(encoding="utf-8")
    other = tmp_path / "other.sh"
    other.write_text(script.replace("-rank 8192", "-rank 4096"), encoding="utf-8")
    if "-rank 8192" in script:
        unread = ("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank")
        assert read_launch(other).unread == unread


def test_bridge_deals_no_samples(plan: Plan) -> None:
    with pytest.raises(InfeasibleError, match="deals no samples"):
        bridge_files(plan)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": None, "seq_len": 4096}, "hybrid-cp: goes with --lengths alone"),
        ({"packing": "padded"}, "hybrid-cp: padded sequences hold no samples"),
        ({"framework": "torchtitan"}, "torchtitan has no hybrid context parallelism"),
        ({"train": "lora"}, "hybrid-cp: is not priced beside adapters"),
    ],
)
def test_what_it_does_not_go_with(lengths: Path, changes: dict[str, Any], says: str) -> None:
    wanted: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 8}
    wanted |= {"lengths": lengths, "hybrid_cp": True} | changes
    with pytest.raises(InputError) as refused:
        read_request(model="llama-3-8b", **wanted)
    assert says in str(refused.value)


def test_a_model_that_it_is_not_for_has_no_plan(lengths: Path) -> None:
    plan = meshwright.plan(
        "deepseek-v2-lite", lengths=lengths, **ASKED | {"pin": "", "pack_size": 32768}
    )
    assert plan.status == "infeasible"

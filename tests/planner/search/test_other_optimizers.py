"""Plans with every optimizer: as fast as by brute force, verified from their files, started as they say."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.cluster_specs.reader import load_cluster
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.catalog import RECORDS, planned
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import read_launch
from tests.planner.search.plain_oracle import least_step_time_s
from tests.planner.search.test_plain_oracle import tiny_request
from tests.planner.search.test_planner_optimum import check_against_brute_force, search
from tests.soaked import some

EVERY = [(record.name, name) for record in RECORDS for name in planned(record.optimizers)]
OTHERS = [(framework, name) for framework, name in EVERY if name not in ("adam", "sgd")]
QUICK = [("fsdp2", "adam-8bit"), ("deepspeed", "muon")]
"""The quickest."""
ALIKE = [("megatron", "lion"), ("deepspeed", "paged-adam"), ("deepspeed", "paged-adam-8bit")]
"""Told as a neighbour is, but for the name: lion of DeepSpeed, Adam in eight bits."""


def small_request(seed: int, framework: str, optimizer: str) -> PlanRequest:
    """A tiny request of a framework that shards over dp alone."""
    asked = tiny_request(seed)
    pins: dict[str, int | str] = {"zero_stage": 2, "recompute": asked.pins["recompute"]}
    return replace(
        asked,
        model=asked.model.model_copy(update={"moe": None, "mtp_layers": 0}),
        framework=framework,
        optimizer=optimizer,
        pins=pins,
        gpus=min(asked.gpus, 4),
        forbids=("interleaving", "optimizer-offload", "selective-recompute"),
    )


@pytest.mark.parametrize("optimizer", [pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [3])
def test_the_optimum_is_that_of_the_plain_oracle(seed: int, optimizer: str) -> None:
    request = replace(tiny_request(seed), optimizer=optimizer)
    outcome, least_s = search(request), least_step_time_s(request)
    if least_s is None:
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "optimal"
    assert outcome.best[0].step_time_s == pytest.approx(least_s, rel=1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["muon", "lion", "sgd"])
@pytest.mark.parametrize("seed", some([0, *range(3, 20)]))
def test_the_optimum_is_that_of_the_plain_oracle_slow(seed: int, optimizer: str) -> None:
    test_the_optimum_is_that_of_the_plain_oracle(seed, optimizer)


@pytest.mark.parametrize(
    ("framework", "optimizer"), [pair for pair in OTHERS if pair[0] in ("deepspeed", "fsdp2")]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_optimum_is_that_of_brute_force(framework: str, optimizer: str, seed: int) -> None:
    check_against_brute_force(small_request(seed, framework, optimizer))


@cache
def plan_of(framework: str, optimizer: str) -> meshwright.Plan:
    """The fastest plan; what its choices bring is not asked."""
    asked = read_request(
        model="llama-3.2-1b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=64,
        seq_len=2048,
        framework=framework,
        optimizer=optimizer,
        forbid=["interleaving"],
    )
    return make_plan(asked, robustness=False, choices=False)


@pytest.mark.parametrize(
    ("framework", "optimizer"),
    [
        pytest.param(
            *each,
            marks=() if each in QUICK else pytest.mark.soak if each in ALIKE else pytest.mark.slow,
        )
        for each in OTHERS
    ],
)
def test_plans_and_their_files_are_verified(framework: str, optimizer: str, tmp_path: Path) -> None:
    plan = plan_of(framework, optimizer)
    assert plan.status == "optimal"
    meshwright.launch(plan, tmp_path)
    audit = meshwright.verify_plan(tmp_path)
    assert audit.passed, audit.checks


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("lion", marks=pytest.mark.slow)])
def test_a_launch_of_megatron_is_read_back(optimizer: str, tmp_path: Path) -> None:
    meshwright.launch(plan_of("megatron", optimizer), tmp_path)
    run = read_launch(tmp_path / "megatron_args.json")
    assert run.settings["optimizer"] == optimizer
    assert not run.unread
    flags = json.loads((tmp_path / "megatron_args.json").read_text(encoding="utf-8"))
    assert ("--muon-tp-mode" in flags) is (optimizer == "muon")
    assert "--overlap-param-gather" in flags


def test_old_names_of_layer_wise_optimizers_shard_states(tmp_path: Path) -> None:
    meshwright.launch(plan_of("megatron", "muon"), tmp_path)
    path = tmp_path / "megatron_args.json"
    flags = json.loads(path.read_text(encoding="utf-8"))
    flags.remove("--use-distributed-optimizer")
    flags[flags.index("muon")] = "dist_muon"
    path.write_text(json.dumps(flags), encoding="utf-8")
    run = read_launch(path)
    assert (run.settings["optimizer"], run.settings["zero_stage"]) == ("muon", 1)


def test_what_deepspeed_and_the_trainer_are_told(tmp_path: Path) -> None:
    expected = {
        "muon": ({"type": "Muon"}, None, None),
        "lion": ({"type": "Lion"}, None, None),
        "adafactor": (None, True, "--optim adafactor"),
        "paged-adam-8bit": (None, True, "--optim paged_adamw_8bit"),
    }
    for optimizer, (own, untested, argument) in expected.items():
        folder = tmp_path / optimizer
        meshwright.launch(plan_of("deepspeed", optimizer), folder)
        config = json.loads((folder / "ds_config.json").read_text(encoding="utf-8"))
        told = config.get("optimizer")
        assert (told and {"type": told["type"]}) == own
        assert config.get("zero_allow_untested_optimizer") == untested
        script = (folder / "launch.sh").read_text(encoding="utf-8")
        assert ("--optim" in script) is (argument is not None)
        assert argument is None or argument in script


def test_what_cannot_be_trained_is_refused_with_its_reason() -> None:
    cases = [
        ("megatron", "adam-8bit", "cannot train with adam-8bit"),
        ("torchtitan", "muon", "no launch file for muon"),
        ("fsdp2", "paged-adam", "cannot train with paged-adam"),
    ]
    for framework, optimizer, reason in cases:
        outcome = plan_of(framework, optimizer)
        assert outcome.status == "infeasible"
        assert reason in outcome.model_dump_json()


@pytest.mark.parametrize(
    ("framework", "optimizer"), [("fsdp2", "muon"), ("megatron", "muon"), ("megatron", "lion")]
)
def test_whole_matrices_are_not_stepped_of_adapters(framework: Any, optimizer: Any) -> None:
    with pytest.raises(InputError, match="optimizer: steps whole matrices"):
        meshwright.plan(
            "llama-3-8b",
            cluster="dgx-h100",
            gpus=8,
            global_batch=32,
            seq_len=2048,
            framework=framework,
            optimizer=optimizer,
            train="lora",
        )


def test_megatron_bridge_is_refused_with_muon(tmp_path: Path) -> None:
    plan = plan_of("megatron", "muon")
    with pytest.raises(InfeasibleError, match="reduces gradients whole for muon"):
        meshwright.launch(plan, tmp_path, target="bridge")


def across_nodes(seed: int) -> PlanRequest:
    """Replicas over two or three nodes, in whose shard groups Muon's own collectives may stay."""
    draw = random.Random(seed)
    nodes = draw.choice([2, 3])
    return replace(
        small_request(seed, "fsdp2", "muon"),
        cluster=load_cluster("dgx-a100"),
        gpus=8 * nodes,
        global_batch=8 * nodes * draw.choice([1, 3, 4]),
        seq_len=draw.choice([256, 1024]),
        pins={"tp": 1, "cp": 1, "recompute": "none", "zero_stage": draw.choice([2, 3])},
    )


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow)])
def test_shard_groups_in_which_muon_sends_less_are_found(seed: int) -> None:
    check_against_brute_force(across_nodes(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some((*range(2, 26), 0)))
def test_shard_groups_in_which_muon_sends_less_are_found_many(seed: int) -> None:
    check_against_brute_force(across_nodes(seed))


@pytest.mark.soak
def test_fewer_ranks_may_step_faster_under_muon_alone() -> None:
    """Groups of one node's GPUs, whose collectives leave out the network, or of 24 on three nodes."""

    def optimizer_s(optimizer: Any, groups: int) -> float:
        plan = meshwright.plan(
            "llama-3-8b",
            cluster="dgx-a100",
            gpus=24,
            global_batch=72,
            seq_len=512,
            framework="fsdp2",
            optimizer=optimizer,
            pin=f"tp=1,cp=1,dp=24,micro_batch=3,zero_stage=3,recompute=none,shard_groups={groups}",
            robustness=False,
        )
        assert plan.predicted is not None
        return plan.predicted.breakdown_s["optimizer"]

    assert optimizer_s("adam", 1) < optimizer_s("adam", 3)
    assert optimizer_s("muon", 3) < optimizer_s("muon", 1)

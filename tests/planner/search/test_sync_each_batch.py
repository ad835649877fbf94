"""Gradients of each micro-batch reduced by themselves: bytes, seconds, search, launches and the way back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import meshwright
from meshwright.constraints.registry import findings
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.data_parallel import (
    data_parallel_traffic,
    hiding_windows,
    passes_of_a_step,
)
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.states import state_bytes
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.documents import write_files
from meshwright.errors import InputError
from meshwright.planner.analysis.neighbours import neighbours
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import price_launch, read_launch
from meshwright.planner.runs.run_file import run_from_mapping
from meshwright.planner.search.loop import search_executions
from meshwright.planner.search.pricing import Outcome
from tests.costmodel.test_data_parallel import context
from tests.planner.search.test_planner_optimum import best_of_executions, cluster, model
from tests.soaked import some

EIGHT = Layout(dp=8, zero_stage=3, num_micro_batches=4)
SFT: dict[str, Any] = {
    "model": "gemma-3-27b",
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 128,
    "seq_len": 4096,
    "framework": "fsdp2",
    "kind": "sft",
}


def synced(c: Context) -> Context:
    """The same layouts, run so."""
    workload = replace(c.workload, sync_each_batch=True)
    return make_context(workload, c.layout, c.placement)


@pytest.mark.parametrize(
    ("layout", "shards", "bytes_each"),
    [
        # fp32 shards in place of whole 16-bit gradients.
        (EIGHT, 8, 4 / 8),
        (replace(EIGHT, zero_stage=2), 8, 4 / 8),
        (replace(EIGHT, shard_groups=2), 4, 4 / 4),
        # They are the host's.
        (replace(EIGHT, optimizer_offload=100), 8, 0),
    ],
)
def test_bytes_of_a_gradient_by_hand(layout: Layout, shards: int, bytes_each: float) -> None:
    c = context(layout, "fsdp2")
    kept = [
        float(np.asarray(state_bytes(workload, layout, shards)[1]))
        for workload in (c.workload, synced(c).workload)
    ]
    assert kept == pytest.approx([2.0, bytes_each])


@pytest.mark.parametrize(("zero", "passes"), [(2, (4, 4)), (3, (8, 4))])
def test_each_micro_batch_is_reduced_and_hides_its_own(zero: int, passes: tuple[int, int]) -> None:
    plain = context(replace(EIGHT, zero_stage=zero), "fsdp2")
    c = synced(plain)
    assert tuple(int(np.asarray(number)) for number in passes_of_a_step(c)) == passes
    assert float(hiding_windows(c)) == float(hiding_windows(plain)) == 4


def seconds(c: Context) -> float:
    return float(np.asarray(data_parallel_traffic(c, 1e9, 0.0).seconds))


def test_seconds_by_hand() -> None:
    """g a gather, r a reduction: 2 g + r of one micro-batch, 8 g + r of four, 8 g + 4 r of four reduced."""
    one = seconds(context(replace(EIGHT, num_micro_batches=1), "fsdp2"))
    four = seconds(context(EIGHT, "fsdp2"))
    gather_s = (four - one) / 6
    reduction_s = one - 2 * gather_s
    assert reduction_s > 0
    every = seconds(synced(context(EIGHT, "fsdp2")))
    assert every == pytest.approx(8 * gather_s + 4 * reduction_s)


def test_frameworks_that_reduce_anyway_have_no_such_choice() -> None:
    for framework in ("torchtitan", "deepspeed", "megatron"):
        asked = read_request(
            model="llama-3-8b", cluster="dgx-h100", gpus=8, global_batch=64, seq_len=4096,
            framework=framework,
        )  # fmt: skip
        assert asked.execution_options.values["sync_each_batch"] == (False,)
        with pytest.raises(InputError, match="sync_each_batch"):
            replace(asked, pins={"sync_each_batch": "on"})


# The search against brute force over both ways.


def in_little_memory(seed: int) -> PlanRequest:
    """A small problem that fits one way, both ways or none."""
    draw = random.Random(f"sync {seed}")
    spec = model(draw).model_copy(update={"moe": None, "mtp_layers": 0, "vocab": 8192})
    pins: dict[str, int | str] = {"recompute": draw.choice(["none", "full"]), "micro_batch": 1}
    if draw.random() < 0.5:
        pins["zero_stage"] = draw.choice([2, 3])
    if draw.random() < 0.5:
        pins["tp"] = 1
    hbm_gib = draw.choice([2.5, 3.0, 3.5, 4.0]) + draw.random()
    return PlanRequest(
        model=spec,
        cluster=cluster(hbm_gib, 16, draw.choice([None, 8])),
        gpus=draw.choice([4, 8]),
        global_batch=draw.choice([16, 32]),
        seq_len=2048,
        framework="fsdp2",
        pins=pins,
        forbids=() if draw.random() < 0.3 else ("optimizer-offload",),
    )


@cache
def found(seed: int) -> Outcome:
    return search_executions(in_little_memory(seed), CostModelPricing)


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1, 2, 6),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (13, 22, 24)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some(range(25, 73))),
    ],
)
def test_the_search_equals_brute_force(seed: int) -> None:
    asked, outcome = in_little_memory(seed), found(seed)
    best_s = best_of_executions(asked, asked.execution_options.executions())
    if best_s is None:
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "optimal"
    assert outcome.best[0].step_time_s == pytest.approx(best_s, rel=1e-9)
    assert outcome.lower_bound_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("seed", [0, 2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_search_equals_brute_force_on_a_slow_network(seed: int) -> None:
    """Nodes of two GPUs at 50 Gb/s each: compute loses less than a share of the traffic's time."""
    asked = in_little_memory(seed)
    slow = asked.cluster.model_copy(
        update={"nic_gbps_per_gpu": 50.0, "gpus_per_node": 2, "nvlink_domain": 2}
    )
    asked = replace(asked, cluster=slow)
    best_s = best_of_executions(asked, asked.execution_options.executions())
    outcome = search_executions(asked, CostModelPricing)
    assert best_s is not None
    assert outcome.best[0].step_time_s == pytest.approx(best_s, rel=1e-9)
    assert outcome.lower_bound_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.slow
def test_it_is_taken_exactly_where_it_helps() -> None:
    """Where it is not taken the best plan without it is as fast; where it is, none is."""
    taken = {True: 0, False: 0}
    for seed in range(24):
        outcome, asked = found(seed), in_little_memory(seed)
        if not outcome.best:
            continue
        without = search_executions(replace(asked, without=("sync-each-batch",)), CostModelPricing)
        best = outcome.best[0]
        plain_s = without.best[0].step_time_s if without.best else float("inf")
        on = best.execution.sync_each_batch
        assert (plain_s > best.step_time_s) == on
        assert not on or (best.layout.num_micro_batches > 1 and best.layout.dp * best.layout.cp > 1)
        taken[on] += 1
    assert min(taken.values()) >= 3


@pytest.mark.parametrize(
    ("layout", "is_legal"),
    [
        (Layout(dp=2, num_micro_batches=2, zero_stage=3), True),
        (Layout(cp=2, num_micro_batches=2, zero_stage=3), True),
        (Layout(dp=2, num_micro_batches=1, zero_stage=3), False),
        (Layout(tp=1, num_micro_batches=2, zero_stage=3), False),
    ],
)
def test_where_it_changes_nothing_a_rule_refuses_it(layout: Layout, is_legal: bool) -> None:
    workload: Workload = replace(read_request(**SFT).workload(), sync_each_batch=True)
    plan = FinishedPlan(
        workload=workload, layout=layout, stages=((62,),), memory_gib=(1.0,), spans={}
    )
    assert ("sync-each-batch" in [each.rule for each in findings(plan)]) == (not is_legal)


def test_a_rival_of_one_micro_batch_is_not_refused_for_it() -> None:
    plan = planned(
        model="llama-3-8b",
        global_batch=16,
        pin="sync_each_batch=on,micro_batch=1,dp=8,recompute=full",
    )
    assert plan.layout is not None
    assert plan.layout.num_micro_batches == 2
    (rival,) = [each for each in neighbours(plan) if each.change == "micro_batch 1 -> 2"]
    assert rival.broken is None
    assert rival.step_time_s is not None


# Plans, their launch files and the way back.


@cache
def planned(**changes: Any) -> Plan:
    return meshwright.plan(robustness=False, **SFT | changes)


def seconds_of(plan: Plan) -> float:
    assert plan.objective is not None
    assert plan.objective.step_time_s is not None
    return plan.objective.step_time_s


def test_full_tuning_of_32b_on_sixteen_gpus_needs_no_host() -> None:
    """Whole 16-bit gradients of 32.2e9 parameters are 60 GiB, beside 30 of shards; theirs are 7.5."""
    asked = {"model": "olmo-2-32b", "gpus": 16, "seq_len": 16384}
    with_it = planned(**asked)
    assert with_it.execution is not None
    assert with_it.layout is not None
    assert with_it.execution.sync_each_batch
    assert with_it.layout.optimizer_offload == 0
    plain = planned(**asked, without="sync-each-batch")
    assert plain.layout is not None
    assert (plain.layout.tp, plain.layout.optimizer_offload) != (1, 0)
    assert seconds_of(with_it) < 0.85 * seconds_of(plain)


def written(folder: Path, target: str | None = None, **changes: Any) -> Plan:
    plan = planned(**changes)
    write_files(folder, plan_files(plan) if target is None else plan_files(plan, target))
    return plan


def test_the_trainer_is_handed_a_file_and_the_run_has_the_price_of_the_plan(tmp_path: Path) -> None:
    plan = written(tmp_path)
    config = json.loads((tmp_path / "accelerator_config.json").read_text(encoding="utf-8"))
    assert config == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    script = (tmp_path / "launch.sh").read_text(encoding="utf-8")
    # As plain torchrun starts the script, and as accelerate does.
    assert script.count('"$TRAIN_SCRIPT" --accelerator_config "$here/accelerator_config.json"') == 2
    assert "GradientAccumulationPlugin(num_steps=32, sync_each_batch=True)" in script
    run = read_launch(tmp_path / "launch.sh")
    assert run.settings["sync_each_batch"] is True
    assert run.unread == ()
    more = ["model=gemma-3-27b", "cluster=dgx-h100", "seq_len=4096", "global_batch=128", "kind=sft"]
    (priced,) = price_launch(tmp_path / "launch.sh", more)
    assert priced.predicted.step_time_s == pytest.approx(seconds_of(plan), rel=1e-9)


def test_without_it_nothing_is_handed_over(tmp_path: Path) -> None:
    written(tmp_path, without="sync-each-batch")
    assert not (tmp_path / "accelerator_config.json").exists()
    assert "accelerator_config" not in (tmp_path / "launch.sh").read_text(encoding="utf-8")
    assert "sync_each_batch" not in read_launch(tmp_path / "launch.sh").settings


@pytest.mark.parametrize(
    ("target", "name"), [("axolotl", "axolotl.yaml"), ("llama-factory", "llama_factory.yaml")]
)
def test_stacks_on_the_trainer_take_it_in_their_own_file(
    target: str, name: str, tmp_path: Path
) -> None:
    written(tmp_path, target, pin="tp=1,sync_each_batch=on")
    fields = yaml.safe_load((tmp_path / name).read_text(encoding="utf-8"))
    assert fields["accelerator_config"]["gradient_accumulation_kwargs"] == {"sync_each_batch": True}
    if target == "axolotl":
        run = read_launch(tmp_path / name)
        assert run.settings["sync_each_batch"] is True
        assert "accelerator_config" not in " ".join(run.unread)


LINE = (
    "torchrun --nproc_per_node 8 train.py --model_name_or_path qwen3-8b --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 8 --bf16 --max_length 4096 --accelerator_config {said} {shards}\n"
)
TEXT = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}, "even_batches": true}'


@pytest.mark.parametrize(
    ("said", "shards", "syncs", "unread"),
    [
        (f"'{TEXT}'", "--fsdp full_shard", True, ()),
        ("own.json", "--fsdp full_shard", True, ()),
        ('\'{"split_batches": true}\'', "--fsdp full_shard", False, ("accelerator_config.split_batches",)),
        # Replicas without FSDP would reduce whole gradients each time.
        ("own.json", "", False, ("accelerator_config.sync_each_batch",)),
        ("own.json", "--deepspeed ds.json", False, ()),
    ],
)  # fmt: skip
def test_command_lines_of_a_trainer(
    said: str, shards: str, syncs: bool, unread: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "own.json").write_text(TEXT, encoding="utf-8")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    script = tmp_path / "train.sh"
    script.write_text(LINE.format(said=said, shards=shards), encoding="utf-8")
    run = read_launch(script)
    assert run.settings.get("sync_each_batch", False) is syncs
    assert run.unread == unread


def test_a_run_of_one_micro_batch_changes_nothing() -> None:
    run = {"framework": "fsdp2", "dp": 8, "micro_batch": 1, "zero_stage": 3, "seq_len": 4096}
    for batch, kept in ((8, False), (16, True)):
        mapping = {
            "model": "llama-3-8b",
            "cluster": "dgx-h100",
            "run": run | {"global_batch": batch, "sync_each_batch": True},
        }
        assert run_from_mapping(mapping, where="a run").workload.sync_each_batch is kept

"""Inputs of recomputed layers on the host as a choice of FSDP2 and DeepSpeed: found, launched, read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import price_launch, read_launch
from meshwright.planner.runs.run_file import run_from_mapping
from meshwright.planner.search.loop import search_executions
from tests.planner.search.test_planner_optimum import best_of_executions
from tests.soaked import some

LONG: dict[str, Any] = {
    "model": "qwen3-8b",
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 1,
    "seq_len": 2**20,
    "framework": "fsdp2",
    "kind": "sft",
    "loss": "chunked",
}


def request(**changes: Any) -> PlanRequest:
    return read_request(**LONG | changes)


def planned(**changes: Any) -> Plan:
    return meshwright.plan(robustness=False, time_limit_s=60, **LONG | changes)


def test_without_leave_nothing_is_offloaded() -> None:
    values = request().execution_options.values
    assert values["offload_modules"] == ("none",)
    allowed = request(allow="activation-offload").execution_options.values
    assert allowed["offload_modules"] == ("none", "layer_inputs", "saved_tensors")
    with pytest.raises(InputError, match="offload_modules"):
        request(pin="offload_modules=core_attn")
    with pytest.raises(InputError, match="offload_modules"):
        request(framework="torchtitan", loss=None, pin="offload_modules=layer_inputs")


def test_a_million_tokens_fit_with_inputs_on_the_host() -> None:
    """As trl's pull request 6846 ran them: 56.2 GB and 364 to 380 s, and no room without.

    The plan says 62.5 GB, with norms at 32 bits and gates apart as transformers has them.
    """
    assert planned().status == "infeasible"
    found = planned(allow="activation-offload", pin="zero_stage=3")
    assert found.status == "optimal"
    assert found.execution is not None
    assert found.layout is not None
    assert found.predicted is not None
    assert found.execution.offload_modules == "saved_tensors"
    assert (found.layout.cp, found.layout.recompute) == (8, "full")
    peak_gb = max(found.predicted.memory_gib) * 2**30 / 1e9
    assert peak_gb == pytest.approx(56.2, rel=0.12)


MORE = [("fsdp2", 6.0), ("deepspeed", 6.0), ("deepspeed", 8.0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "hbm_gib"),
    [("fsdp2", 8.0), *(pytest.param(*case, marks=pytest.mark.soak) for case in some(MORE))],
)
def test_the_search_equals_brute_force(framework: str, hbm_gib: float) -> None:
    asked = request(
        framework=framework,
        model="llama-3.2-1b",
        loss=None,
        gpus=4,
        global_batch=4,
        seq_len=16384,
        allow="activation-offload",
        forbid="optimizer-offload,shard-groups",
        pin="tp=1",
    )
    device = asked.cluster.device.model_copy(update={"hbm_gib": hbm_gib})
    asked = replace(asked, cluster=asked.cluster.model_copy(update={"device": device}))
    best_s = best_of_executions(asked, asked.execution_options.executions())
    outcome = search_executions(asked, CostModelPricing)
    found_s = outcome.best[0].step_time_s if outcome.best else None
    assert found_s == (None if best_s is None else pytest.approx(best_s, rel=1e-9))


def written(folder: Path, target: str | None = None, **changes: Any) -> Plan:
    plan = planned(**changes)
    files = plan_files(plan) if target is None else plan_files(plan, target)
    write_files(folder, files)
    return plan


def test_accelerate_has_a_switch_for_it(tmp_path: Path) -> None:
    plan = written(tmp_path, pin="offload_modules=layer_inputs")
    (path,) = tmp_path.rglob("accelerate.yaml")
    section = yaml.safe_load(path.read_text(encoding="utf-8"))["fsdp_config"]
    assert section["fsdp_activation_checkpointing_offload"] is True
    run = read_launch(path)
    assert run.settings["offload_modules"] == ["layer_inputs"]
    assert run.unread == ()
    assert plan.execution is not None
    assert plan.execution.offload_modules == "layer_inputs"


def test_hooks_are_the_trainers(tmp_path: Path) -> None:
    written(tmp_path, pin="offload_modules=saved_tensors")
    text = "".join(p.read_text(encoding="utf-8") for p in tmp_path.rglob("*.sh"))
    assert "activation_offloading True" in text


def test_deepspeed_is_told_twice(tmp_path: Path) -> None:
    """Its script overrides what ds_config.json says."""
    changes = {"framework": "deepspeed", "loss": None, "kind": "pretrain", "model": "llama-3-8b"}
    pins = "offload_modules=layer_inputs,recompute=full"
    plan = written(tmp_path, seq_len=8192, global_batch=64, pin=pins, **changes)
    (path,) = tmp_path.rglob("ds_config.json")
    section = json.loads(path.read_text(encoding="utf-8"))["activation_checkpointing"]
    assert section["cpu_checkpointing"] is True
    assert read_launch(path).settings["offload_modules"] == ["layer_inputs"]
    scripts = [p for p in tmp_path.rglob("*.sh") if "--checkpoint-in-cpu" in p.read_text("utf-8")]
    assert scripts
    assert plan.execution is not None
    assert plan.execution.offload_modules == "layer_inputs"


def test_axolotl_has_the_hooks_and_llama_factory_has_neither(tmp_path: Path) -> None:
    changes = {"loss": None, "seq_len": 4096, "global_batch": 64, "framework": "deepspeed"}
    plan = planned(pin="offload_modules=saved_tensors,recompute=full,tp=1", **changes)
    for name, text in plan_files(plan, "axolotl").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    run = read_launch(tmp_path / "axolotl.yaml")
    assert (run.settings["offload_modules"], run.unread) == (["saved_tensors"], ())
    (priced,) = price_launch(tmp_path / "axolotl.yaml", ["cluster=dgx-h100", "gpus=8"])
    assert plan.predicted is not None
    assert priced.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    with pytest.raises(InfeasibleError, match="has no field for saved_tensors"):
        plan_files(plan, "llama-factory")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recompute": "none", "offload_modules": ["layer_inputs"]}, "beside full recomputation"),
        ({"offload_modules": ["layer_inputs", "core_attn"]}, "goes alone"),
        ({"framework": "megatron", "offload_modules": ["layer_inputs"]}, "has no price with"),
    ],
)
def test_runs_that_have_no_price(settings: dict[str, Any], words: str) -> None:
    document = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "run": {
            "gpus": 8,
            "framework": "fsdp2",
            "global_batch": 8,
            "seq_len": 4096,
            "micro_batch": 1,
            "dp": 8,
            "zero_stage": 3,
            "recompute": "full",
        }
        | settings,
    }
    with pytest.raises(InputError, match=words):
        run_from_mapping(document, where="run")

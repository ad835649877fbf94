"""Overrides of a Megatron-Bridge recipe, read back, have the price of their plan to the last digit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.costmodel.workload import Execution
from meshwright.errors import InfeasibleError, InputError
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.launch.compare import compare
from meshwright.planner.launch.megatron import bridge_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.runs.launches.reader import price_launch
from meshwright.planner.runs.prediction import PricedRun
from tests.planner.plan.test_planner_service import request
from tests.planner.runs.launches.test_own_launch_read_back import legal_plans, priced
from tests.plans import make_plan
from tests.soaked import some

NAME = "bridge_overrides.json"


def read_back(plan: Plan, folder: Path) -> PricedRun:
    """The price of the overrides, with the model, the GPUs and the cluster that a recipe's user knows."""
    inputs = plan.inputs
    (folder / NAME).write_text(bridge_files(plan)[NAME], encoding="utf-8")
    (folder / "model.json").write_text(json.dumps(inputs.model.model_dump(mode="json")))
    assert plan.layout is not None
    layout = plan.layout
    gpus = layout.tp * layout.cp * layout.pp * layout.dp
    given = [f"cluster={inputs.cluster.name}", f"gpus={gpus}", "model=model.json"]
    given += [f"optimizer={inputs.optimizer}"]
    (run,) = price_launch(folder / NAME, given)
    return run


def check(count: int, folder: Path) -> None:
    for index, plan in enumerate(legal_plans("megatron", count)):
        place = folder / str(index)
        place.mkdir()
        try:
            again = read_back(plan, place)
        except InfeasibleError:
            continue
        own = priced(plan)
        assert again.prediction.estimate.step_time_s == own.estimate.step_time_s, plan.layout
        assert again.prediction.memory_gib == own.memory_gib, plan.layout
        assert not [remark for remark in again.run.remarks if "not read" in remark]


def test_overrides_have_the_price_of_their_plan(tmp_path: Path) -> None:
    check(12, tmp_path)


def test_groups_that_swap_heads_are_overrides_too(tmp_path: Path) -> None:
    plan = make_plan(tp=1, cp=8, dp=2, num_micro_batches=4, seq_len=65_536)
    execution = Execution(cp_comm="a2a+p2p", dp_overlap=True, pp_overlap=True)
    plan = plan.model_copy(update={"execution": execution})
    own, again = priced(plan), read_back(plan, tmp_path)
    assert again.prediction.estimate.step_time_s == own.estimate.step_time_s
    assert not [remark for remark in again.run.remarks if "not read" in remark]
    words = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    assert "model.cp_comm_type=a2a+p2p" in words
    assert "model.hierarchical_context_parallel_sizes=[4,2]" in words


@pytest.mark.soak
def test_many_overrides_have_the_prices_of_their_plans(tmp_path: Path) -> None:
    check(len(some(range(300))), tmp_path)


def test_overrides_without_a_model_ask_for_one(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('["model.tensor_model_parallel_size=2"]')
    with pytest.raises(InputError, match="--with model="):
        list(price_launch(tmp_path / NAME, ["cluster=dgx-h100"]))


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    overrides = ["model.seq_length=2048", "train.global_batch_size=16", "logger.log_interval=5"]
    overrides.append("model.some_new_field=3")
    (tmp_path / NAME).write_text(json.dumps(overrides))
    (run,) = price_launch(tmp_path / NAME, ["cluster=dgx-h100", "gpus=8", "model=llama-3-8b"])
    assert not any("logger.log_interval" in remark for remark in run.run.remarks)
    assert any(f"{NAME}: --some-new-field is not read" in remark for remark in run.run.remarks)


@pytest.mark.parametrize(
    ("model", "targets", "read"),
    [
        ("qwen3-30b-a3b", ("all-linear",), {"qkv_proj", "o_proj", "linear_fc1", "linear_fc2"}),
        ("deepseek-v2-lite", ("o_proj", "experts"), {"o_proj", "experts"}),
        ("deepseek-v2-lite", ("kv_b_proj", "gate_up_proj"), {"kv_b_proj", "gate_up_proj"}),
    ],
)
def test_adapters_of_a_recipe_are_read_back(
    model: str, targets: tuple[str, ...], read: set[str], tmp_path: Path
) -> None:
    """They were refused as without a price, which their plan has."""
    adapters = AdapterSpec(rank=32, targets=targets)
    asked = {"model": load_catalog_model(model), "gpus": 8, "seq_len": 2048}
    plan = fastest_plan(request(**asked, adapters=adapters, pins={"tp": 1, "pp": 1}))
    own, again = priced(plan), read_back(plan, tmp_path)
    assert again.prediction.estimate.step_time_s == own.estimate.step_time_s
    assert again.prediction.memory_gib == own.memory_gib
    found = again.run.workload.adapters
    assert found is not None
    assert (found.rank, {*found.targets}) == (32, read)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("peft.dim=wide", "is the width of adapters"),
        ("peft.dim=8", "give peft.target_modules too"),
        ("peft.target_modules=[linear_qkv]", "is the width of adapters"),
        ("peft.dropout=0.1", "training of adapters"),
    ],
)
def test_adapters_that_are_not_known_are_refused(override: str, words: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(["model.seq_length=4096", override]), encoding="utf-8")
    given = ["cluster=dgx-h100", "gpus=8", "model=qwen3-8b", "global_batch=8"]
    with pytest.raises(InputError, match=words):
        list(price_launch(tmp_path / NAME, given))


def test_a_module_that_is_not_known_is_refused(tmp_path: Path) -> None:
    words = ["peft.dim=8", "peft.target_modules=[linear_qkv,lm_head]"]
    (tmp_path / NAME).write_text(json.dumps(words), encoding="utf-8")
    with pytest.raises(InputError, match="is no module that plans know, got 'lm_head'"):
        list(price_launch(tmp_path / NAME, ["cluster=dgx-h100", "gpus=8", "model=qwen3-8b"]))


def test_overrides_are_a_baseline(tmp_path: Path) -> None:
    """A plan beside its own overrides ended in the advice to name the model, which only `estimate` takes."""
    plan = fastest_plan(request(pins={"tp": 2, "pp": 1, "cp": 1, "micro_batch": 1}))
    own = tmp_path / NAME
    own.write_text(bridge_files(plan)[NAME], encoding="utf-8")
    baseline = compare(plan, own).baseline
    assert baseline is not None
    assert baseline.diff is not None
    assert (baseline.verdict, baseline.diff.note) == ("optimal", "")
    assert not baseline.remarks
    words = [word for word in json.loads(own.read_text()) if "seq_length" not in word]
    own.write_text(json.dumps([*words, "model.recompute_granularity=full"]), encoding="utf-8")
    other = compare(plan, own).baseline
    assert other is not None
    assert other.diff is not None
    assert "launch --target bridge" in other.diff.note
    own.write_text(json.dumps(words[:3]), encoding="utf-8")
    partly = compare(plan, own).baseline
    assert partly is not None
    assert any("the recipe may have it otherwise" in words for words in partly.remarks)
    with pytest.raises(InputError, match="does not say seq_len"):
        list(price_launch(own, ["cluster=dgx-h100", "gpus=16", "model=llama-3-8b"]))

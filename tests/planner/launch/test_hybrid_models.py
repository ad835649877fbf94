"""Hybrid models are launched by pretrain_hybrid.py, and what is launched is read back as it was priced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel.workload import Execution
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError, InputError
from meshwright.model_specs.adapters import AdapterSpec, resolved
from meshwright.model_specs.parameters import mtp_parameters, parameter_count
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.megatron import bridge_overrides
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.runs.launches.command_line import words_of
from meshwright.planner.runs.launches.megatron import megatron_model
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.runs.run_terms import pattern_chunks
from tests.places import DATA
from tests.plans import make_plan

PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def test_chunks_of_a_pattern_are_those_of_the_split(tmp_path: Path) -> None:
    stages = [[7, 6], [7, 6], [7, 6], [7, 6]]
    plan = make_plan("nemotron-h-8b", tp=2, pp=4, vpp=2, dp=2, num_micro_batches=8, stages=stages)
    files = plan_files(plan, "megatron")
    write_files(tmp_path, files)
    script = files["launch.sh"]
    assert "pretrain_hybrid.py" in script
    assert "pretrain_gpt.py" not in script
    assert "--pipeline-model-parallel-layout" not in script
    assert "mamba-ssm and causal-conv1d" in script
    run = read_launch(tmp_path / "launch.sh")
    assert not run.unread
    assert run.settings["stages"] == stages
    assert run.settings["vpp"] == 2
    model = ModelSpec.model_validate(run.model)
    ours = plan.inputs.model
    assert model.hybrid_pattern == ours.hybrid_pattern == PATTERN
    assert (model.mamba, model.layers) == (ours.mamba, 52)
    assert pattern_chunks(PATTERN, stages).replace("|", "") == PATTERN


@pytest.mark.parametrize("name", ["nemotron-3-nano-30b-a3b", "mamba-codestral-7b"])
def test_experts_and_models_without_attention_are_read_back(name: str, tmp_path: Path) -> None:
    plan = make_plan(name, dp=8)
    write_files(tmp_path, plan_files(plan, "megatron"))
    model, ours = (
        ModelSpec.model_validate(read_launch(tmp_path / "launch.sh").model),
        plan.inputs.model,
    )
    assert model.hybrid_pattern == ours.hybrid_pattern
    assert (model.ffn_hidden, model.heads, model.head_dim) == (0, ours.heads, ours.head_dim)
    assert (model.moe is None) is (ours.moe is None)
    if model.moe is not None and ours.moe is not None:
        assert model.moe.router_scaling_factor == ours.moe.router_scaling_factor == 2.5


def test_prediction_modules_stand_behind_the_pattern(tmp_path: Path) -> None:
    plan = make_plan("nemotron-3.5-lightning", pp=2, dp=4, stages=[[26], [26]])
    write_files(tmp_path, plan_files(plan, "megatron"))
    script = (tmp_path / "launch.sh").read_text(encoding="utf-8")
    ours = plan.inputs.model
    pattern = ours.hybrid_pattern or ""
    assert f"{pattern[:26]}|{pattern[26:]}/*E/*E" in script
    assert "--mtp-use-repeated-layer" in script
    run = read_launch(tmp_path / "launch.sh")
    assert not run.unread
    assert run.settings["stages"] == [[26], [26]]
    model = ModelSpec.model_validate(run.model)
    assert (model.mtp_layers, model.mtp_pattern, model.mtp_shared) == (2, "*E", True)
    assert mtp_parameters(model) == mtp_parameters(ours)
    unequal = script.replace("/*E/*E", "/*E/E")
    (tmp_path / "launch.sh").write_text(unequal, encoding="utf-8")
    with pytest.raises(InputError, match="the blocks of equal prediction modules"):
        read_launch(tmp_path / "launch.sh")


def test_experts_on_a_projection_are_launched_and_read_back(tmp_path: Path) -> None:
    ours = read_model(DATA / "hf_configs" / "nemotron-3-super-120b-a12b.json")
    write_files(tmp_path, plan_files(make_plan(ours, dp=8), "megatron"))
    assert "--moe-latent-size 1024" in (tmp_path / "launch.sh").read_text(encoding="utf-8")
    run = read_launch(tmp_path / "launch.sh")
    assert not run.unread
    model = ModelSpec.model_validate(run.model)
    assert model.moe is not None
    assert model.moe.latent_size == 1024
    # Padded to a multiple that its vocabulary already is.
    assert parameter_count(model) == parameter_count(ours)
    plain = plan_files(make_plan("nemotron-3-nano-30b-a3b", dp=8), "megatron")
    assert "latent" not in plain["launch.sh"]


def test_adapters_beside_the_projections_are_named_to_the_bridge() -> None:
    ours = read_model(DATA / "hf_configs" / "nemotron-3-super-120b-a12b.json")
    plan = make_plan(ours, dp=8)
    adapters = resolved(ours, AdapterSpec(targets=("in_proj", "fc1_latent_proj")), fused=True)
    inputs = plan.inputs.model_copy(update={"adapters": adapters})
    (modules,) = (
        words
        for words in bridge_overrides(plan.model_copy(update={"inputs": inputs}))
        if words.startswith("peft.target_modules")
    )
    assert "fc1_latent_proj" in modules
    assert "in_proj" in modules
    assert "fc2_latent_proj" not in modules


def test_partial_graphs_hold_mamba() -> None:
    execution = Execution(moe_dispatch="alltoall", cuda_graph="partial")
    plan = make_plan("nemotron-3-nano-30b-a3b", dp=8).model_copy(update={"execution": execution})
    assert "mamba attn moe_router moe_preprocess" in plan_files(plan, "megatron")["launch.sh"]


def test_bridge_takes_the_chunks_without_virtual_stages() -> None:
    plan = make_plan("nemotron-h-8b", pp=4, dp=2, num_micro_batches=4)
    chunks = pattern_chunks(PATTERN, [[13]] * 4)
    assert f"model.hybrid_layer_pattern='{chunks}'" in bridge_overrides(plan)
    interleaved = make_plan("nemotron-h-8b", pp=4, vpp=2, dp=2, num_micro_batches=4)
    with pytest.raises(InfeasibleError, match="no virtual stages of hybrid models"):
        bridge_overrides(interleaved)


def test_megatron_refuses_mamba_beside_attention_and_accelerate_takes_it() -> None:
    with pytest.raises(InfeasibleError, match="Mamba-2 beside attention"):
        plan_files(make_plan("falcon-h1-34b", dp=8), "megatron")
    whole = make_plan("falcon-h1-34b", dp=8, zero_stage=3)
    assert "accelerate.yaml" in plan_files(whole, "fsdp2")
    with pytest.raises(InfeasibleError, match="cuts neither way"):
        plan_files(make_plan("nemotron-h-8b", tp=2, dp=4, zero_stage=3), "fsdp2")


def read_words(text: str) -> dict[str, Any]:
    words = f"--hidden-size 4096 --num-attention-heads 32 --swiglu {text}"
    return megatron_model(words_of(words, "flags"))


def test_the_older_flag_and_megatrons_own_sizes() -> None:
    model = read_words("--hybrid-override-pattern 'M-M*' --num-layers 9")
    assert (model["layers"], model["hybrid_pattern"]) == (4, "M-M*")
    # Twice as wide as the model, in heads of 64.
    assert model["mamba"] == {"state_dim": 128, "head_dim": 64, "groups": 8, "heads": 128}


@pytest.mark.parametrize("pattern", ["M-G*", "M*/MM", "|", "M-+"])
def test_other_blocks_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="--hybrid-layer-pattern"):
        read_words(f"--hybrid-layer-pattern '{pattern}'")

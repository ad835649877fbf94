"""Newer families from config.json to a plan: what a framework trains of them, and what its launch says."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.documents import write_files
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.parameters import flops_per_token, parameter_count
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import read_launch
from tests.places import DATA
from tests.plans import make_plan

CONFIGS = DATA / "hf_configs"
PLANNED: tuple[tuple[str, FrameworkName, int], ...] = (
    ("command-a-plus-218b", "megatron", 256),
    ("command-r-plus-104b", "megatron", 64),
    ("command-r7b", "fsdp2", 8),
    ("exaone-3.5-7.8b", "torchtitan", 8),
    ("glm-4-9b-chat", "megatron", 8),
    ("glm-4.1v-9b", "fsdp2", 8),
    ("glm-4.5v", "megatron", 64),
    ("hunyuan-a13b", "megatron", 64),
    ("hy3-295b-a21b", "megatron", 256),
    ("internlm2.5-7b", "torchtitan", 8),
    ("internlm3-8b", "fsdp2", 8),
    ("k-exaone-236b-a23b", "megatron", 256),
    ("kimi-linear-48b-a3b", "fsdp2", 32),
    ("ling-lite", "megatron", 16),
    ("ling-mini-2.0", "fsdp2", 16),
    ("mimo-7b", "megatron", 8),
    ("minimax-text-01", "fsdp2", 1024),
    ("phi-2", "fsdp2", 8),
    ("phi-3.5-moe", "megatron", 32),
    ("solar-open-100b", "megatron", 128),
    ("stablelm-2-12b", "fsdp2", 16),
    ("trinity-mini-26b-a3b", "megatron", 32),
)


LONG = {name for name, _, gpus in PLANNED if gpus == 256} | {
    *("hunyuan-a13b", "ling-lite", "solar-open-100b", "trinity-mini-26b-a3b"),
}
"""Models whose plans take two seconds and more; two that are as large are planned in `make test`."""


def planned(name: str, framework: FrameworkName, gpus: int) -> Plan:
    """Without what its choices bring, which takes several searches more and is not asked here."""
    asked = read_request(
        model=CONFIGS / f"{name}.json",
        cluster="dgx-h100",
        gpus=gpus,
        global_batch=2 * gpus,
        seq_len=4096,
        framework=framework,
    )
    return fastest_plan(asked)


@pytest.mark.parametrize(
    ("name", "framework", "gpus"),
    [
        pytest.param(
            *case,
            id="-".join(map(str, case)),
            marks=pytest.mark.soak if case[0] in LONG else pytest.mark.slow,
        )
        for case in PLANNED
    ],
)
def test_a_plan_is_found_and_is_as_fast_as_its_flops_say(
    name: str, framework: FrameworkName, gpus: int
) -> None:
    plan = planned(name, framework, gpus)
    assert plan.predicted is not None
    tokens = 2 * gpus * 4096
    flops = tokens * flops_per_token(plan.inputs.model, 4096)
    assert plan.predicted.mfu == pytest.approx(
        flops / plan.predicted.step_time_s / gpus / 989.4e12, rel=0.01
    )
    assert 0.01 < plan.predicted.mfu < 0.8


@pytest.mark.parametrize(
    "name", ["kimi-linear-48b-a3b", pytest.param("minimax-m1", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed"])
def test_frameworks_without_the_layers_refuse_them_by_a_rule(
    name: str, framework: FrameworkName
) -> None:
    plan = planned(name, framework, 64 if name.startswith("kimi") else 512)
    assert plan.status == "infeasible"
    assert plan.infeasible is not None
    refusing = {rule.rule for rule in plan.infeasible.rules}
    # A rule of a larger part says enough where it refuses the model too.
    assert refusing <= {f"{framework}-linear-kinds", f"{framework}-architecture"}
    assert refusing


def launched(model: ModelSpec, folder: Path) -> tuple[ModelSpec, str]:
    """The model that Megatron's launch file of a plan is read as, and the text of the file."""
    write_files(folder, plan_files(make_plan(model, dp=8), "megatron"))
    run = read_launch(folder / "launch.sh")
    assert not run.unread
    return ModelSpec.model_validate(run.model), (folder / "launch.sh").read_text(encoding="utf-8")


def test_megatron_says_what_it_trains_otherwise(tmp_path: Path) -> None:
    cohere = read_model(CONFIGS / "command-r7b.json")
    model, script = launched(cohere, tmp_path / "cohere")
    assert (model.rope_in_windows_alone, model.output_scale) == (True, 0.25)
    for words in (
        "Layer norms have a shift beside their scale.",
        "Attention and feed-forward run one after the other, not side by side.",
        "--no-rope-freq",
        "--mup-output-mult 0.25",
    ):
        assert words in script
    phi = read_model(CONFIGS / "phi-3.5-moe.json")
    model, script = launched(phi, tmp_path / "phi")
    assert "not two that SparseMixer draws" in script
    assert "Logits have no bias." in script
    assert model.moe is not None
    assert (model.moe.router_score, model.moe.router_normalized) == ("softmax", False)


@pytest.mark.parametrize("name", ["hunyuan-a13b", "ling-mini-2.0", "solar-open-100b"])
def test_experts_are_read_back_as_they_were_launched(name: str, tmp_path: Path) -> None:
    ours = read_model(CONFIGS / f"{name}.json")
    model, _ = launched(ours, tmp_path)
    assert model.moe is not None
    assert ours.moe is not None
    assert model.moe.shared_width == ours.moe.shared_width
    same_width = {"shared_ffn_hidden": ours.moe.shared_ffn_hidden}
    assert model.moe.model_copy(update=same_width) == ours.moe
    # A launch file knows the vocabulary as it is padded.
    same_words = model.model_copy(update={"vocab": ours.vocab})
    assert parameter_count(same_words) == parameter_count(ours)

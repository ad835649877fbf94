"""Launch files of the other targets: what they say is what the plan says, and refusals name their rule."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.catalog import catalog_names, load_catalog_model
from meshwright.planner.launch.bridge import bridge_overrides
from meshwright.planner.launch.plan_files import TARGETS, plan_files
from meshwright.planner.launch.torchtitan_model import pipeline_modules
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_text
from tests.places import DATA
from tests.planner.launch.test_launch_megatron import value
from tests.plans import make_plan


def planned(framework: FrameworkName, model: str = "llama-3-8b", **changes: Any) -> Plan:
    plan = make_plan(model, **changes)
    return plan.model_copy(
        update={"inputs": plan.inputs.model_copy(update={"framework": framework})}
    )


def test_torchtitan_flags_and_stages() -> None:
    plan = planned(
        "torchtitan",
        tp=2,
        pp=2,
        vpp=2,
        dp=4,
        num_micro_batches=4,
        micro_batch=2,
        zero_stage=2,
        sequence_parallel=True,
        schedule="interleaved-1f1b",
        stages=[[8, 9], [7, 8]],
    )
    files = plan_files(plan)
    args = json.loads(files["torchtitan_args.json"])
    assert value(args, "--parallelism.tensor-parallel-degree") == "2"
    assert value(args, "--parallelism.data-parallel-shard-degree") == "4"
    assert value(args, "--training.local-batch-size") == "8"
    assert value(args, "--training.global-batch-size") == "32"
    assert value(args, "--parallelism.pipeline-parallel-schedule") == "Interleaved1F1B"
    assert "--training.disable-cuda-graphs" in args
    assert args[-1] == "activation-checkpoint:none"
    assert plan.layout is not None
    parts = pipeline_modules(plan.layout)
    assert parts is not None
    # Chunk v of rank r is the (v pp + r)-th of the model: 8, 7, 9, 8 layers.
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [8, 7, 9, 8]
    assert [name for part in parts for name in part if "." in name] == [
        f"layers.{i}" for i in range(32)
    ]
    assert (parts[0][0], parts[-1][-1]) == ("tok_embeddings", "lm_head")
    compile(files["meshwright_registry.py"], "meshwright_registry.py", "exec")


def test_deepspeed_says_the_batch_and_the_stage() -> None:
    files = plan_files(
        planned("deepspeed", tp=2, dp=4, zero_stage=2, num_micro_batches=3, precision="fp16")
    )
    config = json.loads(files["ds_config.json"])
    assert config["train_batch_size"] == 12
    assert config["gradient_accumulation_steps"] == 3
    assert config["zero_optimization"]["stage"] == 2
    assert config["fp16"]["enabled"] is True
    assert "tensor_parallel" not in config
    assert json.loads(files["ds_config_autotp.json"])["tensor_parallel"] == {"autotp_size": 2}
    assert (
        value(json.loads(files["megatron_deepspeed_args.json"]), "--tensor-model-parallel-size")
        == "2"
    )


def test_accelerate_says_the_mesh_and_torchrun_gets_the_same() -> None:
    files = plan_files(planned("fsdp2", tp=2, cp=2, dp=4, zero_stage=3, num_micro_batches=5))
    config, env = yaml.safe_load(files["accelerate.yaml"]), json.loads(files["env.json"])
    mesh = config["parallelism_config"]
    assert (mesh["parallelism_config_dp_shard_size"], mesh["parallelism_config_cp_size"]) == (4, 2)
    assert (config["num_machines"], config["num_processes"]) == (2, 16)
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert env["PARALLELISM_CONFIG_TP_SIZE"] == "2"
    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "5"


FLAGS = DATA / "megatron_deepspeed_flags.txt"


ATTENDING = [
    name
    for name in catalog_names()
    if load_catalog_model(name).mamba is None and load_catalog_model(name).indexer is None
]
"""Models that Megatron-DeepSpeed is planned with."""


@pytest.mark.parametrize("name", ATTENDING)
def test_megatron_deepspeed_has_every_flag(name: str) -> None:
    known = {
        line.strip() for line in FLAGS.read_text("utf-8").splitlines() if line.startswith("--")
    }
    for changes in ({"recompute": "full", "recompute_layers": 999}, {"precision": "fp16"}):
        plan = planned("deepspeed", name, dp=8, **changes)
        args = json.loads(plan_files(plan)["megatron_deepspeed_args.json"])
        assert {word for word in args if word.startswith("--")} <= known
        assert value(args, "--expert-interval") == (None if plan.inputs.model.moe is None else "1")


def test_deepspeed_deals_the_layers_that_are_left_to_the_first_stages() -> None:
    assert "ds_config.json" in plan_files(planned("deepspeed", pp=3, stages=[[11], [11], [10]]))


def test_bridge_overrides() -> None:
    texts = bridge_overrides(make_plan(pp=3, dp=2, num_micro_batches=3))
    assert "model.pipeline_model_parallel_layout='Et*11|t*11|t*10L'" in texts
    assert "train.global_batch_size=6" in texts
    assert "model.sequence_parallel=false" in texts


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (planned("torchtitan", "gpt3-175b", zero_stage=3), "torchtitan-architecture"),
        (planned("torchtitan", "deepseek-v3", cp=2, zero_stage=3), "torchtitan-mtp"),
        (
            planned("torchtitan", "mixtral-8x7b", dp=8, ep=8, zero_stage=0),
            "torchtitan-expert-shards",
        ),
        (planned("torchtitan", tp=16, zero_stage=3), "torchtitan-kv-heads"),
        (planned("deepspeed", pp=3, stages=[[10], [11], [11]]), "deepspeed-even-stages"),
        (planned("deepspeed", pp=2, zero_stage=2), "deepspeed-pipeline-zero"),
        (planned("fsdp2", pp=2, zero_stage=3), "fsdp2-degrees"),
    ],
)
def test_what_a_framework_cannot_start_is_refused_by_name(plan: Plan, rule: str) -> None:
    with pytest.raises(InfeasibleError, match=rule):
        plan_files(plan)


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(InputError, match="torchtitan"):
        plan_files(make_plan(), "torchtitn")


@pytest.mark.parametrize("target", TARGETS)
def test_names_reach_no_shell(target: str, tmp_path: Path) -> None:
    name = 'it\'s "x" $(touch owned) `touch owned`\n; touch owned #'
    own: dict[str, FrameworkName] = {
        "torchtitan": "torchtitan",
        "deepspeed": "deepspeed",
        "fsdp2": "fsdp2",
    }
    plan = planned(
        own.get(target, "megatron"), dp=8, zero_stage=3 if target in ("torchtitan", "fsdp2") else 1
    )
    model = plan.inputs.model.model_copy(update={"name": name})
    plan = plan.model_copy(update={"inputs": plan.inputs.model_copy(update={"model": model})})
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    folder = tmp_path / "a folder $(touch owned)"
    command = ["launch", str(tmp_path / "plan.yaml"), "--target", target, "-o", str(folder)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    for script in [*folder.glob("*.sh"), *folder.glob("*.sbatch")]:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
        subprocess.run(
            ["bash", str(script)], cwd=tmp_path, check=False, timeout=30, capture_output=True
        )
        assert all("touch owned" not in line for line in code_lines(script))
    assert not list(tmp_path.rglob("owned"))
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 2
    assert "--force" in again.output
    assert CliRunner().invoke(main, [*command, "--force"]).exit_code == 0


def code_lines(script: Path) -> list[str]:
    """Lines of a script without comments."""
    return [
        shlex.join(shlex.split(line, comments=True))
        for line in script.read_text("utf-8").splitlines()
        if "'" not in line and '"' not in line
    ]

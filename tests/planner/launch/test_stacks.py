"""Configurations of fine-tuning stacks: read back, they have the price of their plan."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.api import plan
from meshwright.costmodel.workload import Execution
from meshwright.errors import InfeasibleError, InputError
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.planner.audit import file_faults
from meshwright.planner.launch.compare import script_diff
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan, ScriptDiff
from meshwright.planner.runs.launches.reader import price_launch, read_launch, run_of_inputs
from meshwright.planner.runs.prediction import price_run
from tests.plans import make_plan

NAMES = {"llama-factory": "llama_factory.yaml", "axolotl": "axolotl.yaml"}


@cache
def planned(asked: str) -> Plan:
    """The plan of some options, which stand in JSON."""
    options = json.loads(asked)
    pins = {"micro_batch": 2, "zero_stage": 2} | options.pop("pin", {})
    return plan(
        "qwen3-8b",
        cluster=options.pop("cluster", "dgx-h100"),
        gpus=8,
        global_batch=64,
        seq_len=2048,
        time_limit_s=60,
        pin=pins,
        robustness=False,
        **options,
    )


def written(folder: Path, target: str, **asked: Any) -> tuple[Any, Path]:
    found = planned(json.dumps(asked))
    for name, text in plan_files(found, target).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return found, folder / NAMES.get(target, "launch.sh")


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize(
    "asked",
    [
        {"framework": "deepspeed", "train": "lora", "lora_rank": 8},
        {"framework": "fsdp2", "train": "qlora", "lora_targets": "q_proj,v_proj"},
        {"framework": "fsdp2", "train": "qdora", "lora_targets": "q_proj,v_proj"},
        {"framework": "deepspeed", "train": "lora-8bit", "lora_rank": 8},
        {"framework": "deepspeed", "kind": "dpo", "loss": "all-logits", "pin": {"tp": 1}},
        {"framework": "fsdp2", "kind": "orpo", "pin": {"tp": 1, "cp": 1}, "train": "lora"},
        {"framework": "deepspeed", "optimizer": "adam-8bit", "pin": {"tp": 1}},
    ],
)
def test_what_is_written_is_read_back(asked: dict[str, Any], target: str, tmp_path: Path) -> None:
    found, path = written(tmp_path, target, **asked)
    run = read_launch(path)
    settings, layout = run.settings, found.layout
    assert run.unread == ()
    assert run.model == "qwen3-8b"
    assert (settings["zero_stage"], settings["framework"]) == (
        layout.zero_stage,
        asked["framework"],
    )
    assert settings["micro_batch"] == layout.micro_batch
    assert run.local_batch == layout.micro_batch * layout.num_micro_batches
    assert (settings["recompute"], settings["seq_len"]) == (layout.recompute, 2048)
    assert settings["kind"] == asked.get("kind", "pretrain" if target == "llama-factory" else "sft")
    assert settings.get("optimizer", "adam") == asked.get("optimizer", "adam")
    adapters = found.inputs.adapters
    assert (settings["adapters"] is None) == (adapters is None)
    if adapters is not None:
        assert settings["adapters"]["method"] == adapters.method
        assert tuple(settings["adapters"]["targets"]) == adapters.targets


@pytest.mark.parametrize(
    ("target", "framework", "cluster"),
    [
        ("axolotl", "fsdp2", "dgx-h100"),
        ("axolotl", "deepspeed", "dgx-h100"),
        ("axolotl", "deepspeed", "rtx-pro-6000-pcie"),
        ("llama-factory", "deepspeed", "dgx-h100"),
        ("llama-factory", "deepspeed", "dgx-a100"),
        ("llama-factory", "fsdp2", "dgx-h100"),
    ],
)
def test_it_has_the_plans_price(target: str, framework: str, cluster: str, tmp_path: Path) -> None:
    """Files name FlashAttention-3 on Hopper, FlashAttention-2 on Ampere and on Blackwell's RTX parts."""
    asked = {"framework": framework, "train": "lora", "lora_rank": 8, "cluster": cluster}
    found, path = written(tmp_path, target, **asked)
    (priced,) = price_launch(path, [f"cluster={cluster}", "gpus=8"])
    assert priced.predicted.step_time_s == pytest.approx(found.predicted.step_time_s, rel=1e-9)


def test_llama_factory_shards_as_the_file_of_accelerate_says(tmp_path: Path) -> None:
    """Under FSDP2 how ranks share the model stands in accelerate.yaml, which lies beside or is named."""
    _, path = written(tmp_path, "llama-factory", framework="fsdp2", pin={"zero_stage": 3})
    beside = read_launch(path)
    assert (beside.settings["zero_stage"], beside.settings["framework"]) == (3, "fsdp2")
    assert any("accelerate.yaml" in remark for remark in beside.remarks)
    (tmp_path / "accelerate.yaml").rename(tmp_path / "own.yaml")
    alone = read_launch(path)
    assert (alone.settings["zero_stage"], alone.settings["framework"]) == (0, "pytorch")
    script = tmp_path / "train.sh"
    script.write_text(
        "accelerate launch --config_file own.yaml src/train.py llama_factory.yaml\n",
        encoding="utf-8",
    )
    named = read_launch(script)
    assert named.settings == beside.settings
    script.write_text(
        "accelerate launch --config_file away.yaml src/train.py llama_factory.yaml\n",
        encoding="utf-8",
    )
    with pytest.raises(InputError, match="config_file"):
        read_launch(script)


@pytest.mark.parametrize(
    ("asked", "additions"),
    [
        ({"framework": "fsdp2", "train": "lora", "lora_rank": 8}, []),
        ({"framework": "fsdp2", "train": "qlora"}, []),
        ({"framework": "deepspeed", "train": "dora", "pin": {"tp": 1}}, []),
        ({"framework": "deepspeed", "train": "lora-8bit", "pin": {"tp": 1}}, []),
        ({"framework": "deepspeed", "optimizer": "adam-8bit", "pin": {"tp": 1}}, []),
        ({"framework": "deepspeed", "kind": "dpo", "pin": {"tp": 1}}, ["kind=dpo"]),
    ],
)
def test_a_script_of_a_plan_has_its_price(
    asked: dict[str, Any], additions: list[str], tmp_path: Path
) -> None:
    """Adapters are those of PEFT's file beside it; a script under DeepSpeed was taken for Megatron's."""
    found, _ = written(tmp_path, asked["framework"], **asked)
    if found.inputs.loss is not None:
        additions = [*additions, f"loss={found.inputs.loss}"]
    known = ["model=qwen3-8b", "cluster=dgx-h100", "gpus=8", "seq_len=2048", "global_batch=64"]
    (priced,) = price_launch(tmp_path / "launch.sh", [*known, *additions])
    assert priced.predicted.step_time_s == pytest.approx(found.predicted.step_time_s, rel=1e-9)
    adapters = priced.run.workload.adapters
    assert adapters == found.inputs.adapters
    if adapters is not None:
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}', encoding="utf-8")
        with pytest.raises(InputError, match=r"adapter_config\.json: peft_type: has no price yet"):
            read_launch(tmp_path / "launch.sh")


@pytest.mark.parametrize(
    "asked",
    [
        {"framework": "fsdp2", "train": "qlora", "pin": {"micro_batch": 4}},
        {"framework": "fsdp2", "kind": "orpo", "train": "dora", "lora_targets": "q_proj,v_proj"},
        {"framework": "deepspeed", "kind": "dpo", "pin": {"tp": 1}},
        {"framework": "deepspeed"},
    ],
)
def test_a_script_of_a_plan_is_the_plan_as_its_baseline(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    """Bits of frozen weights, the loss and the number of micro-batches are the plan's."""
    found, _ = written(tmp_path, asked["framework"], **asked)
    path = tmp_path / "launch.sh"
    launch = read_launch(path)
    assert launch.unread == ()
    priced = price_run(run_of_inputs(launch, found.inputs, path), path)
    assert priced.run.workload.adapters == found.inputs.adapters
    # Its files were said to be of another kind than the plan's.
    assert script_diff(path, found) == ScriptDiff()
    assert priced.predicted.step_time_s == pytest.approx(found.predicted.step_time_s, rel=1e-9)
    assert priced.predicted.memory_gib == pytest.approx(found.predicted.memory_gib, rel=1e-9)


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({}, "starts plans of deepspeed and fsdp2, not of megatron"),
        ({"tp": 2, "dp": 4}, "has no tp: pin tp=1"),
    ],
)
def test_what_they_cannot_start(made: dict[str, Any], words: str, target: str) -> None:
    made_plan = make_plan(**made)
    if made:
        inputs = made_plan.inputs.model_copy(update={"framework": "deepspeed"})
        made_plan = made_plan.model_copy(update={"inputs": inputs})
    with pytest.raises(InfeasibleError, match=words):
        plan_files(made_plan, target)


@pytest.mark.parametrize("target", [*NAMES, "torchtitan"])
def test_a_loss_that_a_plan_counts_on_is_not_left_out(target: str) -> None:
    made = make_plan("qwen3-8b", dp=8, zero_stage=3)
    changes = {"framework": "fsdp2", "loss": "chunked"}
    made = made.model_copy(update={"inputs": made.inputs.model_copy(update=changes)})
    with pytest.raises(InfeasibleError, match="chunked loss"):
        plan_files(made, target)


def test_layers_are_recomputed_once(tmp_path: Path) -> None:
    """LLaMA-Factory wraps layers itself; accelerate's file had FSDP wrap them again."""
    made = make_plan("qwen3-8b", dp=8, zero_stage=3, recompute="full", recompute_layers=10**6)
    changes = {"framework": "fsdp2", "kind": "sft"}
    made = made.model_copy(update={"inputs": made.inputs.model_copy(update=changes)})
    files = plan_files(made, "llama-factory")
    assert "disable_gradient_checkpointing: false" in files["llama_factory.yaml"]
    assert "fsdp_activation_checkpointing: false" in files["accelerate.yaml"]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert list(file_faults(made, files, tmp_path)) == []
    other = files["accelerate.yaml"].replace("dp_shard_size: 8", "dp_shard_size: 4")
    (tmp_path / "accelerate.yaml").write_text(other, encoding="utf-8")
    assert any("accelerate.yaml: line" in fault for fault in file_faults(made, files, tmp_path))
    assert "gradient_checkpointing: true" in plan_files(made, "axolotl")["axolotl.yaml"]


def test_reward_models_are_a_stage_of_one_of_them() -> None:
    made = make_plan("qwen3-8b", dp=8)
    changes = {"framework": "deepspeed", "kind": "reward"}
    made = made.model_copy(update={"inputs": made.inputs.model_copy(update=changes)})
    assert "stage: rm" in plan_files(made, "llama-factory")["llama_factory.yaml"]
    with pytest.raises(InfeasibleError, match="is not written for reward"):
        plan_files(made, "axolotl")


@pytest.mark.parametrize(
    ("framework", "recompute", "words"),
    [
        ("fsdp2", "full", "fsdp_activation_checkpointing recomputes its layers"),
        ("deepspeed", "full", "It turns gradient checkpointing on"),
        ("fsdp2", "none", "It turns gradient checkpointing off"),
        ("deepspeed", "none", "It turns gradient checkpointing off"),
    ],
)
def test_a_script_is_told_what_the_trainer_sets(framework: str, recompute: str, words: str) -> None:
    """The Trainer refuses two that recompute, and its own accumulation wins over the environment's."""
    adapters = AdapterSpec(matrices=("q_proj",))
    changes = {"framework": framework, "adapters": adapters}
    layers: dict[str, Any] = {
        "recompute": recompute,
        "recompute_layers": 36 if recompute == "full" else 0,
    }
    made = make_plan("qwen3-8b", dp=8, zero_stage=2, micro_batch=2, num_micro_batches=4, **layers)
    made = made.model_copy(update={"inputs": made.inputs.model_copy(update=changes)})
    script = plan_files(made, framework)["launch.sh"]
    assert words in script
    assert script.count("gradient checkpointing") == 2  # At its top, and when it starts.
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 4" in script


@pytest.mark.parametrize(
    ("kind", "degrees", "program"),
    [
        ("sft", {"dp": 8}, '"$TRAIN_SCRIPT" --deepspeed'),
        ("sft", {"tp": 2, "dp": 4}, '"$DEEPSPEED_ENTRY" --deepspeed_config'),
        ("pretrain", {"dp": 8}, '"$DEEPSPEED_ENTRY" --deepspeed_config'),
    ],
)
def test_fine_tuning_is_started_by_a_trainer(
    kind: str, degrees: dict[str, Any], program: str
) -> None:
    """Megatron-DeepSpeed's pretrain_gpt.py, which was started, masks no prompts and reads no checkpoint."""
    made = make_plan("qwen3-8b", zero_stage=3 if "tp" not in degrees else 1, **degrees)
    changes = {"framework": "deepspeed", "kind": kind}
    made = made.model_copy(update={"inputs": made.inputs.model_copy(update=changes)})
    assert program in plan_files(made, "deepspeed")["launch.sh"]


@pytest.mark.parametrize("target", NAMES)
def test_a_checkpoint_is_said_to_be_one_of_several(target: str) -> None:
    made = make_plan("llama-3.1-70b", dp=8, zero_stage=3)
    made = made.model_copy(
        update={"inputs": made.inputs.model_copy(update={"framework": "deepspeed"})}
    )
    text = plan_files(made, target)[NAMES[target]]
    assert "one checkpoint with the plan's layers and widths: put the one that you train" in text


SCRIPTS = {"trl": "trl.sh", "ms-swift": "swift.sh"}
WHOLE = {"tp": 1, "cp": 1, "shard_groups": 1}


@pytest.mark.parametrize("target", SCRIPTS)
@pytest.mark.parametrize(
    "asked",
    [
        {"framework": "deepspeed", "train": "lora", "lora_rank": 8},
        {"framework": "fsdp2"},
        {"framework": "fsdp2", "train": "qlora", "lora_targets": "q_proj,v_proj"},
        {"framework": "deepspeed", "train": "dora-8bit"},
        {"framework": "fsdp2", "kind": "dpo", "pin": WHOLE | {"zero_stage": 3}},
        {"framework": "deepspeed", "kind": "kto", "train": "lora"},
        {"framework": "deepspeed", "optimizer": "adam-8bit"},
        {"framework": "fsdp2", "pin": WHOLE | {"zero_stage": 3, "sync_each_batch": "on"}},
    ],
)
def test_scripts_have_the_price_of_their_plan(
    asked: dict[str, Any], target: str, tmp_path: Path
) -> None:
    loss = "fused-head" if target == "trl" else "all-logits"
    found = planned(json.dumps({"kind": "sft", "loss": loss, "pin": WHOLE} | asked, sort_keys=True))
    for name, text in plan_files(found, target).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    run = read_launch(tmp_path / SCRIPTS[target])
    assert found.predicted is not None
    assert run.unread == ()
    # Nothing but the cluster is said beside it: its processes are in the script.
    (priced,) = price_launch(tmp_path / SCRIPTS[target], ["cluster=dgx-h100"])
    assert priced.predicted.step_time_s == pytest.approx(found.predicted.step_time_s, rel=1e-12)
    assert priced.predicted.memory_gib == pytest.approx(found.predicted.memory_gib)


NO_GRAPHS: dict[str, Any] = {
    "framework": "megatron",
    "without": ["cuda-graph", "hybridep", "ep-overlap", "tp-overlap"],
}


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("qwen3-8b", {"kind": "sft", "pin": {"tp": 2, "recompute": "none"}}),
        ("qwen3-8b", {"kind": "dpo", "pin": {"tp": 2, "pp": 2, "vpp": 2}}),
        ("qwen3-8b", {"precision": "fp8", "pin": {"cp": 2, "zero_stage": 1, "recompute": "full"}}),
        ("qwen3-8b", {"pin": {"tp": 2, "optimizer_offload": 50}}),
        ("qwen3-8b", {"kind": "kto", "train": "lora", "lora_rank": 32}),
        ("qwen3-30b-a3b", {"kind": "sft", "pin": {"ep": 8, "moe_dispatch": "deepep"}}),
        ("qwen3-30b-a3b", {"precision": "fp8", "train": "lora", "pin": {"pp": 2, "vpp": 4}}),
        pytest.param(
            "gpt-oss-20b", {"kind": "sft", "pin": {"ep": 4, "tp": 2}}, marks=pytest.mark.soak
        ),
    ],
)
def test_megatron_plans_are_started_by_ms_swift(
    model: str, asked: dict[str, Any], tmp_path: Path
) -> None:
    """Read back as they stand, with the price and memory of their plan."""
    found = plan(
        model,
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=2048,
        time_limit_s=60,
        robustness=False,
        **(NO_GRAPHS | asked),
    )
    files = plan_files(found, "ms-swift")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    run = read_launch(tmp_path / "swift.sh")
    assert run.unread == ()
    (priced,) = price_launch(tmp_path / "swift.sh", ["cluster=dgx-h100"])
    assert found.predicted is not None
    assert priced.predicted.step_time_s == pytest.approx(found.predicted.step_time_s, rel=1e-12)
    assert priced.predicted.memory_gib == pytest.approx(found.predicted.memory_gib)
    assert not list(file_faults(found, files, tmp_path))
    assert script_diff(tmp_path / "swift.sh", found).note == ""
    written_fields = tmp_path / "swift.yaml"
    changed = written_fields.read_text().replace("micro_batch_size: ", "micro_batch_size: 3")
    written_fields.write_text(changed)
    assert list(file_faults(found, files, tmp_path))


def test_a_megatron_command_of_ms_swift_is_not_taken_for_a_script_of_megatron(
    tmp_path: Path,
) -> None:
    """Its flags have underscores or stand in a file: all of the plan's were said to be not set."""
    found = plan(
        "qwen3-8b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=2048,
        robustness=False,
        **NO_GRAPHS,
    )
    script = tmp_path / "train.sh"
    words = "megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 8 --max_length 2048"
    script.write_text(f"export NPROC_PER_NODE=8\n{words} --global_batch_size 64\n")
    diff = script_diff(script, found)
    assert not diff.edits
    assert "launch --target ms-swift" in diff.note


def test_what_megatron_commands_of_ms_swift_have_no_field_for_is_said() -> None:
    made = make_plan("qwen3-8b", dp=8, zero_stage=1, shard_groups=2)
    changes = {"framework": "megatron", "kind": "sft", "optimizer": "sgd"}
    inputs = made.inputs.model_copy(update=changes)
    graphs = Execution(cuda_graph="full", dp_overlap=True)
    made = made.model_copy(update={"inputs": inputs, "execution": graphs})
    words = "no CUDA graphs: plan --without cuda-graph; no shard groups: forbid shard-groups"
    with pytest.raises(InfeasibleError, match=words):
        plan_files(made, "ms-swift")


@pytest.mark.parametrize(
    ("model", "execution", "words"),
    [
        ("qwen3-8b", {"tp_overlap": True}, "no tp overlap, as its packs have unlike lengths"),
        ("qwen3-30b-a3b", {"moe_dispatch": "allgather"}, "no allgather dispatcher"),
        ("mixtral-8x7b", {}, "builds no mistralai/Mixtral-8x7B-v0.1 of Megatron-Core"),
    ],
)
def test_what_fails_as_megatron_commands_of_ms_swift_start_is_refused(
    model: str, execution: dict[str, Any], words: str
) -> None:
    """Each was written, and failed in its library or in the first step."""
    made = make_plan(model, dp=4, tp=2, sequence_parallel=True, zero_stage=1)
    inputs = made.inputs.model_copy(update={"framework": "megatron", "kind": "sft"})
    changes = {"inputs": inputs, "execution": Execution(dp_overlap=True, **execution)}
    with pytest.raises(InfeasibleError, match=words):
        plan_files(made.model_copy(update=changes), "ms-swift")


def test_switches_that_ms_swift_calls_otherwise_than_megatron_are_read(tmp_path: Path) -> None:
    """Rotary embeddings run step by step unless they are to be fused; both were read as Megatron's."""
    script = tmp_path / "train.sh"
    words = "megatron sft --model Qwen/Qwen3-8B --max_length 2048 --pipeline_model_parallel_size 4"
    start = f"export NPROC_PER_NODE=8\n{words} --virtual_pipeline_model_parallel_size 3"
    script.write_text(start)
    settings = read_launch(script).settings
    assert (settings["vpp"], settings["stepwise_rotary"], settings["overlap"]["pp"]) == (
        3,
        True,
        True,
    )
    script.write_text(f"{start} --apply_rope_fusion true --overlap_p2p_comm false")
    run = read_launch(script)
    assert run.unread == ()
    assert "stepwise_rotary" not in run.settings
    assert run.settings["overlap"]["pp"] is False


@pytest.mark.parametrize(
    ("target", "changes", "words"),
    [
        (
            "trl",
            {"loss": "all-logits"},
            "takes the fused-head loss alone there: plan with --loss fused-head",
        ),
        ("trl", {"kind": "orpo", "loss": "all-logits"}, "has no command for orpo"),
        ("ms-swift", {"kind": "reward", "loss": None}, "has no command for reward"),
        (
            "ms-swift",
            {"loss": "fused-head"},
            "asks for trl<1.0, whose trainers take all logits, not the fused-head loss: plan with --loss all",
        ),
        ("llama-factory", {"kind": "dpo", "loss": "fused-head"}, "asks for trl<=0.24.0, whose"),
        ("axolotl", {"kind": "dpo", "loss": "fused-head"}, "asks for trl==1.14.1, whose trainers"),
        (
            "trl",
            {"loss": "liger"},
            "the fused-head loss alone there, and Liger's layers without its loss: plan with --loss fused",
        ),
        ("axolotl", {"loss": "chunked"}, "is not written for the chunked loss: plan with --loss"),
        ("ms-swift", {"optimizer": "muon"}, "makes no Muon"),
        ("axolotl", {"optimizer": "sgd"}, "may run SGD without the momentum"),
        ("llama-factory", {"framework": "deepspeed", "optimizer": "sgd"}, "may run SGD without"),
    ],
)
def test_what_scripts_cannot_start(target: str, changes: dict[str, Any], words: str) -> None:
    made = make_plan("qwen3-8b", dp=8, zero_stage=3)
    changes = {"framework": "fsdp2", "kind": "sft"} | changes
    made = made.model_copy(update={"inputs": made.inputs.model_copy(update=changes)})
    with pytest.raises(InfeasibleError, match=words):
        plan_files(made, target)


STACKS_WITH_LIGER: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-factory": ("llama_factory.yaml", {"enable_liger_kernel": True}),
    "ms-swift": ("swift.yaml", {"use_liger_kernel": True}),
    "axolotl": (
        "axolotl.yaml",
        {
            "plugins": ["axolotl.integrations.liger.LigerPlugin"],
            "liger_fused_linear_cross_entropy": True,
        },
    ),
}


@pytest.mark.parametrize("framework", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("target", STACKS_WITH_LIGER)
def test_ligers_loss_by_each_stacks_own_switch(target: str, framework: str, tmp_path: Path) -> None:
    """Axolotl alone can leave Liger's other kernels off: elsewhere the file says that they run too."""
    name, switches = STACKS_WITH_LIGER[target]
    changes = {"framework": framework, "kind": "sft", "loss": "liger"}
    plans = {}
    for model in ("qwen3-8b", "olmoe-1b-7b"):
        made = make_plan(model, dp=8, zero_stage=3)
        plans[model] = made.model_copy(update={"inputs": made.inputs.model_copy(update=changes)})
    files = plan_files(plans["qwen3-8b"], target)
    written = yaml.safe_load(files[name])
    assert {key: written.get(key) for key in switches} == switches
    said = any("Liger's norms, rotations and gates run too" in text for text in files.values())
    assert said == (target != "axolotl")
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    run = read_launch(tmp_path / ("swift.sh" if target == "ms-swift" else name))
    assert run.settings["loss"] == "liger"
    assert run.unread == (() if target == "axolotl" else tuple(switches))
    with pytest.raises(InfeasibleError, match="may not run Liger's loss for allenai/OLMoE"):
        plan_files(plans["olmoe-1b-7b"], target)


def test_ms_swift_packs_where_its_attention_lets_it() -> None:
    """Its arguments refuse packs under PyTorch's own attention, which plans price on Blackwell."""
    packs = {}
    for cluster in ("dgx-h100", "dgx-b200"):
        made = make_plan("qwen3-8b", cluster=cluster, dp=8, zero_stage=3)
        changes = {"framework": "fsdp2", "kind": "sft"}
        made = made.model_copy(update={"inputs": made.inputs.model_copy(update=changes)})
        packs[cluster] = "packing: true" in plan_files(made, "ms-swift")["swift.yaml"]
    assert packs == {"dgx-h100": True, "dgx-b200": False}

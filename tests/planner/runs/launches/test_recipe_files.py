"""Recipes of torchtune, NeMo-RL and nanotron, and verl's overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import read_model
from meshwright.planner.runs.launches.finetuning import END_TO_END, PACKED, PADDED
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import price_launch, read_launch
from meshwright.planner.runs.launches.reinforcement import ACTOR
from tests.places import DATA

FILES = DATA / "launches"


def changed(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    """A file of ours with other values by their path; None takes one out."""
    document = yaml.safe_load((FILES / name).read_text(encoding="utf-8"))
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = document
        for part in sections:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(key)
        else:
            section[key] = value
    written = folder / name
    written.write_text(yaml.safe_dump(document), encoding="utf-8")
    return written


def tune(folder: Path, **changes: Any) -> LaunchRun:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return read_launch(changed("torchtune_qlora.yaml", folder, named))


def verl(folder: Path, *words: str, program: str = "main_ppo") -> LaunchRun:
    path = folder / "run.sh"
    path.write_text(f"python3 -m verl.trainer.{program} {' '.join(words)}\n", encoding="utf-8")
    return read_launch(path)


def test_torchtunes_adapters() -> None:
    (priced,) = price_launch(FILES / "torchtune_qlora.yaml", ["cluster=dgx-h100", "gpus=8"])
    run, work = priced.run, priced.run.workload
    assert (work.model.name, work.framework, run.layout.zero_stage) == (
        "llama-3.1-8b",
        "fsdp2",
        3,
    )
    assert (work.seq_len, work.global_batch) == (4096, 2 * 4 * 8)
    assert work.adapters is not None
    assert (work.adapters.method, work.adapters.rank) == ("qlora", 16)
    assert work.adapters.has("o_proj")
    assert not work.adapters.has("k_proj")
    assert PACKED in run.remarks
    assert not any("not read" in remark for remark in run.remarks)


@pytest.mark.parametrize(
    ("builder", "model"),
    [
        ("llama2.lora_llama2_7b", "llama-2-7b"),
        ("qwen2_5.lora_qwen2_5_7b_instruct", "qwen2.5-7b"),
        ("qwen3.lora_qwen3_0_6b_instruct", "qwen3-0.6b"),
        ("gemma.lora_gemma_2b", None),
    ],
)
def test_torchtunes_builders_name_models(builder: str, model: str | None, tmp_path: Path) -> None:
    assert tune(tmp_path, model___component_=f"torchtune.models.{builder}").model == model


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        # Weights and moments at 16 bits, without a copy at 32.
        ({"model___component_": "torchtune.models.llama3_1.llama3_1_8b"}, "dtype"),
        (
            {"loss___component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
            "loss._component_",
        ),
        ({"compile": True}, "compile"),
        ({"optimizer___component_": "torch.optim.Adagrad"}, "optimizer._component_"),
        ({"model__apply_lora_to_output": True}, "model.apply_lora_to_output"),
        ({"a_new_key": 1}, "a_new_key"),
    ],
)
def test_what_torchtune_changes_and_is_not_read(
    changes: dict[str, Any], unread: str, tmp_path: Path
) -> None:
    assert tune(tmp_path, **changes).unread == (unread,)


def test_torchtunes_optimizers(tmp_path: Path) -> None:
    run = tune(tmp_path, optimizer___component_="bitsandbytes.optim.PagedAdamW8bit")
    assert (run.settings["optimizer"], run.unread) == ("paged-adam-8bit", ())


def test_torchtune_over_further_axes(tmp_path: Path) -> None:
    run = tune(
        tmp_path,
        tensor_parallel_dim=2,
        context_parallel_dim=4,
        data_parallel_replicate_dim=2,
        fsdp_cpu_offload=True,
        fsdp_reshard_after_forward=False,
        dataset__packed=False,
    )
    degrees = {"tp": 2, "cp": 4, "shard_groups": 2, "zero_stage": 2, "optimizer_offload": 100}
    assert {name: run.settings[name] for name in degrees} == degrees
    assert PADDED in run.remarks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": None}, "optimizer: is not there"),
        ({"loss___component_": "torchtune.rlhf.loss.DPOLoss"}, "loss._component_: has no price"),
        ({"teacher_model___component_": "x"}, "teacher_model: has no price yet"),
        ({"model__decoder_trainable": "frozen"}, "model.decoder_trainable: training of part"),
        ({"model__lora_rank": None}, "model.lora_rank: is needed"),
        ({"model__lora_attn_modules": 5}, "model.lora_attn_modules: must be a list"),
        ({"batch_size": 0}, "batch_size: must be a whole number"),
    ],
)
def test_what_torchtune_trains_without_a_price(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        tune(tmp_path, **changes)


def test_an_actor_of_nemo_rl() -> None:
    """16 prompts of 8 samples a step; what Megatron would have is not asked."""
    (priced,) = price_launch(FILES / "nemo_rl_base.yaml", ["cluster=dgx-h100"])
    run, work = priced.run, priced.run.workload
    assert (run.layout.tp, run.layout.dp, run.layout.zero_stage) == (2, 4, 3)
    assert (work.seq_len, work.global_batch, run.layout.micro_batch) == (2048, 128, 4)
    assert {ACTOR, END_TO_END} <= set(run.remarks)
    assert not any("not read" in remark for remark in run.remarks)


def test_a_configuration_over_another() -> None:
    """Of three nodes one generates alone."""
    (priced,) = price_launch(FILES / "nemo_rl_megatron.yaml", ["cluster=dgx-h100"])
    layout, work = priced.run.layout, priced.run.workload
    assert (layout.tp, layout.pp, layout.dp, layout.zero_stage) == (4, 2, 2, 1)
    assert (work.gpus, work.framework, layout.micro_batch) == (16, "megatron", 2)
    assert layout.sequence_parallel
    assert not any("not read" in remark for remark in priced.run.remarks)


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({"policy.dtensor_cfg.expert_parallel_size": 8}, "policy.dtensor_cfg.expert_parallel_size"),
        ({"policy.optimizer.name": "torch.optim.SGD"}, "policy.optimizer.name"),
        ({"policy.quant_cfg": "NVFP4"}, "policy.quant_cfg"),
    ],
)
def test_what_nemo_rl_changes_and_is_not_read(
    changes: dict[str, Any], unread: str, tmp_path: Path
) -> None:
    assert read_launch(changed("nemo_rl_base.yaml", tmp_path, changes)).unread == (unread,)


def test_nemo_rls_reference_waits_on_the_host(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"grpo": None, "dpo": {"seed": 1, "sft_loss_weight": 0}}
    changes |= {"policy.train_global_batch_size": 32, "policy.dtensor_cfg.enabled": False}
    changes |= {"policy.megatron_cfg.enabled": True}
    changes["policy.megatron_cfg.moe_shared_expert_overlap"] = False
    path = changed("nemo_rl_base.yaml", tmp_path, changes)
    (priced,) = price_launch(path, ["cluster=dgx-h100"])
    work = priced.run.workload
    assert (work.kind, work.reference, work.global_batch) == ("dpo", "offloaded", 32)
    assert read_launch(path).unread == ()


def test_nemo_rl_trains_adapters(tmp_path: Path) -> None:
    lora = {"enabled": True, "dim": 32, "match_all_linear": False, "target_modules": ["q_proj"]}
    changes: dict[str, Any] = {"grpo": None, "sft": {"seed": 1}}
    changes |= {"policy.dtensor_cfg.lora_cfg": lora, "policy.train_global_batch_size": 16}
    run = read_launch(changed("nemo_rl_base.yaml", tmp_path, changes))
    assert run.settings["adapters"] == {"method": "lora", "rank": 32, "targets": ["q_proj"]}
    assert ACTOR not in run.remarks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rm": {"seed": 1}}, "rm: has no price yet"),
        ({"dpo": {"seed": 1}}, "dpo: has no price without Megatron"),
        ({"policy.precision": "float32"}, "policy.precision: training in 32 bits"),
        ({"policy.megatron_cfg.enabled": True}, "megatron_cfg.enabled: is on beside"),
        ({"policy.train_micro_batch_size": None}, "train_micro_batch_size: is needed"),
        ({"defaults": "none.yaml"}, "defaults: is read with this file"),
        (
            {
                "policy.generation.colocated": {
                    "enabled": False,
                    "resources": {"gpus_per_node": "x"},
                }
            },
            "gpus_per_node: must be a whole number",
        ),
        (
            {"policy.generation.colocated": {"enabled": False, "resources": {"gpus_per_node": 64}}},
            "gpus_per_node: leaves no GPU to train on",
        ),
        (
            {"policy.dtensor_cfg.automodel_kwargs.freeze_config.freeze_language_model": True},
            "freeze_language_model: training of part",
        ),
    ],
)
def test_what_nemo_rl_trains_without_a_price(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        read_launch(changed("nemo_rl_base.yaml", tmp_path, changes))


def test_a_file_over_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("defaults: a.yaml\npolicy: {model_name: x}\n", encoding="utf-8")
    with pytest.raises(InputError, match="more than 10 files under one another"):
        read_launch(path)


def test_nanotrons_model_and_degrees() -> None:
    """As many parameters as the same layers of transformers' Llama."""
    (priced,) = price_launch(FILES / "nanotron.yaml", ["cluster=dgx-h100"])
    run, work = priced.run, priced.run.workload
    assert (run.layout.tp, run.layout.pp, run.layout.dp) == (2, 2, 4)
    assert (work.global_batch, run.layout.num_micro_batches) == (2 * 8 * 4, 8)
    assert run.layout.sequence_parallel
    attention = 2048 * 2048 * 2 + 2 * 2048 * 512
    layer = attention + 3 * 2048 * 8192 + 2 * 2048
    assert parameter_count(work.model) == 24 * layer + 2 * 32000 * 2048 + 2048
    assert not any("not read" in remark for remark in run.remarks)


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({"parallelism.pp_engine": "afab"}, "parallelism.pp_engine"),
        ({"optimizer.optimizer_factory.name": "sgd"}, "optimizer.optimizer_factory.name"),
        ({"model.ddp_bucket_cap_mb": 120}, "model.ddp_bucket_cap_mb"),
    ],
)
def test_what_nanotron_changes_and_is_not_read(
    changes: dict[str, Any], unread: str, tmp_path: Path
) -> None:
    assert read_launch(changed("nanotron.yaml", tmp_path, changes)).unread == (unread,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.model_config.is_llama_config": False}, "model.model_config: is of no family"),
        ({"model.dtype": "float32"}, "model.dtype: training in 32 bits"),
        ({"tokens.micro_batch_size": None}, "tokens.micro_batch_size: is needed"),
    ],
)
def test_what_nanotron_trains_without_a_price(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        read_launch(changed("nanotron.yaml", tmp_path, changes))


def test_an_actor_of_verl() -> None:
    """512 sequences over 8 pairs of GPUs are 64 each; 24,576 tokens of a pair are 12, and 8 divide 64."""
    (priced,) = price_launch(FILES / "verl_grpo.sh", ["cluster=dgx-h100"])
    run, work = priced.run, priced.run.workload
    assert (run.layout.cp, run.layout.dp, run.layout.micro_batch) == (2, 8, 8)
    assert (work.seq_len, work.global_batch, work.gpus) == (2048, 512, 16)
    assert {ACTOR, END_TO_END} <= set(run.remarks)
    assert not any("not read" in remark for remark in run.remarks)


ACTORS = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "trainer.nnodes=4",
)


def test_verl_by_megatron(tmp_path: Path) -> None:
    section = "actor_rollout_ref.actor.megatron"
    run = verl(
        tmp_path,
        *ACTORS,
        f"{section}.tensor_model_parallel_size=2",
        f"{section}.pipeline_model_parallel_size=2",
        f"{section}.expert_model_parallel_size=8",
        f"{section}.expert_tensor_parallel_size=1",
        f"+{section}.override_transformer_config.recompute_granularity=full",
        f"{section}.param_offload=True",
    )
    degrees = {"tp": 2, "pp": 2, "ep": 8, "etp": 1, "gpus": 32, "recompute": "full"}
    assert {name: run.settings[name] for name in degrees} == degrees
    assert run.settings["sequence_parallel"]
    assert run.unread == ()


def test_verl_trains_adapters(tmp_path: Path) -> None:
    run = verl(tmp_path, *ACTORS, "actor_rollout_ref.model.lora_rank=64")
    assert run.settings["adapters"] == {"method": "lora", "rank": 64, "targets": ["all-linear"]}


def test_verls_fine_tuning(tmp_path: Path) -> None:
    words = ("model.partial_pretrain=Qwen/Qwen3-8B", "data.max_length=4096", "model.lora_rank=8")
    run = verl(tmp_path, *words, "data.micro_batch_size=2", program="fsdp_sft_trainer")
    assert (run.settings["seq_len"], run.settings["micro_batch"]) == (4096, 2)
    assert (run.settings["global_batch"], run.model) == (256, "qwen3-8b")
    assert (PADDED, ACTOR in run.remarks) == (run.remarks[0], False)


@pytest.mark.parametrize(
    ("words", "program", "refused"),
    [
        ((), "main_generation", "trains nothing that is read"),
        ((), "main_ppo", "ppo_micro_batch_size_per_gpu: must be a whole number"),
        ((*ACTORS, "trainer.nnodes=$NODES"), "main_ppo", "trainer.nnodes: must be a whole number"),
    ],
)
def test_what_verl_does_not_say(
    words: tuple[str, ...], program: str, refused: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=refused):
        verl(tmp_path, *words, program=program)


def test_verls_losses_are_not_read(tmp_path: Path) -> None:
    named = "actor_rollout_ref.model.use_fused_kernels"
    assert verl(tmp_path, *ACTORS, f"{named}=True").unread == (named,)
    assert verl(tmp_path, *ACTORS, f"{named}=False").unread == ()


def test_a_model_by_name_is_the_catalogs() -> None:
    assert read_launch(FILES / "nemo_rl_base.yaml").model == read_model("Qwen/Qwen3-8B").name


V1: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "model_class": "llm",
    "train_dataset": "data/ours.yaml",
    "dist_config": {"name": "fsdp2", "dcp_path": None},
    "peft_config": {"name": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all"},
    "micro_batch_size": 2,
    "cutoff_len": 4096,
    "max_steps": 10,
}


def v1(folder: Path, **changes: Any) -> LaunchRun:
    path = folder / "v1.yaml"
    fields = {name: value for name, value in (V1 | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return read_launch(path)


def test_llamafactorys_second_trainer(tmp_path: Path) -> None:
    run = v1(tmp_path)
    assert run.settings["adapters"] == {"method": "lora", "rank": 16, "targets": ["all-linear"]}
    assert {
        "framework": "fsdp2",
        "zero_stage": 3,
        "recompute": "full",
    }.items() <= run.settings.items()
    assert (run.local_batch, run.settings["seq_len"], run.unread) == (2, 4096, ())
    narrow = v1(
        tmp_path, quant_config={"name": "bnb", "quantization_bit": 4}, peft_config=V1["peft_config"]
    )
    assert (narrow.settings["adapters"]["method"], narrow.unread) == ("qlora", ())
    assert v1(tmp_path, peft_config=None).settings["adapters"] is None
    muon = v1(tmp_path, peft_config=None, optim_config={"name": "muon"}, cp_size=2)
    assert (muon.settings["optimizer"], muon.settings["cp"], muon.unread) == ("muon", 2, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_dataset": None}, "train_dataset: is not there"),
        ({"dist_config": {"name": "fsdpturbo"}}, "dist_config.name: has no price"),
        ({"peft_config": {"name": "freeze"}}, "peft_config.name: training of part"),
        ({"quant_config": {"name": "bnb", "quantization_bit": 3}}, "quant_config.quantization_bit"),
        ({"bf16": False}, "bf16: is off"),
        ({"flash_attn": "xformers"}, "flash_attn: is no kernel"),
    ],
)
def test_what_the_second_trainer_has_without_a_price(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        v1(tmp_path, **changes)


def test_the_second_trainers_kernels_are_not_read(tmp_path: Path) -> None:
    assert v1(tmp_path, kernel_config={"name": "auto"}).unread == ("kernel_config.name",)


def test_loops_that_reduce_the_gradients_of_each_micro_batch(tmp_path: Path) -> None:
    """torchtune's and LLaMA-Factory's have no other way; verl's has a switch, on where nothing is said."""
    assert tune(tmp_path).settings["sync_each_batch"]
    assert v1(tmp_path).settings["sync_each_batch"]
    assert "sync_each_batch" not in verl(tmp_path, *ACTORS).settings
    switch = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    run = verl(tmp_path, *ACTORS, f"{switch}=False")
    assert (run.settings["sync_each_batch"], run.unread) == (True, ())

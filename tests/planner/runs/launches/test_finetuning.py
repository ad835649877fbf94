"""Configurations of LLaMA-Factory and Axolotl: what they train, and what is refused by its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.planner.runs.launches.finetuning import PACKED, PADDED
from meshwright.planner.runs.launches.reader import price_launch, read_launch

FULL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "deepspeed": "deepspeed/z3.json",
    "dataset": "identity",
    "template": "qwen3",
    "cutoff_len": 4096,
    "output_dir": "saves",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-5,
    "bf16": True,
}
ZERO_3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
}


def written(folder: Path, **changed: Any) -> Path:
    """A configuration in a folder of its own, started one above; None takes a field out."""
    (folder / "deepspeed").mkdir(exist_ok=True)
    (folder / "deepspeed" / "z3.json").write_text(json.dumps(ZERO_3), encoding="utf-8")
    path = folder / "runs" / "full.yaml"
    path.parent.mkdir(exist_ok=True)
    fields = {key: value for key, value in (FULL | changed).items() if value is not None}
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def test_a_full_run_is_priced_with_its_deepspeed_file(tmp_path: Path) -> None:
    (priced,) = price_launch(written(tmp_path), ["cluster=dgx-h100", "gpus=16"])
    run = priced.run
    assert run.workload.model.name == "qwen3-8b"
    assert (run.workload.seq_len, run.workload.global_batch) == (4096, 2 * 4 * 16)
    assert (run.layout.dp, run.layout.micro_batch, run.layout.num_micro_batches) == (16, 2, 4)
    assert (run.layout.zero_stage, run.workload.framework) == (3, "deepspeed")
    # Gradient checkpointing is on unless it is switched off (model_args.py).
    assert int(run.layout.recompute) != 0
    assert PADDED in run.remarks
    assert not any("not read" in remark for remark in run.remarks)


def test_without_deepspeed_it_is_plain_data_parallel(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        deepspeed=None,
        packing=True,
        disable_gradient_checkpointing=True,
        flash_attn="fa3",
    )
    launch = read_launch(path)
    assert launch.settings["framework"] == "pytorch"
    assert (launch.settings["zero_stage"], launch.settings["recompute"]) == (0, "none")
    assert launch.settings["attention_kernel"] == "flash-3"
    assert PADDED not in launch.remarks
    (priced,) = price_launch(path, ["cluster=dgx-h100", "gpus=8"])
    assert priced.run.workload.global_batch == 64


def test_defaults_are_those_of_the_stack(tmp_path: Path) -> None:
    left_out = dict.fromkeys(
        ("cutoff_len", "per_device_train_batch_size", "gradient_accumulation_steps")
    )
    launch = read_launch(written(tmp_path, **left_out))
    assert (launch.settings["seq_len"], launch.settings["micro_batch"]) == (2048, 8)
    assert launch.local_batch == 8


@pytest.mark.parametrize(
    "changed",
    [
        {"enable_liger_kernel": True},
        {"optim": "adamw_8bit"},
        {"pure_bf16": True},
        {"neat_packing": True},
        {"some_new_switch": 3},
    ],
)
def test_what_changes_the_price_and_is_not_read_is_listed(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    assert read_launch(written(tmp_path, **changed)).unread == tuple(changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"finetuning_type": "lora"}, "finetuning_type"),
        ({"finetuning_type": None}, "lora is what is trained where nothing is said"),
        ({"stage": "dpo"}, "stage: has no price yet"),
        ({"do_train": None}, "do_train: is not true"),
        ({"bf16": None}, "needs bf16 or fp16"),
        ({"flash_attn": "fa9"}, "flash_attn: is no kernel with a price"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: must be at least 1"),
        ({"cutoff_len": "long"}, "cutoff_len: must be a whole number"),
        ({"deepspeed": "ds_z2.json"}, "lies neither beside it nor under a folder above"),
        ({"deepspeed": {"stage": 3}}, "must name a file"),
        ({"tensor_model_parallel_size": 2}, "is trained by Megatron"),
    ],
)
def test_what_has_no_price_is_refused_by_its_field(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read_launch(written(tmp_path, **changed))


def test_a_model_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, model_name_or_path="somebody/their-model")
    with pytest.raises(InputError, match="--with model="):
        list(price_launch(path, ["cluster=dgx-h100", "gpus=8"]))
    folder = tmp_path / "runs" / "ours"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    config |= {"num_attention_heads": 4, "intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (priced,) = price_launch(
        written(tmp_path, model_name_or_path="ours"), ["cluster=dgx-h100", "gpus=8"]
    )
    assert priced.run.workload.model.layers == 2


AXOLOTL: dict[str, Any] = {
    "base_model": "Qwen/Qwen3-8B",
    "sequence_len": 4096,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "gradient_checkpointing": True,
    "optimizer": "adamw_torch_fused",
    "bf16": "auto",
    "attn_implementation": "flash_attention_2",
    "fsdp_version": 2,
    "fsdp_config": {
        "offload_params": False,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
    },
    "dp_shard_size": 4,
    "tensor_parallel_size": 2,
    "context_parallel_size": 2,
    "output_dir": "out",
    "adapter": None,
    "lora_r": None,
    "wandb_project": None,
}


def axolotl(folder: Path, **changed: Any) -> Path:
    """A configuration of Axolotl; a field that is changed to `...` is taken out."""
    (folder / "zero3.json").write_text(json.dumps(ZERO_3), encoding="utf-8")
    path = folder / "axolotl.yaml"
    fields = {key: value for key, value in (AXOLOTL | changed).items() if value is not ...}
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def test_axolotl_with_fsdp_over_three_axes(tmp_path: Path) -> None:
    launch = read_launch(axolotl(tmp_path))
    assert launch.unread == ()
    assert PACKED in launch.remarks
    (priced,) = price_launch(axolotl(tmp_path), ["cluster=dgx-h100", "gpus=16"])
    layout, work = priced.run.layout, priced.run.workload
    assert (layout.tp, layout.cp, layout.dp) == (2, 2, 4)
    assert (layout.zero_stage, work.framework) == (3, "fsdp2")
    assert (work.seq_len, work.global_batch, layout.micro_batch) == (4096, 2 * 4 * 4, 2)
    assert int(layout.recompute) != 0


def test_axolotl_with_deepspeed_or_without(tmp_path: Path) -> None:
    one_axis = dict.fromkeys(
        ("fsdp_config", "dp_shard_size", "tensor_parallel_size", "context_parallel_size"), ...
    )
    plain = read_launch(axolotl(tmp_path, **one_axis, sample_packing=False))
    assert (plain.settings["framework"], plain.settings["zero_stage"]) == ("pytorch", 0)
    assert PADDED in plain.remarks
    full = read_launch(
        axolotl(tmp_path, **one_axis, sample_packing=False, pad_to_sequence_len=True)
    )
    assert full.remarks == plain.remarks[:-1]
    sharded = read_launch(axolotl(tmp_path, **one_axis, deepspeed="zero3.json"))
    assert (sharded.settings["framework"], sharded.settings["zero_stage"]) == ("deepspeed", 3)


def test_axolotl_offloads_and_keeps_what_its_section_says(tmp_path: Path) -> None:
    old = {
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": False,
        "fsdp_activation_checkpointing": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    launch = read_launch(axolotl(tmp_path, fsdp_config=old, gradient_checkpointing=...))
    assert launch.unread == ()
    assert launch.settings["optimizer_offload"] == 100
    assert (launch.settings["zero_stage"], launch.settings["recompute"]) == (2, "full")


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": "adamw_bnb_8bit"},
        {"liger_fused_linear_cross_entropy": True},
        {"load_in_8bit": True},
        {"expert_parallel_size": 4},
        {"gradient_checkpointing": "offload"},
    ],
)
def test_what_axolotl_changes_and_is_not_read_is_listed(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    assert read_launch(axolotl(tmp_path, **changed)).unread == tuple(changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"adapter": "qlora"}, "adapter"),
        ({"rl": "dpo"}, "rl: has no price yet"),
        ({"unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters: training of part of a model"),
        ({"attn_implementation": "xformers"}, "attn_implementation: is no kernel with a price"),
        ({"bf16": False}, "needs bf16 or fp16"),
        ({"sequence_len": 0}, "sequence_len: must be at least 1"),
    ],
)
def test_what_axolotl_trains_without_a_price_is_refused(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read_launch(axolotl(tmp_path, **changed))

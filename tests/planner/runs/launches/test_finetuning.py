"""Configurations of LLaMA-Factory and Axolotl: what they train, and what is refused by its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.api import plan
from meshwright.errors import InputError
from meshwright.model_specs.adapters import adapter_counts
from meshwright.planner.runs.launches.command_line import unread_words
from meshwright.planner.runs.launches.finetuning import (
    FUSED_ADAPTERS,
    LINEAR_EXPERTS,
    PACKED,
    PADDED,
    from_deepspeed,
)
from meshwright.planner.runs.launches.reader import price_launch, read_launch
from meshwright.planner.runs.run_file import Run, read_runs

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


@pytest.mark.parametrize(
    ("zero", "overlaps"),
    [
        ({"stage": 3}, True),
        ({"stage": 3, "overlap_comm": False}, False),
        ({"stage": 2}, False),
        ({"stage": 2, "overlap_comm": True}, True),
    ],
)
def test_stage_3_alone_overlaps_where_nobody_says(zero: dict[str, Any], overlaps: bool) -> None:
    """As DeepSpeed 0.19.8's own DeepSpeedZeroConfig has it; the first was read as off."""
    run = from_deepspeed({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, "x")
    assert run.settings["overlap"] == {"dp": overlaps}


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


def test_packs_whose_samples_do_not_attend_to_each_other(tmp_path: Path) -> None:
    """`neat_packing` turns `packing` on: samples were said to be padded."""
    launch = read_launch(written(tmp_path, packing=None, neat_packing=True))
    assert PACKED in launch.remarks
    assert PADDED not in launch.remarks
    assert launch.unread == ()


@pytest.mark.parametrize(
    ("fsdp", "section", "settings", "unread"),
    [
        ("full_shard", {"reshard_after_forward": "SHARD_GRAD_OP"}, {"zero_stage": 2}, ()),
        ("full_shard", {"cpu_offload": True}, {"zero_stage": 3, "optimizer_offload": 100}, ()),
        ("no_shard", {}, {"framework": "pytorch", "zero_stage": 0}, ()),
        ("hybrid_shard", {}, {"zero_stage": 3}, ("fsdp",)),
        ("some_shard", {}, {"zero_stage": 3}, ("fsdp",)),
        (True, {"fsdp_reshard_after_forward": False}, {"zero_stage": 2}, ()),
        # Without `fsdp` nobody reads the section.
        (None, {"reshard_after_forward": True}, {"framework": "pytorch", "zero_stage": 0}, ()),
    ],
)
def test_what_fsdp_says(
    fsdp: object,
    section: dict[str, Any],
    settings: dict[str, Any],
    unread: tuple[str, ...],
    tmp_path: Path,
) -> None:
    run = read_launch(written(tmp_path, deepspeed=None, fsdp=fsdp, fsdp_config=section))
    assert {name: run.settings.get(name) for name in settings} == settings
    assert run.unread == unread


@pytest.mark.parametrize(
    "changed",
    [
        {"enable_liger_kernel": True},
        {"optim": "ademamix"},
        {"pure_bf16": True},
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
        ({"finetuning_type": "oft"}, "finetuning_type: has no price yet"),
        ({"finetuning_type": "freeze"}, "finetuning_type: .*part of a model"),
        ({"finetuning_type": "lora", "lora_target": "lm_head"}, "lora_target: names no matrix"),
        ({"finetuning_type": "lora", "quantization_bit": 3}, "quantization_bit: has no price"),
        ({"quantization_method": "hqq"}, "quantization_method: has no price"),
        ({"model_name_or_path": "some/Model-AWQ"}, "model_name_or_path: has weights of few bits"),
        ({"freeze_language_model": True}, "freeze_language_model: training of part"),
        ({"use_kt": True}, "use_kt: experts that run on the host"),
        ({"stage": "ppo"}, "stage: has no price yet"),
        ({"stage": "dpo", "pref_loss": "simpo"}, "pref_loss: has no price yet"),
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


LORA: dict[str, Any] = {"finetuning_type": "lora", "lora_target": "all", "lora_rank": 16}


def test_adapters_are_what_is_trained_where_nothing_is_said(tmp_path: Path) -> None:
    """Rank 8 on every linear module are the stack's own (hparams/finetuning_args.py, LoraArguments)."""
    launch = read_launch(written(tmp_path, finetuning_type=None))
    assert launch.settings["adapters"] == {
        "method": "lora",
        "rank": 8,
        "targets": ["all-linear"],
    }
    assert launch.unread == ()
    assert read_launch(written(tmp_path)).settings["adapters"] is None


@pytest.mark.parametrize(
    ("deepspeed", "framework"), [(None, "pytorch"), ("deepspeed/z3.json", "deepspeed")]
)
def test_adapters_are_priced_as_peft_has_them(
    tmp_path: Path, deepspeed: str | None, framework: str
) -> None:
    """36 layers of Qwen3-8B; queries, keys and values have an adapter each, of rank r (k + n) parameters."""
    changed = LORA | {"lora_target": "q_proj, k_proj,v_proj", "deepspeed": deepspeed}
    (priced,) = price_launch(written(tmp_path, **changed), ["cluster=dgx-h100", "gpus=8"])
    work = priced.run.workload
    assert (work.framework, work.adapters is not None) == (framework, True)
    assert work.adapters is not None
    assert work.adapters.matrices == ("q_proj", "k_proj", "v_proj")
    of_layer = 16 * ((4096 + 4096) + 2 * (4096 + 1024))
    assert adapter_counts(work.model, work.adapters).total == 36 * of_layer


@pytest.mark.parametrize(
    ("changed", "method"),
    [
        ({"use_dora": True}, "dora"),
        ({"use_dora": True, "quantization_bit": 4}, "qdora"),
        ({"quantization_bit": 8}, "lora-8bit"),
        ({"use_dora": True, "quantization_bit": 8}, "dora-8bit"),
    ],
)
def test_methods_by_their_fields(changed: dict[str, Any], method: str, tmp_path: Path) -> None:
    launch = read_launch(written(tmp_path, **LORA, **changed))
    assert (launch.settings["adapters"]["method"], launch.unread) == (method, ())


def test_a_run_file_of_adapters_is_written_and_read_again(tmp_path: Path) -> None:
    path, output = written(tmp_path, **LORA, quantization_bit=4), tmp_path / "run.yaml"
    (first,) = price_launch(path, ["cluster=dgx-h100", "gpus=8"], output)
    assert "adapters" in output.read_text(encoding="utf-8")
    (row,) = read_runs(output)
    assert isinstance(row, Run)
    assert row.workload.adapters == first.run.workload.adapters
    assert row.workload.adapters is not None
    assert row.workload.adapters.method == "qlora"


@pytest.mark.parametrize(
    ("changed", "unread"),
    [
        ({"use_dora": True, "lora_dropout": 0.1}, "lora_dropout"),
        ({"use_dora": True, "quantization_bit": 8}, None),
        ({"additional_target": "embed_tokens,lm_head"}, "additional_target"),
        ({"quantization_bit": 4, "double_quantization": False}, "double_quantization"),
        ({"lora_target": "q_proj,vision.fc1"}, "lora_target"),
        ({"adapter_name_or_path": "saves/earlier"}, "adapter_name_or_path"),
        ({"lora_alpha": 32, "use_rslora": True, "loraplus_lr_ratio": 16.0}, None),
    ],
)
def test_what_changes_the_price_of_adapters_and_is_not_read_is_listed(
    tmp_path: Path, changed: dict[str, Any], unread: str | None
) -> None:
    launch = read_launch(written(tmp_path, **(LORA | changed)))
    assert launch.unread == ((unread,) if unread else ())


def test_what_is_assumed_of_adapters_is_said(tmp_path: Path) -> None:
    moe = written(tmp_path, **LORA, model_name_or_path="Qwen/Qwen3-30B-A3B", lora_dropout=0.05)
    assert LINEAR_EXPERTS in read_launch(moe).remarks
    assert read_launch(moe).settings["adapters"]["dropout"] == 0.05
    dense = written(tmp_path, **LORA, lora_dropout=0.0)
    assert LINEAR_EXPERTS not in read_launch(dense).remarks
    assert "dropout" not in read_launch(dense).settings["adapters"]


def test_a_baseline_trains_what_the_plan_trains(tmp_path: Path) -> None:
    path = written(tmp_path, **LORA, model_name_or_path="meta-llama/Llama-3.2-1B")
    request: dict[str, Any] = {
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 64,
        "seq_len": 4096,
    }
    with pytest.raises(InputError, match="--train lora --lora-rank 16 --lora-targets all-linear"):
        plan("llama-3.2-1b", **request, framework="deepspeed", baseline=path, time_limit_s=30)
    found = plan(
        "llama-3.2-1b",
        **request,
        framework="deepspeed",
        train="lora",
        lora_rank=16,
        baseline=path,
        time_limit_s=30,
        robustness=False,
    )
    assert found.baseline is not None
    assert found.baseline.speed_up is not None


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"stage": "pt"}, "pretrain"),
        ({"stage": "dpo", "pref_beta": 0.1}, "dpo"),
        ({"stage": "dpo", "pref_loss": "ipo"}, "dpo"),
        ({"stage": "dpo", "pref_loss": "orpo"}, "orpo"),
        ({"stage": "kto"}, "kto"),
        ({"stage": "rm"}, "reward"),
    ],
)
def test_stages_are_kinds_of_a_step(tmp_path: Path, changed: dict[str, Any], kind: str) -> None:
    path = written(tmp_path, **changed)
    assert read_launch(path).unread == ()
    (priced,) = price_launch(path, ["cluster=dgx-h100", "gpus=8"])
    work = priced.run.workload
    assert (work.kind, work.global_batch) == (kind, 2 * 4 * 8)
    assert (work.reference == "resident") == (kind in ("dpo", "kto"))


def test_the_frozen_base_is_the_reference_of_plain_data_parallelism(tmp_path: Path) -> None:
    path = written(tmp_path, **LORA, stage="dpo", pref_loss="orpo", deepspeed=None)
    (priced,) = price_launch(path, ["cluster=dgx-h100", "gpus=8"])
    assert (priced.run.workload.kind, priced.run.workload.reference) == ("orpo", None)


def test_a_baseline_takes_the_steps_of_the_plan(tmp_path: Path) -> None:
    path = written(tmp_path, stage="dpo", model_name_or_path="meta-llama/Llama-3.2-1B")
    with pytest.raises(InputError, match="plan with --kind dpo"):
        plan(
            "llama-3.2-1b",
            cluster="dgx-h100",
            gpus=8,
            global_batch=64,
            seq_len=4096,
            framework="deepspeed",
            baseline=path,
            time_limit_s=30,
        )


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
    # Four shards under two tensor and two context ranks are 16, which had to be said.
    (priced,) = price_launch(axolotl(tmp_path), ["cluster=dgx-h100"])
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


PEFT_ALONE = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
ADAPTERS: dict[str, Any] = {
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "self_attn.v_proj"],
    "lora_model_dir": None,
    "fsdp_config": ...,
    "dp_shard_size": ...,
    "tensor_parallel_size": ...,
    "context_parallel_size": ...,
    **PEFT_ALONE,
}


@pytest.mark.parametrize(
    ("changed", "method", "targets"),
    [
        ({}, "qlora", ["q_proj", "v_proj"]),
        ({"adapter": "lora", "load_in_4bit": False}, "lora", ["q_proj", "v_proj"]),
        (
            {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True},
            "lora-8bit",
            ["q_proj", "v_proj"],
        ),
        ({"lora_target_linear": True}, "qlora", ["all-linear", "q_proj", "v_proj"]),
        (
            {"lora_target_modules": r"model.layers.[\d]+.(mlp|self_attn).(up|down|gate|o)_proj"},
            "qlora",
            ["up_proj", "down_proj", "gate_proj", "o_proj"],
        ),
        (
            {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
            "qlora",
            ["q_proj", "v_proj", "experts"],
        ),
    ],
)
def test_axolotl_trains_adapters(
    tmp_path: Path, changed: dict[str, Any], method: str, targets: list[str]
) -> None:
    launch = read_launch(axolotl(tmp_path, **(ADAPTERS | changed)))
    drops = {"dropout": ADAPTERS["lora_dropout"]}
    said = {"method": method, "rank": 32, "targets": targets}
    assert launch.settings["adapters"] == said | drops
    assert launch.unread == ()


@pytest.mark.parametrize(
    ("changed", "unread"),
    [
        (dict.fromkeys(PEFT_ALONE, ...), tuple(PEFT_ALONE)),
        (dict.fromkeys(PEFT_ALONE, ...) | {"trust_remote_code": True}, ()),
        ({"lora_mlp_kernel": True}, ("lora_mlp_kernel",)),
        ({"peft_use_dora": True}, ("lora_dropout",)),
        ({"lora_modules_to_save": ["lm_head"]}, ("lora_modules_to_save",)),
        ({"bnb_config_kwargs": {"bnb_4bit_use_double_quant": True}}, ()),
        ({"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, ("bnb_config_kwargs",)),
        (
            {"lora_target_modules": r"model.layers.(1|2).self_attn.(q|k)_proj"},
            ("lora_target_modules",),
        ),
        ({"lora_target_parameters": ["experts.down_proj"]}, ("lora_target_parameters",)),
        (
            {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
            ("cut_cross_entropy",),
        ),
    ],
)
def test_what_changes_axolotls_adapters_and_is_not_read_is_listed(
    tmp_path: Path, changed: dict[str, Any], unread: tuple[str, ...]
) -> None:
    assert read_launch(axolotl(tmp_path, **(ADAPTERS | changed))).unread == unread


def test_kernels_that_a_file_does_not_name_are_said_to_be_on(tmp_path: Path) -> None:
    """The file has none of them, and each was called a field of which nothing is known."""
    by_itself = read_launch(axolotl(tmp_path, **(ADAPTERS | dict.fromkeys(PEFT_ALONE, ...))))
    assert FUSED_ADAPTERS in by_itself.remarks
    assert all(unread_words(name).endswith("changes the price") for name in by_itself.unread)
    asked = read_launch(axolotl(tmp_path, **(ADAPTERS | dict.fromkeys(PEFT_ALONE, True))))
    assert FUSED_ADAPTERS not in asked.remarks
    assert asked.unread == tuple(PEFT_ALONE)


@pytest.mark.parametrize(
    ("changed", "kind", "reference"),
    [
        ({"rl": "dpo"}, "dpo", None),
        ({"rl": "ipo", "precompute_ref_log_probs": True}, "dpo", "precomputed"),
        ({"rl": "orpo", "orpo_alpha": 0.1}, "orpo", None),
        ({}, "sft", None),
    ],
)
def test_axolotls_kinds_of_a_step(
    tmp_path: Path, changed: dict[str, Any], kind: str, reference: str | None
) -> None:
    """Fused kernels of adapters are off by themselves beside preferences."""
    fields = ADAPTERS | changed
    fields |= dict.fromkeys(PEFT_ALONE, ...) if changed else {}
    launch = read_launch(axolotl(tmp_path, **fields))
    assert launch.settings["kind"] == kind
    assert launch.settings.get("reference") == reference
    assert launch.unread == ()


def test_axolotls_batch_of_a_rank_gives_the_steps_where_these_are_null(tmp_path: Path) -> None:
    """Steps that are left out are 1 by its schema, whatever the batch: they were taken from it."""
    launch = read_launch(axolotl(tmp_path, gradient_accumulation_steps=None, batch_size=8))
    assert (launch.settings["micro_batch"], launch.local_batch) == (2, 8)
    launch = read_launch(axolotl(tmp_path, gradient_accumulation_steps=..., batch_size=8))
    assert launch.local_batch == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": "ademamix"},
        {"liger_fused_linear_cross_entropy": True},
        {"cut_cross_entropy": True},
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
        ({"adapter": "llama-adapter"}, "adapter: has no price yet"),
        ({"adapter": "qlora"}, "load_in_4bit: must be true"),
        ({"adapter": "lora"}, "lora_r: is needed"),
        ({"adapter": "lora", "lora_r": 8}, "lora_target_modules: is missing: say which matrices"),
        ({"load_in_8bit": True}, "load_in_8bit: needs an adapter"),
        (ADAPTERS | {"load_in_8bit": True}, "load_in_8bit: cannot be true beside load_in_4bit"),
        ({"rl": "grpo"}, "rl: has no price yet"),
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

"""Scripts and recipes on transformers' Trainer, and ms-swift's commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.planner.runs.launches.command_line import words_of
from meshwright.planner.runs.launches.fields import fields_of_line
from meshwright.planner.runs.launches.finetuning import END_TO_END, PACKED, PADDED
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import price_launch, read_launch
from meshwright.planner.runs.launches.trainers import PEFT_DEFAULT
from tests.places import DATA

FILES = DATA / "launches"
HEAD = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-8B --bf16 True"
BATCH = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4"
SWIFT = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --max_length 4096"
MEGATRON = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --max_length 4096"


def launch(folder: Path, words: str) -> LaunchRun:
    path = folder / "run.sh"
    path.write_text(words + "\n", encoding="utf-8")
    return read_launch(path)


def test_swifts_command_with_its_own_deepspeed_file() -> None:
    """32 / 4 steps of two sequences on four GPUs are 64; what follows the command is another's."""
    (priced,) = price_launch(FILES / "swift_sft.sh", ["cluster=dgx-h100"])
    run, work = priced.run, priced.run.workload
    assert (work.model.name, work.framework, run.layout.zero_stage) == ("qwen3-8b", "deepspeed", 2)
    assert (work.gpus, work.global_batch, run.layout.micro_batch) == (4, 2 * 8 * 4, 2)
    assert work.adapters is not None
    assert (work.adapters.method, work.adapters.rank) == ("lora", 16)
    assert work.adapters.dropout == 0.05
    assert PACKED in run.remarks
    assert not any("not read" in remark for remark in run.remarks)


def test_swifts_megatron_has_defaults_of_its_own() -> None:
    (priced,) = price_launch(FILES / "swift_megatron.sh", ["cluster=dgx-h100"])
    layout, work = priced.run.layout, priced.run.workload
    assert (layout.tp, layout.ep, layout.zero_stage) == (2, 8, 1)
    assert (work.seq_len, work.global_batch, work.gpus) == (8192, 32, 8)
    assert (work.framework, work.moe_dispatch) == ("megatron", "alltoall")
    assert work.adapters is None
    assert not any("not read" in remark for remark in priced.run.remarks)


def test_a_recipe_and_an_accelerate_file_beside_a_script() -> None:
    """Two sequences, as the command says and not the recipe, four times on eight GPUs."""
    (priced,) = price_launch(FILES / "trl_sft.sh", ["cluster=dgx-h100"])
    run, work = priced.run, priced.run.workload
    assert (work.framework, run.layout.zero_stage, run.layout.dp) == ("deepspeed", 3, 8)
    assert (work.seq_len, work.global_batch) == (2048, 2 * 4 * 8)
    assert work.adapters is not None
    assert (work.adapters.method, work.adapters.targets) == ("qlora", ("q_proj", "v_proj"))
    assert PACKED in run.remarks
    assert not any("not read" in remark for remark in run.remarks)


@pytest.mark.parametrize(
    ("words", "loss", "unread"),
    [
        ("sft --fsdp full_shard", "fused-head", ()),
        ("sft --fsdp full_shard --loss_type chunked_nll", "fused-head", ()),
        ("sft --fsdp full_shard --loss_type nll", "fused-head", ()),
        ("sft --loss_type dft", "fused-head", ()),
        ("sft --deepspeed zero3.json", "fused-head", ()),
        ("sft", "fused-head", ()),
        ("dpo", "fused-head", ()),
        ("kto", "fused-head", ()),
        ("orpo", None, ()),
        # Of Liger its layers alone run there, which have no price; smoothing takes all logits.
        ("sft --use_liger_kernel", "fused-head", ("use_liger_kernel",)),
        ("sft --label_smoothing_factor 0.1", "fused-head", ("label_smoothing_factor",)),
    ],
)
def test_trls_trainers_take_log_probabilities_in_tiles(
    words: str, loss: str | None, unread: tuple[str, ...], tmp_path: Path
) -> None:
    """TRL 1.16.0; the loss of up to 1.14 was read, and of preferences all logits."""
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    run = launch(tmp_path, f"trl {words} --model_name_or_path Qwen/Qwen3-8B {BATCH}")
    assert run.settings.get("loss") == loss
    assert run.unread == unread


def test_swift_reads_the_file_of_fsdp_that_is_named(tmp_path: Path) -> None:
    """Any other word than fsdp2 was full sharding."""
    (tmp_path / "own.json").write_text(
        '{"fsdp": "shard_grad_op offload", "fsdp_config": {"activation_checkpointing": true}}',
        encoding="utf-8",
    )
    run = launch(tmp_path, f"{SWIFT} --fsdp own.json --gradient_checkpointing false")
    assert (run.settings["zero_stage"], run.settings["optimizer_offload"]) == (2, 100)
    assert run.settings["recompute"] == "full"
    with pytest.raises(InputError, match="fsdp: is read with this file"):
        launch(tmp_path, f"{SWIFT} --fsdp other.json")


def test_flags_are_fields() -> None:
    script = (
        'N=4\nA=1 B=2 swift sft --a $(expr 64 / $N / 2) --b x y --c --d "1e-4" --e False\nC=3 ls\n'
    )
    fields = fields_of_line(words_of(script, "x"))
    assert fields == {"a": 8, "b": ["x", "y"], "c": True, "d": 1e-4, "e": False}


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        # Defaults of TrainingArguments: eight sequences, no checkpointing.
        ("--block_size 1024", {"micro_batch": 8, "recompute": "none", "seq_len": 1024}),
        (f"{BATCH} --model_max_length 512", {"micro_batch": 2, "seq_len": 512, "gpus": 8}),
        (f"{BATCH} --gradient_checkpointing True", {"recompute": "full"}),
        (f"{BATCH} --attn_implementation eager", {"attention_kernel": "unfused"}),
        (f"{BATCH} --fsdp 'full_shard auto_wrap'", {"framework": "fsdp2", "zero_stage": 3}),
        (f"{BATCH} --fsdp 'shard_grad_op offload'", {"zero_stage": 2, "optimizer_offload": 100}),
        (f"{BATCH} --use_peft --lora_r 4", {"seq_len": 1024, "recompute": "full"}),
    ],
)
def test_what_a_script_on_the_trainer_says(
    words: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    given = words if _MICRO in words else f"{words} --per_device_train_batch_size 8"
    run = launch(tmp_path, f"{HEAD} {given}")
    assert {name: run.settings[name] for name in settings} == settings
    assert run.unread == ()


_MICRO = "--per_device_train_batch_size"


def test_adapters_of_trl(tmp_path: Path) -> None:
    run = launch(tmp_path, f"{HEAD} {BATCH} --use_peft")
    assert run.settings["adapters"] == {
        "method": "lora",
        "rank": 16,
        "targets": ["q_proj", "v_proj"],
        "dropout": 0.05,
    }
    assert {PEFT_DEFAULT, PADDED} == set(run.remarks)


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("--use_dora --lora_dropout 0", "dora"),
        ("--load_in_8bit", "lora-8bit"),
        ("--load_in_8bit --use_dora --lora_dropout 0", "dora-8bit"),
        ("--load_in_4bit --use_bnb_nested_quant --use_dora --lora_dropout 0", "qdora"),
    ],
)
def test_methods_of_trl(words: str, method: str, tmp_path: Path) -> None:
    run = launch(tmp_path, f"{HEAD} {BATCH} --use_peft {words}")
    assert (run.settings["adapters"]["method"], run.unread) == (method, ())


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("--use_dora true", "dora"),
        ("--quant_method bnb --quant_bits 8", "lora-8bit"),
    ],
)
def test_methods_of_swift(words: str, method: str, tmp_path: Path) -> None:
    run = launch(tmp_path, f"{SWIFT} {words}")
    assert run.settings["adapters"]["method"] == method


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        # Without a number of steps 16 sequences are one step: two times one on eight GPUs.
        ("", {"micro_batch": 1, "gpus": 8, "recompute": "full", "framework": "pytorch"}),
        ("--deepspeed zero3_offload", {"zero_stage": 3, "parameter_offload": True}),
        ("--deepspeed zero1 --deepspeed_autotp_size 2", {"tp": 2, "zero_stage": 1}),
        ("--fsdp fsdp2 --gradient_checkpointing false", {"zero_stage": 3, "recompute": "full"}),
        ("--sequence_parallel_size 4", {"cp": 4, "cp_comm": "a2a"}),
        ("--packing_length 8192", {"seq_len": 8192}),
        ("--optim paged_adamw_8bit", {"optimizer": "paged-adam-8bit"}),
    ],
)
def test_what_swift_says(words: str, settings: dict[str, Any], tmp_path: Path) -> None:
    run = launch(tmp_path, f"{SWIFT} {words}")
    assert {name: run.settings[name] for name in settings} == settings
    assert run.local_batch == 2
    assert run.unread == ()


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("trl dpo --model_name_or_path x --beta 0.1", {"kind": "dpo", "seq_len": 1024}),
        ("trl kto --model_name_or_path x --max_length 512", {"kind": "kto", "seq_len": 512}),
        (
            "trl dpo --model_name_or_path x --precompute_ref_log_probs",
            {"kind": "dpo", "reference": "precomputed"},
        ),
        (f"{SWIFT.replace('sft', 'rlhf')} --rlhf_type orpo --beta 0.1", {"kind": "orpo"}),
        (SWIFT.replace("sft", "rlhf"), {"kind": "dpo", "micro_batch": 1}),
        (f"{MEGATRON.replace('sft', 'rlhf')} --rlhf_type kto", {"kind": "kto", "seq_len": 4096}),
        (SWIFT, {"kind": "sft"}),
    ],
)
def test_kinds_of_a_step(words: str, settings: dict[str, Any], tmp_path: Path) -> None:
    run = launch(tmp_path, words)
    assert {name: run.settings[name] for name in settings} == settings
    assert run.unread == ()


def test_swift_lays_samples_end_to_end_where_it_is_told(tmp_path: Path) -> None:
    assert END_TO_END in launch(tmp_path, f"{SWIFT} --padding_free true").remarks
    assert PADDED in launch(tmp_path, SWIFT).remarks
    assert END_TO_END in launch(tmp_path, MEGATRON).remarks


def test_megatron_trains_adapters_as_the_bridge_names_them(tmp_path: Path) -> None:
    words = f"{MEGATRON} --tuner_type lora --target_modules linear_qkv linear_proj --lora_rank 4"
    path = tmp_path / "run.sh"
    path.write_text(words, encoding="utf-8")
    (priced,) = price_launch(path, ["cluster=dgx-h100"])
    adapters = priced.run.workload.adapters
    assert adapters is not None
    assert set(adapters.matrices) == {"qkv_proj", "o_proj"}


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        (f"{HEAD} {BATCH} --optim ademamix", "optim"),
        (f"{HEAD} {BATCH} --use_liger_kernel", "use_liger_kernel"),
        (f"{HEAD} {BATCH} --use_peft --load_in_4bit --lora_r 8", "use_bnb_nested_quant"),
        (f"{HEAD} {BATCH} --use_peft --use_dora", "lora_dropout"),
        (f"{HEAD} {BATCH} --a_flag_of_next_year 3", "a_flag_of_next_year"),
        (f"{SWIFT} --use_liger_kernel true", "use_liger_kernel"),
        (f"{MEGATRON} --moe_shared_expert_overlap true", "moe_shared_expert_overlap"),
    ],
)
def test_what_is_not_read_is_listed(words: str, unread: str, tmp_path: Path) -> None:
    assert launch(tmp_path, words).unread == (unread,)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (f"{HEAD} {BATCH} --load_in_8bit", "load_in_8bit: needs adapters"),
        (f"{HEAD} {BATCH} --use_peft --load_in_8bit --load_in_4bit", "cannot be true beside"),
        (f"{HEAD} {BATCH} --load_in_4bit", "load_in_4bit: needs adapters"),
        (f"{HEAD} {BATCH} --lora_r 8", "lora_r: is read beside use_peft"),
        (f"{HEAD} {BATCH} --beta 0.1", "beta: has no price yet"),
        (f"{HEAD} {BATCH} --freeze_backbone True", "freeze_backbone: training of other adapters"),
        (f"{HEAD.replace('--bf16 True', '')} {BATCH}", "needs bf16 or fp16"),
        (f"{HEAD} {BATCH} --deepspeed none.json", "deepspeed: is read with this file"),
        (f"{HEAD} {BATCH} --attn_implementation flex_attention", "is no kernel with a price"),
        ("trl grpo --model_name_or_path x", "grpo: has no price yet"),
        ("trl sft --model_name_or_path x --loss_type focal", "loss_type: is no loss of TRL's"),
        (f"{SWIFT} --tuner_type adalora", "tuner_type: has no price yet"),
        (f"{SWIFT} --train_type longlora", "train_type: has no price yet"),
        (f"{SWIFT} --quant_method hqq --quant_bits 4", "quant_method: has no price"),
        (f"{SWIFT} --quant_bits 3", "quant_bits: has no price"),
        (f"{SWIFT} --freeze_llm true", "freeze_llm: training of part"),
        (f"{SWIFT} --task_type embedding", "task_type: has no price yet"),
        (f"{SWIFT.replace('sft', 'rlhf')} --rlhf_type grpo", "rlhf_type: has no price yet"),
        ("CUDA_VISIBLE_DEVICES=0,1 swift sft --model x", "NPROC_PER_NODE: is not set"),
        (f"{MEGATRON} --tuner_type lora_llm", "tuner_type: has no price yet"),
        (MEGATRON.replace("Qwen/Qwen3-8B", "ours"), "model: is not known"),
    ],
)
def test_what_has_no_price_is_refused_by_its_field(
    words: str, refused: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=refused):
        launch(tmp_path, words)


@pytest.mark.parametrize(
    ("plugin", "settings", "unread"),
    [
        ({"zero_stage": 2, "offload_optimizer_device": "cpu"}, {"optimizer_offload": 100}, ()),
        ({"zero_stage": 1, "zero3_init_flag": False}, {"zero_stage": 1, "dp": 8}, ()),
        ({"zero_stage": 3, "a_key": 1}, {"zero_stage": 3}, ("deepspeed_config.a_key",)),
        (None, {"framework": "pytorch", "dp": 8}, ()),
    ],
)
def test_accelerates_file_says_how_ranks_share_the_model(
    plugin: dict[str, Any] | None, settings: dict[str, Any], unread: tuple[str, ...], tmp_path: Path
) -> None:
    document = {"num_processes": 8, "mixed_precision": "bf16", "distributed_type": "DEEPSPEED"}
    if plugin is not None:
        document["deepspeed_config"] = plugin
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    words = f"accelerate launch --config_file a.yaml train.py --model_name_or_path x {BATCH}"
    run = launch(tmp_path, words)
    assert {name: run.settings[name] for name in settings} == settings
    assert (run.settings["precision"], run.unread) == ("bf16", unread)


@pytest.mark.parametrize("program", ["llamafactory-cli train", "axolotl train"])
def test_a_command_names_its_configuration(program: str, tmp_path: Path) -> None:
    document: dict[str, Any] = {"micro_batch_size": 2, "sequence_len": 512, "bf16": True}
    document["base_model"] = "Qwen/Qwen3-8B"
    if "llama" in program:
        document = {"model_name_or_path": "Qwen/Qwen3-8B", "stage": "sft", "bf16": True}
        document |= {"do_train": True, "cutoff_len": 512, "per_device_train_batch_size": 2}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    run = launch(tmp_path, f"torchrun --nproc-per-node 4 x.py\n{program} a.yaml")
    assert (run.model, run.settings["seq_len"]) == ("qwen3-8b", 512)
    assert (run.settings["gpus"], run.settings["micro_batch"]) == (4, 2)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("zero3", {"framework": "deepspeed", "zero_stage": 3, "dp": 8}),
        ("zero1 --num_processes 4", {"framework": "deepspeed", "zero_stage": 1, "dp": 4}),
        ("fsdp1", {"framework": "fsdp2", "zero_stage": 3, "dp": 8}),
        ("fsdp2 --num_processes 16", {"framework": "fsdp2", "zero_stage": 3, "dp": 16}),
        ("multi_gpu", {"framework": "pytorch", "dp": 8}),
        ("single_gpu", {"framework": "pytorch", "dp": 1}),
        ("own.yaml --num_processes 2", {"framework": "deepspeed", "zero_stage": 2, "dp": 2}),
    ],
)
def test_files_of_accelerate_by_trls_word(
    words: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """They were left unread, and the run priced as plain data parallelism."""
    own = "num_processes: 8\ndeepspeed_config: {zero_stage: 2}\n"
    (tmp_path / "own.yaml").write_text(own, encoding="utf-8")
    head = "trl sft --model_name_or_path Qwen/Qwen3-8B --accelerate_config"
    run = launch(tmp_path, f"{head} {words} {BATCH}")
    assert run.unread == ()
    assert {name: run.settings[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("head", "gpus"),
    [("", 16), ("NPROC_PER_NODE=4 ", 4)],
)
def test_the_file_behind_a_command_of_ms_swift(head: str, gpus: int, tmp_path: Path) -> None:
    """Flags win over it, and variables of the shell over its own."""
    (tmp_path / "own.yaml").write_text(
        "model: Qwen/Qwen3-8B\ntuner_type: full\nmax_length: 2048\noptim: adamw_8bit\nfsdp: fsdp2\n"
        "per_device_train_batch_size: 1\nENV: {NPROC_PER_NODE: 8, NNODES: 2}\n",
        encoding="utf-8",
    )
    run = launch(tmp_path, f"{head}swift sft own.yaml --max_length 4096 {BATCH}")
    assert (run.model, run.unread) == ("qwen3-8b", ())
    settings = run.settings
    assert (settings["seq_len"], settings["optimizer"], settings["gpus"]) == (
        4096,
        "adam-8bit",
        gpus,
    )
    assert (settings["framework"], settings["adapters"]) == ("fsdp2", None)
    alone = read_launch(tmp_path / "own.yaml") if not head else run
    assert alone.settings["gpus"] == gpus
    with pytest.raises(InputError, match="config: is read with this file"):
        launch(tmp_path, "swift sft other.yaml --max_length 4096")
    (tmp_path / "own.yaml").write_text("model: Qwen/Qwen3-8B\nENV: 8\n", encoding="utf-8")
    with pytest.raises(InputError, match="ENV"):
        launch(tmp_path, "swift sft own.yaml")

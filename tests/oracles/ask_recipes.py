"""What fine-tuning stacks read in a configuration, by their own parsers. Runs in the oracles' environment.

usage: ask_recipes.py CASES.json
CASES.json is a list of {"stack": name, "fields": a mapping, or words of a command line}. A line of JSON each:
what was read of it by the stack's own names, or the error.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def llamafactory(fields: dict[str, Any]) -> dict[str, Any]:
    # The pins of its own package are older than what the other oracles need.
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    parser = importlib.import_module("llamafactory.hparams.parser")
    model, data, training, tuning, *_ = parser._parse_train_args({**fields, "use_cpu": True})
    return {
        "cutoff_len": data.cutoff_len,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "checkpoints": not model.disable_gradient_checkpointing,
        "finetuning_type": tuning.finetuning_type,
        "lora_rank": tuning.lora_rank,
        "lora_target": tuning.lora_target,
        "quantization_bit": model.quantization_bit,
        "liger": model.enable_liger_kernel,
    }


def axolotl(fields: dict[str, Any]) -> dict[str, Any]:
    schema = importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig
    if fields.get("plugins"):
        configs = importlib.import_module("axolotl.utils.config")
        configs.prepare_plugins(fields)
        _, schema = configs.merge_input_args()
    names = (
        *("sequence_len", "micro_batch_size", "gradient_accumulation_steps", "adapter", "lora_r"),
        *("lora_target_modules", "lora_target_linear", "gradient_checkpointing", "load_in_4bit"),
    )
    config = schema(**fields)
    sizes = ("dp_replicate_size", "dp_shard_size", "tensor_parallel_size", "context_parallel_size")
    sharding = config.fsdp_config and config.fsdp_config.model_dump(exclude_none=True)
    return {name: getattr(config, name) for name in names} | {
        "sizes": [getattr(config, name) for name in sizes],
        # Its builder hands both to the Trainer's arguments (axolotl/core/builders/base.py).
        "fsdp": sharding and _of_trainer(True, sharding),
        "liger": bool(getattr(config, "liger_fused_linear_cross_entropy", None)),
        "liger_layers": any(
            getattr(config, f"liger_{name}", None)
            for name in ("rope", "rms_norm", "glu_activation")
        ),
    }


def _of_trainer(fsdp: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What a Trainer tells accelerate's plugin of FSDP2."""
    training = importlib.import_module("transformers").TrainingArguments
    arguments = object.__new__(training)
    arguments.fsdp, arguments.fsdp_config, arguments.gradient_checkpointing = fsdp, config, False
    told: dict[str, Any] = training._process_fsdp_args(arguments)
    assert told["fsdp_version"] == 2
    return told


def trl(words: list[str]) -> dict[str, Any]:
    package = importlib.import_module("trl")
    parser = package.TrlParser((package.SFTConfig, package.ModelConfig))
    config, model = parser.parse_args_and_config([*words, "--use_cpu", "True", "--bf16", "False"])
    return {
        "max_length": config.max_length,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "checkpoints": bool(config.gradient_checkpointing),
        "packing": config.packing,
        "use_peft": model.use_peft,
        "lora_r": model.lora_r,
        "lora_target_modules": model.lora_target_modules,
        "load_in_4bit": model.load_in_4bit,
    }


def trl_script(case: dict[str, Any]) -> dict[str, Any]:
    """What `trl` gives to its script and to accelerate (trl/cli/commands/training.py)."""
    command, *rest = case["words"]
    os.chdir(case["folder"])
    module = importlib.import_module(f"trl.scripts.{command}")
    on_host = ["--use_cpu", "True", "--bf16", "False", "--fp16", "False"]
    _, config, model, *_, of_file, of_line = module.make_parser().parse_args_and_config(
        [*rest, *on_host], return_remaining_strings=True, separate_remaining_strings=True
    )
    assert not of_file, of_file
    resolved = importlib.import_module("trl.cli.accelerate_config")
    launch = importlib.import_module("accelerate.commands.launch")
    arguments = launch.launch_command_parser().parse_args(
        [*resolved.resolve_accelerate_config_argument(of_line), "script.py"]
    )
    arguments, *_ = launch._validate_launch_command(arguments)
    file = arguments.deepspeed_config_file
    return {
        "length": config.max_length,
        "micro_batch": config.per_device_train_batch_size,
        "steps": config.gradient_accumulation_steps,
        "checkpoints": bool(config.gradient_checkpointing),
        "rank": model.lora_r if model.use_peft else None,
        "targets": model.lora_target_modules,
        "bits": 4 if model.load_in_4bit else 16,
        "syncs": _syncs(config.accelerator_config),
        "processes": arguments.num_processes,
        "nodes": arguments.num_machines,
        "stage": _stage(json.loads(Path(file).read_text())) if arguments.use_deepspeed else None,
        "reshards": arguments.fsdp_reshard_after_forward if arguments.use_fsdp else None,
    }


def _syncs(config: Any) -> Any:
    """What accelerate is told of its accumulation by a Trainer's configuration of it."""
    return (config.gradient_accumulation_kwargs or {}).get("sync_each_batch", False)


def _stage(document: dict[str, Any]) -> int:
    """The stage of ZeRO by DeepSpeed's own reading of its file."""
    config = importlib.import_module("deepspeed.runtime.zero.config")
    return int(config.get_zero_config(document).stage)


def swift(case: dict[str, Any]) -> dict[str, Any]:
    """What ms-swift's parser takes of `swift`'s words; nothing is loaded, and no model looked up."""
    command, *rest = case["words"]
    os.chdir(case["folder"])
    importlib.import_module("swift.cli.main").parse_yaml_args(rest)
    arguments = importlib.import_module("swift.arguments")
    kind = {
        "pt": arguments.PretrainArguments,
        "sft": arguments.SftArguments,
        "rlhf": arguments.RLHFArguments,
    }[command]
    parser = importlib.import_module("transformers").HfArgumentParser(kind)
    trainer = importlib.import_module("transformers.trainer_pt_utils")
    read = argparse.ArgumentParser.parse_args(parser, rest)
    document = json.loads(Path(read.fsdp or read.deepspeed).read_text())
    by_fsdp = read.fsdp is not None
    told = _of_trainer(document["fsdp"], document["fsdp_config"]) if by_fsdp else {}
    return {
        "length": read.max_length,
        "micro_batch": read.per_device_train_batch_size,
        "steps": read.gradient_accumulation_steps,
        "checkpoints": told["activation_checkpointing"]
        if by_fsdp
        else bool(read.gradient_checkpointing),
        "rank": read.lora_rank if read.tuner_type == "lora" else None,
        "targets": read.target_modules,
        "bits": read.quant_bits or 16,
        "liger": read.use_liger_kernel,
        "syncs": _syncs(trainer.AcceleratorConfig(**json.loads(read.accelerator_config or "{}"))),
        "stage": None if by_fsdp else _stage(document),
        "reshards": told["reshard_after_forward"] if by_fsdp else None,
    }


def verl(words: list[str]) -> dict[str, Any]:
    hydra = importlib.import_module("hydra")
    package = importlib.util.find_spec("verl")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]).resolve() / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=words)
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    return {
        "seq_len": config.data.max_prompt_length + config.data.max_response_length,
        "mini_batch": actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        "micro_batch": actor.ppo_micro_batch_size_per_gpu,
        "cp": actor.ulysses_sequence_parallel_size,
        "gpus": config.trainer.n_gpus_per_node * config.trainer.nnodes,
        "lora_rank": model.lora_rank,
        "checkpoints": model.enable_gradient_checkpointing,
        "reshards": actor.fsdp_config.reshard_after_forward,
    }


STACKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    reader.__name__: reader for reader in (llamafactory, axolotl, trl, trl_script, swift, verl)
}


def main() -> None:
    for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            answer = STACKS[case["stack"]](case["fields"])
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""What fine-tuning stacks read in a configuration, by their own parsers. Runs in the oracles' environment.

usage: ask_recipes.py CASES.json
CASES.json is a list of {"stack": name, "fields": a mapping, or words of a command line}. A line of JSON each:
what was read of it by the stack's own names, or the error.
"""

from __future__ import annotations

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
    }


def axolotl(fields: dict[str, Any]) -> dict[str, Any]:
    schema = importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig
    names = (
        *("sequence_len", "micro_batch_size", "gradient_accumulation_steps", "adapter", "lora_r"),
        *("lora_target_modules", "lora_target_linear", "gradient_checkpointing", "load_in_4bit"),
    )
    config = schema(**fields)
    return {name: getattr(config, name) for name in names}


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
    reader.__name__: reader for reader in (llamafactory, axolotl, trl, verl)
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

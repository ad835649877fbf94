"""Recipes of frameworks as runs: YAML of torchtune, nanotron and LLaMA-Factory's second trainer.

Names and defaults are those of torchtune bd2a0fc7c (recipes/*_finetune_*.py), of nanotron 2411b022a
(src/nanotron/config) and of LLaMA-Factory ff6d4d12e (src/llamafactory/v1/config).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.costmodel.layout import AXES
from meshwright.errors import InputError, check_choice
from meshwright.frameworks.deepspeed import DEEPSPEED, TRAINER_OPTIMIZERS
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.model_specs.adapters import adapter_method
from meshwright.model_specs.huggingface import model_from_huggingface
from meshwright.planner.runs.launches import finetuning
from meshwright.planner.runs.launches.fields import NestedFields, nested_fields, with_references
from meshwright.planner.runs.launches.launch_run import LaunchRun

# torchtune.


_COMPONENT = "_component_"
_TUNE = "torchtune.models."
_TUNE_AXES = {"tensor_parallel_dim": "tp", "context_parallel_dim": "cp"}
_BUILDER = re.compile(
    r"torchtune\.models\.\w+\.(?:q?lora_)?(?P<family>llama|qwen|phi)(?P<numbers>\d+(?:_\d+){1,3})b"
    r"(?:_instruct|_base)?"
)
"""A function that builds a model: its family, version and size, with underscores for points."""
_OUTPUT = {"output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_LOSS, _MODEL = f"loss.{_COMPONENT}", f"model.{_COMPONENT}"
_OPTIMIZER = f"optimizer.{_COMPONENT}"
_TUNE_OPTIMIZERS = {
    "bitsandbytes.optim.PagedAdamW": TRAINER_OPTIMIZERS["paged_adamw_32bit"],
    "bitsandbytes.optim.PagedAdamW8bit": TRAINER_OPTIMIZERS["paged_adamw_8bit"],
    "bitsandbytes.optim.AdamW8bit": TRAINER_OPTIMIZERS["adamw_bnb_8bit"],
    "torchao.optim.AdamW8bit": TRAINER_OPTIMIZERS["adamw_torch_8bit"],
}
PURE_HALF = "dtype"
"""Full training keeps weights and moments at this type, without a copy at 32 bits: prices have one."""


def is_torchtune(document: Mapping[str, Any]) -> bool:
    """Whether a mapping is a recipe of torchtune."""
    model = document.get("model")
    builder = model.get(_COMPONENT) if isinstance(model, dict) else None
    return isinstance(builder, str) and builder.startswith(_TUNE)


def from_torchtune(document: dict[str, Any], path: Path) -> LaunchRun:
    """The run of a recipe of torchtune; its cluster and its GPUs are not part of it.

    Parameters
    ----------
    document
        Of a YAML file.
    path
        The file.

    Raises
    ------
    InputError
        Nothing that is trained, another step than that of language modelling, part of a model, or a value of
        the wrong kind.
    """
    where = str(path)
    leaves = NestedFields(with_references(nested_fields(document)), where)
    if not leaves.has_section("optimizer"):
        raise InputError("is not there: nothing is trained", where=f"{where}: optimizer")
    loss = _tuned_loss(leaves, where)
    builder = str(leaves.get(_MODEL))
    built = _BUILDER.fullmatch(builder)
    model = _tuned_model(built, path)
    adapters, unread = _tuned_adapters(leaves, builder, where)
    micro_batch = leaves.count("batch_size", 1)
    steps = leaves.count("gradient_accumulation_steps", 1)
    settings: dict[str, Any] = {
        **leaves.fully_sharded(
            "fsdp_reshard_after_forward",
            "data_parallel_replicate_dim",
            ("fsdp_cpu_offload", "fsdp.cpu_offload"),
            # Its loop asks for no other way (recipes/full_finetune_distributed.py, train).
            syncs=True,
        ),
        **leaves.degrees("", _TUNE_AXES),
        "micro_batch": micro_batch,
        "precision": "fp16" if leaves.get("dtype") == "fp16" else "bf16",
        "recompute": leaves.recompute("enable_activation_checkpointing"),
        "adapters": adapters,
        "kind": finetuning.TUNING,
    }
    if leaves.on("enable_activation_offloading"):
        if settings["recompute"] == "full":
            settings["offload_modules"] = ["saved_tensors"]
        else:
            unread.append("enable_activation_offloading")
    length = leaves.get("tokenizer.max_seq_len")
    if length is not None:
        settings["seq_len"] = leaves.count("tokenizer.max_seq_len")
    settings |= _optimizer(leaves, _OPTIMIZER, _TUNE_OPTIMIZERS)
    unread += [] if adapters is not None else [PURE_HALF]
    # Both torchtune's own losses take the logits in pieces.
    unread += [_LOSS] if loss.startswith("torchtune.") else []
    return LaunchRun(
        settings=settings,
        model=model,
        local_batch=micro_batch * steps,
        unread=(*unread, *leaves.unread("torchtune")),
        remarks=(finetuning.PACKED if leaves.on("dataset.packed") else finetuning.PADDED,),
    )


def _tuned_loss(leaves: NestedFields, where: str) -> str:
    """The loss of a recipe. Raises InputError for steps that have no price, and for part of a model."""
    loss = str(leaves.get(_LOSS, ""))
    if not loss.startswith(("torchtune.modules.loss.", "torch.nn.")):
        raise InputError(finetuning.OTHER_STEP, where=f"{where}: {_LOSS}", value=loss)
    for name in ("teacher_model", "policy_model"):
        if leaves.has_section(name):
            raise InputError(finetuning.OTHER_STEP, where=f"{where}: {name}")
    for name in ("encoder_trainable", "decoder_trainable", "fusion_trainable"):
        leaves.refuse(finetuning.PART_OF_A_MODEL, f"model.{name}")
    return loss


def _optimizer(leaves: NestedFields, field: str, optimizers: Mapping[str, str]) -> dict[str, str]:
    """The optimizer that a field names, where it has a price; others stay unread."""
    optimizer = optimizers.get(str(leaves.values.get(field)))
    if optimizer is None:
        return {}
    leaves.get(field)
    return {"optimizer": optimizer}


def _tuned_model(built: re.Match[str] | None, path: Path) -> str | None:
    """The catalog's name of a model by torchtune's builder of it; None where the catalog has none such."""
    if built is None:
        return None
    numbers, family = built["numbers"].split("_"), built["family"]
    splits = ((".".join(numbers[:end]), ".".join(numbers[end:])) for end in range(1, len(numbers)))
    names = (f"{family}{dash}{v}-{size}b" for v, size in splits for dash in ("", "-"))
    return next(
        (model for name in names if (model := finetuning.known_model(name, path)) is not None), None
    )


def _tuned_adapters(
    leaves: NestedFields, builder: str, where: str
) -> tuple[dict[str, Any] | None, list[str]]:
    """Adapters of a builder such as lora_llama3_8b, and what of them is not read."""
    modules, rank = leaves.names("model.lora_attn_modules"), leaves.get("model.lora_rank")
    of_mlp = leaves.on("model.apply_lora_to_mlp")
    if "lora_" not in builder:
        return None, []
    if rank is None:
        raise InputError("is needed", where=f"{where}: model.lora_rank")
    said = [_OUTPUT.get(name, name) for name in modules]
    said += _MLP if of_mlp else ()
    named = "model.lora_attn_modules"
    targets, unread = finetuning.adapter_targets({named: said}, named, where)
    narrow = "qlora_" in builder or leaves.on("model.quantize_base")
    decomposed = leaves.on("model.use_dora")
    method = adapter_method(4 if narrow else 16, decomposed=decomposed)
    rank, dropout = leaves.count("model.lora_rank"), leaves.get("model.lora_dropout")
    return finetuning.adapters_mapping(method, rank, targets, dropout), unread


# nanotron.


_NANOTRON_AXES = {axis: axis for axis in AXES if axis != "cp"} | {
    "expert_parallel_size": "ep",
    "context_parallel_size": "cp",
}
_LLAMA_LIKE = {"is_llama_config": "llama", "is_qwen2_config": "qwen2"}
"""Switches of `model_config`, and the family of transformers with the same fields."""


def is_nanotron(document: Mapping[str, Any]) -> bool:
    """Whether a mapping is a configuration of nanotron."""
    model = document.get("model")
    return isinstance(model, dict) and "model_config" in model and "parallelism" in document


def from_nanotron(document: dict[str, Any], path: Path) -> LaunchRun:
    """The run of a configuration of nanotron; its cluster is not part of it.

    Parameters
    ----------
    document
        Of a YAML file.
    path
        The file.

    Raises
    ------
    InputError
        A model of another kind than Llama's or Qwen2's, no batch, or a value of the wrong kind.
    """
    where = str(path)
    leaves = NestedFields(nested_fields(document), where)
    degrees = leaves.degrees("parallelism.", _NANOTRON_AXES)
    micro_batch = leaves.count("tokens.micro_batch_size")
    steps = leaves.count("tokens.batch_accumulation_per_replica", 1)
    mode = str(leaves.get("parallelism.tp_mode", "ALL_REDUCE")).upper()
    zero = leaves.get("optimizer.zero_stage", 0)
    sums = leaves.on("optimizer.accumulate_grad_in_fp32", default=True)
    settings: dict[str, Any] = {
        **degrees,
        "framework": "nanotron",
        "seq_len": leaves.count("tokens.sequence_length"),
        "global_batch": micro_batch * steps * degrees["dp"],
        "precision": leaves.half("model.dtype"),
        "zero_stage": zero if type(zero) is int else 0,
        "recompute": leaves.recompute("parallelism.recompute_layer"),
        "overlap": {"dp": True, "tp": leaves.on("parallelism.tp_linear_async_communication")},
        "keeps_gathered_inputs": not leaves.on("parallelism.tp_recompute_allgather", default=True),
        "micro_batch": micro_batch,
        "sequence_parallel": mode == "REDUCE_SCATTER" and degrees["tp"] > 1,
    }
    if not sums:
        settings["gradient_dtype"] = "bf16"
    unread = []
    if leaves.get("parallelism.pp_engine", "1f1b") != "1f1b" and degrees["pp"] > 1:
        unread.append("parallelism.pp_engine")
    return LaunchRun(
        settings=settings,
        model=_nanotron_model(document["model"]["model_config"], where),
        unread=(*unread, *leaves.unread("nanotron")),
    )


def _nanotron_model(config: object, where: str) -> dict[str, Any]:
    """The model that `model_config` describes, as transformers' config.json of its family would."""
    place = f"{where}: model.model_config"
    if not isinstance(config, dict):
        raise InputError("must be a mapping", where=place, value=config)
    family = next((name for switch, name in _LLAMA_LIKE.items() if config.get(switch)), None)
    if family is None or config.get("moe_config"):
        what = "is of no family that is read: Llama's, or Qwen2's without experts"
        raise InputError(what, where=place, allowed=tuple(_LLAMA_LIKE))
    fields = {key: value for key, value in config.items() if key not in _LLAMA_LIKE}
    fields |= {"model_type": family, "pretraining_tp": 1}
    return model_from_huggingface(fields, place, "from launch file").model_dump(exclude_none=True)


# LLaMA-Factory's second trainer (USE_V1=1), whose parts are sections with a name.


_TUNED_MODEL = "model"
_DISTRIBUTED = "dist_config"
_PEFT = "peft_config"
_QUANTISED = "quant_config"
_V1_KERNELS = {"sdpa": "sdpa", "flash_attention_2": "flash-2", "eager": "unfused"}
BY_COMMAND = (
    "what a step does is said by the command, llamafactory-cli sft or dpo: priced as fine-tuning"
)
_WEIGHTS = ("quantization_bit", "name")
_V1_OPTIMIZERS = {"muon": TRAINER_OPTIMIZERS["muon"]}


def is_llamafactory_v1(document: Mapping[str, Any]) -> bool:
    """Whether a mapping is for LLaMA-Factory's second trainer."""
    named = isinstance(document.get(_TUNED_MODEL), str)
    return named and any(name in document for name in ("model_class", _DISTRIBUTED, _PEFT))


def from_llamafactory_v1(document: dict[str, Any], path: Path) -> LaunchRun:
    """The run of a configuration of LLaMA-Factory's second trainer; its GPUs are not part of it.

    Parameters
    ----------
    document
        Of a YAML file.
    path
        The file.

    Raises
    ------
    InputError
        Nothing that is trained, parts without a price, or a value of the wrong kind.
    """
    where = str(path)
    leaves = NestedFields(nested_fields(document), where)
    if leaves.get("train_dataset") is None:
        raise InputError("is not there: nothing is trained", where=f"{where}: train_dataset")
    micro_batch = leaves.count("micro_batch_size", 1)
    kernel = str(leaves.get("flash_attn", "sdpa"))
    check_choice(kernel, _V1_KERNELS, f"{where}: flash_attn", "is no kernel with a price")
    run = _v1_sharding(leaves, path, micro_batch)
    model = finetuning.known_model(leaves.get(_TUNED_MODEL), path)
    adapters, unread = _v1_adapters(leaves, where)
    # Weights are kept at 32 bits, and products run at 16 unless bf16 is off.
    if not leaves.on("bf16", default=True):
        raise InputError("is off: training in 32 bits has no price", where=f"{where}: bf16")
    settings: dict[str, Any] = {
        "seq_len": leaves.count("cutoff_len", 2048),
        "precision": "bf16",
        "attention_kernel": _V1_KERNELS[kernel],
        "adapters": adapters,
        "kind": finetuning.TUNING,
        "micro_batch": micro_batch,
        "recompute": leaves.recompute("enable_activation_checkpointing", default=True),
    }
    context = leaves.count("cp_size", 1)
    leaves.get("cp_mode")
    if context > 1:
        settings |= {"cp": context, "cp_comm": "a2a"}
    batch = leaves.get("global_batch_size")
    if batch is not None:
        settings["global_batch"] = leaves.count("global_batch_size")
    settings |= _optimizer(leaves, "optim_config.name", _V1_OPTIMIZERS)
    batching = leaves.get("batching_strategy", "normal")
    return LaunchRun(
        settings=run.settings | settings,
        model=model,
        local_batch=micro_batch,
        unread=(*run.unread, *unread, *leaves.unread("llamafactory-v1")),
        remarks=(finetuning.PADDED if batching == "normal" else finetuning.END_TO_END, BY_COMMAND),
    )


def _v1_sharding(leaves: NestedFields, path: Path, micro_batch: int) -> LaunchRun:
    name = leaves.get(f"{_DISTRIBUTED}.name")
    if name == DEEPSPEED.name:
        field = f"{_DISTRIBUTED}.config_file"
        file = finetuning.file_beside(leaves.get(field), path, field)
        of_trainer = {finetuning.MICRO_BATCH: micro_batch, finetuning.STEPS: 1}
        return finetuning.trainers_deepspeed(file, of_trainer, str(file))
    if name is None:
        return finetuning.PLAIN
    check_choice(name, (FSDP2.name, DEEPSPEED.name), f"{path}: {_DISTRIBUTED}.name", "has no price")
    reshards, offloads = (
        f"{_DISTRIBUTED}.{switch}" for switch in ("reshard_after_forward", "offload_params")
    )
    # Its loop asks for no other way (src/llamafactory/v1/core/base_trainer.py, fit).
    settings = leaves.fully_sharded(reshards, "mp_replicate_size", (offloads,), syncs=True)
    return LaunchRun(settings=settings)


def _v1_adapters(leaves: NestedFields, where: str) -> tuple[dict[str, Any] | None, list[str]]:
    name, bits, by = leaves.get(f"{_PEFT}.name"), *(f"{_QUANTISED}.{each}" for each in _WEIGHTS)
    said = leaves.get(bits), leaves.get(by)
    width = finetuning.bits_of_base(leaves.values, bits, by, where)
    width = 4 if width == 16 and "bnb" in said else width
    if name is None:
        return None, []
    if name != "lora":
        place = f"{where}: {_PEFT}.name"
        raise InputError(finetuning.PART_OF_A_MODEL, where=place, value=name, allowed=("lora",))
    adapters, unread = leaves.lora(leaves.count(f"{_PEFT}.r", 8), f"{_PEFT}.target_modules")
    return adapters | {"method": adapter_method(width)}, unread

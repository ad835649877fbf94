"""Configurations of fine-tuning stacks as runs: LLaMA-Factory's YAML, and Axolotl's.

Names and defaults are those of LLaMA-Factory ff6d4d12e (src/llamafactory/hparams) and of transformers'
TrainingArguments, which it extends; and of Axolotl 067b021c8 (src/axolotl/utils/schemas).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.model_specs.reader import read_model
from meshwright.planner.runs.launches.launch_run import (
    LaunchRun,
    section_of,
    unread_keys,
    whole_number,
)

# LLaMA-Factory.


_KIND = "llamafactory"
_MODEL, _TRAINED, _STAGE = "model_name_or_path", "finetuning_type", "stage"
_MICRO_BATCH, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_LENGTH, _PACKING, _RECOMPUTES = "cutoff_len", "packing", "disable_gradient_checkpointing"
_ATTENTION = "flash_attn"
_DEEPSPEED = "deepspeed"
_DEFAULTS = {_MICRO_BATCH: 8, _STEPS: 1, _LENGTH: 2048}
_STAGES = ("pt", "sft")
"""Stages of one forward and one backward pass over a batch; the others run further models."""
_KERNELS = dict.fromkeys(("auto", "sdpa", "fa2"), "flash-2") | {
    "fa3": "flash-3",
    "disabled": "unfused",
}
_MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_READ = frozenset(
    (
        *(_MODEL, _TRAINED, _STAGE, _MICRO_BATCH, _STEPS, _LENGTH, _PACKING, _RECOMPUTES),
        *(_ATTENTION, _DEEPSPEED, "do_train", "bf16", "fp16"),
    )
)
PADDED = "sequences of a micro-batch are padded to the longest: all are priced at the full length"
_DATA_PARALLEL = "pytorch"
"""Without DeepSpeed, torchrun wraps the model in DistributedDataParallel."""

ReadDeepSpeed = Callable[[Path, dict[str, Any]], LaunchRun]
"""The run of a DeepSpeed file, with the values that the caller knows in place of its `auto`."""


def is_llamafactory(document: dict[str, Any]) -> bool:
    """Whether a mapping is a configuration of LLaMA-Factory."""
    return _MODEL in document and (_TRAINED in document or _STAGE in document)


def from_llamafactory(
    document: dict[str, Any], path: Path, read_deepspeed: ReadDeepSpeed
) -> LaunchRun:
    """The run of a LLaMA-Factory configuration; its cluster and its GPUs are not part of it.

    Parameters
    ----------
    document
        Of a YAML file.
    path
        The file, for messages and for what it names beside it.
    read_deepspeed
        Reads the DeepSpeed configuration that it names.

    Raises
    ------
    InputError
        A stage or a kind of training without a price, a value of the wrong kind, or a DeepSpeed file that is
        not there.
    """
    where = str(path)
    _check_kind(document, where)
    numbers = _positive_numbers(document, _DEFAULTS, where)
    settings: dict[str, Any] = {
        "seq_len": numbers[_LENGTH],
        "micro_batch": numbers[_MICRO_BATCH],
        "precision": _precision(document, where),
        "recompute": "none" if document.get(_RECOMPUTES) is True else "full",
        "attention_kernel": _kernel(document, where),
    }
    unread = tuple(unread_keys(document, _KIND, _READ))
    run = _sharded(document, path, read_deepspeed, numbers[_MICRO_BATCH], numbers[_STEPS])
    packs = document.get(_PACKING, document.get(_STAGE) == "pt") is True
    return replace(
        run,
        settings=run.settings | settings,
        model=_model(document[_MODEL], path),
        local_batch=numbers[_MICRO_BATCH] * numbers[_STEPS],
        unread=(*run.unread, *unread),
        remarks=run.remarks if packs else (*run.remarks, PADDED),
    )


def _check_kind(document: dict[str, Any], where: str) -> None:
    """Raises InputError for what has no price: adapters, LLaMA-Factory's default, and other stages."""
    if document.get(_TRAINED, "lora") != "full":
        raise InputError(
            "training of adapters or of part of a model has no price yet, and lora is what is trained where "
            "nothing is said: set it to full to price full training of the same layout",
            where=f"{where}: {_TRAINED}",
            value=document.get(_TRAINED),
        )
    stage = document.get(_STAGE, "sft")
    if stage not in _STAGES:
        what = "has no price yet: other models are run beside the one that is trained"
        raise InputError(what, where=f"{where}: {_STAGE}", value=stage, allowed=_STAGES)
    for name in (*_MEGATRON, "megatron_bridge_args"):
        if name in document:
            what = "is trained by Megatron (USE_MCA=1): read its own command line instead"
            raise InputError(what, where=f"{where}: {name}", value=document[name])
    if document.get("do_train") is not True:
        raise InputError("is not true: nothing is trained", where=f"{where}: do_train")


# What both have alike.


def _sharded(
    document: dict[str, Any], path: Path, read: ReadDeepSpeed, micro_batch: int, steps: int
) -> LaunchRun:
    """The run of the DeepSpeed file that a configuration names; plain data parallelism without one."""
    named = document.get(_DEEPSPEED)
    if named is None:
        plain = {"framework": _DATA_PARALLEL, "zero_stage": 0, "overlap": {"dp": True}}
        return LaunchRun(settings=plain)
    known = {"train_micro_batch_size_per_gpu": micro_batch, _STEPS: steps}
    return read(_beside(named, path), known)


def _positive_numbers(
    document: dict[str, Any], defaults: dict[str, int], where: str
) -> dict[str, int]:
    """Whole numbers of a configuration, or their defaults."""
    numbers = {name: whole_number(document, name, where) for name in defaults}
    for name, count in numbers.items():
        if count is not None and count < 1:
            raise InputError("must be at least 1", where=f"{where}: {name}", value=count)
    return {name: defaults[name] if count is None else count for name, count in numbers.items()}


def _precision(document: dict[str, Any], where: str) -> str:
    for name in ("bf16", "fp16"):
        if document.get(name) in (True, "auto"):
            return name
    raise InputError(
        "needs bf16 or fp16: true; training in 32 bits has no price", where=f"{where}: bf16"
    )


def _kernel(document: dict[str, Any], where: str) -> str:
    said = str(document.get(_ATTENTION, "auto"))
    if said not in _KERNELS:
        raise InputError(
            "is no kernel with a price",
            where=f"{where}: {_ATTENTION}",
            value=said,
            allowed=tuple(_KERNELS),
        )
    return _KERNELS[said]


def _model(named: object, path: Path) -> str | None:
    """A catalog model, or a folder with a config.json beside the file; None where there is neither."""
    text = str(named)
    folder = path.parent / text
    if (folder / "config.json").is_file():
        return str(folder)
    try:
        return read_model(text).name
    except InputError:
        return None


def _beside(named: object, path: Path) -> Path:
    """A file that a configuration names from where it is started: its own folder, or one above."""
    if not isinstance(named, str):
        what = "must name a file; a mapping in its place is not read"
        raise InputError(what, where=f"{path}: {_DEEPSPEED}", value=named)
    for folder in (path.parent, *path.absolute().parent.parents):
        if (folder / named).is_file():
            return folder / named
    raise InputError(
        "is read with this file, which lies neither beside it nor under a folder above",
        where=f"{path}: {_DEEPSPEED}",
        value=named,
    )


# Axolotl.


_BASE, _AXOLOTL_LENGTH, _AXOLOTL_MICRO_BATCH = "base_model", "sequence_len", "micro_batch_size"
_AXOLOTL_DEFAULTS = {_AXOLOTL_MICRO_BATCH: 1, _STEPS: 1, _AXOLOTL_LENGTH: 512}
_TENSOR, _CONTEXT, _REPLICAS = "tensor_parallel_size", "context_parallel_size", "dp_replicate_size"
_IMPLEMENTATION, _CHECKPOINTS = "attn_implementation", "gradient_checkpointing"
_IMPLEMENTATIONS = {
    "sdpa": "flash-2",
    "flash_attention_2": "flash-2",
    "flash_attention_3": "flash-3",
    "kernels-community/vllm-flash-attn3": "flash-3",
    "eager": "unfused",
}
_OTHER_STEPS = ("rl", "reward_model", "process_reward_model", "ebft", "diffusion", "num_labels")
"""Fields whose runs have other passes or another head than language modelling."""
_AXOLOTL_READ = frozenset(
    (
        *(_BASE, _AXOLOTL_LENGTH, _AXOLOTL_MICRO_BATCH, _STEPS, _IMPLEMENTATION, _CHECKPOINTS),
        *("bf16", "fp16", "sample_packing", "pad_to_sequence_len", "flash_attention", _DEEPSPEED),
        *("fsdp", "fsdp_config", "fsdp_version", "dp_shard_size", "adapter"),
        *(_TENSOR, _CONTEXT, _REPLICAS),
    )
)
_PARTS = ("unfrozen_parameters", "lisa_n_layers", "relora")
"""Fields that leave most of the model as it is."""
_PREFIX = "fsdp_"
"""Before version 2 the keys of the section begin with it."""
_OFFLOADS, _RESHARDS = "offload_params", "reshard_after_forward"
_FSDP_RECOMPUTES = "activation_checkpointing"
PACKED = "packed documents do not attend to each other: attention is priced as of one long sequence"


def is_axolotl(document: dict[str, Any]) -> bool:
    """Whether a mapping is a configuration of Axolotl."""
    return _BASE in document and (_AXOLOTL_LENGTH in document or _AXOLOTL_MICRO_BATCH in document)


def from_axolotl(document: dict[str, Any], path: Path, read_deepspeed: ReadDeepSpeed) -> LaunchRun:
    """The run of an Axolotl configuration; its cluster and its GPUs are not part of it.

    Parameters
    ----------
    document
        Of a YAML file.
    path
        The file, for messages and for what it names beside it.
    read_deepspeed
        Reads the DeepSpeed configuration that it names.

    Raises
    ------
    InputError
        A kind of training without a price, a value of the wrong kind, or a DeepSpeed file that is not there.
    """
    where = str(path)
    for name in _OTHER_STEPS:
        if document.get(name):
            what = "has no price yet: it is another step than that of language modelling"
            raise InputError(what, where=f"{where}: {name}", value=document[name])
    for name in _PARTS:
        if document.get(name):
            what = "training of part of a model has no price yet"
            raise InputError(what, where=f"{where}: {name}", value=document[name])
    numbers = _positive_numbers(document, _AXOLOTL_DEFAULTS, where)
    micro_batch, steps = numbers[_AXOLOTL_MICRO_BATCH], numbers[_STEPS]
    run = _sharded(document, path, read_deepspeed, micro_batch, steps)
    unread = unread_keys(document, "axolotl", _AXOLOTL_READ)
    if document.get("fsdp") or document.get("fsdp_config"):
        run, of_fsdp = _fully_sharded(document, where)
        unread += of_fsdp
    checkpoints = document.get(_CHECKPOINTS) or False
    if checkpoints not in (True, False):
        unread.append(_CHECKPOINTS)
    settings = {
        "seq_len": numbers[_AXOLOTL_LENGTH],
        "micro_batch": micro_batch,
        "precision": _precision(document, where),
        "recompute": "full" if checkpoints else run.settings.get("recompute", "none"),
        "attention_kernel": _implementation(document, where),
    }
    degrees = {"tp": _TENSOR, "cp": _CONTEXT}
    settings |= {axis: whole_number(document, key, where) or 1 for axis, key in degrees.items()}
    replicas = whole_number(document, _REPLICAS, where) or 1
    if replicas > 1:
        settings["shard_groups"] = replicas
    remarks = run.remarks
    if document.get("sample_packing") is True:
        remarks = (*remarks, PACKED)
    elif document.get("pad_to_sequence_len") is not True:
        remarks = (*remarks, PADDED)
    return replace(
        run,
        settings=run.settings | settings,
        model=_model(document[_BASE], path),
        local_batch=micro_batch * steps,
        unread=(*run.unread, *unread),
        remarks=remarks,
    )


def _fully_sharded(document: dict[str, Any], where: str) -> tuple[LaunchRun, list[str]]:
    """FSDP as accelerate sets it up, and the keys of its section that are not read."""
    section = {
        str(key).removeprefix(_PREFIX): value
        for key, value in section_of(document, "fsdp_config", where).items()
    }
    settings: dict[str, Any] = {
        "framework": FSDP2.name,
        "zero_stage": 2 if section.get(_RESHARDS) is False else 3,
        "overlap": {"dp": True},
    }
    if section.get(_OFFLOADS):
        settings["optimizer_offload"] = 100
    if section.get(_FSDP_RECOMPUTES):
        settings["recompute"] = "full"
    # Options that are off change nothing.
    on = {key: value for key, value in section.items() if value}
    read = (_OFFLOADS, _RESHARDS, _FSDP_RECOMPUTES)
    unread = unread_keys(on, "axolotl", read, "fsdp_config")
    return LaunchRun(settings=settings), unread


def _implementation(document: dict[str, Any], where: str) -> str:
    said = document.get(_IMPLEMENTATION)
    if said is None:
        # FlashAttention-2 by its own switch, else PyTorch's, which has the same kernel.
        return "flash-2"
    if said not in _IMPLEMENTATIONS:
        what, names = "is no kernel with a price", tuple(_IMPLEMENTATIONS)
        raise InputError(what, where=f"{where}: {_IMPLEMENTATION}", value=said, allowed=names)
    return _IMPLEMENTATIONS[str(said)]

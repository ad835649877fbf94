"""Configurations of fine-tuning stacks as runs: LLaMA-Factory's YAML.

Names and defaults are those of LLaMA-Factory ff6d4d12e (src/llamafactory/hparams) and of transformers'
TrainingArguments, which it extends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.model_specs.reader import read_model
from meshwright.planner.runs.launches.launch_run import LaunchRun, unread_keys, whole_number

_KIND = "llamafactory"
_MODEL, _TRAINED, _STAGE = "model_name_or_path", "finetuning_type", "stage"
_MICRO_BATCH, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_LENGTH, _PACKING, _RECOMPUTES = "cutoff_len", "packing", "disable_gradient_checkpointing"
_ATTENTION, _DEEPSPEED = "flash_attn", "deepspeed"
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
PADDED = (
    "sequences of a micro-batch are padded to the longest: all are priced as long as cutoff_len"
)
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
    numbers = {name: _positive(document, name, where) for name in _DEFAULTS}
    settings: dict[str, Any] = {
        "seq_len": numbers[_LENGTH],
        "micro_batch": numbers[_MICRO_BATCH],
        "precision": _precision(document, where),
        "recompute": "none" if document.get(_RECOMPUTES) is True else "full",
        "attention_kernel": _kernel(document, where),
    }
    unread = tuple(unread_keys(document, _KIND, _READ))
    run = LaunchRun(
        settings={"framework": _DATA_PARALLEL, "zero_stage": 0, "overlap": {"dp": True}}
    )
    named = document.get(_DEEPSPEED)
    if named is not None:
        known = {"train_micro_batch_size_per_gpu": numbers[_MICRO_BATCH], _STEPS: numbers[_STEPS]}
        run = read_deepspeed(_beside(named, path), known)
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


def _positive(document: dict[str, Any], name: str, where: str) -> int:
    count = whole_number(document, name, where)
    if count is not None and count < 1:
        raise InputError("must be at least 1", where=f"{where}: {name}", value=count)
    return _DEFAULTS[name] if count is None else count


def _precision(document: dict[str, Any], where: str) -> str:
    for name in ("bf16", "fp16"):
        if document.get(name) is True:
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

"""Configurations of fine-tuning stacks as runs: LLaMA-Factory's YAML, and Axolotl's.

Names and defaults are those of LLaMA-Factory ff6d4d12e (src/llamafactory/hparams) and of transformers'
TrainingArguments, which it extends; and of Axolotl 067b021c8 (src/axolotl/utils/schemas).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.costmodel.execution_names import PRETRAINING, STEP_KINDS, StepKindName
from meshwright.costmodel.layout import AXES
from meshwright.documents import parse_mapping, read_mapping, read_text
from meshwright.errors import InputError, check_choice
from meshwright.frameworks.deepspeed import (
    BUCKET,
    DEEPSPEED,
    OPTIMIZER_TYPE,
    OVERLAP,
    OWN_OPTIMIZERS,
)
from meshwright.frameworks.fsdp2 import (
    ACCELERATOR,
    ACCUMULATION,
    ADAPTER_FILE,
    AXOLOTL_LIGER,
    AXOLOTL_LIGER_LOSS,
    FSDP2,
    OFFLOADS_INPUTS,
    PRECISION,
    PRECOMPUTES,
    SAVED_TENSORS,
    SIZES,
    SYNCS,
)
from meshwright.frameworks.megatron import PYTORCH
from meshwright.model_specs.adapters import ALL_LINEAR, EXPERTS, TARGETS, adapter_method
from meshwright.model_specs.reader import read_model
from meshwright.planner.runs.launches.command_line import fields_of, refuse_adapters
from meshwright.planner.runs.launches.launch_run import (
    ImageFields,
    LaunchRun,
    image_fields,
    section_of,
    unread_keys,
    whole_number,
)
from meshwright.planner.runs.run_file import MAX_FILE_BYTES

# What they have alike.


STEPS = "gradient_accumulation_steps"
DEEPSPEED_FILE = "deepspeed"
PADDED = "sequences of a micro-batch are padded to the longest: all are priced at the full length"
END_TO_END = "samples of a micro-batch lie end to end: each is priced at the full length"
TUNING: StepKindName = "sft"
PACKED = "packed documents do not attend to each other: attention is priced as of one long sequence"
LINEAR_EXPERTS = (
    "which matrices of experts are linear modules, and get an adapter, is another in each version of "
    "transformers: priced as PEFT's all-linear, experts and router included"
)
PART_OF_A_MODEL = "training of part of a model has no price yet"
OTHER_STEP = "has no price yet: it is another step than that of language modelling"
FEW_BITS_ALONE = "has no price: weights of 4 or 8 bits of bitsandbytes alone have one"

ACCELERATE_FILE, CONFIG_FILE = "accelerate.yaml", "config_file"
"""The former is what `launch` calls it, the latter the flag of `accelerate launch` that names it."""
PLAIN = LaunchRun(settings={"framework": PYTORCH.name, "zero_stage": 0, "overlap": {"dp": True}})
"""Without DeepSpeed and FSDP torchrun wraps the model in DistributedDataParallel."""


def refuse_fields(document: Mapping[str, Any], fields: Mapping[str, str], where: str) -> None:
    """Raises InputError for the first of some fields that is there and not off, with what is said of it.

    Parameters
    ----------
    document
        Of the configuration.
    fields
        What is said of each that is refused, by its name.
    where
        The file's name, for messages.
    """
    for name, what in fields.items():
        if document.get(name):
            raise InputError(what, where=f"{where}: {name}", value=document[name])


def sharded(document: dict[str, Any], kind: str, path: Path, batch: tuple[int, int]) -> LaunchRun:
    """How a configuration shards: by the DeepSpeed file that it names, by FSDP, or not at all.

    Parameters
    ----------
    document
        With `deepspeed`, or `fsdp` and `fsdp_config`.
    kind
        The program, by its section of flag_effects.yaml.
    path
        Its file.
    batch
        Sequences of a micro-batch, and how many of these are accumulated.

    Raises
    ------
    InputError
        A file that is not there, or a value of the wrong kind.
    """
    named = document.get(DEEPSPEED_FILE)
    if named is not None:
        of_trainer = {MICRO_BATCH: batch[0], STEPS: batch[1]}
        file = file_beside(named, path, DEEPSPEED_FILE)
        return trainers_deepspeed(file, of_trainer, str(file))
    # Transformers heeds the section only where `fsdp` is on (training_args.py, _process_fsdp_args).
    if document.get(_FSDP) or (kind == _AXOLOTL and document.get(_FSDP_SECTION)):
        return fully_sharded(document, kind, str(path))
    return PLAIN


def _under_accelerate(document: Mapping[str, Any], path: Path) -> LaunchRun | None:
    """The run of the file for `accelerate launch` that a command names, or that lies beside a configuration.

    None where there is none, or where it says nothing of FSDP. Raises InputError for a file that is named and
    not there.
    """
    named = document.get(CONFIG_FILE)
    config_path = (
        path.parent / ACCELERATE_FILE if named is None else file_beside(named, path, CONFIG_FILE)
    )
    if not config_path.is_file():
        return None
    settings = read_mapping(config_path, MAX_FILE_BYTES)
    if _FSDP_SECTION not in settings:
        return None
    run = from_accelerate(dict(settings), str(config_path))
    if named is not None:
        return run
    remark = f"{ACCELERATE_FILE} beside it is read too: it says how ranks share the model"
    return run.with_more(remarks=[remark])


def positive_numbers(
    document: dict[str, Any], defaults: dict[str, int], where: str
) -> dict[str, int]:
    """Whole numbers of a configuration, or their defaults.

    Parameters
    ----------
    document
        Of the configuration.
    defaults
        By name, what stands for a field that is absent or `auto`.
    where
        The file's name, for messages.
    """
    return {name: _positive(document, name, where) or default for name, default in defaults.items()}


def _positive(document: dict[str, Any], name: str, where: str) -> int | None:
    count = whole_number(document, name, where)
    if count is not None and count < 1:
        raise InputError("must be at least 1", where=f"{where}: {name}", value=count)
    return count


def kind_of_step(kind: StepKindName, document: Mapping[str, Any]) -> dict[str, Any]:
    """A kind of step as a run file has it, and that its reference's log-probabilities are in the data.

    Parameters
    ----------
    kind
        As the configuration has it.
    document
        With the switch that log-probabilities are computed beforehand.
    """
    if document.get(PRECOMPUTES) is True and STEP_KINDS[kind].reference_passes:
        return {"kind": kind, "reference": "precomputed"}
    return {"kind": kind}


def offloaded_tensors(
    document: Mapping[str, Any], name: str, recompute: str
) -> tuple[dict[str, Any], list[str]]:
    """What the hooks of a trainer move to the host, as a run file has it; and their switch where it has no
    price: another way than theirs, or without recomputation, where they move gathered weights too.

    Parameters
    ----------
    document
        Of the configuration.
    name
        Of the switch.
    recompute
        none, selective or full.
    """
    said = document.get(name)
    if said in (None, False):
        return {}, []
    if said is not True or recompute != "full":
        return {}, [name]
    return {"offload_modules": ["saved_tensors"]}, []


_UNPRICED = frozenset(
    (
        *("dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"),
        *("use_configured_state", "adjust_scheduler", "sync_with_dataloader"),
    )
)
"""Of accelerate's configuration in a Trainer, what changes no price (transformers/trainer_pt_utils.py)."""


def with_synced_batches(run: LaunchRun, document: Mapping[str, Any], path: Path) -> LaunchRun:
    """A run of FSDP2 with what a Trainer's `accelerator_config` says of its gradients: that those of each
    micro-batch are reduced.

    Parameters
    ----------
    run
        As it is read without.
    document
        Of the Trainer's arguments; the field has a mapping, its text or the name of a JSON file.
    path
        The file of these arguments, from whose folder that name is looked for.

    Raises
    ------
    InputError
        A file that is not there, or no mapping.
    """
    said = document.get(ACCELERATOR)
    if said is None:
        return run
    where = f"{path}: {ACCELERATOR}"
    if isinstance(said, str):
        is_text = said.lstrip().startswith("{")
        mapping = (
            parse_mapping(said, where)
            if is_text
            else read_mapping(file_beside(said, path, ACCELERATOR), MAX_FILE_BYTES)
        )
        said = dict(mapping)
    fields = section_of({ACCELERATOR: said}, ACCELERATOR, str(path))
    inner = section_of(fields, ACCUMULATION, where)
    syncs = inner.get(SYNCS) is True
    unread = [
        f"{ACCELERATOR}.{name}"
        for name, value in (fields | inner).items()
        if value and name not in (*_UNPRICED, ACCUMULATION, SYNCS)
    ]
    # Without FSDP replicas reduce whole gradients each time, which has no price; ZeRO does so anyway.
    if syncs and run.settings.get("framework") == PYTORCH.name:
        unread.append(f"{ACCELERATOR}.{SYNCS}")
    of_fsdp = syncs and run.settings.get("framework") == FSDP2.name
    return run.with_more({"sync_each_batch": True} if of_fsdp else None, unread=unread)


def half_precision(document: dict[str, Any], where: str) -> str:
    """bf16 or fp16 by the switch that is true or `auto`. Raises InputError where neither is.

    Parameters
    ----------
    document
        Of the configuration.
    where
        The file's name, for messages.
    """
    for name in ("bf16", "fp16"):
        if document.get(name) in (True, "auto"):
            return name
    raise InputError(
        "needs bf16 or fp16: true; training in 32 bits has no price", where=f"{where}: bf16"
    )


def kernel_of(document: dict[str, Any], key: str, kernels: Mapping[str, str], where: str) -> str:
    """The attention that a configuration asks for; without a word PyTorch's own.

    Parameters
    ----------
    document
        Of the configuration.
    key
        The field that names it.
    kernels
        Kernels with a price, by the program's words.
    where
        The file's name, for messages.
    """
    said = document.get(key)
    if said is None:
        return "sdpa"
    if str(said) not in kernels:
        what = "is no kernel with a price"
        raise InputError(what, where=f"{where}: {key}", value=said, allowed=tuple(kernels))
    return kernels[str(said)]


def known_model(named: object, path: Path) -> str | None:
    """A catalog model, or a folder with a config.json beside the file; None where there is neither.

    Parameters
    ----------
    named
        What the file calls it.
    path
        Of the file, beside which a folder may lie.
    """
    text = str(named)
    folder = path.parent / text
    if (folder / "config.json").is_file():
        return str(folder)
    try:
        return read_model(text).name
    except InputError:
        return None


def file_beside(named: object, path: Path, field: str) -> Path:
    """A file that a field names from where training is started: the folder of the field's file, or one above.

    Raises InputError where there is none.

    Parameters
    ----------
    named
        What the field says.
    path
        Of the file that has the field.
    field
        Its name, for messages.
    """
    if not isinstance(named, str):
        what = "must name a file; a mapping in its place is not read"
        raise InputError(what, where=f"{path}: {field}", value=named)
    for folder in (path.parent, *path.absolute().parent.parents):
        if (folder / named).is_file():
            return folder / named
    raise InputError(
        "is read with this file, which lies neither beside it nor under a folder above",
        where=f"{path}: {field}",
        value=named,
    )


_FSDP, _FSDP_SECTION, _PREFIX = "fsdp", "fsdp_config", "fsdp_"
"""In files for accelerate, and before FSDP's second version, the section's keys begin with the last."""
_OFFLOADS = ("offload_params", "cpu_offload")
"""Accelerate's name, and transformers'."""
_FSDP_RECOMPUTES = "activation_checkpointing"
_STRATEGIES = ("sharding_strategy", "reshard_after_forward")
_KEEPS, _WHOLE = frozenset(("shard_grad_op", "2", "false")), frozenset(("no_shard", "3"))
_PLAIN_WORDS = frozenset(("full_shard", "1", "true", "auto_wrap", "offload", ""))
"""Of other words hybrid_shard stands for groups of a node's GPUs, how many a node has not being said."""
_FSDP_OFFLOADS_INPUTS = OFFLOADS_INPUTS.removeprefix("fsdp_")


def fully_sharded(document: Mapping[str, Any], kind: str, where: str) -> LaunchRun:
    """FSDP as transformers sets it up by `fsdp` and `fsdp_config`.

    Parameters
    ----------
    document
        With words such as full_shard and offload under `fsdp`, or a section `fsdp_config`.
    kind
        The program, by its section of flag_effects.yaml.
    where
        The file's name.

    Raises
    ------
    InputError
        A section that is no mapping.
    """
    section = {
        str(key).removeprefix(_PREFIX): value
        for key, value in section_of(document, _FSDP_SECTION, where).items()
    }
    said = document.get(_FSDP) or ()
    named = [*said] if isinstance(said, list) else str(said).split() if said else []
    words = {str(word).lower() for word in (*named, *(section.get(key, "") for key in _STRATEGIES))}
    settings: dict[str, Any] = {
        "framework": FSDP2.name,
        "zero_stage": 2 if words & _KEEPS else 3,
        "overlap": {"dp": True},
    }
    if words & _WHOLE:
        settings = dict(PLAIN.settings)
    if any(section.get(key) for key in _OFFLOADS) or "offload" in words:
        settings["optimizer_offload"] = 100
    if section.get(_FSDP_RECOMPUTES):
        settings["recompute"] = "full"
        if section.get(_FSDP_OFFLOADS_INPUTS):
            settings["offload_modules"] = ["layer_inputs"]
    # Options that are off change nothing.
    on = {key: value for key, value in section.items() if value}
    read = (*_OFFLOADS, *_STRATEGIES, _FSDP_RECOMPUTES, _FSDP_OFFLOADS_INPUTS)
    unread = unread_keys(on, kind, read, _FSDP_SECTION)
    unread += [_FSDP] if words - _PLAIN_WORDS - _KEEPS - _WHOLE else []
    return LaunchRun(settings=settings, unread=tuple(unread))


# A DeepSpeed configuration as a run; model, sequence length and cluster are not part of it.


DEFAULT_BUCKET = 500_000_000
"""`reduce_bucket_size`; under ZeRO 3 prices know no other (deepspeed/runtime/zero/config.py)."""
BATCH, MICRO_BATCH = "train_batch_size", "train_micro_batch_size_per_gpu"
_DEEPSPEED_READ = "zero_optimization bf16 fp16 tensor_parallel activation_checkpointing"
_ON_HOST = "cpu_checkpointing"
_INNER_READ = ("enabled", "number_checkpoints", "autotp_size", _ON_HOST)
_ZERO_READ = "stage mics_shard_size offload_optimizer offload_param cpu_offload cpu_offload_param"
_OFFLOAD_READ = ("device", "ratio", "nvme_path")
"""Without pinned memory transfers are slower; prices assume that it is pinned, as it is by default."""


def from_deepspeed(document: dict[str, Any], where: str) -> LaunchRun:
    """The run of a DeepSpeed configuration.

    Parameters
    ----------
    document
        Of a JSON file.
    where
        The file's name, for messages.

    Raises
    ------
    InputError
        No micro-batch, or a value of the wrong kind.
    """
    zero = section_of(document, "zero_optimization", where)
    tensor_parallel = section_of(document, "tensor_parallel", where)
    micro_batch, steps = (_positive(document, name, where) for name in (MICRO_BATCH, STEPS))
    if micro_batch is None:
        raise InputError("is needed", where=f"{where}: {MICRO_BATCH}")
    stage, overlaps = whole_number(zero, "stage", where) or 0, zero.get(OVERLAP)
    settings: dict[str, Any] = {
        "micro_batch": micro_batch,
        "zero_stage": stage,
        "framework": DEEPSPEED.name,
        # Where nobody says, stage 3 alone overlaps (deepspeed/runtime/zero/config.py, overlap_comm_valid).
        "overlap": {"dp": stage == 3 if overlaps is None else bool(overlaps)},
    }
    settings["tp"] = whole_number(tensor_parallel, "autotp_size", where) or 1
    settings["moe_dispatch"] = "alltoall"
    batch = whole_number(document, BATCH, where)
    if batch is not None:
        settings["global_batch"] = batch
        if steps is not None and batch % (micro_batch * steps) == 0:
            settings["dp"] = batch // (micro_batch * steps)
    bucket = zero.get(BUCKET)
    buckets = DEEPSPEED.gradient_buckets
    counts = buckets is not None and settings["zero_stage"] in buckets.zero_stages
    if counts and type(bucket) is int:
        settings["bucket_parameters"] = bucket
    shard_group = whole_number(zero, "mics_shard_size", where) or -1
    if shard_group > 0:
        settings["shard_group"] = shard_group
    settings |= _offloaded(zero, settings["zero_stage"], where)
    kind = section_of(document, "optimizer", where).get("type")
    optimizer = OWN_OPTIMIZERS.get(str(kind).lower(), "adam")
    if optimizer != "adam":
        settings["optimizer"] = optimizer
    if section_of(document, "fp16", where).get("enabled") is True:
        settings["precision"] = "fp16"
    settings |= _checkpoints(section_of(document, "activation_checkpointing", where))
    unread = _unread(document, zero, where)
    if kind is not None and str(kind).lower() not in OWN_OPTIMIZERS:
        unread.append(OPTIMIZER_TYPE)
    if settings["zero_stage"] == 3 and bucket not in (None, "auto", DEFAULT_BUCKET):
        unread.append(f"zero_optimization.{BUCKET}")
    return LaunchRun(settings=settings, unread=tuple(unread))


def _checkpoints(section: dict[str, Any]) -> dict[str, Any]:
    """Recomputation, and that its inputs lie in the host's memory; empty where nothing is recomputed."""
    if not section.get("number_checkpoints"):
        return {}
    inputs = {"offload_modules": ["layer_inputs"]} if section.get(_ON_HOST) is True else {}
    return {"recompute": "full", **inputs}


def _unread(document: dict[str, Any], zero: dict[str, Any], where: str) -> list[str]:
    """Keys that may change the price and that nothing here reads."""
    unread = unread_keys(
        document, "deepspeed", {BATCH, MICRO_BATCH, STEPS, *_DEEPSPEED_READ.split()}
    )
    for name in ("bf16", "fp16", "activation_checkpointing", "tensor_parallel"):
        unread += unread_keys(section_of(document, name, where), "deepspeed", _INNER_READ, name)
    unread += unread_keys(
        zero, "deepspeed", {BUCKET, OVERLAP, *_ZERO_READ.split()}, "zero_optimization"
    )
    for name in ("offload_optimizer", "offload_param"):
        inner, place = section_of(zero, name, where), f"zero_optimization.{name}"
        unread += unread_keys(inner, "deepspeed", _OFFLOAD_READ, place)
    return unread


def _offloaded(zero: dict[str, Any], stage: int, where: str) -> dict[str, Any]:
    """What of parameters and of optimizer states lies off the GPU; empty where nothing does.

    Raises InputError for other places than the host's memory and drives, and for a ratio of the optimizer's
    states that is no number of 0 to 1. Keys with `cpu` are those of old versions.
    """
    settings: dict[str, Any] = {}
    device = _place_of(zero, "offload_param", where)
    # Below stage 3 parameters are whole on every rank, and DeepSpeed leaves them there.
    if stage == 3 and (device in _PLACES or zero.get("cpu_offload_param") is True):
        settings["parameter_offload"] = True
        if device == _DRIVES:
            settings["parameters_on_drives"] = True
    device = _place_of(zero, "offload_optimizer", where)
    ratio = section_of(zero, "offload_optimizer", where).get("ratio", 1.0)
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if not is_number or not 0 <= ratio <= 1:
        place = f"{where}: zero_optimization.offload_optimizer.ratio"
        raise InputError("must be a number of 0 to 1", where=place, value=ratio)
    percent = round(100 * ratio)
    if percent and (device in _PLACES or zero.get("cpu_offload") is True):
        settings["optimizer_offload"] = percent
        if device == _DRIVES:
            settings["optimizer_on_drives"] = True
    return settings


_DRIVES = "nvme"
_PLACES = ("cpu", _DRIVES)


def _place_of(zero: dict[str, Any], name: str, where: str) -> object:
    """Where a section of ZeRO offloads to."""
    device: object = section_of(zero, name, where).get("device", "none")
    if device not in ("none", *_PLACES):
        place = f"{where}: zero_optimization.{name}.device"
        raise InputError("only none, cpu and nvme can be priced", where=place, value=device)
    return device


# An accelerate configuration with FSDP2 as a run; model, batch and cluster are not part of it.


_MESH = "parallelism_config"
_ACCELERATE_READ = (PRECISION, "num_processes", _FSDP_SECTION, _MESH)
_PRECISIONS = tuple(FSDP2.precisions)


def is_accelerate(document: Mapping[str, Any]) -> bool:
    """Whether a mapping is accelerate's file for FSDP: sections of other distributions may be empty, or idle.

    >>> is_accelerate({"distributed_type": "DEEPSPEED", "deepspeed_config": {}, "fsdp_config": {}})
    False
    """
    distribution = document.get("distributed_type")
    sections = _FSDP_SECTION in document or _MESH in document
    return sections if distribution is None else distribution == "FSDP"


def from_accelerate(document: dict[str, Any], where: str) -> LaunchRun:
    """The run of an accelerate configuration.

    Parameters
    ----------
    document
        Of a YAML file.
    where
        The file's name, for messages.

    Raises
    ------
    InputError
        A value of the wrong kind, or sizes of a mesh that accelerate does not start.
    """
    run = fully_sharded(document, "accelerate", where)
    mesh = section_of(document, _MESH, where)
    sizes = {axis: _positive(mesh, key, where) or 1 for axis, key in SIZES.items()}
    gpus = whole_number(document, "num_processes", where)
    dp = sizes["dp_replicate"] * sizes["dp_shard"]
    if mesh:
        _check_mesh(document, sizes, gpus, where)
    elif gpus is not None:
        dp = gpus
    settings: dict[str, Any] = {
        "dp": dp,
        **{axis: size for axis, size in sizes.items() if axis in AXES},
        "recompute": "none",
        "moe_dispatch": "alltoall",
        **run.settings,
    }
    if sizes["dp_replicate"] > 1:
        # Weights are sharded over dp_shard and cp together (accelerate/parallelism_config.py).
        settings["shard_groups"] = sizes["dp_replicate"]
    if document.get(PRECISION) in _PRECISIONS:
        settings["precision"] = document[PRECISION]
    # Axes of one GPU change nothing.
    wide = {key: size for key, size in mesh.items() if size not in (1, None)}
    unread = unread_keys(document, "accelerate", _ACCELERATE_READ)
    unread += unread_keys(wide, "accelerate", SIZES.values(), _MESH)
    return LaunchRun(settings=settings, unread=(*run.unread, *unread))


def _check_mesh(
    document: Mapping[str, Any], sizes: Mapping[str, int], gpus: int | None, where: str
) -> None:
    """Raises InputError for what accelerate 1.15 refuses (parallelism_config.py, __post_init__ and
    _validate_accelerator; commands/launch.py, _validate_launch_command).
    """
    at, of_fsdp = f"{where}: {_MESH}", section_of(document, _FSDP_SECTION, where)
    if str(of_fsdp.get(f"{_PREFIX}version", 1)) != "2":
        raise InputError("is of FSDP2 alone: set fsdp_version: 2 of fsdp_config", where=at)
    if gpus == 1 and math.prod(sizes.values()) == 1:
        return
    if sizes["dp_shard"] * sizes["cp"] == 1:
        what = "leaves FSDP no ranks to shard over: raise dp_shard, or cp"
        raise InputError(what, where=at)
    if sizes["dp_shard"] == 1 and sizes["dp_replicate"] > 1:
        what = "replicates without shards beside tp or cp, which accelerate refuses: raise dp_shard"
        raise InputError(what, where=at)
    # DeepSpeed counts the ranks of Ulysses for itself.
    said = section_of(document, _MESH, where).get(f"{_MESH}_sp_size") in (None, 1)
    total = math.prod(sizes.values())
    if said and gpus is not None and total != gpus:
        what = (
            f"multiplies to {total} ranks, and num_processes is {gpus}: accelerate wants both alike"
        )
        raise InputError(what, where=at)


def trainers_deepspeed(
    source: Path | dict[str, Any], known: dict[str, Any], where: str
) -> LaunchRun:
    """The run of a DeepSpeed file or mapping for transformers' Trainer, which puts its own values in place of
    `auto` (transformers/integrations/deepspeed.py): those that are known here; keys with another `auto` count
    as left out.

    Parameters
    ----------
    source
        Path of the file, or what it holds.
    known
        Fields that the Trainer's own arguments set.
    where
        The file's name, for messages.
    """
    document = source
    if isinstance(document, Path):
        document = read_mapping(document, MAX_FILE_BYTES)
    refuse_adapters(fields_of(document), where)
    filled = {key: value for key, value in document.items() if value != "auto"} | known
    for name in ("bf16", "fp16"):
        filled.pop(name, None)
    zero = section_of(filled, "zero_optimization", where)
    filled["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    # The Trainer's checkpoints are torch's own, which ask nothing of DeepSpeed's section.
    checkpoints = section_of(filled, "activation_checkpointing", where)
    filled["activation_checkpointing"] = {k: checkpoints[k] for k in checkpoints if k != _ON_HOST}
    return from_deepspeed(filled, where)


# Adapters, as PEFT's LoraConfig has them: names of modules, or one pattern for their paths.
#
# A name stands for every module whose path ends with it, a pattern for those that it matches whole
# (peft/tuners/tuners_utils.py, check_target_module_exists).


_OTHER_NAMES = {
    **dict.fromkeys(("c_attn", "query_key_value", "Wqkv", "W_pack"), ("qkv_proj",)),
    **dict.fromkeys(("dense_h_to_4h", "c_fc", "mlp_up"), ("up_proj",)),
    **dict.fromkeys(("dense_4h_to_h", "mlp_down"), ("down_proj",)),
    "c_proj": ("o_proj", "down_proj"),
    **dict.fromkeys(("in_proj_qkvz", "in_proj_qkv"), ("in_proj",)),
}
"""Modules of GPT-2, GPT-NeoX, Phi, MPT, Baichuan, Qwen3-Next and 3.5 by the names that most families have."""
EXPERT_PARAMETERS = frozenset(("experts.gate_up_proj", "experts.down_proj"))
_INSIDE = frozenset(("", "self_attn", "attn", "attention", "linear_attn", "mlp", "mixer", "layers"))
"""What may stand before a module's name, where every layer has one of it."""
_CHOICE = re.compile(r"\(([a-z_]+(?:\|[a-z_]+)*)\)_proj")
_MODULE = re.compile(r"\b[a-z]+(?:_[a-z]+)*_proj\b")
_SOME = re.compile(r"\(\d|\[\d-|vis|projector")
"""What of a pattern names single layers, or modules outside the language model."""


def adapted_modules(said: object) -> tuple[tuple[str, ...], bool]:
    """Matrices that some names of modules, or one pattern, stand for, and whether all were understood.

    Parameters
    ----------
    said
        A list of names, or a pattern.

    Returns
    -------
    tuple
        Words of `--lora-targets`, each once, and whether they are all that is meant.

    >>> adapted_modules(["self_attn.q_proj", "c_fc"])
    (('q_proj', 'up_proj'), True)
    >>> adapted_modules(r"model.layers.[\\d]+.self_attn.(q|k)_proj")
    (('q_proj', 'k_proj'), True)
    >>> adapted_modules(["q_proj", "vision_adapter.mlp.fc1"])
    (('q_proj',), False)
    """
    if isinstance(said, str) and not re.fullmatch(r"[\w.-]+", said):
        spread = _CHOICE.sub(lambda names: " ".join(f"{n}_proj" for n in names[1].split("|")), said)
        words = dict.fromkeys(_MODULE.findall(spread))
        matrices_said = tuple(word for word in words if word in TARGETS)
        return matrices_said, bool(matrices_said) and len(matrices_said) == len(
            words
        ) and _SOME.search(said) is None
    names = [str(name) for name in said] if isinstance(said, list) else [str(said)]
    adapted: dict[str, None] = {}
    understood = True
    for name in names:
        before, _, last = name.rpartition(".")
        matrices = (last,) if last in TARGETS else _OTHER_NAMES.get(last, ())
        understood = understood and bool(matrices) and before.rpartition(".")[2] in _INSIDE
        adapted |= dict.fromkeys(matrices if before.rpartition(".")[2] in _INSIDE else ())
    return tuple(adapted), understood


def adapter_targets(
    fields: Mapping[str, object],
    modules: str,
    where: str,
    usual: tuple[str, ...] = (),
    parameters: str = "",
) -> tuple[tuple[str, ...], list[str]]:
    """Matrices that get an adapter by what a configuration names.

    Parameters
    ----------
    fields
        Of the configuration.
    modules
        The one that has names of modules, or a pattern; `all` and `all-linear` stand for all linear modules.
    where
        The file's name.
    usual
        Taken where it names none.
    parameters
        The one that has names of parameters without a module of their own, those of experts.

    Returns
    -------
    tuple
        Words of `--lora-targets`, and those of the two fields that are not fully understood.

    Raises
    ------
    InputError
        No matrix of a layer that is known.
    """
    said, tensors = fields.get(modules), fields.get(parameters)
    targets, unread = usual, []
    if said in ("all", ["all"], ALL_LINEAR, [ALL_LINEAR]):
        targets = (ALL_LINEAR,)
    elif said:
        targets, understood = adapted_modules(said)
        unread += [] if understood else [modules]
    if tensors:
        names = tensors if isinstance(tensors, list) else [tensors]
        ends = {".".join(str(name).split(".")[-2:]) for name in names}
        targets = (*targets, EXPERTS)
        unread += [] if ends == EXPERT_PARAMETERS else [parameters]
    if not targets:
        what = "names no matrix of a layer that is known"
        if not said:
            what = "is missing: say which matrices have an adapter"
        raise InputError(what, where=f"{where}: {modules}", value=said or ..., allowed=TARGETS)
    return targets, unread


def bits_of_base(fields: Mapping[str, object], bits: str, method: str, where: str) -> int:
    """Bits of a frozen weight, 16 where bitsandbytes narrows none. Raises InputError for other bits and
    methods.

    Parameters
    ----------
    fields
        Of the configuration.
    bits
        Name of the field with their number.
    method
        Name of the field with who narrows them.
    where
        The file's name, for messages.
    """
    for name, allowed in ((method, (None, "bnb", "bitsandbytes", "auto")), (bits, (None, 4, 8))):
        if fields.get(name) not in allowed:
            raise InputError(FEW_BITS_ALONE, where=f"{where}: {name}", value=fields[name])
    return next((width for width in (4, 8) if fields.get(bits) == width), 16)


FOUR_BITS, EIGHT_BITS = "load_in_4bit", "load_in_8bit"
"""Switches of transformers' BitsAndBytesConfig, of the same names in TRL and Axolotl."""


def loaded_bits(fields: Mapping[str, object], where: str) -> int:
    """Bits of a frozen weight by its switches, 16 where both are off. Raises InputError where both are on.

    Parameters
    ----------
    fields
        Of the configuration, with the switches of `FOUR_BITS` and `EIGHT_BITS`.
    where
        The file's name, for messages.
    """
    four, eight = (fields.get(name) is True for name in (FOUR_BITS, EIGHT_BITS))
    if four and eight:
        raise InputError(f"cannot be true beside {FOUR_BITS}", where=f"{where}: {EIGHT_BITS}")
    return 4 if four else 8 if eight else 16


def adapters_mapping(
    method: str, rank: int | None, targets: Iterable[str], dropout: object = None
) -> dict[str, Any]:
    """What is trained beside frozen weights, as a run file has it.

    Parameters
    ----------
    method
        Any of `AdapterMethod`.
    rank
        Width of the adapters, from 1.
    targets
        Matrices that have one, repeated or not.
    dropout
        Of their inputs; none where it is 0 or absent.
    """
    drops = {"dropout": dropout} if dropout else {}
    return {"method": method, "rank": rank, "targets": list(dict.fromkeys(targets))} | drops


_PEFT_KIND, _PEFT_RANK, _PEFT_TARGETS = "peft_type", "r", "target_modules"


_NOTED_BITS = re.compile(r"^# Note: .*BitsAndBytesConfig\(load_in_([48])bit=True", re.MULTILINE)


def with_adapters_beside(launch: LaunchRun, path: Path) -> LaunchRun:
    """A launch with the adapters of PEFT's file that lies beside it; itself where it says what is trained.

    Raises InputError where the file has another kind than LoRA, or names no matrix that is known.

    Parameters
    ----------
    launch
        As it is read without.
    path
        Of the launch file, whose notes may say the bits of the frozen weights.
    """
    beside = path.parent / ADAPTER_FILE
    reads_it = launch.settings.get("framework") in (FSDP2.name, DEEPSPEED.name)
    if "adapters" in launch.settings or not reads_it or not beside.is_file():
        return launch
    fields, where = read_mapping(beside, MAX_FILE_BYTES), str(beside)
    check_choice(fields.get(_PEFT_KIND), ["LORA"], f"{where}: {_PEFT_KIND}", "has no price yet")
    rank = positive_numbers(fields, {_PEFT_RANK: 8}, where)[_PEFT_RANK]
    targets, unread = adapter_targets(fields, _PEFT_TARGETS, where, ("q_proj", "v_proj"))
    # Bits of a frozen weight by the notes of a plan's own script, None where they do not say.
    note = _NOTED_BITS.search(read_text(path, MAX_FILE_BYTES))
    bits = None if note is None else int(note[1])
    method = adapter_method(bits or 16, decomposed=fields.get(_DECOMPOSES) is True)
    taken = "taken as of 16 bits" if bits is None else f"of {bits} bits, as the script notes"
    remark = f"adapters are those of {ADAPTER_FILE} beside it, frozen weights {taken}"
    settings = {"adapters": adapters_mapping(method, rank, targets)}
    return launch.with_more(settings, unread=unread, remarks=[remark], base_is_open=bits is None)


def remarks_on_experts(model: str | None, targets: Collection[str]) -> tuple[str, ...]:
    """A remark where all linear modules of a model with experts are meant.

    Parameters
    ----------
    model
        Its name in the catalog, or a folder with its config.json; None where it is not known.
    targets
        Matrices that have an adapter.
    """
    if model is None or ALL_LINEAR not in targets:
        return ()
    return (LINEAR_EXPERTS,) if read_model(model).moe is not None else ()


# LLaMA-Factory.


_KIND = "llamafactory"
_MODEL, _TRAINED, _STAGE = "model_name_or_path", "finetuning_type", "stage"
_MICRO_BATCH = "per_device_train_batch_size"
_LENGTH, _RECOMPUTES = "cutoff_len", "disable_gradient_checkpointing"
_PACKING, _NEAT_PACKING = "packing", "neat_packing"
"""The latter keeps samples of a pack from attending to each other, and turns the former on (data_args.py)."""
_ATTENTION = "flash_attn"
_BITS, _QUANTISES = "quantization_bit", "quantization_method"
_RANK, _TARGETS, _DROPOUT = "lora_rank", "lora_target", "lora_dropout"
_DECOMPOSES = "use_dora"
_DEFAULTS = {_MICRO_BATCH: 8, STEPS: 1, _LENGTH: 2048, _RANK: 8}
_STAGES: dict[str, StepKindName] = {
    "pt": PRETRAINING,
    "sft": TUNING,
    "dpo": "dpo",
    "kto": "kto",
    "rm": "reward",
}
"""Kinds of a step by stage; PPO has none."""
_LOSS, _LIGER = "pref_loss", "enable_liger_kernel"
_KERNELS = dict.fromkeys(("auto", "sdpa"), "sdpa") | {
    "fa2": "flash-2",
    "fa3": "flash-3",
    "disabled": "unfused",
}
FREEZES_ENCODER = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True}
"""Switches of the image encoder and its projector, and their defaults (hparams/finetuning_args.py)."""
_PIXELS = ("image_max_pixels", "image_min_pixels")
_BY_MEGATRON = "is trained by Megatron (USE_MCA=1): read its own command line instead"
_REFUSED = {
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "megatron_bridge_args"),
        _BY_MEGATRON,
    ),
    **dict.fromkeys(("freeze_language_model", "use_llama_pro"), PART_OF_A_MODEL),
    "use_kt": "experts that run on the host's processors (KTransformers) have no price",
    "use_badam": PART_OF_A_MODEL,
}
_READ = frozenset(
    (
        *(_MODEL, _TRAINED, _STAGE, _MICRO_BATCH, STEPS, _LENGTH, _RECOMPUTES),
        *(_PACKING, _NEAT_PACKING),
        *(_LOSS, _ATTENTION, DEEPSPEED_FILE, _FSDP, _FSDP_SECTION),
        *("do_train", "bf16", "fp16", "pure_bf16"),
        *(_RANK, _TARGETS, _DROPOUT, _DECOMPOSES, _BITS, _QUANTISES, *_REFUSED),
        *(*FREEZES_ENCODER, *_PIXELS, ACCELERATOR, CONFIG_FILE),
    )
)
_NARROW_NAME = re.compile(r"gptq|awq|aqlm|-int[48]\b", re.IGNORECASE)
"""Checkpoints whose weights are of few bits already."""


def is_llamafactory(document: dict[str, Any]) -> bool:
    """Whether a mapping is a configuration of LLaMA-Factory."""
    return _MODEL in document and any(key in document for key in (_TRAINED, _STAGE, "template"))


def from_llamafactory(document: dict[str, Any], path: Path) -> LaunchRun:
    """The run of a LLaMA-Factory configuration; its cluster and its GPUs are not part of it.

    Parameters
    ----------
    document
        Of a YAML file.
    path
        The file, for messages and for what it names beside it.

    Raises
    ------
    InputError
        A stage or a kind of training without a price, a value of the wrong kind, or a DeepSpeed file that is
        not there.
    """
    where = str(path)
    _check_kind(document, where)
    numbers = positive_numbers(document, _DEFAULTS, where)
    settings: dict[str, Any] = {
        "seq_len": numbers[_LENGTH],
        "micro_batch": numbers[_MICRO_BATCH],
        "precision": "bf16" if document.get("pure_bf16") else half_precision(document, where),
        "recompute": "none" if document.get(_RECOMPUTES) is True else "full",
        "attention_kernel": kernel_of(document, _ATTENTION, _KERNELS, where),
    }
    unread = unread_keys(document, _KIND, _READ)
    if document.get("pure_bf16"):
        unread.append("pure_bf16")
    model = known_model(document[_MODEL], path)
    batch = numbers[_MICRO_BATCH], numbers[STEPS]
    run = sharded(document, _KIND, path, batch)
    if run is PLAIN:
        run = _under_accelerate(document, path) or PLAIN
        if run.settings.get("recompute") == "full":
            settings["recompute"] = "full"
    run = with_synced_batches(run, document, path)
    remarks = []
    packs = document.get(_PACKING)
    if document.get(_NEAT_PACKING):
        remarks.append(PACKED)
    elif packs is False or (packs is None and document.get(_STAGE) != "pt"):
        remarks.append(PADDED)
    adapters = None
    if document.get(_TRAINED, "lora") == "lora":
        adapters, of_adapters = _llamafactory_adapters(document, numbers[_RANK], where)
        unread += of_adapters
        remarks += remarks_on_experts(model, adapters["targets"])
    settings |= {"kind": _llamafactory_kind(document, where), "adapters": adapters}
    if document.get(_LIGER) and document.get(_STAGE, TUNING) in ("pt", TUNING):
        # Its other kernels, which run with it, have no price: the switch is not read.
        settings["loss"] = "liger"
    return run.with_more(
        settings,
        unread=unread,
        remarks=remarks,
        model=model,
        local_batch=math.prod(batch),
        images=image_fields(document, FREEZES_ENCODER, _PIXELS, has_adapters=adapters is not None),
    )


def _llamafactory_kind(document: dict[str, Any], where: str) -> StepKindName:
    """What a step does. Raises InputError for stages and losses without a price."""
    stage = str(document.get(_STAGE, TUNING))
    what = "has no price yet: other models are run beside the one that is trained"
    check_choice(stage, _STAGES, f"{where}: {_STAGE}", what)
    loss = document.get(_LOSS, "sigmoid")
    if stage != "dpo" or loss not in ("orpo", "simpo"):
        return _STAGES[stage]
    if loss == "orpo":
        return "orpo"
    raise InputError("has no price yet", where=f"{where}: {_LOSS}", value=loss)


def _check_kind(document: dict[str, Any], where: str) -> None:
    """Raises InputError for what has no price: other adapters than LoRA, other stages, few bits."""
    if document.get("do_train") is not True:
        raise InputError("is not true: nothing is trained", where=f"{where}: do_train")
    trained = document.get(_TRAINED, "lora")
    what = f"has no price: {PART_OF_A_MODEL}" if trained == "freeze" else "has no price yet"
    check_choice(trained, ("full", "lora"), f"{where}: {_TRAINED}", what)
    refuse_fields(document, _REFUSED, where)
    bits_of_base(document, _BITS, _QUANTISES, where)
    refuse_narrow(document[_MODEL], f"{where}: {_MODEL}")


def refuse_narrow(named: object, where: str) -> None:
    """Raises InputError for a checkpoint whose name says that its weights are of few bits.

    Parameters
    ----------
    named
        The model, as the file calls it.
    where
        File and field, for messages.
    """
    if _NARROW_NAME.search(str(named)):
        what = "has weights of few bits, which have no price: those of bitsandbytes alone have one"
        raise InputError(what, where=where, value=named)


def _llamafactory_adapters(
    document: dict[str, Any], rank: int, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Adapters of a configuration, and what of them is not read."""
    said = document.get(_TARGETS, "all")
    names = [name.strip() for name in said.split(",")] if isinstance(said, str) else said
    targets, unread = adapter_targets({_TARGETS: names}, _TARGETS, where)
    bits = bits_of_base(document, _BITS, _QUANTISES, where)
    adapters, of_dropout = adapters_of(document, _DECOMPOSES, bits, rank, targets)
    return adapters, [*unread, *of_dropout]


def adapters_of(
    fields: Mapping[str, Any],
    decomposes: str,
    bits: int,
    rank: int,
    targets: Iterable[str],
    *,
    usual_dropout: float = 0.0,
) -> tuple[dict[str, Any], list[str]]:
    """Adapters of a configuration, and its field of dropout where that is not read.

    Before DoRA's input it is not: the frozen product runs twice then.

    Parameters
    ----------
    fields
        Of the configuration, `lora_dropout` among them.
    decomposes
        Name of the switch of DoRA.
    bits
        Of a frozen weight: 4, 8 or 16.
    rank
        Width of the adapters, from 1.
    targets
        Matrices that have one.
    usual_dropout
        What stands for a field that is not there.
    """
    decomposed, dropout = fields.get(decomposes) is True, fields.get(_DROPOUT, usual_dropout)
    method = adapter_method(bits, decomposed=decomposed)
    unread = [_DROPOUT] if decomposed and dropout else []
    return adapters_mapping(method, rank, targets, dropout), unread


# Axolotl.


_AXOLOTL = "axolotl"
_BASE, _AXOLOTL_LENGTH, _AXOLOTL_MICRO_BATCH = "base_model", "sequence_len", "micro_batch_size"
_AXOLOTL_DEFAULTS = {_AXOLOTL_MICRO_BATCH: 1, STEPS: 1, _AXOLOTL_LENGTH: 512}
_TENSOR, _CONTEXT, _REPLICAS = "tensor_parallel_size", "context_parallel_size", "dp_replicate_size"
_SHARDS = "dp_shard_size"
_IMPLEMENTATION, _CHECKPOINTS = "attn_implementation", "gradient_checkpointing"
_IMPLEMENTATIONS = {
    "sdpa": "sdpa",
    "flash_attention_2": "flash-2",
    "flash_attention_3": "flash-3",
    "kernels-community/vllm-flash-attn3": "flash-3",
    "eager": "unfused",
}
_RANK_BATCH = "batch_size"
_ADAPTER, _AXOLOTL_RANK, _LINEAR = "adapter", "lora_r", "lora_target_linear"
_AXOLOTL_TARGETS, _PARAMETERS = "lora_target_modules", "lora_target_parameters"
_BNB = "bnb_config_kwargs"
_AXOLOTL_DECOMPOSES = "peft_use_dora"
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
"""Fused products of adapters: on where nothing is said of any of them, unless the model brings code of its
own (utils/schemas/config.py, check_auto_enable_lora_kernels)."""
FUSED_ADAPTERS = (
    f"{', '.join(_LORA_KERNELS)} are on by themselves: say false to have PEFT's own products"
)
_CUT_LOSS = "cut_cross_entropy"
_CUT_PLUGIN = "CutCrossEntropyPlugin"
"""It turns `cut_cross_entropy` on by itself (integrations/cut_cross_entropy/args.py)."""
_RL = "rl"
_RL_KINDS: dict[str, StepKindName] = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo"}
"""IPO is another loss over the same passes."""
_FREEZES_MODULES, _IMAGE_SIZE = "freeze_mm_modules", "image_size"
_AXOLOTL_REFUSED = {
    **dict.fromkeys(
        ("reward_model", "process_reward_model", "ebft", "diffusion", "num_labels"),
        OTHER_STEP,
    ),
    **dict.fromkeys(("unfrozen_parameters", "lisa_n_layers", "relora"), PART_OF_A_MODEL),
    "gptq": FEW_BITS_ALONE,
}
_AXOLOTL_READ = frozenset(
    (
        *(_BASE, _AXOLOTL_LENGTH, _AXOLOTL_MICRO_BATCH, STEPS, _IMPLEMENTATION, _CHECKPOINTS),
        *(_RANK_BATCH, "bf16", "fp16", "sample_packing", "pad_to_sequence_len"),
        *("flash_attention", DEEPSPEED_FILE),
        *(_FSDP, _FSDP_SECTION, "fsdp_version", _SHARDS),
        *(_TENSOR, _CONTEXT, _REPLICAS),
        *(_ADAPTER, _AXOLOTL_RANK, _LINEAR, _AXOLOTL_TARGETS, _PARAMETERS, FOUR_BITS, _BNB),
        *(EIGHT_BITS, _AXOLOTL_DECOMPOSES, SAVED_TENSORS.flag),
        *(_DROPOUT, *_LORA_KERNELS, _CUT_LOSS, _RL, PRECOMPUTES, *_AXOLOTL_REFUSED),
        *(_FREEZES_MODULES, _IMAGE_SIZE, ACCELERATOR),
    )
)


def is_axolotl(document: dict[str, Any]) -> bool:
    """Whether a mapping is a configuration of Axolotl."""
    return _BASE in document and (_AXOLOTL_LENGTH in document or _AXOLOTL_MICRO_BATCH in document)


def from_axolotl(document: dict[str, Any], path: Path) -> LaunchRun:
    """The run of an Axolotl configuration; its cluster is not part of it.

    Parameters
    ----------
    document
        Of a YAML file.
    path
        The file, for messages and for what it names beside it.

    Raises
    ------
    InputError
        A kind of training without a price, a value of the wrong kind, or a DeepSpeed file that is not there.
    """
    where = str(path)
    refuse_fields(document, _AXOLOTL_REFUSED, where)
    kind = _axolotl_kind(document, where)
    numbers = positive_numbers(document, _AXOLOTL_DEFAULTS, where)
    micro_batch, steps = numbers[_AXOLOTL_MICRO_BATCH], numbers[STEPS]
    of_rank = whole_number(document, _RANK_BATCH, where)
    if of_rank is not None and document.get(STEPS, 1) is None:
        # Of both the steps go before, which are 1 where they are left out and not null
        # (utils/schemas/training.py; utils/config/__init__.py, normalize_config).
        steps = max(of_rank // micro_batch, 1)
    run = sharded(document, _AXOLOTL, path, (micro_batch, steps))
    run = with_synced_batches(run, document, path)
    unread = unread_keys(document, _AXOLOTL, _AXOLOTL_READ)
    checkpoints = document.get(_CHECKPOINTS) or False
    if checkpoints not in (True, False):
        unread.append(_CHECKPOINTS)
    settings = {
        "seq_len": numbers[_AXOLOTL_LENGTH],
        "micro_batch": micro_batch,
        "precision": half_precision(document, where),
        "recompute": "full" if checkpoints else run.settings.get("recompute", "none"),
        "attention_kernel": kernel_of(document, _IMPLEMENTATION, _IMPLEMENTATIONS, where),
    }
    offloaded, of_hooks = offloaded_tensors(
        document, SAVED_TENSORS.flag, str(settings["recompute"])
    )
    settings |= offloaded
    unread += of_hooks
    settings |= _axolotl_mesh(document, where)
    remarks, model = [], known_model(document[_BASE], path)
    if document.get("sample_packing") is True:
        remarks.append(PACKED)
    elif document.get("pad_to_sequence_len") is not True:
        remarks.append(PADDED)
    adapters, of_adapters = _axolotl_adapters(document, where)
    settings |= {**kind_of_step(kind, document), "adapters": adapters}
    if adapters is not None:
        remarks += remarks_on_experts(model, adapters["targets"])
        by_themselves = set(_LORA_KERNELS) & set(of_adapters) - document.keys()
        remarks += [FUSED_ADAPTERS] if by_themselves else []
    if document.get(_CUT_LOSS, _CUT_PLUGIN in str(document.get("plugins"))):
        unread.append(_CUT_LOSS)
    if document.get(AXOLOTL_LIGER_LOSS) and AXOLOTL_LIGER in str(document.get("plugins")):
        settings["loss"] = "liger"
        unread.remove(AXOLOTL_LIGER_LOSS)
    return run.with_more(
        settings,
        unread=[*unread, *of_adapters],
        remarks=remarks,
        model=model,
        local_batch=micro_batch * steps,
        images=_axolotl_images(document, has_adapters=adapters is not None),
    )


def _axolotl_mesh(document: dict[str, Any], where: str) -> dict[str, int]:
    """Sizes of groups of ranks, and how many ranks these make where all of them are given."""
    sizes = (_TENSOR, _CONTEXT, _REPLICAS)
    tp, cp, replicas = (whole_number(document, key, where) or 1 for key in sizes)
    mesh = {"tp": tp, "cp": cp}
    if replicas > 1:
        mesh["shard_groups"] = replicas
    shards = document.get(_SHARDS)
    if isinstance(shards, int) and shards > 0:
        # All ranks: what accelerate multiplies to the size of its mesh (parallelism_config.py, total_size).
        mesh["gpus"] = shards * replicas * tp * cp
    return mesh


def _axolotl_images(document: dict[str, Any], *, has_adapters: bool) -> ImageFields:
    """What is trained of an image encoder: adapters of every linear module are in it too."""
    images = image_fields(document, {_FREEZES_MODULES: False}, (_IMAGE_SIZE,), has_adapters=False)
    in_encoder = has_adapters and bool(document.get(_LINEAR))
    return replace(images, parts=(_LINEAR,) if in_encoder else ())


def _axolotl_kind(document: dict[str, Any], where: str) -> StepKindName:
    """The kind of step that `rl` names; supervised fine-tuning without."""
    if not document.get(_RL):
        return TUNING
    named = str(document[_RL])
    what = "has no price yet: it is another step than those that are known"
    check_choice(named, _RL_KINDS, f"{where}: {_RL}", what)
    return _RL_KINDS[named]


def _axolotl_adapters(
    document: dict[str, Any], where: str
) -> tuple[dict[str, Any] | None, list[str]]:
    """Adapters of a configuration, None where every parameter is trained, and what of them is not read."""
    adapter = document.get(_ADAPTER)
    if not adapter:
        if document.get(EIGHT_BITS) is True:
            what = "needs an adapter: weights of 8 bits are not trained themselves"
            raise InputError(what, where=f"{where}: {EIGHT_BITS}")
        return None, []
    check_choice(adapter, ("lora", "qlora"), f"{where}: {_ADAPTER}", "has no price yet")
    bits = loaded_bits(document, where)
    if adapter == "qlora" and bits != 4:
        raise InputError("must be true under adapter: qlora", where=f"{where}: {FOUR_BITS}")
    refuse_narrow(document[_BASE], f"{where}: {_BASE}")
    rank = whole_number(document, _AXOLOTL_RANK, where)
    if rank is None:
        raise InputError("is needed beside an adapter", where=f"{where}: {_AXOLOTL_RANK}")
    every = (ALL_LINEAR,) if document.get(_LINEAR) else ()
    targets, unread = adapter_targets(document, _AXOLOTL_TARGETS, where, every, _PARAMETERS)
    targets = (*every, *targets)
    switches = [document.get(name) for name in _LORA_KERNELS]
    apart = document.get("trust_remote_code") or document.get(_RL)
    fused = all(switch is None for switch in switches) and not apart
    unread += [
        name
        for name, on in zip(_LORA_KERNELS, switches, strict=True)
        if on or (fused and on is None)
    ]
    quantised = document.get(_BNB) or {}
    if quantised not in ({}, {"bnb_4bit_use_double_quant": True}):
        unread.append(_BNB)
    adapters, of_dropout = adapters_of(document, _AXOLOTL_DECOMPOSES, bits, rank, targets)
    return adapters, [*unread, *of_dropout]

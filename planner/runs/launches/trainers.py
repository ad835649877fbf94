"""Runs of transformers' Trainer: command lines and YAML of TRL and of other scripts on it, and of ms-swift.

Names and defaults are those of transformers 5.23 (training_args.py), of TRL 1.16.0 (trl/trainer/
sft_config.py, model_config.py, base_config.py), of accelerate 1.15 (commands/config) and of
ms-swift 3602360a5 (swift/arguments, swift/trainers/arguments.py, swift/megatron/arguments).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.costmodel.execution_names import StepKindName
from meshwright.documents import read_mapping
from meshwright.errors import InputError, check_choice
from meshwright.frameworks.deepspeed import BUCKET
from meshwright.frameworks.fsdp2 import (
    ACCELERATOR,
    LIGER_LOSS,
    PRECOMPUTES,
    SAVED_TENSORS,
    TRL_LOSS,
    TRL_STEPS,
)
from meshwright.frameworks.megatron import (
    MEGATRON,
    MEGATRON_ARGUMENTS,
    PYTORCH,
    SWIFT_EXTRA,
    SWIFT_EXTRAS,
    SWIFT_SWITCHES,
)
from meshwright.model_specs.adapters import ALL_LINEAR
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.launches.command_line import CommandLine, trains_a_part
from meshwright.planner.runs.launches.fields import (
    RECIPE,
    fields_of_line,
    launched_gpus,
    recipe_named,
)
from meshwright.planner.runs.launches.finetuning import (
    DEEPSPEED_FILE,
    EIGHT_BITS,
    END_TO_END,
    FOUR_BITS,
    MICRO_BATCH,
    OTHER_STEP,
    PACKED,
    PADDED,
    PART_OF_A_MODEL,
    PLAIN,
    STEPS,
    TUNING,
    adapter_targets,
    adapters_of,
    bits_of_base,
    file_beside,
    from_accelerate,
    fully_sharded,
    half_precision,
    is_accelerate,
    kernel_of,
    kind_of_step,
    known_model,
    loaded_bits,
    offloaded_tensors,
    positive_numbers,
    refuse_fields,
    refuse_narrow,
    remarks_on_experts,
    sharded,
    trainers_deepspeed,
    with_synced_batches,
)
from meshwright.planner.runs.launches.launch_run import (
    ImageFields,
    LaunchRun,
    image_fields,
    is_harmless,
    section_of,
    unread_keys,
    whole_number,
)
from meshwright.planner.runs.launches.megatron import from_megatron
from meshwright.planner.runs.run_file import MAX_FILE_BYTES

_MICRO_BATCH = "per_device_train_batch_size"
_MODEL, _SWIFT_MODEL = "model_name_or_path", "model"
_CHECKPOINTS = "gradient_checkpointing"
_CONFIG_FILE = "config_file"
_TRL_CONFIG_FILE = "accelerate_config"
"""TRL's word for the one of accelerate: a file or one of its own by name."""
_ADAPTERS = "use_peft"
_PACKING, _PADDING_FREE = "packing", "padding_free"
_SWIFT_BATCH = 16
_SWIFT_VARIABLES = "ENV"
"""Section of variables of ms-swift's files (swift/cli/main.py, parse_yaml_args)."""
_EACH_NODE = "NPROC_PER_NODE"
_SECOND_FSDP = "fsdp2"
"""Word of ms-swift and of TRL for their settings of FSDP2."""

PEFT_DEFAULT = "no target modules are named: q_proj and v_proj, which PEFT takes for most families"
UNSHARDED = (
    "how ranks share the model is said where the script is started, in accelerate's file for instance: it is "
    "priced as plain data parallelism"
)


# What TRL's scripts and those of ms-swift call alike things.


@dataclass(frozen=True, kw_only=True)
class _Dialect:
    """Names and defaults of one family of scripts on transformers' Trainer."""

    kind: str
    """Its section of flag_effects.yaml."""
    model: str
    length: tuple[str, ...]
    """Names of the longest sequence; the first that is there counts."""
    default_length: int | None = None
    micro_batch: int = 8
    recomputes: bool = False
    half: bool = False
    """Whether bf16 is what is trained in where nothing is said."""
    attention: tuple[str, ...] = ("attn_implementation",)
    rank: str = "lora_r"
    default_rank: int = 16
    targets: str = "lora_target_modules"
    parameters: str = "lora_target_parameters"
    dropout: float = 0.0
    """Before adapters, where nothing is said."""

    @property
    def is_swift(self) -> bool:
        """Whether it is one of ms-swift's."""
        return self.model == _SWIFT_MODEL


_KERNELS = {
    "sdpa": "sdpa",
    **dict.fromkeys(("flash_attn", "flash_attention_2"), "flash-2"),
    **dict.fromkeys(
        (
            "flash_attention_3",
            "kernels-community/vllm-flash-attn3",
            "kernels-community/flash-attn3",
        ),
        "flash-3",
    ),
    "kernels-community/flash-attn2": "flash-2",
    "eager": "unfused",
}
_TRAINER = _Dialect(
    kind="trainer",
    model=_MODEL,
    length=(
        *("max_length", "max_seq_length", "max_seq_len"),
        *("model_max_length", "block_size", "cutoff_len"),
    ),
)
_TRL = replace(_TRAINER, default_length=1024, recomputes=True, half=True, dropout=0.05)
"""TRL's of 2025 on; before, `max_length` was called `max_seq_length`, and defaults were the Trainer's."""
_OF_TRL = frozenset(
    (
        *("max_length", "packing_strategy", "padding_free", "assistant_only_loss"),
        *("completion_only_loss", "dataset_text_field", "chat_template_path", "dataset_mixture"),
        _ADAPTERS,
    )
)
_SWIFT = _Dialect(
    kind="swift",
    model=_SWIFT_MODEL,
    length=("packing_length", "max_length"),
    micro_batch=1,
    recomputes=True,
    half=True,
    attention=("attn_impl",),
    rank="lora_rank",
    default_rank=8,
    targets="target_modules",
    parameters="target_parameters",
    dropout=0.05,
)
_OTHER_STEPS = dict.fromkeys(
    (
        *("num_generations", "reward_model", "reward_model_path", "reward_funcs"),
        *("teacher_model", "num_labels"),
    ),
    OTHER_STEP,
)
_OF_PREFERENCES = dict.fromkeys(
    (
        *("beta", "max_prompt_length", PRECOMPUTES, "desirable_weight", "ref_model"),
        "max_completion_length",
    ),
    OTHER_STEP,
)
"""Fields of preference training: without a word of which kind it is, they are refused."""
_SWIFT_FREEZES = {"freeze_vit": True, "freeze_aligner": True}
"""Switches of the image encoder and its projector, and their defaults (swift/arguments/tuner_args.py)."""
_SWIFT_PIXELS = ("max_pixels", "MAX_PIXELS")
"""The latter a variable that the preprocessing of Qwen-VL reads (swift/template/templates/qwen.py)."""
_VISION_CHECKPOINTS = "vit_gradient_checkpointing"
_SWIFT_IMAGES = (*_SWIFT_FREEZES, *_SWIFT_PIXELS, _VISION_CHECKPOINTS)
_RLHF = "rlhf_type"
_PREFERENCES: tuple[StepKindName, ...] = ("dpo", "kto", "orpo")
_REFUSED = _OTHER_STEPS | {
    **dict.fromkeys(
        (
            *("freeze_llm", "freeze_parameters", "freeze_parameters_regex"),
            *("freeze_parameters_ratio", "trainable_parameters", "trainable_parameters_regex"),
            "lisa_activated_layers",
        ),
        PART_OF_A_MODEL,
    ),
}
_NESTED = "use_bnb_nested_quant"
_DECOMPOSES = "use_dora"
_TUNERS = ("tuner_type", "train_type", "sft_type")
"""The names of ms-swift's field, the latest first."""
_QUANTISES, _BITS = "quant_method", "quant_bits"
_DROPOUT, _TASK = "lora_dropout", "task_type"
_LOSS, _LOSSES = "loss_type", ("nll", "dft", "chunked_nll")
"""DFT weighs the same log-probabilities; chunked_nll is nll by its name of older versions."""
_SMOOTHING = "label_smoothing_factor"
_TYPE = ("torch_dtype", "dtype")
_READ = frozenset(
    (
        *(
            _MICRO_BATCH,
            STEPS,
            _CHECKPOINTS,
            _CONFIG_FILE,
            _TRL_CONFIG_FILE,
            RECIPE,
            _PACKING,
            DEEPSPEED_FILE,
        ),
        *("fsdp", "fsdp_config", "bf16", "fp16", "num_processes", "num_gpus", "num_nodes"),
        *(_PADDING_FREE, _ADAPTERS, FOUR_BITS, EIGHT_BITS, _DECOMPOSES, SAVED_TENSORS.flag),
        *(_NESTED, _QUANTISES, _BITS, _DROPOUT, "sequence_parallel_size"),
        *(
            ACCELERATOR,
            "deepspeed_autotp_size",
            *_TUNERS,
            *_TYPE,
            *_REFUSED,
            _RLHF,
            *_OF_PREFERENCES,
        ),
    )
)


def is_trainer(fields: Mapping[str, Any]) -> bool:
    """Whether a mapping, of a YAML file or of flags, is for a script on transformers' Trainer.

    Parameters
    ----------
    fields
        By their names without dashes.
    """
    return _MICRO_BATCH in fields and (_MODEL in fields or _SWIFT_MODEL in fields)


_STAGED = re.compile(
    r"(?:^|/)scripts/(?:\w+_)?(sft|dpo|kto|orpo|cpo|bco|ppo|grpo|gspo|rloo|gkd|gold|xpo|mpo|tpo|nash_md|reward|prm|sdft|"
    r"sdpo|ssd|distillation)\w*\.py$"
)
"""Scripts of TRL and of those who keep to its names, by what they train."""


def trl_stage(line: CommandLine) -> str | None:
    """What a command of TRL trains, such as sft or dpo; None for other scripts.

    Parameters
    ----------
    line
        With the program's name: `trl sft`, or the path of a script.

    >>> trl_stage(CommandLine("accelerate launch examples/scripts/sft_vlm.py --bf16".split(), "x"))
    'sft'
    """
    for position, word in enumerate(line.words):
        script = _STAGED.search(word)
        if script is not None:
            return script[1]
        following = line.words[position + 1 : position + 2]
        if word == "trl" and following and following[0].isidentifier():
            return following[0]
    return None


def from_trainer(
    fields: dict[str, Any],
    path: Path,
    gpus: int | None = None,
    stage: str | None = None,
) -> LaunchRun:
    """The run of a script on transformers' Trainer; its cluster is not part of it.

    Parameters
    ----------
    fields
        Of a YAML file, or of a command line by `fields_of_line`.
    path
        The file, for messages and for what it names beside it.
    gpus
        Processes that it starts, where that is known.
    stage
        Of a command of TRL, by `trl_stage`.

    Raises
    ------
    InputError
        A kind of training without a price, a value of the wrong kind, or a file that is not there.
    """
    kind = None if stage is None else _kind_named(stage, f"{path}: {stage}")
    dialect = _SWIFT if _SWIFT_MODEL in fields and stage is None else _TRAINER
    of_trl = stage is not None or bool(_OF_TRL & fields.keys())
    if dialect is _TRAINER and of_trl and "max_seq_length" not in fields:
        dialect = _TRL
    if dialect is _SWIFT and gpus is None:
        gpus = _processes(section_of(fields, _SWIFT_VARIABLES, str(path)), path)
    run = _from_fields(fields, dialect, path, gpus=gpus, kind=kind)
    if stage is None and gpus is None and run.settings["framework"] == PYTORCH.name:
        return run.with_more(remarks=[UNSHARDED])
    return run


def _from_fields(
    fields: dict[str, Any],
    dialect: _Dialect,
    path: Path,
    *,
    gpus: int | None,
    kind: StepKindName | None = None,
) -> LaunchRun:
    where = str(path)
    # A kind is given with TRL's own scripts; others may be of a version that had all logits.
    of_trl = dialect is _TRL and kind is not None
    kind = _kind(fields, where, kind)
    numbers = positive_numbers(fields, {_MICRO_BATCH: dialect.micro_batch, STEPS: 1}, where)
    micro_batch, steps = numbers[_MICRO_BATCH], numbers[STEPS]
    of_all = dialect.is_swift and fields.get(STEPS) is None
    if of_all:
        # So many sequences a step (swift/trainers/arguments.py, TrainArgumentsMixin.__post_init__).
        steps = max(1, math.ceil(_SWIFT_BATCH / micro_batch / (gpus or 1)))
    run = _sharding(fields, dialect, path, (micro_batch, steps), gpus=gpus)
    run = with_synced_batches(run, fields, path)
    named = fields.get(dialect.model)
    model = None if named is None else known_model(named, path)
    adapters, remarks, unread = _adapters(fields, dialect, model, where)
    settings: dict[str, Any] = {
        "micro_batch": micro_batch,
        "precision": _half(fields, dialect, run, where),
        "recompute": _recompute(fields, dialect, run),
        "attention_kernel": _kernel(fields, dialect, where),
        "adapters": adapters,
        **kind_of_step(kind, fields),
    }
    offloaded, of_hooks = offloaded_tensors(fields, SAVED_TENSORS.flag, settings["recompute"])
    settings |= offloaded
    settings |= _longest(fields, dialect, where)
    if of_trl:
        settings |= _loss_of_trl(fields, kind, where)
    elif dialect is not _TRL and kind == TUNING and fields.get(LIGER_LOSS.flag) is True:
        # Its other kernels, which run with it, have no price: the switch is not read.
        settings["loss"] = "liger"
    if gpus is not None and "dp" not in run.settings:
        settings["gpus"] = gpus
    if of_all and gpus is None:
        settings["global_batch"] = _SWIFT_BATCH
    context = whole_number(fields, "sequence_parallel_size", where) or 1
    if context > 1:
        # Ulysses, in groups of so many ranks (swift/sequence_parallel).
        settings |= {"cp": context, "cp_comm": "a2a"}
    if of_trl and fields.get(_SMOOTHING):
        # All logits, and another pass forward for the log (trl/trainer/sft_trainer.py, compute_loss).
        unread.append(_SMOOTHING)
    unread += [*of_hooks, *_unread(fields, dialect, has_loss=of_trl and kind == TUNING)]
    trained = [name for name in unread if trains_a_part(name, str(fields.get(name, "")))]
    if trained and adapters is None:
        what = "training of other adapters, or of part of a model, has no price yet"
        raise InputError(what, where=f"{where}: {trained[0]}", value=fields[trained[0]])
    return run.with_more(
        settings,
        unread=unread,
        remarks=[_laid_out(fields, dialect), *remarks],
        model=model,
        local_batch=micro_batch * steps,
        images=_images(fields, dialect, adapters),
    )


def _images(
    fields: Mapping[str, Any], dialect: _Dialect, adapters: Mapping[str, Any] | None
) -> ImageFields:
    """What is trained of an image encoder: PEFT's adapters of every linear module are in it too."""
    if dialect.is_swift:
        has_adapters = adapters is not None
        images = image_fields(fields, _SWIFT_FREEZES, _SWIFT_PIXELS, has_adapters=has_adapters)
        said = fields.get(_VISION_CHECKPOINTS)
        is_other = said is not None and said is not fields.get(_CHECKPOINTS, True)
        if not images.frozen and (is_other or dialect is _MEGATRON_SWIFT):
            # A trained encoder is priced with the checkpoints of the layers, under Megatron of Bridge's way.
            return replace(images, parts=(*images.parts, _VISION_CHECKPOINTS))
        return images
    in_encoder = adapters is not None and ALL_LINEAR in adapters["targets"]
    return ImageFields(parts=(dialect.targets,) if in_encoder else ())


def _loss_of_trl(fields: Mapping[str, Any], kind: StepKindName, where: str) -> dict[str, str]:
    """The head of TRL's trainers, whatever shards the model; none where theirs takes all logits, or has none.

    `use_liger_kernel` changes layers alone there, and so is not read as a loss (trl/trainer/sft_trainer.py,
    SFTTrainer.__init__). Raises InputError for a loss of fine-tuning that TRL does not have.
    """
    if kind == TUNING:
        word = fields.get(_LOSS)
        if word not in (None, *_LOSSES):
            what = "is no loss of TRL's fine-tuning"
            raise InputError(what, where=f"{where}: {_LOSS}", value=word, allowed=_LOSSES)
        return {"loss": TRL_LOSS}
    loss = TRL_STEPS[kind].loss
    return {"loss": loss} if loss else {}


def _kind_named(name: str, where: str) -> StepKindName:
    """A kind of step by its name. Raises InputError for others than fine-tuning, preferences and rewards."""
    allowed: tuple[StepKindName, ...] = (TUNING, *_PREFERENCES, "reward")
    for kind in allowed:
        if name == kind:
            return kind
    raise InputError("has no price yet", where=where, value=name, allowed=allowed)


def _kind(fields: dict[str, Any], where: str, kind: StepKindName | None = None) -> StepKindName:
    """What a step does. Raises InputError for what has no price, and for part of a model."""
    if fields.get(_RLHF):
        kind = _kind_named(str(fields[_RLHF]), f"{where}: {_RLHF}")
    refused = _REFUSED if kind in _PREFERENCES else _REFUSED | _OF_PREFERENCES
    refuse_fields(fields, refused, where)
    task = fields.get(_TASK)
    if task not in (None, "causal_lm"):
        raise InputError(OTHER_STEP, where=f"{where}: {_TASK}", value=task, allowed=("causal_lm",))
    return TUNING if kind is None else kind


def _stated_lengths(fields: Mapping[str, Any], dialect: _Dialect) -> list[str]:
    return [name for name in dialect.length if fields.get(name) is not None]


def _longest(fields: dict[str, Any], dialect: _Dialect, where: str) -> dict[str, int]:
    """The longest sequence as a run file has it; empty where nothing says it."""
    names = _stated_lengths(fields, dialect)
    lengths = positive_numbers(fields, dict.fromkeys(names, 1), where)
    length = lengths[names[0]] if names else dialect.default_length
    return {} if length is None else {"seq_len": length}


def _unread(fields: dict[str, Any], dialect: _Dialect, *, has_loss: bool) -> list[str]:
    """Fields that may change the price and that nothing here reads; with a loss that of TRL is read."""
    read = {
        *((*_SWIFT_IMAGES, _SWIFT_VARIABLES) if dialect.is_swift else ()),
        *(dialect.model, *dialect.length, *dialect.attention),
        *(dialect.rank, dialect.targets, dialect.parameters),
        *([_LOSS] if has_loss else []),
    }
    return unread_keys(fields, dialect.kind, _READ | read)


def _laid_out(fields: Mapping[str, Any], dialect: _Dialect) -> str:
    """What is said of how samples lie in a micro-batch."""
    if fields.get(_PACKING) is True or "block_size" in _stated_lengths(fields, dialect):
        return PACKED
    return END_TO_END if fields.get(_PADDING_FREE) is True else PADDED


def _half(fields: Mapping[str, Any], dialect: _Dialect, run: LaunchRun, where: str) -> str:
    """The precision that a script states, its accelerate file or the type of its weights."""
    for name in ("bf16", "fp16"):
        if fields.get(name) in (True, "auto"):
            return name
    written = [str(fields.get(name) or "").rpartition(".")[2] for name in _TYPE]
    if dialect.is_swift and written[0] in ("bfloat16", "float16"):
        return "bf16" if written[0] == "bfloat16" else "fp16"
    stated = run.settings.get("precision")
    if stated is not None:
        return str(stated)
    if dialect.half and fields.get("bf16") is None:
        return "bf16"
    return half_precision(dict(fields), where)


def _recompute(fields: Mapping[str, Any], dialect: _Dialect, run: LaunchRun) -> str:
    said = fields.get(_CHECKPOINTS)
    if said is None and "recompute" in run.settings and run.settings["recompute"] != "none":
        return str(run.settings["recompute"])
    on = dialect.recomputes if said is None else said is True
    return "full" if on or run.settings.get("recompute") == "full" else "none"


def _kernel(fields: dict[str, Any], dialect: _Dialect, where: str) -> str:
    name = next((name for name in dialect.attention if fields.get(name)), dialect.attention[0])
    return kernel_of(fields, name, _KERNELS, where)


# How the ranks of a script share the model: DeepSpeed, FSDP or neither, in a file or by name.


_PRESETS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3_offload": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}
"""ms-swift's own files by the word for them (swift/config/*.json)."""
_PRESET_BUCKET = 200_000_000
_FSDP_WORDS = "full_shard auto_wrap"
_FSDP_PRESET: dict[str, Any] = {
    "fsdp_config": {"reshard_after_forward": True, "activation_checkpointing": True}
}
"""ms-swift's `--fsdp fsdp2` (swift/config/fsdp2.json); other words are files (sft_args.py, _init_fsdp)."""
_BY_DEEPSPEED = "deepspeed_config"
_TRL_NODE: dict[str, Any] = {"mixed_precision": "bf16", "num_processes": 8}
_TRL_FSDP: dict[str, Any] = {"fsdp_activation_checkpointing": False, "fsdp_offload_params": False}
_TRL_PRESETS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": _TRL_NODE | {_BY_DEEPSPEED: {"zero_stage": stage}} for stage in (1, 2, 3)},
    "fsdp1": _TRL_NODE | {"fsdp_config": _TRL_FSDP | {"fsdp_reshard_after_forward": "FULL_SHARD"}},
    _SECOND_FSDP: _TRL_NODE | {"fsdp_config": _TRL_FSDP | {"fsdp_reshard_after_forward": True}},
    "multi_gpu": _TRL_NODE,
    "single_gpu": _TRL_NODE | {"num_processes": 1},
}
"""TRL's own files by the word for them (trl/accelerate_configs/*.yaml); single_gpu starts one process,
whatever its file says, for its kind of distribution is none."""
_DEVICES = ("offload_optimizer", "offload_param")


def _sharding(
    fields: dict[str, Any],
    dialect: _Dialect,
    path: Path,
    batch: tuple[int, int],
    *,
    gpus: int | None,
) -> LaunchRun:
    where = str(path)
    by_file = fields.get(_CONFIG_FILE) or fields.get(_TRL_CONFIG_FILE)
    named = fields.get(DEEPSPEED_FILE)
    of_trainer = {MICRO_BATCH: batch[0], STEPS: batch[1]}
    tensor = whole_number(fields, "deepspeed_autotp_size", where)
    if isinstance(named, dict) or named in _PRESETS:
        document = named if isinstance(named, dict) else _preset(str(named))
        if tensor is not None:
            document = {**document, "tensor_parallel": {"autotp_size": tensor}}
        return trainers_deepspeed(document, of_trainer, f"{where}: {DEEPSPEED_FILE}")
    if dialect.is_swift and fields.get("fsdp"):
        by_name = fields["fsdp"] == _SECOND_FSDP
        document = (
            _FSDP_PRESET if by_name else read_mapping(file_beside(fields["fsdp"], path, "fsdp"))
        )
        return fully_sharded({"fsdp": _FSDP_WORDS} | document, dialect.kind, where)
    if by_file is None or named is not None:
        return sharded(fields, dialect.kind, path, batch)
    document, source = dict(_TRL_PRESETS.get(str(by_file), {})), path
    if not document:
        source = file_beside(by_file, path, _CONFIG_FILE)
        document = read_mapping(source, MAX_FILE_BYTES)
    if gpus is not None:
        # Flags of accelerate launch win over its file.
        document["num_processes"] = gpus
    return _accelerated(document, source, of_trainer)


def _preset(name: str) -> dict[str, Any]:
    zero: dict[str, Any] = {**_PRESETS[name], "overlap_comm": False}
    if zero["stage"] < 3:
        zero[BUCKET] = _PRESET_BUCKET
    return {"zero_optimization": zero}


_SECTIONS = (_BY_DEEPSPEED, "fsdp_config", "parallelism_config")
"""Of accelerate's file: one of them is heeded, by the kind of distribution."""


def _accelerated(document: dict[str, Any], path: Path, of_trainer: dict[str, Any]) -> LaunchRun:
    """What accelerate's file says: DeepSpeed, FSDP with further axes, or plain data parallelism."""
    where = str(path)
    if is_accelerate(document):
        return from_accelerate(document, where)
    run = PLAIN
    plugin = document.get(_BY_DEEPSPEED)
    if isinstance(plugin, dict) and document.get("distributed_type", "DEEPSPEED") == "DEEPSPEED":
        run = _by_plugin(plugin, path, of_trainer)
    settings: dict[str, Any] = {}
    gpus = whole_number(document, "num_processes", where)
    if gpus is not None:
        settings["dp"] = gpus // int(run.settings.get("tp", 1))
    if document.get("mixed_precision") in ("bf16", "fp16"):
        settings["precision"] = document["mixed_precision"]
    unread = unread_keys(document, "accelerate", ("num_processes", "mixed_precision", *_SECTIONS))
    return run.with_more(settings, unread=unread)


def _by_plugin(plugin: dict[str, Any], path: Path, of_trainer: dict[str, Any]) -> LaunchRun:
    """DeepSpeed by the section of accelerate's file (accelerate/utils/dataclasses.py, DeepSpeedPlugin)."""
    where = f"{path}: {_BY_DEEPSPEED}"
    if plugin.get("deepspeed_config_file"):
        file = file_beside(plugin["deepspeed_config_file"], path, "deepspeed_config_file")
        return trainers_deepspeed(file, of_trainer, str(file))
    zero: dict[str, Any] = {"stage": whole_number(plugin, "zero_stage", where) or 0}
    for name in _DEVICES:
        device = plugin.get(f"{name}_device")
        if device not in (None, "none"):
            zero[name] = {"device": device}
    run = trainers_deepspeed({"zero_optimization": zero}, of_trainer, where)
    read = ("zero_stage", *(f"{name}_device" for name in _DEVICES), STEPS)
    return run.with_more(unread=unread_keys(plugin, "accelerate", read, _BY_DEEPSPEED))


# Adapters.


def _adapters(
    fields: dict[str, Any], dialect: _Dialect, model: str | None, where: str
) -> tuple[dict[str, Any] | None, list[str], list[str]]:
    """Adapters of a script, None where every parameter is trained; remarks; and what is not read."""
    # Bits of a frozen weight: a switch counts before a number. Raises InputError for others of few bits.
    said = bits_of_base(fields, _BITS, _QUANTISES, where)
    switched = loaded_bits(fields, where)
    bits = said if switched == 16 else switched
    if not _trains_adapters(fields, dialect, where):
        if bits < 16:
            what = f"needs adapters: weights of {bits} bits are not trained themselves"
            raise InputError(what, where=f"{where}: {FOUR_BITS if bits == 4 else EIGHT_BITS}")
        return None, [], []
    named = fields.get(dialect.model)
    refuse_narrow(named, f"{where}: {dialect.model}")
    defaults = {dialect.rank: dialect.default_rank}
    rank = positive_numbers(fields, defaults, where)[dialect.rank]
    usual = (ALL_LINEAR,) if dialect.is_swift else ("q_proj", "v_proj")
    names = dialect.targets, where, usual, dialect.parameters
    targets, unread = adapter_targets(fields, *names)
    remarks = [] if dialect.is_swift or fields.get(dialect.targets) else [PEFT_DEFAULT]
    if not dialect.is_swift and bits == 4 and not fields.get(_NESTED):
        unread.append(_NESTED)
    remarks += remarks_on_experts(model, targets)
    adapters, of_dropout = adapters_of(
        fields, _DECOMPOSES, bits, rank, targets, usual_dropout=dialect.dropout
    )
    return adapters, remarks, [*unread, *of_dropout]


def _trains_adapters(fields: Mapping[str, Any], dialect: _Dialect, where: str) -> bool:
    """Whether adapters are trained. Raises InputError for other kinds than LoRA, or where it is not clear."""
    if dialect.is_swift:
        name = next((name for name in _TUNERS if name in fields), _TUNERS[0])
        tuner = fields.get(name, "lora")
        check_choice(tuner, ("lora", "full"), f"{where}: {name}", "has no price yet")
        return bool(tuner == "lora")
    if _ADAPTERS in fields:
        return fields[_ADAPTERS] is True
    for name in (dialect.rank, dialect.targets):
        if fields.get(name) is not None:
            what = f"is read beside {_ADAPTERS}: true, as TRL has it; nothing is said of it"
            raise InputError(what, where=f"{where}: {name}", value=fields[name])
    return False


# `megatron sft` of ms-swift: Megatron's arguments with underscores, switches with values, and other defaults.


_MEGATRON_DEFAULTS: dict[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": _SWIFT_BATCH,
    "recompute_granularity": "selective",
    "use_distributed_optimizer": True,
    "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1,
    "moe_grouped_gemm": True,
    "cross_entropy_loss_fusion": True,
    "attention_backend": "flash",
    SWIFT_SWITCHES["overlap.pp"]: True,
    SWIFT_SWITCHES["rope_fusion"]: False,
}
_MEGATRON_SWIFT = replace(_SWIFT, kind="megatron-swift")
_MEGATRON_PROGRAM = "megatron"
_PROGRAMS = {"swift": ("sft", "pt", "rlhf"), _MEGATRON_PROGRAM: ("sft", "pt", "rlhf")}
_SCRIPTS = re.compile(r"swift/cli/(_megatron/)?(sft|pt|rlhf)\.py")


class SwiftCommand(NamedTuple):
    """A training command of ms-swift in a script."""

    line: CommandLine
    """Its words, and those before it."""
    by_megatron: bool
    stage: str
    """sft, pt or rlhf."""


def swift_command(line: CommandLine) -> SwiftCommand | None:
    """The first `swift sft` or `megatron sft` of a script, or another stage; None where there is none.

    Parameters
    ----------
    line
        Of a script that may hold several commands.

    >>> found = swift_command(CommandLine("swift sft --model x && swift infer --stream true".split(), "x"))
    >>> found.line.words[-1], found.by_megatron
    ('&&', False)
    """
    words = line.words
    for position, word in enumerate(words):
        script = _SCRIPTS.search(word)
        following = words[position + 1] if position + 1 < len(words) else ""
        if script is None and following not in _PROGRAMS.get(word, ()):
            continue
        later = range(position + 2, len(words))
        end = next((index for index in later if words[index] in _PROGRAMS), len(words))
        by_megatron = word == _MEGATRON_PROGRAM or (script is not None and script[1] is not None)
        stage = following if script is None else script[2]
        return SwiftCommand(line.until(end), by_megatron, stage)
    return None


def swift_fields(command: SwiftCommand, path: Path) -> dict[str, Any]:
    """Flags of a training command of ms-swift by their names, behind those of the file that it names first.

    Raises InputError where that file is not there, or is no mapping.

    Parameters
    ----------
    command
        By `swift_command`.
    path
        Of the script, beside which the file may lie.
    """
    named = recipe_named(command.line)
    of_file = (
        {} if named is None else read_mapping(file_beside(named, path, RECIPE), MAX_FILE_BYTES)
    )
    return of_file | fields_of_line(command.line)


def _processes(variables: dict[str, Any], path: Path) -> int | None:
    """Processes that torchrun starts by a file's section of variables; None where it does not say."""
    if variables.get(_EACH_NODE) is None:
        return None
    where = f"{path}: {_SWIFT_VARIABLES}"
    return math.prod(positive_numbers(variables, {_EACH_NODE: 1, "NNODES": 1}, where).values())


def from_swift(command: SwiftCommand, path: Path, model: ModelSpec | None = None) -> LaunchRun:
    """The run of a training command of ms-swift.

    Parameters
    ----------
    command
        By `swift_command`.
    path
        The script.
    model
        What is trained, where the caller knows; the command's own name for it counts otherwise.

    Raises
    ------
    InputError
        A kind of training without a price, a value of the wrong kind, or a model that is not known and whose
        layers `megatron sft` splits.
    """
    fields, gpus = swift_fields(command, path), launched_gpus(command.line)
    variables = section_of(fields, _SWIFT_VARIABLES, str(path))
    gpus = _processes(variables, path) if gpus is None else gpus
    if command.stage == "rlhf":
        fields.setdefault(_RLHF, "dpo")
    pixels = command.line.variable(_SWIFT_PIXELS[-1]) or variables.get(_SWIFT_PIXELS[-1])
    if pixels is not None:
        fields[_SWIFT_PIXELS[-1]] = pixels
    if command.by_megatron:
        return _by_megatron(fields, path, gpus, model)
    visible = str(command.line.variable("CUDA_VISIBLE_DEVICES") or "")
    if gpus is None and _CONFIG_FILE not in fields and "," in visible:
        what = (
            "spreads the layers of one process over several GPUs (device_map), which has no price"
        )
        where = f"{path}: {_EACH_NODE}"
        raise InputError(f"is not set: it {what}", where=where)
    alone = 1 if gpus is None and _CONFIG_FILE not in fields else gpus
    return _from_fields(fields, _SWIFT, path, gpus=alone)


def _by_megatron(
    fields: dict[str, Any], path: Path, gpus: int | None, model: ModelSpec | None
) -> LaunchRun:
    where = str(path)
    kind = _kind(fields, where)
    named = fields.get(_SWIFT_MODEL)
    name = None if named is None else known_model(named, path)
    if model is None:
        if name is None:
            what = "is not known: say --with model=..., a name or a config.json"
            raise InputError(what, where=f"{where}: {_SWIFT_MODEL}", value=named)
        model = read_model(name)
    tuned = {_TUNERS[0]: "full"} | {key: fields[key] for key in fields if key in _TUNERS}
    adapters, remarks, of_adapters = _adapters(fields | tuned, _MEGATRON_SWIFT, name, where)
    lengths = [fields[name] for name in _SWIFT.length if fields.get(name)]
    apart = {*_SWIFT_IMAGES, SWIFT_EXTRA, _DEEPEP}
    of_megatron = {name: fields[name] for name in fields if name not in apart}
    of_megatron |= _handed_on(fields, where)
    words = _as_megatron(_MEGATRON_DEFAULTS | of_megatron | {"seq_length": [*lengths, 1][0]})
    run = from_megatron(CommandLine(words, where), model, sized=False)
    settings = {**run.settings, "framework": MEGATRON.name, "adapters": adapters}
    settings |= kind_of_step(kind, fields)
    if not lengths:
        # The longest that the model takes: whoever reads the file says how long samples are.
        del settings["seq_len"]
    if gpus is not None:
        settings["gpus"] = gpus
    read = {_SWIFT_MODEL, *_SWIFT.length, *_READ, _SWIFT.rank, _SWIFT.targets, *_MEGATRON_DEFAULTS}
    read |= SWIFT_EXTRAS.keys() | SWIFT_EXTRAS.values()
    unread = [
        name
        for name in (flag.removeprefix("--").replace("-", "_") for flag in run.unread)
        if name not in read and not is_harmless(_MEGATRON_SWIFT.kind, name, str(fields.get(name)))
    ]
    laid_out = _laid_out({_PADDING_FREE: True} | fields, _MEGATRON_SWIFT)
    return replace(
        run,
        settings=settings,
        model=name,
        unread=(*unread, *of_adapters),
        remarks=(*run.remarks, laid_out, *remarks),
        images=_images(fields, _MEGATRON_SWIFT, adapters),
    )


_DEEPEP = "moe_enable_deepep"


def _handed_on(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments of Megatron for what ms-swift says in other words, or hands on to its configuration."""
    flags: dict[str, Any] = {}
    if fields.get(_DEEPEP) is True:
        flags["moe_flex_dispatcher_backend"] = "deepep"
    extra = section_of(fields, SWIFT_EXTRA, where)
    names = {name: MEGATRON_ARGUMENTS[word].flag for word, name in SWIFT_EXTRAS.items()}
    return flags | {names.get(name, name).removeprefix("--"): extra[name] for name in extra}


def _as_megatron(fields: Mapping[str, Any]) -> list[str]:
    """Words of Megatron's own command line."""
    words = [
        MEGATRON_ARGUMENTS[word].flag for word, name in SWIFT_SWITCHES.items() if not fields[name]
    ]
    for name, value in fields.items():
        if value is None or value is False or name in (*_SWIFT.length, *SWIFT_SWITCHES.values()):
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return words

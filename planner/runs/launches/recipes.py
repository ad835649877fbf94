"""Recipes of frameworks as runs: YAML of torchtune, NeMo-RL, nanotron and LLaMA-Factory's second trainer, and
verl's overrides.

Of reinforcement learning the update of the actor is read: a step over samples that are there already.
Names and defaults are those of torchtune bd2a0fc7c (recipes/*_finetune_*.py), of NeMo-RL 7ea279abf
(examples/configs, nemo_rl/models/policy), of nanotron 2411b022a (src/nanotron/config), of verl b178a3cd5
(verl/trainer/config) and of LLaMA-Factory ff6d4d12e (src/llamafactory/v1/config).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.costmodel.layout import AXES
from meshwright.documents import parse_mapping, read_text
from meshwright.errors import InputError
from meshwright.frameworks.deepspeed import DEEPSPEED, TRAINER_OPTIMIZERS
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.frameworks.megatron import MEGATRON
from meshwright.model_specs.adapters import ALL_LINEAR, adapter_method
from meshwright.model_specs.huggingface import model_from_huggingface
from meshwright.planner.runs.launches.command_line import CommandLine
from meshwright.planner.runs.launches.finetuning import (
    DROPPED,
    PACKED,
    PADDED,
    PART_OF_A_MODEL,
    PLAIN,
    STEPS,
    TUNING,
    ReadDeepSpeed,
    adapted_modules,
    adapters_mapping,
    file_beside,
    known_model,
    remarks_on_experts,
)
from meshwright.planner.runs.launches.launch_run import LaunchRun, is_harmless
from meshwright.planner.runs.launches.trainers import (
    END_TO_END,
    OTHER_STEP,
    joined_sums,
    script_value,
)
from meshwright.planner.runs.run_file import MAX_FILE_BYTES

ACTOR = (
    "the update of the actor alone is priced: not generation, the reference's and the old log-probabilities, "
    "a critic, or copies between host and GPU"
)
_DEEPEST = 12
MOST_LETTERS = 2_000
"""Of a value once references in it are put in."""


class _Leaves:
    """Values of a nested document by their path, `section.key`; what is asked for counts as read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = dict(values)
        self.where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or a default where it is absent or null."""
        self._read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def on(self, name: str, *, default: bool = False) -> bool:
        return self.get(name, default) is True

    def first(self, names: Iterable[str], default: Any = None) -> Any:
        """The first of some values that is there; all count as read."""
        there = [self.get(name) for name in names]
        return next((value for value in there if value is not None), default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises InputError for anything else, and where there is none."""
        value = self.get(name, default)
        if value is None:
            raise InputError("is needed", where=f"{self.where}: {name}")
        if type(value) is not int or value < 1:
            what = "must be a whole number of at least 1"
            raise InputError(what, where=f"{self.where}: {name}", value=value)
        return value

    def degrees(self, section: str, axes: Mapping[str, str]) -> dict[str, Any]:
        """Degrees of the axes by the fields of a section that say them, 1 where they do not."""
        return {axis: self.count(f"{section}{field}", 1) for field, axis in axes.items()}

    def refuse(self, what: str, *names: str) -> None:
        """Raises InputError for the first of some values that is there and not off."""
        for name in names:
            if self.get(name):
                raise InputError(what, where=f"{self.where}: {name}", value=self.values[name])

    def has_section(self, name: str) -> bool:
        return name in self.values or any(key.startswith(f"{name}.") for key in self.values)

    def unread(self, kind: str) -> list[str]:
        """Paths that nobody has asked for and that may change the price."""
        return [
            name
            for name, value in self.values.items()
            # A null or an empty section leaves a field to its default, as if it were not there.
            if value not in (None, {}, [])
            and name not in self._read
            and not is_harmless(kind, name, _word(value))
        ]


def _word(value: object) -> str:
    return "none" if value in (None, [], {}, "") else str(value)


def _leaves(document: Mapping[str, Any], place: str = "", depth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, dict) and value and depth < _DEEPEST:
            found |= _leaves(value, name, depth + 1)
        else:
            found[name] = value
    return found


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_PRODUCT = re.compile(r"\$\{mul: *(\d{1,12}), *(\d{1,12})\}")


def _with_references(values: dict[str, Any]) -> dict[str, Any]:
    """Values with what `${a.b}` and `${mul:2, 3}` stand for, as OmegaConf and NeMo-RL resolve them."""
    found = dict(values)
    for _ in range(_DEEPEST):
        texts = {n: v for n, v in found.items() if isinstance(v, str) and "${" in v}
        if not texts:
            break
        found |= {name: _resolved(text, found) for name, text in texts.items()}
    return found


def _resolved(text: str, values: Mapping[str, Any]) -> Any:
    whole = _REFERENCE.fullmatch(text)
    if whole is not None:
        return values.get(whole[1])
    product = _PRODUCT.fullmatch(text)
    if product is not None:
        return int(product[1]) * int(product[2])
    return _REFERENCE.sub(lambda name: str(values.get(name[1]))[:MOST_LETTERS], text)[:MOST_LETTERS]


def _lora(rank: int, said: object, place: str) -> tuple[dict[str, Any], bool]:
    """Adapters of some rank, of all linear modules where none is named, and whether all names are known."""
    if said in (None, [], ALL_LINEAR, [ALL_LINEAR]):
        return adapters_mapping("lora", rank, (ALL_LINEAR,)), True
    targets, understood = adapted_modules(said)
    if not targets:
        raise InputError("names no matrix of a layer that is known", where=place, value=said)
    return adapters_mapping("lora", rank, targets), understood


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
    leaves = _Leaves(_with_references(_leaves(document)), where)
    if not leaves.has_section("optimizer"):
        raise InputError("is not there: nothing is trained", where=f"{where}: optimizer")
    loss = str(leaves.get(_LOSS, ""))
    if not loss.startswith(("torchtune.modules.loss.", "torch.nn.")):
        raise InputError(OTHER_STEP, where=f"{where}: {_LOSS}", value=loss)
    for name in ("teacher_model", "policy_model"):
        if leaves.has_section(name):
            raise InputError(OTHER_STEP, where=f"{where}: {name}")
    for name in ("encoder_trainable", "decoder_trainable", "fusion_trainable"):
        leaves.refuse(PART_OF_A_MODEL, f"model.{name}")
    builder = str(leaves.get(_MODEL))
    found = _BUILDER.fullmatch(builder)
    model = _tuned_model(found, path)
    adapters, unread = _tuned_adapters(leaves, builder, where)
    micro_batch, steps = (
        leaves.count("batch_size", 1),
        leaves.count("gradient_accumulation_steps", 1),
    )
    settings: dict[str, Any] = {
        "framework": FSDP2.name,
        "zero_stage": 3 if leaves.on("fsdp_reshard_after_forward", default=True) else 2,
        "overlap": {"dp": True},
        **leaves.degrees("", _TUNE_AXES),
        "precision": "fp16" if leaves.get("dtype") == "fp16" else "bf16",
        "recompute": "full" if leaves.on("enable_activation_checkpointing") else "none",
        "adapters": adapters,
    }
    settings["micro_batch"] = micro_batch
    settings["kind"] = TUNING
    if leaves.on("enable_activation_offloading"):
        if settings["recompute"] == "full":
            settings["offload_modules"] = ["saved_tensors"]
        else:
            unread.append("enable_activation_offloading")
    replicas = leaves.count("data_parallel_replicate_dim", 1)
    if replicas > 1:
        settings["shard_groups"] = replicas
    if leaves.first(("fsdp_cpu_offload", "fsdp.cpu_offload")) is True:
        settings["optimizer_offload"] = 100
    length = leaves.get("tokenizer.max_seq_len")
    if length is not None:
        settings["seq_len"] = leaves.count("tokenizer.max_seq_len")
    optimizer = _TUNE_OPTIMIZERS.get(str(leaves.values.get(_OPTIMIZER)))
    if optimizer is not None:
        settings["optimizer"] = optimizer
        leaves.get(_OPTIMIZER)
    unread += [] if adapters is not None else [PURE_HALF]
    # Both torchtune's own losses take the logits in pieces.
    unread += [_LOSS] if loss.startswith("torchtune.") else []
    dropped = (DROPPED,) if adapters is not None and leaves.get("model.lora_dropout") else ()
    return LaunchRun(
        settings=settings,
        model=model,
        local_batch=micro_batch * steps,
        unread=(*unread, *leaves.unread("torchtune")),
        remarks=(PACKED if leaves.on("dataset.packed") else PADDED, *dropped),
    )


def _tuned_model(found: re.Match[str] | None, path: Path) -> str | None:
    """The catalog's name of a model by torchtune's builder of it; None where the catalog has none such."""
    if found is None:
        return None
    numbers, family = found["numbers"].split("_"), found["family"]
    splits = ((".".join(numbers[:end]), ".".join(numbers[end:])) for end in range(1, len(numbers)))
    names = (f"{family}{dash}{v}-{size}b" for v, size in splits for dash in ("", "-"))
    return next((model for name in names if (model := known_model(name, path)) is not None), None)


def _tuned_adapters(
    leaves: _Leaves, builder: str, where: str
) -> tuple[dict[str, Any] | None, list[str]]:
    """Adapters of a builder such as lora_llama3_8b, and what of them is not read."""
    modules, rank = leaves.get("model.lora_attn_modules"), leaves.get("model.lora_rank")
    of_mlp = leaves.on("model.apply_lora_to_mlp")
    if "lora_" not in builder:
        return None, []
    if rank is None:
        raise InputError("is needed", where=f"{where}: model.lora_rank")
    said = [_OUTPUT.get(str(name), str(name)) for name in modules or []]
    said += _MLP if of_mlp else ()
    place = f"{where}: model.lora_attn_modules"
    targets, understood = adapted_modules(said)
    if not targets:
        raise InputError("names no matrix of a layer that is known", where=place, value=modules)
    narrow = "qlora_" in builder or leaves.on("model.quantize_base")
    unread = [] if understood else ["model.lora_attn_modules"]
    decomposed = leaves.on("model.use_dora")
    method = adapter_method(4 if narrow else 16, decomposed=decomposed)
    return adapters_mapping(method, leaves.count("model.lora_rank"), targets), unread


# NeMo-RL.


MEGATRON_AXES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "context_parallel_size": "cp",
}
"""Megatron's fields by axis, as NeMo-RL and verl take them over."""
_POLICY = "policy"
_DTENSOR, _OF_MEGATRON = f"{_POLICY}.dtensor_cfg", f"{_POLICY}.megatron_cfg"
_DEFAULTS = "defaults"
_UPDATES = ("grpo", "ppo", "gdpo")
_PAIRS = "dpo"
_OTHER_SECTIONS = ("rm", "distillation", "on_policy_distillation", "xtoken")
_MOST_PARENTS = 10


def is_nemo_rl(document: Mapping[str, Any]) -> bool:
    """Whether a mapping is a configuration of NeMo-RL, or what changes in one."""
    policy = document.get(_POLICY)
    names = ("model_name", "dtensor_cfg", "megatron_cfg", "train_global_batch_size")
    of_policy = isinstance(policy, dict) and any(name in policy for name in names)
    parents = _listed(document.get(_DEFAULTS))
    return of_policy or any(str(name).endswith((".yaml", ".yml")) for name in parents)


def from_nemo_rl(document: dict[str, Any], path: Path) -> LaunchRun:
    """The run of a configuration of NeMo-RL: fine-tuning, or the update of an actor.

    Parameters
    ----------
    document
        Of a YAML file; what it names under `defaults` is read with it.
    path
        The file.

    Raises
    ------
    InputError
        Another step, a file that is not there, or a value of the wrong kind.
    """
    where = str(path)
    whole = _with_parents(document, path)
    leaves = _Leaves(_with_references(_leaves(whole)), where)
    for name in _OTHER_SECTIONS:
        if whole.get(name):
            raise InputError(OTHER_STEP, where=f"{where}: {name}")
    frozen = [name for name in leaves.values if name.endswith("freeze_language_model")]
    leaves.refuse(PART_OF_A_MODEL, *frozen)
    by_megatron = leaves.on(f"{_OF_MEGATRON}.enabled")
    other = leaves.on(f"{_DTENSOR}.enabled", default=not by_megatron)
    if by_megatron and other:
        raise InputError("is on beside dtensor_cfg", where=f"{where}: {_OF_MEGATRON}.enabled")
    if whole.get(_PAIRS) and not by_megatron:
        what = "has no price without Megatron: its reference waits in the host's memory"
        raise InputError(what, where=f"{where}: {_PAIRS}")
    named = leaves.get(f"{_POLICY}.model_name")
    model = None if named is None else known_model(named, path)
    read = _by_megatron if by_megatron else _by_dtensor
    settings, unread = read(leaves, where)
    settings |= {
        "global_batch": leaves.count(f"{_POLICY}.train_global_batch_size"),
        "micro_batch": leaves.count(f"{_POLICY}.train_micro_batch_size"),
        "seq_len": leaves.count(f"{_POLICY}.max_total_sequence_length"),
        "gpus": _training_gpus(leaves),
        "precision": settings.get("precision", _half(leaves, where)),
    }
    settings["kind"] = _PAIRS if whole.get(_PAIRS) else TUNING
    if whole.get(_PAIRS) and settings["adapters"] is None:
        # nemo_rl/models/policy/workers, use_reference_model: weights are exchanged with those on the host.
        settings["reference"] = "offloaded"
    joined = ("sequence_packing", "dynamic_batching")
    laid_out = [leaves.on(f"{_POLICY}.{name}.enabled") for name in joined]
    remarks: list[str] = [END_TO_END if any(laid_out) else PADDED]
    remarks += [ACTOR] if any(whole.get(name) for name in _UPDATES) else []
    adapters = settings["adapters"]
    if adapters is not None:
        remarks += remarks_on_experts(model, adapters["targets"])
    off = f"{_DTENSOR}." if by_megatron else f"{_OF_MEGATRON}."
    unread += [name for name in leaves.unread("nemo-rl") if not name.startswith(off)]
    return LaunchRun(
        settings=settings,
        model=model,
        unread=tuple(unread),
        remarks=tuple(remarks),
    )


def _with_parents(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """A configuration with those that it changes under it, the first of a list the furthest."""
    whole = {key: value for key, value in document.items() if key != _DEFAULTS}
    named, place = document.get(_DEFAULTS), path
    for _ in range(_MOST_PARENTS):
        names = _listed(named)
        if not names:
            return whole
        found = file_beside(names[-1], place, _DEFAULTS)
        parent = parse_mapping(read_text(found, MAX_FILE_BYTES), str(found))
        named, place = [*names[:-1], *_listed(parent.pop(_DEFAULTS, None))], found
        whole = _over(parent, whole)
    raise InputError(
        f"more than {_MOST_PARENTS} files under one another", where=f"{path}: {_DEFAULTS}"
    )


def _listed(named: object) -> list[Any]:
    if named is None:
        return []
    return list(named) if isinstance(named, list) else [named]


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """One mapping over another, section by section; `_override_: true` replaces the section."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and not value.get("_override_"):
            merged[key] = _over(inner, value)
        else:
            merged[key] = value
    return merged


def _half(leaves: _Leaves, where: str) -> str:
    said = leaves.get(f"{_POLICY}.precision", "bfloat16")
    if said not in ("bfloat16", "float16"):
        what = "training in 32 bits has no price"
        raise InputError(what, where=f"{where}: {_POLICY}.precision", value=said)
    return "bf16" if said == "bfloat16" else "fp16"


def _training_gpus(leaves: _Leaves) -> int:
    """GPUs of the actor: all of the cluster, but those that generate alone."""
    each, nodes = leaves.count("cluster.gpus_per_node", 1), leaves.count("cluster.num_nodes", 1)
    apart = f"{_POLICY}.generation.colocated"
    if leaves.on(f"{apart}.enabled", default=True) or not leaves.has_section(
        f"{_POLICY}.generation"
    ):
        return each * nodes
    taken = leaves.get(f"{apart}.resources.num_nodes") or 0
    of_node = leaves.get(f"{apart}.resources.gpus_per_node") or 0
    left = each - of_node if nodes == 1 else each * (nodes - taken)
    return max(1, left)


def _by_dtensor(leaves: _Leaves, where: str) -> tuple[dict[str, Any], list[str]]:
    """FSDP2 with tensor and context parallelism, and adapters."""
    unread = []
    settings: dict[str, Any] = {
        "framework": FSDP2.name,
        "zero_stage": 3,
        "overlap": {"dp": True},
        **leaves.degrees(
            f"{_DTENSOR}.", {"tensor_parallel_size": "tp", "context_parallel_size": "cp"}
        ),
        "recompute": "full" if leaves.on(f"{_DTENSOR}.activation_checkpointing") else "none",
        "adapters": None,
    }
    replicas = leaves.count(f"{_DTENSOR}.dp_replicate_size", 1)
    if replicas > 1:
        settings["shard_groups"] = replicas
    if leaves.on(f"{_DTENSOR}.cpu_offload"):
        settings["optimizer_offload"] = 100
    lora = f"{_DTENSOR}.lora_cfg"
    if leaves.on(f"{lora}.enabled"):
        named = leaves.get(f"{lora}.target_modules")
        said = ALL_LINEAR if leaves.on(f"{lora}.match_all_linear", default=True) else named
        place = f"{where}: {lora}.target_modules"
        settings["adapters"], understood = _lora(leaves.count(f"{lora}.dim", 8), said, place)
        unread += [] if understood else [f"{lora}.target_modules"]
        unread += [
            f"{lora}.{name}"
            for name in ("exclude_modules", "dropout", "use_triton")
            if leaves.get(f"{lora}.{name}")
        ]
    return settings, unread


def _by_megatron(leaves: _Leaves, where: str) -> tuple[dict[str, Any], list[str]]:
    """Megatron's degrees, recomputation, optimizer and adapters."""
    unread = []
    reduces = f"{_OF_MEGATRON}.distributed_data_parallel_config"
    overlaps = leaves.on(f"{reduces}.overlap_grad_reduce")
    leaves.get(f"{reduces}.overlap_param_gather")
    settings: dict[str, Any] = {
        "framework": MEGATRON.name,
        "zero_stage": 1 if leaves.on(f"{_OF_MEGATRON}.optimizer.use_distributed_optimizer") else 0,
        "overlap": {"dp": overlaps},
        **leaves.degrees(f"{_OF_MEGATRON}.", MEGATRON_AXES),
        "sequence_parallel": leaves.on(f"{_OF_MEGATRON}.sequence_parallel"),
        "adapters": None,
    }
    settings["gradient_dtype"] = "fp32" if leaves.on(f"{reduces}.grad_reduce_in_fp32") else "bf16"
    settings["recompute"] = "none"
    granularity = leaves.get(f"{_OF_MEGATRON}.recompute_granularity", "full")
    modules = leaves.get(f"{_OF_MEGATRON}.recompute_modules")
    if leaves.on(f"{_OF_MEGATRON}.activation_checkpointing"):
        settings["recompute"] = granularity
        if granularity == "selective":
            settings["recompute_modules"] = modules or ["core_attn"]
    dispatcher = leaves.get(f"{_OF_MEGATRON}.moe_token_dispatcher_type", "alltoall")
    deep = leaves.on(f"{_OF_MEGATRON}.moe_enable_deepep")
    if dispatcher in ("alltoall", "allgather") and not deep:
        settings["moe_dispatch"] = dispatcher
    else:
        settings["moe_dispatch"] = "deepep"
    share = leaves.get(f"{_OF_MEGATRON}.optimizer.optimizer_offload_fraction", 1.0)
    if leaves.on(f"{_OF_MEGATRON}.optimizer.optimizer_cpu_offload") and share:
        settings["optimizer_offload"] = round(100 * float(share))
    fp8 = f"{_OF_MEGATRON}.fp8_cfg"
    recipe = leaves.get(f"{fp8}.fp8_recipe", "delayed")
    parameters = leaves.on(f"{fp8}.fp8_param")
    if leaves.on(f"{fp8}.enabled"):
        settings |= {"precision": "fp8", "fp8_recipe": recipe, "fp8_params": parameters}
    peft = f"{_OF_MEGATRON}.peft"
    if leaves.on(f"{peft}.enabled"):
        place = f"{where}: {peft}.target_modules"
        said = leaves.get(f"{peft}.target_modules")
        settings["adapters"], understood = _lora(leaves.count(f"{peft}.dim", 8), said, place)
        unread += [] if understood else [f"{peft}.target_modules"]
        unread += [
            f"{peft}.{name}"
            for name in ("exclude_modules", "dropout")
            if leaves.get(f"{peft}.{name}")
        ]
    return settings, unread


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
    leaves = _Leaves(_leaves(document), where)
    degrees = leaves.degrees("parallelism.", _NANOTRON_AXES)
    micro_batch = leaves.count("tokens.micro_batch_size")
    steps = leaves.count("tokens.batch_accumulation_per_replica", 1)
    mode = str(leaves.get("parallelism.tp_mode", "ALL_REDUCE")).upper()
    dtype = leaves.get("model.dtype", "bfloat16")
    if dtype not in ("bfloat16", "float16"):
        what = "training in 32 bits has no price"
        raise InputError(what, where=f"{where}: model.dtype", value=dtype)
    zero = leaves.get("optimizer.zero_stage", 0)
    sums = leaves.on("optimizer.accumulate_grad_in_fp32", default=True)
    settings: dict[str, Any] = {
        **degrees,
        "framework": "nanotron",
        "seq_len": leaves.count("tokens.sequence_length"),
        "global_batch": micro_batch * steps * degrees["dp"],
        "precision": "bf16" if dtype == "bfloat16" else "fp16",
        "zero_stage": zero if type(zero) is int else 0,
        "recompute": "full" if leaves.on("parallelism.recompute_layer") else "none",
        "overlap": {"dp": True, "tp": leaves.on("parallelism.tp_linear_async_communication")},
        "keeps_gathered_inputs": not leaves.on("parallelism.tp_recompute_allgather", default=True),
    }
    settings["micro_batch"] = micro_batch
    settings["sequence_parallel"] = mode == "REDUCE_SCATTER" and degrees["tp"] > 1
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
    known = {key: value for key, value in config.items() if key not in _LLAMA_LIKE}
    known |= {"model_type": family, "pretraining_tp": 1}
    return model_from_huggingface(known, place, "from launch file").model_dump(exclude_none=True)


# verl.


_PROGRAM = re.compile(r"verl\.trainer\.(\w+)")
_OVERRIDE = re.compile(r"\+{0,2}([a-z_][a-z0-9_]*(?:\.[\w@]+)*)=(.*)", re.DOTALL)
_ACTOR, _HF_MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_BY_MEGATRON = "megatron"
"""Strategy of an actor that Megatron trains."""
_UPDATE, _TUNING = "main_ppo", ("fsdp_sft_trainer", "sft_trainer")
_LEFT_OUT = {"data.max_prompt_length": 512, "data.max_response_length": 512}


def verl_program(line: CommandLine) -> str | None:
    """The program of verl that a script starts, such as main_ppo; None for other scripts."""
    found = (_PROGRAM.search(word) for word in line.words)
    return next((program[1] for program in found if program is not None), None)


def from_verl(line: CommandLine, program: str, path: Path) -> LaunchRun:
    """The run of overrides of verl: fine-tuning, or the update of an actor over a mini-batch.

    Parameters
    ----------
    line
        Words of the script.
    program
        By `verl_program`.
    path
        The script.

    Raises
    ------
    InputError
        Another program, or a value of the wrong kind.
    """
    where = str(path)
    if program not in (_UPDATE, *_TUNING):
        allowed = (_UPDATE, *_TUNING)
        raise InputError("trains nothing that is read", where=where, value=program, allowed=allowed)
    pairs = (_OVERRIDE.fullmatch(word) for word in joined_sums(line.words))
    said = {pair[1]: pair[2] for pair in pairs if pair is not None}
    leaves = _Leaves({name: script_value(text, line) for name, text in said.items()}, where)
    if program == _UPDATE:
        return _actors_update(leaves, path)
    settings, remarks, unread = _tuned_by_verl(leaves, line, where)
    named = leaves.first(("model.partial_pretrain", "model.path"))
    model = None if named is None else known_model(named, path)
    return LaunchRun(
        settings=settings,
        model=model,
        unread=(*unread, *leaves.unread("verl")),
        remarks=tuple(remarks),
    )


def _tuned_by_verl(
    leaves: _Leaves, line: CommandLine, where: str
) -> tuple[dict[str, Any], list[str], list[str]]:
    gpus = line.torchrun_gpus()
    length = leaves.count("data.max_length", 1024)
    leaves.get("model.strategy")
    sequences = leaves.first(("data.micro_batch_size_per_gpu", "data.micro_batch_size"), 4)
    batch = leaves.count("data.train_batch_size", 256)
    settings = _fsdp_of_verl(leaves, "model.fsdp_config", "")
    micro_batch = _sequences(leaves, "data", length, sequences, settings.get("cp", 1))
    if gpus is not None:
        micro_batch = _dividing(max(1, batch * _shards(settings) // gpus), micro_batch)
    settings |= {
        "seq_len": length,
        "global_batch": batch,
        "micro_batch": micro_batch,
        "recompute": "full"
        if leaves.on("model.enable_gradient_checkpointing", default=True)
        else "none",
    }
    if gpus is not None:
        settings["gpus"] = gpus
    adapters, unread = _verl_adapters(leaves, "model", where)
    remarks = [END_TO_END if leaves.on("use_remove_padding") else PADDED]
    return settings | {"adapters": adapters, "kind": TUNING}, remarks, unread


def _actors_update(leaves: _Leaves, path: Path) -> LaunchRun:
    where = str(path)
    lengths = [leaves.count(name, usual) for name, usual in _LEFT_OUT.items()]
    length = sum(lengths)
    by_megatron = leaves.get(f"{_ACTOR}.strategy") == _BY_MEGATRON or any(
        name.startswith(f"{_ACTOR}.megatron.") for name in leaves.values
    )
    if by_megatron:
        settings, unread = _megatron_of_verl(leaves)
    else:
        settings = _fsdp_of_verl(leaves, f"{_ACTOR}.fsdp_config", f"{_ACTOR}.")
        checkpoints = leaves.on(f"{_HF_MODEL}.enable_gradient_checkpointing", default=True)
        settings["recompute"] = "full" if checkpoints else "none"
        unread = []
    of_gpu, of_all = f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_micro_batch_size"
    sequences = leaves.get(of_gpu)
    gpus = leaves.count("trainer.n_gpus_per_node", 8) * leaves.count("trainer.nnodes", 1)
    if sequences is None and leaves.get(of_all) is not None:
        sequences = max(1, leaves.count(of_all) // gpus)
    batch = leaves.count(f"{_ACTOR}.ppo_mini_batch_size", 256)
    global_batch, cp = batch * leaves.count("actor_rollout_ref.rollout.n", 1), settings.get("cp", 1)
    of_rank = max(1, global_batch * _shards(settings) // gpus)
    settings |= {
        "seq_len": length,
        "gpus": gpus,
        "global_batch": global_batch,
        "micro_batch": _dividing(of_rank, _sequences(leaves, _ACTOR, length, sequences, cp)),
        "precision": "bf16",
    }
    settings["kind"] = TUNING
    settings["adapters"], of_adapters = _verl_adapters(leaves, _HF_MODEL, where)
    named = leaves.get(f"{_HF_MODEL}.path")
    unpadded = leaves.on(f"{_HF_MODEL}.use_remove_padding", default=by_megatron)
    return LaunchRun(
        settings=settings,
        model=None if named is None else known_model(named, path),
        unread=(*unread, *of_adapters, *leaves.unread("verl")),
        remarks=(END_TO_END if unpadded else PADDED, ACTOR),
    )


def _shards(settings: Mapping[str, Any]) -> int:
    """GPUs that work on the same sequences."""
    return math.prod(settings.get(axis, 1) for axis in AXES if axis != "dp")


def _dividing(of_rank: int, most: int) -> int:
    """The most sequences of a micro-batch, up to some, of which a rank's are a whole number."""
    return next(count for count in range(min(most, of_rank), 0, -1) if of_rank % count == 0)


def _sequences(leaves: _Leaves, section: str, length: int, said: object, cp: int) -> int:
    """Sequences of a micro-batch: a number, or as many of full length as its most tokens hold.

    These are counted for each GPU of a context group (workers/actor/dp_actor.py, update_policy).
    """
    prefix = "ppo_" if section == _ACTOR else ""
    tokens = leaves.get(f"{section}.{prefix}max_token_len_per_gpu", 16384)
    if leaves.on(f"{section}.use_dynamic_bsz") and type(tokens) is int:
        return max(1, tokens * cp // length)
    if type(said) is not int or said < 1:
        what = "must be a whole number of at least 1, or use_dynamic_bsz true"
        name = f"{section}.{prefix}micro_batch_size_per_gpu"
        raise InputError(what, where=f"{leaves.where}: {name}", value=said)
    return said


def _fsdp_of_verl(leaves: _Leaves, section: str, of_ulysses: str) -> dict[str, Any]:
    leaves.get(f"{_ACTOR}.strategy")
    settings: dict[str, Any] = {
        "framework": FSDP2.name,
        "zero_stage": 3 if leaves.on(f"{section}.reshard_after_forward", default=True) else 2,
        "overlap": {"dp": True},
        "precision": "bf16",
    }
    if leaves.first((f"{section}.offload_policy", f"{section}.cpu_offload")) is True:
        settings["optimizer_offload"] = 100
    group = leaves.get(f"{section}.fsdp_size", -1)
    if type(group) is int and group > 0:
        settings["shard_group"] = group
    context = leaves.count(f"{of_ulysses}ulysses_sequence_parallel_size", 1)
    if context > 1:
        settings |= {"cp": context, "cp_comm": "a2a"}
    return settings


def _megatron_of_verl(leaves: _Leaves) -> tuple[dict[str, Any], list[str]]:
    section, transformer = f"{_ACTOR}.megatron", f"{_ACTOR}.megatron.override_transformer_config"
    leaves.get(f"{_ACTOR}.strategy")
    tp = leaves.count(f"{section}.tensor_model_parallel_size", 1)
    dispatcher = leaves.get(f"{transformer}.moe_token_dispatcher_type", "alltoall")
    flexible = [dispatcher == "flex", leaves.on(f"{transformer}.moe_enable_deepep")]
    settings: dict[str, Any] = {
        "framework": MEGATRON.name,
        "zero_stage": 1 if leaves.on(f"{section}.use_distributed_optimizer", default=True) else 0,
        **leaves.degrees(f"{section}.", MEGATRON_AXES),
        "sequence_parallel": tp > 1 and leaves.on(f"{section}.sequence_parallel", default=True),
    }
    settings["moe_dispatch"] = "deepep" if any(flexible) else "alltoall"
    settings["etp"] = leaves.count(f"{section}.expert_tensor_parallel_size", tp)
    settings["vpp"] = leaves.count(f"{section}.virtual_pipeline_model_parallel_size", 1)
    kind = leaves.get(f"{transformer}.recompute_granularity", "none")
    modules = leaves.get(f"{transformer}.recompute_modules")
    settings["recompute"] = kind
    if kind == "selective":
        settings["recompute_modules"] = modules or ["core_attn"]
    method = leaves.get(f"{transformer}.recompute_method", "uniform")
    layers = leaves.get(f"{transformer}.recompute_num_layers")
    if kind == "full" and method == "block" and type(layers) is int:
        settings["recompute_layers"] = layers
    return settings, []


def _verl_adapters(
    leaves: _Leaves, section: str, where: str
) -> tuple[dict[str, Any] | None, list[str]]:
    names = (f"{section}.lora_rank", f"{section}.lora.rank")
    rank, said = (
        leaves.first(names, 0),
        leaves.first((f"{section}.target_modules", f"{section}.lora.target_modules")),
    )
    if not rank:
        return None, []
    name = next(name for name in names if leaves.get(name))
    place = f"{where}: {section}.target_modules"
    adapters, understood = _lora(leaves.count(name), said, place)
    return adapters, [] if understood else [f"{section}.target_modules"]


# LLaMA-Factory's second trainer (USE_V1=1), whose parts are sections with a name.


_TUNED_MODEL, _DISTRIBUTED, _PEFT, _QUANTISED = (
    "model",
    "dist_config",
    "peft_config",
    "quant_config",
)
_V1_KERNELS = {"sdpa": "flash-2", "flash_attention_2": "flash-2", "eager": "unfused"}
BY_COMMAND = (
    "what a step does is said by the command, llamafactory-cli sft or dpo: priced as fine-tuning"
)
_V1_OPTIMIZERS = {"muon": TRAINER_OPTIMIZERS["muon"]}


def is_llamafactory_v1(document: Mapping[str, Any]) -> bool:
    """Whether a mapping is for LLaMA-Factory's second trainer."""
    named = isinstance(document.get(_TUNED_MODEL), str)
    return named and any(name in document for name in ("model_class", _DISTRIBUTED, _PEFT))


def from_llamafactory_v1(document: dict[str, Any], path: Path, read: ReadDeepSpeed) -> LaunchRun:
    """The run of a configuration of LLaMA-Factory's second trainer; its GPUs are not part of it.

    Parameters
    ----------
    document
        Of a YAML file.
    path
        The file.
    read
        Reads the DeepSpeed configuration that it names.

    Raises
    ------
    InputError
        Nothing that is trained, parts without a price, or a value of the wrong kind.
    """
    where = str(path)
    leaves = _Leaves(_leaves(document), where)
    if leaves.get("train_dataset") is None:
        raise InputError("is not there: nothing is trained", where=f"{where}: train_dataset")
    micro_batch = leaves.count("micro_batch_size", 1)
    kernel = str(leaves.get("flash_attn", "sdpa"))
    if kernel not in _V1_KERNELS:
        allowed, place = tuple(_V1_KERNELS), f"{where}: flash_attn"
        raise InputError("is no kernel with a price", where=place, value=kernel, allowed=allowed)
    run = _v1_sharding(leaves, path, read, micro_batch)
    model = known_model(leaves.get(_TUNED_MODEL), path)
    adapters, unread = _v1_adapters(leaves, where)
    # Weights are kept at 32 bits, and products run at 16 unless bf16 is off.
    if not leaves.on("bf16", default=True):
        raise InputError("is off: training in 32 bits has no price", where=f"{where}: bf16")
    settings: dict[str, Any] = {
        "seq_len": leaves.count("cutoff_len", 2048),
        "precision": "bf16",
        "attention_kernel": _V1_KERNELS[kernel],
        "adapters": adapters,
        "kind": TUNING,
    }
    settings["micro_batch"] = micro_batch
    checkpoints = leaves.on("enable_activation_checkpointing", default=True)
    settings["recompute"] = "full" if checkpoints else "none"
    context = leaves.count("cp_size", 1)
    leaves.get("cp_mode")
    if context > 1:
        settings |= {"cp": context, "cp_comm": "a2a"}
    batch = leaves.get("global_batch_size")
    if batch is not None:
        settings["global_batch"] = leaves.count("global_batch_size")
    optimizer = _V1_OPTIMIZERS.get(str(leaves.values.get("optim_config.name")))
    if optimizer is not None:
        settings["optimizer"] = optimizer
        leaves.get("optim_config.name")
    batching = leaves.get("batching_strategy", "normal")
    return LaunchRun(
        settings=run.settings | settings,
        model=model,
        local_batch=micro_batch,
        unread=(*run.unread, *unread, *leaves.unread("llamafactory-v1")),
        remarks=(PADDED if batching == "normal" else END_TO_END, BY_COMMAND),
    )


def _v1_sharding(leaves: _Leaves, path: Path, read: ReadDeepSpeed, micro_batch: int) -> LaunchRun:
    name = leaves.get(f"{_DISTRIBUTED}.name")
    if name == DEEPSPEED.name:
        field = f"{_DISTRIBUTED}.config_file"
        found = file_beside(leaves.get(field), path, field)
        known = {"train_micro_batch_size_per_gpu": micro_batch, STEPS: 1}
        return read(found, known, str(found))
    if name is None:
        return PLAIN
    if name != FSDP2.name:
        allowed, place = (FSDP2.name, DEEPSPEED.name), f"{path}: {_DISTRIBUTED}.name"
        raise InputError("has no price", where=place, value=name, allowed=allowed)
    reshards = leaves.on(f"{_DISTRIBUTED}.reshard_after_forward", default=True)
    settings: dict[str, Any] = {"framework": FSDP2.name, "zero_stage": 3 if reshards else 2}
    settings["overlap"] = {"dp": True}
    replicas = leaves.count("mp_replicate_size", 1)
    if replicas > 1:
        settings["shard_groups"] = replicas
    if leaves.on(f"{_DISTRIBUTED}.offload_params"):
        settings["optimizer_offload"] = 100
    return LaunchRun(settings=settings)


def _v1_adapters(leaves: _Leaves, where: str) -> tuple[dict[str, Any] | None, list[str]]:
    name = leaves.get(f"{_PEFT}.name")
    bits, by = leaves.get(f"{_QUANTISED}.quantization_bit"), leaves.get(f"{_QUANTISED}.name")
    if by not in (None, "bnb", "auto") or bits not in (None, 4):
        what = "has no price: weights of 4 bits of bitsandbytes alone have one"
        raise InputError(what, where=f"{where}: {_QUANTISED}.quantization_bit", value=bits or by)
    if name is None:
        return None, []
    if name != "lora":
        place = f"{where}: {_PEFT}.name"
        raise InputError(PART_OF_A_MODEL, where=place, value=name, allowed=("lora",))
    said = leaves.get(f"{_PEFT}.target_modules", "all")
    every = said in ("all", ["all"])
    field = f"{_PEFT}.target_modules"
    adapters, understood = _lora(
        leaves.count(f"{_PEFT}.r", 8), ALL_LINEAR if every else said, f"{where}: {field}"
    )
    narrow = bits == 4 or by == "bnb"
    unread = [] if understood else [field]
    return adapters | {"method": "qlora" if narrow else "lora"}, unread

"""Configurations of reinforcement learning as runs: NeMo-RL's YAML, and verl's overrides.

What is read is the update of the actor, a step over samples that are there already, and their fine-tuning.
Names and defaults are those of NeMo-RL 7ea279abf (examples/configs, nemo_rl/models/policy) and of verl
b178a3cd5 (verl/trainer/config).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.costmodel.layout import AXES, PLACED_AXES
from meshwright.documents import read_mapping
from meshwright.errors import InputError, check_choice
from meshwright.frameworks.megatron import BRIDGE_OVERRIDES, MEGATRON
from meshwright.model_specs.adapters import ALL_LINEAR
from meshwright.planner.runs.launches.command_line import CommandLine
from meshwright.planner.runs.launches.fields import (
    NestedFields,
    joined_sums,
    nested_fields,
    script_value,
    with_references,
)
from meshwright.planner.runs.launches.finetuning import (
    END_TO_END,
    OTHER_STEP,
    PADDED,
    PART_OF_A_MODEL,
    TUNING,
    adapters_mapping,
    file_beside,
    known_model,
    remarks_on_experts,
)
from meshwright.planner.runs.launches.launch_run import ImageFields, LaunchRun
from meshwright.planner.runs.run_file import MAX_FILE_BYTES

ACTOR = (
    "the update of the actor alone is priced: not generation, the reference's and the old log-probabilities, "
    "a critic, or copies between host and GPU"
)

# NeMo-RL.


MEGATRON_AXES = {
    name.removeprefix("model."): word for name, word in BRIDGE_OVERRIDES if word in PLACED_AXES
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
    leaves = NestedFields(with_references(nested_fields(whole)), where)
    for name in _OTHER_SECTIONS:
        if whole.get(name):
            raise InputError(OTHER_STEP, where=f"{where}: {name}")
    frozen = [name for name in leaves.values if name.endswith("freeze_language_model")]
    leaves.refuse(PART_OF_A_MODEL, *frozen)
    by_megatron = leaves.on(f"{_OF_MEGATRON}.enabled")
    by_tensors = leaves.on(f"{_DTENSOR}.enabled", default=not by_megatron)
    if by_megatron and by_tensors:
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
        "precision": settings.get("precision", leaves.half(f"{_POLICY}.precision")),
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
    merged = {key: value for key, value in document.items() if key != _DEFAULTS}
    named, place = document.get(_DEFAULTS), path
    for _ in range(_MOST_PARENTS):
        names = _listed(named)
        if not names:
            return merged
        parent_file = file_beside(names[-1], place, _DEFAULTS)
        parent = read_mapping(parent_file, MAX_FILE_BYTES)
        named = [*names[:-1], *_listed(parent.pop(_DEFAULTS, None))]
        place = parent_file
        merged = _over(parent, merged)
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


def _training_gpus(leaves: NestedFields) -> int:
    """GPUs of the actor: all of the cluster, but those that generate alone."""
    each, nodes = leaves.count("cluster.gpus_per_node", 1), leaves.count("cluster.num_nodes", 1)
    apart = f"{_POLICY}.generation.colocated"
    if leaves.on(f"{apart}.enabled", default=True) or not leaves.has_section(
        f"{_POLICY}.generation"
    ):
        return each * nodes
    fields = [f"{apart}.resources.{name}" for name in ("num_nodes", "gpus_per_node")]
    leaves.first(fields)
    field = fields[nodes == 1]
    taken = leaves.count(field)
    training = each - taken if nodes == 1 else each * (nodes - taken)
    if training < 1:
        raise InputError("leaves no GPU to train on", where=f"{leaves.where}: {field}", value=taken)
    return training


def _by_dtensor(leaves: NestedFields, where: str) -> tuple[dict[str, Any], list[str]]:
    """FSDP2 with tensor and context parallelism, and adapters."""
    unread: list[str] = []
    replicas, offloads = f"{_DTENSOR}.dp_replicate_size", f"{_DTENSOR}.cpu_offload"
    settings: dict[str, Any] = {
        **leaves.fully_sharded(groups=replicas, offloads=(offloads,)),
        **leaves.degrees(
            f"{_DTENSOR}.", {"tensor_parallel_size": "tp", "context_parallel_size": "cp"}
        ),
        "recompute": leaves.recompute(f"{_DTENSOR}.activation_checkpointing"),
        "adapters": None,
    }
    lora = f"{_DTENSOR}.lora_cfg"
    if leaves.on(f"{lora}.enabled"):
        rank, modules = leaves.count(f"{lora}.dim", 8), f"{lora}.target_modules"
        settings["adapters"], unread = leaves.lora(rank, modules)
        if leaves.on(f"{lora}.match_all_linear", default=True):
            settings["adapters"], unread = adapters_mapping("lora", rank, (ALL_LINEAR,)), []
        unread += [
            f"{lora}.{name}"
            for name in ("exclude_modules", "dropout", "use_triton")
            if leaves.get(f"{lora}.{name}")
        ]
    return settings, unread


def _by_megatron(leaves: NestedFields, where: str) -> tuple[dict[str, Any], list[str]]:
    """Megatron's degrees, recomputation, optimizer and adapters."""
    unread: list[str] = []
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
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            field = f"{where}: {_OF_MEGATRON}.optimizer.optimizer_offload_fraction"
            raise InputError("must be a number of 0 to 1", where=field, value=share)
        settings["optimizer_offload"] = round(100 * share)
    fp8 = f"{_OF_MEGATRON}.fp8_cfg"
    recipe = leaves.get(f"{fp8}.fp8_recipe", "delayed")
    parameters = leaves.on(f"{fp8}.fp8_param")
    if leaves.on(f"{fp8}.enabled"):
        settings |= {"precision": "fp8", "fp8_recipe": recipe, "fp8_params": parameters}
    peft = f"{_OF_MEGATRON}.peft"
    if leaves.on(f"{peft}.enabled"):
        rank = leaves.count(f"{peft}.dim", 8)
        settings["adapters"], unread = leaves.lora(rank, f"{peft}.target_modules")
        unread += [
            f"{peft}.{name}"
            for name in ("exclude_modules", "dropout")
            if leaves.get(f"{peft}.{name}")
        ]
    return settings, unread


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
    matches = (_PROGRAM.search(word) for word in line.words)
    return next((program[1] for program in matches if program is not None), None)


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
    check_choice(program, (_UPDATE, *_TUNING), where, "trains nothing that is read")
    pairs = (_OVERRIDE.fullmatch(word) for word in joined_sums(line.words))
    said = {pair[1]: pair[2] for pair in pairs if pair is not None}
    leaves = NestedFields({name: script_value(text, line) for name, text in said.items()}, where)
    if program == _UPDATE:
        return _actors_update(leaves, path)
    settings, remarks, unread = _tuned_by_verl(leaves, line)
    named = leaves.first(("model.partial_pretrain", "model.path"))
    model = None if named is None else known_model(named, path)
    return LaunchRun(
        settings=settings,
        model=model,
        unread=(*unread, *leaves.unread("verl")),
        remarks=tuple(remarks),
    )


def _tuned_by_verl(
    leaves: NestedFields, line: CommandLine
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
        "recompute": leaves.recompute("model.enable_gradient_checkpointing", default=True),
    }
    if gpus is not None:
        settings["gpus"] = gpus
    adapters, unread = _verl_adapters(leaves, "model")
    remarks = [END_TO_END if leaves.on("use_remove_padding") else PADDED]
    return settings | {"adapters": adapters, "kind": TUNING}, remarks, unread


def _actors_update(leaves: NestedFields, path: Path) -> LaunchRun:
    lengths = [leaves.count(name, usual) for name, usual in _LEFT_OUT.items()]
    length = sum(lengths)
    by_megatron = leaves.get(f"{_ACTOR}.strategy") == _BY_MEGATRON or any(
        name.startswith(f"{_ACTOR}.megatron.") for name in leaves.values
    )
    if by_megatron:
        settings = _megatron_of_verl(leaves)
    else:
        settings = _fsdp_of_verl(leaves, f"{_ACTOR}.fsdp_config", f"{_ACTOR}.")
        checkpoints = f"{_HF_MODEL}.enable_gradient_checkpointing"
        settings["recompute"] = leaves.recompute(checkpoints, default=True)
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
    settings["adapters"], unread = _verl_adapters(leaves, _HF_MODEL)
    named = leaves.get(f"{_HF_MODEL}.path")
    unpadded = leaves.on(f"{_HF_MODEL}.use_remove_padding", default=by_megatron)
    # Older versions froze encoder and projector (fsdp_workers.py); verl 0.9.1 has the switch and no use.
    switch = f"{_ACTOR}.freeze_vision_tower"
    return LaunchRun(
        settings=settings,
        model=None if named is None else known_model(named, path),
        unread=(*unread, *leaves.unread("verl")),
        remarks=(END_TO_END if unpadded else PADDED, ACTOR),
        images=ImageFields(parts=(switch,) if leaves.on(switch) else ()),
    )


def _shards(settings: Mapping[str, Any]) -> int:
    """GPUs that work on the same sequences."""
    return math.prod(settings.get(axis, 1) for axis in AXES if axis != "dp")


def _dividing(of_rank: int, limit: int) -> int:
    """The most sequences of a micro-batch, up to some, of which a rank's are a whole number."""
    return next(count for count in range(min(limit, of_rank), 0, -1) if of_rank % count == 0)


def _sequences(leaves: NestedFields, section: str, length: int, said: object, cp: int) -> int:
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


def _fsdp_of_verl(leaves: NestedFields, section: str, of_ulysses: str) -> dict[str, Any]:
    leaves.get(f"{_ACTOR}.strategy")
    offloads = (f"{section}.offload_policy", f"{section}.cpu_offload")
    syncs = not leaves.on(f"{section}.use_no_sync_for_gradient_accumulation", default=True)
    settings = leaves.fully_sharded(
        f"{section}.reshard_after_forward", offloads=offloads, syncs=syncs
    )
    settings["precision"] = "bf16"
    group = leaves.get(f"{section}.fsdp_size", -1)
    if type(group) is int and group > 0:
        settings["shard_group"] = group
    context = leaves.count(f"{of_ulysses}ulysses_sequence_parallel_size", 1)
    if context > 1:
        settings |= {"cp": context, "cp_comm": "a2a"}
    return settings


def _megatron_of_verl(leaves: NestedFields) -> dict[str, Any]:
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
    return settings


def _verl_adapters(leaves: NestedFields, section: str) -> tuple[dict[str, Any] | None, list[str]]:
    ranks = (f"{section}.lora_rank", f"{section}.lora.rank")
    modules = (f"{section}.target_modules", f"{section}.lora.target_modules")
    leaves.first(modules)
    if not leaves.first(ranks, 0):
        return None, []
    rank = next(name for name in ranks if leaves.get(name))
    named = next((name for name in modules if leaves.get(name)), modules[0])
    return leaves.lora(leaves.count(rank), named)

"""Overrides of a Megatron-Bridge recipe, as the flags of Megatron-LM that they stand for.

They set degrees, schedule and execution of a recipe, whose model they do not name (megatron-bridge 0.6.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.documents import packaged_document
from meshwright.errors import InputError, near_miss
from meshwright.model_specs.reader import load_catalog_model, read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.launches.command_line import CommandLine, has_no_effect
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.megatron import from_megatron

_FLAGS = {
    "train.micro_batch_size": "--micro-batch-size",
    "train.global_batch_size": "--global-batch-size",
    "model.virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "ddp.use_distributed_optimizer": "--use-distributed-optimizer",
    "ddp.overlap_grad_reduce": "--overlap-grad-reduce",
    "ddp.overlap_param_gather": "--overlap-param-gather",
    "ddp.bucket_size": "--ddp-bucket-size",
    "ddp.num_distributed_optimizer_instances": "--num-distributed-optimizer-instances",
    "ddp.use_megatron_fsdp": "--use-megatron-fsdp",
    "ddp.data_parallel_sharding_strategy": "--data-parallel-sharding-strategy",
    "optimizer.optimizer": "--optimizer",
    "optimizer.use_distributed_optimizer": "--use-distributed-optimizer",
    "optimizer.use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "optimizer.exp_avg_dtype": "--exp-avg-dtype",
    "optimizer.exp_avg_sq_dtype": "--exp-avg-sq-dtype",
    "optimizer.optimizer_cpu_offload": "--optimizer-cpu-offload",
    "optimizer.optimizer_offload_fraction": "--optimizer-offload-fraction",
    "optimizer.overlap_cpu_optimizer_d2h_h2d": "--overlap-cpu-optimizer-d2h-h2d",
    "mixed_precision.fp8": "--fp8-format",
    "mixed_precision.fp8_recipe": "--fp8-recipe",
    "mixed_precision.fp8_param_gather": "--fp8-param-gather",
    "mixed_precision.fp4": "--fp4-format",
    "mixed_precision.fp4_recipe": "--fp4-recipe",
    "mixed_precision.fp4_param_gather": "--fp4-param-gather",
    "comm_overlap.tp_comm_overlap": "--tp-comm-overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "comm_overlap.overlap_grad_reduce": "--overlap-grad-reduce",
    "comm_overlap.overlap_param_gather": "--overlap-param-gather",
    "comm_overlap.bucket_size": "--ddp-bucket-size",
}
"""Of overrides other than `model.name`, which is Megatron's `--name`. Those of `comm_overlap` come last, and
win, as in megatron/bridge/training/comm_overlap.py."""
_PRECISIONS = {"bf16_mixed": "--bf16", "fp16_mixed": "--fp16"}
_LOSS, _ATTENTION = "model.cross_entropy_fusion_impl", "mixed_precision.fp8_dot_product_attention"
_SUMS, _PRECISION = "mixed_precision.grad_reduce_in_fp32", "mixed_precision"
_READ_OTHERWISE = frozenset(
    [
        _LOSS,
        _ATTENTION,
        _SUMS,
        _PRECISION,
    ]
)
"""Overrides that are no flag of Megatron, and are read apart."""


def are_overrides(document: object) -> bool:
    """Whether a document is a list of `section.field=value`."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(word, str) and "=" in word and word[:1] != "-" for word in document)
    )


def from_overrides(words: Sequence[str], model: ModelSpec | str | None, where: str) -> LaunchRun:
    """The run of a recipe of a model, or of its name, under overrides. Raises InputError without one."""
    if model is None:
        raise InputError(
            "overrides of a recipe do not say which model it trains: add --with model=...",
            where=where,
        )
    given = dict(word.partition("=")[::2] for word in words)
    run = from_megatron(CommandLine(_words(given), where), read_model(model), sized=False)
    settings: dict[str, Any] = dict(run.settings)
    if _LOSS in given:
        settings["fused_loss"] = given[_LOSS] == "te"
    if given.get(_ATTENTION) == "true":
        settings["recipe"] = {"fp8_attention": True}
    others = (
        name
        for name, value in given.items()
        if not _flag_of(name)
        and name not in _READ_OTHERWISE
        and not has_no_effect("bridge", name, value)
    )
    return LaunchRun(settings=settings, model=run.model, unread=(*run.unread, *others))


def _flag_of(name: str) -> str | None:
    section, _, field = name.partition(".")
    if name in _FLAGS:
        return _FLAGS[name]
    return f"--{field.replace('_', '-')}" if section == "model" and name != _LOSS else None


def _words(given: Mapping[str, str]) -> Iterator[str]:
    """The command line of Megatron that overrides stand for."""
    flags: dict[str, str] = {}
    for name in sorted(given, key=lambda name: name.startswith("comm_overlap.")):
        flag = _flag_of(name)
        if flag is not None:
            flags[flag] = given[name].strip("'\"")
    if given.get(_PRECISION) in _PRECISIONS:
        flags[_PRECISIONS[given[_PRECISION]]] = "true"
    if given.get(_SUMS) == "false":
        flags["--grad-reduce-in-bf16"] = "true"
    for flag, value in flags.items():
        if value == "false":
            continue
        yield flag
        if value != "true":
            yield from value.strip("[]").split(",") if value.startswith("[") else (value,)


# Megatron-Bridge's performance recipes by name, from bridge_recipes.yaml beside this file.


@cache
def recipe_names() -> tuple[str, ...]:
    """The names of the recipes whose model and machine are in the catalog."""
    return tuple(_recipes())


def is_recipe_name(path: Path) -> bool:
    """Whether a path is no file and reads like the name of a recipe."""
    name = str(path)
    return name.endswith("_config") and "gpu_" in name and not path.exists()


def recipe_run(name: str) -> LaunchRun:
    """What a recipe says of its run.

    Parameters
    ----------
    name
        Such as `llama31_405b_pretrain_1024gpu_h100_bf16_config`.

    Raises
    ------
    InputError
        No recipe of that name is known.
    """
    if name not in _recipes():
        raise InputError(
            "no such recipe of Megatron-Bridge is known, nor a file of that name",
            where="--from-launch",
            value=name,
            did_you_mean=near_miss(name, recipe_names()),
        )
    recipe = _recipes()[name]
    model = load_catalog_model(recipe["model"])
    line = CommandLine(recipe["flags"].split(), name)
    run = from_megatron(line, model, sized=False)
    settings = {**run.settings, "gpus": recipe["gpus"]}
    return LaunchRun(settings=settings, model=recipe["model"], cluster=recipe["cluster"])


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    recipes: dict[str, dict[str, Any]] = packaged_document(
        "meshwright.planner.runs.launches", "bridge_recipes.yaml"
    )
    return recipes

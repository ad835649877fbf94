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
from meshwright.frameworks.megatron import BRIDGE_OVERRIDES, MEGATRON_ARGUMENTS
from meshwright.model_specs.reader import load_catalog_model, read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.launches.command_line import CommandLine, has_no_effect
from meshwright.planner.runs.launches.launch_run import LaunchRun, image_fields
from meshwright.planner.runs.launches.megatron import from_megatron

_REPEATED = ("dataset.", "dist.", "checkpoint.")
"""Sections that say once more what others say."""
_ARGUMENTS = {
    name: MEGATRON_ARGUMENTS[word]
    for name, word in BRIDGE_OVERRIDES
    if word in MEGATRON_ARGUMENTS and not name.startswith(_REPEATED)
}
_OVERRIDES = {word: name for name, word in BRIDGE_OVERRIDES}
_LOSS, _ATTENTION = _OVERRIDES["loss"], _OVERRIDES["fp8_attention"]
_SUMS, _PRECISION = _OVERRIDES["wide_sums"], _OVERRIDES["precision"]
FREEZES = ("model.freeze_vision_model", "model.freeze_vision_projection")
"""What leaves the image encoder and its projector as they are (models/qwen_vl/qwen25_vl_provider.py)."""
_READ_OTHERWISE = frozenset((_LOSS, _ATTENTION, _SUMS, _PRECISION))
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
    said = dict(word.partition("=")[::2] for word in words)
    given = {name: value for name, value in said.items() if name not in FREEZES}
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
    switches = {name: said.get(name) == "true" for name in FREEZES}
    usual = dict.fromkeys(FREEZES, False)
    images = image_fields(switches, usual, (), has_adapters=False)
    unread = (*run.unread, *others)
    return LaunchRun(settings=settings, model=run.model, unread=unread, images=images)


def _flag_of(name: str) -> str | None:
    """The flag of Megatron; other fields of the model are called like theirs, `model.name` like `--name`."""
    section, _, field = name.partition(".")
    argument = _ARGUMENTS.get(name)
    # A switch that says no has another name where it is a field.
    if argument is not None and argument.default is not True:
        return argument.flag
    return f"--{field.replace('_', '-')}" if section == "model" and name != _LOSS else None


def _words(given: Mapping[str, str]) -> Iterator[str]:
    """The command line of Megatron that overrides stand for."""
    flags: dict[str, str] = {}
    for name in sorted(given, key=lambda name: name.startswith("comm_overlap.")):
        flag = _flag_of(name)
        if flag is not None:
            flags[flag] = given[name].strip("'\"")
    named = given.get(_PRECISION, "").removesuffix("_mixed")
    if named in ("bf16", "fp16"):
        flags[MEGATRON_ARGUMENTS[named].flag] = "true"
    if given.get(_SUMS) == "false":
        flags[MEGATRON_ARGUMENTS["narrow_sums"].flag] = "true"
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

"""Megatron-Bridge's performance recipes by name, from bridge_recipes.yaml beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from meshwright.documents.reader import packaged_document
from meshwright.errors import InputError, near_miss
from meshwright.model_specs.catalog import load_catalog_model
from meshwright.planner.runs.launches.flags import CommandLine
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.megatron import from_megatron


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

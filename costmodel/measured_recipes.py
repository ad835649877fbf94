"""The fastest published run of each work, and which of them lies nearest to a plan.

A work is a model on so many GPUs of a kind, with a batch, a sequence length and a precision.
`costmodel/data/measured_recipes.json` has the runs of the repository's measured rows that are trusted;
`python -m benchmarks.recipes --measured` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log2
from typing import Any

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.optimum_band import model_kind, priced_settings
from meshwright.costmodel.records import device_class
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.model_specs.parameters import parameter_count

TABLE = "measured_recipes.json"
SAME_SIZE = 0.005
"""Relative difference of parameter counts up to which models with as many layers are the same one."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRecipe:
    """One published run: what it trained, on what, how, and how long a step took."""

    id: str
    """Of its row in the repository's measured runs."""
    source: str
    """Who published it."""
    model: str
    kind: str
    """dense or experts."""
    layers: int
    parameters: int
    device: str
    gpus: int
    global_batch: int
    """Sequences of a step."""
    seq_len: int
    """Tokens of a sequence."""
    precision: str
    framework: str
    """Software profile."""
    step_time_s: float
    """Measured."""
    settings: tuple[str, ...]
    """`optimum_band.priced_settings` of the run."""
    layout: Mapping[str, Any]
    """Degrees and settings as a plan's document writes them, those that are plain left out."""
    execution: Mapping[str, Any]
    """Execution choices likewise."""


@cache
def measured_recipes() -> tuple[MeasuredRecipe, ...]:
    """The fastest trusted run of each work, read once.

    Returns
    -------
    tuple of MeasuredRecipe
        In the order of the file.
    """
    text = files("meshwright.costmodel").joinpath("data", TABLE).read_text(encoding="utf-8")
    rows = json.loads(text)["recipes"]
    return tuple(MeasuredRecipe(**{**row, "settings": tuple(row["settings"])}) for row in rows)


def is_same_work(recipe: MeasuredRecipe, workload: Workload) -> bool:
    """Whether a run did the work of a workload: the model on the same machine, batch and precision.

    Parameters
    ----------
    recipe : MeasuredRecipe
    workload : Workload
        Its model, device, GPUs, sequences, tokens and precision are used.

    Returns
    -------
    bool
        Models are the same with as many layers and parameters (within 0.5 %), whatever they are called.
    """
    return (
        _is_same_model(recipe, workload)
        and recipe.device == workload.cluster.device.name
        and recipe.gpus == workload.gpus
        and recipe.global_batch == workload.global_batch
        and recipe.seq_len == workload.seq_len
        and recipe.precision == workload.precision
    )


def _is_same_model(recipe: MeasuredRecipe, workload: Workload) -> bool:
    apart = abs(recipe.parameters / parameter_count(workload.model) - 1.0)
    return recipe.layers == workload.model.layers and apart <= SAME_SIZE


def distance(recipe: MeasuredRecipe, workload: Workload, layout: Layout) -> float:
    """How far a run lies from a plan: settings that one of both has, plus differences of size.

    Parameters
    ----------
    recipe : MeasuredRecipe
    workload : Workload
        Run as the plan is.
    layout : Layout
        The plan's.

    Returns
    -------
    float
        At least 0: one for each setting of `priced_settings` that only one of both has, one for each doubling
        of parameters, a half for each doubling of GPUs and of tokens in a sequence, one each for another
        device of the class, for another framework and for another model of the same size.
    """
    size = parameter_count(workload.model)
    apart = len(priced_settings(workload, layout).symmetric_difference(recipe.settings))
    scale = abs(log2(recipe.gpus / workload.gpus)) + abs(log2(recipe.seq_len / workload.seq_len))
    others = (
        recipe.device != workload.cluster.device.name,
        framework_of_stack(recipe.framework) is not framework_of_stack(workload.framework),
        not _is_same_model(recipe, workload),
    )
    return apart + abs(log2(recipe.parameters / size)) + scale / 2.0 + sum(others)


def nearest_recipes(workload: Workload, layout: Layout) -> list[MeasuredRecipe]:
    """Measured runs by how near they lie to a plan, those of the same work first and the fastest of these.

    Parameters
    ----------
    workload : Workload
        Run as the plan is.
    layout : Layout
        The plan's.

    Returns
    -------
    list of MeasuredRecipe
        With the plan's kind of model, on its class of device, or on any where none was measured there.
    """
    name, kind = workload.cluster.device.name, model_kind(workload)
    group = device_class(name)
    of_kind = [recipe for recipe in measured_recipes() if recipe.kind == kind]
    near = [
        recipe
        for recipe in of_kind
        if name == recipe.device or (group is not None and group == device_class(recipe.device))
    ]

    def nearness(recipe: MeasuredRecipe) -> tuple[bool, float, str]:
        if is_same_work(recipe, workload):
            return False, recipe.step_time_s, recipe.id
        return True, distance(recipe, workload, layout), recipe.id

    return sorted(near or of_kind, key=nearness)

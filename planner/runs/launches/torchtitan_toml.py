"""A torchtitan job of a TOML file, as torchtitan took them up to 0.2, as a run.

Sections and keys are those of its flags (torchtitan/config/job_config.py of v0.2.0; before v0.1.0
`batch_size` of `training`), so the file is read as the flags that say the same.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.runs.launches.flags import CommandLine
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.torchtitan import from_torchtitan
from meshwright.planner.runs.launches.torchtitan_registry import stages_of_parts

_SECTION = re.compile(r"\s*(?:#[^\n]*\n\s*)*\[[A-Za-z_][\w.]*\]\s*(?:#[^\n]*)?(?:\n|$)")
_SECTIONS = ("training", "parallelism", "compile")
"""Those with a bearing on the time of a step, beside the model and activation checkpointing."""
_HARMLESS = frozenset(
    """
    steps max_norm dataset dataset_path deterministic seed gc_freq gc_debug warmup_steps
    disable_loss_parallel components backend fullgraph
    """.split()  # noqa: SIM905
)
OLD_NAMES = {"training.batch_size": "training.local_batch_size"}
"""Keys before v0.1.0, and what they are called since."""
CONVERTERS = {
    "float8": "fp8",
    "quantize.linear.float8": "fp8",
    "mx": "mxfp8",
    "quantize.linear.mx": "mxfp8",
}
"""Precision of the run by the name in `converters` of `model`."""
MODEL_PARTS = "module_fqns_per_model_part"
"""Key of `parallelism` with the modules of each chunk of the pipeline."""
_CHECKPOINTS = ("none", "selective", "full", "memory_budget")


def is_toml(text: str) -> bool:
    """Whether a text begins with a section of a TOML file, after comments."""
    return _SECTION.match(text) is not None


def toml_document(text: str, where: str) -> dict[str, Any]:
    """The sections of a TOML file. Raises InputError where it cannot be read."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot be read: {str(error)[:200]}", where=where) from None


def from_toml(document: Mapping[str, object], path: Path) -> LaunchRun:
    """The run of a TOML file's sections. Raises InputError where they are of another program."""
    where = str(path)
    model, degrees = document.get("model"), document.get("parallelism")
    if not isinstance(model, Mapping) or not isinstance(degrees, Mapping):
        what = "torchtitan's TOML files have sections model and parallelism, this one has not"
        raise InputError(what, where=where)
    run = from_torchtitan(CommandLine(_words(document, where), where), path.parent)
    converters = model.get("converters")
    named = converters if isinstance(converters, list) else []
    precisions = [CONVERTERS[name] for name in map(str, named) if name in CONVERTERS]
    settings = run.settings | stages_of_parts(degrees.get(MODEL_PARTS), run.settings)
    settings["precision"] = precisions[-1] if precisions else "bf16"
    return replace(run, settings=settings)


def _words(document: Mapping[str, object], where: str) -> Iterator[str]:
    """The flags that say what the sections say."""
    model = document["model"]
    assert isinstance(model, Mapping)
    name, flavor = str(model.get("name", "")), str(model.get("flavor", ""))
    yield from (
        "--module",
        name or "model",
        "--config",
        f"{name}_{flavor}".lower().replace("-", "_"),
    )
    checkpoints = document.get("activation_checkpoint")
    mode = checkpoints.get("mode", "selective") if isinstance(checkpoints, Mapping) else "none"
    if mode not in _CHECKPOINTS:
        where = f"{where}: activation_checkpoint.mode"
        raise InputError(
            "is no kind of checkpointing", where=where, value=mode, allowed=_CHECKPOINTS
        )
    yield f"activation-checkpoint:{mode}"
    for section in _SECTIONS:
        settings = document.get(section, {})
        if not isinstance(settings, Mapping):
            raise InputError("must be a section", where=f"{where}: {section}", value=settings)
        for key, value in settings.items():
            if key not in _HARMLESS and key != MODEL_PARTS:
                yield from _flag(OLD_NAMES.get(f"{section}.{key}", f"{section}.{key}"), value)


def _flag(name: str, value: object) -> Iterator[str]:
    """A switch for a truth, a flag with its value for all else."""
    section, _, key = name.partition(".")
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--{section}.no-{key}"
    else:
        yield from (f"--{name}", str(value))

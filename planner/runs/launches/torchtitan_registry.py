"""What a registry module that we wrote says of a torchtitan run: stages and precision. It is not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.costmodel.pipeline.schedules import schedule_named, traits
from meshwright.documents.reader import read_text
from meshwright.planner.runs.run_file import MAX_FILE_BYTES

_PRECISIONS = {"MXFP8LinearConverter": "mxfp8", "Float8LinearConverter": "fp8"}


def registry_settings(folder: Path, module: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Virtual stages, layers of each stage, and precision; empty where the module is not beside the script.

    Parameters
    ----------
    folder
        Of the launch script.
    module
        Name after `--module`.
    settings
        pp and schedule, as the flags have them.

    Raises
    ------
    InputError
        A module that is too large to read.
    """
    path = folder / f"{module}.py"
    if not re.fullmatch(r"[A-Za-z_]\w{0,99}", module) or not path.is_file():
        return {}
    text = read_text(path, MAX_FILE_BYTES)
    found: dict[str, Any] = {}
    for converter, precision in _PRECISIONS.items():
        if f"{converter}.Config(" in text:
            found["precision"] = precision
    return found | stages_of_parts(_stage_names(text), settings)


def stages_of_parts(parts: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Virtual stages and layers of each stage; empty where the parts are no chunks of a pipeline.

    Parameters
    ----------
    parts
        `module_fqns_per_model_part`: a list of the names of its modules for each chunk, in the model's order.
    settings
        pp and schedule, as the flags have them.
    """
    pp = settings["pp"]
    listed = parts if isinstance(parts, list) else []
    if not listed or pp <= 1 or len(listed) % pp or not all(isinstance(x, list) for x in listed):
        return {}
    chunks = [sum(str(name).startswith("layers.") for name in part) for part in listed]
    stages = _by_rank(chunks, pp, settings.get("schedule", "1f1b"))
    return {"vpp": len(chunks) // pp, "stages": stages}


def _stage_names(text: str) -> list[list[str]]:
    """Module names of each chunk, in the model's order; empty where there are none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if node.targets[0].id == "STAGES":
            value = ast.literal_eval(node.value)
            return value if isinstance(value, list) else []
    return []


def _by_rank(chunks: list[int], pp: int, schedule: str) -> list[list[int]]:
    """Layers of each [rank][virtual stage]; in a V-shaped schedule every second row runs back."""
    v_shaped = traits(schedule_named(schedule)).v_shaped
    rows = [chunks[begin : begin + pp] for begin in range(0, len(chunks), pp)]
    ordered = [row[::-1] if v_shaped and index else row for index, row in enumerate(rows)]
    return [list(rank) for rank in zip(*ordered, strict=True)]

"""Placements in use, from any of the files that `experts` writes: our own, and those of other systems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.documents.reader import read_mapping
from meshwright.errors import InputError
from meshwright.planner.experts.files.routing import (
    LARGEST_TEXT_BYTES,
    MOST_EXPERTS,
    number_array,
)
from meshwright.planner.experts.problem import Slots

_KEYS = ("physical_to_logical_map", "initial_global_assignments", "layer_list", "permutation")


def read_placement(
    path: Path, *, layers: int, gpus: int, experts: int, layer_ids: tuple[int, ...] = ()
) -> Slots:
    """Slots [layers, gpus, slots of a GPU] from any file that `experts` writes. Raises InputError.

    Our own JSON, SGLang's, TensorRT-LLM's YAML, vLLM-ascend's JSON, a Megatron permutation. `layer_ids` are
    the model's layers with experts, where known.
    """
    document = read_mapping(path, LARGEST_TEXT_BYTES)
    key = next((name for name in _KEYS if name in document), None)
    if key is None:
        raise InputError(
            f"{path}: no {', '.join(_KEYS[:-1])} or {_KEYS[-1]}; give a placement written by `experts`"
        )
    where = f"{path}: {key}"
    assignments = document[key]
    if key == "layer_list":
        assignments = _by_device(assignments, where)
    elif isinstance(assignments, Mapping):
        assignments = [assignments[layer] for layer in _numbered(assignments, where)]
    table = number_array(assignments, where)
    if (
        table.ndim != 2
        or table.dtype.kind not in "iu"
        or len(table) < layers
        or table.shape[1] % gpus
    ):
        raise InputError(
            f"{where} must be integers [{layers} layers, slots], slots a multiple of {gpus} GPUs, got "
            f"{list(table.shape)}"
        )
    table = _with_experts(table, layers, layer_ids)
    if table.min() < 0 or table.max() >= min(experts, MOST_EXPERTS):
        raise InputError(f"{where}: experts must be from 0 to {experts - 1}")
    for layer, row in enumerate(table):
        missing = sorted(set(range(experts)) - set(row.tolist()))
        if missing:
            raise InputError(f"{where}[{layer}]: expert {missing[0]} is in no slot")
    return np.asarray(table, dtype=np.int64).reshape(layers, gpus, -1)


def _numbered(assignments: Mapping[Any, Any], where: str) -> list[Any]:
    """Keys in the order of their layers."""
    keys = {key: str(key) for key in assignments}
    if not keys or not all(text.isdecimal() and len(text) < 10 for text in keys.values()):
        raise InputError(
            f"{where}: keys must be the numbers of layers, got {list(keys.values())[:4]}"
        )
    return sorted(keys, key=lambda key: int(keys[key]))


def _by_device(layer_list: object, where: str) -> list[list[Any]]:
    """Rows of vLLM-ascend's layer_list, devices one after the other."""
    try:
        rows = [
            [
                device["device_expert"]
                for device in sorted(layer["device_list"], key=lambda d: d["device_id"])
            ]
            for layer in sorted(layer_list, key=lambda entry: entry["layer_id"])  # type: ignore[call-overload]
        ]
        return [[expert for device in row for expert in device] for row in rows]
    except (KeyError, TypeError):
        raise InputError(
            f"{where}: every layer needs layer_id and device_list, every device device_id and device_expert"
        ) from None


def _with_experts(table: NDArray[Any], layers: int, layer_ids: tuple[int, ...]) -> NDArray[Any]:
    """The rows of layers with experts: SGLang's file has one for every layer, dense ones come first."""
    if len(table) > layers == len(layer_ids) and max(layer_ids) < len(table):
        return table[list(layer_ids)]
    return table[len(table) - layers :]

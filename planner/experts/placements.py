"""Placements in use, from any of the files that `experts` writes: our own, and those of other systems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.documents import read_mapping
from meshwright.errors import InputError
from meshwright.frameworks.megatron import MEGATRON
from meshwright.planner.experts.problem import Slots
from meshwright.planner.experts.recorders import LARGEST_TEXT_BYTES, MOST_EXPERTS, number_array

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


# Placement files: our own JSON, and what SGLang, TensorRT-LLM, vLLM-ascend and Megatron checkpoints load.


READERS = {
    "json": "meshwright experts --from FILE",
    "sglang": "SGLang: --init-expert-location FILE",
    "trtllm": "TensorRT-LLM: moe_config: {load_balancer: FILE} in the YAML of --config",
    "vllm": (
        'vLLM on Ascend: --additional-config \'{"eplb_config": {"expert_map_path": "FILE"}}\' '
        "(before vllm-ascend 0.13 without eplb_config)"
    ),
    MEGATRON.name: "Megatron checkpoints: no option; permute experts and router rows by it",
}
"""By format: the program that reads the file, and the option that loads it. nvidia.github.io/TensorRT-LLM
(MoeConfig); docs.vllm.ai/projects/ascend (Additional Configuration); SGLang server arguments."""
PLACEMENT_FORMATS = tuple(READERS)


@dataclass(frozen=True, kw_only=True)
class PlacementFile:
    """A placement as files hold it: slots [layers, gpus, slots of a GPU]."""

    slots: Slots
    experts: int
    nodes: int
    layer_ids: tuple[int, ...]
    """The model's layer of each row; dense layers are the numbers that are left out below."""
    summary: Mapping[str, Any]


def placement_text(placed: PlacementFile, form: str) -> str:
    """The text of the file. Raises InputError for an unknown format or a placement that it cannot hold."""
    writers = {
        "json": _own,
        "sglang": _sglang,
        "trtllm": _trtllm,
        "vllm": _vllm_ascend,
        MEGATRON.name: _megatron,
    }
    if form not in writers:
        raise InputError(f"format: no format {form[:40]!r}; allowed: {', '.join(writers)}")
    return writers[form](placed)


def _own(placed: PlacementFile) -> str:
    flat = placed.slots.reshape(len(placed.slots), -1)
    document = {
        "schema": 1,
        "kind": "expert_placement",
        "experts": placed.experts,
        "gpus": placed.slots.shape[1],
        "nodes": placed.nodes,
        "slots": flat.shape[1],
        "layer_ids": list(placed.layer_ids),
        "physical_to_logical_map": flat.tolist(),
        "summary": dict(placed.summary),
    }
    return json.dumps(document) + "\n"


def _all_layers(placed: PlacementFile) -> Slots:
    """Slots of every layer up to the last, [layers, slots]; dense layers hold the experts in order."""
    flat = placed.slots.reshape(len(placed.slots), -1)
    table = np.tile(np.arange(flat.shape[1]) % placed.experts, (max(placed.layer_ids) + 1, 1))
    table[list(placed.layer_ids)] = flat
    return table


def _sglang(placed: PlacementFile) -> str:
    """For --init-expert-location: one map and no other key; every layer of the model has a row."""
    return json.dumps({"physical_to_logical_map": _all_layers(placed).tolist()}) + "\n"


def _trtllm(placed: PlacementFile) -> str:
    """TensorRT-LLM's load balancer: assignments by the model's layer number, no updates while running."""
    flat = placed.slots.reshape(len(placed.slots), -1)
    lines = [f"num_slots: {flat.shape[1]}", "initial_global_assignments:"]
    lines += [
        f"  {layer}: {row.tolist()}" for layer, row in zip(placed.layer_ids, flat, strict=True)
    ]
    return "\n".join([*lines, "layer_updates_per_iter: 0"]) + "\n"


def _vllm_ascend(placed: PlacementFile) -> str:
    """vLLM-ascend's expert_map_path: the experts of each device, layer by layer, MoE layers only."""
    layers = [
        {
            "layer_id": index,
            "device_count": len(layer),
            "device_list": [
                {"device_id": gpu, "device_expert": experts.tolist()}
                for gpu, experts in enumerate(layer)
            ],
        }
        for index, layer in enumerate(placed.slots)
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n"


def _megatron(placed: PlacementFile) -> str:
    """A permutation for checkpoints: position p of a layer takes weights and router row of expert old[p]."""
    flat = placed.slots.reshape(len(placed.slots), -1)
    if flat.shape[1] != placed.experts:
        raise InputError(
            f"format: megatron trains every expert once: {flat.shape[1]} slots for {placed.experts} experts "
            f"hold replicas; use --slots {placed.experts}"
        )
    document = {
        "permutation": {
            str(i): row.tolist() for i, row in zip(placed.layer_ids, flat, strict=True)
        },
        "inverse": {
            str(i): np.argsort(row).tolist() for i, row in zip(placed.layer_ids, flat, strict=True)
        },
        "expert_model_parallel_size": placed.slots.shape[1],
    }
    return json.dumps(document) + "\n"

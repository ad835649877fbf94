"""Placement files: our own JSON, and what SGLang, TensorRT-LLM, vLLM-ascend and Megatron checkpoints load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.frameworks.megatron import MEGATRON
from meshwright.planner.experts.problem import Slots

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

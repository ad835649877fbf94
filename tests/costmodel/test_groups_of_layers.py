"""Experts in each n-th layer: two such layers are a model with a leading dense layer, priced another way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.footprint import stage_memory_parts_gib
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.parameters import (
    active_parameter_count,
    flops_per_token,
    parameter_count,
)
from meshwright.model_specs.schema import ModelSpec


def model(layers: int, **placed: int) -> ModelSpec:
    moe = {"experts": 16, "top_k": 2, "moe_ffn_hidden": 1024, "shared_experts": 1, **placed}
    fields: dict[str, Any] = {"layers": layers, "hidden": 2048, "ffn_hidden": 8192, "heads": 16}
    fields |= {"kv_heads": 4, "vocab": 32_000, "moe": moe}
    return ModelSpec.model_validate(fields)


def workload(spec: ModelSpec, framework: str = "megatron-lm") -> Workload:
    return Workload(
        model=spec,
        cluster=read_cluster("dgx-h100", gpus=8),
        gpus=8,
        seq_len=4096,
        global_batch=64,
        framework=framework,
    )


def layout(**changes: Any) -> Layout:
    fields: dict[str, Any] = {"tp": 2, "ep": 4, "dp": 4, "sequence_parallel": True, "zero_stage": 1}
    return Layout(**fields | {"num_micro_batches": 16} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": int(Recompute.FULL), "recompute_layers": 2},
        {"recompute": int(Recompute.LAYERNORM | Recompute.MLP)},
        {"zero_stage": 3},
    ],
)
@pytest.mark.parametrize("framework", ["megatron-lm", "torchtitan"])
def test_a_group_costs_what_its_layers_cost(changes: dict[str, Any], framework: str) -> None:
    leading, group = (
        workload(model(2, dense_layers=1), framework),
        workload(model(2, every=2), framework),
    )
    one = layout(**changes)
    placement = nested_placement(group.cluster, one)
    expected = estimate_layout(leading, one, placement, ((2,),))
    priced = estimate_layout(group, one, placement, ((2,),))
    for part, seconds in expected.breakdown_s.items():
        # Which layer's gradients are last, and so exposed, a mean layer does not say. The host runs beside
        # the mean of unlike layers, where it is hidden better.
        tolerance = {"dp_comm": 0.1, "host": 0.17, "recompute": 0.07, "scale": 0.03}.get(part, 1e-9)
        own = float(np.asarray(priced.breakdown_s[part]))
        assert own == pytest.approx(float(np.asarray(seconds)), rel=tolerance), part
        if part in ("host", "recompute"):
            assert own <= seconds * (1 + 1e-9)
    memory = stage_memory_parts_gib(group, one, ((2,),))
    for part, gib in stage_memory_parts_gib(leading, one, ((2,),)).items():
        if part == "work":
            # What recomputation brings back is that of the larger layer, not of the one with experts.
            assert memory[part] >= gib
        else:
            assert memory[part] == pytest.approx(gib, rel=1e-9), part


def test_numbers_are_those_of_the_same_layers() -> None:
    leading, group = model(2, dense_layers=1), model(2, every=2)
    assert group.expert_layers == leading.expert_layers == (1,)
    for count in (parameter_count, active_parameter_count):
        assert count(group) == count(leading)
    assert flops_per_token(group, 4096) == flops_per_token(leading, 4096)
    assert model(6, every=3).expert_layers == (2, 5)

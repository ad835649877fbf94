"""Mamba-1: parameters, price and memory by hand, and what its spec refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.other_blocks import mamba1_block, saved_bytes, selective_scan_s
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.blocks import Mamba1Spec
from meshwright.model_specs.parameters import (
    attention_flops_per_token,
    mamba_matmul_parameters,
    mamba_parameters,
)
from meshwright.model_specs.schema import ModelSpec

SPEC = Mamba1Spec(channels=32, step_rank=2, state_dim=4)
JAMBA = Mamba1Spec(channels=8192, step_rank=256, inner_norms=True)


def model(spec: Mamba1Spec = SPEC, **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "layers": 4,
        "hidden": 16,
        "ffn_hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 128,
        "norms_per_layer": 1,
        "hybrid_pattern": "M-M*",
        "mamba1": spec,
    }
    return ModelSpec.model_validate(fields | changes)


def test_parameters_and_flops_by_hand() -> None:
    # Channels and gate 32 each; step 2, B and C 4 each, of 32; 32 steps of 2; out 32.
    matrices = 16 * 64 + 32 * 10 + 2 * 32 + 32 * 16
    assert mamba_matmul_parameters(model()) == matrices
    # Convolution of 4 with a bias; 4 decays, a skip and a bias of the step to a channel.
    assert mamba_parameters(model()) == matrices + 32 * (5 + 4 + 2)
    normed = model(SPEC.model_copy(update={"inner_norms": True, "conv_bias": False}))
    assert mamba_parameters(normed) == matrices + 32 * (4 + 4 + 2) + 10
    scans = attention_flops_per_token(model(), 64) - attention_flops_per_token(
        model(hybrid_pattern="---*", mamba1=None), 64
    )
    assert scans == 2 * 3 * 7 * 32 * 4


@pytest.mark.parametrize(
    ("cluster", "lanes"), [("dgx-a100", 64), ("dgx-h100", 128), ("dgx-v100", 64)]
)
def test_the_scan_takes_its_instructions_beside_its_bytes(cluster: str, lanes: int) -> None:
    work = Workload(
        model=model(JAMBA, hidden=4096, layers=1, hybrid_pattern="M"),
        cluster=read_cluster(cluster),
        gpus=8,
        global_batch=16,
        seq_len=2048,
    )
    layout = Layout(dp=8, micro_batch=2)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    scan, states = selective_scan_s(c, JAMBA), 8192 * 16
    per_second = work.cluster.device.sms * lanes * 1.6e9
    moved = 10 * 8192 + 64 + 8 * states / 2048
    forward = 4096 * np.hypot(12 * states / per_second, moved / c.rates.hbm_bytes_per_s)
    assert scan.forward == pytest.approx(forward)
    assert float(scan.backward) > 3 * float(scan.forward)
    block = mamba1_block(c)
    assert float(block.forward["gemm"]) > float(scan.forward)
    assert "tp_comm" not in block.forward


def test_what_is_kept_by_hand() -> None:
    # Channels and gate, 10 selected, the output, and states of 8 bytes each 2,048 positions.
    bare = 2 * 64 + 2 * 10 + 2 * 32 + 8 * 32 * 4 / 2048
    assert saved_bytes(SPEC, 2.0) == bare
    # Fused kernels have no norms: convolved, steps, gated output and the normed values stay too.
    normed = SPEC.model_copy(update={"inner_norms": True})
    assert saved_bytes(normed, 1.0) == bare + (2 + 2 + 1) * 32 + 2 * 10
    work = Workload(
        model=model(layers=1, hybrid_pattern="M"),
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=8,
        seq_len=64,
    )
    kept, recomputed = activation_bytes_per_layer(work, Layout(dp=8), experts=False)
    assert kept == 64 * (2 * 16 + 2 * 16 + bare)
    assert recomputed == 64 * 2 * 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_pattern": "--**"}, "need each other"),
        ({"mamba": {"heads": 4, "head_dim": 8, "state_dim": 6}}, "exclude each other"),
        ({"hybrid_pattern": None}, "mamba1 needs hybrid_pattern"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        model(**changes)

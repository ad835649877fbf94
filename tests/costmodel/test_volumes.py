"""What the groups of a layout send in a step, worked by hand for a rank of Mixtral 8x7B."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import (
    GroupTraffic,
    RankWork,
    expert_passes,
    group_traffic,
    level_traffic,
    mean_rank_work,
    tensor_passes,
)
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec, adapter_counts
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import load_catalog_model

MODEL = load_catalog_model("mixtral-8x7b")
"""32 layers with experts, 4,096 wide, 8 heads of 128 for keys and as many for values."""
STAGES = ((8, 8), (8, 8))
LAYOUT = Layout(tp=2, cp=2, pp=2, vpp=2, dp=2, ep=2, num_micro_batches=4, zero_stage=1)
PARTLY = Layout(**vars(LAYOUT) | {"recompute": int(Recompute.FULL), "recompute_layers": 3})
"""Of each virtual stage of 8 layers 3 are computed again."""
TOKENS = 2048
"""Of a sequence of 4,096 on one of two context ranks."""
LAYERS = 4 * 16
"""That a rank runs in a step: 16 in each of four micro-batches."""
AGAIN = 4 * 2 * 3
ACTIVATION = 2 * TOKENS * 4096
"""Bytes."""


@cache
def context(layout: Layout) -> Context:
    workload = Workload(
        model=MODEL, cluster=read_cluster("dgx-h100"), gpus=16, global_batch=8, seq_len=4096
    )
    return make_context(workload, layout, nested_placement(workload.cluster, layout))


def sent(layout: Layout) -> GroupTraffic:
    return group_traffic(context(layout), STAGES)


@pytest.mark.parametrize(("layout", "again"), [(LAYOUT, 0), (PARTLY, AGAIN)])
def test_layers_are_counted_once_a_micro_batch(layout: Layout, again: int) -> None:
    work = mean_rank_work(context(layout), STAGES)
    assert (work.layers, work.moe_layers) == (LAYERS, LAYERS)
    assert (work.recomputed, work.moe_recomputed) == (again, again)
    assert work.activation_bytes == ACTIVATION


@pytest.mark.parametrize(("layout", "again"), [(LAYOUT, 0), (PARTLY, AGAIN)])
def test_keys_and_values_go_round_forward_backward_with_gradients_and_again(
    layout: Layout, again: int
) -> None:
    """Forward, and backward with their gradients: three times, and once more for what is recomputed."""
    of_rank = 2 * TOKENS * (8 / 2) * (128 + 128)
    assert sent(layout).context == pytest.approx(of_rank * (3 * LAYERS + again))


def test_tokens_go_to_experts_and_back_forward_and_backward() -> None:
    work = RankWork(
        micro_batches=1,
        activation_bytes=1.0,
        layers=9,
        recomputed=4,
        moe_layers=7,
        moe_recomputed=3,
        experts_alone=1,
    )
    assert expert_passes(work) == 4 * 7 + 2 * (3 + 1)
    plain, again = sent(LAYOUT), sent(PARTLY)
    assert again.experts / plain.experts == pytest.approx((4 * LAYERS + 2 * AGAIN) / (4 * LAYERS))


def test_the_tensor_group_adds_up_behind_every_block() -> None:
    """Experts without a shared one leave attention: an all-reduce of two passes forward and one backward, and
    one forward again; of two ranks each sends half a pass.
    """
    for layout, again in ((LAYOUT, 0), (PARTLY, AGAIN)):
        passes = tensor_passes(context(layout), mean_rank_work(context(layout), STAGES))
        assert passes == pytest.approx(2 * (2 * LAYERS + again))
        assert sent(layout).tensor == pytest.approx(ACTIVATION / 2 * passes)


def test_boundaries_are_crossed_by_every_virtual_stage_and_the_last_goes_back_to_the_first() -> (
    None
):
    traffic, once = sent(LAYOUT), ACTIVATION / 2 * 4
    assert traffic.boundary == once * 2
    assert traffic.wrap == once * 1


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_beside_adapters_only_their_gradients_are_sent(zero_stage: int, method: Any) -> None:
    """All-reduced in 4 bytes twice; or scattered, and gathered in 2. FSDP gathers the frozen model too, once
    for each of four micro-batches under ZeRO 2 and twice under 3: 0.53 bytes a parameter of the layers at 4
    bits, the rest at 16.
    """
    llama = load_catalog_model("llama-3-8b")
    adapters = AdapterSpec(method=method, rank=8, targets=("q_proj", "v_proj"))
    layout = Layout(dp=16, num_micro_batches=4, zero_stage=zero_stage)
    workload = Workload(
        model=llama,
        cluster=read_cluster("dgx-h100"),
        gpus=16,
        global_batch=64,
        seq_len=4096,
        framework="torchtitan",
        adapters=adapters,
    )
    c = make_context(workload, layout, nested_placement(workload.cluster, layout))
    trained, reductions = adapter_counts(llama, adapters).total, 4 if zero_stage >= 2 else 1
    gathers = {0: 0, 1: 1, 2: 4, 3: 8}[zero_stage]
    gradient = float(c.constants.framework.gradient_bytes)
    by_hand = (
        gathers * 2 * trained + (2 if zero_stage == 0 else 1) * reductions * gradient * trained
    )
    if zero_stage >= 2:
        narrow = 0.0 if method == "lora" else 6.98e9 * (2 - 0.515)
        by_hand += gathers * (2 * parameter_count(llama) - narrow)
    moved = group_traffic(c, ((32,),)).gradients
    assert moved == pytest.approx(by_hand * 15 / 16, rel=1e-5 if method == "lora" else 0.01)
    inner, outer = (level.bytes_per_step for level in level_traffic(c, ((32,),), 1.0))
    assert outer == pytest.approx(inner / 8)
    assert inner == pytest.approx(moved) or zero_stage == 0  # a tree may send less than rings do


def test_experts_without_adapters_are_gathered_and_send_nothing_between_shard_groups() -> None:
    layout = Layout(dp=16, ep=2, shard_groups=2, num_micro_batches=4, zero_stage=2)
    workload = Workload(
        model=MODEL,
        cluster=read_cluster("dgx-h100"),
        gpus=16,
        global_batch=64,
        seq_len=4096,
        framework="torchtitan",
        adapters=AdapterSpec(rank=8, targets=("q_proj",)),
    )
    c = make_context(workload, layout, nested_placement(workload.cluster, layout))
    moved = group_traffic(c, ((32,),))
    assert moved.gradients > 0 < moved.gradients_between
    assert moved.expert_gradients > 0 == moved.expert_gradients_between

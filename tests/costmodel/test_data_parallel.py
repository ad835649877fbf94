"""Data-parallel traffic by hand: buckets, how often gradients travel, tied token tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, FabricLevelSpec
from meshwright.costmodel.collectives import (
    all_reduce_s,
    best_beyond,
    chain_latency_s,
    long_ring_pass_s,
)
from meshwright.costmodel.data_parallel import (
    DataParallelTraffic,
    data_parallel_traffic,
    exposed_s,
    gather_after_update_s,
    largest_useful_window_s,
    passes_of_a_step,
)
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.schedules import Schedule
from meshwright.costmodel.states import state_bytes_per_parameter
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model


def context(layout: Layout, framework: str = "megatron", model: str = "llama-3-8b") -> Context:
    work = Workload(
        model=load_catalog_model(model),
        cluster=read_cluster("dgx-h100"),
        gpus=int(layout.gpus),
        global_batch=1024,
        seq_len=4096,
        framework=framework,
        dp_overlap=True,
    )
    return make_context(work, layout, nested_placement(work.cluster, layout))


@pytest.mark.parametrize(("dp", "bucket"), [(8, 40e6), (64, 64e6), (8192, 8.03e9)])
def test_megatron_leaves_one_bucket_exposed(dp: int, bucket: float) -> None:
    """max(40 M, 1 M dp) parameters: of 8 billion on 8,192 ranks all in one, where half a layer was taken."""
    c = context(Layout(dp=dp, zero_stage=1))
    members = c.placement.dp_cp
    traffic = data_parallel_traffic(c, 8.03e9, 0.0)
    sizes = (4 * bucket, 2 * bucket)
    tail_s = sum(float(np.asarray(long_ring_pass_s(size, members, c.links))) for size in sizes)
    assert float(np.asarray(traffic.tail_s)) == pytest.approx(tail_s)
    assert float(np.asarray(traffic.seconds)) == pytest.approx(tail_s * 8.03e9 / bucket)


def test_long_rings_pay_their_hops() -> None:
    """8,191 hops of which every eighth leaves the node; a tree would have 13, of which pieces fill ten."""
    c = context(Layout(dp=8192))
    assert c.links.fill_s is not None
    inside_s, outside_s = c.links.latency_s
    least_s = 7167.125 * inside_s + 1023.875 * outside_s + 10 * c.links.fill_s[1]
    empty_s = float(np.asarray(long_ring_pass_s(0.0, c.placement.dp_cp, c.links)))
    assert empty_s == pytest.approx(least_s)


@pytest.mark.parametrize(
    ("framework", "zero", "pp", "passes"),
    [
        ("megatron", 1, 1, (1, 1)),
        ("torchtitan", 2, 1, (4, 4)),
        ("torchtitan", 2, 2, (1, 1)),
        ("torchtitan", 3, 1, (8, 4)),
        ("torchtitan", 3, 2, (4, 1)),
        ("fsdp2", 2, 1, (4, 1)),
        ("fsdp2", 3, 1, (8, 1)),
        ("deepspeed", 1, 1, (1, 1)),
        ("deepspeed", 2, 1, (1, 4)),
    ],
)
def test_gathers_and_reductions_of_four_micro_batches(
    framework: str, zero: int, pp: int, passes: tuple[int, int]
) -> None:
    c = context(Layout(dp=8, pp=pp, zero_stage=zero, num_micro_batches=4), framework)
    assert tuple(int(np.asarray(x)) for x in passes_of_a_step(c)) == passes


def test_accelerate_keeps_gradients_whole_while_it_accumulates() -> None:
    """2 bytes in 16 bits instead of 4 / 8 in fp32: no_sync leaves them on every rank."""
    c = context(Layout(dp=8, zero_stage=3), "fsdp2")
    several = replace(c.layout, num_micro_batches=2)
    once, more = (
        float(np.asarray(state_bytes_per_parameter(c.workload, layout, 8)))
        for layout in (c.layout, several)
    )
    assert more - once == pytest.approx(2.0 - 4.0 / 8)


@pytest.mark.parametrize(
    ("zero", "pp", "bytes_each"),
    [
        (2, 1, 2 + 4 / 8 + 12 / 8),  # 16-bit weights whole; gradients and states in shards
        (2, 2, 2 + 4 + 12 / 8),  # gradients are whole, in fp32, until the last micro-batch
        (3, 1, 16 / 8),
        (
            3,
            2,
            4 / 8 + 2 + 4 + 8 / 8,
        ),  # 16-bit weights beside their fp32 shards, gradients, moments
        (0, 2, 2 + 4 + 12),
    ],
)
@pytest.mark.parametrize("stack", ["torchtitan", "torchtitan-eager"])
def test_a_pipeline_of_fsdp_modules_keeps_gradients_whole(
    stack: str, zero: int, pp: int, bytes_each: float
) -> None:
    """torch 2.13, pipelining/stage.py: set_requires_gradient_sync(False) until perform_reduce_grad."""
    c = context(Layout(dp=8, pp=pp, zero_stage=zero, num_micro_batches=4), stack)
    each = float(np.asarray(state_bytes_per_parameter(c.workload, c.layout, 8)))
    assert each == pytest.approx(bytes_each)


def test_a_tied_table_is_reduced_between_first_and_last_stage() -> None:
    """Its gradient, 50,257 x 1,600 of 4 bytes, crosses the node once, after the step's other traffic."""
    c = context(Layout(pp=16, dp=1, num_micro_batches=16), model="gpt2-xl")
    untied = replace(
        c.workload, model=c.workload.model.model_copy(update={"tied_embeddings": False})
    )
    stages = ((3,),) * 16
    tied_s = exact_step(c, stages).parts["dp_comm"]
    apart_s = exact_step(replace(c, workload=untied), stages).parts["dp_comm"]
    table_bytes = 4 * (50_257 + 1024) * 1600
    sent_s = table_bytes / float(c.links.bytes_per_s[1])
    assert float(np.asarray(tied_s - apart_s)) == pytest.approx(sent_s, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "vpp", "micro_batches", "beside"),
    [
        (Schedule.ONE_F_ONE_B, 1, 16, 1.0),
        (Schedule.ONE_F_ONE_B, 4, 16, 6.0),  # 3 of 4 chunks of the last 8 micro-batches
        (Schedule.ONE_F_ONE_B, 4, 4, 3.0),
        (Schedule.BREADTH_FIRST, 4, 16, 12.0),
        (Schedule.ZBV, 2, 16, 1.0),
    ],
)
def test_gradients_of_a_chunk_leave_beside_the_chunks_before_it(
    schedule: Schedule, vpp: int, micro_batches: int, beside: float
) -> None:
    """100 s of traffic beside micro-batches of 2 s each; an eighth of what is hidden slows the compute."""
    layout = Layout(
        pp=8, dp=8, zero_stage=1, vpp=vpp, num_micro_batches=micro_batches, schedule=int(schedule)
    )
    c = context(layout)
    slow_down = c.constants.framework.dp_interference
    seconds = float(np.asarray(exposed_s(c, DataParallelTraffic(100.0, 1.0, 100.0), 2.0)))
    assert seconds == pytest.approx(100.0 - (1.0 - slow_down) * 2.0 * beside)


def test_traffic_of_the_last_chunk_stays_exposed() -> None:
    """A quarter of it, where one chunk of a rank leaves a bucket of 40 M parameters, a hundredth."""
    whole = context(Layout(pp=8, dp=8, zero_stage=1, num_micro_batches=16))
    by_chunk = context(Layout(pp=8, dp=8, zero_stage=1, vpp=4, num_micro_batches=16))
    one, several = (data_parallel_traffic(c, 4e9, 0.0) for c in (whole, by_chunk))
    assert np.asarray(several.tail_s) == pytest.approx(np.asarray(several.seconds) / 4)
    assert np.asarray(one.tail_s) == pytest.approx(np.asarray(one.seconds) / 100)
    useful_s = largest_useful_window_s(by_chunk, several)
    around = [np.asarray(exposed_s(by_chunk, several, x * useful_s)) for x in (0.9, 1.0, 1.1)]
    assert around[1] < min(around[0], around[2])


@pytest.mark.parametrize(("gbps", "slower"), [(400, 1.0), (200, 1.0), (100, 2.0), (50, 4.0)])
def test_compute_loses_no_more_beside_a_slower_network(gbps: int, slower: float) -> None:
    """Bytes are those of the same collectives at 200 Gb/s a GPU; above that, traffic counts as it is."""
    layout = Layout(dp=64, zero_stage=3)

    def at(gbps: int) -> Context:
        c = context(layout, "llm-foundry")
        cluster = c.workload.cluster.model_copy(update={"nic_gbps_per_gpu": gbps})
        work = replace(c.workload, cluster=cluster)
        return make_context(work, layout, nested_placement(cluster, layout))

    c, full = at(gbps), at(max(gbps, 200))
    traffic, of_full = (data_parallel_traffic(each, 8.03e9, 0.0) for each in (c, full))
    assert np.asarray(traffic.moving_s) == pytest.approx(np.asarray(of_full.seconds))
    rates = c.links.bytes_per_s, c.links.moving.bytes_per_s
    assert rates[1] / rates[0] == pytest.approx([1.0, *[slower] * (len(rates[0]) - 1)])
    seconds, share = float(np.asarray(traffic.seconds)), c.constants.framework.dp_interference
    window_s = 10.0 * seconds
    exposed = float(np.asarray(exposed_s(c, traffic, window_s)))
    assert exposed == pytest.approx(share * float(np.asarray(of_full.seconds)))
    assert best_beyond(c.links).moving.bytes_per_s == pytest.approx(c.links.moving.bytes_per_s)


def behind_a_spine(nic_gbps: float, spine_gbps: float) -> ClusterSpec:
    """64 GPUs on two leaves, whose NICs the spine leaves `spine_gbps` each."""
    spine = FabricLevelSpec(name="spine", gpus=64, oversubscription=max(nic_gbps / spine_gbps, 1.0))
    levels = (FabricLevelSpec(name="leaf", gpus=32), spine)
    changed = {"nic_gbps_per_gpu": nic_gbps, "levels": levels, "gpus": 64}
    return read_cluster("dgx-h100").model_copy(update=changed)


@given(
    st.floats(10, 800), st.floats(10, 800), st.floats(1, 8),
    st.sampled_from(["nic", "spine"]), st.sampled_from([0, 2, 3]),
)  # fmt: skip
@settings(max_examples=100)
def test_a_faster_nic_or_fabric_is_never_slower(
    nic_gbps: float, spine_gbps: float, factor: float, what: str, zero_stage: int
) -> None:
    """What compute loses beside traffic went by the NIC alone: behind a spine of 50 Gb/s a GPU, 200 Gb/s took
    longer than 100, though they moved as much.
    """
    layout = Layout(dp=64, zero_stage=zero_stage, num_micro_batches=16)

    def step_s(nic_gbps: float, spine_gbps: float) -> float:
        cluster = behind_a_spine(nic_gbps, spine_gbps)
        work = replace(context(layout, "torchtitan").workload, cluster=cluster)
        c = make_context(work, layout, nested_placement(cluster, layout))
        own, moving = c.links.bytes_per_s, c.links.moving.bytes_per_s
        assert np.all(moving >= own)
        traffic = data_parallel_traffic(c, 8.03e9, 0.0)
        return float(np.asarray(exposed_s(c, traffic, 1.0)))

    better = (factor, 1.0) if what == "nic" else (1.0, factor)
    after_s = step_s(nic_gbps * better[0], spine_gbps * better[1])
    assert after_s <= step_s(nic_gbps, spine_gbps) * (1.0 + 1e-9)


def test_what_compute_loses_behind_a_thin_spine_does_not_go_by_the_nic() -> None:
    """Bytes over what 200 Gb/s a GPU would move, at 100 and at 400 Gb/s alike."""
    layout = Layout(dp=64, zero_stage=3)
    moving = []
    for nic_gbps in (100, 200, 400):
        cluster = behind_a_spine(nic_gbps, 50)
        work = replace(context(layout).workload, cluster=cluster)
        links = make_context(work, layout, nested_placement(cluster, layout)).links
        moving.append(links.moving.bytes_per_s[-1] / links.bytes_per_s[-1])
    assert moving == pytest.approx([4.0, 4.0, 4.0])


@pytest.mark.parametrize(("gbps", "rises"), [(400, True), (200, True), (100, False), (50, False)])
def test_nics_behind_a_slower_bus_move_no_faster_than_it(gbps: int, rises: bool) -> None:
    """A group with one GPU in a node costs compute no less than one whose bytes pass the bus of the node."""
    cluster = read_cluster("l40s-pcie").model_copy(update={"nic_gbps_per_gpu": gbps})
    layout = Layout(dp=64, zero_stage=3)
    work = replace(context(layout, "torchtitan").workload, cluster=cluster)
    links = make_context(work, layout, nested_placement(cluster, layout)).links
    own, moving = links.bytes_per_s, links.moving.bytes_per_s
    assert np.all(moving >= own)
    assert bool(np.any(np.diff(moving) > 0)) == rises == bool(np.any(np.diff(own) > 0))


@pytest.mark.parametrize("groups", [1, 2])
def test_internevo_broadcasts_when_the_optimizer_has_ended(groups: int) -> None:
    """Gradients leave beside a backward pass, two thirds of a micro-batch; weights come beside nothing."""
    c = context(Layout(dp=16, zero_stage=1, shard_groups=groups), "internevo")
    members = c.placement.dp_cp
    inside = np.minimum(members, 16 // groups)
    broadcast_s = 16 // groups * chain_latency_s(inside, c.links)
    bucket = 2.0**29
    pieces = 8.03e9 / bucket
    gathered_s = pieces * long_ring_pass_s(2 * bucket, inside, c.links)
    after_s = np.asarray(gather_after_update_s(c, 8.03e9, 0.0))
    assert after_s == pytest.approx(np.asarray(gathered_s + broadcast_s))
    traffic = data_parallel_traffic(c, 8.03e9, 0.0)
    reduced_s = np.asarray(all_reduce_s(2 * bucket, members, c.links))
    assert np.asarray(traffic.seconds) == pytest.approx(pieces * reduced_s)
    assert np.asarray(traffic.tail_s) == pytest.approx(reduced_s)
    sent = DataParallelTraffic(100.0, 1.0, 100.0)
    hidden_s = 2.0 / 3.0 * 3.0 * (1.0 - c.constants.framework.dp_interference)
    assert float(np.asarray(exposed_s(c, sent, 3.0))) == pytest.approx(100.0 - hidden_s)


def test_aleph_alphas_stack_reduces_and_gathers_beside_nothing() -> None:
    """All-reduces of 500 M gradients at 32 bits when the backward passes have ended, then gathers at 16."""
    c = context(Layout(dp=8, pp=2, num_micro_batches=8, zero_stage=1), "aa-scaling")
    bucket, parameters = 5e8, 4e9
    reduced_s = 8 * np.asarray(all_reduce_s(4 * bucket, c.placement.dp_cp, c.links))
    traffic = data_parallel_traffic(c, parameters, 0.0)
    assert np.asarray(traffic.seconds) == pytest.approx(reduced_s)
    assert np.asarray(exposed_s(c, traffic, 1e3)) == pytest.approx(reduced_s)
    gathered_s = 8 * np.asarray(long_ring_pass_s(2 * bucket, c.placement.dp_cp, c.links))
    assert np.asarray(gather_after_update_s(c, parameters, 0.0)) == pytest.approx(gathered_s)


def test_fsdp2_copies_what_it_gathers_and_reduces_on_the_stream_of_its_passes() -> None:
    """Two gathers of 2 B in and out and one reduction of 2 B in, 4 B out, a micro-batch: 14 B a parameter."""
    parameters, micro_batches = 8.03e9, 4
    layout = Layout(dp=8, num_micro_batches=micro_batches, zero_stage=3)
    c = context(layout, "torchtitan")
    copied_s = micro_batches * 14.0 * parameters / c.rates.hbm_bytes_per_s
    traffic = data_parallel_traffic(c, parameters, 0.0)
    stack = replace(c.constants.framework, copies_shards=False)
    views = data_parallel_traffic(
        replace(c, constants=replace(c.constants, framework=stack)), parameters, 0.0
    )
    assert np.asarray(traffic.seconds) == pytest.approx(np.asarray(views.seconds) + copied_s)
    hidden_s = np.asarray(exposed_s(c, views, 1e3))
    assert np.asarray(exposed_s(c, traffic, 1e3)) == pytest.approx(hidden_s + copied_s)
    alone = context(Layout(dp=8, num_micro_batches=4, zero_stage=3, shard_groups=8), "torchtitan")
    unsharded = data_parallel_traffic(alone, parameters, 0.0)
    assert np.all(np.asarray(unsharded.tail_s) == 0.0)


@pytest.mark.parametrize(
    ("stack", "layout", "of_parameter"),
    [
        # Accelerate: two gathers (4 B) of each micro-batch, one copy of 16-bit gradients (4), three sums (6).
        ("fsdp2", Layout(dp=8, num_micro_batches=4, zero_stage=3), 4 * 8.0 + 4.0 + 3 * 6.0),
        # torchtitan in a pipeline: one gather, one copy into 32 bits (6), three sums there (10).
        ("torchtitan", Layout(dp=4, pp=2, num_micro_batches=4, zero_stage=2), 4.0 + 6.0 + 3 * 10.0),
        # Whole replicas: the sums alone.
        ("torchtitan", Layout(dp=4, pp=2, num_micro_batches=4), 3 * 10.0),
        ("fsdp2", Layout(dp=8, num_micro_batches=4), 3 * 6.0),
    ],
)
def test_gradients_that_are_not_reduced_yet_are_added_to_whole_sums(
    stack: str, layout: Layout, of_parameter: float
) -> None:
    c = context(layout, stack)
    framework = replace(c.constants.framework, copies_shards=False)
    views = replace(c, constants=replace(c.constants, framework=framework))
    with_copies, without = (
        np.asarray(data_parallel_traffic(x, 1e9, 0.0).seconds) for x in (c, views)
    )
    assert with_copies - without == pytest.approx(of_parameter * 1e9 / c.rates.hbm_bytes_per_s)

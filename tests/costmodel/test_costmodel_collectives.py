"""Collectives on a fabric with levels, worked by hand, and placements that feed them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import fabric_levels, full_levels
from meshwright.cluster_specs.reader import cluster_names, load_cluster, read_cluster
from meshwright.costmodel import textbook as formulas
from meshwright.costmodel.collectives import (
    Links,
    all_reduce_s,
    all_to_all_s,
    best_beyond,
    goes_by_tree,
    halves_go_by_tree,
    neighbour_ring_s,
    point_to_point_s,
    ring_pass_s,
)
from meshwright.costmodel.layout import AXES, Layout
from meshwright.costmodel.placement import level_factors, nested_placement, placement_from_matrix
from meshwright.costmodel.rates import links_of, named_constants
from meshwright.planner.bounds.mappings import gpu_of_rank, matrices, packed_placement

GB = 1e9


def links(
    *bytes_per_s: float, latency_s: float | tuple[float, ...] = 0.0, half_bytes: float = 0.0
) -> Links:
    rates = np.array(bytes_per_s)
    return Links(
        bytes_per_s=rates,
        all_to_all_bytes_per_s=rates,
        latency_s=np.broadcast_to(np.array(latency_s, dtype=np.float64), rates.shape),
        half_bytes=np.full(rates.shape, half_bytes),
    )


def members(*inside_out: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(inside_out, dtype=np.int64)


def test_ring_inside_one_block_is_the_textbook_ring() -> None:
    fabric = links(450 * GB, 50 * GB)
    textbook = formulas.Link(alpha_s=0.0, bytes_per_s=450 * GB)
    found = all_reduce_s(GB, members(8, 8), fabric)
    assert found == pytest.approx(
        formulas.textbook_s("all-reduce", "ring", GB, 8, textbook), rel=1e-12
    )
    assert found == pytest.approx(2 * 7 / 8 / 450)


def test_a_block_s_members_share_the_way_out() -> None:
    """8 members in a node take its 8 NICs, 4 take 4 of them, 1 takes 1; the NVLink part is faster here."""
    fabric = links(4000 * GB, 50 * GB)
    for inside in (1, 4, 8):
        found = ring_pass_s(GB, members(inside, 64), fabric)
        assert found == pytest.approx(63 / 64 / (inside * 50))


def test_a_ring_of_neighbours_leaves_a_block_over_one_member_s_links() -> None:
    """However many sit in a node, its last one sends to the next; 15/16 of the buffer in all."""
    fabric = links(4000 * GB, 50 * GB)
    for inside in (1, 4, 8):
        found = neighbour_ring_s(GB, members(inside, 64), fabric)
        assert found == pytest.approx(63 / 64 / 50)
    assert neighbour_ring_s(GB, members(8, 8), fabric) == ring_pass_s(GB, members(8, 8), fabric)
    assert neighbour_ring_s(GB, members(1, 8), fabric) == ring_pass_s(GB, members(1, 8), fabric)
    assert neighbour_ring_s(GB, members(1, 1), fabric) == 0


def test_no_placement_of_a_ring_of_neighbours_beats_the_packed_one() -> None:
    fabric = best_beyond(links(200 * GB, 50 * GB, 25 * GB))
    for size in range(2, 33):
        packed = neighbour_ring_s(GB, members(min(size, 8), min(size, 16), size), fabric)
        for inner in (k for k in range(1, 9) if size % k == 0):
            for middle in (k for k in range(inner, 17, inner) if size % k == 0):
                placed = neighbour_ring_s(GB, members(inner, middle, size), fabric)
                assert packed <= placed * (1 + 1e-12)


def test_an_all_reduce_between_two_blocks_is_a_tree() -> None:
    """16 members on two nodes: n over 8 NICs of 50 GB/s at 0.92 of the rate, where a ring takes 15/8 n."""
    fabric = links(4000 * GB, 50 * GB)
    assert all_reduce_s(GB, members(8, 16), fabric) == pytest.approx(1 / (8 * 50) / 0.92)
    assert all_reduce_s(GB, members(8, 32), fabric) == pytest.approx(2 * 31 / 32 / (8 * 50))
    assert all_reduce_s(GB, members(1, 2), fabric) == pytest.approx(1 / 50)


def test_a_tree_between_two_blocks_is_no_faster_than_its_channels() -> None:
    """A100 nodes with 100 GB/s: NCCL's tree sums 110 / 2 GB/s, rings 8/15 of the rate of eight NICs."""
    slow, fast = (
        replace(links(4000 * GB, nic * GB), tree_bytes_per_s=110 * GB) for nic in (12.5, 25.0)
    )
    assert all_reduce_s(GB, members(8, 16), slow) == pytest.approx(2 / 110)
    assert all_reduce_s(GB, members(8, 16), fast) == pytest.approx(2 * 15 / 16 / 200)
    assert goes_by_tree(members(8, 16), slow)
    assert not goes_by_tree(members(8, 16), fast)
    assert not goes_by_tree(members(8, 24), slow)
    assert halves_go_by_tree(16, slow)
    assert not halves_go_by_tree(16, fast)


def test_no_placement_of_an_all_reduce_beats_the_packed_one() -> None:
    """The most inside a block and the fewest blocks: also next to the switch from ring to tree."""
    limited = replace(links(200 * GB, 50 * GB, 25 * GB), tree_bytes_per_s=220 * GB)
    for fabric in (best_beyond(links(200 * GB, 50 * GB, 25 * GB)), best_beyond(limited)):
        _packed_all_reduces_are_fastest(fabric)


def _packed_all_reduces_are_fastest(fabric: Links) -> None:
    for size in range(2, 33):
        packed = all_reduce_s(GB, members(min(size, 8), min(size, 16), size), fabric)
        for inner in (k for k in range(1, 9) if size % k == 0):
            for middle in (k for k in range(inner, 17, inner) if size % k == 0):
                placed = all_reduce_s(GB, members(inner, middle, size), fabric)
                assert packed <= placed * (1 + 1e-12)


def test_the_slowest_level_paces_the_ring() -> None:
    fabric = links(100 * GB, 50 * GB, 50 * GB / 3)
    assert ring_pass_s(GB, members(8, 8, 8), fabric) == pytest.approx(7 / 8 / 100)
    assert ring_pass_s(GB, members(8, 16, 16), fabric) == pytest.approx(15 / 16 / 100)
    assert ring_pass_s(GB, members(1, 8, 16), fabric) == pytest.approx(15 / 16 / 50)
    assert ring_pass_s(GB, members(1, 1, 16), fabric) == pytest.approx(15 / 16 * 3 / 50)


def test_hops_are_those_of_a_tree_over_the_levels() -> None:
    fabric = links(1e30, 1e30, latency_s=(1.0, 10.0))
    assert ring_pass_s(1.0, members(8, 64), fabric) == pytest.approx(3 * 1 + 3 * 10)
    assert all_reduce_s(1.0, members(8, 8), fabric) == pytest.approx(6)


def test_pieces_fill_every_hop_between_nodes() -> None:
    fabric = replace(links(1e30, 1e30, latency_s=(1.0, 10.0)), fill_s=np.array([0.0, 5.0]))
    assert ring_pass_s(1.0, members(8, 64), fabric) == pytest.approx(3 * 1 + 3 * (10 + 5))
    assert best_beyond(fabric).fill_s == pytest.approx([0.0, 5.0])


def test_rings_on_three_a100_nodes_are_as_fast_as_measured_over_all_sizes() -> None:
    """NVIDIA/nccl-tests issue 119: 24 GPUs, 4 x 200 Gb/s a node, mean 84.8 GB/s over 1 to 128 MiB."""
    cluster = read_cluster("dgx-a100").model_copy(update={"nic_gbps_per_gpu": 100.0})
    constants = named_constants("a100-sxm-80gb", "ampere", "megatron", {})
    fabric = links_of(fabric_levels(cluster, 24), constants)
    sizes = np.arange(1, 129).astype(np.float64) * 2.0**20
    rates = 2 * 23 / 24 * sizes / all_reduce_s(sizes, members(8, 24), fabric)
    assert rates.mean() == pytest.approx(84.8 * GB, rel=0.1)


def test_small_messages_do_not_fill_the_links() -> None:
    fabric = links(GB, half_bytes=1e6)
    assert ring_pass_s(1e6, members(2), fabric) == pytest.approx(0.5 * 1e6 / GB * 2)
    assert ring_pass_s(1e12, members(2), fabric) == pytest.approx(0.5 * 1e12 / GB, rel=2e-3)


def test_a_group_of_one_costs_nothing_anywhere() -> None:
    fabric = links(GB, GB, latency_s=1.0, half_bytes=1e6)
    for function in (ring_pass_s, all_reduce_s, all_to_all_s):
        assert np.all(
            np.asarray(function(np.array([0.0, 1e9]), members(1, 1)[None], fabric)) == 0.0
        )


def test_an_empty_message_still_takes_its_hops() -> None:
    fabric = links(GB, latency_s=1.0, half_bytes=1e6)
    assert ring_pass_s(0.0, members(8), fabric) == pytest.approx(3.0)


def test_all_to_all_ends_with_its_slowest_level() -> None:
    """64 members, 8 a node: 63/64 leave the GPU, 56/64 leave the node."""
    fabric = links(400 * GB, 50 * GB)
    assert all_to_all_s(GB, members(8, 64), fabric) == pytest.approx(
        max(63 / 64 / 400, 56 / 64 / 50)
    )
    assert all_to_all_s(GB, members(8, 64), links(10 * GB, 50 * GB)) == pytest.approx(63 / 64 / 10)
    assert all_to_all_s(GB, members(8, 8), fabric) == pytest.approx(7 / 8 / 400)


def test_copies_scale_the_level_that_they_cross() -> None:
    fabric = links(400 * GB, 50 * GB)
    found = all_to_all_s(GB, members(8, 64), fabric, np.array([8.0, 4.0]))
    assert found == pytest.approx(max(8 * 63 / 64 / 400, 4 * 56 / 64 / 50))


def test_gradients_of_175b_over_the_global_links_of_a_dragonfly() -> None:
    """TP 8 x PP 8 fill a group of 64 GPUs: 1.4 TB leave it over 8 links of 50 GB/s, 3.4 s."""
    fabric = links(450 * GB, 50 * GB, 8 * 50 * GB / 64)
    gradients = 175e9 / 64 * 4
    assert 64 * 2 * 63 / 64 * gradients == pytest.approx(1.4e12, rel=0.02)
    assert all_reduce_s(gradients, members(1, 1, 64), fabric) == pytest.approx(3.4, rel=0.02)


def test_point_to_point() -> None:
    fabric = links(400 * GB, 50 * GB, latency_s=(1e-6, 5e-6))
    assert point_to_point_s(GB, 1, fabric) == pytest.approx(5e-6 + 1 / 50)
    both = np.asarray(point_to_point_s(GB, np.array([0, 1]), fabric))
    assert both == pytest.approx([1e-6 + 1 / 400, 5e-6 + 1 / 50])


def test_best_beyond_takes_the_best_of_the_levels_outside() -> None:
    fabric = links(25 * GB, 50 * GB, 10 * GB, latency_s=(3.0, 1.0, 2.0))
    best = best_beyond(fabric)
    assert best.bytes_per_s.tolist() == [50 * GB, 50 * GB, 10 * GB]
    assert best.latency_s.tolist() == [1.0, 1.0, 2.0]


def test_best_beyond_keeps_a_fabric_that_slows_outwards() -> None:
    fabric = links(450 * GB, 50 * GB, 25 * GB, latency_s=(1.0, 2.0, 3.0))
    best = best_beyond(fabric)
    assert all(np.array_equal(getattr(best, name), getattr(fabric, name)) for name in vars(fabric))


@given(st.data())
def test_packed_groups_are_never_slower(data: st.DataObject) -> None:
    """Whatever the levels' rates, a group spread in any way loses to the packed one on the best beyond."""
    blocks = np.cumprod(data.draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3)))
    size = 2 ** data.draw(st.integers(0, int(np.log2(blocks[-1]))))
    spread, held = [], 1
    for block, below in zip(blocks, [1, *blocks[:-1]], strict=True):
        most = min(size, held * block // below)
        held = data.draw(
            st.sampled_from([x for x in (held * 2**k for k in range(10)) if x <= most])
        )
        spread.append(held)
    spread[-1] = size
    rates = data.draw(st.lists(st.floats(1.0, 100.0), min_size=len(blocks), max_size=len(blocks)))
    waits = data.draw(st.lists(st.floats(0.0, 10.0), min_size=len(blocks), max_size=len(blocks)))
    fabric = links(*rates, latency_s=tuple(waits), half_bytes=100.0)
    packed = np.minimum(size, blocks)
    n = data.draw(st.floats(1.0, 1e4))
    for function in (ring_pass_s, all_to_all_s):
        best = np.asarray(function(n, packed, best_beyond(fabric)))
        assert best <= np.asarray(function(n, members(*spread), fabric)) * (1 + 1e-12)


def test_scalar_and_array_agree() -> None:
    fabric = links(450 * GB, 50 * GB, latency_s=(1e-6, 4e-6), half_bytes=1e7)
    sizes = np.array([[1, 1], [2, 2], [8, 8], [8, 512], [1, 64]])
    payload = np.array([1.0, 1e3, 1e6, 1e9, 1e12])
    for function in (ring_pass_s, all_reduce_s, all_to_all_s):
        many = np.asarray(function(payload, sizes, fabric))
        each = [
            float(np.asarray(function(n, size, fabric)))
            for n, size in zip(payload, sizes, strict=True)
        ]
        assert many == pytest.approx(each, rel=1e-14)


def test_nested_orders_on_nodes_of_8() -> None:
    cluster = read_cluster("dgx-h100")
    layout = Layout(tp=4, dp=8, pp=2)
    inner = nested_placement(cluster, layout)
    assert (inner.tp.tolist(), inner.dp.tolist(), inner.pp.tolist()) == ([4, 4], [2, 8], [1, 2])
    outer = nested_placement(cluster, layout, ("pp", "tp", "cp", "dp"))
    assert (outer.tp.tolist(), outer.dp.tolist(), outer.pp.tolist()) == ([4, 4], [1, 8], [2, 2])


def test_rings_that_straddle_nodes_share_the_links_of_the_node_that_most_leave() -> None:
    """tp 6 on nodes of 8: the two rings that leave the middle node share the links of its 8 GPUs."""
    placement = nested_placement(read_cluster("dgx-h100"), Layout(tp=6, dp=4))
    assert placement.tp.tolist() == [4, 6]
    assert placement.dp.tolist() == [1, 4]


def test_expert_groups_are_carved_out_of_tp_cp_and_dp() -> None:
    cluster = read_cluster("dgx-h100")
    wide = nested_placement(cluster, Layout(tp=4, dp=16, ep=8, etp=1))
    assert (wide.etp.tolist(), wide.ep.tolist(), wide.edp.tolist()) == ([1, 1], [8, 8], [1, 8])
    tensor = nested_placement(cluster, Layout(tp=4, dp=16, ep=8, etp=4))
    assert (tensor.etp.tolist(), tensor.ep.tolist(), tensor.edp.tolist()) == (
        [4, 4],
        [2, 8],
        [1, 2],
    )
    whole = nested_placement(cluster, Layout(tp=2, dp=4, ep=8))
    assert whole.edp.tolist() == [1]


def brute_force_members(
    matrix: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]], axis: str, blocks: list[int]
) -> list[int]:
    """Members of rank 0's group along an axis in each block of the fabric that holds rank 0."""
    degrees = [int(np.prod(matrix[name])) for name in AXES]
    position = gpu_of_rank({name: matrix[name].tolist() for name in AXES})
    stride = int(np.prod(degrees[: AXES.index(axis)]))
    group = position[np.arange(degrees[AXES.index(axis)]) * stride]
    return [int(np.sum(group // block == position[0] // block)) for block in blocks]


@given(st.data())
def test_placements_count_what_ranks_on_gpus_show(data: st.DataObject) -> None:
    cluster = read_cluster(
        data.draw(st.sampled_from(["dgx-h100", "h100-leaf-3to1", "gb200-nvl72"]))
    )
    degree = st.sampled_from([1, 2, 4, 8])
    layout = Layout(
        tp=data.draw(degree), cp=data.draw(degree), dp=data.draw(degree), pp=data.draw(degree)
    )
    factors = level_factors(cluster, int(layout.gpus))
    table = matrices(layout, factors.tolist())
    chosen = data.draw(st.integers(0, len(table["tp"]) - 1))
    row = {axis: entries[chosen] for axis, entries in table.items()}
    placement = placement_from_matrix(layout, row)
    blocks = np.cumprod(factors).tolist()
    for axis in AXES:
        assert getattr(placement, axis).tolist() == brute_force_members(row, axis, blocks)


@given(st.data())
def test_packed_placements_bound_every_other(data: st.DataObject) -> None:
    cluster = read_cluster(data.draw(st.sampled_from(["dgx-h100", "superpod-a100", "gb200-nvl72"])))
    degree = st.sampled_from([1, 2, 3, 4, 8])
    layout = Layout(
        tp=data.draw(degree), cp=data.draw(degree), dp=data.draw(degree), pp=data.draw(degree)
    )
    layout = replace(layout, ep=int(layout.tp) * int(layout.dp))
    whole, used = full_levels(cluster), fabric_levels(cluster, int(layout.gpus))
    blocks = [int(whole.blocks[whole.names.index(name)]) for name in used.names]
    packed = packed_placement(layout, np.array([*blocks[:-1], int(layout.gpus)]))
    order = ("tp", *data.draw(st.sampled_from(list(permutations(AXES[1:])))))
    placement = nested_placement(cluster, layout, order)
    for name, members in vars(placement).items():
        assert np.all(members <= getattr(packed, name)), name
        assert members[-1] == getattr(packed, name)[-1], name


def test_levels_multiply_to_the_allocation() -> None:
    for name, gpus in (
        ("dgx-h100", 20),
        ("h100-leaf-3to1", 512),
        ("gb200-nvl72", 144),
        ("llama3-24k", 16_384),
    ):
        cluster = read_cluster(name)
        assert np.prod(level_factors(cluster, gpus)) == gpus
        assert len(level_factors(cluster, gpus)) == len(fabric_levels(cluster, gpus).names)


def _members(blocks: tuple[int, ...]) -> list[NDArray[np.int64]]:
    """Every way in which a group of 12 may lie in blocks of three levels."""
    return [
        np.array([inner, middle, 12])
        for middle in range(1, blocks[1] + 1)
        for inner in range(1, min(middle, blocks[0]) + 1)
    ]


@given(st.data())
def test_with_the_best_links_nothing_gains_by_reaching_farther(data: st.DataObject) -> None:
    """Whatever the rates, the latencies, and what small messages lose at each level."""
    rate = st.floats(1.0, 1000.0)

    def three(values: st.SearchStrategy[float]) -> NDArray[np.float64]:
        return np.array([data.draw(values) for _ in range(3)])

    best = best_beyond(
        Links(
            bytes_per_s=three(rate) * GB,
            all_to_all_bytes_per_s=three(rate) * GB,
            latency_s=three(st.floats(1e-6, 2e-5)),
            half_bytes=three(st.sampled_from([0.0, 1e5, 1e7, 1e8])),
            fill_s=three(st.sampled_from([0.0, 3e-5, 1e-3])),
        )
    )
    sent = np.geomspace(1e2, 1e10, 33)
    ways = _members((8, 12))
    for cost in (ring_pass_s, neighbour_ring_s):
        seconds = [np.asarray(cost(sent, each, best)) for each in ways]
        for near, near_s in zip(ways, seconds, strict=True):
            for far, far_s in zip(ways, seconds, strict=True):
                if np.all(near >= far):
                    assert np.all(near_s <= far_s * (1 + 1e-9)), (near, far)


@pytest.mark.parametrize("name", cluster_names())
def test_on_machines_of_the_catalog_a_ring_gains_nothing_by_reaching_farther(name: str) -> None:
    cluster = load_cluster(name)
    device = cluster.device
    constants = named_constants(device.name, device.architecture, "megatron", {})
    of_cluster = links_of(fabric_levels(cluster, min(cluster.gpus, 4096)), constants)
    assert np.array_equal(best_beyond(of_cluster).half_bytes, of_cluster.half_bytes)

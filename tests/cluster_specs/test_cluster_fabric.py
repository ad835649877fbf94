"""Fabric levels: hand-worked allocations, and properties of every allocation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.cluster_specs.allocation import FabricLevels, fabric_levels
from meshwright.cluster_specs.reader import cluster_names, load_cluster, load_device
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError


def cluster(**fields: Any) -> ClusterSpec:
    base = {
        "device": load_device("h100-sxm-80gb"),
        "gpus": 4096,
        "gpus_per_node": 8,
        "nvlink_domain": 8,
    }
    return ClusterSpec.model_validate({**base, "nic_gbps_per_gpu": 400, **fields})


def table(levels: FabricLevels) -> list[tuple[str, str, int, float]]:
    rows = zip(
        levels.names, levels.media, levels.blocks.tolist(), levels.gb_per_s.tolist(), strict=True
    )
    return [(name, medium, block, round(rate, 6)) for name, medium, block, rate in rows]


def test_one_dgx_node_is_one_level() -> None:
    assert table(fabric_levels(load_cluster("dgx-h100"), 8)) == [("nvlink", "nvlink", 8, 450)]
    assert table(fabric_levels(load_cluster("dgx-h100"), 4)) == [("nvlink", "nvlink", 4, 450)]
    assert table(fabric_levels(load_cluster("dgx-h100"), 1)) == [("nvlink", "nvlink", 1, 450)]


def test_dgx_nodes_on_a_non_blocking_fabric() -> None:
    levels = fabric_levels(load_cluster("dgx-h100"), 64)
    assert table(levels) == [("nvlink", "nvlink", 8, 450), ("fabric", "infiniband", 64, 50)]
    assert levels.latency_s.tolist() == pytest.approx([1.9e-6, 4e-6])


def test_nvl72_has_no_node_level() -> None:
    assert table(fabric_levels(load_cluster("gb200-nvl72"), 144)) == [
        ("nvlink", "nvlink", 72, 900),
        ("fabric", "infiniband", 144, 50),
    ]


@pytest.mark.parametrize(
    ("gpus", "rack"),
    [
        (256, 64),
        (144, 72),
        (8, 8),
        (48, 48),
        (64, 64),
        (72, 72),
        (128, 64),
        (512, 64),
        (131_072, 64),
        (100, 20),
    ],
)
def test_racks_of_72_are_filled_evenly(gpus: int, rack: int) -> None:
    assert fabric_levels(load_cluster("gb300-nvl72"), gpus).blocks[0] == rack


def test_a_cluster_of_its_own_size_need_not_be_whole_racks() -> None:
    # 1,024 GPUs in racks of 72 are 16 racks of 64, not 14.2 full ones.
    spec = cluster(device=load_device("gb200"), gpus=1024, gpus_per_node=4, nvlink_domain=72)
    assert fabric_levels(spec, 1024).blocks.tolist() == [64, 1024]


def test_even_filling_stops_at_the_racks_there_are() -> None:
    # 14 racks of 72. 896 GPUs are 14 x 64. 960 are 15 x 64 and 16 x 60, too many racks; blocks of 48, 40 and
    # 32 fit a rack once, once and twice (20, 24, 30 needed, 14, 14, 28 there); 24 three times (40 of 42).
    spec = cluster(device=load_device("gb200"), gpus=1008, gpus_per_node=4, nvlink_domain=72)
    assert fabric_levels(spec, 896).blocks[0] == 64
    assert fabric_levels(spec, 960).blocks[0] == 24
    assert fabric_levels(spec, 1008).blocks[0] == 72


def test_llama3_at_16384_is_eight_pods_of_2048() -> None:
    assert table(fabric_levels(load_cluster("llama3-24k"), 16_384)) == [
        ("nvlink", "nvlink", 8, 450),
        ("rack", "roce", 16, 50),
        ("pod", "roce", 2048, 50),
        ("aggregation", "roce", 16_384, round(50 / 7, 6)),
    ]
    assert fabric_levels(load_cluster("llama3-24k"), 24_576).blocks.tolist() == [
        8,
        16,
        3072,
        24_576,
    ]
    assert fabric_levels(load_cluster("llama3-24k"), 2048).names == ("nvlink", "rack", "pod")


def test_l40s_nodes_have_pcie_inside() -> None:
    assert table(fabric_levels(load_cluster("l40s-pcie"), 32)) == [
        ("node", "pcie", 8, 32),
        ("fabric", "roce", 32, 12.5),
    ]


def test_dragonfly_groups_share_eight_global_links() -> None:
    # 8 links of 50 GB/s over 64 GPUs: 6.25 GB/s each.
    assert table(fabric_levels(load_cluster("dragonfly-4096"), 4096)) == [
        ("nvlink", "nvlink", 8, 450),
        ("group", "infiniband", 64, 50),
        ("global", "infiniband", 4096, 6.25),
    ]


def test_mi300x_scales_up_over_xgmi() -> None:
    assert table(fabric_levels(load_cluster("mi300x"), 8)) == [("xgmi", "xgmi", 8, 448)]


def test_nvlink_bridges_smaller_than_the_node() -> None:
    levels = fabric_levels(cluster(nvlink_domain=2), 64)
    assert table(levels) == [
        ("nvlink", "nvlink", 2, 450),
        ("node", "pcie", 8, 64),
        ("fabric", "infiniband", 64, 50),
    ]


def test_the_worst_oversubscription_so_far_counts() -> None:
    rows = [
        {"name": "leaf", "gpus": 64},
        {"name": "pod", "gpus": 512, "oversubscription": 4},
        {"name": "core", "gpus": 4096, "oversubscription": 2, "latency_us": 30},
    ]
    levels = fabric_levels(cluster(levels=rows), 4096)
    assert levels.gb_per_s.tolist() == [450, 50, 12.5, 12.5]
    assert levels.latency_s[-1] == pytest.approx(30e-6)


def test_the_clusters_own_nvlink_rate_wins() -> None:
    assert fabric_levels(cluster(nvlink_gb_per_s=123), 8).gb_per_s[0] == 123


def test_part_filled_nodes_count_by_the_piece_they_share() -> None:
    assert fabric_levels(cluster(), 20).blocks.tolist() == [4, 20]
    assert fabric_levels(cluster(), 12).blocks.tolist() == [4, 12]
    assert fabric_levels(cluster(), 13).blocks.tolist() == [1, 13]
    assert fabric_levels(cluster(nvlink_domain=2), 12).blocks.tolist() == [2, 4, 12]


def test_six_free_gpus_on_two_nodes_are_not_one_node() -> None:
    nodes = [{"name": "a", "free_gpus": 3}, {"name": "b", "free_gpus": 3}]
    assert fabric_levels(cluster(gpus=6, nodes=nodes), 6).blocks.tolist() == [3, 6]
    assert fabric_levels(cluster(gpus=6, nodes=nodes), 3).blocks.tolist() == [3]


def test_part_filled_nodes_of_one_listed_leaf_meet_there() -> None:
    """Six free GPUs on each of two nodes are beyond one node, and within their leaf all the same."""
    levels = [{"name": "leaf", "gpus": 128}, {"name": "core", "gpus": 4096, "oversubscription": 4}]

    def on_leaves(*leaves: str) -> FabricLevels:
        nodes = [{"name": f"n{k}", "leaf": leaf, "free_gpus": 6} for k, leaf in enumerate(leaves)]
        gpus = 6 * len(nodes)
        return fabric_levels(cluster(gpus=gpus, levels=levels, nodes=nodes), gpus)

    assert table(on_leaves("a", "a")) == [
        ("nvlink", "nvlink", 6, 450),
        ("leaf", "infiniband", 12, 50),
    ]
    assert table(on_leaves("a", "a", "b", "b")) == [
        ("nvlink", "nvlink", 6, 450),
        ("leaf", "infiniband", 12, 50),
        ("core", "infiniband", 24, 12.5),
    ]
    assert table(on_leaves("a", "b")) == [
        ("nvlink", "nvlink", 6, 450),
        ("core", "infiniband", 12, 12.5),
    ]


@pytest.mark.parametrize(("gpus", "blocks"), [(8, [1, 8]), (5, [5, 5]), (3, [3, 3])])
def test_free_gpus_of_several_nodes_are_no_node_though_one_would_hold_them(
    gpus: int, blocks: list[int]
) -> None:
    """Three and five free GPUs are eight, as many as a node has: five of them were taken for one node's."""
    nodes = [{"name": f"n{free}", "leaf": "l", "free_gpus": free} for free in (3, 5)]
    levels = fabric_levels(cluster(gpus=8, nodes=nodes), gpus)
    assert levels.names == ("nvlink", "fabric")
    assert levels.blocks.tolist() == blocks


def test_the_answer_is_cached_and_read_only() -> None:
    first = fabric_levels(load_cluster("dgx-h100"), 512)
    assert fabric_levels(load_cluster("dgx-h100"), 512) is first
    with pytest.raises(ValueError, match="read-only"):
        first.blocks[0] = 1


@pytest.mark.parametrize("gpus", [0, -8, 4097])
def test_more_gpus_than_there_are_is_refused_with_both_numbers(gpus: int) -> None:
    with pytest.raises(InputError, match=rf"{gpus} asked for.*has 4096"):
        fabric_levels(cluster(), gpus)


@given(name=st.sampled_from(cluster_names()), data=st.data())
def test_blocks_nest_and_end_with_the_allocation(name: str, data: st.DataObject) -> None:
    spec = load_cluster(name)
    gpus = data.draw(st.integers(1, spec.gpus))
    levels = fabric_levels(spec, gpus)
    assert levels.blocks[-1] == gpus
    assert (np.diff(levels.blocks) > 0).all()
    assert (levels.blocks[1:] % levels.blocks[:-1] == 0).all()
    assert (levels.gb_per_s > 0).all()
    assert len(levels.names) == len(levels.media) == len(levels.gb_per_s) == len(levels.latency_s)
    assert levels.blocks[0] <= max(spec.nvlink_domain, spec.gpus_per_node)


@given(
    per_node=st.sampled_from([1, 4, 8]),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    data=st.data(),
)
def test_even_blocks_fit_the_machine(per_node: int, sizes: list[int], data: st.DataObject) -> None:
    """So many blocks as the allocation needs can be cut out of the machine's, level by level."""
    factors = np.cumprod([per_node, *sizes])
    rows = [{"name": f"l{k}", "gpus": int(size)} for k, size in enumerate(factors[1:])]
    spec = cluster(
        gpus=int(factors[-1]), gpus_per_node=per_node, nvlink_domain=per_node, levels=rows
    )
    gpus = per_node * data.draw(st.integers(1, int(factors[-1]) // per_node))
    levels = fabric_levels(spec, gpus)
    size_of = {
        "nvlink": per_node,
        "node": per_node,
        **{f"l{k}": int(s) for k, s in enumerate(factors[1:])},
    }
    inner, usable, below = 1, 1, 1
    for name, block in zip(levels.names[:-1], levels.blocks[:-1].tolist(), strict=True):
        usable = size_of[name] // below * (usable // inner * inner)
        assert block <= usable
        assert spec.gpus // size_of[name] * (usable // block) * block >= gpus
        inner, below = block, size_of[name]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"levels": [{"name": "leaf", "gpus": 20}]}, "leaf has 20 GPUs, not a multiple of the 8"),
        ({"levels": [{"name": "leaf", "gpus": 64}]}, "leaf, has 64 GPUs, but the cluster has 4096"),
        ({"nvlink_domain": 6}, "one must be a multiple of the other"),
        ({"device": load_device("l40s"), "nvlink_domain": 8}, "l40s states no scale_up_gb_per_s"),
        (
            {"levels": [{"name": "a", "gpus": 64}, {"name": "a", "gpus": 4096}]},
            "two levels are called a",
        ),
        ({"nodes": [{"name": "n1"}, {"name": "n1"}], "gpus": 16}, "n1 is listed twice"),
        ({"nodes": [{"name": "n1", "free_gpus": 9}], "gpus": 9}, "more than gpus_per_node 8"),
        ({"nodes": [{"name": "n1"}], "gpus": 16}, "16, but the nodes listed have 8 free GPUs"),
        ({"node_name_pattern": "{0.__class__}"}, "node_name_pattern"),
        ({"nodes": [{"name": "n1; rm -rf"}], "gpus": 8}, "nodes.0.name"),
        ({"node_name_pattern": "n{}\n"}, "node_name_pattern"),
    ],
)
def test_inconsistent_clusters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        cluster(**fields)


def test_beside_leaves_a_node_without_one_has_a_leaf_and_a_pod_to_itself() -> None:
    levels = [
        {"name": "leaf", "gpus": 128},
        {"name": "pod", "gpus": 512, "oversubscription": 2},
        {"name": "core", "gpus": 4096, "oversubscription": 4},
    ]
    nodes = [
        {"name": "a", "leaf": "b", "pod": "p"},
        {"name": "b"},
        {"name": "c", "pod": "p"},
        {"name": "d", "leaf": "e", "free_gpus": 0},
    ]
    spec = cluster(gpus=24, levels=levels, nodes=nodes)
    assert [(node.leaf, node.pod) for node in spec.nodes] == [
        ("b", "p"),
        ("1-b", "1-b"),
        ("c", "p"),
        ("e", None),
    ]
    assert ClusterSpec.model_validate(spec.model_dump(exclude={"kind"})).nodes == spec.nodes
    no_pods = cluster(gpus=16, levels=levels, nodes=[{"name": "a", "leaf": "l"}, {"name": "b"}])
    assert [(node.leaf, node.pod) for node in no_pods.nodes] == [("l", None), ("b", None)]
    no_leaves = cluster(gpus=16, levels=levels, nodes=[{"name": "a"}, {"name": "b"}])
    assert [(node.leaf, node.pod) for node in no_leaves.nodes] == [(None, None), (None, None)]

"""All-to-alls of groups in unequal parts of blocks: the GPU with the fewest members beside it paces."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.reader import cluster_from_mapping, load_cluster, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.collectives import Links, all_to_all_s
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.placement import _exchange_members, nested_placement
from meshwright.costmodel.rates import constants_for, links_of
from meshwright.costmodel.recount import recounted_placement
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.mapping.counted import counted_placement

GB = 1e9
LINKS = Links(
    bytes_per_s=np.array([400.0, 50.0]) * GB,
    all_to_all_bytes_per_s=np.array([400.0, 50.0]) * GB,
    latency_s=np.zeros(2),
    half_bytes=np.zeros(2),
)
"""NVLink and one NIC for each GPU."""


def six_of_eight(nodes: int) -> ClusterSpec:
    """DGX H100 with 6 free GPUs a node."""
    free = [{"name": f"a[0-{nodes - 1}]", "leaf": "l0", "free_gpus": 6}]
    return cluster_from_mapping({"name": "six", "base": "dgx-h100", "nodes": free})


def placements_of(cluster: ClusterSpec, layout: Layout, free: int) -> list[Placement]:
    """By the two counters, ranks running through so many GPUs of each node."""
    ranks = [divmod(rank, free) for rank in range(int(layout.gpus))]
    return [
        counted_placement(cluster, layout, ranks),
        recounted_placement(cluster, layout, ranks),
    ]


def test_the_two_of_six_and_two_send_most_over_their_own_adapters() -> None:
    """24 GPUs, 6 a node, expert groups of 8: parts 6 + 2, 4 + 4 and 2 + 6.

    Each of the 2 sends 6/8 of its 4 GB over its NIC of 50 GB/s: 60 ms. The mean member of the first node
    would send 2/8 in 20 ms.
    """
    for placement in placements_of(six_of_eight(4), Layout(dp=24, ep=8), 6):
        assert placement.ep.tolist() == [2, 8]
        seconds = float(np.asarray(all_to_all_s(4 * GB, placement.ep, LINKS)))
        assert seconds == pytest.approx(0.060)


def test_equal_parts_are_as_they_were() -> None:
    """16 experts' ranks on two nodes of 8: every GPU sends half over its NIC."""
    placement = nested_placement(load_cluster("dgx-h100"), Layout(dp=16, ep=16))
    assert placement.ep.tolist() == [8, 16]
    seconds = float(np.asarray(all_to_all_s(4 * GB, placement.ep, LINKS)))
    assert seconds == pytest.approx(4 * (8 / 16) / 50)


def test_groups_of_64_in_racks_of_72() -> None:
    """576 GPUs: the first group fills 64 of a rack, 8 of the second are with it and 56 in the next rack.

    Those 8 send 56/64 outside: parts of 8, 16, 24 and so on, the smallest of them 8.
    """
    placement = nested_placement(load_cluster("gb200-nvl72"), Layout(dp=576, ep=64))
    assert placement.ep.tolist() == [8, 64]
    seconds = float(np.asarray(all_to_all_s(4 * GB, placement.ep, LINKS)))
    assert seconds == pytest.approx(4 * (56 / 64) / 50)


def test_no_gpu_sends_for_longer_than_the_price() -> None:
    """Random blocks: what each rank sends over its own links, added up rank by rank."""
    chance = np.random.default_rng(0)
    for _ in range(300):
        size, count, blocks = (int(chance.integers(1, most)) for most in (13, 5, 6))
        groups = chance.integers(0, blocks, (count, size))
        sent_s = [
            4 * (size - Counter(group)[own]) / size / 50
            for group in groups.tolist()
            for own in group
        ]
        inside_s = 4 * (size - 1) / size / 400
        members = np.array([_exchange_members(groups), size])
        priced_s = float(np.asarray(all_to_all_s(4 * GB, members, LINKS)))
        assert priced_s == pytest.approx(max(inside_s, *sent_s)), groups


@pytest.mark.parametrize(
    ("cluster", "dispatch", "megabytes", "milliseconds"),
    [
        ("dgx-a100", "alltoall", 134.2, 0.6405),
        ("dgx-a100", "alltoall", 536.9, 2.3135),
        ("dgx-h100", "alltoall", 134.2, 0.4024),
        ("dgx-h100", "alltoall", 536.9, 1.4904),
        ("dgx-b200", "alltoall", 134.2, 0.2366),
        ("dgx-b200", "alltoall", 536.9, 0.8342),
        ("dgx-h100", "deduplicated", 308.3, 0.973),
        ("hgx-h800", "deduplicated", 308.3, 1.951),
    ],
)
def test_time_goes_with_bytes_inside_a_domain(
    cluster: str,
    dispatch: Literal["alltoall", "deduplicated"],
    megabytes: float,
    milliseconds: float,
) -> None:
    """nccl-tests, alltoall_perf over 8 GPUs (ai-dynamo/aiconfigurator 095f58a5, systems/data, comm/nccl).

    The last two are DeepEP's combine of 4,096 tokens of 7,168, 5.25 copies each (the same,
    comm/sglang/0.5.6.post2, 20 SMs; 158 GB/s, deepseek-ai/DeepEP, README). Steps attain up to a fifth less
    beside compute, and a call's 30 to 40 us are left out.
    """
    spec = read_cluster(cluster)
    work = Workload(
        model=load_catalog_model("mixtral-8x7b"),
        cluster=spec,
        gpus=8,
        global_batch=8,
        seq_len=4096,
        moe_dispatch=dispatch,
    )
    found = links_of(fabric_levels(spec, 8), constants_for(work))
    if dispatch == "deduplicated":
        assert found.dispatched_bytes_per_s is not None
        found = replace(found, all_to_all_bytes_per_s=found.dispatched_bytes_per_s)
    seconds = float(np.asarray(all_to_all_s(megabytes * 1e6, np.array([8]), found)))
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.2)

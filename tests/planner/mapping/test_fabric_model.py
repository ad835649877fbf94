"""Rails, direct links between groups, other jobs' traffic and slower NICs: levels, graph, cuts and prices."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.allocation import (
    allocated_places,
    fabric_levels,
    full_levels,
    is_irregular,
)
from meshwright.cluster_specs.links import CORE
from meshwright.cluster_specs.reader import cluster_from_mapping, load_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import level_rates, neighbour_share, uplinks
from meshwright.costmodel.collectives import (
    Links,
    all_to_all_s,
    best_beyond,
    collective_time,
    cross_rail_bytes,
    isolated_fabric,
)
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.execution_names import Dispatcher
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rates import constants_for, links_of
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.model_specs.reader import read_model
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.least_traffic import least_traffic
from meshwright.planner.mapping.problem import MappingProblem, Traffic
from meshwright.planner.mapping.slots import slots_of
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.plan_request import PlanRequest
from tests.fabric_graphs import cut_between_gb_per_s, cut_gb_per_s, fabric_graph, node_graph
from tests.soaked import examples

LEVELS: list[dict[str, object]] = [
    {"name": "leaf", "gpus": 32},
    {"name": "pod", "gpus": 128, "oversubscription": 2},
    {"name": "core", "gpus": 512, "oversubscription": 4},
]
NODES: list[dict[str, object]] = [
    {"name": "a[1-4]", "leaf": "l1", "pod": "p1"},
    {"name": "b[1-2]", "leaf": "l2", "pod": "p1"},
    {"name": "c[1-2]", "leaf": "l3", "pod": "p2"},
]


def cluster(**fields: object) -> ClusterSpec:
    return cluster_from_mapping({"base": "dgx-h100", "levels": LEVELS, "nodes": NODES} | fields)


def railed(*, pxn: bool, oversubscription: float = 3.0, nvlink_domain: int = 8) -> ClusterSpec:
    """Units of four nodes on eight rails under a spine."""
    levels = [
        {"name": "unit", "gpus": 32, "rails": 8},
        {"name": "spine", "gpus": 128, "oversubscription": oversubscription},
    ]
    fields = {
        "base": "dgx-h100",
        "gpus": 128,
        "levels": levels,
        "pxn": pxn,
        "nvlink_domain": nvlink_domain,
    }
    return cluster_from_mapping(fields)


# Rails


def test_a_unit_of_rails_is_eight_switches_that_meet_in_the_spine() -> None:
    graph = fabric_graph(load_cluster("superpod-h100"), 512)
    assert graph.edges["node0", "scalable-unit/0/rail3"]["capacity"] == pytest.approx(50)
    assert graph.edges["scalable-unit/0/rail3", "root"]["capacity"] == pytest.approx(32 * 50)
    assert graph.nodes["scalable-unit/1/rail0"] == {"level": "scalable-unit", "gpus": 32}
    assert cut_between_gb_per_s(graph, ["node0"], ["node1"]) == pytest.approx(400)
    first = [f"node{at}" for at in range(32)]
    assert cut_between_gb_per_s(graph, first, ["node32", "node33"]) == pytest.approx(800)


def test_without_pxn_rails_meet_only_above_the_unit() -> None:
    """Half of the rails of 32 GPUs send 16 x 50 / 3 GB/s to the other half; one rail stays below."""
    graph = fabric_graph(railed(pxn=False), 128)
    low = [f"node{n}/rail{r}" for n in range(4) for r in range(4)]
    high = [f"node{n}/rail{r}" for n in range(4) for r in range(4, 8)]
    assert cut_between_gb_per_s(graph, low, high) == pytest.approx(16 * 50 / 3)
    assert cut_between_gb_per_s(graph, ["node0/rail1"], ["node1/rail1"]) == pytest.approx(50)
    assert cut_between_gb_per_s(graph, ["node0/rail1"], ["node1/rail2"]) == pytest.approx(50)
    assert cut_between_gb_per_s(graph, ["node0"], ["node1"]) == pytest.approx(400)


def test_nodes_outside_the_cut_carry_nothing() -> None:
    """With PXN a third node would join the rails that node0 and node1 hang on, were it to pass traffic on."""
    graph = fabric_graph(railed(pxn=True, oversubscription=1000), 128)
    assert cut_between_gb_per_s(graph, ["node0"], ["node4"]) == pytest.approx(32 * 50 / 1000)


@pytest.mark.parametrize("pxn", [True, False])
def test_seven_eighths_of_an_all_to_all_change_rails(pxn: bool) -> None:
    """4 nodes of 8 under one unit: 3/4 of what a GPU sends leaves its node, 7/8 of that for another rail."""
    fabric = isolated_fabric(railed(pxn=pxn), 32, deduplicated=False)
    sent = 1e9
    found = collective_time("all-to-all", sent, fabric).seconds
    rate = 50e9 * 0.9
    if pxn:
        assert found == pytest.approx(0.75 * sent / rate, rel=0.05)
    else:
        assert found == pytest.approx(0.75 * 7 / 8 * sent * 3 / rate, rel=0.05)


def test_a_dispatcher_that_relays_inside_the_node_never_changes_rails() -> None:
    with_pxn, without = (isolated_fabric(railed(pxn=pxn), 32) for pxn in (True, False))
    assert collective_time("all-to-all", 1e9, with_pxn) == collective_time(
        "all-to-all", 1e9, without
    )


def test_cross_rail_bytes_by_hand() -> None:
    """64 GPUs, 8 a node, 32 a unit: 56 units leave a node, 32 of them the unit; of 24 inside 7/8 change."""
    volume, rails = np.array([63.0, 56.0, 32.0]), np.array([1, 8, 1])
    assert cross_rail_bytes(volume, np.array([8, 32, 64]), rails) == pytest.approx(24 * 7 / 8 + 32)
    alone = cross_rail_bytes(np.array([7.0, 7.0, 4.0]), np.array([1, 4, 8]), rails)
    assert alone == pytest.approx(4), "one member a node stays on its rail"


@given(
    inside=st.sampled_from([1, 2, 4, 8]), nodes=st.integers(1, 4), units=st.integers(1, 4),
    over=st.floats(1, 20), sent=st.floats(1, 1e10),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_rails_never_make_it_faster_and_more_spine_never_slower(
    inside: int, nodes: int, units: int, over: float, sent: float
) -> None:
    members = np.array([inside, inside * nodes, inside * nodes * units])

    def seconds(pxn: bool, ratio: float) -> float:
        spec = railed(pxn=pxn, oversubscription=ratio)
        return float(
            all_to_all_s(sent, members, links_of(full_levels(spec), constants_for(workload(spec))))
        )

    assert seconds(False, over) >= seconds(True, over) * (1 - 1e-12)
    assert seconds(False, over) >= seconds(False, 1.0) * (1 - 1e-12)


def workload(
    spec: ClusterSpec, gpus: int | None = None, dispatch: Dispatcher = "alltoall"
) -> Workload:
    return Workload(
        model=read_model("mixtral-8x7b"),
        cluster=spec,
        gpus=gpus or spec.gpus,
        global_batch=128,
        seq_len=4096,
        moe_dispatch=dispatch,
    )


@pytest.mark.parametrize("dispatch", ["alltoall", "deduplicated"])
def test_a_layout_s_bound_holds_with_rails_apart(dispatch: Dispatcher) -> None:
    work = workload(railed(pxn=False, oversubscription=8), 128, dispatch)
    for degrees in ({"tp": 1, "dp": 32, "pp": 4, "ep": 8}, {"tp": 4, "dp": 8, "pp": 4, "ep": 8}):
        layout = Layout(
            **degrees, micro_batch=1, num_micro_batches=128 // degrees["dp"], sequence_parallel=True
        )
        many = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
        bound = float(CostModelPricing(work).lower_bound_s(many)[0])
        for order in (("tp", "cp", "dp", "pp"), ("tp", "pp", "cp", "dp"), ("dp", "tp", "pp", "cp")):
            placement = nested_placement(work.cluster, layout, order)
            priced = estimate_layout(work, layout, placement, ((8,),) * 4)
            assert bound <= float(np.asarray(priced.step_time_s)) * (1 + 1e-9)


def test_best_links_have_no_rails() -> None:
    links = links_of(full_levels(railed(pxn=False)), constants_for(workload(railed(pxn=False))))
    assert links.rails is not None
    assert best_beyond(links).rails is None


def test_without_nvlink_there_is_no_pxn() -> None:
    """NCCL relays through a GPU that NVLink joins; over PCIe what changes rails crosses the spine."""
    spec = railed(pxn=True, nvlink_domain=1)
    assert not spec.crosses_rails_inside
    assert fabric_levels(spec, 128).rails.tolist() == [1, 8, 1]
    assert railed(pxn=True).crosses_rails_inside
    assert fabric_levels(railed(pxn=True), 128).rails.tolist() == [1, 1, 1]


def test_catalog_says_which_machines_have_rails() -> None:
    """DGX SuperPODs do; Meta's racks of two nodes hang on one switch each (arXiv 2407.21783, 3.3.1)."""

    def rails(name: str) -> list[int]:
        return [level.rails for level in load_cluster(name).levels]

    assert rails("superpod-a100") == rails("superpod-h100") == [8, 1, 1]
    assert rails("h100-leaf-3to1") == [8, 1]
    assert rails("llama3-24k") == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"levels": [{"name": "leaf", "gpus": 512, "rails": 3}]}, "do not divide"),
        (
            {"levels": [{"name": "leaf", "gpus": 32}, {"name": "pod", "gpus": 512, "rails": 8}]},
            "innermost",
        ),
        ({"levels": [{"name": "leaf", "gpus": 512, "rails": 8}], "pxn": False}, "leave pxn on"),
        ({"levels": [{"name": "leaf", "gpus": 512, "joined": "direct"}]}, "outermost of several"),
        (
            {
                "levels": [
                    {"name": "a", "gpus": 32, "rails": 8},
                    {"name": "b", "gpus": 512, "joined": "direct"},
                ]
            },
            "can have rails",
        ),
        ({"levels": [{"name": "leaf", "gpus": 512, "background": 0.5}]}, "no up-links"),
        (
            {"blocks": [{"leaf": "l9", "background": 0.5}]},
            "did you mean 'l1'|no node hangs on 'l9'",
        ),
        ({"blocks": [{"pod": "p9", "background": 0.5}]}, "no node is in 'p9'"),
        ({"blocks": [{"background": 0.5}]}, "neither a leaf nor a pod"),
        ({"blocks": [{"leaf": "l1", "background": 1.5}]}, "at most 0.99"),
        ({"blocks": [{"leaf": "l1", "background": 0.1}] * 2}, "listed twice"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], part: str) -> None:
    with pytest.raises(InputError, match=part):
        cluster(**fields)


# Dragonfly


def test_the_dragonfly_s_links_and_cuts() -> None:
    """64 groups x 8 links x 50 GB/s = 25.6 TB/s of end points, 12.8 of links; the middle meets 32 x 32 of
    the 2,016 pairs, 6.5 TB/s one way (13 both ways, where half of the links would be 12.8)."""
    dragonfly = load_cluster("dragonfly-4096")
    graph = fabric_graph(dragonfly, 4096)
    pairs = [edge for edge in graph.edges if all(end.startswith("group/") for end in edge)]
    assert len(pairs) == 64 * 63 // 2
    links = sum(graph.edges[pair]["capacity"] for pair in pairs)
    assert links == pytest.approx(12_800)
    assert 2 * links == pytest.approx(64 * 8 * 50)
    assert cut_gb_per_s(dragonfly, 4096)[-1] == pytest.approx(12_800 * 32 * 32 / 2016)
    assert nx.is_connected(graph)
    group = [f"node{at}" for at in range(8)]
    others = [f"node{at}" for at in range(8, 512)]
    assert cut_between_gb_per_s(graph, group, others) == pytest.approx(400)


def test_two_groups_of_a_dragonfly_reach_each_other_over_the_others() -> None:
    """Directly they have 8/63 of a link; by detours all eight."""
    graph = fabric_graph(load_cluster("dragonfly-4096"), 128)
    assert graph.edges["group/0", "group/1"]["capacity"] == pytest.approx(400 / 63)
    first, second = ([f"node{at}" for at in range(lo, lo + 8)] for lo in (0, 8))
    assert cut_between_gb_per_s(graph, first, second) == pytest.approx(400)


def test_rings_over_groups_pay_for_detours_and_all_to_alls_do_not() -> None:
    level = load_cluster("dragonfly-4096").levels[-1]
    assert neighbour_share(level, 2) == 1
    assert neighbour_share(level, 3) == pytest.approx(0.75)
    assert neighbour_share(level, 64) == pytest.approx(64 / 126)
    assert neighbour_share(load_cluster("llama3-24k").levels[-1], 8) == 1
    spec = load_cluster("dragonfly-4096")
    links = links_of(fabric_levels(spec, 4096), constants_for(workload(spec)))
    assert links.bytes_per_s[-1] / links.all_to_all_bytes_per_s[-1] == pytest.approx(64 / 126)


def test_gradients_of_175_b_on_the_dragonfly() -> None:
    """TP 8 x PP 8 fills a group: each of its GPUs sends 2 x 63/64 of its 10.9 GB, the group 1.38 TB over 8
    links: 3.4 s if rings take the groups in different orders, 6.8 s if all take them in the same."""
    gradients = 175e9 / 64 * 4
    group_tb = 64 * 2 * 63 / 64 * gradients / 1e12
    assert group_tb == pytest.approx(1.38, abs=0.01)
    assert group_tb / 0.4 == pytest.approx(3.4, abs=0.05)
    levels = fabric_levels(load_cluster("dragonfly-4096"), 4096)
    rate = float(levels.gb_per_s[-1] * levels.neighbour_share[-1]) * 1e9
    assert 2 * 63 / 64 * gradients / rate == pytest.approx(6.8, abs=0.05)
    # The write-up: 1.4 TB over the end points of all links.
    assert pytest.approx(0.055, abs=0.001) == 1.4e12 / 25.6e12
    assert pytest.approx(0.275, abs=0.002) == 1.4e12 / 25.6e12 / 0.2


# Other jobs


def test_a_free_gpu_has_its_share_of_an_up_link_unless_more_is_known() -> None:
    first = {"leaf": "l1", "pod": "p1"}
    half = [{"name": "a1", **first}, {"name": "a2", "free_gpus": 0, **first}, *NODES[1:]]
    silent = uplinks(cluster(nodes=half)).leaves["p1", "l1"]
    assert (silent.free, silent.gb_per_s, silent.stated) == (8, 8 * 25, False)
    known = uplinks(cluster(nodes=half, blocks=[{"leaf": "l1", "background": 0.4}])).leaves[
        "p1", "l1"
    ]
    assert known.gb_per_s == pytest.approx(0.6 * 16 * 25), "what others leave of 16 GPUs' links"
    idle = uplinks(cluster(nodes=half, blocks=[{"leaf": "l1", "background": 0}])).leaves["p1", "l1"]
    assert idle.gb_per_s == pytest.approx(8 * 50), "no more than eight NICs"


def test_a_level_s_background_is_that_of_each_of_its_blocks() -> None:
    levels = [{**LEVELS[0], "background": 0.5}, {**LEVELS[1], "background": 0.25}, LEVELS[2]]
    spec = cluster(levels=levels, blocks=[{"leaf": "l2", "background": 0.0}])
    links = uplinks(spec)
    assert links.leaves["p1", "l1"].gb_per_s == pytest.approx(0.5 * 32 * 25)
    assert links.leaves["p1", "l2"].gb_per_s == pytest.approx(16 * 25)
    assert links.pods["p1", ""].gb_per_s == pytest.approx(0.75 * 48 * 12.5)
    graph = node_graph(spec)
    assert graph.edges["leaf/p1/l1", "pod/p1"]["capacity"] == pytest.approx(0.5 * 32 * 25)
    assert cut_between_gb_per_s(graph, ["a1", "a2", "a3", "a4"], ["b1", "b2"]) == pytest.approx(400)
    assert graph.edges["pod/p1", CORE]["capacity"] == pytest.approx(0.75 * 48 * 12.5)
    assert slots_of(spec, slot_gpus=8, wanted=8).leaf_links_gb_per_s == pytest.approx(
        (400, 400, 200)
    )


def test_a_regular_machine_has_what_others_leave() -> None:
    levels = [{**LEVELS[0], "background": 0.2}, {**LEVELS[1], "background": 0.6}, LEVELS[2]]
    spec = cluster_from_mapping({"base": "dgx-h100", "gpus": 512, "levels": levels})
    assert level_rates(spec) == pytest.approx([50, 50 / 2 * 0.8, 50 / 4 * 0.4])
    assert fabric_levels(spec, 512).gb_per_s.tolist() == pytest.approx([450, 50, 20, 5])
    assert cut_gb_per_s(spec, 512)[-1] == pytest.approx(256 * 5)


def test_unequal_backgrounds_make_equal_leaves_unlike() -> None:
    even = [{"name": "a[1-2]", "leaf": "l1"}, {"name": "b[1-2]", "leaf": "l2"}]
    assert not is_irregular(cluster(nodes=even))
    assert is_irregular(cluster(nodes=even, blocks=[{"leaf": "l2", "background": 0.3}]))
    assert not is_irregular(
        cluster(nodes=even, blocks=[{"leaf": f"l{n}", "background": 0.3} for n in (1, 2)])
    )


@given(
    busy=st.lists(st.floats(0, 0.95), min_size=3, max_size=3),
    less=st.floats(0, 1),
    leaf=st.integers(0, 2),
)
@settings(max_examples=examples(25), deadline=None)
def test_less_background_never_worsens_the_best_mapping(
    busy: list[float], less: float, leaf: int
) -> None:
    def best_s(shares: list[float]) -> float:
        blocks = [{"leaf": f"l{at + 1}", "background": share} for at, share in enumerate(shares)]
        slots = slots_of(cluster(blocks=blocks), slot_gpus=8, wanted=6)
        problem = MappingProblem(
            stages=2,
            slots=3,
            traffic=Traffic(ring_bytes=8e9, hop_bytes=3e9),
            leaf_slots=tuple(len(places) for places in slots.places),
            leaf_s_per_byte=tuple(1e-9 / link for link in slots.leaf_links_gb_per_s),
            leaf_pod=slots.leaf_pod,
            pod_s_per_byte=tuple(1e-9 / link for link in slots.pod_links_gb_per_s),
        )
        found = least_traffic(problem, time_limit_s=10)
        assert found.proven
        return found.price_s

    quieter = [share * less if at == leaf else share for at, share in enumerate(busy)]
    assert best_s(quieter) <= best_s(busy) * (1 + 1e-6)


@given(share=st.floats(0, 0.95), less=st.floats(0, 1), level=st.integers(0, 1))
@settings(max_examples=examples(30), deadline=None)
def test_less_background_never_slows_a_step(share: float, less: float, level: int) -> None:
    def step_s(background: float) -> float:
        levels = [dict(one) for one in LEVELS]
        levels[level]["background"] = background
        spec = cluster_from_mapping({"base": "dgx-h100", "gpus": 512, "levels": levels})
        layout = Layout(
            tp=1, dp=128, pp=4, ep=8, micro_batch=1, num_micro_batches=1, sequence_parallel=False
        )
        placement = nested_placement(spec, layout)
        return float(
            np.asarray(estimate_layout(workload(spec), layout, placement, ((8,),) * 4).step_time_s)
        )

    assert step_s(share * less) <= step_s(share) * (1 + 1e-12)


@pytest.mark.slow
def test_less_background_never_worsens_a_plan() -> None:
    """The optimum over a few layouts on slow NICs, leaves equally and unequally busy."""

    def optimum_s(blocks: list[dict[str, object]]) -> float:
        nodes = [{"name": f"{leaf}[1-2]", "leaf": leaf} for leaf in "ab"]
        request = PlanRequest(
            model=read_model("llama-3-8b"),
            cluster=cluster(nodes=nodes, blocks=blocks, nic_gbps_per_gpu=25),
            gpus=32,
            global_batch=32,
            seq_len=4096,
            pins={"tp": 8, "cp": 1, "micro_batch": 1, "vpp": 1, "recompute": "none"},
            without=WITHOUT,
        )
        found = fastest_plan(request).objective.step_time_s
        assert found is not None
        return found

    both = [
        optimum_s([{"leaf": leaf, "background": share} for leaf in "ab"])
        for share in (0.9, 0.5, 0.0)
    ]
    one = [optimum_s([{"leaf": "a", "background": share}]) for share in (0.9, 0.5)]
    assert both == sorted(both, reverse=True)
    assert [*one, both[-1]] == sorted([*one, both[-1]], reverse=True)
    assert both[0] > both[-1]
    assert optimum_s([]) == pytest.approx(both[-1])


# Several NICs, GPUs that are missing


def test_slower_nics_do_not_shrink_the_switches_links() -> None:
    """A node at half rate halves what the NICs do; 2:1 above leaves it all of that, 4:1 half."""
    slow = cluster(nodes=[*NODES[:2], {**NODES[2], "nic_gbps_per_gpu": 200}])
    assert level_rates(slow) == pytest.approx([25, 25, 12.5])
    graph = node_graph(slow)
    assert graph.edges["c1", "leaf/p2/l3"]["capacity"] == pytest.approx(8 * 25)
    assert graph.edges["a1", "leaf/p1/l1"]["capacity"] == pytest.approx(8 * 50)
    fast = cluster(nodes=[{**node, "nic_gbps_per_gpu": 800} for node in NODES])
    assert level_rates(fast) == pytest.approx([100, 50, 25])


def test_ranks_pass_over_busy_nodes_and_fill_leaf_by_leaf() -> None:
    nodes: list[dict[str, object]] = [
        {"name": "a1", "leaf": "l1", "free_gpus": 0},
        {"name": "b1", "leaf": "l2"},
        {"name": "a2", "leaf": "l1"},
        {"name": "b2", "leaf": "l2"},
        {"name": "a3", "leaf": "l1"},
    ]
    spec = cluster(nodes=nodes)
    assert not is_irregular(spec)
    order = [node for node, gpu in allocated_places(spec, 32) if gpu == 0]
    assert order == [2, 4, 1, 3]
    half = allocated_places(cluster(nodes=[{**node, "free_gpus": 4} for node in nodes[1:3]]), 8)
    assert half == [(0, gpu) for gpu in range(4)] + [(1, gpu) for gpu in range(4)]


def test_an_allocation_is_taken_evenly_from_the_leaves() -> None:
    nodes = [{"name": "a[1-4]", "leaf": "l1"}, {"name": "b[1-4]", "leaf": "l2"}]
    spec = cluster(nodes=nodes, levels=[*LEVELS[:1], {"name": "core", "gpus": 64}])
    assert fabric_levels(spec, 48).blocks.tolist() == [8, 24, 48]
    assert sorted({node for node, _ in allocated_places(spec, 48)}) == [0, 1, 2, 4, 5, 6]
    wide = cluster(
        nodes=nodes, levels=[{"name": "leaf", "gpus": 64}, {"name": "core", "gpus": 256}]
    )
    assert fabric_levels(wide, 48).blocks.tolist() == [8, 24, 48], (
        "a leaf has 32 free, whatever it could hold"
    )
    assert sorted({node for node, _ in allocated_places(wide, 48)}) == [0, 1, 2, 4, 5, 6]


def test_links_without_rails_cost_as_before() -> None:
    """The default of two arrays: nothing about rails."""
    rates = np.array([450e9, 50e9])
    plain = Links(
        bytes_per_s=rates,
        all_to_all_bytes_per_s=rates,
        latency_s=np.zeros(2),
        half_bytes=np.zeros(2),
    )
    assert all_to_all_s(1e9, np.array([8, 32]), plain) == pytest.approx(24 / 32 / 50)

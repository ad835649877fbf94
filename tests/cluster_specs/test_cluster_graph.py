"""The fabric graph and its cuts, against the level table and hand-worked machines."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from meshwright.cluster_specs.allocation import expand_nodes, fabric_levels
from meshwright.cluster_specs.links import ROOT, Joint, halves_cut_gb_per_s
from meshwright.cluster_specs.reader import load_cluster
from tests.fabric_graphs import Terminal, cut_between_gb_per_s, cut_gb_per_s, draw, fabric_graph

CASES = [
    ("dgx-h100", 64),
    ("llama3-24k", 16_384),
    ("llama3-24k", 48),
    ("l40s-pcie", 64),
    ("gb200-nvl72", 256),
    ("superpod-a100", 1120),
    ("h100-leaf-3to1", 2048),
    ("dgx-h100", 131_072),
]


@pytest.mark.parametrize(("name", "gpus"), CASES)
def test_cuts_equal_the_level_table(name: str, gpus: int) -> None:
    levels = fabric_levels(load_cluster(name), gpus)
    below = np.concatenate([[1], levels.blocks[:-1]])
    half_gpus = levels.blocks // below // 2 * below
    np.testing.assert_allclose(cut_gb_per_s(load_cluster(name), gpus), half_gpus * levels.gb_per_s)


def test_the_top_of_llama3_leaves_a_seventh_of_the_nics() -> None:
    cut = cut_gb_per_s(load_cluster("llama3-24k"), 24_576)[-1]
    assert cut / (24_576 / 2) == pytest.approx(50 / 7)


@pytest.mark.parametrize(("rails", "direct"), [(1, 0), (4, 0), (1, 2), (1, 6), (1, 64)])
@pytest.mark.parametrize("first", [(400.0,), (50.5, 100.25, 400.0)])
@pytest.mark.parametrize("second", [(400.0, 3.1), (75.0, 12.5, 100.0, 33.3)])
def test_the_cut_of_uneven_halves_is_a_maximum_flow(
    first: tuple[float, ...], second: tuple[float, ...], rails: int, direct: int
) -> None:
    joint = Joint(level="pod", rails=rails, direct=direct)
    sides = [f"a{i}" for i in range(len(first))], [f"b{i}" for i in range(len(second))]
    up = dict(zip((*sides[0], *sides[1]), (*first, *second), strict=True))
    terminals = [Terminal(name=name, gpus=1, path=((0, ROOT),)) for name in up]
    flow = cut_between_gb_per_s(draw(terminals, [joint], up, apart=False), *sides)
    assert halves_cut_gb_per_s(first, second, joint) == pytest.approx(flow)


def test_one_gpu_has_no_cut() -> None:
    assert cut_gb_per_s(load_cluster("dgx-h100"), 1).tolist() == [float("inf")]


def _flow_between_halves(graph: nx.Graph[str], gpus: int) -> float:
    """Maximum flow through the whole tree from the first half of its nodes to the second."""
    directed: nx.DiGraph[str] = nx.DiGraph(graph.to_directed())
    passed = 0
    for vertex in [v for v in graph if v.startswith("node")]:
        if passed < gpus // 2:
            directed.add_edge("source", vertex)
        else:
            directed.add_edge(vertex, "sink")
        passed += graph.nodes[vertex]["gpus"]
    return float(nx.maximum_flow_value(directed, "source", "sink"))


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("dgx-h100", 64),
        ("llama3-24k", 12_288),
        ("gb200-nvl72", 256),
        ("l40s-pcie", 64),
        ("superpod-h100", 512),
    ],
)
def test_the_whole_tree_has_the_cut_of_its_outermost_level(name: str, gpus: int) -> None:
    cluster = load_cluster(name)
    flow = _flow_between_halves(fabric_graph(cluster, gpus), gpus)
    assert flow == pytest.approx(cut_gb_per_s(cluster, gpus)[-1])


@pytest.mark.parametrize(
    ("name", "gpus"), [*CASES[:-1], ("dgx-h100", 20), ("dgx-h100", 4), ("gb200-nvl72", 6)]
)
def test_the_graph_spans_all_gpus_and_is_a_tree_without_rails(name: str, gpus: int) -> None:
    cluster = load_cluster(name)
    graph = fabric_graph(cluster, gpus)
    assert nx.is_tree(graph) == all(level.rails == 1 for level in cluster.levels)
    leaves = [vertex for vertex in graph if vertex.startswith("node")]
    assert sum(graph.nodes[vertex]["gpus"] for vertex in leaves) == gpus
    assert len(leaves) == len(graph) or graph.nodes[ROOT]["gpus"] == gpus


def test_the_graph_of_two_pods() -> None:
    graph = fabric_graph(load_cluster("llama3-24k"), 6144)
    assert graph.nodes["node0"] == {"gpus": 8, "path": ("rack/0", "pod/0", ROOT)}
    assert graph.edges["node0", "rack/0"]["capacity"] == 8 * 50
    assert graph.edges["rack/0", "pod/0"]["capacity"] == 16 * 50
    assert graph.edges["pod/1", ROOT]["capacity"] == pytest.approx(3072 * 50 / 7)


def test_trays_hang_on_the_nvlink_switch_of_their_rack() -> None:
    graph = fabric_graph(load_cluster("gb200-nvl72"), 256)
    assert graph.nodes["node0"] == {"gpus": 4, "path": ("nvlink/0", ROOT)}
    assert graph.edges["node15", "nvlink/0"]["capacity"] == 4 * 900
    assert graph.edges["nvlink/3", ROOT]["capacity"] == 64 * 50


def test_leaves_are_the_nodes_of_the_hostfile() -> None:
    cluster = load_cluster("dgx-h100")
    graph = fabric_graph(cluster, 512)
    assert sum(v.startswith("node") for v in graph) == len(expand_nodes(cluster, 512)) == 64

"""Worked examples of fabrics, node graphs and node ranges."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.links import CORE
from meshwright.cluster_specs.reader import load_cluster, read_cluster
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import group_traffic
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.model_specs.reader import read_model
from tests.fabric_graphs import cut_between_gb_per_s, cut_gb_per_s, node_graph

UNEVEN = """
base: dgx-h100
levels:
- {name: leaf, gpus: 32}
- {name: pod, gpus: 128, oversubscription: 2}
- {name: core, gpus: 512, oversubscription: 6}
nodes:
- {name: "a[1-3]", leaf: l0, pod: p0}
- {name: a4, leaf: l0, pod: p0, free_gpus: 6}
- {name: "b[01-02]", leaf: l1, pod: p0}
- {name: c1, leaf: l2, pod: p1}
"""


def uneven(tmp_path: Path) -> Path:
    path = tmp_path / "uneven.yaml"
    path.write_text(UNEVEN, encoding="utf-8")
    return path


def test_ranges_of_nodes_are_listed_one_by_one(tmp_path: Path) -> None:
    cluster = read_cluster(str(uneven(tmp_path)))
    assert [node.name for node in cluster.nodes] == ["a1", "a2", "a3", "a4", "b01", "b02", "c1"]
    assert cluster.gpus == 6 * 8 + 6
    assert {node.leaf for node in cluster.nodes[:4]} == {"l0"}


@pytest.mark.parametrize("name", ["n[1-", "n[3-1]", "n[1-999999]", "n[x]"])
def test_a_bad_range_names_its_entry(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(UNEVEN.replace("a[1-3]", name), encoding="utf-8")
    with pytest.raises(InputError, match=r"nodes\[0\]\.name"):
        read_cluster(str(path))


def test_cuts_of_listed_nodes_are_computed(tmp_path: Path) -> None:
    """50 GB/s a GPU into the leaf, 25 across leaves, 50 / 6 across pods; a leaf of 30 free GPUs sends 750."""
    graph = node_graph(read_cluster(str(uneven(tmp_path))))
    assert graph.nodes[CORE]["gpus"] == 54
    assert cut_between_gb_per_s(graph, ["a1"], ["a2"]) == pytest.approx(400)
    assert cut_between_gb_per_s(graph, ["a1", "a2"], ["a4"]) == pytest.approx(300)
    assert cut_between_gb_per_s(graph, ["a1", "a2", "a3", "a4"], ["b01", "b02"]) == pytest.approx(
        400
    )
    assert cut_between_gb_per_s(graph, ["a1"], ["c1"]) == pytest.approx(8 * 50 / 6)


def test_three_to_one_at_the_leaf_divides_the_bandwidth_across_leaves_by_three() -> None:
    cluster = load_cluster("h100-leaf-3to1")
    levels = fabric_levels(cluster, cluster.gpus)
    across = dict(zip(levels.names, levels.gb_per_s.tolist(), strict=True))
    outer = across[levels.names[-1]]
    assert outer == pytest.approx(50 / 3)
    assert cut_gb_per_s(cluster, cluster.gpus)[-1] == pytest.approx(
        outer * cluster.gpus / 2, rel=0.05
    )


def gpt3(gpus: int) -> Workload:
    return Workload(
        model=read_model("gpt3-175b"),
        cluster=load_cluster("dgx-h100"),
        gpus=gpus,
        global_batch=512,
        seq_len=2048,
    )


def test_pipeline_traffic_is_the_activation_both_ways() -> None:
    """2,048 tokens of width 12,288 in 2 bytes, one eighth of them from each of 8 tensor ranks, 64 times."""
    layout = Layout(tp=8, pp=8, dp=8, micro_batch=1, num_micro_batches=64, sequence_parallel=True)
    context = make_context(gpt3(512), layout, nested_placement(load_cluster("dgx-h100"), layout))
    found = group_traffic(context, ((12,),) * 8)
    assert found.boundary == pytest.approx(2 * 2048 * 12_288 / 8 * 64)
    assert found.wrap == 0
    assert found.experts == 0


def test_a_slower_node_paces_all_and_sends_less(tmp_path: Path) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text(
        UNEVEN.replace("leaf: l2, pod: p1", "leaf: l2, pod: p1, nic_gbps_per_gpu: 200"),
        encoding="utf-8",
    )
    cluster = read_cluster(str(path))
    assert fabric_levels(cluster, 54).gb_per_s.tolist()[1:] == pytest.approx([25, 25, 50 / 6])
    graph = node_graph(cluster)
    assert graph.edges["c1", "leaf/p1/l2"]["capacity"] == pytest.approx(200)
    assert graph.edges["a1", "leaf/p0/l0"]["capacity"] == pytest.approx(400)

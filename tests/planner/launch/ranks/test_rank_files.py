"""Files of a mapping: groups as Megatron makes them, tables that agree, a picture that can be read."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.importers.document import import_topology
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError
from meshwright.planner.bounds.mappings import MEGATRON_DEFAULT, MEGATRON_TP_PP_DP
from meshwright.planner.drawing import ink_on, ramp_colour, shortened
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.rank_files import fabric_document, mapping_files
from meshwright.planner.mapping.slots import coordinates, process_groups
from meshwright.planner.plan.document import Mapping, Plan
from meshwright.planner.plan.texts import plan_document, plan_text, read_plan
from tests.places import DATA
from tests.plans import make_plan
from tests.soaked import examples

MEGATRON = json.loads((DATA / "megatron_groups.json").read_text(encoding="utf-8"))["cases"]


def named(case: dict[str, Any]) -> str:
    degrees = "-".join(f"{axis}{degree}" for axis, degree in case["degrees"].items())
    return f"{degrees}-{case['order'][-5:]}"


@pytest.mark.parametrize("case", MEGATRON, ids=named)
def test_groups_are_those_of_megatron(case: dict[str, Any]) -> None:
    """72 combinations of degrees and orders, asked of RankGenerator itself (see the file)."""
    plan = make_plan("mixtral-8x7b", **case["degrees"])
    assert plan.layout is not None
    groups = process_groups(plan.layout, case["order"].split("-"), experts="ep" in case["groups"])
    digests = {
        name: hashlib.sha256(json.dumps(table.tolist()).encode()).hexdigest()[:16]
        for name, table in groups.items()
    }
    assert digests == case["groups"]


def test_groups_by_hand() -> None:
    """tp 2, dp 2, pp 2: ranks 0 and 1 share a tensor, 0 and 2 a gradient, 0 and 4 a pipeline."""
    layout = make_plan(tp=2, dp=2, pp=2, num_micro_batches=2).layout
    assert layout is not None
    groups = process_groups(layout, MEGATRON_DEFAULT, experts=False)
    assert groups["tp"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["dp"].tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["pp"].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    other = process_groups(layout, MEGATRON_TP_PP_DP, experts=False)
    assert other["pp"].tolist() == groups["dp"].tolist()


def test_an_expert_grid_that_megatron_refuses() -> None:
    layout = make_plan("mixtral-8x7b", tp=4, pp=2, dp=2, ep=2, num_micro_batches=2).layout
    assert layout is not None
    with pytest.raises(InfeasibleError, match="expert replicas as dp: 4, not 2"):
        process_groups(layout, MEGATRON_TP_PP_DP, experts=True)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 2, 3]),
)
def test_every_axis_parts_the_ranks(tp: int, cp: int, dp: int, pp: int) -> None:
    layout = make_plan(tp=tp, cp=cp, dp=dp, pp=pp, num_micro_batches=pp).layout
    assert layout is not None
    for order in (MEGATRON_DEFAULT, MEGATRON_TP_PP_DP):
        groups = process_groups(layout, order, experts=False)
        for table in groups.values():
            assert sorted(table.ravel().tolist()) == list(range(tp * cp * dp * pp))
        places = np.stack([coordinates(groups, axis) for axis in ("tp", "cp", "dp", "pp")], axis=1)
        assert len({tuple(row) for row in places.tolist()}) == tp * cp * dp * pp


def on(plan: Plan, cluster: ClusterSpec, ranks: list[tuple[int, int]] | None = None) -> Plan:
    """The plan on another cluster, with its ranks at given places."""
    mapping = Mapping(order=["tp"], levels=[], matrix={}, ranks=ranks) if ranks else None
    inputs = plan.inputs.model_copy(update={"cluster": cluster})
    return plan.model_copy(update={"inputs": inputs, "mapping": mapping})


def slurm_cluster() -> ClusterSpec:
    return import_topology("slurm", [DATA / "topologies" / "slurm-tree.conf"], "dgx-h100").cluster


def table(files: dict[str, str], name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files[f"mapping/{name}"])))


def test_the_files_agree_on_a_shuffled_mapping() -> None:
    """Two nodes of leaf3 and one of leaf1, GPUs backwards: every file says the same of every rank."""
    places = [(node, 7 - gpu) for node in (10, 0, 8) for gpu in range(8)]
    plan = on(make_plan(tp=8, dp=3), slurm_cluster(), places)
    files = mapping_files(plan)
    ranks, nodes = table(files, "ranks.csv"), table(files, "nodes.csv")
    assert [row["host"] for row in nodes] == ["rack2n01", "gpu001", "rack1n01"]
    assert [row["leaf"] for row in nodes] == ["leaf3", "leaf1", "leaf3"]
    assert [row["pod"] for row in nodes] == ["podb", "poda", "podb"]
    assert nodes[0]["cuda_visible_devices"] == "7,6,5,4,3,2,1,0"
    assert nodes[1]["ranks"] == "8 9 10 11 12 13 14 15"
    hosts = files["mapping/slurm_hostfile"].splitlines()
    for rank, row in enumerate(ranks):
        assert (row["rank"], row["host"]) == (str(rank), hosts[rank])
        node = next(entry for entry in nodes if entry["host"] == row["host"])
        local = node["ranks"].split().index(str(rank))
        assert node["cuda_visible_devices"].split(",")[local] == row["gpu"]
        line = files["mapping/rankfile.openmpi"].splitlines()[rank]
        assert line == f"rank {rank}={row['host']} slot={row['gpu']}"
    groups = json.loads(files["mapping/groups.json"])
    for axis in ("tp", "dp"):
        for group in groups[axis]:
            assert [int(ranks[rank][axis]) for rank in group] == list(range(len(group)))


def test_ranks_count_as_the_launch_does() -> None:
    """Where the launch takes Megatron's other order, so do the groups."""
    places = [(d, 2 * s + t) for s in range(4) for d in range(4) for t in range(2)]
    plan = on(make_plan(tp=2, dp=4, pp=4, num_micro_batches=4), make_plan().inputs.cluster, places)
    files = plan_files(plan)
    assert "--use-tp-pp-dp-mapping" in json.loads(files["megatron_args.json"])
    assert json.loads(files["mapping/groups.json"])["pp"][0] == [0, 2, 4, 6]
    hosts = files["hostfile.template"].splitlines()[2:]
    assert hosts == [row["host"] for row in table(files, "nodes.csv")]
    assert files["mapping/rankfile.openmpi"].startswith("rank 0=+n0 slot=0\n")


def test_experts_have_their_axes() -> None:
    files = mapping_files(make_plan("mixtral-8x7b", tp=2, dp=4, ep=4, etp=1))
    groups = json.loads(files["mapping/groups.json"])
    assert {len(group) for group in groups["ep"]} == {4}
    assert {len(group) for group in groups["edp"]} == {2}
    assert "ep" in table(files, "ranks.csv")[0]
    assert "ep" not in json.loads(mapping_files(make_plan(tp=2, dp=4))["mapping/groups.json"])


def test_plan_o_and_launch_write_them(tmp_path: Path) -> None:
    written = write_files(tmp_path, plan_files(make_plan(tp=8, dp=2), "slurm"))
    names = {str(path.relative_to(tmp_path.resolve())) for path in written}
    assert {
        f"mapping/{name}"
        for name in ("ranks.csv", "nodes.csv", "slurm_hostfile.template", "groups.json")
    } <= names
    assert "fabric.svg" in {path.name for path in (tmp_path / "mapping").iterdir()}


LARGE = {"tp": 8, "dp": 128, "pp": 16, "num_micro_batches": 16}


def picture(plan: Plan) -> tuple[str, ElementTree.Element]:
    text = mapping_files(plan)["mapping/fabric.svg"]
    return text, ElementTree.fromstring(text)


@pytest.mark.parametrize(
    ("plan", "unit"),
    [
        (make_plan(tp=2, dp=2, pp=2, num_micro_batches=2), "a cell is a GPU, its number the rank"),
        (make_plan(tp=8, dp=30, pp=4, num_micro_batches=4), "a cell is a GPU"),
        pytest.param(
            make_plan("llama-3.1-405b", "superpod-h100", **LARGE), "a square is a node",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            make_plan("llama-3.1-405b", "llama3-24k", **LARGE), "a square is a node",
            marks=pytest.mark.soak,
        ),
        (make_plan("deepseek-v3", "gb200-nvl72", dp=64, ep=64, pp=8, num_micro_batches=8), "a cell is a GPU"),
    ],
)  # fmt: skip
def test_the_picture_fits_and_repeats(plan: Plan, unit: str) -> None:
    """Everything lies on the page, nothing over the title, and the text is the same the second time."""
    text, root = picture(plan)
    assert text == picture(plan)[0]
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    assert (width, height < 2400, len(text) < 1_000_000) == (1200, True, True)
    for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
        left, top = float(shape.attrib.get("x", 0)), float(shape.attrib.get("y", 0))
        assert left >= 0
        assert left + float(shape.attrib["width"]) <= width
        assert top + float(shape.attrib["height"]) <= height
    words = [str(element.text) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(word.startswith(unit) for word in words)
    assert any(word == "How far groups reach: the most that one group touches" for word in words)


def test_the_picture_shows_every_rank_once_and_what_is_idle() -> None:
    plan = on(
        make_plan(tp=4, dp=2),
        slurm_cluster(),
        [(0, g) for g in range(4)] + [(8, g) for g in range(4)],
    )
    text, root = picture(plan)
    tips = [str(element.text) for element in root.iter("{http://www.w3.org/2000/svg}title")]
    ranks = sorted(int(tip.rsplit(" ", 1)[1]) for tip in tips if re.search(r"rank \d+$", tip))
    assert ranks == list(range(8))
    # Four GPUs of each of the two nodes, and eight of every other node of leaf1 (4 nodes) and leaf3 (5).
    assert sum("not used" in tip for tip in tips) == 2 * 4 + 7 * 8
    assert "gpu005" not in text
    assert "poda" in text
    assert "rack1n01" in text


def test_a_page_is_told_what_the_picture_shows() -> None:
    """Four ranks on the first node of leaf1, four on one of leaf3; every other node there is idle."""
    places = [(0, g) for g in range(4)] + [(8, g) for g in range(4)]
    document = fabric_document(on(make_plan(tp=4, dp=2), slurm_cluster(), places))
    assert document is not None
    assert (document["unit"], document["ranks"], document["titles"]) == ("GPU", True, True)
    leaves = {leaf["name"]: leaf["nodes"] for pod in document["pods"] for leaf in pod["leaves"]}
    assert {name: len(nodes) for name, nodes in leaves.items()} == {"leaf1": 4, "leaf3": 5}
    free = [-1] * 4
    assert [nodes[0][1] for nodes in leaves.values()] == [[0, 1, 2, 3, *free], [4, 5, 6, 7, *free]]
    assert all(on_gpus == [-1] * 8 for nodes in leaves.values() for _, on_gpus in nodes[1:])
    assert {pod["name"] for pod in document["pods"]} >= {"poda"}
    assert list(document["axes"]) == ["dp", "tp"]
    assert document["axes"]["dp"] == {
        "words": "data-parallel replica", "parts": 2, "places": [0, 0, 0, 0, 1, 1, 1, 1]
    }  # fmt: skip
    assert document["axes"]["tp"]["places"] == [0, 1, 2, 3] * 2


def test_very_many_leaves_go_without_their_names() -> None:
    """2,048 nodes in racks of two: 1,024 leaves, of which a picture names none."""
    document = fabric_document(make_plan("llama-3.1-405b", "llama3-24k", **LARGE))
    assert document is not None
    assert (document["unit"], document["titles"]) == ("node", False)
    assert sum(len(pod["leaves"]) for pod in document["pods"]) == 1024


def test_experts_are_an_axis_of_the_page() -> None:
    document = fabric_document(make_plan("mixtral-8x7b", tp=2, dp=4, ep=4, etp=1))
    assert document is not None
    assert document["axes"]["ep"]["parts"] == 4
    assert sorted(document["axes"]["ep"]["places"]) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_how_far_groups_reach_is_counted() -> None:
    """dp over leaf1 and leaf3 touches two nodes, two leaves, two pods."""
    plan = on(
        make_plan(tp=4, dp=2),
        slurm_cluster(),
        [(0, g) for g in range(4)] + [(8, g) for g in range(4)],
    )
    words = [str(e.text) for e in picture(plan)[1].iter("{http://www.w3.org/2000/svg}text")]
    at = words.index("dp", words.index("pods"))
    assert words[at : at + 6] == ["dp", "4", "2", "2", "2", "2"]


def test_hostile_names_stay_text() -> None:
    cluster = slurm_cluster()
    nodes = tuple(n.model_copy(update={"leaf": "<script>&\"'\x01"}) for n in cluster.nodes)
    cluster = cluster.model_copy(update={"nodes": nodes, "name": "</text><b>"})
    text, root = picture(on(make_plan(tp=8, dp=2), cluster))
    assert "<script" not in text
    assert "<b>" not in text
    assert {element.tag.rpartition("}")[2] for element in root.iter()} == {
        "svg",
        "title",
        "rect",
        "text",
    }


def test_colours_keep_their_order_and_their_contrast() -> None:
    for count in (1, 2, 7, 64):
        colours = [ramp_colour(index, count) for index in range(count)]
        assert len(set(colours)) == count
        assert all(re.fullmatch(r"#[0-9a-f]{6}", value) for value in colours)
    assert ink_on("#472777") == "#ffffff"
    assert ink_on("#fde725") != "#ffffff"
    assert shortened("node-00001", 40, 11) == "n…001"


def test_a_long_mapping_lies_in_files() -> None:
    """Above 4,096 ranks the document leaves the list out; plan.yaml, ranks.json and ranks.csv have it."""
    places = [(node, gpu) for node in range(640) for gpu in range(8)][::-1]
    plan = on(make_plan(tp=8, dp=640), make_plan().inputs.cluster, places)
    assert "ranks" not in plan_document(plan)["mapping"]
    files = plan_files(plan)
    assert json.loads(files["ranks.json"])[0] == [639, 7]
    assert table(files, "ranks.csv")[0]["gpu"] == "7"
    short = on(make_plan(tp=8, dp=2), make_plan().inputs.cluster, places[-16:])
    assert plan_document(short)["mapping"]["ranks"][0] == [1, 7]
    assert "ranks.json" not in plan_files(short)


def test_a_long_mapping_survives_its_file(tmp_path: Path) -> None:
    places = [(node, gpu) for node in range(640) for gpu in range(8)][::-1]
    plan = on(make_plan(tp=8, dp=640), make_plan().inputs.cluster, places)
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    assert read_plan(tmp_path).mapping == plan.mapping


def test_no_table_of_a_mapping_holds_a_formula() -> None:
    plan = make_plan(tp=8, dp=2)
    nodes = [NodeSpec(name=f"n{number}", leaf="=1+1|'\n", pod="@SUM(A1)") for number in range(2)]
    cluster = plan.inputs.cluster.model_copy(update={"nodes": tuple(nodes), "gpus": 16})
    inputs = plan.inputs.model_copy(update={"cluster": cluster})
    rows = table(mapping_files(plan.model_copy(update={"inputs": inputs})), "nodes.csv")
    assert [(row["leaf"], row["pod"]) for row in rows] == [("'=1+1|'\n", "'@SUM(A1)")] * 2

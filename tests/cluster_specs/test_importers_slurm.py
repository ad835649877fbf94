"""Slurm's and topograph's topologies: host lists, trees, blocks, and what is said of a bad line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.importers.document import ImportedCluster, import_topology
from meshwright.cluster_specs.importers.facts import expand
from meshwright.cluster_specs.reader import read_cluster
from meshwright.errors import InputError
from tests.places import DATA as TEST_DATA

DATA = TEST_DATA / "topologies"


def imported(form: str, file: str, node: str = "dgx-h100", **more: object) -> ImportedCluster:
    return import_topology(form, [DATA / file], node, **more)  # type: ignore[arg-type]


def places(found: ImportedCluster) -> dict[str, tuple[str | None, str | None]]:
    return {node.name: (node.leaf, node.pod) for node in found.cluster.nodes}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("tux[0-3,12,18-20]", [f"tux{n}" for n in (0, 1, 2, 3, 12, 18, 19, 20)]),
        ("a[08-11]", ["a08", "a09", "a10", "a11"]),
        ("r[0-1]n[00-01]-ib", ["r0n00-ib", "r0n01-ib", "r1n00-ib", "r1n01-ib"]),
        ("login,c[1-2],d.e_f", ["login", "c1", "c2", "d.e_f"]),
        ("n[001,2]", ["n001", "n2"]),
        ("[1-2]x", ["1x", "2x"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand(text, 100) == names


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("n[1-2,[3-4]]", "bracket inside a bracket"),
        ("n[1-2", "without its ']'"),
        ("n1-2]", "without its '['"),
        ("n[3-1]", "runs backwards"),
        ("n[a-b]", "neither a number nor a range"),
        ("n[]", "neither a number nor a range"),
        ("a,,b", "empty name"),
        ("n$(x)", "is no node name"),
        ("n[0-999999999]", "stands for 1000000000 names"),
        ("a[0-99]b[0-99]", "stands for 10000 names"),
    ],
)
def test_bad_host_lists_are_refused_before_they_grow(text: str, part: str) -> None:
    with pytest.raises(InputError) as error:
        expand(text, 200)
    assert part in str(error.value)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 30), st.integers(1, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_a_range_written_and_expanded_is_the_range(ranges: list[tuple[int, int, int]]) -> None:
    parts = [f"{first:0{width}d}-{first + more:0{width}d}" for first, more, width in ranges]
    wanted = [
        f"n{n:0{width}d}" for first, more, width in ranges for n in range(first, first + more + 1)
    ]
    assert [name.removeprefix("n") for name in expand(f"n[{','.join(parts)}]", 1000)] == [
        str(n).zfill(len(f"{first:0{width}d}"))
        for first, more, width in ranges
        for n in range(first, first + more + 1)
    ]
    assert len(wanted) == len(expand(f"n[{','.join(parts)}]", 1000))


def test_a_tree_of_switches() -> None:
    found = imported("slurm", "slurm-tree.conf", oversubscription=[1, 3, 7])
    assert places(found)["gpu001"] == ("leaf1", "poda")
    assert places(found)["rack2n01"] == ("leaf3", "podb")
    assert list(places(found))[8:13] == ["rack1n01", "rack1n02", "rack2n01", "rack2n02", "gpu012"]
    levels = [(level.name, level.gpus, level.oversubscription) for level in found.cluster.levels]
    assert levels == [("leaf", 40, 1.0), ("pod", 80, 3.0), ("core", 160, 7.0)]
    assert found.cluster.gpus == 17 * 8
    assert any("4 to 5 nodes" in note for note in found.notes)
    assert any("LinkSpeed" in note for note in found.notes)


def test_blocks_join_in_the_order_of_the_file() -> None:
    found = imported("slurm", "slurm-block.conf", "gb200-nvl72")
    assert places(found)["node018"] == ("rack1", "rack1..rack4")
    assert places(found)["node073"] == ("rack5", "rack5..rack8")
    assert [level.gpus for level in found.cluster.levels] == [72, 144, 288, 576]


def test_topology_yaml_takes_the_default_or_the_one_asked_for() -> None:
    default = imported("slurm", "slurm-topology.yaml")
    assert places(default)["node12"] == ("leaf3", None)
    assert any("racks, any" in note for note in default.notes)
    racks = imported("slurm", "slurm-topology.yaml", topology="racks")
    assert places(racks)["node12"] == ("b4", "b3..b4")
    with pytest.raises(InputError, match="did you mean 'racks'"):
        imported("slurm", "slurm-topology.yaml", topology="rack")
    with pytest.raises(InputError, match=r"slurm-topology.yaml:30: a flat topology"):
        imported("slurm", "slurm-topology.yaml", topology="any")


def test_topograph_shows_the_real_names_of_switches() -> None:
    tree = imported("topograph", "topograph-tree.conf")
    assert places(tree)["srv6208"] == ("leaf-6-2", "spine-6")
    assert len(places(tree)) == 96
    blocks = imported("topograph", "topograph-block.conf")
    assert places(blocks)["srv1101"] == ("nvl-1-1", "nvl-1-1..nvl-2-2")
    assert [level.gpus for level in blocks.cluster.levels] == [64, 128, 256, 768]


def test_topograph_graph() -> None:
    found = imported("topograph", "topograph-graph.json")
    assert places(found) == {
        **dict.fromkeys(("I21", "I22", "I25"), ("S2", None)),
        **dict.fromkeys(("I34", "I35", "I36"), ("S3", None)),
    }


def test_the_written_file_reads_back(tmp_path: Path) -> None:
    for form, file in (
        ("slurm", "slurm-tree.conf"),
        ("slurm", "slurm-block.conf"),
        ("slurm", "slurm-topology.yaml"),
        ("topograph", "topograph-tree.conf"),
        ("topograph", "topograph-graph.json"),
    ):
        found = imported(form, file)
        path = tmp_path / f"{file}.yaml"
        path.write_text(found.text, encoding="utf-8")
        assert read_cluster(str(path)) == found.cluster


def test_uneven_trees_and_forests(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(
        "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2 Switches=a\nSwitchName=c Nodes=n3\n"
    )
    found = import_topology("slurm", [path], "dgx-h100")
    assert [(node.name, node.leaf, node.pod) for node in found.cluster.nodes] == [
        ("n1", "a", "b"),
        ("n2", "b", "b"),
        ("n3", "c", "c"),
    ]
    assert any("no switch joins" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("SwitchName=a Nodes=n[1-\n", ":1: a '[' without its ']'"),
        ("\n# x\nSwitchName=a Node=n1\n", ":3: unknown key 'Node' (did you mean 'Nodes'?)"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n",
            ":2: 'a' is described a second time, first on line 1",
        ),
        (
            "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n[1-2]\n",
            ":2: node 'n1' hangs under 'a' already",
        ),
        (
            "SwitchName=a Nodes=n1\nSwitchName=s Switches=a,b\n",
            ":2: child switch 'b' is described nowhere",
        ),
        ("SwitchName=a Switches=b Nodes=n1\nSwitchName=b Switches=a\n", "is below itself"),
        ("SwitchName=a\n", ":1: switch 'a': expected Switches= or Nodes="),
        ("SwitchName = a Nodes=n1\n", ":1: expected KEY=VALUE pairs"),
        ("BlockName=a Nodes=n1\nSwitchName=b Nodes=n2\n", ":2: a switch among blocks"),
        ("BlockName=a Nodes=n1\nBlockSizes=1,3\n", "times a power of two"),
        ("BlockName=a Nodes=n1\nBlockSizes=x\n", ":2: expected BlockSizes=N,N"),
        ("SwitchName=a Nodes=n1 \\\n", "ends with a backslash"),
        ("# nothing\n", "expected a line with SwitchName="),
        ("RingName=r Nodes=n[1-4]\n", ":1: unknown key 'RingName'"),
        (
            "- topology: t\n  tree:\n    switches:\n      - switch: a\n        nodes: n[1\n",
            ":4: a '[' without",
        ),
        (
            "- topology: t\n  tree: {switches: [{switch: a, node: n1}]}\n",
            ":2: unknown key 'node' (did you mean",
        ),
        (
            "- topology: t\n  tree: {switches: []}\n  flat: true\n",
            "expected exactly one of tree, block, flat",
        ),
        ("- topology: t\n  block: {block_sizes: [a], blocks: []}\n", ":2: expected a block size"),
        ("- [}\n", "not valid YAML"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        import_topology("slurm", [path], "dgx-h100")
    assert part in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"instances": 3}', ":1: expected an object with a list of 'instances'"),
        ('{"instances": [{"network_layers": ["a"]}]}', "expected an 'id'"),
        (
            '{"instances": [\n{"id": "a", "network_layers": "b"}]}',
            ":2: instance 'a': expected network_layers",
        ),
        ('{"instances": [{"id": "a"}]}', "neither network_layers nor the label"),
    ],
)
def test_a_bad_graph_is_named(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        import_topology("topograph", [path], "dgx-h100")
    assert part in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='SwitchNameodsBlk=[]-,.0123456789 \n\\#"', max_size=120))
def test_hostile_text_is_an_error_in_words(text: str) -> None:
    from meshwright.cluster_specs.importers.document import read_facts
    from meshwright.cluster_specs.importers.facts import SourceText
    from meshwright.cluster_specs.reader import read_cluster

    node = read_cluster("dgx-h100")
    for form in ("slurm", "topograph", "nvidia-smi", "ibnetdiscover", "nccl-tests"):
        message = "x:"
        try:
            facts = read_facts(form, [SourceText(name="x", text=text)], node)
        except InputError as error:
            message = str(error)
        else:
            assert facts.nodes or facts.node_fields
        assert message.startswith("x:")


def test_oversubscription_needs_a_number_for_each_level() -> None:
    with pytest.raises(InputError, match=r"2 numbers, but there are 3 levels .*leaf, pod, core"):
        imported("slurm", "slurm-tree.conf", oversubscription=[1, 3])


def test_free_gpus_of_a_cluster_file_are_kept(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        "name: b\nbase: dgx-h100\nnodes:\n- {name: gpu001, free_gpus: 3}\n- {name: gone}\n",
        encoding="utf-8",
    )
    found = import_topology("slurm", [DATA / "slurm-tree.conf"], str(base))
    assert found.cluster.nodes[0].free_gpus == 3
    assert found.cluster.gpus == 16 * 8 + 3


PRINTED = """\
SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[0-3]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[4-7]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-7] Switches=leaf[0-1]
"""
CONFIGURED = """\
SwitchName=leaf0 Nodes=n[0-3]
SwitchName=leaf1 Nodes=n[4-7]
SwitchName=spine Switches=leaf[0-1]
"""


@pytest.mark.parametrize(
    ("printed", "configured"),
    [
        (PRINTED, CONFIGURED),
        (
            "BlockName=b0 BlockIndex=0 Nodes=n[0-3]\nBlockName=b1 BlockIndex=1 Nodes=n[4-7]\n",
            "BlockName=b0 Nodes=n[0-3]\nBlockName=b1 Nodes=n[4-7]\n",
        ),
    ],
)
def test_what_scontrol_show_topology_prints_is_its_file(
    printed: str, configured: str, tmp_path: Path
) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(configured)
    wanted = import_topology("slurm", [path], "dgx-h100").cluster
    path.write_text(printed)
    assert import_topology("slurm", [path], "dgx-h100").cluster == wanted


def test_free_gpus_of_an_imported_node_is_one_edit(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(CONFIGURED)
    text = import_topology("slurm", [path], "dgx-h100").text
    part_filled = text.replace("name: n2,", "name: n2, free_gpus: 5,")
    assert part_filled != text
    path = tmp_path / "cluster.yaml"
    path.write_text(part_filled)
    assert read_cluster(str(path)).gpus == 61


LONG = 120_000


@pytest.mark.parametrize(
    ("form", "file", "text"),
    [
        ("nccl-tests", "x.log", "#  Rank 0 " + "0" * LONG + "\n"),
        ("topograph", "x.conf", "# a=b" + " " * LONG + "c\nSwitchName=s Nodes=\n"),
        ("slurm", "x.conf", "SwitchName=s Nodes=n" + "[0-9]" * (LONG // 5) + "\n"),
        ("slurm", "x.conf", "SwitchName=" + "s" * LONG + " Switches=" + "t" * LONG + "\n"),
    ],
)
def test_a_line_without_end_is_refused_at_once_in_few_words(
    tmp_path: Path, form: str, file: str, text: str
) -> None:
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    began = time.process_time()
    with pytest.raises(InputError) as refused:
        import_topology(form, [path], "dgx-h100")
    assert len(str(refused.value)) < 3000
    assert time.process_time() - began < 3

"""Reading clusters: names, files, run-file blocks; and what is said about those that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.allocation import (
    allocated_gpus,
    expand_nodes,
    fabric_levels,
    node_name,
)
from meshwright.cluster_specs.reader import (
    cluster_from_mapping,
    load_cluster,
    load_device,
    read_cluster,
)
from meshwright.documents import LARGE_FILE_BYTES
from meshwright.errors import InputError
from tests.soaked import examples

# Blocks as in published runs: a stated NIC, none, NVL72 with a remark, a note on what is assumed.
SELENE = {
    "device": "a100-sxm-80gb",
    "gpus": 64,
    "gpus_per_node": 8,
    "nvlink_domain": 8,
    "nvlink_gb_per_s": 300,
    "nic_gbps_per_gpu": 200,
    "fabric": "DGX A100 / Selene, 8x HDR200 InfiniBand per node",
}
JEAN_ZAY = {
    **SELENE,
    "gpus": 384,
    "nic_gbps_per_gpu": 50,
    "fabric": "Jean Zay: 4 Omni-Path 100G links per 8-GPU node",
}
ONE_NODE = {
    "device": "b200-sxm-180gb",
    "gpus": 8,
    "gpus_per_node": 8,
    "nvlink_domain": 8,
    "nvlink_gb_per_s": 900,
    "nic_gbps_per_gpu": None,
    "fabric": "single 8xB200 node",
    "assumed": ["hbm from general knowledge"],
}
NVL72 = {
    "device": "gb300",
    "gpus": 256,
    "gpus_per_node": 4,
    "nvlink_domain": 72,
    "nvlink_gb_per_s": 900,
    "nic_gbps_per_gpu": 800,
    "fabric": "GB300 NVL72 rack(s); NIC 800G/GPU assumed",
}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("block", "blocks", "rates", "medium"),
    [
        (SELENE, [8, 64], [300, 25], "infiniband"),
        (JEAN_ZAY, [8, 384], [300, 6.25], "omnipath"),
        (ONE_NODE, [8], [900], "infiniband"),
        (NVL72, [64, 256], [900, 100], "infiniband"),
        ({**SELENE, "fabric": "1600 Gbps/node RoCE (200G/GPU)"}, [8, 64], [300, 25], "roce"),
    ],
)
def test_blocks_of_run_files(
    block: dict[str, Any], blocks: list[int], rates: list[float], medium: str
) -> None:
    cluster = cluster_from_mapping(block, "runs[0].cluster")
    levels = fabric_levels(cluster, cluster.gpus)
    assert levels.blocks.tolist() == blocks
    assert levels.gb_per_s.tolist() == rates
    assert cluster.nic_medium == medium
    assert cluster.fabric == block["fabric"]


def test_what_is_not_stated_is_assumed_and_said() -> None:
    cluster = cluster_from_mapping(ONE_NODE)
    assert cluster.nic_gbps_per_gpu == 400
    assert cluster.assumed == ("hbm from general knowledge", "nic_gbps_per_gpu of dgx-b200")


def test_a_device_and_a_number_of_gpus_are_enough() -> None:
    cluster = cluster_from_mapping({"device": "l40s", "gpus": 64})
    assert (cluster.gpus_per_node, cluster.nvlink_domain, cluster.nic_gbps_per_gpu) == (8, 1, 100)
    assert cluster.nic_medium == "roce"
    assert len(cluster.assumed) == 3


def test_catalog_names_are_read() -> None:
    assert read_cluster("dgx-h100") is load_cluster("dgx-h100")
    assert read_cluster("dgx-h100", 131_072).name == "dgx-h100"


def test_a_file_with_levels(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        name: two-leaves
        base: dgx-a100
        gpus: 128
        levels:
          - {name: leaf, gpus: 64}
          - {name: spine, gpus: 128, oversubscription: 2}
        """,
    )
    cluster = read_cluster(path, 128)
    assert cluster.name == "two-leaves"
    assert not cluster.elastic
    assert cluster.device == load_device("a100-sxm-80gb")
    assert fabric_levels(cluster, 128).gb_per_s.tolist() == [300, 25, 12.5]


@pytest.mark.parametrize(
    ("base", "changed", "gpus", "elastic"),
    [
        ("dgx-h200", "nic_gbps_per_gpu: 3.125", 131_072, True),
        ("dgx-h100", "host_memory_gib: 512", 131_072, True),
        ("superpod-h100", "nic_medium: roce", 131_072, True),
        ("dragonfly-4096", "nic_gbps_per_gpu: 200", 4096, False),
        ("dgx-h100", "gpus: 64", 64, False),
        ("dgx-h100", "levels: [{name: leaf, gpus: 64}, {name: spine, gpus: 512}]", 512, True),
        ("llama3-24k", "nodes: [{name: a}, {name: b}]", 16, False),
    ],
)
def test_a_base_with_changed_nodes_keeps_its_size(
    base: str, changed: str, gpus: int, elastic: bool, tmp_path: Path
) -> None:
    """`base: dgx-h200` with another NIC asked for a size."""
    cluster = read_cluster(write(tmp_path, f"name: own\nbase: {base}\n{changed}\n"))
    assert (cluster.gpus, cluster.elastic, cluster.name) == (gpus, elastic, "own")
    if "gpus:" not in changed and "nodes:" not in changed:
        assert cluster.level_names == load_cluster(base).level_names


def test_a_file_with_its_own_device(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        device: {name: chip, architecture: hopper, hbm_gib: 90, hbm_gb_per_s: 3000, peak_fp16_tflops: 800,
                 pcie_gb_per_s: 64, sms: 120, tdp_w: 600}
        gpus: 16
        gpus_per_node: 4
        nvlink_domain: 4
        nvlink_gb_per_s: 250
        nic_gbps_per_gpu: 100
        """,
    )
    assert fabric_levels(read_cluster(path), 16).gb_per_s.tolist() == [250, 12.5]


def test_a_written_cluster_reads_back() -> None:
    for name in ("llama3-24k", "gb200-nvl72", "l40s-pcie"):
        cluster = load_cluster(name)
        assert cluster_from_mapping(cluster.model_dump(mode="json")) == cluster


def test_named_nodes_with_free_gpus(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        device: h100-sxm-80gb
        nodes:
          - {name: gpu-a01, leaf: leaf-1, pod: pod-1}
          - {name: gpu-a02, free_gpus: 0}
          - {name: gpu-b07, free_gpus: 4, leaf: leaf-2}
        """,
    )
    cluster = read_cluster(path)
    assert cluster.gpus == 12
    assert cluster.nodes[2].leaf == "leaf-2"
    assert expand_nodes(cluster, 12) == [("gpu-a01", 8), ("gpu-b07", 4)]
    assert fabric_levels(cluster, 12).blocks.tolist() == [4, 12]


def test_node_names_follow_the_pattern() -> None:
    cluster = load_cluster("dgx-h100")
    assert node_name(cluster, 0) == "node-00001"
    assert expand_nodes(cluster, 20) == [("node-00001", 8), ("node-00002", 8), ("node-00003", 4)]
    assert expand_nodes(load_cluster("gb200-nvl72"), 8) == [("node-00001", 4), ("node-00002", 4)]
    other = cluster_from_mapping(
        {"device": "h100-sxm-80gb", "gpus": 8, "node_name_pattern": "gpu{:03d}.hall"}
    )
    assert node_name(other, 6) == "gpu007.hall"


def test_a_kind_of_node_needs_a_number_and_a_machine_has_one() -> None:
    assert allocated_gpus(load_cluster("llama3-24k"), None) == 24_576
    assert allocated_gpus(load_cluster("dgx-h100"), 16) == 16
    with pytest.raises(InputError, match=r"dgx-h100.*--gpus"):
        allocated_gpus(load_cluster("dgx-h100"), None)


def test_more_gpus_than_the_cluster_has() -> None:
    with pytest.raises(InputError, match=r"8192 asked for.*'dragonfly-4096' has 4096"):
        read_cluster("dragonfly-4096", 8192)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dgx-h10",
            r"neither a catalog name nor a file, got 'dgx-h10' .did you mean 'dgx-h100'\?.; allowed: dgx",
        ),
        ("h100", r"did you mean 'dgx-h100'"),
        ("dgx-h100,dgx-a100", "compare several take --cluster once for each"),
        ("b300", r"did you mean 'dgx-b300'"),
        ("h200", r"did you mean 'dgx-h200'"),
        ("H100-80GB", r"did you mean 'dgx-h100'"),
        ("A100-80GB", r"did you mean 'dgx-a100'"),
        ("h100-sxm", r"did you mean 'dgx-h100'"),
        ("NVIDIA H100 80GB HBM3", r"did you mean 'dgx-h100'"),
        ("NVIDIA A100-SXM4-40GB", r"did you mean 'dgx-a100-40gb'"),
        ("gpu:h100:8", r"did you mean 'dgx-h100'"),
        ("Standard_ND96isr_H100_v5", r"did you mean 'ND96isr_H100_v5'"),
        ("absent.yaml", "absent.yaml: no such file"),
        ("/", "this is a directory"),
        ("", "neither a catalog name nor a file"),
        ("a\0b", "neither a catalog name nor a file"),
        ("x" * 10_000, "neither a catalog name nor a file"),
    ],
)
def test_names_that_stand_for_nothing(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_cluster(text)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"device": "h100"},
            r"x.yaml: device: not in the catalog, got 'h100' .did you mean 'h100-sxm-80gb'",
        ),
        ({"device": None}, "x.yaml: device: required and missing"),
        ({"device": 7}, "device: must be a catalog name or a mapping, got 7"),
        (
            {"device": {"name": "x", "architectur": 1}},
            "architectur: unknown field .did you mean 'architecture'",
        ),
        ({"gpus": None}, "gpus: this field is required and missing"),
        ({"gpus": 0}, "x.yaml: gpus: must be at least 1, got 0"),
        ({"nic_gbps_per_gpu": 1e-318}, "nic_gbps_per_gpu: must be at least 0.01, got 1e-318"),
        ({"gpus": 10**400}, "x.yaml: gpus: .*an integer of 1329 bits"),
        ({"gpus": "many"}, "x.yaml: gpus: must be an integer, got 'many'"),
        ({"gpus_per_nod": 8}, r"gpus_per_nod: unknown field .did you mean 'gpus_per_node'\?"),
        ({"nic_gbps_per_gpu": float("nan")}, "nic_gbps_per_gpu: .*got nan"),
        (
            {"nic_medium": "infinband"},
            "not a value of this field, got 'infinband' .did you mean 'infiniband'",
        ),
        (
            {"levels": [{"name": "leaf", "gpu": 8}]},
            r"levels\[0\].gpu: unknown field .did you mean 'gpus'",
        ),
        (
            {"levels": [{"name": "leaf", "gpus": 20}]},
            "levels: leaf has 20 GPUs, not a multiple of the 8",
        ),
        ({"levels": "flat"}, "levels: .*got 'flat'"),
        ({"base": "dgx-h10"}, "base: not in the catalog, got 'dgx-h10' .did you mean 'dgx-h100'"),
        ({"base": ["dgx-h100"]}, "base: not in the catalog, got a list of 1 items"),
        ({"nodes": [1, 2]}, r"nodes\[0\]"),
        ({"assumed": 3}, "assumed"),
    ],
)
def test_fields_that_are_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster_from_mapping({**SELENE, **change}, "x.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: [1", "not valid YAML.*line"),
        ("- 1", "the document must be a mapping of fields, got a list of 1 items"),
        ("", "the document is empty"),
        ("7: 8", "field names must be texts, got 7"),
        ("gpus: 8\ngpus: 16", "line 2: field 'gpus' is given twice"),
        ("a: &x [1]\nb: *x", r"line 2: YAML aliases \(\*name\) are not accepted"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested more than 32 levels deep"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("gpus: 2024-99-99", "a number or date cannot be read"),
        ("gpus: " + "9" * 5000, "a number or date cannot be read"),
        ("a: \x01", "not valid YAML"),
        (
            "levels:\n\t- {name: leaf}",
            "line 2, column 1: a tab, where lines are indented by spaces",
        ),
        ("a: @b", "not valid YAML.*column 4$"),
    ],
)
def test_documents_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_cluster(write(tmp_path, text))
    assert "cluster.yaml" in str(caught.value)


def test_files_that_are_not_text_or_too_large(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_cluster(str(tmp_path / "b.yaml"))
    with (tmp_path / "c.yaml").open("wb") as file:
        file.truncate(LARGE_FILE_BYTES + 1)
    with pytest.raises(InputError, match="larger than"):
        read_cluster(str(tmp_path / "c.yaml"))


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=examples(100, 10))
@given(
    st.dictionaries(
        st.sampled_from([*SELENE, "levels", "nodes", "base", "assumed", "odd"]), _VALUES
    )
)
def test_no_data_brings_anything_but_a_cluster_error(change: dict[str, Any]) -> None:
    try:
        cluster = cluster_from_mapping({**SELENE, **change})
    except InputError:
        return
    assert fabric_levels(cluster, cluster.gpus).blocks[-1] == cluster.gpus


def test_a_name_in_capitals_is_the_catalogs() -> None:
    assert read_cluster("GB200-NVL72") == read_cluster("gb200-nvl72")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"node": "dgx-h100"},
            r"base: dgx-h100 and gpus: 96, got 'node' \(did you mean 'nodes'\?\)",
        ),
        ({"device": "h100-sxm-80gb", "num_nodes": 12}, "unknown field; .* got 'num_nodes'"),
        ({"gpus": 8}, "device: required and missing; .* a kind of node as base: dgx-h100"),
    ],
)
def test_an_unknown_field_may_be_what_is_missing(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster_from_mapping(fields)


def test_a_model_in_place_of_a_cluster_is_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, '{"model_type": "qwen3", "hidden_size": 4096}')
    with pytest.raises(InputError, match="describes a model, no cluster"):
        read_cluster(path)

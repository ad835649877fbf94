"""The catalog: every entry loads, is sourced, and is physically plausible beside its siblings."""

from __future__ import annotations

import pytest

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.reader import (
    cluster_names,
    device_names,
    load_cluster,
    load_device,
    node_kind_of,
)
from meshwright.errors import InputError

DEVICES = [
    "v100-sxm-32gb",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "a800-sxm-80gb",
    "h100-sxm-80gb",
    "h100-sxm-96gb-500w",
    "h800-sxm-80gb",
    "h200-sxm-141gb",
    "b200-sxm-180gb",
    "b300-sxm",
    "gb200",
    "gb300",
    "mi300x",
    "l40s",
    "mi325x",
    "mi350x",
    "mi355x",
    "a100-pcie-80gb",
    "h20-sxm-96gb",
    "rtx-pro-6000",
    "rtx-6000-ada",
    "rtx-4090",
    "rtx-5090",
    "rtx-3090",
    "rtx-a6000",
    "gh200-96gb",
    "gh200-144gb",
    "h100-pcie-80gb",
    "h100-nvl-94gb",
    "h200-nvl-141gb",
    "a100-pcie-40gb",
    "a40",
    "a10",
    "a10g",
    "l4",
]
ANY_SIZE = [
    "dgx-v100",
    "dgx-a100-40gb",
    "dgx-a100",
    "dgx-h100",
    "hgx-h800",
    "dgx-h200",
    "dgx-b200",
    "dgx-b300",
    "gb200-nvl72",
    "gb300-nvl72",
    "mi300x",
    "l40s-pcie",
    "mi325x",
    "mi350x",
    "mi355x",
    "hgx-h20",
    "a100-pcie",
    "rtx-pro-6000-pcie",
    "rtx-6000-ada-pcie",
    "rtx-4090-pcie",
    "rtx-5090-pcie",
    "rtx-3090-pcie",
    "rtx-a6000-pcie",
    "gh200",
    "gh200-hbm3e",
    "gh200-quad",
    "a100-40gb-pcie",
    "h100-pcie",
    "h100-nvl-pcie",
    "h200-nvl-pcie",
    "a40-pcie",
    "a10-pcie",
    "a10g-pcie",
    "l4-pcie",
]
RENTED = [
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
    "g5.12xlarge",
    "g5.48xlarge",
    "g6.12xlarge",
    "g6.48xlarge",
    "g2-standard-96",
    "g6e.48xlarge",
    "a2-ultragpu-8g",
    "a3-highgpu-8g",
    "a3-megagpu-8g",
    "a3-ultragpu-8g",
    "a4-highgpu-8g",
    "ND96asr_v4",
    "ND96amsr_A100_v4",
    "ND96isr_H100_v5",
    "ND96isr_H200_v5",
    "ND96isr_MI300X_v5",
]
WITH_LEVELS = [
    "superpod-a100",
    "superpod-h100",
    "llama3-24k",
    "h100-leaf-3to1",
    "dragonfly-4096",
    "jean-zay-a100",
]


def test_every_promised_name_is_in_the_catalog() -> None:
    assert set(DEVICES) <= set(device_names())
    assert {*ANY_SIZE, *RENTED, *WITH_LEVELS} <= set(cluster_names())


@pytest.mark.parametrize("name", device_names())
def test_every_number_of_a_device_has_a_source(name: str) -> None:
    device = load_device(name)
    numbers = {
        field for field, value in device.model_dump().items() if isinstance(value, int | float)
    }
    assert numbers == set(device.sources) - {"lacks"}
    assert ("lacks" in device.sources) == bool(device.lacks)
    assert all(device.sources.values())


@pytest.mark.parametrize("name", device_names())
def test_devices_are_physically_plausible(name: str) -> None:
    device = load_device(name)
    assert 20 < device.hbm_gib < 300
    # Peak over bandwidth: a few hundred FLOP per byte of HBM to be compute-bound; 37 on the H20.
    assert 30 < device.peak_fp16_tflops * 1000 / device.hbm_gb_per_s < 600
    if device.scale_up_gb_per_s is not None:
        assert device.pcie_gb_per_s < device.scale_up_gb_per_s < device.hbm_gb_per_s
    if device.peak_fp8_tflops is not None:
        assert device.peak_fp8_tflops == pytest.approx(2 * device.peak_fp16_tflops, rel=0.02)
    if device.peak_fp4_tflops is not None and device.peak_fp8_tflops is not None:
        assert device.peak_fp4_tflops >= 2 * device.peak_fp8_tflops


def test_generations_are_ordered() -> None:
    generations = [
        load_device(n)
        for n in ("v100-sxm-32gb", "a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb")
    ]
    for field in (
        "hbm_gib",
        "hbm_gb_per_s",
        "peak_fp16_tflops",
        "scale_up_gb_per_s",
        "pcie_gb_per_s",
    ):
        values = [getattr(device, field) for device in generations]
        assert values == sorted(values), field
    assert len({device.hbm_gb_per_s for device in generations}) == len(generations)


def test_what_the_driver_shows_is_not_the_figure_on_the_box() -> None:
    # 81,559 MiB of an H100, 183,359 MiB of a B200 (nvidia-smi).
    assert load_device("h100-sxm-80gb").hbm_gib == pytest.approx(81559 / 1024, abs=0.01)
    assert load_device("b200-sxm-180gb").hbm_gib == pytest.approx(183359 / 1024, abs=0.01)


def test_export_versions_differ_from_their_originals_in_nvlink() -> None:
    for original, cut in (("a100-sxm-80gb", "a800-sxm-80gb"), ("h100-sxm-80gb", "h800-sxm-80gb")):
        assert load_device(original).peak_bf16_tflops == load_device(cut).peak_bf16_tflops
        assert load_device(cut).scale_up_gb_per_s == 200


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_loads_with_sources_and_gets_slower_outwards(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.fabric
    assert {"gpus_per_node", "nvlink_domain", "nic_gbps_per_gpu"} <= set(cluster.sources)
    if cluster.levels:
        assert {"levels", "gpus"} <= set(cluster.sources)
    levels = fabric_levels(cluster, cluster.gpus)
    assert levels.blocks[-1] == cluster.gpus
    assert (levels.gb_per_s[1:] <= levels.gb_per_s[:-1]).all()
    assert (levels.latency_s[1:] >= levels.latency_s[:-1]).all()
    # 60 microseconds of EFA are the longest.
    assert ((levels.latency_s > 5e-7) & (levels.latency_s < 7e-5)).all()


@pytest.mark.parametrize("name", RENTED)
def test_machines_of_clouds_say_what_their_hosts_have(name: str) -> None:
    """AWS: 3,200 Gb/s of a p5 are 400 a GPU; a p4d has 400 in all."""
    cluster = load_cluster(name)
    assert cluster.host_memory_gib is not None
    assert {"host_memory_gib", "nic_medium"} <= set(cluster.sources)
    if name.startswith("p"):
        assert (cluster.nic_gbps_per_gpu, cluster.nic_medium) == (
            50 if "p4" in name else 400,
            "efa",
        )


@pytest.mark.parametrize("name", [*ANY_SIZE, *RENTED])
@pytest.mark.parametrize("gpus", [8, 1024, 131_072])
def test_kinds_of_nodes_come_in_any_size_and_do_not_block(name: str, gpus: int) -> None:
    cluster = load_cluster(name)
    assert cluster.elastic
    levels = fabric_levels(cluster, gpus)
    assert levels.blocks[-1] == gpus
    if gpus > max(cluster.nvlink_domain, cluster.gpus_per_node):
        assert levels.gb_per_s[-1] == cluster.nic_gbps_per_gpu / 8


def test_sizes_of_machines() -> None:
    assert load_cluster("llama3-24k").gpus == 24_576
    assert load_cluster("dragonfly-4096").gpus == 4096
    assert (
        load_cluster("gb200-nvl72").nvlink_domain == load_cluster("gb300-nvl72").nvlink_domain == 72
    )
    assert load_cluster("jean-zay-a100").nic_gbps_per_gpu == 50
    assert [level.gpus for level in load_cluster("superpod-a100").levels[:2]] == [20 * 8, 140 * 8]
    assert load_cluster("superpod-h100").levels[0].gpus == 32 * 8
    assert load_cluster("h100-leaf-3to1").levels[-1].oversubscription == 3


def test_every_device_has_a_kind_of_node() -> None:
    assert all(node_kind_of(name) for name in device_names())
    assert node_kind_of("h100-sxm-80gb") == "dgx-h100"


def test_loading_twice_gives_the_same_object() -> None:
    assert load_cluster("dgx-h100") is load_cluster("dgx-h100")


def test_unknown_names_say_what_was_meant() -> None:
    with pytest.raises(
        InputError, match=r"'h100-sxm-80g'.*did you mean 'h100-sxm-80gb'.*allowed: .*a100"
    ):
        load_device("h100-sxm-80g")
    with pytest.raises(InputError, match=r"did you mean 'llama3-24k'"):
        load_cluster("llama3-24")

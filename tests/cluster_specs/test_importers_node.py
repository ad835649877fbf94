"""nvidia-smi, ibnetdiscover and nccl-tests logs; and the command around them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.importers.document import FORMATS, ImportedCluster, import_topology
from meshwright.cluster_specs.importers.facts import SourceText
from meshwright.cluster_specs.importers.nccl_tests import read_nccl_log
from meshwright.cluster_specs.reader import cluster_from_mapping, read_cluster
from meshwright.costmodel.rates import constants_for, fabric_links
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.model_specs.reader import read_model
from meshwright.planner.request.choices import WITHOUT
from tests.places import DATA as TEST_DATA

DATA = TEST_DATA / "topologies"


def imported(form: str, file: str, node: str, **more: object) -> ImportedCluster:
    return import_topology(form, [DATA / file], node, **more)  # type: ignore[arg-type]


def changed(tmp_path: Path, file: str, old: str, new: str) -> Path:
    text = (DATA / file).read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / file
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("file", "node", "domain", "gb_per_s"),
    [
        ("nvidia-smi-dgx-h100.txt", "dgx-h100", 8, 450.0),
        ("nvidia-smi-l40s.txt", "l40s-pcie", 1, None),
        ("nvidia-smi-dgx1.txt", "dgx-v100", 8, 150.0),
    ],
)
def test_topo_matrix(file: str, node: str, domain: int, gb_per_s: float | None) -> None:
    """NV18 of H100 is 18 x 25 GB/s through a switch; a V100's six links go to four peers."""
    found = imported("nvidia-smi", file, node)
    cluster = found.cluster
    assert (cluster.gpus_per_node, cluster.nvlink_domain, cluster.nvlink_gb_per_s) == (
        8,
        domain,
        gb_per_s,
    )
    assert cluster.elastic


def test_topo_matrix_tells_the_nics_at_the_gpus_side() -> None:
    notes = imported("nvidia-smi", "nvidia-smi-dgx-h100.txt", "dgx-h100").notes
    assert any("GPU7 mlx5_7 (PIX)" in note for note in notes)
    assert any(note.endswith("storage or management: mlx5_8, mlx5_9") for note in notes)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("GPU1\tNV18", "GPU1\tNV1x", ":3: expected row GPU1, column GPU0: X, NV#, PIX"),
        ("GPU1\tNV18", "GPU1\tNV12", "GPU0 to GPU1 is NV18, but GPU1 to GPU0 on line 3 is NV12"),
        ("GPU1\tNV18\t", "GPU1\t", "column"),
        ("\nGPU7\t", "\nGPU6\t", ":9: a second row of GPU6, first on line 8"),
        ("\nGPU7\t", "\nGPU9\t", ":9: expected a row of one of GPU0 to mlx5_9"),
        ("GPU0", "gpu", ":2: a row of GPU0 before the header"),
    ],
)
def test_a_bad_matrix_is_named(tmp_path: Path, old: str, new: str, part: str) -> None:
    path = changed(tmp_path, "nvidia-smi-dgx-h100.txt", old, new)
    with pytest.raises(InputError) as error:
        import_topology("nvidia-smi", [path], "dgx-h100")
    assert part in str(error.value)


def test_ibnetdiscover_groups_the_rails() -> None:
    """Trays with four NICs, one on each of four rail leaves; two racks, joined by spines."""
    found = imported("ibnetdiscover", "ibnetdiscover-dgx.txt", "gb200-nvl72")
    cluster = found.cluster
    leaves = {node.name: node.leaf for node in cluster.nodes}
    assert leaves == {
        **dict.fromkeys(("a06-p1-dgx-02-c01", "a06-p1-dgx-02-c02"), "A09-P1-IBLEAF-01-02+3"),
        **dict.fromkeys([f"a08-p1-dgx-04-c0{n}" for n in (1, 2, 3)], "A09-P1-IBLEAF-01-04+3"),
    }
    assert [level.name for level in cluster.levels] == ["leaf", "spine"]
    assert cluster.nic_gbps_per_gpu == 400
    assert any("2 adapters name no host" in note for note in found.notes)
    assert [level.rails for level in cluster.levels] == [4, 1]
    assert any("taken as rails" in note for note in found.notes)


FABRIC = """\
Switch 4 "S-1" # "MF0;leaf1:X/U1" enhanced port 0 lid 1 lmc 0
[1] "H-1"[1](1) # "n1 mlx5_0" lid 5 4xHDR
[2] "H-2"[1](2) # "n2 mlx5_0" lid 6 4xHDR
[3] "H-9"[1](9) # "ufm mlx5_0" lid 7 4xHDR
[4] "S-3"[1] # "spine" lid 3 4xHDR

Switch 4 "S-2" # "leaf2" base port 0 lid 2 lmc 0
[1] "H-3"[1](3) # "n3 mlx5_0" lid 8 4xHDR
[2] "H-1"[2](4) # "n1 mlx5_1" lid 9 4xHDR
[4] "S-3"[2] # "spine" lid 3 4xHDR

Switch 4 "S-3" # "spine" base port 0 lid 3 lmc 0
[1] "S-1"[4] # "leaf1" lid 1 4xHDR
[2] "S-2"[4] # "leaf2" lid 2 4xHDR
"""
ADAPTERS = {
    "1": ("n1 mlx5_0", "S-1", 1),
    "2": ("n2 mlx5_0", "S-1", 2),
    "3": ("n3 mlx5_0", "S-2", 1),
}


def fabric(rail: bool) -> str:
    """Three hosts on two leaves; with `rail`, n1 hangs on both, which makes them one block."""
    text = FABRIC if rail else FABRIC.replace('[2] "H-1"[2](4) # "n1 mlx5_1" lid 9 4xHDR\n', "")
    for guid, (name, switch, port) in ADAPTERS.items():
        text += f'\nCa 2 "H-{guid}" # "{name}"\n'
        text += f'[1]({guid}) "{switch}"[{port}] # lid 5 lmc 0 "x" lid 1 4xHDR\n'
        if rail and guid == "1":
            text += '[2](4) "S-2"[2] # lid 9 lmc 0 "leaf2" lid 2 4xHDR\n'
    return text


def test_ibnetdiscover_by_hand(tmp_path: Path) -> None:
    """Three host ports of 200 Gb/s (the manager's is none of a Ca block) over two up-links: 1.5 to 1."""
    path = tmp_path / "ib.txt"
    path.write_text(fabric(rail=False), encoding="utf-8")
    cluster = import_topology("ibnetdiscover", [path], "dgx-h100").cluster
    assert [(node.name, node.leaf) for node in cluster.nodes] == [
        ("n1", "leaf1"),
        ("n2", "leaf1"),
        ("n3", "leaf2"),
    ]
    assert [level.oversubscription for level in cluster.levels] == [1.0, 1.5]
    assert cluster.nic_gbps_per_gpu == 200 / 8
    path.write_text(fabric(rail=True), encoding="utf-8")
    cluster = import_topology("ibnetdiscover", [path], "dgx-h100").cluster
    assert [level.name for level in cluster.levels] == ["leaf"]
    assert {node.leaf for node in cluster.nodes} == {"leaf1+1"}
    assert cluster.levels[0].rails == 1, "n2 and n3 hang on one switch each"


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('[1] "H-1"', '[1] H-1"', ":2: expected Switch, Ca, or a port"),
        ("4xHDR", "4xABC", ":2: expected a link speed like 4xNDR"),
        (
            'Switch 4 "S-1" # "MF0;leaf1:X/U1" enhanced port 0 lid 1 lmc 0\n',
            "",
            ":1: a port before the first",
        ),
        (fabric(rail=False), "# nothing\n", "expected switches and hosts"),
    ],
)
def test_bad_ibnetdiscover_is_named(tmp_path: Path, old: str, new: str, part: str) -> None:
    path = tmp_path / "ib.txt"
    path.write_text(fabric(rail=False).replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as error:
        import_topology("ibnetdiscover", [path], "dgx-h100")
    assert part in str(error.value)


def test_a_log_of_one_node_measures_its_scale_up_domain() -> None:
    """320 of 450 GB/s; 12 us of an all-gather of 8 are log2(8) = 3 hops of 4 us."""
    (entry,) = imported(
        "nccl-tests", "nccl-tests-all-gather-1-node.log", "dgx-h100"
    ).cluster.measured
    assert (entry.level, entry.collective, entry.gpus, entry.bus_gb_per_s) == (
        "nvlink",
        "all_gather",
        8,
        320.0,
    )
    assert entry.attained_fraction == pytest.approx(320 / 450, abs=1e-4)
    assert entry.latency_us == pytest.approx(4.0)


def test_a_log_of_two_nodes_measures_the_network() -> None:
    """16 A100: half of 36.47 us less 3 NVLink hops of 1.9 us is a hop; 237.94 of 8 x 25 GB/s is too good."""
    found = imported("nccl-tests", "nccl-tests-a100-2-nodes.log", "dgx-a100-40gb")
    (entry,) = found.cluster.measured
    assert (entry.level, entry.collective, entry.gpus, entry.bus_gb_per_s) == (
        "fabric",
        "all_reduce",
        16,
        237.94,
    )
    assert entry.latency_us == pytest.approx(36.47 / 2 - 3 * 1.9, abs=1e-3)
    assert entry.attained_fraction == 1
    assert any("1.19 of the nominal rate" in note for note in found.notes)


def test_a_ring_below_the_nominal_rate_is_kept(tmp_path: Path) -> None:
    path = changed(tmp_path, "nccl-tests-a100-2-nodes.log", "126.90  237.94", "92.0  172.50")
    (entry,) = import_topology("nccl-tests", [path], "dgx-a100-40gb").cluster.measured
    assert entry.attained_fraction == pytest.approx(172.5 / (8 * 25))


def test_hosts_that_the_cluster_lists_choose_the_level(tmp_path: Path) -> None:
    conf = tmp_path / "topology.conf"
    conf.write_text(
        "SwitchName=l1 Nodes=a[1-2]\nSwitchName=l2 Nodes=b[1-2]\nSwitchName=s Switches=l[1-2]\n"
    )
    base = tmp_path / "base.yaml"
    base.write_text(import_topology("slurm", [conf], "dgx-a100-40gb").text, encoding="utf-8")
    log = (DATA / "nccl-tests-a100-2-nodes.log").read_text(encoding="utf-8")
    for hosts, level in ((("a1", "a2"), "leaf"), (("a1", "b1"), "spine"), (("a1", "zz"), "spine")):
        for index, host in enumerate(hosts):
            log = log.replace(f"nccl-allreduce-job0-mpiworker-{index}", host)
        path = tmp_path / "x.log"
        path.write_text(log, encoding="utf-8")
        (entry,) = import_topology("nccl-tests", [path], str(base)).cluster.measured
        assert entry.level == level
        log = (DATA / "nccl-tests-a100-2-nodes.log").read_text(encoding="utf-8")


LEAVES_IN_PODS: dict[str, Any] = {
    "base": "dgx-a100-40gb",
    "levels": [
        {"name": "leaf", "gpus": 16},
        {"name": "pod", "gpus": 32},
        {"name": "core", "gpus": 64},
    ],
    "nodes": [
        {"name": name, "leaf": leaf, "pod": pod}
        for name, leaf, pod in (("a", "1", "x"), ("b", "1", "x"), ("c", "2", "x"), ("d", "1", "y"))
    ],
}
RACKS: dict[str, Any] = {
    "base": "gb200-nvl72",
    "levels": [{"name": "pod", "gpus": 144}, {"name": "core", "gpus": 288}],
    "nodes": [
        {"name": f"{name}{tray}", "leaf": name, "pod": pod}
        for name, pod in (("a", "x"), ("b", "x"), ("c", "y"))
        for tray in range(18)
    ],
}


@pytest.mark.parametrize(
    ("cluster", "hosts", "level"),
    [
        (LEAVES_IN_PODS, ("a", "b"), "leaf"),
        (LEAVES_IN_PODS, ("a", "c"), "pod"),
        (LEAVES_IN_PODS, ("a", "d"), "core"),
        (RACKS, ("a0", "a1"), "nvlink"),
        (RACKS, ("a0", "b0"), "pod"),
        (RACKS, ("a0", "c0"), "core"),
    ],
)
def test_listed_leaves_are_told_apart_by_pod_and_may_be_racks(
    cluster: dict[str, Any], hosts: tuple[str, ...], level: str
) -> None:
    ranks = [(host, gpu) for host in hosts for gpu in range(4)]
    lines = [f"#  Rank {n} Group 0 Pid 1 on {h} device {g} [0x1]" for n, (h, g) in enumerate(ranks)]
    row = "8589934592 2147483648 float sum -1 1000 {} 50.0 0 1000 {} 50.0 0".replace(
        "{}", f"{50 / 1.75}"
    )
    source = SourceText(name="all_reduce_perf.log", text="\n".join([*lines, row]))
    (entry,) = read_nccl_log(source, cluster_from_mapping(cluster)).measured
    assert entry.level == level


def test_measured_levels_reach_the_cost_model() -> None:
    """The attained share and the hop of the log go before the constants of the medium."""
    cluster = imported("nccl-tests", "nccl-tests-all-gather-1-node.log", "dgx-h100").cluster
    levels = fabric_levels(cluster, 16)
    assert levels.attained[0] == pytest.approx(0.7111)
    assert np.isnan(levels.attained[1])
    assert np.isnan(levels.all_to_all_attained).all()
    workload = Workload(
        model=read_model("llama-3-8b"), cluster=cluster, gpus=16, global_batch=16, seq_len=2048
    )
    links = fabric_links(workload, constants_for(workload))
    assert links.bytes_per_s[0] == pytest.approx(0.7111 * 450e9)
    assert links.latency_s[0] == pytest.approx(4e-6)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("#  Rank  3 ", "#  Rank  2 ", "rank 2 is listed twice, first on line 7"),
        ("#  Rank  3 Group", "#  Rang  3 Group", "expected every rank up to 15"),
        ("8589934592    2147483648     float     sum      -1    67689", "8589934592  214748 float sum -1 x",
         ":32: expected a row"),
        ("126.90  237.94", "1.0  1.0", "which test ran is not in the log"),
        ("126.90  237.94", "1269.0  2379.4", "this cannot be the kind of node"),
        ("126.90  237.94", "0.00  0.00", "the bus bandwidth of the largest message is 0"),
        ("#  Rank  0 Group  0 Pid     43 on nccl-allreduce-job0-mpiworker-0",
         "#  Rank  0 Group  0 Pid     43 on elsewhere", "as many GPUs on every host"),
    ],
)  # fmt: skip
def test_a_bad_log_is_named(tmp_path: Path, old: str, new: str, part: str) -> None:
    path = changed(tmp_path, "nccl-tests-a100-2-nodes.log", old, new)
    with pytest.raises(InputError) as error:
        import_topology("nccl-tests", [path], "dgx-a100-40gb")
    assert part in str(error.value)


BROKEN = (
    "",
    "0",
    "9999999999",
    "-1",
    "[",
    "]",
    ",",
    "=",
    '"',
    "<",
    ">",
    "\n",
    "\0",
    "NaN",
    "{",
    ": ",
    "&a",
    "GPU0",
)


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_are_errors_in_words(tmp_path: Path, form: str) -> None:
    """Forty damages of a sample: read, or refused with a message; never another exception."""
    file, node = SAMPLES[form]
    sample, draw = (DATA / file).read_text(encoding="utf-8"), random.Random(form)
    path = tmp_path / file
    refused = 0
    for _ in range(40):
        text = sample
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text))
            text = text[:start] + draw.choice(BROKEN) + text[start + draw.choice((0, 1, 20)) :]
        path.write_text(text, encoding="utf-8")
        try:
            import_topology(form, [path], node)
        except InputError:
            refused += 1
    assert refused > 0


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    return result.exit_code, result.stdout, result.stderr


SAMPLES = {
    "slurm": ("slurm-tree.conf", "dgx-h100"),
    "topograph": ("topograph-tree.conf", "dgx-h100"),
    "nvidia-smi": ("nvidia-smi-dgx-h100.txt", "dgx-h100"),
    "ibnetdiscover": ("ibnetdiscover-dgx.txt", "gb200-nvl72"),
    "nccl-tests": ("nccl-tests-all-gather-1-node.log", "dgx-h100"),
}


PLANNED = ("slurm", "ibnetdiscover")
"""Nodes on leaves, and racks: what plans are made on in `make test`."""


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow if form in PLANNED else pytest.mark.soak)
        for form in FORMATS
    ],
)
def test_a_plan_runs_on_what_is_imported(tmp_path: Path, form: str) -> None:
    file, node = SAMPLES[form]
    output = tmp_path / "cluster.yaml"
    code, out, _ = run(
        "topology", "import", DATA / file, "--from", form, "--node", node, "-o", output, "--json"
    )
    assert code == 0
    assert json.loads(out)["schema"] == 1
    cluster = read_cluster(str(output))
    gpus = 16 if cluster.gpus >= 16 else cluster.gpus
    code, out, _ = run(
        *("plan", "gpt2-xl", "--cluster", output, "--gpus", gpus, "--global-batch", 64),
        *("--seq-len", 1024, "--framework", "fsdp2", "--json"),
        *("--pin", "cp=1,micro_batch=1,zero_stage=3", "--without", ",".join(WITHOUT)),
    )
    assert code == 0
    assert json.loads(out)["status"] == "optimal"


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    start = ("topology", "import", DATA / "slurm-tree.conf", "-o", tmp_path / "c.yaml")
    code, _, err = run(*start, "--from", "slrum", "--node", "dgx-h100")
    assert (code, "did you mean 'slurm'" in err) == (2, True)
    code, _, err = run(*start, "--from", "slurm", "--node", "dgx-h10")
    assert (code, "did you mean 'dgx-h100'" in err) == (2, True)
    code, _, err = run(
        *start, "--from", "slurm", "--node", "dgx-h100", "--oversubscription", "1,x,3"
    )
    assert (code, "'x' is not a number from 1 to 1000" in err) == (2, True)
    code, _, err = run(
        *start[:2], tmp_path / "no", "--from", "slurm", "--node", "dgx-h100", *start[3:]
    )
    assert (code, "no such file" in err) == (2, True)
    assert not (tmp_path / "c.yaml").exists()
    shutil.copy(DATA / "slurm-tree.conf", tmp_path / "c.yaml")
    code, _, err = run(*start, "--from", "slurm", "--node", "dgx-h100")
    assert (code, "already there" in err) == (2, True)

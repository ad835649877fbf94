"""Slurm's own reading of our samples, and Megatron's own process groups, against ours."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster_specs.importers.document import import_topology
from meshwright.cluster_specs.importers.facts import expand
from meshwright.cluster_specs.reader import load_cluster
from meshwright.cluster_specs.schema import NodeSpec
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.launch.rank_files import mapping_files
from meshwright.planner.mapping.slots import process_groups
from meshwright.planner.plan.document import Mapping
from tests.oracles.slurm_daemon import slurm_daemon, slurm_machines
from tests.oracles.test_frameworks import ask
from tests.plans import make_plan

pytestmark = pytest.mark.oracle

DATA = Path(__file__).parent.parent / "data" / "topologies"
TELLS_APART = ("r[0-1]n[00-01]-ib",)
"""Read here only: Slurm wants a bracket at the end, ClusterShell and pdsh do not."""
REFUSED = ("n[1-2,[3-4]]", "n[3-1]")
HOSTLISTS = (
    "tux[0-3,12,18-20]",
    "a[08-11],b[1-2]",
    "r[0-1]n[00-01]-ib",
    "login,c[1-2],d.e_f",
    "n[001,2]",
    "gpu[001-004],rack[1-2]n[01-02],gpu012",
    "n[9-11]",
    "x[1-2]y[3-4]z[5-6]",
    *REFUSED,
)


def said(env: dict[str, str], *words: str) -> tuple[int, str]:
    done = subprocess.run(
        ["scontrol", *words], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("file", ["slurm-tree.conf", "topograph-tree.conf"])
def test_slurm_reads_our_samples_as_we_do(file: str, tmp_path: Path) -> None:
    """Every leaf and pod of `scontrol show topology` has the nodes that the import gave it."""
    found = import_topology("slurm", [DATA / file], "dgx-h100")
    names = ",".join(node.name for node in found.cluster.nodes)
    text = (DATA / file).read_text(encoding="utf-8")
    with slurm_daemon(tmp_path, names, text) as env:
        code, out = said(env, "show", "topology")
        log = (tmp_path / "slurmctld.log").read_text(encoding="utf-8")
    assert code == 0, log[-2000:]
    switches = re.findall(r"SwitchName=(\S+) Level=(\d) \S+ Nodes=(\S+)", out)
    assert len(switches) == len(re.findall(r"(?im)^switchname=", text))
    for name, level, nodes in switches:
        ours = {
            node.name
            for node in found.cluster.nodes
            if name == (node.leaf if level == "0" else node.pod)
        }
        assert set(expand(nodes, 1000)) == (
            ours if level in "01" else {node.name for node in found.cluster.nodes}
        )


def test_host_lists_are_those_of_slurm(tmp_path: Path) -> None:
    with slurm_daemon(tmp_path, "n1", "SwitchName=s Nodes=n1\n") as env:
        for text in HOSTLISTS:
            code, out = said(env, "show", "hostnames", text)
            try:
                ours: list[str] | None = expand(text, 1000)
            except InputError:
                ours = None
            theirs = out.split() if code == 0 and out.strip() else None
            if text.count("[") > 2:
                # Slurm mixes the order of three brackets and more.
                ours, theirs = sorted(ours or ()), sorted(theirs or ())
            assert ours == theirs or text in TELLS_APART, (text, ours, theirs)


def test_srun_puts_ranks_where_the_mapping_says(tmp_path: Path) -> None:
    """Ranks interleaved on three nodes: SLURM_PROCID is on the host of its line, SLURM_LOCALID is its GPU."""
    cluster = load_cluster("dgx-h100")
    nodes = tuple(NodeSpec(name=f"gpu00{n}") for n in (1, 2, 3))
    cluster = cluster.model_copy(update={"nodes": nodes, "gpus": 24, "elastic": False})
    places = [(2, 5), (0, 1), (2, 4), (1, 7), (0, 0), (1, 6)]
    plan = make_plan(tp=2, dp=3, mapping=Mapping(order=[], levels=[], matrix={}, ranks=places))
    plan = plan.model_copy(update={"inputs": plan.inputs.model_copy(update={"cluster": cluster})})
    files = mapping_files(plan)
    visible = {
        row["host"]: row["cuda_visible_devices"].split(",") for row in rows(files, "nodes.csv")
    }
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(files["mapping/slurm_hostfile"], encoding="utf-8")
    # Steps listen on sockets in the spool folder, whose paths may have 107 characters.
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="slurm") as short,
        slurm_machines(Path(short), [node.name for node in nodes]) as env,
    ):
        step = ["srun", "--distribution=arbitrary", "--ntasks=6", "bash", "-c"]
        step.append("echo $SLURM_PROCID $SLURMD_NODENAME $SLURM_LOCALID")
        for _ in range(40):
            # The nodes take a while to be idle.
            done = subprocess.run(
                step,
                env=env | {"SLURM_HOSTFILE": str(hostfile)},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                break
            time.sleep(0.5)
    assert done.returncode == 0, done.stderr
    ran = {
        int(r): (host, int(local)) for r, host, local in map(str.split, done.stdout.splitlines())
    }
    for row in rows(files, "ranks.csv"):
        host, local = ran[int(row["rank"])]
        assert (host, visible[host][local]) == (row["host"], row["gpu"])


def rows(files: dict[str, str], name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files[f"mapping/{name}"])))


def test_groups_are_those_of_megatron(tmp_path: Path) -> None:
    """300 random degrees in both orders, dense and expert, and the same refusals."""
    draw = random.Random(11)
    cases: list[dict[str, Any]] = []
    for _ in range(300):
        degrees: dict[str, Any] = {
            "tp": draw.choice((1, 2, 3, 4, 8)),
            "cp": draw.choice((1, 2, 4)),
            "dp": draw.choice((1, 2, 3, 5, 8)),
            "pp": draw.choice((1, 2, 3, 8)),
            "ep": draw.choice((1, 2, 4)),
        }
        degrees["etp"] = draw.choice((1, degrees["tp"]))
        cases.append({**degrees, "order": draw.choice(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))})
    made = 0
    for case, answer in zip(cases, ask("groups", cases, tmp_path), strict=True):
        layout = make_plan("mixtral-8x7b", **{k: v for k, v in case.items() if k != "order"}).layout
        assert layout is not None
        try:
            groups = process_groups(layout, str(case["order"]).split("-"), experts=True)
        except InfeasibleError:
            assert not answer["ok"], case
            continue
        assert answer["ok"], (case, answer)
        digests = {
            name: hashlib.sha256(json.dumps(table.tolist()).encode()).hexdigest()
            for name, table in groups.items()
        }
        assert digests == answer["groups"], case
        made += 1
    assert made >= 150

"""Slurm, OpenMPI and shellcheck on what we write; the JobSet's fields. Missing tools are skipped."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.documents import write_files
from meshwright.frameworks.record import FrameworkName
from meshwright.planner.launch.plan_files import TARGETS, plan_files
from meshwright.planner.plan.document import Mapping, Plan
from tests.oracles.slurm_daemon import need, slurm_daemon, slurm_machines
from tests.plans import make_plan

pytestmark = pytest.mark.oracle

NAMES = [
    "plain",
    "two words",
    "it's",
    'a "quoted" name',
    "$(touch owned)",
    "`touch owned`; x",
    "a\nb",
]
FOR: dict[str, FrameworkName] = {
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "fsdp2": "fsdp2",
}


def plan_for(target: str, name: str = "llama", ranks: list[tuple[int, int]] | None = None) -> Plan:
    zero = 3 if target in FOR else 1
    mapping = None if ranks is None else Mapping(order=[], levels=[], matrix={}, ranks=ranks)
    plan = make_plan(tp=2, dp=16, zero_stage=2 if target == "deepspeed" else zero, mapping=mapping)
    model = plan.inputs.model.model_copy(update={"name": name})
    inputs = plan.inputs.model_copy(
        update={"model": model, "framework": FOR.get(target, "megatron")}
    )
    return plan.model_copy(update={"inputs": inputs})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [NAMES[4], NAMES[6]])
def test_shellcheck_and_bash_accept_every_script(target: str, name: str, tmp_path: Path) -> None:
    need("shellcheck")
    folder = tmp_path / "a folder, $(touch owned)"
    places = [(rank // 8, rank % 8) for rank in range(32)]
    for ranks in (None, places[::-1]) if target != "kubernetes" else (None,):
        write_files(folder, plan_files(plan_for(target, name, ranks), target), force=True)
        for script in [*folder.glob("*.sh"), *folder.glob("*.sbatch")]:
            subprocess.run(["shellcheck", "-S", "warning", "-s", "bash", str(script)], check=True)
            done = subprocess.run(
                ["bash", str(script), "nonsense"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert done.returncode != 0
    assert not list(tmp_path.rglob("owned"))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Eight nodes on two leaves."""
    topology = (
        "SwitchName=leaf0 Nodes=node[0-3]\nSwitchName=leaf1 Nodes=node[4-7]\n"
        "SwitchName=spine Switches=leaf[0-1]\n"
    )
    with slurm_daemon(tmp_path, "node[0-7]", topology) as env:
        yield env


def test_slurm_accepts_the_batch_script(slurm: dict[str, str], tmp_path: Path) -> None:
    topology = subprocess.run(
        ["scontrol", "show", "topology"], env=slurm, capture_output=True, text=True, check=True
    )
    assert "leaf1" in topology.stdout
    for name in NAMES:
        folder = tmp_path / "launch"
        write_files(folder, plan_files(plan_for("megatron", name), "slurm"), force=True)
        done = subprocess.run(
            ["sbatch", "--test-only", str(folder / "job.sbatch")],
            env=slurm,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "4 nodes" in done.stderr or re.search(r"on nodes node\[\d-\d\]", done.stderr), (
            done.stderr
        )
    too_big = (folder / "job.sbatch").read_text(encoding="utf-8").replace("--nodes=4", "--nodes=9")
    (folder / "job.sbatch").write_text(
        too_big.replace("--ntasks=4", "--ntasks=9"), encoding="utf-8"
    )
    refused = subprocess.run(
        ["sbatch", "--test-only", str(folder / "job.sbatch")],
        env=slurm,
        capture_output=True,
        check=False,
    )
    assert refused.returncode != 0


PARTLY_FREE = {
    "name": "partly-free",
    "base": "dgx-h100",
    "levels": [{"name": "leaf", "gpus": 32}, {"name": "core", "gpus": 256}],
    "nodes": [
        {"name": "a0", "leaf": "l0", "free_gpus": 7},
        {"name": "a1", "leaf": "l0"},
        {"name": "a2", "leaf": "l0"},
    ],
}


def plan_on_unlike_nodes(*, named: bool) -> Plan:
    """23 ranks that begin on a2; or on as many nodes without names."""
    if not named:
        return make_plan(dp=23)
    order = [(node, gpu) for node, count in ((2, 8), (0, 7), (1, 8)) for gpu in range(count)]
    plan = make_plan(dp=23, mapping=Mapping(order=[], levels=[], matrix={}, ranks=order))
    cluster = cluster_from_mapping(PARTLY_FREE)
    return plan.model_copy(update={"inputs": plan.inputs.model_copy(update={"cluster": cluster})})


@pytest.mark.parametrize("named", [True, False])
def test_slurm_starts_every_rank_where_nodes_have_unequal_gpus(named: bool, tmp_path: Path) -> None:
    """The script as it is written, on daemons of nodes with 7, 8 and 8 GPUs: each process says its rank."""
    files = plan_files(plan_on_unlike_nodes(named=named), "slurm")
    job = tmp_path / "job"
    write_files(job, files)
    said = tmp_path / "said"
    said.mkdir()
    (tmp_path / "entry.py").write_text(
        "import os, pathlib\n"
        "e = os.environ\n"
        "line = ' '.join([e['SLURMD_NODENAME'], e['LOCAL_RANK'], e['WORLD_SIZE'], e['MASTER_ADDR']])\n"
        f"pathlib.Path({str(said)!r}, e['RANK']).write_text(line)\n",
        encoding="utf-8",
    )
    names = ("a0", "a1", "a2")
    with slurm_machines(tmp_path, names, (7, 8, 8)) as slurm:
        own = {
            "LAUNCH_DIR": str(job),
            "MEGATRON_ENTRY": str(tmp_path / "entry.py"),
            "MOCK_DATA": "1",
        }
        done = subprocess.run(
            ["sbatch", "--wait", f"--output={tmp_path}/log", str(job / "job.sbatch")],
            env=slurm | own,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
    log = tmp_path / "log"
    assert done.returncode == 0, done.stderr + (log.read_text("utf-8") if log.exists() else "")
    lines = {int(path.name): path.read_text("utf-8").split() for path in said.iterdir()}
    assert sorted(lines) == list(range(23))
    first = lines[0][0]
    assert {tuple(line[2:]) for line in lines.values()} == {("23", first)}
    hosts = ("a2", "a0", "a1") if named else ("a1", "a2", "a0")
    expected = [(name, 7 if name == "a0" else 8) for name in hosts]
    places = [(name, str(gpu)) for name, count in expected for gpu in range(count)]
    assert [tuple(lines[rank][:2]) for rank in range(23)] == places


def test_segments_for_nvl72(tmp_path: Path) -> None:
    plan = make_plan(cluster="gb200-nvl72", tp=4, dp=36)
    text = plan_files(plan, "slurm")["job.sbatch"]
    assert "#SBATCH --segment=18\n" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert json.loads(plan_files(plan, "slurm")["env.json"])["NCCL_MNNVL_ENABLE"] == "1"


def test_openmpi_starts_the_planned_order(tmp_path: Path) -> None:
    need("mpirun")
    order = [(0, 3), (0, 1), (0, 0), (0, 2)]
    plan = make_plan(tp=2, dp=2, mapping=Mapping(order=[], levels=[], matrix={}, ranks=order))
    files = plan_files(plan, "openmpi")
    host = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    files["hostfile"] = f"{host}\n"
    files["rankfile.openmpi"] = re.sub(
        r"=\S+ slot=\d+", f"={host} slot=0", files["rankfile.openmpi"]
    )
    write_files(tmp_path, files)
    env = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_plm_rsh_agent": ""}
    show = "echo rank $RANK of $WORLD_SIZE gpu $LOCAL_RANK"
    done = subprocess.run(
        ["bash", str(tmp_path / "mpi.sh"), "bash", "-c", show],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"rank {rank} of 4 gpu {gpu}" for rank, (_, gpu) in enumerate(order)], (
        done.stderr
    )


JOBSET_SCHEMA = Path(__file__).parents[1] / "data" / "kubernetes" / "jobset_v1alpha2.json"
VALIDATE = """
import json, sys
from jsonschema import Draft7Validator as Validator

def strict(part):
    # As kubectl's --validate=strict: no field that the schema does not name.
    if isinstance(part, dict):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
        for inner in part.values():
            strict(inner)

schema, documents = json.load(sys.stdin)
Validator.check_schema(schema)
strict(schema)
print(json.dumps([[one.message for one in Validator(schema).iter_errors(each)] for each in documents]))
"""


def schema_errors(documents: list[object]) -> list[list[str]]:
    """What JobSet's own schema, with that of the pod in it, says against each document."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    asked = json.dumps([json.loads(JOBSET_SCHEMA.read_text("utf-8")), documents])
    done = subprocess.run(
        [python, "-c", VALIDATE], input=asked, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    errors: list[list[str]] = json.loads(done.stdout)
    return errors


def test_the_jobset_schema_accepts_the_manifest() -> None:
    wide = make_plan(cluster="gb200-nvl72", tp=4, dp=36)
    texts = [plan_files(plan_for("megatron", name), "kubernetes")["jobset.yaml"] for name in NAMES]
    texts.append(plan_files(wide, "kubernetes")["jobset.yaml"])
    for named in (True, False):
        unlike = plan_on_unlike_nodes(named=named)
        texts.append(plan_files(unlike, "kubernetes")["jobset.yaml"])
    documents = [yaml.safe_load(text) for text in texts]
    assert schema_errors(documents) == [[] for _ in documents]
    for old, new in (
        ("replicas: 1", "replicas: one"),
        ("completions", "completion"),
        ("  image:", "  images:"),
    ):
        assert old in texts[0]
        assert schema_errors([yaml.safe_load(texts[0].replace(old, new))]) != [[]]


def test_the_jobset_says_the_plan() -> None:
    """Nodes and GPUs of the plan; names must be DNS labels, annotations Kueue's, with strings for values."""
    for name in NAMES:
        document = yaml.safe_load(
            plan_files(plan_for("megatron", name), "kubernetes")["jobset.yaml"]
        )
        assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", document["metadata"]["name"])
        (job,) = document["spec"]["replicatedJobs"]
        inner = job["template"]["spec"]
        assert inner["parallelism"] == inner["completions"] == 4
        assert inner["completionMode"] == "Indexed"
        assert inner["template"]["spec"]["restartPolicy"] == "Never"
        (container,) = inner["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        for key, value in inner["template"]["metadata"]["annotations"].items():
            assert key.startswith("kueue.x-k8s.io/podset-")
            assert isinstance(value, str)

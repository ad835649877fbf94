"""What we write for Slurm, OpenMPI, Kubernetes, SkyPilot and Ray, asked of each and of shellcheck.

Tools of the system that are missing are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
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
    "axolotl": "fsdp2",
    "llama-factory": "fsdp2",
    "trl": "fsdp2",
    "ms-swift": "fsdp2",
}
WHOLE = ("llama-factory", "trl", "ms-swift")
"""Targets that train whole models."""
IN_TURN = ("kubernetes", "volcano", "trainjob", "skypilot", "ray", "trl", "ms-swift")
"""Targets that take no plan whose ranks need nodes without names out of turn."""


def plan_for(target: str, name: str = "llama", ranks: list[tuple[int, int]] | None = None) -> Plan:
    zero = 3 if target in FOR else 1
    mapping = None if ranks is None else Mapping(order=[], levels=[], matrix={}, ranks=ranks)
    tp = 1 if target in WHOLE else 2
    plan = make_plan(
        tp=tp, dp=32 // tp, zero_stage=2 if target == "deepspeed" else zero, mapping=mapping
    )
    model = plan.inputs.model.model_copy(update={"name": name})
    loss = "fused-head" if target == "trl" else plan.inputs.loss
    changes = {"model": model, "framework": FOR.get(target, "megatron"), "loss": loss}
    inputs = plan.inputs.model_copy(update=changes)
    return plan.model_copy(update={"inputs": inputs})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [NAMES[4], NAMES[6]])
def test_shellcheck_and_bash_accept_every_script(target: str, name: str, tmp_path: Path) -> None:
    need("shellcheck")
    folder = tmp_path / "a folder, $(touch owned)"
    places = [(rank // 8, rank % 8) for rank in range(32)]
    for ranks in (None, places[::-1]) if target not in IN_TURN else (None,):
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
    with (
        # Sockets of slurmd lie there, whose paths have at most 108 characters.
        tempfile.TemporaryDirectory(dir="/tmp", prefix="slurm") as short,
        slurm_machines(Path(short), names, (7, 8, 8)) as slurm,
    ):
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


DATA = Path(__file__).parents[1] / "data"
JOBSET_SCHEMA = DATA / "kubernetes" / "jobset_v1alpha2.json"
VOLCANO_SCHEMA = DATA / "kubernetes" / "volcano_job_v1alpha1.json"
SKYPILOT_SCHEMA = DATA / "skypilot" / "task.json"
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


def asked_of_oracles(code: str, question: object, **environment: str) -> str:
    """What a program prints in the environment of the oracles, with the question as JSON on its input."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    done = subprocess.run(
        [python, "-c", code],
        input=json.dumps(question),
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def schema_errors(documents: list[object], schema: object = None) -> list[list[str]]:
    """What a schema, by default JobSet's with that of the pod in it, says against each document."""
    schema = schema or json.loads(JOBSET_SCHEMA.read_text("utf-8"))
    errors: list[list[str]] = json.loads(asked_of_oracles(VALIDATE, [schema, documents]))
    return errors


def texts_of(target: str, file: str) -> list[str]:
    """The file of a target for plans with hostile names, a wide one, and what it takes of unlike nodes."""
    plans = [plan_for("megatron", name) for name in NAMES]
    plans.append(make_plan(cluster="gb200-nvl72", tp=4, dp=36))
    if target in ("kubernetes", "volcano"):
        plans += [plan_on_unlike_nodes(named=named) for named in (True, False)]
    else:
        plans.append(plan_on_two_named_nodes())
    return [plan_files(plan, target)[file] for plan in plans]


def plan_on_two_named_nodes() -> Plan:
    """16 ranks that begin on a2."""
    order = [(node, gpu) for node in (2, 1) for gpu in range(8)]
    plan = make_plan(dp=16, mapping=Mapping(order=[], levels=[], matrix={}, ranks=order))
    cluster = cluster_from_mapping(PARTLY_FREE)
    return plan.model_copy(update={"inputs": plan.inputs.model_copy(update={"cluster": cluster})})


def assert_only_these_pass(texts: list[str], schema: object, *faults: tuple[str, str]) -> None:
    """A schema takes the manifests, and the first of them no longer with a fault in it."""
    documents = [yaml.safe_load(text) for text in texts]
    assert schema_errors(documents, schema) == [[] for _ in documents]
    for old, new in faults:
        assert old in texts[0]
        assert schema_errors([yaml.safe_load(texts[0].replace(old, new))], schema) != [[]]


def test_the_jobset_schema_accepts_the_manifest() -> None:
    assert_only_these_pass(
        texts_of("kubernetes", "jobset.yaml"),
        None,
        ("replicas: 1", "replicas: one"),
        ("completions", "completion"),
        ("  image:", "  images:"),
    )


def test_volcanos_schema_accepts_the_job() -> None:
    assert_only_these_pass(
        texts_of("volcano", "volcano.yaml"),
        json.loads(VOLCANO_SCHEMA.read_text("utf-8")),
        ("minAvailable: 4", "minAvailable: four"),
        ("event: PodFailed", "event: PodBroken"),
        ("mode: soft", "mode: near"),
        ("  image:", "  images:"),
    )


def test_skypilots_schemas_accept_the_task() -> None:
    schemas = json.loads(SKYPILOT_SCHEMA.read_text("utf-8"))
    texts = texts_of("skypilot", "skypilot.yaml")
    assert_only_these_pass(
        texts, schemas["task"], ("num_nodes: 4", "num_nodes: four"), ("workdir", "work_dir")
    )
    resources = [yaml.safe_dump(yaml.safe_load(text)["resources"]) for text in texts]
    assert_only_these_pass(
        resources,
        schemas["resources"],
        ("network_tier", "network_class"),
        ("accelerators: H100:8", "accelerators: 8"),
    )


TRAIN_JOB = """
import json, sys
from kubeflow_trainer_api import models

def read(document):
    try:
        return models.TrainerV1alpha1TrainJob.from_dict(document).to_dict()
    except ValueError as error:
        return str(error)

print(json.dumps([read(document) for document in json.load(sys.stdin)]))
"""


def test_kubeflows_client_reads_the_train_job_whole() -> None:
    """Its models drop what they do not know: what they give back must be all that was written."""
    texts = texts_of("trainjob", "trainjob.yaml")
    documents = [yaml.safe_load(text) for text in texts]
    assert json.loads(asked_of_oracles(TRAIN_JOB, documents)) == documents
    for old, new in (
        ("numNodes: 4", "numNodes: four"),
        ("numProcPerNode", "procPerNode"),
        ("runtimePatches", "podTemplateOverrides"),
        ("  volumeMounts:", "  mounts:"),
    ):
        assert old in texts[0]
        damaged = yaml.safe_load(texts[0].replace(old, new))
        assert json.loads(asked_of_oracles(TRAIN_JOB, [damaged])) != [damaged]


RAY_CLUSTER = """
import json, os, runpy, sys
from ray.cluster_utils import Cluster

question = json.load(sys.stdin)
nodes = [{"num_cpus": 2, "num_gpus": gpus} for gpus in question["gpus"]]
cluster = Cluster(initialize_head=True, head_node_args=nodes[0] | {"include_dashboard": False})
for node in nodes[1:]:
    cluster.add_node(**node)
cluster.wait_for_nodes()
os.environ["RAY_ADDRESS"] = cluster.address
sys.argv = [question["script"], "--more", "two words"]
try:
    runpy.run_path(question["script"], run_name="__main__")
finally:
    import ray
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.parametrize("named", [True, False])
def test_ray_starts_every_node_once_with_its_gpus(named: bool, tmp_path: Path) -> None:
    """The program as it is written, on Ray nodes with 8 GPUs each, to the start of torchrun."""
    host = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    plan = make_plan(dp=16)
    if named:
        # Ray's nodes are all this machine, so that only a plan on one node can find it by its name.
        cluster = cluster_from_mapping(
            {"name": "own", "base": "dgx-h100", "nodes": [{"name": host, "leaf": "l0"}]}
        )
        plan = make_plan(dp=8)
        plan = plan.model_copy(
            update={"inputs": plan.inputs.model_copy(update={"cluster": cluster})}
        )
    job = tmp_path / "a job's folder"
    write_files(job, plan_files(plan, "ray"))
    said = tmp_path / "said"
    said.mkdir()
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "torchrun").write_text(
        f'#!/usr/bin/env bash\nprintf "%s\\n" "$CUDA_VISIBLE_DEVICES" "$@" > {said}/$$\n',
        encoding="utf-8",
    )
    (tools / "torchrun").chmod(0o755)
    (tmp_path / "entry.py").touch()
    asked_of_oracles(
        RAY_CLUSTER,
        {"script": str(job / "ray_train.py"), "gpus": [8] * (1 if named else 2)},
        PATH=f"{tools}:{os.environ['PATH']}",
        MEGATRON_ENTRY=str(tmp_path / "entry.py"),
        MOCK_DATA="1",
        SLURM_PROCID="7",
        MASTER_PORT="29777",
        RAY_TRAIN_V2_ENABLED="1",
    )
    starts = [path.read_text("utf-8").splitlines() for path in said.iterdir()]
    assert {start[0] for start in starts} == {"0,1,2,3,4,5,6,7"}
    assert all(start[-2:] == ["--more", "two words"] for start in starts)
    ranks = sorted(word for start in starts for word in start if word.startswith("--node-rank"))
    assert ranks == [f"--node-rank={rank}" for rank in range(1 if named else 2)]
    assert {"--nproc-per-node=8", "--master-port=29777"} <= set(starts[0])
    (master,) = {word for start in starts for word in start if word.startswith("--master-addr")}
    assert master == f"--master-addr={host}" if named else master != "--master-addr="


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

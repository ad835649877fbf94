"""Launch files of the other targets: what they say is what the plan says, and refusals name their rule."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.reader import catalog_names, load_catalog_model
from meshwright.planner.launch.megatron import bridge_overrides
from meshwright.planner.launch.plan_files import TARGETS, plan_files
from meshwright.planner.launch.torchtitan import pipeline_modules
from meshwright.planner.plan.document import Mapping, Plan
from meshwright.planner.plan.texts import plan_text
from tests.places import DATA
from tests.planner.launch.test_launch_megatron import value
from tests.plans import make_plan


def planned(framework: FrameworkName, model: str = "llama-3-8b", **changes: Any) -> Plan:
    plan = make_plan(model, **changes)
    return plan.model_copy(
        update={"inputs": plan.inputs.model_copy(update={"framework": framework})}
    )


def test_torchtitan_flags_and_stages() -> None:
    plan = planned(
        "torchtitan",
        tp=2,
        pp=2,
        vpp=2,
        dp=4,
        num_micro_batches=4,
        micro_batch=2,
        zero_stage=2,
        sequence_parallel=True,
        schedule="interleaved-1f1b",
        stages=[[8, 9], [7, 8]],
    )
    files = plan_files(plan)
    args = json.loads(files["torchtitan_args.json"])
    assert value(args, "--parallelism.tensor-parallel-degree") == "2"
    assert value(args, "--parallelism.data-parallel-shard-degree") == "4"
    assert value(args, "--training.local-batch-size") == "8"
    assert value(args, "--training.global-batch-size") == "32"
    assert value(args, "--parallelism.pipeline-parallel-schedule") == "Interleaved1F1B"
    assert "--training.disable-cuda-graphs" in args
    assert args[-1] == "activation-checkpoint:none"
    assert plan.layout is not None
    parts = pipeline_modules(plan.layout)
    assert parts is not None
    # Chunk v of rank r is the (v pp + r)-th of the model: 8, 7, 9, 8 layers.
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [8, 7, 9, 8]
    assert [name for part in parts for name in part if "." in name] == [
        f"layers.{i}" for i in range(32)
    ]
    assert (parts[0][0], parts[-1][-1]) == ("tok_embeddings", "lm_head")
    compile(files["meshwright_registry.py"], "meshwright_registry.py", "exec")


def test_deepspeed_says_the_batch_and_the_stage() -> None:
    files = plan_files(
        planned("deepspeed", tp=2, dp=4, zero_stage=2, num_micro_batches=3, precision="fp16")
    )
    config = json.loads(files["ds_config.json"])
    assert config["train_batch_size"] == 12
    assert config["gradient_accumulation_steps"] == 3
    assert config["zero_optimization"]["stage"] == 2
    assert config["fp16"]["enabled"] is True
    assert "tensor_parallel" not in config
    assert json.loads(files["ds_config_autotp.json"])["tensor_parallel"] == {"autotp_size": 2}
    assert (
        value(json.loads(files["megatron_deepspeed_args.json"]), "--tensor-model-parallel-size")
        == "2"
    )


def test_accelerate_says_the_mesh_and_torchrun_gets_the_same() -> None:
    files = plan_files(planned("fsdp2", tp=2, cp=2, dp=4, zero_stage=3, num_micro_batches=5))
    config, env = yaml.safe_load(files["accelerate.yaml"]), json.loads(files["env.json"])
    mesh = config["parallelism_config"]
    assert (mesh["parallelism_config_dp_shard_size"], mesh["parallelism_config_cp_size"]) == (4, 2)
    assert (config["num_machines"], config["num_processes"]) == (2, 16)
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert env["PARALLELISM_CONFIG_TP_SIZE"] == "2"
    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "5"


FLAGS = DATA / "megatron_deepspeed_flags.txt"


ATTENDING = [
    name
    for name in catalog_names()
    if (model := load_catalog_model(name)).mamba is None
    and model.indexer is None
    and model.linear_attention is None
    and model.window_heads is None
]
"""Models that Megatron-DeepSpeed is planned with."""


@pytest.mark.parametrize("name", ATTENDING)
def test_megatron_deepspeed_has_every_flag(name: str) -> None:
    known = {
        line.strip() for line in FLAGS.read_text("utf-8").splitlines() if line.startswith("--")
    }
    for changes in ({"recompute": "full", "recompute_layers": 999}, {"precision": "fp16"}):
        plan = planned("deepspeed", name, dp=8, **changes)
        args = json.loads(plan_files(plan)["megatron_deepspeed_args.json"])
        assert {word for word in args if word.startswith("--")} <= known
        assert value(args, "--expert-interval") == (None if plan.inputs.model.moe is None else "1")


def test_deepspeed_deals_the_layers_that_are_left_to_the_first_stages() -> None:
    assert "ds_config.json" in plan_files(planned("deepspeed", pp=3, stages=[[11], [11], [10]]))


def test_bridge_overrides() -> None:
    texts = bridge_overrides(make_plan(pp=3, dp=2, num_micro_batches=3))
    assert "model.pipeline_model_parallel_layout='Et*11|t*11|t*10L'" in texts
    assert "train.global_batch_size=6" in texts
    assert "model.sequence_parallel=false" in texts


def test_bridge_overrides_take_back_what_a_plan_does_without() -> None:
    """Over the recipe of Qwen3-30B-A3B on H100 a plan without recomputation was run with all of it, or, with
    an overlapped all-to-all, not at all.
    """
    plain = bridge_overrides(make_plan("qwen3-30b-a3b", dp=16, ep=8, pp=1))
    names = [text.partition("=")[0] for text in plain]
    assert len(names) == len(set(names))
    assert {
        "model.recompute_granularity=null",
        "model.recompute_method=null",
        "model.recompute_num_layers=null",
        "model.virtual_pipeline_model_parallel_size=null",
        "model.pipeline_model_parallel_layout=null",
        "model.cuda_graph_scope=null",
    } <= set(plain)
    full = bridge_overrides(
        make_plan(pp=2, vpp=2, dp=2, num_micro_batches=4, recompute="full", recompute_layers=10**6)
    )
    assert "model.recompute_granularity=full" in full
    assert "model.virtual_pipeline_model_parallel_size=2" in full
    assert "model.pipeline_model_parallel_layout=null" in full
    assert "model.recompute_granularity=null" not in full


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (planned("torchtitan", "gpt3-175b", zero_stage=3), "torchtitan-architecture"),
        (planned("torchtitan", "deepseek-v3", cp=2, zero_stage=3), "torchtitan-mtp"),
        (
            planned("torchtitan", "mixtral-8x7b", dp=8, ep=8, zero_stage=0),
            "torchtitan-expert-shards",
        ),
        (planned("torchtitan", tp=16, zero_stage=3), "torchtitan-kv-heads"),
        (planned("deepspeed", pp=3, stages=[[10], [11], [11]]), "deepspeed-even-stages"),
        (planned("deepspeed", pp=2, zero_stage=2), "deepspeed-pipeline-zero"),
        (planned("fsdp2", pp=2, zero_stage=3), "fsdp2-degrees"),
    ],
)
def test_what_a_framework_cannot_start_is_refused_by_name(plan: Plan, rule: str) -> None:
    with pytest.raises(InfeasibleError, match=rule):
        plan_files(plan)


def on_unlike_nodes(order: tuple[str, ...], **free_gpus: int) -> Plan:
    """As many ranks as GPUs are free, node by node in an order of hosts."""
    cluster = cluster_from_mapping(
        {
            "name": "partly-free",
            "base": "dgx-h100",
            "levels": [{"name": "leaf", "gpus": 32}, {"name": "core", "gpus": 256}],
            "nodes": [
                {"name": name, "leaf": "l0", "free_gpus": free} for name, free in free_gpus.items()
            ],
        }
    )
    names = list(free_gpus)
    ranks = [(names.index(name), gpu) for name in order for gpu in range(free_gpus[name])]
    mapping = Mapping(order=[], levels=[], matrix={}, ranks=ranks)
    plan = make_plan(dp=len(ranks), mapping=mapping)
    return plan.model_copy(update={"inputs": plan.inputs.model_copy(update={"cluster": cluster})})


def slurm_parts(plan: Plan) -> list[dict[str, str]]:
    """The options of every part of job.sbatch."""
    parts: list[dict[str, str]] = [{}]
    for text in plan_files(plan, "slurm")["job.sbatch"].splitlines():
        if text == "#SBATCH hetjob":
            parts.append({})
        elif text.startswith("#SBATCH --"):
            name, _, given = text.removeprefix("#SBATCH --").partition("=")
            parts[-1][name] = given
    return parts


def test_slurm_asks_nodes_for_the_gpus_that_the_plan_uses_of_them() -> None:
    """Slurm refuses a node list with more GPUs a node than the node has, or has free."""
    (all_seven,) = slurm_parts(on_unlike_nodes(("a0", "a1"), a0=7, a1=7))
    assert (all_seven["gpus-per-node"], all_seven["nodes"]) == ("7", "2")
    assert "exclusive" not in all_seven, "another job has the eighth GPU"
    full, partly = slurm_parts(on_unlike_nodes(("a2", "a0", "a1"), a0=7, a1=8, a2=8))
    assert (full["gpus-per-node"], full["nodes"], full["nodelist"]) == ("8", "2", "a1,a2")
    assert (partly["gpus-per-node"], partly["nodes"], partly["nodelist"]) == ("7", "1", "a0")
    assert "exclusive" in full
    assert "exclusive" not in partly
    (whole,) = slurm_parts(on_unlike_nodes(("a1", "a0"), a0=8, a1=8))
    assert (whole["nodelist"], "exclusive" in whole) == ("a1,a0", True)
    counts = [part["gpus-per-node"] for part in slurm_parts(make_plan(dp=11))]
    assert counts == ["8", "3"], "nodes without names"


def pods_of(plan: Plan) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(replicated job, pod) in the order of the manifest."""
    document = yaml.safe_load(plan_files(plan, "kubernetes")["jobset.yaml"])
    return [
        (job, job["template"]["spec"]["template"]["spec"])
        for job in document["spec"]["replicatedJobs"]
    ]


def test_every_pod_runs_on_its_host_with_its_gpus() -> None:
    pods = pods_of(on_unlike_nodes(("a2", "a0", "a1"), a0=7, a1=8, a2=8))
    hosts = [pod["nodeSelector"]["kubernetes.io/hostname"] for _, pod in pods]
    assert hosts == ["a2", "a0", "a1"], "the order of ranks"
    containers = [pod["containers"][0] for _, pod in pods]
    assert [each["resources"]["limits"]["nvidia.com/gpu"] for each in containers] == [8, 7, 8]
    for rank, each in enumerate(containers):
        assert (
            f"NODE_RANK={rank} MASTER_ADDR=llama-3-8b-node-0-0-0.llama-3-8b " in each["command"][2]
        )
    unnamed = pods_of(make_plan(dp=19))
    assert [job["template"]["spec"]["completions"] for job, _ in unnamed] == [2, 1]
    commands = [pod["containers"][0]["command"][2] for _, pod in unnamed]
    assert "NODE_RANK=$JOB_COMPLETION_INDEX " in commands[0]
    assert "NODE_RANK=2 " in commands[1]


def test_pods_have_shared_memory_and_the_adapters() -> None:
    for plan in (make_plan(dp=16), on_unlike_nodes(("a0", "a1"), a0=7, a1=8)):
        for _, pod in pods_of(plan):
            (container,) = pod["containers"]
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            volumes = {each["name"]: each for each in pod["volumes"]}
            assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
            assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
            assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    text = plan_files(make_plan(dp=16), "kubernetes")["jobset.yaml"]
    assert text.startswith("# Replace what says replace-me")
    assert "# rdma/hca_shared_devices_a is what" in text
    ((_, alone),) = pods_of(make_plan(dp=8))
    assert list(alone["containers"][0]["resources"]["limits"]) == ["nvidia.com/gpu"]
    ((_, amd),) = pods_of(make_plan(cluster="mi300x", dp=8))
    assert list(amd["containers"][0]["resources"]["limits"]) == ["amd.com/gpu"]


NODES_IN_TURN = ("trainjob", "skypilot", "ray")
"""Targets that start the same number of GPUs on every node, in an order of their own."""


def test_a_volcano_job_binds_every_task_to_its_host() -> None:
    job = yaml.safe_load(
        plan_files(on_unlike_nodes(("a2", "a0", "a1"), a0=7, a1=8, a2=8), "volcano")["volcano.yaml"]
    )["spec"]
    assert job["minAvailable"] == 3, "all pods or none"
    assert "networkTopology" not in job
    pods = [task["template"]["spec"] for task in job["tasks"]]
    assert [pod["nodeSelector"]["kubernetes.io/hostname"] for pod in pods] == ["a2", "a0", "a1"]
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods]
    assert [each["nvidia.com/gpu"] for each in limits] == [8, 7, 8]
    for rank, pod in enumerate(pods):
        start = f"NODE_RANK={rank} MASTER_ADDR=llama-3-8b-node-0-0.llama-3-8b exec "
        assert pod["containers"][0]["command"][2].startswith(start)
    chosen = yaml.safe_load(plan_files(make_plan(dp=19), "volcano")["volcano.yaml"])["spec"]
    assert chosen["networkTopology"] == {"mode": "soft"}
    assert [(task["name"], task["replicas"]) for task in chosen["tasks"]] == [
        ("nodes-0", 2),
        ("nodes-2", 1),
    ]
    commands = [task["template"]["spec"]["containers"][0]["command"][2] for task in chosen["tasks"]]
    assert "NODE_RANK=$VC_TASK_INDEX MASTER_ADDR=llama-3-8b-nodes-0-0.llama-3-8b " in commands[0]
    assert "NODE_RANK=2 " in commands[1]


def test_a_train_job_says_nodes_and_gpus_and_that_places_are_lost() -> None:
    text = plan_files(on_unlike_nodes(("a1", "a0"), a0=8, a1=8), "trainjob")["trainjob.yaml"]
    spec = yaml.safe_load(text)["spec"]
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 8)
    assert spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    assert spec["trainer"]["command"][2].startswith(
        "NODE_RANK=$PET_NODE_RANK MASTER_ADDR=$PET_MASTER_ADDR exec bash "
    )
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (wanted,) = affinity["nodeSelectorTerms"][0]["matchExpressions"]
    assert wanted["values"] == ["a0", "a1"], "on the plan's hosts, in an order of its own"
    assert "ranks may run elsewhere than the plan places them" in text
    assert "--target slurm, openmpi, kubernetes or volcano" in text
    alone = plan_files(make_plan(dp=8), "trainjob")["trainjob.yaml"]
    assert "elsewhere" not in alone, "one node has no order"


def test_a_sky_task_asks_for_nodes_with_accelerators_by_skypilots_names() -> None:
    text = plan_files(make_plan(cluster="gb200-nvl72", dp=8), "skypilot")["skypilot.yaml"]
    task = yaml.safe_load(text)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "GB200:4")
    assert task["resources"]["network_tier"] == "best"
    assert "replace-me" not in text
    unknown = plan_files(make_plan(cluster="mi300x", dp=8), "skypilot")["skypilot.yaml"]
    assert "replace-me:8" in unknown
    assert "sky gpus list" in unknown
    assert "network_tier" not in unknown, "one node needs no network"


def test_what_runs_on_a_sky_node_is_its_rank_of_the_first_address(tmp_path: Path) -> None:
    task = yaml.safe_load(plan_files(make_plan(dp=16), "skypilot")["skypilot.yaml"])
    (tmp_path / "launch.sh").write_text('echo "$1 $NODE_RANK $MASTER_ADDR"\n', encoding="utf-8")
    node = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9"}
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=tmp_path,
        env=dict(os.environ) | node,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "node 1 10.0.0.4\n"


def test_ray_starts_a_worker_for_every_node() -> None:
    text = plan_files(make_plan(dp=16), "ray")["ray_train.py"]
    compile(text, "ray_train.py", "exec")
    assert "num_workers=2" in text
    assert '{"CPU": 1, "GPU": 8}' in text
    assert 'kept["NODE_RANK"] = str(get_context().get_world_rank())' in text
    assert "ranks may run elsewhere than the plan places them" in text
    named = plan_files(on_unlike_nodes(("a1", "a0"), a0=8, a1=8), "ray")["ray_train.py"]
    compile(named, "ray_train.py", "exec")
    assert "get_world_rank" not in named, "launch.sh finds each host's own place"
    assert "elsewhere" not in named


@pytest.mark.parametrize("target", NODES_IN_TURN)
def test_nodes_alike_are_asked_of_plans_on_unlike_nodes(target: str) -> None:
    with pytest.raises(InfeasibleError, match="uses 7 GPUs of one node and 8 of another"):
        plan_files(on_unlike_nodes(("a0", "a1"), a0=7, a1=8), target)
    scattered = [(rank % 2, rank // 2) for rank in range(16)]
    mapping = Mapping(order=[], levels=[], matrix={}, ranks=[*scattered[1:], scattered[0]])
    with pytest.raises(InfeasibleError, match="through the nodes in turn"):
        plan_files(make_plan(dp=16, mapping=mapping), target)


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(InputError, match="torchtitan"):
        plan_files(make_plan(), "torchtitn")


@pytest.mark.parametrize("target", TARGETS)
def test_names_reach_no_shell(target: str, tmp_path: Path) -> None:
    name = 'it\'s "x" $(touch owned) `touch owned`\n; touch owned #'
    own: dict[str, FrameworkName] = {
        "torchtitan": "torchtitan",
        "deepspeed": "deepspeed",
        "fsdp2": "fsdp2",
        "llama-factory": "deepspeed",
        "axolotl": "fsdp2",
        "trl": "fsdp2",
        "ms-swift": "fsdp2",
    }
    plan = planned(
        own.get(target, "megatron"),
        dp=8,
        zero_stage=3 if own.get(target) in ("torchtitan", "fsdp2") else 1,
    )
    model = plan.inputs.model.model_copy(update={"name": name})
    changes: dict[str, Any] = {"model": model}
    if target == "trl":
        changes["loss"] = "fused-head"
    plan = plan.model_copy(update={"inputs": plan.inputs.model_copy(update=changes)})
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    folder = tmp_path / "a folder $(touch owned)"
    command = ["launch", str(tmp_path / "plan.yaml"), "--target", target, "-o", str(folder)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    for file in ("jobset", "volcano", "trainjob", "skypilot", "ray_train"):
        for start in folder.glob(f"{file}.*"):
            assert "touch owned" not in start.read_text("utf-8")
    for script in [*folder.glob("*.sh"), *folder.glob("*.sbatch")]:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
        subprocess.run(
            ["bash", str(script)], cwd=tmp_path, check=False, timeout=30, capture_output=True
        )
        assert all("touch owned" not in line for line in code_lines(script))
    assert not list(tmp_path.rglob("owned"))
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 2
    assert "--force" in again.output
    assert CliRunner().invoke(main, [*command, "--force"]).exit_code == 0


def code_lines(script: Path) -> list[str]:
    """Lines of a script without comments."""
    return [
        shlex.join(shlex.split(line, comments=True))
        for line in script.read_text("utf-8").splitlines()
        if "'" not in line and '"' not in line
    ]

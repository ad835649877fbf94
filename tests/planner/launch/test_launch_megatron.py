"""Megatron-LM launch files: what the arguments say is what the plan says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster_specs.schema import NodeSpec
from meshwright.costmodel.workload import Execution
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError
from meshwright.frameworks.megatron import MEGATRON
from meshwright.model_specs.reader import catalog_names, load_catalog_model
from meshwright.planner.launch.megatron import (
    MEGATRON_WRITER,
    megatron_args,
    megatron_shortfalls,
    model_flags,
)
from meshwright.planner.launch.writer import flag_words, legal_launch
from meshwright.planner.plan.document import Mapping, Plan
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.runs.run_terms import layers_of_layout, layout_string
from tests.plans import make_plan

DEGREES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "micro_batch": "--micro-batch-size",
}


def args_of(plan: Plan) -> list[str]:
    return megatron_args(legal_launch(plan, MEGATRON))


def on_nodes(
    plan: Plan, names: Sequence[str], ranks: Sequence[tuple[int, int]] | None = None
) -> Plan:
    """The plan on nodes of these names, its ranks at given places."""
    inputs = plan.inputs
    nodes = tuple(NodeSpec.model_construct(name=name, leaf=None, pod=None) for name in names)
    cluster = inputs.cluster.model_copy(update={"nodes": nodes})
    changes: dict[str, Any] = {"inputs": inputs.model_copy(update={"cluster": cluster})}
    if ranks is not None:
        changes["mapping"] = Mapping(order=["tp"], levels=[], matrix={}, ranks=list(ranks))
    return plan.model_copy(update=changes)


def at(plan: Plan, ranks: list[tuple[int, int]]) -> Plan:
    """The plan with its ranks at given places."""
    mapping = Mapping(order=["tp"], levels=[], matrix={}, ranks=ranks)
    return plan.model_copy(update={"mapping": mapping})


def value(args: list[str], flag: str) -> str | None:
    """The value after a flag; None where the flag is absent."""
    assert args.count(flag) <= 1
    return args[args.index(flag) + 1] if flag in args else None


def expand(layout: str) -> list[str]:
    """Chunks of a layout string, with the repetitions written out."""
    layout = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    return re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), layout).split("|")


@pytest.mark.parametrize("name", catalog_names())
def test_every_catalog_model_says_its_sizes(name: str) -> None:
    model = load_catalog_model(name)
    args = flag_words(model_flags(model, 1024))
    assert value(args, "--num-layers") == str(model.layers)
    assert value(args, "--hidden-size") == str(model.hidden)
    assert value(args, "--vocab-size") == str(model.vocab)
    assert ("--multi-latent-attention" in args) is (model.attention is not None)
    assert ("--untie-embeddings-and-output-weights" in args) is not model.tied_embeddings
    experts = None if model.moe is None else str(model.moe.experts)
    assert value(args, "--num-experts") == experts
    assert all("\n" not in note for note in megatron_shortfalls(model).values())


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(tp=4, pp=2, dp=2, num_micro_batches=8, sequence_parallel=True, micro_batch=2),
        make_plan(tp=2, cp=2, pp=4, vpp=2, num_micro_batches=8, zero_stage=0),
        make_plan("mixtral-8x7b", tp=2, dp=4, ep=4, etp=2, sequence_parallel=True),
        make_plan("deepseek-v3", pp=8, dp=16, ep=16, num_micro_batches=8),
    ],
)
def test_degrees_survive_the_round_trip(plan: Plan) -> None:
    args, layout = args_of(plan), plan.layout
    assert layout is not None
    for axis, flag in DEGREES.items():
        assert value(args, flag) == str(getattr(layout, axis))
    assert value(args, "--global-batch-size") == str(plan.inputs.global_batch)
    assert ("--sequence-parallel" in args) is layout.sequence_parallel
    assert ("--use-distributed-optimizer" in args) is (layout.zero_stage > 0)
    if plan.inputs.model.moe is not None:
        assert value(args, "--expert-model-parallel-size") == str(layout.ep)
        assert value(args, "--expert-tensor-parallel-size") == str(layout.etp)


def test_deepseek_v3_says_what_makes_it_deepseek_v3() -> None:
    args = args_of(make_plan("deepseek-v3", dp=8, ep=8))
    assert value(args, "--moe-layer-freq") == "([0]*3+[1]*58)"
    assert value(args, "--kv-lora-rank") == "512"
    assert value(args, "--qk-head-dim") == "128"
    assert value(args, "--qk-pos-emb-head-dim") == "64"
    assert value(args, "--moe-router-score-function") == "sigmoid"
    assert "--moe-router-enable-expert-bias" in args
    assert value(args, "--moe-router-num-groups") == "8"
    assert value(args, "--moe-router-group-topk") == "4"
    assert value(args, "--moe-shared-expert-intermediate-size") == "2048"
    assert value(args, "--mtp-num-layers") == "1"


def test_gpt_oss_says_window_sinks_and_biases() -> None:
    args = args_of(make_plan("gpt-oss-20b", dp=8, ep=8))
    assert value(args, "--window-size") == "127,0"
    assert value(args, "--window-attn-skip-freq") == "2"
    assert value(args, "--softmax-type") == "learnable"
    assert "--disable-bias-linear" not in args


def test_older_architectures() -> None:
    gpt = args_of(make_plan("gpt3-175b", tp=8, seq_len=2048))
    assert value(gpt, "--position-embedding-type") == "learned_absolute"
    assert value(gpt, "--normalization") == "LayerNorm"
    assert "--group-query-attention" not in gpt
    nemotron = args_of(make_plan("nemotron-4-15b"))
    assert "--squared-relu" in nemotron
    assert "--disable-bias-linear" in nemotron
    assert value(nemotron, "--num-query-groups") == "8"
    assert "ALiBi" in megatron_shortfalls(load_catalog_model("bloom-176b"))["position"]


@pytest.mark.parametrize(
    ("stages", "mtp", "expected"),
    [
        ([[3, 2], [2, 2], [2, 1]], 0, "Et*3|(tt|)*4tL"),
        ([[16], [16], [15], [14]], 1, "Et*16|t*16|t*15|t*14mL"),
        ([[1], [1]], 0, "Et|tL"),
        ([[4], [5], [5], [5], [4]], 2, "Et*4|(t*5|)*3t*4mmL"),
    ],
)
def test_layout_string(stages: list[list[int]], mtp: int, expected: str) -> None:
    text = layout_string(stages, mtp)
    assert text == expected
    chunks = expand(text)
    counts = [rank[chunk] for chunk in range(len(stages[0])) for rank in stages]
    assert [chunk.count("t") for chunk in chunks] == counts
    assert layers_of_layout(text) == tuple(counts)
    assert (chunks[0][0], chunks[-1][-1], chunks[-1].count("m")) == ("E", "L", mtp)


def test_even_splits_need_no_layout_string_and_uneven_ones_do() -> None:
    even = args_of(make_plan(pp=4, vpp=2, num_micro_batches=4))
    assert value(even, "--num-virtual-stages-per-pipeline-rank") == "2"
    assert "--pipeline-model-parallel-layout" not in even
    uneven = args_of(make_plan(pp=3, num_micro_batches=3))
    text = value(uneven, "--pipeline-model-parallel-layout")
    assert text == "Et*11|t*11|t*10L"
    assert "--num-virtual-stages-per-pipeline-rank" not in uneven


def test_recomputation() -> None:
    full = args_of(make_plan(pp=2, recompute="full", recompute_layers=10**6))
    assert value(full, "--recompute-method") == "block"
    assert value(full, "--recompute-num-layers") == "16"
    modules = ("layernorm", "mla_up_proj")
    some = args_of(make_plan("deepseek-v3", recompute="selective", recompute_modules=modules))
    start = some.index("--recompute-modules")
    assert tuple(some[start + 1 : start + 3]) == modules
    assert "--recompute-method" not in some
    assert not any("recompute" in arg for arg in args_of(make_plan()))


@pytest.mark.parametrize(
    ("precision", "cluster", "expected"),
    [
        ("fp16", "dgx-h100", ["--fp16"]),
        ("fp8", "dgx-h100", ["--bf16", "--fp8-format", "--fp8-recipe"]),
        ("mxfp8", "dgx-b200", ["--bf16", "--fp8-format", "--fp8-recipe"]),
        ("nvfp4", "dgx-b200", ["--bf16", "--fp4-format", "--fp4-recipe"]),
    ],
)
def test_precision(precision: str, cluster: str, expected: list[str]) -> None:
    args = args_of(make_plan(cluster=cluster, precision=precision))
    assert [arg for arg in args if re.fullmatch(r"--(fp|bf).*", arg)] == expected


def test_fsdp_and_its_environment() -> None:
    plan = make_plan(tp=2, dp=4, zero_stage=3)
    args = args_of(plan)
    assert value(args, "--data-parallel-sharding-strategy") == "optim_grads_params"
    assert value(args, "--ckpt-format") == "fsdp_dtensor"
    assert json.loads(MEGATRON_WRITER.files(plan)["env.json"]) == {}
    before = json.loads(MEGATRON_WRITER.files(make_plan(tp=2))["env.json"])
    assert before == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert json.loads(MEGATRON_WRITER.files(make_plan(cluster="dgx-b200", tp=2))["env.json"]) == {}


def test_overlap_flags() -> None:
    plan = make_plan(
        "mixtral-8x7b", tp=2, pp=4, vpp=2, dp=4, ep=4, num_micro_batches=4, sequence_parallel=True
    )
    launch = legal_launch(plan, MEGATRON)
    overlaps = Execution(dp_overlap=True, tp_overlap=True, pp_overlap=True, ep_overlap=True)
    all_on = megatron_args(replace(launch, execution=overlaps))
    assert {
        "--tp-comm-overlap",
        "--overlap-grad-reduce",
        "--overlap-moe-expert-parallel-comm",
    } <= set(all_on)
    off = megatron_args(replace(launch, execution=Execution(moe_dispatch="deepep")))
    assert not {arg for arg in off if arg.startswith("--overlap") or arg == "--tp-comm-overlap"}
    assert "--no-overlap-p2p-communication" in off
    assert value(off, "--moe-flex-dispatcher-backend") == "deepep"


def test_illegal_plans_are_refused_by_the_name_of_the_rule() -> None:
    with pytest.raises(InfeasibleError, match="heads-by-tp"):
        args_of(make_plan("gpt2-xl", tp=2, seq_len=1024))
    with pytest.raises(InfeasibleError, match="megatron-zero-needs-pp-1"):
        args_of(make_plan(pp=2, zero_stage=3))
    with pytest.raises(InfeasibleError, match="there is nothing to launch"):
        args_of(make_plan().model_copy(update={"layout": None, "status": "infeasible"}))


def test_hostfile_follows_the_ranks_and_pipeline_may_come_before_data() -> None:
    places = [(node, gpu) for node in (5, 2) for gpu in range(8)]
    mapping = Mapping(order=["tp", "cp", "dp", "pp"], levels=[], matrix={}, ranks=places)
    plan = make_plan(tp=8, dp=2, mapping=mapping)
    files = MEGATRON_WRITER.files(on_nodes(plan, [f"n{i}" for i in range(6)]))
    assert files["hostfile"] == "n5\nn2\n"
    assert "rankfile" not in files
    # Data-parallel neighbours lie a node apart, pipeline neighbours inside a node: Megatron's other order.
    swapped = [(d, p * 4 + t) for p in range(2) for d in range(2) for t in range(4)]
    mapping = Mapping(order=["tp", "cp", "pp", "dp"], levels=[], matrix={}, ranks=swapped)
    plan = make_plan(tp=4, dp=2, pp=2, mapping=mapping)
    files = MEGATRON_WRITER.files(plan)
    assert "--use-tp-pp-dp-mapping" in json.loads(files["megatron_args.json"])
    assert "rankfile" not in files
    moe = make_plan("mixtral-8x7b", tp=4, dp=2, pp=2, ep=2, sequence_parallel=True, mapping=mapping)
    files = MEGATRON_WRITER.files(moe)
    assert "--use-tp-pp-dp-mapping" not in json.loads(files["megatron_args.json"])
    assert files["rankfile"].splitlines()[:6] == [
        "0 0 0",
        "1 0 1",
        "2 0 2",
        "3 0 3",
        "4 1 0",
        "5 1 1",
    ]


def test_mappings_that_do_not_fit_are_refused() -> None:
    plan = make_plan(tp=8)
    with pytest.raises(InfeasibleError, match="places 2 ranks, the layout has 8"):
        MEGATRON_WRITER.files(at(plan, [(0, 0), (0, 1)]))
    with pytest.raises(InfeasibleError, match="two ranks on one GPU"):
        MEGATRON_WRITER.files(at(plan, [(0, 0)] * 8))
    for place in ((-1, 7), (0, 8), (0, -1)):
        with pytest.raises(InfeasibleError, match=rf"GPU {place[1]} of node {place[0]}: .* 8 GPUs"):
            MEGATRON_WRITER.files(at(plan, [*((0, gpu) for gpu in range(7)), place]))
    with pytest.raises(InfeasibleError, match=r"uses node 1 .* only 1 nodes are known"):
        MEGATRON_WRITER.files(on_nodes(plan, ["a"], [(1, gpu) for gpu in range(8)]))
    with pytest.raises(InfeasibleError, match="cannot be a node name"):
        MEGATRON_WRITER.files(on_nodes(plan, ["a\nb"]))
    with pytest.raises(InfeasibleError, match="have the same name"):
        MEGATRON_WRITER.files(on_nodes(make_plan(tp=8, dp=2), ["a", "a"]))


NASTY = "we$(touch pwned)'\"`; n0"


def run_script(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """launch.sh with stand-ins for torchrun and python that print their arguments, one a line."""
    stand_in = folder / "bin" / "torchrun"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(
        '#!/bin/sh\nprintf "%s\\n" "rank=$RANK gpu=$LOCAL_RANK master=$MASTER_ADDR" "$@"\n'
    )
    stand_in.chmod(0o755)
    env = {
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
        "PYTHON": str(stand_in),
        **environment,
    }
    script = str(folder / "launch.sh")
    return subprocess.run(
        ["bash", script, *arguments],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
        check=False,
    )


def test_the_script_passes_every_argument_unharmed(tmp_path: Path) -> None:
    model = load_catalog_model("deepseek-v3").model_copy(
        update={"name": "x\n$(touch pwned) `id` {0}"}
    )
    plan = make_plan(model, pp=2, dp=8, ep=8, num_micro_batches=2, stages=[[31], [30]])
    files = MEGATRON_WRITER.files(on_nodes(plan, [NASTY, "b"]))
    write_files(tmp_path, files)
    assert subprocess.run(["bash", "-n", str(tmp_path / "launch.sh")], check=False).returncode == 0
    done = run_script(
        tmp_path, "node", "--seed", "1 2", NODE_RANK="1", MOCK_DATA="1", MEGATRON_ENTRY="a b.py"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"--master-addr={NASTY}" in lines
    assert {"--nnodes=2", "--nproc-per-node=8", "--node-rank=1"} <= set(lines)
    args = json.loads(files["megatron_args.json"])
    start = lines.index("a b.py") + 1
    assert lines[start : start + len(args)] == args
    assert lines[-2:] == ["--seed", "1 2"]
    assert "Et*31|t*30mL" in lines
    assert not (tmp_path / "pwned").exists()


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    write_files(tmp_path, MEGATRON_WRITER.files(on_nodes(make_plan(tp=8), ["elsewhere"])))
    assert "say 'slurm' or 'node'" in run_script(tmp_path).stderr
    assert "MEGATRON_ENTRY: set it" in run_script(tmp_path, "node").stderr
    assert "DATA_PATH: set it" in run_script(tmp_path, "node", MEGATRON_ENTRY="x").stderr
    lost = run_script(tmp_path, "node", MEGATRON_ENTRY="x", MOCK_DATA="1")
    assert lost.returncode == 2
    assert "is not in hostfile; set NODE_RANK" in lost.stderr
    (tmp_path / "hostfile").write_text("one\ntwo\n")
    assert "the plan needs 1 nodes" in run_script(tmp_path, "node").stderr


def test_ranks_out_of_turn_are_started_one_by_one(tmp_path: Path) -> None:
    places = [(r % 2, r // 2) for r in range(4)]
    write_files(tmp_path, MEGATRON_WRITER.files(at(make_plan(tp=2, dp=2), places)))
    asked = {"MOCK_DATA": "1", "MEGATRON_ENTRY": "x"}
    done = run_script(tmp_path, "node", NODE_RANK="1", MASTER_ADDR="first", **asked)
    assert done.returncode == 0, done.stderr
    started = sorted(
        line.split(" master")[0] for line in done.stdout.splitlines() if line.startswith("rank=")
    )
    assert started == ["rank=1 gpu=0", "rank=3 gpu=1"]


def stand_in(folder: Path, name: str, script: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_under_slurm_the_hostfile_sets_the_order(tmp_path: Path) -> None:
    write_files(tmp_path, MEGATRON_WRITER.files(on_nodes(make_plan(tp=8, dp=2), ["b7", "a2"])))
    stand_in(tmp_path, "srun", 'echo $(cat "$SLURM_HOSTFILE") "$@"')
    words = shlex.split(run_script(tmp_path, "slurm", "--seed", "7").stdout)
    assert words[:2] == ["b7", "a2"]
    assert {"--distribution=arbitrary", "--nodes=2", "--ntasks=2"} <= set(words)
    assert words[-3:] == ["node", "--seed", "7"]


def test_hosts_of_the_job_take_the_planned_order_where_the_cluster_names_none(
    tmp_path: Path,
) -> None:
    """The first ranks run on the third node: the third host of the job leads."""
    places = [(node, gpu) for node in (2, 0, 1) for gpu in range(8)]
    files = MEGATRON_WRITER.files(at(make_plan(tp=8, dp=3, num_micro_batches=8), places))
    assert "hostfile" not in files
    template = files["hostfile.template"].splitlines()
    assert "names no hosts" in template[0]
    assert template[2:] == ["node-00003", "node-00001", "node-00002"]
    write_files(tmp_path, files)
    stand_in(tmp_path, "srun", 'echo $(cat "$SLURM_HOSTFILE") "$@"')
    stand_in(tmp_path, "scontrol", '[ "$*" = "show hostnames h[1-3]" ] && printf "h1\\nh2\\nh3\\n"')
    started = run_script(tmp_path, "slurm", SLURM_JOB_NODELIST="h[1-3]")
    assert shlex.split(started.stdout)[:3] == ["h3", "h1", "h2"]
    ready = {"MEGATRON_ENTRY": "x", "MOCK_DATA": "1"}
    inside = run_script(
        tmp_path, "node", SLURM_JOB_NODELIST="h[1-3]", SLURM_PROCID="1", **ready
    ).stdout.splitlines()
    assert {"--master-addr=h3", "--node-rank=1"} <= set(inside)
    (tmp_path / "pbs").write_text("p1\np1\np2\np3\n")
    by_pbs = run_script(
        tmp_path, "node", PBS_NODEFILE=str(tmp_path / "pbs"), NODE_RANK="2", **ready
    )
    assert "--master-addr=p3" in by_pbs.stdout.splitlines()
    nowhere = run_script(tmp_path, "node", **ready)
    assert nowhere.returncode == 2
    assert "which hosts?" in nowhere.stderr
    stand_in(tmp_path, "scontrol", 'printf "h1\\nh2\\n"')
    small = run_script(tmp_path, "slurm", SLURM_JOB_NODELIST="h[1-2]")
    assert small.returncode == 2
    assert "the job has 2 nodes, the plan needs 3" in small.stderr
    (tmp_path / "hostfile").write_text("x\ny\nz\n")
    own = run_script(tmp_path, "slurm", SLURM_JOB_NODELIST="h[1-2]")
    assert shlex.split(own.stdout)[:3] == ["x", "y", "z"]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("dispatch", ["alltoall", "deepep", "hybridep"])
@pytest.mark.parametrize("switched_on", [True, False])
def test_execution_choices_are_read_back(
    tmp_path: Path, switched_on: bool, dispatch: Any, precision: str
) -> None:
    plan = make_plan(
        "mixtral-8x7b",
        tp=2, pp=4, vpp=2, dp=4, cp=2, ep=4, num_micro_batches=4, sequence_parallel=True,
        precision=precision,
    )  # fmt: skip
    execution = Execution(
        moe_dispatch=dispatch,
        ep_overlap=switched_on,
        tp_overlap=switched_on,
        dp_overlap=switched_on,
        pp_overlap=switched_on,
        cuda_graph="partial" if switched_on else "none",
        cp_comm="a2a" if switched_on else "p2p",
    )
    args = MEGATRON_WRITER.files(plan.model_copy(update={"execution": execution}))
    path = tmp_path / "megatron_args.json"
    path.write_text(args["megatron_args.json"], encoding="utf-8")
    settings = read_launch(path).settings
    assert settings["moe_dispatch"] == dispatch
    assert set(settings["overlap"].values()) == {switched_on}
    assert settings["cuda_graph"] == execution.cuda_graph
    assert settings.get("cp_comm", "p2p") == execution.cp_comm
    captured = "moe_preprocess" in args["megatron_args.json"]
    padded = dispatch == "alltoall" and precision == "fp8"
    assert captured == (switched_on and not padded)

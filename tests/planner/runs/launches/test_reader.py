"""The way back: what a launch file says is the run that it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import catalog_names, load_catalog_model, model_from_mapping
from meshwright.planner.launch.megatron import bridge_overrides, model_flags
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.writer import flag_words
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.command_line import CommandLine
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.megatron import from_megatron, megatron_model
from meshwright.planner.runs.launches.reader import complete, price_launch, read_launch
from meshwright.planner.runs.run_file import read_runs, run_from_mapping
from tests.plans import make_plan

AXES = (
    "tp",
    "cp",
    "pp",
    "dp",
    "ep",
    "etp",
    "vpp",
    "micro_batch",
    "num_micro_batches",
    "zero_stage",
)


def with_framework(framework: str, model: str = "llama-3-8b", **changes: Any) -> Plan:
    plan = make_plan(model, **changes)
    return plan.model_copy(
        update={"inputs": plan.inputs.model_copy(update={"framework": framework})}
    )


@pytest.mark.parametrize(
    ("plan", "name", "given"),
    [
        (
            with_framework(
                "megatron", tp=4, pp=2, dp=2, num_micro_batches=8, sequence_parallel=True
            ),
            "launch.sh",
            "",
        ),
        (
            with_framework("megatron", tp=2, pp=3, dp=2, num_micro_batches=8),
            "megatron_args.json",
            ",gpus=12",
        ),
        (
            with_framework("megatron", "mixtral-8x7b", tp=2, dp=4, ep=4, sequence_parallel=True),
            "launch.sh",
            "",
        ),
        (
            with_framework("torchtitan", tp=2, cp=2, dp=4, zero_stage=3),
            "torchtitan_args.json",
            ",model=llama-3-8b",
        ),
        (
            with_framework("deepspeed", dp=8, zero_stage=2, num_micro_batches=4),
            "ds_config.json",
            ",model=llama-3-8b,seq_len=4096",
        ),
        (
            with_framework("fsdp2", tp=2, dp=4, zero_stage=3, num_micro_batches=2),
            "accelerate.yaml",
            ",model=llama-3-8b,seq_len=4096,global_batch=8",
        ),
    ],
)
def test_what_we_write_is_read_back(plan: Plan, name: str, given: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(plan_files(plan)[name], encoding="utf-8")
    found = read_launch(path)
    run = run_from_mapping(complete(found, [f"cluster=dgx-h100{given}"], str(path)), where=name)
    assert plan.layout is not None
    assert {axis: getattr(run.layout, axis) for axis in AXES} == {
        a: getattr(plan.layout, a) for a in AXES
    }
    assert run.workload.global_batch == plan.inputs.global_batch
    assert found.unread == ()
    if run.stages is not None:
        assert [list(rank) for rank in run.stages] == plan.layout.stages


_UNEVEN = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 "
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers {} "
    "--decoder-last-pipeline-num-layers 6 --num-virtual-stages-per-pipeline-rank {}"
)


@pytest.mark.parametrize(
    ("chunks", "stages"), [(2, [[3, 3], [5, 5], [5, 5], [3, 3]]), (1, [[6], [10], [10], [6]])]
)
def test_virtual_stages_of_uneven_ends_are_alike(chunks: int, stages: list[list[int]]) -> None:
    """They were read as an even split, and nothing was said of the flags."""
    run = from_megatron(CommandLine(_UNEVEN.format(6, chunks).split(), "x"))
    assert run.settings["stages"] == stages
    assert run.settings.get("vpp", 1) == chunks
    with pytest.raises(InputError, match="5 layers, which 2 virtual stages do not divide"):
        from_megatron(CommandLine(_UNEVEN.format(5, 2).split(), "x"))


_PLAIN = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 "
_LAYOUT = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|ttttL "


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (_LAYOUT + "--num-layers-per-virtual-pipeline-stage 4", "--num-layers-per-virtual"),
        (_LAYOUT + "--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages"),
        (_LAYOUT + "--decoder-last-pipeline-num-layers 6", "--decoder-last"),
        (_LAYOUT + "--account-for-loss-in-pipeline-split", "--account-for-loss"),
        ("--decoder-first-pipeline-num-layers 6", "--decoder-first"),
        ("--defer-embedding-wgrad-compute", "--defer-embedding"),
        ("--enable-cuda-graph --cuda-graph-impl local", "--enable-cuda-graph"),
        ("--delay-wgrad-compute", "--delay-wgrad-compute"),
        ("--overlap-param-gather-with-optimizer-step", "--overlap-param-gather-with"),
        ("--distribute-saved-activations", "--distribute-saved"),
        ("--ckpt-format fsdp_dtensor", "--ckpt-format"),
    ],
)
def test_flags_that_megatron_refuses_together(words: str, flag: str) -> None:
    """They were passed over, and left in scripts that were edited for a plan."""
    line = CommandLine([*_PLAIN.split(), *words.split()], "x")
    with pytest.raises(InputError, match=f"{flag}.*Megatron refuses it"):
        from_megatron(line)
    others = ["--tensor-model-parallel-size", "2", "--ckpt-format", "torch_dist"]
    from_megatron(CommandLine([*_PLAIN.split(), *others, "--enable-cuda-graph"], "x"))


def test_fp8_is_priced_by_its_recipe(tmp_path: Path) -> None:
    """Scales of each tensor take one more pass over it than those of the steps before; blocks take none."""
    plan = with_framework("megatron", precision="fp8")
    script = plan_files(plan)["launch.sh"]
    seconds = {}
    for recipe in ("tensorwise", "delayed", "blockwise"):
        path = tmp_path / f"{recipe}.sh"
        path.write_text(script.replace("tensorwise", recipe), encoding="utf-8")
        priced = next(price_launch(path, ["cluster=dgx-h100"]))
        assert priced.run.workload.fp8_recipe == recipe
        seconds[recipe] = priced.predicted.step_time_s
    assert seconds["delayed"] < seconds["blockwise"] < seconds["tensorwise"]


@pytest.mark.parametrize("allow", [(), ("delayed-scaling",)])
def test_a_plan_in_fp8_is_read_back_at_its_own_price(
    tmp_path: Path, allow: tuple[str, ...]
) -> None:
    request = read_request(
        model="gpt2-xl",
        cluster="dgx-h100",
        gpus=8,
        global_batch=32,
        seq_len=1024,
        precision="fp8",
        allow=allow,
        pin={"pp": 1, "cp": 1},
    )
    plan = fastest_plan(request)
    files = plan_files(plan)
    path = tmp_path / "launch.sh"
    path.write_text(files["launch.sh"], encoding="utf-8")
    priced = next(price_launch(path, ["cluster=dgx-h100"]))
    recipe = "delayed" if allow else "tensorwise"
    assert priced.run.workload.fp8_recipe == recipe
    assert plan.execution is not None
    assert plan.execution.fp8_recipe == recipe
    assert priced.predicted.step_time_s == plan.objective.step_time_s
    assert plan.predicted is not None
    assert priced.predicted.memory_gib == plan.predicted.memory_gib
    assert f"mixed_precision.fp8_recipe={recipe}" in bridge_overrides(plan)
    assert list(faults(request, plan)) == []


def hsdp_files(framework: str, groups: int, size: int) -> tuple[str, str]:
    """Name and text of a launch file that shards over `size` ranks in each of `groups`."""
    if framework == "torchtitan":
        return "run.sh", (
            "torchrun --nnodes=8 --nproc-per-node=8 -m torchtitan.train --module llama3 "
            f"--config llama3_8b --parallelism.data-parallel-replicate-degree {groups} "
            f"--parallelism.data-parallel-shard-degree {size} --training.global-batch-size 64 "
            "--training.local-batch-size 1"
        )
    if framework == "fsdp2":
        sizes = {"dp_replicate": groups, "dp_shard": size}
        mesh = {f"parallelism_config_{axis}_size": value for axis, value in sizes.items()}
        document: dict[str, Any] = {
            "num_processes": 64,
            "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
            "parallelism_config": mesh,
        }
        return "accelerate.json", json.dumps(document)
    zero = {"stage": 3, "mics_shard_size": size if groups > 1 else -1}
    return "ds_config.json", json.dumps(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    )


def accelerated(
    tmp_path: Path, sizes: dict[str, int], version: int = 2, gpus: int = 8
) -> LaunchRun:
    document: dict[str, Any] = {
        "distributed_type": "FSDP",
        "num_processes": gpus,
        "fsdp_config": {"fsdp_version": version, "fsdp_reshard_after_forward": True},
    }
    if sizes:
        mesh = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
        document["parallelism_config"] = mesh
    path = tmp_path / "accelerate.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_launch(path)


@pytest.mark.parametrize(
    ("sizes", "read"),
    [
        ({}, {"dp": 8, "tp": 1, "cp": 1}),
        ({"dp_shard": 8}, {"dp": 8, "tp": 1, "cp": 1}),
        ({"dp_replicate": 2, "dp_shard": 4}, {"dp": 8, "shard_groups": 2}),
        ({"dp_shard": 4, "tp": 2}, {"dp": 4, "tp": 2, "cp": 1}),
        ({"dp_shard": 1, "cp": 8}, {"dp": 1, "tp": 1, "cp": 8}),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, {"dp": 4, "cp": 2, "shard_groups": 2}),
    ],
)
def test_the_mesh_of_accelerate(
    sizes: dict[str, int], read: dict[str, int], tmp_path: Path
) -> None:
    settings = accelerated(tmp_path, sizes).settings
    assert {name: settings[name] for name in read} == read


@pytest.mark.parametrize(
    ("sizes", "version", "words"),
    [
        ({"tp": 2}, 2, "leaves FSDP no ranks to shard over"),
        ({"dp_shard": 1}, 2, "leaves FSDP no ranks to shard over"),
        ({"tp": 2, "dp_shard": 2}, 2, "multiplies to 4 ranks, and num_processes is 8"),
        ({"dp_replicate": 4, "cp": 2}, 2, "replicates without shards beside tp or cp"),
        ({"dp_shard": 8}, 1, "is of FSDP2 alone"),
        ({"dp_shard": 0}, 2, "must be at least 1"),
    ],
)
def test_a_mesh_that_accelerate_does_not_start(
    sizes: dict[str, int], version: int, words: str, tmp_path: Path
) -> None:
    """Two tensor ranks without shards on eight were read as four replicas that shard."""
    with pytest.raises(InputError, match=words):
        accelerated(tmp_path, sizes, version)


def test_sections_of_another_distribution_are_idle(tmp_path: Path) -> None:
    """Files of older versions write all of them, most empty: one of DeepSpeed was read as FSDP."""
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\nfsdp_config: {}\n"
        "deepspeed_config: {zero_stage: 2}\n",
        encoding="utf-8",
    )
    script = tmp_path / "run.sh"
    words = "accelerate launch --config_file accelerate.yaml train.py --model_name_or_path Qwen/Qwen3-8B"
    script.write_text(f"{words} --per_device_train_batch_size 1 --bf16\n", encoding="utf-8")
    run = read_launch(script)
    assert (run.settings["framework"], run.settings["zero_stage"]) == ("deepspeed", 2)
    assert run.unread == ()


@pytest.mark.parametrize("framework", ["torchtitan", "fsdp2", "deepspeed"])
def test_sharding_within_groups_is_not_sharding_over_all(framework: str, tmp_path: Path) -> None:
    """8 groups of 8 hold 8 times the states of 64 in one, and gather inside a node."""
    prices = []
    for groups, size in ((8, 8), (1, 64)):
        name, text = hsdp_files(framework, groups, size)
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        given = ["cluster=dgx-h100,model=llama-3-8b,gpus=64,seq_len=4096,global_batch=64"]
        prices.append(next(price_launch(path, given)).predicted)
    grouped, whole = prices
    model = load_catalog_model("llama-3-8b")
    states_gib = 16 * parameter_count(model) / 2**30
    more_gib = max(grouped.memory_gib) - max(whole.memory_gib)
    assert more_gib == pytest.approx(states_gib / 8 - states_gib / 64, rel=0.05)
    assert grouped.step_time_s != whole.step_time_s
    over_network = [price.level_traffic[-1].by_axis["dp"] for price in prices]
    assert over_network[0] < over_network[1]


@pytest.mark.parametrize(
    ("stage", "size", "unread"),
    [(3, 500_000_000, False), (3, 10_000_000, True), (2, 10_000_000, False)],
)
def test_a_bucket_that_has_no_price_is_named(
    stage: int, size: int, unread: bool, tmp_path: Path
) -> None:
    """Under ZeRO 3 the bucket takes memory, which is counted with DeepSpeed's own size."""
    path = tmp_path / "ds_config.json"
    zero = {"stage": stage, "reduce_bucket_size": size}
    document = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    path.write_text(json.dumps(document), encoding="utf-8")
    read = read_launch(path)
    assert ("zero_optimization.reduce_bucket_size" in read.unread) == unread
    assert read.settings.get("bucket_parameters") == (size if stage == 2 else None)


MEGATRONS = [
    name
    for name in catalog_names()
    if not load_catalog_model(name).mamba_beside_attention
    and load_catalog_model(name).window_heads is None
    and name != "ling-3.0-flash"  # Kimi Delta Attention
]
"""Models that Megatron has layers for."""


@pytest.mark.parametrize("name", MEGATRONS)
def test_every_catalog_model_comes_back_from_its_arguments(name: str) -> None:
    model = load_catalog_model(name)
    words = CommandLine(flag_words(model_flags(model, 4096)), "args")
    back = model_from_mapping(megatron_model(words), "model")
    assert (back.layers, back.hidden, back.heads, back.kv_heads) == (
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
    )
    ours, theirs = parameter_count(model), parameter_count(back)
    assert theirs == pytest.approx(ours, rel=0.01)


SCRIPT = """\
#!/bin/bash
# a script as people write it
TP=4
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096   # comment
    --num-attention-heads 32 --swiglu --ffn-hidden-size 14336
    --group-query-attention --num-query-groups 8
)
PARALLEL_ARGS="--tensor-model-parallel-size $TP --pipeline-model-parallel-size=2"
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py ${MODEL_ARGS[@]} $PARALLEL_ARGS \\
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --some-new-flag 3 $(rm -rf /tmp/nothing)
"""


def test_a_script_with_variables(tmp_path: Path) -> None:
    path = tmp_path / "run it.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    found = read_launch(path)
    assert found.settings["tp"] == 4
    assert found.settings["pp"] == 2
    assert found.settings["gpus"] == 16
    assert found.unread == ("--some-new-flag",)
    out = tmp_path / "run.yaml"
    (priced,) = price_launch(path, ["cluster=dgx-h100"], out)
    assert any("--some-new-flag" in remark for remark in priced.run.remarks)
    (again,) = read_runs(out)
    assert again.layout == priced.run.layout


TINY = "x --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
BATCHES = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", "a: &a [1, 1]\nb: &b [*a, *a]\n", "line 2: YAML aliases"),
        ("a.yaml", "cutoff_len: 1\ncutoff_len: 2\n", "'cutoff_len' is given twice"),
        ("a.yaml", f"a: {'[' * 5000}{']' * 5000}", "nested more than"),
        ("a.json", "[" * 100_000, "nested more than"),
        ("a.json", json.dumps({"x": 1}), "neither a DeepSpeed"),
        ("a.json", json.dumps({"model": "gpt2-xl", "run": {"tp": 1}}), "leave --from-launch out"),
        ("a.json", json.dumps({"train_micro_batch_size_per_gpu": "two"}), "whole number"),
        ("a.sh", "pretrain_gpt.py --num-layers 2", "--hidden-size"),
        ("a.sh", "x --num-layers many", "whole number"),
        ("a.sh", "x --num-layers", "needs a value"),
        ("a.sh", f"{TINY} --pipeline-model-parallel-size 0", "must be at least 1"),
        ("a.sh", f"{TINY} --num-distributed-optimizer-instances 0", "must be at least 1"),
        ("a.sh", "x --parallelism.pipeline-parallel-degree 0", "must be at least 1"),
        ("a.json", json.dumps({**BATCHES, "gradient_accumulation_steps": 0}), "must be at least 1"),
    ],
)
def test_bad_launch_files(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_launch(tmp_path / name)


@pytest.mark.parametrize("count", ["²", "9" * 5000])
def test_words_that_only_look_like_numbers_are_none(count: str, tmp_path: Path) -> None:
    """Both are digits to `str.isdigit`, and raised ValueError."""
    script = tmp_path / "a.sh"
    script.write_text(f"torchrun --nnodes {count} --nproc-per-node 8 {TINY}\n", encoding="utf-8")
    assert "gpus" not in read_launch(script).settings
    with pytest.raises(InputError, match="gpus"):
        list(price_launch(script, ["cluster=dgx-h100", "global_batch=8", f"gpus={count}"]))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1}), encoding="utf-8")
    with pytest.raises(InputError, match=r"--with model=... --with cluster=... --with seq_len=..."):
        list(price_launch(path, []))
    with pytest.raises(InputError, match="NAME=VALUE"):
        list(price_launch(path, ["modle=x"]))


def test_a_batch_jobs_nodes_give_the_gpus(tmp_path: Path) -> None:
    """`#SBATCH --nodes=32` was passed over as a comment."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
    for head in ("--nodes=32", "-N 32"):
        script = tmp_path / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH {head}\n#SBATCH --gpus-per-node=h100:8\n"
            f"srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 pretrain_gpt.py {flags}\n",
            encoding="utf-8",
        )
        assert read_launch(script).settings["gpus"] == 256


def test_the_order_of_ranks_is_read(tmp_path: Path) -> None:
    """`--use-tp-pp-dp-mapping` was listed as unread, and priced as if it were not there."""
    flags = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
    flags += " --pipeline-model-parallel-size 8 --global-batch-size 64 --use-distributed-optimizer"
    flags += " --vocab-size 32000"
    steps = []
    for extra in ("", " --use-tp-pp-dp-mapping"):
        script = tmp_path / "run.sh"
        script.write_text(f"torchrun --nnodes 4 --nproc-per-node 8 x.py {flags}{extra}\n", "utf-8")
        (priced,) = price_launch(script, ["cluster=dgx-h100"])
        assert not priced.run.remarks
        steps.append(priced.predicted.breakdown_s["dp_comm"])
    assert steps[1] > steps[0]

"""The edits of a user's own file: applied, they start the plan; and none of them is idle."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.analysis.waterfall import read_baseline, with_baseline
from meshwright.planner.launch.compare import script_diff, with_script_diff
from meshwright.planner.launch.megatron import model_flags
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.writer import flag_words
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import price_launch

MODEL = "llama-2-13b"
MODEL_FLAGS = " ".join(flag_words(model_flags(load_catalog_model(MODEL), 4096)))
SCRIPT = f"""\
#!/bin/bash
#SBATCH --nodes=4
TP=8   # as in the first try
MODEL_ARGS=(
    {MODEL_FLAGS}
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --sequence-parallel
)
# --micro-batch-size 4 ran out of memory
torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py ${{MODEL_ARGS[@]}} ${{PARALLEL_ARGS[@]}} \\
    --bf16 --use-distributed-optimizer --my-own-flag 7 \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\
    --micro-batch-size 1 --global-batch-size=64
"""
ONE_LINE = (
    f'ARGS="{MODEL_FLAGS} --tensor-model-parallel-size=4 --pipeline-model-parallel-size=2"\n'
    "torchrun --nnodes=4 --nproc_per_node=8 pretrain_gpt.py $ARGS --bf16 --global-batch-size 64"
)


def planned(framework: str = "megatron", **options: Any) -> Plan:
    request = read_request(
        model=MODEL,
        cluster="dgx-h100",
        gpus=32,
        global_batch=64,
        seq_len=4096,
        framework=framework,
        **{"without": WITHOUT, **options},
    )
    return fastest_plan(request)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def price(path: Path, *additions: str) -> float:
    (priced,) = price_launch(path, [f"model={MODEL}", "cluster=dgx-h100", *additions])
    return priced.predicted.step_time_s


def written(tmp_path: Path, text: str, name: str = "run.sh") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def apply(patch: str, path: Path) -> None:
    if shutil.which("patch") is None:
        pytest.skip("needs the program patch")
    done = subprocess.run(
        ["patch", str(path)], input=patch, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("text", [SCRIPT, ONE_LINE])
def test_the_patched_script_has_the_plans_price(plan: Plan, text: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    diff = script_diff(path, plan)
    apply(diff.patch, path)
    assert plan.predicted is not None
    assert price(path) == pytest.approx(plan.predicted.step_time_s, rel=1e-3)
    assert diff.step_time_s == pytest.approx(price(path), rel=1e-9)


def test_one_way_of_saying_the_stages_remains(tmp_path: Path) -> None:
    """Megatron refuses a layout beside a height of virtual stages, which was left in the script."""
    split = planned(pin="pp=4,vpp=3")
    assert "--pipeline-model-parallel-layout" in plan_files(split)["megatron_args.json"]
    text = ONE_LINE.replace("--bf16", "--num-layers-per-virtual-pipeline-stage 5 --bf16")
    path = written(tmp_path, text)
    apply(script_diff(path, split).patch, path)
    assert "--pipeline-model-parallel-layout" in path.read_text(encoding="utf-8")
    assert "--num-layers-per-virtual" not in path.read_text(encoding="utf-8")
    assert split.predicted is not None
    assert price(path) == pytest.approx(split.predicted.step_time_s, rel=1e-3)


def test_what_the_user_wrote_besides_stays(plan: Plan, tmp_path: Path) -> None:
    diff = script_diff(written(tmp_path, SCRIPT), plan)
    removed = [
        line for line in diff.patch.splitlines() if line.startswith("-") and line[1:4] != "-- "
    ]
    assert "--my-own-flag 7" in diff.patch
    assert not any("as in the first try" in line and "TP=8" not in line for line in removed)
    assert not any("ran out of memory" in line for line in removed)
    assert all("num-layers 40" not in line for line in removed)


def test_nothing_to_change_in_the_plans_own_script(plan: Plan, tmp_path: Path) -> None:
    path = written(tmp_path, SCRIPT)
    apply(script_diff(path, plan).patch, path)
    again = script_diff(path, plan)
    assert again.edits == []
    assert again.patch == ""


ON_GPUS = "torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py"
"""Ahead of flags, so that a script says how many GPUs it runs on."""
WHOLE_STEP = {"pin": "tp=2,pp=1,cuda_graph=full,recompute=none", "without": ""}
WITHOUT_SEQUENCE = {"pin": "tp=1,zero_stage=0"}


@pytest.mark.parametrize(
    ("options", "today", "after"),
    [
        # Megatron asserts each pair, and none of these flags changes a price alone.
        (
            WHOLE_STEP,
            "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
            {"--cuda-graph-impl": "full_iteration", "--no-check-for-nan-in-loss-and-grad": ""},
        ),
        (
            WHOLE_STEP,
            "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
            "--cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp",
            {"--cuda-graph-impl": "full_iteration", "--cuda-graph-scope": None},
        ),
        (
            WITHOUT_SEQUENCE,
            "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            {
                "--sequence-parallel": None,
                "--tp-comm-overlap": None,
                "--use-distributed-optimizer": None,
                "--overlap-param-gather": None,
            },
        ),
    ],
)
def test_flags_that_need_one_another_change_together(
    options: dict[str, str], today: str, after: dict[str, str | None], tmp_path: Path
) -> None:
    text = f"{ON_GPUS} {MODEL_FLAGS} --bf16 --global-batch-size 64 {today}\n"
    path, target = written(tmp_path, text), planned(**options)
    diff = script_diff(path, target)
    edits = {edit.name: edit.after for edit in diff.edits}
    assert {name: edits.get(name, "not edited") for name in after} == after
    apply(diff.patch, path)
    assert script_diff(path, target).edits == []


def test_a_subcommand_of_torchtitan_stays_behind_all_flags(tmp_path: Path) -> None:
    plan = planned("torchtitan", pin="tp=1,pp=1,cp=1,recompute=full")
    words = ["--module", "llama2", "--config", "13b", "--parallelism.tensor-parallel-degree", "2"]
    words += ["--training.local-batch-size", "1", "--training.global-batch-size", "64"]
    words += ["--training.seq-len", "4096", "activation-checkpoint:none"]
    diff = script_diff(written(tmp_path, json.dumps(words), "args.json"), plan)
    edits = {edit.name: (edit.before, edit.after) for edit in diff.edits}
    assert edits["activation-checkpoint:"] == ("none", "full")
    added = [line[1:].strip(' ",') for line in diff.patch.splitlines() if line.startswith("+")]
    assert added[-2:] == ["activation-checkpoint:full", "]"]


def test_a_list_of_arguments(plan: Plan, tmp_path: Path) -> None:
    words = [*MODEL_FLAGS.split(), "--tensor-model-parallel-size", "8", "--sequence-parallel"]
    words += ["--global-batch-size", "64", "--bf16"]
    path = written(tmp_path, json.dumps(words), "args.json")
    diff = script_diff(path, plan)
    apply(diff.patch, path)
    assert plan.predicted is not None
    assert price(path, "gpus=32") == pytest.approx(plan.predicted.step_time_s, rel=1e-3)


def test_a_deepspeed_configuration(tmp_path: Path) -> None:
    plan = planned("deepspeed", pin="pp=1,tp=1,cp=1")
    text = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    path = written(tmp_path, json.dumps(text, indent=2) + "\n", "ds.json")
    diff = script_diff(path, plan)
    names = {edit.name for edit in diff.edits}
    assert plan.layout is not None
    if plan.layout.zero_stage != 3:
        assert "zero_optimization.stage" in names
    assert names <= {
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "activation_checkpointing.number_checkpoints",
        "tensor_parallel.autotp_size",
    }


@pytest.mark.parametrize("indent", [1, 4, "\t"])
def test_a_configuration_keeps_its_indentation(indent: int | str, tmp_path: Path) -> None:
    """Of the plan's own file nothing changes; of another one the lines that are edited do, and no others."""
    plan = planned("deepspeed", pin="pp=1,tp=1,cp=1,micro_batch=1")
    own = json.loads(plan_files(plan)["ds_config.json"])
    path = written(tmp_path, json.dumps(own, indent=indent) + "\n", "ds.json")
    assert (script_diff(path, plan).edits, script_diff(path, plan).patch) == ([], "")
    own["train_micro_batch_size_per_gpu"] = 2
    written(tmp_path, json.dumps(own, indent=indent) + "\n", "ds.json")
    diff = script_diff(path, plan)
    changed = [
        line
        for line in diff.patch.splitlines()
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert len(changed) == 2 * len(diff.edits) > 0


def test_a_file_of_another_framework(plan: Plan, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"train_micro_batch_size_per_gpu": 2}), "ds.json")
    diff = script_diff(path, plan)
    assert diff.edits == []
    assert "deepspeed's" in diff.note


def test_the_comparison_of_a_script_holds_its_edits(plan: Plan, tmp_path: Path) -> None:
    path = written(tmp_path, SCRIPT)
    both = with_script_diff(with_baseline(plan, read_baseline(path, plan.inputs)))
    assert both.baseline is not None
    assert both.baseline.diff == script_diff(path, plan)
    assert any("run.sh: --my-own-flag is not read" in text for text in both.baseline.remarks)
    assert both.baseline.verdict == "not compared"

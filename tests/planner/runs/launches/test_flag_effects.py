"""Every flag of a framework is read, known to do nothing to the price, or known to change it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright import cli
from meshwright.planner.analysis.waterfall import read_baseline, with_baseline
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.report.prediction_view import headline
from meshwright.planner.runs.launches.command_line import (
    changes_price,
    has_no_effect,
    trains_a_part,
)
from meshwright.planner.runs.launches.reader import read_launch
from tests.places import DATA, ROOT
from tests.priced_plans import priced_plan

LISTS: dict[str, str] = {
    "megatron": "launch_flags/megatron.txt",
    "torchtitan": "launch_flags/torchtitan.txt",
    "deepspeed": "launch_flags/deepspeed.txt",
}
READERS = (
    *(ROOT / "planner" / "runs" / "launches").glob("*.py"),
    *(ROOT / "planner" / "runs").glob("*.py"),
)
SCRIPT = """\
torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --num-attention-heads 32 --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 \\
  --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope \\
  --untie-embeddings-and-output-weights --vocab-size 128256 --bf16 --seq-length 4096 \\
  --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 4 \\
  --sequence-parallel --use-distributed-optimizer
"""


def flags_of(file: str) -> list[str]:
    lines = (DATA / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def words_of_readers() -> set[str]:
    """Every word in the readers' sources, and the frameworks' records that they ask."""
    sources = (*READERS, *(ROOT / "frameworks").glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    return set(re.findall(r"[-\w.]+", text))


@pytest.mark.parametrize("kind", list(LISTS))
def test_every_flag_is_classified(kind: str) -> None:
    read = words_of_readers()
    unknown = []
    for flag in flags_of(LISTS[kind]):
        bare = flag.rpartition(".")[2]
        taken = flag in read or bare in read or trains_a_part(flag)
        if not (taken or has_no_effect(kind, flag, "some") or changes_price(flag)):
            unknown.append(flag)
    assert not unknown


def test_megatron_deepspeeds_flags_are_classified() -> None:
    read = words_of_readers()
    flags = flags_of("megatron_deepspeed_flags.txt")
    assert len(flags) > 300
    known = [f for f in flags if f in read or has_no_effect("megatron", f) or changes_price(f)]
    assert sorted(set(flags) - set(known)) == []


@pytest.mark.parametrize(
    ("kind", "name", "value", "harmless"),
    [
        ("megatron", "--save-interval", "100", True),
        ("megatron", "--moe-expert-capacity-factor", "1.0", False),
        ("megatron", "--a-flag-of-next-year", "true", False),
        ("megatron", "--main-grads-dtype", "fp32", True),
        ("megatron", "--main-grads-dtype", "bf16", False),
        ("megatron", "--skip-train", "true", False),
        ("torchtitan", "--training.dtype", "bfloat16", False),
        ("torchtitan", "--training.dtype", "float32", True),
        ("torchtitan", "--optimizer.lr", "3e-4", True),
        ("torchtitan", "--optimizer.name", "Adam", False),
        ("deepspeed", "zero_optimization.stage3_prefetch_bucket_size", "5e7", True),
        ("deepspeed", "zero_optimization.stage3_prefetch_bucket_size", "auto", True),
        ("deepspeed", "zero_optimization.stage3_prefetch_bucket_size", "1000", False),
        ("deepspeed", "zero_optimization.zero_quantized_weights", "True", False),
        ("accelerate", "dynamo_config", "true", False),
    ],
)
def test_values_that_ask_for_nothing(kind: str, name: str, value: str, harmless: bool) -> None:
    assert has_no_effect(kind, name, value) == harmless


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("--moe-shared-expert-overlap", "changes the price"),
        ("--fp32-residual-connection", "changes the price"),
        ("--a-flag-of-next-year 3", "may change the price"),
    ],
)
def test_a_flag_that_is_not_read_withholds_the_speed_up(
    extra: str, named: str, tmp_path: Path
) -> None:
    """The factor was printed first, and the flag listed further below."""
    script = tmp_path / "today.sh"
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    for words, compared in (
        (f"--log-interval 5 --save x {extra}", False),
        ("--log-interval 5", True),
    ):
        script.write_text(f"{SCRIPT.rstrip()} {words}\n", encoding="utf-8")
        found = with_baseline(plan, read_baseline(script, plan.inputs))
        document = found.baseline
        assert document is not None
        assert (document.speed_up is not None) == compared
        assert (document.verdict != "not compared") == compared
        assert bool(re.search(r"\d x$", headline(found))) == compared
        if not compared:
            flag = extra.partition(" ")[0]
            assert document.unread == [flag]
            assert flag in headline(found)
            assert any(flag in remark and named in remark for remark in document.remarks)


def test_compare_says_what_to_do(tmp_path: Path) -> None:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    script = tmp_path / "today.sh"
    script.write_text(f"{SCRIPT.rstrip()} --enable-cuda-graph\n", encoding="utf-8")
    done = CliRunner().invoke(cli.main, ["compare", str(tmp_path), str(script)])
    assert done.exit_code == 0, done.output
    assert "--enable-cuda-graph is not read" in done.stdout.splitlines()[0]
    assert " x" not in done.stdout.splitlines()[0].replace(" x8", "")
    assert "--from-launch" in done.stdout


def test_keys_at_their_default_are_no_question(tmp_path: Path) -> None:
    """Keys that every example file has were listed as not read."""
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_quantized_gradients": True,
    }
    document = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert read_launch(path).unread == ("zero_optimization.zero_quantized_gradients",)

"""A model that the caller names is taken where a script leaves it to its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.planner.runs.launches.reader import price_launch, read_launch

# As NVIDIA/Megatron-LM's examples start from a converted checkpoint.
SCRIPT = """\
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {model} --load /ckpt/qwen3-30b-a3b --bf16 \\
  --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --moe-grouped-gemm \\
  --seq-length 8192 --micro-batch-size 1 --global-batch-size 16 --use-distributed-optimizer \\
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""
WITH = ["cluster=dgx-h100", "model=qwen3-30b-a3b"]


@pytest.mark.parametrize(
    "model",
    [
        "--use-checkpoint-args",
        "",
        "--num-layers 48 --use-checkpoint-args",
        "--swiglu --qk-layernorm",
    ],
)
def test_a_given_model_is_taken(model: str, tmp_path: Path) -> None:
    """`--num-layers` was asked for although --with model= named it all."""
    script = tmp_path / "ckptargs.sh"
    script.write_text(SCRIPT.format(model=model), encoding="utf-8")
    (priced,) = price_launch(script, WITH)
    assert priced.run.workload.model.name == "qwen3-30b-a3b"
    assert (priced.run.layout.ep, priced.run.layout.tp, priced.run.layout.dp) == (8, 2, 8)
    assert priced.run.remarks == ()


def test_a_given_model_wins_over_flags_and_gives_the_layers(tmp_path: Path) -> None:
    sizes = "--num-layers 24 --hidden-size 2048 --num-attention-heads 32 --vocab-size 151936"
    text = SCRIPT.format(model=sizes)
    script = tmp_path / "sizes.sh"
    pipeline = " --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 6"
    pipeline += " --expert-tensor-parallel-size 1"
    script.write_text(text.rstrip() + pipeline, encoding="utf-8")
    (priced,) = price_launch(script, WITH)
    assert priced.run.workload.model.layers == 48
    assert priced.run.layout.vpp == 4


def test_without_one_the_way_out_is_named(tmp_path: Path) -> None:
    script = tmp_path / "ckptargs.sh"
    script.write_text(SCRIPT.format(model="--use-checkpoint-args"), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"--use-checkpoint-args reads: name the model, --with model="
    ):
        read_launch(script)


def test_loss_and_ends_of_megatron_are_as_the_flags_say(tmp_path: Path) -> None:
    """Each costs time where its flag is not there."""
    loss, ends = "--cross-entropy-loss-fusion", "--overlap-p2p-communication-warmup-flush"
    stages = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4"
    step_s = []
    for flags in ((loss, ends), (ends,), (loss,)):
        script = tmp_path / "run.sh"
        text = SCRIPT.format(model=f"{stages} {' '.join(flags)}").replace("-size 8 ", "-size 4 ")
        script.write_text(text, encoding="utf-8")
        (priced,) = price_launch(script, WITH)
        workload = priced.run.workload
        assert (workload.stepwise_loss, workload.fill_exposed) == (
            loss not in flags,
            ends not in flags,
        )
        assert not priced.run.remarks
        step_s.append(priced.predicted.step_time_s)
    assert min(step_s[1:]) > step_s[0]


def test_more_of_megatrons_flags_are_read(tmp_path: Path) -> None:
    flags = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --cuda-graph-impl local"
    ends = " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    script = tmp_path / "more.sh"
    script.write_text(
        SCRIPT.format(model=f"{flags} --cuda-graph-scope attn{ends}"), encoding="utf-8"
    )
    found = read_launch(script, "qwen3-30b-a3b")
    assert found.settings["fused_loss"] is True
    assert found.settings["cuda_graph"] == "partial"
    assert found.settings["layer_split"].startswith("embedding and LM head")
    assert found.unread == ()


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--no-rope-fusion", "stepwise_rotary"),
        ("--no-bias-swiglu-fusion", "stepwise_activation"),
    ],
)
def test_operators_that_are_not_fused_take_longer(tmp_path: Path, flag: str, setting: str) -> None:
    step_s = []
    for flags in ("--cross-entropy-loss-fusion", f"--cross-entropy-loss-fusion {flag}"):
        script = tmp_path / "run.sh"
        script.write_text(SCRIPT.format(model=flags), encoding="utf-8")
        (priced,) = price_launch(script, WITH)
        assert bool(getattr(priced.run.workload, setting)) == (flag in flags)
        step_s.append(priced.predicted.step_time_s)
    assert step_s[1] > 1.01 * step_s[0]

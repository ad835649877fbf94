"""Recipes of Megatron-Bridge by name: what they set, and that their runs are priced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.planner.runs.launches.megatron import recipe_names, recipe_run
from meshwright.planner.runs.launches.reader import price_launch, read_launch

LLAMA = "llama31_405b_pretrain_1024gpu_h100_bf16_config"
TOO_FEW_GPUS = 9
"""Recipes whose experts do not divide over their own GPUs; they are refused by that reason."""


def test_a_dense_recipe_by_hand() -> None:
    """src/megatron/bridge/perf_recipes/llama/h100/llama31.py of NVIDIA-NeMo/Megatron-Bridge, 067f987.

    The embedding and the loss count as layers: 126 + 2 over 8 x 8 virtual stages is 2 each.
    """
    run = recipe_run(LLAMA)
    settings = run.settings
    assert (run.model, run.cluster, settings["gpus"]) == ("llama-3.1-405b", "dgx-h100", 1024)
    degrees = [settings[name] for name in ("tp", "pp", "cp", "vpp", "micro_batch", "global_batch")]
    assert degrees == [8, 8, 2, 8, 1, 1536]
    assert settings["stages"][0] == [1, *[2] * 7]
    assert settings["stages"][-1] == [*[2] * 7, 1]
    assert settings["sequence_parallel"]
    assert settings["gradient_dtype"] == "bf16"
    assert settings["overlap"]["dp"]
    assert settings["overlap"]["tp"]
    assert not run.unread


def test_an_expert_recipe_by_hand() -> None:
    run = recipe_run("deepseek_v3_pretrain_1024gpu_h100_bf16_config")
    settings = run.settings
    degrees = [settings[name] for name in ("tp", "pp", "vpp", "ep", "etp", "global_batch")]
    assert degrees == [2, 8, 4, 64, 1, 16384]
    assert settings["moe_dispatch"] == "alltoall"
    assert settings["recompute_modules"] == ["mla_up_proj", "mlp"]
    assert not settings["overlap"]["dp"]
    assert sum(map(sum, settings["stages"])) == 61


def test_a_recipe_is_priced_without_further_words(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["estimate", LLAMA, "--from-launch", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["predicted"]["step_time_s"] > 0
    written = tmp_path / "run.yaml"
    asked = ["estimate", LLAMA, "--from-launch", "-o", str(written)]
    assert CliRunner().invoke(main, asked).exit_code == 0
    again = CliRunner().invoke(main, ["estimate", str(written), "--json"])
    first = json.loads(done.stdout)["predicted"]["step_time_s"]
    assert json.loads(again.stdout)["predicted"]["step_time_s"] == pytest.approx(first)


@pytest.mark.slow
def test_a_recipe_is_a_baseline(tmp_path: Path) -> None:
    asked = ["plan", "llama-3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "128"]
    asked += ["--seq-len", "8192", "--pin", "tp=1,pp=1,micro_batch=1,recompute=none", "--json"]
    recipe = "llama3_8b_pretrain_8gpu_h100_bf16_config"
    done = CliRunner().invoke(main, [*asked, "--baseline", recipe])
    assert done.exit_code == 0, done.output
    baseline = json.loads(done.stdout)["baseline"]
    assert baseline["layout"]["cp"] == recipe_run(recipe).settings["cp"]
    assert "launch --target bridge" in baseline["diff"]["note"]


def test_an_unknown_name_has_its_nearest() -> None:
    with pytest.raises(InputError, match=LLAMA):
        read_launch(Path(LLAMA.replace("h100", "h10")))


@pytest.mark.soak
def test_every_recipe_is_priced_or_refused_by_its_reason() -> None:
    refused = []
    for name in recipe_names():
        try:
            (priced,) = price_launch(Path(name), [])
        except InputError as error:
            refused.append(str(error))
        else:
            assert priced.predicted.step_time_s > 0
    assert len(recipe_names()) > 200
    assert len(refused) == TOO_FEW_GPUS
    assert all("does not divide" in words for words in refused)

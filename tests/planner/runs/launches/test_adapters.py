"""Adapters and frozen parts are an error where no reader knows them, by whatever names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from meshwright import cli
from meshwright.errors import InputError
from meshwright.planner.runs.launches.command_line import trains_a_part
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.runs.run_file import run_from_mapping

MEGATRON = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
DEEPSPEED = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
ACCELERATE = {"num_processes": 8, "fsdp_config": {"fsdp_version": 2}}
TOML = '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 1\n'


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--lora-rank 8", "--lora-rank"),
        ("--lora_alpha 16", "--lora_alpha"),
        ("--train-type lora", "--train-type"),
        ("--tuner_type=qlora", "--tuner_type"),
        ("--peft-type dora", "--peft-type"),
        ("--use-dora", "--use-dora"),
        ("--freeze-LM", "--freeze-LM"),
        ("--freeze-all-layers", "--freeze-all-layers"),
        ("--adapter-dim 8", "--adapter-dim"),
    ],
)
def test_flags_are_refused_by_name(flag: str, named: str, tmp_path: Path) -> None:
    """They had a note, and the price of full training."""
    script = tmp_path / "lora.sh"
    script.write_text(f"{MEGATRON} --finetune {flag}\n", encoding="utf-8")
    asked = ["estimate", str(script), "--from-launch", "--with", "cluster=dgx-h100", "--json"]
    done = CliRunner().invoke(cli.main, asked)
    assert done.exit_code == 2
    assert f"{named}: training of adapters" in done.stderr
    assert "take the flag out" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("ds.json", json.dumps(DEEPSPEED | {"peft_config": {"r": 8}}), "peft_config"),
        ("ds.json", json.dumps({"lora": {"enabled": True, "rank": 8}} | DEEPSPEED), "lora"),
        ("a.yaml", yaml.safe_dump(ACCELERATE | {"peft": {"use_lora": True}}), "peft"),
        ("sft.yaml", "stage: sft\nfinetuning_type: lora\n", "finetuning_type"),
        ("axolotl.yaml", "base_model: x\nadapter: qlora\n", "adapter"),
        ("o.json", '["peft.alpha=8", "model.seq_length=64"]', "peft.alpha"),
        ("o.json", '["model.freeze_language_model=true"]', "model.freeze_language_model"),
        ("t.toml", TOML + "[lora]\nrank = 8\n", "lora"),
        ("t.toml", TOML.replace('"8B"', '"8B"\nconverters = ["lora"]'), "model.converters"),
    ],
)
def test_fields_are_refused_by_name(name: str, text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=f"{named}: training of adapters"):
        read_launch(path, "llama-3-8b")


@pytest.mark.parametrize(
    "words",
    [
        "--q-lora-rank 1536 --kv-lora-rank 512",
        "--train-type full",
        "--use-lora false",
        "--finetune",
    ],
)
def test_latent_attention_and_full_training_are_none(words: str, tmp_path: Path) -> None:
    script = tmp_path / "full.sh"
    script.write_text(f"{MEGATRON} {words}\n", encoding="utf-8")
    assert read_launch(script).settings["seq_len"] == 64


def test_off_is_off() -> None:
    assert not trains_a_part("peft", "none")
    assert not trains_a_part("--freeze-lm", "False")
    assert not trains_a_part("model.q_lora_rank", "1536")


@pytest.mark.parametrize("where", ["kind", "recipe", "run"])
def test_published_rows_of_adapters_are_refused(where: str) -> None:
    """Of a row with `measured`, fields that are not known were a remark."""
    row: dict[str, object] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "run": {"gpus": 8, "seq_len": 4096, "global_batch": 8},
        "measured": {"step_time_s": 1.0},
    }
    run_from_mapping(row, where="row")
    extra: dict[str, object] = {"lora_rank": 8}
    settings = row["run"]
    assert isinstance(settings, dict)
    if where == "kind":
        row["kind"] = "lora"
    else:
        row["run"] = settings | ({"recipe": extra} if where == "recipe" else extra)
    with pytest.raises(InputError, match=r"say adapters under run\.adapters"):
        run_from_mapping(row, where="row")

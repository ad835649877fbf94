"""Optimizers that configurations of fine-tuning stacks and of DeepSpeed name, by each program's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import read_launch

FACTORY: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "cutoff_len": 4096,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "bf16": True,
}
AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "sequence_len": 4096,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "bf16": True,
}


def read(document: dict[str, Any], folder: Path) -> LaunchRun:
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return read_launch(path)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adamw_8bit", "adam-8bit"),
        ("adamw_bnb_8bit", "adam-8bit"),
        ("paged_adamw_8bit", "paged-adam-8bit"),
        ("paged_adamw_32bit", "paged-adam"),
        ("adafactor", "adafactor"),
        ("lion_32bit", "lion"),
        ("adamw_torch", "adam"),
    ],
)
def test_names_of_the_trainer(name: str, optimizer: str, tmp_path: Path) -> None:
    for document, key in ((FACTORY, "optim"), (AXOLOTL, "optimizer")):
        run = read(document | {key: name}, tmp_path)
        assert run.settings.get("optimizer", "adam") == optimizer
        assert key not in run.unread


def test_muon_of_llamafactory_is_a_switch(tmp_path: Path) -> None:
    run = read(FACTORY | {"use_muon": True}, tmp_path)
    assert run.settings["optimizer"] == "muon"
    assert "use_muon" not in run.unread


@pytest.mark.parametrize("name", ["galore_adamw", "ademamix", "sgd", "lion_8bit"])
def test_names_without_a_price_withhold_one(name: str, tmp_path: Path) -> None:
    run = read(FACTORY | {"optim": name}, tmp_path)
    assert "optimizer" not in run.settings
    assert "optim" in run.unread


@pytest.mark.parametrize(
    ("name", "optimizer", "understood"),
    [
        ("AdamW", None, True),
        ("Lion", "lion", True),
        ("Muon", "muon", True),
        ("Adafactor", "adafactor", True),
        ("OneBitAdam", None, False),
        ("SGD", None, False),
    ],
)
def test_types_of_deepspeed(
    name: str, optimizer: str | None, understood: bool, tmp_path: Path
) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": name, "params": {"lr": 1e-4}},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    run = read_launch(path)
    assert run.settings.get("optimizer") == optimizer
    assert ("optimizer.type" not in run.unread) is understood


def test_deepspeeds_own_optimizer_goes_before_the_trainers(tmp_path: Path) -> None:
    document = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lion"}}
    (tmp_path / "ds.json").write_text(json.dumps(document), encoding="utf-8")
    run = read(FACTORY | {"deepspeed": "ds.json", "optim": "adafactor"}, tmp_path)
    assert run.settings["optimizer"] == "lion"

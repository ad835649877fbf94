"""What launch files say of images: switches of the encoder, and sizes, which alone say no tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright
from meshwright.errors import InputError
from meshwright.planner.runs.launches.launch_run import ImageFields
from meshwright.planner.runs.launches.reader import TEXT_ALONE, price_launch, read_launch
from meshwright.planner.runs.prediction import PricedRun
from tests.places import DATA

QWEN = DATA / "hf_configs" / "qwen3-vl-8b.json"
FACTORY: dict[str, Any] = {
    "model_name_or_path": str(QWEN),
    "stage": "sft",
    "template": "qwen3_vl",
    "do_train": True,
    "finetuning_type": "full",
    "bf16": True,
    "cutoff_len": 4096,
    "flash_attn": "fa2",
    "per_device_train_batch_size": 1,
}
AXOLOTL: dict[str, Any] = {
    "base_model": str(QWEN),
    "sequence_len": 4096,
    "micro_batch_size": 1,
    "bf16": True,
    "attn_implementation": "flash_attention_2",
}
SWIFT = f"NPROC_PER_NODE=8 swift sft --model {QWEN} --max_length 4096"
BATCH = ["model.seq_length=4096", "train.micro_batch_size=1", "train.global_batch_size=8"]
ADAPTERS = {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "q_proj"}


def written(folder: Path, name: str, launch: dict[str, Any] | str) -> Path:
    path = folder / name
    text = launch if isinstance(launch, str) else yaml.safe_dump(launch)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("launch", "images"),
    [
        (FACTORY, ImageFields(frozen=True)),
        (
            FACTORY | {"image_max_pixels": 262144},
            ImageFields(frozen=True, sizes=("image_max_pixels",)),
        ),
        (
            FACTORY | {"freeze_vision_tower": False, "freeze_multi_modal_projector": False},
            ImageFields(),
        ),
        (
            FACTORY | {"freeze_multi_modal_projector": False},
            ImageFields(parts=("freeze_multi_modal_projector",)),
        ),
        (
            FACTORY | ADAPTERS | {"freeze_vision_tower": False},
            ImageFields(parts=("freeze_vision_tower",)),
        ),
        (FACTORY | ADAPTERS, ImageFields(frozen=True)),
        (AXOLOTL, ImageFields()),
        (AXOLOTL | {"freeze_mm_modules": True}, ImageFields(frozen=True)),
        (AXOLOTL | {"image_size": 512}, ImageFields(sizes=("image_size",))),
        (
            AXOLOTL | {"adapter": "lora", "lora_r": 8, "lora_target_linear": True},
            ImageFields(parts=("lora_target_linear",)),
        ),
        (SWIFT, ImageFields(frozen=True)),
        (f"MAX_PIXELS=1003520 {SWIFT}", ImageFields(frozen=True, sizes=("MAX_PIXELS",))),
        (f"{SWIFT} --max_pixels 1003520", ImageFields(frozen=True, sizes=("max_pixels",))),
        (f"{SWIFT} --freeze_vit false", ImageFields(parts=("freeze_vit",))),
        (
            f"{SWIFT} --tuner_type full --freeze_aligner false",
            ImageFields(parts=("freeze_aligner",)),
        ),
        (
            f"{SWIFT} --tuner_type full --freeze_vit false --freeze_aligner false "
            "--vit_gradient_checkpointing false",
            ImageFields(parts=("vit_gradient_checkpointing",)),
        ),
        (
            f"trl sft --model_name_or_path {QWEN} --use_peft --lora_target_modules all-linear",
            ImageFields(parts=("lora_target_modules",)),
        ),
        (f"trl sft --model_name_or_path {QWEN}", ImageFields()),
    ],
)
def test_what_files_say_of_images(
    launch: dict[str, Any] | str, images: ImageFields, tmp_path: Path
) -> None:
    name = "run.sh" if isinstance(launch, str) else "run.yaml"
    assert read_launch(written(tmp_path, name, launch)).images == images


def priced(path: Path, *additions: str) -> PricedRun:
    (one,) = price_launch(path, ["cluster=dgx-h100", "gpus=8", *additions])
    return one


def test_an_encoder_is_priced_where_images_are_said(tmp_path: Path) -> None:
    """LLaMA-Factory freezes it by itself; without images the price is said to be that of text."""
    path = written(tmp_path, "run.yaml", FACTORY)
    text, seen = priced(path), priced(path, "image_tokens=2048", "images_per_sequence=2")
    assert TEXT_ALONE in text.run.remarks
    assert TEXT_ALONE not in seen.run.remarks
    vision = seen.run.workload.model.encoder
    assert vision is not None
    assert vision.use is not None
    assert (vision.use.tokens, vision.use.images, vision.use.trained) == (2048, 2, False)
    trained = priced(path, "image_tokens=2048", "freeze_encoder=false").run.workload.model.encoder
    assert trained is not None
    assert trained.use is not None
    assert trained.use.trained


def test_sizes_are_named_until_tokens_are_said(tmp_path: Path) -> None:
    path = written(tmp_path, "run.sh", f"MAX_PIXELS=1003520 {SWIFT}")
    assert any("MAX_PIXELS" in remark for remark in priced(path).run.remarks)
    assert not any("MAX_PIXELS" in word for word in priced(path, "image_tokens=1024").run.remarks)


def test_recipes_of_bridge_freeze_the_encoder(tmp_path: Path) -> None:
    """Its switches were refused as training of part of a model."""
    words = ["model.freeze_vision_model=true", "model.freeze_vision_projection=true"]
    path = tmp_path / "overrides.json"
    path.write_text(json.dumps([*words, *BATCH]), encoding="utf-8")
    assert read_launch(path, str(QWEN)).images == ImageFields(frozen=True)
    path.write_text(json.dumps([words[0], *BATCH]), encoding="utf-8")
    assert read_launch(path, str(QWEN)).images.parts == ("model.freeze_vision_projection",)
    path.write_text(json.dumps(["model.freeze_language_model=true", *BATCH]), encoding="utf-8")
    with pytest.raises(InputError, match="freeze_language_model"):
        read_launch(path, str(QWEN))


def planned(today: Path, **options: Any) -> meshwright.Plan:
    return meshwright.plan(
        QWEN,
        cluster="dgx-h100",
        gpus=8,
        global_batch=8,
        seq_len=4096,
        framework="fsdp2",
        robustness=False,
        baseline=today,
        **options,
    )


def test_todays_file_reads_the_images_of_the_plan(tmp_path: Path) -> None:
    path = written(
        tmp_path, "run.yaml", FACTORY | {"deepspeed": "ds.json", "lr_scheduler_type": "cosine"}
    )
    zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(zero), encoding="utf-8")
    images = {"image_tokens": 2048, "images_per_sequence": 2}
    plan = planned(path, freeze_encoder=True, **images)
    assert plan.baseline is not None
    assert plan.baseline.unread == []
    assert plan.baseline.speed_up is not None
    with pytest.raises(
        InputError, match=r"other images than the plan: plan with .*--freeze-encoder"
    ):
        planned(path, **images)


def test_a_part_of_the_encoder_withholds_the_speed_up(tmp_path: Path) -> None:
    path = written(tmp_path, "run.yaml", FACTORY | {"freeze_multi_modal_projector": False})
    plan = planned(path, image_tokens=2048)
    assert plan.baseline is not None
    assert plan.baseline.unread == ["freeze_multi_modal_projector"]
    assert plan.baseline.speed_up is None

"""Plans for models that read images: against brute force, their files, what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.blocks import ImageInput, VisionSpec
from meshwright.planner.audit import audit_document, audit_plan
from meshwright.planner.launch.configurations import axolotl_files, llamafactory_files
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.plan.texts import plan_document, read_plan, workload_of_plan
from meshwright.planner.report.plan_view import first_screen
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from tests.places import DATA
from tests.planner.report.test_views import text
from tests.planner.search.test_planner_optimum import check_against_brute_force, request
from tests.soaked import some

QWEN = DATA / "hf_configs" / "qwen3-vl-8b.json"


def with_images(asked: PlanRequest, seed: int) -> PlanRequest:
    """A small problem whose model has an encoder as long as itself, trained or frozen."""
    draw = random.Random(f"images {seed}")
    vision = VisionSpec(
        kind=draw.choice(("qwen2_5_vl", "qwen3_vl")),
        layers=draw.choice((2, 8, 16)),
        hidden=256,
        ffn_hidden=1024,
        heads=16,
        out_hidden=asked.model.hidden,
        patch_size=14,
        merge=2,
    )
    model = asked.model.model_copy(update={"vision": vision})
    tokens = max(asked.seq_len // draw.choice((1, 2, 4)), 1)
    images = ImageInput(tokens=tokens, frozen=draw.random() < 0.3)
    return replace(asked, model=model, images=images)


@pytest.mark.parametrize("seed", [4004, 4012, pytest.param(4006, marks=pytest.mark.slow)])
def test_the_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(with_images(request(seed), seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([4003, *range(4000, 4003), *range(4005, 4040)]))
def test_the_search_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(with_images(request(seed), seed))


@cache
def planned(framework: FrameworkName, **options: Any) -> Plan:
    """Made once for all that ask; what its choices bring is not asked."""
    settings: dict[str, Any] = {
        "gpus": 16,
        "global_batch": 64,
        "seq_len": 4096,
        "image_tokens": 2048,
        "images_per_sequence": 2,
    }
    asked = read_request(
        model=str(QWEN),
        cluster="dgx-h100",
        framework=framework,
        time_limit_s=60,
        **settings | options,
    )
    return make_plan(asked, robustness=False, choices=False)


def test_a_plan_says_what_images_take_and_reads_back(tmp_path: Path) -> None:
    plan = planned("fsdp2")
    assert plan.predicted is not None
    assert plan.predicted.breakdown_s["image_encoder"] > 0.0
    assert plan.predicted.memory_parts_gib[0]["image_encoder"] > 0.0
    inputs = plan_document(plan)["inputs"]
    assert inputs["images"] == {"tokens": 2048, "per_sequence": 2, "frozen": False}
    shown = text(*first_screen(plan), width=100)
    assert "2,048 tokens of a sequence, of 2 images" in " ".join(shown.split())
    write_files(tmp_path, plan_files(plan), force=True)
    assert audit_document(audit_plan(tmp_path))["passed"]
    again = workload_of_plan(read_plan(tmp_path / "plan.yaml"))
    assert again.model.encoder == workload_of_plan(plan).model.encoder
    assert any("AutoModelForImageTextToText" in body for body in plan_files(plan).values())
    assert "freeze_vision_tower: false" in llamafactory_files(plan)["llama_factory.yaml"]
    with pytest.raises(InfeasibleError, match="Axolotl cannot start this plan: it is not written"):
        axolotl_files(plan)


def test_frozen_encoders_are_said_and_cheaper() -> None:
    trained, frozen = planned("deepspeed"), planned("deepspeed", freeze_encoder=True)
    assert trained.predicted is not None
    assert frozen.predicted is not None
    assert frozen.predicted.step_time_s < trained.predicted.step_time_s
    assert any("requires_grad_(False)" in warning for warning in frozen.warnings)


def test_text_alone_is_the_language_model() -> None:
    plan = planned("fsdp2", image_tokens=0, images_per_sequence=None)
    blind = meshwright.plan(
        "qwen3-8b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=64,
        seq_len=4096,
        framework="fsdp2",
        robustness=False,
    )
    assert plan.predicted == blind.predicted
    assert "vision" not in plan_document(plan)["inputs"]["model"]
    assert "images" not in plan_document(plan)["inputs"]


@pytest.mark.slow
def test_megatron_plans_are_for_recipes_of_bridge() -> None:
    plan = planned("megatron", pin="tp=2,pp=2")
    assert any("Megatron-Bridge" in warning for warning in plan.warnings)
    assert "megatron-bridge" in [need.software for need in plan.installs]
    assert not [name for name in plan_files(plan) if name.endswith(".sh")]
    with pytest.raises(InfeasibleError, match="No launch files for images"):
        plan_files(plan, "megatron")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_tokens": 5000}, "image_tokens: .*4096 tokens of a sequence"),
        ({"image_tokens": 2047}, "image_tokens: .*2 images of 1023 tokens each: 2046"),
        ({"image_tokens": -1}, "images: tokens: must be at least 1"),
        ({"image_tokens": 0}, "images_per_sequence: .*image_tokens alone"),
        ({"framework": "torchtitan"}, r"qwen3_vl\) is not planned with .*--framework"),
    ],
)
def test_images_that_do_not_fit_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        planned(**{"framework": "fsdp2"} | options)


def test_models_without_an_encoder_are_refused() -> None:
    with pytest.raises(InputError, match="qwen3-8b has no image encoder"):
        meshwright.plan(
            "qwen3-8b",
            cluster="dgx-h100",
            gpus=8,
            global_batch=8,
            seq_len=4096,
            image_tokens=64,
        )


def test_images_of_one_size_are_counted_by_their_tokens() -> None:
    gemma = DATA / "hf_configs" / "gemma-3-4b.json"
    plan = meshwright.plan(
        gemma,
        cluster="dgx-h100",
        gpus=8,
        global_batch=16,
        seq_len=2048,
        image_tokens=512,
        framework="fsdp2",
        train="lora",
        robustness=False,
    )
    vision = plan.inputs.model.encoder
    assert vision is not None
    assert vision.use is not None
    assert (vision.use.images, vision.use.trained) == (2, False)
    assert plan.inputs.adapters == AdapterSpec(rank=16).model_copy(
        update={"matrices": plan.inputs.adapters.matrices if plan.inputs.adapters else ()}
    )

"""What an image encoder takes of the first pipeline rank, by hand and by what must hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.estimate import Stages, estimate_layout, stage_memory_parts_gib
from meshwright.costmodel.footprint import peak_memory_gib, stage_memory_gib
from meshwright.costmodel.image_encoder import encoder_of, projections, score_share
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.parameters import encoder_parameters
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.reader import read_request
from tests.places import DATA

GIB = 2.0**30
WHOLE: Stages = ((28,),)
CONFIGS = DATA / "hf_configs"


def workload(name: str = "qwen2.5-vl-7b", framework: str = "megatron", **changes: Any) -> Workload:
    asked: dict[str, Any] = {
        "model": CONFIGS / f"{name}.json",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 32,
        "seq_len": 4096,
        "image_tokens": 1024,
        "images_per_sequence": 4,
        "framework": framework,
    }
    return read_request(**asked | changes).workload()


TEXT: dict[str, Any] = {"image_tokens": 0, "images_per_sequence": None}


def layout(**changes: Any) -> Layout:
    return Layout(**{"dp": 8, "num_micro_batches": 4, "zero_stage": 1} | changes)


def parts_s(work: Workload, one: Layout, stages: Stages = WHOLE) -> dict[str, float]:
    estimate = estimate_layout(work, one, nested_placement(work.cluster, one), stages)
    return {name: float(np.asarray(seconds)) for name, seconds in estimate.breakdown_s.items()}


def held_gib(work: Workload, one: Layout, stages: Stages = WHOLE) -> dict[str, list[float]]:
    parts = stage_memory_parts_gib(work, one, stages)
    return {name: [float(gib) for gib in ranks] for name, ranks in parts.items()}


def test_text_alone_costs_what_the_language_model_does() -> None:
    seeing, blind = read_model(CONFIGS / "qwen2.5-vl-7b.json"), read_model("qwen2.5-7b")
    assert seeing.vision is not None
    assert seeing.encoder is None
    plain = {"cluster": read_cluster("dgx-h100"), "gpus": 8, "global_batch": 32, "seq_len": 4096}
    own, other = (Workload(model=model, **plain) for model in (seeing, blind))  # type: ignore[arg-type]
    one = layout()
    assert parts_s(own, one) == parts_s(other, one)
    assert held_gib(own, one) == held_gib(other, one)
    asked = workload(**TEXT)
    assert asked.model.vision is None
    assert asked.model.source == "config.json, language model alone"


def test_seconds_are_near_those_of_the_products() -> None:
    """32 layers of 19.66 million matrix weights, three products of 2 FLOP a patch, below 989 TFLOP/s."""
    work, one = workload(), layout()
    patches = 4 * 1024 * 4
    weights = 32 * (4 * 1280**2 + 3 * 1280 * 3420)
    around = 1176 * 1280 * 4 + 5120 * 5120 + 5120 * 3584
    least_s = 3 * 2 * (weights * patches + around * patches / 4) / 989e12
    taken_s = parts_s(work, one)["image_encoder"]
    assert 1.5 * least_s < taken_s < 5 * least_s
    twice = parts_s(workload(image_tokens=2048, images_per_sequence=8), one)["image_encoder"]
    assert 1.3 * taken_s < twice < 2 * taken_s


def test_all_else_of_a_step_but_traffic_and_states_is_as_for_text() -> None:
    one = layout()
    text, seeing = parts_s(workload(**TEXT), one), parts_s(workload(), one)
    for name in ("gemm", "attention", "memory_bound", "head", "host"):
        assert seeing[name] == text[name]
    assert seeing["optimizer"] > text["optimizer"]
    assert seeing["dp_comm"] >= text["dp_comm"]


def test_a_frozen_encoder_runs_forward_alone_and_keeps_weights_alone() -> None:
    one = layout()
    trained, frozen = workload(), workload(freeze_encoder=True)
    text = parts_s(workload(**TEXT), one)
    assert parts_s(frozen, one)["image_encoder"] < 0.7 * parts_s(trained, one)["image_encoder"]
    assert parts_s(frozen, one)["optimizer"] == text["optimizer"]
    vision = frozen.model.encoder
    assert vision is not None
    expected = 2 * encoder_parameters(vision) / GIB
    assert held_gib(frozen, one)["image_encoder"] == [pytest.approx(expected)]
    # ZeRO 1 over 8 ranks: 2 bytes of weight, 4 of gradient, 12 / 8 of states, and activations.
    states = (2 + 4 + 12 / 8) * encoder_parameters(vision) / GIB
    assert held_gib(trained, one)["image_encoder"][0] > states


def test_adapters_leave_the_encoder_frozen() -> None:
    vision = workload(train="lora").model.encoder
    assert vision is not None
    assert vision.use is not None
    assert not vision.use.trained


def test_only_the_first_pipeline_rank_holds_it_for_every_micro_batch_in_flight() -> None:
    halves: Stages = ((14,), (14,))
    one = layout(pp=2, dp=4, num_micro_batches=8)
    parts = held_gib(workload(), one, halves)
    text = held_gib(workload(**TEXT), one, halves)
    assert parts["image_encoder"][1] == 0.0
    assert {name: gib for name, gib in parts.items() if name != "image_encoder"} == text
    shorter = held_gib(workload(), layout(pp=2, dp=4, num_micro_batches=1), halves)
    assert parts["image_encoder"][0] > shorter["image_encoder"][0]
    later = parts_s(workload(), one, halves)
    assert later["image_encoder"] > 0.0


def test_tensor_ranks_share_it_only_where_the_framework_cuts_it() -> None:
    two = layout(tp=2, dp=4, sequence_parallel=True)
    for name, share in (("qwen2.5-vl-7b", 1.0), ("qwen3-vl-8b", 0.6)):
        stages = ((28,),) if share == 1.0 else ((36,),)
        frozen = workload(name, freeze_encoder=True)
        whole, cut = (held_gib(frozen, one, stages)["image_encoder"][0] for one in (layout(), two))
        assert (cut == pytest.approx(whole)) == (share == 1.0)
        assert 0.5 * whole < cut <= max(share, 0.5) * whole * (1 + 1e-12)


def test_windows_and_images_bound_what_patches_attend_to() -> None:
    """Of 32 layers 28 see 64 of an image's 1,024 patches: (4 + 28 / 16) / 32 of twice the causal area."""
    found = encoder_of(workload())
    assert found is not None
    assert score_share(*found) == pytest.approx(2 * (4 + 28 / 16) / 32)
    small = encoder_of(workload(image_tokens=64, images_per_sequence=4))
    assert small is not None
    assert score_share(*small) == 2.0
    full = encoder_of(workload("qwen3-vl-8b"))
    assert full is not None
    assert score_share(*full) == 2.0
    one_image, many = (
        parts_s(workload("qwen3-vl-8b", images_per_sequence=n), layout(), ((36,),)) for n in (1, 16)
    )
    assert one_image["image_encoder"] > many["image_encoder"]


def test_products_around_the_layers() -> None:
    """Patches in, then the projector, and three more of Qwen3-VL for layers in between."""
    qwen, gemma = (
        encoder_of(workload("qwen3-vl-8b")),
        encoder_of(workload("gemma-3-4b", images_per_sequence=None)),
    )
    assert qwen is not None
    assert gemma is not None
    assert projections(*qwen)[:3] == [(4096, 1152, 1536), (1024, 4608, 4608), (1024, 4096, 4608)]
    assert len(projections(*qwen)) == 1 + 2 * 4
    assert projections(*gemma) == [(16 * 1024, 1152, 588), (1024, 2560, 1152)]


def test_full_recomputation_takes_the_encoder_along_where_layers_are_checkpointed() -> None:
    again = {"recompute": int(Recompute.FULL), "recompute_layers": 28}
    for framework, taken_along in (("fsdp2", True), ("megatron", False)):
        work = workload(framework=framework)
        kept, dropped = (
            (held_gib(work, one)["image_encoder"][0], parts_s(work, one)["image_encoder"])
            for one in (layout(zero_stage=1), layout(zero_stage=1, **again))
        )
        assert (dropped[0] < kept[0]) == taken_along
        assert (dropped[1] > kept[1]) == taken_along


def test_narrow_precisions_leave_the_encoder_in_16_bits() -> None:
    wide, narrow = (parts_s(workload(precision=name), layout()) for name in ("bf16", "fp8"))
    assert narrow["image_encoder"] == pytest.approx(wide["image_encoder"])
    assert narrow["gemm"] < wide["gemm"]


@settings(max_examples=40, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1]),
    batch=st.sampled_from([1, 2]),
    full=st.booleans(),
    frozen=st.booleans(),
)
def test_bounds_on_memory_hold(
    *, pp: int, tp: int, zero: int, batch: int, full: bool, frozen: bool
) -> None:
    work = workload(freeze_encoder=frozen)
    again = {"recompute": int(Recompute.FULL), "recompute_layers": 28} if full else {}
    one = layout(
        tp=tp,
        pp=pp,
        dp=8 // (tp * pp),
        zero_stage=zero,
        micro_batch=batch,
        num_micro_batches=8,
        **again,
    )
    stages = tuple((28 // pp,) for _ in range(pp))
    assert float(peak_memory_gib(work, one)) <= float(np.max(stage_memory_gib(work, one, stages)))


def test_the_encoder_is_no_part_of_what_a_model_file_says_of_its_layers() -> None:
    model = read_model(CONFIGS / "qwen3-vl-30b-a3b.json")
    again = ModelSpec.model_validate(model.model_dump(mode="json"))
    assert again == model
    assert "vision" not in read_model("qwen3-30b-a3b").model_dump()

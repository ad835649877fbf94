"""Pipelines through unlike parts that train adapters, preferences, packs of samples and images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.mixed import PlacedPart, Segment, mixed_step
from meshwright.documents import write_files
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.planner.audit import audit_plan
from meshwright.planner.launch.plan_files import mixed_files, next_step_on_parts
from meshwright.planner.mixed.document import mixed_document
from meshwright.planner.mixed.service import MixedResult
from meshwright.planner.mixed.verify import mixed_faults
from meshwright.planner.report.mixed_view import mixed_view
from meshwright.planner.report.view import view_text
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.reader import read_request
from tests.places import DATA
from tests.planner.mixed.test_mixed_optimum import check_equal_parts
from tests.planner.mixed.test_mixed_plan import cluster_file, run
from tests.planner.search.test_packed_optimum import packed

PIN = "tp=2,cp=1,micro_batch=1,zero_stage=1,recompute=none"


def planned(folder: Path, model: str = "llama-3-8b", **options: Any) -> MixedResult:
    asked: dict[str, Any] = {"seq_len": 4096, "pin": PIN, "without": WITHOUT, "choices": False}
    asked |= {"cluster": cluster_file(folder), "global_batch": 64} | options
    if "lengths" in options:
        del asked["seq_len"]
    return meshwright.plan_mixed(model, **asked)


def lengths_file(folder: Path) -> Path:
    path = folder / "lengths.csv"
    path.write_text("length,count\n100,60\n900,30\n3500,10\n")
    return path


@pytest.mark.parametrize("what", ["adapters", "dpo", "offloaded", "packs"])
def test_two_equal_parts_cost_what_one_cluster_costs(what: str) -> None:
    """Whatever is trained: nothing but the pipeline tells the parts from the whole."""
    asked = read_request(
        model="llama-3-8b", cluster="dgx-h100", gpus=64, global_batch=64, seq_len=4096
    )
    packs = packed(2, 4096)
    changes: dict[str, dict[str, Any]] = {
        "adapters": {"adapters": AdapterSpec(rank=8)},
        "dpo": {"kind": "dpo"},
        "offloaded": {"kind": "dpo", "reference": "offloaded"},
        "packs": {"lengths": packs.lengths, "seq_len": packs.seq_len},
    }
    workload = replace(asked, **changes[what]).workload()
    layout = Layout(tp=4, pp=4, dp=4, num_micro_batches=16, sequence_parallel=True, zero_stage=1)
    stages = ((8,), (8,), (8,), (8,))
    check_equal_parts(workload, layout, stages)


def test_layers_wait_for_packs_at_the_pace_of_their_own_part() -> None:
    """The more layers the slower part has, the longer."""
    asked = packed(2, 4096)
    first = asked.workload().on(4)
    device = first.cluster.device
    slower = device.model_copy(
        update={"name": "half", "peak_bf16_tflops": 300.0, "peak_fp16_tflops": 300.0}
    )
    other = replace(first, cluster=first.cluster.model_copy(update={"device": slower}))
    layout = Layout(tp=1, pp=2, dp=4, num_micro_batches=8, zero_stage=1)
    segments = [
        Segment(part=PlacedPart(workload=work, layout=layout, ranks=1), first=number)
        for number, work in enumerate((first, other))
    ]
    layers = first.model.layers
    waits_s = [
        float(np.asarray(mixed_step(segments, ((n,), (layers - n,))).parts["length_imbalance"]))
        for n in range(layers - 1, 0, -1)
    ]
    assert waits_s[0] > 0
    assert waits_s == sorted(set(waits_s))


@pytest.mark.slow
def test_adapters_go_through_parts(tmp_path: Path) -> None:
    result = planned(
        tmp_path, "llama-3-70b", train="lora", pin=f"{PIN},pp=2".replace("tp=2", "tp=4")
    )
    document = result.document
    assert len(document.runs_on) == 2
    assert list(mixed_faults(document)) == []
    out = tmp_path / "out"
    write_files(out, mixed_files(result))
    assert {each.name for each in out.iterdir()} == {
        "mixed_plan.yaml",
        "bridge_overrides.json",
        "env.json",
        "hostfile.template",
    }
    assert "peft.dim=16" in (out / "bridge_overrides.json").read_text()
    assert audit_plan(out).passed
    written = (out / "bridge_overrides.json").read_text()
    (out / "bridge_overrides.json").write_text(written.replace("peft.dim=16", "peft.dim=8"))
    assert not audit_plan(out).passed
    assert "Megatron-Bridge recipe" in next_step_on_parts(result, out)
    assert "adapters of rank 16" in view_text(mixed_view(document))


@pytest.mark.slow
def test_preferences_go_through_parts(tmp_path: Path) -> None:
    """Megatron-LM has no script for them: the order of hosts is all that is written."""
    result = planned(tmp_path, kind="dpo")
    document = result.document
    assert document.layout is not None
    assert document.predicted is not None
    assert document.predicted.breakdown_s["scoring"] > 0
    sequences_per_s = document.predicted.tokens_per_s / 4096
    assert sequences_per_s == pytest.approx(2 * 64 / document.predicted.step_time_s)
    assert any("no launch files" in words for words in document.warnings)
    assert set(mixed_files(result)) == {"mixed_plan.yaml", "hostfile.template"}
    assert "NeMo-RL" in next_step_on_parts(result, tmp_path)


@pytest.mark.slow
def test_packs_go_through_parts(tmp_path: Path) -> None:
    result = planned(tmp_path, lengths=lengths_file(tmp_path))
    document = result.document
    assert document.layout is not None
    assert document.lengths is not None
    assert document.predicted is not None
    assert document.lengths.others
    assert list(mixed_faults(document)) == []
    told = document.lengths.model_copy(update={"samples_per_step": 1.0})
    faults = list(mixed_faults(document.model_copy(update={"lengths": told})))
    assert any("samples_per_step" in fault for fault in faults)
    assert "Samples of unlike lengths" in view_text(mixed_view(document))


@pytest.mark.slow
def test_images_go_through_parts(tmp_path: Path) -> None:
    """The encoder stands on the first rank, whichever part runs it."""
    model = str(DATA / "hf_configs" / "qwen3-vl-8b.json")
    document = planned(tmp_path, model, image_tokens=2048).document
    assert document.layout is not None
    assert list(mixed_faults(document)) == []
    assert "image encoder" in " ".join(document.warnings)


def test_plans_that_ask_for_none_of_it_say_nothing_of_it(result: MixedResult) -> None:
    assert {"lengths", "warnings"}.isdisjoint(mixed_document(result.document))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--train", "qlora"), "train: is not planned in a pipeline through unlike parts"),
        (("--train", "lora", "--framework", "torchtitan"), "choose --framework megatron"),
        (("--kind", "orpo", "--framework", "fsdp2"), "plan on one part alone, got 'orpo'"),
        (("--kind", "dpo", "--reference", "precomputed"), "plan on one part alone"),
        (("--loss", "liger"), "plan on one part alone"),
        (("--image-tokens", "9"), "has no image encoder"),
        (("--pack-size", "4096"), "goes with --lengths alone"),
        (("--hybrid-cp",), "plan on one of its parts"),
    ],
)
def test_training_that_no_pipeline_has_is_refused(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    asked = ("--global-batch", 64, "--seq-len", 4096)
    code, said = run("plan", "llama-3-8b", "--cluster", cluster_file(tmp_path), *asked, *options)
    assert code == 2, said
    assert words in " ".join(said.split())

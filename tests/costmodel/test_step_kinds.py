"""What kinds of training steps change of time, memory and traffic, by hand and by what must hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.data_parallel import data_parallel_traffic, passes_of_a_step
from meshwright.costmodel.estimate import Estimate, Stages, estimate_layout, stage_memory_parts_gib
from meshwright.costmodel.execution_names import KIND_NAMES, STEP_KINDS
from meshwright.costmodel.footprint import offloaded_states_gib
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.lengths import PackedLengths
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import rank_parameters, reference_bytes
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.parameters import active_matmul_parameters, flops_per_token
from meshwright.model_specs.reader import load_catalog_model

MODEL = load_catalog_model("llama-3-8b")
GIB = 2.0**30
WHOLE: Stages = ((32,),)
HALVES: Stages = ((16,), (16,))
PIPELINE: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 2, "num_micro_batches": 4, "zero_stage": 1}


def workload(kind: str = "pretrain", framework: str = "deepspeed", **changes: Any) -> Workload:
    settings: dict[str, Any] = {
        "model": MODEL,
        "cluster": read_cluster("dgx-h100"),
        "gpus": 8,
        "global_batch": 32,
        "seq_len": 4096,
        "framework": framework,
        "kind": kind,
    }
    return Workload(**settings | changes)


def layout(**changes: Any) -> Layout:
    return Layout(**{"dp": 8, "num_micro_batches": 4, "zero_stage": 3} | changes)


def priced(work: Workload, one: Layout, stages: Stages = WHOLE) -> Estimate:
    return estimate_layout(work, one, nested_placement(work.cluster, one), stages)


def context(work: Workload, one: Layout) -> Context:
    return make_context(work, one, nested_placement(work.cluster, one))


def weights_gib(work: Workload, one: Layout, stages: Stages = WHOLE) -> np.ndarray[Any, Any]:
    return stage_memory_parts_gib(work, one, stages)["weights"]


def peak_gib(work: Workload, one: Layout) -> float:
    return float(sum(part[0] for part in stage_memory_parts_gib(work, one, WHOLE).values()))


def two_samples(packs: int = 2) -> PackedLengths:
    """A sequence that is two equal samples, each of which attends to itself."""
    return PackedLengths(
        packing="first-fit",
        samples=packs,
        longest=4096,
        samples_a_pack=2.0,
        fill=1.0,
        attended_share=0.5,
        windowed_share=0.5,
    )


def test_every_word_of_a_kind_has_its_passes() -> None:
    assert tuple(STEP_KINDS) == KIND_NAMES


@pytest.mark.parametrize("framework", ["megatron", "fsdp2"])
def test_fine_tuning_is_priced_as_pretraining(framework: str) -> None:
    one = layout() if framework == "fsdp2" else Layout(**PIPELINE)
    stages = WHOLE if framework == "fsdp2" else HALVES
    plain, tuned = (priced(workload(kind, framework), one, stages) for kind in ("pretrain", "sft"))
    assert plain.breakdown_s == tuned.breakdown_s
    parts = [
        stage_memory_parts_gib(workload(kind, framework), one, stages)
        for kind in ("pretrain", "sft")
    ]
    assert all(np.array_equal(parts[0][name], parts[1][name]) for name in parts[0])


@pytest.mark.parametrize("framework", ["megatron", "fsdp2", "deepspeed"])
def test_a_pair_without_a_reference_is_a_pack_of_two_samples(framework: str) -> None:
    one, stages = (layout(), WHOLE) if framework != "megatron" else (Layout(**PIPELINE), HALVES)
    pairs = workload("dpo", framework, reference="precomputed")
    packs = workload("sft", framework, seq_len=8192, lengths=two_samples())
    assert pairs.tokens_per_step == packs.tokens_per_step == 32 * 8192
    of_pairs, of_packs = priced(pairs, one, stages), priced(packs, one, stages)
    assert of_pairs.breakdown_s == pytest.approx(of_packs.breakdown_s, rel=1e-9)
    parts = stage_memory_parts_gib(packs, one, stages)
    for name, gib in stage_memory_parts_gib(pairs, one, stages).items():
        assert gib == pytest.approx(parts[name])


def test_passes_that_score_are_forward_passes() -> None:
    """A pair has one, a sequence of KTO three of as many tokens."""
    pair = priced(workload("dpo"), layout())
    three = priced(workload("kto"), layout(micro_batch=2))
    assert three.breakdown_s["scoring"] == pytest.approx(3.0 * float(pair.breakdown_s["scoring"]))
    # Forward is a third of compute but for memory-bound operators, which it has fewer of.
    trained = sum(float(pair.breakdown_s[name]) for name in ("gemm", "attention", "memory_bound"))
    assert 0.30 < float(pair.breakdown_s["scoring"]) / trained < 0.36


def test_a_reference_of_disabled_adapters_runs_as_the_plain_model() -> None:
    adapters = AdapterSpec(rank=16, targets=("q_proj", "v_proj"))
    full, beside = (priced(workload("dpo", adapters=a), layout()) for a in (None, adapters))
    assert beside.breakdown_s["scoring"] == pytest.approx(full.breakdown_s["scoring"])
    # KTO scores with the adapters once, and without them twice.
    own, base = (priced(workload("kto", adapters=a), layout()) for a in (adapters, None))
    assert float(own.breakdown_s["scoring"]) > float(base.breakdown_s["scoring"])


def test_a_reference_of_deepspeed_is_sharded_by_zero_3_alone() -> None:
    dense, expert = rank_parameters(MODEL, layout(), None)
    assert float(np.asarray(expert)) == 0.0
    parameters = float(np.asarray(dense))
    assert parameters == pytest.approx(8.03e9, rel=1e-3)
    for stage, expected in ((1, 2.0), (2, 2.0), (3, 2.0 / 8)):
        resident, none = (
            weights_gib(workload("dpo", reference=place), layout(zero_stage=stage))[0]
            for place in ("resident", "precomputed")
        )
        assert resident - none == pytest.approx(expected * parameters / GIB)


def test_a_reference_of_megatron_is_whole_on_each_stage() -> None:
    one = Layout(**PIPELINE)
    dense, _ = rank_parameters(MODEL, one, HALVES)
    added = np.subtract(
        *(
            weights_gib(workload("dpo", "megatron", reference=place), one, HALVES)
            for place in ("resident", "offloaded")
        )
    )
    assert added == pytest.approx(2.0 * np.asarray(dense) / GIB)
    # Half of the layers and a table of 128,256 x 4,096, half of each on a tensor rank.
    table = 128256 * 4096
    assert added[0] == pytest.approx(2.0 * ((8.03e9 - 2 * table) / 4 + table / 2) / GIB, rel=2e-3)


def test_frozen_bases_are_the_reference_of_their_adapters() -> None:
    adapters = AdapterSpec(rank=16)
    scored, plain = (workload(kind, adapters=adapters) for kind in ("dpo", "sft"))
    assert not scored.keeps_reference
    assert weights_gib(scored, layout()) == pytest.approx(weights_gib(plain, layout()))


def test_fsdp_gathers_a_whole_reference_while_all_activations_are_saved() -> None:
    """Shards of 4 bytes stay; 4 bytes of every weight are there at once, where logits and a layer's way back
    are not."""
    short = layout(micro_batch=1)
    resident, none = (
        workload("dpo", "fsdp2", reference=place, seq_len=256)
        for place in ("resident", "precomputed")
    )
    parameters = float(np.asarray(rank_parameters(MODEL, short, None)[0]))
    assert (weights_gib(resident, short) - weights_gib(none, short))[0] == pytest.approx(
        4.0 / 8 * parameters / GIB
    )
    parts = stage_memory_parts_gib(resident, short, WHOLE)
    at_once = parts["logits"] + parts["work"] + parts["buffers"]
    logits = 2 * 256 * MODEL.vocab
    assert at_once[0] == pytest.approx((4.0 * parameters + 4.0 * logits) / GIB, rel=1e-6)
    # With long sequences the backward pass of the trained model needs more.
    longer = (workload("dpo", "fsdp2", reference=p, seq_len=32768) for p in ("resident", None))
    assert peak_gib(next(longer), short) > peak_gib(none, short)
    # Weights that are not resharded after the forward pass stay: no backward pass gives them up.
    kept, _ = reference_bytes(resident, layout(zero_stage=2), 8)
    assert float(np.asarray(kept)) == 4.0 / 8 + 2.0


def test_orpo_takes_the_cross_entropy_of_chosen_sequences_besides() -> None:
    pairs = workload("dpo", reference="precomputed")
    odds, plain = (
        stage_memory_parts_gib(work, layout(), WHOLE)["logits"][0]
        for work in (workload("orpo"), pairs)
    )
    assert odds == pytest.approx(1.5 * plain)
    # 30 bytes a logit, of 2 x 4096 tokens in each of 4 micro-batches, half as often again.
    added_s = float(priced(workload("orpo"), layout()).breakdown_s["head"])
    added_s -= float(priced(pairs, layout()).breakdown_s["head"])
    rate = context(pairs, layout()).rates.hbm_bytes_per_s
    assert added_s == pytest.approx(0.5 * 30.0 * 4 * 8192 * MODEL.vocab / rate, rel=1e-6)


def test_pipelines_carry_scored_sequences_forward() -> None:
    one = Layout(**PIPELINE)
    scored, plain = (
        priced(workload("dpo", "megatron", reference=place), one, HALVES)
        for place in ("resident", None)
    )
    none = priced(workload("sft", "megatron", seq_len=8192, lengths=two_samples()), one, HALVES)
    assert scored.breakdown_s == plain.breakdown_s
    transfers = [float(each.breakdown_s["pipeline_p2p"]) for each in (scored, none)]
    assert transfers[0] == pytest.approx(1.5 * transfers[1])
    sent = [
        sum(level.by_axis.get("pp", 0.0) for level in each.level_traffic) for each in (scored, none)
    ]
    assert sent[0] == pytest.approx(1.5 * sent[1])


def test_sharded_references_are_gathered_once_more_a_micro_batch() -> None:
    gathers = {
        place: float(
            np.asarray(passes_of_a_step(context(workload("dpo", reference=place), layout()))[0])
        )
        for place in ("resident", "precomputed")
    }
    assert gathers == {"resident": 3 * 4, "precomputed": 2 * 4}
    # KTO scores with its own model once and with the reference twice.
    own = context(workload("kto"), layout())
    assert float(np.asarray(passes_of_a_step(own)[0])) == (2 + 3) * 4
    # Megatron-SWIFT's reference is whole, so that ZeRO 3 gathers the trained model alone.
    megatron = context(workload("dpo", "megatron"), layout())
    assert float(np.asarray(passes_of_a_step(megatron)[0])) == 2 * 4


def test_nothing_hides_the_gather_of_a_whole_reference() -> None:
    dense, expert = rank_parameters(MODEL, layout(), None)
    whole, none = (
        data_parallel_traffic(
            context(workload("dpo", "fsdp2", reference=place), layout()), dense, expert
        )
        for place in ("resident", "precomputed")
    )
    longer = np.asarray(whole.seconds) - np.asarray(none.seconds)
    assert longer > 0
    assert np.asarray(whole.tail_s) - np.asarray(none.tail_s) == pytest.approx(longer)


def test_a_reference_on_the_host_takes_the_place_of_the_trained_model() -> None:
    """Three copies of a rank's 16-bit weights pass PCIe at 0.4 of 64 GB/s; the host keeps two."""
    one = Layout(**PIPELINE)
    resident, swapped = (
        priced(workload("dpo", "megatron", reference=place), one, HALVES)
        for place in ("resident", "offloaded")
    )
    most = float(np.max(rank_parameters(MODEL, one, HALVES)[0]))
    longer_s = float(swapped.breakdown_s["scoring"]) - float(resident.breakdown_s["scoring"])
    assert longer_s == pytest.approx(3 * 2.0 * most / (0.4 * 64e9))
    work = workload("dpo", "megatron", reference="offloaded")
    assert max(offloaded_states_gib(work, one, HALVES)) == pytest.approx(4.0 * most / GIB)


def test_deepspeed_uploads_the_shards_of_an_offloaded_reference_for_each_pass() -> None:
    resident, host = (
        priced(workload("dpo", reference=place), layout()) for place in ("resident", "offloaded")
    )
    parameters = float(np.asarray(rank_parameters(MODEL, layout(), None)[0]))
    longer_s = float(host.breakdown_s["scoring"]) - float(resident.breakdown_s["scoring"])
    assert longer_s == pytest.approx(4 * 2.0 * parameters / 8 / (0.4 * 64e9))
    kept = offloaded_states_gib(workload("dpo", reference="offloaded"), layout(), WHOLE)
    assert kept[0] == pytest.approx(2.0 * parameters / 8 / GIB)


def test_flops_of_scored_tokens() -> None:
    plain, scored = (flops_per_token(MODEL, 4096, forward_passes=n) for n in (0, 1))
    assert scored == pytest.approx(plain * 4 / 3)
    assert plain == flops_per_token(MODEL, 4096)
    assert plain > 6 * active_matmul_parameters(MODEL)


def test_a_reward_model_has_no_head_over_the_vocabulary() -> None:
    """Tables of 128,256 x 4,096 are once there, and no logits."""
    scored = workload("reward", "fsdp2")
    pairs = workload("dpo", "fsdp2", reference="precomputed")
    parts, of_pairs = (stage_memory_parts_gib(w, layout(), WHOLE) for w in (scored, pairs))
    table = 128256 * 4096
    assert parts["logits"][0] == parts["fragmentation"][0] == 0.0
    assert of_pairs["weights"][0] - parts["weights"][0] == pytest.approx(4.0 * table / 8 / GIB)
    breakdown = priced(scored, layout()).breakdown_s
    assert float(breakdown["head"]) < 0.02 * float(priced(pairs, layout()).breakdown_s["head"])
    flops = [flops_per_token(m, 4096, has_head=m is MODEL) for m in (MODEL, scored.model)]
    assert flops[0] - flops[1] == 6.0 * table
    assert pairs.model is MODEL

"""Activations in the host's memory: bytes that leave and come back, copies that compute hides or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import offloaded_per_layer, saved_activations
from meshwright.costmodel.buffers import transients
from meshwright.costmodel.estimate import estimate_layout, stage_memory_parts_gib
from meshwright.costmodel.execution_names import OFFLOADED_INPUTS, OFFLOADED_MODULES
from meshwright.costmodel.footprint import GIB, offloaded_gib
from meshwright.costmodel.layer_context import LayerTime
from meshwright.costmodel.layer_kinds import with_copies
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model

MODEL = load_catalog_model("mixtral-8x7b")
"""4,096 wide, 32 heads and 8 key-value heads of 128; two experts a token, gated, 14,336 wide."""
TOKENS = 4096
QUERIES_KEYS_VALUES = 2 * (4096 + 1024 + 1024)
OUTPUT = 2 * 4096
EXPERT_INPUT = 2 * 2 * 4096
ACTIVATION_INPUT = 2 * 2 * 2 * 14_336
EVERYTHING = OFFLOADED_MODULES[-1]
MODULES = tuple(name for name in OFFLOADED_MODULES if name not in OFFLOADED_INPUTS)
SPREAD = Layout(dp=8, ep=8, num_micro_batches=2)


def workload(modules: Any = "none", **changes: Any) -> Workload:
    base = Workload(
        model=MODEL,
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=16,
        seq_len=TOKENS,
        moe_dispatch="alltoall",
        offload_modules=modules,
    )
    return replace(base, **changes)


def per_token(work: Workload, layout: Layout) -> tuple[float, float]:
    found = offloaded_per_layer(work, layout, work.model.blocks)
    tokens = work.seq_len / int(layout.cp)
    return float(np.asarray(found.freed)) / tokens, float(np.asarray(found.copied)) / tokens


@pytest.mark.parametrize(
    ("modules", "freed", "copied"),
    [
        ("core_attn", QUERIES_KEYS_VALUES, QUERIES_KEYS_VALUES + OUTPUT),
        ("core_attn+attn_proj", QUERIES_KEYS_VALUES + OUTPUT, QUERIES_KEYS_VALUES + 2 * OUTPUT),
        ("expert_fc1", EXPERT_INPUT, EXPERT_INPUT),
        ("moe_act", ACTIVATION_INPUT, ACTIVATION_INPUT),
        (EVERYTHING, 151_552, 159_744),
        ("none", 0, 0),
    ],
)
def test_bytes_by_hand(modules: str, freed: int, copied: int) -> None:
    """The output is copied by attention, and once more as the projection's input."""
    assert per_token(workload(modules), SPREAD) == (freed, copied)


def test_tensors_of_less_than_a_million_elements_stay() -> None:
    """At tp 8 a rank has 512 of a token's 4,096 queries, but 128 keys: 4,096 tokens of them are 2^19."""
    layout = Layout(tp=8, ep=8, sequence_parallel=True)
    assert per_token(workload("core_attn"), layout) == (2 * 512, 2 * 2 * 512)
    longer = workload("core_attn", seq_len=2 * TOKENS)
    assert per_token(longer, layout) == (2 * (512 + 2 * 128), 2 * (2 * 512 + 2 * 128))
    halved = replace(layout, cp=2)
    assert per_token(longer, halved) == (2 * 512, 2 * 2 * 512)


def test_quantised_inputs_of_experts_are_half_as_large() -> None:
    """Attention and the projection behind it keep 16 bits."""
    freed, copied = per_token(workload(EVERYTHING, precision="fp8"), SPREAD)
    assert freed == QUERIES_KEYS_VALUES + OUTPUT + EXPERT_INPUT / 2 + ACTIVATION_INPUT
    assert copied == freed + OUTPUT


def test_queries_that_are_recomputed_are_not_offloaded() -> None:
    work = workload("core_attn", model=load_catalog_model("deepseek-v3"))
    kept, _ = per_token(work, SPREAD)
    assert kept == 2 * 128 * (192 + 192 + 128)
    again = replace(SPREAD, recompute=int(Recompute.MLA_UP_PROJECTION))
    assert per_token(work, again)[0] == 0


@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
def test_what_leaves_was_saved(modules: str, precision: str) -> None:
    """Two layers of it are at hand all the same: one at work, one on its way."""
    layouts = [
        SPREAD,
        Layout(tp=2, ep=4, etp=2, dp=4, sequence_parallel=True),
        Layout(cp=2, dp=4, recompute=int(Recompute.MOE_ACTIVATION | Recompute.LAYERNORM)),
    ]
    for layout in layouts:
        plain, work = (workload(m, precision=precision) for m in ("none", modules))
        freed = offloaded_per_layer(work, layout, MODEL.blocks).freed
        whole, rest = (saved_activations(w, layout).main[0] for w in (plain, work))
        assert whole - rest == pytest.approx(freed)
        assert rest > 0
        at_hand = (transients(w, layout, saved_activations(w, layout)).layer for w in (work, plain))
        assert next(at_hand) - next(at_hand) == pytest.approx(2 * freed)


def test_copies_run_beside_their_layer() -> None:
    """159,744 bytes of each of 4,096 tokens at 51.2 GB/s are 12.78 ms, forward and backward."""
    work = workload(EVERYTHING)
    context = make_context(work, SPREAD, nested_placement(work.cluster, SPREAD))
    layer = LayerTime(
        {"gemm": 0.004, "ep_comm": 0.001},
        {"gemm": 0.008, "ep_comm": 0.002},
        {"memory_bound": 0.002},
    )
    copied = with_copies(context, layer, layer, MODEL.blocks)
    copy_s = 159_744 * 4096 / 51.2e9
    assert copy_s == pytest.approx(0.01278, rel=1e-3)
    assert float(copied.forward["offload"]) == pytest.approx(copy_s - 0.005)
    assert float(copied.backward["offload"]) == pytest.approx(copy_s - 0.012)
    long = replace(layer, backward={"gemm": 0.020})
    assert float(with_copies(context, long, long, MODEL.blocks).backward["offload"]) == 0
    plain = make_context(workload(), SPREAD, nested_placement(work.cluster, SPREAD))
    assert with_copies(plain, layer, layer, MODEL.blocks) is layer


def test_what_goes_over_the_network_takes_the_same_link() -> None:
    """16 experts' ranks on two nodes: their whole exchange, of which 1 ms is exposed, comes on top."""
    work = workload(EVERYTHING, gpus=16)
    sent = LayerTime({"gemm": 0.010, "ep_comm": 0.008}, {"gemm": 0.030, "ep_comm": 0.008}, {})
    layer = LayerTime({"gemm": 0.010, "ep_comm": 0.001}, {"gemm": 0.030, "ep_comm": 0.001}, {})
    copy_s = 159_744 * 4096 / 51.2e9
    for ep, exchange_s in ((16, 0.008), (8, 0.0)):
        layout = Layout(dp=16, ep=ep, num_micro_batches=2)
        context = make_context(work, layout, nested_placement(work.cluster, layout))
        copied = with_copies(context, sent, layer, MODEL.blocks)
        assert float(copied.forward["offload"]) == pytest.approx(copy_s + exchange_s - 0.011)
        assert float(copied.backward["offload"]) == 0


def test_a_step_is_never_shorter_and_its_parts_add_up() -> None:
    stages = ((32,),)
    steps = {}
    for modules in MODULES:
        work = workload(modules)
        found = estimate_layout(work, SPREAD, nested_placement(work.cluster, SPREAD), stages)
        steps[modules] = float(np.asarray(found.step_time_s))
        parts = [float(np.asarray(part)) for part in found.breakdown_s.values()]
        assert sum(parts) == pytest.approx(steps[modules])
        assert ("offload" in found.breakdown_s) == (modules != "none")
    assert steps["none"] == min(steps.values())
    assert steps[EVERYTHING] == max(steps.values())


def test_memory_moves_to_the_host() -> None:
    """Of two stages the first has two micro-batches in flight through its 16 layers."""
    layout = Layout(pp=2, dp=4, ep=4, zero_stage=1, num_micro_batches=4)
    stages = ((16,), (16,))
    plain, work = workload(), workload(EVERYTHING)
    before, after = (stage_memory_parts_gib(w, layout, stages) for w in (plain, work))
    host_gib = offloaded_gib(work, layout, stages)
    for rank, micro_batches in enumerate((2, 1)):
        layers = 16 * micro_batches
        left_gib = before["activations"][rank] - after["activations"][rank]
        assert left_gib == pytest.approx(layers * 151_552 * 4096 / GIB)
        assert host_gib[rank] == pytest.approx(layers * 159_744 * 4096 / GIB)
    assert list(offloaded_gib(plain, layout, stages)) == [0, 0]


# Inputs of layers that are recomputed in full.


DENSE = load_catalog_model("llama-3-8b")
"""32 layers, 4,096 wide."""
RECOMPUTED = Layout(
    dp=8, num_micro_batches=1, zero_stage=3, recompute=Recompute.FULL, recompute_layers=32
)
INPUT = 4096 * 2 * 4096


def inputs_of(modules: Any, framework: str = "fsdp2") -> Workload:
    return Workload(
        model=DENSE,
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=8,
        seq_len=4096,
        framework=framework,
        offload_modules=modules,
    )


@pytest.mark.parametrize(
    ("framework", "modules", "at_hand"),
    [
        ("fsdp2", "layer_inputs", 1),
        ("fsdp2", "saved_tensors", 5),
        ("deepspeed", "layer_inputs", 3),
        ("pytorch", "saved_tensors", 5),
    ],
)
def test_inputs_leave_but_for_those_at_hand(framework: str, modules: str, at_hand: int) -> None:
    """An input is 2 bytes an element; of each micro-batch in flight the host has 32."""
    stages = ((32,),)
    plain, work = (inputs_of(each, framework) for each in ("none", modules))
    before, after = (stage_memory_parts_gib(w, RECOMPUTED, stages) for w in (plain, work))
    assert before["activations"][0] - after["activations"][0] == pytest.approx(32 * INPUT / GIB)
    layers = [
        transients(w, RECOMPUTED, saved_activations(w, RECOMPUTED)).layer for w in (plain, work)
    ]
    assert layers[1] - layers[0] == pytest.approx(at_hand * INPUT)
    assert list(offloaded_gib(work, RECOMPUTED, stages)) == [pytest.approx(32 * INPUT / GIB)]


def test_copies_of_inputs_hide_on_a_stream_of_their_own_alone() -> None:
    """51.2 GB/s of PCIe 5.0: 0.66 ms each way for a layer, once, however often it runs forward."""
    copy_s, layer = INPUT / 51.2e9, LayerTime({"gemm": 0.004}, {"gemm": 0.0005}, {})
    found = {}
    for modules in ("layer_inputs", "saved_tensors"):
        work = inputs_of(modules)
        context = make_context(work, RECOMPUTED, nested_placement(work.cluster, RECOMPUTED))
        copied = with_copies(context, layer, layer, DENSE.blocks)
        found[modules] = [float(copied.forward["offload"]), float(copied.backward["offload"])]
    assert found["layer_inputs"] == pytest.approx([copy_s, copy_s])
    assert found["saved_tensors"] == pytest.approx([0.0, copy_s - 0.0005])


def test_recomputation_copies_nothing() -> None:
    stages, steps = ((32,),), {}
    for modules in ("none", "layer_inputs"):
        work = inputs_of(modules)
        placed = nested_placement(work.cluster, RECOMPUTED)
        steps[modules] = estimate_layout(work, RECOMPUTED, placed, stages).breakdown_s
    # The host's launches beside it have more time.
    again = [float(np.asarray(steps[name]["recompute"])) for name in ("layer_inputs", "none")]
    assert again[0] == pytest.approx(again[1], rel=1e-4)
    assert steps["layer_inputs"]["offload"] == pytest.approx(2 * 32 * INPUT / 51.2e9)


def test_a_published_run_of_a_million_tokens() -> None:
    """Qwen3-0.6B on 8 H100: 27.9 GB, and 20.8 with inputs on the host (accelerate, pull request 4175)."""
    layout = Layout(cp=8, zero_stage=3, recompute=Recompute.FULL, recompute_layers=28)
    peaks = []
    for modules in ("none", "layer_inputs"):
        work = Workload(
            model=load_catalog_model("qwen3-0.6b"),
            cluster=read_cluster("dgx-h100"),
            gpus=8,
            global_batch=1,
            seq_len=2**20,
            framework="fsdp2",
            loss="chunked",
            offload_modules=modules,
        )
        parts = stage_memory_parts_gib(work, layout, ((28,),))
        peaks.append(sum(float(part[0]) for part in parts.values()) * GIB / 1e9)
    assert peaks[0] - peaks[1] == pytest.approx(27.9 - 20.8, rel=0.05)

"""Windowed layers with heads of their own (Gemma 4): counts, bytes and seconds, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer, saved_of_kinds
from meshwright.costmodel.attention import attention_block, full_share, one_window_share
from meshwright.costmodel.feed_forward import linear
from meshwright.costmodel.footprint import stage_memory_gib
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.lengths import PackedLengths
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.stacks import stack_constants
from meshwright.costmodel.states import end_parameters, kind_parameters_on_gpu, rank_parameters
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import context_volumes, mean_rank_work
from meshwright.costmodel.workload import Workload, has_wide_heads
from meshwright.model_specs.adapters import (
    AdapterSpec,
    adapter_counts,
    counted_matrices,
    frozen_parameters,
    resolved,
)
from meshwright.model_specs.parameters import (
    active_matmul_parameters,
    attention_matmul_parameters,
    attention_parameters,
    flops_per_token,
    parameter_count,
)
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.analysis.roofline import products_of
from meshwright.planner.runs.calibration.machine import gemm_shapes_of

H, FFN, VOCAB, LAYERS, WINDOW, SEQ = 1024, 4096, 32_000, 6, 1024, 8192
HEADS, FULL_KV, FULL_DIM, WINDOW_KV, WINDOW_DIM = 16, 2, 512, 8, 256
SMS = {"dgx-h200": 132, "dgx-b200": 148}
FULL_LAYER = H * (2 * HEADS + FULL_KV) * FULL_DIM
WINDOWED_LAYER = H * 2 * (HEADS + WINDOW_KV) * WINDOW_DIM
"""Matrices of attention: keys alone beside queries and output, and keys and values."""


def model(**changes: Any) -> ModelSpec:
    """A model of six layers, of which the last attends in full."""
    fields: dict[str, Any] = {
        "layers": LAYERS,
        "hidden": H,
        "ffn_hidden": FFN,
        "heads": HEADS,
        "kv_heads": FULL_KV,
        "head_dim": FULL_DIM,
        "vocab": VOCAB,
        "tied_embeddings": True,
        "norms_per_layer": 4,
        "qk_norm": True,
        "value_norm": True,
        "sliding_window": WINDOW,
        "full_attention_every": LAYERS,
        "window_heads": {"kv_heads": WINDOW_KV, "head_dim": WINDOW_DIM},
        "values_are_keys": True,
    }
    return ModelSpec.model_validate(fields | changes)


def alike(**changes: Any) -> ModelSpec:
    """The model with one set of heads, which FlashAttention takes; its windows named or not."""
    fields = {"values_are_keys": False, "value_norm": False, "kv_heads": 8, "head_dim": 128}
    return model(**fields, **changes)


def workload(spec: ModelSpec, cluster: str = "dgx-h200", **changes: Any) -> Workload:
    settings: dict[str, Any] = {"framework": "fsdp2", "seq_len": SEQ, "global_batch": 16} | changes
    own = read_cluster(cluster, gpus=8)
    return Workload(model=spec, cluster=own, gpus=8, **settings)


LAYOUT = Layout(dp=8, zero_stage=3, num_micro_batches=2)


def context(work: Workload) -> Context:
    return make_context(work, LAYOUT, nested_placement(work.cluster, LAYOUT))


def kind_context(c: Context, spec: ModelSpec) -> Context:
    return replace(c, workload=c.workload.of_kind(spec))


def test_parameters_and_flops_by_hand() -> None:
    spec = model()
    norms = 4 * H
    layers = 5 * (WINDOWED_LAYER + 2 * WINDOW_DIM) + FULL_LAYER + 2 * FULL_DIM
    mlp = 3 * H * FFN
    assert parameter_count(spec) == layers + LAYERS * (mlp + norms) + VOCAB * H + H
    matrices = 5 * WINDOWED_LAYER + FULL_LAYER + LAYERS * mlp + VOCAB * H
    assert active_matmul_parameters(spec) == matrices
    attended = 5 * WINDOW_DIM * (WINDOW - WINDOW**2 / (2 * SEQ)) + FULL_DIM * SEQ / 2
    scores = 3 * 2 * HEADS * 2 * attended
    assert flops_per_token(spec, SEQ) == pytest.approx(6 * matrices + scores, rel=1e-12)
    biased = model(attention_bias=True, attention_output_bias=True)
    assert attention_parameters(biased) - attention_parameters(spec) == (
        (HEADS + FULL_KV) * FULL_DIM + H
    )


def test_scales_of_a_router_by_hand() -> None:
    moe = {"experts": 8, "top_k": 2, "moe_ffn_hidden": 256}
    plain, scaled = (model(moe=moe | {"router_scales": scales}) for scales in (False, True))
    assert parameter_count(scaled) - parameter_count(plain) == LAYERS * (H + 8)


def test_query_heads_values_and_gates_by_hand() -> None:
    windowed = {"heads": 24, "kv_heads": 8, "head_dim": 128, "sinks": True}
    fields = {"window_heads": windowed, "value_head_dim": 64, "attention_head_gates": True}
    spec = alike(**fields)
    # Queries, a gate each and the output; keys and values; two norms; sinks under the window.
    of_full = H * (16 * (128 + 1 + 64) + 8 * (128 + 64)) + 2 * 128
    of_windowed = H * (24 * (128 + 1 + 64) + 8 * (128 + 64)) + 2 * 128 + 24
    assert attention_parameters(spec) == of_full
    assert attention_parameters(spec.in_windows) == of_windowed
    others = VOCAB * H + H + LAYERS * (3 * H * FFN + 4 * H)
    assert parameter_count(spec) == of_full + 5 * of_windowed + others
    attended = 5 * 24 * (WINDOW - WINDOW**2 / (2 * SEQ)) + 16 * SEQ / 2
    scores = 3 * 2 * (128 + 64) * attended
    matrices = 5 * (of_windowed - 2 * 128 - 24) + of_full - 2 * 128
    matrices += LAYERS * 3 * H * FFN + VOCAB * H
    assert flops_per_token(spec, SEQ) == pytest.approx(6 * matrices + scores, rel=1e-12)
    # A layer under the window takes what a model of such layers alone takes.
    c = context(workload(spec))
    of_window = attention_block(kind_context(c, spec.in_windows), one_window_share(c))
    same_heads = {"heads": 24, "attention_sinks": True, "full_attention_every": 0}
    alone = alike(**fields | {"window_heads": None} | same_heads)
    again = attention_block(context(workload(alone)), one_window_share(c))
    for passed in ("forward", "backward"):
        parts, expected = (getattr(each, passed) for each in (of_window, again))
        assert {name: float(part) for name, part in parts.items()} == {
            name: pytest.approx(float(part), rel=1e-12) for name, part in expected.items()
        }
    # Gates read the output and write its product; backward they move three times as many bytes.
    plain = alike(**fields | {"attention_head_gates": False})
    gated, bare = (attention_block(context(workload(each)), 1.0) for each in (spec, plain))
    more_forward, more_backward = (
        getattr(gated, passed)["memory_bound"] - getattr(bare, passed)["memory_bound"]
        for passed in ("forward", "backward")
    )
    assert float(more_backward / more_forward) == pytest.approx(3.0, rel=0.01)
    # Kept are 2 bytes a head, and 2 an element of the product; heads of the mean layer.
    kept, without = (
        activation_bytes_per_layer(workload(each), LAYOUT, experts=False)[0]
        for each in (spec, plain)
    )
    assert float(kept - without) == pytest.approx(SEQ * 2 * (5 * 24 + 16) / 6 * 65, rel=1e-12)


def test_models_of_one_kind_have_its_heads_alone() -> None:
    spec = model(attention_order="WFWFWF", full_attention_every=1)
    windows, full = spec.in_windows, spec.in_full
    assert (windows.kv_heads, windows.qk_head_dim, windows.windowed_layers) == (8, 256, LAYERS)
    assert (full.kv_heads, full.qk_head_dim, full.full_attention_layers) == (2, 512, LAYERS)
    assert not windows.values_are_keys
    assert full.values_are_keys
    assert attention_matmul_parameters(windows) == WINDOWED_LAYER
    assert attention_matmul_parameters(full) == FULL_LAYER
    plain = alike(window_heads=None)
    assert plain.in_windows is plain
    assert plain.in_full is plain
    # Asked for its kinds, a model still equals one that was not.
    assert plain == alike(window_heads=None)
    assert spec == model(attention_order="WFWFWF", full_attention_every=1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window_heads": {"kv_heads": 3, "head_dim": 256}}, "multiple of window_heads.kv_heads 3"),
        ({"sliding_window": None}, "layers with a window and layers that attend in full"),
        ({"full_attention_every": 0}, "layers with a window and layers that attend in full"),
        ({"mtp_layers": 1}, "window_heads with mtp_layers"),
        ({"qk_norm_full_width": True}, "window_heads with qk_norm_full_width"),
        ({"window_heads": None}, "values_are_keys needs window_heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model(**fields)


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-b200"])
@pytest.mark.parametrize("framework", ["fsdp2", "megatron-lm"])
def test_equal_heads_are_priced_as_one_set_of_them(framework: str, cluster: str) -> None:
    prices, held_gib = [], []
    for heads in (None, {"kv_heads": 8, "head_dim": 128}):
        spec = alike(window_heads=heads)
        work = workload(spec, cluster, framework=framework)
        times = kind_times(context(work))
        prices.append(
            [
                parameter_count(spec),
                active_matmul_parameters(spec),
                flops_per_token(spec, SEQ),
                *(float(kind.seconds) for kind in times.unlike),
                *(float(kind.recompute_s) for kind in times.unlike),
                *map(float, activation_bytes_per_layer(work, LAYOUT, experts=False)),
            ]
        )
        held_gib.append(float(np.max(stage_memory_gib(work, LAYOUT, ((LAYERS,),)))))
    assert prices[0] == prices[1]
    assert held_gib[0] == held_gib[1]


def test_ranks_hold_all_parameters_of_a_model_with_both_kinds() -> None:
    spec = load_catalog_model("gemma-4-31b")
    layout = Layout(dp=8)
    windowed, full = (float(dense) for dense, _ in kind_parameters_on_gpu(spec, layout))
    first, _, _ = end_parameters(spec, layout)
    total = 50 * windowed + 10 * full + float(first) + spec.hidden
    assert total == pytest.approx(parameter_count(spec), rel=1e-12)
    dense, experts = rank_parameters(spec, layout, None)
    assert float(dense) + spec.hidden == pytest.approx(parameter_count(spec), rel=1e-9)
    assert float(experts) == 0
    # The plan's own count of a mean layer: five sixths of one kind and a sixth of the other.
    assert windowed - full == WINDOWED_31B - FULL_31B + 2 * (256 - 512)


FULL_31B = 5376 * (2 * 32 + 4) * 512
WINDOWED_31B = 5376 * 2 * (32 + 16) * 256


@pytest.mark.parametrize(("cluster", "measured_ms"), [("dgx-h200", 72.0), ("dgx-b200", 63.9)])
def test_attention_under_a_mask_takes_what_was_measured(cluster: str, measured_ms: float) -> None:
    """Of 16 heads of 256 on 8,192 tokens, forward and backward: verl pull request 7131, unsloth's 11102."""
    c = context(workload(model(), cluster))
    own = kind_context(c, c.workload.model.in_windows)
    block = attention_block(own, one_window_share(own))
    seconds = float(block.forward["attention"] + block.backward["attention"])
    assert 1e3 * seconds == pytest.approx(measured_ms, rel=0.01)
    flop = 3.5 * 4 * SEQ**2 * HEADS * WINDOW_DIM
    assert seconds == pytest.approx(flop / (SMS[cluster] * 405e9), rel=1e-9)


def test_a_causal_mask_leaves_half_of_the_scores() -> None:
    c = context(workload(model()))
    full, windows = (
        kind_context(c, spec) for spec in (c.workload.model.in_full, c.workload.model.in_windows)
    )
    assert (full_share(full), one_window_share(windows)) == (1.0, 2.0)
    seconds = [
        float(attention_block(own, share).forward["attention"])
        for own, share in ((full, full_share(full)), (windows, one_window_share(windows)))
    ]
    # Heads twice as wide, of which half of the scores are computed.
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)
    short = kind_context(context(workload(model(), seq_len=512)), c.workload.model.in_windows)
    assert one_window_share(short) == 1.0
    lengths = PackedLengths(
        packing="first-fit",
        samples=100,
        longest=SEQ // 2,
        samples_a_pack=2.0,
        fill=1.0,
        attended_share=0.5,
        windowed_share=0.2,
    )
    packed = context(workload(model(), lengths=lengths))
    assert full_share(kind_context(packed, packed.workload.model.in_full)) == 2.0


def test_seconds_of_both_kinds_of_layers_by_hand() -> None:
    """Projections in front: queries and keys alone in full, queries, keys and values under the window."""
    c = context(workload(model()))
    for spec, width, outer in (
        (c.workload.model.in_full, (HEADS + FULL_KV) * FULL_DIM, HEADS * FULL_DIM),
        (c.workload.model.in_windows, (HEADS + 2 * WINDOW_KV) * WINDOW_DIM, HEADS * WINDOW_DIM),
    ):
        own = kind_context(c, spec)
        block = attention_block(own, 1.0)
        inputs = linear(own, SEQ, float(width), H, {})
        output = linear(own, SEQ, H, float(outer), {})
        assert float(block.forward["gemm"]) == float(inputs.forward + output.forward)
        assert float(block.backward["gemm"]) == float(inputs.backward + output.backward)
    by_kind = [float(kind.seconds) for kind in kind_times(c).unlike]
    assert len(by_kind) == 2


@pytest.mark.parametrize("masked", [True, False])
def test_saved_bytes_of_both_kinds_by_hand(masked: bool) -> None:
    """Queries, repeated keys and values and output at 16 bits; inputs and products of norms at 32."""
    seq = SEQ if masked else 512
    work = workload(model(), seq_len=seq)
    assert stack_constants(work).memory_efficient
    windowed, full = (float(saved) / seq for saved, _ in saved_of_kinds(work, LAYOUT))
    expected = []
    for kv_heads, width, are_keys in ((WINDOW_KV, WINDOW_DIM, False), (FULL_KV, FULL_DIM, True)):
        read = 2 * 3 * HEADS * width
        output = 2 * HEADS * width + 4 * HEADS
        normed = 4 * (2 * (HEADS + kv_heads) * width + kv_heads * width)
        mask = 2 * seq * (masked and not are_keys)
        expected.append(read + output + normed + mask)
    assert windowed - full == pytest.approx(expected[0] - expected[1], rel=1e-12)
    mean, _ = activation_bytes_per_layer(work, LAYOUT, experts=False)
    assert float(mean) / seq == pytest.approx((5 * windowed + full) / 6, rel=1e-12)
    # Two norms more, each of two 32-bit tensors.
    plain = workload(model(value_norm=False), seq_len=seq)
    less, _ = activation_bytes_per_layer(plain, LAYOUT, experts=False)
    values = 4 * (5 * WINDOW_KV * WINDOW_DIM + FULL_KV * FULL_DIM) / 6
    assert float(mean - less) / seq == pytest.approx(2 * 2 * 4 * H + values, rel=1e-9)


def test_only_heads_that_flash_attention_takes_have_its_rate() -> None:
    wide, narrow = workload(model()), workload(alike(window_heads=None))
    assert has_wide_heads(wide.model)
    assert not has_wide_heads(narrow.model)
    assert not stack_constants(narrow).memory_efficient
    named = workload(model(), attention_kernel="sdpa")
    assert stack_constants(named) == stack_constants(wide)
    assert not stack_constants(workload(model(), attention_kernel="unfused")).flash_attention


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("gemma-4-31b", 61_214_720),
        ("gemma-4-26b-a4b", 9_999_360),
        ("gemma-4-e2b", 13_166_592),
        ("gemma-4-e4b", 19_439_616),
    ],
)
def test_adapters_are_as_many_as_peft_makes(name: str, trained: int) -> None:
    """Rank 8 beside all linear layers of `Gemma4ForCausalLM`, counted in peft 0.21: experts have none."""
    spec = load_catalog_model(name)
    adapters = resolved(spec, AdapterSpec(rank=8), fused=False)
    assert adapter_counts(spec, adapters).total == trained
    shares = frozen_parameters(spec, adapters).trained
    experts = 0 if spec.moe is None else 30 * 128 * 3 * 2816 * 704
    assert shares[0] == pytest.approx(trained / (parameter_count(spec) - experts), rel=1e-12)
    assert shares[1] == 0.0


def test_matrices_are_counted_by_kind() -> None:
    counted = counted_matrices(model(), fused=False)
    keys = {each.matrix.outputs: each.number for each in counted if each.matrix.name == "k_proj"}
    assert keys == {FULL_KV * FULL_DIM: 1, WINDOW_KV * WINDOW_DIM: 5}
    values = [each.number for each in counted if each.matrix.name == "v_proj"]
    assert values == [5]
    elements = sum(each.number * each.matrix.inputs * each.matrix.outputs for each in counted)
    assert elements == active_matmul_parameters(model()) - VOCAB * H


def test_products_and_timed_shapes_have_both_kinds() -> None:
    c = context(workload(model()))
    shapes = {product.name: product.columns for product in products_of(c)}
    assert shapes["attention inputs"] == (HEADS + FULL_KV) * FULL_DIM
    assert shapes["windowed attention inputs"] == (HEADS + 2 * WINDOW_KV) * WINDOW_DIM
    timed = gemm_shapes_of(model())
    assert {(H, HEADS * FULL_DIM), (H, HEADS * WINDOW_DIM)} <= set(timed)


def test_context_parallel_traffic_is_that_of_each_kind() -> None:
    work = workload(model(), cp_comm="a2a")
    layout = Layout(dp=4, cp=2, num_micro_batches=4)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    swapped = context_volumes(c, mean_rank_work(c, ((LAYERS,),))).whole
    full, windowed = (HEADS + FULL_KV) * 2 * FULL_DIM, (HEADS + WINDOW_KV) * 2 * WINDOW_DIM
    per_token = 2.0 * (full + 5 * windowed) / 6
    assert swapped == pytest.approx(per_token * SEQ / 2 * 2 * LAYERS * 4, rel=1e-12)

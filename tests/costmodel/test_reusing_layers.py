"""Layers that reuse what an earlier one made, and inputs that each layer reads of a table of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer, saved_of_kinds
from meshwright.costmodel.attention import attention_block
from meshwright.costmodel.feed_forward import linear
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import embedding, kind_times
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.other_blocks import layer_inputs_block, sparse_saved
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import end_parameters, kind_parameters_on_gpu, rank_parameters
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import read_adapters, resolved
from meshwright.model_specs.parameters import (
    active_matmul_parameters,
    attended_positions,
    attention_flops_per_token,
    flops_per_token,
    parameter_count,
)
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec

H, FFN, WIDE, VOCAB, HEADS, KV, DIM, P, SEQ = 1024, 4096, 8192, 32_000, 8, 2, 128, 64, 4096


def model(**changes: Any) -> ModelSpec:
    """Six layers of one set of heads, the last three of which reuse keys and values."""
    fields: dict[str, Any] = {
        "layers": 6,
        "hidden": H,
        "ffn_hidden": FFN,
        "heads": HEADS,
        "kv_heads": KV,
        "head_dim": DIM,
        "vocab": VOCAB,
        "tied_embeddings": True,
        "qk_norm": True,
        "sliding_window": 512,
        "attention_order": "WFWwfw",
    }
    return ModelSpec.model_validate(fields | changes)


PLAIN = model(attention_order="WFWWFW")
LAYOUT = Layout(dp=8, zero_stage=3, num_micro_batches=2)


def context(spec: ModelSpec, layout: Layout = LAYOUT, **changes: Any) -> Context:
    cluster = read_cluster("dgx-h100", gpus=8)
    settings: dict[str, Any] = {"framework": "fsdp2", "seq_len": SEQ, "global_batch": 16} | changes
    work = Workload(model=spec, cluster=cluster, gpus=8, **settings)
    return make_context(work, layout, nested_placement(cluster, layout))


def of_kind(c: Context, letter: str) -> Context:
    return replace(c, workload=c.workload.of_kind(c.workload.model.kinds_apart[letter]))


def test_parameters_and_flops_of_reusing_layers_by_hand() -> None:
    keys_and_values, norm = H * 2 * KV * DIM, DIM
    assert parameter_count(PLAIN) - parameter_count(model()) == 3 * (keys_and_values + norm)
    fewer = active_matmul_parameters(PLAIN) - active_matmul_parameters(model())
    assert fewer == 3 * keys_and_values
    # Queries attend to as many positions as before.
    assert attention_flops_per_token(model(), SEQ) == attention_flops_per_token(PLAIN, SEQ)
    wide = model(reusing_ffn_hidden=WIDE)
    assert parameter_count(wide) - parameter_count(model()) == 3 * 3 * H * (WIDE - FFN)
    more = flops_per_token(wide, SEQ) - flops_per_token(model(), SEQ)
    assert more == pytest.approx(6 * 3 * 3 * H * (WIDE - FFN))


def test_stages_begin_where_nothing_is_reused_from_ahead() -> None:
    # The last three layers reuse what the second and the fourth made: nothing may be cut in between.
    assert model().stage_begins == (0, 1)
    assert model().most_stages == 2
    assert model(attention_order="WFWwWf").stage_begins == (0, 1)
    assert model(attention_order="WWwFfW").stage_begins == (0, 1, 3, 5)
    assert PLAIN.stage_begins == ()
    assert PLAIN.most_stages == 6
    glm = load_catalog_model("glm-5.2")
    assert glm.stage_begins == (0, 1, *range(2, 78, 4))
    # E2B's layers 15 to 34 reuse keys and values of layers 13 and 14.
    assert load_catalog_model("gemma-4-e2b").stage_begins == tuple(range(14))


def test_inputs_of_layers_by_hand() -> None:
    with_inputs, layers = model(layer_inputs=P), 6
    more = parameter_count(with_inputs) - parameter_count(model())
    assert more == layers * (VOCAB * P + 3 * H * P) + P
    flops = flops_per_token(with_inputs, SEQ) - flops_per_token(model(), SEQ)
    assert flops == pytest.approx(6 * layers * 3 * H * P)
    c = context(with_inputs)
    across = linear(c, SEQ, layers * P, H, {})
    gate, back = linear(c, SEQ, P, H, {}), linear(c, SEQ, H, P, {})
    block = layer_inputs_block(c)
    assert float(block.forward["gemm"]) == pytest.approx(
        float(across.forward / layers + gate.forward + back.forward)
    )
    assert float(block.backward["gemm"]) == pytest.approx(
        float(across.backward / layers + gate.backward + back.backward)
    )
    # Of the token table P elements a layer are looked up beside H.
    plain, looked_up = (
        float(embedding(context(each)).forward["memory_bound"]) for each in (model(), with_inputs)
    )
    assert looked_up / plain == pytest.approx(1 + layers * P / H, rel=0.02)


@pytest.mark.parametrize("recompute", [0, int(Recompute.FULL)])
def test_saved_bytes_of_layer_inputs_by_hand(recompute: int) -> None:
    """The gate's input; what it returns, its activation and the product; the input and its norm's tensors."""
    layout = replace(LAYOUT, recompute=recompute)
    (plain, plain_inputs), (saved, inputs) = (
        activation_bytes_per_layer(context(each, layout).workload, layout, experts=False)
        for each in (model(), model(layer_inputs=P))
    )
    assert float(saved - plain) / SEQ == pytest.approx(2 * H + 3 * 2 * P + (2 + 8) * P)
    assert float(inputs - plain_inputs) / SEQ == pytest.approx((2 + 8) * P)


def test_seconds_and_saved_bytes_of_a_reusing_layer_by_hand() -> None:
    c = context(model())
    own, reusing = of_kind(c, "F"), of_kind(c, "f")
    for each, width in ((own, (HEADS + 2 * KV) * DIM), (reusing, HEADS * DIM)):
        inputs = linear(each, SEQ, float(width), H, {})
        output = linear(each, SEQ, H, float(HEADS * DIM), {})
        block = attention_block(each, 1.0)
        assert float(block.forward["gemm"]) == float(inputs.forward + output.forward)
        assert float(block.backward["gemm"]) == float(inputs.backward + output.backward)
    attended = [float(attention_block(each, 1.0).forward["attention"]) for each in (own, reusing)]
    assert attended[0] == attended[1]
    order = list(dict.fromkeys(model().unlike_bytes))
    assert order == ["W-", "F-", "w-", "f-"]
    kept = dict(
        zip(order, (float(saved) for saved, _ in saved_of_kinds(c.workload, LAYOUT)), strict=True)
    )
    # Keys and values, before their norm and rotation and, of keys, behind it.
    assert kept["F-"] - kept["f-"] >= SEQ * 2 * 2 * KV * DIM
    assert kept["F-"] - kept["f-"] == kept["W-"] - kept["w-"]
    times = kind_times(c)
    by_kind = dict(zip(dict.fromkeys(model().unlike_layers), times.unlike, strict=True))
    assert float(by_kind["f-"].seconds) < float(by_kind["F-"].seconds)


@pytest.mark.parametrize("name", ["gemma-4-e2b", "gemma-4-e4b", "glm-5.2"])
def test_ranks_hold_all_parameters_of_all_kinds(name: str) -> None:
    spec, layout = load_catalog_model(name), Layout(dp=8)
    kinds = kind_parameters_on_gpu(spec, layout)
    numbers = [spec.unlike_bytes.count(kind) for kind in dict.fromkeys(spec.unlike_bytes)]
    first, last, _ = end_parameters(spec, layout)
    of_kinds = sum(
        number * float(dense + experts)
        for number, (dense, experts) in zip(numbers, kinds, strict=True)
    )
    total = of_kinds + float(first) + float(last) + spec.hidden
    assert total == pytest.approx(parameter_count(spec), rel=1e-12)
    dense, experts = rank_parameters(spec, layout, None)
    mean = float(dense) + float(experts) + spec.hidden
    assert mean == pytest.approx(parameter_count(spec), rel=1e-9)


def test_long_sequences_cost_small_gemma_4_its_full_layers_alone() -> None:
    """Of E2B at 131,072 tokens: 7 layers of heads 512 wide see half of them, 28 of 256 the last 512."""
    spec, seq = load_catalog_model("gemma-4-e2b"), 131_072
    full, windowed = 7 * 512 * seq / 2, 28 * 256 * attended_positions(seq, 512)
    assert attention_flops_per_token(spec, seq) == pytest.approx(3 * 2 * 8 * 2 * (full + windowed))


def test_shared_indexers_score_once_for_the_layers_behind_them() -> None:
    """GLM-5.2: 78 layers attend to 2,048 positions, 21 of them score all earlier ones by 32 heads."""
    spec, seq = load_catalog_model("glm-5.2"), 131_072
    chosen = attended_positions(seq, 2048)
    attended = 78 * 3 * 2 * 64 * (256 + 256) * chosen
    scored = 21 * 2 * 32 * 128 * (seq / 2 + 2 * chosen)
    assert attention_flops_per_token(spec, seq) == pytest.approx(attended + scored)
    c = context(spec, Layout(dp=8, ep=8), framework="megatron")
    own, reusing = (of_kind(c, letter).workload for letter in "Ff")
    of_indexer = 2 * (32 * 128 + 128 + 32) + 4 * 2048
    kept = [float(sparse_saved(each, 1.0, 1.0)) for each in (own, reusing)]
    assert kept[0] - kept[1] == of_indexer
    by_kind = dict(zip(dict.fromkeys(spec.unlike_layers), kind_times(c).unlike, strict=True))
    assert set(by_kind) == {"F-", "fE", "FE"}
    assert float(by_kind["FE"].seconds) > float(by_kind["fE"].seconds)


def test_adapters_stand_beside_what_a_layer_has() -> None:
    spec = load_catalog_model("gemma-4-e2b")
    asked = read_adapters("lora", 8, "all-linear")
    assert asked is not None
    adapters = resolved(spec, asked, fused=False)
    assert "per_layer_input_gate" in adapters.matrices
    trained, frozen = (
        float(kind_times(context(spec, adapters=each)).embedding.seconds)
        for each in (None, adapters)
    )
    assert frozen < trained


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_order": "wFWWFW"}, "w ahead of any W"),
        ({"reusing_ffn_hidden": WIDE, "attention_order": "WFWWFW"}, "needs f or w"),
        ({"mtp_layers": 1}, "f or w in attention_order with mtp_layers"),
        ({"layer_inputs": P, "tied_embeddings": False}, "layer_inputs needs tied_embeddings"),
        (
            {"layer_inputs": P, "moe": {"experts": 4, "top_k": 1, "moe_ffn_hidden": 64}},
            "layer_inputs with moe",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        model(**fields)

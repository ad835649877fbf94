"""Parameter and FLOP counts: hand-worked cases, published totals, published FLOP rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.model_specs.blocks import MlaSpec, MoeSpec
from meshwright.model_specs.parameters import (
    active_matmul_parameters,
    active_parameter_count,
    attended_positions,
    attention_flops_per_token,
    attention_matmul_parameters,
    attention_parameters,
    dense_layer_parameters,
    dense_mlp_parameters,
    embedding_parameters,
    encoder_parameters,
    expert_parameters,
    flops_per_token,
    head_parameters,
    moe_layer_parameters,
    mtp_parameters,
    norm_parameters_per_layer,
    parameter_count,
    router_parameters,
    shared_expert_parameters,
)
from meshwright.model_specs.reader import catalog_names, load_catalog_model
from meshwright.model_specs.schema import ModelSpec

CATALOG = tuple(
    """
    gpt2-xl gpt3-175b mt-nlg-530b gpt-1t bloom-176b opt-175b llama-2-7b llama-2-13b llama-2-70b
    llama-3-8b llama-3-70b llama-3.1-405b mixtral-8x7b mixtral-8x22b deepseek-v2 deepseek-v3 deepseek-v3.2
    qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b kimi-k2 gpt-oss-20b gpt-oss-120b
    olmoe-1b-7b nemotron-4-15b nemotron-4-340b grok-1 nemotron-h-8b nemotron-h-47b nemotron-h-56b
    nemotron-3-nano-30b-a3b mamba-codestral-7b mamba2-2.7b falcon-h1-34b
    llama-3.1-8b llama-3.1-70b llama-3.2-1b llama-3.2-3b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b
    qwen2.5-14b qwen2.5-32b qwen2.5-72b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-14b mistral-7b
    mistral-nemo-12b phi-4 smollm2-1.7b
    gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b gemma-4-12b
    gemma-4-e2b gemma-4-e4b gemma-4-26b-a4b gemma-4-31b glm-4.5-air glm-4.5
    minimax-m2.5 olmo-2-7b olmo-2-13b olmo-2-32b olmo-3-7b phi-3-mini-4k
    phi-4-mini deepseek-v2-lite moonlight-16b-a3b smollm2-135m smollm2-360m mistral-small-24b
    qwen2.5-vl-7b qwen3-vl-8b qwen3-vl-30b-a3b qwen3-vl-235b-a22b
    llama-4-scout llama-4-maverick qwen3-next-80b-a3b qwen3.5-9b qwen3.5-35b-a3b qwen3.5-27b glm-5
    glm-4.7-flash nemotron-3.5-lightning glm-5.2 a.x-k1-519b mimo-v2-flash step-3.5-flash ling-3.0-flash
    granite-4.0-h-small nemotron-3-super-120b-a12b seed-oss-36b smollm3-3b ernie-4.5-21b-a3b
    """.split()  # noqa: SIM905
)


def small(**fields: object) -> ModelSpec:
    base: dict[str, object] = {
        "layers": 3,
        "hidden": 8,
        "ffn_hidden": 20,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 100,
    }
    return ModelSpec.model_validate(base | fields)


def test_catalog_holds_exactly_the_documented_names() -> None:
    assert sorted(catalog_names()) == sorted(CATALOG)


@pytest.mark.parametrize("name", CATALOG)
def test_catalog_counts_match_published_totals(name: str) -> None:
    model = load_catalog_model(name)
    assert model.name == name
    assert model.source
    assert model.published_parameters is not None
    # An exact published total must be met much closer than a rounded one.
    tolerance = 5e-3 if "rounded" in model.source else 1e-8
    assert parameter_count(model) == pytest.approx(model.published_parameters, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-3.1-405b", 405.85e9),
        ("deepseek-v3", 671.03e9),
        ("mixtral-8x7b", 46.70e9),
        ("mixtral-8x22b", 140.6e9),
        ("gpt-oss-120b", 116.83e9),
        ("gpt-oss-20b", 20.91e9),
        ("bloom-176b", 176.25e9),
        ("qwen3-235b-a22b", 235.09e9),
        ("deepseek-v2", 235.74e9),
        ("kimi-k2", 1.0264e12),
        ("nemotron-4-340b", 341e9),
        ("gpt-1t", 1008e9),
        ("mt-nlg-530b", 530e9),
        ("gpt2-xl", 1.5576e9),
    ],
)
def test_totals_written_down_apart_from_the_catalog(name: str, total: float) -> None:
    assert parameter_count(load_catalog_model(name)) == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "active", "input_embedding"),
    [
        ("mixtral-8x7b", 12.9e9, True),  # arXiv 2401.04088, table 1: 13B, 12.9B in the text
        ("olmoe-1b-7b", 1.3e9, True),  # arXiv 2409.02060
        ("qwen3-30b-a3b", 3.3e9, True),  # model card
        ("deepseek-v3", 37e9, True),  # arXiv 2412.19437
        ("gpt-oss-120b", 5.13e9, False),  # arXiv 2508.10925, table 1
        ("gpt-oss-20b", 3.61e9, False),
    ],
)
def test_active_counts_match_published_ones(
    name: str, active: float, input_embedding: bool
) -> None:
    model = load_catalog_model(name)
    assert active_parameter_count(model, input_embedding=input_embedding) == pytest.approx(
        active, rel=0.02
    )


def test_llama_layer_by_hand() -> None:
    model = small()
    # head_dim 2: query and output 8 x 8, key and value 8 x 4; three matrices 8 x 20; two norms of 8.
    assert attention_parameters(model) == 64 + 64 + 32 + 32
    assert dense_mlp_parameters(model) == 480
    assert norm_parameters_per_layer(model) == 16
    assert dense_layer_parameters(model) == 192 + 480 + 16
    assert embedding_parameters(model) == head_parameters(model) == 800
    assert parameter_count(model) == 3 * 688 + 800 + 800 + 8
    assert active_parameter_count(model) == parameter_count(model)
    assert active_parameter_count(model, input_embedding=False) == 3 * 688 + 800 + 8


def test_gpt2_layer_by_hand() -> None:
    model = small(
        kv_heads=4,
        activation="gelu",
        norm="layernorm",
        tied_embeddings=True,
        position="learned",
        max_positions=16,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    )
    assert attention_parameters(model) == 4 * 64 + 24 + 8
    assert dense_mlp_parameters(model) == 2 * 160 + 20 + 8
    assert norm_parameters_per_layer(model) == 2 * 16
    assert embedding_parameters(model) == (100 + 16) * 8
    assert head_parameters(model) == 0
    assert parameter_count(model) == 3 * (288 + 348 + 32) + 928 + 16
    assert active_parameter_count(model, input_embedding=False) == 3 * 668 + 16 + 800


def test_small_parts_by_hand() -> None:
    plain = attention_parameters(small())
    assert attention_parameters(small(qk_norm=True)) - plain == 2 * 2
    assert attention_parameters(small(qk_norm=True, qk_norm_full_width=True)) - plain == 8 + 4
    assert attention_parameters(small(attention_sinks=True)) - plain == 4
    assert attention_parameters(small(attention_bias=True)) - plain == 8 + 4 + 4
    assert embedding_parameters(small(embedding_norm=True, norm="layernorm")) == 800 + 16
    assert attention_parameters(small(head_dim=6)) == 8 * 6 * (4 + 4 + 2 + 2)


def test_mla_by_hand() -> None:
    mla = {"kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
    full_query = small(kv_heads=4, attention=mla)
    # query 8 x 20; down 8 x 8; up 6 x 4 x 7; output 16 x 8; a norm of 6.
    assert attention_matmul_parameters(full_query) == 160 + 64 + 168 + 128
    assert attention_parameters(full_query) == 520 + 6
    low_rank = small(kv_heads=4, attention=mla | {"q_lora_rank": 5})
    assert attention_matmul_parameters(low_rank) == 5 * (8 + 20) + 64 + 168 + 128
    assert attention_parameters(low_rank) == 500 + 6 + 5
    biased = small(kv_heads=4, attention=mla | {"q_lora_rank": 5}, attention_bias=True)
    assert attention_parameters(biased) == 511 + 5 + 8


def test_moe_layer_by_hand() -> None:
    moe = {
        "experts": 6,
        "top_k": 2,
        "moe_ffn_hidden": 10,
        "shared_experts": 1,
        "shared_ffn_hidden": 12,
        "shared_expert_gate": True,
        "dense_layers": 1,
        "router_bias": True,
        "expert_bias": True,
    }
    model = small(moe=moe)
    assert expert_parameters(model) == 3 * 80 + 10 + 10 + 8
    assert shared_expert_parameters(model) == 3 * 96 + 8
    assert router_parameters(model) == 48 + 6
    assert moe_layer_parameters(model) == 192 + 16 + 54 + 296 + 6 * 268
    assert parameter_count(model) == 688 + 2 * 2166 + 1608
    assert active_parameter_count(model) == parameter_count(model) - 2 * 4 * 268


def test_dense_models_have_no_expert_parts() -> None:
    model = small()
    parts = (expert_parameters, shared_expert_parameters, router_parameters, moe_layer_parameters)
    assert [part(model) for part in parts] == [0, 0, 0, 0]
    assert mtp_parameters(model) == 0


def test_mtp_modules_count_apart() -> None:
    model = small(mtp_layers=2)
    assert parameter_count(model) == parameter_count(small())
    assert mtp_parameters(model) == 2 * (688 + 128 + 24)
    # DeepSeek-V3 README_WEIGHTS: 11.5B parameters of the module's own.
    assert mtp_parameters(load_catalog_model("deepseek-v3")) == pytest.approx(11.5e9, rel=0.011)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("nemotron-3.5-lightning", 32_913_266_240),
        ("nemotron-3-super-120b-a12b", 123_611_033_088),
    ],
)
def test_prediction_modules_beside_a_pattern_have_the_published_parameters(
    name: str, published: int
) -> None:
    # Megatron-Bridge's verification cards count the checkpoints' tensors: one set of weights, run twice.
    model = load_catalog_model(name)
    assert (model.mtp_layers, model.mtp_pattern, model.mtp_shared) == (2, "*E", True)
    assert parameter_count(model) + mtp_parameters(model) == published
    apart = model.model_copy(update={"mtp_shared": False})
    assert mtp_parameters(apart) == 2 * mtp_parameters(model)
    assert active_matmul_parameters(apart) == active_matmul_parameters(model)


def test_prediction_modules_beside_linear_attention_attend_in_full() -> None:
    # Qwen3.8-27B's card: 27,781,427,952 with the image encoder and one module.
    plain = load_catalog_model("qwen3.5-27b")
    model = plain.model_copy(update={"mtp_layers": 1})
    assert model.vision is not None
    total = parameter_count(model) + encoder_parameters(model.vision) + mtp_parameters(model)
    assert total == 27_781_427_952
    attended = 6 * 4096 / 2 * 24 * (256 + 256)
    more = attention_flops_per_token(model, 4096) - attention_flops_per_token(plain, 4096)
    assert more == attended


def test_flops_of_a_pattern_count_the_blocks_of_its_prediction_modules() -> None:
    pattern: dict[str, object] = {"norms_per_layer": 1, "hybrid_pattern": "*-*"}
    plain = small(**pattern)
    model = small(**pattern, mtp_layers=2, mtp_pattern="*-")
    # Attention 8 x (8 + 4 + 4) + 8 x 8, feed-forward 3 x 8 x 20, the join 2 x 8 x 8 and the head 100 x 8.
    of_module = 192 + 480 + 128 + 800
    assert active_matmul_parameters(model) == active_matmul_parameters(plain) + 2 * of_module
    assert mtp_parameters(model) == 2 * (192 + 8 + 480 + 8 + 128 + 3 * 8)


def test_dense_flops_follow_the_gpt_formula() -> None:
    # Narayanan et al. 2021 without recomputation and with half the attention.
    layers, hidden, seq_len, vocab = 96, 12288, 2048, 51200
    model = ModelSpec(
        layers=layers,
        hidden=hidden,
        ffn_hidden=4 * hidden,
        heads=96,
        kv_heads=96,
        vocab=vocab,
        activation="gelu",
        tied_embeddings=True,
    )
    formula = (
        72 * layers * hidden**2 * (1 + seq_len / (12 * hidden) + vocab / (12 * layers * hidden))
    )
    assert flops_per_token(model, seq_len) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "seq_len", "tflops_per_gpu", "tokens_per_s_per_gpu"),
    [
        # NVIDIA Megatron-Bridge docs/performance-summary-archive.md, 26.06.01 and 26.06, DGX-GB300, which
        # counts model FLOPs with causal attention in half; its tokens per second are rounded.
        ("deepseek-v3", 4096, 1640.0, 6304.0),
        ("llama-3.1-405b", 8192, 2646.0, 1048.0),
        ("qwen3-30b-a3b", 4096, 1029.0, 44544.0),
        ("qwen3-235b-a22b", 4096, 1333.0, 9008.0),
    ],
)
def test_flops_match_a_published_rate(
    name: str, seq_len: int, tflops_per_gpu: float, tokens_per_s_per_gpu: float
) -> None:
    reported = tflops_per_gpu * 1e12 / tokens_per_s_per_gpu
    assert flops_per_token(load_catalog_model(name), seq_len) == pytest.approx(reported, rel=0.01)


def test_moe_flops_by_hand() -> None:
    moe = {"experts": 6, "top_k": 2, "moe_ffn_hidden": 10, "shared_experts": 1, "dense_layers": 1}
    model = small(moe=moe, mtp_layers=1)
    dense, routed = 192 + 480, 192 + 48 + 2 * 240 + 240
    assert active_matmul_parameters(model) == dense + 2 * routed + 800 + (routed + 128 + 800)
    # Scores and values: 4 heads of 2 + 2, 5 of 10 positions, three layers and the MTP layer, times 2 times 3.
    assert attention_flops_per_token(model, 10) == 6 * 16 * 5 * 4


def test_windowed_attention_by_hand() -> None:
    assert attended_positions(100) == 50
    assert attended_positions(100, 100) == 50
    assert attended_positions(100, 10) == pytest.approx(9.5)
    model = small(layers=4, sliding_window=10, full_attention_every=2)
    assert (model.full_attention_layers, model.windowed_layers) == (2, 2)
    assert model.full_attention_fraction == 0.5
    assert attention_flops_per_token(model, 100) == pytest.approx(6 * 16 * 2 * (50 + 9.5))


@given(st.integers(1, 60), st.integers(1, 80))
def test_chunks_leave_the_positions_of_a_query_s_own_chunk(seq_len: int, chunk: int) -> None:
    # By counting: a query at t sees the positions of its chunk before it, and half of its own.
    seen = sum(t % chunk + 0.5 for t in range(seq_len)) / seq_len
    assert attended_positions(seq_len, chunk, chunked=True) == pytest.approx(seen)


def test_norms_without_weights_have_no_parameters() -> None:
    with_weights, without = small(qk_norm=True), small(qk_norm=True, qk_norm_weights=False)
    assert attention_parameters(with_weights) - attention_parameters(without) == 2 * 2
    with pytest.raises(ValidationError, match="chunked_windows needs sliding_window"):
        small(chunked_windows=True)


@pytest.mark.parametrize(
    ("every", "full"), [(0, 0), (1, 26), (2, 13), (6, 4), (26, 1), (27, 0)], ids=str
)
def test_full_layers_of_a_windowed_model(every: int, full: int) -> None:
    model = small(layers=26, sliding_window=8, full_attention_every=every)
    assert model.full_attention_layers == full
    assert model.windowed_layers == 26 - full


def test_without_a_window_every_layer_is_full() -> None:
    assert small().full_attention_fraction == 1.0
    assert small(full_attention_every=4).full_attention_layers == 3


def test_sequence_must_hold_a_token() -> None:
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        flops_per_token(small(), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sliding_window": 8}, "sliding_window needs full_attention_every"),
        ({"hidden": 9}, "hidden 9 is not a multiple of heads 4"),
        ({"kv_heads": 3}, "heads 4 must be a multiple of kv_heads 3"),
        ({"ffn_hidden": 0}, "ffn_hidden must be at least 1"),
        ({"qk_norm_full_width": True}, "needs qk_norm"),
        ({"layers": True}, "valid integer"),
        ({"layers": "3"}, "valid integer"),
        ({"tied_embeddings": 1}, "valid boolean"),
        ({"published_parameters": float("nan")}, "finite"),
        (
            {"moe": {"experts": 4, "top_k": 5, "moe_ffn_hidden": 8}},
            "top_k 5 is more than the 4 experts",
        ),
        (
            {"moe": {"experts": 4, "top_k": 1, "moe_ffn_hidden": 8, "router_groups_per_token": 2}},
            "needs router_groups",
        ),
        (
            {
                "moe": {
                    "experts": 4,
                    "top_k": 1,
                    "moe_ffn_hidden": 8,
                    "router_groups": 2,
                    "router_groups_per_token": 3,
                }
            },
            "more than the 2 router_groups",
        ),
    ],
)
def test_schema_refuses(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        small(**fields)


models = st.builds(
    lambda layers, heads, group, width, vocab, experts, top_k, mla, dense: ModelSpec(
        layers=layers,
        hidden=heads * group * 4,
        ffn_hidden=width,
        heads=heads * group,
        kv_heads=heads,
        vocab=vocab,
        attention=MlaSpec(kv_lora_rank=width, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4)
        if mla
        else None,
        moe=MoeSpec(
            experts=experts,
            top_k=min(top_k, experts),
            moe_ffn_hidden=width,
            dense_layers=min(dense, layers),
        )
        if experts
        else None,
    ),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 500),
    st.integers(1, 5000),
    st.integers(0, 16),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 4),
)


@given(models, st.integers(1, 1 << 20))
def test_counts_and_flops_hang_together(model: ModelSpec, seq_len: int) -> None:
    total, active = parameter_count(model), active_parameter_count(model)
    assert 0 < active <= total
    assert (active == total) == (
        model.moe is None or model.moe_layers == 0 or model.moe.top_k == model.moe.experts
    )
    # A layer more adds exactly one layer of the last kind.
    deeper = model.model_copy(update={"layers": model.layers + 1})
    layer = dense_layer_parameters(model) if model.moe is None else moe_layer_parameters(model)
    assert parameter_count(deeper) - total == layer
    # Matrices are all but lookups, norms and routing's unused experts; attention comes on top.
    assert active_matmul_parameters(model) < active
    assert flops_per_token(model, seq_len) > 6 * active_matmul_parameters(model)
    assert flops_per_token(model, seq_len + 1) > flops_per_token(model, seq_len)


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 16))
def test_a_window_never_attends_more(seq_len: int, window: int) -> None:
    windowed = attended_positions(seq_len, window)
    assert 0 < windowed <= min(attended_positions(seq_len), window)

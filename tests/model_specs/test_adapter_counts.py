"""Parameters of adapters, matrix by matrix, and how a user names them."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.model_specs.adapters import (
    TARGETS,
    TRAINED,
    AdapterMethod,
    AdapterSpec,
    adapter_counts,
    adapter_method,
    counted_matrices,
    frozen_parameters,
    peft_modules,
    read_adapters,
    resolved,
)
from meshwright.model_specs.parameters import active_matmul_parameters, parameter_count
from meshwright.model_specs.reader import catalog_names, load_catalog_model, read_model
from tests.places import DATA

PEFT_COMPARISON = [
    (32, ("q_proj", "v_proj"), 9_175_040),
    (64, ("q_proj", "v_proj"), 18_350_080),
    (10, ("down_proj", "gate_proj", "up_proj"), 9_461_760),
]
"""Trainable parameters of Llama-3.2-3B as PEFT counts them (huggingface/peft, method_comparison)."""


@pytest.mark.parametrize(("rank", "targets", "expected"), PEFT_COMPARISON)
def test_published_counts(rank: int, targets: tuple[str, ...], expected: int) -> None:
    model = load_catalog_model("llama-3.2-3b")
    assert adapter_counts(model, AdapterSpec(rank=rank, targets=targets)).total == expected


def test_every_linear_layer_by_hand() -> None:
    # Llama 3 8B: h 4096, keys and values 1024 each, feed-forward 14336, 32 layers.
    each = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 14336)
    counts = adapter_counts(load_catalog_model("llama-3-8b"), AdapterSpec(rank=8))
    assert counts.dense == 32 * 8 * each == 20_971_520
    assert counts.experts == 0


def test_matrices_that_are_one_have_one_adapter() -> None:
    model = load_catalog_model("llama-3-8b")
    fused = resolved(model, AdapterSpec(rank=8), fused=True)
    each = (4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096)
    assert adapter_counts(model, fused).total == 32 * 8 * each
    megatron = AdapterSpec(
        rank=8, targets=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    )
    assert adapter_counts(model, megatron).total == 32 * 8 * each


def test_latent_attention_and_experts_by_hand() -> None:
    model = load_catalog_model("deepseek-v3")
    asked = AdapterSpec(rank=4, targets=("q_a_proj", "experts"))
    counts = adapter_counts(model, asked)
    assert counts.dense == 61 * 4 * (7168 + 1536)
    assert counts.experts == 58 * 256 * 4 * (2 * (7168 + 4096) + (2048 + 7168))
    in_one = adapter_counts(model, resolved(model, AdapterSpec(rank=4), fused=True))
    assert in_one.experts == 58 * 256 * 4 * ((7168 + 4096) + (2048 + 7168))


def test_peft_adapts_experts_in_place_of_dense_layers() -> None:
    model = load_catalog_model("mixtral-8x7b")
    adapters = resolved(model, AdapterSpec(rank=8), fused=False)
    assert adapters.matrices == ("q_proj", "k_proj", "v_proj", "o_proj", "experts", "router")
    counts = adapter_counts(model, adapters)
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    assert counts.dense == 32 * 8 * (attention + 4096 + 8)
    each = 2 * (4096 + 2 * 14336) + (14336 + 4096)  # gate and up projection at twice the rank
    assert counts.experts == 32 * 8 * 8 * each
    assert counts.total == 179_832_832  # as peft 0.21.2 counts beside transformers 5.23
    with pytest.raises(InputError, match="name all of them or none"):
        resolved(model, AdapterSpec(targets=("up_proj",)), fused=False)


def test_experts_with_biases_are_left_alone() -> None:
    model = load_catalog_model("gpt-oss-20b")
    adapters = resolved(model, AdapterSpec(rank=8), fused=False)
    assert adapter_counts(model, adapters).total == 3_981_312  # as peft 0.21.2 counts them


def test_weights_of_four_bits_by_hand() -> None:
    model = load_catalog_model("llama-2-7b")
    frozen = frozen_parameters(model, AdapterSpec(method="qlora", rank=1))
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = parameter_count(model) - matrices  # token table, head and norms
    scales = 1 / 64 + 4 / (64 * 256)
    expected = (matrices * (0.5 + scales) + 2 * rest) / (matrices + rest)
    assert frozen.weight_bytes[0] == pytest.approx(expected)
    assert frozen_parameters(model, AdapterSpec(rank=1)).weight_bytes == (2.0, 2.0)


def test_nothing_is_asked_by_default() -> None:
    assert read_adapters("full") is None
    assert read_adapters("lora") == AdapterSpec(method="lora", rank=16, targets=("all-linear",))
    asked = read_adapters("qlora", 8, "v_proj, q_proj,v_proj")
    assert asked == AdapterSpec(method="qlora", rank=8, targets=("v_proj", "q_proj"))
    assert peft_modules(asked) == ["q_proj", "v_proj"]
    assert peft_modules(AdapterSpec()) == "all-linear"


@pytest.mark.parametrize(
    ("train", "rank", "targets", "words"),
    [
        ("loar", None, None, "train: is not known"),
        ("full", 8, None, "lora_rank: is of adapters"),
        ("lora", 0, None, "lora_rank: must be 1 to 8192"),
        ("lora", True, None, "lora_rank: must be a whole number"),
        ("lora", None, "q_proj,qproj", "lora_targets: is no matrix of a layer"),
        ("lora", None, " , ", "lora_targets: is no matrix of a layer"),
    ],
)
def test_slips_are_named(train: str, rank: int | None, targets: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_adapters(train, rank, targets)


def test_every_target_is_a_matrix_of_some_model() -> None:
    names = (
        "llama-3-8b",
        "deepseek-v3",
        "nemotron-h-8b",
        "mixtral-8x7b",
        "deepseek-v2",
        "gemma-4-e2b",
    )
    mamba = load_catalog_model("mamba-codestral-7b")
    models = [mamba, *map(load_catalog_model, names)]
    indexer = {"wq_b", "wk", "weights_proj"}  # of DeepSeek-V3.2
    around_experts = {"fc1_latent_proj", "fc2_latent_proj"}  # of Nemotron 3 Super
    unused = {
        word
        for word in TARGETS
        if not any(adapter_counts(each, AdapterSpec(targets=(word,))).total for each in models)
    }
    # Mamba-1 and linear attention: none of these models has them.
    head_gates = {"g_proj"}  # of Step 3.5 and Laguna
    of_linear = {"in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a"}
    assert unused == {"x_proj", "dt_proj"} | of_linear | indexer | around_experts | head_gates


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("a.x-k1-519b", 44_399_104),
        ("laguna-xs.2", 11_508_480),
        ("mimo-v2-flash", 15_538_176),
    ],
)
def test_experts_that_peft_leaves_alone_as_peft_counts_them(name: str, trained: int) -> None:
    """PEFT 0.21.2 on what transformers 5.23 builds of these files, rank 8 beside all linear layers."""
    model = read_model(DATA / "hf_configs" / f"{name}.json")
    asked = resolved(model, AdapterSpec(rank=8), fused=False)
    assert adapter_counts(model, asked).total == trained


def test_magnitudes_are_one_for_each_output() -> None:
    # Llama 3 8B: outputs of q, k, v, o, gate, up and down projection.
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    model = load_catalog_model("llama-3-8b")
    plain, decomposed = (
        adapter_counts(model, AdapterSpec(method=method, rank=8)).total
        for method in ("lora", "dora")
    )
    assert decomposed - plain == 32 * outputs == 1_376_256


def test_weights_of_eight_bits_by_hand() -> None:
    model = load_catalog_model("llama-2-7b")
    frozen = frozen_parameters(model, AdapterSpec(method="lora-8bit", rank=1))
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    scales = 32 * (5 * 4096 + 2 * 11008)  # of 32 bits, one for each output
    rest = parameter_count(model) - matrices
    expected = (matrices + 4 * scales + 2 * rest) / (matrices + rest)
    assert frozen.weight_bytes[0] == pytest.approx(expected)


def test_peft_has_no_magnitudes_beside_experts() -> None:
    model = load_catalog_model("mixtral-8x7b")
    with pytest.raises(InputError, match="beside which PEFT has no DoRA"):
        resolved(model, AdapterSpec(method="dora"), fused=False)
    asked = AdapterSpec(method="dora", rank=4, targets=("q_proj",))
    counts = adapter_counts(model, resolved(model, asked, fused=False))
    assert counts.total == 32 * (4 * (4096 + 4096) + 4096)


@pytest.mark.parametrize("method", [word for word in TRAINED if word != "full"])
def test_a_method_is_its_bits_and_whether_it_has_magnitudes(method: AdapterMethod) -> None:
    adapters = AdapterSpec(method=method)
    assert adapter_method(adapters.base_bits, decomposed=adapters.decomposed) == method


@pytest.mark.parametrize("name", catalog_names())
def test_every_matrix_of_a_layer_is_counted_once(name: str) -> None:
    """Weights by matrix are those by formula; Ling 3.0 lacked the gates of its latent attention."""
    model = load_catalog_model(name)
    if model.mtp_shared:
        pytest.skip("modules run more often than they are held")
    moe, modules = model.moe, model.mtp_layers
    matrices = 0
    for each in counted_matrices(model, fused=False):
        weights = each.number * each.matrix.inputs * each.matrix.outputs
        if each.expert and moe is not None:
            weights = weights * moe.top_k // moe.experts
        matrices += weights
    joins = modules * 2 * model.hidden**2 + (1 + modules) * model.vocab * model.hidden
    if moe is not None and moe.shared_expert_gate:
        joins += (len(model.expert_layers) + modules) * model.hidden
    assert matrices + joins == active_matmul_parameters(model)
